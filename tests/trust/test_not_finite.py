"""A number that is not finite, wherever it comes from, ends a run at once and never reaches the disk."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.errors import Diverged
from regard.recipes import run_config
from regard.training.loop import StepRecord
from training.runs import assert_same, resume, train, words_of, write_data

from .promises import Tally, size

LAST = size(short=8, full=21)  # at each of the steps from 2 on something breaks
WORDS = (
    f"train.steps={LAST}",
    "train.ema=0.9",
    "train.accumulate=2",
    "train.save_every=2",
    "train.eval_every=5",
    "train.batch_tokens=48",
)
WEIGHT = "encoder.blocks.0.attention.w_o.weight"


def spoil_loss(record: StepRecord, value: float) -> None:
    record.model.register_forward_hook(lambda _module, _inputs, logits: logits * value)


def spoil_gradient(record: StepRecord, value: float) -> None:
    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled[-1, -1] = value
        return spoiled

    record.model.get_parameter(WEIGHT).register_hook(spoil)


def spoil_weight(record: StepRecord, value: float) -> None:
    with torch.no_grad():
        record.model.get_parameter(WEIGHT)[-1, -1] = value


def spoil_unused_weight(record: StepRecord, value: float) -> None:
    """Of the vector of the padding token: no loss shows it."""
    with torch.no_grad():
        record.model.get_parameter("token.weight")[0, 0] = value


PLACES: dict[str, Callable[[StepRecord, float], None]] = {
    "loss": spoil_loss,
    "gradient": spoil_gradient,
    "weight": spoil_weight,
    "unused weight": spoil_unused_weight,
}


def assert_finite_on_disk(out: Path) -> None:
    for path in out.rglob("*.safetensors"):
        for name, x in load_file(path).items():
            assert not x.is_floating_point() or bool(torch.isfinite(x).all()), f"{path.relative_to(out)}: {name}"
    for path in (*out.rglob("*.json"), *out.rglob("*.jsonl")):
        assert not re.search(rb"\b(NaN|Infinity)\b", path.read_bytes()), path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A run in which nothing breaks, and what it learns from."""
    folder = tmp_path_factory.mktemp("whole")
    data = write_data("classify", folder)
    train("classify", folder / "run", data, *WORDS)
    return folder / "run", data


@pytest.mark.promise(5, "NaN and infinities in losses, gradients and weights, every step of a run")
@pytest.mark.parametrize("place", PLACES)
def test_nothing_that_is_not_finite_is_saved(place: str, whole: tuple[Path, str], tally: Tally, tmp_path: Path) -> None:
    cases = [(step, value) for value, step in product((math.nan, math.inf), range(2, LAST + 1))]
    for step, value in cases[3 :: size(short=10, full=1)]:

        def spoil(record: StepRecord, step: int = step, value: float = value) -> None:
            if record.step == step - 1:
                PLACES[place](record, value)

        out = tmp_path / f"{step} {value}"
        config = run_config("classify", words_of("classify", whole[1], *WORDS, f"train.out={out}"))
        with tally.attempt(f"{value} in the {place} of step {step}"):
            with pytest.raises(Diverged) as stopped:
                regard.train(config, callbacks=[spoil], style="quiet")
            (told,) = re.findall(r"^step (\d+): ", str(stopped.value))
            # A weight may break after the last step; one that no loss shows is found where it would be saved.
            assert step - 1 <= int(told) <= step + (place == "unused weight")
            assert_finite_on_disk(out)
            saved = [json.loads(path.read_bytes())["at"]["step"] for path in out.rglob("state.json")]
            assert all(x < step for x in saved)
            resume(out)
            assert_same(whole[0], out)
