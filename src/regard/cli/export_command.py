"""`regard export`: a model as something to ship, with the numbers that say how near it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import UsageError
from regard.foundation.language import localise

from . import completion, terminal
from .options import AsJson, argument, flag, option
from .terminal import split_commas

KINDS = ("onnx", "onnx-int8", "hf", "ctranslate2", "gguf", "gguf-f16", "gguf-bf16", "gguf-q8_0", "int8", "safetensors")


def export(
    model: Annotated[str, argument("MODEL", "A run, RUN@STEP, or a model directory.", completion.models)],
    kind: Annotated[
        str,
        argument(
            "KIND",
            f"{', '.join(KINDS)}; several with commas between.",
            completion.choices(*KINDS),
        ),
    ],
    path: Annotated[Path, argument("PATH", "The directory to write; whole or not at all.")],
    check: Annotated[Path | None, option("FILE", "Compare the metric on pairs, texts or labelled texts.")] = None,
    bound: Annotated[
        float | None, option("SHARE", "Largest difference of a logit, by the logits' spread.", least=0, default="1e-4")
    ] = None,
    same_text: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Least share of greedy texts that must be the same: 0.99 unless given, and of int8 none unless given.",
            show_default=False,
        ),
    ] = None,
    delta: Annotated[float, typer.Option(min=0.0, help="Largest loss of the metric on FILE, in its points.")] = 0.2,
    shapes: Annotated[int, typer.Option(min=1, help="Random shapes to compare on.")] = 200,
    seed: Annotated[int, typer.Option(help="Which random shapes.")] = 0,
    beam: Annotated[int, typer.Option(min=1, help="Beam width on FILE.")] = 4,
    compiled: Annotated[bool, flag("--compile/--no-compile", "Compare with torch.compile too.")] = True,
    as_json: AsJson = False,
) -> None:
    """Write a model as ONNX, GGUF or int8, for CTranslate2 or transformers, compare it, and keep the certificate.

    Where a bound is broken the exit code is 1 and nothing is written.
    """
    from regard.foundation.checks import did_you_mean

    kinds: Any = split_commas(kind)
    for one in kinds:
        if one not in KINDS:
            raise UsageError(f"there is no kind {one!r}{did_you_mean(one, KINDS)} (all: {', '.join(KINDS)})")
    if not kinds:
        raise UsageError(f"there is no kind to export; it is one or several of {', '.join(KINDS)}")
    from regard.export import BoundBroken, Bounds, certificate_text
    from regard.export import export as run
    from regard.io import load

    text_bounds = {} if same_text is None else {"same_text": same_text, "int8_same_text": same_text}
    logit_bounds: dict[str, Any] = {} if bound is None else {"max_abs": bound, "times_fp32": None}
    limits = Bounds(delta=delta, **logit_bounds, **text_bounds)
    opened = load(model)
    terminal.progress(f"comparing on {shapes} random shape{'s' if shapes != 1 else ''}")
    try:
        written = run(
            opened, kinds, path, check=check, bounds=limits, n_shapes=shapes, seed=seed, compiled=compiled, beam=beam
        )
    except BoundBroken as broken:
        terminal.progress(certificate_text(broken.document))
        raise
    certificate = json.loads((written / "certificate.json").read_text(encoding="utf-8"))
    if as_json:
        terminal.print_json({"path": str(written), **certificate})
    else:
        print(localise(f"{written}: {', '.join(certificate['kinds'])}\n{certificate_text(certificate)}"))
