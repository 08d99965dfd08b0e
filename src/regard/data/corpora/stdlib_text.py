"""The corpus `stdlib`: the text and source of the reader's own Python standard library, one document a module file.

Real text that stands on every machine with Python. It is © the Python Software Foundation and its authors, under the
PSF licence (docs.python.org/3/license.html): it is read where it lies and never copied into anything we ship. Which
text that is depends on the Python that reads it, so `digest` says exactly what was read.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..hashing import stable_hash
from . import check_index

LICENCE = "Python Software Foundation License, https://docs.python.org/3/license.html"
# Not the library's own text: what was installed beside it, its tests, and tools that travel with it.
_INSTALLED_BESIDE = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_TESTS = frozenset({"test", "tests", "idle_test"})
# Written when this Python was built or set up, so different on every machine.
_MACHINE_SPECIFIC = ("_sysconfigdata", "_sysconfig_vars", "config-", "sitecustomize", "usercustomize")
# Of a hundred top-level modules and packages so many go to each held-out split.
_VALID_PERCENT, _PACKAGES_PERCENT = 8, 8


@dataclass(frozen=True, slots=True)
class ModuleText:
    """One file of the library: its dotted name and its text."""

    name: str
    text: str


class Stdlib:
    """ModuleTexts, whole top-level modules and packages held out: `asyncio` is in one split with everything in it.

    `valid` and `packages` hold about eight in a hundred each, chosen by a hash of the name, so that the same ones are
    held out under every version of Python.
    """

    name = "stdlib"
    splits = ("train", "valid", "packages")

    def __init__(self, root: Path | str | None = None, *, tests: bool = False) -> None:
        self.root = Path(root if root is not None else sysconfig.get_path("stdlib"))
        self.tests = tests
        self.undecodable: list[str] = []  # names of files that were left out

    def size(self, split: str) -> int:
        return len(self._files[split])

    def example(self, split: str, index: int) -> ModuleText:
        """The document at this place: files are in the order of their names."""
        check_index(self, split, index)
        return self._read(self._files[split][index])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of everything read, in order."""
        digest = hashlib.sha256()
        for split in self.splits:
            for x in map(self._read, self._files[split]):
                digest.update(f"{split}\x1f{x.name}\x1f{x.text}\x1e".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    @property
    def python(self) -> str:
        """The Python whose library this is."""
        return f"{platform.python_implementation()} {platform.python_version()}"

    @cached_property
    def _files(self) -> dict[str, list[Path]]:
        files: dict[str, list[Path]] = {split: [] for split in self.splits}
        for file in sorted(self.root.rglob("*.py"), key=lambda path: path.relative_to(self.root).parts):
            parts = file.relative_to(self.root).parts
            is_test = not self.tests and _TESTS.intersection(parts[:-1])
            if is_test or _INSTALLED_BESIDE.intersection(parts) or parts[0].startswith(_MACHINE_SPECIFIC):
                continue
            try:
                self._read(file)
            except (SyntaxError, UnicodeDecodeError, LookupError, OSError):
                self.undecodable.append(self._name(file))
            else:
                if file.stat().st_size:
                    files[split_of(parts[0].removesuffix(".py"))].append(file)
        if not any(files.values()):
            raise ValueError(f"root={str(self.root)!r} holds no Python source files")
        return files

    def _name(self, file: Path) -> str:
        return ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _read(self, file: Path) -> ModuleText:
        """The file as Python decodes it: by its coding line or mark, else UTF-8."""
        with tokenize.open(file) as opened:
            return ModuleText(self._name(file), opened.read())


def split_of(package: str) -> str:
    """The split of a top-level module or package."""
    bucket = stable_hash("stdlib held out", package) % 100
    if bucket < _VALID_PERCENT:
        return "valid"
    return "packages" if bucket < _VALID_PERCENT + _PACKAGES_PERCENT else "train"
