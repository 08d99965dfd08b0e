"""Tensors on disk in pieces: each process writes the pieces it holds, any number of processes reads what it needs.

A file is safetensors, an index says which region of which tensor lies in which file. Nothing here is a pickle.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadModelFile
from ..foundation.files import resolve_inside
from ..foundation.jsonio import parse_json, to_json
from ..hub.manifest import Entry

INDEX = "index.json"
_VERSION = 1
_DTYPES: dict[torch.dtype, str] = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL"},
}
_KINDS = {kind: dtype for dtype, kind in _DTYPES.items()}
_AT_ONCE = 1 << 24  # bytes written and hashed at a time


@dataclass(frozen=True)
class TensorRegion:
    """A part of a tensor: where it starts and how long it is, in each dimension."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Iterable[int]) -> TensorRegion:
        size = tuple(shape)
        return cls((0,) * len(size), size)

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def overlap(self, other: TensorRegion) -> TensorRegion:
        """What both hold; its size is 0 somewhere where that is nothing."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.size, other.offset, other.size, strict=True)
        size = tuple(max(0, min(a + n, b + m) - o) for (a, n, b, m), o in zip(ends, offset, strict=True))
        return TensorRegion(offset, size)

    def slices(self, within: TensorRegion) -> tuple[slice, ...]:
        """This region as an index into the tensor that holds the region ``within``."""
        starts = (own - outer for own, outer in zip(self.offset, within.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))


@dataclass(frozen=True)
class TensorSlice:
    """A region of a tensor and the file it lies in, under the tensor's name."""

    file: str
    region: TensorRegion


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as the index has it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[TensorSlice, ...]


# ------------------------------------------------------------------------------------- what a process holds


def is_sharded(x: Tensor) -> bool:
    """Whether other processes hold the rest of it."""
    placed = _placement(x)
    return placed is not None and not placed.is_replicate()


def local(x: Tensor) -> Tensor:
    """The numbers this process holds."""
    return x.detach() if _placement(x) is None else x.detach().to_local()  # type: ignore[attr-defined]  # a DTensor


def local_region(x: Tensor) -> TensorRegion:
    """Which part of the tensor this process holds: all of it, or one of the even slices fully_shard cuts."""
    placed = _placement(x)
    if placed is None or placed.is_replicate():
        return TensorRegion.whole(x.shape)
    if not placed.is_shard():
        raise ValueError(f"a tensor placed as {placed} cannot be stored: it is a sum not yet taken")
    mesh, dim = x.device_mesh, placed.dim  # type: ignore[attr-defined]  # a DTensor, since it is placed
    length = -(-x.shape[dim] // mesh.size())
    start = min(mesh.get_local_rank() * length, x.shape[dim])
    offset, size = [0] * x.dim(), list(x.shape)
    offset[dim], size[dim] = start, min(length, x.shape[dim] - start)
    held = tuple(local(x).shape)
    if held != tuple(size):
        raise ValueError(f"a tensor of shape {tuple(x.shape)} is cut unevenly: {held} here instead of {tuple(size)}")
    return TensorRegion(tuple(offset), tuple(size))


def _placement(x: Tensor) -> Any:
    """How a DTensor lies over the processes; None for a plain tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # half a second to import, and there is none without it
    if module is None or not isinstance(x, module.DTensor):
        return None
    if x.device_mesh.ndim != 1:
        raise ValueError(f"a tensor over a mesh of {x.device_mesh.ndim} dimensions cannot be stored; 1 can")
    return x.placements[0]


# ------------------------------------------------------------------------------------- one file


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Entry:
    """Write one safetensors file and force it to disk, a tensor at a time; its length and SHA-256 on the way.

    The library's own writer needs all numbers a second time in memory, and its errors lose what the system said.
    """
    for name, x in tensors.items():
        if x.dtype not in _DTYPES:
            raise ValueError(f"{name} is {x.dtype}; stored are {', '.join(map(str, _DTYPES))}")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # so that all lie aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        x = tensors[name]
        start, end = end, end + x.nbytes
        header[name] = {"dtype": _DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            digest.update(chunk)
        for name in order:
            numbers = memoryview(_bytes(tensors[name]))
            for at in range(0, len(numbers), _AT_ONCE):
                file.write(numbers[at : at + _AT_ONCE])
                digest.update(numbers[at : at + _AT_ONCE])
        file.flush()
        os.fsync(file.fileno())
    return Entry(8 + len(text) + end, digest.hexdigest())


def _bytes(x: Tensor) -> Any:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


# ------------------------------------------------------------------------------------- all of them


@dataclass(frozen=True)
class Index:
    """Where every tensor lies; ``tied`` gives names whose tensor is stored under another name."""

    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]

    def text(self) -> bytes:
        tensors = {name: _stored_to_json(stored) for name, stored in sorted(self.tensors.items())}
        return to_json({"regard_checkpoint": _VERSION, "tensors": tensors, "tied": dict(sorted(self.tied.items()))})

    @classmethod
    def read(cls, root: Path) -> Index:
        path = resolve_inside(root, INDEX)
        try:
            text = path.read_bytes()
        except OSError as error:
            raise BadModelFile(f"{path} cannot be read: {error.strerror}") from None
        match parse_json(text, path):
            case {"regard_checkpoint": 1, "tensors": dict(tensors), "tied": dict(tied)}:
                try:
                    index = cls({name: _stored_from_json(x) for name, x in tensors.items()}, tied)
                except (KeyError, TypeError, ValueError, AttributeError):
                    raise BadModelFile(f"{path} is not an index of regard's") from None
                index._check(path)
                return index
        raise BadModelFile(f"{path} is not an index of regard's")

    def _check(self, path: Path) -> None:
        """Every tensor whole: pieces are even slices, so that those which add up to it also cover it."""
        for name, stored in self.tensors.items():
            held = sum(piece.region.numel for piece in stored.pieces)
            if held != math.prod(stored.shape):
                raise BadModelFile(f"{path}: the pieces of {name} hold {held} of {math.prod(stored.shape)} numbers")
        for name, target in self.tied.items():
            if target not in self.tensors:
                raise BadModelFile(f"{path}: {name} is tied to {target}, which is not there")


class Reader:
    """The tensors of a directory by its index, each file opened once and read only where asked."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, Any] = {}

    @cached_property
    def index(self) -> Index:
        return Index.read(self.root)

    def names(self, prefix: str = "") -> list[str]:
        return sorted(name for name in {**self.index.tensors, **self.index.tied} if name.startswith(prefix))

    def stored_as(self, name: str) -> str:
        """The name a tensor is stored under: its own, or that of the one it is tied to."""
        found = self.index.tied.get(name, name)
        if found not in self.index.tensors:
            raise BadModelFile(f"{self.root} holds no tensor {name}")
        return found

    def read(self, name: str, region: TensorRegion | None = None) -> Tensor:
        """A tensor, or one region of it, put together from its pieces."""
        stored = self.index.tensors[self.stored_as(name)]
        region = TensorRegion.whole(stored.shape) if region is None else region
        out = torch.empty(region.size, dtype=stored.dtype)
        for piece in stored.pieces:
            shared = region.overlap(piece.region)
            if shared.numel:
                out[shared.slices(region)] = self._slice(piece, self.stored_as(name), shared.slices(piece.region))
        return out

    def read_like(self, name: str, like: Tensor) -> Tensor:
        """A tensor on the device of ``like`` and, where that is sharded, sharded as it is: only this process' slice."""
        shape = self.index.tensors[self.stored_as(name)].shape
        if shape != tuple(like.shape):
            raise BadModelFile(f"{self.root}: {name} has shape {shape}, the run needs {tuple(like.shape)}")
        here = self.read(name, local_region(like)).to(like.device)
        if _placement(like) is None:
            return here
        return type(like).from_local(  # type: ignore[attr-defined]  # a DTensor, since it is placed
            here,
            like.device_mesh,  # type: ignore[attr-defined]  # likewise
            like.placements,  # type: ignore[attr-defined]  # likewise
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )

    def _slice(self, piece: TensorSlice, name: str, slices: tuple[slice, ...]) -> Tensor:
        from safetensors import SafetensorError, safe_open

        path = resolve_inside(self.root, piece.file)
        try:
            if piece.file not in self._files:
                self._files[piece.file] = safe_open(path, framework="pt")
            file = self._files[piece.file]
            return file.get_slice(name)[slices] if slices else file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise BadModelFile(f"{path} cannot be read, it is damaged or no such file: {error}") from None


def _stored_to_json(stored: StoredTensor) -> dict[str, Any]:
    pieces = [{"file": p.file, "offset": list(p.region.offset), "size": list(p.region.size)} for p in stored.pieces]
    return {"shape": list(stored.shape), "dtype": _DTYPES[stored.dtype], "pieces": pieces}


def _stored_from_json(entry: Any) -> StoredTensor:
    shape = tuple(map(int, entry["shape"]))
    regions = [TensorRegion(tuple(map(int, p["offset"])), tuple(map(int, p["size"]))) for p in entry["pieces"]]
    for region in regions:
        if region.overlap(TensorRegion.whole(shape)) != region:
            raise ValueError(f"{region} does not lie in {shape}")
    pieces = (TensorSlice(str(p["file"]), region) for p, region in zip(entry["pieces"], regions, strict=True))
    return StoredTensor(shape, _KINDS[entry["dtype"]], tuple(pieces))
