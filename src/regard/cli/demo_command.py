"""`regard demo`: train, test, look inside, export and explore a model in seven minutes."""

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
from .options import PORT, AsJson, Words, flag, option

if TYPE_CHECKING:
    from regard.demo import Demo


def demo(
    ctx: typer.Context,
    words: Words = None,
    out: Annotated[Path, typer.Option(file_okay=False, metavar="DIR", help="Directory for everything.")] = Path(
        "runs/demo"
    ),
    serve: Annotated[bool, flag("--serve/--no-serve", "End with the explorer in the browser.")] = True,
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of the explorer; 0 for any free one.",
            show_default=f"{PORT}, or any if it is taken",
        ),
    ] = None,
    lang: Annotated[
        str | None,
        option("en|ko", "Language of the output.", default="as LANG", complete=completion.choices("en", "ko")),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train a translator here, test it on unseen combinations, look inside, ship it, explore it: about 7 minutes.

    Run the same command again to resume a stopped demo. Fields change the recipe, as in `regard train`.
    """
    from rich.console import Console

    from regard.demo import demo as run
    from regard.demo import demo_config
    from regard.demo.demo_screen import DemoScreen, DemoTexts

    if lang is not None and lang not in LANGUAGES:
        raise UsageError(f"--lang {lang} is not one of {', '.join(LANGUAGES)}")
    demo_config(out, words or [])  # raises errors in the words before anything is printed
    screen = DemoScreen(Console(stderr=as_json, highlight=False), DemoTexts(lang or environment_language()))
    screen.title()
    finished = run(out, words or [], screen=screen, command=ctx.obj.command)
    if as_json:
        terminal.print_json(finished.to_dict())
        sys.stdout.flush()
    if serve:
        raise typer.Exit(_explore(finished, port))


def _explore(finished: Demo, port: int | None) -> int:
    """Serve the explorer until Ctrl-C. A missing library is reported, but is not a failure of the demo."""
    finished.screen.stage("serve")
    missing = next((name for name in ("fastapi", "uvicorn") if find_spec(name) is None), None)
    if missing is not None:
        finished.screen.result("serve", {"left_out": missing})
        return 0
    from regard.web import serve

    def print_line(line: str) -> None:
        finished.screen.console.print(f"     {line.removeprefix('regard: ')}", style="bold", markup=False)

    return serve([finished.run], port=_free_port(PORT) if port is None else port, say=print_line)


def _free_port(port: int) -> int:
    """The port if it is free, else 0, which means any free port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return 0
    return port
