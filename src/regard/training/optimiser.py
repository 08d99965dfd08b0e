"""Learning-rate schedules, Muon, and the optimisers of a run as one thing.

The learning rate is a pure function of the step: nothing to store, nothing to resume.
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
from ..foundation.checks import check_positive, check_probability
from ..layers import FeedForward, VisionEmbeddings
from ..models.block import Block
from ..models.experts import ExpertLinear
from ..models.recurrent_cells import Gates
from .shards import is_dtensor, shard_like

Schedule = Callable[[int], float]  # the factor on the peak learning rate at a step, counted from 1
# Of a quintic that lifts every singular value in (0, 1] to about 1 in five steps; exactness is given up for slope at 0.
_A, _B, _C = 3.4445, -4.7750, 2.0315
# Numbers made orthogonal at once, 128 MiB in bf16: large matrices fill the machine one by one.
_MOST_AT_ONCE = 1 << 26
_FUSED_ON = ("cpu", "cuda", "mps")  # one kernel for all of a step; on a CPU 4 to 7 times faster than foreach and loop
_PEAK = "peak"  # each group's own learning rate, which the schedule's factor multiplies


def schedule_of(train: TrainConfig) -> Schedule:
    """The schedule ``train`` describes. ``train.lr`` is the peak of every one of them, the paper's included.

    train.lr=paper_lr(d_model, train.warmup) gives the paper's own rates.
    """
    if start := train.schedule_start:
        again = schedule_of(train.with_(schedule_start=0, steps=train.steps - start))
        return lambda step: again(max(1, step - start))
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
    """The paper's (Vaswani et al. 2017, eq. 3), scaled so that its peak, at the end of the warm-up, is 1.

    factor = min(step^-0.5, step · warmup^-1.5) · warmup^0.5, times the peak of ``paper_lr``: the paper's rates.
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
    """Up, level, and down in a straight line over the last ``decay`` share of the steps (Hu et al. 2024)."""
    start = max(warmup, steps - round(decay * steps))

    def factor(step: int) -> float:
        if step <= warmup:
            return step / max(warmup, 1)
        if step <= start:
            return 1.0
        return floor + (1 - floor) * max(0.0, (steps - step) / max(1, steps - start))

    return factor


def constant(warmup: int) -> Schedule:
    """Linear warm-up, then level."""
    return lambda step: min(1.0, step / max(warmup, 1))


class Muon(torch.optim.Optimizer):
    """For 2-D parameters. ``joined`` gives the rows of each matrix in the parameters that hold more than one."""

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
        for name, value in (("lr", lr), ("weight_decay", weight_decay)):
            if value < 0:
                raise ValueError(f"{name}={value} must not be negative")
        check_probability(momentum=momentum)
        check_positive(steps=steps)
        defaults = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay, "steps": steps}
        super().__init__(params, defaults)
        self._row_sizes = {} if joined is None else dict(joined)
        for param in (param for group in self.param_groups for param in group["params"]):
            rows = self._rows(param)
            if param.dim() != 2 or sum(rows) != param.shape[0]:
                raise ValueError(f"joined={rows} does not divide a parameter of shape {tuple(param.shape)}")

    def _rows(self, param: Tensor) -> tuple[int, ...]:
        return self._row_sizes.get(param, (param.shape[0],))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]  # torch declares overloads
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if params := [param for param in group["params"] if param.grad is not None]:
                self._step(params, group)
        return loss

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
        # What is made orthogonal must be whole: a gradient sharded over processes is gathered, for its spectrum is.
        updates = [update.full_tensor() if is_dtensor(update) else update for update in updates]
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        rows = [self._rows(param) for param in params]
        pieces = [piece for update, sizes in zip(updates, rows, strict=True) for piece in update.split(sizes)]
        directions = iter(orthogonal(pieces, group["steps"]))
        here: list[tuple[Tensor, Tensor]] = []
        for param, sizes in zip(params, rows, strict=True):
            found = [next(directions) for _ in sizes]
            if is_dtensor(param):
                param.add_(shard_like(torch.cat(found), param), alpha=-lr)
            else:
                here += zip(param.split(sizes), found, strict=True)
        if here:
            torch._foreach_add_([part for part, _ in here], [direction for _, direction in here], alpha=-lr)


def orthogonal(matrices: list[Tensor], steps: int = 5) -> list[Tensor]:
    """max(1, rows / columns)^½ times the nearest orthogonal matrix U Vᵀ of each U S Vᵀ, roughly: S ends near 1.

    The factor lets a matrix of any shape move its output alike. Matrices of one shape are stacked and go through
    together; results are in order and in their matrix's dtype.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        alike.setdefault((matrix.shape, matrix.dtype, matrix.device), []).append(i)
    results: dict[int, Tensor] = {}
    for (shape, dtype, _), all_of_them in alike.items():
        at_once = max(1, _MOST_AT_ONCE // max(1, shape.numel()))
        for start in range(0, len(all_of_them), at_once):
            some = all_of_them[start : start + at_once]
            stacked = newton_schulz(torch.stack([matrices[i] for i in some]), steps).to(dtype)
            if shape[0] > shape[1]:
                stacked = stacked * (shape[0] / shape[1]) ** 0.5
            results.update(zip(some, stacked.unbind(), strict=True))
    return [results[i] for i in range(len(matrices))]


def newton_schulz(x: Tensor, steps: int = 5) -> Tensor:
    """X ← a X + (b X Xᵀ + c (X Xᵀ)²) X, ``steps`` times from X / ‖X‖, for each of a stack (…, rows, columns)."""
    tall = x.shape[-2] > x.shape[-1]
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    x = (x.mT if tall else x).to(product_dtype(x.device, x.dtype), memory_format=torch.contiguous_format)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=_B, alpha=_C), x, beta=_A)
    return x.mT if tall else x


@lru_cache
def product_dtype(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """bf16 where its products run in hardware, else as given; the iteration corrects what its rounding disturbs.

    A property of the machine and never a measurement: a run continued on it must go on with the same numbers.
    """
    has_bf16 = False
    if device.type == "cuda":
        has_bf16 = torch.cuda.get_device_capability() >= (8, 0) or torch.version.hip is not None
    elif device.type == "cpu":  # these two say what the processor can; elsewhere torch works bf16 out in fp32, slowly
        has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if dtype == torch.float32 and has_bf16 else dtype


@dataclass(frozen=True)
class Role:
    """What a parameter is. ``rows``: those of each matrix it holds; more than one where matrices are stored joined."""

    name: str
    param: Tensor
    decays: bool
    in_layer: bool
    rows: tuple[int, ...]


class Optimiser:
    """One or two torch optimisers as one thing; a GradScaler is told of each of ``optimisers``."""

    def __init__(self, optimisers: list[torch.optim.Optimizer], names: Mapping[Tensor, str]) -> None:
        self.optimisers = optimisers
        self._names = dict(names)
        for group in self._groups():
            group[_PEAK] = group["lr"]

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimiser in self.optimisers for group in optimiser.param_groups)

    def set_lr(self, factor: float) -> None:
        """``factor`` (what a Schedule gives) times each group's peak."""
        for group in self._groups():
            group["lr"] = group[_PEAK] * factor

    def skip_where(self, broken: Tensor) -> None:
        """Where this bool, which may still be on its way on a GPU, is true, the next step changes no weight; of Muon's
        it may still add their momentum."""
        for optimiser in self.optimisers:
            optimiser.found_inf = broken.float()  # type: ignore[attr-defined]  # what fused kernels read, as a GradScaler gives it

    def step(self) -> None:
        for optimiser in self.optimisers:
            optimiser.step()

    def zero_grad(self) -> None:
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)

    def state_tensors(self) -> dict[str, Tensor]:
        """The state itself, no copies, as ``optimiser/state/parameter``, counters too; sharded as parameters are."""
        return {
            f"{_kind(optimiser)}/{key}/{self._names[param]}": value
            for optimiser in self.optimisers
            for param, state in optimiser.state.items()
            for key, value in state.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on exactly where ``state_tensors`` was taken. Whole tensors are sharded as their parameters are."""
        places = {
            f"{_kind(optimiser)}/{self._names[param]}": (optimiser, param, bool(group.get("fused")))
            for optimiser in self.optimisers
            for group in optimiser.param_groups
            for param in group["params"]
        }
        loaded = []
        for key, value in tensors.items():
            kind, _, rest = key.partition("/")
            state, _, name = rest.partition("/")
            if f"{kind}/{name}" not in places:
                raise ValueError(f"the optimiser's state holds {key!r}, but {kind} trains no parameter {name!r} here")
            optimiser, param, fused = places[f"{kind}/{name}"]
            if state != "step" and value.shape != param.shape:
                raise ValueError(f"{key!r} has shape {tuple(value.shape)}, but its parameter {tuple(param.shape)}")
            # Step counters of all but fused kernels stay on the CPU.
            copy = value.detach().to("cpu" if state == "step" and not fused else param.device, copy=True)
            loaded.append((optimiser, param, state, shard_like(copy, param) if copy.dim() == param.dim() else copy))
        for optimiser in self.optimisers:
            optimiser.state.clear()
        for optimiser, param, state, tensor in loaded:
            optimiser.state[param][state] = tensor


def _kind(optimiser: torch.optim.Optimizer) -> str:
    return type(optimiser).__name__.lower()


def build_optimiser(model: nn.Module, train: TrainConfig) -> Optimiser:
    """The optimiser of ``train`` over what is not frozen; to be built when parameters are where they stay.

    Weight decay is on matrices only: decoupled (AdamW, Muon), or L2 in the gradient as Adam has it.
    """
    trained = list(roles(model))
    if not trained:
        raise ValueError("no parameter is left to train: every one is frozen")
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
    """What each parameter that is not frozen is; a shared one once, by its first name."""
    rows = {param: sizes for module in model.modules() for param, sizes in _joined_matrices(module)}
    layers = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, Block | Gates))
    seen: set[Tensor] = set()
    for path, module in model.named_modules():
        for own, param in module.named_parameters(recurse=False):
            if param in seen or not param.requires_grad:
                continue
            seen.add(param)
            name = f"{path}.{own}" if path else own
            plain = own == "weight" if isinstance(module, nn.Linear) else own == "w_r" or isinstance(module, Gates)
            linear = plain and param.dim() == 2  # what is added to a Linear, such as low-rank factors, is AdamW's
            decays = param.dim() > 1 and not _is_table(module, own)
            yield Role(name, param, decays, linear and name.startswith(layers), rows.get(param, (len(param),)))


def _is_table(module: nn.Module, own: str) -> bool:
    """Rows that are looked up or added, not multiplied with: embeddings, positions, class tokens, biases of heads."""
    if isinstance(module, Bias):
        return own != "w_r"  # Transformer-XL's projection of distances
    rows = {Additive: "v", ExpertLinear: "bias"}
    return isinstance(module, nn.Embedding | VisionEmbeddings) or rows.get(type(module)) == own


def _joined_matrices(module: nn.Module) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The parameters of a module that hold several matrices one below the other, and the rows of each."""
    if isinstance(module, Gates):
        for gates in (module.w_x, module.w_h):
            yield gates, (len(gates) // module.n_gates,) * module.n_gates
    for attribute, rows in joined_rows(module).items():
        # Nothing where the layer was replaced by one whose weight is no parameter.
        if isinstance(weight := getattr(getattr(module, attribute), "weight", None), nn.Parameter):
            yield weight, tuple(rows.values())


def joined_rows(module: nn.Module) -> dict[str, dict[str, int]]:
    """The linear layers of a module that join several matrices: by attribute, the rows of each matrix by name."""
    if isinstance(module, MultiHeadAttention):
        q_rows, kv_rows = module.n_heads * module.d_head, module.n_kv_heads * module.d_head
        key_value = {"k": kv_rows, "v": kv_rows}
        return {"w_query": {"q": q_rows}, "w_kv": key_value} if module.cross else {"w_qkv": {"q": q_rows, **key_value}}
    if isinstance(module, FeedForward) and module.gated:
        return {"w_in": {"gate": module.d_ff, "up": module.d_ff}}
    return {}
