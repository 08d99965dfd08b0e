"""Which parameter is trained how: Adam, AdamW, or Muon for the matrices inside layers with AdamW for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..attention.biases import Bias
from ..attention.scores import Additive
from ..config import TrainConfig
from ..layers import FeedForward
from ..layers.vision import VisionEmbeddings
from ..models.block import Block
from ..models.recurrent.recurrence import Gates
from .muon import Muon, shard

_FUSED_ON = ("cpu", "cuda", "mps")  # one kernel for all of a step; on a CPU 4 to 7 times faster than foreach and loop
_PEAK = "peak"  # each group's own learning rate, which the schedule's factor multiplies


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

    @property
    def lr(self) -> float:
        """The learning rate now: of AdamW where Muon works beside it."""
        return float(self.optimisers[0].param_groups[0]["lr"])

    def set_lr(self, factor: float) -> None:
        """``factor`` (what a Schedule gives) times each group's peak."""
        for group in self._groups():
            group["lr"] = group[_PEAK] * factor

    def step(self, scaler: torch.amp.GradScaler | None = None) -> None:
        """With a ``scaler``, an optimiser whose gradients overflowed skips its step; ``update`` is the caller's."""
        for optimiser in self.optimisers:
            if scaler is None:
                optimiser.step()
            else:
                scaler.step(optimiser)

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
            loaded.append((optimiser, param, state, _placed(value, param, on_device=state != "step" or fused)))
        for optimiser in self.optimisers:
            optimiser.state.clear()
        for optimiser, param, state, tensor in loaded:
            optimiser.state[param][state] = tensor


def _placed(value: Tensor, param: Tensor, on_device: bool) -> Tensor:
    """A copy where the optimiser wants it; step counters of all but fused kernels stay on the CPU."""
    copy = value.detach().to(param.device if on_device else "cpu", copy=True)
    sharded = hasattr(param, "full_tensor") and copy.dim() == param.dim() and not hasattr(copy, "full_tensor")
    return shard(copy, param) if sharded else copy


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
        optimisers.append(_adam(by_adam, train))
    if by_muon:
        joined = {role.param: role.rows for role in by_muon}
        params = [role.param for role in by_muon]
        optimisers.append(Muon(params, train.muon_lr, weight_decay=train.weight_decay, joined=joined))
    return Optimiser(optimisers, {role.param: role.name for role in trained})


def _adam(trained: list[Role], train: TrainConfig) -> torch.optim.Optimizer:
    groups = [
        {"params": [role.param for role in trained if role.decays], "weight_decay": train.weight_decay},
        {"params": [role.param for role in trained if not role.decays], "weight_decay": 0.0},
    ]
    make = torch.optim.Adam if train.optimiser == "adam" else torch.optim.AdamW
    fused = all(role.param.device.type in _FUSED_ON for role in trained)
    return make([group for group in groups if group["params"]], train.lr, train.betas, train.eps, fused=fused or None)


def roles(model: nn.Module) -> Iterator[Role]:
    """What each parameter that is not frozen is; a shared one once, by its first name."""
    rows = {param: sizes for module in model.modules() for param, sizes in _joined(module)}
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
            in_layer = linear and name.startswith(layers)
            yield Role(
                name, param, param.dim() > 1 and not _is_table(module, own), in_layer, rows.get(param, (len(param),))
            )


def _is_table(module: nn.Module, own: str) -> bool:
    """Rows that are looked up or added, not multiplied with: embeddings, positions, class tokens, biases of heads."""
    if isinstance(module, Bias):
        return own != "w_r"  # Transformer-XL's projection of distances
    return isinstance(module, nn.Embedding | VisionEmbeddings) or (isinstance(module, Additive) and own == "v")


def _joined(module: nn.Module) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """The parameters of a module that hold several matrices one below the other, and the rows of each."""
    if isinstance(module, MultiHeadAttention):
        q_rows, kv_rows = module.n_heads * module.d_head, module.n_kv_heads * module.d_head
        if module.cross:
            yield from _weight(module.w_kv, kv_rows, kv_rows)
        else:
            yield from _weight(module.w_qkv, q_rows, kv_rows, kv_rows)
    elif isinstance(module, FeedForward) and module.gated:
        yield from _weight(module.w_in, module.d_ff, module.d_ff)
    elif isinstance(module, Gates):
        for weight in (module.w_x, module.w_h):
            yield weight, (weight.shape[0] // module.n_gates,) * module.n_gates


def _weight(linear: nn.Module, *rows: int) -> Iterator[tuple[Tensor, tuple[int, ...]]]:
    """Nothing where the layer was replaced by one, such as a low-rank one, whose weight is no parameter."""
    weight = getattr(linear, "weight", None)
    if isinstance(weight, nn.Parameter):
        yield weight, rows
