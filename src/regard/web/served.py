"""The models a server has open: what each is called, what it reads, and where it has attention."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import UsageError
from ..lens.places import attentions, heads_of
from ..models import Model
from .limits import Refused


@dataclass(frozen=True, eq=False)
class Served:
    """An open model under the name the page asks for it by."""

    id: str
    name: str
    model: Model
    example: str | None = None
    """What the page begins with: a text, or base64 of an image; None: what it finds suitable."""

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def generates(self) -> bool:
        return self.config.head == "lm" and self.config.architecture != "encoder"

    @property
    def has_source(self) -> bool:
        """Whether what it reads and what it writes are two texts."""
        return self.config.architecture in ("encoder-decoder", "recurrent")

    @property
    def writes_with(self) -> Any:
        """The tokenizer of what it writes; None where it was given none."""
        processor = self.model.processor
        return None if processor is None else processor.target or processor.source

    def document(self) -> dict[str, Any]:
        config = self.config
        return {
            "id": self.id,
            "name": self.name,
            "task": task_of(config),
            "kinds": kinds_of(self.model),
            "max_len": config.max_len,
            "generates": self.generates,
            "image": config.source == "image",
            "source": self.has_source,
            "example": self.example,
        }


def task_of(config: ModelConfig) -> str:
    """What it is for, in the words of `regard train`."""
    if config.head == "classify":
        return "classify-images" if config.source == "image" else "classify"
    if config.head == "masked-lm":
        return "mlm"
    if config.head == "none":
        return "features"
    if config.architecture == "decoder":
        return "lm"
    return "caption" if config.source != "text" else "translate"


def kinds_of(model: Model) -> dict[str, dict[str, int]]:
    """The kinds of attention that have weights, each with its layers and heads."""
    return {
        kind: {"layers": len(modules), "heads": heads_of(modules[0])} for kind, modules in attentions(model).items()
    }


_TEXTS = {
    "en-ko": "[polite] Did the kind teacher read a new book yesterday?",
    "stdlib": "for line in file: print(line) for line in",
}


def example_of(path: str | Path) -> str | None:
    """What suits a run of an embedded corpus: a text of its grammar, or one of its pictures; None for any other."""
    try:
        source = json.loads((Path(str(path).partition("@")[0]) / "run.json").read_text("utf-8"))["data"]["source"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not a run of ours
    if source != "shapes":
        return _TEXTS.get(str(source))
    from ..data.corpora import open_corpus

    out = io.BytesIO()
    open_corpus("shapes").example("valid", 5).pillow().save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def open_all(paths: Sequence[str | Path], device: str = "auto") -> list[Served]:
    """Every model, each under the name of its directory; of two alike the second is called …-2."""
    import torch

    from ..io import load

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device} is none of auto, cpu, cuda, mps")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return named([(str(path), load(path, device=device)) for path in paths])


def named(models: Sequence[tuple[str, Model]]) -> list[Served]:
    found: list[Served] = []
    for path, model in models:
        name = Path(path).name or Path(path).resolve().name or "model"
        taken = {each.id for each in found}
        unique = next(x for n in range(1, len(models) + 1) if (x := name if n == 1 else f"{name}-{n}") not in taken)
        found.append(Served(unique, unique, model, example_of(path)))
    return found


def by_id(models: Sequence[Served], model_id: str) -> Served:
    for each in models:
        if each.id == model_id:
            return each
    raise Refused(404, f"model {model_id[:100]!r} is not open here; there is {', '.join(each.id for each in models)}")
