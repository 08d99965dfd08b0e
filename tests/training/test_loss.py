"""The chunked loss against the formula: values, gradients, ignored rows, low precision, compiled, in little memory."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.training.loss import IGNORE, _chunked, _loss_and_slope, cross_entropy, linear_cross_entropy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def _gpu(request: pytest.FixtureRequest) -> None:
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def problem(
    n_rows: int = 37, vocab: int = 23, ignored: float = 0.4, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(n_rows)
    hidden, weight, bias = (torch.randn(shape, dtype=dtype) for shape in ((n_rows, 7), (vocab, 7), (vocab,)))
    targets = torch.randint(vocab, (n_rows,))
    targets[torch.rand(n_rows) < ignored] = IGNORE
    return (*(x.to(device).requires_grad_() for x in (hidden, weight, bias)), targets.to(device))  # type: ignore[return-value]


def formula(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """-Σ y log p, written out."""
    total = hidden.new_zeros(())
    for x, target in zip(hidden, targets.tolist(), strict=True):
        if target != IGNORE:
            logits = weight @ x + bias
            y = torch.full_like(logits, smoothing / len(logits))
            y[target] += 1 - smoothing
            total = total - (y * (logits - logits.logsumexp(0))).sum()
    return total


def value_and_gradients(loss: Tensor, *wanted: Tensor) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, wanted)]


def assert_alike(ours: list[Tensor], theirs: list[Tensor], **tolerance: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, **tolerance)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("chunk", [None, 1, 5, 37, 100])
def test_it_is_the_formula(chunk: int | None, smoothing: float) -> None:
    hidden, weight, bias, targets = problem()
    wanted = value_and_gradients(formula(hidden, weight, bias, targets, smoothing), hidden, weight, bias)
    loss = linear_cross_entropy(hidden, weight, targets, bias, smoothing, chunk=chunk)
    assert_alike(value_and_gradients(loss, hidden, weight, bias), wanted)


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(1, 40),
    vocab=st.integers(1, 30),
    chunk=st.integers(1, 45),
    ignored=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    told=st.booleans(),
)
def test_any_shape_and_any_share_of_ignored_rows(rows: int, vocab: int, chunk: int, ignored: float, told: bool) -> None:
    hidden, weight, bias, targets = problem(rows, vocab, ignored)
    counted = int((targets != IGNORE).sum()) if told else None
    wanted = value_and_gradients(cross_entropy(F.linear(hidden, weight, bias), targets, 0.1), hidden, weight, bias)
    loss = linear_cross_entropy(hidden, weight, targets, bias, 0.1, chunk=chunk, n_counted=counted)
    assert_alike(value_and_gradients(loss, hidden, weight, bias), wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [None, 8])
def test_nothing_counts(chunk: int | None, device: str) -> None:
    hidden, weight, bias, targets = problem(ignored=1.1, dtype=torch.float32, device=device)
    for x in value_and_gradients(
        linear_cross_entropy(hidden, weight, targets, bias, 0.1, chunk=chunk), hidden, weight, bias
    ):
        assert not x.any()


def test_leading_dimensions_and_no_bias() -> None:
    hidden, weight, _, targets = problem(36)
    wanted = value_and_gradients(cross_entropy(hidden @ weight.T, targets), hidden, weight)
    loss = linear_cross_entropy(hidden.view(3, 12, 7), weight, targets.view(3, 12), chunk=5)
    assert_alike(value_and_gradients(loss, hidden, weight), wanted)


def test_gradcheck_and_the_scale_of_what_follows() -> None:
    hidden, weight, bias, targets = problem(9, 5)
    assert torch.autograd.gradcheck(
        lambda *x: linear_cross_entropy(x[0], x[1], targets, x[2], 0.1, chunk=4) ** 2 / 7, (hidden, weight, bias)
    )


def test_only_what_is_needed_is_computed() -> None:
    hidden, weight, bias, targets = problem(dtype=torch.float32)
    weight.requires_grad_(False)
    loss = linear_cross_entropy(hidden, weight, targets, bias, chunk=8)
    loss.backward()
    assert weight.grad is None
    assert hidden.grad is not None
    assert bias.grad is not None
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets, bias, chunk=8).requires_grad
    none = _chunked(hidden, weight, bias, targets, 0.0, 8, None, torch.float32, False, False, False)
    assert [x.numel() for x in none] == [1, 0, 0, 0]


def test_a_table_that_is_embedding_and_head() -> None:
    table, tokens = nn.Parameter(torch.randn(23, 7, dtype=torch.float64)), torch.randint(23, (40,))
    wanted = value_and_gradients(cross_entropy(F.linear(table[tokens], table), tokens.roll(-1)), table)
    loss = linear_cross_entropy(F.embedding(tokens, table), table, tokens.roll(-1), chunk=6)
    assert_alike(value_and_gradients(loss, table), wanted)


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        ("cpu", torch.bfloat16),
        ("cpu", torch.float16),
        pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_autocast_is_no_further_off_than_autocast_without_chunks(
    smoothing: float, device: str, dtype: torch.dtype
) -> None:
    hidden, weight, bias, targets = problem(300, 400, dtype=torch.float32, device=device)
    with torch.no_grad():
        hidden[:, :3] = hidden[:, :3].to(dtype)
    exact = value_and_gradients(cross_entropy(F.linear(hidden, weight, bias), targets, smoothing), hidden, weight, bias)
    with torch.autocast(device, dtype):
        plain = cross_entropy(F.linear(hidden, weight, bias), targets, smoothing)
        ours = linear_cross_entropy(hidden, weight, targets, bias, smoothing, chunk=64)
    assert ours.dtype == torch.float32
    plain_found, found = (value_and_gradients(x, hidden, weight, bias) for x in (plain, ours))
    for one, other, true in zip(found, plain_found, exact, strict=True):
        assert one.dtype == true.dtype
        assert (one - true).norm() <= 2 * (other - true).norm() + 1e-5 * true.norm()


def test_fp16_keeps_gradients_smaller_than_it_can_hold() -> None:
    hidden, weight, _, targets = problem(64, 30000, ignored=0.0, dtype=torch.float32)
    with torch.no_grad():
        weight /= 100
    exact = value_and_gradients(cross_entropy(hidden @ weight.T, targets), weight)[1]
    with torch.autocast("cpu", torch.float16):
        found = value_and_gradients(linear_cross_entropy(hidden, weight, targets, chunk=16), weight)[1]
    rare = [v for v in range(30000) if v not in set(targets.tolist())]  # their gradients are of the order of 1 / 30,000
    assert (found[rare] - exact[rare]).norm() < 2e-3 * exact[rare].norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("backend", "chunk"), [("aot_eager", None), ("aot_eager", 8), ("inductor", 8)])
def test_it_compiles_whole_for_any_length(backend: str, chunk: int | None, device: str) -> None:
    torch._dynamo.reset()

    def run(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            return linear_cross_entropy(hidden * 1.0, weight, targets, bias, 0.1, chunk=chunk)

    compiled = torch.compile(run, fullgraph=True, backend=backend, dynamic=True)
    for n_rows in (37, 50):
        hidden, weight, bias, targets = problem(n_rows, dtype=torch.float32, device=device)
        wanted = value_and_gradients(run(hidden, weight, bias, targets), hidden, weight, bias)
        found = value_and_gradients(compiled(hidden, weight, bias, targets), hidden, weight, bias)
        assert_alike(found, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_ignored_rows_of_a_chunk_push_nothing(smoothing: float) -> None:
    """A CPU leaves such rows out before; a GPU, which does not count them, relies on this."""
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([3, IGNORE, 0, 10, IGNORE, 7])
    wanted = value_and_gradients(cross_entropy(logits, targets, smoothing), logits)
    assert_alike([*_loss_and_slope(logits.detach(), targets, smoothing, True)], wanted)


@pytest.mark.gpu
def test_on_a_gpu_as_on_the_cpu() -> None:
    here, there = (problem(dtype=torch.float32, device=device) for device in ("cpu", "cuda"))
    wanted = value_and_gradients(linear_cross_entropy(*here[:2], here[3], here[2], 0.1, chunk=8), *here[:3])
    for counted in (None, int((here[3] != IGNORE).sum())):
        loss = linear_cross_entropy(*there[:2], there[3], there[2], 0.1, chunk=8, n_counted=counted)
        found = [x.cpu() for x in value_and_gradients(loss, *there[:3])]
        assert_alike(found, wanted, rtol=1e-4, atol=1e-4)


PEAK = """
import resource, sys, torch
from regard.training.loss import cross_entropy, linear_cross_entropy
torch.set_num_threads(1)
hidden, weight = torch.randn(2048, 32, requires_grad=True), torch.randn(50000, 32, requires_grad=True)
targets = torch.randint(50000, (2048,))
linear_cross_entropy(hidden[:2], weight, targets[:2], chunk=1).backward()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
linear_cross_entropy(hidden, weight, targets).backward()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_the_logits_are_never_held_whole() -> None:
    """2048 × 50,000 fp32 logits are 390 MiB, and their gradient as much again; chunks of 16 MiB stay far below."""
    made = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True)
    assert int(made.stdout) < 120
