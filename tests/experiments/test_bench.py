"""Measuring: exponents, children, the budget, and ``regard bench attention`` from end to end."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring import crossing_length

from regard.cli import main
from regard.errors import RegardError
from regard.experiments import bench_attention as bench
from regard.experiments.bench_attention import (
    CONTENDERS,
    Setup,
    build_run,
    choose_contenders,
    contenders,
    sparse_mask,
)
from regard.experiments.benchmarking import available_memory, fit_exponent, format_table, measure
from regard.experiments.sweep_figures import BENCH_COLOURS, spread_heights
from regard.experiments.sweep_runner import LocalRunner

LENGTHS = [64, 128]
SMALL: dict[str, Any] = {"lengths": LENGTHS, "n_heads": 2, "d_head": 16}

# ------------------------------------------------------------------ how things grow


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, 3.25])
def test_the_exponent_of_a_power_law_is_exact(power: float) -> None:
    lengths = [128, 300, 1024, 5000]
    found = fit_exponent(lengths, [7e-3 * t**power for t in lengths])
    assert found == pytest.approx(power, abs=1e-12)


def test_the_exponent_is_that_of_the_longest_lengths() -> None:
    lengths = [1, 10, 100, 1000, 10_000]
    values = [9e3, 9e3, *(float(t**2) for t in lengths[2:])]
    assert fit_exponent(lengths, values) == pytest.approx(2)
    assert fit_exponent(lengths[::-1], values[::-1]) == pytest.approx(2)
    assert fit_exponent(lengths, values, longest=5) == pytest.approx(1.04, abs=0.05)


@pytest.mark.parametrize(("lengths", "values"), [([], []), ([8], [1.0]), ([8, 8], [1.0, 2.0]), ([8, 16], [0.0, 1.0])])
def test_without_two_lengths_there_is_no_exponent(lengths: list[int], values: list[float]) -> None:
    assert fit_exponent(lengths, values) is None


def test_where_two_power_laws_cross() -> None:
    lengths = [100, 200, 400, 800, 1600]
    slow, fast = [t**2 / 300 for t in lengths], [float(t) for t in lengths]
    assert crossing_length(lengths, fast, slow) == pytest.approx(300)
    assert crossing_length(lengths, slow, fast) is None
    assert crossing_length(lengths[2:], fast[2:], slow[2:]) == 400
    assert crossing_length([], [], []) is None


def test_a_lucky_short_length_is_no_crossing() -> None:
    """What counts is from where on it stays faster."""
    at = crossing_length([1, 2, 4, 8], [1.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 6.0])
    assert at is not None
    assert 4 < at < 8


# ------------------------------------------------------------------ processes of their own


def hold(mib: int) -> int:
    """Touch that much memory; what a child reports that it held."""
    ours = measure(lambda: bytearray(b"x") * (mib << 20), enough_s=0.0)
    assert ours.runs == 1
    return ours.peak_bytes


def fail(_: None) -> None:
    raise ValueError("length=0 is too short")


def die(_: None) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def pid(_: None) -> int:
    return os.getpid()


def environment(name: str) -> str | None:
    return os.environ.get(name)


@pytest.fixture(scope="module")
def runner() -> Iterator[LocalRunner]:
    with LocalRunner() as ready:
        yield ready


def test_a_child_sees_the_memory_of_its_own_work_and_of_nothing_before(runner: LocalRunner) -> None:
    for mib in (200, 40, 120):
        held = runner.submit(hold, mib).result() / 2**20
        assert mib <= held + 2
        assert held < mib + 8


def test_what_goes_wrong_in_a_child_is_told_and_the_next_one_works(runner: LocalRunner) -> None:
    with pytest.raises(RegardError, match="ValueError: length=0 is too short"):
        runner.submit(fail, None).result()
    with pytest.raises(RegardError, match="ended with exit status -9"):
        runner.submit(die, None).result()
    assert runner.submit(pid, None).result() != runner.submit(pid, None).result()


def test_a_child_that_takes_too_long_is_ended(runner: LocalRunner) -> None:
    start = time.monotonic()
    with pytest.raises(RegardError, match=r"longer than max_seconds=0\.2"):
        runner.submit(time.sleep, 600, 0.2).result()
    assert time.monotonic() - start < 300


def test_a_child_has_the_variables_of_its_caller(runner: LocalRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_TRY", "1")
    assert runner.submit(environment, "REGARD_TRY").result() == "1"
    monkeypatch.delenv("REGARD_TRY")
    assert runner.submit(environment, "REGARD_TRY").result() is None
    assert runner.submit(environment, "PYTHONPATH").result() == os.environ.get("PYTHONPATH")


WAITING = """
import os, time

def wait(file):
    with open(file, "w") as out:
        out.write(str(os.getpid()))
    time.sleep(600)
"""


def test_who_stops_asking_leaves_no_process_behind(tmp_path: Path) -> None:
    """The script has no main guard: a child does not run it again."""
    file, script = tmp_path / "pid", tmp_path / "asking.py"
    (tmp_path / "waiting.py").write_text(WAITING)
    script.write_text(
        f"import sys; sys.path[1:] = {sys.path!r}\n"
        "from waiting import wait\n"
        "from regard.experiments import sweep_runner\n"
        "sweep_runner._PRELOAD.clear()\n"  # one job: importing in advance what it does not need would only take time
        f"with sweep_runner.LocalRunner() as runner: runner.submit(wait, {str(file)!r}).result()\n"
    )
    asker = subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True)
    while not (file.exists() and file.read_text()):
        assert asker.poll() is None, asker.communicate()[1]
        time.sleep(0.05)
    asker.send_signal(signal.SIGINT)
    said = asker.communicate(timeout=300)[1]
    assert said.count("KeyboardInterrupt") == 1
    end = time.monotonic() + 120  # the system may take a moment to notice
    while alive(int(file.read_text())):
        assert time.monotonic() < end, "the measuring process is still there"
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_measure_runs_until_it_has_seen_enough() -> None:
    calls: list[int] = []
    assert measure(lambda: calls.append(1), enough_s=0.0).runs == len(calls) == 1
    assert measure(lambda: None, enough_s=60.0, most_runs=4).runs == 4
    assert available_memory() > 1 << 20


# ------------------------------------------------------------------ what is compared


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", CONTENDERS)
def test_every_contender_runs_and_its_gradients_arrive(name: str, causal: bool, backward: bool) -> None:
    setup = Setup(48, n_heads=2, d_head=8, causal=causal, backward=backward)
    build_run(name, setup)()
    forward, leaves = CONTENDERS[name].build(setup)
    output = forward()
    assert output.numel() == 2 * 48 * 8
    assert torch.isfinite(output).all()
    if backward:
        output.sum().backward()
        assert all(leaf.grad is not None for leaf in leaves)


def test_sparse_patterns_look_back_only_when_asked_to() -> None:
    for name in ("window", "strided", "bigbird"):
        assert not sparse_mask(name, is_causal=True).dense(600).triu(1).any()
    assert sparse_mask("window", is_causal=False).dense(600)[0, 0, 300].sum() == 256
    assert sparse_mask("window", is_causal=True).dense(600)[0, 0, 300].sum() == 256


def test_an_unknown_mechanism_is_named_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"mechanism 'tield' is not one of reference, .*; did you mean 'tiled'\?"):
        bench.bench_attention(lengths=[64], mechanisms=["tield"])
    assert [contender.name for contender in choose_contenders(["window", "sdpa", "window"])] == ["window", "sdpa"]


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"lengths": []}, r"lengths=\[\] must be"),
        ({"lengths": [8, 0]}, r"lengths=\[8, 0\] must be"),
        ({"lengths": [8], "n_heads": 0}, "n_heads=0 must be at least 1"),
        ({"lengths": [8], "d_head": -1}, "d_head=-1 must be at least 1"),
    ],
)
def test_sizes_that_cannot_be(asked: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        bench.bench_attention(**asked)


# ------------------------------------------------------------------ the benchmark


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[bench.AttentionBench, list[str]]:
    said: list[str] = []
    out = tmp_path_factory.mktemp("bench") / "new" / "folder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "ENOUGH_S", 0.0)
        # On a busy machine a single run may take so long that a longer one would not be started.
        patient = {name: replace(each, most_seconds=math.inf) for name, each in CONTENDERS.items()}
        patch.setattr(bench, "CONTENDERS", patient)
        return bench.bench_attention(**SMALL, out=out, progress=said.append), said


def _numbers(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from _numbers(item)
    elif isinstance(value, int | float):
        yield value


def test_every_mechanism_has_a_cell_for_every_length(small: tuple[bench.AttentionBench, list[str]]) -> None:
    found, said = small
    document = found.to_dict()
    assert [m["name"] for m in document["mechanisms"]] == list(contenders())
    for mechanism in document["mechanisms"]:
        assert [cell["length"] for cell in mechanism["cells"]] == LENGTHS
        for cell in mechanism["cells"]:
            assert cell["skipped"] is None
            assert cell["seconds"] > 0
            assert cell["peak_bytes"] >= 0
            assert cell["runs"] == 1
        assert isinstance(mechanism["time_exponent"], float)
    assert len(said) == len(contenders()) * len(LENGTHS)
    assert document["threads"] >= 1
    assert (document["n_heads"], document["d_head"], document["causal"]) == (2, 16, True)


def test_the_document_is_json_with_finite_numbers(small: tuple[bench.AttentionBench, list[str]]) -> None:
    document = small[0].to_dict()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    assert all(math.isfinite(number) for number in _numbers(document))


def test_the_table_has_every_row_twice_and_the_files_exist(small: tuple[bench.AttentionBench, list[str]]) -> None:
    found, _ = small
    table = found.to_text()
    for contender in CONTENDERS.values():
        rows = [
            line for line in table.splitlines() if line.startswith((f"{contender.title}  ", f"{contender.title} ("))
        ]
        assert len(rows) == 2
        assert all("T^" in row or "–" in row for row in rows)
    assert "linformer mixes all positions and cannot be causal" in table
    assert "strided is causal" not in table
    text, document, picture = found.files
    assert text.read_text(encoding="utf-8") == table + "\n"
    assert json.loads(document.read_text(encoding="utf-8")) == found.to_dict()
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert picture.stat().st_size > 20_000


def test_the_picture_shows_something(small: tuple[bench.AttentionBench, list[str]]) -> None:
    from PIL import Image

    with Image.open(small[0].files[2]) as image:
        assert image.width > 1500
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24)}
    for colour in set(BENCH_COLOURS.values()):
        assert tuple(bytes.fromhex(colour[1:])) in colours


def test_what_does_not_fit_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "ENOUGH_S", 0.0)
    monkeypatch.setattr(bench, "MOST_BYTES", 8 << 20)
    asked = ["reference", "fourier"]
    found = bench.bench_attention(lengths=[64, 1024, 4096], mechanisms=asked, n_heads=2, d_head=8, out=tmp_path)
    reference, fourier = (found.of(name) for name in asked)
    assert reference[0].skipped is None
    assert [cell.skipped for cell in fourier] == [None, None, None]
    assert reference[2].skipped == "needs 411 MiB, more than the 8 MiB allowed"
    assert (reference[2].seconds, reference[2].peak_bytes) == (None, None)
    table = found.to_text()
    assert "(b) reference at 4,096: needs 411 MiB" in table
    assert sum("(b)" in line for line in table.splitlines()) == 3  # in both tables, and the reason
    document = found.to_dict()
    assert document["mechanisms"][0]["time_exponent"] is None
    json.dumps(document, allow_nan=False)
    assert found.files[2].stat().st_size > 20_000


def test_what_would_take_too_long_is_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither after a shorter length, nor as the first one, where a pilot run tells."""
    monkeypatch.setattr(bench, "ENOUGH_S", 0.0)
    asked: dict[str, Any] = {"mechanisms": ["additive"], "n_heads": 1, "d_head": 4}
    after = bench.bench_attention(lengths=[64, 200_000], **asked)
    assert [cell.skipped is None for cell in after.cells] == [True, False]
    first = bench.bench_attention(lengths=[200_000], **asked)
    assert first.cells[0].skipped is not None
    assert first.cells[0].skipped.startswith("would take about")
    assert first.cells[0].skipped.endswith("more than the 3 s allowed")
    assert first.threads >= 1
    assert "additive at 200,000: would take about" in first.to_text()


def test_the_command_prints_one_document(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "ENOUGH_S", 0.0)
    words = ["bench", "attention", "--lengths", "64,128", "--mechanisms", "sdpa,window,linear", "--json"]
    code = main(words)
    answer = capsys.readouterr()
    assert code == 0, answer.err
    document = json.loads(answer.out)
    assert [m["name"] for m in document["mechanisms"]] == ["sdpa", "window", "linear"]
    assert document["lengths"] == LENGTHS
    assert all(cell["seconds"] > 0 for m in document["mechanisms"] for cell in m["cells"])
    assert "window at 128: " in answer.err


# ------------------------------------------------------------------ small things


def test_columns_are_aligned() -> None:
    text = format_table([["name", "1", "10,000", "last"], ["a", "1.5", "2", "T^2.00"]])
    assert text.splitlines() == ["name    1  10,000    last", "─" * 25, "a     1.5       2  T^2.00"]


@pytest.mark.parametrize(
    "wanted",
    [[], [0.5], [0.5, 0.5, 0.5], [0.0, 0.001, 0.9, 0.95, 1.0], [0.99] * 6, [0.0] * 4, [0.1 * n for n in range(10)]],
)
def test_labels_keep_their_order_and_their_distance(wanted: list[float]) -> None:
    placed = spread_heights(wanted, 0.05)
    assert len(placed) == len(wanted)
    assert all(b - a >= 0.05 - 1e-9 for a, b in pairwise(placed))
    assert all(-1e-9 <= height <= 1 + 1e-9 for height in placed)
    if all(b - a >= 0.05 for a, b in pairwise(wanted)):
        assert placed == pytest.approx(wanted)
