"""A training batch, the loss functions (chunked for a large vocabulary), and the module that joins model and loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config.data_config import ProblemType
from ..data.packing import IGNORE
from ..foundation.autograd import first_derivative_only
from ..foundation.device import HAS_TRITON, TRITON_INTERPRETED
from ..generation.cached_engine import check_logits
from ..models import Model
from ..models.components import TokenHead
from ..models.experts import take_router_losses
from .fused_layers import E5M2, gradient_product


@dataclass(frozen=True, eq=False)
class Batch:
    """The arguments of the model and the targets of the loss.

    Targets are token ids (B, T) with IGNORE at positions without one; classes (B,); for multi-label data 0.0 or 1.0
    for each label (B, labels); or, for regression, numbers (B,).
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)
    n_tokens: int = 0  # tokens or patches the model reads, without padding; both sides of a pair count
    n_counted: int | None = None  # ``n_targets`` as counted before the batch moved to a device
    weights: Tensor | None = None  # factor on the loss of each target, same shape as the targets; None: all 1

    @property
    def n_targets(self) -> int:
        """The number of targets that the loss sums over."""
        if self.n_counted is not None:
            return self.n_counted
        return self.targets.numel() if self.targets.is_floating_point() else int((self.targets != IGNORE).sum())

    def to(self, device: torch.device) -> Batch:
        """Move to a device; from pinned memory the copy is asynchronous."""
        return self.with_counts()._map(lambda x: x.to(device, non_blocking=True))

    def with_counts(self) -> Batch:
        """The same batch with ``n_counted`` set, so that ``n_targets`` never synchronises a GPU."""
        return replace(self, n_counted=self.n_targets)

    def pin_memory(self) -> Batch:
        return self._map(Tensor.pin_memory)

    def repeat_rows(self) -> Batch:
        """The rows of the batch followed by the same rows again."""
        return self._map(lambda x: torch.cat([x, x]))

    def clone(self) -> Batch:
        return self._map(Tensor.clone)

    def tensors(self) -> list[Tensor]:
        """All tensors of the batch, in a fixed order."""
        return [*self.inputs, self.targets, *self.options.values(), *([] if self.weights is None else [self.weights])]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        options = {name: change(x) for name, x in self.options.items()}
        weights = None if self.weights is None else change(self.weights)
        inputs = tuple(map(change, self.inputs))
        return replace(self, inputs=inputs, targets=change(self.targets), options=options, weights=weights)


def shift_targets(target: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """<bos> a b <eos> (B, T + 1) → the decoder input <bos> a b and the targets a b <eos>, each (B, T)."""
    shifted = target[:, 1:]
    return target[:, :-1].contiguous(), torch.where(shifted == pad_id, IGNORE, shifted)


# Largest size of fp32 logits held at once, in bytes; larger ones are computed in chunks of this size. Measured: larger
# chunks cost a CPU time for fresh memory, smaller ones leave a GPU idle.
LOGIT_BYTES = {"cpu": 16 << 20, "cuda": 512 << 20}
# fp16 cannot represent numbers between 0 and 6e-8. Slopes, at most 1 in size, are multiplied by this power of two
# before they are rounded to fp16, and the product is divided by it.
_LIFT = 2.0**15
VOCAB_MULTIPLE = 128  # the fused loss pads the vocabulary to a multiple of this
SHARE_OF_MEMORY = 16  # the fused loss holds bf16 logits of at most 1/16 of GPU memory at once
_ROWS_AT_ONCE = {"cuda": 8192}  # rows of logits per chunk in ``token_losses``; 1024 on other devices
LossFunction = Callable[..., Tensor]  # (model, batch, smoothing) → the sum over the batch's targets


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0, weights: Tensor | None = None) -> Tensor:
    """The sum over targets of -Σ_c y_c log p_c with smoothed y (Szegedy et al. 2016; Vaswani et al. 2017, §5.4).

    y = (1 - smoothing) · one-hot + smoothing / classes. The caller divides by the number of targets. ``weights``, of
    the same shape as the targets, multiply the terms of the sum.   logits (…, classes), targets (…) → ()
    """
    flat = logits.flatten(0, -2)
    flat = flat.to(torch.promote_types(flat.dtype, torch.float32))
    if weights is None:
        return F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="sum")
    losses = F.cross_entropy(flat, targets.flatten(), ignore_index=IGNORE, label_smoothing=smoothing, reduction="none")
    return losses @ weights.flatten().to(losses.dtype)


def label_losses(logits: Tensor, targets: Tensor, problem_type: ProblemType) -> Tensor:
    """The loss of each target of a classifier, in the shape of the targets.

    Cross-entropy for classes (B,), binary cross-entropy for labels (B, labels), squared error for numbers (B,).
    logits (B, classes)
    """
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
    """``cross_entropy(hidden @ weightᵀ + bias, targets)`` without materialising large logits.

    hidden (…, M), weight (V, M). A vocabulary of 50,000 with 65,536 tokens would need 13 GB of fp32 logits, and as much
    again for their gradient; here each takes chunk × V. Small logits are computed at once.

    Rows without a target are left out of the products. Counting them on a GPU would synchronise, so there all rows
    are computed unless ``n_counted`` gives the exact number of targets other than IGNORE.
    ``chunk`` is the number of rows per chunk (default: chosen for the device). ``cap`` replaces each logit by
    cap · tanh(logit / cap).

    In bf16 on a GPU the kernel ``kernels.token_loss`` computes the same at any size; with ``fp8`` the gradient of
    hidden is then a product in eight bits. torch 2.13 also has a chunked loss, but without label smoothing, without
    torch.compile and without skipping rows.
    """
    rows, flat = hidden.flatten(0, -2), targets.flatten()
    device = rows.device.type
    max_rows = LOGIT_BYTES.get(device, LOGIT_BYTES["cuda"]) // (4 * weight.shape[0])
    skips_rows = n_counted is not None and 2 * n_counted <= rows.shape[0]  # pays off even for small logits
    autocasts = torch.is_autocast_enabled(device) and rows.dtype != torch.float64  # autocast leaves fp64 alone
    dtype = torch.get_autocast_dtype(device) if autocasts else rows.dtype
    fused = has_fused_loss(rows.device, dtype)
    if not fused and cap is not None:
        return cross_entropy(torch.tanh(F.linear(rows, weight, bias) / cap) * cap, flat, smoothing)
    if not fused and chunk is None and rows.shape[0] <= max_rows and not skips_rows:
        return cross_entropy(F.linear(rows, weight, bias), flat, smoothing)
    needs = [torch.is_grad_enabled() and x is not None and x.requires_grad for x in (rows, weight, bias)]
    size = max(1, max_rows) if chunk is None and not fused else chunk
    fp8 = fp8 and weight.shape[1] % 16 == 0
    total, *_ = _chunked(rows, weight, bias, flat, smoothing, size, n_counted, dtype, *needs, cap, fp8)
    return total


def has_fused_loss(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether ``kernels.token_loss`` computes the loss of logits in this dtype."""
    return dtype == torch.bfloat16 and HAS_TRITON and (device.type == "cuda" or TRITON_INTERPRETED)


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
    fp8: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The loss and its gradients in hidden, weight and bias.

    The forward pass also computes the gradient of each chunk of logits, softmax(z) - y, so the logits can be freed.
    A custom operator, so that torch.compile neither unrolls the chunks nor recompiles for other lengths.
    """
    target_rows = _target_rows(targets, n_counted)
    if has_fused_loss(hidden.device, dtype):
        x, y, needs = hidden, targets, (for_hidden, for_weight, for_bias)
        if target_rows is not None:
            x, y = hidden[target_rows], targets[target_rows]
        total, d_x, d_weight, d_bias = _fused_loss(x, weight, bias, y, smoothing, cap, chunk, fp8, needs)
        if target_rows is not None and for_hidden:
            d_x = d_x.new_zeros(hidden.shape).index_copy_(0, target_rows, d_x)
        return total, d_x, d_weight, d_bias
    assert chunk is not None
    total, d_hidden, d_weight, d_bias = _zeros(hidden, weight, dtype, for_hidden, for_weight, for_bias)
    n_rows = targets.shape[0] if target_rows is None else target_rows.shape[0]
    w, b = weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(hidden.device.type, enabled=False):  # the dtype of each product is chosen here
        for start in range(0, n_rows, chunk):
            part: Any = slice(start, start + chunk) if target_rows is None else target_rows[start : start + chunk]
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
    """The sum of the loss in fp32, and its gradients in hidden (rows, M), weight (V, M) and bias (V,) in bf16.

    A product writes the logits, one kernel overwrites them with their slope p - y, and two products compute the
    gradients from that. With an unaligned width such as 50,257, cuBLAS falls back to kernels for an old architecture:
    the weight is therefore padded to a multiple of 128 rows, which get no probability.
    ``fp8`` computes the gradient of hidden in eight bits. The logits stay in bf16: in fp8 their softmax would make
    gradients 5 % too large.
    """
    from ..kernels.token_loss import LIFT, loss_and_slope

    n_rows, n_classes = len(hidden), len(weight)
    padding = -n_classes % VOCAB_MULTIPLE
    w = F.pad(weight.bfloat16(), (0, 0, 0, padding)) if padding else weight.bfloat16()
    b = None if bias is None else F.pad(bias.bfloat16(), (0, padding))
    for_hidden, for_weight, for_bias = needs
    size = _rows_in_memory(hidden.device, len(w)) if chunk is None else chunk
    total = hidden.new_zeros((), dtype=torch.float32)
    d_hidden = hidden.new_empty(hidden.shape if for_hidden else 0, dtype=torch.bfloat16)
    sum_dtype = torch.float32 if n_rows > size else torch.bfloat16  # a sum over several chunks needs fp32
    d_weight = hidden.new_zeros(w.shape if for_weight else 0, dtype=sum_dtype)
    d_bias = hidden.new_zeros(len(w) if for_bias else 0, dtype=torch.float32)
    in_fp8 = fp8 and for_hidden
    for start in range(0, n_rows, size):
        x, y = hidden[start : start + size].bfloat16(), targets[start : start + size]
        logits = F.linear(x, w, b)
        slope8 = torch.empty_like(logits, dtype=E5M2) if in_fp8 else None
        total += loss_and_slope(logits, y, n_classes, IGNORE, smoothing, cap, any(needs), slope8).sum()
        if for_bias:
            d_bias += logits.sum(0, dtype=torch.float32)
        if slope8 is not None:
            scale = torch.full((), 1 / LIFT, device=x.device)
            d_hidden[start : start + size] = gradient_product(slope8, w, scale)
        elif for_hidden:
            torch.mm(logits, w, out=d_hidden[start : start + size])
        if for_weight and n_rows <= size:
            torch.mm(logits.T, x, out=d_weight)
        elif for_weight:
            d_weight += logits.T @ x
    return total, d_hidden, d_weight[:n_classes].bfloat16(), d_bias[:n_classes].bfloat16()


def _rows_in_memory(device: torch.device, width: int) -> int:
    """The number of rows of bf16 logits that fill 1/SHARE_OF_MEMORY of the GPU."""
    if device.type != "cuda":
        return 1024
    return max(1024, torch.cuda.get_device_properties(device).total_memory // (SHARE_OF_MEMORY * 2 * width))


def _target_rows(targets: Tensor, n_counted: int | None) -> Tensor | None:
    """Indices of the rows with a target, in order; None to compute all rows: all have one, or a GPU would have to
    synchronise to tell."""
    if n_counted is not None:
        if n_counted >= len(targets):
            return None
        return (targets == IGNORE).byte().argsort(stable=True)[:n_counted]
    if targets.device.type != "cpu":
        return None
    rows = (targets != IGNORE).nonzero()[:, 0]
    return None if len(rows) == len(targets) else rows


def _loss_and_slope(logits: Tensor, y: Tensor, smoothing: float, slope: bool) -> tuple[Tensor, Tensor]:
    """-Σ y log p over a chunk, and its slope p - y in the logits (rows, V), zero in ignored rows.

    Without ``slope`` the second tensor is meaningless.
    """
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
    """slope @ x multiplied in the dtype of x, but summed in that of ``slope``: fp16 sums would overflow."""
    if x.dtype == slope.dtype:
        return slope @ x
    if not x.is_cuda:  # torch.mm takes out_dtype only on CUDA
        return slope @ x.float() if x.dtype == torch.float16 else (slope.to(x.dtype) @ x).float()
    if x.dtype == torch.float16:
        return torch.mm((slope * _LIFT).half(), x, out_dtype=torch.float32).div_(_LIFT)
    return torch.mm(slope.to(x.dtype), x, out_dtype=torch.float32)


def _zeros(
    hidden: Tensor, weight: Tensor, dtype: torch.dtype, for_hidden: bool, for_weight: bool, for_bias: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Zeros for the sum and the three gradients; a gradient that is not needed is empty."""
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
    return (*grads, *[None] * 10)


_chunked.register_autograd(_backward, setup_context=_setup_context)


class Objective(nn.Module):
    """Model and loss as one module, to be compiled, wrapped and sharded together.

    ``forward(batch)`` returns the sum of the loss over the targets; the caller divides by their number over all
    processes. In training it includes the losses of the routers, and ``router_numbers`` describes how the last batch
    was routed. ``reference``, if given, is a frozen model that is passed to the loss as its last argument.
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
        self._reference = (reference,)  # a tuple hides it from nn.Module: it is not trained, sharded or saved
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
        """The mean of the routers' losses over layers, times the number of targets, by which the caller divides."""
        config, layers = self.model.config, take_router_losses(self.model)
        balance, z, load = (torch.stack(parts) for parts in zip(*layers, strict=True))
        total = config.balance_loss * balance.mean() + config.router_z_loss * z.mean()
        load = load * load.shape[-1]  # (layers, E), 1 when all experts are used equally
        numbers = {"router_loss": total, "expert_load_max": load.amax(), "expert_load_min": load.amin()}
        self.router_numbers = {name: x.detach() for name, x in numbers.items()}
        targets = batch.targets
        n_targets = targets.numel() if targets.is_floating_point() else (targets != IGNORE).sum()
        return total * n_targets


def info_nce(logits: Tensor, smoothing: float = 0.0) -> Tensor:
    """-½ Σ_i (log softmax(L_i:)_i + log softmax(L_:i)_i): image i among all texts, text i among all images.

    InfoNCE (van den Oord et al. 2018) in both directions, as in CLIP (Radford et al. 2021).   L (B, B) → ()
    """
    diagonal = torch.arange(len(logits), device=logits.device)
    return (cross_entropy(logits, diagonal, smoothing) + cross_entropy(logits.T, diagonal, smoothing)) / 2


def pairwise_sigmoid(logits: Tensor) -> Tensor:
    """-Σ_ij log σ(s_ij L_ij), s_ij = 1 for i = j, else -1: does each pair belong together? (SigLIP, Zhai et al. 2023).

    logits L (B, B) → ()
    """
    signs = 2 * torch.eye(len(logits), device=logits.device) - 1
    return -F.logsigmoid(signs * logits.float()).sum()


def contrast_loss(model: Model, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The contrastive loss ``config.contrast`` of a two-tower model, summed over the pairs of a batch."""
    logits = model(*batch.inputs, **batch.options)
    return pairwise_sigmoid(logits) if model.config.contrast == "sigmoid" else info_nce(logits, smoothing)


def batch_loss(model: Model, batch: Batch, smoothing: float = 0.0) -> Tensor:
    """The sum of the loss over the targets of a batch: token cross-entropy, or ``label_losses`` for a classifier.

    Token logits of a large vocabulary are not materialised: ``linear_cross_entropy`` takes the states and the head's
    matrix.
    """
    head = getattr(model, "head", None)
    if not isinstance(head, TokenHead):
        logits, targets = model(*batch.inputs, **batch.options), batch.targets
        # A user's own module may have no config; its logits are taken as classes.
        problem_type: Any = getattr(getattr(model, "config", None), "problem_type", "single_label")
        if problem_type == "single_label":
            return cross_entropy(logits, targets, smoothing, batch.weights)
        if problem_type == "multi_label":  # each label is a choice between two classes
            targets = targets * (1 - smoothing) + smoothing / 2
        losses = label_losses(logits, targets, problem_type)
        return (losses if batch.weights is None else losses * batch.weights).sum()
    states, weight = _states_and_weight(model, batch)
    # torch.compile would recompile for every new number.
    n_targets = None if torch.compiler.is_compiling() else batch.n_counted
    return linear_cross_entropy(
        states, weight, batch.targets, head.bias, smoothing, n_counted=n_targets, cap=head.cap, fp8=head.fp8
    )


def r_drop_loss(model: Model, batch: Batch, smoothing: float = 0.0, *, weight: float = 5.0) -> Tensor:
    """½ (L₁ + L₂) + weight · ¼ (KL(p₁ ‖ p₂) + KL(p₂ ‖ p₁)) of two passes with dropout (R-Drop, Liang et al. 2021).

    This is half of the paper's sum, so that a target weighs as much as in ``batch_loss``, which evaluation uses.
    Both passes run as one over the batch and its copy, since dropout is independent for each row.
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
    """-log p of each target (n,) and the most likely token at its position (n,), in the order of the batch.

    BadOutput if one is NaN, which would be taken for a token without a target or spread into a mean.
    """
    head, is_target = cast(TokenHead, model.head), batch.targets != IGNORE
    states, weight = _states_and_weight(model, batch)
    losses, predictions = [], []
    size = _ROWS_AT_ONCE.get(states.device.type, 1024)
    for x, y in zip(states[is_target].split(size), batch.targets[is_target].split(size), strict=True):
        logits = head.cap_logits(F.linear(x, weight, head.bias).float())
        losses.append(F.cross_entropy(logits, y, reduction="none"))
        predictions.append(logits.argmax(-1))
    return check_logits(torch.cat(losses), "losses"), torch.cat(predictions)


def _states_and_weight(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
    """The states (B, T, M) that the output matrix is applied to, and that matrix (V, M)."""
    head = cast(TokenHead, model.head)
    states = head.hidden(model.hidden(*batch.inputs, **batch.options))
    return states, model.output_table if head.weight is None else head.weight
