"""One weight, step by step with its real numbers: q·k, ÷√D, bias, mask, softmax, times v.

s_ij = q_i · k_j / √D + b_ij,   A_ij = exp(s_ij - lse_i),   o_i = Σ_j A_ij v_j      (Vaswani et al. 2017, eq. 1)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionMap, record
from ..attention.mechanisms import Dot
from ..generation.generate import inference
from ..lens.capture import attention_at
from .look_queries import HeadView, check_index, merged_view
from .request_limits import Limits
from .sessions import LookSession


def weight_arithmetic(
    seen: AttentionMap, head: int, row: int, col: int, values: Tensor | None = None
) -> dict[str, Any]:
    """The numbers between a query and a key of one head; ``values`` (B, G, S, D) are v of the layer, where known."""
    one = seen.head(0, head)
    weight = float(one.tile(row, col))
    scoring, here, there = one._walk.scoring, slice(row, row + 1), slice(col, col + 1)
    own, of_bias = one._walk.operands
    with torch.no_grad():
        q, k = scoring.q[:, :, here], scoring.k[:, :, there]
        plain = float(scoring.mechanism.tile(q, k, own))
        bias = 0.0
        if scoring.bias is not None:
            bias = float(scoring.bias.tile(here, there, scoring.frame, of_bias, q, k))
        allowed = scoring.allowed(here, there)
        masked = allowed is not None and not bool(allowed)
        scores = one._walk.scores(here, slice(0, seen.shape[3]), True)[0, 0, 0]
    lse = float(one._walk.lse[0, 0, row])
    found = {
        "mechanism": scoring.mechanism.name,
        "normaliser": scoring.mechanism.normaliser,
        "q": q[0, 0, 0].tolist(),
        "k": k[0, 0, 0].tolist(),
        "dot": None,
        "factor": None,
        "scaled": plain,
        "bias": bias,
        "masked": masked,
        "score": None if masked else plain + bias,
        "max": _finite(float(scores.max())),
        "lse": _finite(lse),
        "weight": weight,
    }
    if isinstance(scoring.mechanism, Dot) and scoring.mechanism.kind == "dot":
        factor = scoring.mechanism.factor(q.shape[-1])
        found |= {"dot": float((q.double() * k.double()).sum()), "factor": factor}
    if values is not None:
        shared_by = seen.shape[1] // values.shape[1]
        v = values[0, head // shared_by, col]
        found |= {"v": v.tolist(), "contribution": (weight * v).tolist()}
    return found


def _finite(x: float) -> float | None:
    """JSON has no infinity: a row that sees nothing has no largest score and no sum."""
    return x if math.isfinite(x) else None


def explain_weight(session: LookSession, at: HeadView, row: int, col: int, limits: Limits) -> dict[str, Any]:
    """``weight_arithmetic``, with v where the text is short enough to run the model again."""
    seen, head = merged_view(session, at), at.head or 0
    check_index("row", row, len(seen.rows))
    check_index("col", col, len(seen.cols))
    values = values_of(session, at.kind, at.layer, limits)
    found = weight_arithmetic(session.look.map(kind=at.kind, layer=at.layer), head, row, col, values)
    if values is None:
        longest = _longest(session)
        found["v_absent"] = f"v is shown for texts of at most {limits.walk_tokens} tokens; this one has {longest}"
    return found


def _longest(session: LookSession) -> int:
    look = session.look
    return max(max(look.map(kind=kind, layer=0).shape[2:]) for kind in look.kinds)


def values_of(session: LookSession, kind: str, layer: int, limits: Limits) -> Tensor | None:
    """v of a layer (1, G, S, D). A look keeps q and k alone, so the same pass is made again, with this layer recorded.

    None where the text is too long to do that while somebody waits.
    """
    if _longest(session) > limits.walk_tokens:
        return None

    def again() -> Tensor:
        module = attention_at(session.served.model, kind, layer)
        model: Any = session.served.model
        with inference(model), session.model_changes(), record(module) as recorder:
            model.hidden(*session.look.inputs)
        calls = recorder.attentions["attention"]
        # Layers that share a module are recorded one after the other.
        found = calls[layer if len(calls) > 1 else 0].v
        assert found is not None
        return found.float()

    return session.once(("v", kind, layer), again)
