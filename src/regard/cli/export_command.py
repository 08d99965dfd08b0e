"""`regard export`: write a model in other formats, with a certificate of how close they are to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.errors import UsageError

from . import completion, terminal
from .options import AsJson, ModelPath, argument, flag, option
from .terminal import split_commas

KINDS = (
    *("onnx", "onnx-int8", "hf", "ctranslate2", "gguf", "gguf-f16", "gguf-bf16", "gguf-q8_0", "int8", "safetensors"),
    *("web", "web-int8"),
)


def export(
    model: ModelPath,
    kind: Annotated[
        str, argument("KIND", f"{', '.join(KINDS)}; several separated by commas.", completion.choices(*KINDS))
    ],
    path: Annotated[Path, argument("OUT", "The directory to write, completely or not at all.")],
    check: Annotated[
        Path | None, option("FILE", "Also compare the metric on a file of pairs, texts or labelled texts.")
    ] = None,
    bound: Annotated[
        float | None,
        option("SHARE", "Largest difference of a logit, relative to the logits' spread.", least=0, default="1e-4"),
    ] = None,
    same_text: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            max=1.0,
            help="Smallest share of greedy texts that must be the same; default: 0.99, and no bound for int8.",
            show_default=False,
        ),
    ] = None,
    delta: Annotated[float, typer.Option(min=0.0, help="Largest drop of the metric on FILE.")] = 0.2,
    shapes: Annotated[int, typer.Option(min=1, help="Random shapes to compare on.")] = 200,
    seed: Annotated[int, typer.Option(help="Seed of the random shapes.")] = 0,
    beam: Annotated[int, typer.Option(min=1, help="Beam width on FILE.")] = 4,
    compiled: Annotated[bool, flag("--compile/--no-compile", "Also compare with torch.compile.")] = True,
    runtime: Annotated[Path | None, option("DIR", "For web: a node_modules folder with onnxruntime-web.")] = None,
    as_json: AsJson = False,
) -> None:
    """Export a model as ONNX, GGUF or int8, or for CTranslate2 or transformers, with a certificate of its accuracy.

    If a bound is broken, the exit code is 1 and nothing is written.
    """
    from regard.foundation.checks import did_you_mean

    kinds: Any = split_commas(kind)
    for name in kinds:
        if name not in KINDS:
            raise UsageError(f"there is no kind {name!r}{did_you_mean(name, KINDS)} (all: {', '.join(KINDS)})")
    if not kinds:
        raise UsageError(f"KIND is empty; it must be one or several of {', '.join(KINDS)}")
    from regard.export import BoundBroken, Bounds, certificate_text
    from regard.export import export as run
    from regard.io import load

    text_bounds = {} if same_text is None else {"same_text": same_text, "int8_same_text": same_text}
    logit_bounds: dict[str, Any] = {} if bound is None else {"max_abs": bound, "times_fp32": None}
    limits = Bounds(delta=delta, **logit_bounds, **text_bounds)
    options: dict[str, Any] = {"check": check, "bounds": limits, "n_shapes": shapes, "seed": seed}
    options |= {"compiled": compiled, "beam": beam, "runtime": runtime}
    opened = load(model)
    terminal.progress(f"comparing on {shapes} random shape{'s' if shapes != 1 else ''}")
    try:
        written = run(opened, kinds, path, **options)
    except BoundBroken as broken:
        terminal.progress(certificate_text(broken.document))
        raise
    certificate = json.loads((written / "certificate.json").read_text(encoding="utf-8"))
    text = f"{written}: {', '.join(certificate['kinds'])}\n{certificate_text(certificate)}"
    terminal.print_either({"path": str(written), **certificate}, text, as_json)
