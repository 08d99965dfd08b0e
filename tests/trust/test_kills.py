"""SIGKILL at any moment, and other numbers of processes afterwards: the run goes on as if nothing had happened."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from training.runs import assert_same, latest, resume, train, write_data
from training.test_torchrun import assert_close, spread, well

from .fork_server import SERVER
from .promises import IS_FULL, Tally, size

WORDS = (
    "train.steps=6",
    "train.save_every=2",
    "train.eval_every=3",
    "train.ema=0.9",
    "train.keep=2",
    "train.accumulate=2",
)
# What leaves a trace on a disk.
WRITES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.chmod"}
DEADLINE = 300.0


def go_on(out: Path, data: str, parallel: str = "auto") -> None:
    """What a person types next: `train` again where there is no run yet, else `train --resume`."""
    if (out / "run.json").exists():
        resume(out)
    else:
        train("translate", out, data, *WORDS, f"train.parallel={parallel}")


def _train(
    out: Path, data: str, kill_at: int, written: Any, environment: dict[str, str], kill_rank: int, done: Any
) -> None:
    """In a process of its own, which SIGKILL ends at its n-th write below ``out``; 0: never."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    rank, below = int(environment.get("RANK", 0)), str(out)

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in WRITES or rank != kill_rank or not str(arguments[0]).startswith(below):
            return
        if event == "open" and not (isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        written.value += 1
        if written.value == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(audit)
    go_on(out, data, environment.get("PARALLEL", "auto"))
    done.value += 1


class World:
    """Processes that train together; one dies at its n-th write, or all at once after a time."""

    def __init__(self, out: Path, data: str, world: int = 1, *, kill_at: int = 0, parallel: str = "auto") -> None:
        self.written, self.done, kill_rank = SERVER.Value("q", 0), SERVER.Value("q", 0), kill_at % world
        self.world = world
        variables = {"PARALLEL": parallel}
        if world > 1:
            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            variables |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
            variables |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.processes = []
        for rank in range(world):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
            arguments = (out, data, kill_at, self.written, variables | place, kill_rank, self.done)
            self.processes.append(SERVER.Process(target=_train, args=arguments))
        self.started = time.monotonic()
        for process in self.processes:
            process.start()

    def wait(self, seconds: float = DEADLINE) -> bool:
        """Until all have ended, one was killed, or the time is over; then none is left. Whether one was killed."""
        while time.monotonic() - self.started < seconds and self.done.value < self.world:
            if any(process.exitcode for process in self.processes):
                break
            time.sleep(0.002)
        killed = self.done.value < self.world
        for process in self.processes:
            process.kill() if killed else process.join(10)
        for process in self.processes:
            process.join(10)
        return killed


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The run that nobody interrupts, and what it learns from."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole")
    data = write_data("translate", folder)
    train("translate", folder / "run", data, *WORDS)
    yield folder / "run", data
    torch.set_num_threads(before)


def assert_nothing_left_over(out: Path) -> None:
    assert [path for path in out.rglob("*") if path.name.startswith(".")] == []


@pytest.mark.promise(1, "SIGKILL at any write or moment of a run, which then goes on bit for bit")
@pytest.mark.parametrize("how", ["write", "moment"])
def test_killed_anywhere_it_goes_on(how: str, whole: tuple[Path, str], tally: Tally, tmp_path: Path) -> None:
    for name in ("first", "counted"):  # the first one waits for what is imported, too
        counted = World(tmp_path / name, whole[1])
        assert not counted.wait()
    n_writes, seconds, chosen = counted.written.value, time.monotonic() - counted.started, random.Random(how)
    assert n_writes > 80
    n_killed = 0
    for number in range(size(short=3, full=60 if how == "write" else 20)):
        out, kill_at = tmp_path / f"run-{number}", chosen.randint(1, n_writes) if how == "write" else 0
        with tally.attempt(f"{how} {kill_at}"):
            world = World(out, whole[1], kill_at=kill_at)
            n_killed += world.wait(chosen.random() * seconds if how == "moment" else DEADLINE)
            go_on(out, whole[1])
            assert_same(whole[0], out)
            assert_nothing_left_over(out)
        shutil.rmtree(out)
    assert n_killed >= tally.tried // 2, "most were killed before their end"


@pytest.mark.promise(1, "SIGKILL of one of two processes; both then go on bit for bit")
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"] if IS_FULL else ["fsdp"])
def test_one_of_two_is_killed(parallel: str, whole: tuple[Path, str], tally: Tally, tmp_path: Path) -> None:
    together = tmp_path / "together"
    counted = World(together, whole[1], 2, parallel=parallel)
    assert not counted.wait()
    chosen = random.Random(parallel)
    for number in range(size(short=1, full=10)):
        out, kill_at = tmp_path / f"run-{number}", chosen.randint(1, counted.written.value)
        with tally.attempt(f"{parallel} write {kill_at}"):
            World(out, whole[1], 2, kill_at=kill_at, parallel=parallel).wait()
            well(spread(2, go_on, out, whole[1], parallel))
            assert_same(together, out)
            assert_nothing_left_over(out)


@pytest.mark.skipif(not IS_FULL, reason="make trust has it; training/test_torchrun.py tries fewer processes")
@pytest.mark.promise(1, "runs saved by four processes that go on with 1, 2 or 8")
@pytest.mark.parametrize("parallel", ["fsdp", "ddp"])
def test_saved_by_four_it_goes_on_with_any_number(
    parallel: str, whole: tuple[Path, str], tally: Tally, tmp_path: Path
) -> None:
    words = ("train.steps=6", "train.save_every=3", "train.eval_every=3", "train.ema=0.5", "train.eps=1e-6")
    train("translate", alone := tmp_path / "alone", whole[1], *words, "train.accumulate=8")
    parts = (*words, "train.accumulate=2", f"train.parallel={parallel}", "train.stop_at=4")
    well(spread(4, train, "translate", saved := tmp_path / "saved", whole[1], *parts))
    assert latest(saved).state["processes"] == 4
    for world in (1, 2, 8):
        with tally.attempt(f"{parallel} on {world}"):
            shutil.copytree(saved, out := tmp_path / str(world))
            well(spread(world, resume, out))
            assert latest(out).state["processes"] == world
            assert_close(alone, out)
