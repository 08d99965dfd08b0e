"""Contributions, Why and Patching in a browser: few tokens and two thousand, in both languages, on a phone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import regard
from generation.spoken import language_model, translator
from regard.export.quantise import quantise
from regard.lens import Look
from regard.models import Model

from .browsing import Tab, near, serving
from .conftest import TEXT
from .test_first_minutes import PHONE

CLEAN, CHANGED = "the cat sat on the mat.", "the mat sat on the cat."
VIEWS = ("contributions", "why", "patching")


@pytest.fixture(scope="module")
def home(models: dict[str, Model]) -> Iterator[str]:
    others = {
        "recurrent": translator("bahdanau-gru"),
        "additive": language_model(mixer="additive"),
        "linear": language_model(mixer="linear"),
        "states": language_model(mixer="mamba2"),
        "int8": quantise(language_model()),
        "masked": language_model(preset="bert-base-masked"),
    }
    with serving({**models, **others}) as address:
        yield address


def test_contributions(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="en-ko", text=TEXT, view="contributions", position=1)
    target = tab.page.get_attribute('textarea[name="target"]', "placeholder")
    exact = regard.capture(models["en-ko"], TEXT, target).logit_attribution(position=1)

    def check() -> None:
        assert any(near(text.rpartition(" ")[2], exact.logit) for text in tab.texts())

    tab.in_both_languages(("Contributions", "기여도"), check)
    table = tab.files()
    assert sum(float(line[3]) for line in table[1:-1]) == pytest.approx(exact.logit, abs=1e-4)
    assert len(table) == 1 + sum(part.numel() for part in exact.parts.values()) + 1
    before = table[-1]
    tab.page.select_option('select[name="token"]', index=1)
    tab.settled()
    assert tab.state["token"]
    assert float(tab.table()[-1][3]) < float(before[3])
    tab.click(140, 44 + 1.5 * 72)  # a head of the first layer
    assert tab.state["view"] == "heatmap"
    assert {"kind", "head"} <= tab.state.keys()


def test_why(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="speaker", text=CLEAN, view="why", layer=1, head=2, row=5, col=3)
    exact = regard.capture(models["speaker"], CLEAN).why(layer=1, head=2, row=5, col=3)

    def check() -> None:
        assert any(near(text, exact.score) for text in tab.texts())
        assert f"{exact.score:.2f}" in tab.page.inner_text(".told")

    tab.in_both_languages(("Why", "왜 보았나"), check)
    table = tab.files()
    query, key, value = exact.top(1)[0]
    assert table[1][:2] == [query, key]
    assert float(table[1][2]) == pytest.approx(value, abs=1e-4)
    assert sum(float(line[2]) for line in table[1:-2]) == pytest.approx(exact.score, abs=1e-3)
    tab.page.select_option('select[data-axis="col"]', "2")
    tab.settled()
    assert tab.state["col"] == "2"


def test_why_and_arithmetic_tell_the_mean_by_the_same_head_and_name_its_query(tab: Tab, seen: Look) -> None:
    """The key is the one that the mean looks at most; its query is that of the token before the one that is written."""
    row = 2
    heads = torch.stack([seen.weights(layer=0, head=head, kind="cross")[row] for head in range(4)])
    col = int(heads.mean(0).argmax())
    head = int(heads[:, col].argmax())
    read, written = (seen.rows(kind=kind)[row].text for kind in ("self", "cross"))
    for view in ("walk", "why"):
        tab.open(model="en-ko", text=TEXT, view=view, kind="cross", layer=0, head=-1, row=row)
        assert tab.page.input_value('select[data-axis="col"]') == str(col)
        told = tab.page.inner_text(".stage")
        assert f"this is head {head + 1}, which gives this pair the most weight" in told
        assert f"This row writes “{written}”; its query comes from the token before, “{read}”." in told
        assert any(text.split() == ["q", read] or f"“{read}”" in text for text in tab.texts())


def test_patching(tab: Tab) -> None:
    tab.open(model="speaker", text=CLEAN, view="patching")
    assert "press Compare" in tab.page.inner_text(".told")
    tab.page.fill('textarea[name="corrupted"]', CHANGED)
    tab.page.click('[data-do="compare"]')
    tab.settled()
    assert tab.state["corrupted"] == CHANGED
    effects = {(line[0], line[1]): float(line[3]) for line in tab.files()[1:]}
    assert len(effects) == 2 * 13
    where = '.stage svg rect[stroke-width="2"]'  # the cell that is patched
    chosen, bars = tab.page.get_attribute(where, "x"), tab.texts()[-16:]
    x, y, width = (float(str(tab.page.get_attribute(where, name))) for name in ("x", "y", "width"))
    tab.over(x - width / 2, y + 8)
    shown, _ = tab.tip()
    assert min(abs(shown - effect) for effect in effects.values()) < 1e-5
    tab.click(x - width / 2, y + 8)
    assert tab.page.get_attribute(where, "x") != chosen
    assert tab.texts()[-16:] != bars, "the prediction is that of another patch"
    tab.in_both_languages(("Patching", "패칭"), lambda: None)
    tab.page.click('.stage [data-value="heads"]')
    tab.settled()
    assert len(tab.table()) == 1 + 2 * 4


def test_texts_of_unequal_length_are_refused_in_a_sentence(tab: Tab) -> None:
    tab.open(model="speaker", text=CLEAN, view="patching", corrupted="the cat", lang="ko")
    assert "토큰 수가 다릅니다" in tab.page.inner_text(".message")
    tab.complaints.clear()


@pytest.mark.parametrize(
    ("model", "missing", "is_scaled"),
    [
        ("speaker", set(), True),
        ("masked", set(), True),
        ("recurrent", set(VIEWS), False),
        ("additive", {"why"}, False),
        ("linear", {"why"}, False),
        ("states", {"why"}, False),
        ("int8", {"why", "contributions"}, True),
    ],
)
def test_only_what_the_model_can_do_is_offered(tab: Tab, model: str, missing: set[str], is_scaled: bool) -> None:
    """No view is refused, and the scale of the scores is offered where they are dot products."""
    tab.open(model=model, text=CLEAN)
    views = tab.every_view()
    assert set(VIEWS) - set(views) == missing
    assert tab.page.locator('.stage input[name="scale"]').count() == is_scaled
    tab.open(model=model, text=CLEAN, view="why")
    assert tab.complaints == []


def test_the_attention_of_a_recurrent_network_has_no_other_query(tab: Tab) -> None:
    """Its rows are those of cross-attention: it has no self-attention."""
    tab.open(model="recurrent", text=CLEAN, view="walk")
    assert "its query comes from" not in tab.page.inner_text(".stage")


@pytest.mark.parametrize(("model", "step", "sums"), [("states", "3 · The row", False), ("linear", "3 · Shares", True)])
def test_a_row_that_is_no_softmax(tab: Tab, model: str, step: str, sums: bool) -> None:
    """Its arithmetic divides nothing by a sum that is not there, and no row is said to add up to 1 that does not."""
    tab.open(model=model, text=CLEAN, view="walk", layer=1, head=2, row=9, col=9)
    table = dict(line for line in tab.table())
    weights = [float(value) for name, value in table.items() if name.startswith("weight ")]
    texts = tab.texts()
    assert any(text.startswith(step) for text in texts)
    assert not any("eˢ" in text or "Softmax" in text for text in texts)
    assert near(texts[texts.index("Σ") + (2 if sums else 1)], sum(weights), rel=0.01)
    assert sums == (sum(weights) == pytest.approx(1, abs=1e-4))
    tab.to("heatmap")
    assert ("adds up to 1" in tab.page.inner_text(".stage .caption")) == sums


def test_the_story_of_a_masked_model_and_of_experts(tab: Tab) -> None:
    tab.open(model="masked", text=CLEAN, row=2)
    assert "at “" in tab.page.inner_text(".lead")
    assert "after" not in tab.page.inner_text(".lead") + tab.page.inner_text('[data-stage="end"]')
    tab.open(model="linear", text=CLEAN)
    assert "Softmax" not in tab.page.inner_text('[data-stage="softmax"] > p')
    tab.open(model="routed", text=CLEAN)
    assert "the experts that the router chooses" in tab.page.inner_text('[data-stage="layer"]')
    tab.to("experts")
    assert [text for text in tab.texts() if text.startswith("Expert")] == [f"Expert {n}" for n in range(1, 5)]


def text_of(model: Model, n_tokens: int) -> str:
    """The first tokens of a sentence said again and again."""
    tokenizer: Any = model.processor and model.processor.source
    text = tokenizer.decode(tokenizer.encode((CLEAN + " ") * (n_tokens // 10 + 1))[:n_tokens])
    assert len(tokenizer.encode(text)) == n_tokens
    return text


@pytest.mark.parametrize("n_tokens", [16, 2000])
def test_few_tokens_and_two_thousand(tab: Tab, models: dict[str, Model], n_tokens: int) -> None:
    model, last = models["speaker"], n_tokens - 1
    text = text_of(model, n_tokens)
    tab.open(model="speaker", text=text, view="contributions", position=last)
    attribution = regard.capture(model, text, positions=[last]).logit_attribution(position=last)
    assert float(tab.table()[-1][3]) == pytest.approx(attribution.logit, abs=1e-4)
    tab.open(model="speaker", text=text, view="why", layer=1, head=2, row=last, col=n_tokens // 2)
    why = regard.capture(model, text).why(layer=1, head=2, row=last, col=n_tokens // 2)
    assert f"{why.score:.2f}" in tab.page.inner_text(".told")
    assert tab.table()[1][:2] == list(why.top(1)[0][:2])
    tab.page.set_viewport_size(PHONE)
    tab.to("patching")
    tab.page.fill('textarea[name="corrupted"]', f"{CHANGED} {text[len(CHANGED) + 1 :]}")
    tab.page.click('[data-do="compare"]')
    tab.settled()
    is_long = n_tokens > 16
    assert ("estimates from one gradient" in tab.page.inner_text(".told")) == is_long
    assert len(tab.table()) == 1 + 2 * n_tokens
    if is_long:
        assert len(tab.texts()) < 100, "only a part of the tokens is drawn"
        tab.page.click('.stage [aria-label="›"]')
        tab.settled()
        assert int(tab.state["from"]) > 0


@pytest.mark.parametrize(("model", "text"), [("en-ko", TEXT), ("speaker", CLEAN)])
def test_nothing_is_wider_than_a_phone(tab: Tab, model: str, text: str) -> None:
    tab.page.set_viewport_size(PHONE)
    tab.open(model=model, text=text, theme="dark", corrupted=CHANGED if model == "speaker" else "")
    tab.every_view(*VIEWS)
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_names_of_the_rows_of_contributions_are_whole_on_a_phone(tab: Tab) -> None:
    tab.page.set_viewport_size(PHONE)
    tab.open(model="en-ko", text=TEXT, view="contributions")
    for names in ({"Embeddings", "Layer 1", "Biases"}, {"임베딩", "1층", "편향"}):
        assert names <= set(tab.texts())
        tab.speak_korean()
