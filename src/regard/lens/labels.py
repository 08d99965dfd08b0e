"""What stands beside rows and columns: tokens as people read them, patches with their place in the image.

A token may be a part of a character, one byte of three of a Hangul syllable. Nobody reads bytes: its label is the
whole character with a small number, 한₁ 한₂ 한₃, and a merged view makes one of the three.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import ModelConfig
from ..text.tokenizer import BYTE_OF_LETTER, Tokenizer, TokenSpan

Box = tuple[float, float, float, float]  # x0, y0, x1, y1 as shares of an image's width and height

_SMALL = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})


@dataclass(frozen=True, slots=True)
class Label:
    """A row or a column in people's terms."""

    text: str  # as it is read: without the space before it; what would be invisible, with a sign for it
    token_id: int | None = None
    special: bool = False  # whether it only says where a text begins, ends or is filled up
    # where its text starts among all the text of its side, in characters; special tokens have none there
    start: int = 0
    end: int = 0
    span: tuple[int, int] = (0, 1)  # the tokens it stands for, first and one past the last: several in a merged view
    box: Box | None = None  # where it lies in the image
    new_word: bool = True  # whether a word begins with it; words never go across special tokens
    whole: tuple[int, int] = (0, 1)  # the tokens that only together make its character, itself among them


def visible(text: str) -> str:
    """A text one can see: without spaces around it, and with a sign for what is left otherwise invisible."""
    shown = text.strip() or text
    shown = shown.translate(_VISIBLE) if not text.strip() else shown.translate({10: "⏎", 9: "⇥", 13: "␍"})
    return "".join("·" if unicodedata.category(x) in ("Cc", "Cs", "Co", "Cn") else x for x in shown) or "∅"


def token_labels(ids: Sequence[int], tokenizer: Tokenizer | None, config: ModelConfig) -> list[Label]:
    """A label for each token; without a tokenizer its number."""
    ids = [int(index) for index in ids]
    labels: list[Label] = []
    before = ""
    for span in token_spans(ids, tokenizer, config):
        n_tokens = span.last - span.first
        for n in range(n_tokens):
            text = visible(span.text)
            text += str(n + 1).translate(_SMALL) if n_tokens > 1 else ""
            labels.append(
                Label(
                    text,
                    ids[span.first + n],
                    span.special,
                    span.start,
                    span.end,
                    (span.first + n, span.first + n + 1),
                    new_word=n == 0 and (span.special or begins_word(before, span.text)),
                    whole=(span.first, span.last),
                )
            )
        before = "" if span.special else before[-8:] + span.text
    return labels


def begins_word(before: str, text: str) -> bool:
    """Whether ``text`` after ``before`` starts a word: at a space, between letters and other signs, at ideographs."""
    if not before or not before.strip():
        return not before  # spaces belong to the word behind them
    if not text or text[0].isspace():
        return bool(text)
    last, first = before[-1], text[0]
    if last.isspace():
        return False
    if _is_ideograph(last) and _is_ideograph(first):
        return True
    inside = "'’_-"  # don't, long-term
    if first in inside or (last in inside and len(before) > 1 and _in_word(before[-2])):
        return False
    return _in_word(last) != _in_word(first)


def _in_word(letter: str) -> bool:
    return unicodedata.category(letter)[0] in "LMN" or letter in "\u200d\ufffd"


def _is_ideograph(letter: str) -> bool:
    """Scripts that write no spaces between words."""
    return "\u3040" <= letter <= "\u30ff" or "\u3400" <= letter <= "\u9fff"


def token_spans(ids: Sequence[int], tokenizer: Tokenizer | None, config: ModelConfig) -> list[TokenSpan]:
    """The tokens of a text, those that hold parts of one character together; without a tokenizer, their numbers."""
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
    """One token alone, with the space it begins with; a part of a character as its bytes."""
    spelled = None if tokenizer is None else tokenizer.token(index)
    if tokenizer is not None and tokenizer.is_native:  # after another token, so that a space before it shows
        text = f"<{index}>" if spelled is None else tokenizer.token_spans([index, index])[-1].text
    else:
        text = token_spans([index], tokenizer, config)[0].text
    if "\ufffd" not in text or not spelled or not all(x in BYTE_OF_LETTER for x in spelled):
        return text
    return " ".join(f"0x{BYTE_OF_LETTER[x]:02X}" for x in spelled)


# ---- images


def patch_labels(rows: int, cols: int, n_class_tokens: int) -> list[Label]:
    """The class tokens, then the patches row by row, each with its place."""
    labels = [Label("[class]", None, True, span=(n, n + 1), whole=(n, n + 1)) for n in range(n_class_tokens)]
    for n in range(rows * cols):
        y, x = divmod(n, cols)
        box = (x / cols, y / rows, (x + 1) / cols, (y + 1) / rows)
        at = (n_class_tokens + n, n_class_tokens + n + 1)
        labels.append(Label(f"patch {y},{x}", None, span=at, box=box, whole=at))
    return labels


def numbered_labels(name: str, count: int, boxes: Sequence[Box] | None = None) -> list[Label]:
    """What has no text: regions of an image, summaries of keys."""
    return [
        Label(f"{name} {n}", span=(n, n + 1), box=None if boxes is None else boxes[n], whole=(n, n + 1))
        for n in range(count)
    ]


# ---- several tokens as one


def join_labels(labels: Sequence[Label], words: bool = True, specials: bool = False) -> list[Label]:
    """Labels of a merged view: sub-words to words, or at least bytes to characters; special tokens left out or kept."""
    groups: list[list[Label]] = []
    for label in labels:
        if label.special and not specials:
            continue
        goes_on = bool(groups) and not label.special and not groups[-1][-1].special
        goes_on = goes_on and groups[-1][-1].span[1] == label.span[0] and label.box is None
        same = goes_on and (groups[-1][-1].whole == label.whole or (words and not label.new_word))
        if same:
            groups[-1].append(label)
        else:
            groups.append([label])
    return [_as_one(group) for group in groups]


def _as_one(group: list[Label]) -> Label:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return first
    parts = {x.whole: re.sub("[₀-₉]+$", "", x.text) if x.whole[1] - x.whole[0] > 1 else x.text for x in group}
    text = "".join(parts.values())
    text = text.lstrip("␣⏎⇥␍") or text
    one = first.token_id if len(group) == 1 else None
    span = (first.span[0], last.span[1])
    return replace(first, text=text, token_id=one, end=last.end, span=span, whole=span)
