"""Tensors in files: their names and shapes first, from the headers alone, their numbers only when all is in order."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import BadModelFile
from ..foundation.files import fsync
from ..foundation.jsonio import parse_json
from .steps import Tensors

INDEX = "model.safetensors.index.json"
_MOST_HEADER = 100 * 10**6  # what safetensors itself allows
_DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool},
}


@dataclass(frozen=True)
class Weights:
    """Tensors on the meta device, until ``read`` fetches the numbers."""

    layout: Tensors
    read: Callable[[], Tensors]


def open_safetensors(path: Path) -> Weights:
    """One safetensors file. safetensors checks that shapes, offsets and the file's length agree."""
    from safetensors import safe_open

    parse_json(_header(path), path)  # for a name that stands there twice, which safetensors lets pass
    with _refusing(path):
        file = safe_open(path, framework="pt")  # kept: opened a second time it might be another file
        layout = {name: _on_meta(file.get_slice(name), name, path) for name in file.keys()}  # noqa: SIM118 - no dict

    def read() -> Tensors:
        with _refusing(path):
            return {name: file.get_tensor(name) for name in layout}

    return Weights(layout, read)


def open_pickle(path: Path) -> Weights:
    """One of PyTorch's own files, read with ``weights_only``: tensors and plain containers, no other objects."""
    with _refusing(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise BadModelFile(f"{path} does not hold named tensors")
    tensors = {str(name): x.detach() for name, x in content.items()}
    return Weights({name: torch.empty_like(x, device="meta") for name, x in tensors.items()}, lambda: tensors)


def together(shards: Mapping[str, Weights], promised: Mapping[str, str] | None, root: Path) -> Weights:
    """Several files as one. Each tensor must be in one file, and that file the one the index ``promised``."""
    place = {name: file for file, shard in shards.items() for name in shard.layout}
    faults = [
        f"{name} is in both {file} and {place[name]}"
        for file, shard in shards.items()
        for name in shard.layout
        if place[name] != file
    ]
    if promised is not None:
        faults += [f"{file} lacks {name}" for name, file in promised.items() if name not in shards[file].layout]
        unnamed = [(name, file) for name, file in place.items() if name not in promised]
        faults += [f"{file} holds {name}, which the index does not name" for name, file in unnamed]
    if faults:
        raise BadModelFile(f"{root}: index and files disagree: {'; '.join(faults)}")
    return Weights(
        {name: x for shard in shards.values() for name, x in shard.layout.items()},
        lambda: {name: x for shard in shards.values() for name, x in shard.read().items()},
    )


def write_safetensors(folder: Path, tensors: Tensors, most_bytes: int) -> dict[str, object] | None:
    """Write model.safetensors, or numbered files of at most ``most_bytes``; their index where there are several."""
    from safetensors.torch import save_file

    shards = _split(tensors, most_bytes)
    files = [
        "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        for i in range(1, len(shards) + 1)
    ]
    for name, shard in zip(files, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        fsync(folder / name)
    if len(shards) == 1:
        return None
    total = sum(x.nbytes for x in tensors.values())
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _split(tensors: Tensors, most_bytes: int) -> list[Tensors]:
    """Files in order of the tensors, each filled until the next tensor would not fit; a larger one has its own."""
    shards: list[Tensors] = [{}]
    room = most_bytes
    for name, x in tensors.items():
        if shards[-1] and x.nbytes > room:
            shards.append({})
            room = most_bytes
        shards[-1][name] = x
        room -= x.nbytes
    return shards


def _header(path: Path) -> bytes:
    """The JSON at the start of a safetensors file."""
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(path.stat().st_size - 8, _MOST_HEADER):
            raise BadModelFile(f"{path} is cut off or no safetensors file: its header is not whole")
        return file.read(length)


def _on_meta(part: Any, name: str, path: Path) -> Tensor:
    kind = part.get_dtype()
    if kind not in _DTYPES:
        raise BadModelFile(f"{path}: {name} holds numbers of type {kind}; regard reads {', '.join(_DTYPES)}")
    return torch.empty(part.get_shape(), dtype=_DTYPES[kind], device="meta")


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what a reader raises on a damaged file into BadModelFile."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, OSError, EOFError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadModelFile(f"{path} cannot be read, it is damaged or no such file: {reason}") from None
