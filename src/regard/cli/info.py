"""`regard info`: what a model directory holds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import completing
from .common import AsJson, show


def info(
    directory: Annotated[
        Path, typer.Argument(help="A model directory, of regard or of Hugging Face.", autocompletion=completing.models)
    ],
    verify: Annotated[bool, typer.Option("--verify/--no-verify", help="Compare every file with manifest.json.")] = True,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read pytorch_model.bin where there is no safetensors file.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What a model directory holds: architecture, parameters, config, files, and whether they are what was written."""
    from regard.io import describe

    show(describe(directory, allow_pickle=allow_pickle, verify=verify), as_json)
