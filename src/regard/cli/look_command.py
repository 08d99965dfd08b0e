"""`regard look`, `circuit` and `lens`: a model's attention as text, picture, table or page; circuits; tuned lenses."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError, UsageError

from . import completion, terminal
from .options import AsJson, Beam, Device, Dtype, ModelPath, NewTokens, argument, flag, option
from .terminal import without_none

if TYPE_CHECKING:
    from regard.lens import Look
    from regard.models import Model

_FIGURES = (".png", ".svg", ".pdf")
_SUFFIXES = (*_FIGURES, ".csv", ".html")


def look(
    model: ModelPath,
    what: Annotated[str | None, argument("TEXT", "A text, or an image file.")] = None,
    target: Annotated[str | None, option("TEXT", "The target text; default: the model's own output.")] = None,
    beam: Beam = None,
    max_new_tokens: NewTokens = None,
    kind: Annotated[
        str | None, option(None, "self, cross or encoder.", complete=completion.choices("self", "cross", "encoder"))
    ] = None,
    layer: Annotated[int, typer.Option(metavar="N", help="Layer, from 1; -1 is the last.")] = -1,
    head: Annotated[int | None, option("N", "Head, from 1; default: the mean of all.")] = None,
    top: Annotated[int | None, option("K", "List the K tokens that each token attends to most.", least=1)] = None,
    experts: Annotated[bool, flag("--experts", "List the experts that each token is routed to.")] = False,
    words: Annotated[bool, flag("--words", "Merge sub-words into words.")] = False,
    specials: Annotated[bool, flag("--specials/--no-specials", "Show special tokens.")] = True,
    out: Annotated[Path | None, option("FILE", f"Write a file: {', '.join(_SUFFIXES)}.")] = None,
    score: Annotated[bool, flag("--score", "Score attention on examples whose alignment is known.")] = False,
    compare: Annotated[
        str | None, option("MODEL", "Compare its heads with those of another model.", complete=completion.models)
    ] = None,
    history: Annotated[
        bool, flag("--history", "Show when heads learned their patterns, over a run's checkpoints.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = None,
    as_json: AsJson = False,
) -> None:
    """Show a model's attention. A language model reads TEXT (and continues it, with --beam or --max-new-tokens); a
    translator or captioner generates its own output unless --target gives one."""
    _check_options(what, out, top=top, score=score, compare=compare, history=history)
    if history:
        _print_history(model, what, target, kind, out, device, as_json)
        return
    opened = terminal.open_model(model, device, dtype=dtype)
    if score:
        _print_scores(model, opened, as_json)
        return
    terminal.check_inputs(opened, [what or ""])
    from regard.lens import look as look_at
    from regard.lens.compare import compare as compare_looks

    options = without_none(beam=beam, max_new_tokens=max_new_tokens) or None
    own_look = look_at(opened, what, target, generate=options)
    kind = kind if kind is not None or "cross" not in own_look.kinds else "cross"
    if compare is not None:
        other = terminal.open_model(compare, device, dtype=dtype)
        if other.config.architecture != opened.config.architecture:
            raise UsageError(f"--compare {compare}: {other.config.architecture}, not {opened.config.architecture}")
        other_target: Any = target
        if target is None and len(own_look.inputs) == 2:  # both models need the same target, so that rows match
            other_target, options = own_look.inputs[1][0].tolist(), None
        other_look = look_at(other, what, other_target, generate=options)
        terminal.print_result(compare_looks(own_look, other_look, kind=kind), as_json)
        return
    from regard.lens.render import select_head

    view_options: dict[str, Any] = {"kind": kind, "words": words, "specials": specials}
    with terminal.usage_errors("kind"):
        layer = _index("layer", layer, own_look.layers(kind=kind))
        head = None if head is None else _index("head", head, own_look.heads(kind=kind))
        if out is not None:
            _write_file(own_look, out, layer=layer, head=head, **view_options)
            terminal.progress(f"wrote {out}")
        if experts:
            _print_routing(own_look, layer, kind, as_json)
        elif as_json:
            terminal.print_json({"model": model, **_to_dict(own_look, top or 3, layer, head, view_options)})
        elif top is not None:
            print(*select_head(own_look, **view_options).view.top(top, layer=layer, head=head), sep="\n")
        elif out is None:
            own_look.print(layer=layer, head=head, **view_options)


def _check_options(
    what: str | None, out: Path | None, *, top: int | None, score: bool, compare: str | None, history: bool
) -> None:
    """Refuse options that do not go together, before a model is loaded."""
    if history and (score or compare is not None or top is not None):
        raise UsageError("--history prints scores over checkpoints: leave out --score, --compare and --top")
    if what is None and not (score or history):
        raise UsageError("there is nothing to look at: give a text, an image file, --score or --history")
    if what is not None and score:
        raise UsageError("--score uses its own examples, whose alignment is known: leave out the text")
    if compare is not None and (out is not None or top is not None):
        raise UsageError("--compare prints one number for each head: leave out --out and --top")
    terminal.check_out(out, _FIGURES if history else _SUFFIXES)


def _index(name: str, number: int, total: int) -> int:
    """The index of a layer or head given as a number from 1, or from the end if negative."""
    if not 1 <= abs(number) <= total:
        raise UsageError(f"--{name} {number}: this model has {total} {name}{'s' * (total != 1)}, 1 … {total}")
    return number - 1 if number > 0 else number


def _write_file(look: Look, out: Path, **options: Any) -> None:
    match out.suffix.lower():
        case ".csv":
            look.csv(out, **options)
        case ".html":
            look.html(out, **options)
        case _ if any(label.box for label in look.cols(kind=options["kind"])) and look.image is not None:
            del options["specials"]
            look.overlay(out, **options)
        case _:
            look.heatmap(out, **options)


def _to_dict(look: Look, top: int, layer: int, head: int | None, view_options: dict[str, Any]) -> dict[str, Any]:
    """The texts and sizes of a look, and the ``top`` tokens that each token attends to, largest weight first."""
    from regard.lens.render import select_head

    kinds = {}
    for kind in look.kinds:
        sizes = {"layers": look.layers(kind=kind), "heads": look.heads(kind=kind)}
        kinds[kind] = {**sizes, "rows": len(look.rows(kind=kind)), "cols": len(look.cols(kind=kind))}
    view = select_head(look, **view_options).view
    indices, rows = {id(label): n for n, label in enumerate(view.cols)}, []
    for n, (row, at) in enumerate(view.top(top, layer=layer, head=head)):
        looks_at = [{"index": indices[id(x)], "text": x.text, "weight": weight} for x, weight in at]
        rows.append({"index": n, "text": row.text, "special": row.special, "looks_at": looks_at})
    chosen = {"kind": view.kind, "layer": look._layer(view.kind, layer), "head": head}
    return {"text": look.text, "target": look.target_text, "kinds": kinds, **chosen, "rows": rows}


def _print_routing(look: Look, layer: int, kind: str | None, as_json: bool) -> None:
    kind = "self" if kind == "cross" else kind  # experts come after all attention of a layer
    routing = look.routing(layer=layer, kind=kind)
    rows: list[dict[str, Any]] = []
    tokens = zip(look.rows(kind=kind), routing.experts.tolist(), routing.weights.tolist(), strict=True)
    for label, chosen, weights in tokens:
        pairs = zip(chosen, weights, strict=True)
        rows.append({"text": label.text, "experts": [{"expert": e, "weight": weight} for e, weight in pairs]})
    if as_json:
        terminal.print_json({"layer": layer, "tokens": rows})
        return
    for row in rows:
        print(f"{row['text']:>12}  " + "  ".join(f"expert {x['expert']} {x['weight']:.2f}" for x in row["experts"]))


def _print_history(
    run: str, what: str | None, target: str | None, kind: str | None, out: Path | None, device: str, as_json: bool
) -> None:
    """Print the pattern scores of heads at every checkpoint, and when each head was born."""
    from regard.foundation.progress import show_progress
    from regard.lens.head_history import head_history

    with show_progress(not as_json), terminal.usage_errors("kind"):
        scores = head_history(run, what, target, kind=kind, device=terminal.device_name(device))
    terminal.print_result(scores, as_json)
    if out is not None:
        scores.draw(out)
        terminal.progress(f"wrote {out}")


def _print_scores(path: str, model: Model, as_json: bool) -> None:
    """Print how well heads align; a run on other data is refused, because its score would be meaningless."""
    from regard.lens.head_scores import score
    from regard.training.run_directory import RUN_FILE, RunDirectory

    source = RunDirectory.open(path).config.data.source if (Path(path) / RUN_FILE).is_file() else None
    if source not in (None, "en-ko", "shapes"):
        raise RegardError(f"{path} learned from {source}; the right alignment is known only for en-ko and shapes")
    scores = score(model)
    table = scores.pop("table", None)
    terminal.print_json(scores) if as_json else print(table)


def circuit(
    model: ModelPath,
    task: Annotated[
        str, argument("FILE", "A table of prompts: clean, corrupted, answer, wrong; or the embedded corpus `repeats`.")
    ],
    faithfulness: Annotated[float, typer.Option(metavar="X", help="Share of the behaviour to explain.")] = 0.85,
    pairs: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum number of pairs to read.")] = 16,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Steps between corrupted and clean embeddings.")] = 5,
    out: Annotated[Path | None, option("FILE", "Draw it: .png, .svg or .pdf.")] = None,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Find the edges between heads and feed-forward layers that carry a behaviour, by attribution patching (EAP-IG)."""
    terminal.check_out(out, _FIGURES)
    from regard.foundation.progress import show_progress
    from regard.lens.circuit import find_circuit, read_task, repeats_task

    chosen = repeats_task(pairs) if task == "repeats" else read_task(task).first(pairs)
    opened = terminal.open_model(model, device)
    with show_progress(not as_json):
        options: dict[str, Any] = {"target": chosen.targets_for(opened), "faithfulness": faithfulness, "steps": steps}
        result = find_circuit(opened, chosen.clean, chosen.corrupted, chosen.metrics(opened), **options)
    terminal.print_result(result, as_json)
    if out is not None:
        result.draw(out)
        terminal.progress(f"wrote {out}")


def lens(
    model: ModelPath,
    texts: Annotated[str, argument("FILE", "Texts to learn from, one per line; or an embedded corpus.")],
    out: Annotated[Path | None, option("FILE", "Write the lens here: .safetensors.")] = None,
    steps: Annotated[int, typer.Option(metavar="N", min=1, help="Training steps.")] = 200,
    limit: Annotated[int, typer.Option(metavar="N", min=2, help="Maximum number of texts to read.")] = 2000,
    device: Device = "auto",
    as_json: AsJson = False,
) -> None:
    """Learn a tuned lens: what each layer would predict if it were the last, and how far that is from the model's own
    prediction."""
    terminal.check_out(out, [".safetensors"])
    from regard.foundation.progress import show_progress
    from regard.lens.tuned_lens import read_texts, train_tuned_lens

    rows = read_texts(texts, limit)
    opened = terminal.open_model(model, device)
    with show_progress(not as_json):
        result = train_tuned_lens(opened, rows, steps=steps)
    terminal.print_result(result, as_json)
    if out is not None:
        result.lens.save(out)
        terminal.progress(f"wrote {out}")
