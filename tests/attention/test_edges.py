"""What a stranger tried: half precision at the edge, hidden NaN, wrong kinds of arguments, memory let go of."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.attention import Additive, attend, explain, masks, triton_backend
from regard.attention.attend import prepare
from regard.attention.biases import Alibi
from regard.attention.masks import Mask


def heads(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "flex"])
def test_large_scores_in_float16_stay_finite(backend: str) -> None:
    q, k, v = (heads(1, 2, 5, 16, seed=i, dtype=torch.float16) for i in range(3))
    with torch.no_grad():
        output = attend(q * 300, k * 300, v, scale=1.0, backend=backend).output
    assert output.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "flex"])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(2)], ids=str)
def test_a_sink_of_minus_infinity_is_none(backend: str, mask: Mask | None) -> None:
    q, k, v = (heads(1, 2, 5, 4, seed=i).requires_grad_(backend != "flex") for i in range(3))
    sinks = torch.tensor([-torch.inf, 0.5])
    found = attend(q, k, v, mask=mask, sinks=sinks, backend=backend).output[:, 0]
    torch.testing.assert_close(found, attend(q, k, v, mask=mask, backend="reference").output[:, 0])
    if backend != "flex":
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(found.sum(), (q, k, v)))


@pytest.mark.parametrize("grad", [True, False])
def test_the_reference_hides_a_nan_that_nobody_may_see(grad: bool) -> None:
    q, k, v = (heads(1, 2, 5, 4, seed=i) for i in range(3))
    k[:, :, 3:] = float("nan")
    with torch.set_grad_enabled(grad):
        seen = attend(q, k, v, mask=masks.padding(torch.tensor([3])), backend="reference").output
    wanted = attend(q, k[:, :, :3], v[:, :, :3], backend="reference").output
    torch.testing.assert_close(seen, wanted)


def test_a_scale_of_zero_can_be_explained() -> None:
    q, k, v = (heads(1, 1, 3, 4, seed=i) for i in range(3))
    steps = explain(q, k, v, scale=0.0)
    torch.testing.assert_close(steps.scores, q @ k.transpose(-1, -2))
    torch.testing.assert_close(steps.weights, torch.full_like(steps.weights, 1 / 3))


@pytest.mark.parametrize("backend", ["tiled", "sdpa"])
def test_checkpointing_lets_go_of_the_heads(backend: str) -> None:
    """Only what save_for_backward keeps can be thrown away and computed again."""
    kept: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        q = x * 2
        kept.append(weakref.ref(q))
        return attend(q, q + 1, q - 1, mask=masks.causal(), backend=backend).output

    x = heads(1, 2, 6, 4).requires_grad_()
    y = checkpoint(layer, x, use_reentrant=False)
    gc.collect()
    assert kept[0]() is None
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


@torch.no_grad()
def test_additive_attention_compiles_where_no_gradient_is_wanted() -> None:
    torch.compiler.reset()
    q, k, v = (heads(1, 2, 5, 4, seed=i) for i in range(3))
    mechanism = Additive(2, 4)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask=masks.causal(), mechanism=mechanism).output

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), run(q, k, v))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"mask": "causal"}, "mask must be a Mask or a tensor, got 'causal'"),
        ({"mask": masks.causal}, r"mask must be a Mask or a tensor, got .*; call it: causal\(\)"),
        ({"bias": "alibi"}, "bias must be a Bias or a tensor, got 'alibi'"),
        ({"bias": Alibi}, r"bias must be a Bias or a tensor, got .*; call it: Alibi\(\)"),
        ({"mechanism": "linear"}, "mechanism must be a Mechanism, got 'linear'"),
        ({"q": [1.0]}, r"q must be a tensor, got \[1.0\]"),
        ({"v": None}, "v must be a tensor, got None"),
    ],
)
def test_the_wrong_kind_of_argument_is_named(arguments: dict[str, Any], sentence: str) -> None:
    q, k, v = (heads(1, 2, 5, 4, seed=i) for i in range(3))
    with pytest.raises(TypeError, match=sentence):
        attend(**{"q": q, "k": k, "v": v, **arguments})


def test_a_mask_joins_masks_only() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        masks.causal() & torch.ones(2, 2, dtype=torch.bool)  # type: ignore[operator]  # that is the point


def test_the_kernels_leave_gradients_that_overfill_shared_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "HAS_TRITON", True)

    def obstacle(width: int, mask: masks.Mask, dtype: torch.dtype = torch.float32, grad: bool = True) -> str | None:
        q, k, v = (heads(1, 2, 5, width, dtype=dtype).requires_grad_(grad) for _ in range(3))
        return triton_backend.triton_obstacle(prepare(q, k, v, mask))

    said = "gradients with a block-sparse mask and torch.float32 heads wider than 128"
    assert obstacle(256, masks.Prefix(3)) == said
    assert obstacle(256, masks.Prefix(3), grad=False) is None
    assert obstacle(256, masks.Prefix(3), torch.bfloat16) is None
    assert obstacle(256, masks.causal()) is None
    assert obstacle(128, masks.Prefix(3)) is None
    monkeypatch.setattr(triton_backend, "shared_memory", lambda device: 99 << 10)
    assert obstacle(256, masks.Prefix(3), torch.bfloat16) == said.replace("float32", "bfloat16")
    assert obstacle(128, masks.Prefix(3), torch.bfloat16) is None
