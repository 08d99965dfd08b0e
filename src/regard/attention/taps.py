"""What was seen of an attention, and the steps of one decoding joined to a single score matrix."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

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
    """One attention as it was computed: q and k as the mechanism prepared them, and what its weights follow from.

    While decoding with a cache, k, v and frame are None: the cache has them, and to keep them for every step would be
    O(T²). ``version`` says what the cache held then. A memory is the same at every step and kept: ``memory`` has the
    keys of a CrossCache and their positions. A recorder without ``values`` leaves out v and output.
    """

    q: Tensor
    k: Tensor | None
    v: Tensor | None
    output: Tensor | None
    mask: Mask | None
    bias: Bias | None
    mechanism: Mechanism
    q_pos: Tensor
    frame: Frame | None
    cache: Cache | None
    version: CacheVersion | None
    memory: tuple[Tensor, Tensor] | None


def current_keys(cache: Cache) -> tuple[Tensor, Tensor]:
    """The keys of a cache and their positions, without history."""
    k, positions = cache.keys()
    return k.detach(), positions


def is_same_memory(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    """Whether two memories are alike; beams of one source are, however they were reordered."""
    return a is b or all(x.shape == y.shape and torch.equal(x, y) for x, y in zip(a, b, strict=True))


def join_steps(steps: list[RecordedAttention], cache: Cache, keys: tuple[Tensor, Tensor]) -> ScoreMatrix:
    """One ScoreMatrix for all steps. While decoding only queries are kept: the keys are the cache's, asked for once."""
    first, (k, k_pos) = steps[0], keys
    if first.mechanism.kind == "summary":
        raise ValueError(
            f"mechanism {first.mechanism.name!r} sums up its keys anew at every step; there is no map of them all"
        )
    if any(step.bias is not first.bias for step in steps):
        raise ValueError(f"the bias is not the same in all {len(steps)} steps; say which step to look at")
    q_pos = _concat_positions([step.q_pos for step in steps])
    frame = Frame(first.q.shape[0], first.q.shape[1], q_pos, k_pos)
    sizes = [step.q.shape[2] for step in steps]
    mask = _joint_mask([step.mask for step in steps], sizes)
    if not isinstance(cache, CrossCache):
        _check_complete(q_pos, k_pos)
        written = _concat_positions([step.q_pos.amax(-1, keepdim=True).expand_as(step.q_pos) for step in steps])
        mask = WrittenKeys(written) if mask is None else mask & WrittenKeys(written)
    if mask is not None:
        mask.check(frame)
    return ScoreMatrix(
        torch.cat([step.q for step in steps], dim=2), first.mechanism.keys(k), mask, first.bias, first.mechanism, frame
    )


def _concat_positions(parts: list[Tensor]) -> Tensor:
    """(T,) and (B, T) side by side."""
    n_rows = max((x.shape[0] for x in parts if x.dim() == 2), default=None)
    return torch.cat(parts if n_rows is None else [x.expand(n_rows, -1) for x in parts], dim=-1)


def _check_complete(q_pos: Tensor, k_pos: Tensor) -> None:
    """Weights are shares of a whole: with some of the keys gone, those of the others cannot be known."""
    last = int(q_pos.max())
    there = torch.zeros(*k_pos.shape[:-1], last + 2, dtype=torch.bool, device=k_pos.device)
    there.scatter_(-1, torch.where((k_pos >= 0) & (k_pos <= last), k_pos, last + 1), True)  # the rest, out of the way
    wanted = torch.arange(last + 1, device=k_pos.device) <= q_pos.amax(-1, keepdim=True)
    n_stale = int((wanted & ~there[..., :-1]).sum(-1).max())
    if n_stale:
        raise ValueError(
            f"{n_stale} of the {last + 1} keys are no longer in the cache; RingCache(keep_keys=…) keeps them"
        )


@dataclass(frozen=True, eq=False)
class WrittenKeys(Mask):
    """Keys that were in the cache when the query was asked: up to the last position of its step."""

    until: Tensor  # (T,) or (B, T)

    def allows(self, at: Site) -> Tensor:
        return at.j <= (self.until[at.row] if self.until.dim() == 1 else self.until[at.b, at.row])

    def bounds(self, box: Box) -> Bounds:
        low, high = block_range(self.until, box.block[0])
        return box.j_min <= high[:, None], box.j_max <= low[:, None]


@dataclass(frozen=True, eq=False)
class StepMasks(Mask):
    """Each step's queries under the mask that step was given; None: they see everything."""

    masks: tuple[Mask | None, ...]
    ends: tuple[int, ...]  # the row after each step's last

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


def _joint_mask(masks: list[Mask | None], sizes: list[int]) -> Mask | None:
    """The one mask of all steps; where they differ, each for its own rows."""
    if all(_equal(mask, masks[0]) for mask in masks):
        return masks[0]
    return StepMasks(tuple(masks), tuple(torch.tensor(sizes).cumsum(0).tolist()))


def _equal(a: object, b: object) -> bool:
    """Whether two masks say the same; models build theirs anew with every step."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    if a is b or not isinstance(a, Mask) or type(a) is not type(b) or not is_dataclass(a):
        return a is b or (not isinstance(a, Mask) and a == b)
    return all(_equal(getattr(a, field.name), getattr(b, field.name)) for field in fields(a))


class _TapRecord:
    """One thing that passed a tap, and what passed before it.

    A chain, because a compiled graph can lengthen it without reading it. A list it would compare, as far as it has
    grown, with the one it was compiled for, and compile anew with every call.
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
        self.ignored = ignored  # of a compiled graph: whether it ran where the recorder does not look


class Recorder:
    """Keeps what the taps of one model show it, by the place where it was seen, in the order it came."""

    def __init__(self, model: nn.Module, values: bool = True) -> None:
        self.values = values  # whether v, outputs and what ``tap`` shows are kept too
        model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
        self._module_names = {module: name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._last = _TapRecord()
        self._thread = threading.get_ident()  # what other threads do is not for this recorder
        self._keys: dict[Cache, tuple[Tensor, Tensor]] = {}
        self._versions: dict[Cache, CacheVersion] = {}  # of these keys
        self._memories: dict[Cache, tuple[Tensor, Tensor]] = {}

    @property
    def tensors(self) -> dict[str, list[Tensor]]:
        """What ``tap`` showed, by name; a module's own taps stand under its place, "layers.0.norm.x"."""
        by_name: dict[str, list[Tensor]] = {}
        for entry in self._records():
            if isinstance(entry.value, Tensor):
                place = "" if entry.owner is None else self._module_names[entry.owner]
                by_name.setdefault(f"{place}.{entry.name}" if place else entry.name, []).append(entry.value)
        return by_name

    @property
    def attentions(self) -> dict[str, list[RecordedAttention]]:
        """What ``tap_attention`` showed, by the place of the module in the model ("attention" if it is the model)."""
        by_name: dict[str, list[RecordedAttention]] = {}
        for entry in self._records():
            if isinstance(entry.value, RecordedAttention) and entry.owner is not None:
                by_name.setdefault(self._module_names[entry.owner] or "attention", []).append(entry.value)
        return by_name

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

    def _scoring(self, name: str, seen: list[RecordedAttention]) -> ScoreMatrix:
        one, cache = seen[0], seen[0].cache
        if cache is None:
            assert one.k is not None and one.frame is not None
            return ScoreMatrix(one.q, one.k, one.mask, one.bias, one.mechanism, one.frame)
        if one.memory is not None:
            if any(s.memory is None or not is_same_memory(s.memory, one.memory) for s in seen):
                raise ValueError(f"the memory is not the same in all {len(seen)} calls at {name!r}; say which step")
            return join_steps(seen, cache, one.memory)
        version = self._versions.get(cache, cache.version)
        n_stale = sum(s.version is not version for s in seen)
        if n_stale:
            raise ValueError(
                f"the cache was reordered, truncated or reset after {n_stale} of these {len(seen)} calls at {name!r},"
                " whose keys are gone; look at the steps since then"
            )
        return join_steps(seen, cache, self._keys[cache] if cache in self._keys else current_keys(cache))

    def _records(self) -> list[_TapRecord]:
        """Everything seen of the model, oldest first; what checkpointing computed again is left out."""
        chain: list[_TapRecord] = []
        entry = self._last
        while entry.before is not None:
            if (entry.owner is None or entry.owner in self._module_names) and (
                entry.ignored is None or not entry.ignored
            ):
                chain.append(entry)
            entry = entry.before
        return chain[::-1]

    def _share_memory(self, seen: RecordedAttention) -> RecordedAttention:
        """With the memory kept already where it is the same: reordering copies it."""
        if seen.cache is None or seen.memory is None:
            return seen
        kept = self._memories.get(seen.cache)
        if kept is None or not is_same_memory(kept, seen.memory):
            kept = self._memories[seen.cache] = seen.memory
        return seen._replace(memory=kept)

    def close(self) -> None:
        """Make it a snapshot: training will change the biases, and the next text will be written over the keys."""
        frozen: dict[int, Any] = {}  # one bias may be seen by all layers at all steps

        def once(part: Any) -> Any:
            if id(part) not in frozen:
                frozen[id(part)] = part, freeze(part)  # both: an id is one's own only as long as one lives
            return frozen[id(part)][1]

        last = _TapRecord()
        for entry in self._records():  # a new chain, which lets go of everything else that a compiled graph showed
            value = entry.value
            if isinstance(value, RecordedAttention):
                self._copy_keys(value)
                value = value._replace(bias=once(value.bias), mechanism=once(value.mechanism))
            last = _TapRecord(last, entry.owner, entry.name, value)
        self._last = last
        self._memories.clear()

    def _copy_keys(self, seen: RecordedAttention) -> None:
        cache = seen.cache
        if cache is None or seen.memory is not None or cache in self._keys or seen.version is not cache.version:
            return
        k, positions = current_keys(cache)
        self._keys[cache], self._versions[cache] = (k.clone(), positions.clone()), cache.version


_recorder: Recorder | None = None


def tap(name: str, x: Tensor, owner: nn.Module | None = None) -> Tensor:
    """Show ``x`` to the recorder, if there is one, under a name; ``owner`` is the module it belongs to. Returns x."""
    if _recorder is not None and _recorder.values:
        _append_record(_recorder, owner, name, x.detach(), x)
    return x


def tap_attention(owner: nn.Module, call: AttentionCall, output: Tensor, cache: Cache | None = None) -> Tensor:
    """Show an attention computed by ``owner`` to the recorder, if there is one. Returns the output."""
    if _recorder is not None:
        _append_record(
            _recorder, owner, "attention", _recorded_attention(call, output, cache, _recorder.values), output
        )
    return output


def _recorded_attention(call: AttentionCall, output: Tensor, cache: Cache | None, values: bool) -> RecordedAttention:
    kept = torch.Tensor.detach if values else _compact_copy
    k, frame = (None, None) if cache is not None else (kept(call.k), call.frame)
    q_pos = call.frame.q_pos.clone()  # its own memory: a view would keep alive, or be overwritten by, the cache's
    return RecordedAttention(
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
        None if cache is None else cache.version,
        current_keys(cache) if isinstance(cache, CrossCache) else None,
    )


def _compact_copy(x: Tensor) -> Tensor:
    """x in memory of its own: a view would keep alive the whole product, v too, that q and k are parts of."""
    x = x.detach()
    alone = not torch.compiler.is_compiling() and x.is_contiguous() and x.untyped_storage().nbytes() == x.nbytes
    return x if alone else x.clone(memory_format=torch.contiguous_format)


def _append_record(
    recorder: Recorder, owner: nn.Module | None, name: str, value: Tensor | RecordedAttention, at: Tensor
) -> None:
    if torch.compiler.is_compiling():  # who runs the graph, and why, is only known when it runs
        recorder._last = _TapRecord(recorder._last, owner, name, value, _is_ignored(at.detach()))
    elif not _should_ignore(recorder) and (owner is None or owner in recorder._module_names):
        value = recorder._share_memory(value) if isinstance(value, RecordedAttention) else value
        recorder._last = _TapRecord(recorder._last, owner, name, value)


def _should_ignore(recorder: Recorder | None) -> bool:
    """Whether this forward pass is gradient checkpointing's second one, inside backward, or another thread's."""
    again = torch._C._current_graph_task_id() != -1
    return again or (recorder is not None and recorder._thread != threading.get_ident())


@torch.library.custom_op("regard::is_ignored", mutates_args=())
def _is_ignored(at: Tensor) -> Tensor:
    """``_ignores`` as a step of a compiled graph; it takes a tensor so that it stays where it was called."""
    return torch.tensor(_should_ignore(_recorder))


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
