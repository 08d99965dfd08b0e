"""The computation of one attention weight and of its row, step by step: q·k, ÷√D, bias, mask, softmax, Σ weight · v.

s_ij = q_i · k_j / √D + b_ij,   A_ij = exp(s_ij - lse_i),   o_i = Σ_j A_ij v_j      (Vaswani et al. 2017, eq. 1)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionMap, record
from ..attention.mechanisms import Dot
from ..generation.generate import inference
from ..lens.capture import attention_site
from .look_queries import HeadView, check_index, head_to_explain, merged_view
from .requests import Limits
from .sessions import LookSession

_ROW_KEYS = 64  # keys of a row in a response; those with the largest weights if it has more


def weight_arithmetic(
    attention: AttentionMap, head: int, row: int, col: int, values: Tensor | None = None
) -> dict[str, Any]:
    """All intermediate numbers between a query and a key of one head; ``values`` is v of the layer (B, G, S, D).

    A fully masked row has an infinite log-sum-exp, which becomes null in JSON.
    """
    one_head = attention.head(0, head)
    weight = float(one_head.tile(row, col))
    walk, i, j = one_head._walk, slice(row, row + 1), slice(col, col + 1)
    scoring = walk.scoring
    score_operands, bias_operands = walk.operands
    with torch.no_grad():
        q, k = scoring.q[:, :, i], scoring.k[:, :, j]
        scaled = float(scoring.mechanism.tile(q, k, score_operands))
        bias = 0.0
        if scoring.bias is not None:
            bias = float(scoring.bias.tile(i, j, scoring.frame, bias_operands, q, k))
        allowed = scoring.allowed(i, j)
        is_masked = allowed is not None and not bool(allowed)
        scores = walk.scores(i, slice(0, attention.shape[3]), True)[0, 0, 0]
    steps = {
        "mechanism": scoring.mechanism.name,
        "normaliser": scoring.mechanism.normaliser,
        "q": q[0, 0, 0].tolist(),
        "k": k[0, 0, 0].tolist(),
        "dot": None,
        "factor": None,
        "scaled": scaled,
        "bias": bias,
        "masked": is_masked,
        "score": None if is_masked else scaled + bias,
        "lse": float(walk.lse[0, 0, row]),
        "sink": None if scoring.sinks is None else float(one_head.sink_shares()[0, 0, row]),
        "weight": weight,
    }
    if isinstance(scoring.mechanism, Dot) and scoring.mechanism.kind == "dot":
        factor = scoring.mechanism.factor(q.shape[-1])
        steps |= {"dot": float((q.double() * k.double()).sum()), "factor": factor}
    v_head = None if values is None else values[0, head * values.shape[1] // attention.shape[1]]  # (S, D)
    if v_head is not None:
        steps |= {"v": v_head[col].tolist(), "contribution": (weight * v_head[col]).tolist()}
    return steps | {"head": head, "row": _row_arithmetic(scores, one_head.row(row)[0, 0], col, v_head)}


def _row_arithmetic(scores: Tensor, weights: Tensor, col: int, values: Tensor | None) -> dict[str, Any]:
    """Scores (S,), weights (S,) and weights · values (S, D) of a row; a long one leaves out ``others`` keys."""
    ranked = weights.clone()
    ranked[col] = float("inf")  # always include the requested key
    cols = sorted(ranked.topk(min(_ROW_KEYS, len(weights))).indices.tolist())
    keys: list[dict[str, Any]] = [
        {"index": key, "score": float(scores[key]), "weight": float(weights[key])} for key in cols
    ]
    row: dict[str, Any] = {"keys": keys, "others": len(weights) - len(cols)}
    row["rest"] = max(0.0, float(weights.sum() - weights[cols].sum())) if row["others"] else 0.0
    if values is not None:
        for key in keys:
            key["contribution"] = [round(value, 6) for value in (key["weight"] * values[key["index"]]).tolist()]
        row["output"] = (weights @ values.to(weights)).tolist()
    return row


def explain_weight(session: LookSession, at: HeadView, row: int, col: int, limits: Limits) -> dict[str, Any]:
    """``weight_arithmetic``, with v if the text is short enough to run the model again."""
    view, look = merged_view(session, at), session.look
    check_index("row", row, len(view.rows))
    check_index("col", col, len(view.cols))
    n_tokens = max(max(look.map(kind=kind, layer=0).shape[2:]) for kind in look.kinds)
    values = layer_values(session, at.kind, at.layer) if n_tokens <= limits.walk_tokens else None
    attention = look.map(kind=at.kind, layer=at.layer)
    steps = weight_arithmetic(attention, head_to_explain(session, at, row, col), row, col, values)
    if values is None:
        steps["v_absent"] = f"v is shown for texts of at most {limits.walk_tokens} tokens; this one has {n_tokens}"
    return steps


def layer_values(session: LookSession, kind: str, layer: int) -> Tensor:
    """v of a layer (1, G, S, D). A look keeps only q and k, so this runs the model again and records the layer."""

    def record_values() -> Tensor:
        model: Any = session.served.model
        with inference(model), session.model_changes(), record(attention_site(model, kind, layer).owner) as recorder:
            model.hidden(*session.look.inputs)
        calls = recorder.attentions["attention"]
        values = calls[layer if len(calls) > 1 else 0].v  # a module that layers share is called once per layer
        assert values is not None
        return values.float()

    return session.cache(("v", kind, layer), record_values)
