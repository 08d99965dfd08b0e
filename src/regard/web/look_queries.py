"""The explorer's queries about a look, answered from its maps as tensors or JSON values; all indices are checked."""

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
from .requests import Limits, RequestRefused
from .sessions import LookSession

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..lens.labels import Label

MEAN = "mean"
Span = tuple[int, int | None]  # [start, stop); a stop of None means as many as one response may have


@dataclass(frozen=True)
class HeadView:
    """Selects the attention of one head, and whether sub-words are joined and special tokens shown."""

    kind: str
    layer: int
    head: int | None = None  # None: the mean of all heads
    words: bool = False
    specials: bool = True


def look_document(session: LookSession, words: bool = False, specials: bool = True) -> dict[str, Any]:
    """What the page needs to know of a look before it requests weights."""
    look = session.look
    kinds = {kind: merged_view(session, HeadView(kind, 0, None, words, specials)).facts for kind in look.kinds}
    about = {"id": session.id, "model": session.served.id, "text": look.text, "target": look.target_text}
    document: dict[str, Any] = {**about, "kinds": kinds, "beams": session.search is not None}
    document |= session.cache("summary", lambda: _summary(session))
    return document if look.image is None else document | {"image": f"/api/looks/{session.id}/image"}


def routing_document(session: LookSession, view: HeadView) -> dict[str, Any]:
    """The experts of each token in a layer, best first, their weights, and each expert's share of all choices."""
    merged_view(session, view)  # checks the kind and the layer
    if session.served.config.experts is None:
        raise RequestRefused(400, "this model has no experts: all tokens go through the same feed-forward network")
    routing = session.look.routing(layer=view.layer, kind=view.kind)
    counts = routing.experts.flatten().bincount(minlength=routing.probabilities.shape[-1])
    load = counts / counts.sum()
    tokens = [label_document(label) for label in session.look.rows(kind=view.kind)]
    chosen = {"experts": routing.experts.tolist(), "weights": routing.weights.tolist(), "load": load.tolist()}
    return {"tokens": tokens, **chosen}


_UNCERTAIN_AMONG = 512  # leading tokens that are searched for the least certain prediction


def _summary(session: LookSession) -> dict[str, Any]:
    """The words that the model hardly knows, its classes, and the position of its least certain prediction."""
    look, served = session.look, session.served
    source = next((look.cols(kind=kind) for kind in ("cross", "encoder", "self") if kind in look.kinds), [])
    summary: dict[str, Any] = {"unfamiliar": [] if look.image else served.unfamiliar_words(look.text, source)}
    if served.config.head == "classify" and (classes := look.classes()):
        summary["classes"] = classes
    if served.can_generate:
        # A language model's prediction after the first token has hardly any context.
        first = 0 if served.has_source or served.config.source == "image" else min(1, len(look.hidden()) - 1)
        summary["uncertain"] = first + int(look.uncertainty(slice(first, _UNCERTAIN_AMONG)).argmax())
    return summary


def merged_view(session: LookSession, at: HeadView) -> MergedView:
    """The rows and columns of a view; raises if the look lacks the kind, layer or head."""
    look, kind = session.look, at.kind
    if kind not in look.kinds:
        kinds = ", ".join(look.kinds) or "it has none"
        raise RequestRefused(422, f"kind={kind[:40]!r} is not one of this look's: {kinds}")
    for name, index, total in (("layer", at.layer, look.layers(kind=kind)), ("head", at.head, look.heads(kind=kind))):
        if index is not None and index >= total:
            raise RequestRefused(422, f"{name}={index}: {kind} attention has {total} {name}s, 0 … {total - 1}")
    is_plain = at.specials and not at.words
    view = session.cache(
        ("view", kind, at.words, at.specials), lambda: MergedView(look, kind, at.words, at.specials, is_plain)
    )
    if not view.rows or not view.cols:
        raise RequestRefused(422, f"specials=false leaves no {kind} attention: all its tokens are special")
    return view


def labels(
    session: LookSession, at: HeadView, axis: str, start: int, stop: int | None, limits: Limits
) -> list[dict[str, Any]]:
    axis_labels: list[Label] = getattr(merged_view(session, at), axis)
    span = _check_span(axis, (start, stop), len(axis_labels), limits.labels)
    return [label_document(label) for label in axis_labels[span]]


def label_document(label: Label) -> dict[str, Any]:
    document = {"text": label.text, "special": label.special}
    return document if label.box is None else document | {"box": list(label.box)}


def head_to_explain(session: LookSession, at: HeadView, row: int, col: int) -> int:
    """The head of a view; for the mean over heads, which has no computation, the head with the largest weight here."""
    if at.head is not None:
        return at.head
    return int(session.look.map(kind=at.kind, layer=at.layer).tile(row, col)[0, :, 0, 0].argmax())


def tile(session: LookSession, at: HeadView, rows: Span, cols: Span, limits: Limits) -> Tensor:
    """Exact weights (R, C)."""
    view = merged_view(session, at)
    row_span, col_span = _check_spans(view, rows, cols, limits)
    return view.weights(layer=at.layer, head=at.head, rows=row_span, cols=col_span)


def _check_spans(view: MergedView, rows: Span, cols: Span, limits: Limits) -> tuple[slice, slice]:
    row_span = _check_span("rows", rows, len(view.rows), limits.tile)
    return row_span, _check_span("cols", cols, len(view.cols), limits.tile)


def _check_span(name: str, span: Span, total: int, most: int) -> slice:
    start, stop = span[0], min(total, span[0] + most) if span[1] is None else span[1]
    if not 0 <= start < stop <= total:
        raise RequestRefused(422, f"{name} {start} … {stop} are not within 0 … {total}")
    if stop - start > most:
        raise RequestRefused(422, f"{name} {start} … {stop} are {stop - start}; one response has at most {most}")
    return slice(start, stop)


def pooled(session: LookSession, at: HeadView, h: int, w: int, reduce: str, limits: Limits) -> Tensor:
    """The whole matrix pooled into at most (h, w) cells; not cached: it may take 1 MB, and the browser keeps it."""
    view = merged_view(session, at)
    h, w = _fit_cells(view, h, w, 1, limits)
    return view.pooled(layer=at.layer, head=at.head, h=h, w=w, reduce=reduce)


def thumbnails(session: LookSession, at: HeadView, size: int, limits: Limits) -> Tensor:
    """Every head of a layer, pooled: (heads, size, size)."""
    view = merged_view(session, at)
    h, w = _fit_cells(view, size, size, view.look.heads(kind=at.kind), limits)
    return session.cache(("thumbnails", at, h, w), lambda: view.overviews(layer=at.layer, h=h, w=w))


def _fit_cells(view: MergedView, h: int, w: int, heads: int, limits: Limits) -> tuple[int, int]:
    """The number of cells: at most h × w, one per weight, and as many as fit into one response."""
    h, w = min(h, len(view.rows)), min(w, len(view.cols))
    most = limits.response_bytes // (4 * heads)
    if h * w <= most:
        return h, w
    h = max(1, min(h, math.isqrt(most * h // w)))
    return h, max(1, min(w, most // h))


def top(session: LookSession, at: HeadView, row: int, k: int) -> list[dict[str, Any]]:
    """The largest weights of a row."""
    view = merged_view(session, at)
    check_index("row", row, len(view.rows))
    weights = view.weights(layer=at.layer, head=at.head, rows=[row])[0]
    best = weights.topk(min(k, len(weights)))
    return [
        {"index": index, "text": view.cols[index].text, "weight": weight}
        for index, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        if weight > 0
    ]


def check_index(name: str, index: int, total: int) -> None:
    if not 0 <= index < total:
        raise RequestRefused(422, f"{name}={index} is not within 0 … {total - 1}")


def to_csv(session: LookSession, at: HeadView, rows: Span, cols: Span, limits: Limits) -> str:
    """Weights with their labels: a row per query, a column per key."""
    view = merged_view(session, at)
    row_span, col_span = _check_spans(view, rows, cols, limits)
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["", *cell_texts(view.cols[col_span])])
    weights = view.weights(layer=at.layer, head=at.head, rows=row_span, cols=col_span).tolist()
    for text, line in zip(cell_texts(view.rows[row_span]), weights, strict=True):
        lines.writerow([text, *(f"{weight:.9g}" for weight in line)])
    return out.getvalue()


def cell_texts(labels: Sequence[Label]) -> list[str]:
    """The texts of labels, with a quote before any that a spreadsheet would evaluate as a formula."""
    signs = ("=", "+", "-", "@", "\t", "\r", "\n")  # spreadsheets skip whitespace before the sign
    return [f"'{label.text}" if label.text.startswith(signs) else label.text for label in labels]


class BeamTree:
    """The nodes of a beam search with their parents; ``score`` is Σ log P of the tokens so far.

    ``kept`` nodes belong to the hypotheses that the search returned, ``best`` ones to the first of them; the last node
    of a hypothesis has its ``rank`` and its length-normalised score, ``final``. All other nodes were dropped during the
    search; ``ended`` marks complete texts among them.
    """

    def __init__(self, session: LookSession) -> None:
        self._tokenizer, self._config = session.served.target_tokenizer, session.served.config
        root = {"id": 0, "parent": None, "text": "", "score": 0.0, "best": True, "kept": True}
        self.nodes: list[dict[str, Any]] = [root]
        self._tokens = [-1]  # the token of each node
        self._children: dict[tuple[int, int], int] = {}  # (node, token) → node

    def add_node(self, parent: int, token: int, score: float) -> int:
        """The child of ``parent`` by a token; created if it does not exist."""
        if (parent, token) not in self._children:
            self._children[parent, token] = node = len(self.nodes)
            text = token_text(token, self._tokenizer, self._config)
            fields = {"text": text, "score": score, "best": False, "kept": False}
            self.nodes.append({"id": node, "parent": parent, **fields})
            self._tokens.append(token)
        return self._children[parent, token]

    def add_steps(self, generated: Generated) -> None:
        """Add the nodes of every step of the search."""
        node_of_beam: dict[int, int] = {}
        for step in generated.steps or ():
            parents, node_of_beam = node_of_beam, {}
            for beam, parent, token, score in step.of(0):
                node = self.add_node(parents.get(parent, 0), token, score)
                if beam is None:
                    self.nodes[node]["ended"] = True
                else:
                    node_of_beam[beam] = node

    def mark_hypotheses(self, generated: Generated) -> None:
        for rank, hypothesis in enumerate(generated.hypotheses[0]):
            node = 0
            for token in hypothesis.tokens:
                node = self._children[node, token]
                self.nodes[node] |= {"kept": True, "best": self.nodes[node]["best"] or rank == 0}
            self.nodes[node] |= {"final": hypothesis.score, "rank": rank}

    def label_nodes(self, nodes: list[dict[str, Any]]) -> None:
        """Give each node the ``label`` of its token in its text; the tokens of one character share its label."""
        inner = {node["parent"] for node in nodes}
        leaves = [node for node in nodes if node["id"] not in inner]
        for leaf in sorted(leaves, key=lambda node: node.get("rank", len(nodes))):
            path = [leaf]
            while path[-1]["parent"]:
                path.append(self.nodes[path[-1]["parent"]])
            tokens = [self._tokens[node["id"]] for node in reversed(path)]
            labels = token_labels(tokens, self._tokenizer, self._config)
            for node, label in zip(reversed(path), labels, strict=True):
                node.setdefault("label", label.text)
        self.nodes[0]["label"] = ""


def beam_tree(session: LookSession, limits: Limits) -> dict[str, Any]:
    """All nodes, parents before children; if there are too many, only those of the returned hypotheses."""
    generated = session.search
    if generated is None:
        raise RequestRefused(422, "this text was not generated by beam search; generate with beam=2 or more")
    tree = BeamTree(session)
    tree.add_steps(generated)
    tree.mark_hypotheses(generated)
    nodes = [node for node in tree.nodes if node["kept"] or len(tree.nodes) <= limits.beam_nodes]
    tree.label_nodes(nodes)
    return {"nodes": nodes, "left_out": len(tree.nodes) - len(nodes)}


def encode_png(image: Image, limits: Limits) -> bytes:
    """A PNG file of at most 640 × 640 pixels, or fewer if that exceeds the size of a response."""
    side = 640
    while True:
        small = image.convert("RGB")
        small.thumbnail((side, side))
        out = io.BytesIO()
        small.save(out, "PNG", optimize=True)
        if out.tell() <= limits.response_bytes:
            return out.getvalue()
        side = side * 3 // 4
