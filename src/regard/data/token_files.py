"""Memory-mapped token files: the ids of all documents, the start of each document, and a header.

``NAME.bin`` is plain uint16 or uint32, as in nanoGPT, ``NAME.starts.bin`` is int64. ``NAME.json``, the header, is
written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import BadData
from ..foundation.files import atomic_file, write_atomic

_FORMAT = "regard-tokens-1"
_BLOCK = 1 << 16  # number of ids converted to an array at a time
Pieces = Iterable[tuple[Sequence[int], bool]]  # ids, and whether they end their document


@dataclass(frozen=True, eq=False)
class TokenFile:
    """The ids of all documents, one after the other."""

    tokens: NDArray[Any]  # (n,) uint16 or uint32, mapped from disk
    starts: NDArray[np.int64]  # (n_documents + 1,) start of each document, then the end of the last
    key: str = ""  # hash of the source and the tokenizer

    @property
    def n_documents(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> NDArray[np.int64]:
        """(n_documents,) number of tokens of each document."""
        return np.diff(self.starts)

    def document(self, index: int) -> list[int]:
        return self.tokens[self.starts[index] : self.starts[index + 1]].tolist()

    @classmethod
    def of(cls, documents: Iterable[Sequence[int]], vocab_size: int) -> TokenFile:
        """Documents in memory instead of on disk."""
        return cls.of_pieces(whole_documents(documents), vocab_size)

    @classmethod
    def of_pieces(cls, pieces: Pieces, vocab_size: int) -> TokenFile:
        """Documents that arrive in pieces, in memory instead of on disk."""
        starts = array("q", [0])
        blocks = list(_blocks(pieces, vocab_size, starts))
        tokens = np.concatenate(blocks) if blocks else np.zeros(0, _dtype(vocab_size))
        return cls(tokens, np.frombuffer(starts, dtype=np.int64))


def whole_documents(documents: Iterable[Sequence[int]]) -> Pieces:
    return ((ids, True) for ids in documents)


def _blocks(pieces: Pieces, vocab_size: int, starts: array[int]) -> Iterator[NDArray[Any]]:
    """All ids as arrays of about ``_BLOCK`` elements; appends the end of each document to ``starts``."""
    ids: list[int] = []
    n_before = 0
    for piece, is_last in pieces:
        ids.extend(piece)
        if is_last:
            starts.append(n_before + len(ids))
        if len(ids) >= _BLOCK:
            yield _block(ids, vocab_size)
            n_before += len(ids)
            ids = []
    yield _block(ids, vocab_size)


def _block(ids: list[int], vocab_size: int) -> NDArray[Any]:
    block = np.asarray(ids, dtype=np.int64)
    if len(block) and not (block.min() >= 0 and block.max() < vocab_size):
        raise ValueError(f"a document has the ids {block.min()} to {block.max()}, but vocab_size={vocab_size}")
    return block.astype(_dtype(vocab_size))


def write_tokens(path: Path, pieces: Pieces, vocab_size: int, key: str = "") -> TokenFile:
    """Write documents as they arrive. A concurrent reader sees the old files or the new ones, never a mixture."""
    starts = array("q", [0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(_with_suffix(path, ".bin")) as file:
        for block in _blocks(pieces, vocab_size, starts):
            file.write(block.tobytes())
        _with_suffix(path, ".json").unlink(missing_ok=True)  # it must never describe the new ids
    write_atomic(_with_suffix(path, ".starts.bin"), np.asarray(starts, dtype="<i8").tobytes())
    header = {
        "format": _FORMAT,
        "dtype": np.dtype(_dtype(vocab_size)).name,
        "tokens": starts[-1],
        "documents": len(starts) - 1,
    }
    header |= {"vocab_size": vocab_size, "key": key}
    write_atomic(_with_suffix(path, ".json"), json.dumps(header, indent=1).encode())
    return open_tokens(path)


def open_tokens(path: Path) -> TokenFile:
    """Map the files that ``write_tokens`` wrote."""
    try:
        header = json.loads(_with_suffix(path, ".json").read_bytes())
        if header["format"] != _FORMAT or header["dtype"] not in ("uint16", "uint32"):
            raise BadData(f"{path}.json is not a {_FORMAT} header")
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        n, n_documents = int(header["tokens"]), int(header["documents"])
        starts = np.frombuffer(_with_suffix(path, ".starts.bin").read_bytes(), dtype="<i8")
        size = _with_suffix(path, ".bin").stat().st_size
    except OSError as error:
        raise BadData(f"{path}: {error.filename} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadData(f"{path}.json is not a {_FORMAT} header: {error}") from None
    if size != n * dtype.itemsize or len(starts) != n_documents + 1 or starts[-1] != n or np.any(np.diff(starts) < 0):
        raise BadData(f"{path}.bin has {size:,} bytes, but its header says {n:,} tokens in {n_documents:,} documents")
    tokens: NDArray[Any] = np.memmap(_with_suffix(path, ".bin"), dtype=dtype, mode="r") if n else np.zeros(0, dtype)
    return TokenFile(tokens, starts, str(header.get("key", "")))


def cached_tokens(
    folder: Path,
    source_sha256: str,
    tokenizer_sha256: str,
    vocab_size: int,
    make: Callable[[], Pieces],
    older: Path | None = None,
) -> TokenFile:
    """The tokens of a source under a tokenizer, from ``folder`` or ``older`` if they are there, else from ``make``.

    New tokens are written to ``folder``, or to ``older`` if ``folder`` is not writable.
    """
    key = hashlib.sha256(f"{source_sha256} {tokenizer_sha256}".encode()).hexdigest()
    name = f"tokens-{key[:16]}"
    for directory in (folder, older):
        with contextlib.suppress(BadData):
            if directory is not None and (cached := open_tokens(directory / name)).key == key:
                return cached
    try:
        return write_tokens(folder / name, make(), vocab_size, key)
    except OSError:  # for example a read-only home directory
        if older is None:
            raise
        return write_tokens(older / name, make(), vocab_size, key)


def _with_suffix(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _dtype(vocab_size: int) -> str:
    return "<u2" if vocab_size <= 1 << 16 else "<u4"
