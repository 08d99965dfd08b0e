"""Taps and recorders: ``tap`` passes a tensor and ``tap_attention`` an attention call to the active ``Recorder``.

Taps are function calls, not module hooks, so a recorder can be enabled after torch.compile. It keeps q and k (O(T)) and
joins the steps of cached decoding into one score matrix.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..foundation.cancellation import check_cancelled
from .attention_map import AttentionMap, freeze
from .biases import Bias
from .cache import Cache, CrossCache
from .cache.kv_cache import CacheVersion
from .frame import Frame, Site
from .mask import Bounds, Box, block_range
from .masks import Mask
from .mechanisms import Mechanism
from .score_matrix import AttentionCall, ScoreMatrix


class RecordedAttention(NamedTuple):
    """One attention call: everything its weights are computed from, with q and k already prepared.

    With a cache, k, v and frame are None: the cache holds the keys, and copying them at every step would take O(T²).
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None  # None unless the recorder keeps ``values``
    output: Tensor | None  # None unless the recorder keeps ``values``
    mask: Mask | None
    bias: Bias | None
    mechanism: Mechanism
    q_pos: Tensor
    frame: Frame | None
    cache: Cache | None
    version: CacheVersion | None  # the cache's version at this call
    memory: tuple[Tensor, Tensor] | None  # keys of a CrossCache and their positions
    sinks: Tensor | None


def current_keys(cache: Cache) -> tuple[Tensor, Tensor]:
    """The keys of a cache, detached, and their positions."""
    k, positions = cache.keys()
    return k.detach(), positions


def is_same_memory(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    return a is b or all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def join_steps(steps: list[RecordedAttention], cache: Cache, keys: tuple[Tensor, Tensor]) -> ScoreMatrix:
    """One ScoreMatrix of the queries of all steps over the cache's keys."""
    first, (k, k_pos) = steps[0], keys
    if first.mechanism.kind == "summary":
        name = first.mechanism.name
        raise ValueError(f"mechanism {name!r} summarises its keys anew at every step, so steps cannot be joined")
    if any(step.bias is not first.bias for step in steps):
        raise ValueError(f"the bias is not the same in all {len(steps)} steps; select one with step=")
    q_pos = _concat_positions([step.q_pos for step in steps])
    frame = Frame(first.q.shape[0], first.q.shape[1], q_pos, k_pos)
    mask = first.mask
    if not all(_equal(step.mask, mask) for step in steps):
        ends = itertools.accumulate(step.q.shape[2] for step in steps)
        mask = StepMasks(tuple(step.mask for step in steps), tuple(ends))
    if not isinstance(cache, CrossCache):
        _check_complete(q_pos, k_pos)
        written = _concat_positions([step.q_pos.amax(-1, keepdim=True).expand_as(step.q_pos) for step in steps])
        mask = WrittenKeys(written) if mask is None else mask & WrittenKeys(written)
    if mask is not None:
        mask.check(frame)
    q = torch.cat([step.q for step in steps], dim=2)
    return ScoreMatrix(q, first.mechanism.keys(k), mask, first.bias, first.mechanism, frame, sinks=first.sinks)


def _concat_positions(parts: list[Tensor]) -> Tensor:
    """Concatenate positions (T,) and (B, T) along the last axis."""
    n_rows = max((x.shape[0] for x in parts if x.dim() == 2), default=None)
    return torch.cat(parts if n_rows is None else [x.expand(n_rows, -1) for x in parts], dim=-1)


def _check_complete(q_pos: Tensor, k_pos: Tensor) -> None:
    """Raise if keys have been evicted from the cache: without them the sum of the softmax is unknown."""
    last = int(q_pos.max())
    present = torch.zeros(*k_pos.shape[:-1], last + 2, dtype=torch.bool, device=k_pos.device)
    # Positions out of range go to the extra column.
    present.scatter_(-1, torch.where((k_pos >= 0) & (k_pos <= last), k_pos, last + 1), True)
    needed = torch.arange(last + 1, device=k_pos.device) <= q_pos.amax(-1, keepdim=True)
    n_evicted = int((needed & ~present[..., :-1]).sum(-1).max())
    if n_evicted:
        hint = "RingCache(keep_keys=…) keeps them"
        raise ValueError(f"{n_evicted} of the {last + 1} keys are no longer in the cache; {hint}")


@dataclass(frozen=True, eq=False)
class WrittenKeys(Mask):
    """Keys that were in the cache at the query's step, up to the last position of that step."""

    until: Tensor  # (T,) or (B, T)

    def allows(self, at: Site) -> Tensor:
        return at.j <= (self.until[at.row] if self.until.dim() == 1 else self.until[at.b, at.row])

    def bounds(self, box: Box) -> Bounds:
        low, high = block_range(self.until, box.block[0])
        return box.j_min <= high[:, None], box.j_max <= low[:, None]


@dataclass(frozen=True, eq=False)
class StepMasks(Mask):
    """One mask per step, for the queries of that step; None means full attention."""

    masks: tuple[Mask | None, ...]
    ends: tuple[int, ...]  # one past each step's last row

    def allows(self, at: Site) -> Tensor:
        allowed = (at.row >= 0) & (at.j >= 0)
        start = 0
        for mask, end in zip(self.masks, self.ends, strict=True):
            here = (at.row >= start) & (at.row < end)
            if mask is not None and here.any():
                allowed = torch.where(here, mask.allows(at), allowed)
            start = end
        return allowed

    def check(self, frame: Frame) -> None:
        for mask in self.masks:
            if mask is not None:
                mask.check(frame)


def _equal(a: object, b: object) -> bool:
    """Whether two masks have the same type and fields; models build a new mask at every step."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if not isinstance(a, Mask):
        return a is b or a == b
    if type(a) is not type(b) or not is_dataclass(a):
        return a is b
    return a is b or all(_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))


class _TapRecord:
    """One recorded value, linked to the previous one.

    This is a linked list because a compiled graph guards on the length of a Python list and would recompile every call.
    """

    def __init__(
        self,
        before: _TapRecord | None = None,
        owner: nn.Module | None = None,
        name: str = "",
        value: Tensor | RecordedAttention | None = None,
        ignored: Tensor | None = None,
    ) -> None:
        self.before, self.owner, self.name, self.value = before, owner, name, value
        self.ignored = ignored  # set in compiled graphs: a boolean tensor, True if this run is not recorded


class Recorder:
    """The recorded tensors and attention calls of one model, by module name, in order."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        self.values = values  # whether v, outputs and all ``tap`` tensors are kept as well
        model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
        self._module_names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._last = _TapRecord()
        self._thread = threading.get_ident()  # other threads are not recorded
        self._keys: dict[Cache, tuple[Tensor, Tensor]] = {}  # keys and positions, copied by ``close``
        self._versions: dict[Cache, CacheVersion] = {}  # versions of ``_keys``
        self._memories: dict[Cache, tuple[Tensor, Tensor]] = {}  # last memory recorded for each CrossCache

    @property
    def tensors(self) -> dict[str, list[Tensor]]:
        """Tensors passed to ``tap``, by name; with an owner, prefixed by the module's name: "layers.0.norm.x"."""
        by_name: dict[str, list[Tensor]] = {}
        for entry in self._records():
            if isinstance(entry.value, Tensor):
                module = "" if entry.owner is None else self._module_names[entry.owner]
                by_name.setdefault(f"{module}.{entry.name}" if module else entry.name, []).append(entry.value)
        return by_name

    @property
    def attentions(self) -> dict[str, list[RecordedAttention]]:
        """Attention calls by module name ("attention" if the module is the model itself)."""
        by_name: dict[str, list[RecordedAttention]] = {}
        for entry in self._records():
            if isinstance(entry.value, RecordedAttention) and entry.owner is not None:
                by_name.setdefault(self._module_names[entry.owner] or "attention", []).append(entry.value)
        return by_name

    def map(self, name: str, step: int | slice | None = None) -> AttentionMap:
        """The attention map of one module, for one of its calls or for several that share a cache."""
        attentions = self.attentions
        if name not in attentions:
            names = ", ".join(attentions) or "none"
            raise KeyError(f"no attention was recorded at {name!r}; recorded: {names}")
        calls = attentions[name]
        if step is not None:
            calls = calls[step] if isinstance(step, slice) else [calls[step]]
        if not calls:
            raise ValueError(f"step={step} selects none of the {len(attentions[name])} calls at {name!r}")
        first, cache = calls[0], calls[0].cache
        if len(calls) > 1 and (cache is None or any(call.cache is not cache for call in calls)):
            raise ValueError(f"{len(calls)} calls at {name!r} do not share a cache; select one with step=")
        if cache is not None:
            return AttentionMap.of(join_steps(calls, cache, self._keys_of(cache, calls, name)))
        assert first.k is not None and first.frame is not None
        matrix = ScoreMatrix(first.q, first.k, first.mask, first.bias, first.mechanism, first.frame, sinks=first.sinks)
        return AttentionMap.of(matrix)

    def _keys_of(self, cache: Cache, calls: list[RecordedAttention], name: str) -> tuple[Tensor, Tensor]:
        """The keys that all these calls attended to, and their positions."""
        memory = calls[0].memory
        if memory is not None:
            if any(call.memory is None or not is_same_memory(call.memory, memory) for call in calls):
                n = len(calls)
                raise ValueError(f"the memory is not the same in all {n} calls at {name!r}; select one with step=")
            return memory
        version = self._versions.get(cache, cache.version)
        n_stale = sum(call.version is not version for call in calls)
        if n_stale:
            stale = f"{n_stale} of these {len(calls)} calls at {name!r}"
            hint = "whose keys are gone; select later steps with step="
            raise ValueError(f"the cache was reordered, truncated or reset after {stale}, {hint}")
        return self._keys[cache] if cache in self._keys else current_keys(cache)

    def _records(self) -> list[_TapRecord]:
        """The records of this model, oldest first, without the ignored ones."""
        records: list[_TapRecord] = []
        entry = self._last
        while entry.before is not None:
            is_own = entry.owner is None or entry.owner in self._module_names
            if is_own and (entry.ignored is None or not entry.ignored):
                records.append(entry)
            entry = entry.before
        return records[::-1]

    def _append(self, owner: nn.Module | None, name: str, value: Tensor | RecordedAttention, at: Tensor) -> None:
        """Add a record; ``at`` determines where in a compiled graph ``_is_ignored`` runs."""
        if torch.compiler.is_compiling():  # thread and backward pass are known only when the graph runs
            self._last = _TapRecord(self._last, owner, name, value, _is_ignored(at.detach()))
        elif not _should_ignore(self) and (owner is None or owner in self._module_names):
            check_cancelled()
            if isinstance(value, RecordedAttention) and value.cache is not None and value.memory is not None:
                # Share an equal memory that is already stored: reordering a CrossCache copies it.
                memory = self._memories.get(value.cache)
                if memory is None or not is_same_memory(memory, value.memory):
                    memory = self._memories[value.cache] = value.memory
                value = value._replace(memory=memory)
            self._last = _TapRecord(self._last, owner, name, value)

    def close(self) -> None:
        """Copy biases, mechanisms and cached keys, which training and the next input will overwrite."""
        frozen: dict[int, Any] = {}  # all layers and steps may share one bias

        def freeze_once(part: Any) -> Any:
            if id(part) not in frozen:
                frozen[id(part)] = part, freeze(part)  # keeps ``part`` alive, so that its id stays unique
            return frozen[id(part)][1]

        last = _TapRecord()
        for entry in self._records():  # rebuild the list, which frees the ignored records
            value = entry.value
            if isinstance(value, RecordedAttention):
                cache = value.cache
                has_own_keys = cache is not None and value.memory is None and value.version is cache.version
                if cache is not None and has_own_keys and cache not in self._keys:
                    k, positions = current_keys(cache)
                    self._keys[cache], self._versions[cache] = (k.clone(), positions.clone()), cache.version
                value = value._replace(bias=freeze_once(value.bias), mechanism=freeze_once(value.mechanism))
            last = _TapRecord(last, entry.owner, entry.name, value)
        self._last = last
        self._memories.clear()


_recorder: Recorder | None = None


def is_recording() -> bool:
    """Whether a recorder is active in this thread."""
    recorder = _recorder
    return recorder is not None and recorder._thread == threading.get_ident()


def tap(name: str, x: Tensor, owner: nn.Module | None = None, small: bool = False) -> Tensor:
    """Pass x to the active recorder, if any, under a name; ``owner`` is the module it belongs to. Returns x.

    A recorder without ``values`` keeps only ``small`` tensors.
    """
    recorder = _recorder  # read once: another thread may remove it
    if recorder is not None and (small or recorder.values):
        recorder._append(owner, name, x.detach(), x)
    return x


def tap_attention(owner: nn.Module, call: AttentionCall, output: Tensor, cache: Cache | None = None) -> Tensor:
    """Pass an attention call of ``owner`` to the active recorder, if any. Returns the output."""
    recorder = _recorder
    if recorder is None:
        return output
    values, copy = recorder.values, torch.Tensor.detach if recorder.values else _compact_copy
    recorded = RecordedAttention(
        q=copy(call.q),
        k=copy(call.k) if cache is None else None,
        v=call.v.detach() if values and cache is None else None,
        output=output.detach() if values else None,
        mask=call.mask,
        bias=call.bias,
        mechanism=call.mechanism,
        q_pos=call.frame.q_pos.clone(),  # the cache would overwrite a view
        frame=call.frame if cache is None else None,
        cache=cache,
        version=None if cache is None else cache.version,
        memory=current_keys(cache) if isinstance(cache, CrossCache) else None,
        sinks=None if call.sinks is None else call.sinks.detach().clone(),
    )
    recorder._append(owner, "attention", recorded, output)
    return output


def _compact_copy(x: Tensor) -> Tensor:
    """x in memory of its own: a view would keep the output of the qkv projection alive."""
    x = x.detach()
    is_whole = not torch.compiler.is_compiling() and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if is_whole else x.clone(memory_format=torch.contiguous_format)


def _should_ignore(recorder: Recorder | None) -> bool:
    """Whether this is a recomputation by gradient checkpointing inside backward, or another thread."""
    in_backward = torch._C._current_graph_task_id() != -1
    return in_backward or (recorder is not None and recorder._thread != threading.get_ident())


@torch.library.custom_op("regard::is_ignored", mutates_args=())
def _is_ignored(at: Tensor) -> Tensor:
    """``_should_ignore`` as an operator of a compiled graph; the argument determines where in the graph it runs."""
    return torch.tensor(_should_ignore(_recorder))


@_is_ignored.register_fake
def _(at: Tensor) -> Tensor:
    return torch.empty((), dtype=torch.bool)


@contextmanager
def record(model: nn.Module, values: bool = True) -> Iterator[Recorder]:
    """Record every tap of ``model``, compiled or not, inside the ``with`` block.

    Keeps q, k, v and the output of every attention call, O(T) numbers; with a cache, q and the output of every call and
    the cache's keys once. ``values=False`` keeps only q and k, in compact copies, which is enough for the attention
    weights. The recorder can be read inside and after the block; biases, mechanisms and keys are copied when it ends,
    masks are kept by reference.
    """
    global _recorder
    if _recorder is not None:
        raise RuntimeError("record() is already active; only one recorder can be active at a time")
    recorder = _recorder = Recorder(model, values)
    try:
        with _record_in_checkpoints():
            yield recorder
    finally:
        _recorder = None
        recorder.close()


def _record_in_checkpoints() -> AbstractContextManager[None]:
    """Let compiled graphs record inside checkpointed regions, in the first forward pass only."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes seconds
        return nullcontext()
    config = torch._dynamo.config
    option = "skip_fwd_side_effects_in_bwd_under_checkpoint"
    return config.patch({option: True}) if hasattr(config, option) else nullcontext()
