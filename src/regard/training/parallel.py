"""Several processes as one run. Models stay single-device code; what makes them parallel is put around them here.

Gradients are averaged over the processes, by DDP and FSDP2 alike: a loss that is a sum is multiplied by ``world``
before the backward pass, and what stands in ``.grad`` afterwards is that of one process with the whole batch.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ..models.block import Block, Stack
from .shards import is_dtensor

Parallel = Literal["ddp", "fsdp"]
# One process may evaluate while the others wait for it; one that dies ends the rest through torchrun, not this.
_PATIENCE = timedelta(hours=2)


@dataclass(frozen=True)
class Group:
    """The processes of a run and this one's place among them. As it stands: one process alone, which needs nobody.

    Every method is to be called by all processes, in the same order.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes, prints and decides."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world > 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the processes; ``x`` stays as it is."""
        if not self.is_distributed:
            return x
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    def barrier(self) -> None:
        """Wait until all are here."""
        self.gather_objects(None)

    def broadcast_object(self, x: Any) -> Any:
        """The main process' object, on all."""
        if not self.is_distributed:
            return x
        held = [x]
        dist.broadcast_object_list(held, src=0)
        return held[0]

    def gather_objects(self, x: Any) -> list[Any]:
        """The object of every process, by rank, on all."""
        if not self.is_distributed:
            return [x]
        held = [None] * self.world
        dist.all_gather_object(held, x)
        return held

    def close(self) -> None:
        """Part from the others; nothing more can be asked of the group."""
        if self.is_distributed and dist.is_initialized():
            dist.destroy_process_group()


def open_group(device: torch.device | str = "cpu") -> Group:
    """The group torchrun's environment describes, each process with a GPU of its own; without torchrun one alone."""
    device = torch.device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return Group(device=device)
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise ValueError(f"WORLD_SIZE={world} without {', '.join(missing)}: start several processes with torchrun")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        if local_rank >= (n := torch.cuda.device_count()):
            raise ValueError(f"LOCAL_RANK={local_rank} has no GPU: there are {n}; start at most {n} processes here")
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    elif device.type != "cpu":
        raise ValueError(f"WORLD_SIZE={world} on device={device.type}: several processes work on cpu and cuda")
    # With CUDA both: numbers travel by NCCL, flags and objects by gloo, without a wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)
    return Group(rank, world, local_rank, device)


def parallelise(objective: nn.Module, kind: Parallel, group: Group, dtype: torch.dtype | None = None) -> nn.Module:
    """The objective over the group's processes: whole copies ("ddp") or cut into shards ("fsdp").

    To be called before the optimiser takes the parameters: sharding replaces them. All start from the main process'
    numbers. ``dtype`` is that of autocast, if any: FSDP then sends the layers' weights in it, half the bytes; the
    weights themselves, the gradients' sum, tables and heads stay as they are.
    """
    if kind not in ("ddp", "fsdp"):
        raise ValueError(f"parallel={kind!r} is unknown; there are 'ddp' and 'fsdp'")
    if not group.is_distributed:
        return objective
    if kind == "ddp":
        ids = [group.device.index] if group.device.type == "cuda" else None
        # Buffers here are tables of fixed numbers, the same everywhere: nothing to send with every step.
        known = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # torch 2.13
        unsent: dict[str, Any] = {name: False}
        return DistributedDataParallel(objective, device_ids=ids, gradient_as_bucket_view=True, **unsent)
    # FSDP2 (Zhao et al. 2023): one unit a layer, gathered when it runs; the rest is gathered all through a step.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for x in [*objective.parameters(), *objective.buffers()]:
        dist.broadcast(x.data, src=0)
    mesh = init_device_mesh(group.device.type, (group.world,))
    half = None if dtype in (None, torch.float32) else dtype
    # Inputs are not cast: autocast decides what runs in half precision, and the residual stream is not among it.
    policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    whole = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = [fully_shard(block, mesh=mesh, mp_policy=policy) for block in _units(objective)]
    units.append(fully_shard(objective, mesh=mesh, mp_policy=whole))
    # In the backward pass each layer calls for the one before it. Left to itself FSDP goes by the order of forward
    # calls it has seen, which differs between processes once one of them has evaluated alone.
    for i, unit in enumerate(units):
        unit.set_modules_to_backward_prefetch([units[max(0, i - 1)]])
    return objective


def _units(objective: nn.Module) -> Iterator[Block]:
    """Layers that run once in a pass and own what they hold. What is shared, and recurrent models, go to the root:

    a recurrent model's parts are used a step at a time, and not through the calls at which FSDP gathers."""
    places = Counter(p for _, p in objective.named_parameters(remove_duplicate=False))
    for stack in (module for module in objective.modules() if isinstance(module, Stack)):
        for block in stack.blocks:
            own = list(block.parameters())
            if isinstance(block, Block) and stack.n_layers == len(stack.blocks) and all(places[p] == 1 for p in own):
                yield block


def gradient_sync(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Around forward and backward of one micro-batch; ``last`` of those accumulated for a step.

    DDP averages once, with the last. FSDP sums each into its shards: gradients kept whole until the last would take
    the very memory that sharding saves, and could not be stored between two micro-batches.
    """
    inner: Any = getattr(module, "_orig_mod", module)  # also inside torch.compile's wrapper
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) and not last else nullcontext()


@contextmanager
def gather_parameters(module: nn.Module) -> Iterator[None]:
    """Inside, every process holds all weights, and any part of the model may be run on any of them, or on one alone.

    For evaluation and generation, without gradients: they call the model by other ways than the wrapped objective's.
    Layers' weights are then in the ``dtype`` they are sent in, so autocast has to be on where it is in training.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a second to import, and nothing is sharded without it
    units: list[Any] = [] if fsdp is None else [unit for unit in module.modules() if isinstance(unit, fsdp.FSDPModule)]
    if units:  # else the first part that runs would take itself for the root, where nothing has run yet
        units[0]._get_fsdp_state()._lazy_init()
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(unit is not module, recurse=False)  # the root's stay for its backward pass


def clip_grad_norm(parameters: Iterable[Tensor], largest: float | None) -> Tensor:
    """Scale gradients so that their norm over all parameters and processes is at most ``largest``; what it was.

    The same number on every process. It is not finite where a gradient is not, and nothing is scaled then.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    norm = norm.full_tensor() if is_dtensor(norm) else norm
    if largest is not None:
        # As 0 a norm that is not finite scales nothing, and to look at it here would have the GPU wait.
        torch.nn.utils.clip_grads_with_norm_(with_grad, largest, torch.where(norm.isfinite(), norm, 0.0))
    return norm
