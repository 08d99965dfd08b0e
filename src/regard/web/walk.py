"""One weight, step by step with its real numbers: q·k, ÷√D, bias, mask, softmax, times v.

s_ij = q_i · k_j / √D + b_ij,   A_ij = exp(s_ij - lse_i),   o_i = Σ_j A_ij v_j      (Vaswani et al. 2017, eq. 1)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..attention import AttentionMap
from ..attention.mechanisms import Dot


def walk(seen: AttentionMap, head: int, row: int, col: int, values: Tensor | None = None) -> dict[str, Any]:
    """The numbers between a query and a key of one head; ``values`` (B, G, S, D) are v of the layer, where known."""
    one = seen.head(0, head)
    weight = float(one.tile(row, col))
    scoring, here, there = one._sweep.scoring, slice(row, row + 1), slice(col, col + 1)
    own, of_bias = one._sweep.operands
    with torch.no_grad():
        q, k = scoring.q[:, :, here], scoring.k[:, :, there]
        plain = float(scoring.mechanism.tile(q, k, own))
        bias = 0.0
        if scoring.bias is not None:
            bias = float(scoring.bias.tile(here, there, scoring.frame, of_bias, q, k))
        allowed = scoring.allowed(here, there)
        masked = allowed is not None and not bool(allowed)
        scores = one._sweep.scores(here, slice(0, seen.shape[3]), True)[0, 0, 0]
    lse = float(one._sweep.lse[0, 0, row])
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
