"""The chapters of the course in the explorer: every one in both languages, with formulas, pictures and links."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from generation.spoken import language_model
from regard.web import explorer
from regard.web.chapter_pages import LANGUAGES, chapter_files, documents_folder
from regard.web.formulas import to_mathml

from .served import HOME, refusal

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def client() -> TestClient:
    return TestClient(explorer({"speaker": language_model()}), base_url=HOME)


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_chapter_is_a_page_whose_links_and_pictures_are_there(client: TestClient, language: str) -> None:
    files = chapter_files(language)
    assert len(files) == 8
    for number, file in enumerate(files, start=1):
        answer = client.get(f"/learn/{language}/{number}")
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/html; charset=utf-8"
        page, prose = answer.text, re.sub(r"<code.*?</code>", "", answer.text, flags=re.DOTALL)
        assert f'<html lang="{language}"' in page
        assert file.read_text("utf-8").partition("\n")[0].lstrip("# ") in page
        assert "$" not in prose, "a formula that was not drawn"
        assert prose.count("<math") == len(re.findall(r"<math .*?</math>", prose))
        for address in re.findall(r'(?:href|src)="(/[^"]*)"', page):
            assert client.get(address).status_code == 200, address
        assert not re.findall(r'href="[^"]*\.md', page)
        assert ("](watch.md)" in file.read_text("utf-8")) == (f'href="/static/watch/index.html#lang={language}' in page)
    assert 'data-theme="dark"' in client.get(f"/learn/{language}/1?theme=dark").text


def test_the_theme_of_an_address_is_not_part_of_the_page(client: TestClient) -> None:
    page = client.get(
        "/learn/en/1", params={"theme": '"><meta http-equiv=refresh content="0;url=//evil.example">'}
    ).text
    assert "http-equiv" not in page
    assert 'href="/learn/en/2?theme=light"' in page


def test_other_pages_are_refused_in_a_sentence(client: TestClient) -> None:
    for path in ("/learn/en/9", "/learn/en/0", "/learn/de/1", "/learn/images/none.png", "/learn/images/x.md"):
        assert "the course has no" in refusal(client.get(path), 404)


def test_the_package_carries_the_chapters_and_their_pictures() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    carried = settings["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert documents_folder() == ROOT / "docs"
    for language, folder in (("en", "docs/learn"), ("ko", "docs/ko/learn")):
        assert carried[folder] == f"regard/web/{folder}"
        for file in chapter_files(language):
            for picture in re.findall(r"images/([\w-]+\.(?:png|svg))\)", file.read_text(encoding="utf-8")):
                assert carried[f"docs/images/{picture}"] == f"regard/web/docs/images/{picture}"


def test_formulas() -> None:
    inner = re.compile(r"<math[^>]*><mrow>(.*)</mrow></math>")
    for latex, wanted in {
        r"\sqrt{d_k}": "<msqrt><mrow><msub><mi>d</mi><mi>k</mi></msub></mrow></msqrt>",
        r"\sqrt 2": "<msqrt><mn>2</mn></msqrt>",
        r"\frac{a}{b}": "<mfrac><mrow><mi>a</mi></mrow><mrow><mi>b</mi></mrow></mfrac>",
        r"x_i^2": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
        r"x^2_i": "<msubsup><mi>x</mi><mi>i</mi><mn>2</mn></msubsup>",
        r"\mathrm{lse}_i": '<msub><mi mathvariant="normal">lse</mi><mi>i</mi></msub>',
        r"\left(a\right)": "<mrow><mo>(</mo><mi>a</mi><mo>)</mo></mrow>",
        "a < b": '<mi>a</mi><mo stretchy="false">&lt;</mo><mi>b</mi>',
    }.items():
        found = inner.fullmatch(to_mathml(latex))
        assert found is not None
        assert found[1] == wanted
    apart = f"<span>{to_mathml('a', 'block')}</span><span>{to_mathml('b', 'block')}</span>"
    assert to_mathml(r"a \qquad b", "block") == apart, "a phone puts them on two lines"
    with pytest.raises(ValueError, match=r"\\overbrace"):
        to_mathml(r"\overbrace{x}")
    with pytest.raises(ValueError, match="ends before"):
        to_mathml("{x")
