"""Labels of rows and columns: the text of tokens, the boxes of image patches.

A token may be part of a character, such as one of the three bytes of a Hangul syllable. Its label is the whole
character with a subscript, 한₁ 한₂ 한₃; a merged view joins the three.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import ModelConfig
from ..text.tokenizer import BYTE_OF_LETTER, Tokenizer, TokenSpan

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 as fractions of an image's width and height

_SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


@dataclass(frozen=True, slots=True)
class Label:
    """The label of a row or a column."""

    text: str  # without leading space; control characters shown as symbols
    token_id: int | None = None
    special: bool = False  # a start, end or padding token
    start: int = 0  # character range [start, end) in the whole text; empty for a special token
    end: int = 0
    span: tuple[int, int] = (0, 1)  # token range [first, stop); several tokens in a merged view
    box: Box | None = None  # position in the image
    new_word: bool = True  # whether a word begins here; words never continue across special tokens
    whole: tuple[int, int] = (0, 1)  # token range of the character that this token is a part of


def visible_text(text: str) -> str:
    """A text without surrounding spaces, with symbols for invisible characters."""
    core = text.strip()
    signs = core.translate({10: "⏎", 9: "⇥", 13: "␍"}) if core else text.translate(_VISIBLE)
    return "".join("·" if unicodedata.category(x) in ("Cc", "Cs", "Co", "Cn") else x for x in signs) or "∅"


def token_labels(ids: Sequence[int], tokenizer: Tokenizer | None, config: ModelConfig) -> list[Label]:
    """A label for each token: its text, or its id if there is no tokenizer."""
    ids, before = [int(index) for index in ids], ""
    labels: list[Label] = []
    for span in token_spans(ids, tokenizer, config):
        n_tokens = span.last - span.first
        for n in range(n_tokens):
            index = span.first + n
            text = visible_text(span.text) + (str(n + 1).translate(_SUBSCRIPTS) if n_tokens > 1 else "")
            new_word = n == 0 and (span.special or begins_word(before, span.text))
            tokens, whole = (index, index + 1), (span.first, span.last)
            labels.append(Label(text, ids[index], span.special, span.start, span.end, tokens, None, new_word, whole))
        before = "" if span.special else before[-8:] + span.text
    return labels


def begins_word(before: str, text: str) -> bool:
    """Whether ``text`` after ``before`` starts a word: at a space, between letters and symbols, at each ideograph."""
    if not before or not before.strip():
        return not before  # spaces belong to the word after them
    if not text or text[0].isspace():
        return bool(text)
    last, first = before[-1], text[0]
    if last.isspace():
        return False
    if _is_ideograph(last) and _is_ideograph(first):
        return True
    joiners = "'’_-"  # don't, long-term
    if first in joiners or (last in joiners and len(before) > 1 and _is_word_letter(before[-2])):
        return False
    return _is_word_letter(last) != _is_word_letter(first)


def _is_word_letter(letter: str) -> bool:
    return unicodedata.category(letter)[0] in "LMN" or letter in "\u200d\ufffd"


def _is_ideograph(letter: str) -> bool:
    """Whether a letter is of a script without spaces between words."""
    return "\u3040" <= letter <= "\u30ff" or "\u3400" <= letter <= "\u9fff"


def token_spans(ids: Sequence[int], tokenizer: Tokenizer | None, config: ModelConfig) -> list[TokenSpan]:
    """The spans of a text, with the tokens of one character in one span; without a tokenizer, one span per id."""
    if tokenizer is not None:
        return tokenizer.token_spans(ids)
    spans: list[TokenSpan] = []
    ends, start = {config.pad_id, config.bos_id, config.eos_id}, 0
    for n, index in enumerate(ids):
        size = 0 if index in ends else len(f" {index}")
        spans.append(TokenSpan(f" {index}", n, n + 1, start, start + size, index in ends))
        start += size
    return spans


def token_text(index: int, tokenizer: Tokenizer | None, config: ModelConfig) -> str:
    """The text of one token with its leading space; a part of a character is shown as its bytes."""
    spelling = None if tokenizer is None else tokenizer.token(index)
    if tokenizer is not None and tokenizer.is_native:  # decoded after another token, which preserves a leading space
        text = f"<{index}>" if spelling is None else tokenizer.token_spans([index, index])[-1].text
    else:
        text = token_spans([index], tokenizer, config)[0].text
    if "\ufffd" not in text or not spelling or not all(x in BYTE_OF_LETTER for x in spelling):
        return text
    return " ".join(f"0x{BYTE_OF_LETTER[x]:02X}" for x in spelling)


def label_of_thing(text: str, n: int, special: bool = False, box: Box | None = None) -> Label:
    """The label of row or column n that is not a token."""
    return Label(text, None, special, span=(n, n + 1), box=box, whole=(n, n + 1))


def patch_labels(rows: int, cols: int, n_class_tokens: int, n_registers: int = 0) -> list[Label]:
    """Labels of the class tokens, the registers, then the patches row by row with their boxes."""
    labels = [label_of_thing("[class]", n, special=True) for n in range(n_class_tokens)]
    labels += [label_of_thing("[register]", n_class_tokens + n, special=True) for n in range(n_registers)]
    for y, x in itertools.product(range(rows), range(cols)):
        box = (x / cols, y / rows, (x + 1) / cols, (y + 1) / rows)
        labels.append(label_of_thing(f"patch {y},{x}", len(labels), box=box))
    return labels


def numbered_labels(name: str, count: int, boxes: Sequence[Box] | None = None) -> list[Label]:
    """Numbered labels: regions of an image, Linformer's summaries of keys."""
    return [label_of_thing(f"{name} {n}", n, box=None if boxes is None else boxes[n]) for n in range(count)]


def join_labels(labels: Sequence[Label], words: bool = True, specials: bool = False) -> list[Label]:
    """Labels of a merged view: sub-words joined to words, or bytes to characters, with or without special tokens."""
    groups: list[list[Label]] = []
    for label in labels:
        if label.special and not specials:
            continue
        last = groups[-1][-1] if groups else label
        is_plain = not (label.special or last.special or label.box)
        continues = last.whole == label.whole or (words and not label.new_word)
        if groups and is_plain and last.span[1] == label.span[0] and continues:
            groups[-1].append(label)
        else:
            groups.append([label])
    return [_join_group(group) for group in groups]


def _join_group(group: list[Label]) -> Label:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    parts = {x.whole: re.sub("[₀-₉]+$", "", x.text) if x.whole[1] - x.whole[0] > 1 else x.text for x in group}
    text = "".join(parts.values())
    text = text.lstrip("␣⏎⇥␍") or text
    span = (first.span[0], last.span[1])
    return replace(first, text=text, token_id=None, end=last.end, span=span, whole=span)
