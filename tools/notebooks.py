"""Each chapter of docs/learn as a Jupyter notebook, in both languages: `make notebooks`.

Prose becomes Markdown cells. The input of a session becomes code cells, one for each output on the page, so that a
notebook shows the same outputs. Notebooks are generated and never committed.
"""

from __future__ import annotations

import argparse
import contextlib
import doctest
import io
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from regard.course.exercises import notebook_json

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"en": ROOT / "docs" / "learn", "ko": ROOT / "docs" / "ko" / "learn"}
FENCE = re.compile(r"^```(pycon|python)[^\n]*\n(.*?)^```[ ]*\n", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()(?!\w+:|#)([^)\s]+)(\))")
Cell = tuple[str, str]  # "markdown" or "code", and its text


def cells_of(page: Path, folder: Path) -> list[Cell]:
    """The cells of a page for a notebook in ``folder``, with relative links changed accordingly."""
    text, cells, end = page.read_text(encoding="utf-8"), list[Cell](), 0
    for found in FENCE.finditer(text):
        cells += _prose(text[end : found.start()], page, folder)
        code = [found[2]] if found[1] == "python" else _split_session(found[2])
        cells += [("code", part) for part in code]
        end = found.end()
    return [*cells, *_prose(text[end:], page, folder)]


def _prose(text: str, page: Path, folder: Path) -> list[Cell]:
    def relative(link: re.Match[str]) -> str:
        path, hash_sign, anchor = link[2].partition("#")
        return f"{link[1]}{os.path.relpath(page.parent / path, folder)}{hash_sign}{anchor}{link[3]}"

    return [("markdown", LINK.sub(relative, text.strip()))] if text.strip() else []


def _split_session(session: str) -> list[str]:
    """The input of a session, split after each example that has an output."""
    parts, so_far = list[str](), ""
    for example in doctest.DocTestParser().get_examples(session):
        so_far += example.source
        if example.want:
            parts, so_far = [*parts, so_far], ""
    return [*parts, so_far] if so_far else parts


def write_notebook(page: Path, folder: Path) -> list[Cell]:
    """Write the notebook of a page, and return its cells."""
    folder.mkdir(parents=True, exist_ok=True)
    cells = cells_of(page, folder)
    (folder / f"{page.stem}.ipynb").write_bytes(notebook_json(cells))
    return cells


def run_cells(cells: list[Cell]) -> None:
    """Run the code cells from top to bottom in one namespace and an empty folder."""
    names: dict[str, Any] = {"__name__": "__main__"}
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as empty, contextlib.redirect_stdout(io.StringIO()):
        os.chdir(empty)
        try:
            for number, (kind, text) in enumerate(cells):
                if kind == "code":
                    exec(compile(text, f"cell {number}", "exec"), names)
        finally:
            os.chdir(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out", type=Path)
    parser.add_argument("--run", action="store_true", help="run every notebook from top to bottom")
    options = parser.parse_args()
    for language, pages in PAGES.items():
        for page in sorted(pages.glob("[1-8]-*.md")):
            cells = write_notebook(page, options.out.resolve() / language)
            if options.run:
                run_cells(cells)
            print(options.out / language / f"{page.stem}.ipynb", "ran" if options.run else "")


if __name__ == "__main__":
    main()
