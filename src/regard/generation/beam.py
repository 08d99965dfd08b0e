"""Beam search: several beginnings of a text followed at once, finished texts put aside where nothing can push them out.

score(Y) = log P(Y | X) / penalty(|Y|)                                              (Wu et al. 2016, eq. 14)

At each step the best 2k continuations of a prompt's k beams are looked at. Those among the best k that end go to the
pool of the k best finished texts; the best k that go on are the next beams. Beams are never copied around: a table says
which beam each came from, and a text is read off it backwards. Groups are searches of k / groups beams each, one after
the other at every step, each steered away from the tokens of those before it (Vijayakumar et al. 2018, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .config import GenerateConfig
from .ending import END, GOING_ON, LENGTH, endings
from .engine import Engine
from .fast import hastened
from .fast_top import top as best_of
from .prompts import Prompts
from .sampling import filtered
from .stop import StopStrings

_NEAR = 2**20  # numbers that fit into a core's own cache
_STRING_ENDS = 6  # tokens of a beam that may complete a stop string at one step, before it has fewer continuations


class Found(NamedTuple):
    """A finished text: its tokens, the beam each was chosen from, the score, and why it ended (``ending``)."""

    tokens: list[int]
    beams: list[int]
    score: float
    code: int


class Candidates(NamedTuple):
    """Continuations of one group, best first, each field (B, n)."""

    score: Tensor  # log P so far
    steered: Tensor  # the same less the price of repeating earlier groups, by which they are ordered
    beam: Tensor  # which of the prompt's beams goes on
    token: Tensor
    code: Tensor  # as in ``ending``

    def take(self, index: Tensor) -> Candidates:
        return Candidates(*(x.gather(-1, index) for x in self))


class Step(NamedTuple):
    """What one step kept of each prompt (B,) still searched for: the beams that go on, and the texts that ended.

    Each field (B, beam); a score is log P so far, -inf where there is no such beam or text.
    """

    prompt: Tensor  # (B,) its number
    parent: Tensor  # which beam it goes on from
    token: Tensor
    score: Tensor
    ended_parent: Tensor
    ended_token: Tensor
    ended_score: Tensor

    def of(self, prompt: int) -> Iterator[tuple[int | None, int, int, float]]:
        """What is there of one prompt: (beam, or None of a text that ended, parent, token, score)."""
        for row in (self.prompt == prompt).nonzero()[:, 0].tolist():
            going, ended = (zip(*(x[row].tolist() for x in part), strict=True) for part in (self[1:4], self[4:]))
            found = [*((None, *text) for text in ended), *((beam, *text) for beam, text in enumerate(going))]
            yield from (each for each in found if each[-1] > -math.inf)


class Best(NamedTuple):
    """The same before it is known what they are: ``place`` is beam · V + token."""

    score: Tensor
    steered: Tensor
    place: Tensor


class Pool(NamedTuple):
    """The best finished texts, best first, each field (B, groups, k): where they end in the table, and how."""

    score: Tensor  # -inf where there is none yet
    step: Tensor
    beam: Tensor
    token: Tensor
    code: Tensor


@dataclass
class Beams:
    """The prompts still searched for; what is dropped as soon as one is done."""

    prompt: Tensor  # (B,) its number
    limit: Tensor  # (B,)
    texts: Tensor  # (B, k · groups, L) tokens so far
    score: Tensor  # (B, groups, k) log P of each beam; -inf: no such beam
    open: Tensor  # (B, groups) whether its pool may still change
    pool: Pool

    def rows(self, left: Tensor) -> Beams:
        prompt, limit, texts = self.prompt[left], self.limit[left], self.texts[left]
        return Beams(prompt, limit, texts, self.score[left], self.open[left], Pool(*(x[left] for x in self.pool)))


class Search:
    """One search over all prompts; ``parents`` and ``tokens`` (steps, B, beam) are the table, ``steps`` all it kept."""

    def __init__(
        self, engine: Engine, config: GenerateConfig, eos_id: int | None, strings: StopStrings | None = None
    ) -> None:
        self.engine, self.config, self.eos_id, self.strings = hastened(engine), config, eos_id, strings
        self.size = config.beam // config.groups
        ends = {stop[-1] for stop in config.stop} | ({eos_id} if eos_id is not None else set())
        # Enough that as many go on even if every beam's best continuations end.
        n_ends = len(ends) + (0 if strings is None else _STRING_ENDS)
        self.n_candidates = max(2, 1 + n_ends) * self.size

    def run(self, prompts: Prompts) -> list[list[Found]]:
        """The n_best texts of each prompt."""
        n, k, device = len(prompts), self.config.beam, prompts.tokens.device
        self.parents = torch.zeros(int(prompts.limit.max()), n, k, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.parents)
        self.steps: list[Step] = []
        beams = self._first(prompts)
        found: list[list[Found]] = [[] for _ in range(n)]
        logits = self.engine.prefill(prompts, copies=k)
        for step in range(len(self.parents)):
            nexts, ended = self._step(beams, logits, step)
            parent, token = (torch.cat([getattr(c, name) for c in nexts], -1) for name in ("beam", "token"))  # (B, k)
            self.parents[step, beams.prompt], self.tokens[step, beams.prompt] = parent, token
            score = torch.stack([c.score for c in nexts], 1)
            texts = (x.flatten(1) for x in (score, ended.beam, ended.token, ended.score))
            self.steps.append(Step(beams.prompt, parent, token, *texts))
            done = ~beams.open.any(-1)
            if done.all() or (done.any() and not self.engine.static):
                self._collect(beams.rows(done), found)
            if done.all():
                break
            rows = torch.arange(len(done), device=device)[:, None] * k + parent
            beams.score = score
            beams.texts = torch.cat([beams.texts.flatten(0, 1)[rows], token[..., None]], -1)
            if not self.engine.static:
                beams, rows, token = beams.rows(~done), rows[~done], token[~done]
            self.engine.select(rows.flatten())
            logits = self.engine.decode_one_token(token.flatten())
        return found

    def _first(self, prompts: Prompts) -> Beams:
        shape, device = (len(prompts), self.config.groups, self.size), prompts.tokens.device
        score = torch.full(shape, -math.inf, device=device)
        nothing = torch.zeros(shape, dtype=torch.int64, device=device)
        pool = Pool(score, nothing, nothing, nothing, nothing)
        score = score.index_fill(2, torch.tensor([0], device=device), 0.0)  # one beginning a group, not k equal ones
        texts = prompts.texts[:, None].expand(-1, self.config.beam, -1)
        open_ = torch.ones(shape[:2], dtype=torch.bool, device=device)
        return Beams(torch.arange(len(prompts), device=device), prompts.limit, texts, score, open_, pool)

    def _step(self, beams: Beams, logits: Tensor, step: int) -> tuple[list[Candidates], Candidates]:
        """Each group's next beams, and the texts that ended, which go to the pools."""
        n, n_groups, k = beams.score.shape
        logits, texts = (x.reshape(n, n_groups, k, -1) for x in (logits, beams.texts))
        price = torch.zeros_like(logits[:, 0, 0]) if n_groups > 1 else None  # (B, V)
        at_limit = (step + 1 >= beams.limit)[:, None]
        nexts: list[Candidates] = []
        finished: list[Candidates] = []
        for group in range(n_groups):
            best = self._candidates(logits[:, group], texts[:, group], beams.score[:, group], price, step, group)
            ends = best.code != GOING_ON
            going = best._replace(score=best.score.masked_fill(ends, -math.inf))  # what has ended goes on as no beam
            nexts.append(going.take(best.steered.masked_fill(ends, -math.inf).topk(k).indices))
            top = Candidates(*(x[:, :k] for x in best))
            score = top.score.masked_fill(~(ends[:, :k] | at_limit), -math.inf)
            finished.append(top._replace(score=score, code=torch.where(ends[:, :k], top.code, LENGTH)))
            if price is None:
                break
            cost = beams.open[:, group, None] * self.config.diversity_penalty  # a group that is done is in no one's way
            price.scatter_add_(1, nexts[-1].token, cost.expand_as(nexts[-1].score))
            price.scatter_add_(1, top.token, cost * ends[:, :k])
        new = Candidates(*(torch.stack(parts, 1) for parts in zip(*finished, strict=True)))
        beams.pool = self._merged(beams, new, step)
        best_going = torch.stack([c.score.amax(-1) for c in nexts], 1)  # (B, groups)
        beams.open = beams.open & ~at_limit & self._may_improve(beams, best_going, step + 1)
        return nexts, new

    def _candidates(
        self, logits: Tensor, texts: Tensor, so_far: Tensor, price: Tensor | None, step: int, group: int
    ) -> Candidates:
        """The best continuations of one group's beams, from logits (B, k, V) after log P ``so_far`` (B, k)."""
        n, k, n_tokens = logits.shape
        if logits.device.type == "cpu":
            best, tied = self._beam_by_beam(logits, texts, so_far, price, step)
            again = tied.nonzero()[:, 0]
            if len(again):
                some = None if price is None else price[again]
                exact = self._all_beams(logits[again], texts[again], so_far[again], some, step)
                best = Best(*(x.index_copy(0, again, y) for x, y in zip(best, exact, strict=True)))
        else:
            best = self._all_beams(logits, texts, so_far, price, step)
        beam, token = best.place // n_tokens, best.place % n_tokens
        rows = torch.arange(n, device=beam.device)[:, None]
        looked_at = self.config.stop or self.strings is not None
        before = texts[rows, beam].flatten(0, 1) if looked_at else texts[:1, 0]
        code = endings(token.flatten(), before, step + 1, self.config, self.eos_id, self.strings).view_as(token)
        return Candidates(best.score, best.steered, beam + group * k, token, code)

    def _all_beams(self, logits: Tensor, texts: Tensor, so_far: Tensor, price: Tensor | None, step: int) -> Best:
        """The best among all tokens of all beams, as they are sorted."""
        n, k, n_tokens = logits.shape
        scores = filtered(logits.log_softmax(-1).flatten(0, 1), texts.flatten(0, 1), step, self.config, self.eos_id)
        scores = (scores.view(n, k, -1) + so_far[..., None]).flatten(1)  # (B, k · V)
        steered = scores if price is None else (scores.view(n, k, -1) - price[:, None]).flatten(1)
        steered, index = steered.topk(min(self.n_candidates, k * n_tokens))
        return Best(scores.gather(1, index), steered, index)

    def _beam_by_beam(
        self, logits: Tensor, texts: Tensor, so_far: Tensor, price: Tensor | None, step: int
    ) -> tuple[Best, Tensor]:
        """The same by way of each beam's own best, and of which prompts (B,) it is not: two sums may round to one.

        A few prompts at a time, so that what lies between logits and tokens stays in a core's own cache.
        """
        n, k, n_tokens = logits.shape
        n_best = min(self.n_candidates + 1, n_tokens)  # of one beam as many as of all: they may all be its own
        at_once = max(1, _NEAR // (k * n_tokens))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for some in (slice(start, start + at_once) for start in range(0, n, at_once)):
            scores = logits[some].flatten(0, 1).log_softmax(-1)
            scores = filtered(scores, texts[some].flatten(0, 1), step, self.config, self.eos_id, in_place=True)
            steered, token = best_of(scores if price is None else scores - price[some].repeat_interleave(k, 0), n_best)
            parts.append((steered if price is None else scores.gather(1, token), steered, token))
        score, steered, token = (torch.cat(part).view(n, k, n_best) for part in zip(*parts, strict=True))
        score, steered = ((x + so_far[..., None]).flatten(1) for x in (score, steered))
        index = (token + torch.arange(k)[:, None] * n_tokens).flatten(1)
        steered, order = steered.topk(min(self.n_candidates + 1, k * n_best))  # one more, to see whether it is a tie
        tied = ((steered[:, 1:] == steered[:, :-1]) & steered[:, 1:].isfinite()).any(1)
        order = order[:, : self.n_candidates]
        return Best(score.gather(1, order), steered[:, : self.n_candidates], index.gather(1, order)), tied

    def _merged(self, beams: Beams, new: Candidates, step: int) -> Pool:
        """The pools with what just finished, where they are open: the best stay."""
        score = (new.score / self.config.penalty(step + 1)).masked_fill(~beams.open[..., None], -math.inf)
        here = Pool(score, torch.full_like(new.token, step), new.beam, new.token, new.code)
        both = Pool(*(torch.cat(pair, -1) for pair in zip(beams.pool, here, strict=True)))
        order = both.score.argsort(dim=-1, descending=True, stable=True)
        if self.config.ended_first:
            by_itself = (both.code >= END) & both.score.isfinite()
            order = order.gather(-1, by_itself.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True))
        return Pool(*(x.gather(-1, order[..., : self.size]) for x in both))

    def _may_improve(self, beams: Beams, best: Tensor, n_tokens: int) -> Tensor:
        """(B, groups): whether going on can still change a pool, as transformers judges it."""
        config, worst = self.config, beams.pool.score[..., -1]
        full = worst.isfinite()
        if config.early_stopping is True:
            return ~full & best.isfinite()
        lengths = beams.limit.tolist() if config.early_stopping == "never" and config.length_penalty > 0 else [n_tokens]
        penalty = torch.tensor([config.penalty(n) for n in lengths], device=best.device)[:, None]
        return best.isfinite() & (~full | (best / penalty > worst))

    def _collect(self, beams: Beams, found: list[list[Found]]) -> None:
        """The best texts of prompts that are done, of all their groups."""
        steps = int(beams.pool.step.max())
        parents, tokens = (x[:steps, beams.prompt].tolist() for x in (self.parents, self.tokens))
        flat = [x.flatten(1).tolist() for x in beams.pool]  # each (B, groups · k)
        for place, prompt in enumerate(beams.prompt.tolist()):
            table = [(parent[place], token[place]) for parent, token in zip(parents, tokens, strict=True)]
            texts = [read_back(table, *entry) for entry in zip(*(x[place] for x in flat), strict=True)]
            texts = [text for text in texts if text.score > -math.inf]
            first = self.config.ended_first
            texts.sort(key=lambda text: (first and text.code >= END, text.score), reverse=True)
            found[prompt] = texts[: self.config.n_best]


def read_back(
    table: list[tuple[list[int], list[int]]], score: float, step: int, beam: int, token: int, code: int
) -> Found:
    """A text read off one prompt's table, (parents, tokens) of each step, from its last token to its first."""
    beams, tokens = [beam], [token]
    for parents, chosen in reversed(table[:step]):
        tokens.append(chosen[beam])
        beam = parents[beam]
        beams.append(beam)
    return Found(tokens[::-1], beams[::-1], score, code)
