"""From a run to what others open: the target is checked before training, and what is shipped says what it came from."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import regard
from processor import needs_vnni
from regard import cli
from regard.export import export
from training.runs import words_of, write_data

from .translators import QUICK, pairs, translator

SCRIPTS = Path(__file__).parents[2] / "examples" / "onnx"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A translator, trained by the command line."""
    folder = tmp_path_factory.mktemp("shipping")
    words = words_of("translate", write_data("translate", folder), "train.steps=4", "train.save_every=2")
    assert cli.main(["train", "translate", *words, f"train.out={folder / 'run'}", "train.seed=1", "--quiet"]) == 0
    return folder / "run"


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "manifest.json").read_text(encoding="utf-8"))


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


def test_what_is_shipped_names_run_step_data_metrics_command_and_versions(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = ("--shapes", "2", "--no-compile")
    for kind in ("safetensors", "int8"):
        assert cli.main(["export", str(run), kind, str(tmp_path / kind), *quick]) == 0
    again = regard.export(regard.load(tmp_path / "safetensors"), "ctranslate2", tmp_path / "again", **QUICK)
    evaluation = json.loads((run / "evaluation.json").read_bytes())
    facts = json.loads((run / "provenance.json").read_bytes())
    for folder in (run / "model", tmp_path / "safetensors", tmp_path / "int8", again):
        record = manifest(folder)["training"]
        assert (record["run"], record["task"], record["step"]) == (
            "run",
            "translate",
            int(evaluation["weights"].split()[1].strip(",")),
        )
        assert record["data"] == {"source": facts["data"]["source"], "sha256": facts["data"]["sha256"]}
        assert record["metrics"] == evaluation["metrics"]
        assert record["command"][:3] == ["regard", "train", "translate"]
        assert record["versions"]["regard"] == regard.__version__
        card = (folder / "README.md").read_text(encoding="utf-8")
        for fact in (
            f"run: {evaluation['weights']}",
            facts["data"]["sha256"],
            "train.seed=1",
            f"regard {regard.__version__}",
        ):
            assert fact in card
        assert f"{regard.load(run).n_parameters:,} parameters" in card
        assert f"| valid_loss | {evaluation['metrics']['valid_loss']:.5g} |" in card
    capsys.readouterr()
    assert cli.main(["info", str(tmp_path / "int8")]) == 0
    assert "trained: run, step" in capsys.readouterr().out


def test_a_file_that_cannot_be_checked_is_refused_before_anything_is_compared(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.export.export_model.quantise", lambda model: pytest.fail("exported first"))
    assert cli.main(["export", str(run), "int8", str(tmp_path / "out"), "--check", str(tmp_path / "none.tsv")]) == 2
    (tmp_path / "some.tsv").write_text("a\tb\n", encoding="utf-8")
    assert cli.main(["export", str(run), "web", str(tmp_path / "out"), "--check", str(tmp_path / "some.tsv")]) == 2


def test_a_step_says_its_own_metrics_and_an_altered_record_is_noticed(run: Path, tmp_path: Path) -> None:
    saved = regard.load(f"{run}@2").save(tmp_path / "two")
    record = manifest(saved)["training"]
    assert (record["step"], record["weights"]) == (2, "step 2")
    text = (saved / "manifest.json").read_text(encoding="utf-8")
    (saved / "manifest.json").write_text(text.replace('"weights": "step 2"', '"weights": 2'), encoding="utf-8")
    with pytest.raises(regard.errors.BadModelFile, match="is not a manifest"):
        regard.load(saved)


# ------------------------------------------------------------------------------------- ONNX without regard


@pytest.fixture(scope="module")
def graphs(learned_graphs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tokenizer or two, float32 or int8."""
    two = translator(joint=False, n_layers=1, max_len=24)
    return {**learned_graphs, "two tokenizers": export(two, "onnx", tmp_path_factory.mktemp("graphs") / "two", **QUICK)}


def run_script(*words: object) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=300, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return done.stdout.rstrip("\n")


@needs_vnni
def test_plain_onnxruntime_translates_as_regard_does(graphs: dict[str, Path]) -> None:
    script = SCRIPTS / "translate.py"
    code = script.read_text(encoding="utf-8")
    assert len(code.splitlines()) <= 48
    assert not re.search(r"^(import|from) (regard|torch)", code, re.MULTILINE)
    text = pairs()[0][0]
    for name in ("float32", "int8"):
        assert run_script(sys.executable, script, graphs[name], text) == pairs()[0][1], name
    wanted = regard.translate(graphs["two tokenizers"], text, beam=1, max_new_tokens=23)[0]
    assert run_script(sys.executable, script, graphs["two tokenizers"], text) == wanted


@needs_vnni
def test_javascript_translates_as_regard_does(graphs: dict[str, Path], tmp_path: Path) -> None:
    node, modules = shutil.which("node"), Path(os.environ.get("NODE_PATH", SCRIPTS / "node_modules"))
    if node is None or not (modules / "onnxruntime-web").is_dir():
        pytest.skip("needs node, and onnxruntime-web and @huggingface/tokenizers in NODE_PATH")
    shutil.copy(SCRIPTS / "translate.mjs", tmp_path)
    (tmp_path / "node_modules").symlink_to(modules, target_is_directory=True)
    for name in ("float32", "int8"):
        assert run_script(node, tmp_path / "translate.mjs", graphs[name], pairs()[0][0]) == pairs()[0][1], name
