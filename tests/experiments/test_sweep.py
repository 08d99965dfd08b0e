"""Sweeps: run in parallel or one by one, killed and started again, diverged and failed, and what the table says."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regard.config.words import UsageError
from regard.experiments.sweep import Cell, Sweep, folder_of, layered, read_result, report, run
from regard.experiments.sweep_run import _waiting

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("data.epoch_examples=200", "data.valid_rows=8", "data.tokenizer=chars", "data.max_len=64", "model.max_len=64"),
    *("model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=16", "model.dropout=0.1"),
    *("train.optimiser=adam", "train.lr=1e-3", "train.steps=6", "train.batch_tokens=256", "train.eval_every=0"),
    *("train.save_every=2", "train.samples=0", "train.precision=fp32", "train.compile=off", "train.log_every=1"),
)
HEADS = Cell("h=1", ("model.n_heads=1",), "A")
BROKEN = Cell("lr=1e30", ("train.lr=1e30",), "B")
LONG = Cell("long", ("train.steps=200", "train.save_every=5"))
CELLS = (HEADS, BROKEN, LONG)


def sweep_of(*cells: Cell, seeds: tuple[int, ...] = (0, 1), words: tuple[str, ...] = ()) -> Sweep:
    base = Sweep("tiny", "en-ko", TINY, cells, seeds, ("valid_loss", "bleu"))
    return base.with_words(words)


def results(out: Path) -> dict[str, dict[str, Any]]:
    return {str(file.parent.relative_to(out)): json.loads(file.read_bytes()) for file in out.rglob("result.json")}


def values(out: Path) -> dict[str, Any]:
    """What a run came to, without what depends on how busy the machine was."""
    kept = ("status", "metrics", "curve", "train_loss", "order", "parameters", "reached")
    return {place: {name: x.get(name) for name in kept} for place, x in results(out).items()}


def mtimes(out: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of four cells and two seeds, two runs at once; one cell cannot but diverge."""
    out = tmp_path_factory.mktemp("sweep") / "out"
    run(sweep_of(*CELLS), out, jobs=2)
    return out


# ------------------------------------------------------------------------------------- what a run of it leaves


@pytest.mark.slow
def test_every_cell_has_a_result_for_every_seed(done: Path) -> None:
    found = results(done)
    assert set(found) == {f"cells/{cell}/seed-{seed}" for cell in ("base", "h=1", "lr=1e30", "long") for seed in (0, 1)}
    first = found["cells/base/seed-0"]
    assert first["status"] == "done"
    assert first["reached"] == 6
    assert first["parameters"] > 1000
    assert first["seconds"] > 0
    assert first["memory_mib"] > 10
    assert first["metrics"]["valid_loss"] > 0
    assert "bleu" in first["metrics"]


def test_a_cell_that_diverges_is_reported_and_not_dropped(done: Path) -> None:
    broken = results(done)["cells/lr=1e30/seed-0"]
    assert broken["status"] == "diverged"
    assert "not finite" in broken["message"]
    row = report(done)["lr=1e30"]
    assert (row.n_done, row.n_diverged, row.state) == (0, 2, "diverged")
    assert "diverged" in report(done).table()
    assert "diverged" in (done / "table.md").read_text("utf-8")


def test_cells_see_the_same_batches_in_the_same_order_and_seeds_do_not(done: Path) -> None:
    found = results(done)
    assert found["cells/base/seed-0"]["order"] == found["cells/h=1/seed-0"]["order"]
    assert found["cells/base/seed-0"]["order"] != found["cells/base/seed-1"]["order"]
    # The first loss is that of the first batch: other heads, the same sentences.
    first = [found[f"cells/{cell}/seed-0"]["curve"][0][1] for cell in ("base", "long", "h=1")]
    assert first[0] == first[1] != first[2]


def test_tables_and_pictures_are_written_and_weights_are_not_kept(done: Path) -> None:
    assert {"table.md", "table.csv", "runs.csv", "results.png", "curves.png"} <= {file.name for file in done.iterdir()}
    assert not list(done.rglob("*.safetensors"))
    assert (done / "table.csv").read_text("utf-8").startswith("cell,group,")
    assert len((done / "runs.csv").read_text("utf-8").splitlines()) == 1 + 8


@pytest.mark.slow
def test_one_by_one_comes_to_the_same(done: Path, tmp_path: Path) -> None:
    run(sweep_of(HEADS, BROKEN), tmp_path / "serial", jobs=1)
    found = values(tmp_path / "serial")
    assert len(found) == 6
    assert found == {place: x for place, x in values(done).items() if place in found}


# ------------------------------------------------------------------------------------- started again


def test_what_is_done_is_not_done_again_also_in_another_place(done: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(done, moved)
    before, said = mtimes(moved), list[str]()
    run(sweep_of(*CELLS), moved, progress=said.append)
    assert mtimes(moved) == before
    assert said == ["8 of 8 runs are done already"]


@pytest.mark.slow
def test_more_seeds_and_cells_may_join_but_settings_may_not_change(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "more"
    shutil.copytree(done, out)
    with pytest.raises(UsageError, match=r"train.steps=6, not 7"):
        run(sweep_of(HEADS, words=("train.steps=7",)), out)
    before = mtimes(out)
    found = run(sweep_of(HEADS, seeds=(0, 1, 2)), out, jobs=1)
    assert found["h=1"].n_done == 3
    assert {file: mtimes(out)[file] for file in before} == before


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError, match="something else"):
        run(sweep_of(), tmp_path)


@pytest.mark.slow
def test_what_fails_says_why_and_is_tried_again_and_time_can_be_limited(tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    lost = Cell("lost", ("data.source=nowhere.tsv", "data.epoch_examples=100000"))
    sweep = sweep_of(lost, seeds=(0,), words=("train.steps=100000",))
    assert run(sweep, out, minutes=0.0, progress=said.append).base.n_missing == 1
    assert "time is up with 2 of 2" in said[-1]
    found = run(sweep, out, jobs=1, max_seconds=12)
    assert not found.finished
    assert (found.base.n_failed, found["lost"].n_failed) == (1, 1)
    assert "max_seconds=12" in found.table()
    assert "nowhere.tsv" in (read_result(out, "lost", 0) or {})["message"]
    assert [job.cell.name for job in _waiting(sweep, out, keep=False)[0]] == ["base", "lost"]


# ------------------------------------------------------------------------------------- killed


def start(out: Path) -> subprocess.Popen[bytes]:
    """The sweep in a process that can be killed."""
    script = f"""
import sys
from regard.experiments.sweep import Sweep, run
from regard.training.interrupting import Interrupted
try:
    run(Sweep.read({str(out)!r}), {str(out)!r}, jobs=1)
except Interrupted as stop:
    sys.exit(stop.exit_code)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([sys.executable, "-c", script], env=environment, start_new_session=True)


def wait_for(what: Callable[[], bool], seconds: float = 120) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def steps_saved(out: Path) -> list[str]:
    return sorted(path.name for path in (folder_of(out, "long", 0) / "run" / "checkpoints").glob("step-*"))


def running_in(out: Path) -> list[int]:
    """Processes whose log lies in the sweep's directory."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "fd" / "2").startswith(str(out)):
                found.append(int(process.name))
        except OSError:
            continue
    return found


@pytest.mark.slow
def test_killed_and_interrupted_it_loses_nothing_that_is_done_and_comes_to_the_same(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sweep = sweep_of(LONG, seeds=(0,))
    sweep.write(out)
    process = start(out)
    wait_for(lambda: read_result(out, "base", 0) is not None and len(steps_saved(out)) > 0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = mtimes(out)
    assert len(before) == 1
    wait_for(lambda: not running_in(out), 20)  # its run went with it

    at = steps_saved(out)
    process = start(out)
    wait_for(lambda: steps_saved(out) != at)  # it goes on from there
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    assert (folder_of(out, "long", 0) / "spent.json").exists()

    found = run(sweep, out)
    assert found.finished
    assert {file: mtimes(out)[file] for file in before} == before
    assert values(out)["cells/long/seed-0"] == values(done)["cells/long/seed-0"]


# ------------------------------------------------------------------------------------- words and tables


def test_later_words_win_and_a_model_starts_afresh() -> None:
    assert layered(["train.steps=1", "data=a"], ["train.steps=2"], ["data.source=b"]) == [
        "train.steps=2",
        "data.source=b",
    ]
    assert layered(["model=gpt2", "model.d_model=8"], ["model=bert"]) == ["model=bert"]


def planted(out: Path, losses: dict[str, list[float | None]], cells: tuple[Cell, ...]) -> Sweep:
    """Results as if they had been run; None has diverged."""
    sweep = Sweep("planted", "en-ko", TINY, cells, tuple(range(len(losses["base"]))), ("valid_loss",))
    sweep.write(out)
    for name, found in losses.items():
        for seed, loss in enumerate(found):
            status = {"status": "done", "metrics": {"valid_loss": loss}}
            if loss is None:
                status = {"status": "diverged", "metrics": {}, "message": "step 3: loss nan"}
            folder = folder_of(out, name, seed)
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(json.dumps({**status, "parameters": 12_345_678, "seconds": 41.0}))
    return sweep


def test_the_table_marks_what_differs_and_says_what_does_not(tmp_path: Path) -> None:
    cells = (HEADS, Cell("d_ff=32", ("model.d_ff=32",), "C"), Cell("no norm", ("model.norm=none",), "F"))
    losses = {"base": [2.0, 2.01, 1.99], "h=1": [2.5, 2.51, 2.49], "d_ff=32": [2.0, 2.02, 1.97]}
    planted(tmp_path / "out", {**losses, "no norm": [2.6, None, 2.4]}, cells)
    found = report(tmp_path / "out")
    assert found["h=1"].differs("valid_loss")
    assert not found["d_ff=32"].differs("valid_loss")
    assert "valid_loss" not in found["no norm"].p
    assert found["no norm"].state == "1 of 3 diverged"
    said = "\n".join(found.said())
    assert "worse: h=1" in said
    assert "not significant: d_ff=32" in said
    assert "step 3: loss nan" in said
    lines = found.table().splitlines()
    assert lines[0].split()[:4] == ["N", "d_model", "d_ff", "h"]
    assert lines[2].split()[1:7] == ["1", "16", "16", "2", "8", "rms"]
    (row,) = (line for line in lines if line.startswith("(A)"))
    assert row.split() == ["(A)", "h=1", "1", "16", "2.500", "±", "0.006", "*", "12.3", "M", "41", "s"]
    document = found.document()
    assert document["cells"][1]["metrics"]["valid_loss"]["p"] < 0.05
    assert json.dumps(document, allow_nan=False)


def test_one_seed_is_not_tested(tmp_path: Path) -> None:
    planted(tmp_path / "out", {"base": [2.0], "h=1": [9.0]}, (HEADS,))
    found = report(tmp_path / "out")
    assert not found["h=1"].p
    assert "one seed" in found.said()[0]


@pytest.mark.parametrize("name", ["../up", "a/b", "", "."])
def test_a_cell_cannot_be_called_like_a_path(name: str) -> None:
    with pytest.raises(UsageError):
        Cell(name)


def test_two_cells_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two cells"):
        sweep_of(HEADS, HEADS)
