"""Output constrained to a JSON schema or a regular expression: llguidance computes the tokens that may come next."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..foundation.plugins import import_optional
from ..generation.text_codec import ModelTokenizers
from .request_bodies import ResponseFormat


class _TokenBytes:
    """A tokenizer in the form that llguidance takes: the bytes of every token."""

    def __init__(self, codec: ModelTokenizers, n_tokens: int, eos_id: int) -> None:
        tokenizer = codec.target
        token_bytes = [tokenizer.token_bytes(index) for index in range(n_tokens)]
        self.eos_token_id, self.bos_token_id = eos_id, codec.config.bos_id
        # llguidance marks special tokens with \xff, which keeps them from matching any text.
        self.tokens = [b"\xff<%d>" % index if spelled is None else spelled for index, spelled in enumerate(token_bytes)]
        self.special_token_ids = [index for index, spelled in enumerate(token_bytes) if spelled is None]
        self._encode = tokenizer.encode
        self._ids = {spelled: index for index, spelled in enumerate(self.tokens)}

    def __call__(self, text: bytes) -> list[int]:
        """The tokens of a text: the tokenizer's own if they spell it, else the longest ones.

        SentencePiece begins a text with a space, and llguidance would force that space upon the next token.
        """
        ids = self._encode(text.decode("utf-8", "replace"), special=False)
        if b"".join(self.tokens[index] for index in ids) == text:
            return ids
        ids = []
        while n := next((n for n in range(len(text), 0, -1) if text[:n] in self._ids), 0):
            ids.append(self._ids[text[:n]])
            text = text[n:]
        return ids


class Grammars:
    """Compiles response formats for one model's tokenizer."""

    def __init__(self, codec: ModelTokenizers) -> None:
        llguidance = import_optional("llguidance", "response_format", "api")
        n_tokens, eos_id = codec.config.output_vocab_size, codec.config.eos_id
        if eos_id is None:
            raise ValueError("response_format needs an end token, which this model does not have")
        tokens = llguidance.TokenizerWrapper(_TokenBytes(codec, n_tokens, eos_id))
        self._tokenizer = llguidance.LLTokenizer(tokens, n_vocab=n_tokens)

    def new_constraint(self, format_: ResponseFormat) -> Callable[[], GrammarConstraint]:
        """Compile a format other than "text"; returns a function that makes a constraint for each text.

        Raises ValueError if the grammar is invalid.
        """
        from llguidance import LLMatcher

        if format_.type == "regex":
            if format_.pattern is None:
                raise ValueError("response_format of type regex needs a pattern")
            grammar = LLMatcher.grammar_from_regex(format_.pattern)
        elif format_.type == "json_object":
            grammar = LLMatcher.grammar_from_json_schema({"type": "object"})
        elif format_.json_schema is None:
            raise ValueError("response_format of type json_schema needs json_schema")
        else:
            grammar = LLMatcher.grammar_from_json_schema(json.dumps(format_.json_schema.schema_))
        first = LLMatcher(self._tokenizer, grammar)
        if first.is_error():
            raise ValueError(f"response_format is invalid: {' '.join(first.get_error().split())[:300]}")
        return lambda: GrammarConstraint(first.deep_copy())


class GrammarConstraint:
    """The state of a grammar within one text: which tokens may come next."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def is_finished(self) -> bool:
        return bool(self._matcher.is_stopped())

    def forbid(self, logits: Tensor) -> Tensor:
        """Return logits (1, V) with -inf for the tokens that may not come next."""
        n_tokens = logits.shape[-1]
        bits = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[:n_tokens].bool()
        return logits.masked_fill(~allowed.to(logits.device), -torch.inf)

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise ValueError(f"the grammar rejects a token: {' '.join(self._matcher.get_error().split())[:200]}")
