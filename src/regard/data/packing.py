"""Rows of equal length for language models: packed documents, or blocks cut from one long text.

Packed rows carry a document id for each token, and positions restart in each document, so that attention never crosses
from one document to the next. Both kinds are pure functions of (seed, epoch, row) or (seed, step), without any state.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from .hashing import integers, permutation, stable_key
from .token_files import TokenFile

IGNORE = -100  # target of positions without a loss; the default ignore_index of torch.nn.functional.cross_entropy


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A row of T tokens, or a batch of B rows; every field is (T,) or (B, T)."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]  # the next token of the same document; IGNORE after its last one
    documents: NDArray[np.int64]  # index of the token's document within the row, from 0; −1 for padding
    positions: NDArray[np.int64]  # position in the document's part of the row


@dataclass(frozen=True, eq=False)
class PackedRows:
    """All documents concatenated, in a random order for each epoch, and cut every ``context`` tokens.

    A document that does not fit continues in the next row, where its positions restart; only the last row of an epoch
    is padded.
    """

    file: TokenFile
    context: int
    seed: int = 0
    pad_id: int = 0
    shuffle: bool = True

    def __len__(self) -> int:
        return -(-len(self.file.tokens) // self.context)

    def row(self, epoch: int, index: int) -> PackedRow:
        documents, ends = _document_layout(self, epoch if self.shuffle else 0)
        width = self.context
        tokens, targets = np.full(width, self.pad_id, np.int64), np.full(width, IGNORE, np.int64)
        document_ids, positions = np.full(width, -1, np.int64), np.zeros(width, np.int64)
        offset, stop = index * width, min((index + 1) * width, int(ends[-1]))  # in the epoch's stream of tokens
        at = int(np.searchsorted(ends, offset, side="right"))  # index into ``documents``
        filled = number = 0
        while offset < stop:
            document = documents[at]
            start, end = int(self.file.starts[document]), int(self.file.starts[document + 1])
            skipped = offset - (int(ends[at]) - (end - start))
            n = min(end - start - skipped, stop - offset)
            part = slice(filled, filled + n)
            ids = self.file.tokens[start + skipped : min(start + skipped + n + 1, end)].astype(np.int64)
            tokens[part] = ids[:n]
            targets[filled : filled + len(ids) - 1] = ids[1:]
            document_ids[part], positions[part] = number, np.arange(n)
            offset += n
            filled += n
            at += 1
            number += n > 0  # an empty document gets no id
        return PackedRow(tokens, targets, document_ids, positions)

    def batch(self, epoch: int, indices: Iterable[int]) -> PackedRow:
        """Several rows of an epoch, each field (B, T)."""
        rows = [self.row(epoch, int(index)) for index in indices]
        names = ("tokens", "targets", "documents", "positions")
        return PackedRow(*(np.stack([getattr(row, name) for row in rows]) for name in names))


@lru_cache(maxsize=4)
def _document_layout(rows: PackedRows, epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(documents in the order of the epoch, end of each in its stream); cached, since every row needs both."""
    n = rows.file.n_documents
    documents = permutation(stable_key("documents", rows.seed, epoch), n) if rows.shuffle else np.arange(n)
    return documents, np.cumsum(np.diff(rows.file.starts)[documents])


@dataclass(frozen=True, eq=False)
class TokenBlocks:
    """Blocks of ``context`` tokens cut from one longer row, across document boundaries."""

    tokens: NDArray[np.integer]
    context: int

    def random(self, seed: int, step: int, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, targets), both (batch, context), at random positions that depend only on (seed, step)."""
        key = stable_key("blocks", seed, step)
        return self._at(integers(key, np.arange(batch), len(self.tokens) - self.context))

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.context

    def sequential(self, first: int, batch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(tokens, targets) of blocks first, first + 1 …; at most ``batch``, fewer at the end."""
        return self._at(np.arange(first, min(first + batch, len(self))) * self.context)

    def _at(self, starts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        rows = [self.tokens[start : start + self.context + 1] for start in starts.tolist()]
        block = np.stack(rows).astype(np.int64) if rows else np.zeros((0, self.context + 1), np.int64)
        return block[:, :-1], block[:, 1:]
