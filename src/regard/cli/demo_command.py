"""`regard demo`: everything once, in seven minutes; `regard serve`: the explorer in the browser."""

from __future__ import annotations

import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import UsageError
from regard.foundation.language import LANGUAGES, environment_language

from . import completion, terminal
from .options import AsJson, Device, Words, argument, flag, option

if TYPE_CHECKING:
    from regard.demo import Demo

_PORT = 8017


def demo(
    ctx: typer.Context,
    words: Words = None,
    out: Annotated[Path, typer.Option(file_okay=False, metavar="DIR", help="Where everything is kept.")] = Path(
        "runs/demo"
    ),
    serve: Annotated[bool, flag("--serve/--no-serve", "End with the explorer in the browser.")] = True,
    port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Of the explorer; 0 takes any.", show_default=f"{_PORT}, or any if it is taken"
        ),
    ] = None,
    lang: Annotated[
        str | None, option("en|ko", "What it speaks.", default="as LANG", complete=completion.choices("en", "ko"))
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a translator here, test it on unseen combinations, look inside, ship it, explore it: about 7 minutes.

    Stopped anywhere, the same command goes on where it stopped. Words change the recipe, as in `regard train`.
    """
    from rich.console import Console

    from regard.demo import demo as run
    from regard.demo import demo_config
    from regard.demo.demo_screen import DemoScreen, DemoTexts

    if lang is not None and lang not in LANGUAGES:
        raise UsageError(f"--lang {lang} is none of {', '.join(LANGUAGES)}")
    demo_config(out, words or [])  # what is wrong is said at once
    screen = DemoScreen(Console(stderr=as_json, highlight=False), DemoTexts(lang or environment_language()))
    screen.title()
    finished = run(out, words or [], screen=screen, command=ctx.obj.command)
    if as_json:
        terminal.print_json(finished.to_dict())
        sys.stdout.flush()
    if serve:
        raise typer.Exit(_explore(finished, port))


def _explore(finished: Demo, port: int | None) -> int:
    """Serve until Ctrl-C. A missing library is named and is no failure: everything else went well."""
    finished.screen.stage("serve")
    missing = next((name for name in ("fastapi", "uvicorn") if find_spec(name) is None), None)
    if missing is not None:
        finished.screen.result("serve", {"left_out": missing})
        return 0
    from regard.web import serve

    def say(line: str) -> None:
        finished.screen.console.print(f"     {line.removeprefix('regard: ')}", style="bold", markup=False)

    return serve([finished.run], port=_free_port(_PORT) if port is None else port, say=say)


def _free_port(port: int) -> int:
    """The port if it is free, else 0, which means any."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port


def serve(
    models: Annotated[list[str], argument("RUN", "Runs or model directories.", completion.models)],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes any that is free.")] = _PORT,
    host: Annotated[str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    open_: Annotated[
        bool | None,
        typer.Option("--open/--no-open", help="Open the browser; unsaid, from a terminal.", show_default=False),
    ] = None,
    memory: Annotated[int, typer.Option(min=50, metavar="MB", help="What all looks together may keep.")] = 2000,
    waiting: Annotated[int, typer.Option(min=1, help="Requests in the queue; one more is refused.")] = 256,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="REGARD_API_KEY", metavar="KEY", help="Answer only those who send it.", show_default=False),
    ] = None,
    no_api_key: Annotated[bool, typer.Option("--no-api-key", help="Let everyone in where --host does.")] = False,
    device: Device = "auto",
) -> None:
    """Explore models in the browser: every head, every weight, exactly. Ctrl-C ends it."""
    from regard.web import serve as run
    from regard.web.requests import MEGABYTE, Limits

    code = run(
        models,
        host=host,
        port=port,
        device=device,
        open_browser=sys.stderr.isatty() if open_ is None else open_,
        limits=Limits(kept_bytes=memory * MEGABYTE, waiting=waiting),
        api_key=api_key or None,
        needs_key=not no_api_key,
        say=terminal.progress,
    )
    raise typer.Exit(code)
