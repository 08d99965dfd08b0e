"""The ablations by name, a grid from a file, the loss token by token, and softmax saturation."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.config import MIXERS
from regard.errors import UsageError
from regard.experiments.ablations import (
    AXES,
    SWEEPS,
    ablation,
    jacobian_norm,
    list_ablations,
    measure_scaling,
    predict_scaled,
    predict_unscaled,
)
from regard.experiments.sweep_cell import token_by_token_loss
from regard.experiments.sweep_spec import Sweep, read_grid, settings
from regard.foundation.plugins import MIXERS_VARIABLE
from regard.models.build import build
from regard.training.loss import Batch, Objective, shift_targets

TINY = (
    *("data.epoch_examples=100", "data.valid_rows=4", "data.tokenizer=chars", "model.d_model=16", "model.d_ff=16"),
    *("model.n_layers=1", "train.steps=2", "train.batch_tokens=128"),
)

# ------------------------------------------------------------------------------------- by name


@pytest.mark.parametrize("name", [*AXES, "paper"])
def test_every_cell_is_a_config_that_differs_from_the_base(name: str) -> None:
    sweep = ablation(name)
    base = settings(sweep.config(sweep.rows[0]))
    assert sweep.cells
    for cell in sweep.cells:
        found = settings(sweep.config(cell))
        changed = {key for key in found if found[key] != base[key]}
        assert changed, cell
        # One thing at a time; dropout is one thing in two places.
        assert len(changed) == 1 or changed == {"model.dropout", "model.embedding_dropout"}, (cell, changed)


def test_the_thirteen_axes_are_there() -> None:
    wanted = "heads d_k d_ff depth size dropout positions norm residual attention mask label-smoothing warmup"
    assert set(AXES) == set(wanted.split())
    assert set(list_ablations()) >= {*AXES, "paper", "scaling"}
    assert set(AXES) <= set(SWEEPS)


def test_heads_keep_the_compute() -> None:
    sweep = ablation("paper")
    widths = [sweep.config(cell).model for cell in sweep.rows if cell.group in ("", "A")]
    assert {model.n_heads for model in widths} == {1, 2, 4, 8, 16}
    assert {model.n_heads * model.head_width for model in widths} == {256}
    groups = "".join(dict.fromkeys(cell.group for cell in sweep.cells))
    assert groups == "ABCDEF"


def test_axes_follow_the_base_they_are_given() -> None:
    cells = ablation("heads", ["model.d_model=24", "model.n_heads=2"]).cells
    assert [cell.name for cell in cells] == ["h=1", "h=4", "h=8"]
    assert [cell.name for cell in ablation("d_ff", ["model.d_ff=100"]).cells] == ["d_ff=50", "d_ff=200"]


@pytest.mark.parametrize(
    ("name", "words", "left"),
    [
        ("norm", ["model.norm=none"], ["norm=layer", "norm=rms"]),  # where there is no norm, its place means nothing
        ("attention", ["model.window=5"], ["not scaled", "additive", "linear", "sinks"]),
        ("attention", ["model.mixer=linear"], ["not scaled", "additive", "window=5", "sinks"]),
        ("depth", ["model=lstm-plain", "model.n_layers=2"], ["N=1", "N=4", "N=6"]),
    ],
)
def test_cells_that_are_the_base_itself_are_left_out(name: str, words: list[str], left: list[str]) -> None:
    assert [cell.name for cell in ablation(name, words).cells] == left


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("residual", ["model.residual=false"]),
        ("mask", ["model.causal=false"]),
        ("heads", ["model=lstm-plain"]),  # a recurrent model has none
        ("d_ff", ["model=lstm-plain"]),
    ],
)
def test_an_ablation_with_nothing_to_change_is_refused(name: str, words: list[str]) -> None:
    with pytest.raises(UsageError, match=f"{name}: there is nothing to compare: .* the same run as the base"):
        ablation(name, words)


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("haeds", [], "did you mean heads"),
        ("heads", ["train.stepps=3"], "did you mean train.steps"),
        ("heads", ["model.d_model=x"], "not a whole number"),
        ("nowhere.toml", [], "nowhere.toml"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_runs(
    name: str, words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["ablate", name, *words, "--out", str(tmp_path / "out")])
    assert code in (1, 2)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_list_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ablate", "--list", "--json"]) == 0
    assert "h=16" in json.loads(capsys.readouterr().out)["ablations"]["heads"]["cells"]


@pytest.mark.slow
def test_from_the_command_line_and_from_python_to_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    test = ["--test", "en-ko"]
    assert main(["ablate", "mask", *TINY, "--seeds", "1", "--jobs", "1", "--out", str(out), "--json", *test]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert document["finished"]
    no_mask = document["cells"][1]
    assert no_mask["name"] == "no mask"
    assert {"train_loss", "valid_loss", "loss_token_by_token", "bleu", "test_bleu"} <= set(no_mask["metrics"])
    again = regard.ablate(out, report_only=True)
    assert again.to_dict()["cells"] == document["cells"]
    assert "no mask writes" in again.to_text()


# ------------------------------------------------------------------------------------- a grid of one's own


def test_a_grid_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        """
recipe = "en-ko"
words = ["model.n_heads=4", "model.d_ff=64"]
seeds = 2
[grid]
"model.n_heads" = [1, 4]
"model.d_ff" = [64, 128]
[[cells]]
name = "no norm"
words = ["model.norm=none"]
[tests]
test = "a.tsv"
"""
    )
    sweep = read_grid(file)
    assert (sweep.name, sweep.seeds, sweep.tests) == ("mine", (0, 1), {"test": "a.tsv"})
    # Four combinations without the one that is the base.
    names = [cell.name for cell in sweep.cells]
    assert names == ["n_heads=1,d_ff=64", "n_heads=1,d_ff=128", "n_heads=4,d_ff=128", "no norm"]
    assert sweep.config(sweep.cells[1]).model.d_ff == 128
    sweep.write(tmp_path / "out")
    assert Sweep.read(tmp_path / "out") == sweep
    # Words change which of them is the base.
    names = [cell.name for cell in read_grid(file, ["model.n_heads=1"]).cells]
    assert names == ["n_heads=1,d_ff=128", "n_heads=4,d_ff=64", "n_heads=4,d_ff=128", "no norm"]


def test_a_grid_may_name_a_mechanism_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MIXERS_VARIABLE, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "gridded.py").write_text("from regard.attention.mechanisms import Dot\n\nclass Mine(Dot):\n    pass\n")
    (tmp_path / "mine.toml").write_text('recipe = "en-ko"\n[grid]\n"model.mixer" = ["dot", "gridded:Mine"]\n')
    try:
        (cell,) = read_grid(tmp_path / "mine.toml").cells
    finally:
        MIXERS.pop("gridded:Mine", None)
        sys.modules.pop("gridded", None)
    assert (cell.name, cell.words) == ("mixer=gridded.Mine", ("model.mixer=gridded:Mine",))


def test_a_grid_is_shown_what_its_task_has_of_further_examples(tmp_path: Path) -> None:
    for recipe, metric in (("en-ko", "test_bleu"), ("stdlib", "test_loss")):
        (tmp_path / "grid.toml").write_text(f'recipe = "{recipe}"\n[tests]\ntest = "a"\n')
        assert read_grid(tmp_path / "grid.toml").metrics == ("valid_loss", metric)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recipe = ", "not TOML"),
        ("words = []", "does not name a recipe"),
        ('recipe = "en-ko"\nsede = 3', "did you mean seeds"),
        ('recipe = "en-ko"\n[grid]\n"model.d_ff" = 3', "list of values"),
        ('recipe = "en-ko"\n[grid]\n"model.d_fff" = [3]', "model.d_ff"),
        ('recipe = "en-ko"\n[[cells]]\nword = "x"', "a cell must have a name"),
        ('recipe = "en-ko"\nwords = "train.steps=3"', "words must be a list of strings, not 'train.steps=3'"),
        ('recipe = "en-ko"\n[[cells]]\nname = "x"\nwords = "train.steps=3"', "words must be a list of strings"),
        ('recipe = "en-ko"\nmetrics = "bleu"', "metrics must be a list of strings"),
        ('recipe = "en-ko"\nmetrics = []', "at least one metric"),
        ('recipe = "en-ko"\nseeds = true', "seeds must be a number or a list of numbers, not True"),
        ('recipe = "en-ko"\nseeds = [0, "1"]', "seeds must be a number or a list"),
        ('recipe = "en-ko"\nseeds = 0', "must be one or more different numbers"),
        ('recipe = "en-ko"\ngrid = 3', "grid must be a table"),
        ('recipe = "en-ko"\ncells = 3', "cells must be written"),
        ('recipe = "en-ko"\n[grid]\n"model.mixer" = ["dot"]', "there is nothing to compare"),
    ],
)
def test_a_file_that_cannot_be_meant(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(UsageError, match=said):
        read_grid(tmp_path / "bad.toml")


# ------------------------------------------------------------------------------------- token by token


@pytest.mark.parametrize("causal", [True, False])
def test_the_loss_token_by_token_is_the_ordinary_one_where_the_future_is_hidden(causal: bool) -> None:
    torch.manual_seed(0)
    model = build(
        "transformer-base", vocab_size=30, d_model=16, n_layers=2, n_heads=2, d_ff=16, max_len=16, causal=causal
    ).eval()
    source, target = torch.randint(3, 30, (3, 7)), torch.randint(3, 30, (3, 6))
    target[1, 4:] = 0
    read, wanted = shift_targets(target, 0)
    batch = Batch((source, read), wanted, {"source_padding_mask": source != 0})
    with torch.no_grad():
        whole = float(Objective(model).eval()(batch))
        total, count = token_by_token_loss(model, batch)
    assert count == batch.n_targets == 13
    assert (abs(total - whole) < 1e-3) == causal


# ------------------------------------------------------------------------------------- softmax saturation


def test_what_passes_is_the_norm_of_the_jacobian() -> None:
    p = torch.tensor([[0.2, 0.5, 0.3], [1.0, 0.0, 0.0]], dtype=torch.float64)
    jacobian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    torch.testing.assert_close(jacobian_norm(p), jacobian.flatten(1).norm(dim=1))


def test_saturation_as_predicted(tmp_path: Path) -> None:
    found = measure_scaling(tmp_path, widths=(4, 64, 4096), n_keys=64, n_queries=600)
    by_width = {scaled.d_k: (scaled, plain) for scaled, plain in found.pairs()}
    for scaled, _ in by_width.values():
        assert scaled.passed == pytest.approx(predict_scaled(64), rel=0.05)
        assert scaled.gradient == pytest.approx(scaled.passed, rel=0.2)
    plain = by_width[4096][1]
    assert plain.passed == pytest.approx(predict_unscaled(64, 4096), rel=0.25)
    assert plain.passed_median < 1e-3 < by_width[4096][0].passed_median
    assert plain.saturated > 0.8
    assert by_width[4][1].predicted is None
    assert (tmp_path / "scaling.png").stat().st_size > 10_000
    assert "without" in found.to_text()


def test_the_asymptote_falls_with_the_root_of_the_width() -> None:
    assert predict_unscaled(64, 400) == pytest.approx(predict_unscaled(64, 100) / 2)
    # Two keys: the gap is N(0, 2 d_k), whose density at 0, on both sides, is 2/√(4π d_k).
    assert predict_unscaled(2, 100) == pytest.approx(2 / (4 * torch.pi * 100) ** 0.5, rel=1e-6)
