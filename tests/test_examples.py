"""Every example at a small size: it runs as a user runs it, and what it teaches is true of what it found."""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from regard.lens.head_scores import alignment_error, pointing
from regard.recipes import run_config

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "examples"
FILES = sorted(FOLDER.glob("*.py"))
Run = Callable[..., tuple[Any, str]]
SMALL_GPT = {"d_model": 48, "n_layers": 1, "n_heads": 2, "d_ff": 96, "max_len": 32, "positions": "rope"}
ONE_LAYER = {"vocab_size": 36, "d_model": 64, "n_layers": 1, "d_ff": 64, "max_len": 16, "positions": "rope"}
NARROW = "model.d_model=32 model.d_ff=64 model.n_heads=2 model.n_layers=1"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """What an example's main() found with these arguments, and what it printed.

    ``fields`` join the words of the runs it trains; ``changes`` replace names of the example: both make it smaller.
    """

    def call(name: str, *words: str, fields: str = "", changes: dict[str, Any] | None = None) -> tuple[Any, str]:
        spec = importlib.util.spec_from_file_location(f"example_{name}", FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        changes = changes or {}
        if fields:
            changes["run_config"] = lambda task, words, **more: run_config(task, replaced(words, fields), **more)
        for changed, instead in changes.items():
            assert hasattr(module, changed)
            setattr(module, changed, instead)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *words])
        return module.main(), capsys.readouterr().out

    return call


def replaced(words: list[str], fields: str) -> list[str]:
    """The words, with those of ``fields`` in the place of what they say of the same field."""
    instead = {word.partition("=")[0]: word for word in fields.split()}
    return [*(word for word in words if word.partition("=")[0] not in instead), *instead.values()]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_is_short_says_what_one_learns_and_is_listed(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 60
    said = ast.get_docstring(ast.parse(text)) or ""
    assert "You learn:" in said
    assert f"python examples/{file.name}" in said
    assert f"[{file.name}]({file.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_the_list_names_nothing_else() -> None:
    named = re.findall(r"^\| \[(\w+\.py)\]", (FOLDER / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(named) == [file.name for file in FILES]
    assert len(named) == 10


def test_mini_attention(run: Run) -> None:
    found, said = run("mini_attention", "the cat sat on the mat")
    torch.testing.assert_close(found["weights"].sum(-1), torch.ones(6))
    assert found["error"] < 1e-5
    assert said.count("←") == 6
    # With √d the spread does not depend on the width; without it a wide query looks at about one word.
    assert abs(found["spread"]["with", 4] - found["spread"]["with", 1024]) < 5
    assert found["spread"]["without", 1024] < 2 < 10 < found["spread"]["without", 4]


@pytest.mark.parametrize("heads", [1, 4])
def test_multi_head(run: Run, heads: int) -> None:
    found, _ = run("multi_head", "--heads", str(heads))
    assert found["error"] < 1e-5
    assert len(set(found["sizes"].values())) == 1
    assert found["answers"][(0, 3), 1] == found["answers"][(1, 2), 1] == [2.5]
    assert found["answers"][(0, 3), 2] == [1.0, 4.0] != found["answers"][(1, 2), 2]


@pytest.mark.slow
def test_causal_mask(run: Run) -> None:
    found, _ = run("causal_mask", "--steps", "60", changes={"LENGTH": 32, "SIZES": SMALL_GPT})
    (with_mask, used), (without, misused) = found[True], found[False]
    assert without < with_mask - 0.3
    assert misused > used + 0.2


def test_head_count(run: Run) -> None:
    found, said = run("head_count", "--steps", "110", "--heads", "1,2", changes={"SIZES": ONE_LAYER})
    assert found[1] < 0.25
    assert found[2] > found[1] + 0.1
    assert "knowing one of the two digits: 17 %" in said


@pytest.mark.slow
def test_bahdanau_translator(run: Run) -> None:
    found, said = run(
        "bahdanau_translator",
        *("--steps", "5"),
        fields="model.d_model=32 train.batch_tokens=512 data.epoch_examples=300 data.valid_rows=8",
        changes={"alignment_error": lambda model, n: alignment_error(model, n // 10)},
    )
    weights = found["weights"]
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)))
    assert 0 <= found["error"] <= 1
    assert found["blind"] > 0.5
    assert "[polite] The cat ate fish. →" in said


def test_bahdanau_translator_of_a_file(run: Run, tmp_path: Path) -> None:
    pairs = [f"{a} {b} {n}\t{n} {b} {a}" for n in range(20) for a in ("one", "two") for b in ("red", "blue")]
    (tmp_path / "pairs.tsv").write_text("\n".join(pairs) + "\n", encoding="utf-8")
    found, said = run("bahdanau_translator", str(tmp_path / "pairs.tsv"), "--steps", "2")
    assert "one red 0 →" in said
    assert "error" not in found


def test_gpt_shakespeare_of_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("To be, or not to be, that is the question.\n" * 200, encoding="utf-8")
    found, said = run(
        "gpt_shakespeare",
        *(str(tmp_path / "input.txt"), "--steps", "25", "--prompt", "To "),
        fields=f"{NARROW} train.batch_tokens=2048 train.eval_batches=2 train.lr=0.01",
    )
    assert found["loss"] < 2.5 < torch.tensor(float(found["letters"])).log()
    assert 200 < len(found["text"]) <= 240
    assert f"To {found['text']}" in said


@pytest.mark.slow
def test_gpt_on_the_standard_library(run: Run) -> None:
    found, said = run(
        "gpt_shakespeare", "--steps", "5", fields=f"{NARROW} train.batch_tokens=2048 train.eval_batches=2"
    )
    assert found["letters"] > 90
    assert "\ndef " in said


@pytest.mark.slow
def test_sentiment(run: Run) -> None:
    found, said = run("sentiment", "--steps", "60", fields=f"{NARROW} train.lr=0.01")
    assert found["accuracy"] > 0.8
    assert 0 <= found["negated"] <= 1
    assert re.search(r"the film was not superb: (good|bad)\n", said)


@pytest.mark.slow
def test_captioning(run: Run) -> None:
    found, said = run(
        "captioning",
        *("--steps", "5"),
        fields=f"{NARROW} train.batch_tokens=512 data.epoch_examples=100 data.valid_rows=8",
        changes={"pointing": lambda model, n: pointing(model, n // 5)},
    )
    assert 0 < found["chance"] < 0.5
    assert 0 <= found["pointing"] <= 1
    assert said.count("true:") == 4


@pytest.mark.slow
def test_vit(run: Run) -> None:
    found, said = run("vit", "--steps", "6", fields=NARROW)
    assert found["none"][1] < 1e-4 < found["sinusoidal"][1], "shuffled patches are the same without positions alone"
    assert said.count("% right") == 2


@pytest.mark.slow
def test_vit_of_a_folder_of_squares_that_stand_in_a_corner(run: Run, tmp_path: Path) -> None:
    drawn = np.random.default_rng(0)
    for n in range(240):
        pixels = np.zeros((64, 64, 3), np.uint8)
        row, column = 32 * (n % 4 // 2) + drawn.integers(17), 32 * (n % 2) + drawn.integers(17)
        pixels[row : row + 16, column : column + 16] = 255
        (tmp_path / str(n % 4)).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / str(n % 4) / f"{n}.png")
    fields = f"{NARROW} data.valid_rows=40 train.optimiser=adamw train.lr=0.01 train.warmup=4"
    found, _ = run("vit", str(tmp_path), "--steps", "60", fields=fields)
    assert found["none"][0] < 0.3 < found["sinusoidal"][0] - 0.05


def test_long_documents(run: Run) -> None:
    found, _ = run("long_documents", "--longest", "2048")
    assert list(found["times"]) == [256, 512, 1024, 2048]
    assert found["reached"] == {1: 31, 2: 62, 4: 124}
