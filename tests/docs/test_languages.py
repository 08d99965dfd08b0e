"""Links lead somewhere, commands between backticks exist, and what there is in English is there in Korean."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from urllib.parse import unquote

import pytest
import typer

from regard.cli import app

from . import markdown

ROOT = markdown.ROOT
PAGES_IN_BOTH = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        *(
            "ablations",
            "architecture",
            "build",
            "circuits",
            "cost",
            "extend",
            "labels",
            "look",
            "performance",
            "research",
        ),
        *("results", "retrieve", "serve", "ship", "trust"),
    )
]
ELSEWHERE = {ROOT / "CONTRIBUTING.md": "contributing.md", ROOT / "examples" / "README.md": "examples.md"}
ENGLISH = [ROOT / "README.md", *PAGES_IN_BOTH, *ELSEWHERE, *sorted((ROOT / "docs" / "learn").glob("*.md"))]
PAGES = [pytest.param(file, id=markdown.name_of(file)) for file in markdown.documents()]


def korean(file: Path) -> Path:
    """README.md → README.ko.md, docs/learn/x.md → docs/ko/learn/x.md, CONTRIBUTING.md → docs/ko/contributing.md."""
    if file in ELSEWHERE:
        return ROOT / "docs" / "ko" / ELSEWHERE[file]
    if file.parent == ROOT:
        return file.with_suffix(".ko.md")
    return ROOT / "docs" / "ko" / file.relative_to(ROOT / "docs")


@pytest.mark.parametrize("file", PAGES)
def test_links_and_images_lead_somewhere(file: Path) -> None:
    lost = []
    for link in markdown.links(file):
        if re.match(r"[a-z]+://|mailto:", link):
            continue
        path, _, anchor = unquote(link).partition("#")
        there = (file.parent / path).resolve() if path else file
        found = there.exists() and (not anchor or there.suffix != ".md" or anchor in markdown.anchors(there))
        if not found:
            lost.append(link)
    assert not lost, f"{markdown.name_of(file)} links to what is not there: {lost}"


@pytest.mark.parametrize("file", PAGES)
def test_commands_between_backticks_exist(file: Path) -> None:
    strange = [f"`{said}`: {wrong}" for said in markdown.inline(file) if (wrong := unknown_word(said))]
    assert not strange, strange


def test_tests_named_in_the_changelog_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    assert named
    for file, name in named:
        assert f"def {name}" in (ROOT / file).read_text(encoding="utf-8"), f"{file}::{name}"


def unknown_word(said: str) -> str | None:
    """The word of a `regard …` that the command line does not know."""
    if not said.startswith("regard ") or "|" in said or "…" in said:
        return None
    command = typer.main.get_command(app)
    words = shlex.split(said)[1:]
    while words and hasattr(command, "commands"):
        if words[0].startswith("-"):
            break
        if words[0] not in command.commands:
            return words[0]
        command = command.commands[words.pop(0)]
    known = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    return next((word for word in words if word.startswith("--") and word.partition("=")[0] not in known), None)


def test_the_check_of_commands_sees_strangers() -> None:
    assert unknown_word("regard lok") == "lok"
    assert unknown_word("regard look RUN --scores") == "--scores"
    assert unknown_word("regard data describe F --json") is None
    assert unknown_word("pip install regard") is None


def test_there_are_eight_chapters_in_both_languages() -> None:
    chapters = sorted(file.name for file in (ROOT / "docs" / "learn").glob("[1-8]-*.md"))
    assert [name[0] for name in chapters] == list("12345678")
    assert sorted(file.name for file in (ROOT / "docs" / "ko" / "learn").glob("[1-8]-*.md")) == chapters


@pytest.mark.parametrize("file", [pytest.param(file, id=markdown.name_of(file)) for file in ENGLISH])
def test_a_translation_has_the_same_code(file: Path) -> None:
    """Comments may be translated; what is typed and what is answered is the same, and so are the pictures."""
    there = korean(file)
    one, two = ([(x.language, x.code()) for x in markdown.blocks(page)] for page in (file, there))
    if file.name == "README.md":  # whose tree is described in words
        one, two = ([x for x in found if x[0] != "text"] for found in (one, two))
    assert [language for language, _ in one] == [language for language, _ in two]
    for (_, here), (_, other) in zip(one, two, strict=True):
        assert here == other
    assert _pictures(file) == _pictures(there)


def _pictures(file: Path) -> list[str]:
    return [Path(link).name for link in markdown.links(file) if link.endswith(".png")]


@pytest.mark.parametrize("file", [pytest.param(file, id=markdown.name_of(file)) for file in ENGLISH])
def test_languages_lead_to_each_other(file: Path) -> None:
    for one, two in ((file, korean(file)), (korean(file), file)):
        links = {(one.parent / link.partition("#")[0]).resolve() for link in markdown.links(one)}
        is_chapter = one.parent.name == "learn" and one.name != "README.md"  # their list leads there
        assert is_chapter or two in links, f"{markdown.name_of(one)} does not lead to {markdown.name_of(two)}"


def test_every_section_of_the_changelog_is_told_in_korean() -> None:
    """Each section has a summary in Korean that leads to its entries; the entries themselves are in English alone."""
    english, korean_page = ROOT / "CHANGELOG.md", ROOT / "docs" / "ko" / "changelog.md"
    sections = re.findall(r"^### .+$", markdown.prose(english), flags=re.MULTILINE)
    told = re.split(r"^### .*[가-힣].*$", markdown.prose(korean_page), flags=re.MULTILINE)[1:]
    anchors = [link.partition("#")[2] for link in markdown.links(korean_page) if link.startswith("../../CHANGELOG.md#")]
    assert len(told) == len(anchors) == len(sections)
    assert all(anchor in markdown.anchors(english) for anchor in anchors)
    assert all(len(re.findall("[가-힣]", text)) > 40 for text in told)


@pytest.mark.parametrize(("name", "n_rows"), [("results", 40), ("performance", 60), ("cost", 60)])
def test_results_are_the_same_numbers(name: str, n_rows: int) -> None:
    """Numbers are repeated in Korean and must not drift: those with a decimal point or a thousand, table by table."""
    page = ROOT / "docs" / f"{name}.md"
    tables = [re.findall(r"^\|.*\d.*$", markdown.prose(file), flags=re.MULTILINE) for file in (page, korean(page))]
    assert len(tables[0]) == len(tables[1]) > n_rows
    for rows in zip(*tables, strict=True):
        one, two = (sorted(re.findall(r"\d+[.,]\d[\d.,]*\d|\d\.\d", row)) for row in rows)
        assert one == two, rows


# Words for which the table of words in docs/ko/README.md has another.
OTHER_WORDS = (
    *("낱말", "빔 서치", "설명문", "꼬리표", "코퍼스", "훈련", "매개변수", "서브레이어", "부분 층", "서브워드"),
    *("페널티", "사영", "교차 어텐션", "행렬 곱", "훅 자리", "어블레이션", "임포트", "컨텍스트", "내트"),
)


def test_one_korean_word_for_one_english_word() -> None:
    package = ROOT / "src" / "regard"
    scripts = (f"web/static/{name}.js" for name in ("i18n", "server_words", "server_errors"))
    texts = ["foundation/korean.toml", "demo/demo_texts.yaml", *scripts]
    exercises = (package / "course/exercises").glob("*.toml")
    files = [
        *(ROOT / "docs" / "ko").rglob("*.md"),
        ROOT / "README.ko.md",
        *(package / name for name in texts),
        *exercises,
    ]
    said = {file: [word for word in OTHER_WORDS if word in file.read_text(encoding="utf-8")] for file in files}
    assert not any(said.values()), {markdown.name_of(file): words for file, words in said.items() if words}


def test_a_translation_is_korean() -> None:
    for file in ENGLISH:
        letters = re.sub(r"`[^`]*`|\$[^$]*\$|\([^)]*\)|[^\w]", "", markdown.prose(korean(file)))
        hangul = len(re.findall(r"[가-힣]", letters))
        assert hangul > 0.5 * len(letters), f"{korean(file)}: {hangul} of {len(letters)} letters are Hangul"


@pytest.mark.parametrize("name", ["README.md", "README.ko.md"])
def test_an_address_is_everywhere_or_nowhere(name: str) -> None:
    """Without a public address there are no project URLs; with them, README has it and its pictures are absolute."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    text = (ROOT / name).read_text(encoding="utf-8")
    absolute = [bool(re.match("https://", link)) for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)]
    if "urls" in project:
        assert {"Source", "Documentation", "Changelog"} <= project["urls"].keys()
        assert all(absolute)
        assert project["urls"]["Source"] in text
    else:
        assert "git clone ADDRESS" in text
        assert not any(absolute)


def test_badges_say_what_the_metadata_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(one for one in project["dependencies"] if one.startswith("torch"))
    said = {"python": project["requires-python"], "torch": torch.removeprefix("torch"), "license": project["license"]}
    for name, value in said.items():
        badge = (ROOT / "docs" / "images" / f"badge-{name}.svg").read_text(encoding="utf-8")
        assert value.replace(">=", "≥ ") in badge
