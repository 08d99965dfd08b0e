"""The corpus `stdlib`: the source of the installed Python standard library, one document per module file.

It is real text that every machine with Python has. It is © the Python Software Foundation and its authors, under the
PSF licence (docs.python.org/3/license.html); it is read in place and not part of this package. Its content depends on
the version of Python, so `digest` identifies exactly what was read.
"""

from __future__ import annotations

import hashlib
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..hashing import stable_hash
from . import check_index

# Folders that are not part of the library: installed packages and build products, and the library's own tests.
_INSTALLED_BESIDE = frozenset({"site-packages", "dist-packages", "__pycache__", "lib-dynload"})
_TESTS = frozenset({"test", "tests", "idle_test"})
# Files generated when Python is built or installed, different on every machine.
_MACHINE_SPECIFIC = ("_sysconfigdata", "_sysconfig_vars", "config-", "sitecustomize", "usercustomize")
# Percentage of the top-level modules and packages in each held-out split.
_VALID_PERCENT, _PACKAGES_PERCENT = 8, 8


@dataclass(frozen=True, slots=True)
class ModuleText:
    """One file of the library: its dotted name and its text."""

    name: str
    text: str


class Stdlib:
    """The files of the library. A top-level module or package such as `asyncio` is in one split as a whole.

    `valid` and `packages` have about 8 % of them each, chosen by a hash of the name, so that every version of Python
    holds out the same ones.
    """

    name = "stdlib"
    splits = ("train", "valid", "packages")

    def __init__(self, root: Path | str | None = None, *, tests: bool = False) -> None:
        self.root = Path(root if root is not None else sysconfig.get_path("stdlib"))
        self.tests = tests
        self.undecodable: list[str] = []  # names of files that could not be read

    def size(self, split: str) -> int:
        return len(self._files[split])

    def example(self, split: str, index: int) -> ModuleText:
        """The document at this index; files are sorted by path."""
        check_index(self, split, index)
        return self._read(self._files[split][index])

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the names and contents of all files, in order."""
        digest = hashlib.sha256()
        for split in self.splits:
            for x in map(self._read, self._files[split]):
                digest.update(f"{split}\x1f{x.name}\x1f{x.text}\x1e".encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

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
        """Read a file with the encoding Python uses for it: its coding line or byte order mark, else UTF-8."""
        with tokenize.open(file) as opened:
            return ModuleText(self._name(file), opened.read())


def split_of(package: str) -> str:
    """The split of a top-level module or package."""
    bucket = stable_hash("stdlib held out", package) % 100
    if bucket < _VALID_PERCENT:
        return "valid"
    return "packages" if bucket < _VALID_PERCENT + _PACKAGES_PERCENT else "train"
