"""Why a text ends: its own end token, a stop sequence, or no more room."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from .config import GenerateConfig
from .stop import StopStrings

Finish = Literal["end", "stop", "length"]
GOING_ON, LENGTH = -1, 0
END, TEXT, STOP = 1, 2, 3  # the end token, a stop string; stop sequence number n has the code STOP + n


def endings(
    tokens: Tensor,
    texts: Tensor,
    n_new: int,
    config: GenerateConfig,
    eos_id: int | None,
    strings: StopStrings | None = None,
) -> Tensor:
    """Codes (R,) for tokens (R,) after ``texts`` (R, L): GOING_ON, END, TEXT, or STOP and the number of the sequence.

    ``n_new`` counts new tokens, this one included: a stop sequence lies among them, never in the prompt.
    """
    codes = torch.full_like(tokens, GOING_ON)
    if n_new >= config.min_new_tokens:
        for number, stop in sorted(enumerate(config.stop), key=lambda one: len(one[1])):  # of several, the longest
            before = torch.tensor(stop[:-1], dtype=tokens.dtype, device=tokens.device)
            if n_new >= len(stop):
                found = (tokens == stop[-1]) & (texts[:, texts.shape[1] - len(before) :] == before).all(-1)
                codes = torch.where(found, STOP + number, codes)
    if strings is not None:
        codes = torch.where(strings.found(tokens, texts, n_new), TEXT, codes)
    return codes if eos_id is None else torch.where(tokens == eos_id, END, codes)


def finish_of(code: int, config: GenerateConfig) -> tuple[Finish, int]:
    """The reason in words, and how many tokens at the end are there only to say so."""
    if code == LENGTH:
        return "length", 0
    if code == TEXT:
        return "stop", 0  # the string may begin in the middle of a token
    return ("end", 1) if code == END else ("stop", len(config.stop[code - STOP]))
