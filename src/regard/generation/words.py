"""What people write, as a model reads it: prompts, sources, stop strings and single tokens, by its tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..models import Decoder, Model
from ..text.tokenizer import Tokenizer, replace_surrogates
from .pieces import Decode

Stop = str | int | Sequence[str | int | Sequence[int]]
"""What ends a text: a string, a token, or several of them and of token sequences."""


class Words:
    """The tokenizers of a model: ``source`` for what it reads, ``target`` for what it writes."""

    def __init__(self, model: Model) -> None:
        self.config, self.goes_on = model.config, isinstance(model, Decoder)
        processor = model.processor
        source, target = (None, None) if processor is None else (processor.source, processor.target)
        self._source: Tokenizer | None = source
        self._target: Tokenizer | None = target if target is not None else source

    @property
    def source(self) -> Tokenizer:
        if self._source is None:
            raise ValueError(_no_tokenizer("text to read"))
        return self._source

    @property
    def target(self) -> Tokenizer:
        if self._target is None:
            raise ValueError(_no_tokenizer("text to write"))
        return self._target

    @property
    def decode(self) -> Decode:
        return self.target.decode

    def rows(self, texts: Sequence[str | Sequence[int]], name: str) -> list[list[int]]:
        """Token ids of texts; what is no text already is ids. A prompt has no end yet, a source has."""
        return [
            self._row(text, f"{name} {index}") if isinstance(text, str) else list(text)
            for index, text in enumerate(texts)
        ]

    def _row(self, text: str, name: str) -> list[int]:
        """The ids of a text with what stands around one in training, but no end behind a prompt that is to go on."""
        tokenizer, text = self.source, replace_surrogates(text)
        first, ids, last = parts(tokenizer, text)
        if not ids:
            raise ValueError(f"{name} is empty: there is nothing to {'continue' if self.goes_on else 'read'}")
        return [*first, *ids] if self.goes_on else [*first, *ids, *last]

    def beginning(self, text: str | Sequence[int]) -> list[int]:
        """The ids of what a text begins with, and nothing around them."""
        return parts(self.target, replace_surrogates(text))[1] if isinstance(text, str) else list(text)

    def token(self, word: str | int) -> int:
        """The id of a token: as it is written in the tokenizer's file, or the text that is exactly this one token."""
        if isinstance(word, int):
            return word
        if word in self._written:
            return self._written[word]
        ids = parts(self.target, replace_surrogates(word))[1]
        if len(ids) == 1 and self.decode([ids[0], ids[0]]).endswith(word) and word:
            return ids[0]
        many = f"it is {len(ids)} tokens" if len(ids) > 1 else "the tokenizer does not have it"
        raise ValueError(f"{word!r} is an unknown token: {many}")

    @cached_property
    def _written(self) -> dict[str, int]:
        """Every token as it is written."""
        words = ((self.target.token(index), index) for index in range(self.config.output_vocab_size))
        return {word: index for word, index in words if word is not None}

    def bias(self, logit_bias: Mapping[str | int, float]) -> dict[int, float]:
        """By id; a token named twice gets both."""
        found: dict[int, float] = {}
        for word, value in logit_bias.items():
            index = self.token(word)
            found[index] = found.get(index, 0.0) + value
        return found

    def fields(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Fields of a GenerateConfig with their text as tokens, and the stop strings, which have no tokens."""
        made, strings = dict(fields), tuple[str, ...]()
        if (stop := made.pop("stop", None)) is not None:
            strings, sequences = split_stops(stop)
            made |= {"stop": sequences} if sequences or not strings else {}
        if (prefix := made.get("prefix")) is not None:
            made["prefix"] = self.beginning(prefix)
        if (bias := made.get("logit_bias")) is not None:
            made["logit_bias"] = self.bias(bias)
        return made, strings


def split_stops(stop: Stop) -> tuple[tuple[str, ...], list[int | Sequence[int]]]:
    """Strings, and tokens and token sequences, apart."""
    each = [stop] if isinstance(stop, str | int) else list(stop)
    if any(isinstance(s, str) and not s for s in each):
        raise ValueError(f"stop={stop!r} holds an empty string, which would end every text before it starts")
    return tuple(s for s in each if isinstance(s, str)), [s for s in each if not isinstance(s, str)]


def has_text(fields: Mapping[str, Any]) -> bool:
    """Whether a tokenizer is needed to understand them."""
    stop, prefix, bias = (fields.get(name) for name in ("stop", "prefix", "logit_bias"))
    words = [prefix, stop, *(stop if isinstance(stop, Sequence) else ()), *(bias or ())]
    return any(isinstance(word, str) for word in words)


def parts(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int], list[int]]:
    """The ids of a text, with what the tokenizer puts before and behind it apart."""
    ids = tokenizer.encode(text)
    around = tokenizer.encode("")
    for n_first in range(len(around), -1, -1):
        n_last = len(around) - n_first
        if ids[:n_first] == around[:n_first] and ids[len(ids) - n_last :] == around[n_first:]:
            return ids[:n_first], ids[n_first : len(ids) - n_last], ids[len(ids) - n_last :]
    return [], ids, []


def _no_tokenizer(what: str) -> str:
    return f"this model has no tokenizer for {what}: load one with a tokenizer.json beside it, or give token ids"
