"""The promises of docs/trust.md: tests say which one they try, and one table says how often it was tried and held.

    python tests/trust/promises.py               # `make trust`: everything at full size; writes the table
    python tests/trust/promises.py tests/x.py    # a part of it: its lines of the table are replaced, the others stay
    REGARD_TRUST=0.05 python tests/trust/promises.py    # a twentieth of the cases; writes nothing

A test names its line of the table with a marker; one that tries many cases counts them with the fixture ``tally``:

    @pytest.mark.promise(6, "raw bodies")
    def test_raw_bodies(tally):
        for body in bodies(size(short=20, full=1000)):
            with tally.attempt(body):              # an exception is a miss; the other cases are tried all the same
                assert ask(body).status_code < 500
        tally.measured = "slowest 12 ms"           # a figure for the last column, where there is one
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARE = float(os.environ.get("REGARD_TRUST", "0"))  # of the full size; 0 is the short version of `make test`
IS_FULL = SHARE > 0
PROMISES = {
    1: ("Kills and resumes", "강제 종료와 이어서 학습하기"),
    2: ("Flipped bits", "뒤집힌 비트"),
    3: ("Malformed and hostile files", "잘못되었거나 악의적인 파일"),
    4: ("Full disks and low limits", "가득 찬 디스크와 낮은 한도"),
    5: ("Numbers that are not finite", "유한하지 않은 수"),
    6: ("Explorer and API", "탐색기와 API"),
    7: ("Threads and long processes", "스레드와 오래 도는 프로세스"),
    8: ("Same seed, same bits", "같은 시드, 같은 비트"),
    9: ("Odd places", "낯선 환경"),
    10: ("Supply chain", "공급망"),
}


def size(short: int, full: int) -> int:
    """How many cases to try: in `make test`, and in `make trust`."""
    return max(short, round(SHARE * full))


@dataclass
class Tally:
    """What was tried for one line of the table, and what held."""

    promise: int
    what: str
    tried: int = 0
    held: int = 0
    measured: str = ""
    misses: list[str] = field(default_factory=list)

    @contextmanager
    def attempt(self, case: object = "") -> Iterator[None]:
        """One case: a miss if an exception comes out of it, which ends here."""
        self.tried += 1
        try:
            yield
        except (Exception, pytest.fail.Exception) as wrong:
            self.misses.append(f"{str(case)[:100]!r}: {type(wrong).__name__}: {str(wrong)[:300]}")
        else:
            self.held += 1

    def add(self, other: Tally) -> None:
        self.tried, self.held = self.tried + other.tried, self.held + other.held
        self.misses += other.misses
        self.measured = "; ".join(dict.fromkeys(x for x in (self.measured, other.measured) if x))


# ---- hooks of pytest, which tests/conftest.py imports


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    marker = request.node.get_closest_marker("promise")
    return Tally(*marker.args)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> Generator[None, Any, Any]:
    result = yield
    counted = pyfuncitem.funcargs.get("tally")
    if counted is not None and counted.misses:
        pytest.fail(
            f"{len(counted.misses)} of {counted.tried} missed:\n" + "\n".join(counted.misses[:10]), pytrace=False
        )
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Generator[None, Any, Any]:
    report = yield
    marker = item.get_closest_marker("promise")
    if marker is None or report.skipped or (call.when != "call" and report.passed):
        return report
    counted = item.funcargs.get("tally") if call.when == "call" else None
    counted = counted or Tally(*marker.args, tried=1, held=int(report.passed))
    if report.failed and counted.tried == counted.held:  # it failed beside what it counted
        counted.tried += 1
    if report.failed and not counted.misses:
        counted.misses.append(f"{item.nodeid}: {str(call.excinfo.value)[:300]}")
    report.user_properties.append(("promise", asdict(counted)))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if hasattr(terminalreporter.config, "workerinput"):  # who started the workers has the reports of all of them
        return
    reports = [report for found in terminalreporter.stats.values() for report in found]
    values = [
        value for report in reports for name, value in getattr(report, "user_properties", ()) if name == "promise"
    ]
    rows = sum_up(Tally(**value) for value in values)
    for row in rows:
        if IS_FULL or row.misses:
            terminalreporter.write_line(line_of(row), red=bool(row.misses))
    if place := os.environ.get("REGARD_TRUST_ROWS"):
        with open(place, "a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(row)) + "\n" for row in rows)


# ---- the table


def sum_up(tallies: Iterator[Tally]) -> list[Tally]:
    rows: dict[tuple[int, str], Tally] = {}
    for each in tallies:
        rows.setdefault((each.promise, each.what), Tally(each.promise, each.what)).add(each)
    return [rows[key] for key in sorted(rows)]


def line_of(row: Tally) -> str:
    title = f"{row.promise} {PROMISES[row.promise][0]}: {row.what}"
    return f"promise {title:<90} tried {row.tried:>8,}  held {row.held:>8,}  {row.measured}".rstrip()


def read_table(page: str) -> list[Tally]:
    """The rows of the English page."""
    lines = [line.strip("|").split("|") for line in page.splitlines() if re.match(r"\| \d+ ", line)]
    return [
        Tally(int(title.split()[0]), what, int(tried.replace(",", "")), int(held.replace(",", "")), measured)
        for title, what, tried, held, measured in (map(str.strip, line) for line in lines)
    ]


def english_table(rows: list[Tally]) -> str:
    lines = ["| promise | what was tried | tried | held | measured |", "|---|---|--:|--:|---|"]
    for row in rows:
        title = f"{row.promise} {PROMISES[row.promise][0]}"
        lines.append(f"| {title} | {row.what} | {row.tried:,} | {row.held:,} | {row.measured} |")
    return "\n".join(lines)


def korean_table(rows: list[Tally]) -> str:
    lines = ["| 약속 | 시도 | 지킴 |", "|---|--:|--:|"]
    for number, (_, title) in PROMISES.items():
        mine = [row for row in rows if row.promise == number]
        lines.append(f"| {number} {title} | {sum(x.tried for x in mine):,} | {sum(x.held for x in mine):,} |")
    return "\n".join(lines)


def write_pages(rows: list[Tally]) -> None:
    """Replace what stands between the two comments of each page."""
    for name, table in (("docs/trust.md", english_table(rows)), ("docs/ko/trust.md", korean_table(rows))):
        page = ROOT / name
        begin, end = "<!-- table of make trust -->\n", "\n<!-- end of the table -->"
        before, _, rest = page.read_text(encoding="utf-8").partition(begin)
        page.write_text(f"{before}{begin}{table}{end}{rest.partition(end)[2]}", encoding="utf-8")


def main(words: list[str]) -> int:
    n_cores = os.cpu_count() or 1
    parallel = ["-n", str(n_cores), "--dist", "worksteal", "-m", "promise and not serial"]
    start, failed = time.monotonic(), False
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "rows.jsonl"
        environment = {"REGARD_TRUST": "1", **os.environ, "REGARD_TRUST_ROWS": str(place)}
        for options, threads in ((parallel, 1), (["-m", "promise and serial"], n_cores)):
            threaded = {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
            command = [sys.executable, "-m", "pytest", "-q", "--timeout=0", "--durations=15", *options, *words]
            failed |= subprocess.run(command, cwd=ROOT, env=environment | threaded).returncode not in (0, 5)
        written = place.read_text(encoding="utf-8").splitlines() if place.exists() else []
    rows = sum_up(Tally(**json.loads(line)) for line in written)
    print("\n", *(line_of(row) for row in rows), sep="\n")
    for row in rows:
        print(*(f"missed, promise {row.promise}, {row.what}: {miss}" for miss in row.misses), sep="\n")
    missing = [] if words else [number for number in PROMISES if number not in {row.promise for row in rows}]
    if missing:
        print("not tried:", *missing)
    if words:  # lines that were not tried this time stay
        known = {
            (row.promise, row.what): row for row in read_table((ROOT / "docs/trust.md").read_text(encoding="utf-8"))
        }
        rows = sum_up(iter((known | {(row.promise, row.what): row for row in rows}).values()))
    if SHARE in (0, 1):
        write_pages(rows)
    print(f"\n{sum(x.held for x in rows):,} of {sum(x.tried for x in rows):,} held, {time.monotonic() - start:.0f} s")
    return int(failed or bool(missing) or any(row.misses for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
