"""Tokenizers: text comes back, transformers reads the files, training repeats itself, people see whole characters."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.sources import open_source
from regard.errors import BadData, UsageError
from regard.text.tokenizer import SPECIAL, Tokenizer
from regard.text.tokenizer_training import train_tokenizer
from regard.text.unigram import train_unigram

KINDS = ("chars", "bytes", "words", "bpe", "unigram")
EXACT = ("bytes", "bpe")
TEXTS = [
    "The cat sat on the mat.",
    "The dogs sat on the cats, didn't they?",
    "나는 학교에 갑니다.",
    "고양이가 매트 위에 앉았어요.",
    "  two  spaces, a\ttab and\na line  ",
    "naïve café — 42 % 😀",
] * 3


def made(kind: str, template: str = "none") -> Tokenizer:
    size = {"bpe": 400, "unigram": 200}.get(kind)
    return train_tokenizer(TEXTS, kind, size, template)  # type: ignore[arg-type]


TOKENIZERS = {kind: made(kind) for kind in KINDS}
any_text = st.text(max_size=40) | st.text(alphabet="가나다 cat<>eospadunk▁\n\t é😀\u1100\u1161", max_size=30)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", [*TEXTS[:6], "", " ", "  ", " the cat ", "\n"])
def test_seen_texts_come_back_exactly(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    if kind == "words" and tokenizer.unk_id in ids:
        assert text == " the cat ", "only this text was never seen as such"
        return
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", EXACT)
@given(text=any_text)
def test_any_text_comes_back_exactly(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert all(len(SPECIAL) <= index < tokenizer.size for index in ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in EXACT])
@given(text=any_text)
def test_any_text_comes_back_composed_where_all_of_it_is_known(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    assert not set(ids) & {tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.mask_id}
    if tokenizer.unk_id not in ids:
        expected = unicodedata.normalize("NFC", text)
        assert tokenizer.decode(ids) == (expected if kind == "chars" else expected.replace("▁", " "))


@pytest.mark.parametrize("kind", KINDS)
@given(text=any_text)
def test_pieces_are_whole_characters_in_order_and_cover_all_tokens(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    pieces, decoded = tokenizer.token_spans(ids), tokenizer.decode(ids)
    assert [place for piece in pieces for place in range(piece.first, piece.last)] == list(range(len(ids)))
    for piece in pieces:
        if ids[piece.first] != tokenizer.unk_id:
            assert decoded[piece.start : piece.end] == piece.text
            assert "\ufffd" not in piece.text or "\ufffd" in text
    assert "".join(piece.text for piece in pieces if ids[piece.first] != tokenizer.unk_id) == decoded


@given(ids=st.lists(st.integers(5, 260), max_size=12))
def test_bytes_that_are_no_text_are_shown_as_they_decode(ids: list[int]) -> None:
    tokenizer = TOKENIZERS["bytes"]
    pieces = tokenizer.token_spans(ids)
    assert "".join(piece.text for piece in pieces) == tokenizer.decode(ids)
    assert sum(piece.last - piece.first for piece in pieces) == len(ids)


@pytest.mark.parametrize("kind", EXACT)
def test_hangul_and_emoji_that_were_never_seen_are_one_piece_each(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("뷁🦜")
    assert len(ids) > 2
    assert tokenizer.span_texts(ids) == ["뷁", "🦜"]
    assert tokenizer.span_texts([1, *ids[:1], 2]) == ["<bos>", "\ufffd", "<eos>"]


def test_pieces_as_people_see_them() -> None:
    shown = made("words", "eos")
    assert shown.span_texts(shown.encode("The cat sat.")) == ["The", " cat", " sat", ".", "<eos>"]
    characters = TOKENIZERS["chars"]
    assert characters.span_texts(characters.encode("학교에 q")) == ["학", "교", "에", " ", "<unk>"]
    assert characters.span_texts([10_000, 0]) == ["<10000>", "<pad>"]


@pytest.mark.parametrize("kind", KINDS)
def test_special_tokens_have_fixed_ids_and_cannot_be_typed(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tuple(tokenizer.token(index) for index in range(5)) == SPECIAL
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.unk_id, tokenizer.mask_id) == (
        0,
        1,
        2,
        3,
        4,
    )
    for word in SPECIAL:
        assert not set(tokenizer.encode(word)) & {0, 1, 2, 4}


@pytest.mark.parametrize("kind", KINDS)
def test_half_a_surrogate_pair_is_replaced_not_fatal(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    assert tokenizer.encode("a\ud800b") == tokenizer.encode("a" + "\ufffd" * 3 + "b")


@pytest.mark.parametrize(("template", "around"), [("none", ([], [])), ("eos", ([], [2])), ("bos-eos", ([1], [2]))])
def test_templates(template: str, around: tuple[list[int], list[int]]) -> None:
    tokenizer = made("bpe", template)
    inside = tokenizer.encode("The cat", special=False)
    assert tokenizer.encode("The cat") == around[0] + inside + around[1]
    assert tokenizer.encode_all(["The cat", "", "a"])[0] == around[0] + inside + around[1]
    assert tokenizer.decode(tokenizer.encode("The cat")) == "The cat"


@pytest.mark.parametrize("kind", KINDS)
def test_saved_and_loaded_it_is_the_same_and_transformers_agrees(kind: str, tmp_path: Path) -> None:
    tokenizer = made(kind, "bos-eos")
    path = tmp_path / "tokenizer.json"
    tokenizer.save(path)
    again = Tokenizer.load(path)
    assert (again.content, again.sha256, again.size) == (tokenizer.content, tokenizer.sha256, tokenizer.size)
    assert [file.name for file in tmp_path.iterdir()] == ["tokenizer.json"]
    transformers = pytest.importorskip("transformers", reason="the hub extra is not installed")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    assert len(theirs) == tokenizer.size
    for text in [*TEXTS[:6], "뷁 unseen"]:
        ids = tokenizer.encode(text)
        assert theirs(text)["input_ids"] == ids
        assert theirs.decode(ids, skip_special_tokens=True) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_foreign_file_is_read_by_the_same_class(kind: str) -> None:
    """The same vocabulary under other names of its special tokens, as another program would have written it."""
    ours = made(kind, "eos")
    theirs = Tokenizer(ours.content.replace(b'"<pad>"', b'"[PAD]"'))
    assert (ours.is_native, theirs.is_native) == (True, False)
    assert theirs.size == ours.size
    for text in TEXTS:
        ids = ours.encode(text)
        assert theirs.encode(text) == ids
        assert theirs.encode_all([text], special=False) == [ours.encode(text, special=False)]
        assert theirs.decode(ids) == ours.decode(ids)
        assert [span.text.strip() for span in theirs.token_spans(ids)] == [x.strip() for x in ours.span_texts(ids)]


def test_special_ids_of_a_foreign_file_are_those_of_its_model() -> None:
    ours = made("bytes", "none")
    theirs = Tokenizer(ours.content.replace(b'"<pad>"', b'"[PAD]"'), "theirs.json")
    with pytest.raises(ValueError, match=r"theirs\.json has no pad token, or does not say which token it is"):
        _ = theirs.pad_id
    told = theirs.with_special_ids(pad=7, eos=9)
    assert (told.pad_id, told.eos_id, theirs.special_ids) == (7, 9, {})
    with pytest.raises(BadData, match=r"starts with the tokens \('\[PAD\]', .* are needed"):
        Tokenizer.read_native(theirs.content, "theirs.json")


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_the_texts_does_not_matter(kind: str) -> None:
    shuffled = random.Random(1).sample(TEXTS, len(TEXTS))
    size = {"bpe": 400, "unigram": 200}.get(kind)
    assert train_tokenizer(shuffled, kind, size).content == TOKENIZERS[kind].content  # type: ignore[arg-type]


def test_another_process_trains_the_same_files() -> None:
    script = (
        "import json, sys\nfrom regard.text import train_tokenizer\n"
        "texts, sizes = json.load(sys.stdin)\n"
        "print(json.dumps({k: train_tokenizer(texts, k, n).sha256 for k, n in sizes.items()}))"
    )
    sizes = {kind: {"bpe": 400, "unigram": 200}.get(kind) for kind in KINDS}
    source = Path(__file__).resolve().parents[2] / "src"
    answer = subprocess.run(
        [sys.executable, "-c", script], input=json.dumps([TEXTS, sizes]), capture_output=True, text=True, cwd=source
    )
    assert answer.returncode == 0, answer.stderr
    assert json.loads(answer.stdout) == {kind: TOKENIZERS[kind].sha256 for kind in KINDS}


def test_sizes_are_kept() -> None:
    assert TOKENIZERS["bytes"].size == 261
    assert TOKENIZERS["bpe"].size <= 400
    assert TOKENIZERS["unigram"].size <= 200
    few = train_tokenizer(TEXTS, "chars", 15)
    assert few.size == 15
    assert train_tokenizer(TEXTS, "words", 20).size == 20
    with pytest.raises(ValueError, match="vocab_size=100 is less than the 261 that kind='bpe' needs"):
        train_tokenizer(TEXTS, "bpe", 100)
    with pytest.raises(ValueError, match="kind='bep' is not one of"):
        train_tokenizer(TEXTS, "bep")  # type: ignore[arg-type]


def test_unigram_finds_the_pieces_words_are_made_of() -> None:
    stems, endings = ("walk", "push", "jump", "play", "open", "hunt"), ("ing", "ed", "er", "s", "able")
    words = {f"{stem}{ending}": 1 for stem in stems for ending in endings}
    letters = {letter for word in words for letter in word}
    pieces = dict(train_unigram(words, len(letters) + 10))
    assert {*stems, *endings[:3], endings[4]} <= set(pieces)
    assert letters <= set(pieces)
    assert all(score <= 0 for score in pieces.values())


def test_unigram_is_never_longer_than_characters_and_shorter_on_korean() -> None:
    tokenizer, characters = TOKENIZERS["unigram"], TOKENIZERS["chars"]
    ours = sum(len(tokenizer.encode(text)) for text in TEXTS)
    assert ours < 0.7 * sum(len(characters.encode(text)) for text in TEXTS)


def test_unigram_keeps_the_pieces_that_save_most() -> None:
    texts = [x.source for x in open_source("en-ko", epoch_examples=400).train]  # type: ignore[union-attr]
    tokenizer = train_tokenizer(texts, "unigram", 200)
    assert tokenizer.size == 200
    assert sum(map(len, tokenizer.encode_all(texts))) < 0.5 * sum(map(len, texts))


def test_many_texts_are_encoded_as_one_by_one() -> None:
    tokenizer = made("bpe", "eos")
    many = [f"The cat {n} 가" for n in range(5000)]
    assert list(tokenizer.encode_stream(iter(many))) == [tokenizer.encode(text) for text in many]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"model": 1}'])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(BadData, match="is not a tokenizer that can be read"):
        Tokenizer.load(path)
    with pytest.raises(UsageError, match="there is no file"):
        Tokenizer.load(tmp_path / "missing.json")


@pytest.mark.parametrize("length", range(40, 401, 20))
def test_a_very_long_word_leaves_unigram_scores_finite(length: int) -> None:
    """Its probability goes through the smallest numbers there are on its way to 0; one over it must not be used."""
    rare = "".join(chr(0xAC00 + place % 97) for place in range(length))
    words = {rare: 1, **{chr(0xAC00 + place) * 2: 1000 for place in range(97)}}
    assert all(math.isfinite(score) for _, score in train_unigram(words, 150))
