"""How far attention is to be believed, as a number: against the known alignment of ``en-ko`` and the known places of
things in ``shapes``, on held-out examples, beside what a guess that never looks would reach.

Attention is read at two rows of each word: the one that writes it, and the one that has just read it. The best head is
chosen on one half of the examples and its number is that of the other half, so that choosing makes nothing look better.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from ..data.corpora import open_corpus
from ..models import Model
from ..models.translating import SourceToTarget
from .alignment import Counts, When, count, links_of, words_of
from .labels import Label
from .look import Look, look
from .places import attentions

N = 200
"""Examples a score is made of unless said otherwise."""
WHEN: tuple[When, ...] = get_args(When)
_AT_ONCE = 64  # positions whose logits are held


def score(model: Model, n: int = N) -> dict[str, Any]:
    """The score that fits a model: ``alignment_error`` where it translates text, ``pointing`` where it says what is on
    an image. ``["table"]`` is for people, the rest for programs."""
    if not isinstance(model, SourceToTarget) or model.head is None or "cross" not in attentions(model):
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
    guesses = [Counts(torch.zeros(()), torch.zeros(()), 0, 0) for _ in range(3)]
    right = total = skipped = 0
    for index in range(_positive(n)):
        pair = corpus.example(split, index)
        seen = _look(model, pair.source, pair.target)
        words = None if seen is None else _words(seen, pair.source, pair.target)
        if seen is None or words is None:
            skipped += 1
            continue
        (rows, cols), sure = words, set(pair.alignment)
        allowed = sure | set(pair.possible)
        for when in WHEN:
            own = rows if when == "written" else [[token + 1 for token in word] for word in rows]
            maps = [seen.map("cross", layer) for layer in range(seen.layers("cross"))]
            links = torch.stack([links_of(found, own, cols, allowed, together=True).words for found in maps])
            sums.add(when, index, count(links, sure, allowed))
        guesses = [a + b for a, b in zip(guesses, _guesses(len(rows), len(cols), sure, allowed), strict=True)]
        hits, tokens = _accuracy(seen)
        right, total = right + hits, total + tokens
    if skipped == n:
        raise ValueError("none of the pairs of en-ko is a text this model's tokenizers can write")
    names = ("diagonal", "chance", "one_link_at_best")
    found = sums.document(lambda counts: counts.error, lowest=True)
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


def _words(seen: Look, source: str, target: str) -> tuple[list[list[int]], list[list[int]]] | None:
    """The tokens of the target's and of the source's words; None where the tokenizer does not know all letters."""
    try:
        return words_of(seen.rows("cross"), target), words_of(seen.cols("cross"), source)
    except ValueError:
        return None


def _guesses(n_rows: int, n_cols: int, sure: set[tuple[int, int]], allowed: set[tuple[int, int]]) -> list[Counts]:
    """Without looking: the word at the same place, any word; and the best that one link a word can do."""
    diagonal = torch.tensor([round(row * (n_cols - 1) / max(n_rows - 1, 1)) for row in range(n_rows)])
    chance = Counts(torch.tensor(len(sure) / n_cols), torch.tensor(len(allowed) / n_cols), n_rows, len(sure))
    best = {row: col for col, row in [*sorted(allowed - sure), *sorted(sure)]}  # a sure link where there is one
    at_best = torch.tensor([best.get(row, 0) for row in range(n_rows)])
    return [count(diagonal, sure, allowed), chance, count(at_best, sure, allowed)]


# ---- images


@dataclass(frozen=True, eq=False)
class Pointed:
    """Sums over words: how often the heaviest patch lies on what the word names, and how much weight does."""

    hits: Tensor  # of each head
    mass: Tensor
    by_chance: float
    words: int

    def __add__(self, other: Pointed) -> Pointed:
        by_chance, words = self.by_chance + other.by_chance, self.words + other.words
        return Pointed(self.hits + other.hits, self.mass + other.mass, by_chance, words)


def pointing(model: Model, n: int = N, split: str = "valid", language: str | None = None) -> dict[str, Any]:
    """The pointing game (Zhang et al. 2016) over n pictures of ``shapes``: the share of words about a thing at which a
    head's heaviest patch touches that thing's box, and the share of its attention to patches that does.

    Words that relate two things ("left of") name neither, and are left out. ``language`` is "en" or "ko"; None: the one
    whose captions the model's tokens can write.
    """
    from ..data.corpora.shapes import Shapes

    sums, right, total, skipped = _Halves(), 0, 0, 0
    corpus = Shapes(_language(model) if language is None else language, model.config.image_size)  # type: ignore[arg-type]  # caption() checks it
    for index in range(_positive(n)):
        picture = corpus.example(split, index)
        seen = _look(model, picture.pillow(), picture.caption)
        if seen is None:
            skipped += 1
            continue
        rows = words_of(seen.rows("cross"), picture.caption)
        side = picture.size
        boxes = [tuple(x / side for x in box) for box in picture.boxes]
        related = bool(picture.scene.relations)
        named = [(row, things) for row, things in zip(rows, picture.words.things, strict=True) if things and row]
        named = [(row, things) for row, things in named if not (related and len(things) > 1)]
        for when in WHEN:
            sums.add(when, index, _pointed(seen, named, boxes, 0 if when == "written" else 1))
        hits, tokens = _accuracy(seen)
        right, total = right + hits, total + tokens
    if skipped == n:
        raise ValueError("none of the captions of shapes is a text this model's tokenizer can write")
    found = sums.document(lambda one: one.hits / max(one.words, 1), lowest=False)
    mass = sums.document(lambda one: one.mass / max(one.words, 1), lowest=False)
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


def _pointed(
    seen: Look, named: list[tuple[list[int], tuple[int, ...]]], boxes: list[tuple[float, ...]], shift: int
) -> Pointed:
    patches = [n for n, label in enumerate(seen.cols("cross")) if label.box is not None]
    at = [seen.cols("cross")[n] for n in patches]
    on = [torch.tensor([_touches(label, boxes[thing]) for label in at]) for thing in range(len(boxes))]
    hits, mass, by_chance = [], [], 0.0
    for layer in range(seen.layers("cross")):
        found = seen.map("cross", layer)
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
    return Pointed(torch.stack(hits), torch.stack(mass), by_chance, len(named))


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

    def document(self, value: Callable[[Any], Tensor], lowest: bool) -> dict[str, Any]:
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
    wanted = [label.token_id for label in seen.rows("cross")]
    known = [n for n, token in enumerate(wanted) if token is not None]
    states, model = seen.hidden(), seen.model
    assert isinstance(model, SourceToTarget) and model.head is not None
    right = 0
    for some in torch.tensor(known).split(_AT_ONCE):
        said = model.head(states[some.to(states.device)][None], model.output_table)[0].argmax(-1).cpu()
        right += int((said == torch.tensor([wanted[n] for n in some.tolist()])).sum())
    return right, len(known)


def _positive(n: int) -> int:
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
