"""Decoding with CUDA graphs: the decode step is captured once and replayed for every token.

A step of a small model is a hundred kernels of two microseconds each; launched one by one, they wait for Python.
Captured, several steps at a time, they run back to back: each step writes the chosen token where the next one reads
it, and the host sees one block later which texts have ended. On a CPU the same code runs without capture (tests).
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ..foundation.cancellation import check_cancelled
from ..models import Model
from ..models.components import window_of
from .cached_engine import CacheName, DecodingEngine, check_logits
from .decode_step import DecodeStep, Form, capture_obstacle
from .generation_config import GenerateConfig
from .prompts import Prompts, Sources, max_text_length
from .sampling import ChosenTokens, decode_loop, draw_tokens, filter_logits, token_log_probs, uniform_draws
from .step_keys import DecodeState, StepKeys
from .stop_conditions import GOING_ON, LENGTH, StopStrings, stop_codes

BLOCK_STEPS = 8  # steps captured together; the host reads the tokens of a block while the next one runs
_WARM_UPS = 3
_MAX_CAPTURES = 8  # captures of one decoder, one for each way to choose tokens
_LENGTH_MULTIPLE = 128  # cache lengths are multiples of this, so that texts of similar length share a capture
_SOURCE_MULTIPLE = 64  # the same for sources
_PROMPT_MULTIPLE = 64  # the same for prompts
_MAX_PROMPT_TOKENS = 16384  # in a captured prefill; larger ones are not bound by kernel launches
_MAX_DECODERS = 4  # decoders kept per model, each with its keys and values
_MAX_KEPT_BYTES = 8 << 30  # of all decoders of a model together

_capture_lock = threading.Lock()  # torch has one stream for the captures of all threads
_lock = threading.Lock()  # for the decoders of all models
Captured = TypeVar("Captured")


class CapturedStep:
    """A function without arguments as a CUDA graph over the tensors it reads and writes; ``out`` is its result.

    The function runs a few times before the capture, to load kernels and choose algorithms; the caller must reset what
    these runs write. A call runs it ``repeats`` times.
    """

    def __init__(self, run: Callable[[], Tensor | None], device: torch.device, repeats: int = 1) -> None:
        self.out: Tensor | None = None
        self._run: Callable[[], Any] = lambda: [run() for _ in range(repeats)][-1]
        if device.type != "cuda":
            return
        with _capture_lock, torch.cuda.device(device):
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    run()
            torch.cuda.current_stream().wait_stream(side)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self.out = self._run()
        self._run = graph.replay

    def __call__(self) -> Tensor | None:
        result = self._run()
        return result if self.out is None else self.out


class GraphShape(NamedTuple):
    """The sizes that a captured step is made for; its rows are prompts · copies."""

    prompts: int
    copies: int
    max_len: int  # positions of a text
    source_len: int = 0  # positions of the encoder's output; 0: no encoder

    @property
    def rows(self) -> int:
        return self.prompts * self.copies


class GraphDecoder:
    """A decode step of one shape with its keys, state and captures, which are reused.

    Steps are captured before ``begin``, because warm-up runs write tokens and keys. ``compile`` applies torch.compile
    to the step before it is captured; ``form`` and ``ops`` are those of DecodeStep.
    """

    def __init__(
        self, model: Model, shape: GraphShape, *, form: Form | None = None, ops: Any = None, compile: bool = False
    ) -> None:
        self.shape, self.device, rows = shape, model.device, shape.rows
        self.keys = StepKeys(model, rows, shape.max_len, shape.copies, shape.source_len)
        self.state = DecodeState.empty(rows, shape.max_len + BLOCK_STEPS + _WARM_UPS, model.device)
        self.step = DecodeStep(model, self.keys, self.state, form, ops)
        n_steps = len(self.state.history)
        # New tokens first, then the prompt: captured filters do not depend on the order.
        self.texts = torch.full((rows, n_steps + shape.max_len), -1, dtype=torch.int64, device=model.device)
        self.draws = torch.zeros(rows, n_steps, dtype=torch.float64, device=model.device)
        self.owner: weakref.ref[object] | None = None  # the engine that uses this decoder
        self.addresses = _parameter_addresses(model)
        self.logits: Callable[[], Tensor] = self.step.logits
        if compile:
            self.logits = torch.compile(self.step.logits, dynamic=False, fullgraph=True)
        self._captures: dict[Any, Any] = {}
        self._prompt_passes: dict[tuple[int, int], PromptPass | None] = {}
        self._prompt_shapes: Counter[tuple[int, int]] = Counter()

    @property
    def n_bytes(self) -> int:
        return self.keys.data.nbytes + self.keys.memory_data.nbytes

    def begin(self, lengths: Tensor, limit: Tensor) -> None:
        """The first n rows continue texts of ``lengths`` (n,) by at most ``limit`` (n,) tokens; others are unused."""
        state, n = self.state, len(lengths)
        for x in (state.lengths, state.last, state.steps):
            x.zero_()
        state.lengths[:n], state.last[:n] = lengths, lengths + limit - 1

    def prefill(self, prompts: list[list[int]], memory: Tensor | None, padding_mask: Tensor | None) -> Tensor:
        """``DecodeStep.prefill``, captured if there is no source and prompts of this number and length recur."""
        length = min(_round_up(max(map(len, prompts)), _PROMPT_MULTIPLE), self.shape.max_len)
        key = (len(prompts), length)
        self._prompt_shapes[key] += 1
        capture = self._prompt_shapes[key] > 1 and memory is None and len(prompts) * length <= _MAX_PROMPT_TOKENS
        if capture and key not in self._prompt_passes:
            while len(self._prompt_passes) >= _MAX_CAPTURES:
                self._prompt_passes.pop(next(iter(self._prompt_passes)))
            try:
                self._prompt_passes[key] = PromptPass(self.step, *key)
            except Exception:  # it cannot be captured: launch its kernels one by one
                self._prompt_passes[key] = None
        captured = self._prompt_passes.get(key) if capture else None
        return self.step.prefill(prompts, memory, padding_mask) if captured is None else captured(prompts)

    def logit_step(self) -> CapturedStep:
        """A step without the choice of tokens: reads ``state.tokens``, returns logits that the next call overwrites."""

        def run() -> Tensor:
            logits = self.logits()
            self.state.advance()
            return logits

        return self.capture("logits", lambda: CapturedStep(run, self.device))

    def token_steps(self, config: GenerateConfig, eos_id: int | None, repeats: int = BLOCK_STEPS) -> CapturedStep:
        """Steps that each choose the token that the next one reads."""

        def run() -> None:
            self.choose(self.logits(), config, eos_id, advance=True)

        sampling = (config.samples, config.temperature, config.top_k, config.top_p, config.min_p)
        filters = (config.repetition_penalty, tuple(sorted(config.logit_bias.items())), config.min_new_tokens)
        return self.capture((sampling, filters, eos_id, repeats), lambda: CapturedStep(run, self.device, repeats))

    def capture(self, key: Any, make: Callable[[], Captured]) -> Captured:
        """The capture kept under this key, or a new one from ``make``."""
        if key not in self._captures:
            while len(self._captures) >= _MAX_CAPTURES:
                self._captures.pop(next(iter(self._captures)))
            self.begin(torch.zeros_like(self.state.lengths), torch.ones_like(self.state.last))
            self._captures[key] = make()
        captured: Captured = self._captures[key]
        return captured

    def choose(self, logits: Tensor, config: GenerateConfig, eos_id: int | None, advance: bool) -> None:
        """Choose the next token of every row and append it; ``advance`` moves past the token that the step decoded."""
        state = self.state
        if not config.samples and not config.logit_bias and config.repetition_penalty == 1.0:
            self.step.ops.store_greedy_tokens(logits, *state, advance, eos_id, config.min_new_tokens)
            return
        logits = logits.float()
        scores = filter_logits(logits, self.texts, state.steps, config, eos_id)
        draws = self.draws.gather(1, state.steps[:, None])[:, 0]
        tokens = draw_tokens(scores, draws) if config.samples else scores.argmax(-1)
        if advance:
            state.advance()
        self.texts.scatter_(1, state.steps[:, None], tokens[:, None])
        state.append(tokens, token_log_probs(logits, tokens))


class PromptPass:
    """The captured prefill of ``n`` prompts of at most ``length`` tokens."""

    def __init__(self, step: DecodeStep, n: int, length: int) -> None:
        device = step.table.weight.device
        self._tokens = torch.zeros(n, length, dtype=torch.int64, device=device)
        self._lengths = torch.ones(n, dtype=torch.int64, device=device)
        self._pass = CapturedStep(lambda: step.read_prompts(self._tokens, self._lengths), device)

    def __call__(self, prompts: list[list[int]]) -> Tensor:
        """Next-token logits (n, V)."""
        length = self._tokens.shape[1]
        self._tokens.copy_(torch.tensor([row + [0] * (length - len(row)) for row in prompts]))
        self._lengths.copy_(torch.tensor([len(row) for row in prompts]))
        logits = self._pass()
        assert logits is not None
        return logits.clone()  # the next call overwrites it


def _parameter_addresses(model: Model) -> int:
    """A hash of the parameters' addresses, which a capture depends on."""
    return hash(tuple((p.data_ptr(), p.dtype) for p in model.parameters()))


_decoders: weakref.WeakKeyDictionary[Model, OrderedDict[GraphShape, GraphDecoder]] = weakref.WeakKeyDictionary()
_refused: weakref.WeakKeyDictionary[Model, str] = weakref.WeakKeyDictionary()  # models whose capture failed, and why


def graph_shape(model: Model, n_prompts: int, copies: int, min_len: int, source_len: int) -> GraphShape | None:
    """The shape for a number of prompts and positions, rounded up so that similar batches share a capture.

    None if a layer's window is smaller than ``min_len``, because a captured step attends to all keys.
    """
    target = not model.is_decoder_only
    windows = [size for n in range(model.decoder.n_layers) if (size := window_of(model.config, n)) is not None]
    max_len = _round_up(min_len, _LENGTH_MULTIPLE)
    max_len = min(max_len, max(max_text_length(model.config, target), min_len), *windows)
    if max_len < min_len:
        return None
    n_prompts = n_prompts if n_prompts <= 4 else _round_up(n_prompts, 8 if n_prompts <= 64 else 32)
    return GraphShape(n_prompts, copies, max_len, _round_up(source_len, _SOURCE_MULTIPLE))


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def graph_decoder_for(engine: CudaGraphEngine, shape: GraphShape) -> GraphDecoder:
    """A decoder of this shape: a kept one if the weights have not moved and no other engine uses it, else a new one."""
    model = engine.model
    with _lock:
        decoders = _decoders.setdefault(model, OrderedDict())
        decoder = decoders.pop(shape, None)
        owner = None if decoder is None or decoder.owner is None else decoder.owner()
        if decoder is None or decoder.addresses != _parameter_addresses(model) or owner not in (None, engine):
            while len(decoders) >= _MAX_DECODERS or sum(x.n_bytes for x in decoders.values()) > _MAX_KEPT_BYTES:
                decoders.popitem(last=False)
            decoder = GraphDecoder(model, shape)
        decoders[shape] = decoder
        decoder.owner = weakref.ref(engine)
    return decoder


def release_captures(model: Model) -> None:
    """Free a model's captures and their keys."""
    _decoders.pop(model, None)
    _refused.pop(model, None)


def can_capture(model: Model) -> bool:
    """Whether decoding this model is captured: on CUDA, with a supported step, and no recorder, edit or hook."""
    return model.device.type == "cuda" and model not in _refused and capture_obstacle(model) is None


class CudaGraphEngine(DecodingEngine):
    """An engine with captured steps, for every search; if they cannot be captured, it works like its base class.

    Prompts and sources go through the model once; captured steps then attend to their keys.
    """

    def __init__(self, model: Model, sources: Sources | None = None, cache: CacheName = "growing") -> None:
        super().__init__(model, sources, cache)
        self.decoder: GraphDecoder | None = None
        self._step: CapturedStep | None = None  # for ``decode_one_token``

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        started = self.begin(prompts, copies, lambda decoder: decoder.logit_step())
        if started is None:
            self._max_length = None
            return super().prefill(prompts, copies)
        self._step, logits = started
        return logits

    def begin(
        self, prompts: Prompts, copies: int, capture: Callable[[GraphDecoder], Captured]
    ) -> tuple[Captured, Tensor] | None:
        """Run the prompts. Returns the result of ``capture(decoder)`` and the logits (B · copies, V) after the prompts.

        None, with nothing run, if the capture fails.
        """
        captured = self._capture(prompts, copies, capture)
        if captured is None or self.decoder is None:
            return None
        decoder, self.static = self.decoder, True  # rows stay in place
        lengths = torch.tensor([len(row) for row in prompts.rows], device=decoder.device)
        decoder.begin(lengths.repeat_interleave(copies), prompts.limit.repeat_interleave(copies))
        decoder.keys.begin(decoder.state.lengths, self.model.decoder.position_bias)
        memory = None if self._memory is None else self._memory.states
        logits = check_logits(decoder.prefill(prompts.rows, memory, self._padding_mask))
        return captured, logits if copies == 1 else logits.repeat_interleave(copies, 0)

    def _capture(self, prompts: Prompts, copies: int, capture: Callable[[GraphDecoder], Captured]) -> Captured | None:
        source_len = 0 if self._memory is None else self._memory.states.shape[1]
        shape = graph_shape(self.model, len(prompts), copies, self._cache_length(prompts), source_len)
        if shape is None or self.model in _refused:
            return None
        try:
            self.decoder = graph_decoder_for(self, shape)
            return capture(self.decoder)
        except Exception as error:  # out of memory, an operation that cannot be captured, no compiler
            release_captures(self.model)
            self.decoder = None
            _refused[self.model] = f"{type(error).__name__}: {error}"
            warnings.warn(f"decoding continues without a CUDA graph: {_refused[self.model]:.300}", stacklevel=3)
            return None

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        if self.decoder is None or self._step is None:
            return super().decode_one_token(tokens)
        self.decoder.state.tokens[: len(tokens)] = tokens
        logits = self._step()
        assert logits is not None
        return logits[: len(tokens)].to(torch.float32, copy=True)

    def select(self, rows: Tensor) -> None:
        if self.decoder is None:
            return super().select(rows)
        state, n = self.decoder.state, len(rows)
        for x in (state.lengths, state.last):
            x[:n] = x.index_select(0, rows)
        self.decoder.keys.select(rows, state.lengths)

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("CudaGraphEngine decodes one token at a time; DecodingEngine can decode several")

    def truncate(self, length: int) -> None:
        raise NotImplementedError("CudaGraphEngine cannot truncate; DecodingEngine can")

    def blocks(self, prompts: Prompts, config: GenerateConfig) -> Iterator[tuple[Tensor, ...]] | None:
        """Tokens and log-probabilities (n, R) of the next n steps, on the host; None if that cannot be captured.

        The next block runs while one is read, so a few tokens too many are computed at the end.
        """
        eos_id, copies = self.model.config.eos_id, config.n_best
        if not can_choose_captured(config, eos_id):
            return None
        started = self.begin(prompts, copies, lambda decoder: decoder.token_steps(config, eos_id))
        if started is None or self.decoder is None:
            return None
        (steps, logits), decoder, n = started, self.decoder, len(prompts) * copies
        n_steps, texts = len(decoder.state.history), prompts.texts
        decoder.texts.fill_(-1)
        decoder.texts[:n, n_steps : n_steps + texts.shape[1]] = texts.repeat_interleave(copies, 0)
        if config.samples:
            draws = uniform_draws(config, prompts.limit, copies)[:, :n_steps]
            decoder.draws[:n, : draws.shape[1]] = draws.to(decoder.device)
        first = logits.new_zeros(decoder.shape.rows, logits.shape[1])
        first[:n] = logits
        decoder.choose(first, config, eos_id, advance=False)
        state = decoder.state
        return read_blocks(
            steps,
            lambda start, stop: (state.history[start:stop, :n], state.log_probs[start:stop, :n]),
            int(prompts.limit.max()),
        )


def can_choose_captured(config: GenerateConfig, eos_id: int | None) -> bool:
    """Whether captured steps can choose tokens: not if the choice depends on anything that only the host has."""
    return not (config.no_repeat_ngram or config.prefix or (config.logit_bias and eos_id is None))


def read_blocks(
    steps: CapturedStep, read: Callable[[int, int], tuple[Tensor, ...]], n_steps: int
) -> Iterator[tuple[Tensor, ...]]:
    """``read(start, stop)`` on the host, block by block up to ``n_steps``; step 0 has already run.

    Each iteration launches the next block before it waits for the previous one.
    """
    previous, done = copy_to_host(read(0, 1)), 1
    while done < n_steps:
        check_cancelled()
        steps()
        stop = min(done + BLOCK_STEPS, n_steps)
        block, done = copy_to_host(read(done, stop)), stop
        yield previous()
        previous = block
    yield previous()


def copy_to_host(tensors: tuple[Tensor, ...]) -> Callable[[], tuple[Tensor, ...]]:
    """Start to copy tensors to the host; returns a function that waits for the copies."""
    copies = tuple(x.to("cpu", non_blocking=True, copy=True) for x in tensors)
    event = torch.cuda.Event() if tensors[0].is_cuda else None
    if event is not None:
        event.record(torch.cuda.current_stream(tensors[0].device))

    def wait() -> tuple[Tensor, ...]:
        if event is not None:
            event.synchronize()
        return copies

    return wait


def graph_decode_loop(
    engine: DecodingEngine,
    prompts: Prompts,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None = None,
) -> Iterator[ChosenTokens]:
    """``decode_loop`` with captured steps, which run ahead while the host determines which texts have ended."""
    blocks = engine.blocks(prompts, config) if isinstance(engine, CudaGraphEngine) else None
    if blocks is None:
        yield from decode_loop(engine, prompts, config, eos_id, strings)
        return
    limit = prompts.limit.cpu().repeat_interleave(config.n_best)
    rows, step = torch.arange(len(limit)), 0
    done, some_done, shortest = torch.zeros_like(rows, dtype=torch.bool), False, int(limit.min())
    reads_text = bool(config.stop) or strings is not None
    texts = prompts.texts.cpu().repeat_interleave(config.n_best, 0)
    for block in blocks:
        # The codes of all steps at once, if possible, so that a fast GPU does not wait for the host.
        block_codes = None if reads_text else stop_codes(block[0], texts, step, config, eos_id, None)
        for number, (tokens, log_probs) in enumerate(zip(*block, strict=True)):
            step += 1
            if block_codes is None:
                codes = stop_codes(tokens, texts, step, config, eos_id, strings)
            else:
                codes = block_codes[number]
            if step >= shortest:
                codes = torch.where((codes == GOING_ON) & (step >= limit), LENGTH, codes)
            chosen = ChosenTokens(rows, tokens, log_probs, codes)
            yield ChosenTokens(*(x[~done] for x in chosen)) if some_done else chosen
            texts = torch.cat([texts, tokens[:, None]], 1) if reads_text else texts
            if step >= shortest or bool((codes != GOING_ON).any()):
                done, some_done = done | (codes != GOING_ON), True
                if done.all():
                    return
