"""`regard bench`: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import AsJson, comma_words, progress, show

app = typer.Typer(help="Measure: time and memory against length.", no_args_is_help=True)


def _lengths(text: str) -> list[int]:
    """`512,1024` → [512, 1024]."""
    words = comma_words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(
            f"{text!r} is not a comma-separated list of positive whole numbers", param_hint="--lengths"
        )
    return [int(word) for word in words]


@app.command("attention")
def attention(
    lengths: Annotated[
        str, typer.Option(help="Sequence lengths to measure, separated by commas.")
    ] = "512,1024,2048,4096,8192",
    mechanisms: Annotated[
        str | None, typer.Option(help="Mechanisms to measure, separated by commas; all of them unless given.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, help="Number of heads.")] = 8,
    width: Annotated[int, typer.Option(min=1, help="Width of one head.")] = 64,
    causal: Annotated[bool, typer.Option("--causal/--no-causal", help="Look only at the past.")] = True,
    backward: Annotated[
        bool, typer.Option("--backward/--forward", help="Measure forward and backward, or forward alone.")
    ] = False,
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the table and the PNG.")] = Path(
        "runs/bench-attention"
    ),
    as_json: AsJson = False,
) -> None:
    """Time and memory of every attention mechanism against length, with the fitted exponent of each."""
    wanted_lengths = _lengths(lengths)
    from regard.experiments.bench_attention import bench_attention as measure
    from regard.experiments.contenders import choose

    wanted = None if mechanisms is None else comma_words(mechanisms)
    try:
        choose(wanted)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--mechanisms") from None
    if wanted == []:
        raise typer.BadParameter("names no mechanism", param_hint="--mechanisms")

    result = measure(
        lengths=wanted_lengths,
        mechanisms=wanted,
        n_heads=heads,
        d_head=width,
        causal=causal,
        backward=backward,
        out=out,
        progress=progress,
    )
    show(result, as_json)
