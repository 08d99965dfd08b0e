"""A model directory on disk: its files, checked before they are read, and the tensors in its weight files.

Nothing here runs code of the directory, and nothing is trusted: a path may lead out, an index may name missing files.
Every fault is a BadModelFile that names the file. Names and shapes are read from the headers alone; values are read
only after they have been checked.
"""

from __future__ import annotations

import errno
import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import BadModelFile
from ..foundation.files import fsync, previous_version, resolve_inside
from ..foundation.jsonio import parse_json
from .manifest import NAME as MANIFEST
from .manifest import Entry, Manifest, file_names
from .weight_steps import Tensors

INDEX = "model.safetensors.index.json"
_MOST_HEADER = 16 * 10**6  # bytes; real headers take 100 for a tensor
_MOST_TENSORS = 100_000  # in one file
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

    with path.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > path.stat().st_size - 8:
            raise BadModelFile(f"{path} is cut off or no safetensors file: its header is not whole")
        if length > _MOST_HEADER:
            raise BadModelFile(f"{path} has a header of {length:,} bytes, more than the {_MOST_HEADER:,} of any model")
        # It refuses a name that stands there twice, which safetensors lets pass.
        if (n_tensors := len(parse_json(opened.read(length), path))) > _MOST_TENSORS:
            raise BadModelFile(f"{path} has {n_tensors:,} tensors, more than the {_MOST_TENSORS:,} that a model has")
    with _bad_file_errors(path):
        file = safe_open(path, framework="pt")  # kept: opened a second time it might be another file
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - no dict
    for name, part in parts.items():
        if part.get_dtype() not in _DTYPES:
            known = ", ".join(_DTYPES)
            raise BadModelFile(f"{path}: {name} holds numbers of type {part.get_dtype()}; regard reads {known}")
    layout = {
        name: torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
        for name, part in parts.items()
    }

    def read() -> Tensors:
        with _bad_file_errors(path):
            return {name: file.get_tensor(name) for name in layout}

    return Weights(layout, read)


def open_pickle(path: Path) -> Weights:
    """One of PyTorch's own files, read with ``weights_only``: tensors and plain containers, no other objects."""
    with _bad_file_errors(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise BadModelFile(f"{path} does not hold named tensors")
    tensors = {str(name): x.detach() for name, x in content.items()}
    return Weights({name: torch.empty_like(x, device="meta") for name, x in tensors.items()}, lambda: tensors)


def merge_shards(shards: Mapping[str, Weights], index: Mapping[str, str] | None, root: Path) -> Weights:
    """Several files as one. Each tensor must be in one file only, the one that the ``index`` names."""
    place = {name: file for file, shard in shards.items() for name in shard.layout}
    faults = [
        f"{name} is in both {file} and {place[name]}"
        for file, shard in shards.items()
        for name in shard.layout
        if place[name] != file
    ]
    if index is not None:
        faults += [f"{file} lacks {name}" for name, file in index.items() if name not in shards[file].layout]
        unnamed = [(name, file) for name, file in place.items() if name not in index]
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

    shards: list[Tensors] = [{}]
    free = most_bytes
    for name, x in tensors.items():  # a tensor that is larger has a file of its own
        if shards[-1] and x.nbytes > free:
            shards.append({})
            free = most_bytes
        shards[-1][name] = x
        free -= x.nbytes
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


def raise_shortage(path: Path, reason: str) -> None:
    """Raise what the system said where the machine is short of something, and the file may be as it should be."""
    if "Cannot allocate memory" in reason:
        raise MemoryError(f"reading {path}: {reason}") from None
    if "Too many open files" in reason:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path)) from None


@contextmanager
def _bad_file_errors(path: Path) -> Iterator[None]:
    """Turn what a reader raises on a damaged file into BadModelFile."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, OSError, EOFError, ValueError, KeyError, RuntimeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise_shortage(path, reason)
        raise BadModelFile(f"{path} cannot be read, it is damaged or no such file: {reason}") from None


Verified = Literal["verified", "unverified"]
_CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_MOST_JSON = 32 * 2**20  # no config or index is larger


@dataclass(frozen=True)
class Provenance:
    """Where a model came from: the directory, what its config.json calls it, and whether a manifest vouched for it."""

    path: Path
    model_type: str
    verified: Verified
    token_ids: Mapping[str, Any] = field(default_factory=dict, repr=False)  # of config.json, unchanged
    generation_config: bytes | None = field(default=None, repr=False)  # that file, unchanged; only others read it


class Directory:
    """A model directory. With a manifest, all files are checked at once, and only listed files are read."""

    dtype: torch.dtype | None = None  # what a model of it is to be in; None: each tensor as it is stored

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        root = Path(path)
        if not root.exists() and previous_version(root).is_dir():
            root = previous_version(root)  # a save was cut off between its two renames; the old model is whole
        elif not root.exists():
            raise BadModelFile(
                f"there is no directory {str(root)!r}; regard loads local directories and downloads nothing"
            )
        elif not root.is_dir():
            raise BadModelFile(f"{root} is a file; a model is a directory with config.json and model.safetensors")
        elif not (root / "config.json").exists():
            raise BadModelFile(f"{root} has no config.json, so it is no model directory")
        self.root = root
        self._listed: Mapping[str, Entry] | None = None
        self.training_record: dict[str, Any] | None = None  # of the manifest
        manifest = Manifest.read(self.root) if verify else None
        if manifest is not None:
            manifest.check(self.root)
            self._listed = manifest.files
            self.training_record = None if manifest.training is None else dict(manifest.training)

    @property
    def verified(self) -> Verified:
        return "unverified" if self._listed is None else "verified"

    def files(self) -> dict[str, int]:
        """Every file and its size."""
        return {name: (self.root / name).lstat().st_size for name in sorted(file_names(self.root))}

    def has(self, name: str) -> bool:
        return (self.root / name).exists()

    def path(self, name: str) -> Path:
        """A file to read: inside the directory, an ordinary file, and listed where there is a manifest."""
        path = resolve_inside(self.root, name)
        if not path.exists():
            raise BadModelFile(f"{self.root} has no {name}")
        if not path.is_file():
            raise BadModelFile(f"{path} is not a file")
        if self._listed is not None and name not in self._listed:
            raise BadModelFile(f"{path} is not listed in {MANIFEST}, so nobody vouches for it")
        return path

    def bytes(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def json(self, name: str) -> dict[str, Any]:
        path = self.path(name)
        if path.stat().st_size > _MOST_JSON:
            raise BadModelFile(f"{path} has {path.stat().st_size} bytes, too many for what it should be")
        return parse_json(path.read_bytes(), path)

    def config(self) -> dict[str, Any]:
        """config.json; refused where it wants code of its own to be run."""
        fields = self.json("config.json")
        for name in _CONFIGS:
            if self.has(name) and "auto_map" in self.json(name):
                raise BadModelFile(
                    f"{self.root / name} has auto_map: the model needs code from its directory, and regard runs none"
                )
        if fields.get("quantization_config") is not None:
            raise BadModelFile(f"{self.root / 'config.json'} has quantization_config; regard reads unquantised weights")
        return fields

    def weights(self, *, allow_pickle: bool = False) -> Weights:
        """The tensors: one safetensors file, several with an index, or — only when allowed — PyTorch's pickles."""
        for single, index, pickled in (
            ("model.safetensors", INDEX, False),
            ("pytorch_model.bin", "pytorch_model.bin.index.json", True),
        ):
            if not self.has(single) and not self.has(index):
                continue
            if pickled and not allow_pickle:
                raise BadModelFile(
                    f"{self.root} has its weights as a pickle only; allow_pickle=True (--allow-pickle) reads it, "
                    f"tensors and nothing else"
                )
            names, weight_map = [single], None
            if not self.has(single):
                weight_map = self.json(index).get("weight_map")
                if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                    raise BadModelFile(f"{self.root / index} has no weight_map from tensors to files")
                names = sorted(set(weight_map.values()))
            open_shard = open_pickle if pickled else open_safetensors
            return merge_shards({name: open_shard(self.path(name)) for name in names}, weight_map, self.root)
        raise BadModelFile(f"{self.root} has no model.safetensors and no model.safetensors.index.json")
