"""What a source holds, before anything is trained on it: sizes, lengths, repeats, leaks, and what would be lost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from .examples import Example, ImageExample, Labelled, Pair, Text, key_of
from .hashing import stable_key
from .sources import Source
from .splits import sha256_of

__all__ = ["Lengths", "Losses", "SourceDescription", "describe"]

_PERCENTILES = (0, 50, 90, 99, 100)
_MOST_LOOKED_AT = 200_000


class Encoder(Protocol):
    """Text to ids."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Lengths:
    """How long texts are."""

    total: int
    mean: float
    percentiles: dict[str, int]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> Lengths:
        array = np.fromiter(sizes, dtype=np.int64)
        if not len(array):
            return cls(0, 0.0, {})
        places = np.percentile(array, _PERCENTILES, method="lower").astype(int)
        names = (f"p{p}" if 0 < p < 100 else ("min" if p == 0 else "max") for p in _PERCENTILES)
        return cls(int(array.sum()), round(float(array.mean()), 1), dict(zip(names, places.tolist(), strict=True)))

    def text(self) -> str:
        return f"mean {self.mean:,}, " + ", ".join(f"{name} {n:,}" for name, n in self.percentiles.items())


@dataclass(frozen=True)
class Losses:
    """What ``max_len`` would do to the training examples."""

    max_len: int
    n_longer: int
    """Examples with a side longer than that: left out of translation and captioning, cut short elsewhere."""
    tokens_lost: int
    """Tokens past max_len in them."""
    n_unknown: int
    """Tokens that are <unk>."""
    max_target_len: int | None = None
    """The same for targets where it is another number."""
    cut: bool = False
    """Whether longer examples are cut short rather than left out."""


@dataclass(frozen=True)
class SourceDescription:
    """What ``describe`` found; ``looked_at`` is less than the number of examples where there are very many."""

    name: str
    kind: str
    n_train: int
    n_valid: int
    looked_at: int
    split: dict[str, Any]
    labels: dict[str, int] | None
    characters: dict[str, Lengths]
    tokens: dict[str, Lengths]
    duplicates: int
    """Training examples that are an exact repeat of an earlier one."""
    repeated_sources: int
    """Training examples whose source side stood there before."""
    leaked_sources: int
    """Held-out examples whose source side is also trained on."""
    leaked_examples: int
    """Held-out examples that are trained on, exactly."""
    dropped_duplicates: int
    images: dict[str, int] | None
    """Sizes of images and how many have each."""
    losses: Losses | None
    bad_lines: dict[str, Any]
    others: dict[str, int] = field(default_factory=dict)
    examples: list[list[str]] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """As one JSON document."""
        return asdict(self)

    def table(self) -> str:
        """As lines for people."""
        lines = [
            f"{self.name}: {self.kind}",
            f"  train {self.n_train:,}, valid {self.n_valid:,}; held out: {self.split['how']}",
            *(f"  {name} {n:,}" for name, n in self.others.items()),
            f"  SHA-256 of valid {self.split['valid_sha256']}",
        ]
        if self.looked_at < self.n_train:
            lines.append(f"  what follows looks at the first {self.looked_at:,} of the training examples")
        if self.labels is not None:
            lines += ["labels", *(f"  {name}  {n:,}" for name, n in self.labels.items())]
        if self.images is not None:
            lines += ["images", *(f"  {size}  {n:,}" for size, n in self.images.items())]
        for unit, sides in (("characters", self.characters), ("tokens", self.tokens)):
            lines += [unit, *(f"  {side}  {found.text()}" for side, found in sides.items())] if sides else []
        lines += ["repeats and leaks", *(f"  {line}" for line in self._repeats())]
        lines += ["lost", *(f"  {line}" for line in self._lost())]
        shown = [" → ".join(text.replace("\n", "⏎") for text in texts) for texts in self.examples]
        return "\n".join([*lines, "examples", *(f"  {text[:200]}" for text in shown)])

    def _repeats(self) -> list[str]:
        return [
            f"{self.duplicates:,} training examples repeat another exactly, {self.repeated_sources:,} its source side",
            f"{self.leaked_sources:,} held-out source sides are in train too, {self.leaked_examples:,} whole examples",
            *([f"{self.dropped_duplicates:,} duplicates were left out"] if self.dropped_duplicates else []),
        ]

    def _lost(self) -> list[str]:
        bad, lines = self.bad_lines, []
        if self.losses is not None:
            found = self.losses
            fate = f"cut short, {found.tokens_lost:,} tokens past it" if found.cut else "left out, whole"
            target = "" if found.max_target_len is None else f" or max_target_len={found.max_target_len}"
            lines.append(f"{found.n_longer:,} examples longer than max_len={found.max_len}{target} are {fate}")
            lines.append(f"{self.losses.n_unknown:,} tokens are unknown")
        lines.append(f"{bad['bad']:,} of {bad['read']:,} lines were bad and left out")
        lines += [f"  {reason}: {n:,}" for reason, n in bad["reasons"].items()]
        lines += [f"  {x['file']}:{x['line']}: {x['reason']}" for x in bad["first"]]
        changed = bad["normalised"]
        return lines + ([f"{changed:,} lines were brought into Unicode's composed form (NFC)"] if changed else [])


def describe(
    source: Source,
    tokenizer: Encoder | None = None,
    target_tokenizer: Encoder | None = None,
    *,
    max_len: int | None = None,
    max_target_len: int | None = None,
    too_long: Literal["auto", "drop", "truncate"] = "auto",
    n_examples: int = 3,
) -> SourceDescription:
    """Look at every example (of embedded corpora and very large sources, at the first ones) and count.

    ``max_len``, ``max_target_len`` and ``too_long`` are those of DataConfig: what training would lose.
    """
    n_train = min(len(source.train), _MOST_LOOKED_AT if source.kind != "captions" else 20_000)
    train = [source.train[index] for index in range(n_train)]
    valid = [source.valid[index] for index in range(min(len(source.valid), n_train))]
    texts = _texts(train)
    cut = too_long == "truncate" or (too_long == "auto" and source.kind != "pairs")
    limits = None if max_len is None else (max_len, max_target_len)
    tokens, losses = _tokenised(texts, tokenizer, target_tokenizer, limits, cut)
    keys, wholes = [stable_key(key_of(x)) for x in train], [sha256_of([x]) for x in train]
    key_set, whole_set = set(keys), set(wholes)
    return SourceDescription(
        name=source.name,
        kind=source.kind,
        n_train=len(source.train),
        n_valid=len(source.valid),
        looked_at=n_train,
        split=source.split.document(),
        labels=_label_counts(source, train),
        characters={side: Lengths.of(map(len, sides)) for side, sides in texts.items()},
        tokens=tokens,
        duplicates=n_train - len(whole_set),
        repeated_sources=n_train - len(key_set),
        leaked_sources=sum(stable_key(key_of(x)) in key_set for x in valid),
        leaked_examples=sum(sha256_of([x]) in whole_set for x in valid),
        dropped_duplicates=source.n_duplicates,
        images=_sizes(train) if source.kind in ("captions", "images") else None,
        losses=losses,
        bad_lines=source.report.document(),
        others={name: len(view) for name, view in source.others.items()},
        examples=[_shown(x, source.labels) for x in islice(train, n_examples)],
    )


def _texts(examples: Sequence[Example]) -> dict[str, list[str]]:
    sides: dict[str, list[str]] = {}
    for example in examples:
        match example:
            case Pair(source, target):
                sides.setdefault("source", []).append(source)
                sides.setdefault("target", []).append(target)
            case Text(text) | Labelled(text):
                sides.setdefault("text", []).append(text)
            case ImageExample(captions=captions) if captions:
                sides.setdefault("caption", []).extend(captions)
    return sides


def _tokenised(
    texts: dict[str, list[str]],
    tokenizer: Encoder | None,
    target_tokenizer: Encoder | None,
    limits: tuple[int, int | None] | None,
    cut: bool,
) -> tuple[dict[str, Lengths], Losses | None]:
    if tokenizer is None:
        return {}, None
    sizes: dict[str, np.ndarray] = {}
    n_unknown = 0
    for side, sides in texts.items():
        encoder = target_tokenizer if side == "target" and target_tokenizer is not None else tokenizer
        unknown = getattr(encoder, "unk_id", -1)
        rows = encoder.encode_all(sides) if hasattr(encoder, "encode_all") else [encoder.encode(x) for x in sides]
        sizes[side] = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
        n_unknown += sum(row.count(unknown) for row in rows)
    lengths = {side: Lengths.of(found) for side, found in sizes.items()}
    if limits is None or not sizes:
        return lengths, None
    max_len, max_target_len = limits
    targets = max_target_len or max_len
    rooms = [targets if side in ("target", "caption") else max_len for side in sizes]
    past = np.maximum.reduce([found - room for found, room in zip(sizes.values(), rooms, strict=True)])
    lost = int(np.maximum(past, 0).sum())
    return lengths, Losses(max_len, int((past > 0).sum()), lost, n_unknown, max_target_len, cut)


def _label_counts(source: Source, train: Sequence[Example]) -> dict[str, int] | None:
    if source.labels is None:
        return None
    counts = Counter(x.label for x in train if isinstance(x, Labelled | ImageExample))
    return {name: counts.get(index, 0) for index, name in enumerate(source.labels)}


def _sizes(train: Sequence[Example]) -> dict[str, int]:
    from PIL import Image

    counts: Counter[str] = Counter()
    for example in train:
        assert isinstance(example, ImageExample)
        if isinstance(example.image, np.ndarray):
            height, width = example.image.shape[:2]
        elif isinstance(example.image, Path):
            with Image.open(example.image) as image:
                width, height = image.size
        else:
            width, height = example.image.size
        counts[f"{width} × {height}"] += 1
    return dict(counts.most_common(10))


def _shown(example: Example, labels: tuple[str, ...] | None) -> list[str]:
    match example:
        case Pair(source, target):
            return [source, target]
        case Text(text):
            return [text[:300]]
        case Labelled(text, label):
            return [text[:300], labels[label] if labels else str(label)]
        case ImageExample(image, captions, label):
            name = image.name if isinstance(image, Path) else "image"
            if captions:
                return [name, *captions]
            return [name, labels[label] if labels and label is not None else str(label)]
