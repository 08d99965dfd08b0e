"""The blocks ``tiled`` chooses and joins: small where the mask is sparse, scattered ones gathered, none lost."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.attention import attend, masks
from regard.attention.attend import prepare
from regard.attention.biases import T5Bias
from regard.attention.masks import BlockPlan, Mask
from regard.attention.score_matrix import apply_mask

MASKS: dict[str, Callable[[], Mask]] = {
    "causal": masks.causal,
    "window": lambda: masks.window(100),
    "strided": lambda: masks.strided(128),
    "dilated": lambda: masks.dilated(8, 96),
    "bigbird": lambda: masks.bigbird(64, 10, 3.0) & masks.causal(),
    "random": lambda: masks.random_blocks(64, 20.0),  # leaves whole rows without a key
}


def heads(length: int, n_heads: int = 2, n_kv_heads: int = 2, d_head: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    sizes = (n_heads, n_kv_heads, n_kv_heads)
    q, k, v = (torch.randn(1, n, length, d_head, dtype=torch.float64, requires_grad=True) for n in sizes)
    return q, k, v


def plan_of(mask: Mask | None, length: int, n_heads: int = 8) -> BlockPlan:
    x = torch.empty(1, n_heads, length, 8)
    return prepare(x, x, x, mask).plan()


@pytest.mark.parametrize("n_kv_heads", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_gathered_tiles_give_what_the_formula_gives(name: str, n_kv_heads: int) -> None:
    length = 700  # ends inside a block
    found: dict[str, list[Tensor]] = {}
    for backend in ("reference", "tiled"):
        q, k, v = heads(length, n_kv_heads=n_kv_heads)
        output = attend(q, k, v, mask=MASKS[name](), dropout=0.2, seed=3, backend=backend).output
        found[backend] = [output, *torch.autograd.grad(output.cos().sum(), [q, k, v])]
    for ours, formula in zip(found["tiled"], found["reference"], strict=True):
        torch.testing.assert_close(ours, formula, rtol=0, atol=1e-11)


@pytest.mark.parametrize("name", ["window", "bigbird"])
def test_a_bias_trains_over_small_blocks(name: str) -> None:
    grads = []
    for backend in ("reference", "tiled"):
        torch.manual_seed(1)
        bias = T5Bias(2).double()
        output = attend(*heads(450), mask=MASKS[name](), bias=bias, backend=backend).output
        grads.append(torch.autograd.grad(output.cos().sum(), bias.w)[0])
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-11)


def test_sparse_masks_get_blocks_that_skip_what_large_ones_would_compute() -> None:
    length = 4096
    for mask, most in ((masks.window(256), 0.1), (MASKS["bigbird"](), 0.1), (masks.strided(128), 0.3)):
        assert plan_of(mask, length).density < most


def test_dense_masks_keep_large_blocks() -> None:
    for mask in (None, masks.everything(), masks.causal()):
        assert plan_of(mask, 8192).block == (512, 256)


def test_a_decoding_step_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing costs more than it could save there."""
    from regard.attention import score_matrix

    calls = []
    monkeypatch.setattr(score_matrix, "plan", lambda *a, real=score_matrix.plan: calls.append(a) or real(*a))
    x = torch.empty(1, 8, 1, 8)
    prepare(x, torch.empty(1, 8, 3000, 8), torch.empty(1, 8, 3000, 8), masks.window(100)).plan()
    assert len(calls) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_hiding_is_the_same_with_and_without_a_graph(dtype: torch.dtype) -> None:
    allowed = torch.tensor([[True, False, True], [False, False, False]])
    scores = torch.tensor([[1.0, 2.0, -3.0], [float("inf"), 5.0, 0.0]], dtype=dtype)
    kept = apply_mask(scores.clone(), allowed, float("-inf"))
    with torch.no_grad():
        in_place = scores.clone()
        assert apply_mask(in_place, allowed, float("-inf")) is in_place
    assert torch.equal(in_place, kept)
    assert kept.dtype == dtype
    assert torch.equal(kept == float("-inf"), ~allowed)
