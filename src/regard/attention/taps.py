"""Looking inside without hooks: functions through which a recorder sees what passes, and nothing when nobody looks.

Hooks registered after ``torch.compile`` are silently never called. A tap is an ordinary function call in the forward
pass: compiled away while no recorder is set, and compiled in, by a new trace, from the moment one is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .cache import Cache, CrossCache
from .cache.cache import Edition
from .call import Call, Scoring
from .joined import Seen, join, keys_now, same_memory
from .map import AttentionMap, freeze


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
        ignored: Tensor | None = None,
    ) -> None:
        self.before, self.owner, self.name, self.what = before, owner, name, what
        self.ignored = ignored  # of a compiled graph: whether it ran where the recorder does not look


class Recorder:
    """Keeps what the taps of one model show it, by the place where it was seen, in the order it came."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        self.values = values  # whether v, outputs and what ``tap`` shows are kept too
        model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
        self._places = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._last = _Passed()
        self._thread = threading.get_ident()  # what other threads do is not for this recorder
        self._keys: dict[Cache, tuple[Tensor, Tensor]] = {}
        self._editions: dict[Cache, Edition] = {}  # of these keys
        self._memories: dict[Cache, tuple[Tensor, Tensor]] = {}

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

    def map(self, name: str, step: int | slice | None = None) -> AttentionMap:
        """The attention map of one place: of one of its calls, or of all or some together if they share a cache."""
        attentions = self.attentions
        if name not in attentions:
            raise KeyError(f"no attention was recorded at {name!r}; there is {', '.join(attentions) or 'none'}")
        seen = attentions[name]
        some = seen if step is None else seen[step] if isinstance(step, slice) else [seen[step]]
        if not some:
            raise ValueError(f"step={step} picks none of the {len(seen)} calls at {name!r}")
        if len(some) > 1 and any(s.cache is None or s.cache is not some[0].cache for s in some):
            raise ValueError(f"{len(some)} calls at {name!r} do not share a cache; say which step to look at")
        return AttentionMap.of(self._scoring(name, some))

    def _scoring(self, name: str, seen: list[Seen]) -> Scoring:
        one, cache = seen[0], seen[0].cache
        if cache is None:
            assert one.k is not None and one.frame is not None
            return Scoring(one.q, one.k, one.mask, one.bias, one.mechanism, one.frame)
        if one.memory is not None:
            if any(s.memory is None or not same_memory(s.memory, one.memory) for s in seen):
                raise ValueError(f"the memory is not the same in all {len(seen)} calls at {name!r}; say which step")
            return join(seen, cache, one.memory)
        edition = self._editions.get(cache, cache.edition)
        gone = sum(s.edition is not edition for s in seen)
        if gone:
            raise ValueError(
                f"the cache was reordered, truncated or reset after {gone} of these {len(seen)} calls at {name!r},"
                " whose keys are gone; look at the steps since then"
            )
        return join(seen, cache, self._keys[cache] if cache in self._keys else keys_now(cache))

    def _passed(self) -> list[_Passed]:
        """Everything seen of the model, oldest first; what checkpointing computed again is left out."""
        chain: list[_Passed] = []
        passed = self._last
        while passed.before is not None:
            if (passed.owner is None or passed.owner in self._places) and (
                passed.ignored is None or not passed.ignored
            ):
                chain.append(passed)
            passed = passed.before
        return chain[::-1]

    def _sharing(self, seen: Seen) -> Seen:
        """With the memory kept already where it is the same: reordering copies it."""
        if seen.cache is None or seen.memory is None:
            return seen
        kept = self._memories.get(seen.cache)
        if kept is None or not same_memory(kept, seen.memory):
            kept = self._memories[seen.cache] = seen.memory
        return seen._replace(memory=kept)

    def close(self) -> None:
        """Make it a snapshot: training will change the biases, and the next text will be written over the keys."""
        frozen: dict[int, Any] = {}  # one bias may be seen by all layers at all steps

        def once(part: Any) -> Any:
            if id(part) not in frozen:
                frozen[id(part)] = part, freeze(part)  # both: an id is one's own only as long as one lives
            return frozen[id(part)][1]

        last = _Passed()
        for passed in self._passed():  # a new chain, which lets go of everything else that a compiled graph showed
            what = passed.what
            if isinstance(what, Seen):
                self._keep_keys(what)
                what = what._replace(bias=once(what.bias), mechanism=once(what.mechanism))
            last = _Passed(last, passed.owner, passed.name, what)
        self._last = last
        self._memories.clear()

    def _keep_keys(self, seen: Seen) -> None:
        cache = seen.cache
        if cache is None or seen.memory is not None or cache in self._keys or seen.edition is not cache.edition:
            return
        k, positions = keys_now(cache)
        self._keys[cache], self._editions[cache] = (k.clone(), positions.clone()), cache.edition


_recorder: Recorder | None = None


def tap(name: str, x: Tensor, owner: nn.Module | None = None) -> Tensor:
    """Show ``x`` to the recorder, if there is one, under a name; ``owner`` is the module it belongs to. Returns x."""
    if _recorder is not None and _recorder.values:
        _show(_recorder, owner, name, x.detach(), x)
    return x


def tap_attention(owner: nn.Module, call: Call, output: Tensor, cache: Cache | None = None) -> Tensor:
    """Show an attention computed by ``owner`` to the recorder, if there is one. Returns the output."""
    if _recorder is not None:
        _show(_recorder, owner, "attention", _seen(call, output, cache, _recorder.values), output)
    return output


def _seen(call: Call, output: Tensor, cache: Cache | None, values: bool) -> Seen:
    kept = torch.Tensor.detach if values else _own
    k, frame = (None, None) if cache is not None else (kept(call.k), call.frame)
    q_pos = call.frame.q_pos.clone()  # its own memory: a view would keep alive, or be overwritten by, the cache's
    return Seen(
        kept(call.q),
        k,
        call.v.detach() if values and cache is None else None,
        output.detach() if values else None,
        call.mask,
        call.bias,
        call.mechanism,
        q_pos,
        frame,
        cache,
        None if cache is None else cache.edition,
        keys_now(cache) if isinstance(cache, CrossCache) else None,
    )


def _own(x: Tensor) -> Tensor:
    """x in memory of its own: a view would keep alive the whole product, v too, that q and k are parts of."""
    x = x.detach()
    alone = not torch.compiler.is_compiling() and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _show(recorder: Recorder, owner: nn.Module | None, name: str, what: Tensor | Seen, at: Tensor) -> None:
    if torch.compiler.is_compiling():  # who runs the graph, and why, is only known when it runs
        recorder._last = _Passed(recorder._last, owner, name, what, _is_ignored(at.detach()))
    elif not _ignores(recorder) and (owner is None or owner in recorder._places):
        what = recorder._sharing(what) if isinstance(what, Seen) else what
        recorder._last = _Passed(recorder._last, owner, name, what)


def _ignores(recorder: Recorder | None) -> bool:
    """Whether this forward pass is gradient checkpointing's second one, inside backward, or another thread's."""
    again = torch._C._current_graph_task_id() != -1
    return again or (recorder is not None and recorder._thread != threading.get_ident())


@torch.library.custom_op("regard::is_ignored", mutates_args=())
def _is_ignored(at: Tensor) -> Tensor:
    """``_ignores`` as a step of a compiled graph; it takes a tensor so that it stays where it was called."""
    return torch.tensor(_ignores(_recorder))


@_is_ignored.register_fake
def _(at: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool)


@contextmanager
def record(model: nn.Module, values: bool = True) -> Iterator[Recorder]:
    """Record every tap of ``model`` inside the ``with`` block; works on compiled models, switched on at any time.

    Of every call q, k, v and output are kept, O(T) numbers and never the matrix of weights; while decoding with a cache
    q and output, and the cache's keys once. These q, k and v may be parts of one product that stays in memory whole.
    With ``values=False`` q and k alone are kept, in memory of their own: all that attention weights need.
    What was recorded can be read inside the block and after it: when the block ends, biases, mechanisms and keys are
    copied as they are then. Masks are kept by reference. Other models and other threads are not seen.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("record() is already on; one recorder looks at a time")
    recorder = _recorder = Recorder(model, values)
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
