"""Inputs that the page offers: held-out examples of a run's data and the tags its sentences start with.

Also the words of a text that a tokenizer spells in small pieces.
"""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..data.corpora import CORPORA
from ..data.examples import Example, ImageExample, Labelled, Pair, Text
from ..data.images import open_upright
from ..data.sources import open_source
from ..errors import BadModelFile, RegardError
from ..lens.head_history import checkpoint_steps
from ..lens.labels import Label, join_labels
from ..training.run_directory import RunDirectory, find_run
from .requests import MEGABYTE

_INPUTS, _SAMPLED = 6, 120  # number of inputs offered, and of sentences searched for tags
_LETTERS = range(8, 101)  # length of an offered text
_LARGEST_FILE = 50 * MEGABYTE  # a larger file takes too long to read
_TAG = re.compile(r"(\[[^\]\s]+\]|<[^>\s]+>)\s")


@dataclass(frozen=True)
class RunExamples:
    inputs: tuple[str, ...] = ()  # texts, or base64 of images
    tags: tuple[str, ...] = ()  # every source sentence of the training data starts with one of these


def name_of_run(path: str | Path) -> str:
    """The name of a directory; for a run that is just called "run" or "model", the name of its parent."""
    folder = Path(path).resolve()
    if _run_of(path) is None:
        return folder.name or "model"
    folder = folder.parent if folder.name == "model" else folder
    name, at, step = folder.name.partition("@")
    return (folder.parent.name if name == "run" else name) + at + step


def _run_of(path: str | Path) -> RunDirectory | None:
    """The run for a path RUN, RUN@STEP or RUN/model; None if there is none."""
    run_and_step = find_run(Path(path).parent if Path(path).name == "model" else path)
    return None if run_and_step is None else run_and_step[0]


def run_with_checkpoints(path: str | Path) -> Path | None:
    """The directory of the run if it has at least two checkpoints, otherwise None."""
    run = _run_of(path)
    if run is None:
        return None
    try:
        return run.root if len(checkpoint_steps(run.root)) > 1 else None
    except BadModelFile:  # it has no checkpoints
        return None


def examples_of_run(path: str | Path) -> RunExamples:
    """Examples from the data of a run; empty if the path is not a run, or its data is missing or too large."""
    try:
        if (source := _data_of(path)) is None:
            return RunExamples()
        inputs = dict.fromkeys(_inputs(_spread(_held_out(source), 4 * _INPUTS)))
        return RunExamples(tuple(inputs)[:_INPUTS], _tags(source.train))
    except (OSError, ValueError, RegardError):
        return RunExamples()


def held_out_inputs(path: str | Path, n: int) -> list[Any]:
    """At most n inputs of a run's held-out data, texts or images; none if the data is missing."""
    try:
        if (source := _data_of(path)) is None:
            return []
        examples = _spread(_held_out(source), 4 * n)
        images = [open_upright(example.image) for example in examples if isinstance(example, ImageExample)]
        return _spread(images or list(_inputs(examples)), n)
    except (OSError, ValueError, RegardError):
        return []


def _data_of(path: str | Path) -> Any:
    """The source of a run's data; None if the path is not a run, or its data is missing or too large."""
    run = _run_of(path)
    if run is None:
        return None
    data = run.config.data
    if data.source in CORPORA:
        return open_source(data)
    if all(Path(name).exists() and Path(name).stat().st_size < _LARGEST_FILE for name in data.source.split(",")):
        return open_source(data, check_images=False)
    return None


def _held_out(source: Any) -> Any:
    return source.valid if len(source.valid) else source.train


def _spread(items: Sequence[Any], n: int) -> list[Any]:
    """At most n evenly spaced items of a sequence."""
    n = min(n, len(items))
    return [items[index * len(items) // n] for index in range(n)]


def _inputs(examples: list[Example]) -> Iterator[str]:
    for example in examples:
        match example:
            case Pair(source=text) | Labelled(text=text) if len(text) in _LETTERS:
                yield text
            case Text(text=text):
                yield from _spread([line.strip() for line in text.splitlines() if len(line.strip()) in _LETTERS], 3)
            case ImageExample(image=image):
                yield _png(image)


def _png(image: Any) -> str:
    small = open_upright(image)
    small.thumbnail((160, 160))
    out = io.BytesIO()
    small.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _tags(examples: Sequence[Example]) -> tuple[str, ...]:
    """Tags such as "[polite]", most frequent first; empty unless every sampled sentence starts with one."""
    sources = [example.source for example in _spread(examples, _SAMPLED) if isinstance(example, Pair)]
    tags = Counter(match[1] for source in sources if (match := _TAG.match(source)))
    return tuple(tag for tag, _ in tags.most_common()) if sources and tags.total() == len(sources) else ()


def spelled_words(labels: Sequence[Label]) -> list[str]:
    """Words split into three or more tokens of fewer than three letters each on average."""

    def is_spelled(word: Label) -> bool:
        n_pieces = word.span[1] - word.span[0]
        return not word.special and n_pieces > 2 and len(word.text) < 3 * n_pieces

    return [word.text for word in join_labels(labels, words=True, specials=True) if is_spelled(word)]
