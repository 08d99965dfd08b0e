"""Precision, the choice of it, and compiling: nothing is disturbed, nothing fails for want of a compiler."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models.small import small_config
from regard.attention import attend, masks
from regard.config import TrainConfig
from regard.errors import RegardError
from regard.models import build
from regard.training import compilation
from regard.training.compilation import Choice, Compiled, choose, compiler_trouble, preserve_state
from regard.training.loss import Batch, Objective
from regard.training.precision import Precision, supported_precisions

from .runs import use_backend

CPU = torch.device("cpu")


def objective_of(**fields: Any) -> Objective:
    torch.manual_seed(0)
    return Objective(build(small_config("gpt2", **fields)))


def batch(number: int = 0, length: int = 9) -> Batch:
    tokens = torch.randint(3, 31, (3, length + 1), generator=torch.Generator().manual_seed(number))
    return Batch((tokens[:, :-1],), tokens[:, 1:], n_tokens=3 * length)


# ------------------------------------------------------------------------------------- fp32 attention under bf16


def dtypes_in_sdpa(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.dtype, bool]]:
    seen, real = [], torch.nn.functional.scaled_dot_product_attention

    def spy(q: Tensor, *args: Any, **options: Any) -> Tensor:
        seen.append((q.dtype, torch.is_autocast_enabled("cpu")))
        return real(q, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    return seen


@pytest.mark.parametrize(
    ("length", "grad", "cast", "wanted"),
    [
        (64, True, True, (torch.float32, False)),
        (256, True, True, (torch.float32, False)),
        (257, True, True, (torch.bfloat16, True)),  # long texts: bf16 is the faster one
        (64, False, True, (torch.bfloat16, True)),  # no backward pass, nothing to avoid
        (64, True, False, (torch.bfloat16, False)),  # a bf16 model, not autocast: what was requested for
    ],
)
def test_attention_is_fp32_where_its_bf16_backward_is_slow(
    length: int, grad: bool, cast: bool, wanted: tuple[torch.dtype, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = dtypes_in_sdpa(monkeypatch)
    q, k, v = (torch.randn(1, 2, length, 8).bfloat16().requires_grad_(grad) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
        out = attend(q, k, v, mask=masks.causal(), backend="sdpa").output
    assert seen == [wanted]
    assert out.dtype == torch.bfloat16
    if grad:
        out.float().sum().backward()
        assert q.grad is not None
        assert q.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("kind", ["causal", "padding", "bias"])
def test_fp32_attention_is_closer_to_the_truth_than_bf16(kind: str) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 20, 8).bfloat16().requires_grad_() for _ in range(3))
    options: dict[str, Any] = {"mask": masks.causal() if kind != "padding" else masks.padding(torch.tensor([20, 7]))}
    if kind == "bias":
        options["bias"] = torch.randn(2, 20, 20).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = attend(q, k, v, backend="sdpa", **options).output
    exact_options = options | ({"bias": options["bias"].double()} if kind == "bias" else {})
    exact = attend(q.double(), k.double(), v.double(), backend="reference", **exact_options).output
    # One rounding to bf16 at the end, half a unit in its last place, and nothing else.
    torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


# ------------------------------------------------------------------------------------- precision


def test_cpu_has_fp32_first_and_no_fp16() -> None:
    assert supported_precisions("cpu")[0] == "fp32"
    assert "fp16" not in supported_precisions("cpu")


@pytest.mark.parametrize(("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_products_are_computed_in_the_precision_and_weights_stay(name: Any, dtype: torch.dtype) -> None:
    layer, precision = nn.Linear(4, 4), Precision(name, "cpu")
    with precision.forward():
        out = layer(torch.randn(2, 4))
    assert out.dtype == precision.dtype == dtype
    precision.backward(out.float().sum())
    assert layer.weight.dtype == torch.float32
    assert layer.weight.grad is not None
    assert layer.weight.grad.dtype == torch.float32
    optimiser = torch.optim.SGD(layer.parameters(), 0.1)
    before = layer.weight.detach().clone()
    precision.unscale([optimiser])
    precision.step([optimiser])
    torch.testing.assert_close(layer.weight, before - 0.1 * layer.weight.grad)
    assert not precision.scales
    assert precision.state() == {}
    precision.load_state({})


def test_fp16_is_for_cuda() -> None:
    with pytest.raises(ValueError, match="precision='fp16' needs device='cuda', not 'cpu'"):
        Precision("fp16", "cpu")


def test_a_precision_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="precision='fp4' is not one of fp32, bf16, fp16, fp8"):
        Precision("fp4", "cpu")  # type: ignore[arg-type]


def test_settings_leave_the_cpu_alone() -> None:
    before = torch.get_float32_matmul_precision()
    with Precision("fp32", "cpu").settings():
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
def test_fp16_scales_its_loss_and_skips_what_overflows() -> None:
    layer, precision = nn.Linear(4, 4).cuda(), Precision("fp16", "cuda")
    optimiser = torch.optim.SGD(layer.parameters(), 0.1)
    with precision.settings(), precision.forward():
        loss = layer(torch.randn(2, 4, device="cuda")).float().sum()
        assert torch.get_float32_matmul_precision() == "high"
    precision.backward(loss * float("inf"))
    before, state = layer.weight.detach().clone(), precision.state()
    precision.unscale([optimiser])
    precision.step([optimiser])
    assert torch.equal(layer.weight, before)
    assert precision.state()["scale"] < state["scale"]
    again = Precision("fp16", "cuda")
    again.load_state(json.loads(json.dumps(precision.state())))
    assert again.state() == precision.state()


# ------------------------------------------------------------------------------------- the choice


class Drawing(nn.Module):
    """Draws from every generator, counts its calls in a buffer, changes with the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        self.calls += 1
        noise = random.random() + np.random.rand()
        return (self.linear(torch.randn(2, 4)) + noise).float().sum()


def test_an_error_inside_puts_everything_back_too() -> None:
    module = Drawing().eval()
    torch.manual_seed(3)
    with pytest.raises(RuntimeError, match="stop"), preserve_state(module):  # noqa: PT012
        torch.rand(2)
        module.calls += 1
        assert module.training
        raise RuntimeError("stop")
    assert not module.training
    assert float(module.calls) == 0
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))


GFLOP = 1e9


@pytest.fixture
def any_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compiler_trouble", lambda kind: None)


def test_nothing_is_timed(any_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine makes the same weights: no clock and no measurement of an earlier run has a say."""
    here = threading.current_thread()  # threads of other tests may look at the clock

    def guard(real: Callable[[], float]) -> Callable[[], float]:
        return lambda: pytest.fail("nothing was to be timed") if threading.current_thread() is here else real()

    for name in ("perf_counter", "monotonic", "time", "process_time"):
        monkeypatch.setattr(time, name, guard(getattr(time, name)))
    monkeypatch.setattr(compilation, "has_bf16_matrix_unit", lambda: True)
    objective, train = objective_of(), TrainConfig(steps=2000)
    objective.forward = lambda batch: pytest.fail("nothing was to be run")  # type: ignore[method-assign]
    assert choose(objective, 20 * GFLOP, train, CPU) == choose(objective, 20 * GFLOP, train, CPU)


@pytest.mark.parametrize(
    ("unit", "gflop", "wanted", "why"),
    [
        (True, 20, "bf16", "bf16: this cpu has a matrix unit for it, and passes of 20.0 GFLOP are large enough"),
        (True, 0.5, "fp32", "fp32: a pass of 0.5 GFLOP is too small for bf16"),
        (False, 20, "fp32", "fp32: this cpu has no matrix unit for bf16"),
    ],
)
def test_a_cpu_computes_bf16_where_it_has_a_unit_for_it(
    unit: bool, gflop: float, wanted: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation, "has_bf16_matrix_unit", lambda: unit)
    choice = choose(objective_of(), gflop * GFLOP, TrainConfig(compile="off"), CPU)
    assert (choice.precision, choice.reason) == (wanted, f"{why}; compile off as requested")


def test_what_is_asked_for_is_done() -> None:
    choice = choose(objective_of(), GFLOP, TrainConfig(precision="bf16", compile="off"), CPU)
    assert choice == Choice("bf16", False, "bf16 as requested; compile off as requested")


@pytest.mark.parametrize(
    ("steps", "accumulate", "gflop", "wanted"),
    [
        (100, 1, 5, False),  # 100 passes of 100 ms: nothing to save 12.5 s in
        (2000, 1, 5, True),
        (500, 4, 5, True),  # the same passes
        (2000, 1, 0.01, False),
    ],
)
def test_compiling_must_pay_back(any_compiler: None, steps: int, accumulate: int, gflop: float, wanted: bool) -> None:
    choice = choose(objective_of(), gflop * GFLOP, TrainConfig(steps=steps, accumulate=accumulate), CPU)
    assert choice.compile is wanted
    assert "expected: 12 s to compile" in choice.reason  # two layers, 25 s for four


@pytest.mark.parametrize(
    ("steps", "gflop", "wanted"),
    [
        (1000, 15, False),  # the recipe of a small language model: done in seconds
        (600_000, 15, True),
        (300, 53_000, False),  # GPT-2 124M with 64 texts of 1,024 tokens
        (3000, 53_000, True),
    ],
)
def test_a_gpu_compiles_long_runs(any_compiler: None, steps: int, gflop: float, wanted: bool) -> None:
    train = TrainConfig(steps=steps, precision="bf16")
    assert choose(objective_of(n_layers=12), gflop * GFLOP, train, torch.device("cuda")).compile is wanted


# ------------------------------------------------------------------------------------- without a compiler


def test_without_a_compiler_auto_trains_eagerly_and_on_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    choice = choose(objective_of(), GFLOP, TrainConfig(steps=10**6), CPU)
    assert not choice.compile
    assert "there is no C++ compiler" in choice.reason
    with pytest.raises(RegardError, match=r"train.compile=on is not possible here: there is no C\+\+ compiler"):
        choose(objective_of(), GFLOP, TrainConfig(compile="on"), CPU)


def test_a_compiler_that_does_not_work_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken++"
    broken.write_text("#!/bin/sh\necho 'error: nothing works' >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    trouble = compiler_trouble("cpu")
    assert trouble is not None
    assert "error: nothing works" in trouble


def test_a_compiled_objective_is_the_same_function(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "aot_eager")
    objective = objective_of(dropout=0.1).train()
    fast = Compiled(objective)
    wanted = dict(objective.named_parameters())
    torch.manual_seed(5)
    loss = fast(batch())
    torch.manual_seed(5)
    eager = objective(batch())
    torch.testing.assert_close(loss, eager)  # the first call drew nothing of its own
    assert fast.note is None
    assert fast.seconds is not None
    assert {name.removeprefix("inner.") for name, _ in fast.named_parameters()} == set(wanted)
    assert all(p.grad is None for p in wanted.values())
    loss.backward()
    assert all(p.grad is not None for p in wanted.values())


def _fails_at_once(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no such kernel")


def _fails_in_backward(graph: Any, inputs: Any) -> Any:
    from torch._dynamo.backends.common import aot_autograd

    def whole(graph: Any, inputs: Any) -> Any:
        return graph.forward

    return aot_autograd(fw_compiler=whole, bw_compiler=_fails_at_once)(graph, inputs)


@pytest.mark.parametrize("backend", [_fails_at_once, _fails_in_backward])
def test_a_failed_compilation_goes_on_eagerly(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, backend)
    objective = objective_of().train()
    fast = Compiled(objective)
    loss = fast(batch())
    assert torch.equal(loss, objective(batch()))
    loss.backward()
    assert fast.note is not None
    assert "no such kernel" in fast.note
    assert torch.equal(fast(batch(1)), objective(batch(1)))


def test_bad_input_is_the_models_error_not_the_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backend(monkeypatch, "eager")
    fast = Compiled(objective_of().train())
    bad = Batch((torch.zeros(3, dtype=torch.long),), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="token ids must be"):
        fast(bad)


@pytest.mark.slow
def test_really_compiled_in_bf16() -> None:
    torch._dynamo.reset()
    if (trouble := compiler_trouble("cpu")) is not None:
        pytest.fail(trouble)
    objective = objective_of(n_layers=1).train()
    fast = Compiled(objective)
    with Precision("bf16", "cpu").forward():
        found, wanted = fast(batch()), objective(batch())
    assert fast.note is None
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)
