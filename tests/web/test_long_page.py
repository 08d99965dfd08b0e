"""4,096 tokens in the browser: an overview, a zoom, and a number that is exact; of 144 heads, and every view of 8."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from generation.spoken import LINES, made
from regard.lens import Look, look
from regard.models import Model
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer

from .browsing import Tab, serving
from .conftest import WIDE
from .test_views import CLOSE

LENGTH = 4096
TEXT = ("the cat sat on the mat. a dog ran, and the cat ran too. " * 100)[:LENGTH]


@pytest.fixture
def long_model(n_layers: int, n_heads: int) -> Model:
    tokenizer = train_tokenizer(LINES, "chars", None)
    sizes: dict[str, Any] = {"d_model": 96, "n_layers": n_layers, "n_heads": n_heads, "d_ff": 96, "max_len": LENGTH}
    return made("gpt2", Processor(source=tokenizer), vocab_size=tokenizer.size, **sizes)


@pytest.fixture
def long_look(long_model: Model) -> Look:
    return look(long_model, TEXT)


@pytest.fixture
def tab(page: Any, long_model: Model) -> Iterator[Tab]:
    with serving({"long": long_model}) as home:
        page.set_viewport_size(WIDE)
        here = Tab(page, home)
        yield here
        here.leave()
    assert here.complaints == []
    assert 4 * 256 * 256 <= here.largest <= 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize(("n_layers", "n_heads"), [(12, 12)])
def test_4096_tokens_of_144_heads(tab: Tab, long_look: Look) -> None:
    layer, head = 7, 5
    tab.open(model="long", text=TEXT, view="heatmap", layer=layer, head=head)
    assert tab.page.inner_text(".caption").startswith("Each cell is the mean of 12.8 × 12.8 weights")
    box = tab.box()
    tab.over(120, box["height"] * 0.7)
    shown, about = tab.tip()
    r0, r1, c0, c1 = (int(x.replace("\u202f", "")) for x in re.findall(r"[\d\u202f]+", about[0]))
    assert (r1 - r0, c1 - c0) in {(11, 11), (11, 12), (12, 11), (12, 12)}
    block = long_look.weights(layer=layer, head=head, rows=slice(r0 - 1, r1), cols=slice(c0 - 1, c1))
    assert shown == pytest.approx(float(block.mean()), **CLOSE)

    for _ in range(4):  # 4,096 → 2,048 → … → 256: the weights themselves
        tab.page.click('[aria-label="Zoom in"]')
        tab.settled()
    r0, r1, c0, c1 = (int(x) for x in tab.state["zoom"].split(","))
    assert (r1 - r0, c1 - c0) == (256, 256)
    assert tab.page.inner_text(".caption").startswith("Each row is a token that looks")
    box = tab.box()
    tab.over(box["width"] * 0.3, box["height"] * 0.6)
    shown, _ = tab.tip()
    tab.click(box["width"] * 0.3, box["height"] * 0.6)
    row, col = int(tab.state["row"]), int(tab.state["col"])
    assert r0 <= row < r1
    assert c0 <= col < c1
    exact = float(long_look.weights(layer=layer, head=head, rows=[row], cols=[col]))
    assert shown == pytest.approx(exact, **CLOSE)
    assert tab.weight(row, col) == pytest.approx(exact, **CLOSE)

    tab.page.keyboard.press("ArrowDown")  # to another row, and to another head
    tab.settled()
    assert tab.weight(row + 1, col) == pytest.approx(
        float(long_look.weights(layer=layer, head=head, rows=[row + 1], cols=[col])), **CLOSE
    )


@pytest.mark.slow
@pytest.mark.parametrize(("n_layers", "n_heads"), [(2, 4)])  # patterns and thumbnails read every weight of every layer
def test_every_view_of_4096_tokens(tab: Tab, long_look: Look) -> None:
    tab.open(model="long", text=TEXT, view="sentence", layer=1, head=2, row=3000, col=17, **{"from": 2950})
    best = long_look.weights(layer=1, head=2, rows=[3000])[0].topk(3)
    for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True):
        assert tab.weight(3000, index) == pytest.approx(weight, **CLOSE)
    assert tab.every_view() == [
        *("story", "sentence", "heatmap", "grid", "walk", "next", "contributions", "why", "patching", "patterns"),
        "variant",
    ]
    full = "The text fills the model's whole context of 4096 tokens, so it cannot be continued."
    assert tab.page.inner_text(".written") == full
    tab.open(model="long", text=TEXT, view="variant", off="self.0.1")
    assert tab.page.inner_text(".written") == full
    assert re.match(r"It predicted \d+ of the first text's 4095 tokens; now \d+\.$", tab.page.inner_text(".happened"))
    assert tab.page.inner_text(".message") == ""
    tab.open(model="long", text=TEXT, view="heatmap", layer=1, head=2, words=1, row=700, col=3)
    words = long_look.merged(kind="self", words=True, specials=True)
    exact = float(words.weights(layer=1, head=2, rows=[700], cols=[3]))
    assert tab.weight(700, 3) == pytest.approx(exact, **CLOSE)
