"""`regard bench`: measurements."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import completing
from .common import AsJson, comma_words, progress, show
from .reading import Device, device_of, open_model

app = typer.Typer(help="Measure: attention against length, generation by batch and beam.", no_args_is_help=True)


def _numbers(text: str, option: str) -> list[int]:
    """`512,1024` → [512, 1024]."""
    words = comma_words(text)
    if not words or not all(word.isdecimal() and int(word) > 0 for word in words):
        raise typer.BadParameter(f"{text!r} is not a comma-separated list of positive whole numbers", param_hint=option)
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
    wanted_lengths = _numbers(lengths, "--lengths")
    from regard.experiments.bench_attention import bench_attention as measure
    from regard.experiments.bench_attention import choose_contenders

    wanted = None if mechanisms is None else comma_words(mechanisms)
    try:
        choose_contenders(wanted)
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


@app.command("generate")
def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run, a model directory, or a preset with random weights.",
            autocompletion=completing.presets_or_models,
        ),
    ],
    batch: Annotated[str, typer.Option(help="Prompts written at once, separated by commas.")] = "1,8",
    beam: Annotated[str, typer.Option(help="Beam widths, separated by commas; 1 is greedy.")] = "1,4",
    weights: Annotated[str, typer.Option(help="fp32, bf16 or int8, separated by commas.")] = "fp32,int8",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt or a source.")] = 16,
    new: Annotated[int, typer.Option(min=2, help="Tokens to write.")] = 64,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """How fast a model writes: time to the first token, time of each further one, tokens a second."""
    batches, beams, kinds = _numbers(batch, "--batch"), _numbers(beam, "--beam"), comma_words(weights)
    from regard import PRESETS, build
    from regard.experiments.bench_generate import WEIGHTS, bench_generate

    for kind in kinds:
        if kind not in WEIGHTS:
            raise typer.BadParameter(f"{kind!r} is none of {', '.join(WEIGHTS)}", param_hint="--weights")
    if model in PRESETS and not Path(model).exists():
        opened = build(model).to(device_of(device))
    else:
        opened = open_model(model, device)
    result = bench_generate(
        opened.eval(),
        model,
        batches=batches,
        beams=beams,
        weights=kinds,  # type: ignore[arg-type]  # checked against WEIGHTS above
        n_prompt=prompt,
        n_new=new,
        progress=progress,
    )
    show(result, as_json)
