"""What a run says when it is done: three lines, once, and the third is what to type next."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from regard import cli

from .runs import words_of, write_data


@pytest.mark.parametrize(("task", "command"), [("translate", "translate"), ("classify", "classify")])
def test_the_result_is_three_lines_and_what_to_type_next(
    task: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_data(task, tmp_path), tmp_path / "a run"
    words = words_of(task, data, f"train.out={out}", "train.steps=2", "train.eval_every=1")
    assert cli.main(["train", task, *words]) == 0
    said = capsys.readouterr()
    model, held_out, follows = said.out.splitlines()
    assert re.fullmatch(r"step \d, the best, 2 steps in 0:\d\d", model.removeprefix(f"{out}/model: "))
    assert held_out.startswith("held out: valid loss ")
    assert held_out.endswith("n 12")
    assert "signature" not in said.out + said.err
    assert "twin" not in said.out + said.err
    assert len([line for line in said.err.splitlines() if "valid loss" in line]) == 2, "one for each evaluation"
    assert "weights" not in said.err
    program, *typed = shlex.split(follows.removeprefix("next: "))
    assert (program, typed[:2]) == ("regard", [command, str(out)])
    assert cli.main(typed) == 0, "it can be typed as it stands"
    kept = json.loads((out / "evaluation.json").read_bytes())
    assert (task == "classify") or "bleu_signature" in kept["metrics"]


def test_a_run_that_was_stopped_says_how_to_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("lm", tmp_path), tmp_path / "run"
    words = words_of("lm", data, f"train.out={out}", "train.steps=3", "train.stop_at=1", "train.eval_every=0")
    assert cli.main(["train", "lm", *words]) == 0
    first, follows = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{out}: stopped after 1 step in 0:0")
    assert follows == f"next: regard train --resume {out}"
