"""Run directories that are damaged, unfinished, or written to while they are read."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cli import main
from regard.config import RunConfig
from regard.errors import BadModelFile, Diverged
from regard.hub import Manifest
from regard.recipes import run_config
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer
from regard.training import run_directory
from regard.training.run_directory import RunDirectory
from training.runs import resume, train, words_of, write_data


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stopped after three steps, with two checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    data = write_data("classify", folder)
    words = ("train.steps=6", "train.save_every=2", "train.eval_every=2", "train.stop_at=3")
    train("classify", folder / "run", data, *words)
    return folder / "run"


def damaged(run: Path, folder: Path, name: str, change: Callable[[Any], Any]) -> Path:
    """A copy of a run with one file changed, by somebody who wrote the manifests again."""
    shutil.copytree(run, copy := folder / "run")
    file = copy / name
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    (copy / "manifest.json").unlink(missing_ok=True)
    if file.parent != copy:
        (file.parent / "manifest.json").unlink()
        Manifest.of(file.parent).write(file.parent)
    return copy


STATE = "checkpoints/step-000003/state.json"
IMPOSSIBLE: list[dict[str, Any]] = [  # for where a run stands
    {"micro": True},
    {"micro": 1, "losses": []},
    {"seconds": "NaN"},
    {"best": "é"},
    {"best_step": {}},
    {"n_tokens": -1},
]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("labels.json", lambda _: {}),
        ("labels.json", lambda _: {"labels": 5}),
        ("labels.json", lambda _: {"labels": [1, None]}),
        (STATE, lambda _: {}),
        (STATE, lambda x: {**x, "at": 5}),
        (STATE, lambda x: {**x, "at": {"step": 3}}),
        (STATE, lambda x: {**x, "at": None}),
        ("run.json", lambda x: {**x, "model": {**x["model"], "n_layers": 10**20}}),
        ("run.json", lambda x: {**x, "model": 5}),
        ("run.json", lambda x: {**x, "model": {**x["model"], "d_model": 512}}),
        ("run.json", lambda x: {**x, "model": {**x["model"], "init_std": -0.02}}),
        ("run.json", lambda x: {**x, "model": {**x["model"], "init_std": "nan"}}),
        ("labels.json", lambda x: {"labels": x["labels"][:1]}),
    ],
)
def test_a_run_that_cannot_be_loaded(run: Path, tmp_path: Path, name: str, change: Callable[[Any], Any]) -> None:
    with pytest.raises(BadModelFile, match=Path(name).name):
        regard.load(damaged(run, tmp_path, name, change))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (STATE, lambda x: {**x, "at": {**x["at"], "more": 1}}),
        (STATE, lambda x: {**x, "at": {**x["at"], "step": "3"}}),
        *((STATE, lambda x, i=i: {**x, "at": {**x["at"], **IMPOSSIBLE[i]}}) for i in range(len(IMPOSSIBLE))),
        (STATE, lambda x: {**x, "reporter": 7}),
        (STATE, lambda x: {**x, "reporter": {"tokens": [1]}}),
        (STATE, lambda x: {key: x[key] for key in x if key != "scaler"}),
        ("choice.json", lambda _: {}),
        ("choice.json", lambda x: {**x, "precision": "fp3"}),
        ("choice.json", lambda x: {**x, "compile": "yes"}),
        ("provenance.json", lambda x: {key: x[key] for key in x if key != "data"}),
        ("labels.json", lambda _: {"labels": None}),
    ],
)
def test_a_run_that_cannot_be_continued(run: Path, tmp_path: Path, name: str, change: Callable[[Any], Any]) -> None:
    with pytest.raises(BadModelFile, match=Path(name).name):
        resume(damaged(run, tmp_path, name, change))


def test_a_run_without_a_whole_checkpoint(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, copy := tmp_path / "run")
    for file in copy.glob("checkpoints/*/manifest.json"):
        file.unlink()
    with pytest.raises(BadModelFile, match="has no undamaged checkpoint"):
        regard.load(copy)


# ---- killed before it was a run


@pytest.fixture(scope="module")
def new_run(run: Path) -> tuple[RunConfig, Processor]:
    config = RunDirectory.open(run).config
    return config, Processor(source=train_tokenizer(["one two"], "words", None), labels=("even", "odd"))


@pytest.mark.parametrize("point", range(5))
def test_a_directory_that_was_never_finished_is_begun_again(
    new_run: tuple[RunConfig, Processor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: int
) -> None:
    """A kill at each write; what is half written then stays behind under a hidden name."""
    write, written = run_directory.write_atomic, 0

    def write_until_killed(path: Path, content: bytes) -> None:
        nonlocal written
        if written == point:
            path.with_name(f".{path.name}.0a1b2c3d").write_bytes(content[:3])
            raise SystemExit
        written += 1
        write(path, content)

    root, facts = tmp_path / "run", {"data": {}, "command": []}
    with monkeypatch.context() as patch:
        patch.setattr(run_directory, "write_atomic", write_until_killed)
        with pytest.raises(SystemExit):
            RunDirectory.create(root, *new_run, facts)
    if (root / "run.json").exists():
        return
    made = RunDirectory.create(root, *new_run, facts)
    assert RunDirectory.open(root).config == made.config
    assert not [path.name for path in root.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("names", [["tokenizer.json"], ["notes.txt"], ["provenance.json", "notes.txt"]])
def test_what_others_wrote_is_not_taken_for_an_unfinished_run(
    new_run: tuple[RunConfig, Processor], tmp_path: Path, names: list[str]
) -> None:
    for name in names:
        (tmp_path / name).write_text("{}")
    with pytest.raises(FileExistsError, match="already holds other files"):
        RunDirectory.create(tmp_path, *new_run, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)


# ---- read while it is written


def test_a_checkpoint_that_goes_while_it_is_read(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with train.average and train.save_every=1: the oldest of those to average is removed meanwhile."""
    shutil.copytree(run, copy := tmp_path / "run")
    shutil.copytree(copy / "checkpoints" / "step-000003", copy / "checkpoints" / "step-000004")
    opened = RunDirectory.open(copy)
    opened.__dict__["config"] = opened.config.with_(train=opened.config.train.with_(average=3))
    read, n_reads = run_directory._weights, 0

    def read_slowly(*arguments: Any) -> Any:
        nonlocal n_reads
        n_reads += 1
        if n_reads == 1:
            shutil.rmtree(copy / "checkpoints" / "step-000002")
        return read(*arguments)

    monkeypatch.setattr(run_directory, "_weights", read_slowly)
    _, name = opened.model()
    assert name == "the average of steps 3, 4"


# ---- a run that diverges where evaluation sees it first


def test_an_evaluation_that_is_not_finite_is_a_divergence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = write_data("translate", tmp_path)
    fields = ("steps=4", "eval_every=1", "lr=1e38", "schedule=constant", "warmup=0", f"out={tmp_path / 'run'}")
    words = words_of("translate", data, *(f"train.{field}" for field in fields))
    with pytest.raises(Diverged):
        regard.train(run_config("translate", words), style="quiet")
    shutil.rmtree(tmp_path / "run")
    assert main(["train", "translate", *words]) == 4
    assert "not finite" in capsys.readouterr().err


# ---- evaluations of many examples


def test_writing_an_evaluation_takes_no_memory_for_each_example(tmp_path: Path) -> None:
    from regard.training.evaluation import EvaluationReport, SplitReport, write_evaluation
    from regard.training.tasks import ExampleResult

    rows = tuple(ExampleResult(f"source {n}", "target", "output", 0.5, 1.0) for n in range(10_000))
    assert not hasattr(rows[0], "__dict__")
    split = SplitReport("valid", len(rows), {}, rows=rows, passages=False)
    report = EvaluationReport("run", "translate", "last", {"source": "file"}, {}, (split,))
    tracemalloc.start()
    try:
        write_evaluation(tmp_path / "out", report)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    size = (tmp_path / "out" / "outputs.jsonl").stat().st_size
    assert size > 900_000
    assert peak < 2.5 * size, "the worst are sorted, and the file is read once for its checksum"
