"""Attention as an alignment of words, against one that is known: translations, or a syntax tree's arcs.

Each row word is linked to the column word it looks at most. The alignment error rate (Och & Ney 2003, eq. 22) holds
these links A against the sure ones S and the possible ones P ⊇ S:

    AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention import AttentionMap
from .labels import Label

if TYPE_CHECKING:
    from .look import Look

Links = Iterable[tuple[int, int]]
"""(column word, row word): in a translation (source word, target word)."""
When = Literal["written", "read"]
"""Whose row is a word's: the one that writes it, or the one that has just read it (Chen et al. 2020, "Shift-Att")."""
_STRIPE = 1 << 20  # weights held at a time


@dataclass(frozen=True, eq=False)
class Counts:
    """What an alignment error rate is made of; sums of them are those of a corpus."""

    sure: Tensor  # |A ∩ S| of each head
    possible: Tensor  # |A ∩ P|
    made: int  # |A|
    wanted: int  # |S|

    def __add__(self, other: Counts) -> Counts:
        sure, possible = self.sure + other.sure, self.possible + other.possible
        return Counts(sure, possible, self.made + other.made, self.wanted + other.wanted)

    @property
    def error(self) -> Tensor:
        """The alignment error rate of each head."""
        return 1 - (self.sure + self.possible) / max(self.made + self.wanted, 1)


@dataclass(frozen=True, eq=False)
class Alignment:
    """How far the heads of one kind agree with a known alignment, (L, H) each."""

    error: Tensor
    """Alignment error rate: 0 is the known alignment."""
    mass: Tensor
    """The share of a row word's attention that lies on words it is linked to, averaged over the linked ones."""
    links: Tensor
    """(L, H, row words): the column word each one is linked to."""


def alignment(
    look: Look, gold: Links, possible: Links | None = None, kind: str | None = None, when: When = "written"
) -> Alignment:
    """The heads of one kind against a known alignment of words, split at spaces.

    gold      (column word, row word): of a translation (source word, target word); of a syntax tree (head, dependent)
    possible  links that are no mistake, the sure ones among them or not; none but the gold ones unless given
    """
    kind = look._kind("cross" if kind is None and "cross" in look.kinds else kind)
    rows, cols = look_words(look, kind, when)
    sure = set(gold)
    allowed = sure | set(possible or ())
    _check(allowed, len(cols), len(rows))
    errors, masses, links = [], [], []
    for layer in range(look.layers(kind)):
        found = links_of(look.map(kind, layer), rows, cols, allowed)
        errors.append(count(found.words, sure, allowed).error)
        masses.append(found.mass)
        links.append(found.words)
    return Alignment(torch.stack(errors), torch.stack(masses), torch.stack(links))


def _check(links: set[tuple[int, int]], n_cols: int, n_rows: int) -> None:
    for col, row in links:
        if not (0 <= col < n_cols and 0 <= row < n_rows):
            raise ValueError(f"link ({col}, {row}) leaves the {n_cols} column words or the {n_rows} row words")


# ---- words


def look_words(look: Look, kind: str, when: When) -> tuple[list[list[int]], list[list[int]]]:
    """For each word of a look's rows and columns, split at spaces, the tokens it is made of."""
    row_text, col_text = look.text, look.text
    if kind != "encoder" and look.target_text is not None:
        row_text, col_text = look.target_text, look.text if kind == "cross" else look.target_text
    if row_text is None or col_text is None:
        raise ValueError(f"kind={kind!r}: words are split from text, and one side of this look is none")
    rows = words_of(look.rows(kind), row_text)
    cols = words_of(look.cols(kind), col_text)
    if when == "read" and kind == "cross":  # a row is called by the token it writes, the next one has read it
        rows = [[token + 1 for token in word] for word in rows]
    return rows, cols


def words_of(labels: Sequence[Label], text: str) -> list[list[int]]:
    """For each word of ``text.split()`` its tokens: those that share the most letters with it."""
    length = max((label.end for label in labels), default=0)
    if length != len(text):
        raise ValueError(f"the tokens spell {length} letters of a text of {len(text)}: some are unknown to them")
    words: list[list[int]] = []
    letters = [-1] * len(text)  # the word that each letter belongs to
    place = 0
    for number, word in enumerate(text.split()):
        place = text.index(word, place)
        letters[place : place + len(word)] = [number] * len(word)
        place += len(word)
        words.append([])
    for token, label in enumerate(labels):
        own = [word for word in letters[label.start : label.end] if word >= 0]
        if own and not label.special:
            words[max(set(own), key=own.count)].append(token)
    return words


def word_weights(
    found: AttentionMap, rows: Sequence[Sequence[int]], cols: Sequence[Sequence[int]]
) -> Iterator[tuple[slice, Tensor]]:
    """Weights (H, words, words), some row words at a time: rows of a word averaged, columns summed."""
    n_heads, _, n_keys = found.shape[1:]
    col_of = torch.full((n_keys,), len(cols), device=found.device)  # the last place is for what is no word's
    for word, tokens in enumerate(cols):
        col_of[list(tokens)] = word
    some: list[int] = []
    start = 0
    for number, tokens in enumerate(rows):
        if some and (len(some) + len(tokens)) * n_keys * n_heads > _STRIPE:
            yield slice(start, number), _joined(found, rows[start:number], some, col_of, len(cols))
            some, start = [], number
        some += list(tokens)
    yield slice(start, len(rows)), _joined(found, rows[start:], some, col_of, len(cols))


def _joined(
    found: AttentionMap, words: Sequence[Sequence[int]], tokens: list[int], col_of: Tensor, n_cols: int
) -> Tensor:
    tile = found.tile(tokens)[0]  # (H, R, S)
    by_col = tile.new_zeros(*tile.shape[:2], n_cols + 1).index_add_(2, col_of, tile)[..., :n_cols]
    row_of = torch.tensor([word for word, own in enumerate(words) for _ in own], device=tile.device, dtype=torch.long)
    summed = tile.new_zeros(tile.shape[0], len(words), n_cols).index_add_(1, row_of, by_col)
    sizes = torch.tensor([max(len(own), 1) for own in words], device=tile.device)
    return summed / sizes[:, None]


# ---- links


class Linked(NamedTuple):
    words: Tensor  # (H, row words) the column word each one looks at most; -1 for a word without tokens
    mass: Tensor  # (H,)


def links_of(
    found: AttentionMap,
    rows: Sequence[Sequence[int]],
    cols: Sequence[Sequence[int]],
    allowed: set[tuple[int, int]],
    together: bool = False,
) -> Linked:
    """The link of each row word, and how much of the attention to words lies on allowed links.

    With ``together`` the mean of all heads is one more head, the last.
    """
    n_heads = found.shape[1] + together
    best = torch.full((n_heads, len(rows)), -1)
    mass, n_linked = torch.zeros(n_heads), 0
    for here, weights in word_weights(found, rows, cols):
        weights = torch.cat([weights, weights.mean(0, keepdim=True)]) if together else weights
        weights = weights.cpu()
        right = torch.zeros(weights.shape[1:])
        for col, row in allowed:
            if here.start <= row < here.stop:
                right[row - here.start, col] = 1
        real = torch.tensor([bool(word) for word in rows[here]])
        best[:, here] = torch.where(real, weights.argmax(-1), -1)
        linked = real & right.any(-1)
        share = (weights * right).sum(-1) / weights.sum(-1).clamp(min=1e-9)
        mass += share[:, linked].sum(-1)
        n_linked += int(linked.sum())
    return Linked(best, mass / max(n_linked, 1))


def count(words: Tensor, sure: set[tuple[int, int]], allowed: set[tuple[int, int]]) -> Counts:
    """Links (…, row words), -1 for none, against the known ones."""
    heads = words.reshape(-1, words.shape[-1]).tolist()
    found = [[(col, row) for row, col in enumerate(own) if col >= 0] for own in heads]
    hits = [torch.tensor([float(sum(link in known for link in own)) for own in found]) for known in (sure, allowed)]
    shape = words.shape[:-1]
    return Counts(hits[0].view(shape), hits[1].view(shape), len(found[0]), len(sure))
