"""Chunked prefill: prompts are read part by part, the parts of several prompts in one pass.

reading = PromptReading(model, inputs, config)       one prompt, or one source and the beginning of its target
PromptReader(model).read(readings)                   the next part of each; ``start`` does not wait for a GPU
reading.is_read, reading.logits                      next-token logits, once all parts are read
reading.log_probs                                    log P of the prompt itself, if requested

A prompt's numbers do not depend on the others in its pass. Parts begin at multiples of ``PROMPT_PART``. The tokens of
all parts are rows of the same products (``ragged_rows``): on a CPU, packed products compute a row with the same bits in
any batch; on a GPU there are always ``N_ROWS`` rows, so that the same kernels run. Sources other than text, and
prompts of models that cannot be computed in rows, are read one by one.
"""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..attention.cache import GrowingCache
from ..errors import first_line
from ..layers import Embeddings
from ..models import Model
from ..models.base_model import DecoderShape, join_padding
from .cached_engine import DecodingEngine, attention_obstacle, check_logits, plain_engine
from .captured_reading import N_ROWS, N_TEXTS, CapturedReading, write_memory
from .cpu_engine import MemoryKeys, RowDecoder, packed_weights, row_block_obstacle, row_layers, row_norm, row_obstacle
from .cuda_graph import can_capture
from .generation_config import GenerateConfig
from .prompts import ModelInputs, Prompts, check_prompts, max_text_length, pad_sources
from .ragged_rows import RaggedKeys, RaggedRows
from .sampling import LogProb, log_probs_of

PROMPT_PART = 128  # tokens per part
_PREFIX_BYTES = {"cpu": 256 << 20, "elsewhere": 2 << 30}

PartKey = tuple[int, tuple[int, ...]]  # the number of the part before it, and its tokens


class PrefixCache:
    """Keys and values of the leading parts of prompts; drops the least recently used prompts first, and the end of a
    prompt before its beginning.

    A part is identified by the number of the part before it and its own tokens, so that looking up a prompt takes time
    linear in its length. Its keys have the same bits whichever prompt it was read for, as parts begin at fixed
    positions.
    """

    def __init__(self, max_bytes: int) -> None:
        self._parts: OrderedDict[PartKey, tuple[int, Tensor]] = OrderedDict()
        self._numbers = count(1)  # numbers of parts; 0 is the beginning of a prompt
        self._max_bytes, self._n_bytes, self.n_tokens_found = max_bytes, 0, 0

    def find(self, tokens: list[int]) -> Tensor | None:
        """Keys (layers, 2, G, T, D) of the longest known prefix of ``tokens``, at most all but the last token."""
        used, number = list[PartKey](), 0
        for end in range(PROMPT_PART, len(tokens), PROMPT_PART):
            key = number, tuple(tokens[end - PROMPT_PART : end])
            if key not in self._parts:
                break
            used.append(key)
            number, _ = self._parts[key]
        self._mark_used(used)
        self.n_tokens_found += PROMPT_PART * len(used)
        return torch.cat([self._parts[key][1] for key in used], 3) if used else None

    def keep(self, tokens: list[int], keys: Tensor) -> None:
        """Store the whole parts of a prompt, given all its keys (layers, 2, G, T, D)."""
        used, number = list[PartKey](), 0
        for end in range(PROMPT_PART, len(tokens) + 1, PROMPT_PART):
            key = number, tuple(tokens[end - PROMPT_PART : end])
            if key not in self._parts:
                part = keys[:, :, :, end - PROMPT_PART : end].clone()
                self._parts[key] = next(self._numbers), part
                self._n_bytes += part.nbytes
            used.append(key)
            number, _ = self._parts[key]
        self._mark_used(used)
        while self._n_bytes > self._max_bytes:
            _, (_, dropped) = self._parts.popitem(last=False)
            self._n_bytes -= dropped.nbytes

    def _mark_used(self, keys: list[PartKey]) -> None:
        """Mark the parts of a prompt as just used, in reverse: a part can be found only if those before it are kept."""
        for key in reversed(keys):
            self._parts.move_to_end(key)


def new_prefix_cache(model: Model) -> PrefixCache | None:
    """A prefix cache; None for a model with an encoder, or with a layer whose cache is not simply all keys."""
    if not model.is_decoder_only or not model.decodes_by_token:
        return None
    if not all(isinstance(layer, GrowingCache) for layer in model.new_cache().layers):
        return None
    return PrefixCache(_PREFIX_BYTES.get(model.device.type, _PREFIX_BYTES["elsewhere"]))


class PromptReading:
    """One prompt, or one source and the beginning of its target, and how much of it has been read.

    If the model is computed in rows, the keys so far are kept here; otherwise in the cache of an engine. With ``n_top``
    log P of each token, and of the ``n_top`` likeliest in its place, is kept, and a known prefix is read again.
    """

    def __init__(
        self,
        model: Model,
        inputs: ModelInputs,
        config: GenerateConfig,
        prefixes: PrefixCache | None = None,
        *,
        n_top: int | None = None,
        writes: bool = True,
    ) -> None:
        name = "prompt" if inputs.sources is None else "target"
        self.inputs, (self.row,) = inputs, check_prompts(inputs.rows, model.config, config, name, room=int(writes))
        most = max_text_length(model.config, target=name == "target") - len(self.row)
        self.limit = min(config.max_new_tokens, most) if writes else 0  # maximum of new tokens
        self.n_top, self.log_probs = n_top, [LogProb()]  # nothing precedes the first token
        self.n_source = 0 if inputs.sources is None else len(inputs.sources[0])
        self.n_read = 0
        self.logits: Tensor | None = None  # (1, V) after the prompt, once it is read
        self.likeliest = 0  # argmax of the logits
        self._model, self._prefixes = model, prefixes
        self._engine: DecodingEngine | None = None
        self._keys: Tensor | None = None
        self._memory: Tensor | None = None

    @cached_property
    def prompts(self) -> Prompts:
        """The prompt as a batch of one. Readings are made in request threads, which would wait here for a busy GPU."""
        tokens, limit = (torch.tensor(x, device=self._model.device) for x in ([self.row], [self.limit]))
        return Prompts([self.row], tokens, None, limit)

    @property
    def is_read(self) -> bool:
        return self.logits is not None

    @property
    def n_next_tokens(self) -> int:
        """Tokens of the next part, including those of the source."""
        return len(self.next_part()) + self.n_source

    def next_part(self) -> list[int]:
        """The tokens to read next: a part of a prompt, or the whole beginning of a target, which is short."""
        end = len(self.row) if self._prefixes is None else self.n_read + PROMPT_PART
        return self.row[self.n_read : end]

    def find_prefix(self) -> Tensor | None:
        """The keys read so far; before the first part, those of a known prefix. None if there are none."""
        if self.n_read == 0 and self._prefixes is not None and self.n_top is None:
            self._keys = self._prefixes.find(self.row)
            self.n_read = 0 if self._keys is None else self._keys.shape[3]
        return self._keys

    def score_part(self, states: Tensor, logits_of: Callable[[Tensor], Tensor], min_rows: int) -> list[LogProb]:
        """log P of the tokens after each of the next part's, if requested, from its states (T, M).

        A few rows at a time, at least ``min_rows``: logits of all tokens together would take too much memory.
        """
        log_probs: list[LogProb] = []
        if self.n_top is None:
            return log_probs
        if len(states) < len(self.next_part()):
            raise ValueError("an ONNX graph returns no logits inside of a prompt: use --engine torch for them")
        tokens = torch.tensor(self.row[self.n_read + 1 : self.n_read + 1 + len(states)], device=states.device)
        for part, following in zip(states[: len(tokens)].split(N_TEXTS), tokens.split(N_TEXTS), strict=True):
            rows = torch.nn.functional.pad(part, (0, 0, 0, max(0, min_rows - len(part))))
            logits = check_logits(logits_of(rows).float()[: len(part)])
            log_probs += log_probs_of(logits, following, self.n_top)
        return log_probs

    def add_part(self, keys: Tensor, memory: Tensor | None, logits: Tensor, likeliest: int) -> None:
        """Record the result of a part: all keys so far, those of the source, and next-token logits (1, V)."""
        self.n_read, self._memory = keys.shape[3], memory
        if self.n_read < len(self.row):
            self._keys = keys.clone()  # a view would keep the keys of all prompts of the pass
            return
        self._keys, self.logits, self.likeliest = keys, logits, likeliest
        if self._prefixes is not None:
            self._prefixes.keep(self.row, keys)

    def read_alone(self) -> None:
        """Read the next part, after the source if it is the first, with an engine of its own."""
        if self._engine is None:
            sources = None if self.inputs.sources is None else pad_sources(self.inputs.sources, self._model)
            self._engine = plain_engine(self._model, sources)
            if (prefix := self.find_prefix()) is not None:
                for layer, (k, v) in zip(self._engine._cache.layers, prefix, strict=True):
                    layer.update(k[None], v[None])
        part, engine = self.next_part(), self._engine
        states = engine.prefill_part(self.prompts.tokens[:, self.n_read : self.n_read + len(part)])
        logits = check_logits(engine.logits_of(states[:, -1:])[:, 0])
        self.log_probs += self.score_part(states[0], lambda rows: engine.logits_of(rows[None])[0], 1)
        self.n_read += len(part)
        if self.n_read == len(self.row):
            self.logits, self.likeliest = logits, int(logits.argmax())
            if self._prefixes is not None:
                self._prefixes.keep(self.row, self.keys())

    @property
    def engine(self) -> DecodingEngine:
        """The engine of a prompt that was read by ``read_alone``."""
        if self._engine is None or self.logits is None:
            raise ValueError("the prompt has not been read yet")
        return self._engine

    def release(self) -> None:
        """Drop keys and logits, which the slots have copied."""
        self._engine = self._keys = self._memory = self.logits = None

    def keys(self) -> Tensor:
        """The keys and values of the prompt, (layers, 2, G, T, D)."""
        if self._keys is not None and self._engine is None:
            return self._keys
        layers = [layer for layer in self.engine._cache.layers if isinstance(layer, GrowingCache)]
        return torch.stack([torch.cat(layer.keys_and_values()) for layer in layers])

    def memory(self) -> Tensor:
        """The keys and values of the source, (layers, 2, G, S, D)."""
        if self._memory is not None:
            return self._memory
        return torch.stack([torch.cat(layer.update()) for layer in self.engine._cache.cross])


class PromptReader:
    """Reads the prompts of one model: its decoder, and its encoder if it has one, as functions of rows."""

    def __init__(self, model: Model) -> None:
        self.model, self.in_rows = model, _can_read_rows(model)
        is_cpu = model.device.type == "cpu"
        self._min_rows, self._min_prompts = (2, 2) if is_cpu else (N_ROWS, N_TEXTS)
        self._max_rows = sys.maxsize if is_cpu else N_ROWS
        if not self.in_rows:
            return
        self._decoder, self._shape = RowDecoder(model), model.decoder_shape
        self._dtype = next(model.parameters()).dtype
        max_length = max_text_length(model.config, target=not model.is_decoder_only)
        self._position_table = self._decoder.position_table(max_length, self._dtype)
        self._encoder = RowEncoder(model) if not model.is_decoder_only and _can_encode_rows(model) else None
        self.captures = can_capture(model) and (model.is_decoder_only or self._encoder is not None)

    @cached_property
    def _captured_pass(self) -> CapturedReading | None:
        """The captured pass; None where it cannot be captured."""
        if not self.captures:
            return None
        try:
            return CapturedReading(self._decoder, self._encoder, self._position_table, self._shape, self._dtype)
        except Exception as error:  # out of memory, or an operation that cannot be captured
            warnings.warn(f"prompts are read without a CUDA graph: {first_line(error)[:300]}", stacklevel=2)
            return None

    def read(self, readings: Sequence[PromptReading]) -> dict[PromptReading, Exception]:
        """Read the next part of each; returns the exceptions, by reading."""
        return self.start(readings)()

    def start(self, readings: Sequence[PromptReading]) -> Callable[[], dict[PromptReading, Exception]]:
        """Start to read the next part of each; returns a function that waits, and returns the exceptions by reading.

        In between, captured passes run on the device. Other passes are over when this returns.
        """
        passes = [(group, self._read_pass(group)) for group in self._passes(readings)]
        errors: dict[PromptReading, Exception] = {}

        def advance() -> dict[PromptReading, Exception]:
            for group, steps in passes:
                try:
                    next(steps, None)
                except Exception as error:
                    if len(group) == 1:
                        errors[group[0]] = error
                    else:  # out of memory or NaN logits, say: some may succeed one by one
                        for reading in group:
                            errors.update(self.read([reading]))
            return errors

        advance()
        return advance

    def _passes(self, readings: Sequence[PromptReading]) -> list[list[PromptReading]]:
        """Group readings into passes: all together up to the limits of a pass, or one by one without rows."""
        passes, n_tokens = list[list[PromptReading]](), 0
        for reading in readings:
            n_tokens += reading.n_next_tokens
            is_full = n_tokens > self._max_rows or len(passes[-1]) == N_TEXTS if passes else True
            if is_full or not self.in_rows:
                passes.append([])
                n_tokens = reading.n_next_tokens
            passes[-1].append(reading)
        return passes

    def _read_pass(self, readings: Sequence[PromptReading]) -> Iterator[None]:
        """Read the next part of each in one pass; yields while a captured pass runs."""
        if not self.in_rows:
            readings[0].read_alone()
            return
        pasts = [reading.find_prefix() for reading in readings]
        parts = [reading.next_part() for reading in readings]
        sources = [reading.inputs.sources[0] for reading in readings if reading.inputs.sources is not None]
        is_fresh = all(past is None for past in pasts) and all(source.dim() == 1 for source in sources)
        is_fresh = is_fresh and all(reading.n_top is None for reading in readings)  # a captured pass keeps no states
        fits = is_fresh and CapturedReading.fits(parts) and CapturedReading.fits(sources)
        if fits and self._captured_pass is not None:
            wait = self._captured_pass.start(parts, [source.tolist() for source in sources])
            yield
            for reading, result in zip(readings, wait(), strict=True):
                reading.add_part(*result)
            return
        self._read_rows_uncaptured(readings, parts, pasts)

    def _read_rows_uncaptured(
        self, readings: Sequence[PromptReading], parts: list[list[int]], pasts: list[Tensor | None]
    ) -> None:
        rows = self._new_rows([len(part) for part in parts])
        keys = RaggedKeys(self._shape, rows, pasts, self._dtype, causal=True)
        sources = None if self.model.is_decoder_only else self._read_sources(readings)
        memory = [] if sources is None else [MemoryKeys(k, v, sources.mask[:, :, :1]) for k, v in sources.data]
        positions = rows.extend(keys.positions[:, None])[:, 0]
        states = self._decoder.states(rows.fill(parts), positions, self._position_table, keys, memory)
        last = torch.nn.functional.pad(rows.last, (0, max(0, self._min_prompts - len(parts))))
        logits = self._decoder.output(states[last]).float()[: len(parts)]
        likeliest = check_logits(logits).argmax(-1).tolist()
        log_probs = [
            reading.score_part(part, self._decoder.output, self._min_prompts)
            for reading, part in zip(readings, states[: rows.n_tokens].split(rows.lengths), strict=True)
        ]
        for number, reading in enumerate(readings):
            reading.log_probs += log_probs[number]
            source_keys = None if sources is None else sources.of_text(number)
            reading.add_part(keys.of_text(number), source_keys, logits[number : number + 1], likeliest[number])

    def _read_sources(self, readings: Sequence[PromptReading]) -> RaggedKeys:
        """The keys and values of the encoder's output in every layer of the decoder."""
        items = [reading.inputs.sources[0] for reading in readings if reading.inputs.sources is not None]
        if self._encoder is not None and all(item.dim() == 1 for item in items):
            rows = self._new_rows([len(item) for item in items])
            states = self._encoder.states(rows, [item.tolist() for item in items])
        else:
            encoded = [_encode(self.model, item) for item in items]
            rows = self._new_rows([len(x) for x in encoded])
            states = rows.extend(torch.cat(encoded))
        sources = RaggedKeys(self._shape, rows, [None] * len(items), self._dtype, causal=False)
        write_memory(self._decoder, sources, states)
        return sources

    def _new_rows(self, lengths: list[int]) -> RaggedRows:
        """On a GPU, one shape for all passes; a longer source has a pass of its own, with a multiple of the rows."""
        n = sum(lengths)
        n_rows = self._min_rows if n <= self._max_rows else -(-n // self._min_rows) * self._min_rows
        return RaggedRows(lengths, self.model.device, n_rows)


class RowEncoder:
    """A text encoder as a function of rows."""

    def __init__(self, model: Any) -> None:
        self.table, self.embeddings = model.token, model.embeddings
        self.layers = row_layers(model.encoder, packed_weights(model))
        self.norm = None if model.encoder.norm is None else row_norm(model.encoder.norm)
        attention = self.layers[0].attention.module
        self.shape = DecoderShape(1, attention.n_heads, attention.n_kv_heads, attention.d_head)  # layers take turns
        self._dtype = next(model.parameters()).dtype

    def states(self, rows: RaggedRows, sources: Sequence[Sequence[int]]) -> Tensor:
        """The states (R, M) of all tokens of the sources."""
        keys = RaggedKeys(self.shape, rows, [None] * len(sources), self._dtype, causal=False)
        return self.states_of_tokens(rows.fill(sources), rows.extend(rows.index[:, None])[:, 0], keys)

    def states_of_tokens(self, tokens: Tensor, positions: Tensor, keys: RaggedKeys) -> Tensor:
        """The states (R, M) of ``tokens`` (R,) at ``positions`` (R,) of the texts of ``keys``."""
        x: Tensor = self.embeddings(self.table(tokens[None]), positions[None])[0]
        for layer in self.layers:
            x = layer(x, 0, keys, positions, [])
        return x if self.norm is None else self.norm(x)


def _encode(model: Model, source: Tensor) -> Tensor:
    """The encoder's output (S, M) of one source, without padding."""
    sources = pad_sources([source], model)
    states = model.encode(sources.values, padding_mask=sources.padding_mask).states[0]
    return states if sources.padding_mask is None else states[join_padding(sources.padding_mask).bool()[0]]


def _can_read_rows(model: Model) -> bool:
    """Whether the decoder can be computed in rows; a CPU also needs packed products, which keep rows independent."""
    with torch.no_grad():
        if row_obstacle(model) is not None:
            return False
    return can_capture(model) if model.device.type != "cpu" else packed_weights(model) is not None


def _can_encode_rows(model: Any) -> bool:
    """Whether the encoder can be computed in rows: plain attention over text, nothing between it and the decoder."""
    config, stack = model.config, model.encoder
    if config.source != "text" or config.positions_skip_padding or model.resampler is not None:
        return False
    if type(model.embeddings) is not Embeddings or model.embeddings.projection is not None:
        return False
    if stack.position_bias is not None or row_block_obstacle(stack) is not None:
        return False
    return all(attention_obstacle(block.attention) is None for block in stack.blocks)
