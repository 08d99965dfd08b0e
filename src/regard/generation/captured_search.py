"""Beam search with CUDA graphs: the decode step and the bookkeeping of the search, captured together.

The beams, the pool of finished texts and the table of parents are on the GPU at fixed addresses. The host launches a
block of steps at a time and learns, one block later, which prompts are unfinished; it reads the texts at the end.
"""

from __future__ import annotations

from copy import copy

import torch
from torch import Tensor

from .beam_search import Beams, BeamSearch, BeamStep, Hypothesis, Pool
from .cuda_graph import BLOCK_STEPS, CapturedStep, CudaGraphEngine, GraphDecoder, can_choose_captured, read_blocks
from .prompts import Prompts

_SEARCH_FIELDS = (  # config fields that are fixed in a captured step
    *("beam", "length_penalty", "penalty_form", "early_stopping", "ended_first", "groups", "diversity_penalty"),
    *("logit_bias", "min_new_tokens"),
)


class SearchBuffers:
    """The state of a search, for all prompts of a decoder, and its captured steps."""

    def __init__(self, decoder: GraphDecoder, search: BeamSearch) -> None:
        n, n_steps, k, device = decoder.shape.prompts, len(decoder.state.history), search.config.beam, decoder.device
        self.decoder, self.first_row = decoder, torch.arange(n, device=device)[:, None] * k
        self.rules = copy(search)
        del self.rules.engine  # it refers to the model, which must not be kept by its captures
        self.rules.prepare_penalties(n_steps, device)
        limit = torch.zeros(n, dtype=torch.int64, device=device)
        self.beams = search.initial_beams(Prompts([[]] * n, limit.new_zeros(n, 0), None, limit))
        # The result of every step, each field (steps, B, k), and whether a prompt is unfinished after it, (steps, B).
        numbers, scores = (torch.zeros(n_steps, n, k, dtype=x, device=device) for x in (torch.int64, torch.float32))
        parts = [(scores if "score" in name else numbers).clone() for name in BeamStep._fields[1:]]
        self.table = BeamStep(self.beams.prompt, *parts)
        self.is_open = torch.zeros(n_steps, n, dtype=torch.bool, device=device)

        def run() -> None:
            logits = decoder.logits()
            decoder.state.advance()
            self.advance(logits.float() if logits.dtype == torch.float64 else logits)

        self.steps = CapturedStep(run, device, BLOCK_STEPS)

    def begin(self, prompts: Prompts, logits: Tensor) -> None:
        """Start from the prompts' logits (B · k, V); the decoder's other rows are unused."""
        n, new = len(prompts), self.rules.initial_beams(prompts)
        self.beams.step.zero_()
        self.beams.open.zero_()
        self.beams.limit[:n] = new.limit
        for buffer, x in zip(changing_tensors(self.beams)[1:], changing_tensors(new)[1:], strict=True):
            buffer[:n] = x
        first = logits.new_zeros(self.decoder.shape.rows, logits.shape[1])
        first[: len(logits)] = logits
        self.advance(first)

    def advance(self, logits: Tensor) -> None:
        """One step of the search, given logits (R, V)."""
        decoder, beams, step = self.decoder, copy(self.beams), self.beams.step
        result = self.rules.advance(beams, logits, step)
        for buffer, x in zip(self.table[1:], result[1:], strict=True):
            buffer.index_copy_(0, step, x[None])
        self.is_open.index_copy_(0, step, beams.open.any(-1)[None])
        for buffer, x in zip(changing_tensors(self.beams), changing_tensors(beams), strict=True):
            buffer.copy_(x)
        decoder.keys.select((self.first_row + result.parent).flatten(), decoder.state.lengths)
        decoder.state.tokens.copy_(result.token.flatten())

    def read(self, search: BeamSearch, n: int, is_open: Tensor) -> list[list[Hypothesis]]:
        """The texts of the first n prompts. Also sets the table of ``search`` and its steps, which hold the prompts
        that were open."""
        table = [x[: len(is_open), :n].cpu() for x in self.table[1:]]
        search.parents, search.tokens, search.steps = table[0], table[1], []
        was_open = torch.cat([torch.ones_like(is_open[:1]), is_open[:-1]])
        for step, mask in enumerate(was_open):
            prompts = mask.nonzero()[:, 0]
            search.steps.append(BeamStep(prompts, *(x[step, prompts] for x in table)))
        beams, finished = copy(self.beams), [list[Hypothesis]() for _ in range(n)]
        beams.prompt, beams.pool = torch.arange(n), Pool(*(x[:n].cpu() for x in beams.pool))
        search.collect(beams, finished)
        return finished


def changing_tensors(beams: Beams) -> list[Tensor]:
    """The tensors that a step updates."""
    return [beams.step, beams.score, beams.open, *beams.pool]


def run_captured(search: BeamSearch, prompts: Prompts) -> list[list[Hypothesis]] | None:
    """``search.run`` with captured steps; None if this search cannot be captured."""
    engine, config = search.engine, search.config
    reads_texts = config.stop or search.strings is not None or config.repetition_penalty != 1.0
    if type(search) is not BeamSearch or not isinstance(engine, CudaGraphEngine) or reads_texts:
        return None
    if not can_choose_captured(config, search.eos_id):
        return None
    key = (search.eos_id, *(str(getattr(config, name)) for name in _SEARCH_FIELDS))
    started = engine.begin(
        prompts, config.beam, lambda decoder: decoder.capture(key, lambda: SearchBuffers(decoder, search))
    )
    if started is None:
        return None
    (buffers, logits), n = started, len(prompts)
    buffers.begin(prompts, logits)
    blocks = []
    is_open = buffers.is_open
    for (block,) in read_blocks(buffers.steps, lambda *span: (is_open[slice(*span), :n],), int(prompts.limit.max())):
        blocks.append(block)
        if not block[-1].any():
            break
    return buffers.read(search, n, torch.cat(blocks))
