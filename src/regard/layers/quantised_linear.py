"""Linear maps in int8: one scale per output for the weights, one scale per row for the inputs (Jacob et al. 2018).

W ≈ diag(s) Q,  s_n = max_m |W_nm| / 127,   y = s ⊙ (Q round(x / t)) t + b,  t = max_m |x_m| / 127

In a trained model a few inputs are a hundred times larger than all others, which would then be rounded to 0. If the
sizes of the inputs are known, the columns of W for the largest ones, 1 in 64, stay float32 (Dettmers et al. 2022).

On a CPU the product is FBGEMM's with packed weights; elsewhere, and while tracing, it is plain integer arithmetic.
State: ``weight`` int8 (out, in), ``scale`` float32 (out,), ``bias`` float32 (out,) or None; with float columns also
``columns`` (n,) and ``column_weight`` float32 (out, n), and ``weight`` is 0 in those columns.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .embeddings import TokenEmbedding
from .positions import check_ids

_MAX_INT8 = 127
_FLOAT_COLUMNS = 64  # one in this many columns stays float32, but at least four
# (float32 rows, their scale and zero point, packed weights) → float32; None if torch lacks it.
_packed_product: Any = getattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32", None)
_pack_lock = threading.Lock()  # torch.backends.quantized.engine is global


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Weights (out, in) as int8 and one scale per output (out,)."""
    weight = weight.detach().float()
    scale = weight.abs().amax(1) / _MAX_INT8
    scale = torch.where(scale > 0, scale, 1.0)
    return (weight / scale[:, None]).round().clamp(-_MAX_INT8, _MAX_INT8).to(torch.int8), scale


class FloatColumns(NamedTuple):
    """Columns of a matrix that stay float32: their indices (n,) and weights (out, n)."""

    columns: Tensor
    column_weight: Tensor


def split_columns(weight: Tensor, input_sizes: Tensor) -> tuple[Tensor, FloatColumns]:
    """Split weights (out, in) by the sizes of the inputs (in,): 0 in the columns of the largest, and those columns."""
    n_columns = min(len(input_sizes), max(4, -(-len(input_sizes) // _FLOAT_COLUMNS)))
    columns = input_sizes.topk(n_columns).indices.sort().values
    weight = weight.detach().float()
    return weight.index_fill(1, columns, 0.0), FloatColumns(columns, weight[:, columns].contiguous())


class Int8Linear(nn.Module):
    """y = x Wᵀ + b with int8 weights, for inference.   (…, in) → (…, out)"""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None
    columns: Tensor | None
    column_weight: Tensor | None

    def __init__(
        self, weight: Tensor, scale: Tensor, bias: Tensor | None = None, floats: FloatColumns | None = None
    ) -> None:
        super().__init__()
        if weight.dtype != torch.int8 or scale.shape != weight.shape[:1]:
            got = f"{weight.dtype} and {tuple(scale.shape)}"
            raise ValueError(f"weight must be int8 and scale of shape ({len(weight)},), got {got}")
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", bias)
        self.register_buffer("columns", None if floats is None else floats.columns)
        self.register_buffer("column_weight", None if floats is None else floats.column_weight)
        self._packed: Any = None

    @classmethod
    def of(cls, linear: nn.Linear, input_sizes: Tensor | None = None) -> Int8Linear:
        """Quantise a Linear; ``input_sizes`` (in,), the magnitudes of its inputs, decide which columns stay float32."""
        bias: Tensor | None = linear.bias
        weight, floats = (linear.weight, None) if input_sizes is None else split_columns(linear.weight, input_sizes)
        return cls(*quantise_weight(weight), None if bias is None else bias.detach().float().clone(), floats)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.bias)

    def product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias."""
        out = self.product_rows(x.detach().reshape(-1, self.in_features).float(), bias)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def product_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias for float32 rows (R, in)."""
        if self.columns is None or self.column_weight is None:
            return self._int8_rows(x, bias)
        float_part = x[:, self.columns] @ self.column_weight.float().t()
        return self._int8_rows(x.index_fill(1, self.columns, 0.0), bias) + float_part

    def _int8_rows(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if torch.compiler.is_compiling() or x.device.type != "cpu" or len(x) == 0 or not _can_pack():
            out = self._integer_product(x)
            return out if bias is None else out + bias.float()
        if self._packed is None:
            self._packed = _pack_weight(self.weight, self.scale)
        levels, packed = _input_levels(), self._packed
        if len(x) == 1:  # the scale of a single row can be passed to the product
            largest = float(torch.linalg.vector_norm(x, math.inf)) or 1.0
            out = _packed_product(x, largest / levels, levels + 1, packed)
            return out if bias is None else out.add_(bias)
        # A row of zeros becomes 0 / 0, which is quantised to some integer; multiplied by row_max = 0 it is 0 again.
        row_max = x.abs().amax(1, keepdim=True)  # (R, 1)
        out = _packed_product(x / row_max, 1 / levels, levels + 1, packed)
        return out.mul_(row_max) if bias is None else torch.addcmul(bias.float(), out, row_max, out=out)

    def _integer_product(self, x: Tensor) -> Tensor:
        """The same product without packed weights."""
        step = (x.abs().amax(1, keepdim=True) / _MAX_INT8).clamp(min=torch.finfo(torch.float32).tiny)  # (R, 1)
        q = (x / step).round()
        if x.device.type == "cpu" and len(x):
            total = torch._int_mm(q.to(torch.int8), self.weight.t()).float()
        else:  # integers below 2²⁴ are exact in float32
            total = F.linear(q, self.weight.float())
        return total * (step * self.scale.float())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        self._packed = None
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._packed = None
        super()._load_from_state_dict(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}  # each copy packs its own weights

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, int8"


class Int8Embedding(Int8Linear):
    """A token table in int8, times ``factor``; a tied head uses it as its output matrix (``product``)."""

    def __init__(self, weight: Tensor, scale: Tensor, factor: float = 1.0, floats: FloatColumns | None = None) -> None:
        super().__init__(weight, scale, floats=floats)
        self.factor = factor
        self.vocab_size, self.d_model = weight.shape

    def forward(self, ids: Tensor) -> Tensor:
        """ids (B, T) → (B, T, M)."""
        check_ids("token ids", ids, 0, self.vocab_size, "vocab_size")
        vectors = self.weight[ids] * (self.scale[ids] * self.factor)[..., None]
        if self.columns is None or self.column_weight is None:
            return vectors
        return vectors.index_copy(-1, self.columns, self.column_weight[ids].to(vectors.dtype) * self.factor)


class Int8Head(nn.Module):
    """A head whose output matrix is int8: its own, or a tied token table."""

    bias: Tensor | None

    def __init__(self, head: Any, tied: Int8Embedding | None, input_sizes: Tensor | None = None) -> None:
        super().__init__()
        weight, self.bias = head.weight, head.bias
        self.output = None
        if tied is None:
            weight, floats = (weight, None) if input_sizes is None else split_columns(weight, input_sizes)
            self.output = Int8Linear(*quantise_weight(weight), None, floats)
        head.weight = head.bias = None
        self.inner = head  # the part before the output matrix
        self._tied = (tied,)  # in a tuple, so that it is not a submodule and is saved only once

    def hidden(self, x: Tensor) -> Tensor:
        """The input of the output matrix."""
        return self.inner.hidden(x)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        """x (B, T, M) → (B, T, V); ``table`` is ignored, unlike in plain heads."""
        output = self._tied[0] if self.output is None else self.output
        assert output is not None
        return self.inner.cap_logits(output.product(self.hidden(x), self.bias))


def quantise(model: nn.Module, input_sizes: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Convert a model's linear maps, token tables and output matrix to int8, in place; norms and positions stay float.

    ``input_sizes`` are the magnitudes of each linear map's inputs, by the map's name, and "head" for the output matrix;
    the columns of the largest inputs stay float32.
    """
    sizes = {} if input_sizes is None else input_sizes
    for parent, module in list(model.named_modules()):
        for name, part in list(module.named_children()):
            if type(part) is nn.Linear:
                setattr(module, name, Int8Linear.of(part, sizes.get(f"{parent}.{name}" if parent else name)))
    head: Any = getattr(model, "head", None)
    has_matrix = hasattr(head, "hidden") and hasattr(head, "weight")
    tables = [(name, part) for name, part in model.named_children() if type(part) is TokenEmbedding]
    quantised: list[Int8Embedding] = []
    for name, part in tables:
        is_output = has_matrix and head.weight is None and name == tables[-1][0]
        whole: Tensor = part.weight
        weight, floats = split_columns(whole, sizes["head"]) if is_output and "head" in sizes else (whole, None)
        quantised.append(Int8Embedding(*quantise_weight(weight), part.scale, floats))
        setattr(model, name, quantised[-1])
    if has_matrix:
        model.head = Int8Head(head, quantised[-1] if head.weight is None else None, sizes.get("head"))
    return model.requires_grad_(False).eval()


@cache
def _input_levels() -> int:
    """Input levels on either side of 0; without VNNI a CPU accumulates in 16 bits, which only 7-bit inputs fit."""
    return _MAX_INT8 if torch.cpu._is_vnni_supported() else 63


@cache
def _can_pack() -> bool:
    """Whether this build of torch and this CPU support the packed product."""
    if _packed_product is None or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    try:
        packed = _pack_weight(torch.zeros(16, 16, dtype=torch.int8), torch.ones(16))
        _packed_product(torch.zeros(1, 16), 1.0, 128, packed)
    except (RuntimeError, AttributeError):
        return False
    return True


def _pack_weight(weight: Tensor, scale: Tensor) -> Any:
    zero = torch.zeros(len(weight), dtype=torch.int64)
    with _pack_lock, torch.inference_mode(False), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.quantize_per_tensor", UserWarning)  # deprecated
        before = torch.backends.quantized.engine
        torch.backends.quantized.engine = "fbgemm"
        try:
            q = torch._make_per_channel_quantized_tensor(weight.contiguous(), scale.double(), zero, 0)
            return torch.ops.quantized.linear_prepack(q, None)
        finally:
            torch.backends.quantized.engine = before
