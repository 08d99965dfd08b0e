"""The models a server has open: what each is called, what it reads, and where it has attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..config.words import UsageError
from ..lens.places import attentions, heads_of
from ..models import Model
from .limits import Refused


@dataclass(frozen=True, eq=False)
class Served:
    """An open model under the name the page asks for it by."""

    id: str
    name: str
    model: Model

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
        found.append(Served(unique, unique, model))
    return found


def by_id(models: Sequence[Served], model_id: str) -> Served:
    for each in models:
        if each.id == model_id:
            return each
    raise Refused(404, f"model {model_id[:100]!r} is not open here; there is {', '.join(each.id for each in models)}")
