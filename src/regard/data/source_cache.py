"""A cache of large sources: their examples, split and report, keyed by a hash of the files' content.

Reading, checking and splitting five million lines takes minutes, hashing them takes a second. Each combination of
content and options has a folder, which may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..errors import BadLine
from ..foundation.files import cache_folder, replace_directory, write_atomic
from ..foundation.jsonio import to_json
from .example_files import ExampleFile
from .examples import ReadReport

_VERSION = 2  # increase it when a change makes the same file be read or split differently
_HEADER = "source.json"
LARGE = 1 << 26  # bytes of files or training text from which the result is cached for later runs


def content_key(paths: Sequence[Path], reading: Mapping[str, Any]) -> str | None:
    """A hash of the files' content and of the options they are read with; None if they are too small to cache."""
    if sum(path.stat().st_size for path in paths) < LARGE:
        return None
    digests = []
    for path in paths:
        with path.open("rb") as file:
            digests.append([path.name, hashlib.file_digest(file, "sha256").hexdigest()])
    about = json.dumps([_VERSION, digests, dict(reading)], sort_keys=True, default=str)
    return hashlib.sha256(about.encode()).hexdigest()[:32]


def read_source(key: str) -> tuple[dict[str, Any], ExampleFile, ExampleFile, ReadReport] | None:
    """(``about`` of ``write_source``, training examples, held-out examples, report); None if it is not cached."""
    folder = _folder(key)
    try:
        header = json.loads((folder / _HEADER).read_bytes())
        fields = header.pop("report")
        fields |= {"first": [BadLine(**line) for line in fields["first"]], "reasons": Counter(fields["reasons"])}
        report = ReadReport(**fields)
        train, valid = (ExampleFile.open(folder / side, header["n_texts"]) for side in ("train", "valid"))
    except (OSError, ValueError, KeyError, TypeError):  # missing or damaged: the source files are read again
        return None
    return header, train, valid, report


def write_source(
    key: str, about: Mapping[str, Any], train: ExampleFile, valid: ExampleFile, report: ReadReport
) -> None:
    """Store a source. A full or read-only disk is not an error."""
    with suppress(OSError), replace_directory(_folder(key)) as folder:
        train.save(folder / "train")
        valid.save(folder / "valid")
        lines = [asdict(line) for line in report.first]
        fields = {**vars(report), "first": lines, "reasons": dict(report.reasons)}
        header = {**about, "n_texts": train.n_texts, "report": fields}
        write_atomic(folder / _HEADER, to_json(header))


def _folder(key: str) -> Path:
    return cache_folder() / "examples" / key
