"""Decoding with CUDA graphs: the decode step is captured once and replayed for every token.

A step of a small model is a hundred launches of two microseconds each; launched one by one they wait for Python.
Captured, they run back to back, the chosen token is written where the next step reads it, and the host reads the tokens
only every few steps to see which texts have ended. On a CPU the same code runs without capture, for tests.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..attention.cache import StaticCache
from ..models import Model
from ..models.components import window_of
from .cached_engine import DecodingEngine, check_logits
from .decode_step import DecodeState, DecodeStep, Form, capture_obstacle
from .generation_config import GenerateConfig
from .prompts import Prompts, max_text_length
from .sampling import ChosenTokens, decode_loop, draw_tokens, filter_logits, token_log_probs, uniform_draws
from .stop_conditions import GOING_ON, LENGTH, StopStrings, stop_codes

_WARM_UPS = 3
_MAX_CAPTURES = 8  # captures of one step, each with its own way to choose tokens
_LENGTH_MULTIPLE = 128  # cache lengths are multiples of this, so that texts of similar length share a capture
_MAX_DECODERS = 2  # kept for a model, each with its cache
_AHEAD = 32  # tokens between two reads by the host


class CapturedStep:
    """A function without arguments as a CUDA graph over the tensors it reads and writes; ``out`` is its result.

    It runs a few times before the capture, to load kernels and choose algorithms; the caller discards what that writes.
    """

    def __init__(self, run: Callable[[], Tensor | None], device: torch.device) -> None:
        self.out: Tensor | None = None
        if device.type != "cuda":
            self._run: Callable[[], Any] = run
            return
        with torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.out = run()
        self._run = graph.replay

    def __call__(self) -> Tensor | None:
        result = self._run()
        return result if self.out is None else self.out


class GraphDecoder:
    """A decode step for a number of rows and a cache length: its cache, state and captures, which are reused.

    ``compile`` applies torch.compile to the step before it is captured; ``form`` and ``ops`` are those of DecodeStep.
    """

    def __init__(
        self, model: Model, rows: int, max_len: int, *, form: Form | None = None, ops: Any = None, compile: bool = False
    ) -> None:
        self.rows, self.max_len, self.device = rows, max_len, model.device
        self.cache = model.new_cache(rows, max_len)
        self.state = DecodeState.empty(rows, max_len + _WARM_UPS + 1, model.device)
        self.step = DecodeStep(model, self.cache, self.state, form, ops)
        n_steps = len(self.state.history)
        # New tokens first, then the prompt: the filters that are captured do not depend on the order.
        self.texts = torch.full((rows, n_steps + max_len), -1, dtype=torch.int64, device=model.device)
        self.draws = torch.zeros(rows, n_steps, dtype=torch.float64, device=model.device)
        self.owner: weakref.ref[object] | None = None  # the engine that uses it
        self.addresses = _parameter_addresses(model)
        self._logits: Callable[[], Tensor] = self.step.logits
        if compile:
            self._logits = torch.compile(self.step.logits, dynamic=False, fullgraph=True)
        self._captures: dict[Any, CapturedStep] = {}

    def logits(self) -> CapturedStep:
        """The step alone: reads ``state.tokens`` and returns logits, which the next call overwrites."""

        def run() -> Tensor:
            logits = self._logits()
            self.state.advance()
            return logits

        return self._capture("logits", run)

    def chooser(self, config: GenerateConfig, eos_id: int | None) -> CapturedStep:
        """The step and the choice of the next token, which the next step reads."""

        def run() -> None:
            self.choose(self._logits(), config, eos_id, advance=True)

        drawing = (config.samples, config.temperature, config.top_k, config.top_p, config.min_p)
        filters = (config.repetition_penalty, tuple(sorted(config.logit_bias.items())))
        return self._capture((drawing, filters, eos_id), run)

    def _capture(self, key: Any, run: Callable[[], Tensor | None]) -> CapturedStep:
        if key not in self._captures:
            while len(self._captures) >= _MAX_CAPTURES:
                self._captures.pop(next(iter(self._captures)))
            # Warming up chooses tokens and writes their keys at the first position, which is undone afterwards.
            touched = [*self.state, *(x[:, :, :1] for pair in self.step.cache for x in pair)]
            before = [x.clone() for x in touched]
            self.state.begin(torch.zeros_like(self.state.lengths), torch.zeros_like(self.state.last))
            try:
                self._captures[key] = CapturedStep(run, self.device)
            finally:
                for x, old in zip(touched, before, strict=True):
                    x.copy_(old)
        return self._captures[key]

    def choose(self, logits: Tensor, config: GenerateConfig, eos_id: int | None, advance: bool) -> None:
        """Choose the next token of every row and append it; ``advance`` moves past the token that the step read."""
        state = self.state
        if not config.samples and not config.logit_bias and config.repetition_penalty == 1.0:
            self.step.ops.store_greedy_tokens(logits, *state, advance)
            return
        logits = logits.float()
        scores = filter_logits(logits, self.texts, 0, config, eos_id)
        draws = self.draws.gather(1, state.steps[:, None])[:, 0]
        tokens = draw_tokens(scores, draws) if config.samples else scores.argmax(-1)
        if advance:
            state.advance()
        self.texts.scatter_(1, state.steps[:, None], tokens[:, None])
        state.append(tokens, token_log_probs(logits, tokens))


def _parameter_addresses(model: Model) -> int:
    """A hash of where the parameters lie, by which a capture reads them."""
    return hash(tuple((p.data_ptr(), p.dtype) for p in model.parameters()))


_decoders: weakref.WeakKeyDictionary[Model, OrderedDict[tuple[int, int], GraphDecoder]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_refused: weakref.WeakKeyDictionary[Model, str] = weakref.WeakKeyDictionary()


def graph_decoder_for(engine: CudaGraphEngine, rows: int, min_len: int) -> GraphDecoder | None:
    """A decoder with a cache of at least ``min_len``: an earlier one, if the weights have not moved and it is unused.

    None where a layer's window is smaller than that, because ring caches are not captured.
    """
    model = engine.model
    windows = [size for n in range(model.config.n_layers) if (size := window_of(model.config, n)) is not None]
    max_len = -(-min_len // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
    max_len = min(max_len, max(max_text_length(model.config), min_len), *windows)
    if max_len < min_len:
        return None
    with _lock:
        decoders = _decoders.setdefault(model, OrderedDict())
        decoder = decoders.pop((rows, max_len), None)
        owner = None if decoder is None or decoder.owner is None else decoder.owner()
        if decoder is None or decoder.addresses != _parameter_addresses(model) or owner not in (None, engine):
            while len(decoders) >= _MAX_DECODERS:
                decoders.popitem(last=False)
            decoder = GraphDecoder(model, rows, max_len)
        decoders[rows, max_len] = decoder
        decoder.owner = weakref.ref(engine)
    return decoder


def release_captures(model: Model) -> None:
    """Free a model's captures and their caches."""
    _decoders.pop(model, None)
    _refused.pop(model, None)


def can_capture(model: Model) -> bool:
    """Whether decoding this model is captured: on CUDA, with a supported step, and no recorder, edit or hook."""
    return model.device.type == "cuda" and model not in _refused and capture_obstacle(model) is None


class CudaGraphEngine(DecodingEngine):
    """A decoder-only model with captured steps, for every search that uses ``decode_one_token``."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, cache="static")
        self.decoder: GraphDecoder | None = None
        self._cache_is_behind = False  # whether captured steps wrote tokens that the cache has not counted

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        try:
            self.decoder = graph_decoder_for(self, len(prompts) * copies, self._cache_length(prompts))
        except Exception as error:  # no memory: decode without a graph
            self._disable_capture(error)
        if self.decoder is None:
            return super().prefill(prompts, copies)
        rows = torch.arange(len(prompts), device=prompts.tokens.device).repeat_interleave(copies)
        self._cache, self._cache_is_behind = self.decoder.cache, False
        self._cache.reset()
        positions = None if prompts.positions is None else prompts.positions[rows]
        logits = check_logits(self._logits(self._states(prompts.tokens[rows], positions)))
        lengths = torch.tensor([len(row) for row in prompts.rows], device=self.decoder.device)
        self.decoder.state.begin(lengths[rows], (lengths + prompts.limit)[rows] - 1)
        return logits

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        step = self._captured_step(lambda decoder: decoder.logits())
        if self.decoder is None or step is None:
            return super().decode_one_token(tokens)
        self.decoder.state.tokens.copy_(tokens)
        self._cache_is_behind = True
        logits = step()
        assert logits is not None
        return logits.to(torch.float32, copy=True)

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        self._update_cache()
        logits = super().decode_tokens(tokens)
        self._update_state()
        return logits

    def truncate(self, length: int) -> None:
        self._update_cache()
        super().truncate(length)
        self._update_state()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.decoder is not None:
            for x in (self.decoder.state.lengths, self.decoder.state.last):
                x.copy_(x.index_select(0, rows))

    def blocks(
        self, prompts: Prompts, copies: int, config: GenerateConfig, ahead: int
    ) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Tokens and log-probabilities (n, R) of the next n steps, on the host; None where that cannot be captured.

        While one block is read the next one is computed, so that a few tokens too many are chosen.
        """
        eos_id = self.model.config.eos_id
        by_step = config.no_repeat_ngram or config.prefix or config.min_new_tokens  # depends on the token's number
        if config.beam > 1 or by_step or (config.logit_bias and eos_id is None):
            return None
        logits = self.prefill(prompts, copies)
        step = self._captured_step(lambda decoder: decoder.chooser(config, eos_id))
        if self.decoder is None or step is None:
            return None
        decoder, n_steps, texts = self.decoder, len(self.decoder.state.history), prompts.texts
        decoder.texts.fill_(-1)
        decoder.texts[:, n_steps : n_steps + texts.shape[1]] = texts.repeat_interleave(copies, 0)
        if config.samples:
            draws = uniform_draws(config, len(prompts), copies)[:, :n_steps]
            decoder.draws[:, : draws.shape[1]].copy_(draws)
        decoder.choose(logits, config, eos_id, advance=False)
        self._cache_is_behind = True
        return _read_blocks(step, decoder.state, int(prompts.limit.max()), ahead)

    def _captured_step(self, capture: Callable[[GraphDecoder], CapturedStep]) -> CapturedStep | None:
        if self.decoder is None:
            return None
        try:
            return capture(self.decoder)
        except Exception as error:  # a library that cannot be captured, no compiler: decode without a graph
            self._update_cache()
            self._disable_capture(error)
            return None

    def _disable_capture(self, error: Exception) -> None:
        release_captures(self.model)
        self.decoder = None
        _refused[self.model] = f"{type(error).__name__}: {error}"
        warnings.warn(f"decoding goes on without a CUDA graph: {_refused[self.model]:.300}", stacklevel=3)

    def _update_cache(self) -> None:
        """Count the tokens that captured steps wrote into the cache."""
        if self.decoder is None or not self._cache_is_behind:
            return
        lengths, self._cache_is_behind = self.decoder.state.lengths, False
        for layer in self._cache.layers:
            assert isinstance(layer, StaticCache)
            if len(layer.lengths) < len(lengths):
                layer._split_rows()
            layer._lengths.copy_(lengths)
            slots = torch.arange(layer.max_len + 1, device=lengths.device)
            layer._slots.pos.copy_(torch.where(slots < lengths[:, None], slots, -1))
            layer._count = None

    def _update_state(self) -> None:
        if self.decoder is not None:
            self.decoder.state.lengths.copy_(torch.minimum(self._cache.lengths, self.decoder.state.last))


def _read_blocks(step: CapturedStep, state: DecodeState, n_steps: int, ahead: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first token is chosen already; each turn launches the next steps before it waits for the previous ones."""
    read, done = _copy_to_host(state, 0, 1), 1
    while done < n_steps:
        n = min(ahead, n_steps - done)
        for _ in range(n):
            step()
        read_previous, read = read, _copy_to_host(state, done, done + n)
        done += n
        yield read_previous()
    yield read()


def _copy_to_host(state: DecodeState, start: int, stop: int) -> Callable[[], tuple[Tensor, Tensor]]:
    """Start to copy some steps of the history to the host; what is returned waits for the copy."""
    tokens, log_probs = (
        x[start:stop].to("cpu", non_blocking=True, copy=True) for x in (state.history, state.log_probs)
    )
    event = torch.cuda.Event() if state.history.is_cuda else None
    if event is not None:
        event.record()

    def read() -> tuple[Tensor, Tensor]:
        if event is not None:
            event.synchronize()
        return tokens, log_probs

    return read


def graph_decode_loop(
    engine: DecodingEngine,
    prompts: Prompts,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None = None,
    ahead: int = _AHEAD,
) -> Iterator[ChosenTokens]:
    """The steps of ``decode_loop``; captured steps run ahead, and here it is decided which texts have ended."""
    copies = config.n_best
    blocks = engine.blocks(prompts, copies, config, ahead) if isinstance(engine, CudaGraphEngine) else None
    if blocks is None:
        yield from decode_loop(engine, prompts, config, eos_id, strings)
        return
    limit = prompts.limit.cpu().repeat_interleave(copies)
    rows, step = torch.arange(len(limit)), 0
    done = torch.zeros_like(rows, dtype=torch.bool)
    reads_text = bool(config.stop) or strings is not None
    texts = prompts.texts.cpu().repeat_interleave(copies, 0)
    for block in blocks:
        for tokens, log_probs in zip(*block, strict=True):
            step += 1
            codes = stop_codes(tokens, texts, step, config, eos_id, strings)
            codes = torch.where((codes == GOING_ON) & (step >= limit), LENGTH, codes)
            yield ChosenTokens(*(x[~done] for x in (rows, tokens, log_probs, codes)))
            texts = torch.cat([texts, tokens[:, None]], 1) if reads_text else texts
            done = done | (codes != GOING_ON)
            if done.all():
                return
