"""Attention as an alignment of words, against one that is known: translations, or a syntax tree's arcs.

Each row word is linked to the column word it looks at most. The alignment error rate (Och & Ney 2003, eq. 22) holds
these links A against the sure ones S and the possible ones P ⊇ S:

    AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..attention import AttentionMap
from ..data.corpora import open_corpus
from ..models import Model
from .capture import attention_modules
from .labels import Label
from .look import Look, look

if TYPE_CHECKING:
    from .look import Look

Links = Iterable[tuple[int, int]]
"""(column word, row word): in a translation (source word, target word)."""
RowChoice = Literal["written", "read"]
"""Whose row is a word's: the one that writes it, or the one that has just read it (Chen et al. 2020, "Shift-Att")."""
_STRIPE = 1 << 20  # weights held at a time


@dataclass(frozen=True, eq=False)
class LinkCounts:
    """What an alignment error rate is made of; sums of them are those of a corpus."""

    sure: Tensor  # |A ∩ S| of each head
    possible: Tensor  # |A ∩ P|
    made: int  # |A|
    wanted: int  # |S|

    def __add__(self, other: LinkCounts) -> LinkCounts:
        sure, possible = self.sure + other.sure, self.possible + other.possible
        return LinkCounts(sure, possible, self.made + other.made, self.wanted + other.wanted)

    @property
    def error(self) -> Tensor:
        """The alignment error rate of each head."""
        return 1 - (self.sure + self.possible) / max(self.made + self.wanted, 1)


@dataclass(frozen=True, eq=False)
class WordAlignment:
    """How far the heads of one kind agree with a known alignment, (L, H) each."""

    error: Tensor
    """Alignment error rate: 0 is the known alignment."""
    mass: Tensor
    """The share of a row word's attention that lies on words it is linked to, averaged over the linked ones."""
    links: Tensor
    """(L, H, row words): the column word each one is linked to."""


def align_words(
    look: Look, gold: Links, possible: Links | None = None, *, kind: str | None = None, when: RowChoice = "written"
) -> WordAlignment:
    """The heads of one kind against a known alignment of words, split at spaces.

    gold      (column word, row word): of a translation (source word, target word); of a syntax tree (head, dependent)
    possible  links that are no mistake, the sure ones among them or not; none but the gold ones unless given
    """
    kind = look._kind("cross" if kind is None and "cross" in look.kinds else kind)
    rows, cols = look_word_tokens(look, kind, when)
    sure = set(gold)
    allowed = sure | set(possible or ())
    _check_links(allowed, len(cols), len(rows))
    errors, masses, links = [], [], []
    for layer in range(look.layers(kind=kind)):
        found = best_links(look.map(kind=kind, layer=layer), rows, cols, allowed)
        errors.append(count_links(found.words, sure, allowed).error)
        masses.append(found.mass)
        links.append(found.words)
    return WordAlignment(torch.stack(errors), torch.stack(masses), torch.stack(links))


def _check_links(links: set[tuple[int, int]], n_cols: int, n_rows: int) -> None:
    for col, row in links:
        if not (0 <= col < n_cols and 0 <= row < n_rows):
            raise ValueError(f"link ({col}, {row}) leaves the {n_cols} column words or the {n_rows} row words")


# ---- words


def look_word_tokens(look: Look, kind: str, when: RowChoice) -> tuple[list[list[int]], list[list[int]]]:
    """For each word of a look's rows and columns, split at spaces, the tokens it is made of."""
    row_text, col_text = look.text, look.text
    if kind != "encoder" and look.target_text is not None:
        row_text, col_text = look.target_text, look.text if kind == "cross" else look.target_text
    if row_text is None or col_text is None:
        raise ValueError(f"kind={kind!r}: words are split from text, and one side of this look is none")
    rows = word_tokens(look.rows(kind=kind), row_text)
    cols = word_tokens(look.cols(kind=kind), col_text)
    if when == "read" and kind == "cross":  # a row is called by the token it writes, the next one has read it
        rows = [[token + 1 for token in word] for word in rows]
    return rows, cols


def word_tokens(labels: Sequence[Label], text: str) -> list[list[int]]:
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


class BestLinks(NamedTuple):
    words: Tensor  # (H, row words) the column word each one looks at most; -1 for a word without tokens
    mass: Tensor  # (H,)


def best_links(
    found: AttentionMap,
    rows: Sequence[Sequence[int]],
    cols: Sequence[Sequence[int]],
    allowed: set[tuple[int, int]],
    together: bool = False,
) -> BestLinks:
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
    return BestLinks(best, mass / max(n_linked, 1))


def count_links(words: Tensor, sure: set[tuple[int, int]], allowed: set[tuple[int, int]]) -> LinkCounts:
    """Links (…, row words), -1 for none, against the known ones."""
    heads = words.reshape(-1, words.shape[-1]).tolist()
    found = [[(col, row) for row, col in enumerate(own) if col >= 0] for own in heads]
    hits = [torch.tensor([float(sum(link in known for link in own)) for own in found]) for known in (sure, allowed)]
    shape = words.shape[:-1]
    return LinkCounts(hits[0].view(shape), hits[1].view(shape), len(found[0]), len(sure))


N = 200
"""Examples a score is made of unless said otherwise."""
WHEN: tuple[RowChoice, ...] = get_args(RowChoice)
_AT_ONCE = 64  # positions whose logits are held


def score(model: Model, n: int = N) -> dict[str, Any]:
    """The score that fits a model: ``alignment_error`` where it translates text, ``pointing`` where it says what is on
    an image. ``["table"]`` is for people, the rest for programs."""
    if not model.is_encoder_decoder or model.head is None or "cross" not in attention_modules(model):
        raise ValueError(
            "a score needs cross-attention: translators are scored by the words of en-ko, captioners by the places"
            f" in shapes, and this model has architecture={model.config.architecture!r}"
        )
    if model.config.source == "text":
        return alignment_error(model, n)
    if model.config.source == "image":
        return pointing(model, n)
    raise ValueError(f"source={model.config.source!r}: there is no corpus with known places of regions")


# ---- translations


def alignment_error(model: Model, n: int = N, split: str = "valid") -> dict[str, Any]:
    """The alignment error rate of each cross-attention head over n pairs of ``en-ko``."""
    corpus, sums = open_corpus("en-ko"), _Halves()
    guesses = [LinkCounts(torch.zeros(()), torch.zeros(()), 0, 0) for _ in range(3)]
    right = total = skipped = 0
    for index in range(_check_count(n)):
        pair = corpus.example(split, index)
        seen = _look(model, pair.source, pair.target)
        words = None if seen is None else _example_words(seen, pair.source, pair.target)
        if seen is None or words is None:
            skipped += 1
            continue
        (rows, cols), sure = words, set(pair.alignment)
        allowed = sure | set(pair.possible)
        for when in WHEN:
            own = rows if when == "written" else [[token + 1 for token in word] for word in rows]
            maps = [seen.map(kind="cross", layer=layer) for layer in range(seen.layers(kind="cross"))]
            links = torch.stack([best_links(found, own, cols, allowed, together=True).words for found in maps])
            sums.add(when, index, count_links(links, sure, allowed))
        guesses = [a + b for a, b in zip(guesses, _guesses(len(rows), len(cols), sure, allowed), strict=True)]
        hits, tokens = _accuracy(seen)
        right, total = right + hits, total + tokens
    if skipped == n:
        raise ValueError("none of the pairs of en-ko is a text this model's tokenizers can write")
    names = ("diagonal", "chance", "one_link_at_best")
    found = sums.to_dict(lambda counts: counts.error, lowest=True)
    return _with_table(
        {
            "corpus": f"en-ko {split}",
            "measure": "alignment error rate",
            "n": n - skipped,
            "skipped": skipped,
            **found,
            **{name: float(guess.error) for name, guess in zip(names, guesses, strict=True)},
            "token_accuracy": right / max(total, 1),
        }
    )


def _example_words(seen: Look, source: str, target: str) -> tuple[list[list[int]], list[list[int]]] | None:
    """The tokens of the target's and of the source's words; None where the tokenizer does not know all letters."""
    try:
        return word_tokens(seen.rows(kind="cross"), target), word_tokens(seen.cols(kind="cross"), source)
    except ValueError:
        return None


def _guesses(n_rows: int, n_cols: int, sure: set[tuple[int, int]], allowed: set[tuple[int, int]]) -> list[LinkCounts]:
    """Without looking: the word at the same place, any word; and the best that one link a word can do."""
    diagonal = torch.tensor([round(row * (n_cols - 1) / max(n_rows - 1, 1)) for row in range(n_rows)])
    chance = LinkCounts(torch.tensor(len(sure) / n_cols), torch.tensor(len(allowed) / n_cols), n_rows, len(sure))
    best = {row: col for col, row in [*sorted(allowed - sure), *sorted(sure)]}  # a sure link where there is one
    at_best = torch.tensor([best.get(row, 0) for row in range(n_rows)])
    return [count_links(diagonal, sure, allowed), chance, count_links(at_best, sure, allowed)]


# ---- images


@dataclass(frozen=True, eq=False)
class PointingSums:
    """Sums over words: how often the heaviest patch lies on what the word names, and how much weight does."""

    hits: Tensor  # of each head
    mass: Tensor
    by_chance: float
    words: int

    def __add__(self, other: PointingSums) -> PointingSums:
        by_chance, words = self.by_chance + other.by_chance, self.words + other.words
        return PointingSums(self.hits + other.hits, self.mass + other.mass, by_chance, words)


def pointing(model: Model, n: int = N, split: str = "valid", language: str | None = None) -> dict[str, Any]:
    """The pointing game (Zhang et al. 2016) over n pictures of ``shapes``: the share of words about a thing at which a
    head's heaviest patch touches that thing's box, and the share of its attention to patches that does.

    Words that relate two things ("left of") name neither, and are left out. ``language`` is "en" or "ko"; None: the one
    whose captions the model's tokens can write.
    """
    from ..data.corpora.shapes import Shapes

    sums, right, total, skipped = _Halves(), 0, 0, 0
    corpus = Shapes(_language(model) if language is None else language, model.config.image_size)  # type: ignore[arg-type]  # caption() checks it
    for index in range(_check_count(n)):
        picture = corpus.example(split, index)
        seen = _look(model, picture.pillow(), picture.caption)
        if seen is None:
            skipped += 1
            continue
        rows = word_tokens(seen.rows(kind="cross"), picture.caption)
        side = picture.size
        boxes = [tuple(x / side for x in box) for box in picture.boxes]
        related = bool(picture.scene.relations)
        named = [(row, things) for row, things in zip(rows, picture.words.things, strict=True) if things and row]
        named = [(row, things) for row, things in named if not (related and len(things) > 1)]
        for when in WHEN:
            sums.add(when, index, _pointing_sums(seen, named, boxes, 0 if when == "written" else 1))
        hits, tokens = _accuracy(seen)
        right, total = right + hits, total + tokens
    if skipped == n:
        raise ValueError("none of the captions of shapes is a text this model's tokenizer can write")
    found = sums.to_dict(lambda one: one.hits / max(one.words, 1), lowest=False)
    mass = sums.to_dict(lambda one: one.mass / max(one.words, 1), lowest=False)
    every = sums.total(WHEN[0])
    return _with_table(
        {
            "corpus": f"shapes {split}",
            "measure": "pointing accuracy",
            "n": n - skipped,
            "skipped": skipped,
            **found,
            "mass": {name: mass[name] for name in (*WHEN, "mean")},
            "chance": every.by_chance / max(every.words, 1),
            "words": every.words,
            "token_accuracy": right / max(total, 1),
        }
    )


def _pointing_sums(
    seen: Look, named: list[tuple[list[int], tuple[int, ...]]], boxes: list[tuple[float, ...]], shift: int
) -> PointingSums:
    patches = [n for n, label in enumerate(seen.cols(kind="cross")) if label.box is not None]
    at = [seen.cols(kind="cross")[n] for n in patches]
    on = [torch.tensor([_touches(label, boxes[thing]) for label in at]) for thing in range(len(boxes))]
    hits, mass, by_chance = [], [], 0.0
    for layer in range(seen.layers(kind="cross")):
        found = seen.map(kind="cross", layer=layer)
        layer_hits, layer_mass = torch.zeros(2, found.shape[1] + 1)  # the last: all heads together
        for tokens, things in named:
            right = torch.stack([on[thing] for thing in things]).any(0)
            weights = found.tile([token + shift for token in tokens], patches)[0].mean(1).cpu()  # (H, patches)
            weights = torch.cat([weights, weights.mean(0, keepdim=True)])
            layer_hits += right[weights.argmax(-1)].float()
            layer_mass += (weights * right).sum(-1) / weights.sum(-1).clamp(min=1e-9)
            by_chance += float(right.float().mean()) if layer == 0 else 0.0
        hits.append(layer_hits)
        mass.append(layer_mass)
    return PointingSums(torch.stack(hits), torch.stack(mass), by_chance, len(named))


def _touches(label: Label, box: tuple[float, ...]) -> bool:
    """Whether a patch and a thing's box share more than an edge."""
    assert label.box is not None
    (x0, y0, x1, y1), (left, top, right, bottom) = label.box, box
    return x0 < right and left < x1 and y0 < bottom and top < y1


def _language(model: Model) -> str:
    """The language of which the model's tokenizer gives a caption back as it was."""
    from ..data.corpora.shapes import Shapes

    processor = model.processor
    tokenizer = None if processor is None else processor.target or processor.source
    if tokenizer is None:
        raise ValueError("this model has no tokenizer: a caption cannot be given to it")
    for language in ("en", "ko"):
        text = Shapes(language).example("valid", 0).caption
        if tokenizer.decode(tokenizer.encode(text)).strip() == text:
            return language
    return "en"


# ---- both


class _Halves:
    """Sums of what examples count for, of the even and of the odd ones apart, by which row was read."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], Any] = {}

    def add(self, when: str, index: int, one: Any) -> None:
        key = when, index % 2
        self._sums[key] = one if key not in self._sums else self._sums[key] + one

    def total(self, when: str) -> Any:
        parts = [self._sums[when, half] for half in (0, 1) if (when, half) in self._sums]
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def to_dict(self, value: Callable[[Any], Tensor], lowest: bool) -> dict[str, Any]:
        """Each head's value over all examples, their mean, and the best head: chosen on one half, told of the other."""
        tables = {when: value(self.total(when)) for when in WHEN}  # (L, H + 1), the last: all heads together
        sign = 1 if lowest else -1
        told = []
        for half in (0, 1):
            other = 1 - half if (WHEN[0], 1 - half) in self._sums else half
            if (WHEN[0], half) not in self._sums:
                continue
            chosen = self._single(value, half) * sign
            told.append(float(self._single(value, other).flatten()[int(chosen.argmin())]))
        whole = torch.stack([tables[when][:, :-1] for when in WHEN])
        when, layer, head = (int(x) for x in torch.unravel_index((whole * sign).argmin(), whole.shape))
        return {
            **{name: table[:, :-1].tolist() for name, table in tables.items()},
            "together": {name: table[:, -1].tolist() for name, table in tables.items()},
            "mean": {name: float(table[:, :-1].mean()) for name, table in tables.items()},
            "best": {"value": sum(told) / len(told), "layer": layer, "head": head, "when": WHEN[when]},
        }

    def _single(self, value: Callable[[Any], Tensor], half: int) -> Tensor:
        """Of one half, the heads by themselves, (rows that were read, L, H)."""
        return torch.stack([value(self._sums[when, half])[:, :-1] for when in WHEN])


def _look(model: Model, what: Any, target: str) -> Look | None:
    """A look at an example; None where it does not fit into the model."""
    try:
        return look(model, what, target)
    except ValueError as error:
        if "tokens, but this model reads at most" in str(error):
            return None
        raise


@torch.no_grad()
def _accuracy(seen: Look) -> tuple[int, int]:
    """How many of the target's tokens are the model's own first choice, and how many there are."""
    wanted = [label.token_id for label in seen.rows(kind="cross")]
    known = [n for n, token in enumerate(wanted) if token is not None]
    states, model = seen.hidden(), seen.model
    assert model.head is not None
    right = 0
    for some in torch.tensor(known).split(_AT_ONCE):
        said = model.head(states[some.to(states.device)][None], model.output_table)[0].argmax(-1).cpu()
        right += int((said == torch.tensor([wanted[n] for n in some.tolist()])).sum())
    return right, len(known)


def _check_count(n: int) -> int:
    if n < 1:
        raise ValueError(f"n={n} must be at least 1")
    return n


def _with_table(found: dict[str, Any]) -> dict[str, Any]:
    return {**found, "table": "\n".join(_lines(found))}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """What is printed."""
    error = found["measure"] == "alignment error rate"
    yield f"{found['measure']} on {found['n']} examples of {found['corpus']}: {'0 %' if error else '100 %'} is perfect"
    for when in WHEN:
        table = found[when]
        yield f"row that {'writes' if when == 'written' else 'has just read'} the word"
        yield "          " + "".join(f"{f'head {head}':>9}" for head in range(len(table[0]))) + f"{'together':>11}"
        for layer, values in enumerate(table):
            cells = "".join(f"{_percent(value):>9}" for value in values)
            yield f"  layer {layer:<2}{cells}{_percent(found['together'][when][layer]):>11}"
    best = found["best"]
    where = f"layer {best['layer']}, head {best['head']}, {best['when']}"
    yield f"best head {_percent(best['value'])} ({where}; chosen on one half, measured on the other)"
    if error:
        yield f"without looking {_percent(found['diagonal'])} (same place), {_percent(found['chance'])} (any word)"
        yield f"one link a word cannot do better than {_percent(found['one_link_at_best'])}"
    else:
        mass = max(found["mass"]["mean"].values())
        yield f"without looking {_percent(found['chance'])}; {_percent(mass)} of the attention lies on the thing"
    yield f"the model itself gets {_percent(found['token_accuracy'])} of the tokens right"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"
