"""How a recurrent decoder looks at the encoder's states: prepared once, then one query after another or all at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ...attention import Frame, masks
from ...attention.backends import run
from ...attention.cache import Cache
from ...attention.edits import apply_edits_to_call, apply_edits_to_heads, has_edits
from ...attention.frame import ALL
from ...attention.mechanisms import Additive, Concat, Dot, General, Mechanism
from ...attention.reference import draw_seed
from ...attention.score_matrix import AttentionCall
from ...attention.taps import tap_attention
from ...config import ModelConfig
from ..block import Memory


@dataclass(frozen=True, eq=False)
class View:
    """A memory as one head looks at it: keys through the mechanism's O(S) half, values, and what is no padding."""

    k: Tensor  # (B, 1, S, D)
    v: Tensor  # (B, 1, S, M) the encoder's states, 0 at padding
    real: Tensor | None = None  # (B, S)

    def rows(self, index: Tensor) -> View:
        k, v = (x.index_select(0, index) for x in (self.k, self.v))
        return View(v if self.k is self.v else k, v, None if self.real is None else self.real.index_select(0, index))

    def closed(self) -> Tensor | None:
        """To be added to scores, (B, 1, 1, S): -inf at padding. A row of nothing else stays open: its values are 0."""
        if self.real is None:
            return None
        open_ = self.real | ~self.real.any(-1, keepdim=True)
        return torch.zeros_like(open_, dtype=self.v.dtype).masked_fill(~open_, float("-inf"))[:, None, None]


class Glimpse(NamedTuple):
    """One query's attention."""

    q: Tensor  # (B, 1, 1, D) through the mechanism
    context: Tensor  # (B, M)


class Alignment(nn.Module):
    """Attention of a decoder's state to the encoder's, one head: Σ_j α_ij h_j with α_i = softmax_j(score(s_i, h_j)).

    The scores are ``regard.attention``'s mechanisms: additive (Bahdanau et al. 2015, eq. 6), dot, general and concat
    (Luong et al. 2015, eq. 8).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.mechanism = _mechanism(config.alignment, config.d_model)
        self.dropout, self.backend = config.attention_dropout, config.attention_backend
        self.checkpointing = False  # recompute a step's scores in the backward pass; set from outside

    def view(self, memory: Memory) -> View:
        """The memory prepared for any number of looks."""
        n_batch, n_keys, _ = memory.states.shape
        # A mechanism's O(S) half treats tokens alike: as one long row they are a single matrix product.
        keys = self.mechanism.keys(memory.states.reshape(1, 1, n_batch * n_keys, -1))
        v = memory.states[:, None]
        same = type(self.mechanism).keys is Mechanism.keys
        return View(v if same else keys.view(n_batch, 1, n_keys, -1), v, real_keys(memory))

    def look(self, state: Tensor, view: View, closed: Tensor | None) -> Glimpse:
        """The attention of one state (B, M): the inside of a loop, so nothing here is checked or chosen anew."""
        q = self.mechanism.queries(state[None, None]).transpose(0, 2)  # (1, 1, B, D) → (B, 1, 1, D)
        if has_edits(self):
            return Glimpse(q, self._attended(q, view)[1][:, 0, 0])
        if self.checkpointing and self.training:
            context = checkpoint(self._weigh, q, view, closed, use_reentrant=False)
        else:
            context = self._weigh(q, view, closed)
        return Glimpse(q, context)

    def _weigh(self, q: Tensor, view: View, closed: Tensor | None) -> Tensor:
        scores = self.mechanism.tile(q, view.k, self.mechanism.operands(_ONE_HEAD))
        weights = torch.softmax(scores if closed is None else scores + closed, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return (weights.to(view.v.dtype) @ view.v)[:, 0, 0]

    def look_all(self, states: Tensor, view: View) -> Tensor:
        """The attention of all states (B, T, M) at once, where no step waits for another's: → (B, T, M)."""
        n_batch, n_queries, width = states.shape
        q = self.mechanism.queries(states.reshape(1, 1, -1, width)).view(n_batch, 1, n_queries, -1)
        return tap_attention(self, *self._attended(q, view))[:, 0]

    def _attended(self, q: Tensor, view: View) -> tuple[AttentionCall, Tensor]:
        """The attention of q (B, 1, T, D) as any other attention is computed, → (B, 1, T, M)."""
        call = apply_edits_to_call(self, self._call(q, view, self.dropout if self.training else 0.0))
        return call, apply_edits_to_heads(self, call, run(call, self.backend).output)

    def show(self, q: Tensor, contexts: Tensor, view: View, cache: Cache | None) -> None:
        """Let the recorder see looks made one by one as one attention: q (B, 1, T, D), contexts (B, T, M)."""
        tap_attention(self, apply_edits_to_call(self, self._call(q, view)), contexts[:, None], cache)

    def _call(self, q: Tensor, view: View, dropout: float = 0.0) -> AttentionCall:
        mask = None if view.real is None else masks.valid_keys(view.real)
        frame = Frame.of(q, view.k)
        seed = draw_seed(q.device) if dropout > 0 else None
        return AttentionCall(q, view.k, mask, None, self.mechanism, frame, view.v, dropout, seed)


_ONE_HEAD = Frame.aligned(1, 1, 1, 1)


def real_keys(memory: Memory) -> Tensor | None:
    """Which of a memory's states are no padding, (B, S); None for all."""
    if memory.mask is None:
        return None
    n_batch, n_keys, _ = memory.states.shape
    frame = Frame.aligned(n_batch, 1, 1, n_keys, memory.states.device)
    return memory.mask.tile(ALL, ALL, frame).expand(n_batch, 1, 1, n_keys)[:, 0, 0]


def _mechanism(alignment: str, d_model: int) -> Mechanism:
    if alignment == "dot":
        return Dot(scale=1.0)
    if alignment == "general":
        return General(1, d_model)
    return (Concat if alignment == "concat" else Additive)(1, d_model)
