"""`regard ablate`: the same run with one thing changed at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .common import AsJson, Words, emit, progress, show


def ablate(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="heads, d_k, d_ff, depth, size, dropout, positions, norm, residual, attention, mask, label-smoothing, "
            "warmup, mechanisms, extrapolation, paper, scaling; a grid as a TOML file; or the directory of a sweep to "
            "go on with.",
            show_default=False,
        ),
    ] = None,
    words: Words = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Runs of every cell.", show_default="3")] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Runs at once.", show_default="one a core; 4 on a GPU")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(file_okay=False, help="Where it is kept.", show_default="runs/ablate-NAME")
    ] = None,
    test: Annotated[
        str | None, typer.Option(metavar="SOURCE", help="Evaluate every model on these examples too: test.en,test.de.")
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Stop after so many; starting again goes on.", show_default=False)
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(min=0, help="A run that takes longer has failed.", show_default=False)
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the weights of finished runs.")] = False,
    on: Annotated[
        str, typer.Option(metavar="PLACE", help="local, ray (this machine's cluster) or ray://HOST:PORT.")
    ] = "local",
    report_only: Annotated[
        bool, typer.Option("--report-only", help="Run nothing; tables and pictures of what is done.")
    ] = False,
    listed: Annotated[bool, typer.Option("--list", help="Show the ablations and what they change, and leave.")] = False,
    as_json: AsJson = False,
) -> None:
    """Ablate: every cell with several seeds on the same batches, as the paper's table 3.

    Runs that are done are never run again: after Ctrl-C, or worse, start it again and it goes on. It ends with 1 when a
    run failed; one that diverged is a result.
    """
    if listed:
        _list(as_json)
        return
    from regard.errors import UsageError

    if what is None:
        raise UsageError("an ablation comes first: regard ablate NAME; regard ablate --list shows them")
    if what == "scaling":
        from regard.experiments.ablations import measure_scaling

        if words:
            raise UsageError(f"scaling trains nothing, so {words[0]} means nothing to it")
        show(measure_scaling(out=out or Path("runs/ablate-scaling")), as_json)
        return
    from regard.experiments import ablate as run

    tests = None if test is None else {"test": test}
    result = run(
        what,
        words or (),
        seeds=seeds,
        jobs=jobs,
        out=out,
        tests=tests,
        minutes=minutes,
        max_seconds=max_seconds,
        keep=keep,
        report_only=report_only,
        on=on,
        progress=progress,
    )
    show(result, as_json)
    if any(row.n_failed for row in result.rows):
        raise typer.Exit(1)


def _list(as_json: bool) -> None:
    from regard.experiments.ablations import list_ablations

    found = list_ablations()
    if as_json:
        emit({"ablations": found})
        return
    for name, entry in found.items():
        print(f"{name}: {entry['about']}")
        if entry["cells"]:
            print(f"    {', '.join(entry['cells'])}")
