"""Sharded tensors on disk: each process writes the pieces it holds, and any number of processes can read them.

Files are safetensors, never pickles; an index says which file holds which region of a tensor.
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
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import BadModelFile
from ..foundation.files import resolve_inside
from ..foundation.jsonio import read_json, to_json
from ..hub.hf_directory import SAFETENSORS_DTYPES, raise_shortage
from ..hub.manifest import Entry

INDEX = "index.json"
_VERSION = 1
_NAMES = {dtype: name for name, dtype in SAFETENSORS_DTYPES.items()}
_CHUNK_BYTES = 1 << 24  # bytes written and hashed at a time


class TensorRegion(NamedTuple):
    """A rectangular part of a tensor: its offset and size in each dimension."""

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
        """The region that both contain; if there is none, its size is 0 in some dimension."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = (min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True))
        return TensorRegion(offset, tuple(max(0, end - start) for start, end in zip(offset, ends, strict=True)))

    def slices(self, within: TensorRegion) -> tuple[slice, ...]:
        """This region as an index into the tensor that holds the region ``within``."""
        starts = (own - outer for own, outer in zip(self.offset, within.offset, strict=True))
        return tuple(slice(start, start + n) for start, n in zip(starts, self.size, strict=True))


class StoredTensor(NamedTuple):
    """The index entry of a tensor: each piece is a file, which holds it under the tensor's name, and its region."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[tuple[str, TensorRegion], ...]


def is_sharded(x: Tensor) -> bool:
    """Whether other processes hold parts of the tensor."""
    return (placement := _placement(x)) is not None and not placement.is_replicate()


def local(x: Tensor) -> Tensor:
    """The part of the tensor that this process holds."""
    return x.detach() if _placement(x) is None else x.detach().to_local()  # type: ignore[attr-defined]  # a DTensor


def local_region(x: Tensor) -> TensorRegion:
    """The region of the tensor that this process holds: all of it, or one of the even slices of fully_shard."""
    placement = _placement(x)
    if placement is None or placement.is_replicate():
        return TensorRegion.whole(x.shape)
    mesh, dim = x.device_mesh, placement.dim  # type: ignore[attr-defined]  # a DTensor, since it has a placement
    length = -(-x.shape[dim] // mesh.size())
    start = min(mesh.get_local_rank() * length, x.shape[dim])
    offset, size = [0] * x.dim(), list(x.shape)
    offset[dim], size[dim] = start, min(length, x.shape[dim] - start)
    return TensorRegion(tuple(offset), tuple(size))


def _placement(x: Tensor) -> Any:
    """The placement of a DTensor over the processes; None for a plain tensor."""
    module = sys.modules.get("torch.distributed.tensor")  # half a second to import; without it there is no DTensor
    if module is None or not isinstance(x, module.DTensor):
        return None
    return x.placements[0]


def is_dtensor(x: object) -> bool:
    """Whether ``x`` is a DTensor, without importing torch.distributed."""
    return hasattr(x, "full_tensor")


def shard_like(x: Tensor, like: Any) -> Tensor:
    """Shard ``x``, which is equal on all processes, like ``like``: each keeps its own part, without communication.

    If ``like`` is a plain tensor or ``x`` is already sharded, ``x`` is returned unchanged.
    """
    if is_dtensor(x) or not is_dtensor(like):
        return x
    from torch.distributed.tensor import DTensor, Replicate

    replicated = [Replicate()] * like.device_mesh.ndim
    whole = DTensor.from_local(x, like.device_mesh, replicated, run_check=False)
    return whole.redistribute(placements=like.placements)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Entry:
    """Write a safetensors file tensor by tensor and flush it to disk; returns its length and SHA-256.

    The writer of safetensors copies all tensors in memory first, and its errors drop the message of the system.
    """
    for name, x in tensors.items():
        if x.dtype not in _NAMES:
            raise ValueError(f"{name} is {x.dtype}, which cannot be stored; use {', '.join(map(str, _NAMES))}")
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))  # keeps every tensor aligned
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        x = tensors[name]
        start, end = end, end + x.nbytes
        header[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [start, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for chunk in (len(text).to_bytes(8, "little"), text):
            file.write(chunk)
            digest.update(chunk)
        for name in order:
            numbers: Any = tensors[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(numbers), _CHUNK_BYTES):
                file.write(numbers[start : start + _CHUNK_BYTES])
                digest.update(numbers[start : start + _CHUNK_BYTES])
        file.flush()
        os.fsync(file.fileno())
    return Entry(8 + len(text) + end, digest.hexdigest())


@dataclass(frozen=True)
class Index:
    """Where each tensor is stored; ``tied`` maps the names of tied tensors to the name they are stored under."""

    tensors: Mapping[str, StoredTensor]
    tied: Mapping[str, str]

    def text(self) -> bytes:
        tensors = {}
        for name, (shape, dtype, pieces) in sorted(self.tensors.items()):
            entries = [{"file": file, "offset": list(part.offset), "size": list(part.size)} for file, part in pieces]
            tensors[name] = {"shape": list(shape), "dtype": _NAMES[dtype], "pieces": entries}
        return to_json({"regard_checkpoint": _VERSION, "tensors": tensors, "tied": dict(sorted(self.tied.items()))})

    @classmethod
    def read(cls, root: Path) -> Index:
        """Read an index and check that the pieces of each tensor are complete.

        Pieces are even slices, so comparing the number of elements is enough.
        """
        path = resolve_inside(root, INDEX)
        document = read_json(path)
        try:
            if document["regard_checkpoint"] != _VERSION:
                raise ValueError("another version")
            tied = dict(document["tied"])
            tensors = {name: _stored_tensor(entry) for name, entry in document["tensors"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise BadModelFile(f"{path} is not the index of a regard checkpoint") from None
        for name, stored in tensors.items():
            held = sum(region.numel for _, region in stored.pieces)
            if held != math.prod(stored.shape):
                raise BadModelFile(f"{path}: the pieces of {name} hold {held} of {math.prod(stored.shape)} values")
        for name, target in tied.items():
            if target not in tensors:
                raise BadModelFile(f"{path}: {name} is tied to {target}, which is missing")
        return cls(tensors, tied)


def _stored_tensor(entry: Any) -> StoredTensor:
    shape, pieces = tuple(map(int, entry["shape"])), []
    for piece in entry["pieces"]:
        region = TensorRegion(tuple(map(int, piece["offset"])), tuple(map(int, piece["size"])))
        if region.overlap(TensorRegion.whole(shape)) != region:
            raise ValueError(f"{region} does not lie in {shape}")
        pieces.append((str(piece["file"]), region))
    return StoredTensor(shape, SAFETENSORS_DTYPES[entry["dtype"]], tuple(pieces))


class TensorReader:
    """Reads the tensors of a directory through its index. Each file is opened once; only requested parts are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}

    @cached_property
    def index(self) -> Index:
        return Index.read(self.path)

    def names(self, prefix: str = "") -> list[str]:
        """The names of all tensors that start with ``prefix``, sorted."""
        return sorted(name for name in {**self.index.tensors, **self.index.tied} if name.startswith(prefix))

    def tensors(self, prefix: str = "") -> dict[str, Tensor]:
        """The tensors under a prefix such as "model/", which their keys omit. Tied names share one tensor."""
        names = {name: self.index.tied.get(name, name) for name in self.names(prefix)}
        read = {stored: self.read(stored) for stored in set(names.values())}
        return {name.removeprefix(prefix): read[stored] for name, stored in names.items()}

    def tensor(self, name: str, like: Tensor | None = None) -> Tensor:
        """One tensor, whole on the CPU; with ``like``, on its device and sharded like it."""
        if like is None:
            return self.read(name)
        shape = self._find_stored(name)[1].shape
        if shape != tuple(like.shape):
            raise BadModelFile(f"{self.path}: {name} has shape {shape}, the run needs {tuple(like.shape)}")
        part = self.read(name, local_region(like)).to(like.device)
        if _placement(like) is None:
            return part
        sharded: Any = like
        mesh, placements = sharded.device_mesh, sharded.placements
        return type(sharded).from_local(part, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())

    def read(self, name: str, region: TensorRegion | None = None) -> Tensor:
        """Assemble a tensor, or one region of it, from its pieces."""
        from safetensors import SafetensorError, safe_open

        stored_name, stored = self._find_stored(name)
        region = TensorRegion.whole(stored.shape) if region is None else region
        out = torch.empty(region.size, dtype=stored.dtype)
        for file_name, held in stored.pieces:
            shared = region.overlap(held)
            if not shared.numel:
                continue
            path = resolve_inside(self.path, file_name)
            try:
                if file_name not in self._files:
                    self._files[file_name] = safe_open(path, framework="pt")
                file, slices = self._files[file_name], shared.slices(held)
                piece = file.get_slice(stored_name)[slices] if slices else file.get_tensor(stored_name)
            except (SafetensorError, OSError, RuntimeError) as error:
                raise_shortage(path, str(error))
                raise BadModelFile(f"{path} is missing or damaged: {error}") from None
            out[shared.slices(region)] = piece
        return out

    def _find_stored(self, name: str) -> tuple[str, StoredTensor]:
        """The name a tensor is stored under, which differs for a tied one, and its index entry."""
        stored_name = self.index.tied.get(name, name)
        if stored_name not in self.index.tensors:
            raise BadModelFile(f"{self.path} holds no tensor {name}")
        return stored_name, self.index.tensors[stored_name]
