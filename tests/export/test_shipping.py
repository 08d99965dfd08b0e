"""From a run to what others open: the target is checked before training, and what is shipped says where it came from."""

from __future__ import annotations

from pathlib import Path

import pytest

from regard import cli
from training.runs import words_of, write_data


def test_a_target_that_the_model_cannot_have_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = words_of("translate", write_data("translate", tmp_path), "train.steps=1", f"train.out={tmp_path / 'run'}")
    for target, said in (
        ("hf", "train.ship_to=hf: transformers has no twin of this model: "),
        ("onnx,ctranslate2", "train.ship_to=onnx,ctranslate2: CTranslate2 cannot run a model with mixer='additive'"),
    ):
        fields = ["model.mixer=additive"] if "ctranslate2" in target else []
        assert cli.main(["train", "translate", *words, *fields, f"train.ship_to={target}"]) == 2
        assert said in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    assert cli.main(["train", "translate", *words, "train.ship_to=onnx,int8,ctranslate2", "--quiet"]) == 0
    assert (tmp_path / "run" / "model").is_dir()


def test_the_document_sends_translators_only_to_servers_that_exist() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "ship.md").read_text(encoding="utf-8").split())
    assert "its own server" not in text
    assert "vLLM runs no encoder-decoder" in text
    assert "through it vLLM" not in text
