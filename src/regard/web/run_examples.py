"""What the page offers to look at: held-out inputs of the data a run learned from, and the tags its sentences begin
with; and which words of a text the model hardly knows."""

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
from ..data.images import pixels_of
from ..data.sources import open_source
from ..errors import RegardError
from ..lens.labels import Label, join_labels
from ..training.run_directory import RunDirectory, find_run
from .requests import MEGABYTE

_INPUTS, _SAMPLED = 6, 120  # inputs that are offered; sentences in which tags are looked for
_LETTERS = range(8, 101)  # of an input that is offered
_LARGEST_FILE = 50 * MEGABYTE  # a larger one takes too long to read
_TAG = re.compile(r"(\[[^\]\s]+\]|<[^>\s]+>)\s")


@dataclass(frozen=True)
class RunExamples:
    inputs: tuple[str, ...] = ()  # texts, or base64 of images
    tags: tuple[str, ...] = ()  # each source sentence that the model learned from begins with one of these


def name_of_run(path: str | Path) -> str:
    """The name of a directory; where a run's says no more than "run" or "model", that of the one around it."""
    folder = Path(path).resolve()
    if _run_of(path) is None:
        return folder.name or "model"
    folder = folder.parent if folder.name == "model" else folder
    name, at, step = folder.name.partition("@")
    return (folder.parent.name if name == "run" else name) + at + step


def _run_of(path: str | Path) -> RunDirectory | None:
    """The run at RUN or RUN@STEP, or the one whose model is at RUN/model."""
    found = find_run(Path(path).parent if Path(path).name == "model" else path)
    return None if found is None else found[0]


def examples_of_run(path: str | Path) -> RunExamples:
    """From the data of a run; none where it is no run, or its data is not here or too large."""
    run = _run_of(path)
    if run is None:
        return RunExamples()
    try:
        data = run.config.data
        if data.source in CORPORA:
            source = open_source(data)
        elif all(Path(name).exists() and Path(name).stat().st_size < _LARGEST_FILE for name in data.source.split(",")):
            source = open_source(data, check_images=False)
        else:
            return RunExamples()
        held_out = source.valid if len(source.valid) else source.train
        return RunExamples(tuple(_inputs(_spread(held_out, 4 * _INPUTS)))[:_INPUTS], _tags(source.train))
    except (OSError, ValueError, RegardError):
        return RunExamples()


def _spread(items: Sequence[Any], n: int) -> list[Any]:
    """At most n items, evenly from the whole sequence."""
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
    from PIL import Image

    small = Image.fromarray(pixels_of(image))
    small.thumbnail((160, 160))
    out = io.BytesIO()
    small.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


def _tags(examples: Sequence[Example]) -> tuple[str, ...]:
    """The tags, most frequent first, where all sentences begin with one: "[polite] Did the cat sleep?"."""
    sources = [example.source for example in _spread(examples, _SAMPLED) if isinstance(example, Pair)]
    tags = Counter(match[1] for source in sources if (match := _TAG.match(source)))
    return tuple(tag for tag, _ in tags.most_common()) if sources and tags.total() == len(sources) else ()


def spelled_words(labels: Sequence[Label]) -> list[str]:
    """Words that a tokenizer has to spell: in three or more pieces, of less than three letters each on average."""

    def is_spelled(word: Label) -> bool:
        n_pieces = word.span[1] - word.span[0]
        return not word.special and n_pieces > 2 and len(word.text) < 3 * n_pieces

    return [word.text for word in join_labels(labels, words=True, specials=True) if is_spelled(word)]
