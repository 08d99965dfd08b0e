"""bf16 weights to compute with beside the fp32 ones that are trained: here on a CPU, where no run chooses them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from models.small import small_config
from regard.errors import Diverged
from regard.models import build
from regard.training import gradient_pass, trainer
from regard.training.checkpoint import Checkpoint
from regard.training.gradient_pass import WorkingWeights, uses_working_weights
from regard.training.loop import Loop
from regard.training.loss import Batch, Objective
from regard.training.parallel import Group
from regard.training.precision import Precision
from regard.training.run_directory import RunDirectory

from .runs import losses, train, write_data


def batch(config_vocab: int = 31) -> Batch:
    tokens = torch.randint(3, config_vocab, (3, 10), generator=torch.Generator().manual_seed(1))
    return Batch((tokens[:, :-1],), tokens[:, 1:], n_tokens=27)


@pytest.mark.parametrize("name", ["gpt2", "llama-7b", "t5-small"])
def test_gradients_go_to_the_fp32_weights_and_their_changes_come_back(name: str) -> None:
    torch.manual_seed(0)
    objective = Objective(
        build(small_config(name, dropout=0.0, embedding_dropout=0.0, activation_dropout=0.0, attention_dropout=0.0))
    )
    working, tokens = WorkingWeights(objective), batch()
    inputs = tokens if objective.model.config.architecture == "decoder" else Batch(
        (tokens.inputs[0], tokens.inputs[0]), tokens.targets
    )  # fmt: skip
    own, half = dict(objective.model.named_parameters()), dict(working.objective.model.named_parameters())
    assert own.keys() == half.keys(), "what is tied stays tied"
    assert {p.dtype for p in half.values()} == {torch.bfloat16}
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            loss = working.objective(inputs)
        loss.backward()
        working.hand_over_gradients()
    assert all(p.grad is None for p in half.values())
    first = objective(inputs)
    assert loss.item() == pytest.approx(first.item(), rel=0.02)
    wanted = torch.autograd.grad(2 * first, own.values(), allow_unused=True)
    for (key, p), exact in zip(own.items(), wanted, strict=True):
        if exact is not None and exact.norm() > 1e-3:
            assert p.grad is not None
            assert p.grad.dtype == torch.float32
            assert (p.grad - exact).norm() < 0.2 * exact.norm(), key
    with torch.no_grad():
        for p in own.values():
            p.mul_(1.001)  # less than bf16 can tell from 1, and not lost
            p.mul_(1.5)
    working.refresh()
    assert all(torch.equal(half[key], p.bfloat16()) for key, p in own.items())


def test_one_gpu_in_bf16_uses_them() -> None:
    assert not uses_working_weights(Precision("bf16", "cpu"), Group())
    assert not uses_working_weights(Precision("fp32", "cpu"), Group())


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same run: with working weights, with them and stopped inside a step's batches, and in fp32."""
    folder = tmp_path_factory.mktemp("working")
    data = write_data("lm", folder)
    words = ("train.steps=6", "train.save_every=3", "train.eval_every=0", "train.accumulate=2", "train.ema=0.9")
    paths = {name: folder / name for name in ("whole", "stopped", "fp32")}
    train("lm", paths["fp32"], data, *words)
    with mock.patch.object(gradient_pass, "uses_working_weights", return_value=True):
        train("lm", paths["whole"], data, *words, "train.precision=bf16")
        train("lm", paths["stopped"], data, *words, "train.precision=bf16", "train.stop_at=3")
        trainer.resume(paths["stopped"], style="quiet")
    return paths


def state(path: Path) -> dict[str, torch.Tensor]:
    checkpoint = RunDirectory.open(path).checkpoints().latest()
    assert isinstance(checkpoint, Checkpoint)
    return {
        prefix + key: x for prefix in ("model/", "optimiser/", "ema/") for key, x in checkpoint.tensors(prefix).items()
    }


def test_a_checkpoint_holds_fp32_weights_and_a_run_goes_on_bit_for_bit(runs: dict[str, Path]) -> None:
    whole, stopped = state(runs["whole"]), state(runs["stopped"])
    assert {x.dtype for key, x in whole.items() if x.is_floating_point()} == {torch.float32}
    assert any(not torch.equal(x, x.bfloat16().float()) for key, x in whole.items() if key.startswith("model/"))
    assert whole.keys() == stopped.keys()
    assert all(torch.equal(x, stopped[key]) for key, x in whole.items())


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("working", [False, True])
def test_what_is_read_a_step_late_is_never_saved(working: bool, optimiser: str, tmp_path: Path) -> None:
    words = ("train.steps=9", "train.save_every=5", "train.eval_every=0", "train.log_every=4", "train.clip=none")
    words += (f"train.optimiser={optimiser}", "train.precision=bf16" if working else "train.precision=fp32")

    def break_batch(loop: Loop, batch: Batch, number: int, do: Any = Loop._accumulate) -> None:
        do(loop, batch, number)
        if number == 5:
            next(loop.model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]

    with (
        mock.patch.object(gradient_pass, "uses_working_weights", return_value=working),
        mock.patch.object(trainer, "_reads_late", return_value=True),
        mock.patch.object(Loop, "_accumulate", break_batch),
        pytest.raises(Diverged, match=r"step 6: loss .*, gradient norm nan; .* the last checkpoint is that of step 5"),
    ):
        train("lm", tmp_path / "run", write_data("lm", tmp_path), *words)
    assert max(RunDirectory.open(tmp_path / "run").checkpoints().steps()) == 5
    assert all(x.isfinite().all() for x in state(tmp_path / "run").values())
    assert all(math.isfinite(x) for x in losses(tmp_path / "run"))


def test_it_learns_as_fp32_does(runs: dict[str, Path]) -> None:
    assert losses(runs["whole"]) == pytest.approx(losses(runs["fp32"]), rel=0.01)
    assert losses(runs["whole"]) != losses(runs["fp32"])
