"""Texts of different lengths in one pass without padding: the tokens of all texts are rows of one matrix.

Products, norms and feed-forward networks process the tokens of all texts as rows (N, M). Only attention depends on
which text a row belongs to: it pads queries and keys to a batch (n, heads, W, D) and gathers the rows again
(``RaggedRows``). ``RaggedKeys`` has keys and values in such a batch, after those of earlier parts.

A row has the same bits whichever texts are in the pass: widths are multiples of 32, and attention processes
``QUERY_PART`` queries at a time, up to which the fused CPU kernel splits them into blocks of one size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.base_model import DecoderShape

COLUMN_MULTIPLE = 32  # keys and queries of a batch are padded to this
QUERY_PART = 128


def padded_width(n: int) -> int:
    """The next multiple of ``COLUMN_MULTIPLE``."""
    return -(-n // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


class RaggedRows:
    """n texts of ``lengths`` tokens as rows: row r is token ``index[r]`` of text ``text[r]``.

    There are R = max(min_rows, N) rows for N tokens; rows beyond the tokens belong to no text.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device, min_rows: int = 2) -> None:
        counts = torch.tensor(lengths)
        self.lengths, self.n_tokens = list(lengths), sum(lengths)
        self.n_rows, self.width = max(min_rows, self.n_tokens), padded_width(max(lengths))
        first = counts.cumsum(0) - counts
        text = torch.arange(len(lengths)).repeat_interleave(counts)
        self.text, self.index = torch.stack([text, torch.arange(self.n_tokens) - first[text]]).to(device)  # (N,) each
        self.last = (first + counts - 1).to(device)  # (n,) the last row of each text
        self.device = device

    def fill(self, tokens: Sequence[Sequence[int]]) -> Tensor:
        """The tokens of all texts as rows (R,); 0 beyond them."""
        flat = [token for text in tokens for token in text]
        return torch.tensor(flat + [0] * (self.n_rows - len(flat)), device=self.device)

    def extend(self, x: Tensor) -> Tensor:
        """x (N, …) with zeros for the rows that belong to no text: (R, …)."""
        return x if len(x) == self.n_rows else F.pad(x, (0, 0) * (x.dim() - 1) + (0, self.n_rows - len(x)))

    def pad(self, x: Tensor) -> Tensor:
        """Rows (R, H, 1, D) → batch (n, H, W, D), zeros where a text has no token."""
        batch = x.new_zeros(len(self.lengths), self.width, x.shape[1], x.shape[3])
        batch[self.text, self.index] = x[: self.n_tokens, :, 0]
        return batch.transpose(1, 2)

    def take(self, x: Tensor) -> Tensor:
        """Batch (n, H, W, D) → rows (R, H · D)."""
        return self.extend(x.transpose(1, 2)[self.text, self.index].flatten(1))


class RaggedKeys:
    """Keys and values (layers, 2, n, G, columns, D) of ragged rows, after the ``pasts`` (layers, 2, G, T, D).

    ``mask`` (n, 1, W, columns) is added to scores. A token sees all of its text or, if ``causal``, up to itself.
    """

    size = 1

    def __init__(
        self, shape: DecoderShape, rows: RaggedRows, pasts: Sequence[Tensor | None], dtype: torch.dtype, causal: bool
    ) -> None:
        n_past = [0 if past is None else past.shape[3] for past in pasts]
        self.ragged, self.ends = rows, [n + length for n, length in zip(n_past, rows.lengths, strict=True)]
        width, n, device = padded_width(max(self.ends)), len(n_past), rows.device
        sizes = (shape.n_layers, 2, n, shape.n_kv_heads, width, shape.d_head)
        self.data = torch.zeros(sizes, dtype=dtype, device=device)
        for number, past in enumerate(pasts):
            if past is not None:
                self.data[:, :, number, :, : n_past[number]] = past
        starts, ends = torch.tensor([n_past, self.ends]).to(device)
        self.positions = starts[rows.text] + rows.index  # (N,)
        columns = torch.arange(width, device=device)
        last = starts[:, None] + torch.arange(rows.width, device=device) if causal else ends[:, None] - 1
        visible = (columns <= last[..., None]).expand(n, rows.width, width)
        self.mask = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, -math.inf)[:, None]

    def update(self, layer: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of rows (R, 2G, 1, D); returns all k and v of the layer, (n, G, columns, D)."""
        buffer, rows = self.data[layer], self.ragged
        buffer[:, rows.text, :, self.positions] = new[: rows.n_tokens, :, 0].unflatten(1, (2, -1))
        k, v = buffer.unbind()
        return k, v

    def of_text(self, number: int) -> Tensor:
        """Keys and values (layers, 2, G, T, D) of one text."""
        return self.data[:, :, number, :, : self.ends[number]]


def attend_ragged(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, rows: RaggedRows, shares_keys: bool
) -> Tensor:
    """Queries of rows (R, H, 1, D) over keys and values of a batch (n, G, S, D) → (R, H · D)."""
    padded = rows.pad(q)
    masks = mask.expand(-1, -1, rows.width, -1).split(QUERY_PART, 2)
    parts = [
        F.scaled_dot_product_attention(part, k, v, attn_mask=part_mask, scale=scale, enable_gqa=shares_keys)
        for part, part_mask in zip(padded.split(QUERY_PART, 2), masks, strict=True)
    ]
    return rows.take(parts[0] if len(parts) == 1 else torch.cat(parts, 2))
