"""`regard look`: a model's attention in the terminal, as a picture, a table or a page, and how reliable it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError, UsageError

from . import completion, terminal
from .options import AsJson, Beam, Device, ModelPath, NewTokens, argument, flag, option
from .terminal import without_none

if TYPE_CHECKING:
    from regard.lens import Look

_FIGURES = (".png", ".svg", ".pdf")
_SUFFIXES = (".png", ".svg", ".pdf", ".csv", ".html")


def look(
    model: ModelPath,
    what: Annotated[str | None, argument("TEXT", "A text, or an image file.")] = None,
    target: Annotated[str | None, option("TEXT", "What is written about it; else the model's.")] = None,
    beam: Beam = None,
    max_new_tokens: NewTokens = None,
    kind: Annotated[
        str | None, option(None, "self, cross or encoder.", complete=completion.choices("self", "cross", "encoder"))
    ] = None,
    layer: Annotated[int, typer.Option(metavar="N", help="From 1; -1 is the last.")] = -1,
    head: Annotated[int | None, option("N", "From 1; else the mean of all.")] = None,
    top: Annotated[int | None, option("K", "Say the K tokens each one looks at.", least=1)] = None,
    experts: Annotated[bool, flag("--experts", "Say which experts each token goes through.")] = False,
    words: Annotated[bool, flag("--words", "Sub-words as words.")] = False,
    specials: Annotated[bool, flag("--specials/--no-specials", "Show special tokens.")] = True,
    out: Annotated[Path | None, option("F", f"Write a file: {', '.join(_SUFFIXES)}.")] = None,
    score: Annotated[bool, flag("--score", "How often attention is right where that is known.")] = False,
    compare: Annotated[
        str | None, option("MODEL", "Compare its heads with another's.", complete=completion.models)
    ] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Where a model looks. A language model reads TEXT (and goes on, with --beam or --max-new-tokens); a translator or
    captioner writes its own answer unless --target gives one."""
    if what is None and not score:
        raise UsageError("there is nothing to look at: give a text, an image file, or --score")
    if what is not None and score:
        raise UsageError("--score looks at examples whose truth is known: leave the text out")
    if compare is not None and (out is not None or top is not None):
        raise UsageError("--compare prints one number for each head: leave --out and --top out")
    if out is not None and out.suffix.lower() not in _SUFFIXES:
        raise UsageError(f"--out {out} ends in {out.suffix or 'nothing'}; it may end in {', '.join(_SUFFIXES)}")
    terminal.check_out(out)
    opened = terminal.open_model(model, device)
    if score:
        from regard.lens.head_scores import score as score_heads

        _check_known_alignment(model)
        scores = score_heads(opened)
        table = scores.pop("table", None)
        terminal.print_json(scores) if as_json else print(table)
        return
    terminal.refuse_images(opened, [what or ""])
    from regard.lens import look as look_at
    from regard.lens.render import select_head

    options = without_none(beam=beam, max_new_tokens=max_new_tokens) or None
    seen = look_at(opened, what, target, generate=options)
    kind = kind if kind is not None or "cross" not in seen.kinds else "cross"
    if compare is not None:
        other = terminal.open_model(compare, device)
        if other.config.architecture != opened.config.architecture:
            raise UsageError(f"--compare {compare}: {other.config.architecture}, not {opened.config.architecture}")
        same: Any = target
        if target is None and len(seen.inputs) == 2:  # both must write the same text, or no row of theirs is alike
            same, options = seen.inputs[1][0].tolist(), None
        _print_comparison(seen, look_at(other, what, same, generate=options), kind, as_json)
        return
    merging: dict[str, Any] = {"kind": kind, "words": words, "specials": specials}
    with terminal.usage_errors("kind"):
        layer = _index("layer", layer, seen.layers(kind=kind))
        head = None if head is None else _index("head", head, seen.heads(kind=kind))
        if out is not None:
            _write_file(seen, out, layer=layer, head=head, **merging)
            terminal.progress(f"wrote {out}")
        if experts:
            _print_routing(seen, layer, kind, as_json)
        elif as_json or top is not None:
            view = select_head(seen, **merging).view
            rows = view.top(top or 3, layer=layer, head=head)
            if as_json:
                chosen = {"kind": view.kind, "layer": seen._layer(view.kind, layer), "head": head}
                terminal.print_json(
                    {"model": model, **_to_dict(seen), **chosen, "rows": _rows_to_dict(rows, view.cols)}
                )
            else:
                for row in rows:
                    print(row)
        elif out is None:
            seen.print(layer=layer, head=head, **merging)


def _index(name: str, number: int, total: int) -> int:
    """The index of a layer or head that is counted from 1, from the end if negative."""
    if not 1 <= abs(number) <= total:
        raise UsageError(f"--{name} {number}: this model has {total} {name}{'s' * (total != 1)}, 1 … {total}")
    return number - 1 if number > 0 else number


def _write_file(seen: Look, out: Path, **options: Any) -> None:
    match out.suffix.lower():
        case ".csv":
            seen.csv(out, **options)
        case ".html":
            seen.html(out, **options)
        case _ if any(label.box for label in seen.cols(kind=options["kind"])) and seen.image is not None:
            del options["specials"]
            seen.overlay(out, **options)
        case _:
            seen.heatmap(out, **options)


def _to_dict(seen: Look) -> dict[str, Any]:
    kinds = {}
    for kind in seen.kinds:
        sizes = {"layers": seen.layers(kind=kind), "heads": seen.heads(kind=kind)}
        kinds[kind] = {**sizes, "rows": len(seen.rows(kind=kind)), "cols": len(seen.cols(kind=kind))}
    return {"text": seen.text, "target": seen.target_text, "kinds": kinds}


def _rows_to_dict(rows: Sequence[Any], cols: Sequence[Any]) -> list[dict[str, Any]]:
    """What each token looks at, likeliest first."""
    places, dicts = {id(label): n for n, label in enumerate(cols)}, []
    for n, (row, at) in enumerate(rows):
        looks_at = [{"index": places[id(x)], "text": x.text, "weight": weight} for x, weight in at]
        dicts.append({"index": n, "text": row.text, "special": row.special, "looks_at": looks_at})
    return dicts


def _print_routing(seen: Look, layer: int, kind: str | None, as_json: bool) -> None:
    """The experts of each token in one layer, that with the largest weight first."""
    kind = "self" if kind == "cross" else kind  # experts follow all attention of a layer
    routing = seen.routing(layer=layer, kind=kind)
    rows: list[dict[str, Any]] = []
    tokens = zip(seen.rows(kind=kind), routing.experts.tolist(), routing.weights.tolist(), strict=True)
    for label, chosen, weights in tokens:
        pairs = zip(chosen, weights, strict=True)
        rows.append({"text": label.text, "experts": [{"expert": e, "weight": weight} for e, weight in pairs]})
    if as_json:
        terminal.print_json({"layer": layer, "tokens": rows})
        return
    for row in rows:
        print(f"{row['text']:>12}  " + "  ".join(f"expert {x['expert']} {x['weight']:.2f}" for x in row["experts"]))


def _check_known_alignment(path: str) -> None:
    """A model of other data can be scored as well, but the number would say nothing about it."""
    from regard.training.run_directory import RUN_FILE, RunDirectory

    if not (Path(path) / RUN_FILE).is_file():
        return
    source = RunDirectory.open(path).config.data.source
    if source not in ("en-ko", "shapes"):
        raise RegardError(f"{path} learned from {source}; where it should look is known for en-ko and shapes alone")


def _print_comparison(seen: Look, other: Look, kind: str | None, as_json: bool) -> None:
    """The same text in two models, head by head."""
    from regard.lens.compare import compare

    comparison = compare(seen, other, kind=kind)
    if as_json:
        terminal.print_json(comparison.to_dict())
        return
    print(f"{comparison.kind} attention: Jensen–Shannon divergence in bits, 0 the same, 1 nothing in common")
    print("layer  " + "  ".join(f"head {h:<2}" for h in range(1, comparison.divergence.shape[1] + 1)))
    for (one, two), row in zip(comparison.layers, comparison.divergence.tolist(), strict=True):
        name = str(one + 1) if one == two else f"{one + 1}/{two + 1}"
        print(f"{name:>5}  " + "  ".join(f"{value:7.4f}" for value in row))


def circuit(
    model: ModelPath,
    task: Annotated[str, argument("FILE", "A table of prompts: clean, corrupted, answer, wrong; or `repeats`.")],
    faithfulness: Annotated[float, typer.Option(metavar="X", help="Share of the behaviour to explain.")] = 0.85,
    pairs: Annotated[int, typer.Option(metavar="N", min=1, help="Pairs to read at most.")] = 16,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps between corrupted and clean embeddings.")] = 5,
    out: Annotated[Path | None, option("F", "Draw it: .png, .svg or .pdf.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """The few edges between heads and networks that carry a behaviour, by edge attribution patching (EAP-IG)."""
    if out is not None and out.suffix.lower() not in _FIGURES:
        raise UsageError(f"--out {out} ends in {out.suffix or 'nothing'}; it may end in {', '.join(_FIGURES)}")
    terminal.check_out(out)
    from regard.foundation.progress import show_progress
    from regard.lens.circuit import find_circuit, read_task, repeats_task

    chosen = repeats_task(pairs) if task == "repeats" else read_task(task).first(pairs)
    opened = terminal.open_model(model, device)
    with show_progress(not as_json):
        found = find_circuit(
            opened, chosen.clean, chosen.corrupted, chosen.metrics(opened), faithfulness=faithfulness, steps=steps
        )
    terminal.print_result(found, as_json)
    if out is not None:
        found.draw(out)
        print(out)
