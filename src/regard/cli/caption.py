"""`regard caption`: what is to be seen in an image."""

from __future__ import annotations

from typing import Annotated

import typer

from .common import AsJson, as_options, emit
from .generate import document
from .reading import Beam, Device, LengthPenalty, MaxNewTokens, ModelPath, given, one_line, open_model


def caption(
    model: ModelPath,
    images: Annotated[list[str], typer.Argument(metavar="IMAGE", help="Image files.", show_default=False)],
    beam: Beam = None,
    length_penalty: LengthPenalty = None,
    max_new_tokens: MaxNewTokens = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """A caption for each image file, one line each; with several, the file's name before it."""
    from regard.generation import GenerateConfig
    from regard.generation import caption as run

    options = given(beam=beam, length_penalty=length_penalty, max_new_tokens=max_new_tokens)
    with as_options(*options):
        GenerateConfig(**options)
    made = run(open_model(model, device), images, **options)
    if as_json:
        emit(document(model, images, made))
        return
    for image, text in zip(images, made, strict=True):
        print(f"{image}\t{one_line(text)}" if len(images) > 1 else one_line(text))
