"""Tokens as people read them: whole Hangul, words of sub-words, special tokens told apart; by anybody's tokenizer."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from generation.spoken import LINES, language_model, made, translator
from models.small import small, small_config
from regard.lens import Label, Look
from regard.lens.labels import begins_word, join_labels, token_labels, token_text, visible_text
from regard.text.processor import Processor
from regard.text.tokenizer import MarianTokenizer, Tokenizer
from regard.text.tokenizer_training import TokenizerKind, train_tokenizer

CONFIG = small_config("gpt2")
TEXT = "고양이가 매트 위에, don't sit!"


def texts(labels: list[Label]) -> list[str]:
    return [label.text for label in labels]


# ---- our own tokenizers


def test_bytes_of_a_character_are_numbered_and_join_to_it() -> None:
    tokenizer = train_tokenizer(LINES, "bytes")
    labels = token_labels(tokenizer.encode("a 한!"), tokenizer, CONFIG)
    assert texts(labels) == ["a", "␣", "한₁", "한₂", "한₃", "!"]
    assert [label.start for label in labels] == [0, 1, 2, 2, 2, 3]
    whole = join_labels(labels, words=False, specials=True)
    assert texts(whole) == ["a", "␣", "한", "!"]
    assert whole[2].span == (2, 5)
    assert texts(join_labels(labels)) == ["a", "한", "!"], "the space belongs to the word behind it"


@pytest.mark.parametrize("kind", ["chars", "bytes", "words", "bpe", "unigram"])
def test_words_are_the_same_whatever_cut_them(kind: TokenizerKind) -> None:
    tokenizer = train_tokenizer([*LINES, TEXT], kind, None if kind in ("chars", "words", "bytes") else 330, "bos-eos")
    labels = token_labels(tokenizer.encode(TEXT), tokenizer, CONFIG)
    assert labels[0].special
    assert labels[-1].text == "<eos>"
    assert texts(join_labels(labels)) == ["고양이가", "매트", "위에", ",", "don't", "sit", "!"]
    kept = join_labels(labels, specials=True)
    assert [x.text for x in kept if x.special] == ["<bos>", "<eos>"]
    for label in join_labels(labels):
        assert TEXT[label.start : label.end].strip() == label.text, "start and end find it in the text"


@pytest.mark.parametrize("kind", ["bytes", "bpe", "chars"])
@given(text=st.text(min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_every_token_has_exactly_one_label_of_any_text(kind: TokenizerKind, text: str) -> None:
    tokenizer = _tokenizer(kind)
    ids = tokenizer.encode(text)
    labels = token_labels(ids, tokenizer, CONFIG)
    assert [label.span for label in labels] == [(n, n + 1) for n in range(len(ids))]
    assert [label.token_id for label in labels] == ids
    assert all(label.text for label in labels)
    merged = join_labels(labels, specials=True)
    assert [n for label in merged for n in range(*label.span)] == list(range(len(ids)))


_MADE: dict[str, Tokenizer] = {}


def _tokenizer(kind: TokenizerKind) -> Tokenizer:
    if kind not in _MADE:
        _MADE[kind] = train_tokenizer(LINES, kind, 300 if kind == "bpe" else None)
    return _MADE[kind]


# ---- anybody's


def from_json(model: dict[str, Any], decoder: dict[str, Any] | None, special: tuple[str, ...] = ()) -> Tokenizer:
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {x[0]: n for n, x in enumerate(model["vocab"])}
    added = [
        {"id": vocab[x], "content": x, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for x in special
    ]
    content = {"version": "1.0", "added_tokens": added, "model": model, "decoder": decoder}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor"))
    return Tokenizer(json.dumps(nothing | content).encode())


def test_word_pieces_join_at_their_marks() -> None:
    words = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "play", "##ing", "foot", "##ball", "."]
    model = {
        **{"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##"},
        **{"max_input_chars_per_word": 100, "vocab": {word: n for n, word in enumerate(words)}},
    }
    decoder = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    tokenizer = from_json(model, decoder, tuple(words[:5]))
    labels = token_labels([1, 5, 6, 7, 8, 3, 4, 9, 2], tokenizer, CONFIG)
    assert texts(labels) == ["[CLS]", "play", "ing", "foot", "ball", "[UNK]", "[MASK]", ".", "[SEP]"]
    assert [x.text for x in labels if x.special] == ["[CLS]", "[SEP]"], "what stands for a word is no frame"
    assert texts(join_labels(labels)) == ["playing", "football", "[UNK]", "[MASK]", "."]


def test_sentence_pieces_have_spaces_and_single_bytes() -> None:
    words = ["<pad>", "</s>", "<unk>", "▁the", "▁cat", "s", "<0xED>", "<0x95>", "<0x9C>"]
    model = {"type": "Unigram", "unk_id": 2, "byte_fallback": True, "vocab": [[word, 0.0] for word in words]}
    decoder = {
        "type": "Sequence",
        "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}],
    }
    tokenizer = from_json(model, decoder, ("<pad>", "</s>", "<unk>"))
    labels = token_labels([3, 4, 5, 6, 7, 8, 1], tokenizer, CONFIG)
    assert texts(labels) == ["the", "cat", "s", "한₁", "한₂", "한₃", "</s>"]
    assert texts(join_labels(labels)) == ["the", "cats한"]
    assert texts(token_labels([6, 1], tokenizer, CONFIG)) == ["\ufffd", "</s>"], "half a character stays one"


def test_byte_level_tokens_of_others() -> None:
    ours = train_tokenizer(LINES, "bpe", 290)
    fields = json.loads(ours.content)
    fields["added_tokens"] = [x for x in fields["added_tokens"] if x["content"] == "<eos>"]
    tokenizer = Tokenizer(json.dumps(fields).encode())
    ids = ours.encode("고양이 cat")
    assert texts(token_labels(ids, tokenizer, CONFIG)) == texts(token_labels(ids, ours, CONFIG))


def test_marian_s_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as without sentencepiece
    vocab = {"</s>": 0, "<unk>": 1, "▁ein": 2, "▁Haus": 3, "tür": 4, "<pad>": 5}
    tokenizer = MarianTokenizer(b"", vocab, "source.spm")
    labels = token_labels([2, 3, 4, 0], tokenizer, CONFIG)
    assert texts(labels) == ["ein", "Haus", "tür", "</s>"]
    assert texts(join_labels(labels)) == ["ein", "Haustür"]


def test_without_a_tokenizer_a_token_is_its_number() -> None:
    labels = token_labels([1, 17, 30, 2], None, CONFIG)
    assert texts(labels) == ["1", "17", "30", "2"]
    assert [x.special for x in labels] == [True, False, False, True]
    assert texts(join_labels(labels)) == ["17", "30"]


def test_one_token_alone() -> None:
    tokenizer = train_tokenizer(LINES, "bpe", 300)
    (index,) = tokenizer.encode(" the")
    assert token_text(index, tokenizer, CONFIG) == " the"
    first = train_tokenizer(LINES, "bytes").encode("한")[0]
    assert token_text(first, train_tokenizer(LINES, "bytes"), CONFIG) == "0xED"
    assert token_text(10**6, tokenizer, CONFIG) == "<1000000>"
    assert token_text(2, tokenizer, CONFIG) == "<eos>"


@pytest.mark.parametrize(
    ("before", "text", "begins"),
    [
        ("", "a", True),
        ("the", " cat", True),
        ("pla", "ying", False),
        ("don", "'t", False),
        ("don'", "t", False),
        ("mat", ".", True),
        (".", ")", False),
        ("(", "x", True),
        (" ", "x", False),
        ("책", "을", False),
        ("東", "京", True),
        ("x", "1", False),
        ("é", "\u0301", False),
    ],
)
def test_where_words_begin(before: str, text: str, begins: bool) -> None:
    assert begins_word(before, text) is begins


def test_nothing_is_invisible() -> None:
    assert visible_text(" a ") == "a"
    assert visible_text("  ") == "␣␣"
    assert visible_text("\n") == "⏎"
    assert visible_text("a\x00\nb") == "a·⏎b"
    assert visible_text("") == "∅"
    assert visible_text("שלום 👍🏽") == "שלום 👍🏽"


# ---- merged views


@pytest.fixture(scope="module")
def seen() -> Look:
    return regard.look(translator(), "the cat sat on the mat.", "고양이가 매트 위에 앉았다.")


@pytest.mark.parametrize("kind", ["encoder", "self", "cross"])
@pytest.mark.parametrize("specials", [True, False])
def test_a_merged_view_is_averages_of_rows_and_sums_of_columns(seen: Look, kind: str, specials: bool) -> None:
    view, dense = seen.merged(kind=kind, specials=specials), seen.weights(layer=1, head=2, kind=kind)
    found = view.weights(layer=1, head=2)
    assert found.shape == (len(view.rows), len(view.cols))
    wanted = torch.stack(
        [torch.stack([dense[slice(*r.span), slice(*c.span)].sum(1).mean() for c in view.cols]) for r in view.rows]
    )
    if not specials:
        shares = torch.stack([dense[slice(*r.span)].sum(1).mean() for r in view.rows])
        lost = shares - wanted.sum(1)
        assert lost.max() > 0.01, "something was hidden"
        wanted = wanted / (1 - lost)[:, None]
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(found.sum(-1), torch.ones(len(found)))
    torch.testing.assert_close(view.weights(layer=1, head=2, rows=slice(1, 3), cols=[0, 2]), found[1:3][:, [0, 2]])
    assert view.top(1, layer=1, head=2)[1].at[0][0] is view.cols[int(found[1].argmax())]


def test_words_of_a_look(seen: Look) -> None:
    view = seen.words(kind="cross")
    assert texts(view.rows) == ["고양이가", "매트", "위에", "앉았다", "."]
    assert texts(view.cols) == ["the", "cat", "sat", "on", "the", "mat", "."]
    assert str(view.top(2, layer=0)[0]).startswith("'고양이가' looks at '")


def test_a_row_that_sees_hidden_columns_alone_is_left_with_nothing() -> None:
    tokenizer = train_tokenizer(LINES, "bpe", 300, "bos-eos")
    model = made("gpt2", Processor(source=tokenizer), vocab_size=tokenizer.size)
    look = regard.look(model, "the cat")
    assert look.rows()[0].text == "<bos>"
    kept = look.merged(words=False, specials=False).weights(layer=0, head=0)
    torch.testing.assert_close(kept.sum(-1), torch.ones(len(kept)))
    view = look.merged(words=False, specials=True)
    torch.testing.assert_close(view.weights(layer=0, head=0), look.weights(layer=0, head=0))


@pytest.mark.parametrize("fields", [{"attention_sinks": True}, {"mixer": "sigmoid"}])
def test_hidden_columns_leave_a_row_its_sum(fields: dict[str, Any]) -> None:
    model = small("gpt2", **fields)
    look = regard.look(model, [1, 5, 6, 7, 5, 9])
    kept, whole = look.merged(words=False).weights(layer=0, head=0), look.weights(layer=0, head=0)[1:]
    torch.testing.assert_close(kept.sum(-1), whole.sum(-1))
    torch.testing.assert_close(kept / kept.sum(-1, keepdim=True), whole[:, 1:] / whole[:, 1:].sum(-1, keepdim=True))


def test_patches_are_not_words() -> None:
    look = regard.look(small("vit-tiny"), torch.randn(1, 16, 16))
    view = look.merged(specials=False)
    assert len(view.cols) == 16
    torch.testing.assert_close(view.weights(layer=0, head=0).sum(-1), torch.ones(16))


def test_next_tokens_are_said_as_they_are_written() -> None:
    look = regard.look(language_model(), "the cat sat")
    found = look.next(k=5)
    assert len(found) == 5
    assert found == sorted(found, key=lambda x: -x.probability)
    assert len(look.next(k=50, top_k=3)) == 3
    assert look.next(k=1, temperature=0.01)[0].probability > found[0].probability
    with pytest.raises(ValueError, match="head='none': it does not predict tokens"):
        regard.look(small("bert-base"), [3, 4]).next()
