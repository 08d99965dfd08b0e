"""The inputs of generation, checked and as tensors: token ids and images, prompts padded left, sources padded right."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import DataConfig, ModelConfig
from ..data.images import check_image, open_upright
from ..errors import BadData
from ..models import Model
from ..text.image_processor import ImageProcessor
from .generation_config import GenerateConfig

Rows = Tensor | Sequence[Any]  # token ids of one text, (T,) or a list, or of several, (B, T) or a list of lists

MAX_PIXELS: int = DataConfig.model_fields["max_pixels"].default
_MAX_CACHE_BYTES = {"cpu": 1 << 30, "elsewhere": 4 << 30}
_LOGIT_BYTES = 16  # bytes per row and token of the vocabulary in one step: logits, scores and their sorted copy
_LENGTH_STEP = 32  # default output lengths are multiples of this, so that sources of similar length share a batch


@dataclass(frozen=True, eq=False)
class Prompts:
    """A batch of prompts, padded on the left, and how many tokens may follow each."""

    rows: list[list[int]]
    tokens: Tensor  # (B, T), padded on the left
    positions: Tensor | None  # (B, T), -1 at padding; None if all prompts have one length
    limit: Tensor  # (B,) maximum of new tokens

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def texts(self) -> Tensor:
        """The tokens (B, T), -1 at padding."""
        return self.tokens if self.positions is None else torch.where(self.positions < 0, -1, self.tokens)


@dataclass(frozen=True, eq=False)
class Sources:
    """The inputs of an encoder, and their padding mask (B, S), True at real tokens; None: no padding."""

    values: Tensor
    padding_mask: Tensor | None = None


@dataclass(frozen=True)
class ModelInputs:
    """Checked inputs, one item per text: prompts, or the beginnings of targets and their sources."""

    rows: list[list[int]]
    sources: list[Tensor] | None

    def select(self, index: list[int]) -> ModelInputs:
        sources = None if self.sources is None else [self.sources[i] for i in index]
        return ModelInputs([self.rows[i] for i in index], sources)


def read_inputs(
    model: Model,
    inputs: Rows,
    config: GenerateConfig,
    *,
    target: Rows | None = None,
    padding_mask: Tensor | None = None,
) -> ModelInputs:
    """Check prompts, or sources and the beginnings of their targets, against the model and the config."""
    ours = model.config
    if config.beam > ours.output_vocab_size:
        raise ValueError(f"beam={config.beam} is larger than the vocabulary of {ours.output_vocab_size} tokens")
    stops = [token for stop in config.stop for token in stop]
    for name, tokens in (("stop", stops), ("prefix", config.prefix), ("logit_bias", config.logit_bias)):
        for token in tokens:
            if not 0 <= token < ours.output_vocab_size:
                allowed = f"the vocabulary has {ours.output_vocab_size}: 0 to {ours.output_vocab_size - 1}"
                raise ValueError(f"{name} holds the unknown token {token}; {allowed}")
    if model.is_decoder_only:
        if target is not None:
            raise ValueError("target is for models with an encoder; a decoder takes only a prompt")
        return ModelInputs(fill_empty_rows(token_rows(inputs, padding_mask), ours.bos_id, "prompt"), None)
    if ours.architecture == "encoder":
        raise TypeError("a model with architecture='encoder' writes no text")
    sources = source_tensors(inputs, padding_mask, ours, config.truncate)
    rows = fill_empty_rows([[]] if target is None else token_rows(target, name="target"), ours.bos_id, "target")
    rows = [row if ours.bos_id in (None, row[0]) else [ours.bos_id, *row] for row in rows]
    rows = rows * len(sources) if len(rows) == 1 else rows
    if len(rows) != len(sources):
        raise ValueError(f"there are {len(rows)} targets for {len(sources)} sources")
    return ModelInputs(rows, sources)


def fill_empty_rows(rows: list[list[int]], bos_id: int | None, name: str) -> list[list[int]]:
    """An empty row becomes bos_id, with which the model begins a text; an error if it has none."""
    if not rows:
        raise ValueError(f"there is no {name}: the batch is empty")
    for index, row in enumerate(rows):
        if not row and bos_id is None:
            raise ValueError(f"{name} {index} is empty, and this model has no bos_id to begin with")
    return rows if bos_id is None else [row or [bos_id] for row in rows]


def pad_prompts(
    rows: list[list[int]], model: ModelConfig, config: GenerateConfig, device: torch.device, name: str = "prompt"
) -> Prompts:
    """Check rows of token ids against the model and pad them on the left."""
    max_len, rows = max_text_length(model, target=name == "target"), check_prompts(rows, model, config, name)
    limit = torch.tensor([min(config.max_new_tokens, max_len - len(row)) for row in rows], device=device)
    width = max(len(row) for row in rows)
    if all(len(row) == width for row in rows):
        return Prompts(rows, torch.tensor(rows, device=device), None, limit)
    tokens = torch.tensor([[model.pad_id] * (width - len(row)) + row for row in rows], device=device)
    n_padding = torch.tensor([width - len(row) for row in rows], device=device)
    positions = torch.arange(width, device=device) - n_padding[:, None]
    return Prompts(rows, tokens, positions.clamp(min=-1), limit)


def check_prompts(
    rows: list[list[int]], model: ModelConfig, config: GenerateConfig, name: str, room: int = 1
) -> list[list[int]]:
    """Check that each row leaves room for that many new tokens, after truncation if the config allows it."""
    max_len = max_text_length(model, target=name == "target")
    if config.truncate and name == "prompt":
        rows = [_truncate_prompt(row, max_len, model.bos_id, config.max_new_tokens) for row in rows]
    for index, row in enumerate(rows):
        _check_ids(f"{name} {index}", row, model.output_vocab_size)
        if len(row) + room > max_len:
            hint = "; truncate=True keeps its end" if name == "prompt" else ""
            raise ValueError(f"{name} {index} has {len(row)} tokens, and max_len={max_len} leaves no room{hint}")
    return rows


def token_rows(inputs: Rows, padding_mask: Tensor | None = None, name: str = "prompt") -> list[list[int]]:
    """One or several texts as lists of ids; ``padding_mask`` (B, T) is True at the real tokens of a padded tensor."""
    if isinstance(inputs, str) or (isinstance(inputs, Sequence) and any(isinstance(row, str) for row in inputs)):
        raise TypeError(f"{name} is text, but token ids are needed: encode it with the model's tokenizer first")
    if isinstance(inputs, Tensor):
        if inputs.dim() not in (1, 2) or inputs.is_floating_point():
            got = f"{inputs.dtype} of shape {tuple(inputs.shape)}"
            raise TypeError(f"{name} must be whole numbers of shape (length,) or (batch, length), got {got}")
        if padding_mask is not None:
            if padding_mask.shape != inputs.shape:
                shapes = f"shape {tuple(padding_mask.shape)}, but {name} has {tuple(inputs.shape)}"
                raise ValueError(f"padding_mask has {shapes}")
            pairs = zip(torch.atleast_2d(inputs), torch.atleast_2d(padding_mask.bool()), strict=True)
            return [row[real].tolist() for row, real in pairs]
        return torch.atleast_2d(inputs).tolist()
    if padding_mask is not None:
        raise ValueError(f"padding_mask needs {name} as a tensor; the rows of a list have no padding")
    try:
        is_batch = any(isinstance(row, Sequence | Tensor) for row in inputs)
        rows = [row.tolist() if isinstance(row, Tensor) else row for row in inputs] if is_batch else [inputs]
        return [[operator.index(token) for token in row] for row in rows]
    except TypeError:
        raise TypeError(f"{name} must hold token ids, whole numbers; got {inputs!r:.80}") from None


def source_tensors(source: Rows, padding_mask: Tensor | None, model: ModelConfig, truncate: bool) -> list[Tensor]:
    """The encoder's inputs, one tensor per source: ids (S,), an image (C, height, width), or regions (R, d_region).

    A source of several passages, given as lists of ids, becomes (P, S) with -1 at padding.
    """
    if model.source == "text" and _has_passages(source):
        items = [_pad_passages(index, rows, model, truncate) for index, rows in enumerate(source)]
    elif model.source == "text":
        rows = enumerate(token_rows(source, padding_mask, "source"))
        items = [torch.tensor(_check_source(index, row, model, truncate)) for index, row in rows]
    else:
        n_dims, shape = (3, "(channels, height, width)") if model.source == "image" else (2, "(regions, d_region)")
        items = list(source) if not isinstance(source, Tensor) or source.dim() > n_dims else [source]
        x: Any  # a list may contain anything
        for x in items:
            if not isinstance(x, Tensor) or x.dim() != n_dims or not x.is_floating_point() or x.numel() == 0:
                kinds = f"floating-point tensors {shape}, one or several, none empty"
                raise ValueError(f"source={model.source!r} takes {kinds}")
        if padding_mask is not None:
            real = torch.atleast_2d(padding_mask.bool()).to(items[0].device)
            if model.source == "image" or real.shape != (len(items), *{len(item) for item in items}):
                sources = f"{model.source} sources of shapes {[tuple(item.shape) for item in items]}"
                raise ValueError(f"padding_mask of shape {tuple(real.shape)} does not match {sources}")
            items = [item[row] for item, row in zip(items, real, strict=True)]
    if not items:
        raise ValueError("there is no source: the batch is empty")
    return items


def _has_passages(source: Rows) -> bool:
    """Whether every source is a list of lists of ids."""
    return (
        isinstance(source, list)
        and bool(source)
        and all(isinstance(x, list) and x and isinstance(x[0], list) for x in source)
    )


def _pad_passages(index: int, rows: list[list[int]], model: ModelConfig, truncate: bool) -> Tensor:
    checked = [torch.tensor(_check_source(index, row, model, truncate)) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(checked, batch_first=True, padding_value=-1)


def pad_sources(items: list[Tensor], model: Model) -> Sources:
    """Sources as one batch, padded on the right."""
    text = model.config.source == "text"
    if text and items[0].dim() == 2:
        n_passages, width = (max(item.shape[side] for item in items) for side in (0, 1))
        tokens = torch.full((len(items), n_passages, width), -1)
        for row, item in zip(tokens, items, strict=True):
            row[: item.shape[0], : item.shape[1]] = item
        return Sources(
            torch.where(tokens < 0, model.config.pad_id, tokens).to(model.device), (tokens >= 0).to(model.device)
        )
    dtype, padding = (torch.int64, model.config.pad_id) if text else (next(model.parameters()).dtype, 0)
    items = [item.to(model.device, dtype) for item in items]
    lengths = [len(item) for item in items]
    if len({item.shape if model.config.source == "image" else item.shape[1:] for item in items}) > 1:
        raise ValueError(f"sources of different sizes cannot share a batch: {[tuple(x.shape) for x in items]}")
    if len(set(lengths)) == 1:
        return Sources(torch.stack(items))
    values = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=padding)
    padding_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Sources(values, padding_mask.to(model.device))


def max_text_length(model: ModelConfig, target: bool = False) -> int:
    """The maximum length of a text or target; dynamic RoPE scaling extends it beyond max_len."""
    max_len = model.max_len if not target or model.max_target_len is None else model.max_target_len
    scaling = model.rope_scaling
    if scaling is None or scaling.kind != "dynamic" or scaling.factor is None:
        return max_len
    return int(max_len * scaling.factor)


def default_output_length(model: ModelConfig, n_source: int, multiple: int = _LENGTH_STEP) -> int:
    """Default limit of new tokens for a source of ``n_source`` tokens: 2 n + 20, rounded up, or as many as fit."""
    length = -(-(2 * n_source + 20) // multiple) * multiple
    return max(1, min(length, max_text_length(model, target=True) - 1))


def rope_depends_on_length(model: ModelConfig) -> bool:
    """Whether rotary angles depend on the longest text, so that the texts of a batch would affect each other."""
    return model.rope_scaling is not None and model.rope_scaling.kind in ("dynamic", "longrope")


def length_batches(
    model: Model, config: GenerateConfig, lengths: Sequence[int], limits: Sequence[int]
) -> Iterator[list[int]]:
    """Indices in batches with equal limits and similar lengths, longest first, as large as memory allows.

    ``lengths`` are prompt or source lengths, ``limits`` the maxima of new tokens; the longest text of a batch
    determines its size.
    """
    ours, copies = model.config, max(config.beam, config.n_best)
    n_heads, d_head = ours.n_kv_heads or ours.n_heads, ours.d_head or ours.d_model // ours.n_heads
    n_layers, n_bytes = max(ours.n_layers, ours.n_decoder_layers or 0), next(model.parameters()).element_size()
    token_bytes = 2 * n_layers * n_heads * d_head * n_bytes  # keys and values in all layers
    logit_bytes = _LOGIT_BYTES * ours.output_vocab_size
    max_bytes = _MAX_CACHE_BYTES.get(model.device.type, _MAX_CACHE_BYTES["elsewhere"])
    order = sorted(range(len(lengths)), key=lambda index: (limits[index], lengths[index]), reverse=True)
    batch: list[int] = []
    for index in order:
        if batch:
            first = batch[0]
            row_bytes = copies * ((lengths[first] + limits[first]) * token_bytes + logit_bytes)
            if limits[index] != limits[first] or (len(batch) + 1) * row_bytes > max_bytes:
                yield batch
                batch = []
        batch.append(index)
    if batch:
        yield batch


def _check_source(index: int, row: list[int], model: ModelConfig, truncate: bool) -> list[int]:
    _check_ids(f"source {index}", row, model.vocab_size)
    if not row:
        raise ValueError(f"source {index} is empty")
    max_len = max_text_length(model)
    if len(row) <= max_len:
        return row
    if not truncate:
        hint = "truncate=True keeps its beginning"
        raise ValueError(f"source {index} has {len(row)} tokens, but max_len={max_len}; {hint}")
    end = row[-1:] if row[-1] == model.eos_id else []  # keep a final eos_id
    return row[: max_len - len(end)] + end


def _truncate_prompt(row: list[int], max_len: int, bos_id: int | None, max_new_tokens: int) -> list[int]:
    """The end of a long prompt: at least half of max_len, more if the new tokens leave room."""
    length = max(1, max_len - max_new_tokens, max_len // 2)
    if len(row) <= length:
        return row
    start = row[:1] if row[0] == bos_id and length > 1 else []  # keep an initial bos_id
    return start + row[len(row) - length + len(start) :]


def _check_ids(name: str, row: list[int], vocab_size: int) -> None:
    for token in row:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token {token}, but the vocabulary has {vocab_size}: 0 to {vocab_size - 1}")


def image_pixels(model: Model, images: Any) -> Tensor:
    """One or several images as pixels (B, C, height, width), preprocessed as in training; tensors are not changed.

    An image is a path, a Pillow image, or a uint8 array (height, width) or (height, width, channels).
    """
    if model.config.source != "image":
        raise ValueError(f"this model reads source={model.config.source!r}, not images")
    if isinstance(images, Tensor):
        return images if images.dim() == 4 else images[None]
    processor = None if model.processor is None else model.processor.image
    if processor is None:
        raise ValueError("this model has no image processor: load one with a preprocessor_config.json, or give pixels")
    batch = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    if not batch:
        raise ValueError("there is no image: the list is empty")
    return torch.cat([_prepare_image(processor, image, model.config.n_channels) for image in batch])


def _prepare_image(processor: ImageProcessor, image: Any, channels: int) -> Tensor:
    from PIL import Image

    if isinstance(image, str | Path):
        image = Path(image)
        if (fault := check_image(image, MAX_PIXELS, decode=True)) is not None:
            raise BadData(f"{image}: {fault}")
    elif isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim not in (2, 3) or 0 in image.shape:
            got = f"{image.dtype} of shape {image.shape}"
            raise ValueError(f"an image array must be uint8 (height, width) or (height, width, channels), got {got}")
        if image.ndim == 3 and image.shape[2] not in (1, 3, 4):
            raise ValueError(f"an image must have 1, 3 or 4 channels, got an array of shape {image.shape}")
    elif not isinstance(image, Image.Image):
        raise TypeError(f"an image must be a path, a Pillow image or an array of bytes, not {type(image).__name__}")
    return processor(open_upright(image, channels))
