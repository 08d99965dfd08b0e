"""Precision, the choice of it, and compiling: nothing is disturbed, nothing fails for want of a compiler."""

from __future__ import annotations

import json
import random
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
from regard.training.compilation import Choice, Compiled, choose, compiler_trouble, preserve_state, record
from regard.training.loss import Batch, Objective
from regard.training.precision import Precision, supported_precisions

from .runs import use_backend

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the measurements of whoever runs it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "regard" / "speed.json"


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
        (64, True, False, (torch.bfloat16, False)),  # a bf16 model, not autocast: what was asked for
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
    with pytest.raises(ValueError, match="precision='fp8' is none of fp32, bf16, fp16"):
        Precision("fp8", "cpu")  # type: ignore[arg-type]


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


def test_choosing_leaves_everything_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "supported_precisions", lambda device: ("fp32", "bf16"))
    monkeypatch.setattr(compilation, "_BUDGET", 0.02)
    module = Drawing().eval()
    module.linear.weight.grad = torch.ones(1, 4)
    state = {name: x.clone() for name, x in module.state_dict().items()}
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    wanted = (random.random(), np.random.rand(), torch.rand(3))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    choice = choose(module, batch, TrainConfig(compile="off", steps=10**6), CPU)
    assert set(choice.table) == {"fp32", "bf16"}
    assert (random.random(), np.random.rand()) == wanted[:2]
    assert torch.equal(torch.rand(3), wanted[2])
    assert all(torch.equal(x, state[name]) for name, x in module.state_dict().items())
    assert torch.equal(module.linear.weight.grad, torch.ones(1, 4))
    assert module.linear.bias.grad is None
    assert not module.training
    assert not module.linear.training


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


class Timed:
    """A clock that is told how long a pass takes in each precision."""

    def __init__(self, **seconds: float) -> None:
        self.seconds = seconds

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seconds = self.seconds

        def once(timer: Any, name: str) -> float:
            return seconds[name]

        def time(timer: Any, names: list[str]) -> None:
            timer.best.update({name: seconds[name] for name in names})

        monkeypatch.setattr(compilation._Timer, "once", once)
        monkeypatch.setattr(compilation._Timer, "time", time)
        monkeypatch.setattr(compilation, "supported_precisions", lambda device: ("fp32", "bf16"))


@pytest.mark.parametrize(("bf16", "wanted"), [(0.5, "bf16"), (0.95, "fp32"), (3.0, "fp32")])
def test_bf16_is_taken_where_it_is_clearly_faster(bf16: float, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(fp32=1.0, bf16=bf16).install(monkeypatch)
    choice = choose(objective_of(), batch, TrainConfig(compile="off", steps=100), CPU)
    assert choice.precision == wanted
    assert "1000.0 ms in fp32" in choice.reason


def test_a_run_shorter_than_the_timing_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(fp32=0.01, bf16=0.001).install(monkeypatch)
    choice = choose(objective_of(), batch, TrainConfig(steps=5), CPU)
    assert (choice.precision, choice.compile, choice.table) == ("fp32", False, {})


def test_what_is_asked_for_is_done_without_timing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation._Timer, "once", lambda *a: pytest.fail("nothing was to be timed"))
    choice = choose(objective_of(), batch, TrainConfig(precision="bf16", compile="off"), CPU)
    assert (choice.precision, choice.compile) == ("bf16", False)


@pytest.mark.parametrize(
    ("steps", "accumulate", "wanted"),
    [
        (100, 1, False),  # 100 passes of 100 ms: nothing to save 12.5 s in
        (2000, 1, True),
        (500, 4, True),  # the same passes
    ],
)
def test_compiling_must_pay_back(steps: int, accumulate: int, wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(fp32=0.1, bf16=0.2).install(monkeypatch)
    monkeypatch.setattr(compilation, "compiler_trouble", lambda kind: None)
    choice = choose(objective_of(), batch, TrainConfig(steps=steps, accumulate=accumulate), CPU)
    assert choice.compile is wanted
    assert "expected: 12 s for 1.25×" in choice.reason  # two layers, 25 s for four


def test_the_next_run_knows_what_compiling_brought(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(fp32=0.1, bf16=0.2).install(monkeypatch)
    monkeypatch.setattr(compilation, "compiler_trouble", lambda kind: None)
    train = TrainConfig(steps=2000)
    choice = choose(objective_of(), batch, train, CPU)
    assert choice.compile
    record(choice, compile_seconds=20.0, compiled_ms=110.0)
    assert own_cache.exists()
    slower = choose(objective_of(), batch, train, CPU)
    assert not slower.compile
    assert "0.91× as fast" in slower.reason
    # Another model, another precision and a batch of another size were not measured.
    assert choose(objective_of(d_ff=64), batch, train, CPU).compile
    assert choose(objective_of(), lambda n: batch(n, 23), train, CPU).compile
    record(choice, compile_seconds=2.0, compiled_ms=50.0)
    faster = choose(objective_of(), batch, train, CPU)
    assert "measured: 20 s for 2.00×" in faster.reason  # a warm cache of torch's own does not make the cost 2 s


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', "\x00"])
def test_a_damaged_table_is_an_empty_one(content: str, own_cache: Path) -> None:
    own_cache.parent.mkdir(parents=True)
    own_cache.write_text(content)
    choice = Choice("fp32", True, {"fp32": 2.0}, "", "key")
    assert not compilation.compile_cost("key", objective_of(), "cpu")[2]
    record(choice, 5.0, 1.0)
    assert compilation.compile_cost("key", objective_of(), "cpu") == (5.0, 2.0, True)
    assert [path.name for path in own_cache.parent.iterdir()] == ["speed.json"]


def test_a_cache_that_cannot_be_written_stops_nothing(own_cache: Path) -> None:
    own_cache.parent.write_text("a file where the directory should be")
    record(Choice("fp32", True, {"fp32": 10.0}, "", "key"), 1.0, 5.0)


def test_a_relative_cache_home_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "here")
    assert compilation.table_path() == Path.home() / ".cache" / "regard" / "speed.json"


# ------------------------------------------------------------------------------------- without a compiler


def test_without_a_compiler_auto_trains_eagerly_and_on_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    Timed(fp32=0.1, bf16=0.2).install(monkeypatch)
    choice = choose(objective_of(), batch, TrainConfig(steps=10**6), CPU)
    assert not choice.compile
    assert "there is no C++ compiler" in choice.reason
    with pytest.raises(RegardError, match=r"train.compile=on cannot be done here: there is no C\+\+ compiler"):
        choose(objective_of(), batch, TrainConfig(compile="on"), CPU)


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
