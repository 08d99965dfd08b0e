"""Progress as people and programs meet it: a live line in a terminal, plain lines in a pipe, files, a picture."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
import unicodedata
from fcntl import ioctl
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from forked_shell import Shell
from regard.config import ModelConfig
from regard.models import build
from regard.training.console_display import (
    LiveLine,
    RunStatus,
    Style,
    clip_to_width,
    format_count,
    format_duration,
    format_rows,
    printable,
)
from regard.training.journal import TIMINGS, draw_curves, without_timings
from regard.training.precision import flops_per_token, peak_flops, peak_of
from regard.training.reporter import Pace, Reporter, peak_memory_mib


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def make_steps(reporter: Reporter, first: int, last: int, evaluate_every: int = 0) -> None:
    """A run whose numbers are a function of the step."""
    for step in range(first, last + 1):
        reporter.step(step, loss=torch.tensor(1 / step), lr=0.1 / step, grad_norm=torch.tensor(2.0), n_tokens=step)
        if evaluate_every and step % evaluate_every == 0:
            with reporter.paused():
                reporter.evaluation(step, {"valid_loss": 2 / step, "bleu": float(step)})


# ------------------------------------------------------------------------------------ metrics.jsonl


def test_lines_hold_the_loss_of_the_step_and_the_mean_since_the_last_line(tmp_path: Path) -> None:
    with Reporter(tmp_path, steps=10, log_every=4, style="quiet", flops_per_token=3.0, peak_flops=6e9) as reporter:
        make_steps(reporter, 1, 10, evaluate_every=5)
    found = lines_of(tmp_path)
    training = [line for line in found if "loss_mean" in line]
    assert [line["step"] for line in training] == [1, 4, 8, 10]
    assert training[1]["loss"] == 0.25
    assert training[1]["loss_mean"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3)
    assert training[2]["tokens"] == sum(range(1, 9))
    assert training[2]["lr"] == 0.1 / 8
    assert training[2]["grad_norm"] == 2.0
    assert training[2]["tokens_per_s"] > 0
    assert training[2]["mfu"] == pytest.approx(training[2]["tokens_per_s"] * 3.0 / 6e9, abs=1e-4)
    assert "tokens_per_s" not in training[0], "the time of the first step is start-up"
    assert all(line["memory_mib"] > 1 and line["seconds"] >= line["train_seconds"] for line in training)
    evaluations = [line for line in found if "valid_loss" in line]
    assert [(line["step"], line["bleu"]) for line in evaluations] == [(5, 5.0), (10, 10.0)]
    assert evaluations[0]["loss"] == pytest.approx(0.2)


def test_training_never_takes_longer_than_the_run_however_slowly_the_clock_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count().__next__  # a second for each reading
    monkeypatch.setattr("regard.training.reporter.Pace", lambda: Pace(clock=clock))
    with Reporter(tmp_path, steps=10, log_every=4, style="quiet") as reporter:
        make_steps(reporter, 1, 10, evaluate_every=5)
        state = reporter.state()
    lines = [line for line in lines_of(tmp_path) if "train_seconds" in line]
    assert [line["step"] for line in lines] == [1, 4, 8, 10]
    assert all(times["seconds"] >= times["train_seconds"] for times in [*lines, state])


@pytest.mark.parametrize("bad", [math.nan, math.inf, torch.tensor(math.nan)])
def test_what_is_not_a_number_becomes_null(tmp_path: Path, bad: Any) -> None:
    with Reporter(tmp_path, steps=2, log_every=1, style="quiet") as reporter:
        reporter.step(1, loss=bad, lr=0.1, grad_norm=bad, n_tokens=1, extra=bad)
        reporter.evaluation(1, {"valid_loss": bad, "signature": "nrefs:1|토큰:ko"})
    text = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert "nrefs:1|토큰:ko" in text
    first, second = lines_of(tmp_path)
    assert first["loss"] is first["loss_mean"] is first["grad_norm"] is first["extra"] is None
    assert second["valid_loss"] is None


class Counting:
    """Looks like a number on a device; to look at it is to wait."""

    looks = 0

    def item(self) -> float:
        Counting.looks += 1
        return 1.5


def test_numbers_stay_on_the_device_until_a_line_is_due(tmp_path: Path) -> None:
    Counting.looks = 0
    number: Any = Counting()
    with Reporter(tmp_path, steps=1000, log_every=100, style="quiet") as reporter:
        reporter.step(1, loss=number, lr=0.1, grad_norm=number, n_tokens=1)
        Counting.looks = 0
        for step in range(2, 100):
            reporter.step(step, loss=number, lr=0.1, grad_norm=number, n_tokens=1, extra=number)
        assert Counting.looks == 0
        reporter.step(100, loss=number, lr=0.1, grad_norm=number, n_tokens=1, extra=number)
        assert Counting.looks > 0


def test_a_step_that_is_not_due_neither_waits_for_tensors_nor_keeps_their_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(*_: object) -> float:
        raise AssertionError("a device would have been waited for")

    weight = torch.ones((), requires_grad=True)
    buffer = torch.tensor(1.0)
    with Reporter(tmp_path, steps=10, log_every=4, style="quiet") as reporter:
        make_steps(reporter, 1, 1)
        for name in ("item", "tolist", "__float__", "cpu", "numpy", "__bool__"):
            monkeypatch.setattr(torch.Tensor, name, waits)
        for step in (2, 3):
            buffer.fill_(float(step))  # the same memory every step, as CUDA graphs have it
            reporter.step(step, loss=buffer * 1 + 0 * weight, lr=0.1, grad_norm=buffer, n_tokens=1)
            assert not reporter._losses[-1].requires_grad
        reporter.step(3, loss=buffer, lr=0.1, grad_norm=buffer, n_tokens=1)
        buffer.fill_(4.0)
        monkeypatch.undo()
        reporter.step(4, loss=buffer, lr=0.1, grad_norm=buffer, n_tokens=1)
    assert lines_of(tmp_path)[-1]["loss_mean"] == (2 + 3 + 3 + 4) / 4


# ------------------------------------------------------------------------------------ resuming


@pytest.mark.parametrize(("saved_at", "killed_at"), [(4, 4), (5, 5), (5, 7), (6, 9), (10, 12), (12, 12)])
def test_a_resumed_run_leaves_the_lines_of_an_uninterrupted_one(tmp_path: Path, saved_at: int, killed_at: int) -> None:
    with Reporter(tmp_path / "whole", steps=12, log_every=4, style="quiet") as whole:
        make_steps(whole, 1, 12, evaluate_every=5)
        whole.finish()
    out = tmp_path / "parts"
    with Reporter(out, steps=12, log_every=4, style="quiet") as first:
        make_steps(first, 1, saved_at, evaluate_every=5)
        state = json.loads(json.dumps(first.state(), allow_nan=False))
        make_steps(first, saved_at + 1, killed_at, evaluate_every=5)
    with open(out / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 3, "loss": 0.1')  # torn by the kill
    with Reporter(out, steps=12, log_every=4, style="quiet", start_step=saved_at) as second:
        second.restore(state)
        make_steps(second, saved_at + 1, 12, evaluate_every=5)
        assert second.seconds > state["seconds"]
        second.finish()
    assert [without_timings(x) for x in lines_of(out)] == [without_timings(x) for x in lines_of(tmp_path / "whole")]
    assert sorted(p.name for p in out.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_an_evaluation_made_again_after_a_crash_is_written_once(tmp_path: Path) -> None:
    for start in (0, 3):
        with Reporter(tmp_path, steps=4, log_every=1, style="quiet", start_step=start) as reporter:
            make_steps(reporter, start + 1, 3)
            reporter.evaluation(3, {"valid_loss": 0.5})
            reporter.evaluation(3, {"valid_loss": 0.4})  # of other weights: that is news
    assert [line.get("valid_loss") for line in lines_of(tmp_path)] == [None, None, None, 0.5, 0.4]


def test_a_new_run_in_an_old_directory_begins_empty_and_a_state_is_not_needed_to_go_on(tmp_path: Path) -> None:
    with Reporter(tmp_path, steps=9, log_every=1, style="quiet") as reporter:
        make_steps(reporter, 1, 5)
    with Reporter(tmp_path, steps=9, log_every=1, style="quiet", start_step=3) as reporter:
        assert reporter.tokens == 1 + 2 + 3
        assert reporter.last_loss == pytest.approx(1 / 3)
    with Reporter(tmp_path, steps=9, log_every=1, style="quiet"):
        assert lines_of(tmp_path) == []


def test_a_full_disk_takes_back_half_a_line_and_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, steps=9, log_every=1, style="plain")
    make_steps(reporter, 1, 2)
    real = reporter._file._file  # type: ignore[union-attr]

    class Full:
        def write(self, line: bytes) -> int:
            return real.write(line[:7])

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(reporter._file, "_file", Full())
    make_steps(reporter, 3, 4)
    monkeypatch.undo()
    make_steps(reporter, 5, 5)
    reporter.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 5]
    assert capsys.readouterr().err.count("metrics.jsonl cannot be written") == 1


def test_off_says_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path / "new", steps=3, log_every=1, style="off") as reporter:
        reporter.begin({"task": "lm"})
        make_steps(reporter, 1, 3, evaluate_every=1)
        reporter.samples(1, [{"a": "b"}])
        reporter.finish()
    assert not (tmp_path / "new").exists()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("arguments", "message"), [({"log_every": 0}, "log_every=0"), ({"style": "loud"}, "style='loud'")]
)
def test_bad_arguments_are_named(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Reporter(tmp_path, **{"steps": 1, "log_every": 1, **arguments})


# ------------------------------------------------------------------------------------ TensorBoard


def events(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return {tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tensorboard.summary.writer import event_file_writer

    # Files of one second and process are read in the order of this counter as text, where 10 comes before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    with Reporter(tmp_path, steps=6, log_every=1, style="quiet") as reporter:
        make_steps(reporter, 1, 5, evaluate_every=2)
        reporter.samples(5, [{"source": "a|b", "output": "한글"}])
    with Reporter(tmp_path, steps=6, log_every=1, style="quiet", start_step=3) as reporter:
        make_steps(reporter, 4, 6, evaluate_every=2)
    found = events(tmp_path / "tensorboard")
    assert [step for step, _ in found["train/loss"]] == [1, 2, 3, 4, 5, 6]
    assert [step for step, _ in found["valid/bleu"]] == [2, 4, 6]
    assert [value for _, value in found["valid/loss"]] == pytest.approx([1.0, 0.5, 1 / 3])


def test_without_tensorboard_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with Reporter(tmp_path, steps=4, log_every=1, style="plain") as reporter:
        make_steps(reporter, 1, 4, evaluate_every=1)
    assert capsys.readouterr().err.count("tensorboard is not installed") == 1
    assert len(lines_of(tmp_path)) == 8


# ------------------------------------------------------------------------------------ in a terminal, in a pipe

SCRIPT = """
import sys, time, warnings
from pathlib import Path
from regard.training.reporter import Reporter
assert not {"rich", "matplotlib", "tensorboard"} & set(sys.modules), "imported before they are needed"
with Reporter(Path(sys.argv[1]), steps=60, log_every=10, style=sys.argv[2]) as reporter:
    reporter.begin({"task": "translate", "data": "en-ko", "parameters": 3_210_000, "device": "cpu"})
    for step in range(1, 61):
        time.sleep(0.02)
        reporter.step(step, loss=60.0 / step, lr=1e-3, grad_norm=0.5, n_tokens=1000)
        if step == 30:
            warnings.warn("somebody else speaks")
            with reporter.paused():
                reporter.evaluation(step, {"valid_loss": 1.25, "bleu": 31.4})
                said = {"source": "The cat\\x1b[31m sat.", "target": "고양이가 앉았다.", "output": "아주 긴 문장 " * 60}
                reporter.samples(step, [said])
            reporter.report_checkpoint(step, Path(sys.argv[1]) / "checkpoints/step-000030")
    reporter.finish()
"""
FORKED = "\n".join(line for line in SCRIPT.splitlines() if not line.startswith("assert"))  # all is imported there


def run_in_terminal(bash: Shell, out: Path, columns: int, term: str = "xterm-256color") -> tuple[str, str]:
    """What a terminal of that width gets from stderr, and what stdout gets."""
    ours, theirs = pty.openpty()
    ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    env = {**os.environ, "TERM": term, "PYTHONIOENCODING": "utf-8"}
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        env.pop(name, None)
    child = subprocess.Popen(
        [bash.python, "-c", FORKED, str(out), "auto"], stdin=theirs, stderr=theirs, stdout=subprocess.PIPE, env=env
    )
    os.close(theirs)
    got, end = b"", time.monotonic() + 300
    while time.monotonic() < end and select.select([ours], [], [], 300)[0]:
        try:
            part = os.read(ours, 65536)
        except OSError:  # the other side is closed: Linux says EIO
            break
        if not part:
            break
        got += part
    os.close(ours)
    stdout, _ = child.communicate(timeout=300)
    assert child.returncode == 0, got.decode()
    return got.decode("utf-8"), stdout.decode()


ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_a_terminal_gets_one_live_line_that_leaves_no_trace(bash: Shell, tmp_path: Path) -> None:
    shown, stdout = run_in_terminal(bash, tmp_path, 100)
    assert stdout == ""
    text = ESCAPES.sub("", shown)
    live = [piece for piece in re.split(r"[\r\n]+", text) if re.search(r"\d+/60", piece) and "loss" in piece]
    moving = [piece for piece in live if "ETA" in piece]
    assert len({re.search(r"(\d+)/60", piece)[1] for piece in moving}) > 2, "the line moves"  # type: ignore[index]
    assert any(re.search(r"loss \d+\.\d{4}.*lr 1\.00e-03.*tok/s.*(MiB|GiB).*ETA \d+:\d\d", piece) for piece in moving)
    assert all(cell_len(piece) <= 100 for piece in live)
    assert "\x1b[2K" in shown, "each line wipes the one before"
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l"), "the cursor is there again"
    assert "somebody else speaks" in text
    assert "bleu 31.40" in text
    assert "고양이가 앉았다." in text
    assert "The cat␛[31m sat." in text, "what a model says cannot steer the terminal"
    assert text.rstrip().splitlines()[-1].strip() == "saved checkpoints/step-000030"
    samples = [line for line in text.splitlines() if "아주 긴" in line]
    assert len(samples) == 1
    assert samples[0].rstrip().endswith("…")
    assert cell_len(samples[0].rstrip()) in (99, 100)


@pytest.mark.parametrize("terminal", [False, True])
def test_anything_else_gets_plain_lines(bash: Shell, tmp_path: Path, terminal: bool) -> None:
    if terminal:  # one that cannot move its cursor
        stderr, stdout = run_in_terminal(bash, tmp_path, 100, term="dumb")
    else:
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, str(tmp_path), "auto"],
            capture_output=True,
            env={**os.environ, "PYTHONIOENCODING": "utf-8"},
            check=True,
        )
        stderr, stdout = done.stderr.decode(), done.stdout.decode()
    assert stdout == ""
    assert "\x1b" not in stderr
    text = stderr.replace("\r\n", "\n")
    assert "\r" not in text
    assert text.startswith("translate\n  data")
    assert re.search(r"^  parameters  3,210,000$", text, re.MULTILINE)
    assert len(re.findall(r"^step +\d+/60  loss \d", text, re.MULTILINE)) == 7
    assert re.search(r"^step 30/60  loss 2\.0000  lr 1\.00e-03  grad 0\.5  \S+ tok/s  \d+ MiB  ETA 0:0\d$", text, re.M)
    assert re.search(r"^step 30/60  valid loss 1\.2500  bleu 31\.40$", text, re.MULTILINE)
    assert re.search(r"^step 30/60  saved checkpoints/step-000030$", text, re.MULTILINE)


def test_json_leaves_stdout_to_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Reporter(tmp_path, steps=3, log_every=1, style="json") as reporter:
        reporter.begin({"task": "lm"})
        make_steps(reporter, 1, 3, evaluate_every=3)
        reporter.finish()
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("lm\nstep 1/3  loss 1.0000  lr 1.00e-01  grad 2  ")


@pytest.mark.parametrize("style", ["plain", "live"])
def test_a_reader_that_leaves_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: Style
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    closed = open(writer, "w", encoding="utf-8", buffering=1)  # noqa: SIM115 - closing it fails, as it should
    monkeypatch.setattr(sys, "stderr", closed)
    with Reporter(tmp_path, steps=9, log_every=1, style=style) as reporter:
        reporter.begin({"task": "lm"})
        make_steps(reporter, 1, 9, evaluate_every=3)
        reporter.finish()
    with contextlib.suppress(BrokenPipeError):
        closed.close()
    assert lines_of(tmp_path)[-1]["step"] == 9


@given(st.integers(10, 200), st.booleans())
def test_the_live_line_fits_every_terminal(width: int, doing: bool) -> None:
    now = RunStatus(
        100_000, 4_321, 1.2345, 3e-4, 0.5, 123_456.0, 0.384, 12_345.0, 4_321.0, "evaluating …" if doing else ""
    )
    line = LiveLine(now, sys.stderr, force=True)
    text = line.render(width).plain
    assert "4,321/100,000" in text
    if width >= 50:
        assert cell_len(text) <= width
        assert "loss 1.2345" in text
    if width >= 130:
        assert "123k tok/s  MFU 38.4%  12.1 GiB  ETA 1:12:01" in text


# ------------------------------------------------------------------------------------ text in columns


@example("aᄒ\u200d\u200dᄒ한글", 4)
@example("\u200d\u200daa", 1)
@given(st.text(st.sampled_from("a 한글á́👨‍👩‍👧ᄒ\u1161\u11ab\n\t界"), max_size=30), st.integers(1, 20))
def test_clipping_keeps_whole_characters(text: str, width: int) -> None:
    text = printable(text)
    clipped = clip_to_width(text, width)
    assert cell_len(clipped) <= max(width, 1)
    if clipped != text:
        assert clipped.endswith("…")
        kept = clipped[:-1]
        assert text.startswith(kept)
        rest = text[len(kept) :]
        # A text may itself begin within a character; then a cut before all of it splits nothing.
        assert not kept or not unicodedata.combining(rest[0])
        assert not kept or rest[0] not in "\u1161\u11ab\u200d"


def test_short_examples_stand_in_columns_that_line_up_under_hangul() -> None:
    rows = [
        {"source": "나는 간다", "output": "I go"},
        {"source": "ab", "output": "먹는다"},
        {"source": "x", "label": 3},
    ]
    found = format_rows(rows, 60)
    starts = [
        cell_len(line[: line.index(word)]) for line, word in zip(found, ("output", "I go", "먹는다"), strict=False)
    ]
    assert len(set(starts)) == 1
    assert len(found) == 4
    assert len(format_rows(rows, 16)) == 6 + 2, "too narrow: one value a line, an empty one between examples"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (999.0, "999"),
        (1000, "1.00k"),
        (9_999, "10.0k"),
        (12_345, "12.3k"),
        (999_999, "1.00M"),
        (4_560_000, "4.56M"),
        (2.5e12, "2.50T"),
    ],
)
def test_counts_in_few_digits(value: float, said: str) -> None:
    assert format_count(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0:00"), (59.6, "1:00"), (754, "12:34"), (11045, "3:04:05"), (183845, "2 d 3:04:05")]
)
def test_durations(seconds: float, said: str) -> None:
    assert format_duration(seconds) == said


# ------------------------------------------------------------------------------------ speed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_and_slow_first_steps_do_not_spoil_the_pace() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    for step in range(1, 61):
        clock.now += 30.0 if step in (1, 3) else 0.5  # compiled, then compiled again
        pace.tick(100)
        if step == 1:
            assert pace.per_second("steps") is None
        if step % 10 == 0:
            pace.pause()
            clock.now += 50
            pace.pause()
            clock.now += 7
            pace.resume()
            pace.resume()
    assert pace.per_second("steps") == pytest.approx(2.0)
    assert pace.per_second("tokens") == pytest.approx(200.0)
    assert pace.training() == pytest.approx(2 * 30 + 58 * 0.5)
    assert pace.wall() == pytest.approx(pace.training() + 6 * 57)


def test_the_window_stays_small_and_follows_a_change() -> None:
    clock = Clock()
    pace = Pace(clock=clock)
    for seconds, steps in ((0.001, 50_000), (0.01, 4_000)):
        for _ in range(steps):
            clock.now += seconds
            pace.tick(1)
    assert len(pace._marks) <= 420
    assert pace.per_second("steps") == pytest.approx(100, rel=0.01)


def test_peak_memory_is_that_of_the_process() -> None:
    before = peak_memory_mib("cpu")
    block = torch.ones(32 * 2**20)  # 128 MiB
    after = peak_memory_mib("cpu")
    assert before is not None
    assert after is not None
    assert after >= block.numel() * 4 / 2**20
    assert 20 < after < 2**20


# ------------------------------------------------------------------------------------ the picture


def png_size(path: Path) -> tuple[int, int]:
    head = path.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    return struct.unpack(">II", head[16:24])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1, "loss": 3.0, "loss_mean": 3.0, "lr": 1e-3}],
        [{"step": 1, "loss": None, "loss_mean": None, "lr": 0.0}],
        [{"step": 5, "loss": 0.0, "valid_loss": 0.0, "accuracy": 1.0, "bleu": 0.0, "perplexity": 1e30, "note": "글"}],
        [
            {"step": n, "loss": 9 / n, "loss_mean": 9 / n, "lr": n}
            if n % 3
            else {"step": n, "loss": 1, "valid_loss": 9 / n, "chrf": n}
            for n in range(1, 300)
        ],
    ],
)
def test_curves_of_every_kind_of_run_are_drawn(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    folder = tmp_path / "실험-1 $x_$"  # a name that may have no font, and no formula
    folder.mkdir()
    lines = [*map(json.dumps, records), "not json", '{"step": 9, "lo']
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    draw_curves(folder / "metrics.jsonl", folder / "curves.png")
    assert png_size(folder / "curves.png") == (1800, 840)
    assert "matplotlib.pyplot" not in sys.modules
    assert sorted(p.name for p in folder.iterdir()) == ["curves.png", "metrics.jsonl"]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Curves are drawn here; elsewhere tests/conftest.py leaves them out."""
    monkeypatch.setattr("regard.training.reporter.draw_curves", draw_curves)


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize(("style", "files"), [("quiet", ["curves.png"]), ("records", []), ("off", [])])
def test_a_run_that_ends_leaves_its_curves_but_where_they_would_be_removed(
    tmp_path: Path, style: Style, files: list[str]
) -> None:
    with Reporter(tmp_path, steps=2, log_every=1, style=style) as reporter:
        make_steps(reporter, 1, 2, evaluate_every=1)
        reporter.finish()
    written = [] if style == "off" else ["metrics.jsonl", "tensorboard"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [*files, *written]


@pytest.mark.usefixtures("drawn")
def test_curves_show_training_and_validation_in_their_colours(tmp_path: Path) -> None:
    from PIL import Image

    def colours(picture: Path) -> set[tuple[int, ...]]:
        return {colour for _, colour in Image.open(picture).convert("RGB").getcolors(2**20)}  # type: ignore[union-attr,misc]

    blue, orange = (0, 0x72, 0xB2), (0xD5, 0x5E, 0)
    with Reporter(tmp_path, steps=20, log_every=1, style="quiet") as reporter:
        make_steps(reporter, 1, 20)
    draw_curves(tmp_path / "metrics.jsonl", tmp_path / "a.png")
    assert blue in colours(tmp_path / "a.png")
    assert orange not in colours(tmp_path / "a.png")
    with Reporter(tmp_path, steps=30, log_every=1, style="quiet", start_step=20) as reporter:
        make_steps(reporter, 21, 30, evaluate_every=3)
        reporter.finish()
    assert {blue, orange} <= colours(tmp_path / "curves.png")


@pytest.mark.usefixtures("drawn")
def test_the_last_evaluation_of_a_step_is_drawn(tmp_path: Path) -> None:
    """At the end a run is evaluated on a sample and then on every held-out row: one point, that of all rows."""
    pictures = {}
    for name, values in {"both": (40.0, 43.0), "last": (43.0,)}.items():
        lines = [
            {"step": 5, "bleu": 30.0, "valid_loss": 2.0},
            *({"step": 10, "bleu": x, "valid_loss": 1.5} for x in values),
        ]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        draw_curves(tmp_path / "metrics.jsonl", tmp_path / f"{name}.png")
        pictures[name] = (tmp_path / f"{name}.png").read_bytes()
    assert pictures["both"] == pictures["last"]


@pytest.mark.usefixtures("drawn")
def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with Reporter(tmp_path, steps=1, log_every=1, style="plain") as reporter:
        make_steps(reporter, 1, 1)
        reporter.finish()
    assert "curves.png cannot be drawn" in capsys.readouterr().err


# ------------------------------------------------------------------------------------ operations

SMALL: dict[str, Any] = {"vocab_size": 100, "d_model": 64, "n_layers": 3, "n_heads": 4, "d_ff": 128, "max_len": 64}
SEEN_BY_ALL = {"attention_backend": "sdpa", "causal": False}


@pytest.mark.parametrize(
    ("changes", "source_length"),
    [
        ({"architecture": "decoder"}, None),
        ({"architecture": "decoder", "activation": "swiglu", "n_kv_heads": 2, "tie_head": False}, None),
        ({"architecture": "decoder", "d_head": 32, "d_embed": 32, "head_transform": True}, None),
        ({"architecture": "encoder", "head": "masked-lm", "share_layers": True}, None),
        ({"architecture": "encoder", "head": "classify", "positions": "rope"}, None),
        ({"architecture": "encoder", "head": "none", "mixer": "fourier", "attention_backend": "auto"}, None),
        ({"architecture": "encoder-decoder", "n_decoder_layers": 2, "n_decoder_heads": 2, "d_decoder_ff": 96}, 24),
        ({"architecture": "encoder-decoder", "target_vocab_size": 70, "n_kv_heads": 1}, 24),
    ],
)
def test_operations_are_those_that_torch_counts(changes: dict[str, Any], source_length: int | None) -> None:
    config = ModelConfig(**{**SMALL, **SEEN_BY_ALL, **changes})
    model = build(config)
    lengths = [32] if source_length is None else [source_length, 32]
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(*(torch.randint(3, 70, (2, length)) for length in lengths))
    ours = flops_per_token(config, 32, source_length=source_length) * 2 * sum(lengths)
    assert ours == pytest.approx(3 * counter.get_total_flops())  # backward costs twice the forward


def test_hidden_futures_and_windows_halve_and_bound_attention() -> None:
    def attention(length: int, **changes: Any) -> float:
        config = ModelConfig(**{**SMALL, "architecture": "decoder", **changes})
        return flops_per_token(config, length) - flops_per_token(config.with_(mixer="linear"), length)

    linear = 12 * 3 * 64 * 16
    full = attention(1000, causal=False) + linear
    assert full == 12 * 3 * 1000 * 64
    assert attention(1000) + linear == pytest.approx(full / 2, rel=0.002)
    assert attention(1000, window=10) + linear == pytest.approx(12 * 3 * 10 * 64, rel=0.01)
    assert attention(1000, window=10, window_layers=(0,)) + linear == pytest.approx((10 + 500 * 2) * 12 * 64, rel=0.01)
    brute = sum(min(10, n + 1) for n in range(40)) / 40
    assert attention(40, window=10) + linear == pytest.approx(12 * 3 * brute * 64)


@pytest.mark.parametrize("preset", ["vit-base-16", "captioner", "luong-lstm", "transformer-base", "gpt2"])
def test_every_kind_of_model_has_a_cost(preset: str) -> None:
    from regard.presets import PRESETS

    config = ModelConfig(**PRESETS[preset])
    assert 1e6 < flops_per_token(config, 64) < 1e10


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("NVIDIA H200", "torch.bfloat16", 989.4e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA A100-SXM4-80GB", "fp16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA A10", "bf16", 125e12),
        ("NVIDIA L4", "bf16", 121e12),
        ("NVIDIA L40S", "bf16", 362e12),
        ("Tesla V100-SXM2-16GB", "bf16", None),
        ("Tesla V100-SXM2-16GB", "fp16", 125e12),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2e12),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16", None),
        ("AMD Instinct", "bf16", None),
        ("NVIDIA H200", "int8", None),
    ],
)
def test_peaks_of_known_gpus(name: str, dtype: str, expected: float | None) -> None:
    assert peak_of(name, dtype) == expected


def test_peaks_elsewhere_are_unknown_and_tf32_counts_where_it_is_on() -> None:
    assert peak_flops("cpu", torch.bfloat16) is None
    assert peak_of("NVIDIA A100-SXM4-40GB", "fp32", tf32=True) == 156e12
    assert set(TIMINGS) >= {"seconds", "tokens_per_s", "mfu", "memory_mib"}
