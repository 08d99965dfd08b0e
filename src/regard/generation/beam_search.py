"""Beam search with a length penalty, a pool of finished texts, and diverse groups.

score(Y) = log P(Y | X) / length_penalty(|Y|)                                       (Wu et al. 2016, eq. 14)

At each step the best 2k continuations of a prompt's k beams are considered. Those among the best k that end go to the
pool of the k best finished texts; the best k that go on are the next beams. A table of parents says which beam each
came from, and a text is read off it backwards. Groups are searches of k / groups beams each, one after the other at
every step, each penalised for the tokens of the groups before it (Vijayakumar et al. 2018, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..foundation.cancellation import check_cancelled
from .cached_engine import DecodingEngine
from .cpu_engine import accelerate
from .decode_step import ops_for
from .generation_config import GenerateConfig
from .prompts import Prompts
from .sampling import filter_logits, has_filters
from .stop_conditions import END, GOING_ON, LENGTH, Finish, StopStrings, finish_reason, stop_codes

_CORE_CACHE = 2**20  # numbers that fit into the cache of a CPU core
_STRING_ENDS = 6  # continuations of a beam that may complete a stop string at one step without narrowing the search
_BLOCK = 64
_MIN_BLOCKS = 8  # per block that is looked into, for ``block_topk`` to be faster than topk

# The best continuations of a group, (B, n) each: score and diverse as in ``Candidates``, and beam · V + token.
TopScores = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """One text: new tokens only, those that end it included."""

    tokens: list[int]
    score: float  # log P / length penalty; of a beam after the filters, otherwise by the model alone
    finish: Finish  # the end token, a stop sequence, or the limit
    n_ending: int  # how many of the last tokens are the end token or the stop sequence
    beams: list[int]  # for each token the beam, 0 … beam - 1, whose logits it was chosen from

    @classmethod
    def of(cls, tokens: list[int], beams: list[int], score: float, code: int, config: GenerateConfig) -> Hypothesis:
        """A text that ended with a code of ``stop_conditions``."""
        return cls(tokens, score, *finish_reason(code, config), beams)

    @property
    def content(self) -> list[int]:
        """The tokens without the end token or stop sequence."""
        return self.tokens[: len(self.tokens) - self.n_ending]


class Candidates(NamedTuple):
    """Continuations of one group, best first, each field (B, n)."""

    score: Tensor  # log P so far
    diverse: Tensor  # score minus the penalty for tokens of earlier groups, by which they are ordered
    beam: Tensor  # which of the prompt's beams is continued
    token: Tensor
    code: Tensor  # as in ``stop_conditions``

    def gather(self, index: Tensor) -> Candidates:
        return Candidates(*(x.gather(-1, index) for x in self))


class BeamStep(NamedTuple):
    """What one step kept of each unfinished prompt (B,): the beams that go on, and the texts that ended.

    Each field (B, beam); a score is log P so far, -inf where there is no such beam or text.
    """

    prompt: Tensor  # (B,) its number
    parent: Tensor  # the beam that was continued
    token: Tensor
    score: Tensor
    ended_parent: Tensor
    ended_token: Tensor
    ended_score: Tensor

    def of(self, prompt: int) -> Iterator[tuple[int | None, int, int, float]]:
        """The entries of one prompt: (beam, or None for a text that ended, parent, token, score)."""
        for row in (self.prompt == prompt).nonzero()[:, 0].tolist():
            going, ended = (zip(*(x[row].tolist() for x in part), strict=True) for part in (self[1:4], self[4:]))
            entries = [*((None, *text) for text in ended), *((beam, *text) for beam, text in enumerate(going))]
            yield from (entry for entry in entries if entry[-1] > -math.inf)


class Pool(NamedTuple):
    """The best finished texts, best first, each field (B, groups, k): where they end in the parent table, and how."""

    score: Tensor  # -inf where there is none yet
    step: Tensor
    beam: Tensor
    token: Tensor
    code: Tensor


@dataclass
class Beams:
    """The state of the prompts that are not finished."""

    step: Tensor  # (1,) how many steps are done
    prompt: Tensor  # (B,) its number
    limit: Tensor  # (B,)
    texts: Tensor  # (B, k · groups, L) tokens so far
    score: Tensor  # (B, groups, k) log P of each beam; -inf: no such beam
    open: Tensor  # (B, groups) whether its pool may still change
    pool: Pool

    def select(self, mask: Tensor) -> Beams:
        prompt, limit, texts = self.prompt[mask], self.limit[mask], self.texts[mask]
        return Beams(
            self.step, prompt, limit, texts, self.score[mask], self.open[mask], Pool(*(x[mask] for x in self.pool))
        )


class BeamSearch:
    """One search over all prompts. ``parents`` and ``tokens`` (steps, B, beam) are its table, ``steps`` its record."""

    def __init__(
        self, engine: DecodingEngine, config: GenerateConfig, eos_id: int | None, strings: StopStrings | None = None
    ) -> None:
        self.engine, self.config, self.eos_id, self.strings = accelerate(engine), config, eos_id, strings
        self.size = self.pool_size = config.beam // config.groups
        ends = {stop[-1] for stop in config.stop} | ({eos_id} if eos_id is not None else set())
        # Enough that k go on even if the best continuations of every beam end.
        self.n_ends = len(ends) + (0 if strings is None else _STRING_ENDS)
        self.n_candidates = max(2, 1 + self.n_ends) * self.size

    def prepare_penalties(self, max_tokens: int, device: torch.device) -> None:
        """Compute the length penalties of texts of up to ``max_tokens`` tokens."""
        values = [1.0, *(self.config.length_penalty_at(n) for n in range(1, max_tokens + 1))]
        self._penalties = torch.tensor(values, device=device)

    def run(self, prompts: Prompts) -> list[list[Hypothesis]]:
        """The n_best texts of each prompt."""
        n, k, device = len(prompts), self.config.beam, prompts.tokens.device
        self.parents = torch.zeros(int(prompts.limit.max()), n, k, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.parents)
        self.steps: list[BeamStep] = []
        self.prepare_penalties(len(self.parents), device)
        beams = self.initial_beams(prompts)
        finished: list[list[Hypothesis]] = [[] for _ in range(n)]
        logits = self.engine.prefill(prompts, copies=k)
        for step in range(len(self.parents)):
            check_cancelled()
            taken = self.advance(beams, logits, step)
            parent, token = taken.parent, taken.token  # (B, k)
            self.parents[step, beams.prompt], self.tokens[step, beams.prompt] = parent, token
            self.steps.append(taken)
            done = ~beams.open.any(-1)
            if done.all() or (done.any() and not self.engine.static):
                self.collect(beams.select(done), finished)
            if done.all():
                break
            rows = torch.arange(len(done), device=device)[:, None] * k + parent
            beams.texts = torch.cat([beams.texts.flatten(0, 1)[rows], token[..., None]], -1)
            if not self.engine.static:
                beams, rows, token = beams.select(~done), rows[~done], token[~done]
            self.engine.select(rows.flatten())
            logits = self.engine.decode_one_token(token.flatten())
        return finished

    def initial_beams(self, prompts: Prompts) -> Beams:
        shape, device = (len(prompts), self.config.groups, self.size), prompts.tokens.device
        score = torch.full(shape, -math.inf, device=device)
        zeros = torch.zeros(shape, dtype=torch.int64, device=device)
        pool = Pool(score, zeros, zeros, zeros, zeros)
        score = score.index_fill(2, torch.tensor([0], device=device), 0.0)  # one beam a group, not k equal ones
        texts = prompts.texts[:, None].expand(-1, self.config.beam, -1)
        open_ = torch.ones(shape[:2], dtype=torch.bool, device=device)
        numbers, step = torch.arange(len(prompts), device=device), torch.zeros(1, dtype=torch.int64, device=device)
        return Beams(step, numbers, prompts.limit, texts, score, open_, pool)

    def advance(self, beams: Beams, logits: Tensor, step: int | Tensor) -> BeamStep:
        """The next beams of each prompt, and the texts that ended, which go to the pools; ``beams`` holds both then.

        ``step`` is beams.step as a number where that is known: some filters go by it.
        """
        nexts, ended = self._advance(beams, logits, step)
        parent, token = (torch.cat([getattr(c, name) for c in nexts], -1) for name in ("beam", "token"))  # (B, k)
        beams.score, beams.step = torch.stack([c.score for c in nexts], 1), beams.step + 1
        texts = (x.flatten(1) for x in (beams.score, ended.beam, ended.token, ended.score))
        return BeamStep(beams.prompt, parent, token, *texts)

    def _advance(self, beams: Beams, logits: Tensor, step: int | Tensor) -> tuple[list[Candidates], Candidates]:
        """The next beams of each group, and the texts that ended."""
        n, n_groups, k = beams.score.shape
        logits, texts = (x.reshape(n, n_groups, k, -1) for x in (logits, beams.texts))
        price = torch.zeros_like(logits[:, 0, 0]) if n_groups > 1 else None  # (B, V)
        at_limit = (beams.step + 1 >= beams.limit)[:, None]
        nexts: list[Candidates] = []
        finished: list[Candidates] = []
        for group in range(n_groups):
            best = self._candidates(logits[:, group], texts[:, group], beams.score[:, group], price, step, group)
            ends = best.code != GOING_ON
            going = best._replace(score=best.score.masked_fill(ends, -math.inf))  # a text that ended is no beam
            nexts.append(going.gather(best.diverse.masked_fill(ends, -math.inf).topk(k).indices))
            top = Candidates(*(x[:, :k] for x in best))
            score = top.score.masked_fill(~(ends[:, :k] | at_limit), -math.inf)
            finished.append(top._replace(score=score, code=torch.where(ends[:, :k], top.code, LENGTH)))
            if price is None:
                break
            cost = beams.open[:, group, None] * self.config.diversity_penalty  # finished groups cost nothing
            price.scatter_add_(1, nexts[-1].token, cost.expand_as(nexts[-1].score))
            price.scatter_add_(1, top.token, cost * ends[:, :k])
        new = Candidates(*(torch.stack(parts, 1) for parts in zip(*finished, strict=True)))
        beams.pool = self._update_pool(beams, new)
        best_going = torch.stack([c.score.amax(-1) for c in nexts], 1)  # (B, groups)
        beams.open = beams.open & ~at_limit & self._may_improve(beams, best_going)
        return nexts, new

    def _candidates(
        self, logits: Tensor, texts: Tensor, past: Tensor, price: Tensor | None, step: int | Tensor, group: int
    ) -> Candidates:
        """The best continuations of one group's beams, from logits (B, k, V) and log P so far, ``past`` (B, k)."""
        n, k, n_tokens = logits.shape
        if logits.device.type == "cpu":
            best, tied = self._topk_per_beam(logits, texts, past, price, step)
            ties = tied.nonzero()[:, 0]
            if len(ties):
                exact = self._topk(logits[ties], texts[ties], past[ties], None if price is None else price[ties], step)
                for values, exact_values in zip(best, exact, strict=True):
                    values.index_copy_(0, ties, exact_values)
        elif price is None and not has_filters(self.config, step):
            best = self._topk_of_each(logits, past)
        else:
            best = self._topk(logits, texts, past, price, step)
        score, diverse, index = best
        beam, token = index // n_tokens, index % n_tokens
        rows = torch.arange(n, device=beam.device)[:, None]
        reads_text = self.config.stop or self.strings is not None
        before = texts[rows, beam].flatten(0, 1) if reads_text else texts[:1, 0]
        code = stop_codes(token.flatten(), before, step + 1, self.config, self.eos_id, self.strings).view_as(token)
        return Candidates(score, diverse, beam + group * k, token, code)

    def _topk(self, logits: Tensor, texts: Tensor, past: Tensor, price: Tensor | None, step: int | Tensor) -> TopScores:
        """The best of all tokens of all beams, sorted together."""
        n, k, n_tokens = logits.shape
        scores = filter_logits(
            logits.log_softmax(-1, dtype=torch.float32).flatten(0, 1),
            texts.flatten(0, 1),
            step,
            self.config,
            self.eos_id,
        )
        scores = (scores.view(n, k, -1) + past[..., None]).flatten(1)  # (B, k · V)
        diverse = scores if price is None else (scores.view(n, k, -1) - price[:, None]).flatten(1)
        diverse, index = diverse.topk(min(self.n_candidates, k * n_tokens))
        return scores.gather(1, index), diverse, index

    def _topk_of_each(self, logits: Tensor, past: Tensor) -> TopScores:
        """The same without filters and price: the best tokens of each beam, then the best of those."""
        n, k, n_tokens = logits.shape
        score, token = ops_for(logits).best_tokens(logits.flatten(0, 1), min(self.n_candidates, n_tokens))
        index = token.view(n, k, -1) + torch.arange(k, device=token.device)[:, None] * n_tokens
        score = (score.view(n, k, -1) + past[..., None]).flatten(1)
        score, order = score.topk(min(self.n_candidates, score.shape[1]))
        return score, score, index.flatten(1).gather(1, order)

    def _topk_per_beam(
        self, logits: Tensor, texts: Tensor, past: Tensor, price: Tensor | None, step: int | Tensor
    ) -> tuple[TopScores, Tensor]:
        """The same from the best of each beam, and for which prompts (B,) ties make the order uncertain: two sums may
        round to one.

        A few prompts at a time, so that intermediate results stay in the cache of a core.
        """
        n, k, n_tokens = logits.shape
        n_best = min(self.n_candidates + 1, n_tokens)  # they may all come from one beam
        at_once = max(1, _CORE_CACHE // (k * n_tokens))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for some in (slice(start, start + at_once) for start in range(0, n, at_once)):
            scores = logits[some].flatten(0, 1).log_softmax(-1)
            scores = filter_logits(scores, texts[some].flatten(0, 1), step, self.config, self.eos_id, in_place=True)
            diverse, token = block_topk(
                scores if price is None else scores - price[some].repeat_interleave(k, 0), n_best
            )
            parts.append((diverse if price is None else scores.gather(1, token), diverse, token))
        score, diverse, token = (torch.cat(part).view(n, k, n_best) for part in zip(*parts, strict=True))
        score, diverse = ((x + past[..., None]).flatten(1) for x in (score, diverse))
        index = (token + torch.arange(k)[:, None] * n_tokens).flatten(1)
        diverse, order = diverse.topk(min(self.n_candidates + 1, k * n_best))  # one more, to detect a tie
        tied = ((diverse[:, 1:] == diverse[:, :-1]) & diverse[:, 1:].isfinite()).any(1)
        order = order[:, : self.n_candidates]
        return (score.gather(1, order), diverse[:, : self.n_candidates], index.gather(1, order)), tied

    def _update_pool(self, beams: Beams, new: Candidates) -> Pool:
        """The open pools with the texts that just finished, reduced to the best."""
        score = (new.score / self._penalties[beams.step + 1]).masked_fill(~beams.open[..., None], -math.inf)
        finished = Pool(score, beams.step.expand_as(new.token), new.beam, new.token, new.code)
        both = Pool(*(torch.cat(pair, -1) for pair in zip(beams.pool, finished, strict=True)))
        order = both.score.argsort(dim=-1, descending=True, stable=True)
        if self.config.ended_first:
            ended = (both.code >= END) & both.score.isfinite()
            order = order.gather(-1, ended.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True))
        return Pool(*(x.gather(-1, order[..., : self.pool_size]) for x in both))

    def _may_improve(self, beams: Beams, best: Tensor) -> Tensor:
        """(B, groups): whether further steps can still change a pool, by the rule of transformers."""
        config, worst = self.config, beams.pool.score[..., -1]
        full = worst.isfinite()
        if config.early_stopping is True:
            return ~full & best.isfinite()
        longest = config.early_stopping == "never" and config.length_penalty > 0
        penalty = self._penalties[beams.limit if longest else beams.step + 1]
        return best.isfinite() & (~full | (best / penalty[:, None] > worst))

    def collect(self, beams: Beams, finished: list[list[Hypothesis]]) -> None:
        """Write the best texts of finished prompts, over all their groups, into ``finished``."""
        steps = int(beams.pool.step.max())
        parents, tokens = (x[:steps, beams.prompt].tolist() for x in (self.parents, self.tokens))
        flat = [x.flatten(1).tolist() for x in beams.pool]  # each (B, groups · k)
        ended_first = self.config.ended_first
        for row, prompt in enumerate(beams.prompt.tolist()):
            table = [(parent[row], token[row]) for parent, token in zip(parents, tokens, strict=True)]
            texts = []
            for score, step, beam, token, code in zip(*(x[row] for x in flat), strict=True):
                if score > -math.inf:
                    texts.append(Hypothesis.of(*trace_back(table[:step], beam, token), score, code, self.config))
            texts.sort(key=lambda text: (ended_first and text.finish != "length", text.score), reverse=True)
            finished[prompt] = texts[: self.config.n_best]


def trace_back(table: list[tuple[list[int], list[int]]], beam: int, token: int) -> tuple[list[int], list[int]]:
    """The tokens of a text and the beam of each, from (parents, tokens) of each step before its last token."""
    beams, tokens = [beam], [token]
    for parents, chosen in reversed(table):
        tokens.append(chosen[beam])
        beam = parents[beam]
        beams.append(beam)
    return tokens[::-1], beams[::-1]


def block_topk(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """``scores.topk(n)`` for (R, V), by way of blocks: values, best first, and indices.

    Each of the n best lies in one of the n blocks with the largest maxima. On a CPU finding those is one pass at the
    speed of memory, where topk over a vocabulary takes many times that.
    """
    n_rows, n_all = scores.shape
    n_blocks = n_all // _BLOCK
    if scores.device.type != "cpu" or n_blocks < _MIN_BLOCKS * n:
        return scores.topk(n)
    n_whole = n_blocks * _BLOCK
    blocks = scores[:, :n_whole].unflatten(1, (n_blocks, _BLOCK))  # (R, blocks, 64)
    chosen = blocks.amax(-1).topk(n).indices  # (R, n)
    values = blocks.gather(1, chosen[..., None].expand(-1, -1, _BLOCK)).flatten(1)
    indices = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(1)
    if n_whole < n_all:
        values = torch.cat([values, scores[:, n_whole:]], 1)
        indices = torch.cat([indices, torch.arange(n_whole, n_all).expand(n_rows, -1)], 1)
    best, order = values.topk(n)
    return best, indices.gather(1, order)
