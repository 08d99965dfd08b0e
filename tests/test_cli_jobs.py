"""Bulk answers by several processes: the file that one process writes, whatever happens to the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from generation.spoken import captioner, classifier, language_model, picture, translator
from regard.cli import bulk_answers, main
from regard.experiments import sweep_runner
from regard.experiments.sweep_runner import JobFailed, JobLost, Runner

Said = pytest.CaptureFixture[str]
SEARCH = {"translate": ["--max-new-tokens", "3"], "generate": ["--max-new-tokens", "3"], "classify": ["--top", "2"]}


class HereRunner(Runner):
    """Calls in threads of this process, some of which are lost on the way."""

    def __init__(self, lost: Callable[[int], bool] = lambda call: False) -> None:
        super().__init__(2)
        self.lost, self.n_calls = lost, 0

    def _call(self, function: Any, argument: Any, max_seconds: float | None) -> Any:
        self.n_calls += 1
        if self.lost(self.n_calls):
            raise JobLost("WorkerCrashedError: killed")
        return function(argument)

    def stop(self, force: bool = False) -> None:
        pass


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {"translate": translator(), "generate": language_model(), "classify": classifier(), "caption": captioner()}
    return {name: model.save(tmp_path_factory.mktemp("models") / name) for name, model in made.items()}


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sixty records in three shards and a half, a blank one among them."""
    monkeypatch.setattr(bulk_answers, "_LINES_AT_ONCE", 2)
    rows = [{"text": f"the cat {n}" if n % 7 else "", "n": n} for n in range(60)]
    (tmp_path / "in.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return tmp_path / "in.jsonl"


def put_runner(monkeypatch: pytest.MonkeyPatch, runner: Runner) -> None:
    monkeypatch.setattr(sweep_runner, "open_runner", lambda *_, **__: runner)


@pytest.mark.parametrize("command", SEARCH)
def test_shards_come_to_what_one_process_writes(
    models: dict[str, Path], texts: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    runner = HereRunner(lambda call: call in (2, 3))
    put_runner(monkeypatch, runner)
    words = [command, str(models[command]), "--file", str(texts), *SEARCH[command], "--out"]
    for place in (["--on", "local"], ["--on", "ray", "--jobs", "2"]):
        assert main([*words, str(tmp_path / f"{place[1]}.csv"), *place]) == 0, capsys.readouterr().err
    assert (tmp_path / "local.csv").read_bytes() == (tmp_path / "ray.csv").read_bytes()
    assert runner.n_calls == 4 + 2  # two were lost and sent again


def test_images_too(models: dict[str, Path], tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "photos").mkdir()
    for name in "ab":
        picture(tmp_path / "photos" / f"{name}.png")
    put_runner(monkeypatch, HereRunner())
    words = ["caption", str(models["caption"]), "--file", str(tmp_path / "photos"), "--max-new-tokens", "3", "--out"]
    for jobs in ("1", "2"):
        assert main([*words, str(tmp_path / f"{jobs}.csv"), "--jobs", jobs]) == 0, capsys.readouterr().err
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()


def test_a_job_that_was_stopped_goes_on_at_the_shard_that_is_missing(
    models: dict[str, Path], texts: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.csv"
    words = ["translate", str(models["translate"]), "--file", str(texts), "--max-new-tokens", "3"]
    put_runner(monkeypatch, HereRunner(lambda call: call > 2))
    assert main([*words, "--out", str(out), "--jobs", "2"]) == 1
    err = capsys.readouterr().err
    assert "a shard was lost 3 times: WorkerCrashedError: killed; run the same command to resume there" in err
    assert not out.exists()
    rest = HereRunner()
    put_runner(monkeypatch, rest)
    assert main([*words, "--out", str(out), "--jobs", "2"]) == 0
    assert "resuming after 32 rows" in capsys.readouterr().err
    assert rest.n_calls == 2  # of four shards
    assert main([*words, "--out", str(tmp_path / "one.csv")]) == 0
    assert out.read_bytes() == (tmp_path / "one.csv").read_bytes()


def test_what_cannot_be_shared_out(models: dict[str, Path], texts: Path, tmp_path: Path, capsys: Said) -> None:
    translate = ["translate", str(models["translate"])]
    assert main([*translate, "the cat", "--on", "ray"]) == 2
    assert "--on ray needs a file of inputs and one for the answers: --file F --out F" in capsys.readouterr().err
    assert main([*translate, "--file", str(texts), "--jobs", "3"]) == 2
    assert "--jobs 3 needs a file of inputs" in capsys.readouterr().err
    assert main([*translate, "--file", str(texts), "--out", str(tmp_path / "x"), "--on", "moon"]) == 2
    assert "moon is not one of local, ray, ray://HOST:PORT" in capsys.readouterr().err


def test_a_shard_that_raises_ends_the_command(
    models: dict[str, Path], texts: Path, tmp_path: Path, capsys: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    class FailingRunner(HereRunner):
        def _call(self, function: Any, argument: Any, max_seconds: float | None) -> Any:
            raise JobFailed("FileNotFoundError: in.jsonl")

    put_runner(monkeypatch, FailingRunner())
    words = ["translate", str(models["translate"]), "--file", str(texts), "--out", str(tmp_path / "x"), "--jobs", "2"]
    assert main(words) == 1
    assert "a shard cannot be answered: FileNotFoundError: in.jsonl" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_of_this_machine(models: dict[str, Path], texts: Path, tmp_path: Path, capsys: Said) -> None:
    words = ["translate", str(models["translate"]), "--file", str(texts), "--max-new-tokens", "3", "--out"]
    for jobs in ("1", "2"):
        assert main([*words, str(tmp_path / f"{jobs}.csv"), "--jobs", jobs]) == 0, capsys.readouterr().err
    assert (tmp_path / "1.csv").read_bytes() == (tmp_path / "2.csv").read_bytes()
    assert bulk_answers._SHARD_BATCHES * 2 < 60
