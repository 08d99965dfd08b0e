"""A task and a model of another kind: the task sets head and architecture where it can, else says what fits."""

from __future__ import annotations

from pathlib import Path

import pytest

import regard
from regard import cli
from regard.config import RunConfig
from regard.errors import UsageError
from regard.presets import preset
from regard.training.run_directory import RunDirectory

from .runs import words_of, write_data


@pytest.mark.parametrize(
    ("task", "model", "becomes"),
    [
        ("classify", "bert-base", ("encoder", "classify")),
        ("classify", "gpt2", ("encoder", "classify")),
        ("lm", "bert-base", ("decoder", "lm")),
        ("lm", "transformer-tiny", ("decoder", "lm")),
        ("mlm", "bert-base", ("encoder", "masked-lm")),
        ("translate", "gpt2", ("encoder-decoder", "lm")),
    ],
)
def test_the_task_sets_architecture_and_head(
    task: str, model: str, becomes: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = write_data(task, tmp_path), tmp_path / "run"
    words = words_of(task, data, f"model={model}", f"train.out={out}", "train.steps=1", "train.eval_batches=1")
    words.sort(key=lambda word: not word.startswith("model="))  # a preset replaces what stands before it
    assert cli.main(["train", task, *words]) == 0
    config = RunDirectory.open(out).config.model
    assert (config.architecture, config.head) == becomes
    assert config.positions == preset(model).positions
    assert f"{becomes[0]}, head {becomes[1]}, " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            "lm data=text.txt model=bahdanau-gru",
            "the task lm needs model.architecture=decoder, but this model has model.architecture=recurrent; "
            "one that fits is model=gpt2 or gpt2-medium or gpt2-large",
        ),
        (
            "classify data=labels.tsv model=vit-tiny",
            "the task classify needs model.source=text, but this model has model.source=image; "
            "one that fits is model=sentiment",
        ),
        (
            "caption model=gpt2",
            "the task caption needs model.architecture=encoder-decoder, model.source=image, but this model has "
            "model.architecture=decoder, model.source=text; one that fits is model=captioner",
        ),
        (
            "classify data=labels.tsv model.head=masked-lm",
            "the task classify needs model.head=classify, but this model has model.head=masked-lm; "
            "one that fits is model=sentiment",
        ),
    ],
)
def test_what_cannot_fit_is_one_sentence(
    words: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *words.split(), f"train.out={tmp_path / 'run'}"]) == 2
    assert capsys.readouterr().err == f"regard: {sentence}\n"
    assert not (tmp_path / "run").exists()


def test_a_config_made_in_python_is_checked_too(tmp_path: Path) -> None:
    config = RunConfig(task="classify", model=preset("bert-base", d_model=16, n_heads=2, n_layers=1))
    config = config.with_(data={"source": write_data("classify", tmp_path)}, train={"out": str(tmp_path / "run")})
    with pytest.raises(UsageError, match=r"the task classify needs model.head=classify, but this model has .*=none"):
        regard.train(config, style="quiet")
    assert not (tmp_path / "run").exists()
