"""The chapters of the course as pages of the explorer, which links to them: Markdown to HTML, formulas to MathML."""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any

from .formulas import to_mathml
from .requests import RequestRefused

LANGUAGES = ("en", "ko")
_NAMES = {
    "en": {"course": "Course", "explorer": "Explorer", "other": "한국어"},
    "ko": {"course": "강좌", "explorer": "탐색기", "other": "English"},
}
_CODE = re.compile(r"^```.*?^```[ ]*$|`[^`\n]+`", flags=re.MULTILINE | re.DOTALL)
_FORMULA = re.compile(r"\$\$(.+?)\$\$|(?<![a-zA-Z0-9$])\$(?!\s)([^$\n]+?)(?<!\s)\$(?![a-zA-Z0-9])", flags=re.DOTALL)
_HIDDEN = re.compile(r"formula(block|inline)([0-9a-f]+)end")


def documents_folder() -> Path:
    """docs/ of the repository, or the part of it that is installed with the package."""
    here = Path(__file__)
    return next(folder for folder in (here.with_name("docs"), here.parents[3] / "docs") if folder.is_dir())


def chapter_files(language: str) -> list[Path]:
    """The chapters in order; the first is number 1."""
    folder = documents_folder() if language == "en" else documents_folder() / language
    return sorted(folder.glob("learn/[1-9]-*.md"))


def chapter_page(number: int, language: str, theme: str = "light") -> str:
    """Render a chapter as an HTML page."""
    files = chapter_files(language) if language in LANGUAGES else []
    if not 1 <= number <= len(files):
        raise RequestRefused(404, f"the course has no chapter {number} in {language!r}")
    theme = "dark" if theme == "dark" else "light"  # any other value would become part of the page
    markdown, names = files[number - 1].read_text(encoding="utf-8"), _NAMES[language]
    title = escape(markdown.partition("\n")[0].lstrip("# "))
    other = next(one for one in LANGUAGES if one != language)

    def link(n: int, to: str, text: str, **attributes: str) -> str:
        more = "".join(f' {name}="{value}"' for name, value in attributes.items())
        return f'<a href="/learn/{to}/{n}?theme={theme}"{more}>{text}</a>'

    chapters = " ".join(
        link(n, language, str(n), **({"aria-current": "page"} if n == number else {})) for n in range(1, len(files) + 1)
    )
    return f"""<!doctype html>
<html lang="{language}" data-theme="{theme}">
<head>
  <meta charset="utf-8">
  <meta name="viewport" content="width=device-width, initial-scale=1">
  <title>{title} · regard</title>
  <link rel="icon" href="/static/icon.svg" type="image/svg+xml">
  <link rel="stylesheet" href="/static/style.css">
  <link rel="stylesheet" href="/static/chapter.css">
</head>
<body>
  <div id="app" class="chapter">
    <header><a class="mark" lang="en" href="/">regard</a>
      <nav aria-label="{names["course"]}"><span class="quiet">{names["course"]}</span> {chapters}</nav>
      <span class="room"></span>{link(number, other, names["other"], hreflang=other)}</header>
    <main class="wide"><article>{chapter_html(markdown, language, theme)}</article></main>
  </div>
</body>
</html>
"""


def chapter_html(markdown: str, language: str, theme: str = "light") -> str:
    """Render the text of a chapter. Links to chapters and the training page work; those to other files become text."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = parser.parse(hide_formulas(markdown))
    for token in tokens:
        _relink(token.children or [], language, theme)
    return show_formulas(parser.renderer.render(tokens, parser.options, {}))


def _relink(tokens: list[Any], language: str, theme: str) -> None:
    is_dropped = False
    for token in tokens:
        if token.type == "image":
            token.attrs["src"] = f"/learn/images/{Path(str(token.attrs['src'])).name}"
        elif token.type == "link_open":
            target = str(token.attrs["href"])
            chapter = re.fullmatch(r"([1-9])-[\w-]+\.md(#.*)?", target)
            if chapter:
                target = f"/learn/{language}/{chapter[1]}?theme={theme}"
            elif target == "watch.md":
                target = f"/static/watch/index.html#lang={language}&theme={theme}"
            is_dropped = not re.match(r"/|https?:", target)
            token.attrs = {} if is_dropped else {"href": target}
        if token.type in ("link_open", "link_close") and is_dropped:
            token.tag = "span"


def picture_file(name: str) -> Path:
    """The file of a picture in the documents."""
    file = documents_folder() / "images" / name
    if not re.fullmatch(r"[\w-]+\.(png|svg)", name) or not file.is_file():
        raise RequestRefused(404, f"the course has no picture {name[:60]!r}")
    return file


# ---- formulas in Markdown


def outside_code(text: str, change: Any) -> str:
    """Apply a function to the parts of a Markdown text that are not code."""
    parts, end = [], 0
    for code in _CODE.finditer(text):
        parts += [change(text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(text[end:])])


def hide_formulas(markdown: str) -> str:
    """Replace formulas by words that Markdown leaves alone; ``show_formulas`` turns them into MathML."""
    return outside_code(markdown, lambda part: _FORMULA.sub(_hide, part))


def _hide(formula: re.Match[str]) -> str:
    kind, latex = ("block", formula[1]) if formula[1] else ("inline", formula[2])
    word = f"formula{kind}{latex.encode().hex()}end"
    return f"\n\n{word}\n\n" if kind == "block" else word


def show_formulas(html: str) -> str:
    """Replace the words of ``hide_formulas`` in HTML by MathML."""
    return _HIDDEN.sub(lambda word: to_mathml(bytes.fromhex(word[2]).decode(), word[1]), html)
