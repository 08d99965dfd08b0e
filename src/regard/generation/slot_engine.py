"""Continuous batching: each text has a slot of one batch and joins or leaves between two steps.

slots = open_slots(model, size, max_slots)           ``size`` rows per slot: 1, or the beams of a search
slot = slots.join(reading)                           for a prompt that has been read (``prompt_reading``)
logits = slots.decode(tokens)                        one token for every row of every taken slot
block = slots.start_block(draws)                     several tokens for every slot (``GraphSlots``)
slots.select_all(slots, parents)                     reorder the beams of each of these slots
slots.leave(slot)

A text's numbers do not depend on its neighbours. On a CPU, the packed products of oneDNN and the int8 products compute
a row with the same bits in any batch of two rows or more, and attention does if the number of keys is a multiple of 32;
so there are always at least two rows, and keys are padded. On a GPU, the captured step has one shape, however many
slots are taken. Models whose step can be computed in neither way decode each slot separately.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..foundation.device import upload
from ..models import Model
from ..models.base_model import DecoderShape
from ..models.components import window_of
from .cached_engine import DecodingEngine
from .cpu_engine import MemoryKeys, RowDecoder, row_step_obstacle
from .cuda_graph import (
    BLOCK_STEPS,
    CapturedStep,
    GraphDecoder,
    GraphShape,
    can_capture,
    can_choose_captured,
    copy_to_host,
)
from .generation_config import GenerateConfig
from .prompt_reading import PromptReading
from .prompts import max_text_length
from .ragged_rows import COLUMN_MULTIPLE, padded_width
from .sampling import draw_tokens, filter_logits
from .text_codec import forbidden_bias

_COMPACT_STEPS = 16  # steps after which keys that no beam uses are dropped


@dataclass(eq=False)
class Slot:
    """The place of one text in a batch: ``size`` rows from index · size on. It may move when another slot leaves."""

    index: int
    batch: SeparateSlots
    owner: Any = None
    next_tokens: list[int] = field(default_factory=list)  # the next input token of each row


class BlockDraws(NamedTuple):
    """How the tokens of a text are sampled in a block."""

    temperature: float
    uniform: list[float]  # the random number of each token, up to the limit of the text


class TokenBlock(NamedTuple):
    """Tokens of the taken slots, computed by ``start_block``."""

    slots: list[Slot]
    read: Callable[[], tuple[Tensor, ...]]

    def wait(self) -> list[list[int]]:
        """The tokens of each slot, in the order of ``slots``; -1 where the logits are NaN."""
        history, log_probs = self.read()  # (steps, R)
        columns = history.masked_fill(log_probs.isnan(), -1).T.tolist()
        return [columns[slot.index] for slot in self.slots]


class SeparateSlots:
    """Slots that are decoded one by one, each by an engine of its own; works for every model."""

    has_blocks = False  # whether ``start_block`` decodes several steps at a time

    def __init__(self, model: Model, size: int, max_slots: int) -> None:
        self.model, self.size, self.max_slots = model, size, max_slots
        self.taken: list[Slot] = []  # in the order of the rows of ``decode``
        self.block: Any = None  # the last block that was started, for the caller to keep
        self._engines: dict[Slot, DecodingEngine] = {}

    def join(self, reading: PromptReading) -> Slot:
        """Take a slot for the text that follows a prompt."""
        slot = Slot(len(self.taken), self)
        self._write(slot, reading)  # if this raises, no slot is taken
        self.taken.append(slot)
        return slot

    def leave(self, slot: Slot) -> None:
        """Free a slot; the last one takes its place."""
        last = self.taken.pop()
        if last is not slot:
            self._move(last, slot.index)
            last.index = slot.index
            self.taken[slot.index] = last
        self._clear(slot, last)

    def decode(self, tokens: Tensor) -> Tensor:
        """Run one token per row (R,), in the order of ``taken``; next-token logits (R, V)."""
        parts = zip(self.taken, tokens.split(self.size), strict=True)
        return torch.cat([self._engines[slot].decode_one_token(slot_tokens) for slot, slot_tokens in parts])

    def start_block(self, draws: Mapping[Slot, BlockDraws]) -> TokenBlock | None:
        """Start several steps of every slot, greedy but for those with ``draws``; None if no slot is taken, or if these
        slots only decode step by step."""
        return None

    def select_all(self, slots: list[Slot], parents: Tensor) -> None:
        """Row r of slot n continues its row parents[n, r]."""
        for slot, slot_parents in zip(slots, parents, strict=True):
            self._engines[slot].select(slot_parents)

    def _write(self, slot: Slot, reading: PromptReading) -> None:
        engine = copy(reading.engine)  # a copy, as several texts may follow one prompt
        engine._cache = deepcopy(engine._cache)
        if self.size > 1:
            engine.select(torch.zeros(self.size, dtype=torch.int64, device=self.model.device))
        self._engines[slot] = engine

    def _move(self, slot: Slot, index: int) -> None:
        """Move the rows of ``slot`` to slot number ``index``."""

    def _clear(self, slot: Slot, last: Slot) -> None:
        del self._engines[slot]


class SlotColumns:
    """Keys and values of all slots in one tensor (layers, 2, slots, G, columns, D), and which columns each row sees."""

    def __init__(self, shape: DecoderShape, n_slots: int, size: int, dtype: torch.dtype) -> None:
        n_columns = 2 * COLUMN_MULTIPLE
        self.data = torch.zeros(shape.n_layers, 2, n_slots, shape.n_kv_heads, n_columns, shape.d_head, dtype=dtype)
        self.visible = torch.full((n_slots, size, n_columns), -math.inf, dtype=dtype)  # added to scores: 0 or -inf
        self.visible[..., 0] = 0.0  # rows of free slots see one column, or they would be NaN
        self.ends = [0] * n_slots  # columns written

    def write(self, slot: int, keys: Tensor) -> None:
        """Start a slot with these keys and values (layers, 2, G, T, D), visible to all its rows."""
        n = keys.shape[3]
        self.reserve(n)
        self.data[:, :, slot, :, :n] = keys
        self.visible[slot, :, :n] = 0.0
        self.visible[slot, :, n:] = -math.inf
        self.ends[slot] = n

    def move(self, slot: int, to: int) -> None:
        end = self.ends[slot]
        self._zero(to, end)
        self.data[:, :, to, :, :end] = self.data[:, :, slot, :, :end]
        self.visible[to], self.ends[to] = self.visible[slot], end

    def clear(self, slot: int) -> None:
        self._zero(slot, 0)
        self.visible[slot], self.ends[slot] = -math.inf, 0
        self.visible[slot, :, 0] = 0.0

    def compact(self, slot: int) -> None:
        """Drop the columns that no row sees."""
        end = self.ends[slot]
        used = (self.visible[slot, :, :end] == 0).any(0).nonzero()[:, 0]
        self.data[:, :, slot, :, : len(used)] = self.data[:, :, slot].index_select(3, used)
        self.visible[slot, :, : len(used)] = self.visible[slot].index_select(1, used)
        self.visible[slot, :, len(used) :] = -math.inf
        self._zero(slot, len(used))
        self.ends[slot] = len(used)

    def _zero(self, slot: int, first: int) -> None:
        """Forget the columns from ``first`` on: for a later text, a leftover NaN times weight 0 would be NaN."""
        self.data[:, :, slot, :, first : self.ends[slot]] = 0

    def reserve(self, n_columns: int) -> None:
        """Grow to at least ``n_columns`` columns."""
        old = self.data.shape[4]
        if n_columns <= old:
            return
        new = max(2 * old, padded_width(n_columns))
        self.data = torch.cat([self.data, self.data.new_zeros(*self.data.shape[:4], new - old, self.data.shape[5])], 4)
        hidden = self.visible.new_full((*self.visible.shape[:2], new - old), -math.inf)
        self.visible = torch.cat([self.visible, hidden], 2)

    def width(self, n_columns: int) -> int:
        """``n_columns`` padded to a width that attention computes with the same bits."""
        return min(padded_width(n_columns), self.data.shape[4])


class CpuSlots(SeparateSlots):
    """The slots of a batch on a CPU, decoded together by ``RowDecoder``, for which it implements ``RowKeys``."""

    mask: Tensor | None
    ragged = None

    def __init__(self, model: Model, size: int, max_slots: int) -> None:
        super().__init__(model, size, max_slots)
        shape, dtype = model.decoder_shape, next(model.parameters()).dtype
        n_slots = max(2, max_slots)  # a single row would be computed with other bits
        self.decoder = RowDecoder(model)
        self.keys = SlotColumns(shape, n_slots, size, dtype)
        self.sources = None if model.is_decoder_only else SlotColumns(shape, n_slots, 1, dtype)
        max_length = max_text_length(model.config, target=not model.is_decoder_only)
        self.position_table = self.decoder.position_table(max_length, dtype)
        self._positions, self._n_steps = [0] * n_slots, [0] * n_slots

    def decode(self, tokens: Tensor) -> Tensor:
        n, size = len(self.taken), self.size
        n_padded = 2 if n * size == 1 else n
        if n_padded > n:
            tokens = torch.cat([tokens, tokens])
        memory = self._begin_step(n_padded)
        positions = torch.tensor(self._positions[:n_padded]).repeat_interleave(size)
        logits = self.decoder.logits(tokens, positions, self.position_table, self, memory)
        for index in range(n):
            self.keys.ends[index] += size
            self._positions[index] += 1
            self._n_steps[index] += 1
            if size > 1 and self._n_steps[index] % _COMPACT_STEPS == 0:
                self.keys.compact(index)
        return logits[: n * size]

    def _begin_step(self, n: int) -> list[MemoryKeys]:
        """Reserve one column per row; returns the keys and values of the sources."""
        keys, size = self.keys, self.size
        keys.reserve(max(keys.ends[:n]) + size)
        columns = torch.tensor(keys.ends[:n])[:, None] + torch.arange(size)  # (n, size)
        keys.visible[:n].scatter_(2, columns[..., None], 0.0)
        width = keys.width(max(keys.ends[:n]) + size)
        n_kv_heads, d_head = keys.data.shape[3], keys.data.shape[5]
        self._columns = columns[None, :, None, :, None].expand(2, n, n_kv_heads, size, d_head)
        self._layers = keys.data[:, :, :n, :, :width]
        self.mask = keys.visible[:n, None, :, :width]
        if (sources := self.sources) is None:
            return []
        width = sources.width(max(sources.ends[:n]))
        mask = sources.visible[:n, None, :, :width]
        return [MemoryKeys(k, v, mask) for k, v in sources.data[:, :, :n, :, :width]]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's keys and values (n, 2G, size, D); returns all k and v of the layer, (n, G, columns, D)."""
        buffer = self._layers[layer]
        buffer.scatter_(3, self._columns, new.unflatten(1, (2, -1)).transpose(0, 1))
        k, v = buffer.unbind()
        return k, v

    def select_all(self, slots: list[Slot], parents: Tensor) -> None:
        index, visible = torch.tensor([slot.index for slot in slots]), self.keys.visible
        past = visible[index]  # (n, size, columns)
        visible[index] = past.gather(1, parents[..., None].expand_as(past))

    def _write(self, slot: Slot, reading: PromptReading) -> None:
        self.keys.write(slot.index, reading.keys())
        if self.sources is not None:
            self.sources.write(slot.index, reading.memory())
        self._positions[slot.index], self._n_steps[slot.index] = len(reading.row), 0

    def _move(self, slot: Slot, index: int) -> None:
        for columns in (self.keys, self.sources):
            if columns is not None:
                columns.move(slot.index, index)
        for numbers in (self._positions, self._n_steps):
            numbers[index] = numbers[slot.index]

    def _clear(self, slot: Slot, last: Slot) -> None:
        index = len(self.taken)  # the slot that is free now
        self._positions[index] = 0
        for columns in (self.keys, self.sources):
            if columns is not None:
                columns.clear(index)


class JoinedText(NamedTuple):
    """A text that has joined a batch, with what is known after its prompt."""

    keys: Tensor  # (layers, 2, G, T, D)
    memory: Tensor | None  # the keys and values of its source, (layers, 2, G, S, D)
    length: int  # of its prompt
    last: int  # the length at which its last token is decoded


class GraphSlots(SeparateSlots):
    """The slots of a batch, decoded by a captured step whose shape does not depend on which are taken; none moves.

    Texts can also be decoded in blocks of several steps, each choosing the token that the next one reads: the next
    block runs while the host handles the tokens of the previous one.
    """

    def __init__(self, model: Model, size: int, max_slots: int) -> None:
        super().__init__(model, size, max_slots)
        self._rules = GenerateConfig(logit_bias=forbidden_bias(model.config))
        self.has_blocks = size == 1 and can_choose_captured(self._rules, model.config.eos_id)
        self._decoder = GraphDecoder(model, slot_shape(model, size, max_slots))
        self._capture()  # before a text joins, because warm-up runs write keys
        state, keys = self._decoder.state, self._decoder.keys
        self._decoder.begin(state.lengths[:0], state.last[:0])
        keys.begin(state.lengths, model.decoder.position_bias)
        self._free = list(range(max_slots))[::-1]
        self._rows: Tensor | None = None  # rows of the taken slots, in their order; None: to be listed
        self._unset: list[Slot] = []  # slots whose next tokens are not on the device
        self._changed: dict[int, JoinedText | None] = {}  # by index, slots taken (the text) or left since the last step

    def _capture(self) -> None:
        decoder = self._decoder
        self._step = decoder.logit_step()
        if not self.has_blocks:
            return
        self._greedy_steps = decoder.token_steps(self._rules, self.model.config.eos_id)
        self._inverse = torch.zeros(decoder.shape.rows, device=decoder.device)  # 1 / temperature; 0: greedy
        self._mixed_steps = CapturedStep(self._choose_mixed, decoder.device, BLOCK_STEPS)

    def _choose_mixed(self) -> None:
        """One step in which some rows are greedy and others are sampled."""
        state, draws, logits = self._decoder.state, self._decoder.draws, self._decoder.logits().float()
        drawn = draw_tokens(self._filter(logits * self._inverse[:, None]), draws.gather(1, state.steps[:, None])[:, 0])
        state.advance()
        best = self._filter(logits).max(-1)
        state.append(torch.where(self._inverse > 0, drawn, best.indices), best.values)  # of log P, only NaN is read

    def _filter(self, logits: Tensor) -> Tensor:
        """Logits (R, V) without the tokens that the model forbids."""
        return filter_logits(logits, self._decoder.texts, 0, self._rules, self.model.config.eos_id)

    def join(self, reading: PromptReading) -> Slot:
        n, memory = len(reading.row), reading.memory() if self._decoder.keys.memory else None
        text = JoinedText(reading.keys(), memory, n, n + reading.limit - 1)  # if this raises, no slot is taken
        slot = Slot(self._free.pop(), self)
        self.taken.append(slot)
        self._unset.append(slot)
        self._changed[slot.index] = text
        self._rows = None
        return slot

    def leave(self, slot: Slot) -> None:
        self.taken.remove(slot)
        self._unset = [other for other in self._unset if other is not slot]
        self._free.append(slot.index)
        self._changed[slot.index] = None
        self._rows = None

    def decode(self, tokens: Tensor) -> Tensor:
        self._write_changes()
        if self._rows is None:
            rows = [slot.index * self.size + row for slot in self.taken for row in range(self.size)]
            self._rows = upload(rows, self._decoder.state.tokens)
        self._decoder.state.tokens[self._rows] = tokens
        self._unset = list(self.taken)
        logits = self._step()
        assert logits is not None
        return logits[self._rows].float()

    def start_block(self, draws: Mapping[Slot, BlockDraws]) -> TokenBlock | None:
        if not self.has_blocks or not self.taken:
            return None
        self._write_changes()
        state = self._decoder.state
        if self._unset:
            indices, next_tokens = zip(*((slot.index, slot.next_tokens[0]) for slot in self._unset), strict=True)
            rows, tokens = upload([indices, next_tokens], state.tokens)
            state.tokens[rows] = tokens
        self._unset = []
        state.steps.zero_()  # the tokens of a block are the first rows of the history
        if draws:
            self._set_draws(draws)
        (self._mixed_steps if draws else self._greedy_steps)()
        return TokenBlock(list(self.taken), copy_to_host((state.history[:BLOCK_STEPS], state.log_probs[:BLOCK_STEPS])))

    def _set_draws(self, draws: Mapping[Slot, BlockDraws]) -> None:
        temperatures, numbers = [math.inf] * self._decoder.shape.rows, list[list[float]]()
        for slot, (temperature, uniform) in draws.items():
            temperatures[slot.index] = temperature
            numbers.append([*uniform, *[0.0] * (BLOCK_STEPS - len(uniform))])
        rows = upload([slot.index for slot in draws], self._decoder.state.tokens)
        # The inverses that torch computes on a GPU to divide by a number: single steps draw the same tokens.
        self._inverse.copy_(upload(temperatures, self._inverse).reciprocal())
        self._decoder.draws[rows, :BLOCK_STEPS] = upload(numbers, self._decoder.draws)

    def select_all(self, slots: list[Slot], parents: Tensor) -> None:
        self._write_changes()
        keys = self._decoder.keys
        if keys.origin is None:
            return
        first = torch.tensor([slot.index * self.size for slot in slots], device=parents.device)[:, None]
        rows = (first + torch.arange(self.size, device=parents.device)).flatten()
        past = torch.arange(keys.max_len, device=parents.device) < self._decoder.state.lengths[rows, None]
        keys.origin[rows] = torch.where(past, keys.origin[(first + parents).flatten()], keys.row[rows, None])

    def _write_changes(self) -> None:
        """Write to the device the texts that have joined since the last step, and the lengths of slots that changed.

        Few operations, however many texts: in each of them another thread may take the interpreter from this one.
        """
        if not self._changed:
            return
        state, joined = self._decoder.state, {index: text for index, text in self._changed.items() if text is not None}
        bounds = [(0, 0) if text is None else (text.length, text.last) for text in self._changed.values()]
        index, lengths, last = upload([list(self._changed), *zip(*bounds, strict=True)], state.tokens)
        state.lengths.view(-1, self.size)[index] = lengths[:, None]
        state.last.view(-1, self.size)[index] = last[:, None]
        self._changed = {}
        for slot_index, text in joined.items():
            self._write_keys(slot_index, text)

    def _write_keys(self, index: int, text: JoinedText) -> None:
        keys, first, rows = self._decoder.keys, index * self.size, slice(index * self.size, (index + 1) * self.size)
        keys.data[:, :, rows].zero_()  # a leftover infinity times weight 0 would be NaN
        keys.data[:, :, first, :, : text.length] = text.keys
        if text.memory is not None:
            n_source = text.memory.shape[3]
            keys.memory_data[:, :, index, :, :n_source] = text.memory
            keys.source_lengths[index : index + 1] = n_source  # one element would wait for the device
        if keys.origin is not None:
            past = torch.arange(keys.max_len, device=keys.row.device) < text.length
            keys.origin[rows] = torch.where(past, first, keys.row[rows, None])


def slot_shape(model: Model, size: int, max_slots: int) -> GraphShape:
    """The shape of a step for texts and sources of any length that the model supports."""
    config = model.config
    n_source = 0
    if not model.is_decoder_only:
        n_source = (config.image_size // config.patch_size) ** 2 + 1 if config.source == "image" else config.max_len
    return GraphShape(max_slots, size, max_text_length(config, target=not model.is_decoder_only), n_source)


def open_slots(model: Model, size: int, max_slots: int) -> SeparateSlots:
    """The fastest slots that a model supports."""
    if row_step_obstacle(model) is None:
        return CpuSlots(model, size, max_slots)
    return (GraphSlots if can_capture_slots(model) else SeparateSlots)(model, size, max_slots)


def can_capture_slots(model: Model) -> bool:
    """Whether the step of ``GraphSlots``, which attends to all keys, can be captured for this model."""
    return can_capture(model) and all(window_of(model.config, n) is None for n in range(model.decoder.n_layers))
