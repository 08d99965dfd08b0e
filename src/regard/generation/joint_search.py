"""Beam searches that began at different steps, advanced together: one pass over all their logits per step.

Each finds what ``BeamSearch`` finds for its prompt alone. They share a config apart from the limit of new tokens, and
its filters must not depend on the text so far (``can_join``).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .beam_search import Beams, BeamSearch, Hypothesis, Pool
from .generation_config import GenerateConfig
from .prompts import Prompts
from .sampling import reads_text


def can_join(config: GenerateConfig) -> bool:
    """Whether searches with this config can be advanced together, each at its own step."""
    return not config.stop and not reads_text(config)


class SearchStep(NamedTuple):
    """The result of one step for one search."""

    parents: list[int]  # the beam that each beam continues
    tokens: list[int]  # the next token of each beam
    finished: list[Hypothesis] | None  # its texts, once the search is over


class JointSearch:
    """Searches with one config; ``members`` are in the order of the rows of ``advance``."""

    def __init__(self, config: GenerateConfig, eos_id: int | None, max_tokens: int, device: torch.device) -> None:
        self.members: list[Hashable] = []
        self._rules = BeamSearch(None, config, eos_id)
        self._rules.prepare_penalties(max_tokens, device)
        self._beams: Beams | None = None
        self._tables: dict[Hashable, list[tuple[list[int], list[int]]]] = {}  # parents and tokens of each step

    def begin(self, members: Sequence[Hashable], prompts: Sequence[Prompts], logits: Tensor) -> list[SearchStep]:
        """The first step of new searches, given the logits (n, V) after their prompts; adds the unfinished ones."""
        k, limit = self._rules.config.beam, torch.cat([prompt.limit for prompt in prompts])
        no_text = limit.new_zeros(len(limit), 0)
        beams = self._rules.initial_beams(Prompts([prompt.rows[0] for prompt in prompts], no_text, None, limit))
        beams.step = torch.zeros_like(limit)
        self._tables |= {member: [] for member in members}
        steps = self._advance(beams, members, logits.repeat_interleave(k, 0))
        unfinished = [step.finished is None for step in steps]
        if any(unfinished):
            new = _select(beams, unfinished)
            self.members += [member for member, stays in zip(members, unfinished, strict=True) if stays]
            self._beams = new if self._beams is None else _join(self._beams, new)
        return steps

    def advance(self, logits: Tensor) -> list[SearchStep]:
        """One step of every member, given the logits (n · k, V) of their beams; finished ones are removed."""
        assert self._beams is not None
        steps = self._advance(self._beams, self.members, logits)
        self._keep([step.finished is None for step in steps])
        return steps

    def remove(self, member: Hashable) -> None:
        if member in self.members:
            self._keep([other != member for other in self.members])
        self._tables.pop(member, None)

    def _keep(self, kept: list[bool]) -> None:
        if all(kept):
            return
        self.members = [member for member, stays in zip(self.members, kept, strict=True) if stays]
        assert self._beams is not None
        self._beams = _select(self._beams, kept) if self.members else None

    def _advance(self, beams: Beams, members: Sequence[Hashable], logits: Tensor) -> list[SearchStep]:
        k = self._rules.config.beam
        result = self._rules.advance(beams, logits, beams.step)
        is_open = beams.open.any(-1, keepdim=True)
        rows = torch.cat([result.parent, result.token, is_open.long()], 1).tolist()  # (n, 2k + 1), one transfer
        pools = None if all(row[-1] for row in rows) else [x.flatten(1).tolist() for x in beams.pool]
        steps = []
        for number, (member, row) in enumerate(zip(members, rows, strict=True)):
            parents, tokens, finished = row[:k], row[k:-1], None
            table = self._tables[member]
            if not row[-1]:
                assert pools is not None
                finished = self._rules.hypotheses([x[number] for x in pools], table)
                del self._tables[member]
            table.append((parents, tokens))
            steps.append(SearchStep(parents, tokens, finished))
        return steps


def _select(beams: Beams, kept: list[bool]) -> Beams:
    if all(kept):
        return beams
    mask = torch.tensor(kept, device=beams.step.device)
    selected, step = beams.select(mask), beams.step[mask]
    selected.step = step
    return selected


def _join(beams: Beams, new: Beams) -> Beams:
    names = ("step", "prompt", "limit", "texts", "score", "open")
    fields = {name: torch.cat([getattr(beams, name), getattr(new, name)]) for name in names}
    return Beams(**fields, pool=Pool(*(torch.cat(pair) for pair in zip(beams.pool, new.pool, strict=True))))
