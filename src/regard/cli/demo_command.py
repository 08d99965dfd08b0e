"""`regard demo`: everything once, in three minutes."""

from __future__ import annotations

import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import completion
from .options import AsJson, Device, Words, print_json, progress

if TYPE_CHECKING:
    from regard.demo.run import Demo

_PORT = 8017


def demo(
    ctx: typer.Context,
    words: Words = None,
    out: Annotated[Path, typer.Option(file_okay=False, metavar="DIR", help="Where everything is kept.")] = Path(
        "runs/demo"
    ),
    serve: Annotated[bool, typer.Option("--serve/--no-serve", help="End with the explorer in the browser.")] = True,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Of the explorer; 0 takes any.", show_default=f"{_PORT}, or any if it is taken"
        ),
    ] = None,
    lang: Annotated[
        str | None,
        typer.Option(
            metavar="en|ko",
            help="What it speaks.",
            show_default="as LANG",
            autocompletion=completion.choices("en", "ko"),
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a translator here, test it on unseen combinations, look inside, ship it, explore it: about 3 minutes.

    Stopped anywhere, the same command goes on where it stopped. Words change the recipe, as in `regard train`.
    """
    from regard.demo.says import LANGUAGES, Says, language_here
    from regard.errors import UsageError

    if lang is not None and lang not in LANGUAGES:
        raise UsageError(f"--lang {lang} is none of {', '.join(LANGUAGES)}")
    from rich.console import Console

    from regard.demo.showing import Shown
    from regard.demo.wanted import demo_config

    demo_config(out, words or [])  # what is wrong is said at once
    shown = Shown(Console(stderr=as_json, highlight=False), Says(lang or language_here()))
    shown.title()
    from regard.demo.run import demo as run

    made = run(out, words or [], shown=shown, command=ctx.obj.command)
    if as_json:
        print_json(made.document())
        sys.stdout.flush()
    if serve:
        raise typer.Exit(_serve(made, port))


def _serve(made: Demo, port: int | None) -> int:
    """Until somebody ends it. What is not installed is named, and no reason to fail after everything else went well."""
    made.shown.stage("serve")
    missing = next((name for name in ("fastapi", "uvicorn") if find_spec(name) is None), None)
    if missing is not None:
        made.shown.result("serve", {"left_out": missing})
        return 0
    from regard.web import serve

    def say(line: str) -> None:
        made.shown.console.print(f"     {line.removeprefix('regard: ')}", style="bold", markup=False)

    return serve([made.run], port=_free(_PORT) if port is None else port, say=say)


def _free(port: int) -> int:
    """The port where nobody has it, else 0: any."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


def serve(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN", help="Runs or model directories.", show_default=False, autocompletion=completion.models
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
