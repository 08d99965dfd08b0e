"""`regard eval`: how good a run or a model directory is, alone or against another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from . import completing
from .common import AsJson, Words, show


def evaluate(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_DIR", help="A run, RUN@STEP, or a model directory.", autocompletion=completing.models
        ),
    ],
    words: Words = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="OTHER",
            help="Compare with this run or directory by paired bootstrap.",
            autocompletion=completing.models,
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the output of every example and the worst cases.")
    ] = None,
    split: Annotated[
        str, typer.Option(help="Which examples: valid, another set the source holds out, all of those, or train.")
    ] = "valid",
    beam: Annotated[int | None, typer.Option(min=1, help="Beam width; as in training unless given.")] = None,
    length_penalty: Annotated[
        float | None, typer.Option(help="Length penalty; as in training unless given.", show_default=False)
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Move the window of perplexity by so many tokens."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many examples.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16: of the loss's matrix products.", show_default="fp32")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Metrics on held-out data: the run's own, or data.source=… and other data.* words."""
    from regard.config import DataConfig
    from regard.config.overrides import parse_overrides
    from regard.errors import UsageError

    data: dict[str, Any] = parse_overrides(words or [], sections={"data": DataConfig}).get("data", {})
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device} is none of auto, cpu, cuda, mps")
    if precision not in (None, "fp32", "bf16", "fp16"):
        raise UsageError(f"--precision {precision} is none of fp32, bf16, fp16")
    from regard.training.evaluating import evaluate as run

    given: dict[str, Any] = {
        "against": against,
        "out": out,
        "beam": beam,
        "length_penalty": length_penalty,
        "stride": stride,
    }
    given |= {"limit": limit, "precision": precision}
    options = {name: value for name, value in given.items() if value is not None}
    show(run(path, data, split=split, device=device, **options), as_json)
