"""Speculative decoding (Leviathan et al. 2023, the greedy case): a small draft model guesses, the model verifies.

draft    d₁ … d_k, one after the other, by the draft model
verify   p(· | …), p(· | … d₁), …, p(· | … d_k) in one pass of the model over its cache
keep     d₁ … d_m before the first that differs from the model's own choice, then the model's choice

Each pass of the model gives m + 1 tokens, the same as without a draft. Wrong guesses are truncated from both caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..foundation.checks import check_positive
from ..models import Model
from ..models.recurrent_cells import StateCache
from .cached_engine import DecodingEngine
from .generation_config import GenerateConfig
from .prompts import Prompts, max_text_length, rope_depends_on_length
from .sampling import ChosenTokens, filter_logits, token_log_probs
from .stop_conditions import GOING_ON, LENGTH, StopStrings, stop_codes


@dataclass(frozen=True)
class DraftStatistics:
    """How many tokens of a draft were accepted."""

    proposed: int = 0  # tokens guessed by the draft
    accepted: int = 0  # guesses that the model chose too
    passes: int = 0  # forward passes of the model

    @property
    def share(self) -> float:
        """Share of the proposed tokens that were accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def __add__(self, other: DraftStatistics) -> DraftStatistics:
        passes = self.passes + other.passes
        return DraftStatistics(self.proposed + other.proposed, self.accepted + other.accepted, passes)


def check_draft(model: Model, draft: Model, config: GenerateConfig, n_tokens: int) -> None:
    """Raise if the two models do not match, or the config is not greedy search."""
    if config.beam > 1 or config.samples:
        option = f"beam={config.beam}" if config.beam > 1 else "sample=True"
        raise ValueError(f"draft needs greedy search with one text per prompt, got {option}")
    if config.cache != "growing":
        raise ValueError(f"draft needs cache='growing' to remove wrong guesses, but cache={config.cache!r}")
    check_positive(draft_tokens=n_tokens)
    ours, theirs = model.config, draft.config
    names = ["source", "vocab_size", "output_vocab_size", "eos_id"]
    for name in names + (["image_size", "n_channels"] if ours.source == "image" else []):
        if getattr(ours, name) != getattr(theirs, name):
            both = f"{getattr(theirs, name)!r}, but the model has {getattr(ours, name)!r}"
            raise ValueError(f"the draft has {name}={both}: both must have the same tokens and inputs")
    if (ours.architecture == "decoder") != (theirs.architecture == "decoder"):
        raise ValueError(f"the draft has architecture={theirs.architecture!r}, but the model {ours.architecture!r}")
    if ours.architecture != "decoder" and max_text_length(theirs) < max_text_length(ours):
        raise ValueError(
            f"the draft reads max_len={max_text_length(theirs)} tokens, but the model {max_text_length(ours)}"
        )
    for side in (model, draft):
        if rope_depends_on_length(side.config):
            raise ValueError("draft does not work with rotary angles that depend on the length of the text")
        if side.config.mixing.recurrent:
            raise ValueError("draft does not work with a state-space model, whose state cannot take back a wrong guess")
        if side.is_recurrent and n_tokens >= StateCache.n_states:
            most = StateCache.n_states - 1
            raise ValueError(f"draft_tokens={n_tokens} is more than the {most} past states a recurrent model keeps")
    if model.device != draft.device:
        raise ValueError(f"the draft is on {draft.device}, but the model on {model.device}")


class SpeculativeDecoder:
    """Yields the decode steps of one text, like ``decode_loop``; ``statistics`` is updated at every step."""

    def __init__(
        self,
        engine: DecodingEngine,
        draft: DecodingEngine,
        n_tokens: int,
        config: GenerateConfig,
        strings: StopStrings | None,
    ) -> None:
        self.engine, self.draft, self.n_tokens, self.config, self.strings = engine, draft, n_tokens, config, strings
        self.eos_id, self.statistics = engine.model.config.eos_id, DraftStatistics()
        self._max_draft = max_text_length(draft.model.config, target=not draft.model.is_decoder_only)
        self._n_cached = 0  # tokens of the text in the draft's cache

    def decode(self, prompts: Prompts) -> Iterator[ChosenTokens]:
        """The steps for a batch of one prompt."""
        texts, limit, step = prompts.texts, int(prompts.limit), 0
        guessed, logits = texts[:, :0], self.engine.prefill(prompts)[:, None]  # (1, 1, V): no guesses yet
        while True:
            self.statistics += DraftStatistics(proposed=guessed.shape[1], passes=1)
            for index in range(logits.shape[1]):
                chosen = self._choose(logits[:, index], texts, step, limit)
                texts, step = torch.cat([texts, chosen.tokens[:, None]], dim=1), step + 1
                accepted = index < guessed.shape[1] and bool(chosen.tokens == guessed[:, index])
                self.statistics += DraftStatistics(accepted=int(accepted))
                yield chosen
                if int(chosen.codes) != GOING_ON:
                    return
                if not accepted:  # a wrong guess, or the token after the last guess
                    break
            self.engine.truncate(texts.shape[1] - 1)
            guessed = self._guess(texts, step, limit - step - 1)
            logits = self.engine.decode_tokens(torch.cat([texts[:, -1:], guessed], dim=1))

    def _choose(self, logits: Tensor, texts: Tensor, step: int, limit: int) -> ChosenTokens:
        """The model's own next token, from logits (1, V)."""
        tokens = filter_logits(logits, texts, step, self.config, self.eos_id).argmax(-1)
        codes = stop_codes(tokens, texts, step + 1, self.config, self.eos_id, self.strings)
        if step + 1 >= limit:
            codes = torch.where(codes == GOING_ON, LENGTH, codes)
        return ChosenTokens(torch.zeros_like(tokens), tokens, token_log_probs(logits, tokens), codes)

    def _guess(self, texts: Tensor, step: int, limit: int) -> Tensor:
        """At most ``limit`` guesses (1, n) of the tokens after ``texts`` (1, L), from new token number ``step`` on."""
        n_text = texts.shape[1]
        limit = min(limit, self.n_tokens, self._max_draft - n_text + 1)  # the last guess is not fed back
        if limit < 1:
            return texts[:, :0]
        self._n_cached = min(self._n_cached, n_text - 1)
        if self._n_cached:
            self.draft.truncate(self._n_cached)
        new, guessed, eos_id = texts[:, self._n_cached :], texts, self.draft.model.config.eos_id
        while True:
            self._n_cached += new.shape[1]
            scores = filter_logits(self.draft.decode_tokens(new)[:, -1], guessed, step, self.config, eos_id)
            new, step = scores.argmax(-1)[:, None], step + 1
            guessed = torch.cat([guessed, new], dim=1)
            if guessed.shape[1] - n_text == limit or int(new) == eos_id:
                return guessed[:, n_text:]
