"""Malformed files of every kind: each is read or refused with a typed error; nothing crashes, runs, leaks out or hangs.

A kind is tried in a process of its own, since what is spoiled is also read by C++ and Rust: where that process dies,
the case that killed it is a miss, and another goes on with the next.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from regard.errors import RegardError

from .fork_server import SERVER
from .malformed import KINDS, Target
from .promises import IS_FULL, Tally, size

MAX_SECONDS = 1.0  # of the processor for one file
MAX_SILENCE = 60.0  # seconds until a case counts as one that never ends
ROOM = 48 << 20  # bytes a valid file may always take: the allocator's and the interpreter's own
MAX_DEATHS = 5
# What nothing that is read may bring about.
FORBIDDEN = {
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.getaddrinfo", "pickle.find_class", "ctypes.dlopen", "webbrowser.open"),
}
EVIL = "from pathlib import Path\nPath(__file__).with_name('code-ran').touch()\nclass Payload: pass\n"
_PROCESS = "/proc/self"


@dataclass
class Watch:
    """An audit hook: which files were opened and what was started while it is on."""

    folder: Path
    on: bool = False
    faults: list[str] = field(default_factory=list)
    libraries: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()  # beginnings of paths

    def install(self) -> None:
        root = Path(__file__).resolve().parents[2]
        places = {sys.prefix, sys.base_prefix, str(root / "src"), str(root / "tests"), *sys.path[1:]} - {""}
        self.libraries = (*places, "/proc/", "/sys/", "/dev/")
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in FORBIDDEN:
            self.faults.append(f"{event} {str(arguments)[:100]}")
        elif event == "open" and isinstance(path := arguments[0], str | bytes):
            path = os.path.abspath(os.fsdecode(path))
            if not path.startswith(self.allowed) or os.path.basename(path).startswith(("evil", "secret")):
                self.faults.append(f"opened {path}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.on = True
        try:
            yield
        finally:
            self.on = False


def _peak_memory() -> int:
    """The most this process has held since ``_reset_peak``, in bytes."""
    with open(f"{_PROCESS}/status", encoding="ascii") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def _reset_peak() -> int:
    with open(f"{_PROCESS}/clear_refs", "w", encoding="ascii") as file:
        file.write("5")
    return _peak_memory()


def _cost(target: Target, number: int, watch: Watch) -> tuple[str, float, int]:
    """What came of reading a file, a fault or "", with the processor's seconds and the memory it took."""
    before, start, fault = _reset_peak(), time.process_time(), ""
    try:
        with watch.watching():
            target.read(number)
    except RegardError as refused:
        if not str(refused).strip():
            fault = f"{type(refused).__name__} without a word"
    except BaseException as other:  # a panic of Rust's is no Exception
        fault = f"{type(other).__name__}: {str(other)[:200]}"
    return fault, time.process_time() - start, _peak_memory() - before


def _usual_memory(targets: list[Target], folder: Path) -> int:
    """What valid files take; the first time libraries are imported."""
    usual = 0
    for target in targets:
        for _ in range(2):
            fault, _, memory = _cost(target, 0, Watch(folder))
            assert not fault, f"{target.path.name} as it was written: {fault}"
        usual = max(usual, memory)
    return usual


def _try_kinds(kinds: Sequence[str], each: int, folder: Path, at: Any, misses: Any) -> None:
    """In a process of its own, from the case ``at`` on: of every kind as many files, each spoiled in another way."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what libraries print about each
    (folder / "evil.py").write_text(EVIL)
    os.chdir(folder)
    sys.path.insert(0, str(folder))  # so that a name of the folder's code could be imported
    watch = Watch(folder)
    watch.install()
    watch.allowed = (*watch.libraries, str(folder))
    opened: dict[str, tuple[list[Target], int]] = {}
    for case in range(at.value, len(kinds) * each):
        at.value, kind, number = case, kinds[case // each], case % each
        if kind not in opened:
            (home := folder / kind).mkdir()
            (home / "secret.json").write_text('{"weight_map": {}}')  # which "../secret.json" leads to
            targets = KINDS[kind](home)
            opened[kind] = targets, _usual_memory(targets, folder)
        targets, usual = opened[kind]
        target, chosen = targets[number % len(targets)], random.Random(f"{kind} {number}")
        valid = target.path.read_bytes()
        target.path.write_bytes(target.spoil(valid, chosen))
        fault, seconds, memory = _cost(target, number, watch)
        target.path.write_bytes(valid)
        if not fault and seconds > MAX_SECONDS:
            fault = f"took {seconds:.1f} s"
        if not fault and memory > 2 * max(usual, ROOM):
            fault = f"took {memory >> 20} MB, a valid one {usual >> 20}"
        if (folder / "code-ran").exists():
            watch.faults.append("code of the folder was run")
            (folder / "code-ran").unlink()
        if fault := fault or "; ".join(watch.faults):
            misses.put(f"{kind} {number} {target.path.name}: {fault}")
        watch.faults.clear()
    at.value = len(kinds) * each


def _missing_library(kind: str) -> str | None:
    names = {"Parquet": "pyarrow", "ONNX": "onnxruntime", "CTranslate2": "ctranslate2", "GGUF": "gguf"}
    return next((name for k, name in names.items() if k == kind and importlib.util.find_spec(name) is None), None)


# ONNX takes ten seconds to export. Everything in one process saves imports, each kind in its own uses every core.
GROUPS = [[kind] for kind in KINDS] if IS_FULL else [[kind for kind in KINDS if kind != "ONNX"]]


@pytest.mark.skipif(not os.path.exists(f"{_PROCESS}/clear_refs"), reason="memory is measured as Linux counts it")
@pytest.mark.promise(3, f"malformed files of {len(KINDS)} kinds")
@pytest.mark.parametrize("kinds", GROUPS, ids=["+".join(kinds) for kinds in GROUPS])
def test_malformed_files_are_refused(kinds: list[str], tally: Tally, tmp_path: Path) -> None:
    kinds = [kind for kind in kinds if _missing_library(kind) is None]
    each = size(short=30, full=10_000)
    at, misses, found, deaths = SERVER.Value("q", 0), SERVER.SimpleQueue(), list[str](), 0
    while at.value < len(kinds) * each and deaths < MAX_DEATHS:
        (folder := tmp_path / str(at.value)).mkdir()
        process = SERVER.Process(target=_try_kinds, args=(kinds, each, folder, at, misses))
        process.start()
        before, since = -1, time.monotonic()
        while process.is_alive() or not misses.empty():
            process.join(0.02)
            while not misses.empty():
                found.append(misses.get())
            if at.value != before:
                before, since = at.value, time.monotonic()
            elif time.monotonic() - since > MAX_SILENCE:
                process.kill()
        if process.exitcode:
            deaths += 1
            found.append(f"{kinds[at.value // each]} {at.value % each}: the process ended with {process.exitcode}")
            at.value += 1
    tally.tried, tally.misses = len(kinds) * each, found
    tally.held = tally.tried - len(found)
