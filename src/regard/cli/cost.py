"""`regard cost`: what a model costs, before it is built."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import AsJson, Words, as_options, emit, progress

if TYPE_CHECKING:
    from regard.config import TrainConfig


def cost(
    config: Annotated[
        str, typer.Argument(metavar="CONFIG", help="A model preset, a run, or a model directory.", show_default=False)
    ],
    words: Words = None,
    batch: Annotated[int, typer.Option(help="Texts or images at once.")] = 1,
    length: Annotated[
        int | None, typer.Option(help="Tokens of a text, of the target beside a source.", show_default="max_len")
    ] = None,
    source_length: Annotated[int | None, typer.Option(help="Tokens of the source.", show_default="as many")] = None,
    training: Annotated[bool, typer.Option("--training", help="Show memory and time of a training step too.")] = False,
    compare: Annotated[
        str | None, typer.Option(metavar="OTHER", help="Another preset, run or directory to put beside it.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Whose speed and memory: h200, a100, rtx4090, … or cpu, measured.")
    ] = "h200",
    cache: Annotated[str, typer.Option(help="Numbers of the KV cache: fp32, bf16 or int8.")] = "bf16",
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw it: .png, .svg or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """What a model costs: parameters, operations, memory, cache, and the least time a device can take for it.

    Words change the model (model.n_layers=4) and how it is trained (train.optimiser=muon train.checkpointing=true).
    """
    from regard.config.overrides import SECTIONS, check_section, parse_overrides
    from regard.errors import UsageError

    typed = parse_overrides(words or [], sections={name: SECTIONS[name] for name in ("model", "train")})
    model = dict(typed.get("model", {}))
    if "preset" in model:
        raise UsageError(f"model={model['preset']}: the model comes first, regard cost {model['preset']}")
    check_section("train", typed.get("train", {}))
    from regard.experiments.cost import cost as find
    from regard.experiments.cost import resolve_model
    from regard.experiments.cost_report import CostComparison, check_plot

    if plot is not None:
        check_plot(plot)

    def found(name: str, fields: dict[str, Any]) -> Any:
        recipe: TrainConfig = resolve_model(name, fields)[2]
        return find(
            name,
            batch,
            length,
            source_length=source_length,
            train=recipe.with_(**typed.get("train", {})),
            device=device,
            cache=cache,  # type: ignore[arg-type]  # checked there
            **fields,
        )

    with as_options("batch", "length", "source_length", "device", "cache"):
        first = found(config, model)
        answer = first if compare is None else CostComparison(first, found(compare, {}))
    if plot is not None:
        progress(f"drawn: {first.draw(plot)}")
    if as_json:
        emit(answer.to_dict())
    else:
        print(answer.to_text(training))
