"""Every script of benchmarks/ finds what it imports and explains itself; what it measures takes minutes or a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(file.name for file in FOLDER.glob("*.py") if "__main__" in file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_explains_itself(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / name), run_name="__main__")
    assert ended.value.code in (0, None)
    assert "usage:" in capsys.readouterr().out
