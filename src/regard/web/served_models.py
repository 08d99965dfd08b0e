"""The models a server has open: what each is called, what it reads, and where it has attention."""

from __future__ import annotations

import base64
import binascii
import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..errors import UsageError
from ..generation.text_codec import ModelTokenizers
from ..lens.capture import attention_modules, n_heads_of
from ..models import Model
from .request_bodies import LookRequest, ModelChanges, SearchRequest
from .request_limits import Limits, RequestRefused
from .sessions import LookSession, SessionStore


@dataclass(frozen=True, eq=False)
class ServedModel:
    """An open model under the name the page asks for it by."""

    id: str
    name: str
    model: Model
    example: str | None = None  # what the page begins with: a text, or base64 of an image; None: what it finds suitable

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

    def to_dict(self) -> dict[str, Any]:
        config = self.config
        return {
            "id": self.id,
            "name": self.name,
            "task": task_name(config),
            "kinds": attention_sizes(self.model),
            "max_len": config.max_len,
            "generates": self.generates,
            "image": config.source == "image",
            "source": self.has_source,
            "example": self.example,
        }


def task_name(config: ModelConfig) -> str:
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


def attention_sizes(model: Model) -> dict[str, dict[str, int]]:
    """The kinds of attention that have weights, each with its layers and heads."""
    return {
        kind: {"layers": len(modules), "heads": n_heads_of(modules[0])}
        for kind, modules in attention_modules(model).items()
    }


_TEXTS = {
    "en-ko": "[polite] Did the kind teacher read a new book yesterday?",
    "stdlib": "for line in file: print(line) for line in",
}


def example_input(path: str | Path) -> str | None:
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


def open_models(paths: Sequence[str | Path], device: str = "auto") -> list[ServedModel]:
    """Every model, each under the name of its directory; of two alike the second is called …-2."""
    import torch

    from ..io import load

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device} is none of auto, cpu, cuda, mps")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return name_models([(str(path), load(path, device=device)) for path in paths])


def name_models(models: Sequence[tuple[str, Model]]) -> list[ServedModel]:
    found: list[ServedModel] = []
    for path, model in models:
        name = Path(path).name or Path(path).resolve().name or "model"
        taken = {each.id for each in found}
        unique = next(x for n in range(1, len(models) + 1) if (x := name if n == 1 else f"{name}-{n}") not in taken)
        found.append(ServedModel(unique, unique, model, example_input(path)))
    return found


def find_model(models: Sequence[ServedModel], model_id: str) -> ServedModel:
    for each in models:
        if each.id == model_id:
            return each
    raise RequestRefused(
        404, f"model {model_id[:100]!r} is not open here; there is {', '.join(each.id for each in models)}"
    )


if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_look(served: ServedModel, body: LookRequest, sessions: SessionStore, limits: Limits) -> LookSession:
    """Run the model over a text or an image and keep what is needed to see its attention."""
    from ..lens import look

    model = served.model
    check_inputs(served, body, limits)
    what = decode_image(body.image, limits) if served.config.source == "image" else body.text
    search = _search_fields(served, body)
    sessions.make_room(planned_bytes(served, body, search, limits))
    under = change_model(served, body.variant)
    with under():
        made = look(model, what, body.target, generate=search)
    return sessions.add(LookSession(made, served, under))


def check_inputs(served: ServedModel, body: LookRequest, limits: Limits) -> None:
    """Before anything is tokenised: how long the texts are, and whether they are what the model reads."""
    reads_image = served.config.source == "image"
    if reads_image and body.image is None:
        raise RequestRefused(422, f"model {served.id!r} reads an image; give one as base64 in the field image")
    if not reads_image and body.image is not None:
        raise RequestRefused(422, f"model {served.id!r} reads {served.config.source}, not an image")
    if body.target is not None and not served.has_source:
        raise RequestRefused(422, f"model {served.id!r} has no target; its text is all it reads")
    longest = max(served.config.max_len, served.config.max_target_len or 0, 16)
    most = min(limits.characters, longest * limits.characters_per_token)
    for name, text in (("text", body.text), ("target", body.target or "")):
        if len(text) > most:
            raise RequestRefused(
                413, f"{name} has {len(text):,} characters; for model {served.id!r} at most {most:,} are read"
            )
    if not reads_image and not body.text:
        raise RequestRefused(422, "text is empty: there is nothing to look at")


def _search_fields(served: ServedModel, body: LookRequest) -> dict[str, Any] | None:
    if body.generate is None:
        return None
    if not served.generates:
        raise RequestRefused(422, f"model {served.id!r} writes no text, so there is nothing to generate")
    if body.target is not None:
        raise RequestRefused(422, "target and generate are both given: a target is either told or written")
    return search_fields(body.generate)


def search_fields(search: SearchRequest) -> dict[str, Any]:
    """As ``GenerateConfig`` takes them; a beam's other texts are wanted too, for the tree."""
    fields = search.fields()
    return fields | ({"n_best": search.beam} if search.beam > 1 else {})


def planned_bytes(served: ServedModel, body: LookRequest, search: dict[str, Any] | None, limits: Limits) -> int:
    """What q and k of all layers will take, before any of it is there."""
    config, words = served.config, ModelTokenizers(served.model)
    if config.source == "image":
        n_read = (config.image_size // config.patch_size) ** 2
    else:
        n_read = len(words.source.encode(body.text))
    n_target = len(words.target.encode(body.target)) if body.target else 0
    n_written = 0 if not served.generates else int((search or {}).get("max_new_tokens", 128))
    if max(n_read, n_target) > limits.tokens:
        raise RequestRefused(
            413, f"the text has {max(n_read, n_target):,} tokens; at most {limits.tokens:,} are looked at"
        )
    n_said = min(n_target or n_written, config.max_target_len or config.max_len)
    if not served.has_source:
        n_read, n_said = min(n_read + n_written * (search is not None), config.max_len), 0
    lengths = {"encoder": (n_read, n_read), "cross": (n_said, n_read), "self": (n_said or n_read,) * 2}
    total = 0
    for kind, size in attention_sizes(served.model).items():
        d_head = config.d_head or config.d_model // size["heads"]
        n_rows, n_cols = lengths[kind]
        heads = size["heads"] * n_rows + (config.n_kv_heads or size["heads"]) * n_cols
        total += 4 * size["layers"] * heads * d_head
    return total


# ---- a changed model


def change_model(served: ServedModel, variant: ModelChanges | None) -> Callable[[], AbstractContextManager[None]]:
    """The model under the page's changes; entered as often as it has to run."""
    return partial(_apply_changes, served, variant or ModelChanges())


@contextmanager
def _apply_changes(served: ServedModel, variant: ModelChanges) -> Iterator[None]:
    with ExitStack() as changes:
        if variant != ModelChanges():
            from ..lens import interventions

            if not variant.causal:
                changes.enter_context(interventions.no_causal_mask(served.model))
            if variant.scale != 1:
                changes.enter_context(interventions.attention_scale(served.model, variant.scale))
            if variant.off:
                changes.enter_context(interventions.switch_off(served.model, list(variant.off)))
        yield


# ---- images


def decode_image(encoded: str | None, limits: Limits) -> Image:
    """The image of a base64 text or a data: URL, refused by its size before it is decoded."""
    from PIL import Image, UnidentifiedImageError

    text = (encoded or "").strip()
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestRefused(422, "image is not base64") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            found = Image.open(io.BytesIO(raw), formats=_FORMATS)
            if found.width * found.height > limits.pixels:
                size = f"{found.width:,} × {found.height:,}"
                raise RequestRefused(413, f"image has {size} pixels, more than the {limits.pixels:,} allowed")
            found.load()
    except UnidentifiedImageError:
        raise RequestRefused(422, f"image is none of {', '.join(_FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as wrong:
        raise RequestRefused(422, f"image cannot be read: {' '.join(str(wrong).split())[:200]}") from None
    return found
