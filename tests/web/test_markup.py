"""Markup in texts, tokens, classes and names of models and files stays text: in the page, in look.html, in exports."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from generation.spoken import made
from regard.lens import Look, look
from regard.models import Model
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.web.run_examples import RunExamples
from regard.web.served_models import ServedModel
from trust.promises import Tally

from .browsing import Tab, serving

HOSTILE = (
    "<img/src=x/onerror=window.pwned=1>",
    "<svg/onload=window.pwned=1>",
    "\"'><script>window.pwned=1</script>",
    "</script><script>window.pwned=1</script>",
    "</style></title></text></svg><img/src=x/onerror=window.pwned=1>",
    "'onmouseover='window.pwned=1'",
    "javascript:window.pwned=1",
    "<!--",
    "]]>",
    "&lt;b&gt;&#0;",
    "${window.pwned=1}",
    "{{7*7}}",
)
TEXT = " ".join(HOSTILE)
NAME = HOSTILE[2].replace("/", "\u2215")  # a directory's name cannot hold a slash
pytestmark = pytest.mark.promise(6, "markup in texts, tokens, classes and names stays text")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *HOSTILE]
    backend = Backend(WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    backend.pre_tokenizer = WhitespaceSplit()
    return Tokenizer(backend.to_str().encode())


@pytest.fixture(scope="module")
def translator(tokenizer: Tokenizer) -> Model:
    return made("transformer-base", Processor(source=tokenizer, target=tokenizer), vocab_size=tokenizer.size)


@pytest.fixture(scope="module")
def critic(tokenizer: Tokenizer) -> Model:
    processor = Processor(source=tokenizer, labels=HOSTILE[:3])
    return made("bert-base", processor, head="classify", n_classes=3, vocab_size=tokenizer.size)


@pytest.fixture(scope="module")
def home(translator: Model, critic: Model) -> Iterator[str]:
    examples = RunExamples(HOSTILE[:3], HOSTILE[3:5])
    served = [
        ServedModel(name, name, each, lambda: examples) for name, each in ((NAME, translator), ("critic", critic))
    ]
    with serving(served) as address:
        yield address


@pytest.fixture(scope="module")
def written(translator: Model) -> Look:
    return look(translator, TEXT, target=TEXT)


CHECK = """() => ({
  ran: window.pwned ?? null,
  elements: document.querySelectorAll("[src=x], [onerror], [onload], [onmouseover]").length,
  scripts: [...document.scripts].filter((x) => x.type !== "application/json" && /pwned/.test(x.textContent)).length,
  text: document.body.textContent + [...document.querySelectorAll("textarea")].map((x) => x.value),
})"""


def check(page: Any) -> None:
    """Nothing ran, and nothing of the markup became an element or an attribute; it can be read instead."""
    found = page.evaluate(CHECK)
    assert HOSTILE[0] in found.pop("text")
    assert found == {"ran": None, "elements": 0, "scripts": 0}


@pytest.mark.parametrize("name", [NAME, "critic"], ids=["translator", "critic"])
def test_in_the_page(tab: Tab, name: str, tally: Tally) -> None:
    tab.open(model=name, text=TEXT, beam=2 if name == NAME else 1, row=1, col=1)
    for view in tab.tabs():
        with tally.attempt(view):
            tab.page.click(f'nav [data-view="{view}"]')
            tab.settled()
            box = tab.box()
            tab.over(box["width"] * 0.4, min(box["height"] * 0.4, 200))
            check(tab.page)
    with tally.attempt("a refusal"):
        tab.page.evaluate("(text) => fetch('/api/looks/' + encodeURIComponent(text.slice(0, 30)))", HOSTILE[0])
        tab.complaints = [each for each in tab.complaints if "404" not in each]
        check(tab.page)
    with tally.attempt("name"):
        assert tab.page.eval_on_selector("header select", "(x) => x.selectedOptions[0].textContent") == name


def test_in_a_page_without_a_server(browser: Any, written: Look, tmp_path: Path, tally: Tally) -> None:
    file = written.html(tmp_path / f"{NAME}.html")
    assert "default-src 'none'" in file.read_text(encoding="utf-8")
    page = browser.new_page(viewport={"width": 1100, "height": 800}, offline=True)
    here = Tab(page, "")
    page.goto(f"{file.as_uri()}#lang=en&row=1&col=1")
    page.wait_for_selector("nav button[aria-selected=true]")
    for view in here.tabs():
        with tally.attempt(view):
            page.click(f'nav [data-view="{view}"]')
            here.settled()
            check(page)
    page.click('nav [data-view="heatmap"]')
    here.settled()
    with tally.attempt("as SVG"):
        check_svg(here.exported("svg"))
    with tally.attempt("as CSV"):
        assert {cell for row in here.table() for cell in row} >= set(HOSTILE[:3])
    assert here.complaints == []
    page.close()


def check_svg(content: bytes) -> None:
    assert b"&lt;img" in content, "the tokens are in it"
    for element in ElementTree.fromstring(content).iter():
        assert not element.tag.endswith(("script", "foreignObject"))
        assert not [name for name in element.attrib if name.lower().startswith("on")]
        assert not [x for x in element.attrib.values() if x.startswith("javascript:")]


def test_what_a_file_may_not_hold_is_replaced(tab: Tab) -> None:
    """Formulas in tables, which spreadsheets would evaluate, and control characters in drawings, which are not XML."""
    tab.open(model="critic", text=HOSTILE[0], view="heatmap")
    table = """async () => (await import("/static/export.js")).csvOf([["=1+1", "-x", "@a", "+b", "a=b", -0.5, null]])"""
    assert tab.page.evaluate(table) == "\ufeff'=1+1,'-x,'@a,'+b,a=b,-0.5,\r\n"
    drawing = """async () => {
      const { SvgPen } = await import("/static/pen.js"), pen = new SvgPen(9, 9, { font: "serif", ink: "black" });
      pen.text("a\\u0000b\\u0007c\\ufffe", 0, 0);
      return pen.toString();
    }"""
    (text,) = ElementTree.fromstring(tab.page.evaluate(drawing))
    assert text.text == "a\ufffdb\ufffdc\ufffd"


def test_in_exported_files(written: Look, tmp_path: Path, tally: Tally) -> None:
    with tally.attempt("SVG"):
        check_svg(written.heatmap(tmp_path / f"{NAME}.svg", title=HOSTILE[2]).read_bytes())
    with tally.attempt("CSV"):
        rows = list(csv.reader(io.StringIO(written.csv(tmp_path / f"{NAME}.csv", kind="cross").read_text("utf-8-sig"))))
        assert {cell for row in rows for cell in row} >= set(HOSTILE)
