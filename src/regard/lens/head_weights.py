"""QK and OV circuits of heads, computed from the weights, and the composition of heads.

A score is x_i QK x_jᵀ with QK = W_q W_kᵀ; a head moves x_j OV from token j to token i, with OV = W_v W_o. Both are
(M, M) matrices of rank D, kept as their factors (Elhage et al. 2021). They contain everything that is linear and does
not depend on the text: W_q, W_k, W_v and W_o, RoPE, layer scales, and of the norms (before the attention, of queries
and keys, on the output) the gain and LayerNorm's subtraction of the mean. The norms' scales depend on the text and are
left out, as are all biases. A mechanism that changes queries, keys, values or heads in its own way has no such matrix.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor

from ..attention import MultiHeadAttention
from ..layers import Embeddings
from ..models import Model
from ..models.components import TokenHead
from .capture import attention_site, attention_sites, resolve_kind, stacks
from .notebook import table_html
from .residual import check_float_weights, check_reads_source, fold_norm, layer_block, output_matrix, unscaled_norm
from .why import has_dot_scores, rotation_matrix, unchanged_heads

Reader = Literal["q", "k", "v"]


class FactoredMatrix:
    """left · right, (M, D) and (D, N): a matrix of rank at most D, which only ``dense()`` materialises."""

    def __init__(self, left: Tensor, right: Tensor) -> None:
        if left.dim() != 2 or right.dim() != 2 or left.shape[1] != right.shape[0]:
            raise ValueError(f"factors of shape {tuple(left.shape)} and {tuple(right.shape)} cannot be multiplied")
        self.left, self.right = left, right

    @property
    def shape(self) -> tuple[int, int]:
        return self.left.shape[0], self.right.shape[1]

    @property
    def T(self) -> FactoredMatrix:  # noqa: N802 — named like Tensor.T
        return FactoredMatrix(self.right.T, self.left.T)

    def dense(self) -> Tensor:
        """The matrix itself (M, N)."""
        return self.left @ self.right

    def __matmul__(self, other: FactoredMatrix | Tensor) -> FactoredMatrix:
        if isinstance(other, FactoredMatrix):
            return FactoredMatrix(self.left, (self.right @ other.left) @ other.right)
        return FactoredMatrix(self.left, self.right @ other)

    @cached_property
    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (M, D), the singular values (D,) and V (N, D): left · right = U diag(S) Vᵀ. Costs O((M + N) D²)."""
        q_left, r_left = torch.linalg.qr(self.left)
        q_right, r_right = torch.linalg.qr(self.right.T)
        u, s, vh = torch.linalg.svd(r_left @ r_right.T)
        return q_left @ u, s, q_right @ vh.T

    @property
    def norm(self) -> float:
        """The Frobenius norm."""
        return float(self.svd[1].square().sum().sqrt())

    def eigenvalues(self) -> Tensor:
        """The nonzero eigenvalues of a square matrix, complex (D,): those of right · left."""
        return torch.linalg.eigvals(self.right @ self.left)

    def _repr_html_(self) -> str:
        rows = [(n, value) for n, value in enumerate(self.svd[1][:16].tolist())]
        return table_html(("direction", "singular value"), rows, f"{self.shape[0]} × {self.shape[1]}")

    def __repr__(self) -> str:
        values = ", ".join(f"{x:.3g}" for x in self.svd[1][:4].tolist())
        return (
            f"FactoredMatrix({self.shape[0]} × {self.shape[1]}, rank {self.left.shape[1]}; singular values {values} …)"
        )


@torch.no_grad()
def qk_circuit(model: Model, layer: int, head: int, kind: str | None = None, *, distance: int = 0) -> FactoredMatrix:
    """QK of a head: the score of x_i and x_j is x_i QK x_jᵀ, before the mechanism's scale, biases and soft cap.

    distance  with RoPE, QK depends on the distance i - j from the key to the query
    """
    _, g = _module(model, kind, layer, head)
    kind = resolve_kind(model, kind)
    return FactoredMatrix(
        _read_weights(model, kind, layer, "q", distance)[head].T, _read_weights(model, kind, layer, "k")[g]
    )


@torch.no_grad()
def ov_circuit(model: Model, layer: int, head: int, kind: str | None = None) -> FactoredMatrix:
    """OV of a head: it adds a_ij · x_j OV to the residual stream of token i, without biases."""
    _, g = _module(model, kind, layer, head)
    kind = resolve_kind(model, kind)
    return FactoredMatrix(_read_weights(model, kind, layer, "v")[g].T, _write_weights(model, kind, layer)[head])


@torch.no_grad()
def composition_scores(model: Model, reader: Reader, kind: str | None = None) -> Tensor:
    """How much each head reads of the output of earlier heads: [layer, head of the writer; layer, head of the reader].

        ‖OV₁ · X‖ / (‖OV₁‖ ‖X‖)    X = QK₂ for reader="q", QK₂ᵀ for "k", OV₂ for "v"   (L, H, L, H)

    (Frobenius norms; Elhage et al. 2021). With RoPE, QK₂ is that of distance 0; with post-norm, OV₁ includes the norms
    between the two heads. 0 if the reader is not in a later layer. Two random matrices score about √(D / M).
    """
    kind = resolve_kind(model, kind)
    if kind == "cross":
        raise ValueError("kind='cross' reads from another residual stream; heads compose within one")
    if reader not in ("q", "k", "v"):
        raise ValueError(f"reader={reader!r} is not one of q, k, v")
    layers = range(len(attention_sites(model)[kind]))
    near, far = {"q": ("q", "k"), "k": ("k", "q"), "v": ("v", "o")}[reader]
    sides = {side: [_read_weights(model, kind, n, side) for n in layers] for side in {near, far, "v"} - {"o"}}
    sides["o"] = [_write_weights(model, kind, n) for n in layers]  # (H, D, M)
    n_heads = len(sides["o"][0])
    shared = {side: [w.repeat_interleave(n_heads // len(w), 0) for w in by_layer] for side, by_layer in sides.items()}
    scores = torch.zeros(len(layers), n_heads, len(layers), n_heads)
    for first in layers:
        v, o = _triangles(shared["v"][first].transpose(1, 2)), shared["o"][first]  # (H, D, D), (H, D, M)
        for second in range(first + 1, len(layers)):
            o = _through_layers(model, kind, o, range(second - 1, second))
            written = torch.linalg.matrix_norm(v @ o)
            x, y = shared[near][second], _triangles(shared[far][second].transpose(1, 2))  # (H, D, M), (H, D, D)
            read = torch.linalg.matrix_norm(y @ x)
            middle = torch.einsum("adm,bem->abde", o, x)  # the writer's output as read by the reader
            product = torch.einsum("acd,abde,bfe->abcf", v, middle, y)
            scores[first, :, second] = (torch.linalg.matrix_norm(product) / (written[:, None] * read)).float().cpu()
    return scores


def _triangles(x: Tensor) -> Tensor:
    """The R factors (…, D, D) of matrices (…, M, D), with the same norms, also in products."""
    return torch.linalg.qr(x, mode="r").R


@torch.no_grad()
def copying_scores(model: Any) -> Tensor:
    """Whether heads copy tokens, (L, H): Σ λ / Σ |λ| over the eigenvalues of W_E · OV · W_U (Elhage et al. 2021).

    1: a head raises the logits of the tokens it attends to; −1: it lowers them.
    """
    check_float_weights(model)
    kinds = attention_sites(model)
    kind = resolve_kind(model, None)
    head = model.head
    is_plain = isinstance(head, TokenHead) and head.transform is None and not model.is_encoder_decoder
    embed = getattr(model, "embeddings", None) if is_plain else None
    if not isinstance(embed, Embeddings) or embed.projection is not None:
        raise ValueError("copying scores need a model that reads and predicts tokens of one vocabulary")
    stack = stacks(model)["encoder" if model.is_encoder_only else "decoder"]
    tokens = unscaled_norm(embed.norm, model.token.weight.double())
    product = fold_norm(stack.norm, output_matrix(model).double()).T @ tokens  # (M, M): Σ_t u_t e_tᵀ
    scores = []
    n_layers = len(kinds[kind])
    for layer in range(n_layers):
        read, write = _read_weights(model, kind, layer, "v"), _write_weights(model, kind, layer)
        read = read.repeat_interleave(len(write) // len(read), 0)
        for below in reversed(range(layer)):
            for norm in reversed(_residual_norms(model, kind, below)):
                read = fold_norm(norm, read)
        write = _through_layers(model, kind, write, range(layer, n_layers))
        values = torch.linalg.eigvals(write.double() @ product @ read.double().transpose(1, 2))  # (H, D)
        scores.append(values.real.sum(-1) / values.abs().sum(-1).clamp(min=1e-30))
    return torch.stack(scores).float().cpu()


def _through_layers(model: Model, kind: str, x: Tensor, layers: Iterable[int]) -> Tensor:
    """Outputs (…, M) of the first of these layers' heads, as the residual stream carries them to the last one's end."""
    for layer in layers:
        for norm in _residual_norms(model, kind, layer):
            x = unscaled_norm(norm, x)
    return x


def _residual_norms(model: Model, kind: str, layer: int) -> list[Any]:
    """The norms of a layer's residual sums (post-norm), which all earlier outputs pass; None where there is none."""
    block = layer_block(model, kind, layer)
    if not block.residual:
        raise ValueError("without residual connections, no output of a head reaches a later layer unchanged")
    return [norms.total for norms in block.residuals()[:3]]


def _module(model: Model, kind: str | None, layer: int, head: int) -> tuple[MultiHeadAttention, int]:
    """A multi-head attention, and the index of the key head that one of its heads uses."""
    module = attention_site(model, resolve_kind(model, kind), layer, head).owner
    if not isinstance(module, MultiHeadAttention):
        raise ValueError(f"{type(module).__name__} has no weights of single heads")
    if module.n_global:
        raise ValueError("with global_projections a head has other weights for global tokens, not one QK and one OV")
    check_float_weights(module)
    return module, head * module.n_kv_heads // module.n_heads


def _read_weights(model: Any, kind: str, layer: int, side: str, position: int = 0) -> Tensor:
    """W_q, W_k or W_v of each head with the norms' gains and RoPE folded in, at least fp32: (H or G, D, M)."""
    module, _ = _module(model, kind, layer, 0)
    heads = _at_least_fp32({"q": module.w_q, "k": module.w_k, "v": module.w_v}[side]).unflatten(0, (-1, module.d_head))
    if side != "v":
        if not has_dot_scores(module):
            name = module.mechanism.name
            raise ValueError(f"mechanism {name!r} does not score by q · k as projected, so a head has no QK matrix")
        own_norm, is_joint = module.q_norm if side == "q" else module.k_norm, module.norms_all_heads
        rows = heads.flatten(0, 1)[None] if is_joint else heads
        heads = unscaled_norm(own_norm, rows.transpose(1, 2)).transpose(1, 2).reshape(heads.shape)
        if module.rope is not None:
            heads = rotation_matrix(module.rope, module.d_head, position, abs(position) + 1).to(heads) @ heads
    norms = layer_block(model, kind, layer).residuals()
    norm = norms.cross.before if kind == "cross" else norms.attention.before
    if kind == "cross" and side != "q":  # keys and values come from the encoder's last states
        check_reads_source(model)
        norm = stacks(model)["encoder"].norm
    return fold_norm(norm, heads)


def _write_weights(model: Model, kind: str, layer: int) -> Tensor:
    """W_o of each head with the gain of the output's norm, layer scale or gate, at least fp32: (H, D, M)."""
    module, _ = _module(model, kind, layer, 0)
    weight = _at_least_fp32(module.head_outputs()).permute(1, 2, 0)
    if "v" not in unchanged_heads(module):
        raise ValueError(f"mechanism {module.mechanism.name!r} changes the values, so a head has no OV matrix")
    norms = layer_block(model, kind, layer).residuals()
    return unscaled_norm(norms.cross.output if kind == "cross" else norms.attention.output, weight)


def _at_least_fp32(weight: Tensor) -> Tensor:
    """QR and SVD do not support half precision."""
    return weight.detach().to(torch.promote_types(weight.dtype, torch.float32))
