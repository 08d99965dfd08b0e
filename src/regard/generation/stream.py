"""Text as it is written: the pieces of one text while the model still goes on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ..models import Model
from .config import GenerateConfig
from .generate import config_of, stream_tokens
from .pieces import Decode, after, text_pieces, waiting
from .prompts import Rows, rows_of
from .stop import first_end
from .texts import is_text, text_reader, understood
from .words import Stop, Words, split_stops


def stream(
    model: Model,
    inputs: str | Rows,
    decode: Decode | None = None,
    config: GenerateConfig | None = None,
    *,
    stop: Stop | None = None,
    target: str | Rows | None = None,
    draft: Model | None = None,
    draft_tokens: int = 4,
    **fields: Any,
) -> Iterator[str]:
    """The text of one prompt or source, piece by piece, without end token and stop strings.

    A piece never ends within a character. ``decode`` is the model's own unless given. Fields as in ``generate``.
    """
    fields |= {} if stop is None else {"stop": stop}
    if decode is None:
        words = text_reader(model) if is_text(inputs) else Words(model)
        if is_text(inputs):
            texts = [inputs] if isinstance(inputs, str) else list(inputs)
            inputs = words.rows(texts, "prompt" if words.goes_on else "source")
        config, found = understood(model, config, fields, words)
        strings = () if found is None else found.strings
        target = words.beginning(target) if isinstance(target, str) else target
        before = inputs if words.goes_on else target
        decode = words.decode if before is None else after(words.decode, rows_of(before)[0])
    else:
        strings, sequences = split_stops(fields.pop("stop", ()))
        config = config_of(config, fields | ({"stop": sequences} if sequences else {}))
    tokens = stream_tokens(model, inputs, config, target=target, draft=draft, draft_tokens=draft_tokens)
    return text_pieces(_content(tokens, model.config.eos_id, config), decode, strings, first_end(config))


def _content(tokens: Iterable[int], eos_id: int | None, config: GenerateConfig) -> Iterator[int]:
    """The tokens without those that end the text: the end token, or a stop sequence, which then comes last."""
    held: tuple[int, ...] = ()
    for token in tokens:
        if token == eos_id:
            yield from held
            return
        held = (*held, token)
        ready = waiting(held, config.stop)
        yield from held[:ready]
        held = held[ready:]
    ends = [len(stop) for stop in config.stop if held[-len(stop) :] == stop]
    yield from held[: len(held) - max(ends, default=0)]
