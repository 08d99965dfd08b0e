"""What several commands share: how they speak, and the options that mean the same everywhere."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import typer

from . import advice, completing

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of the text.")]
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="WORDS",
        help="Fields as section.field=value: `regard train --fields`.",
        show_default=False,
        autocompletion=completing.words,
    ),
]


@dataclass
class Common:
    """What stands before and around every command, for `main` and for a run's provenance."""

    debug: bool = False
    command: list[str] = field(default_factory=list)
    """What was typed."""


class Result(Protocol):
    """What a command ends with."""

    def document(self) -> dict[str, Any]: ...

    def table(self) -> str: ...


def show(result: Any, as_json: bool) -> None:
    """The answer, for machines (``to_dict``) or for people (``to_text``)."""
    if as_json:
        emit(result.to_dict() if hasattr(result, "to_dict") else result.document())
    else:
        print(result.to_text() if hasattr(result, "to_text") else result.table())


def emit(document: dict[str, Any]) -> None:
    """The one document that `--json` promises on stdout. NaN and infinity are not JSON, so they fail here."""
    print(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False))


def progress(line: str) -> None:
    """Say what is going on, where it cannot mix with an answer on stdout."""
    print(line, file=sys.stderr, flush=True)


def complain(failure: Exception, typed: Sequence[str] = ()) -> None:
    """One line whatever the message holds, as logs and scripts read line by line; bad lines of data get one each."""
    lines = [str(line) for line in getattr(failure, "lines", ())]
    said = advice.as_typed(_sentence(failure).split("\n", 1)[0] if lines else _sentence(failure))
    progress(f"regard: {' '.join(said.split()) or type(failure).__name__}{advice.advise(typed, failure)}")
    for line in lines:
        progress(" ".join(line.split()))
    if (hidden := getattr(failure, "n_bad", 0) - len(lines)) > 0:
        progress(f"… and {hidden:,} more")


@contextmanager
def as_options(*names: str) -> Iterator[None]:
    """What the library says against these arguments was typed as options: it is usage that is wrong, exit code 2."""
    from regard.errors import UsageError

    try:
        yield
    except UsageError:
        raise
    except ValueError as failure:
        said = str(failure)
        for name in names:
            said = re.sub(rf"\b{name}=", f"--{name.replace('_', '-')} ", said)
        raise UsageError(said) from None


def _sentence(failure: Exception) -> str:
    """The message; of what the system refused, without its number and without the name a file has while written."""
    if isinstance(failure, OSError) and failure.filename is not None and failure.strerror:
        name = re.sub(r"/\.([^/]+?)\.[a-z0-9_]{8}(\.saving)?(?=/|$)", r"/\1", str(failure.filename))
        return f"{name} cannot be read or written: {failure.strerror}"
    return str(failure)


def comma_words(text: str) -> list[str]:
    """`a, b` → [a, b]."""
    return [word.strip() for word in text.split(",") if word.strip()]
