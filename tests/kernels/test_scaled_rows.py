"""The kernels between matrix products against torch in fp32: activations, their slopes, rows in fp8, sums of columns.

TRITON_INTERPRET=1 pytest tests/kernels          # without a GPU, where triton is installed
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from regard.layers.feedforward import ACTIVATIONS
from regard.training.fused_layers import KINDS, activated_rows, gradient_rows, joined_rows, slope

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytestmark = [] if INTERPRETED else gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
ROUNDING, HALF = (0.07, 0.008) if INTERPRETED else (0.035, 0.004)  # of e4m3 and bf16; the interpreter cuts bits off


def rows(n_rows: int = 37, width: int = 208) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(n_rows)
    hidden, gradient = (torch.randn(n_rows, width, device=DEVICE).bfloat16() for _ in range(2))
    return 2 * hidden, gradient, torch.rand(n_rows, 1, device=DEVICE)


def assert_near(found: Tensor, wanted: Tensor, most: float) -> None:
    assert (found.float() - wanted).norm() < most * wanted.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_activated_rows(kind: str) -> None:
    hidden, _, _ = rows()
    hidden[3] = 0
    half, eight, scales = activated_rows(hidden, kind)
    wanted = ACTIVATIONS[kind](hidden.float())
    assert_near(half, wanted, HALF)
    assert_near(eight.float() * scales, wanted, ROUNDING)
    assert eight.float().abs().amax(-1)[wanted.abs().amax(-1) > 0].min() >= 416, "every row uses the whole range"


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("has_factors", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "none"])
def test_gradient_rows(kind: str, has_factors: bool, fp8: bool) -> None:
    hidden, gradient, factors = rows(n_rows=1200 if DEVICE.type == "cuda" else 21)  # several rows for each program
    inputs = (gradient, factors if has_factors else None, None if kind == "none" else hidden, kind, fp8)
    half, eight, scales, total = gradient_rows(*inputs)
    wanted = gradient.float() * (factors if has_factors else 1)
    if kind == "none":
        assert half.numel() == 0
    else:
        wanted = wanted * slope(hidden.float(), kind)
        assert_near(half, wanted, HALF)
    assert_near(total, wanted.sum(0), 1e-4)
    if fp8:
        assert_near(eight.float() * scales, wanted, ROUNDING)
    else:
        assert eight.numel() == scales.numel() == 0


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("widths", [(64, 64, 64), (96, 32, 32), (48, 48)])
def test_joined_rows(widths: tuple[int, ...], fp8: bool) -> None:
    parts = [rows(n_rows=1200 if DEVICE.type == "cuda" else 21, width=width)[1] for width in widths]
    wanted = torch.cat(parts, 1)
    half, eight, scales, total = joined_rows(parts, fp8)
    assert torch.equal(half, wanted)
    assert_near(total, wanted.float().sum(0), 1e-4)
    if fp8:
        assert_near(eight.float() * scales, wanted, ROUNDING)
    else:
        assert eight.numel() == scales.numel() == 0


def test_without_fp8_no_kernel_gets_a_tensor_in_e4m3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton refuses to compile such a kernel for a GPU that has bf16 but not e4m3, such as an A100."""
    from regard.kernels import scaled_rows

    found = []
    for name in ("_gradient_rows", "_joined_rows"):
        note = lambda *given, **_: found.extend(x.dtype for x in given if isinstance(x, Tensor))  # noqa: E731
        monkeypatch.setattr(scaled_rows, name, {(4,): note})
    monkeypatch.setattr(scaled_rows, "_multiprocessors", lambda _: 1000)
    hidden, gradient, factors = rows(n_rows=4)
    scaled_rows.gradient_rows(gradient, factors, hidden, "silu", False)
    scaled_rows.gradient_rows(gradient, None, None, "none", False)
    scaled_rows.joined_rows([hidden, gradient, gradient], False)
    assert set(found) == {torch.bfloat16, torch.float32}
