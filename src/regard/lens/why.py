"""Why a head attends to a token: the score q · k of one query and one key, split by the writers of both sides.

q = R W_q Norm(x_row) and k = R W_k Norm(x_col) are readouts of two tokens' states (``lens.residual``). With the norms'
scales held fixed, both are sums over writers (embeddings, heads and feed-forward networks of the layers below), and the
score is the sum over all pairs of writers plus the position bias. RoPE's rotation R is part of each readout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..attention import Dot, Frame, MultiHeadAttention
from ..attention.mechanisms import CappedDot, Sigmoid
from ..models.sites import norms_around
from .capture import attention_modules, attention_site
from .notebook import table_html
from .residual import (
    Place,
    check_float_weights,
    check_reads_source,
    readout_before_norm,
    residual_stack,
    split_residual,
)

if TYPE_CHECKING:
    from .activations import ActivationRecord


@dataclass(frozen=True, eq=False)
class ScoreSplit:
    """One attention score as a sum over pairs (writer of the query, writer of the key)."""

    score: float  # as the model computes it, before soft cap, mask and softmax
    pairs: Tensor  # (query writers, key writers), fp64
    queries: list[str]  # names of the rows of ``pairs``: "token", "position", "self.0.3", "ff.1", "bias"
    keys: list[str]  # names of its columns
    position_bias: float  # added by ALiBi, T5 or Transformer-XL

    @property
    def parts(self) -> dict[tuple[str, str], float]:
        """The contribution of every pair of writers; together with the position bias they sum to the score."""
        rows = zip(self.queries, self.pairs.tolist(), strict=True)
        return {(q, k): value for q, row in rows for k, value in zip(self.keys, row, strict=True)}

    @property
    def total(self) -> float:
        return float(self.pairs.sum()) + self.position_bias

    def top(self, n: int = 10) -> list[tuple[str, str, float]]:
        """The n pairs with the largest absolute contribution."""
        parts = sorted(self.parts.items(), key=lambda part: -abs(part[1]))[:n]
        return [(query, key, value) for (query, key), value in parts]

    def _repr_html_(self) -> str:
        caption = f"score {self.score:.3f}, its largest pairs of writers"
        return table_html(("query's side", "key's side", "adds"), self.top(16), caption)

    def __repr__(self) -> str:
        best = ", ".join(f"{query} × {key} {value:+.2f}" for query, key, value in self.top(3))
        return f"ScoreSplit({self.score:.3f} = {best} …)"


@torch.no_grad()
def split_score(
    record: ActivationRecord, kind: str, layer: int, head: int, row: int, col: int, prompt: int = 0
) -> ScoreSplit:
    """Split the score of query ``row`` and key ``col`` of one head; in cross-attention ``col`` indexes the source."""
    module = _dot_attention(record, kind, layer, head)
    row = record.index(prompt, row, source=kind == "encoder")
    col = record.index(prompt, col, source=kind != "self")
    q_names, q_parts = _split_query(record, module, kind, layer, head, row, prompt)
    group = head * module.n_kv_heads // module.n_heads
    key_place = Place("decoder" if kind == "self" else "encoder", prompt, col)
    is_global = row < (module.n_global or 0)
    k_names, k_parts = _split_side(record, module, "k", group, key_place, None if kind == "cross" else layer, is_global)
    call = record.call(layer=layer, kind=kind)
    pair = slice(row, row + 1), slice(col, col + 1)
    bias = 0.0
    if call.bias is not None:
        with_bias = call.tile(*pair, masked=False)
        without = replace(call, bias=None).tile(*pair, masked=False)
        bias = float((with_bias - without)[prompt, head])
    q, k = call.q[prompt, head, row].double(), call.k[prompt, group, col].double()
    scale = module.mechanism.factor(module.d_head)
    pairs = scale * q_parts @ k_parts.T
    constant = module.mechanism.b[head].double() if isinstance(module.mechanism, Sigmoid) else 0.0
    pairs[-1, -1] += constant  # "bias" is the last writer of both sides
    return ScoreSplit(float(q @ k * scale + constant) + bias, pairs, q_names, k_names, bias)


@torch.no_grad()
def split_query(
    record: ActivationRecord, kind: str, layer: int, head: int, row: int, prompt: int = 0
) -> tuple[list[str], Tensor]:
    """Names of the writers of one query, and their contributions to the scores of all keys (writers, S), without the
    position bias."""
    module = _dot_attention(record, kind, layer, head)
    row = record.index(prompt, row, source=kind == "encoder")
    names, parts = _split_query(record, module, kind, layer, head, row, prompt)
    keys = record.call(layer=layer, kind=kind).k[prompt, head * module.n_kv_heads // module.n_heads].double()
    return names, parts @ keys.T * module.mechanism.factor(module.d_head)


def _dot_attention(record: ActivationRecord, kind: str, layer: int, head: int) -> Any:
    """The attention of one layer; raises if its scores are not dot products of projected states."""
    module = attention_site(record.model, kind, layer, head).owner
    if not has_dot_scores(module):
        raise ValueError("only a score that is a dot product of projected states can be split")
    check_float_weights(record.model)
    return module


def split_kinds(model: Any) -> list[str]:
    """The kinds of attention whose scores ``split_score`` can split, in a model of layers with float weights."""
    dots = [kind for kind, modules in attention_modules(model).items() if all(map(has_dot_scores, modules))]
    return [kind for kind in dots if kind != "cross" or getattr(model, "resampler", None) is None]


def has_dot_scores(module: Any) -> bool:
    """Whether the scores of an attention are dot products of its queries and keys, which no mechanism changes first."""
    mechanism = module.mechanism if isinstance(module, MultiHeadAttention) else None
    if not isinstance(mechanism, Dot) or type(mechanism).tile not in (Dot.tile, CappedDot.tile, Sigmoid.tile):
        return False
    return {"q", "k"} <= unchanged_heads(module)


@torch.no_grad()
def unchanged_heads(module: MultiHeadAttention) -> set[str]:
    """Which of q, k and v a mechanism uses as they were projected: no feature map, no projection, no mixing of tokens.

    Found by trying it on numbers, because a class of your own may do anything.
    """
    q, k, v = random_heads(module)
    new = module.mechanism.prepare(q, k, v, None, Frame.of(q, k))
    return {name for name, x, y in (("q", q, new.q), ("k", k, new.k), ("v", v, new.v)) if torch.equal(x, y)}


def random_heads(module: MultiHeadAttention) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (1, H, 3, D), keys and values (1, G, 3, D) on which a mechanism can be tried."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, *kv = (draw(1, n, 3, module.d_head).to(module.w_q) for n in (module.n_heads, *[module.n_kv_heads] * 2))
    return q, kv[0], kv[1]


def _split_query(
    record: ActivationRecord, module: Any, kind: str, layer: int, head: int, row: int, prompt: int
) -> tuple[list[str], Tensor]:
    place = Place("encoder" if kind == "encoder" else "decoder", prompt, row)
    return _split_side(record, module, "q", head, place, layer, row < (module.n_global or 0))


def _split_side(
    record: ActivationRecord,
    module: Any,
    side: Literal["q", "k"],
    head: int,
    place: Place,
    layer: int | None,
    is_global: bool,
) -> tuple[list[str], Tensor]:
    """Names of the writers of a query or key, and their contributions (writers, D).

    head       a query head, or a key head
    layer      the layer whose attention reads the state; None: the encoder's last state, which cross-attention reads
    is_global  whether the query is a global token, for which ``global_projections`` make query and key
    """
    own_norm = None if is_global else module.q_norm if side == "q" else module.k_norm
    rows = slice(head * module.d_head, (head + 1) * module.d_head)
    normed_together = own_norm is not None and module.norms_all_heads  # one scale for all heads
    readout, constant = _projection(module, side, slice(None) if normed_together else rows, is_global)
    name, norm = _reading_state(record, module, place, layer)
    state = record.at(name, place.prompt, place.position)
    readout, bias = readout_before_norm(norm, state, readout)
    constant = constant + bias
    if own_norm is not None:
        own_rows = torch.eye(len(readout)).to(readout)[rows if normed_together else slice(None)]
        within, bias = readout_before_norm(own_norm, readout @ state + constant, own_rows)
        readout, constant = within @ readout, within @ constant + bias
    if module.rope is not None and not is_global:
        n_tokens = max(record.inputs.lengths_in(place.stack))
        rotation = rotation_matrix(module.rope, len(readout), place.position, n_tokens).to(readout)
        readout, constant = rotation @ readout, rotation @ constant
    part = "cross_attention" if name.endswith("after_attention") else "attention"
    n_layers = residual_stack(record.model, place.stack).n_layers if layer is None else layer
    parts = dict(split_residual(record, place, n_layers, readout, part).writers())
    parts["bias"] = parts["bias"] + constant
    return list(parts), torch.stack(list(parts.values()))


def _projection(module: Any, side: Literal["q", "k"], rows: slice, is_global: bool) -> tuple[Tensor, Tensor]:
    """Weight (D, M) and bias (D,) of one head's queries or keys, or of all heads'."""
    n_queries = module.n_heads * module.d_head
    if module.cross:
        linear, start = (module.w_query, 0) if side == "q" else (module.w_kv, 0)
    else:
        linear, start = module.w_qkv_global if is_global else module.w_qkv, 0 if side == "q" else n_queries
    stop = start + (n_queries if side == "q" else module.n_kv_heads * module.d_head)
    weight = linear.weight[start:stop][rows].double()
    return weight, weight.new_zeros(len(weight)) if linear.bias is None else linear.bias[start:stop][rows].double()


def _reading_state(
    record: ActivationRecord, module: MultiHeadAttention, place: Place, layer: int | None
) -> tuple[str, Any]:
    """The site of the state from which a query or key is computed, and the norm in between."""
    stack = residual_stack(record.model, place.stack)
    if layer is None:
        check_reads_source(record.model)
        return f"{place.stack}.blocks.{stack.n_layers - 1}.output", stack.norm
    part = "cross_attention" if module.cross else "attention"
    norms, before = norms_around(record.model.sites()[f"{place.stack}.blocks.{layer}.{part}.input"])
    return before, norms.before


def rotation_matrix(rope: Any, width: int, position: int, n_tokens: int) -> Tensor:
    """RoPE at one position as a matrix (D, D)."""
    basis = torch.eye(width, dtype=torch.float64)[None, None]  # D vectors as D tokens, all at this position
    return rope(basis, torch.full((width,), position), n_tokens)[0, 0].T
