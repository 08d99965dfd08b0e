"""Scores of cross-attention heads against a known word alignment or the known positions of objects in an image.

Each row word is linked to the column word it attends to most. The alignment error rate (Och & Ney 2003, eq. 22)
compares these links A with the sure ones S and the possible ones P ⊇ S:

    AER = 1 - (|A ∩ S| + |A ∩ P|) / (|A| + |S|)

``score`` computes it on held-out examples of ``en-ko``, or the accuracy of pointing on ``shapes``, next to baselines
without attention. The weights of a word are those of the row that predicts it, or of the row that has just read it.
The best head is chosen on one half of the examples and measured on the other, so that the choice does not bias the
score.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from ..attention import AttentionMap
from ..data.corpora import open_corpus
from ..foundation.checks import check_positive
from ..models import Model
from .capture import attention_sites
from .capture_inputs import tokenizers
from .labels import Label
from .look import Look, look, token_logits

Links = Iterable[tuple[int, int]]  # (column word, row word): in a translation (source word, target word)
WordTokens = Sequence[Sequence[int]]  # the tokens of each word
RowChoice = Literal["written", "read"]  # the row that predicts a word, or the one that has just read it ("Shift-Att")
ROW_CHOICES: tuple[RowChoice, ...] = get_args(RowChoice)
DEFAULT_N = 200  # examples
_WEIGHTS_AT_ONCE = 1 << 20  # weights in memory at a time


@dataclass(frozen=True, eq=False)
class LinkCounts:
    """The counts of an alignment error rate, which add up over the examples of a corpus."""

    sure: Tensor  # |A ∩ S| for each head
    possible: Tensor  # |A ∩ P| for each head
    n_links: int  # |A|
    n_sure: int  # |S|

    def __add__(self, other: LinkCounts) -> LinkCounts:
        sure, possible = self.sure + other.sure, self.possible + other.possible
        return LinkCounts(sure, possible, self.n_links + other.n_links, self.n_sure + other.n_sure)

    @property
    def error(self) -> Tensor:
        """The alignment error rate of each head."""
        return 1 - (self.sure + self.possible) / max(self.n_links + self.n_sure, 1)


@dataclass(frozen=True, eq=False)
class WordAlignment:
    """How well the heads of one kind agree with a known alignment."""

    error: Tensor  # (L, H): alignment error rate, 0 is perfect
    mass: Tensor  # (L, H): share of a row word's attention on the words it is linked to, mean over linked words
    links: Tensor  # (L, H, row words): the column word that each row word attends to most


def align_words(
    look: Look, gold: Links, possible: Links | None = None, *, kind: str | None = None, when: RowChoice = "written"
) -> WordAlignment:
    """Compare the heads of one kind with a known alignment of words, which are split at spaces.

    gold      (column word, row word): in a translation (source word, target word), in a syntax tree (head, dependent)
    possible  further links that do not count as errors
    """
    kind = look._kind("cross" if kind is None and "cross" in look.kinds else kind)
    rows, cols = look_word_tokens(look, kind, when)
    sure = set(gold)
    allowed = sure | set(possible or ())
    for col, row in allowed:
        if not (0 <= col < len(cols) and 0 <= row < len(rows)):
            raise ValueError(f"link ({col}, {row}) is outside the {len(cols)} column words or {len(rows)} row words")
    layers = range(look.layers(kind=kind))
    by_layer = [best_links(look.map(layer=layer, kind=kind), rows, cols, allowed) for layer in layers]
    links, mass = (torch.stack(parts) for parts in zip(*by_layer, strict=True))
    return WordAlignment(count_links(links, sure, allowed).error, mass, links)


def look_word_tokens(look: Look, kind: str, when: RowChoice) -> tuple[list[list[int]], list[list[int]]]:
    """The tokens of each word in a look's rows and in its columns; words are split at spaces."""
    row_text, col_text = look.text, look.text
    if kind != "encoder" and look.target_text is not None:
        row_text, col_text = look.target_text, look.text if kind == "cross" else look.target_text
    if row_text is None or col_text is None:
        raise ValueError(f"kind={kind!r}: words need text, and one side of this look is not text")
    rows = word_tokens(look.rows(kind=kind), row_text)
    cols = word_tokens(look.cols(kind=kind), col_text)
    return (_query_rows(rows, when) if kind == "cross" else rows), cols


def _query_rows(words: WordTokens, when: RowChoice) -> list[list[int]]:
    """Rows of cross-attention for each word. A row is labelled by the token it predicts; the next row reads it."""
    return [[token + (when == "read") for token in word] for word in words]


def word_tokens(labels: Sequence[Label], text: str) -> list[list[int]]:
    """The tokens of each word of ``text.split()``; a token belongs to the word that it shares the most letters with."""
    length = max((label.end for label in labels), default=0)
    if length != len(text):
        raise ValueError(f"the tokens spell {length} of the text's {len(text)} letters: some are not in the vocabulary")
    words: list[list[int]] = []
    word_of = [-1] * len(text)  # the word of each letter
    start = 0
    for number, word in enumerate(text.split()):
        start = text.index(word, start)
        word_of[start : start + len(word)] = [number] * len(word)
        start += len(word)
        words.append([])
    for token, label in enumerate(labels):
        overlaps = [word for word in word_of[label.start : label.end] if word >= 0]
        if overlaps and not label.special:
            words[max(set(overlaps), key=overlaps.count)].append(token)
    return words


def word_weights(attention: AttentionMap, rows: WordTokens, cols: WordTokens) -> Iterator[tuple[slice, Tensor]]:
    """Weights (H, row words, col words) in chunks of row words: a word's rows are averaged, its columns summed."""
    n_heads, _, n_keys = attention.shape[1:]
    col_of = torch.full((n_keys,), len(cols), device=attention.device)  # an extra column collects tokens of no word
    for word, tokens in enumerate(cols):
        col_of[list(tokens)] = word

    def weights(start: int, stop: int) -> Tensor:
        words = rows[start:stop]
        tile = attention.tile([token for word in words for token in word])[0]  # (H, R, S)
        by_col = tile.new_zeros(*tile.shape[:2], len(cols) + 1).index_add_(2, col_of, tile)[..., : len(cols)]
        owners = [number for number, tokens in enumerate(words) for _ in tokens]
        row_of = torch.tensor(owners, device=tile.device, dtype=torch.long)
        summed = tile.new_zeros(n_heads, len(words), len(cols)).index_add_(1, row_of, by_col)
        return summed / torch.tensor([max(len(tokens), 1) for tokens in words], device=tile.device)[:, None]

    start = n_tokens = 0
    for number, tokens in enumerate(rows):
        if n_tokens and (n_tokens + len(tokens)) * n_keys * n_heads > _WEIGHTS_AT_ONCE:
            yield slice(start, number), weights(start, number)
            start, n_tokens = number, 0
        n_tokens += len(tokens)
    yield slice(start, len(rows)), weights(start, len(rows))


def best_links(
    attention: AttentionMap, rows: WordTokens, cols: WordTokens, allowed: set[tuple[int, int]], with_mean: bool = False
) -> tuple[Tensor, Tensor]:
    """The column word that each row word attends to most, (H, row words), -1 for a word without tokens; and the share
    of the attention to words that lies on allowed links, (H,). ``with_mean`` appends the mean of all heads as a head.
    """
    n_heads = attention.shape[1] + with_mean
    best = torch.full((n_heads, len(rows)), -1)
    mass, n_linked = torch.zeros(n_heads), 0
    for span, weights in word_weights(attention, rows, cols):
        weights = (torch.cat([weights, weights.mean(0, keepdim=True)]) if with_mean else weights).cpu()
        is_allowed = torch.zeros(weights.shape[1:])
        for col, row in allowed:
            if span.start <= row < span.stop:
                is_allowed[row - span.start, col] = 1
        has_tokens = torch.tensor([bool(word) for word in rows[span]])
        best[:, span] = torch.where(has_tokens, weights.argmax(-1), -1)
        linked = has_tokens & is_allowed.any(-1)
        share = (weights * is_allowed).sum(-1) / weights.sum(-1).clamp(min=1e-9)
        mass += share[:, linked].sum(-1)
        n_linked += int(linked.sum())
    return best, mass / max(n_linked, 1)


def count_links(words: Tensor, sure: set[tuple[int, int]], allowed: set[tuple[int, int]]) -> LinkCounts:
    """Compare links (…, row words), -1 for none, with the known ones."""
    heads = words.reshape(-1, words.shape[-1]).tolist()
    links = [[(col, row) for row, col in enumerate(head) if col >= 0] for head in heads]
    in_sure, in_allowed = (
        torch.tensor([float(sum(link in known for link in head)) for head in links]).view(words.shape[:-1])
        for known in (sure, allowed)
    )
    return LinkCounts(in_sure, in_allowed, len(links[0]), len(sure))


def score(model: Model, n: int = DEFAULT_N) -> dict[str, Any]:
    """``alignment_error`` of a translator or ``pointing`` of a captioner; ["table"] is a table as text."""
    if not model.is_encoder_decoder or model.head is None or "cross" not in attention_sites(model):
        raise ValueError(
            "a score needs cross-attention: translators are scored on the words of en-ko, captioners on the objects of"
            f" shapes, and this model has architecture={model.config.architecture!r}"
        )
    if model.config.source == "text":
        return alignment_error(model, n)
    if model.config.source == "image":
        return pointing(model, n)
    raise ValueError(f"source={model.config.source!r}: there is no corpus with known regions to score against")


def alignment_error(model: Model, n: int = DEFAULT_N, split: str = "valid") -> dict[str, Any]:
    """The alignment error rate of each cross-attention head over n pairs of ``en-ko``."""
    check_positive(n=n)
    corpus, sums = open_corpus("en-ko"), _ExampleSums()
    baselines = [LinkCounts(torch.zeros(()), torch.zeros(()), 0, 0) for _ in range(3)]
    for index in range(n):
        pair = corpus.example(split, index)
        example_look = _look_if_short(model, pair.source, pair.target)
        if example_look is None:
            continue
        try:
            rows = word_tokens(example_look.rows(kind="cross"), pair.target)
            cols = word_tokens(example_look.cols(kind="cross"), pair.source)
        except ValueError:  # the tokenizer's vocabulary lacks some letters
            continue
        sure, allowed = set(pair.alignment), {*pair.alignment, *pair.possible}
        maps = [example_look.map(layer=layer, kind="cross") for layer in range(example_look.layers(kind="cross"))]
        for when in ROW_CHOICES:
            query_rows = _query_rows(rows, when)
            links = torch.stack([best_links(x, query_rows, cols, allowed, with_mean=True)[0] for x in maps])
            sums.add(when, index, count_links(links, sure, allowed))
        baselines = list(map(operator.add, baselines, _baseline_counts(len(rows), len(cols), sure, allowed)))
        sums.add_accuracy(example_look)
    if not sums.n_examples:
        raise ValueError("this model's tokenizers cannot encode any of the pairs of en-ko")
    errors = sums.to_dict(lambda counts: counts.error, lowest=True)
    names = ("diagonal", "chance", "one_link_at_best")
    errors |= {name: float(counts.error) for name, counts in zip(names, baselines, strict=True)}
    return sums.result(f"en-ko {split}", "alignment error rate", n, errors)


def _baseline_counts(
    n_rows: int, n_cols: int, sure: set[tuple[int, int]], allowed: set[tuple[int, int]]
) -> list[LinkCounts]:
    """Baselines without attention: the word at the same relative position, a random word; and the best single link."""
    diagonal = torch.tensor([round(row * (n_cols - 1) / max(n_rows - 1, 1)) for row in range(n_rows)])
    chance = LinkCounts(torch.tensor(len(sure) / n_cols), torch.tensor(len(allowed) / n_cols), n_rows, len(sure))
    best = {row: col for col, row in [*sorted(allowed - sure), *sorted(sure)]}  # sure links override possible ones
    at_best = torch.tensor([best.get(row, 0) for row in range(n_rows)])
    return [count_links(diagonal, sure, allowed), chance, count_links(at_best, sure, allowed)]


@dataclass(frozen=True, eq=False)
class PointingSums:
    """Sums over words, for each head."""

    hits: Tensor  # words whose heaviest patch lies on the object that the word names
    mass: Tensor  # share of the attention on that object
    by_chance: float  # share of the patches on that object
    words: int

    def __add__(self, other: PointingSums) -> PointingSums:
        by_chance, words = self.by_chance + other.by_chance, self.words + other.words
        return PointingSums(self.hits + other.hits, self.mass + other.mass, by_chance, words)


def pointing(model: Model, n: int = DEFAULT_N) -> dict[str, Any]:
    """The pointing game (Zhang et al. 2016) over n images of ``shapes``.

    For the words that name an object: how often a head's heaviest patch overlaps the object's box, and the share of its
    attention on such patches. Words that relate two objects ("left of") name neither and are left out.
    """
    from ..data.corpora.shapes import Shapes

    check_positive(n=n)
    sums = _ExampleSums()
    corpus = Shapes(_caption_language(model), model.config.image_size)
    for index in range(n):
        example = corpus.example("valid", index)
        example_look = _look_if_short(model, example.pillow(), example.caption)
        if example_look is None:
            continue
        rows = word_tokens(example_look.rows(kind="cross"), example.caption)
        boxes = [tuple(x / example.size for x in box) for box in example.boxes]
        max_things = 1 if example.scene.relations else math.inf
        for when in ROW_CHOICES:
            words = zip(_query_rows(rows, when), example.words.things, strict=True)
            named_words = [(tokens, things) for tokens, things in words if tokens and 0 < len(things) <= max_things]
            sums.add(when, index, _pointing_sums(example_look, named_words, boxes))
        sums.add_accuracy(example_look)
    if not sums.n_examples:
        raise ValueError("this model's tokenizer cannot encode any of the captions of shapes")
    hits = sums.to_dict(lambda one: one.hits / max(one.words, 1), lowest=False)
    mass = sums.to_dict(lambda one: one.mass / max(one.words, 1), lowest=False)
    total = sums.total(ROW_CHOICES[0])
    chance = {"chance": total.by_chance / max(total.words, 1), "words": total.words}
    scores = hits | {"mass": {name: mass[name] for name in (*ROW_CHOICES, "mean")}} | chance
    return sums.result("shapes valid", "pointing accuracy", n, scores)


def _pointing_sums(
    example_look: Look, named_words: list[tuple[list[int], tuple[int, ...]]], boxes: list[tuple[float, ...]]
) -> PointingSums:
    patch_boxes = {n: label.box for n, label in enumerate(example_look.cols(kind="cross")) if label.box is not None}
    patches = list(patch_boxes)
    x0, y0, x1, y1 = torch.tensor(list(patch_boxes.values()), dtype=torch.float64).T
    touches = [  # whether the overlap of a patch and an object's box has an area
        (x0 < right) & (left < x1) & (y0 < bottom) & (top < y1) for left, top, right, bottom in boxes
    ]
    hits, mass, by_chance = [], [], 0.0
    for layer in range(example_look.layers(kind="cross")):
        attention = example_look.map(layer=layer, kind="cross")
        layer_hits, layer_mass = torch.zeros(2, attention.shape[1] + 1)  # the last entry: the mean of all heads
        for tokens, things in named_words:
            is_right = torch.stack([touches[thing] for thing in things]).any(0)
            weights = attention.tile(tokens, patches)[0].mean(1).cpu()  # (H, patches)
            weights = torch.cat([weights, weights.mean(0, keepdim=True)])
            layer_hits += is_right[weights.argmax(-1)].float()
            layer_mass += (weights * is_right).sum(-1) / weights.sum(-1).clamp(min=1e-9)
            by_chance += float(is_right.float().mean()) if layer == 0 else 0.0
        hits.append(layer_hits)
        mass.append(layer_mass)
    return PointingSums(torch.stack(hits), torch.stack(mass), by_chance, len(named_words))


def _caption_language(model: Model) -> Literal["en", "ko"]:
    """The language whose captions the model's tokenizer encodes without loss."""
    from ..data.corpora.shapes import Shapes

    tokenizer = tokenizers(model)[1]
    if tokenizer is None:
        raise ValueError("this model has no tokenizer, so it cannot read a caption")
    languages: tuple[Literal["en", "ko"], ...] = ("en", "ko")
    for language in languages:
        text = Shapes(language).example("valid", 0).caption
        if tokenizer.decode(tokenizer.encode(text)).strip() == text:
            return language
    return "en"


class _ExampleSums:
    """Sums over the even and over the odd examples for each choice of rows, and the model's token accuracy."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, Any]] = {}  # by choice of rows, then by half (index % 2)
        self.n_examples = self.n_right = self.n_tokens = 0

    def add(self, name: str, index: int, counts: Any) -> None:
        halves, half = self._sums.setdefault(name, {}), index % 2
        halves[half] = halves[half] + counts if half in halves else counts

    def total(self, name: str) -> Any:
        return functools.reduce(operator.add, self._sums[name].values())

    def to_dict(self, value: Callable[[Any], Tensor], lowest: bool) -> dict[str, Any]:
        """The value of each head, their mean, and that of the best head: chosen on one half, measured on the other."""
        tables = {when: value(self.total(when)) for when in ROW_CHOICES}  # (L, H + 1); last column: mean of the heads
        sign = 1 if lowest else -1
        present = self._sums[ROW_CHOICES[0]]
        halves = [torch.stack([value(self._sums[when][half])[:, :-1] for when in ROW_CHOICES]) for half in present]
        pairs = zip(halves, reversed(halves), strict=True)
        best_values = [float(other.flatten()[int((half * sign).argmin())]) for half, other in pairs]
        whole = torch.stack([tables[when][:, :-1] for when in ROW_CHOICES])
        when, layer, head = (int(x) for x in torch.unravel_index((whole * sign).argmin(), whole.shape))
        best = {"value": sum(best_values) / len(best_values), "layer": layer, "head": head, "when": ROW_CHOICES[when]}
        return {
            **{name: table[:, :-1].tolist() for name, table in tables.items()},
            "together": {name: table[:, -1].tolist() for name, table in tables.items()},
            "mean": {name: float(table[:, :-1].mean()) for name, table in tables.items()},
            "best": best,
        }

    def add_accuracy(self, example_look: Look) -> None:
        n_right, n_tokens = _accuracy(example_look)
        self.n_examples += 1
        self.n_right += n_right
        self.n_tokens += n_tokens

    def result(self, corpus: str, measure: str, n: int, scores: dict[str, Any]) -> dict[str, Any]:
        """The dictionary that ``score`` returns."""
        about = {"corpus": corpus, "measure": measure, "n": self.n_examples, "skipped": n - self.n_examples}
        result = {**about, **scores, "token_accuracy": self.n_right / max(self.n_tokens, 1)}
        return {**result, "table": "\n".join(_text_lines(result))}


def _look_if_short(model: Model, what: Any, target: str) -> Look | None:
    """A look at an example; None if it is longer than the model's maximum length."""
    try:
        return look(model, what, target)
    except ValueError as error:
        if "tokens, but this model reads at most" in str(error):
            return None
        raise


def _accuracy(example_look: Look) -> tuple[int, int]:
    """The number of target tokens that the model predicts correctly (argmax), and their total number."""
    tokens = [label.token_id for label in example_look.rows(kind="cross") if label.token_id is not None]
    best = torch.cat([logits.argmax(-1) for logits in token_logits(example_look, len(tokens))]).tolist()
    return sum(a == b for a, b in zip(best, tokens, strict=True)), len(tokens)


def _text_lines(result: dict[str, Any]) -> Iterator[str]:
    is_error = result["measure"] == "alignment error rate"
    perfect = "0 %" if is_error else "100 %"
    yield f"{result['measure']} on {result['n']} examples of {result['corpus']}: {perfect} is perfect"
    for when in ROW_CHOICES:
        table = result[when]
        yield f"row that {'predicts' if when == 'written' else 'has just read'} the word"
        yield "          " + "".join(f"{f'head {head + 1}':>9}" for head in range(len(table[0]))) + f"{'together':>11}"
        for layer, values in enumerate(table):
            cells = "".join(f"{_percent(value):>9}" for value in values)
            yield f"  layer {layer + 1:<2}{cells}{_percent(result['together'][when][layer]):>11}"
    best = result["best"]
    where = f"layer {best['layer'] + 1}, head {best['head'] + 1}, {best['when']}"
    yield f"best head {_percent(best['value'])} ({where}; chosen on one half, measured on the other)"
    if is_error:
        diagonal, chance = _percent(result["diagonal"]), _percent(result["chance"])
        yield f"without attention {diagonal} (word at the same position), {chance} (random word)"
        yield f"lower bound with one link per word: {_percent(result['one_link_at_best'])}"
    else:
        mass = max(result["mass"]["mean"].values())
        yield f"without attention {_percent(result['chance'])}; {_percent(mass)} of the attention lies on the object"
    yield f"the model predicts {_percent(result['token_accuracy'])} of the tokens correctly"


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.1f} %"
