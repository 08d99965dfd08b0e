"""Position biases: what is added to a score because of where query and key stand.

Like masks they answer ``tile(rows, cols, frame)``. A bias first lays out what is O(T) (``operands``: its values by
distance, its projected relative encodings), under autograd; tiles are then read from that. A backend that recomputes
tiles hands the gradient of each tile to ``tile_backward`` and so trains the bias without ever holding T × S numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..frame import Frame, Span
from ..scores import Operands


class Bias(nn.Module):
    """Base of all biases. ``reads_content`` marks those that need q and k, not only their places."""

    reads_content: bool = False
    n_operands: int = 0

    def operands(self, frame: Frame) -> Operands:
        """The O(T) tensors that ``tile`` reads, differentiable in the parameters."""
        return ()

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        """The bias of some rows and columns, broadcastable to (B, H, R, C); q and k are those of the tile."""
        raise NotImplementedError  # a bias is its tile; there is no sensible default

    def tile_backward(
        self,
        rows: Span,
        cols: Span,
        frame: Frame,
        operands: Operands,
        q: Tensor,
        k: Tensor,
        d_tile: Tensor,
        d_operands: list[Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        """Add the gradient of one tile to ``d_operands``; return those of q and k where the content was read.

        The default lets autograd differentiate this one tile.
        """
        with torch.enable_grad():
            inputs = [x.detach().requires_grad_() for x in (q, k, *operands)]
            tile = self.tile(rows, cols, frame, tuple(inputs[2:]), inputs[0], inputs[1])
            if not tile.requires_grad:
                return None
            grads = torch.autograd.grad(
                tile.expand_as(d_tile), inputs, d_tile, allow_unused=True, materialize_grads=True
            )
        for total, grad in zip(d_operands, grads[2:], strict=True):
            total += grad
        return (grads[0], grads[1]) if self.reads_content else None

    def dense(self, frame: Frame, q: Tensor, k: Tensor) -> Tensor:
        """The whole bias: the tile of everything."""
        return self.tile(slice(None), slice(None), frame, self.operands(frame), q, k)

    def check(self, frame: Frame) -> None:
        """Raise when the bias cannot belong to this frame."""

    @property
    def trainable(self) -> bool:
        return any(p.requires_grad for p in self.parameters())


class DenseBias(Bias):
    """Any tensor of additive scores: (T, S), (H, T, S) or (B or 1, H or 1, T, S), trainable if it is a parameter."""

    n_operands = 1

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        if not 2 <= values.dim() <= 4 or not values.is_floating_point():
            raise ValueError(f"DenseBias wants 2 to 4 floating dimensions, got {values.dtype} {tuple(values.shape)}")
        # Kept as it came: a plain tensor may belong to someone else's graph and must keep its gradient path.
        self.values = values

    def operands(self, frame: Frame) -> Operands:
        values = self.values[(None,) * (4 - self.values.dim())]
        batch = slice(frame.first_batch, frame.first_batch + frame.n_batch) if values.shape[0] > 1 else slice(None)
        heads = frame.heads if values.shape[1] > 1 else slice(None)
        return (values[batch, heads],)

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        return operands[0][:, :, rows][..., cols]

    def check(self, frame: Frame) -> None:
        given = tuple(self.values[(None,) * (4 - self.values.dim())].shape)
        sizes = (frame.n_batch, frame.n_heads, frame.n_queries, frame.n_keys)
        if given[2:] != sizes[2:] or any(g not in (1, n) for g, n in zip(given[:2], sizes[:2], strict=True)):
            raise ValueError(f"bias of shape {given} does not fit (batch, heads, queries, keys) = {sizes}")
        if self.values.device != frame.device:
            raise ValueError(f"bias is on {self.values.device} but q is on {frame.device}; put them on one device")

    @property
    def trainable(self) -> bool:
        return self.values.requires_grad


class Sum(Bias):
    """Several biases added up."""

    def __init__(self, first: Bias, *others: Bias) -> None:
        super().__init__()
        parts = (first, *others)
        self.parts = nn.ModuleList(parts)
        self.reads_content = any(part.reads_content for part in parts)
        self.n_operands = sum(part.n_operands for part in parts)

    @property
    def _parts(self) -> list[Bias]:
        return [part for part in self.parts if isinstance(part, Bias)]

    @property
    def trainable(self) -> bool:
        return any(part.trainable for part in self._parts)

    def operands(self, frame: Frame) -> Operands:
        return tuple(x for part in self._parts for x in part.operands(frame))

    def tile(self, rows: Span, cols: Span, frame: Frame, operands: Operands, q: Tensor, k: Tensor) -> Tensor:
        total: Tensor | None = None
        for part in self._parts:
            own, operands = operands[: part.n_operands], operands[part.n_operands :]
            tile = part.tile(rows, cols, frame, own, q, k)
            total = tile if total is None else total + tile
        assert total is not None
        return total

    def check(self, frame: Frame) -> None:
        for part in self._parts:
            part.check(frame)
