"""No room, no right to write, no descriptors, no memory: a sentence, and what was there before is whole."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import random
import resource
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch

from regard.cli import main
from regard.training.run_directory import RunDirectory
from training.runs import assert_same, train, words_of, write_data

from .fork_server import SERVER
from .promises import Tally, size

WORDS = ("train.steps=6", "train.save_every=2", "train.eval_every=3", "train.ema=0.9", "train.keep=2")
Fault = Literal["full", "read-only"]
# A full disk still lets names change and files go.
REFUSED = {"full": {"open", "os.mkdir"}, "read-only": {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}}
CODES = {"full": errno.ENOSPC, "read-only": errno.EROFS}


class Disk:
    """From the n-th write below a folder on, every one fails; 0: none does, and they are counted."""

    def __init__(self) -> None:
        self.below, self.fault, self.fails_at, self.n_writes = "", "full", 0, 0
        self.fsync = os.fsync
        sys.addaudithook(self._audit)  # for the whole process, but idle until ``failing``

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.below or event not in REFUSED[self.fault] or not str(arguments[0]).startswith(self.below):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        self._write(arguments[0])

    def _write(self, path: object) -> None:
        self.n_writes += 1
        if 0 < self.fails_at <= self.n_writes:
            code = CODES[self.fault]
            raise OSError(code, os.strerror(code), path)

    def _fsync(self, handle: int) -> None:
        """What was written may be found not to fit only when it is forced to disk."""
        if self.fault == "full":
            self._write(None)
        self.fsync(handle)

    @contextmanager
    def failing(self, below: Path, fault: Fault = "full", at: int = 0) -> Iterator[None]:
        self.below, self.fault, self.fails_at, self.n_writes = str(below), fault, at, 0
        try:
            with mock.patch("os.fsync", self._fsync):
                yield
        finally:
            self.below = ""


@pytest.fixture(scope="module")
def disk() -> Disk:
    return Disk()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("whole")
    data = write_data("translate", folder)
    train("translate", folder / "run", data, *WORDS)
    return folder / "run", data


def run(*words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `regard WORDS`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    curves = mock.patch("regard.training.reporter.draw_curves")
    with curves, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(list(words))
    return code, out.getvalue(), err.getvalue()


def next_command(out: Path, data: str) -> list[str]:
    if (out / "run.json").exists():
        return ["train", "--resume", str(out), "--quiet"]
    return ["train", "translate", *words_of("translate", data, *WORDS, f"train.out={out}"), "--quiet"]


@pytest.mark.promise(4, "disks that are full or read-only from any write of a run on")
@pytest.mark.parametrize("fault", CODES)
def test_a_disk_that_takes_no_more(
    fault: Fault, disk: Disk, whole: tuple[Path, str], tally: Tally, tmp_path: Path
) -> None:
    with disk.failing(out := tmp_path / "counted", fault):
        assert run(*next_command(out, whole[1]))[0] == 0
    n_writes, chosen = disk.n_writes, random.Random(fault)
    assert n_writes > 60
    for number in range(size(short=3, full=20)):
        at, out = chosen.randint(1, n_writes), tmp_path / f"run-{number}"
        with tally.attempt(f"{fault} from write {at} of {n_writes}"):
            with disk.failing(out, fault, at):
                code, said, told = run(*next_command(out, whole[1]))
            assert code == 1, (code, told)
            assert "held out" not in said
            assert "next:" not in said
            assert "Traceback" not in told
            assert os.strerror(CODES[fault]) in told.splitlines()[-1]
            if (out / "run.json").exists():
                checkpoints = RunDirectory.open(out).checkpoints()
                for step in checkpoints.steps():
                    checkpoints.at(step)  # whole, or this raises
            assert run(*next_command(out, whole[1]))[0] == 0
            assert_same(whole[0], out)
            assert [path for path in out.rglob("*") if path.name.startswith(".")] == []
        shutil.rmtree(out, ignore_errors=True)


# ---- descriptors and memory


def _limited(kind: int, room: int, words: Sequence[str], told: Path) -> None:
    """In a process of its own: `regard WORDS` with so much room for more descriptors, or bytes of memory."""
    torch.set_num_threads(1)
    main(["info", words[1]])  # imports take more than what is tried here
    sys.stdout.flush()  # else it is written to the file below, after what the command says
    handle = os.open(told, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)
    if kind == resource.RLIMIT_NOFILE:
        taken = {int(name) for name in os.listdir("/proc/self/fd")}
        most = sorted(set(range(4096)) - taken)[room]  # so many are free below it
    else:
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + room
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
    code = 99
    try:
        code = main(list(words))
        sys.stdout.flush()
    finally:
        os._exit(code)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 33 MB."""
    from generation.spoken import language_model

    return language_model(d_model=512, d_ff=2048, n_layers=2, max_len=1024).save(tmp_path_factory.mktemp("large") / "m")


LIMITS: dict[str, tuple[int, Callable[[int], int]]] = {
    "descriptors": (resource.RLIMIT_NOFILE, lambda number: number),
    "memory": (resource.RLIMIT_AS, lambda number: number * 3 << 20),
}


@pytest.mark.skipif(sys.platform != "linux", reason="limits are counted as Linux does")
@pytest.mark.promise(4, "commands with few descriptors or little memory")
@pytest.mark.parametrize("limit", LIMITS)
def test_little_room(limit: str, large: Path, tally: Tally, tmp_path: Path) -> None:
    kind, room = LIMITS[limit]
    codes = set()
    for number in range(0, 24, size(short=21, full=2)):
        process = SERVER.Process(
            target=_limited,
            args=(
                kind,
                room(number),
                ("generate", str(large), "the cat", "--max-new-tokens", "3"),
                tmp_path / str(number),
            ),
        )
        with tally.attempt(f"{limit}: room for {room(number)}"):
            process.start()
            process.join(120)
            told = (tmp_path / str(number)).read_text(encoding="utf-8")
            assert process.exitcode in (0, 1), f"{process.exitcode}: {told[-300:]}"
            assert "Traceback" not in told, told
            if process.exitcode:
                assert told.splitlines()[-1].startswith("regard: "), told
            codes.add(process.exitcode)
        if process.is_alive():
            process.kill()
    assert 1 in codes, "somewhere it was too little"
