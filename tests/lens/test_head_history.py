"""The heads of a run over its checkpoints: the scores of each are those of a look, and births are their thresholds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.lens.head_history import HeadHistory, head_history, repeated_tokens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "repeats"
    data: dict[str, Any] = {"source": "repeats", "tokenizer": "words", "max_len": 64, "epoch_examples": 40}
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 16, "max_len": 64}
    model: dict[str, Any] = {"architecture": "decoder", "head": "lm", "positions": "learned", **sizes}
    steps = {"steps": 3, "warmup": 1, "save_every": 1, "keep": 3, "eval_batches": 1, "batch_tokens": 256}
    train = {**steps, "device": "cpu", "compile": "off", "out": str(out)}
    regard.train(regard.RunConfig(task="lm", data={**data, "valid_rows": 8}, model=model, train=train))
    return out


def test_scores_of_a_checkpoint_are_those_of_a_look(run: Path) -> None:
    found = head_history(run)
    assert found.steps == [1, 2, 3]
    model = regard.load(f"{run}@2")
    rows = repeated_tokens(model)
    assert all(row[: len(row) // 2] == row[len(row) // 2 :] for row in rows)
    patterns = [regard.look(model, row).patterns() for row in rows]
    for name in ("previous", "induction"):
        mean = torch.stack([x.scores[name] for x in patterns]).mean(0)
        torch.testing.assert_close(found.scores[name][1], mean)
    assert found.loss[0] != found.loss[2]
    assert head_history(run, steps=[2]).scores["induction"].shape == (1, 2, 2)
    with pytest.raises(ValueError, match="there are no texts to look at"):
        head_history(run, [], steps=[2])
    with pytest.raises(ValueError, match="there are 1 targets for 2 sources"):
        head_history(run, [[5, 6], [7, 8]], [[5]], steps=[2])
    with pytest.raises(ValueError, match="target is for models with an encoder"):
        head_history(run, [5, 6], [7, 8], steps=[2])  # one row of ids and its target


def test_a_head_is_born_when_its_score_stays_high() -> None:
    scores = torch.zeros(4, 1, 3)
    scores[1:, 0, 0] = 0.9
    scores[1, 0, 1], scores[3, 0, 1] = 0.9, 0.5  # lost in between
    scores[1, 0, 2] = 0.9
    history = HeadHistory("self", [10, 20, 30, 40], {"induction": scores}, [2.0] * 4, [1.0] * 4)
    assert history.births() == {(0, 0): 20, (0, 1): 40}
    assert history.births(least=0.6) == {(0, 0): 20}
    assert "induction from step: L1H1 20, L1H2 40" in history.to_text()
    with pytest.raises(ValueError, match="'previous' was not scored; induction were"):
        history.births("previous")


def test_the_command_says_draws_and_writes_it(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["look", str(run), "--history", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == [1, 2, 3]
    assert len(found["scores"]["induction"][0][1]) == 2
    picture = tmp_path / "history.svg"
    assert main(["look", str(run), "ba ko ba ko", "--history", "--out", str(picture), "--device", "cpu"]) == 0
    assert "induction from step" in capsys.readouterr().out
    assert picture.read_text().count("<svg") == 1
    assert main(["look", str(tmp_path), "--history"]) == 3
    assert "has no checkpoints, so it has no history" in capsys.readouterr().err
