"""The views in a browser: numbers on the screen are those ``look`` gives in Python, in both languages.

A complaint in the browser's console fails a test, and so does an answer of 4xx or 5xx that was not asked for.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.attention import record
from regard.lens import Look, look
from regard.lens.capture import attention_site
from regard.models import Model

from .browsing import EVERY_SENTENCE, Tab, as_number, as_percent, near, numbers_in
from .conftest import TEXT

CLOSE = {"abs": 2e-6, "rel": 2e-4}  # six decimals, or four digits of what is smaller
MIDDLE_OF = """(words) => {
  const all = [...document.querySelectorAll(".stage svg text")], sheet = document.querySelector(".stage .sheet");
  const { y, height } = all.find((one) => one.textContent === words).getBoundingClientRect();
  return y + height / 2 - sheet.getBoundingClientRect().y;
}"""
# As soon as the second token is written, the player is paused, however slow the page or who looks at it is.
PAUSE_AT_2 = """() => new MutationObserver((_, observer) => {
  if (Number(document.querySelector(".player output")?.textContent.split(" ")[0]) < 2) return;
  observer.disconnect();
  document.querySelector('[data-do="pause"]').click();
}).observe(document.body, { subtree: true, childList: true, characterData: true })"""
KEEP_STREAM = """() => {
  const ask = window.fetch;
  window.fetch = async (...asked) => {
    const answer = await ask(...asked);
    if (String(asked[0]).includes("/stream")) answer.clone().text().then((text) => { window.streamed = text; });
    return answer;
  };
}"""


def test_tokens_in_the_colours_of_their_experts(tab: Tab, models: dict[str, Model]) -> None:
    seen = look(models["routed"], "the cat sat")
    routing = seen.routing(layer=1)
    tab.open(model="routed", text="the cat sat", view="experts", layer=1)
    share = float(routing.experts.eq(2).float().mean())

    def check() -> None:
        rows = tab.table()[1:]
        assert [row[0] for row in rows[::2]] == [label.text for label in seen.rows()]
        assert [int(row[1]) for row in rows] == routing.experts.flatten().tolist()
        assert [float(row[2]) for row in rows] == pytest.approx(routing.weights.flatten().tolist(), **CLOSE)
        assert tab.texts()[-3] == as_percent(share)  # a name and a share for each of four experts

    tab.in_both_languages(("Experts", "전문가"), check)
    fills = tab.page.eval_on_selector_all(".stage svg rect", "(all) => all.map((one) => one.getAttribute('fill'))")
    first = routing.experts[:, 0].tolist()
    n = len(first)
    colours = {(expert, fill) for expert, fill in zip(first, fills[:n], strict=True)}
    assert len(colours) == len(set(first)) == len(set(fills[:n]))
    tab.page.set_viewport_size({"width": 360, "height": 740})
    assert tab.page.evaluate("() => document.documentElement.scrollWidth") <= 360
    assert len(tab.files()) == 2 * n + 1


def test_heat_map(tab: Tab, seen: Look) -> None:
    weights = seen.weights(layer=1, head=2, kind="cross")
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="cross", layer=1, head=2, row=1, col=3)

    def check() -> None:
        assert tab.weight(1, 3) == pytest.approx(float(weights[1, 3]), **CLOSE)
        best = weights[1].topk(3)
        for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            assert tab.weight(1, index) == pytest.approx(weight, **CLOSE)

    tab.in_both_languages(("Heat map", "히트맵"), check)
    box = tab.box()
    for across, down in ((0.35, 0.4), (0.5, 0.55)):
        tab.over(box["width"] * across, box["height"] * down)
        shown, _ = tab.tip()
        tab.page.keyboard.press("Escape")
        tab.click(box["width"] * across, box["height"] * down)
        row, col = int(tab.state["row"]), int(tab.state["col"])
        assert shown == pytest.approx(float(weights[row, col]), **CLOSE)
    table = tab.files()
    assert [line[0] for line in table[1:]] == [label.text for label in seen.rows(kind="cross")]
    opening = re.search(r'id="opening">(.*?)</script>', tab.exported("html").decode())
    assert opening is not None
    same = json.loads(opening[1])
    assert {name: same[name] for name in ("kind", "layer", "head", "row", "col", "view")} == {
        **{"kind": "cross", "layer": 1, "head": 2, "view": "heatmap"},
        **{"row": int(tab.state["row"]), "col": int(tab.state["col"])},
    }
    assert torch.allclose(torch.tensor([[float(x) for x in line[1:]] for line in table[1:]]), weights, atol=1e-7)


def test_sentence(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="sentence", kind="encoder", layer=0, head=1, row=3)
    weights = seen.weights(layer=0, head=1, kind="encoder")

    def check() -> None:
        tab.over(tab.box()["width"] * 0.75, 8 + 30 * 2.5)  # the third token of the right column
        shown, about = tab.tip()
        assert shown == pytest.approx(float(weights[3, 2]), **CLOSE)
        assert about == [f"{seen.rows(kind='encoder')[3].text} → {seen.cols(kind='encoder')[2].text}"]

    tab.in_both_languages(("Sentence", "문장"), check)
    table = tab.files()
    assert float(table[4][3]) == pytest.approx(float(weights[3, 2]), abs=1e-7)
    tab.click(40, 8 + 30 * 1.5)
    assert tab.state["row"] == "1"
    tab.page.keyboard.press("Escape")
    tab.settled()
    assert "row" not in tab.state


def test_every_head_of_a_locked_token(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="sentence", kind="encoder", layer=1, row=2)
    box, found = tab.box(), set()
    for x in range(int(box["width"] * 0.6), int(box["width"]), 7):
        tab.page.mouse.move(box["x"] + x, box["y"] + 8 + 30 * 4.5)
        shown, about = tab.tip_now() or (0.0, [""])
        if about[-1].startswith("Head "):
            head = int(about[-1].split()[1]) - 1  # people count from 1
            found.add(head)
            exact = float(seen.weights(layer=1, head=head, kind="encoder")[2, 4])
            assert shown == pytest.approx(exact, **CLOSE)
    assert found == {0, 1, 2, 3}


def test_grid_of_layers_and_heads(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="grid", kind="encoder")
    rows, cols = ([label.text for label in labels] for labels in (seen.rows(kind="encoder"), seen.cols(kind="encoder")))

    def check() -> None:
        box = tab.box()
        for across, down in ((60, 60), (220, box["height"] - 60)):
            tab.over(across, down)
            shown, (pair, place) = tab.tip()
            layer, head = (int(n) - 1 for n in re.findall(r"\d+", place))  # people count from 1
            row, col = pair.split(" → ")
            weights = seen.weights(layer=layer, head=head, kind="encoder")
            assert shown == pytest.approx(float(weights[rows.index(row), cols.index(col)]), **CLOSE)

    tab.in_both_languages(("Layers × heads", "층 × 헤드"), check)
    assert len(tab.files()) == 1 + 2 * 4 * 9 * 9
    tab.click(60, 60)
    assert (tab.state["view"], tab.state["head"]) == ("heatmap", "0")


def test_arithmetic(tab: Tab, seen: Look) -> None:
    """Rounded on the screen, whole in the file: one weight, the softmax of its row, and the values summed."""
    row, col = 1, 4
    tab.open(model="en-ko", text=TEXT, view="walk", kind="cross", layer=1, head=3, row=row, col=col)
    weights = seen.weights(layer=1, head=3, kind="cross")[row]
    names = [label.text for label in seen.cols(kind="cross")]

    def check() -> None:
        texts = tab.texts()
        _, factor = numbers_in(texts, r"(\S+) × (\S+) =")
        assert factor == pytest.approx(6**-0.5, abs=5e-4)
        power, total = numbers_in(texts, r"(\S+) ÷ (\S+) =")
        assert power / total == pytest.approx(float(weights[col]), rel=0.01)
        shown = texts[texts.index("eˢ ÷ Σ") + 1 :]
        for index, name in enumerate(names):  # name, s, eˢ, share
            line = shown[4 * index : 4 * index + 4]
            score, power, share = (as_number(text) for text in line[1:])
            assert line[0] == name
            assert power == pytest.approx(math.exp(score), rel=0.006, abs=0.006)
            assert share == pytest.approx(float(weights[index]), abs=5e-4)
        sign, *sums = shown[4 * len(names) :][:3]
        assert (sign, [as_number(text) for text in sums]) == ("Σ", pytest.approx([total, 1], abs=1e-3))
        assert all(len(re.sub(r"\D", "", text)) <= 4 for text in shown[: 4 * len(names)] if text not in names)

    tab.in_both_languages(("Arithmetic", "계산 과정"), check)
    table = dict(line[:2] for line in tab.files()[1:])
    q, k, v, share, output = (
        [float(table[f"{name}[{i}]"]) for i in range(6)] for name in ("q", "k", "v", "contribution", "output")
    )
    assert sum(a * b for a, b in zip(q, k, strict=True)) == pytest.approx(float(table["dot"]), abs=1e-4)
    assert [float(table["weight"]) * x for x in v] == pytest.approx(share, abs=1e-5)
    values = layer_values(seen, 1)[3]  # (S, D) of head 3
    assert output == pytest.approx((weights @ values).tolist(), abs=1e-5)
    for index, name in enumerate(names):
        assert float(table[f"weight {index} {name}"]) == pytest.approx(float(weights[index]), abs=1e-6)


def layer_values(seen: Look, layer: int) -> torch.Tensor:
    """v of the cross-attention of a layer, (H, S, D)."""
    model: Any = seen.model
    with torch.no_grad(), record(attention_site(model, "cross", layer).owner) as recorder:
        model.hidden(*seen.inputs)
    values = recorder.attentions["attention"][0].v
    assert values is not None
    return values[0]


def test_arithmetic_starts_from_the_cell_that_was_clicked(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="cross", layer=1, head=-1)
    box = tab.box()
    tab.click(box["width"] * 0.5, box["height"] * 0.55)
    row, col = int(tab.state["row"]), int(tab.state["col"])
    tab.page.click('aside [data-open="walk"]')
    tab.settled()
    assert tab.page.get_attribute("nav [aria-selected=true]", "data-view") == "walk"
    assert [tab.page.input_value(f'select[data-axis="{axis}"]') for axis in ("row", "col")] == [str(row), str(col)]
    every = torch.stack([seen.weights(layer=1, head=head, kind="cross")[row, col] for head in range(4)])
    assert f"head {int(every.argmax()) + 1}," in tab.page.inner_text(".stage")
    other = next(n for n in range(len(seen.cols(kind="cross"))) if n != col)
    below = tab.page.evaluate(MIDDLE_OF, "eˢ ÷ Σ")
    tab.click(40, below + 28 * (other + 1))
    assert (tab.state["row"], tab.state["col"]) == (str(row), str(other))


def test_alignment(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="align", layer=1, head=0, row=0, col=2)
    exact = float(seen.weights(layer=1, head=0, kind="cross")[0, 2])

    def check() -> None:
        assert tab.weight(0, 2) == pytest.approx(exact, **CLOSE)

    tab.in_both_languages(("Alignment", "단어 정렬"), check)
    assert float(tab.files()[1][3]) == pytest.approx(exact, abs=1e-7)


def drawn(tab: Tab) -> tuple[int, int]:
    """Tokens and lines of the drawing."""
    tab.settled()
    return len(tab.texts()), tab.page.locator(".stage svg path").count()


def steps_of(tab: Tab, n_steps: int) -> Iterator[int]:
    """ "Watch it write" without a clock, then "One step" again and again; after the last it ends by itself."""
    tab.page.evaluate("() => { window.setInterval = () => 1; }")
    tab.page.click('[data-do="write"]')
    tab.settled()
    tab.page.click('[data-do="pause"]')
    for n in range(1, n_steps + 1):
        assert tab.page.inner_text(".player output") == f"{n - 1} / {n_steps}"
        tab.page.click('[data-do="step"]')
        yield n
    tab.page.wait_for_selector('[data-do="write"]:visible')
    tab.settled()


@pytest.mark.parametrize(("head", "beam"), [(0, 1), (-1, 1), (1, 4)])
def test_alignment_is_drawn_as_it_is_written(tab: Tab, models: dict[str, Model], head: int, beam: int) -> None:
    """Each token comes with its row of weights; paused, it waits, and a step brings exactly one more."""
    seen = look(models["en-ko"], TEXT, generate={"beam": beam})
    exact = seen.weights(layer=1, head=None if head < 0 else head, kind="cross")
    tab.open(model="en-ko", text=TEXT, view="align", layer=1, head=head, row=0, col=2, beam=beam)
    tab.page.evaluate(KEEP_STREAM)
    n_source, lines = exact.shape[1], [_lines_of(row) for row in exact]
    for n in steps_of(tab, len(exact)):
        assert drawn(tab) == (n_source + n, sum(lines[:n])) or n == len(exact)
    told = [json.loads(line) for line in tab.page.evaluate("() => window.streamed ?? ''").splitlines()]
    assert bool(told) == (beam == 1), "what a search found is there already"
    for line, row in zip((line for line in told if "weights" in line), exact, strict=beam == 1):
        assert line["weights"] == pytest.approx(row.tolist(), abs=1e-5)
    assert tab.page.get_attribute('textarea[name="target"]', "placeholder") == seen.target_text
    assert tab.weight(0, 2) == pytest.approx(float(exact[0, 2]), **CLOSE)
    shown = torch.tensor([[float(x) for x in line[1:]] for line in tab.table()[1:]])
    assert (shown - exact).abs().max() < 1e-5


def _lines_of(row: torch.Tensor) -> int:
    """How many lines lead from a token: the three heaviest, those of at least 0.05."""
    return int((row.topk(3).values >= 0.05).sum())


def test_a_new_text_is_written_in_view_at_a_pace_to_follow(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="en-ko", text=TEXT, view="align", layer=0, row=0, col=1)
    text = "[formal] Did the tiger shine?"
    tab.page.fill('textarea[name="text"]', text)
    tab.page.evaluate(PAUSE_AT_2)
    began = time.monotonic()
    with tab.page.expect_response("**/api/stream"):
        tab.page.click(".primary")
    tab.page.wait_for_function("() => document.querySelector('.primary')?.disabled === false")
    found = look(models["en-ko"], text)
    exact = found.weights(layer=0, head=None, kind="cross")
    tab.page.wait_for_selector('[data-do="play"]:visible')
    assert time.monotonic() - began > 1, "two tokens, more than half a second each"
    assert tab.page.inner_text(".player output").startswith("2")
    assert tab.page.inner_text(".live") in found.target_text
    tab.page.click('[data-do="play"]')
    tab.page.wait_for_selector('[data-do="write"]:visible')
    tab.settled()
    assert tab.page.get_attribute('textarea[name="target"]', "placeholder") == found.target_text
    shown = torch.tensor([[float(x) for x in line[1:]] for line in tab.table()[1:]])
    assert torch.allclose(shown, exact, atol=1e-6)


def test_blocks_of_a_pooled_map_are_counted_from_1(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat sat on the mat. " * 90, view="heatmap", head=0)
    tab.over(9, 9)
    assert re.match(r"mean of rows 1–\d, columns 1–\d$", tab.tip()[1][0])


def test_next_token(tab: Tab, seen: Look) -> None:
    tab.open(model="en-ko", text=TEXT, view="next", position=1)
    tab.page.click('[data-do="tail"]')

    def check() -> None:
        texts = tab.texts()
        for one in seen.next(1, k=5):
            assert as_percent(one.probability) in texts, one
        assert tab.page.locator(".stage svg rect").count() <= 16, "no track that the likeliest would fill as if certain"

    tab.in_both_languages(("Next token", "다음 토큰"), check)
    tab.open(model="en-ko", text=TEXT, view="next", position=1, temperature=0.5, topk=4, topp=0.9)
    tab.page.click('[data-do="tail"]')
    tab.settled()
    texts = tab.texts()
    for one in seen.next(1, k=4, temperature=0.5, top_k=4, top_p=0.9):
        assert as_percent(one.probability) in texts, one
    assert texts.count("cut off") >= 12
    before = tab.files()
    tab.page.locator('input[name="temperature"]').fill("2")
    tab.page.wait_for_function("() => location.hash.includes('temperature=2')")
    tab.settled()
    assert tab.state["temperature"] == "2"
    assert tab.table() != before


def test_head_patterns(tab: Tab, seen: Look) -> None:
    from regard.lens.patterns import patterns

    tab.open(model="en-ko", text=TEXT, view="patterns", kind="encoder", pattern="previous")
    measured = patterns(seen, kind="encoder")
    exact = measured.previous
    # What B's number means, from the weights themselves: the mean of A[i, i - 1].
    weights = torch.stack(
        [torch.stack([seen.weights(layer=n, head=h, kind="encoder") for h in range(4)]) for n in range(2)]
    )
    assert torch.allclose(exact, weights.diagonal(-1, 2, 3).mean(-1), atol=1e-6)

    def check() -> None:
        texts = tab.texts()
        for value in exact.flatten().tolist():
            assert f"{value:.3f}" in texts

    tab.in_both_languages(("Head patterns", "헤드 유형"), check)
    table = tab.files()
    assert float(table[6][table[0].index("previous")]) == pytest.approx(float(exact[1, 1]), abs=1e-6)
    assert [line[2] for line in table[1:]] == [measured.label(n, h) for n in range(2) for h in range(4)]
    tab.page.click('.stage [data-value=""]')
    tab.settled()
    assert "pattern" not in tab.state


def test_heads_are_called_after_their_patterns(tab: Tab, seen: Look) -> None:
    from regard.lens.patterns import NAMES, patterns

    labels = {kind: patterns(seen, kind=kind).to_dict()["labels"] for kind in seen.kinds}
    names = {kind: {name for line in lines for name in line} for kind, lines in labels.items()}
    assert any(len(found) > 1 for found in names.values()), "all heads are called alike"
    words = dict(tab.open(model="en-ko", text=TEXT, view="patterns").page.evaluate(EVERY_SENTENCE))
    assert {*NAMES.values(), "diagonal", "mixed"} == {key[6:] for key in words if key.startswith("label.")}
    for kind, found in names.items():
        tab.open(model="en-ko", text=TEXT, view="patterns", kind=kind)
        for nth, _ in enumerate(tab.languages()):
            assert {words[f"label.{name}"][nth] for name in found} <= set(tab.texts())


def test_beam_tree(tab: Tab, models: dict[str, Model]) -> None:
    tab.open(model="en-ko", text=TEXT, view="beams", beam=4)
    found = look(models["en-ko"], TEXT, generate={"beam": 4, "n_best": 4})
    made = found.generated
    assert made is not None
    assert made.steps is not None
    best = made.hypotheses[0][0]
    chances = [
        one.probability for n in range(len(best.tokens)) for one in found.next(n, k=1000) if one.token == best.tokens[n]
    ]
    exact = float(torch.tensor(chances).log().sum())

    def check() -> None:
        assert any(near(text, exact) for text in tab.texts())

    tab.in_both_languages(("Beam tree", "빔 트리"), check)
    nodes = tab.files()[1:]
    winner = [line for line in nodes if line[4] == "true"]
    assert len(winner) == 1 + len(best.tokens)
    assert float(winner[-1][3]) == pytest.approx(exact, abs=1e-3)
    given_up = [line for line in nodes if line[5] == "false"]
    scores = sorted(score for step in made.steps for *_, score in step.of(0))
    assert given_up
    for line in given_up:  # each is a beam that the search had, with the score it had
        assert min(abs(float(line[3]) - score) for score in scores) < 1e-4
    n_texts = len(tab.texts())
    tab.page.uncheck('input[name="discarded"]')
    tab.settled()
    assert tab.state["discarded"] == "0"
    assert len(tab.texts()) < n_texts
    assert len(tab.table()) == 1 + len(nodes) - len(given_up)


def test_a_beam_search_is_watched_step_by_step(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT, view="beams", beam=4)
    for _ in tab.languages():
        nodes = {line[0]: line for line in tab.table()[1:]}
        depths = {"0": 0}
        for number, line in nodes.items():  # parents before children
            depths.setdefault(number, depths.get(line[1], 0) + 1)
        last = max(depths.values())
        for n in steps_of(tab, last):
            tab.settled()
            names = sum(0 < depth <= n for depth in depths.values())
            scores = sum(depth == n for depth in depths.values())  # of the beams of this step
            assert len(tab.texts()) == names + scores or n == last
        assert len(tab.texts()) > len(nodes) - 1, "all of it, with scores"
    tab.page.click('[data-do="write"]')
    tab.page.click('[data-do="end"]')
    tab.page.wait_for_selector('[data-do="write"]:visible')


def test_the_score_of_what_was_given_up_is_under_the_pointer(tab: Tab) -> None:
    tab.open(model="en-ko", text=TEXT, view="beams", beam=4)
    box, told = tab.box(), []
    for y in range(20, int(box["height"]), 27):
        for x in range(30, int(box["width"]), 60):
            tab.page.mouse.move(box["x"] + x, box["y"] + y)
            if shown := tab.tip_now():
                told.append(shown)
    scores = [float(line[3]) for line in tab.table()[1:]]
    assert any("dropped here" in about for _, about in told)
    for score, _ in told:
        assert min(abs(score - one) for one in scores) < 1e-4


def test_what_if(tab: Tab, models: dict[str, Model]) -> None:
    from regard.lens import interventions

    text = "the cat sat on the mat"
    plain = look(models["speaker"], text)
    last = len(plain.rows()) - 1
    tab.open(model="speaker", text=text, view="variant", layer=1, head=2, causal=0, off="self.0.1", position=last)
    with interventions.no_causal_mask(models["speaker"]), interventions.switch_off(models["speaker"], [("self", 0, 1)]):
        changed = look(models["speaker"], text)

    def check() -> None:
        assert as_percent(plain.next(k=1)[0].probability) in tab.texts()
        assert as_percent(changed.next(k=1)[0].probability) in tab.texts()

    tab.in_both_languages(("What if", "바꿔 보기"), check)
    table = tab.files()[1:]
    n = len(plain.rows())
    for at, found in ((2, plain), (3, changed)):
        shown = torch.tensor([float(line[at]) for line in table]).view(n, n)
        assert torch.allclose(shown, found.weights(layer=1, head=2), atol=1e-6)
    assert changed.weights(layer=1, head=2)[0, -1] > 0
    assert "q와 k" in tab.page.inner_text(".stage")  # what the map of a head shows that is switched off
    tab.page.click('[data-do="reset"]')
    tab.settled()
    assert "off" not in tab.state
    assert "causal" not in tab.state
    assert "q와 k" not in tab.page.inner_text(".stage")


def test_image_overlay(tab: Tab, models: dict[str, Model], tmp_path: Path) -> None:
    from regard.data.corpora import open_corpus

    file = tmp_path / "scene.png"
    open_corpus("shapes").example("valid", 3).pillow().save(file)
    tab.show(file, model="shapes", kind="cross", layer=0)
    found = look(models["shapes"], file)
    weights = found.weights(layer=0, head=None, kind="cross")

    def check() -> None:
        tab.page.click('.chips [data-row="1"]')
        tab.settled()
        tab.over(520 * 0.3, 520 * 0.6)
        shown, about = tab.tip()
        inside = [
            n
            for n, each in enumerate(found.cols(kind="cross"))
            if each.box and each.box[0] <= 0.3 < each.box[2] and each.box[1] <= 0.6 < each.box[3]
        ]
        row, col = (int(n) + 1 for n in re.findall(r"\d+", found.cols(kind="cross")[inside[0]].text))
        assert about[0].endswith(f" {row},{col}"), "people count patches from 1"
        assert shown == pytest.approx(float(weights[1, inside[0]]), **CLOSE)

    tab.in_both_languages(("Image", "이미지"), check)
    assert float(tab.files()[1][5]) == pytest.approx(float(weights[1, 0]), abs=1e-6)


def test_only_the_look_that_was_requested_last_is_shown(tab: Tab, models: dict[str, Model]) -> None:
    """The answer about the first text arrives after the one about the second."""
    tab.open(model="en-ko", text=TEXT, view="heatmap", kind="encoder")
    first, second, late = "[formal] Did the boy sing?", "[formal] Did the girl sing?", list[Any]()
    tab.page.route(
        "**/api/looks", lambda route: late.append(route) if first in route.request.post_data else route.continue_()
    )
    tab.page.fill("textarea[name=text]", first)
    tab.page.press("textarea[name=text]", "Enter")
    tab.page.fill("textarea[name=text]", second)
    with tab.page.expect_response("**/api/looks"):
        tab.page.press("textarea[name=text]", "Enter")
    with tab.page.expect_response("**/api/looks"):
        late[0].continue_()
    tab.page.unroute("**/api/looks")
    tab.settled()
    tab.page.wait_for_function("document.querySelector('#app')?.getAttribute('aria-busy') === 'false'")
    assert tab.state["text"] == second
    assert tab.table()[0][1:] == [label.text for label in look(models["en-ko"], second).cols(kind="encoder")]


def test_a_link_is_not_said_to_be_copied_where_there_is_no_clipboard(tab: Tab) -> None:
    """As for a page over http from another machine."""
    tab.open(model="en-ko", text=TEXT, view="heatmap")
    assert "Copy link" in tab.page.inner_text("footer")
    tab.page.evaluate("() => Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    tab.to("grid")
    assert "Copy link" not in tab.page.inner_text("footer")


def test_why_v_is_not_shown_is_said_in_korean(tab: Tab) -> None:
    def shorten(route: Any) -> None:
        answer = route.fetch()
        steps = {name: value for name, value in answer.json().items() if name not in ("v", "contribution")}
        route.fulfill(response=answer, json=steps | {"v_absent": ABSENT})

    tab.page.route("**/walk?*", shorten)
    tab.open(model="en-ko", text=TEXT, view="walk", lang="ko", row=1, col=1)
    tab.page.unroute("**/walk?*")
    assert "v는 512토큰까지의 문장에서 보여 줍니다. 이 문장은 600토큰입니다." in tab.texts()


ABSENT = "v is shown for texts of at most 512 tokens; this one has 600"  # explain_weight
