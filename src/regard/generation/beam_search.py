"""Beam search with a length penalty, a pool of finished texts, and diverse groups.

score(Y) = log P(Y | X) / length_penalty(|Y|)                                       (Wu et al. 2016, eq. 14)

Each step considers the best 2k continuations of a prompt's k beams. Of the best k, those that end go to the pool of
the k best finished texts; the best k that go on are the next beams. A table holds the parent of every beam, and a text
is read from it backwards. Groups are searches of k / groups beams each, run one after the other at every step; each
is penalised for choosing the tokens of the groups before it (Vijayakumar et al. 2018, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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

NO_TEXT = "the search found no text; the model's logits are not finite"
_CORE_CACHE = 2**20  # numbers that fit into the cache of a CPU core
_STRING_ENDS = 6  # continuations per beam that may complete a stop string at one step without narrowing the search
_MAX_FORBIDDEN = 8  # tokens that are left out of the best ones, rather than masked in all scores
_BLOCK = 64
_MIN_BLOCKS = 8  # blocks per requested value above which ``block_topk`` is faster than topk

# The best continuations of a group, each (B, n): score and diverse as in ``Candidates``, and beam · V + token.
TopScores = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Hypothesis:
    """A generated text: its new tokens, including the end token or stop sequence."""

    tokens: list[int]
    score: float  # log P / length penalty; P after the filters in beam search, by the model alone otherwise
    finish: Finish  # the end token, a stop sequence, or the limit
    n_ending: int  # how many of the last tokens are the end token or the stop sequence
    beams: list[int]  # for each token, the beam (0 … beam - 1) whose logits it was chosen from

    @classmethod
    def of(cls, tokens: list[int], beams: list[int], score: float, code: int, config: GenerateConfig) -> Hypothesis:
        """A text that ended with the given code of ``stop_conditions``."""
        return cls(tokens, score, *finish_reason(code, config), beams)

    @property
    def content(self) -> list[int]:
        """The tokens without the end token or stop sequence."""
        return self.tokens[: len(self.tokens) - self.n_ending]


class Candidates(NamedTuple):
    """Continuations of one group, best first, each field (B, n)."""

    score: Tensor  # log P so far
    diverse: Tensor  # score minus the penalty for tokens of earlier groups; the sort key
    beam: Tensor  # which of the prompt's beams is continued
    token: Tensor
    code: Tensor  # a code of ``stop_conditions``

    def gather(self, index: Tensor) -> Candidates:
        return Candidates(*(x.gather(-1, index) for x in self))


class BeamStep(NamedTuple):
    """The result of one step for each unfinished prompt: the next beams, and the texts that ended.

    Each field but ``prompt`` is (B, beam); a score is log P so far, -inf where there is no such beam or text.
    """

    prompt: Tensor  # (B,) number of the prompt
    parent: Tensor  # the beam that was continued
    token: Tensor
    score: Tensor
    ended_parent: Tensor
    ended_token: Tensor
    ended_score: Tensor

    def of(self, prompt: int) -> Iterator[tuple[int | None, int, int, float]]:
        """The entries of one prompt: (beam, parent, token, score), with beam None for texts that ended."""
        for row in (self.prompt == prompt).nonzero()[:, 0].tolist():
            ended = zip(*(x[row].tolist() for x in self[4:]), strict=True)
            going = zip(*(x[row].tolist() for x in self[1:4]), strict=True)
            entries = [*((None, *text) for text in ended), *((beam, *text) for beam, text in enumerate(going))]
            yield from (entry for entry in entries if entry[-1] > -math.inf)


class Pool(NamedTuple):
    """The best finished texts, best first: where each ends in the parent table, and how. Each field (B, groups, k)."""

    score: Tensor  # -inf in empty entries
    step: Tensor
    beam: Tensor
    token: Tensor
    code: Tensor


@dataclass
class Beams:
    """The state of all unfinished prompts."""

    step: Tensor  # (1,) steps done so far; (B,) if prompts began at different steps
    prompt: Tensor  # (B,) number of the prompt
    limit: Tensor  # (B,) maximum of new tokens
    texts: Tensor  # (B, k · groups, L) tokens so far
    score: Tensor  # (B, groups, k) log P of each beam; -inf: no such beam
    open: Tensor  # (B, groups) whether the group's pool may still change
    pool: Pool

    def select(self, mask: Tensor) -> Beams:
        """The prompts where ``mask`` (B,) is True."""
        prompt, limit, texts = self.prompt[mask], self.limit[mask], self.texts[mask]
        pool = Pool(*(x[mask] for x in self.pool))
        return Beams(self.step, prompt, limit, texts, self.score[mask], self.open[mask], pool)


class BeamSearch:
    """One search over a batch of prompts.

    ``parents`` and ``tokens`` (steps, B, beam) hold the parent and the token of every beam; ``steps`` the result of
    every step.
    """

    def __init__(
        self,
        engine: DecodingEngine | None,
        config: GenerateConfig,
        eos_id: int | None,
        strings: StopStrings | None = None,
    ) -> None:
        """Without an ``engine``, the caller computes the logits for ``step``."""
        self.engine = None if engine is None else accelerate(engine)
        self.config, self.eos_id, self.strings = config, eos_id, strings
        self.size = self.pool_size = config.beam // config.groups
        ends = {stop[-1] for stop in config.stop} | ({eos_id} if eos_id is not None else set())
        # Enough candidates that k go on even if the best continuations of every beam end.
        self.n_ends = len(ends) + (0 if strings is None else _STRING_ENDS)
        self.n_candidates = max(2, 1 + self.n_ends) * self.size
        # A few forbidden tokens do not need all scores: they are left out of the best.
        few = len(config.logit_bias) <= _MAX_FORBIDDEN and all(x == -math.inf for x in config.logit_bias.values())
        self._other_filters = config.with_(logit_bias={}) if config.logit_bias and few else config

    def prepare_penalties(self, max_tokens: int, device: torch.device) -> None:
        """Compute the length penalties of texts of up to ``max_tokens`` tokens."""
        values = [1.0, *(self.config.length_penalty_at(n) for n in range(1, max_tokens + 1))]
        self._penalties = torch.tensor(values, device=device)

    def run(self, prompts: Prompts) -> list[list[Hypothesis]]:
        """The n_best texts of each prompt."""
        self.begin(prompts)
        assert self.engine is not None
        logits = self.engine.prefill(prompts, copies=self.config.beam)
        while (next_inputs := self.step(logits)) is not None:
            check_cancelled()
            rows, tokens = next_inputs
            self.engine.select(rows)
            logits = self.engine.decode_one_token(tokens)
        return self.finished

    def begin(self, prompts: Prompts) -> None:
        """Start a search. ``finished`` will hold the texts of each prompt once its search is over."""
        n, k, device = len(prompts), self.config.beam, prompts.tokens.device
        self.parents = torch.zeros(int(prompts.limit.max()), n, k, dtype=torch.int64, device=device)
        self.tokens = torch.zeros_like(self.parents)
        self.steps: list[BeamStep] = []
        self.prepare_penalties(len(self.parents), device)
        self.beams = self.initial_beams(prompts)
        self.finished: list[list[Hypothesis]] = [[] for _ in range(n)]

    def step(self, logits: Tensor) -> tuple[Tensor, Tensor] | None:
        """One step, given the logits (B · k, V) of all beams. Returns the rows (R,) that go on, in their new order, and
        their next tokens (R,); None when all prompts are finished."""
        beams, step, k = self.beams, len(self.steps), self.config.beam
        result = self.advance(beams, logits, step)
        parent, token = result.parent, result.token  # (B, k)
        self.parents[step, beams.prompt] = parent
        self.tokens[step, beams.prompt] = token
        self.steps.append(result)
        done = ~beams.open.any(-1)
        is_static = self.engine is not None and self.engine.static
        if done.all() or (done.any() and not is_static):
            self.collect(beams.select(done), self.finished)
        if done.all():
            return None
        rows = torch.arange(len(done), device=parent.device)[:, None] * k + parent
        beams.texts = torch.cat([beams.texts.flatten(0, 1)[rows], token[..., None]], -1)
        if not is_static:
            self.beams, rows, token = beams.select(~done), rows[~done], token[~done]
        return rows.flatten(), token.flatten()

    def initial_beams(self, prompts: Prompts) -> Beams:
        shape, device = (len(prompts), self.config.groups, self.size), prompts.tokens.device
        score = torch.full(shape, -math.inf, device=device)
        pool = Pool(score, *torch.zeros(4, *shape, dtype=torch.int64, device=device))
        score = score.index_fill(2, torch.arange(1, device=device), 0.0)  # one beam per group, not k equal ones
        texts = prompts.texts[:, None].expand(-1, self.config.beam, -1)
        open_ = torch.ones(shape[:2], dtype=torch.bool, device=device)
        numbers, step = torch.arange(len(prompts), device=device), torch.zeros(1, dtype=torch.int64, device=device)
        return Beams(step, numbers, prompts.limit, texts, score, open_, pool)

    def advance(self, beams: Beams, logits: Tensor, step: int | Tensor) -> BeamStep:
        """Update ``beams``: their next scores, and the pools with the texts that ended. Returns both.

        ``step`` is beams.step, as an int where the host knows it: some filters depend on it.
        """
        nexts, ended = self._advance(beams, logits, step)
        parent = torch.cat([group.beam for group in nexts], -1)  # (B, k)
        token = torch.cat([group.token for group in nexts], -1)
        beams.score = torch.stack([group.score for group in nexts], 1)
        beams.step = beams.step + 1
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
            going = best._replace(score=best.score.masked_fill(ends, -math.inf))  # a text that ended is not a beam
            nexts.append(going.gather(best.diverse.masked_fill(ends, -math.inf).topk(k).indices))
            top = Candidates(*(x[:, :k] for x in best))
            score = top.score.masked_fill(~(ends[:, :k] | at_limit), -math.inf)
            finished.append(top._replace(score=score, code=torch.where(ends[:, :k], top.code, LENGTH)))
            if price is None:
                break
            cost = beams.open[:, group, None] * self.config.diversity_penalty  # 0 for tokens of finished groups
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
        elif price is None and not has_filters(self._other_filters, step):
            best = self._topk_by_parts(logits, past)
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
        """The best continuations over all beams and tokens. ``price`` (B, V): the penalty on each token."""
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

    def _topk_by_parts(self, logits: Tensor, past: Tensor) -> TopScores:
        """``_topk`` without filters other than forbidden tokens, and without price: the best tokens of each beam, then
        the best of those."""
        (n, k, n_tokens), forbidden = logits.shape, self.config.logit_bias
        n_best = min(self.n_candidates + len(forbidden), n_tokens)
        score, token = ops_for(logits).best_tokens(logits.flatten(0, 1), n_best)
        for index in forbidden:
            score = score.masked_fill(token == index, -math.inf)
        index = token.view(n, k, -1) + torch.arange(k, device=token.device)[:, None] * n_tokens
        score = (score.view(n, k, -1) + past[..., None]).flatten(1)
        score, order = score.topk(min(self.n_candidates, score.shape[1]))
        return score, score, index.flatten(1).gather(1, order)

    def _topk_per_beam(
        self, logits: Tensor, texts: Tensor, past: Tensor, price: Tensor | None, step: int | Tensor
    ) -> tuple[TopScores, Tensor]:
        """``_topk`` by way of the best of each beam, and for which prompts (B,) equal sums make the order uncertain:
        adding ``past`` may round two scores to the same number.

        A few prompts at a time, so that intermediate results stay in the cache of a core.
        """
        n, k, n_tokens = logits.shape
        n_best = min(self.n_candidates + 1, n_tokens)  # all of the best may come from one beam
        chunk = max(1, _CORE_CACHE // (k * n_tokens))
        parts: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, n, chunk):
            rows = slice(start, start + chunk)
            scores = logits[rows].flatten(0, 1).log_softmax(-1)
            scores = filter_logits(scores, texts[rows].flatten(0, 1), step, self.config, self.eos_id, in_place=True)
            if price is None:
                diverse, token = block_topk(scores, n_best)
                parts.append((diverse, diverse, token))
            else:
                diverse, token = block_topk(scores - price[rows].repeat_interleave(k, 0), n_best)
                parts.append((scores.gather(1, token), diverse, token))
        score, diverse, token = (torch.cat(part).view(n, k, n_best) for part in zip(*parts, strict=True))
        score, diverse = ((x + past[..., None]).flatten(1) for x in (score, diverse))
        index = (token + torch.arange(k)[:, None] * n_tokens).flatten(1)
        diverse, order = diverse.topk(min(self.n_candidates + 1, k * n_best))  # one more, to detect a tie
        tied = ((diverse[:, 1:] == diverse[:, :-1]) & diverse[:, 1:].isfinite()).any(1)
        order = order[:, : self.n_candidates]
        return (score.gather(1, order), diverse[:, : self.n_candidates], index.gather(1, order)), tied

    def _update_pool(self, beams: Beams, new: Candidates) -> Pool:
        """The pools with the newly finished texts, reduced to the best; a pool that is not open does not change."""
        step = beams.step[:, None, None]
        score = (new.score / self._penalties[step + 1]).masked_fill(~beams.open[..., None], -math.inf)
        finished = Pool(score, step.expand_as(new.token), new.beam, new.token, new.code)
        both = Pool(*(torch.cat(pair, -1) for pair in zip(beams.pool, finished, strict=True)))
        order = both.score.argsort(dim=-1, descending=True, stable=True)
        if self.config.ended_first:
            ended = (both.code >= END) & both.score.isfinite()
            order = order.gather(-1, ended.gather(-1, order).byte().argsort(dim=-1, descending=True, stable=True))
        return Pool(*(x.gather(-1, order[..., : self.pool_size]) for x in both))

    def _may_improve(self, beams: Beams, best: Tensor) -> Tensor:
        """(B, groups): whether further steps can still change a pool, by the rule of transformers; ``best`` is the
        score of each group's best beam."""
        config, worst = self.config, beams.pool.score[..., -1]
        full = worst.isfinite()
        if config.early_stopping is True:
            return ~full & best.isfinite()
        longest = config.early_stopping == "never" and config.length_penalty > 0
        penalty = self._penalties[beams.limit if longest else beams.step + 1]
        return best.isfinite() & (~full | (best / penalty[:, None] > worst))

    def collect(self, beams: Beams, finished: list[list[Hypothesis]]) -> None:
        """Write the best texts of each prompt, over all its groups, into ``finished``."""
        steps = int(beams.pool.step.max())
        parents, tokens = (x[:steps, beams.prompt].tolist() for x in (self.parents, self.tokens))
        pools = [x.flatten(1).tolist() for x in beams.pool]  # each (B, groups · k)
        for row, prompt in enumerate(beams.prompt.tolist()):
            table = [(parent[row], token[row]) for parent, token in zip(parents, tokens, strict=True)]
            finished[prompt] = self.hypotheses([x[row] for x in pools], table)

    def hypotheses(self, pool: list[list[Any]], table: list[tuple[list[int], list[int]]]) -> list[Hypothesis]:
        """The n_best texts of one prompt, from the fields of its pool and the (parents, tokens) of each step."""
        texts = []
        for score, step, beam, token, code in zip(*pool, strict=True):
            if score > -math.inf:
                texts.append(Hypothesis.of(*trace_back(table[:step], beam, token), score, code, self.config))
        ended_first = self.config.ended_first
        texts.sort(key=lambda text: (ended_first and text.finish != "length", text.score), reverse=True)
        return texts[: self.config.n_best]


def trace_back(table: list[tuple[list[int], list[int]]], beam: int, token: int) -> tuple[list[int], list[int]]:
    """The tokens of a text and the beam of each, given its last beam and token and the (parents, tokens) of each step
    before."""
    beams, tokens = [beam], [token]
    for parents, chosen in reversed(table):
        tokens.append(chosen[beam])
        beam = parents[beam]
        beams.append(beam)
    return tokens[::-1], beams[::-1]


def block_topk(scores: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """``scores.topk(n)`` for (R, V), by way of blocks: values, best first, and indices.

    Each of the n best lies in one of the n blocks with the largest maxima. On a CPU, finding those blocks is one pass
    at memory speed, many times faster than topk over the vocabulary.
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
