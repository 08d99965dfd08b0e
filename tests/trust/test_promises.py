"""The table of docs/trust.md: what is counted, and that a miss is seen."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .promises import PROMISES, ROOT, Tally, english_table, korean_table, line_of, read_table, size, sum_up
from .weaknesses import WEAKNESSES

TESTS = """
import pytest

@pytest.mark.promise(6, "cases")
def test_cases(tally):
    for n in range(5):
        with tally.attempt(n):
            assert n != 3
    tally.measured = "7 ms"

@pytest.mark.promise(9, "passes")
@pytest.mark.parametrize("n", range(3))
def test_passes(n): pass

@pytest.mark.promise(9, "fails")
def test_fails(): raise KeyError("lost")
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_miss_turns_its_line_red(workers: str, tmp_path: Path) -> None:
    names = "pytest_pyfunc_call, pytest_runtest_makereport, pytest_terminal_summary, tally"
    (tmp_path / "conftest.py").write_text(f"from trust.promises import {names}\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", *options, "-n", workers, str(tmp_path)]
    environment = {"PYTHONPATH": str(ROOT / "tests"), "REGARD_TRUST_ROWS": str(tmp_path / "rows"), "COLUMNS": "200"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 1
    assert re.search(r"promise 6 Explorer and API: cases +tried +5  held +4  7 ms", ran.stdout)
    assert re.search(r"promise 9 Odd places: fails +tried +1  held +0", ran.stdout)
    assert "Odd places: passes" not in ran.stdout, "the short version names misses alone"
    assert "'3': AssertionError" in ran.stdout
    assert (tmp_path / "rows").read_text().count("\n") == 3


def test_pages_hold_the_table() -> None:
    rows = sum_up(iter([Tally(10, "b", 2, 2), Tally(6, "a, b", 1000, 999, "7 ms"), Tally(10, "b", 3, 3, "x")]))
    assert [(row.promise, row.tried, row.measured) for row in rows] == [(6, 1000, "7 ms"), (10, 5, "x")]
    assert read_table(english_table(rows)) == rows
    assert "| 6 탐색기와 API | 1,000 | 999 |" in korean_table(rows)
    for name, table in (("docs/trust.md", english_table), ("docs/ko/trust.md", korean_table)):
        page = (ROOT / name).read_text(encoding="utf-8")
        assert table([]).splitlines()[0] in page
        assert page.count("<!-- table of make trust -->\n") == page.count("\n<!-- end of the table -->") == 1
    said = (ROOT / "docs/trust.md").read_text(encoding="utf-8")
    for number, (title, _) in PROMISES.items():
        assert re.search(rf"^{number}\. \*\*{title}", said, flags=re.MULTILINE)
    assert not [fault.name for fault in WEAKNESSES if f"| {fault.name} |" not in said]
    assert not [line_of(row) for row in read_table(said) if row.tried != row.held], "the page tells of a miss"


def test_sizes() -> None:
    assert size(short=3, full=5000) in (3, 5000)


def test_an_attempt_ends_what_goes_wrong() -> None:
    counted = Tally(1, "it")
    for wrong in (ValueError("x"), AssertionError(), pytest.fail.Exception("y")):
        with counted.attempt():
            raise wrong
    with counted.attempt():
        pass
    assert (counted.tried, counted.held, len(counted.misses)) == (4, 1, 3)
