"""What a run leaves behind as it goes: metrics.jsonl and TensorBoard's events. Neither ever stops a run."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..data.token_files import write_atomically

Note = Callable[[str], None]
TIMINGS = ("seconds", "train_seconds", "tokens_per_s", "mfu", "memory_mib")


class MetricsFile:
    """One JSON object a line, on disk as soon as it is written.

    Opened to go on after ``start_step``, it first drops what is not to be: later steps and a line torn by a crash.
    A line goes out in one write, and is taken back where the disk holds only part of it.
    """

    def __init__(self, path: Path, start_step: int, note: Note) -> None:
        self.path, self._note = path, note
        self.last: dict[str, Any] = {}
        self._here: list[dict[str, Any]] = []  # lines of the last step, without their timings
        self._start_step = start_step
        path.parent.mkdir(parents=True, exist_ok=True)
        self._rewind()
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by close()
        self._failed = False

    def _rewind(self) -> None:
        content = self.path.read_bytes() if self.path.exists() else b""
        kept: list[bytes] = []
        for line in content.splitlines(keepends=True) if self._start_step > 0 else []:
            record = read_line(line)
            if record is None or record["step"] > self._start_step or not line.endswith(b"\n"):
                continue
            kept.append(line)
            self._remember(record)
        if (rest := b"".join(kept)) != content:
            write_atomically(self.path, rest)

    def write(self, record: dict[str, Any]) -> None:
        """Append; numbers that JSON does not know become null. What was said before a crash is not repeated."""
        record = clean(record)
        if record["step"] == self.last.get("step") and without_timings(record) in self._here:
            return
        self._remember(record)
        line = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "replace")
        end = self._file.seek(0, os.SEEK_END)
        try:
            if self._file.write(line) != len(line):
                self._file.truncate(end)
                raise OSError("the line did not fit")
        except OSError as failure:
            if not self._failed:
                self._note(f"{self.path.name} cannot be written: {failure.strerror or failure}")
            self._failed = True

    def _remember(self, record: dict[str, Any]) -> None:
        if record["step"] != self.last.get("step"):
            self._here = []
        self._here.append(without_timings(record))
        self.last = record

    def close(self) -> None:
        self._file.close()


def without_timings(record: dict[str, Any]) -> dict[str, Any]:
    """What is the same whenever and wherever a run is made."""
    return {name: value for name, value in record.items() if name not in TIMINGS}


def is_evaluation(record: dict[str, Any]) -> bool:
    """Whether a line is that of an evaluation, not of training."""
    return "loss_mean" not in record


def read_line(line: bytes | str) -> dict[str, Any] | None:
    """The object of a line of metrics.jsonl; None where it is torn or something else."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def clean(value: Any) -> Any:
    """What JSON can say: NaN and infinity become null, one-element tensors numbers, anything unknown its text."""
    if isinstance(value, dict):
        return {str(key): clean(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item) for item in value]
    if value is None or isinstance(value, str | bool | int):
        return value
    if not isinstance(value, float) and hasattr(value, "item"):
        return clean(value.item())
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return str(value)


class TensorBoard:
    """The same numbers as TensorBoard events. Without the library, or with a full disk, it says so once."""

    def __init__(self, folder: Path, start_step: int, note: Note) -> None:
        self._note = note
        self._writer: Any = None
        try:
            from torch.utils.tensorboard import SummaryWriter

            # Events of steps that will be made again are hidden, not shown twice.
            purge = start_step + 1 if folder.exists() else None
            self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=30)
        except ImportError:
            note("tensorboard is not installed: no events are written")
        except OSError as failure:
            self._give_up(failure)

    def scalars(self, step: int, values: dict[str, Any]) -> None:
        """Numbers by their names, such as ``train/loss``; whatever is not a finite number is left out."""
        for name, value in values.items():
            if self._writer is not None and isinstance(value, int | float) and math.isfinite(value):
                try:
                    self._writer.add_scalar(name, value, step)
                except OSError as failure:
                    self._give_up(failure)

    def text(self, step: int, name: str, markdown: str) -> None:
        if self._writer is not None:
            try:
                self._writer.add_text(name, markdown, step)
            except OSError as failure:
                self._give_up(failure)

    def close(self) -> None:
        if self._writer is not None:
            try:
                self._writer.close()
            except OSError as failure:
                self._give_up(failure)
            self._writer = None

    def _give_up(self, failure: OSError) -> None:
        self._writer = None
        self._note(f"TensorBoard events cannot be written: {failure.strerror or failure}")
