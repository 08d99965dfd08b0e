"""LSTM and GRU layers: a whole text through torch's fused kernels, or one step at a time.

    LSTM  i, f, o = σ(W_x x + W_h h),  g = tanh(…),  c ← f ∘ c + i ∘ g,  h ← o ∘ tanh(c)   Hochreiter & Schmidhuber 1997
    GRU   r, z = σ(W_x x + W_h h),  n = tanh(W_x x + r ∘ W_h h),  h ← (1 - z) ∘ n + z ∘ h  Cho et al. 2014; cuDNN's form

Padding is handled without packed sequences, which synchronise with the device and cannot be traced. Instead, each
layer has one more input per token, 1 at padding, with fixed weights that close the gates that write to the state and
open those that keep it: i = 0 and f = 1, or z = 1. A state that is still 0 then stays 0, and c is unchanged, exactly.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..attention import Frame, masks
from ..attention.backends import run
from ..attention.cache import Cache, CrossCache
from ..attention.cache.kv_cache import n_bytes
from ..attention.edits import apply_edits_to_call, apply_edits_to_heads, has_edits
from ..attention.frame import ALL
from ..attention.mechanisms import Additive, Concat, Dot, General, Mechanism
from ..attention.reference import draw_seed
from ..attention.score_matrix import AttentionCall
from ..attention.taps import tap_attention
from ..config import ModelConfig
from .block import Memory

State = tuple[Tensor, ...]  # (B, M) tensors: h of each layer, an LSTM's c of each layer; a decoder may add more

_SATURATED = 1e4  # large enough that σ is 0 or 1 in every precision, and finite in fp16
_PADDING_WEIGHTS = {  # of the gates in torch's order: i f g o, and r z n
    "lstm": (-_SATURATED, _SATURATED, 0.0, 0.0),
    "gru": (0.0, _SATURATED, 0.0),
}


class Rows(NamedTuple):
    """Moves the padding of each row to its end, and back."""

    order: Tensor  # (B, T) indices that move real tokens to the front
    inverse: Tensor  # (B, T) indices that undo it
    real: Tensor  # (B, T) booleans: False at padding, after the move

    @classmethod
    def of(cls, padding_mask: Tensor) -> Rows:
        order = (~padding_mask).byte().argsort(dim=1, stable=True)
        return cls(order, order.argsort(dim=1), padding_mask.gather(1, order))

    def pack(self, x: Tensor) -> Tensor:
        return x.gather(1, self.order[..., None].expand_as(x))

    def unpack(self, x: Tensor) -> Tensor:
        return x.gather(1, self.inverse[..., None].expand_as(x))


class Gates(nn.Module):
    """The weights of one layer in one direction, all gates stacked."""

    def __init__(self, cell: str, d_in: int, d_out: int) -> None:
        super().__init__()
        self.cell, self.n_gates = cell, len(_PADDING_WEIGHTS[cell])
        rows = self.n_gates * d_out
        self.w_x = nn.Parameter(torch.empty(rows, d_in))
        self.w_h = nn.Parameter(torch.empty(rows, d_out))
        self.b_x = nn.Parameter(torch.empty(rows))
        self.b_h = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier-uniform for each gate; an LSTM's forget gate starts open, f ≈ σ(1) (Jozefowicz et al. 2015)."""
        for weight in (self.w_x, self.w_h):
            for gate in weight.chunk(self.n_gates):
                nn.init.xavier_uniform_(gate)
        for bias in (self.b_x, self.b_h):
            nn.init.zeros_(bias)
        if self.cell == "lstm":
            nn.init.ones_(self.b_x.chunk(4)[1])

    def weights(self, padded: bool) -> list[Tensor]:
        """The weights in the order of torch's kernels; ``padded`` adds the column for the padding input."""
        w_x: Tensor = self.w_x
        if padded:
            n_units = w_x.shape[0] // self.n_gates
            column = torch.cat([w_x.new_full((n_units, 1), value) for value in _PADDING_WEIGHTS[self.cell]])
            w_x = torch.cat([w_x, column], dim=1)
        return [w_x, self.w_h, self.b_x, self.b_h]


class Recurrence(nn.Module):
    """Layers of LSTM or GRU cells, x (B, T, d_in) → (B, T, M); if bidirectional, each direction has M/2 units."""

    def __init__(
        self, cell: str, d_in: int, d_model: int, n_layers: int, *, bidirectional: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.cell, self.n_layers, self.dropout = cell, n_layers, dropout
        n_units = self.n_units = d_model // 2 if bidirectional else d_model
        widths = [d_in] + [d_model] * (n_layers - 1)
        self.ahead = nn.ModuleList(Gates(cell, width, n_units) for width in widths)
        self.back = nn.ModuleList(Gates(cell, width, n_units) for width in widths) if bidirectional else None

    def forward(self, x: Tensor, start: State | None = None) -> tuple[Tensor, State]:
        """Rows without padding, from an initial state or 0: all outputs (B, T, M) and the last state."""
        return self._run_fused(x, range(self.n_layers), start)

    def forward_padded(self, x: Tensor, real: Tensor) -> tuple[Tensor, State]:
        """Rows that end in padding, where ``real`` (B, T) is False: outputs, 0 at padding, and the last states."""
        padding = (~real)[..., None]
        last_token = (real.sum(1, keepdim=True) - 1).clamp(min=0)[..., None]  # (B, 1, 1)
        finals: list[State] = []
        for layer in range(self.n_layers):
            if layer > 0:
                x = F.dropout(x, self.dropout, self.training)
            x = torch.cat([x, padding.to(x.dtype)], dim=-1)
            x, final = self._run_fused(x, range(layer, layer + 1), padded=True)
            x = x.masked_fill(padding, 0.0)
            # Padding keeps c but not h, so h is read at the last token. The backward direction ends at the first token.
            h = x[..., : self.n_units].gather(1, last_token.expand(-1, -1, self.n_units))[:, 0]
            finals.append((torch.cat([h, final[0][:, self.n_units :]], dim=-1), *final[1:]))
        return x, tuple(part for kind in zip(*finals, strict=True) for part in kind)

    def _run_fused(
        self, x: Tensor, layers: range, start: State | None = None, padded: bool = False
    ) -> tuple[Tensor, State]:
        """The given layers in one call of torch's kernel (cuDNN on a GPU)."""
        gates = [direction for layer in layers for direction in self._directions(layer)]
        weights = _contiguous_weights([direction.weights(padded) for direction in gates])
        if start is None:
            state = [x.new_zeros(len(gates), x.shape[0], self.n_units)] * (2 if self.cell == "lstm" else 1)
        else:
            state = list(torch.stack(start).to(x.dtype).split(len(layers)))
        output, *state = self.run_kernel(x, state, weights)
        # (layers · directions, B, units) → for each layer (B, M)
        by_layer = [s.unflatten(0, (len(layers), -1)).transpose(1, 2).flatten(2) for s in state]
        return output, tuple(part for s in by_layer for part in s.unbind())

    def run_kernel(self, x: Tensor, state: list[Tensor], weights: list[Tensor]) -> tuple[Tensor, ...]:
        """x (B, T, d_in), h and an LSTM's c (layers · directions, B, units) → (B, T, M) and the last state."""
        n_layers = len(weights) // 4 // (1 if self.back is None else 2)
        options = (True, n_layers, self.dropout, self.training, self.back is not None, True)
        with torch.backends.mkldnn.flags(enabled=False) if _lacks_half_kernel(x) else nullcontext():
            if self.cell == "lstm":
                return torch.lstm(x, state, weights, *options)
            return torch.gru(x, state[0], weights, *options)

    def _directions(self, layer: int) -> list[Gates]:
        stacks = [self.ahead] if self.back is None else [self.ahead, self.back]
        return [cast(Gates, stack[layer]) for stack in stacks]

    # ---- one step at a time, for decoders that feed back the output of attention

    def project(self, x: Tensor) -> Tensor:
        """The first layer's W_x x + b_x for all tokens at once; ``feed`` adds the other inputs of a step."""
        (first,) = self._directions(0)
        return F.linear(x, first.w_x[:, : x.shape[-1]], first.b_x)

    def feed(self, gates: Tensor, fed: Tensor) -> Tensor:
        """Add W_x fed, with the last columns of W_x, to the gates (B, gates · M); fed (B, M) is fed back."""
        (first,) = self._directions(0)
        return torch.addmm(gates, fed, first.w_x[:, -fed.shape[-1] :].t())

    def step(self, gates: Tensor, state: State) -> State:
        """One token through all layers, given the first layer's projected input."""
        hs: list[Tensor] = []
        cs: list[Tensor] = []
        for layer in range(self.n_layers):
            (weights,) = self._directions(layer)
            if layer > 0:
                gates = F.linear(F.dropout(hs[-1], self.dropout, self.training), weights.w_x, weights.b_x)
            from_h = F.linear(state[layer], weights.w_h, weights.b_h)
            if self.cell == "lstm":
                h, c = _lstm(gates + from_h, state[self.n_layers + layer])
                cs.append(c)
            else:
                h = _gru(gates, from_h, state[layer])
            hs.append(h)
        return *hs, *cs


def _lacks_half_kernel(x: Tensor) -> bool:
    """Whether oneDNN, whose half-precision kernels need AVX-512, lacks the kernel that this input would run."""
    is_half = x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")
    return x.device.type == "cpu" and is_half and not torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _contiguous_weights(weights: list[list[Tensor]]) -> list[Tensor]:
    """The weights as one list; on a GPU as views of one tensor, which saves cuDNN's copy and its warning."""
    if not weights[0][0].is_cuda:
        return [weight for layer in weights for weight in layer]
    parts = [part for layer in weights for part in layer[:2]]  # matrices first, as in cuDNN's own layout
    parts += [part for layer in weights for part in layer[2:]]
    block = torch.cat([part.flatten() for part in parts]).split([part.numel() for part in parts])
    views = [flat.view_as(part) for flat, part in zip(block, parts, strict=True)]
    matrices, biases = views[: len(views) // 2], views[len(views) // 2 :]
    return [weight for i in range(0, len(matrices), 2) for weight in (*matrices[i : i + 2], *biases[i : i + 2])]


def _lstm(gates: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    i, f, g, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(from_x: Tensor, from_h: Tensor, h: Tensor) -> Tensor:
    x_r, x_z, x_n = from_x.chunk(3, dim=-1)
    h_r, h_z, h_n = from_h.chunk(3, dim=-1)
    n = torch.tanh(x_n + torch.sigmoid(x_r + h_r) * h_n)
    return n + torch.sigmoid(x_z + h_z) * (h - n)


@dataclass(frozen=True, eq=False)
class MemoryView:
    """A memory as keys and values of one head, with the mechanism's transformation applied to the keys."""

    k: Tensor  # (B, 1, S, D)
    v: Tensor  # (B, 1, S, M) the encoder's states, 0 at padding
    real: Tensor | None = None  # (B, S)

    def rows(self, index: Tensor) -> MemoryView:
        v = self.v.index_select(0, index)
        k = v if self.k is self.v else self.k.index_select(0, index)
        return MemoryView(k, v, None if self.real is None else self.real.index_select(0, index))

    def padding_bias(self) -> Tensor | None:
        """(B, 1, 1, S) added to the scores: -inf at padding. A row of only padding stays visible: its values are 0."""
        if self.real is None:
            return None
        visible = self.real | ~self.real.any(-1, keepdim=True)
        return torch.zeros_like(visible, dtype=self.v.dtype).masked_fill(~visible, float("-inf"))[:, None, None]


class Alignment(nn.Module):
    """One head of attention from a decoder's state to the encoder's: Σ_j α_ij h_j, α_i = softmax_j(score(s_i, h_j)).

    The scores are mechanisms of ``regard.attention``: additive (Bahdanau et al. 2015, eq. 6), dot, general and concat
    (Luong et al. 2015, eq. 8).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        scores: dict[str, type[Additive | General]] = {"additive": Additive, "general": General, "concat": Concat}
        score = scores.get(config.alignment)
        self.mechanism: Mechanism = Dot(scale=1.0) if score is None else score(1, config.d_model)
        self.dropout, self.backend = config.attention_dropout, config.attention_backend
        self.checkpointing = False  # recompute scores in the backward pass; set by Recurrent.use_checkpointing

    def view(self, memory: Memory) -> MemoryView:
        """The memory as keys, transformed once for all queries, and values."""
        n_batch, n_keys, _ = memory.states.shape
        # Keys are transformed independently, so one long row makes it a single matrix product.
        keys = self.mechanism.keys(memory.states.reshape(1, 1, n_batch * n_keys, -1))
        v = memory.states[:, None]
        same = type(self.mechanism).keys is Mechanism.keys
        return MemoryView(v if same else keys.view(n_batch, 1, n_keys, -1), v, real_keys(memory))

    def attend_one(self, state: Tensor, view: MemoryView, padding_bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The query (B, 1, 1, D) and context (B, M) of one state (B, M). No checks: it runs for each target token."""
        q = self.mechanism.queries(state[None, None]).transpose(0, 2)  # (1, 1, B, D) → (B, 1, 1, D)
        if has_edits(self):
            return q, self._attend(q, view)[1][:, 0, 0]
        if self.checkpointing and self.training:
            return q, checkpoint(self._weigh, q, view, padding_bias, use_reentrant=False)
        return q, self._weigh(q, view, padding_bias)

    def _weigh(self, q: Tensor, view: MemoryView, padding_bias: Tensor | None) -> Tensor:
        scores = self.mechanism.tile(q, view.k, self.mechanism.operands(_ONE_HEAD))
        weights = torch.softmax(scores if padding_bias is None else scores + padding_bias, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        return (weights.to(view.v.dtype) @ view.v)[:, 0, 0]

    def attend_all(self, states: Tensor, view: MemoryView) -> Tensor:
        """The contexts (B, T, M) of all states (B, T, M) at once, for decoders that feed nothing back."""
        n_batch, n_queries, width = states.shape
        q = self.mechanism.queries(states.reshape(1, 1, -1, width)).view(n_batch, 1, n_queries, -1)
        return tap_attention(self, *self._attend(q, view))[:, 0]

    def _attend(self, q: Tensor, view: MemoryView) -> tuple[AttentionCall, Tensor]:
        """The attention of q (B, 1, T, D) through the configured backend, → (B, 1, T, M)."""
        call = apply_edits_to_call(self, self._call(q, view, self.dropout if self.training else 0.0))
        return call, apply_edits_to_heads(self, call, run(call, self.backend).output)

    def record_attention(self, q: Tensor, contexts: Tensor, view: MemoryView, cache: Cache | None) -> None:
        """Report attention that was computed step by step as one tap: q (B, 1, T, D), contexts (B, T, M)."""
        tap_attention(self, apply_edits_to_call(self, self._call(q, view)), contexts[:, None], cache)

    def _call(self, q: Tensor, view: MemoryView, dropout: float = 0.0) -> AttentionCall:
        mask = None if view.real is None else masks.valid_keys(view.real)
        seed = draw_seed(q.device) if dropout > 0 else None
        frame = Frame.of(q, view.k)
        return AttentionCall(q, view.k, mask, None, self.mechanism, frame, v=view.v, dropout=dropout, seed=seed)


_ONE_HEAD = Frame.aligned(1, 1, 1, 1)


def real_keys(memory: Memory) -> Tensor | None:
    """(B, S) booleans, False at the memory's padding; None without a mask."""
    if memory.mask is None:
        return None
    n_batch, n_keys, _ = memory.states.shape
    frame = Frame.aligned(n_batch, 1, 1, n_keys, memory.states.device)
    return memory.mask.tile(ALL, ALL, frame).expand(n_batch, 1, 1, n_keys)[:, 0, 0]


class MemoryCache(CrossCache):
    """The memory's view, kept for decoding; as a Cache, its keys and values are the encoder's states."""

    def reset(self) -> None:
        super().reset()
        self.view: MemoryView | None = None

    def fill(self, view: MemoryView) -> MemoryView:
        self.view, self._k, self._v = view, view.v, view.v
        return view

    def reorder(self, beam_index: Tensor) -> None:
        if self.view is not None:
            self.fill(self.view.rows(beam_index))

    def memory(self) -> int:
        view = self.view
        return 0 if view is None else n_bytes(view.v, None if view.k is view.v else view.k, view.real)


class StateCache(Cache):
    """A decoder's current state and the 16 before it, so that ``truncate`` can remove up to 16 tokens.

    Its size does not depend on the length of the text. With ``in_place`` it always writes to the same memory, for CUDA
    graphs, and passes no gradients.
    """

    n_states = 17  # the current state and the 16 before it

    def __init__(self, in_place: bool = False) -> None:
        self.in_place = in_place
        self._state = torch.empty(0)  # (B, W): the tensors of the state, concatenated
        self._past = self._state  # (n_states, B, W): a ring of the last states
        self._lengths = torch.zeros(1, dtype=torch.int64)  # (B,) tokens so far
        self._past_lengths = self._lengths  # (n_states, B): the length at each state of the ring, -1 where empty
        self._slot = self._lengths.clone()  # (1,) where the ring is written next; not the lengths of a batch of one
        self._widths: list[int] = []  # widths of the tensors in _state
        self.reset()

    def reset(self) -> None:
        self.filled = False
        if not self.in_place:
            self._state = self._past = self._state.new_empty(0)

    @property
    def lengths(self) -> Tensor:
        return self._lengths if self.filled else torch.zeros(1, dtype=torch.int64, device=self._lengths.device)

    def start(self, state: State) -> None:
        joined = torch.cat(state, dim=-1)
        zeros = torch.zeros(joined.shape[0], dtype=torch.int64, device=joined.device)
        self._widths = [part.shape[-1] for part in state]
        self._state, self._lengths = self._put(self._state, joined), self._put(self._lengths, zeros)
        self._past = self._put(self._past, torch.zeros_like(joined).repeat(self.n_states, 1, 1))
        self._past_lengths = self._put(self._past_lengths, zeros.repeat(self.n_states, 1) - 1)
        self._slot = self._put(self._slot, zeros[:1].clone())
        self.filled = True
        self._record()

    def state(self) -> State:
        if not self.filled:
            raise ValueError("an empty StateCache has no state: call start(state) first")
        return self._state.split(self._widths, dim=-1)

    def push(self, state: State, real: Tensor | None = None) -> State:
        """Write the state after one more token, which is padding in the rows where ``real`` (B,) is False."""
        self._move(torch.cat(state, dim=-1), self._lengths + (1 if real is None else real))
        self._record()
        return self.state()

    def _move(self, state: Tensor, lengths: Tensor) -> None:
        self._state, self._lengths = self._put(self._state, state), self._put(self._lengths, lengths)

    def _put(self, old: Tensor, new: Tensor) -> Tensor:
        if not self.in_place:
            return new
        fits = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        return old.copy_(new.detach()) if fits else new.detach().clone()

    def _record(self) -> None:
        """Copy the current state to the ring of past states."""
        self._past.index_copy_(0, self._slot, self._state.detach()[None])
        self._past_lengths.index_copy_(0, self._slot, self._lengths[None])
        self._slot.add_(1).remainder_(self.n_states)

    def reorder(self, beam_index: Tensor) -> None:
        """Row b continues row beam_index[b]; the index may be longer than the batch."""
        if self.filled:
            self._move(self._state.index_select(0, beam_index), self._lengths.index_select(0, beam_index))
            self._past = self._put(self._past, self._past.index_select(1, beam_index))
            self._past_lengths = self._put(self._past_lengths, self._past_lengths.index_select(1, beam_index))

    def truncate(self, length: int | Tensor) -> None:
        self.check_truncate(length)
        if not self.filled:
            return
        lengths = self._lengths.clamp(max=length)
        slot = (self._past_lengths == lengths).byte().argmax(0)  # (B,)
        earlier = self._past[slot, torch.arange(len(slot), device=slot.device)]
        shortened = lengths < self._lengths  # other rows keep their state and its gradient history
        self._move(torch.where(shortened[:, None], earlier, self._state), lengths)
        self._past_lengths.masked_fill_(self._past_lengths > lengths, -1)

    def check_truncate(self, length: int | Tensor) -> None:
        super().check_truncate(length)
        if not self.filled or torch.compiler.is_compiling():
            return
        lengths = self._lengths.clamp(max=length)
        if not (self._past_lengths == lengths).any(0).all():
            n_removed, n_kept = int((self._lengths - lengths).max()), self.n_states - 1
            raise ValueError(f"length={length} removes {n_removed} tokens, but only the last {n_kept} states are kept")

    def memory(self) -> int:
        return n_bytes(self._state, self._past, self._lengths, self._past_lengths) if self.filled else 0
