"""docs/architecture.md is true: its files exist, and a search for the obvious word finds each answer first."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from . import markdown

PAGE = markdown.ROOT / "docs" / "architecture.md"
PACKAGE = markdown.ROOT / "src" / "regard"
_QUESTION = re.compile(r"^\| ([^|]+\?) \| `([^`]+)` \| `([^`]+)` \|$", flags=re.MULTILINE)
QUESTIONS = [match.groups() for match in _QUESTION.finditer(PAGE.read_text(encoding="utf-8"))]
_READING = re.compile(r"^\| (\d+) \| `([^`]+)` \|", flags=re.MULTILINE)
READING_PATH = _READING.findall(PAGE.read_text(encoding="utf-8"))


@cache
def sources() -> dict[str, tuple[str, list[str]]]:
    """Each file's text, and the names of the functions and classes it defines, as snake case."""
    found = {}
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        defined = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef | ast.ClassDef))
        found[str(file.relative_to(PACKAGE))] = text, [re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", n.name) for n in defined]
    return found


def search(words: str) -> str:
    """The first file found: by the words in its name, then in names it defines, then anywhere in its text."""
    # A word starts where no letter precedes it: top_p is not in stopped.
    spelled = re.compile(r"(?<![a-z])" + r"[\W_]?".join(re.findall(r"[a-z0-9]+", words.lower())), flags=re.IGNORECASE)

    def rank(name: str) -> tuple[bool, int, int]:
        text, defined = sources()[name]
        named = sum(bool(spelled.search(n)) for n in defined)
        return bool(spelled.search(Path(name).stem)), named, len(spelled.findall(text))

    return max(sources(), key=rank)


def test_there_are_twenty_questions_and_at_most_twelve_files_to_read() -> None:
    assert len(QUESTIONS) >= 20
    assert 8 <= len(READING_PATH) <= 12
    assert [name for _, name in READING_PATH if not (PACKAGE / name).is_file()] == []


@pytest.mark.parametrize(("question", "words", "file"), QUESTIONS)
def test_the_obvious_search_finds_the_answer_first(question: str, words: str, file: str) -> None:
    assert search(words) == file, question


def test_every_file_and_folder_it_names_exists() -> None:
    named = {word for word in markdown.inline(PAGE) if re.fullmatch(r"[a-z_]+/[\w/.]*", word)}
    folders = (PACKAGE, markdown.ROOT)
    missing = [w for w in named if not any((f / w).exists() or (f / w).with_suffix(".py").exists() for f in folders)]
    assert not missing


def test_the_search_prefers_names_to_mentions() -> None:
    assert search("tiled") == "attention/tiled.py"
    assert search("scaled dot product") != "attention/tiled.py"
