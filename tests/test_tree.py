"""The size and shape of src/: few whole files, every module and class findable by one name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "regard"
MAX_FILES, MAX_LINES, MAX_LINES_OF_A_FILE = 354, 76_100, 500
FRAGMENT_LINES = 60  # a module below this with a single importer belongs into that importer


def python_files(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def n_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def module_name(file: Path, package: Path) -> str:
    """`regard/attention/frame.py` → regard.attention.frame; a package's `__init__.py` → the package."""
    return ".".join(file.relative_to(package.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(file: Path, package: Path) -> Iterator[str]:
    """Every module of ours that a file imports, anywhere in it; `from .frame import Frame` gives both readings."""
    here = [package.name, *file.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - (node.level - 1)] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def importers(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Which modules import each module."""
    by_module: dict[str, set[str]] = defaultdict(set)
    for file in python_files(package):
        for module in imported_modules(file, package):
            by_module[module].add(module_name(file, package))
    return by_module


def duplicated_modules(package: Path = PACKAGE) -> dict[str, list[str]]:
    """File names that occur twice; Python reserves names with two underscores."""
    by_name: dict[str, list[str]] = defaultdict(list)
    for file in python_files(package):
        if not file.name.startswith("__"):
            by_name[file.name].append(str(file.relative_to(package)))
    return {name: places for name, places in by_name.items() if len(places) > 1}


def duplicated_classes(package: Path = PACKAGE) -> dict[str, list[str]]:
    by_name: dict[str, list[str]] = defaultdict(list)
    for file in python_files(package):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                by_name[node.name].append(f"{file.relative_to(package)}:{node.lineno}")
    return {name: places for name, places in by_name.items() if len(places) > 1}


def fragments(package: Path = PACKAGE) -> list[str]:
    """Short modules that only one other module imports."""
    known = importers(package)
    return [
        f"{file.relative_to(package)}: {n_lines(file)} lines, imported by {next(iter(known[name]))} alone"
        for file in python_files(package)
        if not file.name.startswith("__")
        and n_lines(file) < FRAGMENT_LINES
        and len(known[name := module_name(file, package)]) == 1
    ]


def test_the_tree_stays_small() -> None:
    files = python_files()
    lines = {str(file.relative_to(PACKAGE)): n_lines(file) for file in files}
    assert len(files) <= MAX_FILES
    assert sum(lines.values()) <= MAX_LINES
    assert not {name: n for name, n in lines.items() if n > MAX_LINES_OF_A_FILE}


def test_no_two_modules_or_classes_share_a_name() -> None:
    assert not duplicated_modules()
    assert not duplicated_classes()


def test_no_short_module_serves_a_single_importer() -> None:
    assert not fragments()


def test_the_checks_see_what_they_look_for(tmp_path: Path) -> None:
    package = tmp_path / "regard"
    for name, text in {
        "__init__.py": "",
        "a/__init__.py": "",
        "a/frame.py": "class Frame: ...\n",
        "b/__init__.py": "from .frame import Frame\n",
        "b/frame.py": "class Frame: ...\n",
        "b/long.py": "\n" * 80,
        "c.py": "from .b import long\nfrom .a.frame import Frame\nfrom .b.frame import Frame as Other\n",
    }.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(text, encoding="utf-8")
    assert duplicated_modules(package) == {"frame.py": ["a/frame.py", "b/frame.py"]}
    assert list(duplicated_classes(package)) == ["Frame"]
    assert fragments(package) == ["a/frame.py: 1 lines, imported by regard.c alone"]
