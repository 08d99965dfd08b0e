"""A captured pass over prompts, for GPUs: launching its kernels one by one takes longer than computing them.

The pass has one shape: up to ``N_TEXTS`` texts of at most ``WIDTH`` tokens, in ``N_ROWS`` rows. Rows that no prompt
needs belong to one more text, whose results nobody reads. Prompts that follow a known prefix, longer sources and images
take the uncaptured pass of ``PromptReader``, which computes the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..foundation.device import upload
from ..models.base_model import DecoderShape
from .cached_engine import nan_error
from .cpu_engine import MemoryKeys
from .cuda_graph import CapturedStep, copy_to_host
from .ragged_rows import QUERY_PART, RaggedKeys, RaggedRows

N_TEXTS, N_ROWS, WIDTH = 64, 2048, QUERY_PART


class FixedRows(RaggedRows):
    """Ragged rows of one shape at fixed addresses: ``set`` writes other texts into them."""

    def __init__(self, device: torch.device) -> None:
        self.lengths, self.n_tokens = [WIDTH] * (N_TEXTS + 1), N_ROWS
        self.n_rows, self.width, self.device = N_ROWS, WIDTH, device
        self._numbers = torch.zeros(3, N_ROWS, dtype=torch.int64, device=device)
        self.tokens, self.text, self.index = self._numbers
        self._ends = torch.ones(2, N_TEXTS + 1, dtype=torch.int64, device=device)
        self.ends, self.last = self._ends  # the number of tokens of each text, and its last row

    def set(self, texts: Sequence[Sequence[int]]) -> None:
        lengths = np.array([len(text) for text in texts])
        lasts, number, n = lengths.cumsum() - 1, np.arange(len(texts)).repeat(lengths), lengths.sum()
        numbers, ends = np.zeros((3, N_ROWS), np.int64), np.zeros((2, N_TEXTS + 1), np.int64)
        numbers[0, :n] = np.fromiter(chain.from_iterable(texts), np.int64, n)
        numbers[1, :n], numbers[1, n:] = number, N_TEXTS
        numbers[2, :n] = np.arange(n) - (lasts - lengths + 1)[number]
        ends[0, : len(texts)], ends[0, len(texts) :] = lengths, 1
        ends[1, : len(texts)] = lasts
        self._numbers.copy_(upload(numbers, self._numbers))
        self._ends.copy_(upload(ends, self._ends))


class FixedKeys(RaggedKeys):
    """The keys and values of ``FixedRows``; none precede them."""

    def __init__(self, shape: DecoderShape, rows: FixedRows, dtype: torch.dtype, causal: bool) -> None:
        self.ragged, self.positions, self._text_ends, self._causal = rows, rows.index, rows.ends, causal
        sizes = (shape.n_layers, 2, N_TEXTS + 1, shape.n_kv_heads, WIDTH, shape.d_head)
        self.data = torch.zeros(sizes, dtype=dtype, device=rows.device)
        self._columns = torch.arange(WIDTH, device=rows.device)

    def begin(self) -> None:
        """Forget the previous texts."""
        self.data.zero_()  # a leftover infinity times weight 0 would be NaN
        last = self._columns if self._causal else self._text_ends[:, None] - 1
        visible = (self._columns <= last[..., None]).expand(N_TEXTS + 1, WIDTH, WIDTH)
        self.mask = torch.zeros(visible.shape, dtype=self.data.dtype, device=self.data.device)
        self.mask = self.mask.masked_fill_(~visible, -math.inf)[:, None]

    def copy_of_text(self, number: int, length: int) -> Tensor:
        """A copy of the keys and values (layers, 2, G, T, D) of a text, which the next pass overwrites."""
        return self.data[:, :, number, :, :length].clone()


class PassResult(NamedTuple):
    """The results for one prompt: its keys, those of its source, next-token logits (1, V) and their argmax."""

    keys: Tensor
    memory: Tensor | None
    logits: Tensor
    likeliest: int


class CapturedReading:
    """The pass over the prompts of one model, and over their sources if it has an encoder."""

    def __init__(
        self, decoder: Any, encoder: Any, table: Tensor | None, shape: DecoderShape, dtype: torch.dtype
    ) -> None:
        self._decoder, self._encoder, self._table = decoder, encoder, table
        device = decoder.table.weight.device
        self._rows, self._source_rows = FixedRows(device), FixedRows(device)
        self._keys, self._sources = FixedKeys(shape, self._rows, dtype, causal=True), None
        if encoder is not None:
            self._sources = FixedKeys(shape, self._source_rows, dtype, causal=False)
            self._encoder_keys = FixedKeys(encoder.shape, self._source_rows, dtype, causal=False)
        self._run = CapturedStep(self._compute, device)

    @staticmethod
    def fits(texts: Sequence[Sized]) -> bool:
        """Whether a pass can read these prompts, or these sources, together."""
        lengths = list(map(len, texts))
        return len(lengths) <= N_TEXTS and max(lengths, default=0) <= WIDTH and sum(lengths) <= N_ROWS

    def start(self, prompts: Sequence[list[int]], sources: Sequence[list[int]]) -> Callable[[], list[PassResult]]:
        """Start a pass; returns a function that waits for it, but not for what the device is given after it."""
        self._rows.set(prompts)
        if self._sources is not None:
            self._source_rows.set(sources)
        logits = self._run()
        assert logits is not None
        rows = logits[: len(prompts)].clone()
        read = copy_to_host(tuple(rows.max(-1)))
        memory: list[Tensor | None] = [None] * len(prompts)
        if self._sources is not None:
            memory = [self._sources.copy_of_text(number, len(source)) for number, source in enumerate(sources)]
        keys = [self._keys.copy_of_text(number, len(prompt)) for number, prompt in enumerate(prompts)]

        def wait() -> list[PassResult]:
            best, likeliest = read()
            if best.isnan().any():  # NaN counts as the maximum
                raise nan_error()
            return [PassResult(*x) for x in zip(keys, memory, rows.split(1), likeliest.tolist(), strict=True)]

        return wait

    def _compute(self) -> Tensor:
        """Next-token logits (N_TEXTS, V)."""
        rows, keys, memory = self._rows, self._keys, list[MemoryKeys]()
        keys.begin()
        if self._sources is not None:
            self._encoder_keys.begin()
            self._sources.begin()
            source_rows = self._source_rows
            states = self._encoder.states_of_tokens(source_rows.tokens, source_rows.index, self._encoder_keys)
            write_memory(self._decoder, self._sources, states)
            memory = [MemoryKeys(k, v, self._sources.mask[:, :, :1]) for k, v in self._sources.data]
        states = self._decoder.states(rows.tokens, rows.index, self._table, keys, memory)
        logits: Tensor = self._decoder.output(states[rows.last[:N_TEXTS]]).float()
        return logits


def write_memory(decoder: Any, sources: RaggedKeys, states: Tensor) -> None:
    """Write the keys and values of an encoder's states (R, M) for every layer of the decoder."""
    for number, layer in enumerate(decoder.layers):
        sources.update(number, layer.cross.memory_keys(states))
