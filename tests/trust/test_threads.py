"""Threads that share a model get the answers one thread gets, and a process that goes on does not grow."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from generation.spoken import LINES, language_model, translator
from regard.attention import taps
from regard.lens import interventions
from regard.models import Model

from .promises import Tally, size

THREADS = 8
Job = Callable[[], Any]


@pytest.fixture(scope="module")
def models() -> tuple[Model, Model]:
    return language_model(max_len=128), translator()


def jobs(models: tuple[Model, Model]) -> dict[str, Job]:
    """What a thread may do with the models: each gives something that can be compared bit for bit."""
    writer, reader = models

    def switched_off(head: int) -> Any:
        with interventions.switch_off(writer, [("self", 1, head)]):
            return regard.look(writer, LINES[1]).weights(layer=-1, head=head), writer(torch.arange(3, 20)[None])

    def scaled(factor: float) -> Any:
        with interventions.attention_scale(reader, factor):
            return regard.translate(reader, LINES[0], beam=2, max_new_tokens=8)

    made: dict[str, Job] = {}
    for number, line in enumerate(LINES[:4]):
        made[f"greedy {number}"] = lambda line=line: regard.generate(writer, line, max_new_tokens=12)
        made[f"look {number}"] = lambda line=line: regard.look(writer, line).weights(layer=1, head=2)
        made[f"off {number}"] = lambda head=number: switched_off(head)
    made["sampled"] = lambda: regard.generate(writer, LINES[4], temperature=1.0, seed=3, max_new_tokens=12)
    made["beam"] = lambda: regard.translate(reader, LINES[:2], beam=3, max_new_tokens=8)
    made["cross"] = lambda: regard.look(reader, LINES[0], target=LINES[2]).weights(layer=0, head=1, kind="cross")
    made["halved"], made["doubled"] = lambda: scaled(0.5), lambda: scaled(2.0)
    return made


def is_same(one: Any, two: Any) -> bool:
    if isinstance(one, tuple):
        return all(is_same(a, b) for a, b in zip(one, two, strict=True))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) else bool(one == two)


@pytest.mark.promise(7, "answers of 8 threads on one model, bit for bit those of one")
def test_eight_threads(models: tuple[Model, Model], tally: Tally) -> None:
    todo = jobs(models)
    alone = {name: work() for name, work in todo.items()}
    with tally.attempt("what they do differs"):
        assert not is_same(alone["off 0"], alone["off 1"])
        assert alone["halved"] != alone["doubled"] or alone["halved"] != alone["beam"][:1]
    answers: list[tuple[str, Any]] = []
    begin = threading.Barrier(THREADS)

    def work(seed: int) -> None:
        draw = random.Random(seed)
        begin.wait()
        for _ in range(size(5, 300)):
            name = draw.choice(list(todo))
            try:
                answers.append((name, todo[name]()))
            except Exception as wrong:
                answers.append((name, wrong))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, answer in answers:
        with tally.attempt(name):
            assert not isinstance(answer, Exception), repr(answer)
            assert is_same(answer, alone[name])


@pytest.mark.promise(7, "a recorder that another thread switches off in the middle of a tap")
def test_a_recorder_that_is_switched_off_meanwhile(
    models: tuple[Model, Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen with eight threads: one checked whether somebody records, and by the time it showed a tensor nobody did."""

    class Leaving(taps.Recorder):
        @property
        def values(self) -> bool:  # type: ignore[override]
            monkeypatch.setattr(taps, "_recorder", None)
            return True

        @values.setter
        def values(self, value: bool) -> None: ...

    for tensor in (True, False):
        monkeypatch.setattr(taps, "_recorder", recorder := Leaving(models[0]))
        if tensor:
            taps.tap("x", torch.zeros(1))
            assert list(recorder.tensors) == ["x"]
        else:
            models[0](torch.arange(3, 9)[None])


def held() -> tuple[int, int]:
    """Bytes and descriptors of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages, len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.promise(7, "looks and generations in one process, memory and descriptors flat")
def test_a_process_that_goes_on_does_not_grow(models: tuple[Model, Model], tally: Tally) -> None:
    todo = list(jobs(models).items())

    def go_on(n: int) -> None:
        for number in range(n):
            name, work = todo[number % len(todo)]
            with tally.attempt(name):
                work()

    go_on(size(30, 300))
    bytes_before, files_before = held()
    go_on(size(30, 1000))
    bytes_after, files_after = held()
    tally.measured = f"{(bytes_after - bytes_before) / 1e6:+.1f} MB, {files_after - files_before:+d} descriptors"
    assert bytes_after - bytes_before < 6_000_000
    assert files_after <= files_before  # what other tests have left open may be closed meanwhile
