"""What stands beside rows and columns: tokens as people read them, patches with their place in the image.

A token may be a part of a character, one byte of three of a Hangul syllable. Nobody reads bytes: its label is the
whole character with a small number, 한₁ 한₂ 한₃, and a merged view makes one of the three.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import ModelConfig
from ..data.token_models import BYTES
from ..data.tokenizers import Tokenizer as OwnTokenizer

Box = tuple[float, float, float, float]
"""x0, y0, x1, y1 as shares of an image's width and height."""

SPACE = "▁"
_ENDS = (OwnTokenizer.pad_id, OwnTokenizer.bos_id, OwnTokenizer.eos_id)
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SMALL = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
_VISIBLE = str.maketrans({" ": "␣", "\n": "⏎", "\t": "⇥", "\r": "␍"})
# Special to a tokenizer, but they stand where a word stood.
_IN_PLACE_OF_WORDS = re.compile(r"unk|mask", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Label:
    """A row or a column in people's terms."""

    text: str
    """As it is read: without the space before it; what would be invisible, with a sign for it."""
    token_id: int | None = None
    special: bool = False
    """Whether it only says where a text begins, ends or is filled up."""
    start: int = 0
    """Where its text starts among all the text of its side, in characters; special tokens have none there."""
    end: int = 0
    span: tuple[int, int] = (0, 1)
    """The tokens it stands for, first and one past the last: several in a merged view."""
    box: Box | None = None
    """Where it lies in the image."""
    new_word: bool = True
    """Whether a word begins with it; words never go across special tokens."""
    whole: tuple[int, int] = (0, 1)
    """The tokens that only together make its character, itself among them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that make whole characters together. ``text`` has the space before it, where there is one."""

    text: str
    first: int
    last: int
    special: bool = False
    silent: bool = False
    """Whether the decoded text has nothing of it: special tokens, and those that stand for an unknown word."""


def visible(text: str) -> str:
    """A text one can see: without spaces around it, and with a sign for what is left otherwise invisible."""
    shown = text.strip() or text
    shown = shown.translate(_VISIBLE) if not text.strip() else shown.translate({10: "⏎", 9: "⇥", 13: "␍"})
    return "".join("·" if unicodedata.category(x) in ("Cc", "Cs", "Co", "Cn") else x for x in shown) or "∅"


def token_labels(ids: Sequence[int], tokenizer: Any, config: ModelConfig) -> list[Label]:
    """A label for each token; without a tokenizer its number."""
    ids = [int(index) for index in ids]
    labels: list[Label] = []
    place, before = 0, ""
    for piece in pieces(ids, tokenizer, config):
        n_tokens = piece.last - piece.first
        size = 0 if piece.silent else len(piece.text)
        for n in range(n_tokens):
            text = visible(piece.text)
            text += str(n + 1).translate(_SMALL) if n_tokens > 1 else ""
            labels.append(
                Label(
                    text,
                    ids[piece.first + n],
                    piece.special,
                    place,
                    place + size,
                    (piece.first + n, piece.first + n + 1),
                    new_word=n == 0 and (piece.special or begins_word(before, piece.text)),
                    whole=(piece.first, piece.last),
                )
            )
        place, before = place + size, "" if piece.special else before[-8:] + piece.text
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


# ---- from ids to text, whatever wrote the vocabulary


def pieces(ids: Sequence[int], tokenizer: Any, config: ModelConfig) -> list[Piece]:
    """The tokens of a text, those that hold parts of one character together."""
    if tokenizer is None:
        ends = {config.pad_id, config.bos_id, config.eos_id}
        return [Piece(f" {index}", n, n + 1, index in ends, index in ends) for n, index in enumerate(ids)]
    if isinstance(tokenizer, OwnTokenizer):
        return [
            Piece(x.text, x.first, x.last, x.start == x.end and ids[x.first] in _ENDS, x.start == x.end)
            for x in tokenizer.pieces(ids)
        ]
    return list(_grouped(ids, _speller(tokenizer)))


def token_text(index: int, tokenizer: Any, config: ModelConfig) -> str:
    """One token alone, with the space it begins with; a part of a character as its bytes."""
    if isinstance(tokenizer, OwnTokenizer):  # after another token, so that a space before it shows
        spelled = tokenizer.token(index)
        found = pieces([index, index], tokenizer, config)[-1] if spelled is not None else None
        text = f"<{index}>" if found is None else found.text
    else:
        text = pieces([index], tokenizer, config)[0].text
    if "\ufffd" not in text:
        return text
    spelled = getattr(tokenizer, "token", lambda _: None)(index) or ""
    return " ".join(f"0x{BYTES[x]:02X}" for x in spelled) if spelled and all(x in BYTES for x in spelled) else text


Spell = Callable[[int, bool], tuple[bytes | str, bool]]
"""From an id, and whether it is the first, to what it adds to a text, and whether it is special."""


def _grouped(ids: Sequence[int], spell: Spell) -> Iterator[Piece]:
    """Bytes are collected until they make whole characters."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    first, held, at_start = 0, "", True
    for n, index in enumerate(ids):
        raw, special = spell(index, at_start)
        if isinstance(raw, str):  # a special token, or one of no bytes: what waits has waited in vain
            held += decoder.decode(b"", final=True)
            decoder.reset()
            if first < n:
                yield Piece(held, first, n)
            yield Piece(raw, n, n + 1, special, silent=True)
            first, held, at_start = n + 1, "", at_start and special
            continue
        held, at_start = held + decoder.decode(raw), False
        if not decoder.getstate()[0]:
            yield Piece(held, first, n + 1)
            first, held = n + 1, ""
    if first < len(ids):
        yield Piece(held + decoder.decode(b"", final=True), first, len(ids))


def _speller(tokenizer: Any) -> Spell:
    """How the tokens of a foreign tokenizer spell text: byte by byte, with ▁ for a space, or ## for no space."""
    word, special, decoders = _vocabulary(tokenizer)
    if "ByteLevel" in decoders:
        add = _from_bytes
    elif "WordPiece" in decoders:
        add = _from_word_pieces
    elif "BPEDecoder" in decoders or any(x in decoders for x in ("Metaspace", "Replace", "ByteFallback")):
        add = _from_spaces
    else:  # "Fuse" joins letters, nothing at all joins words by spaces
        add = _as_it_is if decoders else _from_word_pieces

    def spell(index: int, at_start: bool) -> tuple[bytes | str, bool]:
        text = word(index)
        if text is None:
            return f"<{index}>", False
        if text in special:
            return (f" {text}", False) if _IN_PLACE_OF_WORDS.search(text) else (text, True)
        return add(text, at_start), False

    return spell


def _vocabulary(tokenizer: Any) -> tuple[Callable[[int], str | None], set[str], set[str]]:
    """How ids are written, which tokens are special, and the decoders that make text of them."""
    if hasattr(tokenizer, "content"):
        fields = json.loads(tokenizer.content)
        special = {x["content"] for x in fields.get("added_tokens") or () if x.get("special")}
        decoder = fields.get("decoder")
        return tokenizer.token, special, set(re.findall(r'"type": "(\w+)"', json.dumps(decoder)))
    words = {index: text for text, index in getattr(tokenizer, "vocab", {}).items()}  # Marian's
    return words.get, {"<unk>", "</s>", "<pad>"}, {"Metaspace"}


def _from_bytes(token: str, at_start: bool) -> bytes:
    return bytes(BYTES[x] for x in token) if all(x in BYTES for x in token) else token.encode()


def _from_word_pieces(token: str, at_start: bool) -> bytes:
    return (token[2:] if token.startswith("##") and len(token) > 2 else token if at_start else f" {token}").encode()


def _from_spaces(token: str, at_start: bool) -> bytes:
    if (byte := _BYTE.fullmatch(token)) is not None:
        return bytes([int(byte[1], 16)])
    text = token.replace(SPACE, " ").replace("</w>", " ")
    return (text.removeprefix(" ") if at_start else text).encode()


def _as_it_is(token: str, at_start: bool) -> bytes:
    return token.encode()


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


def numbered(name: str, count: int, boxes: Sequence[Box] | None = None) -> list[Label]:
    """What has no text: regions of an image, summaries of keys."""
    return [
        Label(f"{name} {n}", span=(n, n + 1), box=None if boxes is None else boxes[n], whole=(n, n + 1))
        for n in range(count)
    ]


# ---- several tokens as one


def joined(labels: Sequence[Label], words: bool = True, specials: bool = False) -> list[Label]:
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
