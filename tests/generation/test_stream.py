"""Text in pieces: whole characters only, nothing lost, stop strings found wherever tokens are cut."""

from __future__ import annotations

import itertools
import random
import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.small import small
from regard.generation import GenerateConfig, generate, stream, text_pieces

HANGUL = "주의력만 있으면 됩니다."


def of_bytes(ids: list[int]) -> str:
    return bytes(ids).decode("utf-8", errors="replace")


def byte_by_byte(ids: list[int]) -> str:
    """A decoder that gives up on a whole run of bytes while one is missing, as byte fallback does."""
    try:
        return bytes(ids).decode("utf-8")
    except UnicodeDecodeError:
        return "\ufffd" * len(ids)


def words(ids: list[int]) -> str:
    """A decoder that drops the space at the beginning of a text, as SentencePiece does."""
    return "".join(f" {i}" for i in ids).removeprefix(" ")


@pytest.mark.parametrize("text", [HANGUL, "a가b😀c\n", "ascii", "é漢字🇰🇷", ""])
@pytest.mark.parametrize("decode", [of_bytes, byte_by_byte])
def test_pieces_are_whole_characters(text: str, decode: object) -> None:
    pieces = list(text_pieces(text.encode(), decode))  # type: ignore[arg-type]
    assert pieces == list(text)  # one byte at a time, so each character comes as soon as it is whole


def test_a_syllable_of_several_tokens_waits_for_the_last() -> None:
    tokens = [b"\xec\xa3", b"\xbc\xec", b"\x9d\x98", b"!"]  # 주의! cut in the middle of both

    def decode(ids: list[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")

    assert list(text_pieces([0, 1, 2, 3], decode)) == ["주", "의", "!"]


def test_syllables_spelled_in_jamo_are_not_split() -> None:
    spelled = unicodedata.normalize("NFD", "한글은 쉽다")
    assert len(spelled) > len("한글은 쉽다")

    def decode(ids: list[int]) -> str:
        return "".join(spelled[i] for i in ids)

    pieces = list(text_pieces(range(len(spelled)), decode))
    assert "".join(pieces) == spelled
    assert [unicodedata.normalize("NFC", piece) for piece in pieces] == ["한", "글", "은 ", "쉽", "다"]


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.randoms(use_true_random=False))
@example("각\ufffd가", random.Random(0))
def test_nothing_is_lost_however_bytes_are_cut(text: str, chance: random.Random) -> None:
    data = text.encode()
    borders = sorted({0, len(data), *(chance.randrange(len(data) + 1) for _ in range(len(data) // 2))})
    tokens = [data[a:b] for a, b in itertools.pairwise(borders)]

    def decode(ids: list[int]) -> str:
        return b"".join(tokens[i] for i in ids).decode("utf-8", errors="replace")

    pieces = list(text_pieces(range(len(tokens)), decode))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_bytes_that_never_become_a_character_come_in_the_end() -> None:
    assert "".join(text_pieces([0xEA, 0xB0], of_bytes)) == "\ufffd"
    assert "".join(text_pieces([0xFF, 0xFE, 0x61, 0xEA], of_bytes)) == "\ufffd\ufffda\ufffd"


def test_spaces_between_words_survive() -> None:
    assert list(text_pieces([1, 2, 30, 4], words)) == ["1", " 2", " 30", " 4"]


def test_only_the_last_tokens_are_decoded_again() -> None:
    longest = 0

    def decode(ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return of_bytes(ids)

    assert "".join(text_pieces((HANGUL * 20).encode(), decode)) == HANGUL * 20
    assert longest <= 8


# ---- stop strings


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(
    ("stops", "told"),
    [
        ([], "one two three two."),
        (["two"], "one "),
        (["three", " th"], "one two"),
        (["e two thx", "e th"], "one two three two."),
        (["wo t", "o thre"], "one t"),
        (["."], "one two three two"),
        (["one"], ""),
        (["two.."], "one two three two."),
    ],
)
def test_stop_strings_across_tokens(size: int, stops: list[str], told: str) -> None:
    text = "one two three two."
    tokens = [text[i : i + size] for i in range(0, len(text), size)]
    pieces = list(text_pieces(range(len(tokens)), lambda ids: "".join(tokens[i] for i in ids), stops))
    assert "".join(pieces) == told
    assert all(pieces)


@settings(max_examples=200, deadline=None)
@example("baa", ["a", "baa"])
@given(st.text("ab가", max_size=25), st.lists(st.text("ab가", min_size=1, max_size=4), max_size=3))
def test_a_stream_ends_at_the_first_stop_string(text: str, stops: list[str]) -> None:
    so_far = (text[:n] for n in range(len(text) + 1))
    told = next((s[: -max(len(x) for x in stops if s.endswith(x))] for s in so_far if s.endswith(tuple(stops))), text)
    assert "".join(text_pieces(text.encode(), of_bytes, stops)) == told
    assert "".join(text_pieces([0], lambda ids: text * len(ids), stops)) == told  # all of it one token


def test_what_cannot_be_a_stop_does_not_wait() -> None:
    assert list(text_pieces(b"xyabcabd", of_bytes, ["abd"])) == ["x", "y", "abc"]


# ---- with a model


def letters(ids: list[int]) -> str:
    return "".join(chr(0xAC00 + 7 * i) for i in ids)


def test_a_models_text_comes_without_what_ends_it() -> None:
    model = small("gpt2").double()
    config = GenerateConfig(max_new_tokens=8, no_repeat_ngram=1, logit_bias={2: -1e9})
    told = generate(model, [5, 6], config).tokens[0]
    assert len(told) == 8
    assert "".join(stream(model, [5, 6], letters, config)) == letters(told)
    for stop in ([told[3]], told[2:4], [told[0], 30], told[5:8]):  # one token, two, not there, the last three
        ends = config.with_(stop=[stop[-1:], stop, [9, 9, 9]] if len(stop) > 2 else [stop, [9, 9, 9]])
        assert "".join(stream(model, [5, 6], letters, ends)) == letters(generate(model, [5, 6], ends).tokens[0])
    assert "".join(stream(model, [5, 6], letters, config, stop=[letters(told[3:5])])) == letters(told[:3])
    assert "".join(stream(model, [5, 6], letters, config, max_new_tokens=3)) == letters(told[:3])
    assert "".join(stream(model, [5, 6], letters, config, logit_bias={2: 1e9})) == ""
    translator = small("transformer-base").double()
    told = generate(translator, [5, 6], config, target=[7]).tokens[0]
    assert "".join(stream(translator, [5, 6], letters, config, target=[7])) == letters(told)


@pytest.mark.parametrize("stop", ["", [""], ["end", ""]])
def test_bad_stop_strings(stop: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"stop={stop!r} holds an empty string")):
        stream(small("gpt2"), [5], letters, stop=stop)  # type: ignore[arg-type]


def test_stop_strings_of_a_given_decoder() -> None:
    model = small("gpt2").double()
    config = GenerateConfig(max_new_tokens=8, no_repeat_ngram=1, logit_bias={2: -1e9})
    told = generate(model, [5, 6], config).tokens[0]
    for stop in (letters(told[3:5]), [letters(told[3:5]), told[6]], told[3], [told[3:5]]):
        assert "".join(stream(model, [5, 6], letters, config, stop=stop)) == letters(told[:3])
    late = config.with_(min_new_tokens=5)  # what is complete before is text like any other
    assert "".join(stream(model, [5, 6], letters, late, stop=letters(told[3:4]))) == letters(told)
    assert "".join(stream(model, [5, 6], letters, late, stop=letters(told[3:5]))) == letters(told[:3])
    forced = config.with_(prefix=told[:4])
    assert "".join(stream(model, [5, 6], letters, forced, stop=letters(told[3:4]))) == letters(told)
