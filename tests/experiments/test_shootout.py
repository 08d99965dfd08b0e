"""The shoot-out and the extrapolation: who plays, what is measured, and what the reports say of it."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.small import SIZES, shaken
from regard.config import MIXERS, ModelConfig, Positions
from regard.config.mixers import keys_per_query
from regard.experiments import ablate, extended_reports
from regard.experiments.ablations import SWEEPS, ablation, mechanisms
from regard.experiments.sweep_cell import FACTORS, losses_by_length
from regard.experiments.sweep_report import SweepReport
from regard.experiments.sweep_spec import Sweep, fingerprint, read_grid, run_folder
from regard.models import build

TEXT_POSITIONS = sorted({*get_args(Positions)} - {"window"})  # that one is of the windows of an image (Swin)
TEXT = np.random.default_rng(0).integers(3, 31, 24 * 8 * 3 + 1)


# ---- who plays


def test_every_mechanism_pattern_and_position_scheme_plays() -> None:
    sweep = ablation("mechanisms")
    configs = [sweep.config(cell).model for cell in sweep.rows]
    reads_both_ways = {name for name, entry in MIXERS.items() if not entry.recurrent}  # as a masked language model does
    assert {config.mixer for config in configs} == reads_both_ways
    assert {config.positions for config in configs} == set(TEXT_POSITIONS)
    assert {config.sparsity for config in configs} == {"none", "strided", "bigbird"}
    assert [config.window for config in configs if config.window is not None] == [8]
    base = configs[0]
    for config in configs:  # one thing at a time
        changed = {name for name in ModelConfig.model_fields if getattr(config, name) != getattr(base, name)}
        assert (
            changed <= {"mixer", "mixer_size"}
            or changed <= {"positions"}
            or changed <= {"window", "sparsity", "sparsity_size"}
        )


def test_sparse_patterns_look_at_about_as_much_as_each_other() -> None:
    sweep = ablation("mechanisms")
    for cell in (cell for cell in sweep.cells if cell.group == "B"):
        config = sweep.config(cell)
        share = keys_per_query(config.model, 0, config.data.max_len, causal=False) / config.data.max_len
        assert 0.15 < share < 0.45, cell.name


def test_a_decoder_is_not_offered_what_cannot_hide_the_future() -> None:
    base = ablation("extrapolation").config(ablation("extrapolation").rows[0])
    names = {cell.name for cell in mechanisms(base)}
    assert names == {name for name, entry in MIXERS.items() if entry.causal and name != "dot"}


def test_a_mechanism_of_ones_own_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MIXERS, "mine", MIXERS["additive"])
    assert "mine" in [cell.name for cell in ablation("mechanisms").cells]


# ---- beyond the length of training


def model_of(positions: str) -> Any:
    torch.manual_seed(0)
    return shaken(build(ModelConfig(**SIZES, architecture="decoder", positions=positions))).eval()


@pytest.mark.parametrize("positions", TEXT_POSITIONS)
def test_the_same_tokens_are_predicted_at_every_length(positions: str) -> None:
    model = model_of(positions)
    found, cannot = losses_by_length(model, TEXT, [24, 48, 96, 192])
    assert set(found) | set(cannot) == {24, 48, 96, 192}
    assert bool(cannot) == (positions == "learned"), cannot
    ids = torch.from_numpy(TEXT)
    for length, loss in found.items():
        total = 0.0
        for start in range(0, len(ids) - 1, length):
            logits = model(ids[None, start : start + length])[0]
            total += F.cross_entropy(logits, ids[start + 1 : start + length + 1], reduction="sum").item()
        assert loss == pytest.approx(total / (len(ids) - 1), rel=1e-5)


def test_a_text_shorter_than_a_piece_is_refused() -> None:
    with pytest.raises(ValueError, match="577 held-out tokens are too few for one piece of 1,025"):
        losses_by_length(model_of("rope"), TEXT, [128, 1024])


# ---- what the reports say


def results(out: Path, sweep: Sweep, metrics: Any) -> None:
    """As if every run had ended."""
    sweep.write(out)
    for place, cell in enumerate(sweep.rows):
        for seed in sweep.seeds:
            folder = run_folder(out, cell.name, seed)
            folder.mkdir(parents=True)
            found = {"fingerprint": fingerprint(sweep.config(cell, seed)), "status": "done", "parameters": 1000 + place}
            found |= {"metrics": metrics(cell.name, place + 0.01 * seed), "seconds": 1.0, "memory_mib": 10.0}
            (folder / "result.json").write_text(json.dumps(found))


def test_what_cannot_be_asked_is_said_and_not_left_out(tmp_path: Path) -> None:
    def metrics(name: str, x: float) -> dict[str, Any]:
        if name == "positions=learned":
            why = {f"loss_{n}x": "positions end at 128" for n in (2, 4, 8)}
            return {"loss_1x": x, "cannot": why}
        return {f"loss_{n}x": x + n / 10 for n in FACTORS}

    results(tmp_path, ablation("extrapolation", seeds=2), metrics)
    found = ablate(str(tmp_path), report_only=True)
    row = next(line for line in found.markdown().splitlines() if "positions=learned" in line)
    assert row.count("cannot") == 3
    assert "loss at 1,024" in found.markdown()
    assert "positions=learned: cannot go beyond its training length: positions end at 128" in found.conclusions()
    assert (tmp_path / "lengths.png").stat().st_size > 20_000
    assert "cannot" in (tmp_path / "table.md").read_text("utf-8")


def steps_of(sweep: Sweep, device: str) -> dict[str, dict[str, Any]]:
    return {
        cell.name: {
            "fingerprint": fingerprint(sweep.config(cell)),
            "ms": 10.0 + n,
            "mib": 100.0 * (n + 1),
            "device": device,
        }
        for n, cell in enumerate(sweep.rows)
    }


def test_steps_stand_in_the_table_and_are_not_measured_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = ablation("mechanisms", seeds=2)
    results(tmp_path, sweep, lambda name, x: {"valid_loss": 2 + x / 10, "perplexity": 9.0})
    steps = steps_of(sweep, "cpu")
    (tmp_path / extended_reports.STEPS_FILE).write_text(json.dumps(steps))
    # A report measures nothing, nor does a run that knows it all.
    monkeypatch.setattr(extended_reports, "LocalRunner", None)
    monkeypatch.setattr(extended_reports, "resolve_device", lambda *_: torch.device("cpu"))
    found = ablate(str(tmp_path), report_only=True)
    assert ablate(str(tmp_path)).to_dict() == found.to_dict()
    cells = {cell["name"]: cell for cell in found.to_dict()["cells"]}
    assert (cells["base"]["step_ms"], cells["base"]["step_mib"]) == (10.0, 100.0)
    assert cells["bigbird"]["step_ms"] == steps["bigbird"]["ms"]
    row = next(line for line in found.markdown().splitlines() if "| bigbird |" in line)
    assert row.endswith(f"| {steps['bigbird']['ms']:.1f} ms | {steps['bigbird']['mib']:,.0f} MiB |")
    assert (tmp_path / "tradeoff.png").stat().st_size > 20_000
    assert json.loads((tmp_path / extended_reports.STEPS_FILE).read_text()) == steps


class FakeRunner:
    """Stands for the processes that measure."""

    devices: ClassVar[list[str]] = []

    def submit(self, function: Any, question: tuple[str, str]) -> Future[dict[str, Any]]:
        FakeRunner.devices.append(question[1])
        answer: Future[dict[str, Any]] = Future()
        answer.set_result({"ms": 1.0, "mib": 2.0, "device": question[1]})
        return answer

    def __enter__(self) -> FakeRunner:
        FakeRunner.devices.clear()
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("before", ["another device", "cut", "a list", "half of it"])
def test_steps_of_another_device_or_a_damaged_file_are_measured_anew(
    before: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = ablation("mechanisms", seeds=1)
    sweep = replace(whole, cells=whole.cells[:1])
    results(tmp_path, sweep, lambda name, x: {"valid_loss": 2 + x / 10, "perplexity": 9.0})
    elsewhere = steps_of(sweep, "cuda")
    texts = {"another device": json.dumps(elsewhere), "cut": json.dumps(elsewhere)[:50], "a list": "[1]"}
    texts["half of it"] = json.dumps({"base": {"fingerprint": elsewhere["base"]["fingerprint"]}})
    (tmp_path / extended_reports.STEPS_FILE).write_text(texts[before])
    monkeypatch.setattr(extended_reports, "resolve_device", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(extended_reports, "LocalRunner", FakeRunner)
    shown = ablate(tmp_path, report_only=True).to_dict()  # what was measured there is shown, and nothing measured
    assert shown["step_device"] == ("cuda" if before == "another device" else None)
    document = ablate(tmp_path).to_dict()
    assert FakeRunner.devices == ["cpu", "cpu"]
    assert (document["step_device"], document["cells"][0]["step_ms"]) == ("cpu", 1.0)


def test_a_grid_that_happens_to_be_called_mechanisms_is_a_plain_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mechanisms.toml"
    file.write_text('recipe = "en-ko"\nseeds = 2\n[grid]\n"model.n_heads" = [1, 2]\n')
    monkeypatch.setattr(extended_reports, "LocalRunner", None)
    sweep = read_grid(file)
    results(tmp_path / "out", sweep, lambda name, x: {"valid_loss": 2 + x / 10})
    assert type(ablate(file, out=tmp_path / "out")) is SweepReport
    assert type(ablate(tmp_path / "out", report_only=True)) is SweepReport
    assert {name for name, named in SWEEPS.items() if named.ending} == {"mechanisms", "extrapolation"}
