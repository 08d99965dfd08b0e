"""Each chapter is a notebook too; `make notebooks` writes and runs them all, here a few run."""

from __future__ import annotations

import json
from pathlib import Path

import draw_transformer
import notebooks
import pytest

from . import markdown

CHAPTERS = [page for folder in notebooks.PAGES.values() for page in sorted(folder.glob("[1-8]-*.md"))]


@pytest.mark.parametrize("page", [pytest.param(page, id=markdown.name_of(page)) for page in CHAPTERS])
def test_a_notebook_holds_what_the_page_holds(page: Path, tmp_path: Path) -> None:
    cells = notebooks.write_notebook(page, tmp_path)
    written = json.loads((tmp_path / f"{page.stem}.ipynb").read_text(encoding="utf-8"))
    assert [cell["cell_type"] for cell in written["cells"]] == [kind for kind, _ in cells]
    assert ["".join(cell["source"]) for cell in written["cells"]] == [text.rstrip("\n") for _, text in cells]
    assert len({cell["id"] for cell in written["cells"]}) == len(cells)
    code = "".join(text for kind, text in cells if kind == "code")
    typed = [line[4:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith((">>> ", "... "))]
    assert len(typed) > 10
    assert all(line in code for line in typed)
    for kind, text in cells:
        if kind == "markdown":
            assert ">>> " not in text
            for _, link, _ in notebooks.LINK.findall(text):
                assert (tmp_path / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize("name", ["2-the-formula", "5-gradients"])
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    notebooks.run_cells(notebooks.write_notebook(notebooks.PAGES["en"] / f"{name}.md", tmp_path))
    with pytest.raises(ZeroDivisionError):
        notebooks.run_cells([("markdown", "1 / 0"), ("code", "x = 1"), ("code", "x / 0")])


@pytest.mark.parametrize("language", draw_transformer.TEXTS)
def test_the_figure_of_the_transformer_is_what_is_drawn_today(language: str) -> None:
    kept = (draw_transformer.IMAGES / f"transformer-{language}.svg").read_text(encoding="utf-8")
    assert kept == draw_transformer.draw(language), "python tools/draw_transformer.py draws it anew"
    assert ("self-attention" in kept) == (language == "en")
