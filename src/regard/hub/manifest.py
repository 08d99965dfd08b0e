"""manifest.json: size and SHA-256 of every file in a directory, written last, so that damaged files do not load."""

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
    """Size and checksum of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a directory with their sizes and checksums."""

    files: Mapping[str, Entry]  # by path relative to the directory, with "/" between folders
    training: Mapping[str, Any] | None = None  # the training record of the weights; None if unknown

    @classmethod
    def of(cls, root: Path, training: Mapping[str, Any] | None = None) -> Manifest:
        """The manifest of all files below a directory, which are read for their checksums."""
        return cls.of_files(root, (name for name in sorted(file_names(root)) if name != NAME), training)

    @classmethod
    def of_files(cls, root: Path, names: Iterable[str], training: Mapping[str, Any] | None = None) -> Manifest:
        """The manifest of the named files of a directory."""
        return cls({name: _entry(root / name) for name in names}, training)

    @classmethod
    def read(cls, root: Path) -> Manifest | None:
        """Read the manifest of a directory; None if it has none."""
        if not (root / NAME).exists():
            return None
        text = resolve_inside(root, NAME).read_bytes()
        match parse_json(text, root / NAME):
            case {"regard_manifest": 1, "files": dict(files), **rest} if all(
                map(_is_entry, files.values())
            ) and is_training_record(rest.get("training")):
                manifest = cls({name: Entry(**entry) for name, entry in files.items()}, rest.get("training"))
            case _:
                raise BadModelFile(f"{root / NAME} is not a manifest written by regard")
        if text not in (manifest.text(), manifest.text(digest=False)):  # detects any change, even of whitespace
            raise BadModelFile(f"{root / NAME} is damaged: its text differs from what regard writes")
        return manifest

    def text(self, *, digest: bool = True) -> bytes:
        """The content of manifest.json.

        digest  with the SHA-256 of the training record, which older versions did not write
        """
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        training: dict[str, Any] = {} if self.training is None else {"training": self.training}
        if training and digest:
            training["training_sha256"] = hashlib.sha256(to_json(training)).hexdigest()
        return to_json({"regard_manifest": _VERSION, **training, "files": files})

    def write(self, root: Path) -> None:
        write_atomic(root / NAME, self.text())

    def check(self, root: Path) -> None:
        """Raise BadModelFile with a list of all files that are missing or changed."""
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
            raise BadModelFile(f"{root} does not match its {NAME}: {'; '.join(faults)}")


def file_names(root: Path) -> Iterator[str]:
    """The paths of all files below a directory, relative to it."""
    return (path.relative_to(root).as_posix() for path in root.rglob("*") if not path.is_dir())


def check_replaceable(target: Path, doing: str) -> None:
    """Raise FileExistsError if replacing a directory would delete files that regard did not write.

    doing  the operation, for the message: "saving", "exporting"
    """
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"{target} is a file; {doing} needs a directory")
    try:
        manifest = Manifest.read(target)
    except BadModelFile:
        manifest = None
    listed = set() if manifest is None else {*manifest.files, NAME}
    foreign = sorted(set(file_names(target)) - listed)
    if foreign:
        more = f" and {len(foreign) - 3} more" if len(foreign) > 3 else ""
        raise FileExistsError(
            f"{target} holds {', '.join(foreign[:3])}{more}, not written by regard; {doing} there would delete it"
        )


def _is_entry(value: object) -> bool:
    match value:
        case {"size": int(), "sha256": str(digest), **rest}:
            return not rest and _SHA256.fullmatch(digest) is not None
    return False


def is_training_record(value: object) -> bool:
    """Whether a value is a training record (or None), with the types that cards and manifests rely on."""
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
