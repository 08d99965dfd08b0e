"""One token after the other without looking back: the most likely one, or one that is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .config import GenerateConfig
from .ending import GOING_ON, LENGTH, endings
from .engine import Engine
from .fast import hastened
from .prompts import Prompts
from .sampling import chances, draw, filtered
from .stop import StopStrings


class Chosen(NamedTuple):
    """One step: for each text still going on, its number, its next token, and what became of it."""

    rows: Tensor  # (n,) prompt · copies + copy
    tokens: Tensor  # (n,)
    log_probs: Tensor  # (n,) of the token, by the model alone, before any filter
    codes: Tensor  # (n,) as in ``ending``


def walk(
    engine: Engine, prompts: Prompts, config: GenerateConfig, eos_id: int | None, strings: StopStrings | None = None
) -> Iterator[Chosen]:
    """The steps of all texts at once, n_best of them for each prompt. No row looks at another."""
    copies = config.n_best
    rows = torch.arange(len(prompts) * copies, device=prompts.tokens.device)
    limit, texts = prompts.limit.repeat_interleave(copies), prompts.texts.repeat_interleave(copies, 0)
    chance = chances(config, len(prompts), copies).to(rows.device) if config.samples else None
    done = torch.zeros_like(rows, dtype=torch.bool)
    engine = hastened(engine)
    logits = engine.prefill(prompts, copies)
    for step in range(int(limit.max())):
        scores = filtered(logits, texts, step, config, eos_id)
        tokens = scores.argmax(-1) if chance is None else draw(scores, chance[rows, step])
        log_probs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
        codes = endings(tokens, texts, step + 1, config, eos_id, strings)
        codes = torch.where((codes == GOING_ON) & (step + 1 >= limit), LENGTH, codes)
        chosen = Chosen(rows, tokens, log_probs, codes)
        yield Chosen(*(x[~done] for x in chosen)) if engine.static else chosen  # elsewhere what is done has left
        texts = torch.cat([texts, tokens[:, None]], dim=1)
        done = done | (codes != GOING_ON)
        if done.all():
            return
        if not engine.static and done.any():
            left = (~done).nonzero()[:, 0]
            engine.select(left)
            rows, limit, texts, tokens, done = (x[left] for x in (rows, limit, texts, tokens, done))
        logits = engine.decode_one_token(tokens)
