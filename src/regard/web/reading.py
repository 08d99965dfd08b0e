"""What the page asks of a look, answered with tensors and plain values; every number it names is checked first."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..attention import record
from ..generation.generate import at_rest
from ..lens.places import attention_at
from ..lens.view import View
from .limits import Limits, Refused
from .sessions import Session
from .walk import walk

if TYPE_CHECKING:
    from ..lens.labels import Label

MEAN = "mean"
Part = tuple[int, int | None]
"""First, and one past the last; None: as far as is sent at once."""


@dataclass(frozen=True)
class Place:
    """Which attention of a look, and whether token by token."""

    kind: str
    layer: int
    head: int | None = None
    """None: the mean of all heads."""
    words: bool = False
    specials: bool = True


def document(session: Session, words: bool = False, specials: bool = True) -> dict[str, Any]:
    """What the page needs to know of a look before it asks for weights."""
    look = session.look
    found = {
        "id": session.id,
        "model": session.served.id,
        "text": look.text,
        "target": look.target_text,
        "kinds": {kind: _sizes(view(session, Place(kind, 0, None, words, specials))) for kind in look.kinds},
        "beams": session.search is not None,
    }
    return found if look.image is None else found | {"image": f"/api/looks/{session.id}/image"}


def _sizes(seen: View) -> dict[str, int]:
    layers, heads = seen.look.layers(seen.kind), seen.look.heads(seen.kind)
    return {"layers": layers, "heads": heads, "n_rows": len(seen.rows), "n_cols": len(seen.cols)}


def view(session: Session, at: Place) -> View:
    """The rows and columns that are asked for; the place is checked."""
    look, kind = session.look, at.kind
    if kind not in look.kinds:
        raise Refused(422, f"kind={kind[:40]!r} is not one of this look's: {', '.join(look.kinds) or 'it has none'}")
    have, heads = look.layers(kind), look.heads(kind)
    if at.layer >= have:
        raise Refused(422, f"layer={at.layer}: {kind} attention has {have} layers, 0 … {have - 1}")
    if at.head is not None and at.head >= heads:
        raise Refused(422, f"head={at.head}: {kind} attention has {heads} heads, 0 … {heads - 1}")
    if not at.words and at.specials:
        return session.once(("view", kind), lambda: View.plain(look, kind))
    found = session.once(
        ("view", kind, at.words, at.specials), lambda: look.merged(kind, words=at.words, specials=at.specials)
    )
    if not found.rows or not found.cols:
        raise Refused(422, f"specials=false leaves nothing of the {kind} attention: all its tokens are special")
    return found


def labels(
    session: Session, at: Place, axis: str, start: int, stop: int | None, limits: Limits
) -> list[dict[str, Any]]:
    every: list[Label] = getattr(view(session, at), axis)
    return [label_document(label) for label in every[_checked(axis, (start, stop), len(every), limits.labels)]]


def label_document(label: Label) -> dict[str, Any]:
    found = {"text": label.text, "special": label.special}
    return found if label.box is None else found | {"box": list(label.box)}


def tile(session: Session, at: Place, rows: Part, cols: Part, limits: Limits) -> Tensor:
    """Exact weights (R, C)."""
    seen = view(session, at)
    picked = _checked_parts(seen, rows, cols, limits)
    return seen.weights(at.layer, at.head, *picked)


def _checked_parts(seen: View, rows: Part, cols: Part, limits: Limits) -> tuple[slice, slice]:
    here = _checked("rows", rows, len(seen.rows), limits.tile)
    return here, _checked("cols", cols, len(seen.cols), limits.tile)


def _checked(name: str, part: Part, total: int, most: int) -> slice:
    start, stop = part[0], min(total, part[0] + most) if part[1] is None else part[1]
    if not 0 <= start < stop <= total:
        raise Refused(422, f"{name} {start} … {stop} do not lie within 0 … {total}")
    if stop - start > most:
        raise Refused(422, f"{name} {start} … {stop} are {stop - start}; at most {most} are sent at once")
    return slice(start, stop)


def pooled(session: Session, at: Place, h: int, w: int, reduce: str, limits: Limits) -> Tensor:
    """The whole matrix in (h, w) cells, or fewer where it has no more or no more can be sent.

    Up to 1 MB a head: the browser keeps it, not the server.
    """
    seen = view(session, at)
    return seen.pooled(at.layer, at.head, *_fitting(seen, h, w, 1, limits), reduce)


def thumbnails(session: Session, at: Place, size: int, limits: Limits) -> Tensor:
    """Every head of a layer, small: (heads, size, size)."""
    seen = view(session, at)
    h, w = _fitting(seen, size, size, seen.look.heads(at.kind), limits)
    return session.once(("thumbnails", at, h, w), lambda: seen.overviews(at.layer, h, w))


def _fitting(seen: View, h: int, w: int, heads: int, limits: Limits) -> tuple[int, int]:
    """As many cells as are asked for, as there are, and as can be sent at once."""
    h, w = min(h, len(seen.rows)), min(w, len(seen.cols))
    most = limits.response_bytes // (4 * heads)
    if h * w <= most:
        return h, w
    h = max(1, min(h, math.isqrt(most * h // w)))
    return h, max(1, min(w, most // h))


def top(session: Session, at: Place, row: int, k: int) -> list[dict[str, Any]]:
    """Where a row looks most."""
    seen = view(session, at)
    _check_index("row", row, len(seen.rows))
    weights = seen.weights(at.layer, at.head, [row])[0]
    best = weights.topk(min(k, len(weights)))
    return [
        {"index": index, "text": seen.cols[index].text, "weight": weight}
        for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if weight > 0
    ]


def _check_index(name: str, index: int, total: int) -> None:
    if not 0 <= index < total:
        raise Refused(422, f"{name}={index} does not lie within 0 … {total - 1}")


# ---- the arithmetic of one weight


def arithmetic(session: Session, at: Place, row: int, col: int, limits: Limits) -> dict[str, Any]:
    """``walk``, with v where the text is short enough to run the model again."""
    seen, head = view(session, at), at.head or 0
    _check_index("row", row, len(seen.rows))
    _check_index("col", col, len(seen.cols))
    values = values_of(session, at.kind, at.layer, limits)
    found = walk(session.look.map(at.kind, at.layer), head, row, col, values)
    if values is None:
        longest = _longest(session)
        found["v_absent"] = f"v is shown for texts of at most {limits.walk_tokens} tokens; this one has {longest}"
    return found


def _longest(session: Session) -> int:
    look = session.look
    return max(max(look.map(kind, 0).shape[2:]) for kind in look.kinds)


def values_of(session: Session, kind: str, layer: int, limits: Limits) -> Tensor | None:
    """v of a layer (1, G, S, D). A look keeps q and k alone, so the same pass is made again, with this layer recorded.

    None where the text is too long to do that while somebody waits.
    """
    if _longest(session) > limits.walk_tokens:
        return None

    def again() -> Tensor:
        module = attention_at(session.served.model, kind, layer)
        model: Any = session.served.model
        with at_rest(model), session.under(), record(module) as recorder:
            model.hidden(*session.look.inputs)
        calls = recorder.attentions["attention"]
        # Layers that share a module are recorded one after the other.
        found = calls[layer if len(calls) > 1 else 0].v
        assert found is not None
        return found.float()

    return session.once(("v", kind, layer), again)


# ---- as a table


def as_csv(session: Session, at: Place, rows: Part, cols: Part, limits: Limits) -> str:
    """Weights with their labels: a column for each key, a line for each query."""
    seen = view(session, at)
    here, there = _checked_parts(seen, rows, cols, limits)
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["", *_texts(seen.cols[there])])
    weights = seen.weights(at.layer, at.head, here, there).tolist()
    for text, line in zip(_texts(seen.rows[here]), weights, strict=True):
        lines.writerow([text, *(f"{weight:.9g}" for weight in line)])
    return out.getvalue()


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # spreadsheets look behind white space too


def _texts(labels: Sequence[Label]) -> list[str]:
    """A spreadsheet would run a cell that begins like a formula."""
    return [f"'{label.text}" if label.text.startswith(_FORMULA) else label.text for label in labels]
