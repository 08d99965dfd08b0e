"""Encode texts, and the text in generation fields (stop, prefix, logit_bias), with a model's tokenizers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from ..config import ModelConfig
from ..models import Model
from ..text.chat import read_messages
from ..text.processor import Processor
from ..text.tokenizer import Tokenizer, replace_surrogates
from .generation_config import GenerateConfig
from .stop_conditions import Decode, StopStrings, first_stop_token

Stop = str | int | Sequence[str | int | Sequence[int]]  # a string, a token, or a list of strings, tokens and sequences


class ModelTokenizers:
    """The tokenizers of a model: ``source`` for its input, ``target`` for its output."""

    def __init__(self, model: Model) -> None:
        self.config, self.continues_prompt = model.config, model.is_decoder_only
        processor = model.processor or Processor()
        self._source, self._target = processor.source, processor.tokenizer_of("target")
        self._chat = processor.chat

    @property
    def source(self) -> Tokenizer:
        return _require_tokenizer(self._source, "text to read")

    @property
    def target(self) -> Tokenizer:
        return _require_tokenizer(self._target, "text to write")

    @property
    def decode(self) -> Decode:
        return self.target.decode

    def encode_inputs(self, texts: Any, name: str | None = None) -> list[list[int]]:
        """Token ids of prompts, without an end token, or of sources, with one; inputs that are not text must be ids.

        Messages, ``[{"role": "user", "content": …}]``, are formatted by the model's chat template.
        """
        name = name or ("prompt" if self.continues_prompt else "source")
        purpose, rows = "continue" if self.continues_prompt else "read", []
        for index, text in enumerate([texts] if isinstance(texts, str) or is_chat(texts) else texts):
            if is_chat(text):
                rows.append(self._encode_chat(text))
                continue
            if not isinstance(text, str):
                rows.append(list(text))
                continue
            first, ids, last = split_special_tokens(self.source, replace_surrogates(text))
            if not ids:
                raise ValueError(f"{name} {index} is empty: there is nothing to {purpose}")
            rows.append([*first, *ids] if self.continues_prompt else [*first, *ids, *last])
        return rows

    def _encode_chat(self, messages: Any) -> list[int]:
        if self._chat is None:
            raise ValueError("this model has no chat template, so it takes a text, not messages")
        if (chat := read_messages(messages)) is None:
            raise ValueError("a message needs a role and a content, both strings")
        return self._chat.encode_prompt(chat)

    def encode_beginning(self, text: str | Sequence[int]) -> list[int]:
        """The ids of the beginning of a target, without special tokens."""
        return split_special_tokens(self.target, replace_surrogates(text))[1] if isinstance(text, str) else list(text)

    def token_id(self, word: str | int) -> int:
        """The id of a token, given as spelled in the tokenizer's vocabulary or as text that encodes to one token."""
        if isinstance(word, int):
            return word
        if word in self._vocabulary:
            return self._vocabulary[word]
        ids = split_special_tokens(self.target, replace_surrogates(word))[1]
        if len(ids) == 1 and self.decode([ids[0], ids[0]]).endswith(word) and word:
            return ids[0]
        reason = f"it is split into {len(ids)} tokens" if len(ids) > 1 else "the tokenizer does not have it"
        raise ValueError(f"{word!r} is an unknown token: {reason}")

    @cached_property
    def languages(self) -> dict[str, int]:
        """Special tokens other than bos, eos, padding and the like: the languages of mBART, M2M-100 and NLLB."""
        tokenizer, known = self.source, set(self.source.special_ids.values())
        ids = {index: tokenizer.token(index) for index in tokenizer.all_special_ids if index not in known}
        return {name: index for index, name in sorted(ids.items()) if name and name[0] not in "<["}

    def language_id(self, name: str) -> int:
        """The token of a language: "eng_Latn" (NLLB), "en" for __en__ (M2M-100) or for en_XX (mBART)."""
        matches = [self.languages[x] for x in (name, f"__{name}__") if x in self.languages]
        matches = matches or [index for token, index in self.languages.items() if token.startswith(f"{name}_")]
        if len(matches) != 1:
            known = ", ".join(list(self.languages)[:8]) + (" …" if len(self.languages) > 8 else "")
            raise ValueError(f"{name!r} is not a language of this model, which has {known or 'none'}")
        return matches[0]

    def with_language(self, row: list[int], index: int) -> list[int]:
        """A source with this language token: it replaces the tokenizer's language token or goes to the front."""
        languages = set(self.languages.values())
        if row[-1] in languages:
            return [*row[:-1], index]
        return [index, *(row[1:] if row[0] in languages else row)]

    @cached_property
    def _vocabulary(self) -> dict[str, int]:
        """The id of every token, by its spelling."""
        words = ((self.target.token(index), index) for index in range(self.config.output_vocab_size))
        return {word: index for word, index in words if word is not None}

    def encode_fields(self, fields: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Fields of a GenerateConfig with text encoded as tokens, and the stop strings, which remain text."""
        encoded, strings = dict(fields), tuple[str, ...]()
        if (stop := encoded.pop("stop", None)) is not None:
            strings, sequences = split_stops(stop)
            encoded |= {"stop": sequences} if sequences or not strings else {}
        if (prefix := encoded.get("prefix")) is not None:
            encoded["prefix"] = self.encode_beginning(prefix)
        if (logit_bias := encoded.get("logit_bias")) is not None:
            bias: dict[int, float] = {}
            for word, value in logit_bias.items():  # the values of a token named twice add up
                index = self.token_id(word)
                bias[index] = bias.get(index, 0.0) + value
            encoded["logit_bias"] = bias
        return encoded, strings


def resolve_config(
    model: Model, config: GenerateConfig | None, fields: Mapping[str, Any], tokenizers: ModelTokenizers | None = None
) -> tuple[GenerateConfig, StopStrings | None]:
    """The config with its text encoded as tokens, and the stop strings, if any."""
    stop, prefix, bias = (fields.get(name) for name in ("stop", "prefix", "logit_bias"))
    words = [prefix, stop, *(stop if isinstance(stop, Sequence) else ()), *(bias or ())]
    if not any(isinstance(word, str) for word in words):
        return merge_config(model, config, fields), None
    tokenizers = tokenizers or ModelTokenizers(model)
    encoded, strings = tokenizers.encode_fields(fields)
    config = merge_config(model, config, encoded)
    return config, StopStrings(strings, tokenizers.decode, first_stop_token(config)) if strings else None


def merge_config(model: Model, config: GenerateConfig | None, fields: Mapping[str, Any]) -> GenerateConfig:
    """A config with the given fields and the model's rules."""
    if config is None:
        config = GenerateConfig(**fields)
    elif fields:
        config = config.with_(**fields)
    return with_rules(config, model.config)


def with_rules(config: GenerateConfig, model: ModelConfig) -> GenerateConfig:
    """A config with the rules of a model: more tokens that end a text, and those that never occur."""
    ends = [(index,) for index in model.more_eos_ids if (index,) not in config.stop]
    rules: dict[str, Any] = {"stop": (*config.stop, *ends)} if ends else {}
    if forbidden := forbidden_bias(model):
        rules["logit_bias"] = forbidden | config.logit_bias
    return config.with_(**rules) if rules else config


def forbidden_bias(model: ModelConfig) -> dict[int, float]:
    """The ``logit_bias`` of a model's forbidden tokens."""
    return dict.fromkeys(model.forbidden_ids, -math.inf)


def split_stops(stop: Stop) -> tuple[tuple[str, ...], list[int | Sequence[int]]]:
    """The stop strings, and the other stops: tokens and token sequences."""
    stops = [stop] if isinstance(stop, str | int) else list(stop)
    if any(isinstance(s, str) and not s for s in stops):
        raise ValueError(f"stop={stop!r} holds an empty string, which would end every text before it starts")
    return tuple(s for s in stops if isinstance(s, str)), [s for s in stops if not isinstance(s, str)]


def is_chat(inputs: Any) -> bool:
    """Whether the input is a list of messages, which are dictionaries."""
    return isinstance(inputs, list | tuple) and bool(inputs) and all(isinstance(x, Mapping) for x in inputs)


def split_special_tokens(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int], list[int]]:
    """The special tokens before a text, its own ids, and the special tokens after it."""
    ids = tokenizer.encode(text)
    special = tokenizer.encode("")
    for n_first in range(len(special), -1, -1):
        n_last = len(special) - n_first
        if ids[:n_first] == special[:n_first] and ids[len(ids) - n_last :] == special[n_first:]:
            return ids[:n_first], ids[n_first : len(ids) - n_last], ids[len(ids) - n_last :]
    return [], ids, []


def _require_tokenizer(tokenizer: Tokenizer | None, purpose: str) -> Tokenizer:
    if tokenizer is None:
        hint = "load one with a tokenizer.json next to it, or give token ids"
        raise ValueError(f"this model has no tokenizer for {purpose}: {hint}")
    return tokenizer
