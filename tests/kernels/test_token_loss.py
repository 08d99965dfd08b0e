"""The kernel of linear + cross-entropy against plain torch in fp32: the loss and every gradient.

TRITON_INTERPRET=1 pytest tests/kernels          # without a GPU, where triton is installed
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data.packing import IGNORE
from regard.training.loss import cross_entropy, has_fused_loss, linear_cross_entropy

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytestmark = [] if INTERPRETED else gpu
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")


def problem(n_rows: int, vocab: int, width: int = 16, ignored: float = 0.3) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(n_rows + vocab)
    shapes = ((n_rows, width), (vocab, width), (vocab,))
    hidden, weight, bias = (torch.randn(shape, device=DEVICE).bfloat16().requires_grad_() for shape in shapes)
    targets = torch.randint(vocab, (n_rows,), device=DEVICE)
    targets[torch.rand(n_rows, device=DEVICE) < ignored] = IGNORE
    return hidden, weight, bias, targets


def reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, smoothing: float, cap: float | None
) -> Tensor:
    logits = F.linear(hidden, weight, bias)
    return cross_entropy(logits if cap is None else cap * torch.tanh(logits / cap), targets, smoothing)


@pytest.mark.parametrize(
    ("n_rows", "vocab", "smoothing", "cap", "has_bias", "chunk"),
    [
        (12, 300, 0.0, None, False, None),
        (12, 300, 0.1, None, True, 5),
        (7, 129, 0.0, 2.0, True, None),
        (7, 256, 0.1, 3.0, False, 3),
        (3, 5, 0.0, None, False, None),
    ],
)
def test_it_is_plain_torch_within_twice_the_error_of_bf16(
    n_rows: int, vocab: int, smoothing: float, cap: float | None, has_bias: bool, chunk: int | None
) -> None:
    hidden, weight, bias, targets = problem(n_rows, vocab)
    used = [hidden, weight, *([bias] if has_bias else [])]
    assert has_fused_loss(DEVICE, torch.bfloat16)
    loss = linear_cross_entropy(hidden, weight, targets, bias if has_bias else None, smoothing, chunk=chunk, cap=cap)
    ours = [loss, *torch.autograd.grad(loss * 0.5, used)]
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        x, w, b = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight, bias))
        plain = reference(x, w, b if has_bias else None, targets, smoothing, cap)
        results.append([plain, *torch.autograd.grad(plain * 0.5, [x, w, *([b] if has_bias else [])])])
    for mine, exact, half in zip(ours, *results, strict=True):
        assert mine.isfinite().all()
        error, allowed = (mine - exact).abs().max(), (half - exact).abs().max()
        assert error <= 2 * allowed + 4e-3 * exact.abs().max(), (error, allowed)


def test_rows_without_a_target_have_no_gradient() -> None:
    hidden, weight, _, targets = problem(9, 140)
    losses = [
        linear_cross_entropy(hidden, weight, targets, n_counted=n) for n in (None, int((targets != IGNORE).sum()))
    ]
    torch.testing.assert_close(*losses)
    for loss in losses:
        (d_hidden,) = torch.autograd.grad(loss, hidden)
        assert not d_hidden[targets == IGNORE].any()
        assert d_hidden[targets != IGNORE].any(-1).all()
    nothing = linear_cross_entropy(hidden, weight, torch.full_like(targets, IGNORE))
    assert nothing.item() == 0
    assert not torch.cat([x.flatten() for x in torch.autograd.grad(nothing, (hidden, weight))]).any()


def test_with_fp8_the_gradient_of_hidden_is_a_product_in_eight_bits() -> None:
    hidden, weight, _, targets = problem(20, 300, width=64)
    losses = [linear_cross_entropy(hidden, weight * 0.1, targets, fp8=fp8) for fp8 in (False, True)]
    assert losses[0] == losses[1], "the logits are the same"
    (half, half_weight), (eight, eight_weight) = (torch.autograd.grad(loss, (hidden, weight)) for loss in losses)
    assert torch.equal(half_weight, eight_weight)
    assert 0 < (eight - half).norm() < 0.1 * half.norm()
    assert abs((eight * half).sum() / (half * half).sum() - 1) < 0.02, "rounded to both sides"


def test_large_logits_overflow_nowhere() -> None:
    hidden, weight, bias, targets = problem(6, 200, ignored=0.0)
    loss = linear_cross_entropy(hidden * 300, weight * 300, targets, bias)
    assert loss.isfinite()
    assert all(x.isfinite().all() for x in torch.autograd.grad(loss, (hidden, weight, bias)))


@pytest.mark.skipif(INTERPRETED, reason="torch.compile does not run the interpreter")
def test_compiled_it_stays_one_operator() -> None:
    hidden, weight, _, targets = problem(70, 1000)
    eager = linear_cross_entropy(hidden, weight, targets)
    compiled = torch.compile(linear_cross_entropy, fullgraph=True)(hidden, weight, targets)
    torch.testing.assert_close(compiled, eager)
    grads = [torch.autograd.grad(loss, (hidden, weight)) for loss in (eager, compiled)]
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs)
