"""Shell completion. Nothing here imports torch, because completions must appear at once."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import typer

_MAX_ENTRIES = 200
_RUN_FILES = ("run.json", "config.json")  # mark a training run and a model directory
_HIDDEN = {"node_modules", "__pycache__"}

Offer = str | tuple[str, str]  # a completion, optionally with a short description


def choices(*names: str) -> Callable[[str], list[str]]:
    return lambda incomplete: [name for name in names if name.startswith(incomplete)]


def tasks(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """After `regard train`: a task, or a field if --preset names the task."""
    from regard.recipes import TASKS

    is_field = "." in incomplete or "=" in incomplete
    return [*choices(*TASKS)(incomplete), *(words(ctx, incomplete) if is_field else ())]


def recipes(incomplete: str) -> list[Offer]:
    from regard.recipes import RECIPES

    return [(name, str(recipe["task"])) for name, recipe in RECIPES.items() if name.startswith(incomplete)]


def words(ctx: typer.Context, incomplete: str) -> list[Offer]:
    """`section.field=`, and after "=" the values of the field."""
    from regard.config.overrides import fields_to_dict

    before: list[str] = list(ctx.params.get("words") or ())
    if len(before) > 1 and before[-1] == "=":  # bash splits words at "="
        return [offer.partition("=")[2] for offer in _values(before[-2], incomplete)]
    name, equals, value = incomplete.partition("=")
    if equals:
        return [(offer, "") for offer in _values(name, value)]
    return [
        (f"{section}.{field}=", facts["about"].partition(";")[0][:60])
        for section, fields in fields_to_dict().items()
        for field, facts in fields.items()
        if f"{section}.{field}=".startswith(name)
    ]


def _values(name: str, start: str) -> list[str]:
    """`name=value` for each value that begins with ``start``."""
    from regard.config.overrides import SECTIONS, format_value, literal_choices

    values: Iterable[str] = ()
    section, _, field = name.partition(".")
    if name == "model":
        from regard.presets import PRESETS

        values = PRESETS
    elif name in ("data", "data.source"):
        from regard.data.corpora import CORPORA

        values = [*CORPORA, *_paths(start, files=True)]
    elif name == "model.mixer":
        from regard.config.mixers import mixer_names

        values = mixer_names()  # without importing: completion must not run a user's code
    elif section in SECTIONS and field in SECTIONS[section].model_fields:
        annotation = SECTIONS[section].model_fields[field].annotation
        values = map(format_value, (True, False) if annotation is bool else literal_choices(annotation))
    return [f"{name}={value}" for value in values if value.startswith(start)]


def models(incomplete: str) -> list[Offer]:
    """Runs and model directories; those in runs/ are offered even before anything is typed."""
    runs = [] if incomplete.startswith("runs/") else list(_paths("runs/", files=False))
    offers: list[Offer] = [path for path in runs if path.startswith(incomplete) and not path.endswith("/")]
    return [*offers, *_paths(incomplete, files=False)][:_MAX_ENTRIES]


def presets_or_models(incomplete: str) -> list[Offer]:
    from regard.presets import PRESETS

    return [*choices(*PRESETS)(incomplete), *models(incomplete)]


def sources(incomplete: str) -> list[Offer]:
    """An embedded corpus, a file or a folder."""
    return [value.partition("=")[2] for value in _values("data", incomplete)]


def _paths(start: str, *, files: bool) -> Iterator[str]:
    folder, _, name = start.rpartition("/")
    prefix = f"{folder}/" if folder or start.startswith("/") else ""
    try:
        entries = sorted(os.scandir(Path(prefix or ".").expanduser()), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries[: 10 * _MAX_ENTRIES]:
        if not entry.name.startswith(name) or entry.name in _HIDDEN or (entry.name[:1] == "." and not name):
            continue
        if entry.is_dir():
            is_model = any((Path(entry.path) / file).is_file() for file in _RUN_FILES)
            yield f"{prefix}{entry.name}" if is_model else f"{prefix}{entry.name}/"
        elif files:
            yield f"{prefix}{entry.name}"
