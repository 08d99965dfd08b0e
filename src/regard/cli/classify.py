"""`regard classify`: which class a text or an image belongs to."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import AsJson, emit
from .reading import Device, ModelPath, TextFile, Truncate, lines_of, need_text, open_model


def classify(
    model: ModelPath,
    inputs: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT_OR_IMAGE", help="Or --file, or lines piped in.", show_default=False),
    ] = None,
    file: TextFile = None,
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Classes to show, likeliest first.")] = 1,
    truncate: Truncate = False,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The class of each text, or of each image file: one line for each, the class and its probability."""
    given = lines_of(inputs, file)
    from regard.generation import classify as run
    from regard.generation.classes import check_classifies

    opened = open_model(model, device)
    check_classifies(opened)
    need_text(opened, given)
    found = run(opened, given, truncate=truncate) if given else []
    if as_json:
        results = [
            {"input": text, "label": one.label, "probability": one.probability, "all": one.all}
            for text, one in zip(given, found, strict=True)
        ]
        emit({"model": model, "results": results})
        return
    for one in found:
        print("\t".join(f"{label}\t{chance:.4f}" for label, chance in list(one.all.items())[:top]))
