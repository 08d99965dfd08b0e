"""What docs/serve.md shows is typed here: curl lines, Python and JavaScript, at a server with the models it names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import markdown
from regard.models import Model

from .served_api import ServedApi, serving_api

PAGE = markdown.ROOT / "docs" / "serve.md"
ADDRESS = "http://127.0.0.1:8017"
BLOCKS = markdown.blocks(PAGE)


@pytest.fixture(scope="module")
def page_api(models: dict[str, Model]) -> Iterator[ServedApi]:
    with serving_api({"translator": models["translator"], "writer": models["speaker"]}) as served:
        yield served


def test_the_curl_lines(page_api: ServedApi) -> None:
    commands = [command for block in BLOCKS if block.language == "sh" for command in block.commands()]
    asked = [command for command in commands if command.startswith("curl")]
    assert len(asked) >= 5
    for command in asked:
        line = command.replace(ADDRESS, page_api.url) + " -sS --fail-with-body"
        said = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=60, check=False)
        assert said.returncode == 0, said.stdout + said.stderr
        if '"stream": true' in command:
            assert said.stdout.endswith("data: [DONE]\n\n")
        else:
            assert json.loads(said.stdout)["object"]


def test_the_python_example(page_api: ServedApi, tmp_path: Path) -> None:
    said = _run([sys.executable, str(_write("client.py", page_api, tmp_path))])
    assert said.strip()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_javascript_example(page_api: ServedApi, tmp_path: Path) -> None:
    _run(["node", str(_write("client.mjs", page_api, tmp_path))])


def test_every_test_that_the_page_names_exists() -> None:
    tests = Path(__file__).parents[1]
    defined = {name for file in tests.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())}
    named = set(re.findall(r"`(test_\w+)`", PAGE.read_text(encoding="utf-8")))
    assert len(named) >= 14
    assert named <= defined, named - defined


def _write(name: str, served: ServedApi, folder: Path) -> Path:
    (block,) = (block for block in BLOCKS if block.title == name)
    file = folder / name
    file.write_text(block.text.replace(ADDRESS, served.url), encoding="utf-8")
    return file


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout
