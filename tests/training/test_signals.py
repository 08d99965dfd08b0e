"""Whatever ends a run early, what was done is kept: Ctrl-C, SIGTERM, SIGKILL, a full disk."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from forked_shell import Shell
from regard import cli
from regard.training.journal import MetricsFile
from regard.training.run_directory import RunDirectory

from .runs import (
    assert_same,
    command,
    environment,
    latest,
    losses,
    metrics,
    names,
    resume,
    train,
    words_of,
    write_data,
)

# Steps long enough for a signal to come between two of them.
LONG = (
    *("train.steps=30", "train.accumulate=2", "train.save_every=0", "train.eval_every=0", "train.ema=0.9"),
    *("model.d_model=32", "model.d_ff=512", "train.batch_tokens=512"),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes have that are started here: sums in another order are other sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(*called: str) -> subprocess.Popen[str]:
    return subprocess.Popen(called, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())


@contextmanager
def running(*called: str) -> Iterator[subprocess.Popen[str]]:
    process = start(*called)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def wait_for(condition: Any, process: subprocess.Popen[str] | Any, seconds: float = 240.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        alive = process.poll() is None if isinstance(process, subprocess.Popen) else process.is_alive()
        assert alive, "the run ended by itself"
        assert time.monotonic() < end, "nothing came of it"
        time.sleep(0.002)


def n_lines(out: Path) -> int:
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_asked_to_stop_it_saves_and_goes_on_later(
    number: signal.Signals, code: int, bash: Shell, tmp_path: Path
) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = words_of("translate", data, f"train.out={out}", *LONG)
    regard = [bash.regard] if number == signal.SIGINT else command()  # once as people start it
    with running(*regard, "train", "translate", *words) as process:
        wait_for(lambda: n_lines(out) >= 3, process)
        process.send_signal(number)
        _, said = process.communicate(timeout=240)
        assert process.returncode == code
    done = latest(out).step
    assert 3 <= done < 30
    assert said.splitlines()[-1] == (
        f"regard: stopped at step {done}; progress is saved, --resume continues from there"
    )
    assert "Traceback" not in said
    assert not (out / "model").exists()
    resume(out)
    train("translate", tmp_path / "whole", data, *LONG)
    assert_same(tmp_path / "whole", out)


SLOW_SAVING = """
import sys, time
from regard.cli import main
from regard.training.checkpoint import Checkpoints

def slow(*args):
    print("saving", flush=True)
    time.sleep(600)

Checkpoints.write = slow
sys.exit(main(sys.argv[1:]))
"""


def test_the_second_time_it_leaves_at_once(bash: Shell, tmp_path: Path) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = words_of("translate", data, f"train.out={out}", *LONG)
    with running(bash.python, "-c", SLOW_SAVING, "train", "translate", *words) as process:
        wait_for(lambda: n_lines(out) >= 1, process)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "saving\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=300) == 130
    assert RunDirectory.open(out).checkpoints().steps() == []


def test_stop_at_saves_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = words_of("translate", data, f"train.out={out}", "train.steps=6", "train.save_every=4")
    assert cli.main(["train", "translate", *words, "train.stop_at=3", "--json"]) == 0
    assert '"finished": false' in capsys.readouterr().out
    assert (latest(out).step, (out / "model").exists()) == (3, False)
    assert cli.main(["train", "--resume", str(out), "--quiet"]) == 0
    train("translate", tmp_path / "whole", data, "train.steps=6", "train.save_every=4")
    assert_same(tmp_path / "whole", out, files=False)
    assert (out / "model").is_dir()


# ------------------------------------------------------------------------------------- SIGKILL

KILLS = 8
STEPS = 5 * KILLS
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["regard.training.trainer", "torch.utils.tensorboard", "numpy.random", "pytest"])


def _resumed(out: Path) -> None:
    torch.set_num_threads(1)
    resume(out)


@pytest.mark.slow
def test_killed_again_and_again_while_it_saves(tmp_path: Path) -> None:
    """Every step is saved, so most of the time is spent saving; each kill falls anywhere within such a step."""
    words = (f"train.steps={STEPS}", "train.save_every=1", "train.eval_every=0", "train.ema=0.9", "train.keep=2")
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    train("translate", tmp_path / "whole", data, *words)
    train("translate", out, data, *words, "train.stop_at=1")
    chosen, done = random.Random(20), 1
    for _ in range(KILLS):
        process = SERVER.Process(target=_resumed, args=(out,))
        process.start()
        try:
            newest = _newest(out)
            wait_for(lambda newest=newest: _newest(out) > newest, process)
            began = time.monotonic()
            newest = _newest(out)
            wait_for(lambda newest=newest: _newest(out) > newest, process)
            time.sleep(chosen.random() * (time.monotonic() - began))
        finally:
            process.kill()
            process.join(30)
        assert process.exitcode == -signal.SIGKILL
        assert latest(out).step > done, "every run went on from where the last one was killed"
        done = latest(out).step
    resume(out)
    assert losses(out) == losses(tmp_path / "whole")
    assert_same(tmp_path / "whole", out)
    assert [path for path in out.rglob("*") if path.name.startswith(".")] == []


def _newest(out: Path) -> int:
    return max((int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")), default=0)


def test_half_written_files_of_a_killed_process_go_and_others_stay(tmp_path: Path) -> None:
    data, out = write_data("lm", tmp_path), tmp_path / "run"
    train("lm", tmp_path / "whole", data, "train.steps=2")
    train("lm", out, data, "train.steps=2", "train.stop_at=1")
    half = [".run.json.0a1b2c3d", ".metrics.jsonl.x7_k2p9q", "tokens/.tokens-00.bin.abcdefgh"]
    half += ["checkpoints/.step-000009.0a1b2c3d.saving/model.safetensors"]
    for name in [*half, ".gitignore", ".notes.txt"]:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"{")
    resume(out)
    assert names(out) == sorted([*names(tmp_path / "whole"), ".gitignore", ".notes.txt"])


# ------------------------------------------------------------------------------------- a full disk


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """The system refuses to let any file of this process grow beyond that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_export_to_a_full_disk_is_told_in_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes: dict[str, Any] = {"d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 32, "vocab_size": 500, "max_len": 16}
    model, out = regard.build("gpt2", **sizes).save(tmp_path / "model"), tmp_path / "out"
    with files_of_at_most(40_000):
        assert cli.main(["export", str(model), "safetensors", str(out), "--shapes", "1", "--no-compile"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("regard: model.safetensors cannot be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_the_checkpoint_before_it_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    words = ("train.steps=6", "train.save_every=2", "train.eval_every=0")
    train("translate", tmp_path / "whole", data, *words)
    train("translate", out, data, *words, "train.stop_at=2")
    before = {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()}
    largest = max(map(len, before.values()))
    with files_of_at_most(largest // 2):
        assert cli.main(["train", "--resume", str(out), "--quiet"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(f"regard: {out}/checkpoints/step-000004 could not be written (File too large): it needs ")
    assert said.endswith("; earlier checkpoints are unchanged")
    assert {path: path.read_bytes() for path in (out / "checkpoints").rglob("*") if path.is_file()} == before
    latest(out).check()
    resume(out)
    assert_same(tmp_path / "whole", out)


def test_no_room_even_for_metrics_is_said_and_costs_no_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """metrics.jsonl is worth less than the run."""
    data, out = write_data("translate", tmp_path), tmp_path / "run"
    train("translate", out, data, "train.steps=4", "train.stop_at=2")
    write = MetricsFile.write

    class Full:
        """A file whose disk is full."""

        def __init__(self, file: Any) -> None:
            self.seek, self.close = file.seek, file.close

        def write(self, line: bytes) -> int:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_to_full(self: Any, record: dict[str, Any]) -> None:
        self._file = Full(self._file)
        write(self, record)

    monkeypatch.setattr(MetricsFile, "write", write_to_full)
    assert cli.main(["train", "--resume", str(out)]) == 0
    said = capsys.readouterr().err
    assert said.count("metrics.jsonl cannot be written: No space left on device") == 1
    assert [line["step"] for line in metrics(out)] == [1, 2]
    assert latest(out).step == 4
