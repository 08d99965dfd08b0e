"""A model directory on disk: its files, checked before they are read, and the tensors in its weight files.

No code from the directory is run, and no content is trusted: a path may lead outside, an index may name missing files.
Every fault raises a BadModelFile that names the file. Names and shapes are read from the headers and checked before any
tensor is read.
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

from ..errors import BadModelFile, first_line
from ..foundation.files import fsync, previous_version, resolve_inside
from ..foundation.jsonio import parse_json
from .manifest import NAME as MANIFEST
from .manifest import Entry, Manifest, file_names
from .weight_steps import Tensors

INDEX = "model.safetensors.index.json"
_MAX_HEADER = 16 * 10**6  # bytes; real headers need about 100 per tensor
_MAX_TENSORS = 100_000  # per file
SAFETENSORS_DTYPES: dict[str, torch.dtype] = {
    **{"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16},
    **{"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8},
    **{"BOOL": torch.bool},
}


@dataclass(frozen=True)
class Weights:
    """The tensors of a file, not yet read."""

    layout: Tensors  # on the meta device
    read: Callable[[], Tensors]


def open_safetensors(path: Path) -> Weights:
    """Open a safetensors file. The library checks that shapes, offsets and the length of the file agree."""
    from safetensors import safe_open

    with path.open("rb") as opened:
        start = opened.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > path.stat().st_size - 8:
            raise BadModelFile(f"{path} is truncated or not a safetensors file: its header is incomplete")
        if length > _MAX_HEADER:
            raise BadModelFile(f"{path} has a header of {length:,} bytes; regard reads at most {_MAX_HEADER:,}")
        # parse_json refuses duplicate names, which safetensors accepts.
        if (n_tensors := len(parse_json(opened.read(length), path))) > _MAX_TENSORS:
            raise BadModelFile(f"{path} has {n_tensors:,} tensors; regard reads at most {_MAX_TENSORS:,}")
    with _bad_file_errors(path):
        file = safe_open(path, framework="pt")  # kept open: a second open could find another file
        parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    for name, part in parts.items():
        if part.get_dtype() not in SAFETENSORS_DTYPES:
            dtypes = ", ".join(SAFETENSORS_DTYPES)
            raise BadModelFile(f"{path}: {name} has dtype {part.get_dtype()}; regard reads {dtypes}")
    layout = {
        name: torch.empty(part.get_shape(), dtype=SAFETENSORS_DTYPES[part.get_dtype()], device="meta")
        for name, part in parts.items()
    }

    def read() -> Tensors:
        with _bad_file_errors(path):
            return {name: file.get_tensor(name) for name in layout}

    return Weights(layout, read)


def open_pickle(path: Path) -> Weights:
    """Open a PyTorch pickle with ``weights_only``: tensors and plain containers, no other objects."""
    with _bad_file_errors(path):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(content, dict) or not all(isinstance(x, Tensor) for x in content.values()):
        raise BadModelFile(f"{path} is not a dictionary of tensors")
    tensors = {str(name): x.detach() for name, x in content.items()}
    return Weights({name: torch.empty_like(x, device="meta") for name, x in tensors.items()}, lambda: tensors)


def merge_shards(shards: Mapping[str, Weights], index: Mapping[str, str] | None, root: Path) -> Weights:
    """Several weight files as one. Each tensor must be in exactly one file, the one named in the ``index``."""
    file_of = {name: file for file, shard in shards.items() for name in shard.layout}
    faults = [
        f"{name} is in both {file} and {file_of[name]}"
        for file, shard in shards.items()
        for name in shard.layout
        if file_of[name] != file
    ]
    if index is not None:
        faults += [f"{file} lacks {name}" for name, file in index.items() if name not in shards[file].layout]
        extra = [(name, file) for name, file in file_of.items() if name not in index]
        faults += [f"{file} holds {name}, which the index does not name" for name, file in extra]
    if faults:
        raise BadModelFile(f"{root}: index and files disagree: {'; '.join(faults)}")
    return Weights(
        {name: x for shard in shards.values() for name, x in shard.layout.items()},
        lambda: {name: x for shard in shards.values() for name, x in shard.read().items()},
    )


def write_safetensors(folder: Path, tensors: Tensors, most_bytes: int) -> dict[str, object] | None:
    """Write model.safetensors, or numbered shards of at most ``most_bytes``. Returns the index of several shards.

    A tensor larger than ``most_bytes`` gets a shard of its own.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    shards: list[Tensors] = [{}]
    free = most_bytes
    for name, x in tensors.items():
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
        try:
            save_file(shard, folder / name, metadata={"format": "pt"})
        except SafetensorError as error:  # no room on the disk
            raise OSError(f"{name} cannot be written: {error}") from None
        fsync(folder / name)
    if len(shards) == 1:
        return None
    total = sum(x.nbytes for x in tensors.values())
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def raise_shortage(path: Path, reason: str) -> None:
    """Raise MemoryError or OSError if a read failed for lack of memory or file handles, not because of the file."""
    if "Cannot allocate memory" in reason:
        raise MemoryError(f"reading {path}: {reason}") from None
    if "Too many open files" in reason:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path)) from None


@contextmanager
def _bad_file_errors(path: Path) -> Iterator[None]:
    """Turn the exceptions of a damaged file into BadModelFile."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, pickle.UnpicklingError, OSError, EOFError, ValueError, KeyError, RuntimeError) as error:
        reason = first_line(error)
        raise_shortage(path, reason)
        raise BadModelFile(f"{path} cannot be read, it is damaged or of another format: {reason}") from None


Verified = Literal["verified", "unverified"]
_CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_MAX_JSON = 32 * 2**20  # bytes; larger than any config or index


@dataclass(frozen=True)
class Provenance:
    """Where a loaded model came from."""

    path: Path
    model_type: str  # as in config.json
    verified: Verified  # whether its files were checked against a manifest
    token_ids: Mapping[str, Any] = field(default_factory=dict, repr=False)  # the token ids of config.json, unchanged
    generation_config: bytes | None = field(default=None, repr=False)  # that file, unchanged, saved with the model


class Directory:
    """A model directory. If it has a manifest, all files are checked on opening, and only listed files are read."""

    dtype: torch.dtype | None = None  # the dtype to load a model in; None: that of each stored tensor

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        root = Path(path)
        if not root.exists() and previous_version(root).is_dir():
            root = previous_version(root)  # a save was interrupted between its two renames; the old model is intact
        elif not root.exists():
            raise BadModelFile(
                f"there is no directory {str(root)!r}; regard loads local directories and downloads nothing"
            )
        elif not root.is_dir():
            raise BadModelFile(f"{root} is a file; a model is a directory with config.json and model.safetensors")
        elif not (root / "config.json").exists():
            raise BadModelFile(f"{root} has no config.json, so it is not a model directory")
        self.root = root
        self._listed: Mapping[str, Entry] | None = None  # files of the manifest
        self.training_record: dict[str, Any] | None = None  # from the manifest
        manifest = Manifest.read(self.root) if verify else None
        if manifest is not None:
            manifest.check(self.root)
            self._listed = manifest.files
            self.training_record = None if manifest.training is None else dict(manifest.training)

    @property
    def verified(self) -> Verified:
        return "unverified" if self._listed is None else "verified"

    def files(self) -> dict[str, int]:
        """The size of every file, by path."""
        return {name: (self.root / name).lstat().st_size for name in sorted(file_names(self.root))}

    def has(self, name: str) -> bool:
        return (self.root / name).exists()

    def path(self, name: str) -> Path:
        """The path of a file to read: a regular file inside the directory, listed in the manifest if there is one."""
        path = resolve_inside(self.root, name)
        if not path.exists():
            raise BadModelFile(f"{self.root} has no {name}")
        if not path.is_file():
            raise BadModelFile(f"{path} is not a file")
        if self._listed is not None and name not in self._listed:
            raise BadModelFile(f"{path} is not listed in {MANIFEST}, so it cannot be verified")
        return path

    def bytes(self, name: str) -> bytes:
        return self.path(name).read_bytes()

    def json(self, name: str) -> dict[str, Any]:
        path = self.path(name)
        if path.stat().st_size > _MAX_JSON:
            raise BadModelFile(f"{path} has {path.stat().st_size:,} bytes; regard reads at most {_MAX_JSON:,}")
        return parse_json(path.read_bytes(), path)

    def config(self) -> dict[str, Any]:
        """config.json; refused if the model needs its own code or has quantised weights."""
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
        """The tensors of one safetensors file, of several with an index, or, only if allowed, of PyTorch pickles."""
        for single, index, pickled in (
            ("model.safetensors", INDEX, False),
            ("pytorch_model.bin", "pytorch_model.bin.index.json", True),
        ):
            if not self.has(single) and not self.has(index):
                continue
            if pickled and not allow_pickle:
                raise BadModelFile(
                    f"{self.root} has its weights only as a pickle; allow_pickle=True (--allow-pickle) reads it, "
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
