"""`regard eval`: how good a run or a model directory is, alone or against another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import AsJson, Words, show


def evaluate(
    path: Annotated[str, typer.Argument(metavar="RUN_OR_DIR", help="A run, RUN@STEP, or a model directory.")],
    words: Words = None,
    against: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Compare with this run or directory by paired bootstrap.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder for the output of every example and the worst cases.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which held-out examples; valid, or one more the source has.")] = "valid",
    beam: Annotated[int | None, typer.Option(min=1, help="Beam width; as in training unless given.")] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Move the window of perplexity by so many tokens."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first so many examples.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Metrics on held-out data: the run's own, or data.source=… and other data.* words."""
    from regard.config import DataConfig
    from regard.config.words import UsageError, parse_words

    data: dict[str, Any] = parse_words(words or [], sections={"data": DataConfig}).get("data", {})
    if device not in ("auto", "cpu", "cuda", "mps"):
        raise UsageError(f"--device {device} is none of auto, cpu, cuda, mps")
    from regard.training import evaluate as run

    options = {"against": against, "out": out, "split": split, "beam": beam, "stride": stride}
    show(run(path, data, **options, limit=limit, device=device), as_json)
