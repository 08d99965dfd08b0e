"""The site of the documents: every page is in it, no link leads nowhere, and it builds without a warning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import docs_site
import pytest

from . import markdown

# Where `make docs` puts what builds the site, beside the environment that runs these tests.
BUILDER = Path(sys.prefix) / "share" / "docs"


def test_every_document_is_in_the_site_and_no_page_in_one_language_only() -> None:
    in_site = {file for language in docs_site.LANGUAGES for file in docs_site.pages_of(language).values()}
    assert {file for file in markdown.documents() if file.parent != markdown.ROOT} <= in_site
    assert docs_site.in_one_language() == []
    assert list(docs_site.pages_of("ko")) == list(docs_site.pages_of("en"))


def test_the_reference_of_the_api_has_korean_headings_and_says_that_the_rest_is_english() -> None:
    english = docs_site.source_of("api.md", "ko").read_text(encoding="utf-8")
    korean = docs_site.in_korean(english)
    assert "docstring이므로 영어 그대로입니다" in korean
    for heading in re.findall(r"^##? .+$", korean, flags=re.MULTILINE):
        assert re.search("[가-힣]", heading), heading
    assert korean.count("```") == english.count("```")
    with pytest.raises(ValueError, match="no longer has"):
        docs_site.in_korean(korean)


@pytest.mark.parametrize("language", docs_site.LANGUAGES)
def test_links_of_the_staged_pages_lead_somewhere(language: str, tmp_path: Path) -> None:
    for page in docs_site.stage(tmp_path, language):
        text = (tmp_path / page).read_text(encoding="utf-8")
        links = markdown.links(tmp_path / page)
        assert "/examples/onnx" not in " ".join(links), "a file that the site does not have is no link"
        for link in links:
            path = link.partition("#")[0]
            assert re.match(r"\w+:", link) or not path or (tmp_path / page).parent.joinpath(path).is_file(), link
        assert text.count("```") == docs_site.pages_of(language)[page].read_text(encoding="utf-8").count("```")


def test_formulas_are_hidden_from_markdown_and_code_is_left_alone() -> None:
    page = "Here $a_i * b_i$ and `$HOME` cost $5.\n\n$$x_1 = \\sqrt{d}$$\n\n```sh\necho $A $B\n```\n"
    hidden = docs_site.on_page_markdown(page)
    assert len(re.findall(r"formula(?:block|inline)[0-9a-f]+end", hidden)) == 2
    assert "`$HOME` cost $5." in hidden
    assert "$" not in docs_site.on_page_markdown("행렬 $A_{ij}$는 $\\sqrt{d}$로 나눕니다."), "particles follow at once"
    assert "echo $A $B" in hidden


def test_a_dead_link_and_another_host_are_seen(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<a href="b.html#there">x</a> <a href="c.html">y</a> <h1 id="here">', "utf-8")
    (tmp_path / "b.html").write_text(
        '<a href="a.html#here">x</a><a href="https://arxiv.org">p</a><script src="https://cdn.example/x.js">', "utf-8"
    )
    assert sorted(docs_site.dead_links(tmp_path)) == [
        "a.html: b.html#there",
        "a.html: c.html",
        "b.html loads https://cdn.example/x.js",
    ]


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    if not BUILDER.is_dir():
        pytest.skip("`make docs` installs what builds the site")
    path = os.pathsep.join([str(BUILDER), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, docs_site.__file__, str(tmp_path / "site")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stderr
    for page in ("index.html", "api.html", "learn/5-gradients.html", "ko/index.html", "ko/learn/5-gradients.html"):
        text = (tmp_path / "site" / page).read_text(encoding="utf-8")
        assert f'lang="{"ko" if page.startswith("ko/") else "en"}"' in text
        assert ("<math" in text) == ("gradients" in page)
        assert "formulablock" not in text
        assert not re.search(r"\$[^$<]*[\\_][^$<]*\$", re.sub(r"<code.*?</code>", "", text, flags=re.DOTALL)), (
            "a formula"
        )
