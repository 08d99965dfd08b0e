"""The SHA-256 of every file in a directory, written last. One flipped bit in a tensor loads silently; not past this."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import BadModelFile
from ..foundation.files import resolve_inside, write_atomic
from ..foundation.jsonio import parse_json, to_json

NAME = "manifest.json"
_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Entry:
    """What a file must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a directory and what each must be; by name, "/" between folders.

    ``training``: which run and step the weights are of, its data, metrics, command and versions; None where unknown.
    """

    files: Mapping[str, Entry]
    training: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, root: Path, training: Mapping[str, Any] | None = None) -> Manifest:
        """Read every file there is and take its checksum."""
        return cls.of_files(root, (name for name in sorted(file_names(root)) if name != NAME), training)

    @classmethod
    def of_files(cls, root: Path, names: Iterable[str], training: Mapping[str, Any] | None = None) -> Manifest:
        """The same of some of a directory's files."""
        return cls({name: _entry(root / name) for name in names}, training)

    @classmethod
    def read(cls, root: Path) -> Manifest | None:
        """The manifest a directory has; None where it has none."""
        if not (root / NAME).exists():
            return None
        text = resolve_inside(root, NAME).read_bytes()
        match parse_json(text, root / NAME):
            case {"regard_manifest": 1, "files": dict(files), **rest} if all(
                map(_is_entry, files.values())
            ) and is_training_record(rest.get("training")):
                manifest = cls({name: Entry(**entry) for name, entry in files.items()}, rest.get("training"))
            case _:
                raise BadModelFile(f"{root / NAME} is not a manifest of regard's")
        if text not in (manifest.text(), manifest.text(digest=False)):  # so that not a bit of it can change unseen
            raise BadModelFile(f"{root / NAME} is damaged: it is not written as regard writes it")
        return manifest

    def text(self, *, digest: bool = True) -> bytes:
        """manifest.json; ``digest``: with the SHA-256 of the training record, which older versions did not write."""
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        training: dict[str, Any] = {} if self.training is None else {"training": self.training}
        if training and digest:
            training["training_sha256"] = hashlib.sha256(to_json(training)).hexdigest()
        return to_json({"regard_manifest": _VERSION, **training, "files": files})

    def write(self, root: Path) -> None:
        write_atomic(root / NAME, self.text())

    def check(self, root: Path) -> None:
        """Raise BadModelFile, naming every file that is missing or is not the one that was written."""
        faults = []
        for name, entry in self.files.items():
            path = resolve_inside(root, name)
            if not path.is_file():
                faults.append(f"{name} is missing")
            elif (size := path.stat().st_size) != entry.size:
                faults.append(f"{name} has {size} bytes instead of {entry.size}")
            elif _entry(path) != entry:
                faults.append(f"{name} has another SHA-256")
        if faults:
            raise BadModelFile(f"{root} is not what its {NAME} says: {'; '.join(faults)}")


def file_names(root: Path) -> Iterator[str]:
    """Every file below a directory."""
    return (path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def check_replaceable(target: Path, doing: str) -> None:
    """Refuse to replace a directory that holds files not written by regard: they would be deleted."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; {doing} a model makes a directory")
    try:
        manifest = Manifest.read(target)
    except BadModelFile:
        manifest = None
    known = set() if manifest is None else {*manifest.files, NAME}
    strange = sorted(set(file_names(target)) - known)
    if strange:
        more = f" and {len(strange) - 3} more" if len(strange) > 3 else ""
        raise FileExistsError(
            f"{target} holds {', '.join(strange[:3])}{more}, not written by regard; {doing} there would delete it"
        )


def _is_entry(value: object) -> bool:
    match value:
        case {"size": int(), "sha256": str(digest), **rest}:
            return not rest and _SHA256.fullmatch(digest) is not None
    return False


def is_training_record(value: object) -> bool:
    """Whether it says where a model's weights came from, all in the types that cards and manifests show."""
    match value:
        case {
            "run": str(),
            "weights": str(),
            "data": dict(data),
            "metrics": dict(),
            "command": list(command),
            "versions": dict(),
        }:
            return all(isinstance(x, str) for x in (data.get("source"), data.get("sha256"), *command))
    return value is None


def _entry(path: Path) -> Entry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Entry(path.stat().st_size, digest)
