"""The documentation as a site, English at its root and Korean below ko/: `make docs` writes build/site.

Material for MkDocs builds each language from a staged copy of docs/, with search in its own language. Formulas become
MathML, so that no page loads anything from another host. A warning or a dead link fails the build.
This file is also MkDocs' hook (`on_page_markdown`, `on_page_content`).
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from regard.web.chapter_pages import hide_formulas, outside_code, show_formulas
from regard.web.watch_page import write_watch_page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
# Titles of the sections and their pages; a Korean page has the name of the English one.
SECTIONS: dict[tuple[str, str], tuple[str, ...]] = {
    ("Start", "시작"): ("README.md",),
    ("Learn", "배우기"): (
        "learn/README.md",
        *(f"learn/{page.name}" for page in sorted(DOCS.glob("learn/[1-8]-*.md"))),
        "learn/watch.md",
    ),
    ("Build", "만들기"): ("build.md", "labels.md", "retrieve.md", "extend.md"),
    ("Look", "들여다보기"): ("look.md", "circuits.md"),
    ("Ship", "내보내기"): ("ship.md", "serve.md"),
    ("Research", "연구"): ("research.md", "ablations.md", "results.md", "cost.md", "performance.md"),
    ("Sources", "소스"): ("architecture.md", "api.md", "trust.md", "contributing.md", "changelog.md", "examples.md"),
}
# Pages from outside docs/.
ELSEWHERE = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "examples.md": "examples/README.md"}
LANGUAGES = ("en", "ko")
# Korean headings of the generated API reference; its descriptions are English docstrings.
API_HEADINGS = {
    "# API reference\n": "# API 레퍼런스\n",
    "Generated from signatures and docstrings by `python tests/test_api.py --update`.": (
        "공개된 이름 전부를 시그니처와 docstring에서 자동으로 만든 페이지입니다"
        "(`python tests/test_api.py --update`). 설명은 소스의 docstring이므로 영어 그대로입니다."
    ),
    "| field | default | meaning |": "| 필드 | 기본값 | 뜻 |",
    "\n## regard\n": "\n## regard · 맨 위의 이름들\n",
    "\n## regard.attention\n": "\n## regard.attention · 어텐션\n",
    "\n## regard.config\n": "\n## regard.config · 설정\n",
    "\n## regard.data\n": "\n## regard.data · 데이터\n",
    "\n## regard.export\n": "\n## regard.export · 내보내기\n",
    "\n## regard.generation\n": "\n## regard.generation · 생성\n",
    "\n## regard.layers\n": "\n## regard.layers · 층\n",
    "\n## regard.lens\n": "\n## regard.lens · 들여다보기\n",
    "\n## regard.models\n": "\n## regard.models · 모델\n",
    "\n## regard.text\n": "\n## regard.text · 글\n",
    "\n## regard.training\n": "\n## regard.training · 학습\n",
}
# The page that trains (`regard learn watch`): where its sources are, and where the site has it.
WATCH_SOURCE, WATCH_PAGE = ROOT / "src" / "regard" / "web" / "static" / "watch" / "index.html", "watch/index.html"
# More contrast than the theme has, for section names and code; and underlined links.
STYLE_FILE = "site.css"
STYLE = """\
.md-tabs__link { opacity: 1 }
.md-tabs__item--active .md-tabs__link { font-weight: 700 }
.md-content a:not(.headerlink) { text-decoration: underline }
[data-md-color-scheme="default"] { --md-default-fg-color--light: #000000a0 }
[data-md-color-scheme="slate"] { --md-code-bg-color: #1d202a }
"""
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


# ------------------------------------------------------------------------------------------- the staged copy


def source_of(page: str, language: str) -> Path:
    """The source file of a page; the API reference has one file for both languages (`in_korean`)."""
    if language == "en":
        return ROOT / ELSEWHERE[page] if page in ELSEWHERE else DOCS / page
    return DOCS / page if page == "api.md" else DOCS / "ko" / page


def pages_of(language: str) -> dict[str, Path]:
    """The existing pages of a language, in the order of the site."""
    named = {page: source_of(page, language) for section in SECTIONS.values() for page in section}
    return {page: file for page, file in named.items() if file.is_file()}


def in_one_language() -> list[str]:
    """Pages that exist in one language only."""
    return sorted(pages_of("en").keys() ^ pages_of("ko").keys())


def in_korean(reference: str) -> str:
    """The generated API reference with Korean headings; docstrings stay English, and the page says so."""
    for english, korean in API_HEADINGS.items():
        if english not in reference:
            raise ValueError(f"docs/api.md no longer has {english!r}: tools/docs_site.py names its headings")
        reference = reference.replace(english, korean)
    return reference


def relink(text: str, page: str, language: str) -> str:
    """A page's text with its links changed to the site's addresses; links to files outside it become plain text."""
    here, by_file = pages_of(language), {file: (page, of) for of in LANGUAGES for page, file in pages_of(of).items()}
    by_file |= {file: (page, language) for page, file in here.items()}  # one file may be a page of both
    file = here[page]

    def place(link: re.Match[str]) -> str:
        path, hash_sign, anchor = unquote(link[3]).partition("#")
        if re.match(r"\w+:", link[3]) or not path:
            return link[0]
        target = (file.parent / path).resolve()
        target = target / "README.md" if target.is_dir() else target
        if target in by_file:
            there, of = by_file[target]
            if of != language:  # in the other site, which MkDocs does not know: as HTML
                there = f"{'../' if language == 'ko' else 'ko/'}{_html(there)}"
                return f'<a href="{os.path.relpath(there, Path(page).parent)}{hash_sign}{anchor}">{link[2]}</a>'
        elif target == WATCH_SOURCE:  # a page that MkDocs does not know either
            there = os.path.relpath(f"{'../' if language == 'ko' else ''}{WATCH_PAGE}", Path(page).parent)
            settings_in_link = f"{anchor}&lang={language}".lstrip("&")
            return f'<a href="{there}#{settings_in_link}">{link[2]}</a>'
        elif target.is_file() and target.is_relative_to(DOCS) and target.suffix in (".png", ".svg"):
            there = str(target.relative_to(DOCS))
        else:
            return link[2]
        return f"{link[1]}[{link[2]}]({os.path.relpath(there, Path(page).parent)}{hash_sign}{anchor})"

    return outside_code(text, lambda part: _LINK.sub(place, part))


def _html(page: str) -> str:
    return re.sub(r"(^|/)README\.md$", r"\1index.html", page).replace(".md", ".html")


def stage(folder: Path, language: str) -> list[str]:
    """Write the pages and pictures of a language into a folder, and return the pages."""
    shutil.rmtree(folder, ignore_errors=True)
    for page, file in pages_of(language).items():
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        text = file.read_text(encoding="utf-8")
        text = in_korean(text) if (page, language) == ("api.md", "ko") else text
        text = relink(text, page, language).replace("```mermaid\n", "```text\n")
        (folder / page).write_text(text, encoding="utf-8")
    for picture in (*DOCS.rglob("*.png"), *DOCS.rglob("*.svg")):
        copy = folder / picture.relative_to(DOCS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, copy)
    (folder / STYLE_FILE).write_text(STYLE, encoding="utf-8")
    return list(pages_of(language))


# ------------------------------------------------------------------------------------------- the build


def on_page_markdown(markdown: str, **_: Any) -> str:
    return hide_formulas(markdown)


def on_page_content(html: str, **_: Any) -> str:
    return show_formulas(html)


def settings(language: str, staged: Path, site: Path) -> dict[str, Any]:
    """MkDocs' settings for one language."""
    from pymdownx.slugs import slugify

    pages, n = pages_of(language), LANGUAGES.index(language)
    nav = [{titles[n]: [page for page in section if page in pages]} for titles, section in SECTIONS.items()]
    to_english, to_korean = ("index.html", "ko/index.html") if language == "en" else ("../index.html", "index.html")
    shades = (
        ("light", "default", "weather-night", "Dark", "어둡게"),
        ("dark", "slate", "weather-sunny", "Light", "밝게"),
    )
    palette = [
        {
            **{"media": f"(prefers-color-scheme: {shade})", "scheme": scheme, "primary": "brown"},
            "toggle": {"icon": f"material/{icon}", "name": names[n]},
        }
        for shade, scheme, icon, *names in shades
    ]
    return {
        "site_name": "regard",
        "docs_dir": str(staged),
        "site_dir": str(site if language == "en" else site / "ko"),
        "use_directory_urls": False,
        "nav": [entry for entry in nav if any(entry.values())],
        "hooks": [__file__],
        "extra_css": [STYLE_FILE],
        "theme": {
            "name": "material", "language": language, "font": False, "palette": palette,
            "features": ["navigation.tabs", "search.suggest", "search.highlight", "content.code.copy"],
        },
        "plugins": [{"search": {"lang": [language] if language == "en" else ["ko", "en"]}}],
        "markdown_extensions": [
            "tables", "attr_list", "sane_lists", "pymdownx.superfences", "pymdownx.highlight",
            {"toc": {"permalink": True, "slugify": slugify(case="lower")}},
        ],
        "extra": {
            "generator": False,
            "alternate": [
                {"name": "English", "link": to_english, "lang": "en"},
                {"name": "한국어", "link": to_korean, "lang": "ko"},
            ],
        },
        "validation": {
            "nav": {"omitted_files": "warn", "not_found": "warn"},
            "links": {"not_found": "warn", "anchors": "warn", "absolute_links": "warn", "unrecognized_links": "ignore"},
        },
        "strict": True,
    }  # fmt: skip


def build(site: Path, staged: Path) -> None:
    """Build both languages; a warning raises an exception."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    shutil.rmtree(site, ignore_errors=True)
    for language in LANGUAGES:  # English first: building empties the folder
        stage(staged / language, language)
        build_site(load_config(config_file=os.devnull, **settings(language, staged / language, site)))
    write_watch_page((site / WATCH_PAGE).parent)


# ------------------------------------------------------------------------------------------- links of the site


class _Page(HTMLParser):
    """The links of a page, and the anchors in it."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links, self.names = set[str](), set[str]()
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.add(value)
            elif name in ("id", "name") and value:
                self.names.add(value)


def dead_links(site: Path) -> Iterator[str]:
    """Dead links and missing pictures of the site, and everything that its pages load from another host."""
    pages = {file: _Page(file) for file in site.rglob("*.html") if file.name != "404.html"}
    for file, page in pages.items():
        for link in page.links:
            path, _, anchor = unquote(link).partition("#")
            there = (file.parent / path).resolve() if path else file
            there = there / "index.html" if there.is_dir() else there
            if re.match(r"(https?:)?//", link):
                continue  # a link for the reader; what the page itself loads is looked at below
            if link.startswith("data:") or link == "javascript:void(0)":
                continue
            has_anchors = there in pages and there != site / WATCH_PAGE  # there an anchor holds settings
            if not there.is_file() or (anchor and has_anchors and anchor not in pages[there].names):
                yield f"{file.relative_to(site)}: {link}"
        loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="((?:https?:)?//[^"]+)"', file.read_text("utf-8"))
        yield from (f"{file.relative_to(site)} loads {address}" for address in loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the documents as a site.")
    parser.add_argument("site", type=Path)
    site = parser.parse_args().site.resolve()
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(message)s")
    build(site, site.with_name(f"{site.name}-pages"))
    if dead := sorted(dead_links(site)):
        raise SystemExit("\n".join(["links that lead nowhere:", *dead]))
    n = {language: len(pages_of(language)) for language in LANGUAGES}
    print(f"{site}: {n['en']} pages in English, {n['ko']} in Korean")


if __name__ == "__main__":
    main()
