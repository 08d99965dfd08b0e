"""Scores against alignments and places that are known, of attention that was planted and of real models."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from generation.spoken import image_classifier, language_model, translator
from regard.data.corpora import open_corpus
from regard.lens import head_scores, look
from regard.lens.head_scores import align_words, alignment_error, count_links, pointing, score, word_tokens
from regard.lens.look import Look
from regard.models import Model

from .planted import en_ko_translator, map_of, pointing_at, shapes_captioner


def planted(monkeypatch: pytest.MonkeyPatch, plant: Any) -> None:
    """Let every look that a score takes have these cross-attention weights, (H, T, S), in all layers."""

    def looked(model: Model, what: Any, target: Any) -> Look:
        seen = look(model, what, target)
        found = map_of(plant(seen, len(seen.rows(kind="cross")), len(seen.cols(kind="cross"))))
        seen._maps |= {("cross", layer): found for layer in range(seen.layers(kind="cross"))}
        return seen

    monkeypatch.setattr(head_scores, "look", looked)


# ---- alignment error rate


def test_the_rate_is_och_and_neys() -> None:
    """Three links, two of them sure and one more possible, of four sure ones: 1 - (2 + 3) / (3 + 4)."""
    sure = {(0, 0), (1, 1), (4, 1), (5, 3)}
    allowed = sure | {(2, 2)}
    found = count_links(torch.tensor([[0, 1, 2, -1], [9, 9, 9, -1]]), sure, allowed)
    assert found.error.tolist() == pytest.approx([1 - 5 / 7, 1.0])
    assert (found + found).error.tolist() == pytest.approx(found.error.tolist())
    assert (found + count_links(torch.tensor([[7], [7]]), {(0, 0)}, set())).error[0] == pytest.approx(1 - 5 / 9)


@pytest.mark.parametrize("kind", ["bpe", "words"])
def test_words_have_the_tokens_that_spell_them(kind: str) -> None:
    model = en_ko_translator(kind=kind)
    for index in range(20):
        pair = open_corpus("en-ko").example("train", index)
        seen = look(model, pair.source, pair.target)
        for labels, text, tokenizer in (
            (seen.cols(kind="cross"), pair.source, model.processor.source),
            (seen.rows(kind="cross"), pair.target, model.processor.target),
        ):
            words = word_tokens(labels, text)
            spelled = [tokenizer.decode([labels[n].token_id for n in word]).strip() for word in words]
            assert spelled == text.split()
            spelling = [n for n, x in enumerate(labels) if not x.special and x.text != "␣"]  # a space is no word's
            assert sorted(n for word in words for n in word) == spelling


def test_word_weights_are_the_same_in_small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = look(en_ko_translator(), *open_corpus("en-ko").example("train", 5)[:2])
    rows, cols = head_scores.look_word_tokens(seen, "cross", "written")
    dense = seen.map(kind="cross", layer=1).dense()[0]
    wanted = torch.stack(
        [torch.stack([dense[:, row][:, :, col].sum(-1).mean(-1) for col in cols], -1) for row in rows], dim=1
    )
    for most in (1, 300, 1 << 20):
        monkeypatch.setattr(head_scores, "_WEIGHTS_AT_ONCE", most)
        parts = list(head_scores.word_weights(seen.map(kind="cross", layer=1), rows, cols))
        torch.testing.assert_close(torch.cat([x for _, x in parts], dim=1), wanted)
        assert (len(parts) == 1) == (most == 1 << 20)
        assert len(parts) <= len(rows)


def test_attention_on_the_true_words_has_the_least_error(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = open_corpus("en-ko")
    at = iter(range(10_000))

    def true_words(seen: Look, n_rows: int, n_cols: int) -> torch.Tensor:
        pair = corpus.example("valid", next(at))
        rows, cols = (
            word_tokens(seen.rows(kind="cross"), pair.target),
            word_tokens(seen.cols(kind="cross"), pair.source),
        )
        best = {row: col for col, row in [*pair.possible, *pair.alignment]}
        targets = [n_cols - 1] * n_rows  # what is no word looks at the end
        for word, tokens in enumerate(rows):
            for token in tokens:
                targets[token] = cols[best[word]][0] if word in best else n_cols - 1
        wrong = pointing_at([0] * n_rows, n_cols)
        return torch.cat([wrong, pointing_at(targets, n_cols), wrong, wrong])

    planted(monkeypatch, true_words)
    found = alignment_error(en_ko_translator(), 12)
    assert found["written"][0][1] == pytest.approx(found["one_link_at_best"])
    assert found["one_link_at_best"] < 0.1
    assert found["best"] == {
        "value": pytest.approx(found["one_link_at_best"], abs=0.03),
        "layer": 0,
        "head": 1,
        "when": "written",
    }
    assert found["written"][0][0] > 0.7
    assert found["read"][0][1] > found["written"][0][1] + 0.05
    assert found["diagonal"] > 0.5
    assert found["chance"] > 0.5


def test_the_row_that_has_read_a_word_is_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, at = open_corpus("en-ko"), iter(range(10_000))

    def shifted(seen: Look, n_rows: int, n_cols: int) -> torch.Tensor:
        pair = corpus.example("valid", next(at))
        rows, cols = (
            word_tokens(seen.rows(kind="cross"), pair.target),
            word_tokens(seen.cols(kind="cross"), pair.source),
        )
        best, targets = {row: col for col, row in pair.alignment}, [n_cols - 1] * (n_rows + 1)
        for word, tokens in enumerate(rows):
            for token in tokens:
                targets[token + 1] = cols[best.get(word, 0)][0]
        return pointing_at(targets[:n_rows], n_cols, n_heads=4)

    planted(monkeypatch, shifted)
    found = alignment_error(en_ko_translator(), 8)
    assert found["best"]["when"] == "read"
    assert found["read"][1][2] < 0.15
    assert found["written"][1][2] > found["read"][1][2] + 0.05


def test_the_best_head_is_measured_where_it_was_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """One head is right about even examples, another about odd ones: whichever is chosen is wrong about the others."""
    corpus, at = open_corpus("en-ko"), iter(range(10_000))

    def lucky(seen: Look, n_rows: int, n_cols: int) -> torch.Tensor:
        index = next(at)
        pair = corpus.example("valid", index)
        rows, cols = (
            word_tokens(seen.rows(kind="cross"), pair.target),
            word_tokens(seen.cols(kind="cross"), pair.source),
        )
        best, right = {row: col for col, row in pair.alignment}, [n_cols - 1] * n_rows
        for word, tokens in enumerate(rows):
            for token in tokens:
                right[token] = cols[best.get(word, 0)][0]
        heads = [pointing_at([0] * n_rows, n_cols) for _ in range(4)]
        heads[index % 2] = pointing_at(right, n_cols)
        return torch.cat(heads)

    planted(monkeypatch, lucky)
    found = alignment_error(en_ko_translator(), 20)
    assert found["best"]["value"] > 0.7
    assert min(min(layer) for layer in found["written"]) < 0.6


def test_a_score_is_a_table_and_a_document() -> None:
    found = score(en_ko_translator(), 6)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["n"] == 6
    assert len(found["written"]) == 2
    assert len(found["written"][0]) == 4
    assert 0 <= found["token_accuracy"] < 0.5
    for wanted in (
        "alignment error rate on 6 examples of en-ko valid",
        "head 3",
        "layer 1",
        "together",
        "without attention",
    ):
        assert wanted in found["table"]
    assert f"{100 * found['read'][1][3]:.1f} %" in found["table"]


def test_recurrent_attention_is_scored_too() -> None:
    found = score(en_ko_translator("luong-lstm"), 3)
    assert len(found["written"]) == 1
    assert len(found["written"][0]) == 1


def test_accuracy_is_that_of_all_logits() -> None:
    model = en_ko_translator()
    seen = look(model, *open_corpus("en-ko").example("valid", 0)[:2])
    with torch.no_grad():
        said = model(*seen.inputs)[0].argmax(-1).tolist()
    wanted = [x.token_id for x in seen.rows(kind="cross")]
    right = sum(a == b for a, b in zip(said, wanted, strict=True))
    assert head_scores._accuracy(seen) == (right, len(wanted))


# ---- an alignment of one's own


def test_alignment_of_one_look_with_given_links() -> None:
    pair = open_corpus("en-ko").example("train", 3)
    seen = look(en_ko_translator(), pair.source, pair.target)
    rows, cols = head_scores.look_word_tokens(seen, "cross", "written")
    targets = [0] * len(seen.rows(kind="cross"))
    gold = {row: col for col, row in pair.alignment}
    for word, tokens in enumerate(rows):
        for token in tokens:
            targets[token] = cols[gold.get(word, 0)][-1]
    seen._maps["cross", 0] = map_of(pointing_at(targets, len(seen.cols(kind="cross")), n_heads=4))
    found = align_words(seen, pair.alignment, pair.possible)
    assert found.error.shape == (2, 4)
    assert found.links.shape == (2, 4, len(rows))
    assert found.links[0, 0].tolist() == [gold.get(word, 0) for word in range(len(rows))]
    assert found.mass[0].tolist() == pytest.approx([1.0] * 4)
    assert (found.mass[1] < 0.9).all()
    assert (found.error[0] < 0.2).all()
    assert (found.error[1] > found.error[0]).all()


def test_arcs_of_a_sentence_are_links_to_itself() -> None:
    seen = look(language_model(), "the cat sat on the mat.")
    words = word_tokens(seen.rows(), seen.text or "")
    targets = [words[0][0]] * len(seen.rows())
    targets[words[2][-1]] = words[1][-1]
    for token in words[2]:
        targets[token] = words[1][-1]
    seen._maps["self", 1] = map_of(pointing_at(targets, len(targets), n_heads=4))
    found = align_words(seen, [(1, 2)])
    assert found.links[1, 0, 2] == 1
    assert found.mass[1, 0] == pytest.approx(1)


@pytest.mark.parametrize(
    ("links", "said"),
    [([(99, 0)], r"link \(99, 0\) is outside the 6 column words"), ([(0, -1)], r"link \(0, -1\) is outside")],
)
def test_links_outside_of_the_text_are_told(links: list[tuple[int, int]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        align_words(look(translator(), "the cat sat on the mat.", "주의력만"), links)


def test_words_that_the_tokens_cannot_spell_are_told() -> None:
    seen = look(translator(), "the cat", "주의력만")
    with pytest.raises(ValueError, match="spell 7 of the text's 9 letters"):
        word_tokens(seen.cols(kind="cross"), "the cat!!")
    with pytest.raises(ValueError, match="one side of this look is not text"):
        align_words(look(shapes_captioner(), torch.rand(3, 64, 64), "a red circle"), [(0, 0)])


# ---- pointing


def test_attention_on_the_things_points_right(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, at = open_corpus("shapes"), iter(range(10_000))

    def on_things(seen: Look, n_rows: int, n_cols: int) -> torch.Tensor:
        picture = corpus.example("valid", next(at))
        targets, elsewhere = [0] * n_rows, [0] * n_rows
        for tokens, things in zip(
            word_tokens(seen.rows(kind="cross"), picture.caption), picture.words.things, strict=True
        ):
            for token in tokens if things else ():
                thing = picture.scene.things[things[0]]
                targets[token] = 1 + int(thing.y * 8) * 8 + int(thing.x * 8)
                corner = [0, 7, 56, 63]
                elsewhere[token] = 1 + max(corner, key=lambda n: _far(n, picture, things))
        return torch.cat(
            [
                pointing_at(targets, n_cols),
                pointing_at(elsewhere, n_cols),
                pointing_at([0] * n_rows, n_cols).repeat(2, 1, 1),
            ]
        )

    planted(monkeypatch, on_things)
    found = pointing(shapes_captioner(), 16)
    assert found["written"][0][0] == 1.0
    assert found["mass"]["written"][0][0] == pytest.approx(1.0)
    assert found["written"][1][1] < 0.1
    assert found["best"] == {"value": 1.0, "layer": 0, "head": 0, "when": "written"}
    assert 0.05 < found["chance"] < 0.35
    assert found["words"] > 60
    assert found["read"][0][0] > 0.5


def _far(patch: int, picture: Any, things: tuple[int, ...]) -> float:
    y, x = divmod(patch, 8)
    return min((picture.scene.things[t].x - x / 7) ** 2 + (picture.scene.things[t].y - y / 7) ** 2 for t in things)


def test_even_attention_points_no_better_than_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    planted(monkeypatch, lambda seen, n_rows, n_cols: torch.full((4, n_rows, n_cols), 1 / n_cols))
    found = pointing(shapes_captioner(), 10)
    assert found["mass"]["written"][0][0] == pytest.approx(found["chance"], abs=1e-4)


def test_a_captioner_is_scored_by_pointing() -> None:
    found = score(shapes_captioner(), 4)
    assert found["measure"] == "pointing accuracy"
    assert "pointing accuracy on 4 examples" in found["table"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize("model", [language_model, image_classifier], ids=["decoder", "vit"])
def test_a_model_that_cannot_be_scored_says_so(model: Any) -> None:
    with pytest.raises(ValueError, match="a score needs cross-attention"):
        score(model())
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        alignment_error(en_ko_translator(), 0)
