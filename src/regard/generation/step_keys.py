"""The buffers of a captured decode step, at fixed addresses: tokens and lengths, and keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.biases import RelativeBias
from ..models import Model


class DecodeState(NamedTuple):
    """The state that a step updates, on the device and at fixed addresses."""

    tokens: Tensor  # (R,) the next input token of each row
    lengths: Tensor  # (R,) its position
    last: Tensor  # (R,) the last position of each row, where a finished row stays
    steps: Tensor  # (R,) number of tokens chosen so far
    history: Tensor  # (n, R) the chosen tokens
    log_probs: Tensor  # (n, R) log P of each, by the model alone

    @classmethod
    def empty(cls, rows: int, n_steps: int, device: torch.device) -> DecodeState:
        tokens, lengths, last, steps = (torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4))
        history = torch.zeros(n_steps, rows, dtype=torch.int64, device=device)
        return cls(tokens, lengths, last, steps, history, torch.zeros(n_steps, rows, device=device))

    def begin(self, lengths: Tensor, last: Tensor) -> None:
        self.lengths.copy_(lengths)
        self.last.copy_(last)
        self.steps.zero_()

    def advance(self) -> None:
        self.lengths.copy_(torch.minimum(self.lengths + 1, self.last))

    def append(self, tokens: Tensor, log_probs: Tensor) -> None:
        """Add the chosen tokens to the history and make them the next step's input."""
        self.history.scatter_(0, self.steps[None], tokens[None])
        self.log_probs.scatter_(0, self.steps[None], log_probs[None].to(self.log_probs.dtype))
        self.tokens.copy_(tokens)
        self.steps.add_(1)


class StepKeys:
    """Keys and values of R rows of text, and of the encoder's output for R / copies sources.

    The copies of a prompt (beams or samples) are adjacent rows that share its keys. Row r of a buffer has the keys of
    the tokens that were decoded in row r; ``origin`` gives, for each position in a row's past, the row with its keys.
    """

    def __init__(self, model: Model, rows: int, max_len: int, copies: int = 1, source_len: int = 0) -> None:
        shape, self.max_len, self.copies = model.decoder_shape, max_len, copies
        like, n_sources = next(model.parameters()), rows // copies if source_len else 0
        self.data = like.new_zeros(shape.n_layers, 2, rows, shape.n_kv_heads, max_len, shape.d_head)
        self.memory_data = like.new_zeros(shape.n_layers, 2, n_sources, shape.n_kv_heads, source_len, shape.d_head)
        self.layers = [(k, v) for k, v in self.data]  # (R, G, S, D) each
        self.memory = [(k, v) for k, v in self.memory_data] if source_len else []  # (B, G, source_len, D) each
        self.row = torch.arange(rows, device=like.device)
        self.source_lengths = torch.ones(rows // copies, dtype=torch.int64, device=like.device)
        self.origin = self.row[:, None].repeat(1, max_len) if copies > 1 else None  # (R, S); None: the row itself
        has_bias = model.decoder.position_bias is not None
        self.bias = like.new_zeros(shape.n_heads, max_len) if has_bias else None  # (H, S), by distance from the query

    def begin(self, lengths: Tensor, bias: RelativeBias | None) -> None:
        """Reset for prompts of ``lengths`` (R,), whose keys go to the first of their copies."""
        self.data.zero_()  # a leftover infinity times 0 would be NaN
        if self.origin is not None:
            past = torch.arange(self.max_len, device=lengths.device) < lengths[:, None]
            first = self.row - self.row % self.copies
            self.origin.copy_(torch.where(past, first[:, None], self.row[:, None]))
        if self.bias is not None:
            assert bias is not None
            self.bias.copy_(bias.at(-torch.arange(self.max_len, device=self.row.device)))

    def write_prompts(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Write the keys and values (n, G, P, D) of n prompts."""
        for buffer, new in zip(self.layers[layer], (k, v), strict=True):
            buffer[:: self.copies][: len(new), :, : new.shape[2]] = new

    def write_memory(self, layer: int, k: Tensor, v: Tensor, padding_mask: Tensor | None) -> None:
        """Write the keys and values (n, G, S, D) of n sources; ``padding_mask`` (n, S) is True at real tokens."""
        for buffer, new in zip(self.memory[layer], (k, v), strict=True):
            buffer[: len(new), :, : new.shape[2]] = new
        self.source_lengths[: len(k)] = k.shape[2] if padding_mask is None else padding_mask.sum(1)

    def select(self, rows: Tensor, lengths: Tensor) -> None:
        """Row r continues row rows[r]; ``lengths`` (R,) of all rows. With copies, only ``origin`` changes."""
        n = len(rows)
        if self.origin is None:
            for pair in self.layers:
                for x in pair:
                    x[:n] = x[:n].index_select(0, rows)
            return
        past = torch.arange(self.max_len, device=rows.device) < lengths[:n, None]
        self.origin[:n] = torch.where(past, self.origin.index_select(0, rows), self.row[:n, None])
