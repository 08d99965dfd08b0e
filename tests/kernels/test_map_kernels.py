"""The kernels that read an attention map against the walk in plain torch, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard.attention import map_kernels
from regard.attention.attention_map import AttentionMap, Ranked
from regard.attention.biases import Alibi, Bias, DenseBias, Sum, T5Bias
from regard.attention.mask import Mask
from regard.attention.masks import bigbird, causal, packed, padding, window
from regard.attention.mechanisms import CappedDot

from .test_attention_kernels import DEVICE, INTERPRETED, gpu

pytestmark = [] if INTERPRETED else gpu
B, H, G, D = 2, 2, 1, 12


def _documents(t: int) -> Tensor:
    return (torch.arange(t, device=DEVICE) // 37).expand(B, -1).contiguous()


def _t5(t: int, s: int) -> Bias:
    bias = T5Bias(H, n_buckets=8, max_distance=19)
    nn.init.normal_(bias.w)
    return bias.to(DEVICE)


MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "none": lambda t, s: None,
    "causal": lambda t, s: causal(),
    "window": lambda t, s: window(21),
    "lengths": lambda t, s: causal() & padding(torch.tensor([s, 5], device=DEVICE)),
    "blind": lambda t, s: padding(torch.tensor([0, s // 2], device=DEVICE)),
    "packed": lambda t, s: causal() & packed(_documents(t)),
    "bigbird": lambda t, s: bigbird(16, 3, 20.0),
}
BIASES: dict[str, Callable[[int, int], Bias | None]] = {
    "none": lambda t, s: None,
    "alibi": lambda t, s: Alibi(H).to(DEVICE),
    "t5": _t5,
    "dense": lambda t, s: DenseBias(torch.randn(1, H, t, s, generator=torch.Generator().manual_seed(5)).to(DEVICE)),
    "sum": lambda t, s: Sum(Alibi(H).to(DEVICE), _t5(t, s)),
}
T, S = (20, 40) if INTERPRETED else (170, 190)
CASES = [("none", "none", T, S), *((mask, "none", S, S) for mask in MASKS), ("causal", "sum", S, S)]
CASES += [("causal", bias, T, S) for bias in BIASES] + [("bigbird", "t5", S, S)]


@pytest.mark.parametrize(("mask", "bias", "t", "s"), CASES)
def test_every_reading_is_that_of_the_walk(
    mask: str, bias: str, t: int, s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = (torch.randn(B, heads, n, D, generator=draw).to(DEVICE) for heads, n in ((H, t), (G, s)))
    given = (q, k, MASKS[mask](t, s), BIASES[bias](t, s))
    mechanism = CappedDot(2.0) if bias == "alibi" else None
    x = torch.randn(B, H, 3, t, generator=draw).to(DEVICE)
    weights = AttentionMap(*given, mechanism=mechanism).dense()

    def with_weights(ranked: Ranked) -> Tensor:
        """The values, and beside them the weights of the keys."""
        at_keys = weights.gather(-1, ranked.indices.clamp(min=0)) * (ranked.indices >= 0)
        return torch.stack([ranked.values, at_keys])

    readings: dict[str, Callable[[AttentionMap], Tensor]] = {
        "tile": lambda m: m.tile(slice(t - 17, t), slice(3, 30)),
        "entropy": lambda m: m.entropy(),
        "lse": lambda m: m.lse(),
        "entropy of a head": lambda m: m.head(1, 1).entropy(),
        "top": lambda m: with_weights(m.top(5)),
        "top of some rows": lambda m: m.top(3, slice(3, t - 3)).values,
        "column sums": lambda m: m.column_sums(),
        "push": lambda m: m.push(x, stay=t == s),
        "mean of cells": lambda m: m.pooled(1, 2),
        "mean of many cells": lambda m: m.pooled(t // 16, s // 16),
        "max of cells": lambda m: m.pooled(1, 2, "max"),
    }
    if INTERPRETED:  # slow: one map for all of them, and each kernel once
        readings = {name: readings[name] for name in ("entropy", "top", "push", "mean of cells")}
    walked = {name: ask(AttentionMap(*given, mechanism=mechanism)) for name, ask in readings.items()}
    monkeypatch.setattr(map_kernels, "_SMALL", 0)
    map = AttentionMap(*given, mechanism=mechanism)
    for name, ask in readings.items():
        map = map if INTERPRETED else AttentionMap(*given, mechanism=mechanism)
        assert map._kernels is not None
        torch.testing.assert_close(
            ask(map), walked[name], rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )
