"""Mixture of experts: a router sends each token to k of E feed-forward networks (Shazeer et al. 2017).

p = softmax(W_router x)        the router's probabilities, in fp32
y = Σ_{e ∈ top-k(p)} g_e FFN_e(x)  [+ FFN_shared(x)]       g = p over the chosen, which may be scaled to sum to 1

No token is dropped: tokens are sorted by expert, and every expert multiplies its own rows (Gale et al. 2023). Two
losses keep the router useful: ``balance`` wants the experts used alike (Fedus et al. 2022, eq. 4), ``z`` wants small
logits (Zoph et al. 2022, eq. 5).
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

_ALIGNMENT = 8  # a grouped product's rows begin at multiples of 16 bytes, which are eight numbers in bf16


class Router(nn.Linear):
    """Logits of the experts; in the dtype of its weight even under autocast, for rounding would change the choice."""

    def forward(self, x: Tensor) -> Tensor:
        """x (…, M) → fp32 (…, E)."""
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(self.weight.dtype), self.weight).float()


class ExpertLinear(nn.Module):
    """A linear map of its own for each expert; ``weight`` (E, out, in), ``bias`` (E, out) or None."""

    def __init__(self, n_experts: int, d_in: int, d_out: int, bias: bool) -> None:
        super().__init__()
        bound = d_in**-0.5  # as nn.Linear begins
        self.weight = nn.Parameter(torch.empty(n_experts, d_out, d_in).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(n_experts, d_out).uniform_(-bound, bound)) if bias else None

    def forward(self, x: Tensor, experts: Tensor, counts: Tensor) -> Tensor:
        """Rows (R, in) sorted by expert, the expert of each (R,) and the rows of each expert (E,) → (R, out)."""
        weight = self.weight.to(x.dtype)
        if can_group(x, weight):
            y = torch._grouped_mm(x, weight.mT, offs=counts.cumsum(0, dtype=torch.int32))
        else:
            y = _multiply_one_by_one(x, weight, counts)
        return y if self.bias is None else y + self.bias.to(x.dtype)[experts]

    def of_all(self, x: Tensor) -> Tensor:
        """x (…, R, in), or (E, R, in) a row for each expert → (E, R, out): every expert's product with every row."""
        y = x @ self.weight.to(x.dtype).mT
        return y if self.bias is None else y + self.bias.to(x.dtype)[:, None]

    def extra_repr(self) -> str:
        n_experts, d_out, d_in = self.weight.shape
        return f"{n_experts} × ({d_in} → {d_out}), bias={self.bias is not None}"


def can_group(x: Tensor, weight: Tensor) -> bool:
    """Whether torch multiplies the rows of all experts in one launch: on a GPU, in bf16, of even widths."""
    grouped = x.is_cuda and x.dtype == torch.bfloat16 and hasattr(torch, "_grouped_mm")
    return grouped and all(width % _ALIGNMENT == 0 for width in weight.shape[1:])


# torch.compiler.disable without its import of the whole compiler: the number of an expert's rows would be compiled in.
@_disable_dynamo
def _multiply_one_by_one(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    parts = zip(x.split(counts.tolist()), weight.unbind(), strict=True)
    return torch.cat([F.linear(rows, own) for rows, own in parts])


class Routing(NamedTuple):
    """Where a router sends tokens: of every token the probability of each expert (…, E), the chosen ones (…, k), best
    first, and their weights in the sum (…, k)."""

    probabilities: Tensor
    experts: Tensor
    weights: Tensor


class RouterLosses(NamedTuple):
    """Of one batch and layer: the two losses, and the share of all choices that each expert got (E,)."""

    balance: Tensor
    z: Tensor
    load: Tensor


class Experts(nn.Module):
    """E feed-forward networks of width ``d_ff``, of which each token goes through k; ``n_shared`` more see every token.

    In training, ``losses`` holds those of the last batch until ``take_router_losses`` reads them.
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
    ) -> None:
        super().__init__()
        self.n_experts, self.k, self.renormalise = n_experts, k, renormalise
        self.gated, self.f = activation in GATED, activation_function(activation)
        self.router = Router(d_model, n_experts, bias=False)
        self.w_in = ExpertLinear(n_experts, d_model, 2 * d_ff if self.gated else d_ff, bias)
        self.w_out = ExpertLinear(n_experts, d_ff, d_model, bias)
        self.shared = FeedForward(d_model, n_shared * d_ff, activation, dropout, bias) if n_shared else None
        self.dropout = nn.Dropout(dropout)
        self.losses: RouterLosses | None = None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        routing = self.route(logits)
        counts = (routing.experts.flatten()[:, None] == torch.arange(self.n_experts, device=x.device)).sum(0)  # (E,)
        if self.training and torch.is_grad_enabled():
            self.losses = self._losses(logits, routing, counts)
        kind = x.device.type
        low = torch.is_autocast_enabled(kind)
        rows = x.flatten(0, -2).to(torch.get_autocast_dtype(kind) if low else x.dtype)  # (N, M)
        experts, weights = routing.experts.flatten(0, -2), routing.weights.flatten(0, -2)  # (N, k)
        if self._needs_fixed_shapes(rows):
            y = self._by_all(rows, experts, weights)
        else:
            y = self._run_by_expert(rows, experts, weights, counts)
        y = y.view(*x.shape[:-1], -1)
        return y if self.shared is None else y + self.shared(x)

    def route(self, logits: Tensor) -> Routing:
        """The choice of experts, from logits (…, E)."""
        return self.choose(tap("router", apply_edits_to_states(self, "router", logits.softmax(-1)), self, small=True))

    def choose(self, probabilities: Tensor) -> Routing:
        """The likeliest k experts of each token and their weights, from probabilities (…, E)."""
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
        """Tokens sorted by expert, so that each multiplies its own rows only."""
        chosen, order = experts.flatten().sort(stable=True)  # (N k,)
        places = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        x = _take_rows(rows, order // self.k, places, self.k)  # (N k, M)
        y = self.w_out(self._activate(self.w_in(x, chosen, counts)), chosen, counts)
        y = _take_rows(y, places, order, 1).unflatten(0, (-1, self.k))  # (N, k, M)
        return (y * weights[..., None].to(y.dtype)).sum(1)

    def _by_all(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Every expert sees every token, and most count for nothing: where shapes must not depend on the numbers."""
        share = torch.zeros(len(rows), self.n_experts, dtype=rows.dtype, device=rows.device)
        share = share.scatter(1, experts, weights.to(rows.dtype))  # (N, E)
        y = self.w_out.of_all(self._activate(self.w_in.of_all(rows)))  # (E, N, M)
        return (y * share.T[..., None]).sum(0)

    def _needs_fixed_shapes(self, rows: Tensor) -> bool:
        """In an exported graph, and a CUDA graph whose products cannot be grouped, no number may decide a shape."""
        captures = rows.is_cuda and torch.cuda.is_current_stream_capturing()
        return torch.compiler.is_exporting() or (captures and not can_group(rows, self.w_in.weight))

    def _activate(self, hidden: Tensor) -> Tensor:
        if not self.gated:
            return self.dropout(self.f(hidden))
        gate, up = hidden.chunk(2, dim=-1)
        return self.dropout(self.f(gate) * up)

    def _losses(self, logits: Tensor, routing: Routing, counts: Tensor) -> RouterLosses:
        """E Σ_e f_e P_e with f_e the share of tokens that chose e and P_e its mean probability; mean (log Σ exp z)²."""
        flat = logits.flatten(0, -2)
        chosen = counts.float() / len(flat)
        balance = self.n_experts * (chosen * routing.probabilities.flatten(0, -2).mean(0)).sum()
        return RouterLosses(balance, flat.logsumexp(-1).square().mean(), chosen.detach() / self.k)

    def extra_repr(self) -> str:
        return f"{self.k} of {self.n_experts}"


def take_router_losses(model: nn.Module) -> list[RouterLosses]:
    """The losses of the last batch in every layer with experts, first to last; each is given out once."""
    found = []
    for module in model.modules():
        if isinstance(module, Experts) and module.losses is not None:
            found.append(module.losses)
            module.losses = None
    return found


class _TakeRows(torch.autograd.Function):
    """x[index], every row k times; ``places`` says where: row r of x is at places[k r], … places[k r + k - 1].

    So the gradient is a sum of k rows that are looked up; torch's own would add in any order, with atomics.
    """

    @staticmethod
    def forward(x: Tensor, index: Tensor, places: Tensor, k: int) -> Tensor:
        return x[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int], output: Tensor) -> None:
        _, _, places, ctx.k = inputs
        ctx.save_for_backward(places)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        rows = gradients[0][ctx.saved_tensors[0]]
        return (rows if ctx.k == 1 else rows.unflatten(0, (-1, ctx.k)).sum(1)), None, None, None


def _take_rows(x: Tensor, index: Tensor, places: Tensor, k: int) -> Tensor:
    taken: Tensor = _TakeRows.apply(x, index, places, k)
    return taken


def _row(bias: Tensor | None, e: int) -> Tensor | None:
    return None if bias is None else bias[e]
