"""A training batch, its loss (chunked over a large vocabulary), and the objective that is trained."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..attention.triton_backend import HAS_TRITON
from ..config.data_config import ProblemType
from ..data.packing import IGNORE
from ..foundation.autograd import first_derivative_only
from ..layers import fp8_linear
from ..layers.fp8_linear import E4M3
from ..models import Model
from ..models.components import TokenHead
from ..models.experts import take_router_losses


@dataclass(frozen=True, eq=False)
class Batch:
    """The model's arguments and targets.

    Targets are token ids (B, T), IGNORE at positions without one; classes (B,); of several labels 1.0 for each that
    holds (B, labels); or numbers (B,).
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)
    n_tokens: int = 0  # tokens or patches the model reads, without padding; pairs count both sides
    n_counted: int | None = None  # ``n_targets``, counted before the batch moved to a device
    weights: Tensor | None = None  # the factor on each target's loss, shaped as the targets; None: 1

    @property
    def n_targets(self) -> int:
        """How many targets the loss is a sum over."""
        if self.n_counted is not None:
            return self.n_counted
        return self.targets.numel() if self.targets.is_floating_point() else int((self.targets != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        """On a device; from pinned memory the copy does not wait."""
        return self.with_counts()._map(lambda x: x.to(device, non_blocking=True))

    def with_counts(self) -> Batch:
        """The same, its targets counted."""
        return replace(self, n_counted=self.n_targets)

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def repeat_rows(self) -> Batch:
        """Every row twice: all of them, then all of them again."""
        return self._map(lambda x: torch.cat([x, x]))

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        options = {name: change(x) for name, x in self.options.items()}
        weights = None if self.weights is None else change(self.weights)
        inputs = tuple(map(change, self.inputs))
        return replace(self, inputs=inputs, targets=change(self.targets), options=options, weights=weights)


def shift_targets(target: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """<bos> a b <eos> (B, T + 1) → the decoder's input <bos> a b and its targets a b <eos>, each (B, T)."""
    wanted = target[:, 1:]
    return target[:, :-1].contiguous(), torch.where(wanted == pad_id, IGNORE, wanted)


# Bytes of fp32 logits: up to this they are held whole, beyond it made in chunks of this size. Measured: with
# larger chunks a CPU loses time to fresh memory; a GPU must be filled.
_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
# fp16 has nothing between 0 and 6e-8: probabilities, at most 1, are lifted out of the way of that, exactly.
_LIFT = 2.0**15
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_ALIGNMENT = 128  # of the vocabulary in a product on a GPU
_SHARE_OF_MEMORY = 16  # there bf16 logits take at most this part of the memory; beyond that rows go in chunks
_ROWS_AT_ONCE = {"cuda": 8192}  # of logits in ``token_losses``; 1024 elsewhere
LossFunction = Callable[..., Tensor]  # (model, batch, smoothing) → the sum over the batch's targets


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """The sum over targets of -Σ_c y_c log p_c, y smoothed (Szegedy et al. 2016; Vaswani et al. 2017, §5.4).

    y = (1 - smoothing) · one-hot + smoothing / classes. The caller divides by the number of targets. ``weights``,
    shaped as the targets, are factors on the terms of this sum.
    """
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if weights is None:
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    return losses @ weights.flatten().to(losses.dtype)


def label_losses(logits: Tensor, targets: Tensor, problem_type: ProblemType) -> Tensor:
    """The loss of every target of a classifier, shaped as the targets: cross-entropy of classes (B,), binary
    cross-entropy of each label (B, labels), squared error of numbers (B,).   logits (B, classes)"""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    match problem_type:
        case "single_label":
            return F.cross_entropy(logits, targets, reduction="none")
        case "multi_label":
            return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    return (logits[:, 0] - targets) ** 2


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
    *,
    n_counted: int | None = None,
    chunk: int | None = None,
    cap: float | None = None,
    fp8: bool = False,
) -> Tensor:
    """``cross_entropy(hidden @ weightᵀ + bias, targets)`` whose logits, where they are large, are never held whole.

    hidden (…, M), weight (V, M). A vocabulary of 50,000 at 65,536 tokens would be 13 GB of fp32 logits, and as much
    again for their gradient; here it is chunk × V of each. Small logits are held whole: nothing is saved by less.

    Rows without a target are left out of the products. Counting them on a GPU would synchronise, so there all rows
    are computed unless ``n_counted`` gives the exact number of targets other than IGNORE.
    ``chunk`` rows at a time, else as many as suit the device. ``cap``: of logits cap · tanh(logit / cap).

    In bf16 on a GPU a kernel of ours (``kernels.token_loss``) computes the same, whatever the size. ``fp8``: its
    products in eight bits, where that kernel runs.
    torch 2.13 has a chunked loss too: without label smoothing, without torch.compile, and with every row.
    """
    rows, flat = hidden.flatten(0, -2), targets.flatten()
    most = _BYTES.get(rows.device.type, _BYTES["cuda"]) // (4 * weight.shape[0])
    skips_rows = n_counted is not None and 2 * n_counted <= rows.shape[0]  # worth leaving out the others, however small
    device = rows.device.type
    low = torch.is_autocast_enabled(device) and rows.dtype != torch.float64  # which autocast leaves as it is
    dtype = torch.get_autocast_dtype(device) if low else rows.dtype
    fused = has_fused_loss(rows.device, dtype)
    if not fused and cap is not None:
        return cross_entropy(torch.tanh(F.linear(rows, weight, bias) / cap) * cap, flat, smoothing)
    if not fused and chunk is None and rows.shape[0] <= most and not skips_rows:
        return cross_entropy(F.linear(rows, weight, bias), flat, smoothing)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (rows, weight, bias)]
    size = max(1, most) if chunk is None and not fused else chunk
    dtype = E4M3 if fused and fp8 and weight.shape[1] % 16 == 0 else dtype
    total, *_ = _chunked(rows, weight, bias, flat, smoothing, size, n_counted, dtype, *needs, cap)
    return total


def has_fused_loss(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the loss of a product of this type is computed by the kernel of ``kernels.token_loss``."""
    return dtype in (torch.bfloat16, E4M3) and HAS_TRITON and (device.type == "cuda" or INTERPRETED)


@torch.library.custom_op("regard::linear_cross_entropy", mutates_args=())
def _chunked(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    chunk: int | None,
    n_counted: int | None,
    dtype: torch.dtype,
    for_hidden: bool,
    for_weight: bool,
    for_bias: bool,
    cap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients: that of a chunk is made beside its loss, softmax(z) - y, and its logits can go.

    An operator of its own, so that torch.compile takes it as it is, whatever the lengths, and never unrolls the chunks.
    """
    places = _places(targets, n_counted)
    if has_fused_loss(hidden.device, dtype):
        x, y, needs = hidden, targets, (for_hidden, for_weight, for_bias)
        if places is not None:
            x, y = hidden[places], targets[places]
        total, d_x, *others = _fused_loss(x, weight, bias, y, smoothing, cap, chunk, dtype == E4M3, needs)
        if places is not None and for_hidden:
            d_x = d_x.new_zeros(hidden.shape).index_copy_(0, places, d_x)
        return total, d_x, others[0], others[1]
    assert chunk is not None
    total, d_hidden, d_weight, d_bias = _zeros(hidden, weight, dtype, for_hidden, for_weight, for_bias)
    n_rows = targets.shape[0] if places is None else places.shape[0]
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # each product's dtype is chosen here
        for start in range(0, n_rows, chunk):
            part: Any = slice(start, start + chunk) if places is None else places[start : start + chunk]
            x, y = hidden[part].to(dtype), targets[part]
            loss, d_logits = _loss_and_slope(F.linear(x, w, b), y, smoothing, for_hidden or for_weight or for_bias)
            total += loss
            if for_bias:
                d_bias += d_logits.sum(0)
            if for_hidden:
                d_hidden[part] = _product(d_logits, w)
            if for_weight:
                d_weight += _product(d_logits.T, x)
    return total, d_hidden, d_weight, d_bias


def _fused_loss(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    smoothing: float,
    cap: float | None,
    chunk: int | None,
    fp8: bool,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum of the loss, fp32, and its gradients in hidden (rows, M), weight (V, M) and bias (V,), bf16.

    Logits are written once by a product, read and overwritten with their slope once by a kernel, and two products make
    the gradients from it. Of 50,257 columns a product is not aligned, and cuBLAS falls back to kernels of an old
    architecture: for the length of a step the weight is padded to a multiple of 128 rows, without probability.
    ``fp8``: logits and the gradient in hidden are products in eight bits.
    """
    from ..kernels.token_loss import LIFT, loss_and_slope

    n_rows, n_classes = len(hidden), len(weight)
    padding = -n_classes % _ALIGNMENT
    w = F.pad(weight.bfloat16(), (0, 0, 0, padding)) if padding else weight.bfloat16()
    b = None if bias is None else F.pad(bias.bfloat16(), (0, padding))
    for_hidden, for_weight, for_bias = needs
    size = _rows_in_memory(hidden.device, len(w)) if chunk is None else chunk
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden = hidden.new_empty(hidden.shape if for_hidden else 0, dtype=torch.bfloat16)
    wide = torch.float32 if n_rows > size else torch.bfloat16  # sums over several chunks
    d_weight = hidden.new_zeros(w.shape if for_weight else 0, dtype=wide)
    d_bias = hidden.new_zeros(len(w) if for_bias else 0, dtype=torch.float32)
    w8 = (fp8_linear.scale_rows(w, E4M3), fp8_linear.scale_rows(w.T, E4M3)) if fp8 else None
    for start in range(0, n_rows, size):
        x, y = hidden[start : start + size].bfloat16(), targets[start : start + size]
        eighths = None
        if w8 is None:
            logits = F.linear(x, w, b)
        else:
            logits = fp8_linear.product(fp8_linear.scale_rows(x, E4M3), w8[0], b)
            eighths = torch.empty_like(logits, dtype=fp8_linear.E5M2) if for_hidden else None
        total += loss_and_slope(logits, y, n_classes, IGNORE, smoothing, cap, any(needs), eighths).sum()
        if for_bias:
            d_bias += logits.sum(0, dtype=torch.float32)
        if w8 is not None and eighths is not None:
            scale = torch.full((len(x), 1), 1 / LIFT, device=x.device)
            d_hidden[start : start + size] = fp8_linear.product((eighths, scale), w8[1], gradient=True)
        elif for_hidden:
            torch.mm(logits, w, out=d_hidden[start : start + size])
        if for_weight and n_rows <= size:
            torch.mm(logits.T, x, out=d_weight)
        elif for_weight:
            d_weight += logits.T @ x
    return total, d_hidden, d_weight[:n_classes].bfloat16(), d_bias[:n_classes].bfloat16()


def _rows_in_memory(device: torch.device, width: int) -> int:
    """How many rows of bf16 logits take up a small share of a GPU's memory."""
    if device.type != "cuda":
        return 1024
    return max(1024, torch.cuda.get_device_properties(device).total_memory // (_SHARE_OF_MEMORY * 2 * width))


def _places(targets: Tensor, n_counted: int | None) -> Tensor | None:
    """The rows with a target, in order; None: all of them, or unknown without synchronising a GPU."""
    if n_counted is not None:
        everything = n_counted >= len(targets)
        return None if everything else (targets == IGNORE).byte().argsort(stable=True)[:n_counted]
    if targets.device.type != "cpu":
        return None
    places = (targets != IGNORE).nonzero()[:, 0]
    return None if len(places) == len(targets) else places


def _loss_and_slope(logits: Tensor, y: Tensor, smoothing: float, slope: bool) -> tuple[Tensor, Tensor]:
    """-Σ y log p over a chunk, and its slope p - y in the logits (rows, V); rows to ignore give zeros."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    log_p = torch.log_softmax(logits, dim=-1, dtype=wide)
    counts = y != IGNORE
    index = torch.where(counts, y, 0)[:, None]
    loss = log_p.gather(-1, index)[:, 0] * (smoothing - 1)
    if smoothing:
        loss -= smoothing * log_p.mean(-1)
    total = torch.where(counts, loss, 0).sum()
    if not slope:
        return total, log_p
    d_logits = log_p.exp_()
    if smoothing:
        d_logits -= smoothing / logits.shape[-1]
    d_logits.scatter_add_(-1, index, torch.full_like(index, smoothing - 1, dtype=wide))
    return total, d_logits.mul_(counts[:, None])


def _product(slope: Tensor, x: Tensor) -> Tensor:
    """slope @ x in the dtype of x, its sums kept as wide as ``slope``: they outgrow fp16, and chunks add to them."""
    if x.dtype == slope.dtype:
        return slope @ x
    if not x.is_cuda:  # no CPU product gives a wider result than it takes
        return slope @ x.float() if x.dtype == torch.float16 else (slope.to(x.dtype) @ x).float()
    if x.dtype == torch.float16:
        return torch.mm((slope * _LIFT).half(), x, out_dtype=torch.float32).div_(_LIFT)
    return torch.mm(slope.to(x.dtype), x, out_dtype=torch.float32)


def _zeros(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, for_hidden: bool, for_weight: bool, for_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The sum and the three gradients to begin with; those nobody needs have no numbers."""
    wide = torch.promote_types(hidden.dtype, torch.float32)
    total = hidden.new_zeros((), dtype=wide)
    wide = torch.bfloat16 if has_fused_loss(hidden.device, dtype) else wide
    d_hidden = hidden.new_zeros(hidden.shape if for_hidden else 0, dtype=wide)
    d_weight = hidden.new_zeros(weight.shape if for_weight else 0, dtype=wide)
    return total, d_hidden, d_weight, hidden.new_zeros(len(weight) if for_bias else 0, dtype=wide)


@_chunked.register_fake
def _(hidden: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _zeros(hidden, weight, *rest[5:9])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.dtypes = [None if x is None else x.dtype for x in inputs[:3]]
    ctx.needs = inputs[8:11]
    ctx.save_for_backward(*output[1:])
    ctx.mark_non_differentiable(*output[1:])


@first_derivative_only("the cross-entropy of a large vocabulary")
def _backward(ctx: Any, d_total: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    slopes = zip(ctx.saved_tensors, ctx.dtypes, ctx.needs, strict=True)
    grads = [(slope * d_total).to(dtype) if needed else None for slope, dtype, needed in slopes]
    return (*grads, *[None] * 9)


_chunked.register_autograd(_backward, setup_context=_setup_context)


class Objective(nn.Module):
    """Model and loss as one module, so that it can be compiled, wrapped and sharded as one.

    A batch → the sum of the loss over its targets; the caller divides by their number over all processes. In training
    the losses of routers are part of it, and ``router_numbers`` says how the last batch was routed.
    ``reference`` is a frozen model that the loss compares with, its last argument where there is one.
    """

    def __init__(
        self,
        model: Model,
        smoothing: float = 0.0,
        loss: LossFunction | None = None,
        reference: Model | None = None,
    ) -> None:
        super().__init__()
        self.model, self.smoothing, self.loss = model, smoothing, batch_loss if loss is None else loss
        self._reference = (reference,)  # in a tuple, so that it is no submodule: neither trained, sharded nor saved
        self.router_numbers: dict[str, Tensor] = {}

    @property
    def reference(self) -> Model | None:
        return self._reference[0]

    def forward(self, batch: Batch) -> Tensor:
        others = () if self.reference is None else (self.reference,)
        loss = self.loss(self.model, batch, self.smoothing if self.training else 0.0, *others)
        return loss + self._router_loss(batch) if self.training and self.has_routers else loss

    @property
    def has_routers(self) -> bool:
        return getattr(getattr(self.model, "config", None), "experts", None) is not None

    def _router_loss(self, batch: Batch) -> Tensor:
        """The routers' losses, meant over layers, as often as there are targets, by whose number the sum is divided."""
        config, layers = self.model.config, take_router_losses(self.model)
        balance, z, load = (torch.stack(parts) for parts in zip(*layers, strict=True))
        total = config.balance_loss * balance.mean() + config.router_z_loss * z.mean()
        load = load * load.shape[-1]  # (layers, E), 1 where all are used alike
        numbers = {"router_loss": total, "expert_load_max": load.amax(), "expert_load_min": load.amin()}
        self.router_numbers = {name: x.detach() for name, x in numbers.items()}
        targets = batch.targets
        n_targets = targets.numel() if targets.is_floating_point() else (targets != IGNORE).sum()
        return total * n_targets


def batch_loss(model: Model, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The sum of the loss over a batch's targets: the cross-entropy, or what ``label_losses`` has.

    Token logits of a large vocabulary are never held whole: the head's matrix goes into the loss with the states.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, TokenHead):
        logits, targets = model(*batch.inputs, **batch.options), batch.targets
        # A module of one's own may have no config; its logits are those of classes.
        problem_type: Any = getattr(getattr(model, "config", None), "problem_type", "single_label")
        if problem_type == "single_label":
            return cross_entropy(logits, targets, smoothing, batch.weights)
        if problem_type == "multi_label":  # each label is a question of two answers
            targets = targets * (1 - smoothing) + smoothing / 2
        losses = label_losses(logits, targets, problem_type)
        return (losses if batch.weights is None else losses * batch.weights).sum()
    states, weight = _states_and_weight(model, batch)
    # Compiled, a number that differs from batch to batch would be compiled anew.
    n_targets = None if torch.compiler.is_compiling() else batch.n_counted
    return linear_cross_entropy(
        states, weight, batch.targets, head.bias, smoothing, n_counted=n_targets, cap=head.cap, fp8=head.fp8
    )


def r_drop_loss(model: Model, batch: Batch, smoothing: float = 0.0, *, weight: float = 5.0) -> Tensor:
    """½ (L₁ + L₂) + weight · ¼ (KL(p₁ ‖ p₂) + KL(p₂ ‖ p₁)) of two passes with dropout (R-Drop, Liang et al. 2021).

    Half of the paper's sum, so that a target weighs as much as in ``batch_loss``, which is the loss of held-out data.
    Both passes are one over the batch and its copy, since every row has a dropout of its own.
    """
    if not model.training:
        return batch_loss(model, batch, smoothing)
    twice = batch.repeat_rows()
    logits = model(*twice.inputs, **twice.options)
    p, log_p = (f(logits, dim=-1, dtype=torch.float32).chunk(2) for f in (torch.softmax, torch.log_softmax))
    divergence = ((p[0] - p[1]) * (log_p[0] - log_p[1])).sum(-1)
    divergence = torch.where(batch.targets != IGNORE, divergence, 0.0).sum()
    return (cross_entropy(logits, twice.targets, smoothing, twice.weights) + weight / 2 * divergence) / 2


@torch.no_grad()
def token_losses(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """-log p of every target (n,) and the likeliest token in its place (n,), in the order of the batch."""
    head, is_target = cast(TokenHead, model.head), batch.targets != IGNORE
    states, weight = _states_and_weight(model, batch)
    losses, likeliest = [], []
    size = _ROWS_AT_ONCE.get(states.device.type, 1024)
    for x, y in zip(states[is_target].split(size), batch.targets[is_target].split(size), strict=True):
        logits = head.cap_logits(F.linear(x, weight, head.bias).float())
        losses.append(F.cross_entropy(logits, y, reduction="none"))
        likeliest.append(logits.argmax(-1))
    return torch.cat(losses), torch.cat(likeliest)


def _states_and_weight(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The states the output matrix is applied to (B, T, M), and that matrix (V, M)."""
    head = cast(TokenHead, model.head)
    states = head.hidden(model.hidden(*batch.inputs, **batch.options))
    return states, model.output_table if head.weight is None else head.weight
