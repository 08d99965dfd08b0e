"""A step captured once and replayed for every token, and what it needs to stay where it is between two of them."""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import taps
from ..attention.cache import StaticCache
from ..attention.edits import has_edits
from ..models import Decoder, Model
from ..models.parts import window_of
from .cached_engine import DecoderEngine, DecodingEngine
from .decode_step import DecodeState, DecodeStep, Form, capture_obstacle, log_prob_of
from .generation_config import GenerateConfig
from .prompts import Prompts, max_text_length
from .sampling import ChosenTokens, decode_loop, draw_tokens, filter_logits, uniform_draws
from .stop_conditions import GOING_ON, LENGTH, StopStrings, stop_codes

_WARM_UPS = 3
_MAX_CAPTURES = 8  # captures of one step, each for its own way to choose


class CapturedStep:
    """A function without arguments, captured with the tensors it reads and writes; ``out`` is what it returned.

    Calling it repeats the work and not the function. It runs a few times first, which loads kernels and picks
    algorithms: what it writes then has to be meaningless.
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
        made = self._run()
        return made if self.out is None else self.out


class GraphDecoder:
    """A decoder's step for a number of rows and places: its cache, its state, and its captures, used again and again.

    ``compile`` hands the step to torch.compile before it is captured; ``form`` and ``parts`` are OneToken's.
    """

    def __init__(
        self,
        model: Decoder,
        rows: int,
        places: int,
        *,
        form: Form | None = None,
        parts: Any = None,
        compile: bool = False,
    ) -> None:
        self.rows, self.places, self.device = rows, places, model.device
        self.cache = model.new_cache(rows, places)
        self.state = DecodeState.empty(rows, places + _WARM_UPS + 1, model.device)
        self.step = DecodeStep(model, self.cache, self.state, form, parts)
        n_steps = len(self.state.history)
        # New tokens first, then the prompt: filters ask which tokens were there, not in which order.
        self.texts = torch.full((rows, n_steps + places), -1, dtype=torch.int64, device=model.device)
        self.chance = torch.zeros(rows, n_steps, dtype=torch.float64, device=model.device)
        self.owner: weakref.ref[object] | None = None
        self._logits: Callable[[], Tensor] = self.step.logits
        if compile:
            self._logits = torch.compile(self.step.logits, dynamic=False, fullgraph=True)
        self._captures: dict[Any, CapturedStep] = {}

    def logits(self) -> CapturedStep:
        """The step alone: takes in ``state.tokens`` and returns logits, which the next call overwrites."""

        def run() -> Tensor:
            logits = self._logits()
            self.state.advance()
            return logits

        return self._capture("logits", run)

    def chooser(self, config: GenerateConfig, eos_id: int | None) -> CapturedStep:
        """The step with the choice of the next token, which the next step takes in."""

        def run() -> None:
            self.choose(self._logits(), config, eos_id, advance=True)

        return self._capture(_choice(config, eos_id), run)

    def _capture(self, key: Any, run: Callable[[], Tensor | None]) -> CapturedStep:
        if key not in self._captures:
            while len(self._captures) >= _MAX_CAPTURES:
                self._captures.pop(next(iter(self._captures)))
            # Warming up chooses tokens and writes their keys into the first place; afterwards all is as it was.
            touched = [*self.state, *(x[:, :, :1] for held in self.step.held for x in held)]
            before = [x.clone() for x in touched]
            self.state.begin(torch.zeros_like(self.state.lengths), torch.zeros_like(self.state.last))
            try:
                self._captures[key] = CapturedStep(run, self.device)
            finally:
                for x, was in zip(touched, before, strict=True):
                    x.copy_(was)
        return self._captures[key]

    def choose(self, logits: Tensor, config: GenerateConfig, eos_id: int | None, advance: bool) -> None:
        """The next token of every row, written down; after a step its own token's place is left behind."""
        state = self.state
        if not config.samples and not _filters(config):
            self.step.parts.settle_greedy(logits, *state, advance)
            return
        logits = logits.float()
        scores = filter_logits(logits, self.texts, 0, config, eos_id)
        if config.samples:
            tokens = draw_tokens(scores, self.chance.gather(1, state.steps[:, None])[:, 0])
        else:
            tokens = scores.argmax(-1)
        if advance:
            state.advance()
        self.texts.scatter_(1, state.steps[:, None], tokens[:, None])
        state.note(tokens, log_prob_of(logits, tokens))

    def before_choosing(self, prompts: Prompts, copies: int, config: GenerateConfig) -> None:
        """What the choice reads beside the logits: the tokens there were, and the numbers it draws with."""
        given, n_steps = prompts.texts.repeat_interleave(copies, 0), len(self.state.history)
        self.texts.fill_(-1)
        self.texts[:, n_steps : n_steps + given.shape[1]] = given
        if config.samples:
            drawn = uniform_draws(config, len(prompts), copies)[:, :n_steps]
            self.chance[:, : drawn.shape[1]].copy_(drawn)


def _filters(config: GenerateConfig) -> bool:
    return bool(config.logit_bias) or config.repetition_penalty != 1.0


def _choice(config: GenerateConfig, eos_id: int | None) -> tuple[Any, ...]:
    """What of a config the captured choice depends on."""
    drawing = (config.samples, config.temperature, config.top_k, config.top_p, config.min_p)
    return (*drawing, config.repetition_penalty, tuple(sorted(config.logit_bias.items())), eos_id)


def can_capture_choice(config: GenerateConfig, eos_id: int | None) -> bool:
    """Whether the choice can be part of the captured step: not where its rules change from token to token."""
    by_step = config.no_repeat_ngram or config.prefix or config.min_new_tokens
    return config.beam == 1 and not by_step and not (config.logit_bias and eos_id is None)


_ROUND = 128  # places of a cache are rounded up to this, so that texts of about the same length share one capture
_KEPT = 2  # captures kept for a model, each with its cache
_AHEAD = 32  # tokens between two looks of the host


# ---- which capture


class _Kept(NamedTuple):
    signature: int  # where the model's parameters lie: a capture knows them by address
    writer: GraphDecoder


_writers: weakref.WeakKeyDictionary[Model, OrderedDict[tuple[int, int], _Kept]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_refused: weakref.WeakKeyDictionary[Model, str] = weakref.WeakKeyDictionary()


def graph_decoder_for(engine: CudaGraphEngine, rows: int, places: int) -> GraphDecoder | None:
    """A writer with at least so many places: one that was captured before, if nothing has moved and nobody uses it.

    None where a layer's window is smaller than that: its ring of places is not written out.
    """
    model = engine.model
    windows = [size for n in range(model.config.n_layers) if (size := window_of(model.config, n)) is not None]
    rounded = min(-(-places // _ROUND) * _ROUND, max(max_text_length(model.config), places), *windows)
    if rounded < places:
        return None
    signature = hash(tuple((p.data_ptr(), p.dtype) for p in model.parameters()))
    with _lock:
        kept = _writers.setdefault(model, OrderedDict())
        found = kept.pop((rows, rounded), None)
        user = None if found is None or found.writer.owner is None else found.writer.owner()
        if found is None or found.signature != signature or user not in (None, engine):
            while len(kept) >= _KEPT:
                kept.popitem(last=False)
            found = _Kept(signature, GraphDecoder(model, rows, rounded))
        kept[rows, rounded] = found
        found.writer.owner = weakref.ref(engine)
    return found.writer


def release_captures(model: Model) -> None:
    """Let go of a model's captures and their caches."""
    _writers.pop(model, None)
    _refused.pop(model, None)


def can_capture(model: Model) -> bool:
    """Whether decoding this model is captured: on CUDA, with a step that can be written out and nobody looking in."""
    if model.device.type != "cuda" or model in _refused or taps._recorder is not None or has_edits(model):
        return False
    if torch.is_autocast_enabled("cuda"):  # its casts are cached from one step to the next
        return False
    return capture_obstacle(model) is None and not any(
        m._forward_hooks or m._forward_pre_hooks for m in model.modules()
    )


# ---- the engine


class CudaGraphEngine(DecoderEngine):
    """A decoder behind captured steps. Searches that only know ``decode_one_token`` profit too."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, "static")
        self.writer: GraphDecoder | None = None
        self._untold = False  # whether the cache holds tokens that it has not counted

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        try:
            self.writer = graph_decoder_for(self, len(prompts) * copies, self._cache_length(prompts))
        except Exception as error:  # no memory: there is another way
            self._give_up(error)
        if self.writer is None:
            return super().prefill(prompts, copies)
        rows = torch.arange(len(prompts), device=prompts.tokens.device).repeat_interleave(copies)
        self._cache, self._untold = self.writer.cache, False
        self._cache.reset()
        positions = None if prompts.positions is None else prompts.positions[rows]
        logits = self._logits(self._states(prompts.tokens[rows], positions))
        if logits.isnan().any():
            raise ValueError("the model's logits are not numbers (NaN); its weights may have diverged")
        lengths = torch.tensor([len(row) for row in prompts.rows], device=self.writer.device)
        self.writer.state.begin(lengths[rows], (lengths + prompts.limit)[rows] - 1)
        return logits

    def decode_one_token(self, tokens: Tensor) -> Tensor:
        step = self._captured(lambda writer: writer.logits())
        if self.writer is None or step is None:
            return super().decode_one_token(tokens)
        self.writer.state.tokens.copy_(tokens)
        self._untold = True
        logits = step()
        assert logits is not None
        return logits.to(torch.float32, copy=True)

    def decode_tokens(self, tokens: Tensor) -> Tensor:
        self._tell_cache()
        logits = super().decode_tokens(tokens)
        self._ask_cache()
        return logits

    def truncate(self, length: int) -> None:
        self._tell_cache()
        super().truncate(length)
        self._ask_cache()

    def select(self, rows: Tensor) -> None:
        super().select(rows)
        if self.writer is not None:
            for held in (self.writer.state.lengths, self.writer.state.last):
                held.copy_(held.index_select(0, rows))

    def blocks(
        self, prompts: Prompts, copies: int, config: GenerateConfig, ahead: int
    ) -> Iterator[tuple[Tensor, Tensor]] | None:
        """Tokens and log-probabilities (n, R) of the next n steps, on the host; None where that cannot be captured.

        While one block is read the next one is computed, so a few tokens are chosen that nobody asks for.
        """
        eos_id = self.model.config.eos_id
        if not can_capture_choice(config, eos_id):
            return None
        logits = self.prefill(prompts, copies)
        step = self._captured(lambda writer: writer.chooser(config, eos_id))
        if self.writer is None or step is None:
            return None
        self.writer.before_choosing(prompts, copies, config)
        self.writer.choose(logits, config, eos_id, advance=False)
        self._untold = True
        return _in_blocks(step, self.writer.state, int(prompts.limit.max()), ahead)

    def _captured(self, ask: Callable[[GraphDecoder], CapturedStep]) -> CapturedStep | None:
        if self.writer is None:
            return None
        try:
            return ask(self.writer)
        except Exception as error:  # a library that cannot be captured, no compiler: there is another way
            self._tell_cache()
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        release_captures(self.model)
        self.writer = None
        _refused[self.model] = f"{type(error).__name__}: {error}"
        warnings.warn(f"decoding goes on without a CUDA graph: {_refused[self.model]:.300}", stacklevel=3)

    def _tell_cache(self) -> None:
        """The cache counts the tokens that captured steps wrote into it."""
        if self.writer is None or not self._untold:
            return
        lengths, self._untold = self.writer.state.lengths, False
        for layer in self._cache.layers:
            assert isinstance(layer, StaticCache)
            if len(layer.lengths) < len(lengths):
                layer._part_rows()
            layer._lengths.copy_(lengths)
            places = torch.arange(layer.max_len + 1, device=lengths.device)
            layer._slots.pos.copy_(torch.where(places < lengths[:, None], places, -1))
            layer._count = None

    def _ask_cache(self) -> None:
        if self.writer is not None:
            self.writer.state.lengths.copy_(torch.minimum(self._cache.lengths, self.writer.state.last))


def _in_blocks(step: CapturedStep, state: DecodeState, n_steps: int, ahead: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The first token is chosen already; each turn starts the next steps before it waits for those before."""
    waiting, done = _Fetched(state, 0, 1), 1
    while done < n_steps:
        n = min(ahead, n_steps - done)
        for _ in range(n):
            step()
        before, waiting = waiting, _Fetched(state, done, done + n)
        done += n
        yield before.read()
    yield waiting.read()


class _Fetched:
    """Some steps of the histories on their way to the host."""

    def __init__(self, state: DecodeState, start: int, stop: int) -> None:
        self._parts = [_sent(x[start:stop]) for x in (state.history, state.log_probs)]
        self._event: torch.cuda.Event | None = None
        if state.history.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[Tensor, Tensor]:
        if self._event is not None:
            self._event.synchronize()
        tokens, log_probs = self._parts
        return tokens, log_probs


def _sent(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x.clone()
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    return host.copy_(x, non_blocking=True)


# ---- texts


def graph_decode_loop(
    engine: DecodingEngine,
    prompts: Prompts,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None = None,
    ahead: int = _AHEAD,
) -> Iterator[ChosenTokens]:
    """What ``walk`` gives; where steps are captured they run ahead, and what became of the texts is seen to here."""
    copies = config.n_best
    blocks = engine.blocks(prompts, copies, config, ahead) if isinstance(engine, CudaGraphEngine) else None
    if blocks is None:
        yield from decode_loop(engine, prompts, config, eos_id, strings)
        return
    limit = prompts.limit.cpu().repeat_interleave(copies)
    rows, step = torch.arange(len(limit)), 0
    done = torch.zeros_like(rows, dtype=torch.bool)
    looked_at = bool(config.stop) or strings is not None
    texts = prompts.texts.cpu().repeat_interleave(copies, 0)
    for block in blocks:
        for tokens, log_probs in zip(*block, strict=True):
            step += 1
            codes = stop_codes(tokens, texts, step, config, eos_id, strings)
            codes = torch.where((codes == GOING_ON) & (step >= limit), LENGTH, codes)
            yield ChosenTokens(*(x[~done] for x in (rows, tokens, log_probs, codes)))
            texts = torch.cat([texts, tokens[:, None]], 1) if looked_at else texts
            done = done | (codes != GOING_ON)
            if done.all():
                return
