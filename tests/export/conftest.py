"""For every export: what several tests read is exported once, by one of the processes of a test run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.export import export
from regard.foundation.files import file_lock

from .translators import QUICK, learned, pairs

MadeOnce = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """``made_once(name, make)``: the directory that ``make(path)`` wrote, here or in another process; read only."""
    base = tmp_path_factory.getbasetemp()
    root = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "made-once"

    def directory(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        with file_lock(folder):
            if not (folder / "done").exists():
                make(folder / "out")
                (folder / "done").touch()
        return folder / "out"

    return directory


@pytest.fixture(scope="session")
def check(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sentences that ``learned`` knows, and their translations."""
    path = tmp_path_factory.mktemp("check") / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in pairs()[:12]), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def learned_graphs(made_once: MadeOnce, check: Path) -> dict[str, Path]:
    """What ``learned`` knows, as ONNX."""
    return {
        "float32": made_once("learned", lambda path: export(learned(), "onnx", path, **QUICK)),
        "int8": made_once("learned-int8", lambda path: export(learned(), "onnx-int8", path, check=check, **QUICK)),
    }
