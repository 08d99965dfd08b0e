"""Fifty hostile payloads: none is run, each is refused with a typed error, also where assertions are off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from training.runs import environment

from .promises import IS_FULL, Tally

SCRIPT = Path(__file__).with_name("payloads.py")


@pytest.mark.promise(3, "hostile payloads: pickles, names of code, templates, paths, links, bombs")
@pytest.mark.parametrize("options", [["-O"], []] if IS_FULL else [["-O"]], ids=" ".join)
def test_hostile_payloads(options: list[str], tally: Tally, tmp_path: Path) -> None:
    path = environment().get("PYTHONPATH", "")
    env = environment(PYTHONPATH=f"{SCRIPT.parents[1]}:{path}", REGARD_LANG="en")
    ran = subprocess.run([sys.executable, *options, SCRIPT, tmp_path], capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("[")]
    assert len(found) >= 50
    for name, fault in found:
        with tally.attempt(name):
            assert not fault, fault
