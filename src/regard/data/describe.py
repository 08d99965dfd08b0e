"""``regard data describe``: the content of a source before training: sizes, lengths, repeats, leaks and losses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..text.tokenizer import Tokenizer
from .examples import (
    Chat,
    Example,
    ImageExample,
    Labelled,
    Pair,
    Preference,
    Question,
    Tagged,
    Triplet,
    key_of,
    label_text,
)
from .images import open_image
from .sources import Source
from .splits import content_keys

_PERCENTILES = {"min": 0, "p50": 50, "p90": 90, "p99": 99, "max": 100}
_MAX_EXAMPLES, _MAX_IMAGES = 200_000, 20_000


@dataclass(frozen=True)
class LengthSummary:
    """Lengths of texts: their sum, mean and percentiles."""

    total: int
    mean: float
    percentiles: dict[str, int]

    @classmethod
    def from_sizes(cls, sizes: Iterable[int]) -> LengthSummary:
        array = np.fromiter(sizes, dtype=np.int64)
        if not len(array):
            return cls(0, 0.0, {})
        values = np.percentile(array, list(_PERCENTILES.values()), method="lower").astype(int).tolist()
        percentiles = dict(zip(_PERCENTILES, values, strict=True))
        return cls(int(array.sum()), round(float(array.mean()), 1), percentiles)

    def to_text(self) -> str:
        return f"mean {self.mean:,}, " + ", ".join(f"{name} {n:,}" for name, n in self.percentiles.items())


@dataclass(frozen=True)
class LengthLosses:
    """What ``max_len`` and unknown tokens cost in the training examples."""

    max_len: int
    n_longer: int  # number of examples with a side longer than max_len
    tokens_lost: int  # number of their tokens past max_len
    n_unknown: int  # number of <unk> tokens
    max_target_len: int | None = None  # limit of targets, if it differs
    cut: bool = False  # whether longer examples are cut short instead of left out


@dataclass(frozen=True)
class SourceDescription:
    name: str
    kind: str
    n_train: int
    n_valid: int
    looked_at: int  # number of training examples examined; fewer than n_train in a very large source
    split: dict[str, Any]
    labels: dict[str, int] | None
    characters: dict[str, LengthSummary]
    tokens: dict[str, LengthSummary]
    duplicates: int  # training examples that repeat an earlier one exactly
    repeated_sources: int  # training examples whose source side repeats an earlier one's
    leaked_sources: int  # held-out examples whose source side is also in the training data
    leaked_examples: int  # held-out examples that are also in the training data, exactly
    dropped_duplicates: int
    images: dict[str, int] | None  # number of images of each size
    losses: LengthLosses | None
    bad_lines: dict[str, Any]
    others: dict[str, int] = field(default_factory=dict)
    examples: list[list[str]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        lines = [
            f"{self.name}: {self.kind}",
            f"  train {self.n_train:,}, valid {self.n_valid:,}; held out: {self.split['how']}",
            *(f"  {name} {n:,}" for name, n in self.others.items()),
            f"  SHA-256 of valid {self.split['valid_sha256']}",
        ]
        if self.looked_at < self.n_train:
            lines.append(f"  the numbers below are for the first {self.looked_at:,} training examples")
        if self.labels is not None:
            lines += ["labels", *(f"  {name}  {n:,}" for name, n in self.labels.items())]
        if self.images is not None:
            lines += ["images", *(f"  {size}  {n:,}" for size, n in self.images.items())]
        for unit, sides in (("characters", self.characters), ("tokens", self.tokens)):
            lines += [unit, *(f"  {side}  {lengths.to_text()}" for side, lengths in sides.items())] if sides else []
        lines.append("repeats and leaks")
        n, n_sources = self.duplicates, self.repeated_sources
        lines.append(
            f"  training examples that repeat an earlier one: {n:,}, or at least its source side: {n_sources:,}"
        )
        n, n_sources = self.leaked_examples, self.leaked_sources
        lines.append(f"  held-out examples that are also in train: {n:,}, their source sides: {n_sources:,}")
        lines += [f"  duplicates left out: {self.dropped_duplicates:,}"] if self.dropped_duplicates else []
        lines += ["lost", *(f"  {line}" for line in self._loss_lines())]
        examples = [" → ".join(text.replace("\n", "⏎") for text in texts) for texts in self.examples]
        return "\n".join([*lines, "examples", *(f"  {text[:200]}" for text in examples)])

    def _loss_lines(self) -> list[str]:
        bad, lines = self.bad_lines, []
        if (losses := self.losses) is not None:
            fate = f"cut short; tokens lost: {losses.tokens_lost:,}" if losses.cut else "left out"
            n = f"{losses.n_longer:,} example{'s' * (losses.n_longer != 1)}"
            target = "" if losses.max_target_len is None else f" or max_target_len={losses.max_target_len}"
            lines.append(f"{n} longer than max_len={losses.max_len}{target}: {fate}")
            lines.append(f"unknown tokens: {losses.n_unknown:,}")
        lines += [f"{name} is read as {code.upper()}" for name, code in bad.get("encodings", {}).items()]
        lines.append(f"{bad['bad']:,} of {bad['read']:,} lines were bad and left out")
        lines += [f"  {reason}: {n:,}" for reason, n in bad["reasons"].items()]
        lines += [f"  {x['file']}:{x['line']}: {x['reason']}" for x in bad["first"]]
        if normalised := bad["normalised"]:
            lines.append(f"{normalised:,} lines were normalised to Unicode's composed form (NFC)")
        return lines


def describe(
    source: Source,
    tokenizer: Tokenizer | None = None,
    target_tokenizer: Tokenizer | None = None,
    *,
    max_len: int | None = None,
    max_target_len: int | None = None,
    too_long: Literal["auto", "drop", "truncate"] = "auto",
    n_examples: int = 3,
) -> SourceDescription:
    """Describe all examples of a source, or the first ones of an embedded corpus or a very large source.

    ``max_len``, ``max_target_len`` and ``too_long`` have the meaning they have in DataConfig, and determine the losses.
    """
    n_train = min(len(source.train), _MAX_IMAGES if source.kind == "captions" else _MAX_EXAMPLES)
    train = [source.train[index] for index in range(n_train)]
    valid = [source.valid[index] for index in range(min(len(source.valid), n_train))]
    texts = _texts(train)
    cut = too_long == "truncate" or (too_long == "auto" and source.kind not in ("pairs", "chats", "preferences"))
    limits = None if max_len is None else (max_len, max_target_len)
    n_passages = [len(x.passages) for x in train if isinstance(x, Question)]
    tokens, losses = _token_lengths(texts, tokenizer, target_tokenizer, limits, cut, n_passages)
    hashes, held_out = [content_keys(x) for x in train], [content_keys(x) for x in valid]
    keys, wholes = ({pair[side] for pair in hashes} for side in (0, 1))
    counts: Counter[Any] = Counter()
    for example in train:
        label = example.tags if isinstance(example, Tagged) else getattr(example, "label", None)
        counts.update(label if isinstance(label, tuple) else (label,))
    labels = None if source.labels is None else {name: counts[n] for n, name in enumerate(source.labels)}
    return SourceDescription(
        name=source.name,
        kind=source.kind,
        n_train=len(source.train),
        n_valid=len(source.valid),
        looked_at=n_train,
        split=source.split.to_dict(),
        labels=labels,
        characters={side: LengthSummary.from_sizes(map(len, sides)) for side, sides in texts.items()},
        tokens=tokens,
        duplicates=n_train - len(wholes),
        repeated_sources=n_train - len(keys),
        leaked_sources=sum(source in keys for source, _ in held_out),
        leaked_examples=sum(whole in wholes for _, whole in held_out),
        dropped_duplicates=source.n_duplicates,
        images=_image_sizes(train) if source.kind in ("captions", "images") else None,
        losses=losses,
        bad_lines=source.report.to_dict(),
        others={name: len(view) for name, view in source.others.items()},
        examples=[_example_texts(x, source.labels) for x in islice(train, n_examples)],
    )


def _texts(examples: Sequence[Example]) -> dict[str, list[str]]:
    texts: dict[str, list[str]] = {}
    for example in examples:
        for side, own in texts_by_side(example).items():
            texts.setdefault(side, []).extend(own)
    return texts


def texts_by_side(example: Example) -> dict[str, Sequence[str]]:
    """The texts of an example by side; questions have several passages, images several captions."""
    match example:
        case ImageExample(captions=captions):
            return {"caption": captions} if captions else {}
        case Question(question, answer, passages):
            return {"question": [question], "answer": [answer], "passage": passages}
        case Pair(source, target):
            return {"source": [source], "target": [target]}
        case Triplet(anchor, positive, negative):
            return {"anchor": [anchor], "positive": [positive], "negative": [negative]}
        case Chat():
            return {"prompt": [str(key_of(example))], "answer": [example.answer]}
        case Preference(chosen=chosen, rejected=rejected):
            return {"prompt": [str(key_of(example))], "chosen": [chosen], "rejected": [rejected]}
        case Labelled(text, second=str() as second):
            return {"text": [text], "second": [second]}
    return {"text": [example.text]}


def _token_lengths(
    texts: dict[str, list[str]],
    tokenizer: Tokenizer | None,
    target_tokenizer: Tokenizer | None,
    limits: tuple[int, int | None] | None,
    cut: bool,
    n_passages: list[int],
) -> tuple[dict[str, LengthSummary], LengthLosses | None]:
    """The token lengths of each side and, with ``limits``, what they cost; a question counts its longest passage."""
    if tokenizer is None:
        return {}, None
    sizes: dict[str, np.ndarray] = {}
    n_unknown = 0
    for side, sides in texts.items():
        encoder = target_tokenizer if side == "target" and target_tokenizer is not None else tokenizer
        rows = encoder.encode_all(sides)
        sizes[side] = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        n_unknown += sum(row.count(encoder.special_ids.get("unk", -1)) for row in rows)
    lengths = {side: LengthSummary.from_sizes(counts) for side, counts in sizes.items()}
    if limits is None or not sizes:
        return lengths, None
    max_len, max_target_len = limits
    target_limit = max_target_len or max_len
    if n_passages:  # several to an example, unlike the other sides
        sizes["passage"] = np.maximum.reduceat(sizes["passage"], np.cumsum([0, *n_passages[:-1]]))
    excess = np.maximum.reduce(
        [counts - (target_limit if side in ("target", "caption") else max_len) for side, counts in sizes.items()]
    )
    lost = int(np.maximum(excess, 0).sum())
    return lengths, LengthLosses(max_len, int((excess > 0).sum()), lost, n_unknown, max_target_len, cut)


def _image_sizes(train: Sequence[Example]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for example in train:
        assert isinstance(example, ImageExample)
        if isinstance(example.image, np.ndarray):
            height, width = example.image.shape[:2]
        elif isinstance(example.image, Path):
            with open_image(example.image) as image:
                width, height = image.size
        else:
            width, height = example.image.size
        counts[f"{width} × {height}"] += 1
    return dict(counts.most_common(10))


def _example_texts(example: Example, labels: tuple[str, ...] | None) -> list[str]:
    """An example to show: the beginnings of its texts, at most three passages, and its label."""
    texts = [text[:300] for own in texts_by_side(example).values() for text in own[:3]]
    match example:
        case Pair(source, target):
            return [source, target]
        case Labelled(label=label):
            return [*texts, label_text(label, labels)]
        case Tagged(tags=tags):
            return [*texts, " ".join(label_text(tag, labels) for tag in tags)[:300]]
        case ImageExample(image, captions, label):
            name = image.name if isinstance(image, Path) else "image"
            return [name, *(captions or ([] if label is None else [label_text(label, labels)]))]
    return texts
