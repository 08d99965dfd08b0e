"""Decoding on a GPU without a wait: the step is captured once in a CUDA graph, and replayed for every token.

A step of a small model is a hundred launches of two microseconds each. Launched one by one they wait for Python;
captured, they run back to back, the chosen token is written where the next step reads it, and the host looks in only
every few tokens to see which texts have ended. On a CPU the same code runs without capture: that is what tests read.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import taps
from ..attention.cache import StaticCache
from ..attention.edits import has_edits
from ..models import Decoder, Model
from ..models.parts import window_of
from .captured import Captured, Writer, chooses
from .config import GenerateConfig
from .ending import GOING_ON, LENGTH, endings
from .engine import Engine, TextEngine
from .prompts import Prompts, longest
from .steps import State, why_not
from .stop import StopStrings
from .walk import Chosen, walk

_ROUND = 128  # places of a cache are rounded up to this, so that texts of about the same length share one capture
_KEPT = 2  # captures kept for a model, each with its cache
_AHEAD = 32  # tokens between two looks of the host


# ---- which capture


class _Kept(NamedTuple):
    signature: int  # where the model's parameters lie: a capture knows them by address
    writer: Writer


_writers: weakref.WeakKeyDictionary[Model, OrderedDict[tuple[int, int], _Kept]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
_refused: weakref.WeakKeyDictionary[Model, str] = weakref.WeakKeyDictionary()


def writer_for(engine: GraphedEngine, rows: int, places: int) -> Writer | None:
    """A writer with at least so many places: one that was captured before, if nothing has moved and nobody uses it.

    None where a layer's window is smaller than that: its ring of places is not written out.
    """
    model = engine.model
    windows = [size for n in range(model.config.n_layers) if (size := window_of(model.config, n)) is not None]
    rounded = min(-(-places // _ROUND) * _ROUND, max(longest(model.config), places), *windows)
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
            found = _Kept(signature, Writer(model, rows, rounded))
        kept[rows, rounded] = found
        found.writer.owner = weakref.ref(engine)
    return found.writer


def forget(model: Model) -> None:
    """Let go of a model's captures and their caches."""
    _writers.pop(model, None)
    _refused.pop(model, None)


def can_capture(model: Model) -> bool:
    """Whether decoding this model is captured: on CUDA, with a step that can be written out and nobody looking in."""
    if model.device.type != "cuda" or model in _refused or taps._recorder is not None or has_edits(model):
        return False
    if torch.is_autocast_enabled("cuda"):  # its casts are cached from one step to the next
        return False
    return why_not(model) is None and not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---- the engine


class GraphedEngine(TextEngine):
    """A decoder behind captured steps. Searches that only know ``decode_one_token`` profit too."""

    def __init__(self, model: Decoder) -> None:
        super().__init__(model, "static")
        self.writer: Writer | None = None
        self._untold = False  # whether the cache holds tokens that it has not counted

    def prefill(self, prompts: Prompts, copies: int = 1) -> Tensor:
        try:
            self.writer = writer_for(self, len(prompts) * copies, self._places(prompts))
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
        if not chooses(config, eos_id):
            return None
        logits = self.prefill(prompts, copies)
        step = self._captured(lambda writer: writer.chooser(config, eos_id))
        if self.writer is None or step is None:
            return None
        self.writer.before_choosing(prompts, copies, config)
        self.writer.choose(logits, config, eos_id, advance=False)
        self._untold = True
        return _in_blocks(step, self.writer.state, int(prompts.limit.max()), ahead)

    def _captured(self, ask: Callable[[Writer], Captured]) -> Captured | None:
        if self.writer is None:
            return None
        try:
            return ask(self.writer)
        except Exception as error:  # a library that cannot be captured, no compiler: there is another way
            self._tell_cache()
            self._give_up(error)
            return None

    def _give_up(self, error: Exception) -> None:
        forget(self.model)
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


def _in_blocks(step: Captured, state: State, n_steps: int, ahead: int) -> Iterator[tuple[Tensor, Tensor]]:
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

    def __init__(self, state: State, start: int, stop: int) -> None:
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


def walk_ahead(
    engine: Engine,
    prompts: Prompts,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None = None,
    ahead: int = _AHEAD,
) -> Iterator[Chosen]:
    """What ``walk`` gives; where steps are captured they run ahead, and what became of the texts is seen to here."""
    copies = config.n_best
    blocks = engine.blocks(prompts, copies, config, ahead) if isinstance(engine, GraphedEngine) else None
    if blocks is None:
        yield from walk(engine, prompts, config, eos_id, strings)
        return
    limit = prompts.limit.cpu().repeat_interleave(copies)
    rows, step = torch.arange(len(limit)), 0
    done = torch.zeros_like(rows, dtype=torch.bool)
    looked_at = bool(config.stop) or strings is not None
    texts = prompts.texts.cpu().repeat_interleave(copies, 0)
    for block in blocks:
        for tokens, log_probs in zip(*block, strict=True):
            step += 1
            codes = endings(tokens, texts, step, config, eos_id, strings)
            codes = torch.where((codes == GOING_ON) & (step >= limit), LENGTH, codes)
            yield Chosen(*(x[~done] for x in (rows, tokens, log_probs, codes)))
            texts = torch.cat([texts, tokens[:, None]], 1) if looked_at else texts
            done = done | (codes != GOING_ON)
            if done.all():
                return
