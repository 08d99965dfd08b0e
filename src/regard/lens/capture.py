"""Where in a model attention happens: by kind ("self", "cross", "encoder") and layer, whatever the architecture."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention, record
from ..attention.taps import Recorder
from ..generation import GenerateConfig, Generated
from ..generation.generate import generate as generate_tokens
from ..generation.generate import inference
from ..generation.prompts import default_output_length, max_text_length, token_rows
from ..generation.text_codec import ModelTokenizers, resolve_config
from ..models import Block, Decoder, Encoder, EncoderDecoder, Model, Recurrent, Stack
from ..models.recurrent_cells import Alignment
from .capture_inputs import LookImage, read_image
from .labels import Box, Label, numbered_labels, patch_labels, token_labels

Head = tuple[str, int, int]
"""(kind, layer, head)."""

_PLACE = re.compile(
    r"(?P<stack>encoder|decoder)(?:\.blocks\.(?P<layer>\d+)(?:\.(?P<part>attention|cross_attention))?)?(?:\.output)?"
)


class HookSite(NamedTuple):
    """A place whose activations can be read and replaced."""

    name: str
    owner: nn.Module
    """The stack whose input it is, the layer whose output it is, or the attention whose heads it is."""
    turn: int
    """Layers may share one module: which of its calls in a pass is meant, 0 where they do not."""


def attention_modules(model: Model) -> dict[str, list[nn.Module]]:
    """The attention modules of each kind, one a layer; shared layers have the same one several times."""
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    by_kind: dict[str, list[nn.Module]] = {}
    for site in model.attention_sites():
        by_kind.setdefault(site.kind, []).append(site.module)
    return by_kind


def stacks(model: Model) -> dict[str, Stack]:
    """The encoder and the decoder, as far as there are any; a recurrent model has neither."""
    both = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
    return {name: stack for name, stack in both.items() if isinstance(stack, Stack)}


def block_of(stack: Stack, layer: int) -> Block:
    """A layer of a stack; where layers are shared, each is the same one."""
    block = stack.blocks[layer % len(stack.blocks)]
    assert isinstance(block, Block)
    return block


def resolve_kind(model: Model, kind: str | None) -> str:
    """The kind that is meant: the one given, or the only one, or the decoder's own."""
    kinds = list(attention_modules(model))
    if not kinds:
        raise ValueError("this model has no attention weights in any of its layers")
    if kind is None:
        return kinds[0] if len(kinds) == 1 else "self"
    if kind not in kinds:
        raise ValueError(f"kind={kind!r} is not one of the kinds of attention this model has: {', '.join(kinds)}")
    return kind


def attention_at(model: Model, kind: str, layer: int) -> nn.Module:
    """The attention module of a layer; one sentence where there is none."""
    modules = attention_modules(model)[resolve_kind(model, kind)]
    if not 0 <= layer < len(modules):
        have = f"this model has {len(modules)}, 0 to {len(modules) - 1}"
        raise ValueError(f"layer={layer} is not one of the {kind} attention's layers: {have}")
    return modules[layer]


def check_head(model: Model, kind: str, layer: int, head: int) -> nn.Module:
    """The attention module that has this head."""
    module = attention_at(model, kind, layer)
    n_heads = n_heads_of(module)
    if not 0 <= head < n_heads:
        have = f"there are {n_heads}, 0 to {n_heads - 1}"
        raise ValueError(f"head={head} is not one of the {kind} attention's heads: {have}")
    return module


def n_heads_of(module: nn.Module) -> int:
    """How many heads an attention has."""
    if isinstance(module, MultiHeadAttention):
        return module.n_heads
    assert isinstance(module, Alignment)
    return 1


def hook_site(model: Model, name: str) -> HookSite:
    """ "decoder" is what its first layer reads, "decoder.blocks.3" what layer 3 gives on (B, T, M),
    "decoder.blocks.3.attention" or "….cross_attention" what its heads return (B, H, T, D)."""
    parts = _PLACE.fullmatch(name)
    found = stacks(model)
    if parts is None or parts["stack"] not in found:
        have = [f"{own}, {own}.blocks.0 to {own}.blocks.{stack.n_layers - 1}" for own, stack in found.items()]
        raise ValueError(f"place={name!r} is none of this model's: {'; '.join(have) or 'it has no stack of layers'}")
    stack = found[parts["stack"]]
    if parts["layer"] is None:
        return HookSite(name, stack, 0)
    layer = int(parts["layer"])
    if layer >= stack.n_layers:
        raise ValueError(f"place={name!r}: the {parts['stack']} has {stack.n_layers} layers, 0 to {stack.n_layers - 1}")
    block = block_of(stack, layer)
    owner = block if parts["part"] is None else getattr(block, parts["part"])
    if owner is None or (parts["part"] is not None and not isinstance(owner, MultiHeadAttention)):
        raise ValueError(f"place={name!r}: this layer has no such attention")
    return HookSite(name, owner, layer // len(stack.blocks))


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_MAPPED_FROM = 1 << 20
_USUAL = 32 << 20  # where glibc ends up by itself after the first large tensors: tiles are read faster from a heap


@contextmanager
def return_freed_memory(n_tokens: int) -> Iterator[None]:
    """While it lasts, large tensors are mapped one by one; for short texts, and without glibc, nothing changes."""
    tell = _mallopt() if n_tokens >= 1024 else None
    if tell is None:
        yield
        return
    tell(_MMAP_THRESHOLD, _MAPPED_FROM)
    try:
        yield
    finally:
        tell(_TRIM_THRESHOLD, 2 * _USUAL)
        tell(_MMAP_THRESHOLD, _USUAL)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 — other libraries give these numbers other meanings, or none
        found: Callable[[int, int], int] = library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
    return found


if TYPE_CHECKING:
    from PIL.Image import Image

GenerateOptions = Mapping[str, Any] | GenerateConfig
"""How a text is to be written: the fields of a GenerateConfig, or one."""

_one_at_a_time = threading.Lock()


@dataclass(frozen=True, eq=False)
class Capture:
    """What a look is made of."""

    inputs: tuple[Tensor, ...]
    """What the model was called with: (tokens,), (pixels,) or (source, target)."""
    states: Tensor
    """The last states (T, M), of the decoder where there is one."""
    sites: dict[str, list[tuple[str, int]]]
    """By kind and layer: where the recorder saw it, and which of the calls there."""
    recorder: Recorder
    rows: dict[str, list[Label]]
    cols: dict[str, list[Label]]
    text: str | None
    target_text: str | None
    image: Image | None
    generated: Generated | None


def capture_look(model: Model, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    """Read, write on, run."""
    if not isinstance(model, Decoder | Encoder | EncoderDecoder | Recurrent):
        raise TypeError(f"regard.look takes a model of regard's or its directory, not {type(model).__name__}")
    with inference(model):
        if isinstance(model, Decoder):
            return _of_text(model, what, target, generate)
        if isinstance(model, Encoder):
            return _of_encoder(model, what, target, generate)
        return _of_both(model, what, target, generate)


@contextmanager
def record_attention(model: nn.Module, n_tokens: int) -> Iterator[Recorder]:
    """q and k of what runs inside; a recorder is one for the whole process, so a second look waits."""
    with _one_at_a_time, return_freed_memory(n_tokens), record(model, values=False) as seen:
        yield seen


# ---- the three kinds of model


def _of_text(model: Decoder, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None:
        raise ValueError("target is for models with an encoder; a language model's text is all there is")
    ids, made = _read_ids(model, what, "text"), None
    if generate is not None:
        made = _written(model, [ids], None, generate)
        ids = [*made.prompts[0], *made.best[0].content]
    tokens = torch.tensor([ids], device=model.device)
    with record_attention(model, len(ids)) as seen:
        states = model.hidden(tokens)[0]
    tokenizer = _tokenizers(model)[0]
    labels = token_labels(ids, tokenizer, model.config)
    text = what if isinstance(what, str) and made is None else _decoded(ids, tokenizer)
    places = {"self": _places(model.decoder, "decoder", "attention")}
    return _taken(model, (tokens,), states, seen, places, {"self": labels}, {"self": labels}, text, generated=made)


def _of_encoder(model: Encoder, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None or generate is not None:
        given = "target" if target is not None else "generate"
        raise ValueError(f"{given} is for models that write text; one with architecture='encoder' only reads")
    source = _read_source(model, what)
    with record_attention(model, len(source.labels)) as seen:
        states = model.hidden(source.values)[0]
    labels = {"encoder": source.labels}
    places = {"encoder": _places(model.encoder, "encoder", "attention")}
    return _taken(model, (source.values,), states, seen, places, labels, labels, source.text, image=source.image)


def _of_both(model: EncoderDecoder | Recurrent, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None and generate is not None:
        raise ValueError("target and generate are both given: the target is either known or to be written")
    source, made = _read_source(model, what), None
    if target is None:
        given = source.values if model.config.source != "text" else source.values.tolist()
        fields = generate if generate is not None else {"max_new_tokens": _room(model, len(source.labels))}
        made = _written(model, given, source, fields)
        best = made.best[0]
        fed = [*made.prompts[0], *best.content]
        ended = best.finish == "end"
    else:
        fed, ended = _target_ids(model, target), model.config.eos_id is not None
    tokens = torch.tensor([fed], device=model.device)
    with record_attention(model, max(len(source.labels), len(fed))) as seen:
        states = model.hidden(source.values, tokens)[0]
    return _taken_of_both(model, source, fed, ended, tokens, states, seen, target, made)


def _taken_of_both(
    model: EncoderDecoder | Recurrent,
    source: _Source,
    fed: list[int],
    ended: bool,
    tokens: Tensor,
    states: Tensor,
    seen: Recorder,
    target: Any,
    made: Generated | None,
) -> Capture:
    tokenizer, eos_id = _tokenizers(model)[1], model.config.eos_id
    read = token_labels(fed, tokenizer, model.config)
    # A row of cross-attention is a look at the source while the next token is written: it is called by that token.
    written = token_labels([*fed[1:], *([eos_id] if ended and eos_id is not None else [])], tokenizer, model.config)
    if len(written) < len(fed):
        n = len(written)
        written.append(Label("…", None, True, span=(n, n + 1), whole=(n, n + 1)))
    rows = {"encoder": source.labels, "self": read, "cross": written}
    cols = {"encoder": source.labels, "self": read, "cross": source.labels}
    if isinstance(model, Recurrent):
        places = {"cross": [("decoder.cross_attention", 0)]}
    else:
        places = {
            "encoder": _places(model.encoder, "encoder", "attention"),
            "self": _places(model.decoder, "decoder", "attention"),
            "cross": _places(model.decoder, "decoder", "cross_attention"),
        }
    said = target if isinstance(target, str) else _decoded(fed, tokenizer)
    inputs = (source.values, tokens)
    return _taken(model, inputs, states, seen, places, rows, cols, source.text, said, source.image, made)


def _taken(
    model: Model,
    inputs: tuple[Tensor, ...],
    states: Tensor,
    seen: Recorder,
    places: dict[str, list[tuple[str, int]]],
    rows: dict[str, list[Label]],
    cols: dict[str, list[Label]],
    text: str | None,
    target_text: str | None = None,
    image: Image | None = None,
    generated: Generated | None = None,
) -> Capture:
    """Of the kinds that could have been seen, those that were."""
    found = seen.attentions
    places = {kind: at for kind, at in places.items() if all(place in found for place, _ in at)}
    if not places:
        how = f"mixer={model.config.mixer!r}" if model.config.architecture != "recurrent" else "alignment='none'"
        raise ValueError(f"this model has no attention to look at: it is built with {how}")
    for kind, at in places.items():
        place, call = at[0]
        k = found[place][call].k
        if k is not None and k.shape[2] != len(cols[kind]):  # Linformer looks at sums of keys
            cols = {**cols, kind: numbered_labels("summary", k.shape[2])}
    return Capture(inputs, states, places, seen, rows, cols, text, target_text, image, generated)


def _places(stack: Stack, name: str, part: str) -> list[tuple[str, int]]:
    """Where each layer's attention is seen; layers that share a block are its first, second … call."""
    n_blocks = len(stack.blocks)
    return [(f"{name}.blocks.{layer % n_blocks}.{part}", layer // n_blocks) for layer in range(stack.n_layers)]


# ---- what is given


@dataclass(frozen=True, eq=False)
class _Source:
    values: Tensor  # (1, T), (1, C, height, width) or (1, R, d_region)
    labels: list[Label]
    text: str | None = None
    image: Image | None = None


def _read_source(model: Model, what: Any) -> _Source:
    config = model.config
    if config.source == "text":
        ids = _read_ids(model, what, "source" if config.architecture != "encoder" else "text")
        tokenizer = _tokenizers(model)[0]
        text = what if isinstance(what, str) else _decoded(ids, tokenizer)
        return _Source(torch.tensor([ids], device=model.device), token_labels(ids, tokenizer, config), text)
    if config.source == "image":
        picture = read_image(model, what)
        return _Source(_on(model, picture.pixels), _patches(model, picture), image=picture.image)
    regions = what if isinstance(what, Tensor) else torch.as_tensor(what)
    regions = regions[None] if regions.dim() == 2 else regions
    if regions.dim() != 3 or len(regions) != 1 or not regions.is_floating_point() or not regions.numel():
        raise ValueError(f"a look is at the regions of one image, (R, d_region), got shape {tuple(regions.shape)}")
    return _Source(_on(model, regions), numbered_labels("region", regions.shape[1], _boxes(model, regions)))


def _patches(model: Model, picture: LookImage) -> list[Label]:
    embeddings: Any = model.embeddings
    rows, cols = embeddings.patches.grid_of(*picture.pixels.shape[2:])
    return patch_labels(rows, cols, embeddings.n_class_tokens)


def _boxes(model: Model, regions: Tensor) -> list[Box] | None:
    width = model.config.d_region
    if not model.config.d_box:
        return None
    return [(x0, y0, x1, y1) for x0, y0, x1, y1 in regions[0, :, width : width + 4].tolist()]


def _on(model: Model, x: Tensor) -> Tensor:
    return x.to(model.device, next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32))


def _read_ids(model: Model, what: Any, name: str) -> list[int]:
    """The token ids of one text, not longer than the model is made for."""
    if isinstance(what, str):
        ids = ModelTokenizers(model).encode_inputs(what, name)[0]
    else:
        rows = token_rows(what, name=name)
        if len(rows) != 1:
            raise ValueError(f"a look is at one {name}, got {len(rows)}")
        ids = rows[0]
    _check(ids, name, model.config.vocab_size, max_text_length(model.config))
    return ids


def _target_ids(model: Model, target: Any) -> list[int]:
    """What the decoder is fed: bos_id, then the target without its end, as in training."""
    bos_id, eos_id = model.config.bos_id, model.config.eos_id
    if isinstance(target, str):
        ids = ModelTokenizers(model).target.encode(target)
    else:
        rows = token_rows(target, name="target")
        if len(rows) != 1:
            raise ValueError(f"a look is at one target, got {len(rows)}")
        ids = rows[0]
    ids = ids[:-1] if ids and ids[-1] == eos_id else ids
    ids = ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]
    _check(ids, "target", model.config.output_vocab_size, max_text_length(model.config, target=True))
    return ids


def _check(ids: list[int], name: str, vocab_size: int, max_len: int) -> None:
    if not ids:
        raise ValueError(f"{name} is empty: there is nothing to look at")
    if len(ids) > max_len:
        raise ValueError(f"{name} has {len(ids):,} tokens, but this model reads at most max_len={max_len:,}")
    for index in ids:
        if not 0 <= index < vocab_size:
            raise ValueError(f"{name} holds token {index}, but the vocabulary has {vocab_size}: 0 to {vocab_size - 1}")


def _written(model: Model, given: Any, source: _Source | None, how: GenerateOptions) -> Generated:
    """The texts that a search finds."""
    if isinstance(how, GenerateConfig):
        return generate_tokens(model, given, how)
    fields = dict(how)
    if source is not None:
        fields.setdefault("max_new_tokens", _room(model, len(source.labels)))
    config, strings = resolve_config(model, None, fields)
    return generate_tokens(model, given, config, strings=strings)


def _room(model: Model, n_source: int) -> int:
    """New tokens: about twice the source's, a caption's as many as there is place for."""
    if model.config.source == "text":
        return default_output_length(model.config, n_source, multiple=1)
    return max(1, max_text_length(model.config, target=True) - 1)


def _tokenizers(model: Model) -> tuple[Any, Any]:
    """Of the source and of the target; None where a model was given none."""
    processor = model.processor
    if processor is None:
        return None, None
    return processor.source, processor.target if processor.target is not None else processor.source


def _decoded(ids: list[int], tokenizer: Any) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids)
