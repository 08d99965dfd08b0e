"""The share of each token in each state: attention weighted by value norms, and ALTI over all layers.

A large weight on a key with a small value moves little, so weights are multiplied by the norm of the values they move,
a_ij ‖v_j W_o‖ (Kobayashi et al. 2020). ALTI (Ferrando et al. 2022) measures how close the part y_i←j that token j adds
comes to the whole state y_i of token i after attention, residual and norm,

    c_ij ∝ max(0, ‖y_i‖₁ − ‖y_i − y_i←j‖₁),   Σ_j c_ij = 1,   y_i = Σ_j y_i←j

and multiplies the matrices of the layers. In an encoder-decoder, a target state has shares of both source and target
tokens (Ferrando, Gállego et al. 2022).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..attention import MultiHeadAttention
from ..attention.attention_map import Pick
from ..attention.frame import ALL
from .capture import attention_name, attention_site, attention_sites, resolve_kind, resolve_layer
from .notebook import heatmap_html
from .residual import check_float_weights, check_reads_source, layer_block, norm_scale, unscaled_norm

if TYPE_CHECKING:
    from .activations import ActivationRecord

_NUMBERS_AT_ONCE = 1 << 24  # upper bound on the elements of a tensor (rows, keys, M)


@torch.no_grad()
def value_weighted_attention(
    record: ActivationRecord,
    *,
    layer: int,
    kind: str | None = None,
    prompt: int = 0,
    rows: Pick = ALL,
    cols: Pick = ALL,
) -> Tensor:
    """‖a_ij v_j W_o‖ of every head: how much each key adds to each query's state, (H, R, C)."""
    kind, layer = resolve_layer(record.model, kind, layer)
    values = _moved_values(record, kind, layer, prompt)  # (H, S, M)
    weights = record.attention(layer=layer, kind=kind).part(batch=prompt).tile(rows, cols)[0]
    norms = values.norm(dim=-1)
    picked = norms[:, [cols] if isinstance(cols, int) else cols]
    return weights * picked[:, None].to(weights)


def _moved_values(record: ActivationRecord, kind: str, layer: int, prompt: int) -> Tensor:
    """The values of each head after its output projection: v_j W_o   (H, S, M)"""
    values = head_values(record, kind, layer, prompt)
    module: Any = attention_site(record.model, kind, layer).owner
    weight = module.head_outputs()
    return torch.einsum("hsd,mhd->hsm", values.to(weight), weight)


def head_values(record: ActivationRecord, kind: str, layer: int, prompt: int) -> Tensor:
    """The values of each head (H, S, D); heads that share a key head have the same."""
    module = attention_site(record.model, kind, layer).owner
    if not isinstance(module, MultiHeadAttention):
        raise ValueError(f"{type(module).__name__} has no values of single heads")
    if module.n_global:
        raise ValueError("with global_projections a key has one value for global and one for other queries")
    check_float_weights(module)
    return record.call(layer=layer, kind=kind).v[prompt].repeat_interleave(module.n_heads // module.n_kv_heads, 0)


@dataclass(frozen=True, eq=False)
class TokenContributions:
    """The share of every input token in every state after a layer; the shares of a row sum to 1, or less where the
    parts of a state cancel one another (see ``layer_contributions``)."""

    target: Tensor  # (T, T): shares of the tokens of the same text
    source: Tensor | None = None  # (T, S): shares of the source tokens, in the decoder of an encoder-decoder

    def top(self, row: int, k: int = 5) -> list[tuple[str, int, float]]:
        """("source" or "target", position, share) of the k largest shares of one row."""
        parts = {"target": self.target[row]} | ({} if self.source is None else {"source": self.source[row]})
        shares = [(name, at, share) for name, x in parts.items() for at, share in enumerate(x.tolist())]
        return sorted(shares, key=lambda part: -part[2])[:k]

    def _repr_html_(self) -> str:
        parts = [self.target] if self.source is None else [self.source, self.target]
        cols = [
            f"{name} {n}"
            for name, x in zip(("source", "target")[-len(parts) :], parts, strict=True)
            for n in range(x.shape[1])
        ]
        return heatmap_html(torch.cat(parts, 1), [str(n) for n in range(len(self.target))], cols, repr(self))

    def __repr__(self) -> str:
        sides = "" if self.source is None else f", source {self.source.shape[1]} tokens"
        return f"TokenContributions({len(self.target)} states{sides})"


@torch.no_grad()
def token_contributions(
    record: ActivationRecord, *, prompt: int = 0, layers: int | None = None, kind: str | None = None
) -> TokenContributions:
    """ALTI: the shares of the input tokens in the states after the first ``layers`` layers; None: after all.

    kind  "encoder" for the encoder states of an encoder-decoder, otherwise those of the decoder
    """
    model: Any = record.model
    kinds = attention_sites(model)
    if kind == "encoder" or "self" not in kinds:
        return TokenContributions(_roll_out(record, "encoder", prompt, layers))
    if "cross" not in kinds:
        return TokenContributions(_roll_out(record, "self", prompt, layers))
    check_reads_source(model)
    encoded = _roll_out(record, "encoder", prompt, None)  # (S, S)
    length = record.lengths[prompt]
    target, source = _identity(length, encoded), encoded.new_zeros(length, len(encoded))
    for layer in range(len(kinds["self"]) if layers is None else layers):
        within = layer_contributions(record, layer=layer, kind="self", prompt=prompt)
        shares = layer_contributions(record, layer=layer, kind="cross", prompt=prompt)  # (T, S + 1)
        stays, crossed = shares[:, -1:], shares[:, :-1]
        source = crossed @ encoded + stays * (within @ source)
        target = stays * (within @ target)
    return TokenContributions(target, source)


def _roll_out(record: ActivationRecord, kind: str, prompt: int, layers: int | None) -> Tensor:
    """C_L ⋯ C_2 C_1, the product of the layers' contributions: shares (T, T) of the input tokens in the last states."""
    n_tokens = record.inputs.lengths_in(kind)[prompt]
    product = _identity(n_tokens, record.final_states.double())
    n_layers = len(attention_sites(record.model)[resolve_kind(record.model, kind)])
    for layer in range(n_layers if layers is None else layers):
        product = layer_contributions(record, layer=layer, kind=kind, prompt=prompt) @ product
    return product


def _identity(n: int, like: Tensor) -> Tensor:
    return torch.eye(n, dtype=like.dtype, device=like.device)


@torch.no_grad()
def layer_contributions(record: ActivationRecord, *, layer: int, kind: str | None = None, prompt: int = 0) -> Tensor:
    """ALTI of one attention with its residual, (T, T): the share of token j in state i. Rows sum to 1, or to 0 if the
    parts cancel one another, so that none of them comes closer to the state than 0 does.

    For cross-attention (T, S + 1): the shares of the source states, and in the last column that of the state itself.
    """
    model: Any = record.model
    kind, layer = resolve_layer(model, kind, layer)
    block = layer_block(model, kind, layer)
    norms = block.residuals().cross if kind == "cross" else block.residuals().attention
    name = attention_name(kind, layer)
    before = f"{name.rpartition('.')[0]}.{'after_attention' if kind == 'cross' else 'input'}"
    n_rows = record.inputs.lengths_in(kind)[prompt]
    n_cols = record.inputs.source_lengths[prompt] if kind == "cross" else n_rows
    x = record[before][prompt, :n_rows].double() * block.residual  # 0 without residual connections
    values = _moved_values(record, kind, layer, prompt)[:, :n_cols].double()
    attention = record.attention(layer=layer, kind=kind).part(batch=prompt)
    module: Any = attention_site(model, kind, layer).owner
    bias = 0.0 if module.w_o.bias is None else module.w_o.bias.double()
    shares = []
    step = max(1, _NUMBERS_AT_ONCE // (n_cols * x.shape[-1]))
    for start in range(0, n_rows, step):
        rows = slice(start, min(start + step, n_rows))
        weights = attention.tile(rows)[0, :, :, :n_cols].double()  # (H, R, S)
        moved = torch.einsum("hrs,hsm->rsm", weights, values)
        moved = _linear_norm(norms.output, moved, bias)
        parts = _linear_norm(norms.total, _add_residual(moved, x[rows], start, kind == "cross"))
        whole = parts.sum(1, keepdim=True)
        proximity = (whole.abs().sum(-1) - (whole - parts).abs().sum(-1)).clamp(min=0)
        shares.append(proximity / proximity.sum(-1, keepdim=True).clamp(min=1e-30))
    return torch.cat(shares)


def _add_residual(moved: Tensor, x: Tensor, start: int, is_cross: bool) -> Tensor:
    """Add the residual to the parts (R, S, M) of R states: to each state's own key, or as one more part (R, S + 1, M)
    in cross-attention."""
    if is_cross:
        return torch.cat((moved, x[:, None]), 1)
    at = torch.arange(len(x), device=x.device)
    moved[at, at + start] += x
    return moved


def _linear_norm(norm: Any, parts: Tensor, constant: Tensor | float = 0.0) -> Tensor:
    """Parts (R, S, M) that sum, with a constant, to the input of a norm, layer scale or gate, as parts of its output.

    A norm is linear once its scale is fixed; here it is the scale of the whole sum.
    """
    if norm is None:
        return parts
    scale = norm_scale(norm, parts.sum(1) + constant)[:, None, None]
    return unscaled_norm(norm, parts) / scale
