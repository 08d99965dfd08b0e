"""Markdown as the tests read it: fenced blocks in their order, links, headings, and what stands between backticks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_FENCE = re.compile(r"^```([a-z]*)([^\n`]*)\n(.*?)^```[ ]*$", flags=re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_INLINE = re.compile(r"`([^`\n]+)`")
_COMMENT = re.compile(r"(^|\s+)#(\s.*)?$")  # a # that starts a word; none of our commands quotes one


@dataclass(frozen=True)
class Block:
    """A fenced block and where it stands."""

    file: Path
    line: int
    language: str
    text: str
    title: str | None = None
    """The file it is to be saved as, where it says so."""

    @property
    def where(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[str]:
        """The commands of a shell block: comments left out, lines that end in a backslash joined, those with && cut."""
        joined = re.sub(r"\s*\\\n\s*", " ", self.text)
        lines = (_COMMENT.sub("", line) for line in joined.splitlines())
        return [part.strip() for line in lines for part in line.split(" && ") if part.strip()]

    def code(self) -> str:
        """The block without its comments: what must be the same in every language."""
        if self.language == "sh":
            return "\n".join(self.commands())
        lines = (_COMMENT.sub("", line).rstrip() for line in self.text.splitlines())
        return "\n".join(line for line in lines if line.strip())


def documents() -> list[Path]:
    """Every page that is written for people who use regard; contributing.md is for those who change it."""
    pages = [page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name != "contributing.md"]
    return [*sorted(ROOT.glob("README*.md")), *pages, ROOT / "examples" / "README.md"]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def blocks(file: Path) -> list[Block]:
    text = file.read_text(encoding="utf-8")
    return [
        Block(file, text.count("\n", 0, found.start()) + 1, found[1], found[3], _title(found[2]))
        for found in _FENCE.finditer(text)
    ]


def _title(said: str) -> str | None:
    found = re.search(r'title="([^"]+)"', said)
    return None if found is None else found[1]


def prose(file: Path) -> str:
    """The text outside of fenced blocks."""
    return _FENCE.sub("", file.read_text(encoding="utf-8"))


def links(file: Path) -> list[str]:
    return _LINK.findall(prose(file))


def inline(file: Path) -> list[str]:
    return _INLINE.findall(prose(file))


def anchors(file: Path) -> set[str]:
    """The names GitHub gives the headings."""
    found = re.findall(r"^#+\s+(.*?)\s*$", prose(file), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).replace(" ", "-") for heading in found}
