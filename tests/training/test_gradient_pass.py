"""Passes as CUDA graphs: on a CPU the same code without the capture, on a GPU against passes that are not captured."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from models.small import small_config
from regard.models import build
from regard.training import gradient_pass, trainer
from regard.training.compilation import Compiled, compiler_options
from regard.training.gradient_pass import CapturedPass, GradientPass, WorkingWeights, should_capture
from regard.training.loss import Batch, Objective, r_drop_loss
from regard.training.precision import Precision

from .runs import losses, train, write_data


def batch(seed: int, length: int = 9, device: str = "cpu") -> Batch:
    tokens = torch.randint(3, 31, (3, length + 1), generator=torch.Generator().manual_seed(seed))
    return Batch((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous(), n_tokens=27).to(torch.device(device))


def passes(captures: bool, device: str = "cpu", dropout: float = 0.0) -> tuple[list[Tensor], GradientPass]:
    """Loss and gradients of six batches, of which the fourth has another shape."""
    torch.manual_seed(0)
    objective = Objective(build(small_config("gpt2", dropout=dropout)).to(device)).train()
    working = WorkingWeights(objective)
    run = GradientPass(working.objective, Precision("bf16", device), working, captures)
    found = []
    for n in range(6):
        torch.manual_seed(n)
        found.append(run.run(batch(n, 7 if n == 3 else 9, device), 0.5 + n))
        found += [gradient.clone() for _, gradient in working.gradients()]
        working.forget_gradients()
    return found, run


def test_batches_of_one_shape_are_captured_and_others_computed() -> None:
    wanted, _ = passes(captures=False)
    with mock.patch.object(CapturedPass, "run", autospec=True, side_effect=CapturedPass.run) as replayed:
        found, run = passes(captures=True)
    assert replayed.call_count == 3  # the third, fifth and sixth
    assert run.note is None
    assert len(found) == len(wanted) > 6
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_many_shapes_or_a_failure_end_it() -> None:
    with mock.patch.object(gradient_pass, "_MAX_SHAPES", 1):
        assert not passes(captures=True)[1].captures
    with mock.patch.object(CapturedPass, "__init__", side_effect=RuntimeError("not permitted\nand more")):
        found, run = passes(captures=True)
    assert run.note == "passes are not captured as a CUDA graph: not permitted"
    with mock.patch.object(CapturedPass, "__init__", side_effect=AssertionError):  # without a message
        assert passes(captures=True)[1].note == "passes are not captured as a CUDA graph: AssertionError"
    assert all(torch.equal(a, b) for a, b in zip(found, passes(captures=False)[0], strict=True))


def test_only_small_plain_passes_of_one_batch_a_step() -> None:
    objective = Objective(build(small_config("gpt2")))
    working = WorkingWeights(objective)
    assert should_capture(objective, 1e12, working, 1)
    assert not should_capture(objective, 1e12, None, 1), "not on a CPU, where there are no working weights"
    assert not should_capture(objective, 1e15, working, 1)
    assert not should_capture(objective, 1e12, working, 2)
    assert not should_capture(Objective(objective.model, loss=r_drop_loss), 1e12, working, 1)
    objective.model.use_checkpointing()
    assert not should_capture(objective, 1e12, working, 1)


def test_small_passes_on_a_gpu_compute_a_norms_gradients_by_two_kernels() -> None:
    assert compiler_options(1e12, torch.device("cpu")) is None
    assert compiler_options(1e15, torch.device("cuda")) is None
    options = compiler_options(1e12, torch.device("cuda"))
    assert options in (None, {"triton.mix_order_reduction": False})  # torch before 2.10 has no such option
    Compiled(torch.nn.Linear(2, 2), options=options)  # which torch.compile knows


def test_a_run_with_captured_passes_is_the_run_without(tmp_path: Path) -> None:
    data, words = write_data("lm", tmp_path), ("train.steps=6", "train.eval_every=0", "train.precision=bf16")
    with mock.patch.object(gradient_pass, "uses_working_weights", return_value=True):
        with mock.patch.object(CapturedPass, "run", autospec=True, side_effect=CapturedPass.run) as replayed:
            train("lm", tmp_path / "captured", data, *words)
        with mock.patch.object(trainer, "should_capture", return_value=False):
            train("lm", tmp_path / "plain", data, *words)
    assert replayed.call_count >= 2  # one batch of the six may be shorter
    assert losses(tmp_path / "captured") == losses(tmp_path / "plain")


@pytest.mark.gpu
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_on_a_gpu_a_replay_computes_what_the_pass_does(dropout: float) -> None:
    wanted, _ = passes(captures=False, device="cuda", dropout=dropout)
    found, run = passes(captures=True, device="cuda", dropout=dropout)
    assert run.note is None
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4 * float(b.abs().max()) + 1e-6)
