"""The SHA-256 of every file in a directory, written last. One flipped bit in a tensor loads silently; not past this."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

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
    """The files of a directory and what each must be; by name, "/" between folders."""

    files: Mapping[str, Entry]

    @classmethod
    def of(cls, root: Path) -> Manifest:
        """Read every file there is and take its checksum."""
        return cls({name: _entry(root / name) for name in sorted(file_names(root)) if name != NAME})

    @classmethod
    def read(cls, root: Path) -> Manifest | None:
        """The manifest a directory has; None where it has none."""
        if not (root / NAME).exists():
            return None
        text = resolve_inside(root, NAME).read_bytes()
        manifest = cls(_parse(text, root / NAME))
        if manifest.text() != text:  # so that not a bit of it can change unseen
            raise BadModelFile(f"{root / NAME} is damaged: it is not written as regard writes it")
        return manifest

    def text(self) -> bytes:
        files = {name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())}
        return to_json({"regard_manifest": _VERSION, "files": files})

    def write(self, root: Path) -> None:
        write_atomic(root / NAME, self.text())

    def check(self, root: Path) -> None:
        """Raise BadModelFile, naming every file that is missing or is not the one that was written."""
        faults = [fault for name, entry in self.files.items() if (fault := _fault(root, name, entry))]
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


def _parse(text: bytes, path: Path) -> dict[str, Entry]:
    entries = {}
    match parse_json(text, path):
        case {"regard_manifest": 1, "files": dict(files)}:
            for name, entry in files.items():
                match entry:
                    case {"size": int(size), "sha256": str(digest)} if _SHA256.fullmatch(digest):
                        entries[name] = Entry(size, digest)
            if len(entries) == len(files):
                return entries
    raise BadModelFile(f"{path} is not a manifest of regard's")


def _entry(path: Path) -> Entry:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return Entry(path.stat().st_size, digest)


def _fault(root: Path, name: str, entry: Entry) -> str | None:
    path = resolve_inside(root, name)
    if not path.is_file():
        return f"{name} is missing"
    if (size := path.stat().st_size) != entry.size:
        return f"{name} has {size} bytes instead of {entry.size}"
    if _entry(path) != entry:
        return f"{name} has another SHA-256"
    return None
