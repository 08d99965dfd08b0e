"""Direct preference optimisation: the loss of the paper, its reference, what is measured, and that it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import cli
from regard.data.packing import IGNORE
from regard.data.sources import open_source
from regard.errors import BadData
from regard.recipes import run_config
from regard.training.finetuning import add_lora
from regard.training.tasks import open_task
from regard.training.tasks.preference_tuning import answer_log_probs

from .runs import assert_same, metrics
from .test_chat_tuning import questions, tune, words, write_chats


def write_preferences(file: Path, n: int = 60) -> Path:
    """An answer is preferred to a question."""
    rows = [{"prompt": prompt, "chosen": answer, "rejected": "what is that ?"} for prompt, answer in questions(n)]
    lines = map(json.dumps, rows)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def typed(folder: Path, *more: str) -> list[str]:
    named = words(f"data={folder / 'preferences.jsonl'}", f"train.init={folder / 'sft'}", *more)
    return [word for word in named if not word.startswith(("model.", "data.tokenizer"))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers, and preferences."""
    made = tmp_path_factory.mktemp("dpo")
    tune(made / "sft", write_chats(made / "chats.jsonl"), "train.steps=20")
    write_preferences(made / "preferences.jsonl")
    return made


def test_a_model_learns_what_is_preferred(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    asked = typed(folder, "train.steps=12", "train.eval_every=6", "train.lr=1e-3", "train.warmup=1", f"train.out={out}")
    assert cli.main(["train", "dpo", "--quiet", *asked]) == 0
    lines = metrics(out)
    assert lines[0]["loss"] == pytest.approx(0.693, abs=0.05), "at first no answer is preferred: log 2"
    found = json.loads((out / "evaluation.json").read_bytes())["metrics"]
    assert found["accuracy"] > 0.9
    assert found["margin"] > 0.2
    assert found["margin"] == pytest.approx(found["chosen_reward"] - found["rejected_reward"])
    report = regard.evaluate(out)
    assert report.metrics["loss"] == pytest.approx(found["valid_loss"], rel=1e-3)
    assert report.metrics["accuracy"] == pytest.approx(found["accuracy"])
    assert cli.main(["generate", str(out), "what is three number 3 ?", "--max-new-tokens", "4"]) == 0


@pytest.mark.parametrize("lora", [(), ("train.lora=2",), ("train.lora=2", "train.quantize=nf4")])
def test_a_stopped_run_goes_on(folder: Path, lora: tuple[str, ...], tmp_path: Path) -> None:
    """With additions the reference is the model without them, else the one that it started from."""
    for name, more in (("whole", ()), ("parts", ("train.stop_at=1",))):
        asked = typed(folder, "train.steps=2", f"train.out={tmp_path / name}", *lora, *more)
        assert cli.main(["train", "dpo", "--quiet", *asked]) == 0
    assert cli.main(["train", "--quiet", "--resume", str(tmp_path / "parts")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_loss_is_the_papers(folder: Path) -> None:
    config = run_config("dpo", typed(folder, "train.dpo_beta=0.3"))
    task = open_task(config, open_source(config.data), regard.load(folder / "sft").processor)
    batch = task.batch(0)
    pairs, targets = batch.n_targets, batch.targets
    assert targets.shape[0] == 2 * pairs
    answers = {task.tokenizer.decode(row[row != IGNORE].tolist()) for row in targets[:pairs]}
    assert answers <= {x.chosen for x in task.source.train}
    model, reference = regard.load(folder / "sft"), task.reference_model(regard.load(folder / "sft"))
    assert task.loss(model, batch, 0.0, reference).item() == pytest.approx(pairs * 0.6931, rel=1e-3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.01 * torch.randn_like(p))
    ours, theirs = (answer_log_probs(x, batch) for x in (model, reference))
    ratio = (ours - theirs).detach()
    margin = 0.3 * (ratio[:pairs] - ratio[pairs:])
    expected = -torch.log(torch.sigmoid(margin)).sum()
    assert torch.allclose(task.loss(model, batch, 0.0, reference), expected, rtol=1e-4)
    smooth = -(0.9 * torch.log(torch.sigmoid(margin)) + 0.1 * torch.log(torch.sigmoid(-margin))).sum()
    assert torch.allclose(task.loss(model, batch, 0.1, reference), smooth, rtol=1e-4)
    adapted = add_lora(regard.load(folder / "sft"), 2)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_b" in name:
                p.normal_(std=0.1)
    assert task.reference_model(adapted) is None
    assert torch.allclose(task.loss(adapted, batch), task.loss(adapted, batch, 0.0, reference), rtol=1e-4)
    assert not any(layer.is_switched_off for layer in adapted.modules() if hasattr(layer, "is_switched_off"))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, ("a", "b", "c")),
        ({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
          "rejected": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}]}, ("a", "b", "c")),
        ({"prompt": [{"role": "user", "content": "a"}], "chosen": [{"role": "assistant", "content": "b"}],
          "rejected": [{"role": "assistant", "content": "c"}]}, ("a", "b", "c")),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": "b", "rejected": "c"}, "nothing before the answers"),
    ],
)  # fmt: skip
def test_preferences_are_read_as_people_write_them(record: Any, expected: Any, tmp_path: Path) -> None:
    file = tmp_path / "preferences.jsonl"
    file.write_text(json.dumps(record) + "\n", encoding="utf-8")
    config = run_config("dpo", [f"data={file}", "data.valid_fraction=0"])
    if isinstance(expected, str):
        with pytest.raises(BadData, match=expected):
            open_source(config.data)
        return
    (example,) = open_source(config.data).train
    assert (example.prompt, example.chosen, example.rejected) == ((("user", expected[0]),), *expected[1:])


def test_dpo_needs_a_model_to_start_from(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "dpo", f"data={folder / 'preferences.jsonl'}"]) == 2
    assert "add train.init=DIR" in capsys.readouterr().err
