"""LSTM and GRU layers: a whole text through torch's fused kernels, or one step at a time.

    LSTM  i, f, o = σ(W_x x + W_h h),  g = tanh(…),  c ← f ∘ c + i ∘ g,  h ← o ∘ tanh(c)   Hochreiter & Schmidhuber 1997
    GRU   r, z = σ(W_x x + W_h h),  n = tanh(W_x x + r ∘ W_h h),  h ← (1 - z) ∘ n + z ∘ h  Cho et al. 2014; cuDNN's form

Padding does not need packed sequences, which wait for the device and cannot be traced. Instead each layer reads one
more number a token, 1 where it is padding, whose fixed weights shut the gates that write and open those that keep:
i = 0 and f = 1, or z = 1. A state that is still 0 then stays 0, and c passes through unchanged, both exactly.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

State = tuple[Tensor, ...]
"""(B, M) tensors: h of each layer, then of an LSTM c of each layer; a decoder may add more."""

_SHUT = 1e4  # far enough that σ is 0 or 1 in every precision, and still a number in fp16
_ON_PADDING = {"lstm": (-_SHUT, _SHUT, 0.0, 0.0), "gru": (0.0, _SHUT, 0.0)}  # in torch's order: i f g o, and r z n


class Rows(NamedTuple):
    """A ragged batch put in order: the real tokens of each row first, wherever its padding stands."""

    order: Tensor  # (B, T) for each place in the tight row, the place in the row as given
    place: Tensor  # (B, T) the way back
    real: Tensor  # (B, T) booleans: what is no padding in the tight row

    @classmethod
    def of(cls, keep: Tensor) -> Rows:
        order = (~keep).byte().argsort(dim=1, stable=True)
        return cls(order, order.argsort(dim=1), keep.gather(1, order))

    def tight(self, x: Tensor) -> Tensor:
        """(B, T, M) with the real tokens first."""
        return x.gather(1, self.order[..., None].expand_as(x))

    def spread(self, x: Tensor) -> Tensor:
        """(B, T, M) as the row was given."""
        return x.gather(1, self.place[..., None].expand_as(x))


class Gates(nn.Module):
    """The weights of one layer in one direction, those of all gates one below the other."""

    def __init__(self, cell: str, d_in: int, d_out: int) -> None:
        super().__init__()
        self.cell, self.n_gates = cell, len(_ON_PADDING[cell])
        rows = self.n_gates * d_out
        self.w_x = nn.Parameter(torch.empty(rows, d_in))
        self.w_h = nn.Parameter(torch.empty(rows, d_out))
        self.b_x = nn.Parameter(torch.empty(rows))
        self.b_h = nn.Parameter(torch.empty(rows))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Xavier-uniform gate by gate; an LSTM begins by remembering, f ≈ σ(1) (Jozefowicz et al. 2015)."""
        for weight in (self.w_x, self.w_h):
            for gate in weight.chunk(self.n_gates):
                nn.init.xavier_uniform_(gate)
        for bias in (self.b_x, self.b_h):
            nn.init.zeros_(bias)
        if self.cell == "lstm":
            nn.init.ones_(self.b_x.chunk(4)[1])

    def weights(self, padded: bool) -> list[Tensor]:
        """As the fused kernels take them; ``padded`` adds the column that reads whether a token is padding."""
        w_x: Tensor = self.w_x
        if padded:
            n_units = w_x.shape[0] // self.n_gates
            column = torch.cat([w_x.new_full((n_units, 1), value) for value in _ON_PADDING[self.cell]])
            w_x = torch.cat([w_x, column], dim=1)
        return [w_x, self.w_h, self.b_x, self.b_h]


class Recurrence(nn.Module):
    """Layers of LSTM or GRU cells over x (B, T, d_in) → (B, T, M); reading both ways, each direction has M/2 units."""

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
        """Unpadded rows, from a first state or 0: all outputs, and the state after the last token."""
        return self._fused(x, range(self.n_layers), start)

    def ragged(self, x: Tensor, real: Tensor) -> tuple[Tensor, State]:
        """Rows that end in padding, ``real`` (B, T) False there: outputs, 0 at padding, and the rows' last states."""
        padding = (~real)[..., None]
        last_token = (real.sum(1, keepdim=True) - 1).clamp(min=0)[..., None]  # (B, 1, 1)
        finals: list[State] = []
        for layer in range(self.n_layers):
            if layer > 0:
                x = F.dropout(x, self.dropout, self.training)
            x, final = self._fused(torch.cat([x, padding.to(x.dtype)], dim=-1), range(layer, layer + 1), padded=True)
            x = x.masked_fill(padding, 0.0)
            # c came through the padding, h did not. The way back ends at the first token: there h is right already.
            h = x[..., : self.n_units].gather(1, last_token.expand(-1, -1, self.n_units))[:, 0]
            finals.append((torch.cat([h, final[0][:, self.n_units :]], dim=-1), *final[1:]))
        return x, tuple(part for kind in zip(*finals, strict=True) for part in kind)

    def _fused(
        self, x: Tensor, layers: range, start: State | None = None, padded: bool = False
    ) -> tuple[Tensor, State]:
        """Some layers in one call of torch's kernel (cuDNN on a GPU)."""
        gates = [one for layer in layers for one in self._directions(layer)]
        weights = _side_by_side([one.weights(padded) for one in gates])
        n_kinds = 2 if self.cell == "lstm" else 1
        if start is None:
            state = [x.new_zeros(len(gates), x.shape[0], self.n_units)] * n_kinds
        else:
            held = torch.stack(start).to(x.dtype)
            state = list(held.split(len(layers)))
        options = (True, len(layers), self.dropout, self.training, self.back is not None, True)
        if self.cell == "lstm":
            output, *state = torch.lstm(x, state, weights, *options)
        else:
            output, *state = torch.gru(x, state[0], weights, *options)
        # (layers · directions, B, units) → for each layer (B, M)
        return output, tuple(
            part for s in state for part in s.unflatten(0, (len(layers), -1)).transpose(1, 2).flatten(2).unbind()
        )

    def _directions(self, layer: int) -> list[Gates]:
        stacks = [self.ahead] if self.back is None else [self.ahead, self.back]
        return [cast(Gates, stack[layer]) for stack in stacks]

    # ---- one step at a time, for decoders that feed back what they saw

    def project(self, x: Tensor) -> Tensor:
        """The first layer's W_x x + b_x of all tokens at once; further inputs of a step are added by ``feed``."""
        (first,) = self._directions(0)
        return F.linear(x, first.w_x[:, : x.shape[-1]], first.b_x)

    def feed(self, gates: Tensor, fed: Tensor) -> Tensor:
        """Add the part of W_x that reads what is fed back, the last columns: gates (B, gates · M), fed (B, M)."""
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


def _side_by_side(weights: list[list[Tensor]]) -> list[Tensor]:
    """On a GPU as views of one block, all matrices, then all biases: otherwise cuDNN copies, with a warning."""
    if not weights[0][0].is_cuda:
        return [weight for one in weights for weight in one]
    parts = [part for some in (slice(0, 2), slice(2, 4)) for one in weights for part in one[some]]
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
