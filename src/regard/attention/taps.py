"""Looking inside without hooks: functions through which a recorder sees what passes, and nothing when nobody looks.

Hooks registered after ``torch.compile`` are silently never called. A tap is an ordinary function call in the forward
pass: compiled away while no recorder is set, and compiled in, by a new trace, from the moment one is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from .cache import Cache
from .call import Call, Scoring
from .joined import Seen, join, keys_now
from .map import AttentionMap


class _Passed:
    """One thing that passed a tap, and what passed before it.

    A chain, because a compiled graph can lengthen it without reading it. A list it would compare, as far as it has
    grown, with the one it was compiled for, and compile anew with every call.
    """

    def __init__(
        self,
        before: _Passed | None = None,
        owner: nn.Module | None = None,
        name: str = "",
        what: Tensor | Seen | None = None,
        again: Tensor | None = None,
    ) -> None:
        self.before, self.owner, self.name, self.what = before, owner, name, what
        self.again = again  # of a compiled graph: whether it ran as the second pass of a checkpoint


class Recorder:
    """Keeps what the taps of one model show it, by the place where it was seen, in the order it came."""

    def __init__(self, model: nn.Module) -> None:
        model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
        self._places = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._last = _Passed()
        self._keys: dict[Cache, tuple[Tensor, Tensor]] = {}

    @property
    def tensors(self) -> dict[str, list[Tensor]]:
        """What ``tap`` showed, by name; a module's own taps stand under its place, "layers.0.norm.x"."""
        found: dict[str, list[Tensor]] = {}
        for passed in self._passed():
            if isinstance(passed.what, Tensor):
                place = "" if passed.owner is None else self._places[passed.owner]
                found.setdefault(f"{place}.{passed.name}" if place else passed.name, []).append(passed.what)
        return found

    @property
    def attentions(self) -> dict[str, list[Seen]]:
        """What ``tap_attention`` showed, by the place of the module in the model ("attention" if it is the model)."""
        found: dict[str, list[Seen]] = {}
        for passed in self._passed():
            if isinstance(passed.what, Seen) and passed.owner is not None:
                found.setdefault(self._places[passed.owner] or "attention", []).append(passed.what)
        return found

    def map(self, name: str, step: int | None = None) -> AttentionMap:
        """The attention map of one place: of one of its calls, or of all together where they decoded with a cache."""
        attentions = self.attentions
        if name not in attentions:
            raise KeyError(f"no attention was recorded at {name!r}; there is {', '.join(attentions) or 'none'}")
        seen = attentions[name]
        if step is None and len(seen) > 1 and any(s.cache is None or s.cache is not seen[0].cache for s in seen):
            raise ValueError(f"{len(seen)} calls at {name!r} do not share a cache; say which step to look at")
        return AttentionMap.of(self._scoring(seen if step is None else [seen[step]]))

    def _scoring(self, seen: list[Seen]) -> Scoring:
        one, cache = seen[0], seen[0].cache
        if cache is None:
            assert one.k is not None and one.frame is not None
            return Scoring(one.q, one.k, one.mask, one.bias, one.mechanism, one.frame)
        keys = self._keys[cache] if cache in self._keys else keys_now(cache)
        return join(seen, cache, keys)

    def _passed(self) -> list[_Passed]:
        """Everything seen of the model, oldest first; what checkpointing computed again is left out."""
        chain: list[_Passed] = []
        passed = self._last
        while passed.before is not None:
            if (passed.owner is None or passed.owner in self._places) and (passed.again is None or not passed.again):
                chain.append(passed)
            passed = passed.before
        return chain[::-1]

    def close(self) -> None:
        """Keep the caches' keys as they are now: the next text will be written over them."""
        caches = {passed.what.cache for passed in self._passed() if isinstance(passed.what, Seen)}
        for cache in caches:
            if cache is not None and cache.length > 0:
                k, positions = keys_now(cache)
                self._keys[cache] = k.clone(), positions.clone()


_recorder: Recorder | None = None


def tap(name: str, x: Tensor, owner: nn.Module | None = None) -> Tensor:
    """Show ``x`` to the recorder, if there is one, under a name; ``owner`` is the module it belongs to. Returns x."""
    if _recorder is not None:
        _show(_recorder, owner, name, x.detach(), x)
    return x


def tap_attention(owner: nn.Module, call: Call, output: Tensor, cache: Cache | None = None) -> Tensor:
    """Show an attention computed by ``owner`` to the recorder, if there is one. Returns the output."""
    if _recorder is not None:
        _show(_recorder, owner, "attention", _seen(call, output, cache), output)
    return output


def _seen(call: Call, output: Tensor, cache: Cache | None) -> Seen:
    k, v, frame = (None, None, None) if cache is not None else (call.k.detach(), call.v.detach(), call.frame)
    q_pos = call.frame.q_pos.clone()  # its own memory: a view would keep alive, or be overwritten by, the cache's
    return Seen(call.q.detach(), k, v, output.detach(), call.mask, call.bias, call.mechanism, q_pos, frame, cache)


def _show(recorder: Recorder, owner: nn.Module | None, name: str, what: Tensor | Seen, at: Tensor) -> None:
    if torch.compiler.is_compiling():  # whether this is a first or a second time is only known when the graph runs
        recorder._last = _Passed(recorder._last, owner, name, what, _is_again(at.detach()))
    elif not _is_recomputing():
        recorder._last = _Passed(recorder._last, owner, name, what)


def _is_recomputing() -> bool:
    """Whether this forward pass is gradient checkpointing's second one, inside backward: it was seen already."""
    return torch._C._current_graph_task_id() != -1


@torch.library.custom_op("regard::is_again", mutates_args=())
def _is_again(at: Tensor) -> Tensor:
    """``_is_recomputing`` as a step of a compiled graph; it takes a tensor so that it stays where it was called."""
    return torch.tensor(_is_recomputing())


@_is_again.register_fake
def _(at: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool)


@contextmanager
def record(model: nn.Module) -> Iterator[Recorder]:
    """Record every tap of ``model`` inside the ``with`` block; works on compiled models, switched on at any time.

    What was recorded can be read inside the block and after it. Masks and biases are kept by reference, so maps are
    best made before training changes the bias.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("record() is already on; one recorder looks at a time")
    recorder = _recorder = Recorder(model)
    try:
        with _checkpoints_may_record():
            yield recorder
    finally:
        _recorder = None
        recorder.close()


def _checkpoints_may_record() -> AbstractContextManager[None]:
    """A compiled graph lets nothing out of a checkpointed region unless told that once, the first time, is enough."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and loading it takes seconds
        return nullcontext()
    config = torch._dynamo.config
    option = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    return config.patch({option: True}) if hasattr(config, option) else nullcontext()
