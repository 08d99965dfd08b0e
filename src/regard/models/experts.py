"""Mixture of experts: a router sends each token to k of E feed-forward networks (Shazeer et al. 2017).

p = softmax(W_router x [+ b])  the router's probabilities, in fp32
y = Σ_{e ∈ top-k(p)} g_e FFN_e(x)  [+ FFN_shared(x)]       g = p of the chosen experts, optionally renormalised

No token is dropped: tokens are sorted by expert, and every expert multiplies its own rows (Gale et al. 2023). Two
auxiliary losses train the router: ``balance`` spreads tokens over the experts (Fedus et al. 2022, eq. 4), ``z`` keeps
the logits small (Zoph et al. 2022, eq. 5).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from ..attention.edits import apply_edits_to_states
from ..attention.taps import tap
from ..layers import GATED, FeedForward, activation_function
from ..layers.feedforward import apply_gate

_ALIGNMENT = 8  # a grouped product needs rows aligned to 16 bytes, which is 8 numbers in bf16


class Router(nn.Linear):
    """Logits of the experts, in the dtype of the weight even under autocast, as rounding could change the choice."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, M) → fp32 (…, E)."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias).float()


class ExpertLinear(nn.Module):
    """One linear map per expert; ``weight`` (E, out, in), ``bias`` (E, out) or None."""

    def __init__(self, n_experts: int, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        bound = d_in**-0.5  # the initialisation of nn.Linear
        self.weight = nn.Parameter(torch.empty(n_experts, d_out, d_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n_experts, d_out).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        """Rows (R, in) sorted by expert, each row's expert (R,), the number of rows of each expert (E,) → (R, out)."""
        weight = self.weight.to(x.dtype)
        if can_group(x, weight):
            y = grouped_product(x, weight, counts.cumsum(0, dtype=torch.int32))
        else:
            y = _multiply_one_by_one(x, weight, counts)
        return y if self.bias is None else y + self.bias.to(x.dtype)[experts]

    def apply_all(self, x: Tensor) -> Tensor:
        """Every expert applied to every row: x (R, in), or (E, R, in) with rows for each expert, → (E, R, out)."""
        y = x @ self.weight.to(x.dtype).mT
        return y if self.bias is None else y + self.bias.to(x.dtype)[:, None]

    def extra_repr(self) -> str:
        n_experts, d_out, d_in = self.weight.shape
        return f"{n_experts} × ({d_in} → {d_out}), bias={self.bias is not None}"


def can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether torch can multiply the rows of all experts in one launch: on a GPU, in bf16, with aligned widths."""
    supported = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
    return supported and all(width % _ALIGNMENT == 0 for width in weight.shape[1:])


# Custom operators, so that compiled code launches the same kernels.
@torch.library.custom_op("regard::grouped_product", mutates_args=())
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows (R, in) times the weights (E, out, in) of their experts → (R, out); those of expert e end at ends[e]."""
    return torch._grouped_mm(x, weight.mT, offs=ends)


@torch.library.custom_op("regard::grouped_product_gradients", mutates_args=())
def grouped_product_gradients(d_y: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of rows and weights."""
    d_y = d_y.contiguous()
    return torch._grouped_mm(d_y, weight, offs=ends), torch._grouped_mm(d_y.mT, x, offs=ends)


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(len(x), weight.shape[1])


@grouped_product_gradients.register_fake
def _(d_y: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save_inputs(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, d_y: Tensor) -> tuple[Tensor, Tensor, None]:
    return *grouped_product_gradients(d_y, *ctx.saved_tensors), None


grouped_product.register_autograd(_backward, setup_context=_save_inputs)


# Compiling would specialise on the number of rows of each expert. This is torch.compiler.disable, which would import
# the whole compiler.
@_disable_dynamo
def _multiply_one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, matrix) for rows, matrix in parts])


class Routing(NamedTuple):
    """A router's decision for every token."""

    probabilities: Tensor  # (…, E) of all experts
    experts: Tensor  # (…, k) the chosen ones, best first
    weights: Tensor  # (…, k) their weights in the sum


class RouterLosses(NamedTuple):
    """The auxiliary losses of one layer and batch, and the share of all choices that went to each expert (E,)."""

    balance: Tensor
    z: Tensor
    load: Tensor


class Experts(nn.Module):
    """E feed-forward networks of width ``d_ff``, k of which process each token; ``n_shared`` more process every token.

    In training, ``losses`` holds the router's losses of the last batch until ``take_router_losses`` reads them.
    (…, M) → (…, M)
    """

    def __init__(
        self,
        d_model: int,
        d_ff: int,
        activation: str,
        dropout: float,
        bias: bool,
        *,
        n_experts: int,
        k: int,
        n_shared: int = 0,
        renormalise: bool = True,
        router_bias: bool = False,
        gate_limit: float | None = None,
    ) -> None:
        super().__init__()
        self.n_experts, self.k, self.renormalise, self.gate_limit = n_experts, k, renormalise, gate_limit
        self.gated, self.f = activation in GATED, activation_function(activation)
        self.router = Router(d_model, n_experts, bias=router_bias)
        self.w_in = ExpertLinear(n_experts, d_model, 2 * d_ff if self.gated else d_ff, bias)
        self.w_out = ExpertLinear(n_experts, d_ff, d_model, bias)
        self.shared = None
        if n_shared:
            self.shared = FeedForward(d_model, n_shared * d_ff, activation, dropout, bias, gate_limit=gate_limit)
        self.dropout = nn.Dropout(dropout)
        self.losses: RouterLosses | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        routing = self.route(logits)
        counts = (routing.experts.flatten()[:, None] == torch.arange(self.n_experts, device=x.device)).sum(0)  # (E,)
        if self.training and torch.is_grad_enabled():
            self.losses = self._losses(logits, routing, counts)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        rows = x.flatten(0, -2).to(dtype)  # (N, M)
        experts, weights = routing.experts.flatten(0, -2), routing.weights.flatten(0, -2)  # (N, k)
        if self._needs_fixed_shapes(rows):
            y = self._run_all(rows, experts, weights)
        else:
            y = self._run_by_expert(rows, experts, weights, counts)
        y = y.view(*x.shape[:-1], -1)
        return y if self.shared is None else y + self.shared(x)

    def route(self, logits: Tensor) -> Routing:
        """Choose the experts of each token, from logits (…, E)."""
        return self.choose(tap("router", apply_edits_to_states(self, "router", logits.softmax(-1)), self, small=True))

    def choose(self, probabilities: Tensor) -> Routing:
        """The k most probable experts of each token and their weights, from probabilities (…, E)."""
        weights, experts = probabilities.topk(self.k, dim=-1)
        if self.renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routing(probabilities, experts, weights)

    def reference(self, x: Tensor) -> Tensor:
        """The formula, token by token."""
        outputs = []
        _, chosen, shares = (part.flatten(0, -2) for part in self.route(self.router(x)))
        for token, experts, weights in zip(x.flatten(0, -2), chosen, shares, strict=True):
            terms = []
            for e, weight in zip(experts.tolist(), weights, strict=True):
                hidden = self._activate(F.linear(token, self.w_in.weight[e], _row(self.w_in.bias, e)))
                terms.append(weight * F.linear(hidden, self.w_out.weight[e], _row(self.w_out.bias, e)))
            outputs.append(torch.stack(terms).sum(0))
        y = torch.stack(outputs).view_as(x)
        return y if self.shared is None else y + self.shared(x)

    def _run_by_expert(self, rows: Tensor, experts: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """Tokens sorted by expert, so that each expert multiplies only its own rows."""
        chosen, order = experts.flatten().sort(stable=True)  # (N k,)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        x = _gather_rows(rows, order // self.k, inverse, self.k)  # (N k, M)
        y = self.w_out(self._activate(self.w_in(x, chosen, counts)), chosen, counts)
        y = _gather_rows(y, inverse, order, 1).unflatten(0, (-1, self.k))  # (N, k, M)
        return (y * weights[..., None].to(y.dtype)).sum(1)

    def _run_all(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every expert processes every token, most with weight 0, so that shapes do not depend on the routing."""
        is_chosen = experts[..., None] == torch.arange(self.n_experts, device=rows.device)  # (N, k, E)
        share = (is_chosen * weights[..., None].to(rows.dtype)).sum(1)  # (N, E)
        y = self.w_out.apply_all(self._activate(self.w_in.apply_all(rows)))  # (E, N, M)
        return (y * share.T[..., None]).sum(0)

    def _needs_fixed_shapes(self, rows: Tensor) -> bool:
        """Shapes must not depend on data in an exported graph, nor in a CUDA graph without grouped products."""
        if torch.compiler.is_dynamo_compiling():  # torch 2.11 calls that an export too
            return False
        capturing = rows.is_cuda and torch.cuda.is_current_stream_capturing()
        return torch.compiler.is_exporting() or (capturing and not can_group(rows, self.w_in.weight))

    def _activate(self, hidden: Tensor) -> Tensor:
        return self.dropout(apply_gate(self.f, hidden, self.gate_limit) if self.gated else self.f(hidden))

    def _losses(self, logits: Tensor, routing: Routing, counts: Tensor) -> RouterLosses:
        """balance = E Σ_e f_e P_e with f_e the share of tokens sent to e and P_e its mean probability;
        z = mean (log Σ_e exp logit_e)²."""
        flat = logits.flatten(0, -2)
        chosen = counts.float() / len(flat)
        balance = self.n_experts * (chosen * routing.probabilities.flatten(0, -2).mean(0)).sum()
        return RouterLosses(balance, flat.logsumexp(-1).square().mean(), chosen.detach() / self.k)

    def extra_repr(self) -> str:
        return f"{self.k} of {self.n_experts}"


def take_router_losses(model: nn.Module) -> list[RouterLosses]:
    """The router losses of the last batch, one per layer with experts, first to last; clears them."""
    losses = []
    for module in model.modules():
        if isinstance(module, Experts) and module.losses is not None:
            losses.append(module.losses)
            module.losses = None
    return losses


class _GatherRows(torch.autograd.Function):
    """x[index], where ``index`` has every row k times: row r of x ends up at inverse[k r], …, inverse[k r + k - 1].

    The gradient is then a gather and a sum of k rows; torch's own would add with atomics, in no fixed order.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, inverse: Tensor, k: int) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, _, inverse, ctx.k = inputs
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0][ctx.saved_tensors[0]]
        return (rows if ctx.k == 1 else rows.unflatten(0, (-1, ctx.k)).sum(1)), None, None, None


def _gather_rows(x: Tensor, index: Tensor, inverse: Tensor, k: int) -> Tensor:
    rows: Tensor = _GatherRows.apply(x, index, inverse, k)
    return rows


def _row(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]
