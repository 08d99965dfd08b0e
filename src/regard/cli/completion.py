"""What a shell offers at the tab key. Nothing here imports torch: an answer after a second is no answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

_MOST = 200
_RUN_FILES = ("run.json", "config.json")  # of a training run, of a model directory
_NOT_SHOWN = {"node_modules", "__pycache__"}

Offer = str | tuple[str, str]
"""What may be typed, alone or with a few words about it."""


def choices(*mixer_names: str) -> Callable[[str], list[str]]:
    """Fixed ones."""
    return lambda incomplete: [name for name in mixer_names if name.startswith(incomplete)]


def tasks(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """What comes first after `regard train`: a task, or a field where --preset knows the task."""
    from regard.recipes import TASKS

    return [
        *(task for task in TASKS if task.startswith(incomplete)),
        *(words(ctx, incomplete) if "." in incomplete or "=" in incomplete else ()),
    ]


def recipes(incomplete: str) -> list[Offer]:
    from regard.recipes import RECIPES

    return [(name, f"{made['task']}") for name, made in RECIPES.items() if name.startswith(incomplete)]


def words(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """`section.field=`, and after the sign what the field may be."""
    typed: list[str] = list(ctx.params.get("words") or ())
    if typed and typed[-1] == "=" and len(typed) > 1:  # bash takes a word apart at its sign
        return [offer[0].partition("=")[2] for offer in _values(typed[-2], incomplete)]
    name, equals, value = incomplete.partition("=")
    return list(_values(name, value) if equals else _fields(name))


def data_words(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """Only those of data."""
    return [offer for offer in words(ctx, incomplete) if (offer if isinstance(offer, str) else offer[0])[:4] == "data"]


def _fields(start: str) -> Iterator[tuple[str, str]]:
    from regard.config.overrides import SECTIONS

    for section, config in SECTIONS.items():
        for name, field in config.model_fields.items():
            if (word := f"{section}.{name}=").startswith(start):
                yield word, " ".join((field.description or "").split()).partition(";")[0][:60]


def _values(name: str, start: str) -> Iterator[tuple[str, str]]:
    from regard.config.overrides import SECTIONS, format_value, literal_choices

    found: Iterable[str] = ()
    section, _, field = name.partition(".")
    if name == "model":
        from regard.presets import PRESETS

        found = PRESETS
    elif name in ("data", "data.source"):
        from regard.data.corpora import CORPORA

        found = [*CORPORA, *_paths(start, files=True)]
    elif name == "model.mixer":
        from regard.config.mixers import mixer_names

        found = mixer_names()  # the tab key runs nobody's code
    elif section in SECTIONS and field in SECTIONS[section].model_fields:
        annotation: Any = SECTIONS[section].model_fields[field].annotation
        found = (
            ("true", "false")
            if annotation is bool
            else [format_value(choice) for choice in literal_choices(annotation)]
        )
    for value in found:
        if value.startswith(start):
            yield f"{name}={value}", ""


def models(incomplete: str) -> list[Offer]:
    """Runs and model directories, those in runs/ also before anything is typed."""
    found: list[Offer] = [*_runs(incomplete), *_paths(incomplete, files=False)]
    return found[:_MOST]


def presets_or_models(incomplete: str) -> list[Offer]:
    from regard.presets import PRESETS

    return [*(name for name in PRESETS if name.startswith(incomplete)), *models(incomplete)]


def sources(incomplete: str) -> list[Offer]:
    """An embedded corpus, a file or a folder."""
    return [*(value.partition("=")[2] for value, _ in _values("data", incomplete))]


def _runs(start: str) -> Iterator[str]:
    folder = Path("runs")
    if not folder.is_dir() or start.startswith("runs/"):
        return
    for path in sorted(folder.iterdir()):
        if str(path).startswith(start) and any((path / name).is_file() for name in _RUN_FILES):
            yield str(path)


def _paths(start: str, *, files: bool) -> Iterator[str]:
    """What lies where the typed path points to."""
    folder, _, name = start.rpartition("/")
    place = Path(f"{folder}/" if folder or start.startswith("/") else ".").expanduser()
    try:
        entries = sorted(os.scandir(place), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries[: 10 * _MOST]:
        if not entry.name.startswith(name) or entry.name in _NOT_SHOWN or (entry.name[:1] == "." and not name):
            continue
        shown = f"{folder}/{entry.name}" if folder or start.startswith("/") else entry.name
        if entry.is_dir():
            is_model = any((Path(entry.path) / file).is_file() for file in _RUN_FILES)
            yield shown if is_model else f"{shown}/"
        elif files:
            yield shown
