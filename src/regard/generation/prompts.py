"""What a model is given to start from, as tensors: ragged prompts padded on the left, ragged sources on the right."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import ModelConfig
from ..models import Model
from .config import GenerateConfig

Rows = Tensor | Sequence[Any]
"""One text as token ids, (T,) or a list, or several, (B, T) or a list of them."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts that end in the same column, and how many tokens may follow each."""

    rows: list[list[int]]
    tokens: Tensor  # (B, T), padded on the left
    positions: Tensor | None  # (B, T) with -1 for padding; None where all are of one length
    limit: Tensor  # (B,) new tokens

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def texts(self) -> Tensor:
        """The tokens (B, T), -1 where there is none."""
        return self.tokens if self.positions is None else torch.where(self.positions < 0, -1, self.tokens)


@dataclass(frozen=True, eq=False)
class Sources:
    """What an encoder reads, and which of it is real (B, S); None: all."""

    values: Tensor
    keep: Tensor | None = None

    def __len__(self) -> int:
        return len(self.values)


def prompts_of(
    rows: list[list[int]], model: ModelConfig, config: GenerateConfig, device: torch.device, name: str = "prompt"
) -> Prompts:
    """Check rows of token ids against the model and bring them side by side."""
    max_len, rows = longest(model, target=name == "target"), fitting_prompts(rows, model, config, name)
    limit = torch.tensor([min(config.max_new_tokens, max_len - len(row)) for row in rows], device=device)
    width = max(len(row) for row in rows)
    if all(len(row) == width for row in rows):
        return Prompts(rows, torch.tensor(rows, device=device), None, limit)
    tokens = torch.tensor([[model.pad_id] * (width - len(row)) + row for row in rows], device=device)
    missing = torch.tensor([width - len(row) for row in rows], device=device)
    places = torch.arange(width, device=device) - missing[:, None]
    return Prompts(rows, tokens, places.clamp(min=-1), limit)


def fitting_prompts(rows: list[list[int]], model: ModelConfig, config: GenerateConfig, name: str) -> list[list[int]]:
    """Rows that leave room for at least one more token, cut short where that is wanted."""
    max_len = longest(model, target=name == "target")
    if config.truncate and name == "prompt":
        rows = [_shortened(row, max_len, model.bos_id, config.max_new_tokens) for row in rows]
    for index, row in enumerate(rows):
        _check_ids(f"{name} {index}", row, model.output_vocab_size)
        if len(row) >= max_len:
            hint = "; truncate=True keeps its end" if name == "prompt" else ""
            raise ValueError(f"{name} {index} has {len(row)} tokens, and max_len={max_len} leaves no room{hint}")
    return rows


def sources_of(source: Rows, keep: Tensor | None, model: ModelConfig, truncate: bool) -> list[Tensor]:
    """What the encoder reads, one tensor a source: ids, an image (C, height, width), or regions (R, d_region)."""
    if model.source == "text":
        rows = [_fitting(index, row, model, truncate) for index, row in enumerate(rows_of(source, keep, "source"))]
        items = [torch.tensor(row) for row in rows]
    else:
        n_dims, shape = (3, "(channels, height, width)") if model.source == "image" else (2, "(regions, d_region)")
        items = list(source) if not isinstance(source, Tensor) or source.dim() > n_dims else [source]
        if any(not _is_filled(item, n_dims) for item in items):
            raise ValueError(
                f"source={model.source!r} takes floating-point tensors {shape}, one or several, none empty"
            )
        if keep is not None:
            items = _kept(items, keep, model.source)
    if not items:
        raise ValueError("there is no source: the batch is empty")
    return items


def rows_of(given: Rows, keep: Tensor | None = None, name: str = "prompt") -> list[list[int]]:
    """One text or several, as lists of ids; ``keep`` (B, T) says which ids of a padded tensor are real."""
    if isinstance(given, str) or (isinstance(given, Sequence) and any(isinstance(row, str) for row in given)):
        raise TypeError(f"{name} is text, but token ids are needed: encode it with the model's tokenizer first")
    if isinstance(given, Tensor):
        if given.dim() not in (1, 2) or given.is_floating_point():
            got = f"{given.dtype} of shape {tuple(given.shape)}"
            raise TypeError(f"{name} must be whole numbers of shape (length,) or (batch, length), got {got}")
        if keep is not None:
            if keep.shape != given.shape:
                raise ValueError(f"keep has shape {tuple(keep.shape)}, but {name} has {tuple(given.shape)}")
            return [row[real].tolist() for row, real in zip(_two(given), _two(keep.bool()), strict=True)]
        return _two(given).tolist()
    if keep is not None:
        raise ValueError(f"keep goes with {name} as a tensor; rows of a list are as long as they are")
    several = any(isinstance(row, Sequence | Tensor) for row in given)
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in given] if several else [list(given)]
    try:
        return [[operator.index(token) for token in row] for row in rows]
    except TypeError:
        raise TypeError(f"{name} must hold token ids, whole numbers; got {given!r:.80}") from None


def _kept(items: list[Tensor], keep: Tensor, source: str) -> list[Tensor]:
    """Regions that are no padding."""
    keep = _two(keep.bool()).to(items[0].device)
    if source == "image" or keep.shape != (len(items), *{len(item) for item in items}):
        shapes = [tuple(item.shape) for item in items]
        raise ValueError(f"keep of shape {tuple(keep.shape)} does not go with {source} sources of shapes {shapes}")
    return [item[real] for item, real in zip(items, keep, strict=True)]


def _is_filled(item: Any, n_dims: int) -> bool:
    return isinstance(item, Tensor) and item.dim() == n_dims and item.is_floating_point() and item.numel() > 0


def _two(x: Tensor) -> Tensor:
    return x[None] if x.dim() == 1 else x


def longest(model: ModelConfig, target: bool = False) -> int:
    """The longest text a model is made for; dynamic scaling stretches the angles for longer ones as they come."""
    max_len = model.max_len if not target or model.max_target_len is None else model.max_target_len
    scaling = model.rope_scaling
    stretch = scaling.factor if scaling is not None and scaling.kind == "dynamic" else None
    return max_len if stretch is None else int(max_len * stretch)


def angles_by_length(model: ModelConfig) -> bool:
    """Whether rotary angles follow the longest text so far: then what stands beside or behind a token changes it."""
    return model.rope_scaling is not None and model.rope_scaling.kind in ("dynamic", "longrope")


def _shortened(row: list[int], max_len: int, bos_id: int | None, max_new_tokens: int) -> list[int]:
    """The end of a long prompt: room is made for the tokens asked for, as long as half of the place is left to it."""
    most = max(1, max_len - max_new_tokens, max_len // 2)
    if len(row) <= most:
        return row
    starts = row[:1] if row[0] == bos_id and most > 1 else []  # a text that begins as trained still does
    return starts + row[len(row) - most + len(starts) :]


def _fitting(index: int, row: list[int], model: ModelConfig, truncate: bool) -> list[int]:
    _check_ids(f"source {index}", row, model.vocab_size)
    if not row:
        raise ValueError(f"source {index} is empty")
    max_len = longest(model)
    if len(row) <= max_len:
        return row
    if not truncate:
        raise ValueError(
            f"source {index} has {len(row)} tokens, but max_len={max_len}; truncate=True keeps its beginning"
        )
    ends = row[-1:] if row[-1] == model.eos_id else []  # a source that ends as trained still does
    return row[: max_len - len(ends)] + ends


def _check_ids(name: str, row: list[int], vocab_size: int) -> None:
    for token in row:
        if not 0 <= token < vocab_size:
            raise ValueError(f"{name} holds token {token}, but the vocabulary has {vocab_size}: 0 to {vocab_size - 1}")


def side_by_side(items: list[Tensor], model: Model) -> Sources:
    """Sources stacked, the shorter ones padded at their end."""
    text = model.config.source == "text"
    dtype, padding = (torch.int64, model.config.pad_id) if text else (next(model.parameters()).dtype, 0)
    items = [item.to(model.device, dtype) for item in items]
    lengths = [len(item) for item in items]
    if len({item.shape if model.config.source == "image" else item.shape[1:] for item in items}) > 1:
        raise ValueError(f"sources of different sizes cannot be read together: {[tuple(x.shape) for x in items]}")
    if len(set(lengths)) == 1:
        return Sources(torch.stack(items))
    values = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=padding)
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return Sources(values, keep.to(model.device))
