"""The models of a server: loading and naming them, checking inputs, and opening looks."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import ModelConfig
from ..data.images import open_image
from ..errors import BadData, UsageError
from ..generation.prompts import max_text_length
from ..generation.text_codec import ModelTokenizers
from ..layers.quantised_linear import Int8Linear
from ..lens.capture import attention_modules, n_heads_of, stacks
from ..lens.capture_inputs import tokenizers
from ..lens.labels import Label, token_labels
from ..lens.why import split_kinds
from ..models import Model
from .requests import Limits, LookRequest, ModelChanges, RequestRefused, SearchRequest
from .run_examples import RunExamples, examples_of_run, name_of_run, run_with_checkpoints, spelled_words
from .sessions import LookSession, SessionStore

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..lens import Look


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A loaded model and its id in requests."""

    id: str
    name: str
    model: Model
    read_examples: Callable[[], RunExamples] = RunExamples
    run: Path | None = None  # the run directory it came from, if that has checkpoints

    @property
    def config(self) -> ModelConfig:
        return self.model.config

    @property
    def can_generate(self) -> bool:
        return self.config.head == "lm" and self.config.architecture != "encoder"

    @property
    def has_source(self) -> bool:
        """Whether it has a source and a target."""
        return self.config.architecture in ("encoder-decoder", "recurrent")

    @property
    def target_tokenizer(self) -> Any:
        """The tokenizer of the texts it generates, if it has one."""
        return tokenizers(self.model)[1]

    @cached_property
    def examples(self) -> RunExamples:
        return self.read_examples()

    def unfamiliar_words(self, text: str | None, labels: Sequence[Label]) -> list[str]:
        """Words of a source text that the model hardly knows, as typed: those without a token, and those that are
        spelled in small pieces, unless its training examples are too."""
        source = tokenizers(self.model)[0]
        unknown = [] if source is None or text is None else source.unknown_texts(text)
        return unknown if self._spells_examples else [*unknown, *spelled_words(labels)]

    @cached_property
    def _spells_examples(self) -> bool:
        """Whether most of its own examples contain words spelled in small pieces; True if it has no examples."""
        texts = [] if self.config.source == "image" else self.examples.inputs
        source = tokenizers(self.model)[0]
        labels = [token_labels(source.encode(text), source, self.config) for text in texts] if source else []
        return sum(bool(spelled_words(each)) for each in labels) * 2 >= len(texts)

    def to_dict(self) -> dict[str, Any]:
        config = self.config
        is_layered = bool(stacks(self.model)) and (self.model.head or self.model.class_head) is not None
        can_split = is_layered and not any(isinstance(part, Int8Linear) for part in self.model.modules())
        attentions: list[Any] = [module for modules in attention_modules(self.model).values() for module in modules]
        return {
            "id": self.id,
            "name": self.name,
            "task": task_name(config),
            "kinds": attention_sizes(self.model),
            "max_len": max_text_length(config),
            "d_head": config.d_head or config.d_model // config.n_heads,
            "generates": self.can_generate,
            "image": config.source == "image",
            "source": self.has_source,
            "causal": any(stack.causal for stack in self.model.stacks()) and not config.mixing.recurrent,
            "scales": all(module.mechanism.kind == "dot" for module in attentions),
            "layered": is_layered,
            "contributes": can_split,
            "splits": split_kinds(self.model) if can_split else [],
            "state_space": config.mixing.recurrent,
            "experts": config.experts is not None,
            "history": self.run is not None and config.source == "text",
            "examples": self.examples.inputs,
            "tags": self.examples.tags,
        }


def task_name(config: ModelConfig) -> str:
    """The task of `regard train` that trains a model with this config."""
    if config.head == "classify":
        return "classify-images" if config.source == "image" else "classify"
    if config.architecture == "encoder":
        features = "embed" if config.source == "text" else "features"
        return {"masked-lm": "mlm", "tag": "tag", "replaced": "electra", "span": "answer"}.get(config.head, features)
    if config.architecture == "decoder":
        return "lm"
    if config.architecture == "two-tower":
        return "contrast"
    return "caption" if config.source != "text" else "translate"


def attention_sizes(model: Model) -> dict[str, dict[str, int]]:
    """The number of layers and heads of each kind of attention."""
    return {
        kind: {"layers": len(modules), "heads": n_heads_of(modules[0])}
        for kind, modules in attention_modules(model).items()
    }


def open_models(paths: Sequence[str | Path], device: str = "auto") -> list[ServedModel]:
    """Load models and name each after its directory; a second one of the same name gets the suffix -2."""
    import torch

    from ..io import load

    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device} is not one of auto, cpu, cuda, mps")
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return name_models([(str(path), load(path, device=device)) for path in paths])


def name_models(models: Sequence[tuple[str, Model]]) -> list[ServedModel]:
    served: dict[str, ServedModel] = {}
    for path, model in models:
        name = name_of_run(path)
        candidates = (name, *(f"{name}-{n}" for n in range(2, len(models) + 1)))
        unique = next(candidate for candidate in candidates if candidate not in served)
        served[unique] = ServedModel(unique, unique, model, partial(examples_of_run, path), run_with_checkpoints(path))
    return list(served.values())


def find_model(models: Sequence[ServedModel], model_id: str) -> ServedModel:
    by_id = {served.id: served for served in models}
    if model_id not in by_id:
        raise RequestRefused(404, f"model {model_id[:100]!r} is not served here; available: {', '.join(by_id)}")
    return by_id[model_id]


_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")


def open_look(served: ServedModel, body: LookRequest, sessions: SessionStore, limits: Limits) -> LookSession:
    """Run the model over a text or an image and keep the look."""
    from ..lens import look

    check_inputs(served, body, limits)
    inputs = decode_image(body.image, limits) if served.config.source == "image" else body.text
    if body.generate is not None and not served.can_generate:
        raise RequestRefused(422, f"model {served.id!r} does not generate text")
    if body.generate is not None and body.target is not None:
        raise RequestRefused(422, "give either target or generate, not both")
    search = None if body.generate is None else search_fields(body.generate)
    sessions.evict_for(planned_bytes(served, body, search, limits))
    changes = partial(change_model, served, body.variant)
    with changes():
        new_look = look(served.model, inputs, body.target, generate=search)
    return sessions.add(LookSession(shrink_image(new_look), served, changes))


_LARGEST_SIDE = 640  # pixels, of the image that the page shows


def shrink_image(new_look: Look) -> Look:
    """Shrink the look's image to the size that the page shows; the model has already read it."""
    if new_look.image is not None:
        new_look.image.thumbnail((_LARGEST_SIDE, _LARGEST_SIDE))
    return new_look


def check_inputs(served: ServedModel, body: LookRequest, limits: Limits) -> None:
    """Refuse inputs that the model does not read, and texts that are too long, before they are tokenised."""
    reads_image = served.config.source == "image"
    if reads_image and body.image is None:
        raise RequestRefused(422, f"model {served.id!r} reads an image: send one as base64 in the field image")
    if not reads_image and body.image is not None:
        raise RequestRefused(422, f"model {served.id!r} reads {served.config.source}, not an image")
    if body.target is not None and not served.has_source:
        raise RequestRefused(422, f"model {served.id!r} reads a text only, no target")
    longest = max(served.config.max_len, served.config.max_target_len or 0, 16)
    most = min(limits.characters, longest * limits.characters_per_token)
    for name, text in (("text", body.text), ("target", body.target or "")):
        if len(text) > most:
            allowed = f"model {served.id!r} reads at most {most:,}"
            raise RequestRefused(413, f"{name} has {len(text):,} characters; {allowed}")
    if not reads_image and not body.text:
        raise RequestRefused(422, "text is empty: there is nothing to look at")


def search_fields(search: SearchRequest) -> dict[str, Any]:
    """The fields of a ``GenerateConfig``; a beam search returns all hypotheses, for the tree."""
    return search.fields() | ({"n_best": search.beam} if search.beam > 1 else {})


def planned_bytes(served: ServedModel, body: LookRequest, search: dict[str, Any] | None, limits: Limits) -> int:
    """An upper bound on the bytes of q and k of all layers, computed before the model runs."""
    config, codec = served.config, ModelTokenizers(served.model)
    if config.source == "image":
        n_source = (config.image_size // config.patch_size) ** 2
    else:
        n_source = len(codec.source.encode(body.text))
    n_target = len(codec.target.encode(body.target)) if body.target else 0
    n_new = 0 if not served.can_generate else int((search or {}).get("max_new_tokens", 128))
    if (longest := max(n_source, n_target)) > limits.tokens:
        raise RequestRefused(413, f"the text has {longest:,} tokens; the limit is {limits.tokens:,}")
    n_target_rows = min(n_target or n_new, config.max_target_len or config.max_len)
    if not served.has_source:
        n_source, n_target_rows = min(n_source + n_new * (search is not None), config.max_len), 0
    n_self = n_target_rows or n_source
    lengths = {"encoder": (n_source, n_source), "cross": (n_target_rows, n_source), "self": (n_self, n_self)}
    total = 0
    for kind, size in attention_sizes(served.model).items():
        d_head = config.d_head or config.d_model // size["heads"]
        n_rows, n_cols = lengths.get(kind, lengths["encoder"])  # a stage of an image encoder has at most all patches
        heads = size["heads"] * n_rows + (config.n_kv_heads or size["heads"]) * n_cols
        total += 4 * size["layers"] * heads * d_head
    return total


@contextmanager
def change_model(served: ServedModel, changes: ModelChanges | None) -> Iterator[None]:
    """Apply the page's interventions to the model within the block."""
    from ..lens import interventions

    changes = changes or ModelChanges()
    with ExitStack() as stack:
        if not changes.causal:
            stack.enter_context(interventions.no_causal_mask(served.model))
        if changes.scale != 1:
            stack.enter_context(interventions.attention_scale(served.model, changes.scale))
        if changes.off:
            stack.enter_context(interventions.switch_off(served.model, list(changes.off)))
        yield


def decode_image(encoded: str | None, limits: Limits) -> Image:
    """Decode an image from base64 or a data: URL; one with too many pixels is refused before it is decompressed."""
    from PIL import Image, UnidentifiedImageError

    text = (encoded or "").replace("\n", "").replace("\r", "").strip()  # base64 is often wrapped into lines
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise RequestRefused(422, "image is not base64") from None
    try:
        image = open_image(io.BytesIO(raw), _FORMATS)
        if image.width * image.height > limits.pixels:
            size = f"{image.width:,} × {image.height:,}"
            raise RequestRefused(413, f"image has {size} pixels, more than the {limits.pixels:,} allowed")
        image.load()
    except BadData as refused:
        raise RequestRefused(413, f"image has {refused}") from None
    except UnidentifiedImageError:
        raise RequestRefused(422, f"image is not one of {', '.join(_FORMATS)}") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as wrong:
        raise RequestRefused(422, f"image cannot be read: {' '.join(str(wrong).split())[:200]}") from None
    return image
