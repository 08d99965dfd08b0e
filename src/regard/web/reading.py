"""What the page asks of a look, answered with tensors and plain values; every number it names is checked first."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..attention import AttentionMap, record
from ..generation.generate import at_rest
from ..lens.places import attention_at
from .limits import Limits, Refused
from .sessions import Session
from .walk import walk

if TYPE_CHECKING:
    from ..lens import Look
    from ..lens.labels import Label

MEAN = "mean"


def document(session: Session) -> dict[str, Any]:
    """What the page needs to know of a look before it asks for weights."""
    look = session.look
    found = {
        "id": session.id,
        "model": session.served.id,
        "text": look.text,
        "target": look.target_text,
        "kinds": {kind: sizes(look, kind) for kind in look.kinds},
        "beams": session.search is not None,
    }
    return found if look.image is None else found | {"image": f"/api/looks/{session.id}/image"}


def sizes(look: Look, kind: str) -> dict[str, int]:
    n_rows, n_cols = look.map(kind, 0).shape[2:]
    return {"layers": look.layers(kind), "heads": look.heads(kind), "n_rows": n_rows, "n_cols": n_cols}


def maps(session: Session, kind: str, layer: int, head: str = MEAN) -> AttentionMap:
    """The map of one head, or of all heads of a layer."""
    look = session.look
    if kind not in look.kinds:
        raise Refused(422, f"kind={kind[:40]!r} is not one of this look's: {', '.join(look.kinds) or 'it has none'}")
    have = look.layers(kind)
    if layer >= have:
        raise Refused(422, f"layer={layer}: {kind} attention has {have} layers, 0 … {have - 1}")
    whole = session.once(("map", kind, layer), lambda: look.map(kind, layer))
    if head == MEAN:
        return whole
    if int(head) >= whole.shape[1]:
        raise Refused(422, f"head={head}: {kind} attention has {whole.shape[1]} heads, 0 … {whole.shape[1] - 1}")
    return whole.head(0, int(head))


def labels(
    session: Session, kind: str, axis: str, start: int, stop: int | None, limits: Limits
) -> list[dict[str, Any]]:
    maps(session, kind, 0)
    every = session.once((axis, kind), lambda: getattr(session.look, axis)(kind))
    stop = min(len(every), start + limits.labels) if stop is None else stop
    _check_range(axis, start, stop, len(every), limits.labels)
    return [_label(label) for label in every[start:stop]]


def _label(label: Label) -> dict[str, Any]:
    found = {"text": label.text, "special": label.special}
    return found if label.box is None else found | {"box": list(label.box)}


def tile(
    session: Session, kind: str, layer: int, head: str, rows: tuple[int, int], cols: tuple[int, int], limits: Limits
) -> Tensor:
    """Exact weights (R, C)."""
    seen = maps(session, kind, layer, head)
    for name, (start, stop), total in (("rows", rows, seen.shape[2]), ("cols", cols, seen.shape[3])):
        _check_range(name, start, stop, total, limits.tile)
    return seen.tile(slice(*rows), slice(*cols))[0].mean(0)


def _check_range(name: str, start: int, stop: int, total: int, most: int) -> None:
    if not 0 <= start < stop <= total:
        raise Refused(422, f"{name} {start} … {stop} do not lie within 0 … {total}")
    if stop - start > most:
        raise Refused(422, f"{name} {start} … {stop} are {stop - start}; at most {most} are sent at once")


def pooled(session: Session, kind: str, layer: int, head: str, h: int, w: int, reduce: str, limits: Limits) -> Tensor:
    """The whole matrix in (h, w) cells, or fewer where it has no more."""
    seen = maps(session, kind, layer, head)
    h, w = min(h, seen.shape[2]), min(w, seen.shape[3])
    if 4 * h * w > limits.response_bytes:
        raise Refused(422, f"h={h} times w={w} cells are more than {limits.response_bytes:,} bytes")
    return seen.pooled(h, w, reduce)[0].mean(0)  # up to 1 MB a head: the browser keeps it, not the server


def thumbnails(session: Session, kind: str, layer: int, size: int, limits: Limits) -> Tensor:
    """Every head of a layer, small: (heads, size, size)."""
    seen = maps(session, kind, layer)
    h, w = min(size, seen.shape[2]), min(size, seen.shape[3])
    if 4 * seen.shape[1] * h * w > limits.response_bytes:
        raise Refused(422, f"size={size} is too large for {seen.shape[1]} heads in {limits.response_bytes:,} bytes")
    return session.once(("thumbnails", kind, layer, h, w), lambda: seen.pooled(h, w)[0])


def top(session: Session, kind: str, layer: int, head: str, row: int, k: int) -> list[dict[str, Any]]:
    """Where a row looks most."""
    seen = maps(session, kind, layer, head)
    _check_index("row", row, seen.shape[2])
    weights = seen.row(row)[0].mean(0)
    best = weights.topk(min(k, len(weights)))
    every = session.once(("cols", kind), lambda: session.look.cols(kind))
    return [
        {"index": index, "text": every[index].text, "weight": weight}
        for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if weight > 0
    ]


def _check_index(name: str, index: int, total: int) -> None:
    if not 0 <= index < total:
        raise Refused(422, f"{name}={index} does not lie within 0 … {total - 1}")


# ---- the arithmetic of one weight


def arithmetic(
    session: Session, kind: str, layer: int, head: int, row: int, col: int, limits: Limits
) -> dict[str, Any]:
    """``walk``, with v where the text is short enough to run the model again."""
    seen = maps(session, kind, layer)
    _check_index("head", head, seen.shape[1])
    _check_index("row", row, seen.shape[2])
    _check_index("col", col, seen.shape[3])
    values = values_of(session, kind, layer, limits)
    found = walk(seen, head, row, col, values)
    if values is None:
        longest = max(sizes(session.look, each)["n_rows"] for each in session.look.kinds)
        found["v_absent"] = f"v is shown for texts of at most {limits.walk_tokens} tokens; this one has {longest}"
    return found


def values_of(session: Session, kind: str, layer: int, limits: Limits) -> Tensor | None:
    """v of a layer (1, G, S, D). A look keeps q and k alone, so the same pass is made again, with this layer recorded.

    None where the text is too long to do that while somebody waits.
    """
    look = session.look
    longest = max(max(look.map(each, 0).shape[2:]) for each in look.kinds)
    if longest > limits.walk_tokens:
        return None

    def again() -> Tensor:
        module = attention_at(session.served.model, kind, layer)
        model: Any = session.served.model
        with at_rest(model), session.under(), record(module) as recorder:
            model.hidden(*look.inputs)
        calls = recorder.attentions["attention"]
        # Layers that share a module are recorded one after the other.
        found = calls[layer if len(calls) > 1 else 0].v
        assert found is not None
        return found.float()

    return session.once(("v", kind, layer), again)


# ---- as a table


def as_csv(
    session: Session, kind: str, layer: int, head: str, rows: tuple[int, int], cols: tuple[int, int], limits: Limits
) -> str:
    """Weights with their labels: a column for each key, a line for each query."""
    weights = tile(session, kind, layer, head, rows, cols, limits)
    look = session.look
    above, beside = look.cols(kind)[slice(*cols)], look.rows(kind)[slice(*rows)]
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["", *_texts(above)])
    for text, line in zip(_texts(beside), weights.tolist(), strict=True):
        lines.writerow([text, *(f"{weight:.9g}" for weight in line)])
    return out.getvalue()


def _texts(labels: Sequence[Label]) -> list[str]:
    """A spreadsheet would run a cell that begins like a formula."""
    return [f"'{label.text}" if label.text[:1] in "=+-@" else label.text for label in labels]
