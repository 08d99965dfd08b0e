"""Speculative decoding (Leviathan et al. 2023, the greedy case): a small model guesses, the model checks.

draft    d₁ … d_k, one after the other, by the small model
check    p(· | …), p(· | … d₁), …, p(· | … d_k) in one pass of the model over its cache
keep     d₁ … d_m up to the first that is not the model's own choice, and the model's choice in its place

Each pass of the model gives m + 1 tokens, which are those it would have chosen alone: the draft decides how fast a text
comes, never what it says. What it guessed wrong is taken back from both caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..models import Model, Recurrent
from ..models.recurrent.cache import StateCache
from .config import GenerateConfig
from .ending import GOING_ON, LENGTH, endings
from .engine import Engine
from .prompts import Prompts, angles_by_length, longest
from .sampling import filtered
from .stop import StopStrings
from .walk import Chosen


@dataclass(frozen=True)
class Drafted:
    """How much a draft was worth."""

    proposed: int = 0
    """Tokens it guessed."""
    accepted: int = 0
    """Those that the model would have chosen too."""
    passes: int = 0
    """Passes of the model that wrote the texts."""

    @property
    def share(self) -> float:
        """Of the guesses, those accepted."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def __add__(self, other: Drafted) -> Drafted:
        passes = self.passes + other.passes
        return Drafted(self.proposed + other.proposed, self.accepted + other.accepted, passes)


def check_draft(model: Model, draft: Model, config: GenerateConfig, n_tokens: int) -> None:
    """Raise where the two do not go together, or where not greedy search alone is asked for."""
    if config.beam > 1 or config.samples or config.n_best > 1:
        asked = f"beam={config.beam}" if config.beam > 1 else "sample=True" if config.samples else "n_best"
        raise ValueError(f"draft goes with greedy search, one text a prompt; {asked} asks for more")
    if config.cache != "growing":
        raise ValueError(f"draft needs cache='growing' to take guesses back, but cache={config.cache!r}")
    if n_tokens < 1:
        raise ValueError(f"draft_tokens={n_tokens} must be at least 1")
    ours, theirs = model.config, draft.config
    names = ["source", "vocab_size", "output_vocab_size", "eos_id"]
    for name in names + (["image_size", "n_channels"] if ours.source == "image" else []):
        if getattr(ours, name) != getattr(theirs, name):
            both = f"{getattr(theirs, name)!r}, but the model has {getattr(ours, name)!r}"
            raise ValueError(f"the draft has {name}={both}: a draft guesses the model's own tokens")
    if (ours.architecture == "decoder") != (theirs.architecture == "decoder"):
        raise ValueError(f"the draft has architecture={theirs.architecture!r}, but the model {ours.architecture!r}")
    if ours.architecture != "decoder" and longest(theirs) < longest(ours):
        raise ValueError(f"the draft reads max_len={longest(theirs)} tokens, but the model {longest(ours)}")
    for each in (model, draft):
        if angles_by_length(each.config):
            raise ValueError("draft does not go with rotary angles that follow the length of the text")
        if isinstance(each, Recurrent) and n_tokens >= StateCache.kept:
            most = StateCache.kept - 1
            raise ValueError(f"draft_tokens={n_tokens} is more than the {most} states a recurrent model goes back")
    if model.device != draft.device:
        raise ValueError(f"the draft is on {draft.device}, but the model on {model.device}")


class Guesser:
    """The small model, which keeps up with the text."""

    def __init__(self, engine: Engine, model: Model, config: GenerateConfig, n_tokens: int) -> None:
        self.engine, self.config, self.eos_id, self.n_tokens = engine, config, model.config.eos_id, n_tokens
        self.max_len = longest(model.config, target=model.config.architecture != "decoder")
        self._n_held = 0  # tokens in its cache, which are those of the text

    def guess(self, texts: Tensor, step: int, most: int) -> Tensor:
        """What follows ``texts`` (1, L), before new token number ``step``: (1, n), n at most ``most``."""
        n_text = texts.shape[1]
        most = min(most, self.n_tokens, self.max_len - n_text + 1)  # its last guess it need not take in
        if most < 1:
            return texts[:, :0]
        self._n_held = min(self._n_held, n_text - 1)
        if self._n_held:
            self.engine.truncate(self._n_held)
        new, guessed = texts[:, self._n_held :], texts
        while True:
            self._n_held += new.shape[1]
            scores = filtered(self.engine.decode_tokens(new)[:, -1], guessed, step, self.config, self.eos_id)
            new, step = scores.argmax(-1)[:, None], step + 1
            guessed = torch.cat([guessed, new], dim=1)
            if guessed.shape[1] - n_text == most or int(new) == self.eos_id:
                return guessed[:, n_text:]


class Speculation:
    """The steps of one text, as ``walk`` has them; ``drafted`` counts as they come."""

    def __init__(
        self, engine: Engine, guesser: Guesser, config: GenerateConfig, eos_id: int | None, strings: StopStrings | None
    ) -> None:
        self.engine, self.guesser, self.config, self.eos_id, self.strings = engine, guesser, config, eos_id, strings
        self.drafted = Drafted()

    def walk(self, prompts: Prompts) -> Iterator[Chosen]:
        """Of one prompt."""
        texts, limit, step = prompts.texts, int(prompts.limit), 0
        guessed, logits = texts[:, :0], self.engine.prefill(prompts)[:, None]  # (1, 1, V): nothing guessed yet
        while True:
            self.drafted += Drafted(proposed=guessed.shape[1], passes=1)
            for place in range(logits.shape[1]):
                chosen = self._choose(logits[:, place], texts, step, limit)
                texts, step = torch.cat([texts, chosen.tokens[:, None]], dim=1), step + 1
                right = place < guessed.shape[1] and bool(chosen.tokens == guessed[:, place])
                self.drafted += Drafted(accepted=int(right))
                yield chosen
                if int(chosen.codes) != GOING_ON:
                    return
                if not right:  # or the last place, behind all guesses
                    break
            self.engine.truncate(texts.shape[1] - 1)
            guessed = self.guesser.guess(texts, step, limit - step - 1)
            logits = self.engine.decode_tokens(torch.cat([texts[:, -1:], guessed], dim=1))

    def _choose(self, logits: Tensor, texts: Tensor, step: int, limit: int) -> Chosen:
        """The model's own next token, from logits (1, V)."""
        tokens = filtered(logits, texts, step, self.config, self.eos_id).argmax(-1)
        log_probs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        codes = endings(tokens, texts, step + 1, self.config, self.eos_id, self.strings)
        if step + 1 >= limit:
            codes = torch.where(codes == GOING_ON, LENGTH, codes)
        return Chosen(torch.zeros_like(tokens), tokens, log_probs, codes)
