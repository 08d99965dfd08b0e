"""Learning-rate schedules, Muon, and a wrapper for the one or two torch optimisers of a run.

The learning rate is a pure function of the step, so a checkpoint stores nothing for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..attention.biases import Bias
from ..attention.mechanisms import Additive
from ..config import TrainConfig
from ..layers import FeedForward, VisionEmbeddings
from ..models.block import Block
from ..models.experts import ExpertLinear
from ..models.recurrent_cells import Gates
from .shards import is_dtensor, shard_like

Schedule = Callable[[int], float]  # the factor on the peak learning rate at a step, counted from 1
# Coefficients of the quintic of Muon (Jordan 2024): five iterations bring every singular value in (0, 1] near 1. They
# maximise the slope at 0 and do not converge to exactly 1.
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Most elements orthogonalised in one stack, 128 MiB in bf16: matrices beyond this size fill the device on their own.
MAX_STACK_ELEMENTS = 1 << 26
_FUSED_ON = ("cpu", "cuda", "mps")  # devices with a fused Adam kernel; on a CPU it is 4 to 7 times faster than foreach
_PEAK = "peak"  # key of a group's peak learning rate, which the schedule's factor multiplies


def schedule_of(train: TrainConfig) -> Schedule:
    """The schedule that ``train`` describes. ``train.lr`` is the peak of every schedule, including the paper's.

    train.lr=paper_lr(d_model, train.warmup) gives the paper's own rates.
    """
    if start := train.schedule_start:
        restarted = schedule_of(train.with_(schedule_start=0, steps=train.steps - start))
        return lambda step: restarted(max(1, step - start))
    match train.schedule:
        case "noam":
            return noam(train.warmup)
        case "cosine":
            return cosine(train.warmup, train.steps, train.floor)
        case "wsd":
            return warmup_stable_decay(train.warmup, train.steps, floor=train.floor)
    return constant(train.warmup)


def paper_lr(d_model: int, warmup: int) -> float:
    """The peak of the paper's learning rate, d_model^-0.5 · warmup^-0.5: 7e-4 for the base model's 512 and 4,000."""
    return (d_model * max(warmup, 1)) ** -0.5


def noam(warmup: int) -> Schedule:
    """The schedule of Vaswani et al. (2017, eq. 3), scaled so that its peak, at the end of the warm-up, is 1.

    factor = min(step^-0.5, step · warmup^-1.5) · warmup^0.5; times ``paper_lr`` it is the paper's learning rate.
    """
    warmup = max(warmup, 1)
    return lambda step: min((warmup / step) ** 0.5, step / warmup)


def cosine(warmup: int, steps: int, floor: float = 0.0) -> Schedule:
    """Linear warm-up, then half a cosine down to ``floor`` at the last step (Loshchilov & Hutter 2017)."""

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        done = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    return factor


def warmup_stable_decay(warmup: int, steps: int, decay: float = 0.2, floor: float = 0.0) -> Schedule:
    """Linear warm-up, constant, then linear decay over the last ``decay`` share of the steps (Hu et al. 2024)."""
    start = max(warmup, steps - round(decay * steps))

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        if step <= start:
            return 1.0
        return floor + (1 - floor) * max(0.0, (steps - step) / max(1, steps - start))

    return factor


def constant(warmup: int) -> Schedule:
    """Linear warm-up, then a constant rate."""
    return lambda step: min(1.0, step / max(warmup, 1))


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by a Newton-Schulz iteration (Jordan et al. 2024); 2-D parameters only.

    ``joined`` gives, for a parameter that stacks several matrices, the number of rows of each; every matrix is
    orthogonalised separately.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        steps: int = 5,
        joined: Mapping[Tensor, tuple[int, ...]] | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "steps": steps}
        super().__init__(params, defaults)
        self._row_sizes = {} if joined is None else dict(joined)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # a run has no closure
        for group in self.param_groups:
            if params := [param for param in group["params"] if param.grad is not None]:
                self._step(params, group)

    def _step(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        grads = [param.grad for param in params if param.grad is not None]
        if (skips := getattr(self, "found_inf", None)) is not None:
            grads = [torch.where(skips > 0, 0.0, grad) for grad in grads]
        for param in params:
            if "momentum" not in self.state[param]:
                self.state[param]["momentum"] = torch.zeros_like(param)
        buffers = [self.state[param]["momentum"] for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates: Any = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers
        # Orthogonalising needs the whole matrix: updates sharded over processes are gathered.
        updates = [update.full_tensor() if is_dtensor(update) else update for update in updates]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        rows = [self._row_sizes.get(param, (len(param),)) for param in params]
        pieces = [piece for update, sizes in zip(updates, rows, strict=True) for piece in update.split(sizes)]
        directions = iter(orthogonal(pieces, group["steps"]))
        unsharded: list[tuple[Tensor, Tensor]] = []
        for param, sizes in zip(params, rows, strict=True):
            param_directions = [next(directions) for _ in sizes]
            if is_dtensor(param):
                param.add_(shard_like(torch.cat(param_directions), param), alpha=-lr)
            else:
                unsharded += zip(param.split(sizes), param_directions, strict=True)
        if unsharded:
            torch._foreach_add_([part for part, _ in unsharded], [direction for _, direction in unsharded], alpha=-lr)


def orthogonal(matrices: list[Tensor], steps: int = 5) -> list[Tensor]:
    """For each matrix U S Vᵀ, approximately max(1, rows / columns)^½ · U Vᵀ: its singular values end near 1.

    The factor makes a matrix of any shape change its output by a similar amount. Matrices of one shape are stacked and
    computed together; results are in the order and the dtypes of the inputs.
    """
    by_shape: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        by_shape.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(i)
    results: dict[int, Tensor] = {}
    for (shape, dtype, _), indices in by_shape.items():
        stack_size = max(1, MAX_STACK_ELEMENTS // max(1, shape.numel()))
        for start in range(0, len(indices), stack_size):
            chunk = indices[start : start + stack_size]
            stacked = newton_schulz(torch.stack([matrices[i] for i in chunk]), steps).to(dtype)
            if shape[0] > shape[1]:
                stacked = stacked * (shape[0] / shape[1]) ** 0.5
            results.update(zip(chunk, stacked.unbind(), strict=True))
    return [results[i] for i in range(len(matrices))]


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """X ← a X + (b X Xᵀ + c (X Xᵀ)²) X, ``steps`` times from X / ‖X‖, for a stack of matrices (n, rows, columns)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    x = (x.mT if tall else x).to(product_dtype(x.device, x.dtype), memory_format=torch.contiguous_format)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


@lru_cache
def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """bf16 for fp32 inputs if the device multiplies it in hardware, else ``dtype``; the iteration corrects rounding.

    This depends on the device alone and is never measured, so that a resumed run computes the same numbers.
    """
    has_bf16 = False
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability(device) >= (8, 0) or torch.version.hip is not None
    elif device.type == "cpu":  # other processors emulate bf16 in fp32, slowly
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if dtype == torch.float32 and has_bf16 else dtype


@dataclass(frozen=True)
class Role:
    """How the optimiser treats a parameter."""

    name: str
    param: Tensor
    decays: bool  # weight decay applies
    in_layer: bool  # a matrix of a layer, which Muon can train
    rows: tuple[int, ...]  # rows of each matrix it holds; several if matrices are stored joined


class Optimiser:
    """The one or two torch optimisers of a run behind one interface; a GradScaler steps each of ``optimisers``."""

    def __init__(self, optimisers: list[torch.optim.Optimizer], names: Mapping[Tensor, str]) -> None:
        self.optimisers = optimisers
        self._names = dict(names)
        for group in self._groups():
            group[_PEAK] = group["lr"]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimiser in self.optimisers for group in optimiser.param_groups)

    def set_lr(self, factor: float) -> None:
        """Set the learning rate of each group to ``factor`` (from a Schedule) times its peak."""
        for group in self._groups():
            group["lr"] = group[_PEAK] * factor

    def skip_where(self, broken: Tensor) -> None:
        """If ``broken``, a bool tensor that is not read back to the host, is true, the next step skips its gradients.

        Fused Adam then changes no weight; Muon may still apply the momentum it has.
        """
        for optimiser in self.optimisers:
            optimiser.found_inf = broken.float()  # type: ignore[attr-defined]  # the attribute a GradScaler sets for fused kernels

    def step(self) -> None:
        for optimiser in self.optimisers:
            optimiser.step()

    def zero_grad(self) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state without copies, including step counters, named ``optimiser/state/parameter``; sharded like the
        parameters."""
        return {
            f"{_kind(optimiser)}/{key}/{self._names[param]}": value
            for optimiser in self.optimisers
            for param, state in optimiser.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore ``state_tensors``. Whole tensors are sharded like their parameters."""
        known = {
            f"{_kind(optimiser)}/{self._names[param]}": (optimiser, param, bool(group.get("fused")))
            for optimiser in self.optimisers
            for group in optimiser.param_groups
            for param in group["params"]
        }
        loaded = []
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            state, _, name = rest.partition("/")
            if f"{kind}/{name}" not in known:
                raise ValueError(f"the optimiser's state holds {key!r}, but {kind} trains no parameter {name!r} here")
            optimiser, param, fused = known[f"{kind}/{name}"]
            if state != "step" and value.shape != param.shape:
                raise ValueError(f"{key!r} has shape {tuple(value.shape)}, but its parameter {tuple(param.shape)}")
            # torch keeps step counters on the CPU except for fused kernels.
            copy = value.detach().to("cpu" if state == "step" and not fused else param.device, copy=True)
            loaded.append((optimiser, param, state, shard_like(copy, param) if copy.dim() == param.dim() else copy))
        for optimiser in self.optimisers:
            optimiser.state.clear()
        for optimiser, param, state, tensor in loaded:
            optimiser.state[param][state] = tensor


def _kind(optimiser: torch.optim.Optimizer) -> str:
    return type(optimiser).__name__.lower()


def build_optimiser(model: nn.Module, train: TrainConfig) -> Optimiser:
    """The optimiser of ``train`` over all parameters that are not frozen; build it after moving or sharding the model.

    Weight decay applies to matrices only: decoupled for AdamW and Muon, L2 in the gradient for Adam.
    """
    trained = list(roles(model))
    if not trained:
        raise ValueError("no parameter is left to train: all are frozen")
    by_muon = [role for role in trained if train.optimiser == "muon" and role.in_layer]
    by_adam = [role for role in trained if train.optimiser != "muon" or not role.in_layer]
    optimisers: list[torch.optim.Optimizer] = []
    if by_adam:
        groups = [
            {"params": [role.param for role in by_adam if role.decays], "weight_decay": train.weight_decay},
            {"params": [role.param for role in by_adam if not role.decays], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        adam = torch.optim.Adam if train.optimiser == "adam" else torch.optim.AdamW
        fused = all(role.param.device.type in _FUSED_ON for role in by_adam) or None
        optimisers.append(adam(groups, train.lr, train.betas, train.eps, fused=fused))
    if by_muon:
        rows = {role.param: role.rows for role in by_muon}
        optimisers.append(Muon(list(rows), train.muon_lr, weight_decay=train.weight_decay, joined=rows))
    return Optimiser(optimisers, {role.param: role.name for role in trained})


def roles(model: nn.Module) -> Iterator[Role]:
    """The role of each parameter that is not frozen; a tied one appears once, under its first name."""
    rows = {param: sizes for module in model.modules() for param, sizes in _joined_parameters(module)}
    layers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Block | Gates))
    seen: set[Tensor] = set()
    for path, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            if param in seen or not param.requires_grad:
                continue
            seen.add(param)
            name = f"{path}.{own}" if path else own
            plain = own == "weight" if isinstance(module, nn.Linear) else own == "w_r" or isinstance(module, Gates)
            linear = plain and param.dim() == 2  # additions to a Linear, such as LoRA factors, go to AdamW
            decays = param.dim() > 1 and not _is_table(module, own)
            yield Role(name, param, decays, linear and name.startswith(layers), rows.get(param, (len(param),)))


def _is_table(module: nn.Module, own: str) -> bool:
    """Whether rows are looked up or added, not multiplied: embeddings, positions, class tokens, biases of heads."""
    if isinstance(module, Bias):
        return own != "w_r"  # Transformer-XL's projection of distances
    rows = {Additive: "v", ExpertLinear: "bias"}
    return isinstance(module, nn.Embedding | VisionEmbeddings) or rows.get(type(module)) == own


def _joined_parameters(module: nn.Module) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The parameters of a module that stack several matrices, with the number of rows of each."""
    if isinstance(module, Gates):
        for gates in (module.w_x, module.w_h):
            yield gates, (len(gates) // module.n_gates,) * module.n_gates
    for attribute, rows in joined_matrices(module).items():
        # A quantised replacement of the layer has no weight parameter.
        if isinstance(weight := getattr(getattr(module, attribute), "weight", None), nn.Parameter):
            yield weight, tuple(rows.values())


def joined_matrices(module: nn.Module) -> dict[str, dict[str, int]]:
    """The linear layers of a module that join several matrices: {attribute: {name of the matrix: rows}}."""
    if isinstance(module, MultiHeadAttention):
        q_rows, kv_rows = module.n_heads * module.d_head, module.n_kv_heads * module.d_head
        key_value = {"k": kv_rows, "v": kv_rows}
        return {"w_query": {"q": q_rows}, "w_kv": key_value} if module.cross else {"w_qkv": {"q": q_rows, **key_value}}
    if isinstance(module, FeedForward) and module.gated:
        return {"w_in": {"gate": module.d_ff, "up": module.d_ff}}
    return {}
