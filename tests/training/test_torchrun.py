"""One run on several processes is the run on one with as many batches a step: `torchrun -m regard train …`.

Most worlds here are forked from a server that has imported torch and told what torchrun tells its processes: a moment,
not ten seconds. The slow tests start torchrun itself.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed as dist

import regard
from regard.training.loop import Loop
from regard.training.run_directory import RunDirectory

from .runs import environment, latest, losses, metrics, resume, stopped_after, told_after, train, words_of, write_data

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(
    ["regard.training.trainer", "torch.distributed.fsdp", "torch.utils.tensorboard", "numpy.random", "pytest"]
)
DEADLINE = 300.0
SLOW = pytest.mark.slow
WORDS = (
    *("train.steps=6", "train.save_every=3", "train.eval_every=3", "train.optimiser=adamw", "train.ema=0.5"),
    *("model.n_layers=2", "train.weight_decay=0.1", "train.eps=1e-6"),
)
BATCHES = 4  # of a step, on however many processes
# Sums in another order differ in fp32's last digit, 6e-8; six steps carry that into the weights and back. Seen: 3e-7.
# Other batches and other dropout change a loss by 1e-2. (Muon, whose products are bf16, multiplies it to 6e-5.)
TOLERANCE = 2e-6


def spread(world: int, job: Callable[..., Any], *args: Any) -> list[str | None]:
    """Run the job on so many processes; what went wrong on each, by rank."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    queue = SERVER.SimpleQueue()
    started = [SERVER.Process(target=_rank, args=(i, world, store.port, job, args, queue)) for i in range(world)]
    for process in started:
        process.start()
    faults: dict[int, str | None] = {}
    end = time.monotonic() + DEADLINE
    try:
        while len(faults) < world:
            assert time.monotonic() < end, f"{world - len(faults)} of {world} processes hang"
            if queue.empty():
                time.sleep(0.01)
            else:
                rank, fault = queue.get()
                faults[rank] = fault
    finally:
        for process in started:
            process.join(5 if len(faults) == world else 0.1)
            if process.is_alive():
                process.kill()
                process.join(5)
    return [faults[rank] for rank in range(world)]


def _rank(rank: int, world: int, port: int, job: Callable[..., Any], args: tuple[Any, ...], queue: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    try:
        job(*args)
        queue.put((rank, None))
    except BaseException:
        queue.put((rank, traceback.format_exc()))


def well(faults: list[str | None]) -> None:
    assert not any(faults), "\n".join(fault for fault in faults if fault)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """The run on one process, and what it learns from."""
    folder = tmp_path_factory.mktemp("alone")
    data = write_data("translate", folder)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    train("translate", folder / "run", data, *WORDS, f"train.accumulate={BATCHES}")
    yield folder / "run", data
    torch.set_num_threads(before)


def assert_close(one: Path, other: Path) -> None:
    """The same lines, numbers but for rounding, and a model that loads and says nearly the same."""
    here, there = metrics(one), metrics(other)
    assert len(here) == len(there)
    for first, second in zip(here, there, strict=True):
        assert first.keys() == second.keys()
        for name, value in first.items():
            if isinstance(value, float):
                assert math.isclose(value, second[name], rel_tol=TOLERANCE, abs_tol=1e-9), (name, value, second[name])
            else:
                assert value == second[name]
    model, twin = (regard.load(out / "model").state_dict() for out in (one, other))
    assert model.keys() == twin.keys()
    for name, x in model.items():
        # Adam divides by the gradient's own size: where that is all rounding (a bias before a norm), so is the step.
        torch.testing.assert_close(x, twin[name], rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(("kind", "world"), [("fsdp", 2), pytest.param("ddp", 4, marks=SLOW)])
def test_several_processes_do_what_one_does(kind: str, world: int, alone: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = (*WORDS, f"train.accumulate={BATCHES // world}", f"train.parallel={kind}")
    well(spread(world, train, "translate", out, alone[1], *words))
    assert_close(alone[0], out)
    shards = sorted(path.name for path in latest(out).path.glob("shard-*"))
    expected = [f"shard-{i:05}-of-{world:05}.safetensors" for i in range(world)] if kind == "fsdp" else []
    assert shards == expected
    facts = RunDirectory.open(out).facts
    assert facts["machine"]["processes"] == world


def test_the_comparison_can_fail(alone: tuple[Path, str], tmp_path: Path) -> None:
    train("translate", tmp_path / "run", alone[1], *WORDS, f"train.accumulate={BATCHES}", "train.seed=1")
    with pytest.raises(AssertionError):
        assert_close(alone[0], tmp_path / "run")


@pytest.mark.parametrize(("first", "then"), [(2, 1), pytest.param(2, 4, marks=SLOW)])
def test_it_goes_on_with_another_number_of_processes(
    first: int, then: int, alone: tuple[Path, str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = (*WORDS, f"train.accumulate={BATCHES // first}", "train.parallel=fsdp", "train.stop_at=4")
    well(spread(first, train, "translate", out, alone[1], *words))
    assert latest(out).state["processes"] == first
    well(spread(then, resume, out))
    assert latest(out).state["processes"] == then
    assert_close(alone[0], out)
    assert RunDirectory.open(out).config.train.accumulate == BATCHES // first, "the run's own config stays"


@pytest.mark.slow
def test_a_step_begun_by_one_process_is_begun_anew_by_two(alone: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = (*WORDS, f"train.accumulate={BATCHES}", "train.parallel=fsdp")
    stopped_after(4 * BATCHES + 1, train, "translate", out, alone[1], *words)
    assert latest(out).state["at"]["micro"] == 1
    well(spread(2, resume, out))
    assert_close(alone[0], out)


def test_processes_that_cannot_share_a_step_are_refused(alone: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("translate", out, alone[1], *WORDS, "train.accumulate=4", "train.stop_at=1")
    for fault in spread(3, resume, out):
        assert fault is not None
        assert fault.splitlines()[-1] == (
            "ValueError: the run computes 4 batches per step (train.accumulate=4 on 1 processes), which 3 processes "
            "cannot share evenly"
        )


def test_token_files_are_written_once_and_read_by_all(tmp_path: Path) -> None:
    """With Muon, which needs a matrix whole where its rows lie on several processes."""
    data = write_data("lm", tmp_path)
    words = ("train.steps=3", "train.eval_every=0", "train.optimiser=muon", "train.parallel=fsdp")
    train("lm", tmp_path / "one", data, *words, "train.accumulate=2")
    well(spread(2, train, "lm", tmp_path / "two", data, *words))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=50 * TOLERANCE)
    assert sorted(x.name for x in (tmp_path / "two/tokens").iterdir()) == sorted(
        x.name for x in (tmp_path / "one/tokens").iterdir()
    )


@pytest.mark.slow
def test_sharded_layers_in_bf16_are_evaluated_too(tmp_path: Path) -> None:
    """Losses and texts; bf16 has 8 bits, and sums in another order differ in the last of them."""
    data = write_data("translate", tmp_path)
    words = ("train.steps=2", "train.eval_every=1", "train.precision=bf16", "train.parallel=fsdp", "train.samples=1")
    train("translate", tmp_path / "one", data, *words, "train.accumulate=2")
    well(spread(2, train, "translate", tmp_path / "two", data, *words))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=2**-8)
    assert [line.keys() for line in metrics(tmp_path / "one")] == [line.keys() for line in metrics(tmp_path / "two")]


def _poisoned(out: Path, data: str, kind: str) -> None:
    """The second process' part of step 2 is not finite."""
    accumulate = Loop._accumulate

    def poison(self: Loop, batch: Any, number: int) -> None:
        if number == 3:
            layer = next(m for n, m in self.model.named_modules() if n.endswith("decoder.blocks.0.ff.w_out"))
            layer.register_forward_hook(lambda module, inputs, output: output * math.inf)
        accumulate(self, batch, number)

    with mock.patch.object(Loop, "_accumulate", poison):
        train("translate", out, data, *WORDS, f"train.parallel={kind}", "train.save_every=1")


@pytest.mark.parametrize("kind", [pytest.param("ddp", marks=SLOW), "fsdp"])
def test_what_breaks_on_one_process_stops_all_and_is_named(kind: str, alone: tuple[Path, str], tmp_path: Path) -> None:
    for fault in spread(2, _poisoned, tmp_path / "run", alone[1], kind):
        assert fault is not None
        said = fault.splitlines()[-1]
        assert said.startswith("regard.errors.Diverged: step 2: loss nan, gradient norm nan; not finite first in ")
        assert "the output of decoder.blocks.0.ff.w_out; the last checkpoint is that of step 1" in said
    assert latest(tmp_path / "run").step == 1


def _told_alone(out: Path, data: str) -> None:
    """The second process alone gets a signal."""
    with told_after(3, signal.SIGTERM) if os.environ["RANK"] == "1" else nullcontext():
        train("translate", out, data, *WORDS, f"train.accumulate={BATCHES // 2}", "train.parallel=ddp")


def test_a_signal_to_one_process_saves_on_all(alone: tuple[Path, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    for fault in spread(2, _told_alone, out, alone[1]):
        assert fault is not None
        assert "Interrupted" in fault.splitlines()[-1]
    latest(out).check()
    assert not list(latest(out).path.glob("shard-*"))
    resume(out)
    assert_close(alone[0], out)


# ------------------------------------------------------------------------------------- torchrun itself


@contextmanager
def torchrun(world: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """`torchrun -m regard …`, ended in a way that it passes on to its processes, which outlive it otherwise."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={world}", "-m", "regard"]
    pipe, env = subprocess.PIPE, environment()
    process = subprocess.Popen([sys.executable, *launch, *words], stderr=pipe, stdout=pipe, env=env, text=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=DEADLINE)


@pytest.mark.slow
def test_torchrun_from_the_command_line(alone: tuple[Path, str], tmp_path: Path) -> None:
    """Trains on two and answers once."""
    out = tmp_path / "run"
    words = words_of("translate", alone[1], *WORDS, f"train.out={out}", "train.accumulate=2", "train.parallel=ddp")
    with torchrun(2, "train", "translate", *words, "--json") as process:
        answer, said = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    assert json.loads(answer)["finished"] is True
    assert RunDirectory.open(out).facts["machine"]["processes"] == 2
    assert_close(alone[0], out)


@pytest.mark.slow
def test_sigterm_to_torchrun_saves_on_all(tmp_path: Path) -> None:
    out, data = tmp_path / "run", write_data("translate", tmp_path)
    more = ("train.steps=100000", "train.save_every=0", "train.eval_every=0", "train.parallel=fsdp")
    words = words_of("translate", data, f"train.out={out}", *more)
    with torchrun(2, "train", "translate", *words) as process:
        end = time.monotonic() + DEADLINE
        while not (out / "metrics.jsonl").exists() or (out / "metrics.jsonl").read_bytes().count(b"\n") < 3:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.02)
    saved = latest(out)
    saved.check()
    assert saved.step >= 3
    assert len(list(saved.path.glob("shard-*"))) == 2
    resume(out, steps=saved.step + 2)
    assert [line["step"] for line in metrics(out) if "loss_mean" in line] == list(range(1, saved.step + 3))
