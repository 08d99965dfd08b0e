"""One look taken: what was given is read, written on where that is asked for, and run once with the recorder on.

The pass is the model's own fast one, up to its last states: logits of all positions are never formed. Whatever search
wrote a text, its attention depends on the text alone, so one pass over the winner shows what every step of it saw.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention import record
from ..attention.taps import Recorder
from ..generation import GenerateConfig, Generated
from ..generation.generate import at_rest
from ..generation.generate import generate as generate_tokens
from ..generation.prompts import longest, rows_of
from ..generation.texts import understood
from ..generation.words import Words
from ..models import Decoder, Encoder, EncoderDecoder, Model, Recurrent, Stack
from .labels import Box, Label, numbered, patch_labels, token_labels
from .memory import giving_back
from .pictures import Picture, picture_of

if TYPE_CHECKING:
    from PIL.Image import Image

Generating = Mapping[str, Any] | GenerateConfig
"""How a text is to be written: the fields of a GenerateConfig, or one."""

_one_at_a_time = threading.Lock()


@dataclass(frozen=True, eq=False)
class Taken:
    """What a look is made of."""

    inputs: tuple[Tensor, ...]
    """What the model was called with: (tokens,), (pixels,) or (source, target)."""
    states: Tensor
    """The last states (T, M), of the decoder where there is one."""
    places: dict[str, list[tuple[str, int]]]
    """By kind and layer: where the recorder saw it, and which of the calls there."""
    seen: Recorder
    rows: dict[str, list[Label]]
    cols: dict[str, list[Label]]
    text: str | None
    target_text: str | None
    image: Image | None
    generated: Generated | None


def take(model: Model, what: Any, target: Any, generate: Generating | None) -> Taken:
    """Read, write on, run."""
    if not isinstance(model, Decoder | Encoder | EncoderDecoder | Recurrent):
        raise TypeError(f"regard.look takes a model of regard's or its directory, not {type(model).__name__}")
    with at_rest(model):
        if isinstance(model, Decoder):
            return _of_text(model, what, target, generate)
        if isinstance(model, Encoder):
            return _of_encoder(model, what, target, generate)
        return _of_both(model, what, target, generate)


@contextmanager
def recording(model: nn.Module, n_tokens: int) -> Iterator[Recorder]:
    """q and k of what runs inside; a recorder is one for the whole process, so a second look waits."""
    with _one_at_a_time, giving_back(n_tokens), record(model, values=False) as seen:
        yield seen


# ---- the three kinds of model


def _of_text(model: Decoder, what: Any, target: Any, generate: Generating | None) -> Taken:
    if target is not None:
        raise ValueError("target is for models with an encoder; a language model's text is all there is")
    ids, made = _read_ids(model, what, "text"), None
    if generate is not None:
        made = _written(model, [ids], None, generate)
        ids = [*made.prompts[0], *made.best[0].content]
    tokens = torch.tensor([ids], device=model.device)
    with recording(model, len(ids)) as seen:
        states = model.hidden(tokens)[0]
    tokenizer = _tokenizers(model)[0]
    labels = token_labels(ids, tokenizer, model.config)
    text = what if isinstance(what, str) and made is None else _decoded(ids, tokenizer)
    places = {"self": _places(model.decoder, "decoder", "attention")}
    return _taken(model, (tokens,), states, seen, places, {"self": labels}, {"self": labels}, text, generated=made)


def _of_encoder(model: Encoder, what: Any, target: Any, generate: Generating | None) -> Taken:
    if target is not None or generate is not None:
        given = "target" if target is not None else "generate"
        raise ValueError(f"{given} is for models that write text; one with architecture='encoder' only reads")
    source = _read_source(model, what)
    with recording(model, len(source.labels)) as seen:
        states = model.hidden(source.values)[0]
    labels = {"encoder": source.labels}
    places = {"encoder": _places(model.encoder, "encoder", "attention")}
    return _taken(model, (source.values,), states, seen, places, labels, labels, source.text, image=source.image)


def _of_both(model: EncoderDecoder | Recurrent, what: Any, target: Any, generate: Generating | None) -> Taken:
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
    with recording(model, max(len(source.labels), len(fed))) as seen:
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
) -> Taken:
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
) -> Taken:
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
            cols = {**cols, kind: numbered("summary", k.shape[2])}
    return Taken(inputs, states, places, seen, rows, cols, text, target_text, image, generated)


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
        picture = picture_of(model, what)
        return _Source(_on(model, picture.pixels), _patches(model, picture), image=picture.image)
    regions = what if isinstance(what, Tensor) else torch.as_tensor(what)
    regions = regions[None] if regions.dim() == 2 else regions
    if regions.dim() != 3 or len(regions) != 1 or not regions.is_floating_point() or not regions.numel():
        raise ValueError(f"a look is at the regions of one image, (R, d_region), got shape {tuple(regions.shape)}")
    return _Source(_on(model, regions), numbered("region", regions.shape[1], _boxes(model, regions)))


def _patches(model: Model, picture: Picture) -> list[Label]:
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
        ids = Words(model).rows([what], name)[0]
    else:
        rows = rows_of(what, name=name)
        if len(rows) != 1:
            raise ValueError(f"a look is at one {name}, got {len(rows)}")
        ids = rows[0]
    _check(ids, name, model.config.vocab_size, longest(model.config))
    return ids


def _target_ids(model: Model, target: Any) -> list[int]:
    """What the decoder is fed: bos_id, then the target without its end, as in training."""
    bos_id, eos_id = model.config.bos_id, model.config.eos_id
    if isinstance(target, str):
        ids = Words(model).target.encode(target)
    else:
        rows = rows_of(target, name="target")
        if len(rows) != 1:
            raise ValueError(f"a look is at one target, got {len(rows)}")
        ids = rows[0]
    ids = ids[:-1] if ids and ids[-1] == eos_id else ids
    ids = ids if bos_id is None or ids[:1] == [bos_id] else [bos_id, *ids]
    _check(ids, "target", model.config.output_vocab_size, longest(model.config, target=True))
    return ids


def _check(ids: list[int], name: str, vocab_size: int, max_len: int) -> None:
    if not ids:
        raise ValueError(f"{name} is empty: there is nothing to look at")
    if len(ids) > max_len:
        raise ValueError(f"{name} has {len(ids):,} tokens, but this model reads at most max_len={max_len:,}")
    for index in ids:
        if not 0 <= index < vocab_size:
            raise ValueError(f"{name} holds token {index}, but the vocabulary has {vocab_size}: 0 to {vocab_size - 1}")


def _written(model: Model, given: Any, source: _Source | None, how: Generating) -> Generated:
    """The texts that a search finds."""
    if isinstance(how, GenerateConfig):
        return generate_tokens(model, given, how)
    fields = dict(how)
    if source is not None:
        fields.setdefault("max_new_tokens", _room(model, len(source.labels)))
    config, strings = understood(model, None, fields)
    return generate_tokens(model, given, config, strings=strings)


def _room(model: Model, n_source: int) -> int:
    """New tokens: about twice the source's, a caption's as many as there is place for."""
    most = longest(model.config, target=True) - 1
    return max(1, min(2 * n_source + 20, most) if model.config.source == "text" else most)


def _tokenizers(model: Model) -> tuple[Any, Any]:
    """Of the source and of the target; None where a model was given none."""
    processor = model.processor
    if processor is None:
        return None, None
    return processor.source, processor.target if processor.target is not None else processor.source


def _decoded(ids: list[int], tokenizer: Any) -> str | None:
    return None if tokenizer is None else tokenizer.decode(ids)
