"""What the page asks of a look, answered with tensors and plain values; every number it names is checked first."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..generation.generate import Generated
from ..lens.labels import token_labels, token_text
from ..lens.merged_view import MergedView
from .request_limits import Limits, RequestRefused
from .sessions import LookSession

if TYPE_CHECKING:
    from ..lens.labels import Label

MEAN = "mean"
Span = tuple[int, int | None]  # first, and one past the last; None: as far as is sent at once


@dataclass(frozen=True)
class HeadView:
    """Which attention of a look, and whether token by token."""

    kind: str
    layer: int
    head: int | None = None  # None: the mean of all heads
    words: bool = False
    specials: bool = True


def look_document(session: LookSession, words: bool = False, specials: bool = True) -> dict[str, Any]:
    """What the page needs to know of a look before it asks for weights."""
    look = session.look
    found = {
        "id": session.id,
        "model": session.served.id,
        "text": look.text,
        "target": look.target_text,
        "kinds": {
            kind: _view_sizes(merged_view(session, HeadView(kind, 0, None, words, specials))) for kind in look.kinds
        },
        "beams": session.search is not None,
    }
    return found if look.image is None else found | {"image": f"/api/looks/{session.id}/image"}


def _view_sizes(seen: MergedView) -> dict[str, int]:
    layers, heads = seen.look.layers(kind=seen.kind), seen.look.heads(kind=seen.kind)
    return {"layers": layers, "heads": heads, "n_rows": len(seen.rows), "n_cols": len(seen.cols)}


def merged_view(session: LookSession, at: HeadView) -> MergedView:
    """The rows and columns that are asked for; the place is checked."""
    look, kind = session.look, at.kind
    if kind not in look.kinds:
        raise RequestRefused(
            422, f"kind={kind[:40]!r} is not one of this look's: {', '.join(look.kinds) or 'it has none'}"
        )
    have, heads = look.layers(kind=kind), look.heads(kind=kind)
    if at.layer >= have:
        raise RequestRefused(422, f"layer={at.layer}: {kind} attention has {have} layers, 0 … {have - 1}")
    if at.head is not None and at.head >= heads:
        raise RequestRefused(422, f"head={at.head}: {kind} attention has {heads} heads, 0 … {heads - 1}")
    if not at.words and at.specials:
        return session.once(("view", kind), lambda: MergedView.plain(look, kind))
    found = session.once(
        ("view", kind, at.words, at.specials), lambda: look.merged(kind=kind, words=at.words, specials=at.specials)
    )
    if not found.rows or not found.cols:
        raise RequestRefused(422, f"specials=false leaves nothing of the {kind} attention: all its tokens are special")
    return found


def labels(
    session: LookSession, at: HeadView, axis: str, start: int, stop: int | None, limits: Limits
) -> list[dict[str, Any]]:
    every: list[Label] = getattr(merged_view(session, at), axis)
    return [label_document(label) for label in every[_check_span(axis, (start, stop), len(every), limits.labels)]]


def label_document(label: Label) -> dict[str, Any]:
    found = {"text": label.text, "special": label.special}
    return found if label.box is None else found | {"box": list(label.box)}


def tile(session: LookSession, at: HeadView, rows: Span, cols: Span, limits: Limits) -> Tensor:
    """Exact weights (R, C)."""
    seen = merged_view(session, at)
    picked = _check_spans(seen, rows, cols, limits)
    return seen.weights(layer=at.layer, head=at.head, rows=picked[0], cols=picked[1])


def _check_spans(seen: MergedView, rows: Span, cols: Span, limits: Limits) -> tuple[slice, slice]:
    here = _check_span("rows", rows, len(seen.rows), limits.tile)
    return here, _check_span("cols", cols, len(seen.cols), limits.tile)


def _check_span(name: str, part: Span, total: int, most: int) -> slice:
    start, stop = part[0], min(total, part[0] + most) if part[1] is None else part[1]
    if not 0 <= start < stop <= total:
        raise RequestRefused(422, f"{name} {start} … {stop} do not lie within 0 … {total}")
    if stop - start > most:
        raise RequestRefused(422, f"{name} {start} … {stop} are {stop - start}; at most {most} are sent at once")
    return slice(start, stop)


def pooled(session: LookSession, at: HeadView, h: int, w: int, reduce: str, limits: Limits) -> Tensor:
    """The whole matrix in (h, w) cells, or fewer where it has no more or no more can be sent.

    Up to 1 MB a head: the browser keeps it, not the server.
    """
    seen = merged_view(session, at)
    h, w = _fit_cells(seen, h, w, 1, limits)
    return seen.pooled(layer=at.layer, head=at.head, h=h, w=w, reduce=reduce)


def thumbnails(session: LookSession, at: HeadView, size: int, limits: Limits) -> Tensor:
    """Every head of a layer, small: (heads, size, size)."""
    seen = merged_view(session, at)
    h, w = _fit_cells(seen, size, size, seen.look.heads(kind=at.kind), limits)
    return session.once(("thumbnails", at, h, w), lambda: seen.overviews(layer=at.layer, h=h, w=w))


def _fit_cells(seen: MergedView, h: int, w: int, heads: int, limits: Limits) -> tuple[int, int]:
    """As many cells as are asked for, as there are, and as can be sent at once."""
    h, w = min(h, len(seen.rows)), min(w, len(seen.cols))
    most = limits.response_bytes // (4 * heads)
    if h * w <= most:
        return h, w
    h = max(1, min(h, math.isqrt(most * h // w)))
    return h, max(1, min(w, most // h))


def top(session: LookSession, at: HeadView, row: int, k: int) -> list[dict[str, Any]]:
    """Where a row looks most."""
    seen = merged_view(session, at)
    check_index("row", row, len(seen.rows))
    weights = seen.weights(layer=at.layer, head=at.head, rows=[row])[0]
    best = weights.topk(min(k, len(weights)))
    return [
        {"index": index, "text": seen.cols[index].text, "weight": weight}
        for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if weight > 0
    ]


def check_index(name: str, index: int, total: int) -> None:
    if not 0 <= index < total:
        raise RequestRefused(422, f"{name}={index} does not lie within 0 … {total - 1}")


# ---- as a table


def to_csv(session: LookSession, at: HeadView, rows: Span, cols: Span, limits: Limits) -> str:
    """Weights with their labels: a column for each key, a line for each query."""
    seen = merged_view(session, at)
    here, there = _check_spans(seen, rows, cols, limits)
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["", *_texts(seen.cols[there])])
    weights = seen.weights(layer=at.layer, head=at.head, rows=here, cols=there).tolist()
    for text, line in zip(_texts(seen.rows[here]), weights, strict=True):
        lines.writerow([text, *(f"{weight:.9g}" for weight in line)])
    return out.getvalue()


_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # spreadsheets look behind white space too


def _texts(labels: Sequence[Label]) -> list[str]:
    """A spreadsheet would run a cell that begins like a formula."""
    return [f"'{label.text}" if label.text.startswith(_FORMULA) else label.text for label in labels]


class BeamTree:
    """Nodes with their parents; ``score`` is Σ log P of the tokens so far.

    ``kept`` are those of the texts the search ended with, of which one is ``best``; of each such text the last node has
    its ``rank`` and ``final``, its score by length. The others were given up on the way; ``ended`` says that a text
    that was given up was a whole one.
    """

    def __init__(self, session: LookSession) -> None:
        self._served = session.served
        self.nodes: list[dict[str, Any]] = [
            {"id": 0, "parent": None, "text": "", "score": 0.0, "best": True, "kept": True}
        ]
        self._tokens = [-1]  # of each node
        self._below: dict[tuple[int, int], int] = {}  # (node, token) → the node it leads to

    def grow(self, parent: int, token: int, score: float) -> int:
        """The node that a token leads to."""
        if (parent, token) not in self._below:
            self._below[parent, token] = node = len(self.nodes)
            text = token_text(token, self._served.writes_with, self._served.config)
            plain = {"text": text, "score": score, "best": False, "kept": False}
            self.nodes.append({"id": node, "parent": parent, **plain})
            self._tokens.append(token)
        return self._below[parent, token]

    def follow(self, made: Generated) -> None:
        """Step by step, as the search went: a beam goes on from one before it."""
        at: dict[int, int] = {}  # beam → its node
        for step in made.steps or ():
            kept = list(step.of(0))
            nodes = [self.grow(at.get(parent, 0), token, score) for _, parent, token, score in kept]
            for node, (beam, *_) in zip(nodes, kept, strict=True):
                if beam is None:
                    self.nodes[node]["ended"] = True
            at = {beam: node for node, (beam, *_) in zip(nodes, kept, strict=True) if beam is not None}

    def mark(self, made: Generated) -> None:
        """The texts that the search ended with."""
        for rank, found in enumerate(made.hypotheses[0]):
            node = 0
            for token in found.tokens:
                node = self._below[node, token]
                self.nodes[node] |= {"kept": True, "best": self.nodes[node]["best"] or rank == 0}
            self.nodes[node] |= {"final": found.score, "rank": rank}

    def name(self, nodes: list[dict[str, Any]]) -> None:
        """Give each node the ``label`` of its token within a text: a part of a character is called after the whole."""
        inner = {node["parent"] for node in nodes}
        leaves = [node for node in nodes if node["id"] not in inner]
        for leaf in sorted(leaves, key=lambda node: node.get("rank", len(nodes))):
            path = [leaf]
            while path[-1]["parent"]:
                path.append(self.nodes[path[-1]["parent"]])
            tokens = [self._tokens[node["id"]] for node in reversed(path)]
            labels = token_labels(tokens, self._served.writes_with, self._served.config)
            for node, label in zip(reversed(path), labels, strict=True):
                node.setdefault("label", label.text)
        self.nodes[0]["label"] = ""


def beam_tree(session: LookSession, limits: Limits) -> dict[str, Any]:
    """All nodes, parents before children; where there are too many, without those that were given up."""
    made = session.search
    if made is None:
        raise RequestRefused(422, "this look was not written by a beam search; generate with beam=2 or more")
    found = BeamTree(session)
    found.follow(made)
    found.mark(made)
    nodes = found.nodes
    if len(nodes) > limits.beam_nodes:
        nodes = [node for node in nodes if node["kept"]]
    found.name(nodes)
    return {"nodes": nodes, "left_out": len(found.nodes) - len(nodes)}


if TYPE_CHECKING:
    from PIL.Image import Image

_LONGEST = 640


def encode_png(image: Image, limits: Limits) -> bytes:
    """A PNG file that is small enough to be sent: larger pictures are made smaller, small ones stay as they are."""
    longest = _LONGEST
    while True:
        small = image.convert("RGB")
        small.thumbnail((longest, longest))
        out = io.BytesIO()
        small.save(out, "PNG", optimize=True)
        if out.tell() <= limits.response_bytes:
            return out.getvalue()
        longest = longest * 3 // 4
