"""The same command and seed give the same bits, in any process, with any number of threads that stays the same."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.training.run_directory import RunDirectory
from training.runs import assert_same, command, environment, train, words_of, write_data

from .promises import IS_FULL, Tally

RUNS: dict[str, tuple[str, ...]] = {
    "translate": ("train.optimiser=muon", "model.d_model=64", "model.d_ff=128", "train.batch_tokens=512"),
    "lm": ("train.ema=0.9", "model.d_model=64", "model.d_ff=256", "train.batch_tokens=512"),
    "classify": ("train.accumulate=2", "train.precision=bf16"),
    "mlm": ("train.optimiser=adamw", "train.schedule=wsd"),
}
WORDS = ("train.steps=4", "train.save_every=2", "train.eval_every=2", "train.seed=5")


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.promise(8, "runs trained again with as many threads")
@pytest.mark.parametrize("task", RUNS if IS_FULL else ["classify"])
def test_the_same_bits_with_any_number_of_threads(task: str, threads: None, tally: Tally, tmp_path: Path) -> None:
    """Threads share out sums, so another number of them changes last digits: that is told in provenance.json."""
    data, texts, numbers = write_data(task, tmp_path, 200), set(), range(1, 5) if IS_FULL else [2]
    for n in numbers:
        torch.set_num_threads(n)
        with tally.attempt(f"{task} on {n} threads"):
            one, other = (tmp_path / f"{n}-{again}" for again in ("one", "other"))
            for out in (one, other):
                train(task, out, data, *WORDS, *RUNS[task])
            assert_same(one, other)
            assert RunDirectory.open(one).facts["machine"]["threads"] == n
        if task == "translate":
            texts.add(
                tuple(regard.translate(regard.load(tmp_path / f"{numbers[0]}-one"), ["one two three", "four"], beam=2))
            )
    assert len(texts) <= 1, "one model says the same on any number of threads"


@pytest.mark.skipif(not IS_FULL, reason="make trust has it: each process takes seconds to start")
@pytest.mark.promise(8, "runs of processes with other hash seeds and as many threads")
def test_the_same_bits_in_other_processes(tally: Tally, tmp_path: Path) -> None:
    data = write_data("translate", tmp_path, 200)
    for n in (1, 2, 3, 4):
        found = set()
        for again, seed in enumerate(("0", "1", "77")):
            out = tmp_path / f"{n}-{again}"
            words = words_of("translate", data, *WORDS, *RUNS["translate"], f"train.out={out}")
            env = environment(PYTHONHASHSEED=seed, OMP_NUM_THREADS=str(n), MKL_NUM_THREADS=str(n))
            subprocess.run(command("train", "translate", *words, "--quiet"), env=env, check=True, capture_output=True)
            found.add(hashlib.sha256((out / "model" / "model.safetensors").read_bytes()).hexdigest())
        with tally.attempt(f"{n} threads"):
            assert len(found) == 1, found
