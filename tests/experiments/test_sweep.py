"""Sweeps: run in parallel or one by one, killed and started again, diverged and failed, and what the table says."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forked_shell import Shell
from regard.cli import main
from regard.config import MIXERS
from regard.data.sources import open_source
from regard.errors import BadModelFile, Diverged, RegardError, UsageError
from regard.experiments import ablate, sweep_cell
from regard.experiments.ablations import SWEEPS
from regard.experiments.sweep_cell import check_convergence, run_facts
from regard.experiments.sweep_report import smaller_is_better, write_report
from regard.experiments.sweep_runner import run_sweep, unfinished_runs
from regard.experiments.sweep_spec import Cell, Sweep, data_hash, fingerprint, merge_words, read_result, run_folder
from regard.foundation import plugins
from regard.foundation.files import file_lock
from regard.recipes import run_config
from regard.training import train

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    *("data.epoch_examples=200", "data.valid_rows=8", "data.tokenizer=chars", "data.max_len=64", "model.max_len=64"),
    *("model.d_model=16", "model.n_layers=1", "model.n_heads=2", "model.d_ff=16", "model.dropout=0.1"),
    *("train.optimiser=adam", "train.lr=1e-3", "train.steps=6", "train.batch_tokens=256", "train.eval_every=0"),
    *("train.save_every=2", "train.samples=0", "train.precision=fp32", "train.compile=off", "train.log_every=1"),
)
HEADS = Cell("h=1", ("model.n_heads=1",), "A")
BROKEN = Cell("lr=1e30", ("train.lr=1e30",), "B")
LONG = Cell("long", ("train.steps=80", "train.save_every=5"))
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
    run_sweep(sweep_of(*CELLS), out, jobs=2)
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
    row = write_report(done)["lr=1e30"]
    assert (row.n_done, row.n_diverged, row.state) == (0, 2, "diverged")
    assert "diverged" in write_report(done).to_text()
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
    run_sweep(sweep_of(HEADS, BROKEN, seeds=(1,)), tmp_path / "serial", jobs=1)
    found = values(tmp_path / "serial")
    assert len(found) == 3
    assert found == {place: x for place, x in values(done).items() if place in found}


# ------------------------------------------------------------------------------------- started again


def test_what_is_done_is_not_done_again_also_in_another_place(done: Path, tmp_path: Path) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(done, moved)
    before, said = mtimes(moved), list[str]()
    run_sweep(sweep_of(*CELLS), moved, progress=said.append)
    assert mtimes(moved) == before
    assert said == ["8 of 8 runs are already done"]


@pytest.mark.slow
def test_more_seeds_and_cells_may_join_but_settings_may_not_change(done: Path, tmp_path: Path) -> None:
    out = tmp_path / "more"
    shutil.copytree(done, out)
    with pytest.raises(UsageError, match=r"train.steps=6, not 7"):
        run_sweep(sweep_of(HEADS, words=("train.steps=7",)), out)
    before = mtimes(out)
    found = run_sweep(sweep_of(HEADS, seeds=(0, 1, 2)), out, jobs=1)
    assert found["h=1"].n_done == 3
    assert {file: mtimes(out)[file] for file in before} == before


def test_a_directory_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("x")
    with pytest.raises(FileExistsError, match="is not empty and holds no sweep"):
        run_sweep(sweep_of(), tmp_path)


@pytest.mark.slow
def test_what_fails_says_why_and_is_tried_again_and_time_can_be_limited(tmp_path: Path) -> None:
    out, said = tmp_path / "out", list[str]()
    lost = Cell("lost", ("data.source=nowhere.tsv", "data.epoch_examples=100000"))
    sweep = sweep_of(lost, seeds=(0,), words=("train.steps=100000",))
    assert run_sweep(sweep, out, minutes=0.0, progress=said.append).base.n_missing == 1
    assert "time is up with 2 of 2" in said[-1]
    found = run_sweep(sweep, out, jobs=1, max_seconds=5)
    assert not found.finished
    assert (found.base.n_failed, found["lost"].n_failed) == (1, 1)
    assert "max_seconds=5" in found.to_text()
    assert "nowhere.tsv" in (read_result(out, "lost", 0) or {})["message"]
    assert [job.cell for job in unfinished_runs(sweep, out, keep=False)[0]] == ["base", "lost"]


# ------------------------------------------------------------------------------------- killed


def start(bash: Shell, out: Path) -> subprocess.Popen[bytes]:
    """The sweep in a process that can be killed."""
    script = f"""
import sys
from regard.experiments.sweep_runner import run_sweep
from regard.experiments.sweep_spec import Sweep
from regard.training.signals import Interrupted
try:
    run_sweep(Sweep.read({str(out)!r}), {str(out)!r}, jobs=1)
except Interrupted as stop:
    sys.exit(stop.exit_code)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    return subprocess.Popen([bash.python, "-c", script], env=environment, start_new_session=True)


def wait_for(what: Callable[[], bool], seconds: float = 300) -> None:
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.02)


def steps_saved(out: Path) -> list[str]:
    return sorted(path.name for path in (run_folder(out, "long", 0) / "run" / "checkpoints").glob("step-*"))


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
def test_killed_and_interrupted_it_loses_nothing_that_is_done_and_comes_to_the_same(
    bash: Shell, done: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    sweep = sweep_of(LONG, seeds=(0,))
    sweep.write(out)
    process = start(bash, out)
    wait_for(lambda: read_result(out, "base", 0) is not None and len(steps_saved(out)) > 0)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = mtimes(out)
    assert len(before) == 1
    wait_for(lambda: not running_in(out))  # its run went with it

    at = steps_saved(out)
    process = start(bash, out)
    wait_for(lambda: steps_saved(out) != at)  # it goes on from there
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(300) == 130
    assert (run_folder(out, "long", 0) / "spent.json").exists()

    found = run_sweep(sweep, out)
    assert found.finished
    assert {file: mtimes(out)[file] for file in before} == before
    assert values(out)["cells/long/seed-0"] == values(done)["cells/long/seed-0"]


DEADLY = "import os\n\ndef measure(run):\n    return os.kill(os.getpid(), 9) if 'h=1' in str(run) else {'extra': 1.0}\n"


@pytest.mark.slow
def test_a_run_that_is_killed_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deadly.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(str(tmp_path))
    sweep = replace(sweep_of(HEADS, seeds=(0,)), measures=("deadly:measure",), metrics=("valid_loss", "extra"))
    found = run_sweep(sweep, tmp_path / "out", jobs=2)
    assert (found.base.n_done, found["h=1"].n_failed) == (1, 1)
    message = (read_result(tmp_path / "out", "h=1", 0) or {})["message"]
    assert re.fullmatch(r"its process ended with exit status -9; see .*/h=1/seed-0/log\.txt", message)


# ------------------------------------------------------------------------------------- words and tables


def test_later_words_win_and_a_model_starts_afresh() -> None:
    assert merge_words(["train.steps=1", "data=a"], ["train.steps=2"], ["data.source=b"]) == [
        "train.steps=2",
        "data.source=b",
    ]
    assert merge_words(["model=gpt2", "model.d_model=8"], ["model=bert"]) == ["model=bert"]


def planted(out: Path, losses: dict[str, list[float | None]], cells: tuple[Cell, ...]) -> Sweep:
    """Results as if they had been run; None has diverged."""
    sweep = Sweep("planted", "en-ko", TINY, cells, tuple(range(len(losses["base"]))), ("valid_loss",))
    sweep.write(out)
    for name, found in losses.items():
        for seed, loss in enumerate(found):
            status = {"status": "done", "metrics": {"valid_loss": loss}}
            if loss is None:
                status = {"status": "diverged", "metrics": {}, "message": "step 3: loss nan"}
            folder = run_folder(out, name, seed)
            folder.mkdir(parents=True)
            (folder / "result.json").write_text(json.dumps({**status, "parameters": 12_345_678, "seconds": 41.0}))
    return sweep


def test_the_table_marks_what_differs_and_says_what_does_not(tmp_path: Path) -> None:
    cells = (HEADS, Cell("d_ff=32", ("model.d_ff=32",), "C"), Cell("no norm", ("model.norm=none",), "F"))
    losses = {"base": [2.0, 2.01, 1.99], "h=1": [2.5, 2.51, 2.49], "d_ff=32": [2.0, 2.02, 1.97]}
    planted(tmp_path / "out", {**losses, "no norm": [2.6, None, 2.4]}, cells)
    found = write_report(tmp_path / "out")
    assert found["h=1"].differs("valid_loss")
    assert not found["d_ff=32"].differs("valid_loss")
    assert "valid_loss" not in found["no norm"].p
    assert found["no norm"].state == "1 of 3 diverged"
    said = "\n".join(found.conclusions())
    assert "worse: h=1" in said
    assert "not significant: d_ff=32" in said
    assert "step 3: loss nan" in said
    lines = found.to_text().splitlines()
    assert lines[0].split()[:4] == ["N", "d_model", "d_ff", "h"]
    assert lines[2].split()[1:7] == ["1", "16", "16", "2", "8", "rms"]
    (row,) = (line for line in lines if line.startswith("(A)"))
    assert row.split() == ["(A)", "h=1", "1", "16", "2.500", "±", "0.006", "*", "12.3", "M", "41", "s"]
    document = found.to_dict()
    assert document["cells"][1]["metrics"]["valid_loss"]["p"] < 0.05
    assert json.dumps(document, allow_nan=False)


def test_numbers_without_a_square_are_no_results(tmp_path: Path) -> None:
    planted(tmp_path / "out", {"base": [2.0, 2.01, 1e308], "h=1": [2.5, -1e308, 2.49]}, (HEADS,))
    found = write_report(tmp_path / "out")
    assert found["h=1"].estimates["valid_loss"].values == (2.5, 2.49)


def test_one_seed_is_not_tested(tmp_path: Path) -> None:
    planted(tmp_path / "out", {"base": [2.0], "h=1": [9.0]}, (HEADS,))
    found = write_report(tmp_path / "out")
    assert not found["h=1"].p
    assert "one seed" in found.conclusions()[0]


@pytest.mark.parametrize("name", ["../up", "a/b", "", "."])
def test_a_cell_cannot_be_called_like_a_path(name: str) -> None:
    with pytest.raises(UsageError):
        Cell(name)


def test_two_cells_of_one_name_are_refused() -> None:
    with pytest.raises(UsageError, match="two cells"):
        sweep_of(HEADS, HEADS)


# ------------------------------------------------------------------------------------- a directory of somebody else's


OWN = "from regard.attention.mechanisms import Dot\n\nopen('ran', 'w').close()\n\nclass Mine(Dot):\n    pass\n"


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory with code in it that leaves a file when it is imported."""
    (tmp_path / "strange.py").write_text(OWN + "\ndef measure(run):\n    return {}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(plugins.MIXERS_VARIABLE, "")
    yield tmp_path
    MIXERS.pop("strange:Mine", None)
    sys.modules.pop("strange", None)


def written_down(out: Path, **fields: Any) -> None:
    sweep = replace(sweep_of(seeds=(0,)), **fields)
    out.mkdir()
    (out / "sweep.json").write_text(json.dumps(sweep.to_dict()))


def test_without_a_finished_run_nothing_is_drawn_or_tested(tmp_path: Path) -> None:
    written_down(tmp_path / "out")
    report = write_report(tmp_path / "out")
    assert report.conclusions()[0] == "no run is finished"
    assert report.to_text().endswith(f"{tmp_path / 'out'}/table.md")
    assert not (tmp_path / "out/results.png").exists()


def test_a_missing_test_file_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "a.en").touch()
    sweep = replace(sweep_of(seeds=(0,)), tests={"test": f"{tmp_path / 'a.en'},{tmp_path / 'a.de'}"})
    with pytest.raises(UsageError, match=r"^the examples test=.*: there is no file .*a\.de$"):
        run_sweep(sweep, tmp_path / "out", jobs=1)
    assert not (tmp_path / "out/cells").exists()


@pytest.mark.parametrize(
    "fields",
    [{"base_words": (*TINY, "model.mixer=strange:Mine")}, {"cells": (Cell("mine", ("model.mixer=strange:Mine",)),)}],
)
def test_a_directory_never_has_anything_imported(strangers: Path, fields: dict[str, Any]) -> None:
    """A sweep that names a mechanism goes on where it is known; elsewhere it is refused in one sentence."""
    out = strangers / "out"
    written_down(out, **fields)
    tries: list[Callable[[], object]] = [
        lambda: ablate(out, jobs=1),
        lambda: ablate(str(out), report_only=True),
        lambda: ablate(out, ["train.steps=6"], report_only=True),
        lambda: ablate(sweep_of(Cell("mine", ("model.n_heads=1",))), out=out),
        lambda: write_report(out),
        lambda: run_sweep(Sweep.read(out), out),
    ]
    for attempt in tries:
        with pytest.raises(BadModelFile, match=r"mixer='strange:Mine' is not registered.*REGARD_MIXERS=strange:Mine"):
            attempt()
    assert main(["ablate", str(out)]) == BadModelFile.exit_code
    assert not (strangers / "ran").exists()
    assert "strange" not in sys.modules

    os.environ[plugins.MIXERS_VARIABLE] = "strange:Mine"
    stored = Sweep.read(out)
    assert stored.config(stored.rows[-1]).model.mixer == "strange:Mine"
    assert "mine" in {row.cell.name for row in write_report(out).rows} or not stored.cells


def test_a_model_class_that_only_a_directory_names_is_not_imported(strangers: Path) -> None:
    out = strangers / "out"
    written_down(out, base_words=(*TINY, "model.model_class=strange:Mine"))
    with pytest.raises(BadModelFile, match=r"model_class='strange:Mine' is not registered.*REGARD_MODELS=strange:Mine"):
        ablate(out, report_only=True)
    assert not (strangers / "ran").exists()


def test_what_was_typed_is_imported_and_the_directory_then_goes_on(strangers: Path) -> None:
    out = strangers / "out"
    typed = sweep_of(Cell("mine", ("model.mixer=strange:Mine",)), seeds=(0,))
    assert typed.config(typed.cells[0]).model.mixer == "strange:Mine"
    assert (strangers / "ran").exists()
    typed.write(out)
    assert ablate(out, report_only=True)["mine"].n_missing == 1


def test_a_measure_that_only_a_directory_names_is_not_called(strangers: Path) -> None:
    out = strangers / "out"
    written_down(out, measures=("strange:measure",))
    with pytest.raises(BadModelFile, match=r"names the measure 'strange:measure'.*never run"):
        ablate(out, jobs=1)
    assert ablate(out, report_only=True).base.n_missing == 1
    assert not (strangers / "ran").exists()
    own = replace(sweep_of(seeds=(0,)), measures=("strange:measure",))
    assert run_sweep(own, out, minutes=0.0).base.n_missing == 1  # given by hand it is not refused
    ours = {measure for named in SWEEPS.values() for measure in named.measures}
    replace(own, measures=tuple(ours), stored=True).check_measures(out)
    assert ours


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "name: Field required"),
        ('{"name": "x", "reci', "not valid JSON"),
        ("[]", "where an object belongs"),
        ('{"name": "x", "recipe": "en-ko", "seeds": ["../../up"]}', "seeds.0: Input should be a valid integer"),
        ('{"name": "x", "recipe": "en-ko", "seeds": [true]}', "seeds.0: Input should be a valid integer"),
        ('{"name": "x", "recipe": "en-ko", "cells": [{"words": []}]}', "cells.0.name"),
        ('{"name": "x", "recipe": "en-ko", "cells": [{"name": "../up"}]}', "cell name '../up'"),
        ('{"name": "x", "recipe": "en-ko", "measures": "a:b"}', "measures: Input should be a valid array"),
    ],
)
def test_a_damaged_sweep_is_refused_in_one_sentence(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sweep.json").write_text(text)
    for more in ([], ["--report-only"]):
        assert main(["ablate", str(tmp_path), *more]) == 3
        complaint = capsys.readouterr().err
        assert said in complaint
        assert complaint.count("\n") == 1


# ------------------------------------------------------------------------------------- what is kept, heard and stored


def test_weights_that_were_kept_stay(tmp_path: Path) -> None:
    sweep = sweep_of(HEADS, seeds=(0,))
    sweep.write(tmp_path)
    for cell, keep in (("base", True), ("h=1", False)):
        row = next(x for x in sweep.rows if x.name == cell)
        folder = run_folder(tmp_path, cell, 0)
        (folder / "run" / "checkpoints").mkdir(parents=True)
        (folder / "run" / "checkpoints" / "weights").write_text("x")
        found = {"fingerprint": fingerprint(sweep.config(row, 0)), "status": "done", "metrics": {}, "keep": keep}
        (folder / "result.json").write_text(json.dumps(found))
    assert unfinished_runs(sweep, tmp_path, keep=False) == ([], 2)
    assert (run_folder(tmp_path, "base", 0) / "run" / "checkpoints" / "weights").exists()
    assert not (run_folder(tmp_path, "h=1", 0) / "run" / "checkpoints").exists()


def test_results_on_one_file_are_not_reported_as_those_on_another(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.tsv", "moved.tsv", "second.tsv")]
    for file, word in zip(files, ("one", "one", "two"), strict=True):
        file.write_text("".join(f"{word} {n}\t{n} {word}\n" for n in range(60)))
    first, moved, second = (sweep_of(HEADS, seeds=(0,), words=(f"data.source={file}",)) for file in files)
    out = tmp_path / "out"
    first.write(out)
    for row in first.rows:
        config = first.config(row, 0)
        found = {"fingerprint": fingerprint(config), "status": "done", "metrics": {"valid_loss": 1.0, "bleu": 0.0}}
        folder = run_folder(out, row.name, 0)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps(found | {"data_sha256": open_source(config.data).sha256}))
    for other in (second, first.with_words([f"data.valid={files[2]}"])):
        with pytest.raises(UsageError, match="holds runs of 'base' on other data"):
            run_sweep(other, out)
    assert Sweep.read(out) == first
    assert run_sweep(moved, out).finished


@pytest.mark.parametrize("same", [True, False])
def test_an_interrupted_run_goes_on_with_the_same_data_only(same: bool, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first.tsv", "second.tsv")]
    for file, word in zip(files, ("one", "one" if same else "two"), strict=True):
        file.write_text("".join(f"{word} {n}\t{n} {word}\n" for n in range(60)))
    words = ["train.steps=2", "train.save_every=1", "train.samples=0", "model.d_model=16", "model.n_heads=2"]
    config, other = (run_config("translate", [f"data.source={file}", *words]) for file in files)
    train(config.with_(train=config.train.with_(out=str(tmp_path / "run"), stop_at=1)), style="quiet")
    result = sweep_cell._train_or_resume(other, tmp_path / "run", tmp_path / "shared", "quiet")
    began = json.loads((tmp_path / "run" / "provenance.json").read_bytes())["data"]
    assert began["sha256"] == data_hash(other)
    assert result.finished


def test_fewer_seeds_do_not_shrink_what_is_stored(tmp_path: Path) -> None:
    sweep_of(HEADS, seeds=(0, 1, 2)).write(tmp_path)
    sweep_of(HEADS, seeds=(0, 5)).write(tmp_path)
    assert Sweep.read(tmp_path).seeds == (0, 1, 2, 5)


def test_nobody_writes_into_a_sweep_that_is_running(tmp_path: Path) -> None:
    sweep_of(seeds=(0,)).write(tmp_path)
    before = (tmp_path / "sweep.json").read_bytes()
    with file_lock(tmp_path), pytest.raises(RegardError, match="is in use by another sweep"):
        run_sweep(sweep_of(seeds=(0, 1)), tmp_path)
    assert (tmp_path / "sweep.json").read_bytes() == before


@pytest.mark.parametrize("names", [("no norm", "no_norm"), ("N=1", "n=1"), ("Base",)])
def test_cells_that_would_share_a_directory_are_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(UsageError, match="would share a directory"):
        sweep_of(*(Cell(name) for name in names))


# ------------------------------------------------------------------------------------- what a run says of itself


def test_no_loss_is_a_failure_and_an_infinite_one_has_diverged() -> None:
    with pytest.raises(RegardError, match="no held-out loss") as failure:
        check_convergence({"metrics": {}})
    assert not isinstance(failure.value, Diverged)
    with pytest.raises(Diverged):
        check_convergence({"metrics": {"valid_loss": float("inf")}})


@pytest.mark.parametrize(
    ("field", "value", "same"),
    [("max_len", 32, False), ("mask_rate", 0.3, False), ("packing", "blocks", False), ("source", "moved.tsv", True)],
)
def test_other_ways_to_read_the_data_are_other_batches(
    done: Path, field: str, value: Any, same: bool, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder(done, "base", 0) / "run", run)
    before = run_facts(run)["order"]
    config = json.loads((run / "run.json").read_bytes())
    config["data"][field] = value
    (run / "manifest.json").unlink(missing_ok=True)
    (run / "run.json").write_text(json.dumps(config))
    assert (run_facts(run)["order"] == before) == same


def test_runs_that_were_not_asked_are_counted(tmp_path: Path) -> None:
    sweep = planted(tmp_path / "out", {"base": [2.0, 2.1], "h=1": [2.5, 2.4]}, (HEADS,))
    for seed, tests in enumerate(({"test": "a.tsv"}, {})):
        file = run_folder(tmp_path / "out", "base", seed) / "result.json"
        found = json.loads(file.read_text()) | {"tests": tests, "measures": []}
        file.write_text(json.dumps(found))
    measures = ("regard.experiments.sweep_cell:measure_token_by_token",)
    asked = replace(sweep, tests={"test": "b.tsv"}, measures=measures, metrics=("valid_los", "test_bleu"))
    said = write_report(tmp_path / "out", asked).conclusions()
    assert "1 of 4 finished runs was evaluated on test=a.tsv, not b.tsv" in said
    assert "3 of 4 finished runs were not evaluated on test: it was added after they were done" in said
    assert f"2 of 4 finished runs were not measured by {measures[0]}: it was added after they were done" in said
    assert "no finished run has the metric valid_los; did you mean valid_loss?" in said
    assert "no finished run has the metric test_bleu" in said
    assert not [line for line in write_report(tmp_path / "out", sweep).conclusions() if "finished run" in line]


def test_a_failed_run_ends_the_command_with_1_after_its_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(tmp_path / "out", {"base": [2.0, 2.1], "h=1": [2.5, None]}, (HEADS,))
    assert main(["ablate", str(tmp_path / "out"), "--report-only"]) == 0  # to diverge is a result
    file = run_folder(tmp_path / "out", "h=1", 0) / "result.json"
    file.write_text(json.dumps({"status": "failed", "message": "no such file", "metrics": {}}))
    capsys.readouterr()
    assert main(["ablate", str(tmp_path / "out"), "--report-only"]) == 1
    assert "no such file" in capsys.readouterr().out


@pytest.mark.parametrize("kind", [str, Path])
def test_a_report_is_of_what_is_stored_however_it_is_named(kind: type, tmp_path: Path) -> None:
    out = tmp_path / "out"
    planted(out, {"base": [2.0, 2.1], "h=1": [2.5, 2.4]}, (HEADS,))
    what = kind(out)
    assert ablate(what, report_only=True).sweep.seeds == (0, 1)
    assert ablate(what, ["train.steps=6"], seeds=1, report_only=True).sweep.seeds == (0,)
    assert ablate(what, tests={"test": "a.tsv"}, report_only=True).sweep.metrics == ("valid_loss", "test_bleu")
    with pytest.raises(UsageError, match=r"train.steps=6, not 7"):
        ablate(what, ["train.steps=7"], report_only=True)
    assert Sweep.read(out).seeds == (0, 1)
    assert not Sweep.read(out).tests


@pytest.mark.parametrize("name", ["valid_loss", "loss_8x", "test_perplexity", "error", "cer", "wer", "seconds"])
def test_smaller_is_better_of_losses_errors_and_times(name: str) -> None:
    assert smaller_is_better(name)


@pytest.mark.parametrize("name", ["bleu", "accuracy", "f1", "test_chrf", "exact", "cider", "winner"])
def test_larger_is_better_of_the_rest(name: str) -> None:
    assert not smaller_is_better(name)
