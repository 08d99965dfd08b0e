"""Small runs for the tests of the whole loop: what they learn from, how they are asked for, when two are the same."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import regard
from regard.recipes import run_config
from regard.training.checkpoint import Checkpoint
from regard.training.journal import without_timings
from regard.training.loop import Loop
from regard.training.run_directory import RunDirectory
from regard.training.signals import Interrupted
from regard.training.trainer import TrainResult

NUMBERS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
ZAHLEN = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "elf", "zwölf"]

TINY = (
    *("model.d_model=16", "model.n_heads=2", "model.d_ff=24", "model.n_layers=1", "model.max_len=24"),
    *("model.dropout=0.2", "model.embedding_dropout=0.1", "data.max_len=24", "data.valid_fraction=0.2"),
    *("train.precision=fp32", "train.compile=off", "train.samples=0", "train.eval_examples=4", "train.log_every=1"),
    *("train.warmup=2", "train.device=cpu"),
)
TOKENIZERS = {"translate": "words", "lm": "chars", "mlm": "chars", "classify": "words"}


def write_data(task: str, folder: Path, n: int = 60) -> str:
    """A small file of the task's own kind; always the same one."""
    chosen = random.Random(7)
    lines: list[str] = []
    for number in range(n):
        length = chosen.randint(1, 6)
        picked = [chosen.randrange(len(NUMBERS)) for _ in range(length)]
        text = " ".join(NUMBERS[i] for i in picked)
        if task == "translate":
            lines.append(f"{text} number {number}\t{' '.join(ZAHLEN[i] for i in reversed(picked))}")
        elif task == "classify":
            lines.append(f"{text} number {number}\t{'odd' if sum(picked) % 2 else 'even'}")
        else:
            lines.append(f"{text} .")
    path = folder / {"translate": "pairs.tsv", "classify": "labels.tsv"}.get(task, "text.txt")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def words_of(task: str, data: str, *more: str) -> list[str]:
    """The words of a small run; later ones take the place of earlier ones."""
    first = [f"data={data}", *TINY, f"data.tokenizer={TOKENIZERS[task]}", "train.batch_tokens=96"]
    if task in ("lm", "mlm"):
        first.append("data.documents=line")
    named = {word.partition("=")[0]: word for word in [*first, *more]}
    return list(named.values())


def train(task: str, out: Path, data: str, *more: str) -> TrainResult:
    """In this process, without the picture at the end, which takes longer than the run."""
    return regard.train(run_config(task, words_of(task, data, f"train.out={out}", *more)), style="quiet")


def resume(out: Path, **changes: Any) -> TrainResult:
    return regard.resume(out, style="quiet", **changes)


@contextmanager
def told_after(n_batches: int, number: int = signal.SIGINT) -> Iterator[None]:
    """This process gets a signal while its n-th batch from here on is worked on."""
    accumulate, left = Loop._accumulate, [n_batches]

    def counted(self: Loop, *args: Any) -> None:
        accumulate(self, *args)
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), number)

    with mock.patch.object(Loop, "_accumulate", counted):
        yield


def use_backend(monkeypatch: pytest.MonkeyPatch, backend: Any) -> None:
    """torch.compile with this in place of inductor, which takes long and a C++ compiler."""
    real = torch.compile

    def compile(module: Any, *, dynamic: bool | None, options: Any = None) -> Any:  # options are inductor's
        return real(module, backend=backend, dynamic=dynamic)

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", compile)


def stopped_after(n_batches: int, call: Any, *args: Any, **options: Any) -> Interrupted:
    """What a run that is told to stop after so many batches ends with."""
    with told_after(n_batches), pytest.raises(Interrupted) as stopped:
        call(*args, **options)
    assert stopped.value.exit_code == 130
    return stopped.value


# ------------------------------------------------------------------------------------- what a run left


def latest(out: Path) -> Checkpoint:
    found = RunDirectory.open(out).checkpoints().latest()
    assert found is not None
    return found


def metrics(out: Path, timings: bool = False) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return lines if timings else [without_timings(line) for line in lines]


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in metrics(out) if "loss_mean" in line]


def state_of(out: Path) -> dict[str, Any]:
    """Of the last checkpoint, without the clock's."""
    state = json.loads(json.dumps(latest(out).state))
    state["at"].pop("seconds")
    for name in ("seconds", "train_seconds"):
        state["reporter"].pop(name)
    return state


def bits_equal(one: Tensor, other: Tensor) -> bool:
    """Bit for bit: NaN is itself, and 0 is not -0."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def assert_same(one: Path, other: Path, *, files: bool = True) -> None:
    """Weights, optimiser, averages, metrics, position and shipped model of two runs are the same, bit for bit."""
    here, there = latest(one).tensors(), latest(other).tensors()
    assert here.keys() == there.keys()
    odd = [name for name in here if not bits_equal(here[name].reshape(-1), there[name].reshape(-1))]
    assert not odd, f"{len(odd)} of {len(here)} tensors differ: {odd[:3]}"
    assert state_of(one) == state_of(other)
    if files:
        assert metrics(one) == metrics(other)
        assert names(one) == names(other)
        assert (one / "model/model.safetensors").read_bytes() == (other / "model/model.safetensors").read_bytes()
        first, second = (json.loads((out / "evaluation.json").read_bytes()) for out in (one, other))
        assert first["metrics"] == second["metrics"]


_OF_ONE_PROCESS = ("/grad.safetensors", "curves.png")


def names(out: Path) -> list[str]:
    """Every file of a run but TensorBoard's, which begins a new one each time, the gradients of a step that was
    interrupted, which stay with their checkpoint, and curves.png, which tests' own processes do not draw."""
    found = (path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    return sorted(x for x in found if not x.startswith("tensorboard/") and not x.endswith(_OF_ONE_PROCESS))


# ------------------------------------------------------------------------------------- as people start them


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "regard", *words]


def environment(**more: str) -> dict[str, str]:
    """One thread: the same sums in every process."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **more}


def call(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`regard …` to its end."""
    return subprocess.run(command(*words), capture_output=True, text=True, env=environment(**env), timeout=400)
