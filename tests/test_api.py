"""The public API, name by name with its signature, as a text file: nobody changes it without seeing it in the diff.

docs/api.md, the reference for readers, is generated from the same names and their docstrings.
Update both after a change that is meant:  python tests/test_api.py --update
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SNAPSHOT = Path(__file__).with_name("api.txt")
REFERENCE = Path(__file__).parents[1] / "docs" / "api.md"
# What the reference documents; other public modules are for those who read the code.
DOCUMENTED = (
    *("regard", "regard.attention", "regard.config", "regard.data", "regard.experiments", "regard.export"),
    *("regard.generation", "regard.layers", "regard.lens", "regard.models", "regard.text", "regard.training"),
)
HOW_TO_UPDATE = "the public API differs from tests/api.txt; if that is meant: python tests/test_api.py --update"


class _Plain:
    """An annotation that prints as its source, without the quotes that postponed evaluation leaves."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _plain(annotation: object) -> object:
    return _Plain(annotation) if isinstance(annotation, str) else annotation


def signature(thing: object) -> str:
    """`(q: Tensor, *, mask: Mask | None = None) -> Attended`, the same on every machine."""
    try:
        found = inspect.signature(thing)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # written in C, or an alias of typing
        return "(…)"
    parameters = [p.replace(annotation=_plain(p.annotation)) for p in found.parameters.values()]
    found = found.replace(parameters=parameters, return_annotation=_plain(found.return_annotation))
    return re.sub(r" at 0x[0-9a-f]+", "", str(found))


def _members(cls: type, root: str) -> Iterator[str]:
    """Public methods and properties defined in our own classes; what torch or pydantic bring is theirs to change."""
    ours = [base for base in cls.__mro__ if base.__module__.split(".")[0] == root]
    names = sorted({name for base in ours for name in vars(base) if not name.startswith("_")})
    for name in names:
        member = next(vars(base)[name] for base in ours if name in vars(base))
        if isinstance(member, property):
            yield f"    {name}: property"
        elif isinstance(member, staticmethod | classmethod):
            yield f"    {type(member).__name__} {name}{signature(member.__func__)}"
        elif inspect.isfunction(member):
            yield f"    def {name}{signature(member)}"


def _describe(name: str, thing: object, root: str) -> Iterator[str]:
    if inspect.isclass(thing):
        bases = ", ".join(base.__name__ for base in thing.__bases__ if base is not object)
        yield f"class {name}{signature(thing)}" + (f" : {bases}" if bases else "")
        yield from _members(thing, root)
    elif inspect.ismodule(thing):
        yield f"module {name}"
    elif inspect.isroutine(thing):
        yield f"def {name}{signature(thing)}"
    else:
        yield f"{name}: {type(thing).__name__}"


def public_packages(root: ModuleType, depth: int = 0) -> Iterator[ModuleType]:
    """Whatever declares `__all__`: the root, its modules, packages at any depth and modules a package exports by name.

    Other files inside a room are reached through the room's own `__all__`, so they are not listed a second time.
    """
    if hasattr(root, "__all__"):
        yield root
    for found in sorted(pkgutil.iter_modules(getattr(root, "__path__", [])), key=lambda module: module.name):
        exported = inspect.ismodule(getattr(root, found.name, None)) and found.name in getattr(root, "__all__", ())
        if not found.name.startswith("_") and (found.ispkg or depth == 0 or exported):
            yield from public_packages(importlib.import_module(f"{root.__name__}.{found.name}"), depth + 1)


def describe(root: ModuleType) -> str:
    """The whole public API as text."""
    lines: list[str] = []
    for module in public_packages(root):
        lines.append(f"# {module.__name__}")
        for name in sorted(module.__all__):
            lines.extend(_describe(name, getattr(module, name), root.__name__))
        lines.append("")
    return "\n".join(lines)


def _regard() -> str:
    return describe(importlib.import_module("regard"))


# -------------------------------------------------------------------------------- docs/api.md


def _wrapped_signature(thing: object) -> str:
    """One parameter a line where the whole does not fit into one."""
    text = signature(thing)
    parameters = [] if text == "(…)" else list(inspect.signature(thing).parameters.values())  # type: ignore[arg-type]
    if len(text) < 90 or not parameters:
        return text
    lines, keyword_only = [], False
    for parameter in parameters:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            lines.append("    *,")
        shown = parameter.replace(annotation=_plain(parameter.annotation))
        lines.append("    " + re.sub(r" at 0x[0-9a-f]+", "", str(shown)) + ",")
    end = text.rpartition(") -> ")[2] if ") -> " in text else ""
    return "\n".join(["(", *lines, ")" + (f" -> {end}" if end else "")])


def _reference_entry(name: str, thing: object, root: str) -> Iterator[str]:
    if inspect.ismodule(thing) or not (inspect.isclass(thing) or inspect.isroutine(thing)):
        return
    yield f"### {name}"
    yield ""
    doc = inspect.cleandoc(thing.__doc__ or "")
    fields = getattr(thing, "model_fields", None)
    if fields is not None:
        yield from (doc, "", "| field | default | meaning |", "|---|---|---|")
        for field, about in fields.items():
            meaning = " ".join((about.description or "").split()).replace("|", "\\|")
            default = (
                "required" if about.is_required() else f"`{about.default!r}`" if len(str(about.default)) < 60 else "…"
            )
            yield f"| `{field}` | {default} | {meaning} |"
    else:
        code = [f"{name}{_wrapped_signature(thing)}", *(_members(thing, root) if inspect.isclass(thing) else ())]
        yield from ("```text", *code, "```", *(("", "```text", doc, "```") if doc else ()))
    yield ""


def reference() -> str:
    """docs/api.md: every documented name with signature and docstring, once, in the first module that has it."""
    lines = [
        *(
            "# API reference",
            "",
            "Generated from signatures and docstrings by `python tests/test_api.py --update`.",
            "",
        ),
    ]
    seen: set[int] = set()
    for module_name in DOCUMENTED:
        module = importlib.import_module(module_name)
        entries: list[str] = []
        for name in sorted(module.__all__):
            thing = getattr(module, name)
            if id(inspect.unwrap(thing) if inspect.isroutine(thing) else thing) not in seen:
                seen.add(id(inspect.unwrap(thing) if inspect.isroutine(thing) else thing))
                entries += _reference_entry(name, thing, "regard")
        if entries:
            summary = (module.__doc__ or "").strip().splitlines()[0]
            lines += [f"## {module_name}", "", summary, "", *entries]
    return "\n".join(lines).rstrip() + "\n"


def test_the_api_reference_is_current() -> None:
    assert REFERENCE.read_text(encoding="utf-8") == reference(), "docs/api.md: python tests/test_api.py --update"


def test_the_api_reference_has_every_name_of_the_front_door() -> None:
    import regard

    text = reference()
    for name in regard.__all__:
        if inspect.isroutine(thing := getattr(regard, name)) or inspect.isclass(thing):
            assert f"\n### {name}\n" in text


def test_public_api_is_the_one_in_the_snapshot() -> None:
    before, now = SNAPSHOT.read_text(encoding="utf-8"), _regard()
    difference = "\n".join(
        difflib.unified_diff(before.splitlines(), now.splitlines(), "tests/api.txt", "now", lineterm="")
    )
    assert not difference, f"{HOW_TO_UPDATE}\n{difference}"


def test_the_snapshot_sees_what_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "small_house"
    (package / "room").mkdir(parents=True)
    (package / "__init__.py").write_text("__all__ = ['f']\ndef f(x: 'int', *, y=2) -> 'str': ...\ndef hidden(): ...\n")
    (package / "room" / "__init__.py").write_text(
        "__all__ = ['A', 'SIZE']\nSIZE = 3\n"
        "class A(dict):\n    def __init__(self, n: int): ...\n    def m(self, k: 'float' = 0.5): ...\n"
        "    @property\n    def p(self): ...\n    @classmethod\n    def make(cls): ...\n    def _hidden(self): ...\n"
    )
    (package / "_private.py").write_text("__all__ = ['g']\ndef g(): ...\n")
    (package / "room" / "corner.py").write_text("raise ImportError('reached through the room only')")
    (package / "quiet.py").write_text("def g(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert describe(importlib.import_module("small_house")).splitlines() == [
        "# small_house",
        "def f(x: int, *, y=2) -> str",
        "",
        "# small_house.room",
        "class A(n: int) : dict",
        "    def m(self, k: float = 0.5)",
        "    classmethod make(cls)",
        "    p: property",
        "SIZE: int",
    ]


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: {sys.argv[0]} --update")
    SNAPSHOT.write_text(_regard(), encoding="utf-8")
    REFERENCE.write_text(reference(), encoding="utf-8")
    print(f"wrote {SNAPSHOT}")
