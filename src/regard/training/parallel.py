"""Training on several processes with DDP or FSDP2. Models are single-device code and are wrapped here.

DDP and FSDP2 average gradients over the processes: the loss, a sum, is multiplied by ``world`` before the backward
pass, and ``.grad`` then holds what one process would compute for the whole batch.
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
# Long, because processes wait while the main one evaluates. If a process dies, torchrun ends the others.
_TIMEOUT = timedelta(hours=2)


@dataclass(frozen=True)
class Group:
    """The processes of a run and the rank of this one. ``Group()`` is a single process without communication.

    All processes must call the methods in the same order.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def is_main(self) -> bool:
        """Whether this process (rank 0) writes, prints and decides."""
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.world > 1

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all processes; ``x`` is not changed."""
        if not self.is_distributed:
            return x
        total = x.detach().clone()
        dist.all_reduce(total)
        return total

    def barrier(self) -> None:
        """Wait until all processes have called this."""
        self.gather_objects(None)

    def broadcast_object(self, x: Any) -> Any:
        """The object of the main process, on all processes."""
        if not self.is_distributed:
            return x
        objects = [x]
        dist.broadcast_object_list(objects, src=0)
        return objects[0]

    def gather_objects(self, x: Any) -> list[Any]:
        """The objects of all processes, by rank, on all processes."""
        if not self.is_distributed:
            return [x]
        objects = [None] * self.world
        dist.all_gather_object(objects, x)
        return objects

    def close(self) -> None:
        """Leave the process group; the group cannot be used afterwards."""
        if self.is_distributed and dist.is_initialized():
            dist.destroy_process_group()


def open_group(device: torch.device | str = "cpu") -> Group:
    """The group that the environment of torchrun describes, one GPU per process; without torchrun, a single process."""
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
        raise ValueError(f"WORLD_SIZE={world} on device={device.type}: several processes need cpu or cuda")
    # On CUDA both: NCCL for tensors, and gloo for flags and objects, so that they do not wait for the GPU.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_TIMEOUT)
    return Group(rank, world, device)


def parallelise(objective: nn.Module, kind: Parallel, group: Group, dtype: torch.dtype | None = None) -> nn.Module:
    """Distribute the objective over the processes of a group: a full copy on each ("ddp") or shards ("fsdp").

    Call this before building the optimiser, because sharding replaces the parameters. All processes start from the
    weights of the main one. ``dtype`` is that of autocast, if any: FSDP then communicates the weights of layers in it,
    which halves the traffic. Stored weights, gradient sums, embeddings and heads keep their dtype.
    """
    if not group.is_distributed:
        return objective
    if kind == "ddp":
        ids = [group.device.index] if group.device.type == "cuda" else None
        # Buffers are constant tables, so they need not be broadcast. torch 2.13 renamed the argument.
        arguments = inspect.signature(DistributedDataParallel).parameters
        name = "forward_sync_buffers" if "forward_sync_buffers" in arguments else "broadcast_buffers"
        no_broadcast: dict[str, Any] = {name: False}
        return DistributedDataParallel(objective, device_ids=ids, gradient_as_bucket_view=True, **no_broadcast)
    # FSDP2 (Zhao et al. 2023): each layer is a unit, gathered when it runs; the rest stays gathered through a step.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    for x in [*objective.parameters(), *objective.buffers()]:
        dist.broadcast(x.data, src=0)
    mesh = init_device_mesh(group.device.type, (group.world,))
    half = None if dtype in (None, torch.float32) else dtype
    # Inputs are not cast: autocast decides what runs in half precision, and the residual stream stays in fp32.
    layer_policy = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32, cast_forward_inputs=False)
    root_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    units = [fully_shard(block, mesh=mesh, mp_policy=layer_policy) for block in _units(objective)]
    units.append(fully_shard(objective, mesh=mesh, mp_policy=root_policy))
    # In the backward pass each layer prefetches the one before it. By default FSDP follows the recorded order of
    # forward calls, which differs between processes after the main one has evaluated alone.
    for i, unit in enumerate(units):
        unit.set_modules_to_backward_prefetch([units[max(0, i - 1)]])
    return objective


def _units(objective: nn.Module) -> Iterator[Block]:
    """The layers that run once per pass and share no parameter; FSDP leaves everything else to the root unit.

    Recurrent models belong to the root too: their parts run step by step, not through the calls at which FSDP gathers.
    """
    n_uses = Counter(p for _, p in objective.named_parameters(remove_duplicate=False))
    for stack in (module for module in objective.modules() if isinstance(module, Stack)):
        if stack.n_layers != len(stack.blocks):  # layers that share their weights
            continue
        for block in stack.blocks:
            if isinstance(block, Block) and all(n_uses[p] == 1 for p in block.parameters()):
                yield block


def gradient_sync(module: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """A context for the forward and backward pass of one batch; ``last`` of those accumulated for a step.

    DDP averages once, with the last batch. FSDP reduces every batch into its shards: whole gradients would take the
    memory that sharding saves, and could not be checkpointed between two batches.
    """
    inner: Any = getattr(module, "_orig_mod", module)  # unwrap torch.compile
    return inner.no_sync() if isinstance(inner, DistributedDataParallel) and not last else nullcontext()


@contextmanager
def gather_parameters(module: nn.Module) -> Iterator[None]:
    """A context in which every process holds all weights and may run any part of the model on its own.

    For evaluation and generation, without gradients: they do not call the wrapped objective. Layers are then in the
    ``dtype`` they are communicated in, so autocast must be on if it is on in training.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a second to import; if it is not loaded, nothing is sharded
    units: list[Any] = [] if fsdp is None else [unit for unit in module.modules() if isinstance(unit, fsdp.FSDPModule)]
    if units:  # before the first forward pass, the first submodule to run would otherwise become the root
        units[0]._get_fsdp_state()._lazy_init()
    for unit in units:
        unit.set_reshard_after_forward(False, recurse=False)
        unit.unshard()
    try:
        yield
    finally:
        for unit in units:
            unit.reshard()
            unit.set_reshard_after_forward(unit is not module, recurse=False)  # the root stays gathered for backward


def clip_grad_norm(parameters: Iterable[Tensor], largest: float | None) -> Tensor:
    """Scale gradients so that their norm over all parameters and processes is at most ``largest``.

    Returns the norm before scaling, the same on every process. If it is not finite, nothing is scaled.
    """
    with_grad = [p for p in parameters if p.grad is not None]
    norm: Any = torch.nn.utils.get_total_norm([p.grad for p in with_grad if p.grad is not None])
    norm = norm.full_tensor() if is_dtensor(norm) else norm
    if largest is not None:
        # A norm of 0 scales nothing. An ``if`` on the norm would synchronise the GPU.
        torch.nn.utils.clip_grads_with_norm_(with_grad, largest, torch.where(norm.isfinite(), norm, 0.0))
    return norm
