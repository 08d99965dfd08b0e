"""A model directory as it lies on disk: its files, checked before they are read.

Nothing here runs code of the directory, and nothing is trusted: a path may lead out, an index may name what is not
there. Whatever is wrong is a BadModelFile that names the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..errors import BadModelFile
from ..foundation.files import previous_version, resolve_inside
from ..foundation.jsonio import parse_json
from .manifest import NAME as MANIFEST
from .manifest import Entry, Manifest, file_names
from .weights import Weights, open_pickle, open_safetensors, together

Verified = Literal["verified", "unverified"]
_CONFIGS = ("config.json", "tokenizer_config.json", "preprocessor_config.json", "processor_config.json")
_MOST_JSON = 64 * 2**20  # no config or index is larger


@dataclass(frozen=True)
class Provenance:
    """Where a model came from: the directory, what its config.json calls it, and whether a manifest vouched for it."""

    path: Path
    model_type: str
    verified: Verified
    token_ids: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """The token ids of config.json exactly as they stood there: several ends, null, or fields that only others read."""
    generation_config: bytes | None = field(default=None, repr=False)
    """generation_config.json, which only others read, as it came."""


class Directory:
    """A model directory. With a manifest, every file is compared with it at once, and nothing else is read from it."""

    def __init__(self, path: str | Path, *, verify: bool = True) -> None:
        self.root = _locate(Path(path))
        self._listed: Mapping[str, Entry] | None = None
        manifest = Manifest.read(self.root) if verify else None
        if manifest is not None:
            manifest.check(self.root)
            self._listed = manifest.files

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
        if "quantization_config" in fields:
            raise BadModelFile(f"{self.root / 'config.json'} has quantization_config; regard reads unquantised weights")
        return fields

    def weights(self, *, allow_pickle: bool = False) -> Weights:
        """The tensors: one safetensors file, several with an index, or — only when allowed — PyTorch's pickles."""
        for single, index, pickled in (
            ("model.safetensors", "model.safetensors.index.json", False),
            ("pytorch_model.bin", "pytorch_model.bin.index.json", True),
        ):
            if not self.has(single) and not self.has(index):
                continue
            if pickled and not allow_pickle:
                raise BadModelFile(
                    f"{self.root} has its weights as a pickle only; allow_pickle=True (--allow-pickle) reads it, "
                    f"tensors and nothing else"
                )
            promised = None if self.has(single) else self._index(index)
            names = [single] if promised is None else sorted(set(promised.values()))
            open_shard = open_pickle if pickled else open_safetensors
            return together({name: open_shard(self.path(name)) for name in names}, promised, self.root)
        raise BadModelFile(f"{self.root} has no model.safetensors and no model.safetensors.index.json")

    def _index(self, name: str) -> dict[str, str]:
        """Which file holds which tensor."""
        match self.json(name):
            case {"weight_map": dict(promised)} if all(isinstance(file, str) for file in promised.values()):
                return promised
        raise BadModelFile(f"{self.root / name} has no weight_map from tensors to files")


def _locate(path: Path) -> Path:
    if not path.exists():
        if previous_version(path).is_dir():  # a save was cut off between its two renames; the old model is whole
            return previous_version(path)
        raise BadModelFile(f"there is no directory {str(path)!r}; regard loads local directories and downloads nothing")
    if not path.is_dir():
        raise BadModelFile(f"{path} is a file; a model is a directory with config.json and model.safetensors")
    if not (path / "config.json").exists():
        raise BadModelFile(f"{path} has no config.json, so it is no model directory")
    return path
