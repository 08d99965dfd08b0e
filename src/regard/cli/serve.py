"""`regard serve`: the explorer in the browser."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from . import completing
from .common import progress
from .reading import Device


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Runs or model directories.", show_default=False, autocompletion=completing.models
        ),
    ],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = 8017,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    open_: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the browser; unsaid, from a terminal.", show_default=False),
    ] = None,
    memory: Annotated[int, typer.Option(min=50, metavar="MB", help="What all looks together may keep.")] = 2000,
    device: Device = "auto",
) -> None:
    """Explore models in the browser: every head, every weight, exactly. Ctrl-C ends it."""
    from regard.web import serve as run
    from regard.web.request_limits import MEGABYTE, Limits

    code = run(
        models,
        host=host,
        port=port,
        device=device,
        open_browser=sys.stderr.isatty() if open_ is None else open_,
        limits=Limits(kept_bytes=memory * MEGABYTE),
        say=progress,
    )
    raise typer.Exit(code)
