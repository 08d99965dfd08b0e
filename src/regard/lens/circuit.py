"""Circuits: the few edges between parts of a model that carry a behaviour.

The edges of the residual graph (``lens.residual_graph``) are scored, and the model runs with only the best of them:
along all other edges, readers get the corrupted values.

faithfulness  (circuit − corrupted) / (clean − corrupted) of the metric
completeness  1 − the faithfulness of the model without the circuit; 1 if the rest of the model does nothing
minimality    the smallest loss of faithfulness when one edge is removed; positive if every edge is needed
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.corpora.repeats import induction_pairs
from ..data.record_files import open_records
from ..errors import BadData
from ..foundation.plotting import INK, SOFT, new_figure
from ..models import Model
from .activations import Metric
from .notebook import figure_html
from .patching import logit_difference, read_pairs
from .residual_graph import CircuitRunner, Edge, ResidualGraph, edge_scores


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges that carry a behaviour, and how much of it they carry."""

    edges: dict[Edge, float]  # edge → score, by descending absolute score
    n_possible: int  # edges of the whole graph
    faithfulness: float
    completeness: float
    minimality: float

    @property
    def share(self) -> float:
        """The circuit's edges as a share of all edges."""
        return len(self.edges) / self.n_possible

    def heads(self, kind: str = "self") -> list[tuple[int, int]]:
        """(layer, head) of the circuit's heads of one kind, "self", "cross" or "encoder"."""
        names = {edge.writer for edge in self.edges if edge.writer.startswith(f"{kind}.")}
        return sorted((int(layer), int(head)) for _, layer, head in (name.split(".") for name in names))

    def to_dict(self) -> dict[str, Any]:
        edges = [{"from": edge.writer, "to": edge.reader, "score": score} for edge, score in self.edges.items()]
        return {**self._qualities(), "n_possible": self.n_possible, "edges": edges}

    def _qualities(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in ("faithfulness", "completeness", "minimality")}

    def to_text(self) -> str:
        lines = [
            f"{display_name(edge.writer):>9} → {display_name(edge.reader):<10} {score:+.3f}"
            for edge, score in self.edges.items()
        ]
        size = f"{len(self.edges)} of {self.n_possible} edges ({self.share:.1%})"
        qualities = [f"{name} {value:.3f}" for name, value in self._qualities().items()]
        return "\n".join([", ".join([size, *qualities]), *lines])

    def draw(self, path: str | Path) -> Path:
        """Draw the parts layer by layer from the embeddings up to the logits, with edges as wide as their scores."""
        self._figure().savefig(path, facecolor="white")
        return Path(path)

    def _figure(self) -> Any:
        figure = new_figure(8, 6)
        panel = figure.add_axes((0.02, 0.02, 0.96, 0.96))
        panel.axis("off")
        panel.set_xlim(0, 1)
        places = _layout(self.edges)
        largest = max((abs(score) for score in self.edges.values()), default=1.0)
        for edge, score in self.edges.items():
            start, end = places[edge.writer], places[_part(edge.reader)]
            side = edge.reader.rpartition(".")[2]
            colour = {"q": "#3b6fb6", "k": "#b6533b", "v": "#4b8f4b"}.get(side, SOFT)
            bend = {"q": -0.08, "k": 0.08}.get(side, 0.0)  # so that edges to q, k and v do not overlap
            style = {"arrowstyle": "-|>", "color": colour, "lw": 0.6 + 3 * abs(score) / largest}
            style |= {"shrinkA": 14, "shrinkB": 14, "connectionstyle": f"arc3,rad={bend}"}
            panel.annotate("", end, start, arrowprops=style)
        for name, (x, y) in places.items():
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": SOFT}
            panel.text(x, y, display_name(name), ha="center", va="center", fontsize=9, color=INK, bbox=box)
        panel.set_ylim(-0.3, max(y for _, y in places.values()) + 0.3)
        panel.text(0.0, 1.0, "q blue, k red, v green", transform=panel.transAxes, fontsize=8, color=SOFT, va="top")
        return figure

    def _repr_html_(self) -> str:
        return figure_html(self._figure())

    def __repr__(self) -> str:
        size = f"{len(self.edges)} of {self.n_possible} edges, {self.share:.1%}"
        return f"Circuit({size}, {', '.join(f'{name} {value:.2f}' for name, value in self._qualities().items())})"


def _part(reader: str) -> str:
    """The part that a reader belongs to: "self.1.2" for "self.1.2.q"."""
    return reader[:-2] if reader.endswith((".q", ".k", ".v")) else reader


_KINDS = {"self": "", "cross": "cross ", "encoder": "enc ", "ff": "", "encoder_ff": "enc "}


def display_name(name: str) -> str:
    """A part or reader with layers and heads counted from 1: "self.0.3.k" is "L1H4 k", "ff.1" is "L2 MLP"."""
    kind, *numbers = name.split(".")
    if kind not in _KINDS:
        return name
    layer = f"{_KINDS[kind]}L{int(numbers[0]) + 1}"
    return f"{layer} MLP" if kind.endswith("ff") else f"{layer}H{int(numbers[1]) + 1} {''.join(numbers[2:])}".strip()


_HEIGHTS = {"encoder": 0.8, "encoder_ff": 1.6, "self": 0.7, "cross": 1.25, "ff": 1.75}  # within a layer


def _layout(edges: Iterable[Edge]) -> dict[str, tuple[float, float]]:
    """The (x, y) of each part: encoder below decoder, heads of a layer side by side, feed-forward networks right."""
    names = {name for edge in edges for name in (edge.writer, _part(edge.reader))} | {"embedding", "logits"}
    encoder = sorted({int(name.split(".")[1]) for name in names if name.startswith("encoder")})
    decoder = sorted({int(name.split(".")[1]) for name in names if name.startswith(("self", "cross", "ff"))})
    has_both = "source" in names
    floor = 2.0 * len(encoder) + 1.0 if has_both else 0.0
    top = floor + 2.0 * (len(decoder) if has_both or decoder else len(encoder)) + 1
    height = {"source": 0.0, "embedding": floor, "logits": top}
    rows: dict[float, list[str]] = {}
    for name in sorted(names, key=lambda name: [int(x) if x.isdigit() else 0 for x in name.split(".")[1:]]):
        kind, *numbers = name.split(".")
        y = height.get(name, -1.0)
        if y < 0:
            layers, base = (encoder, 0.0) if kind.startswith("encoder") else (decoder, floor)
            y = base + 2.0 * layers.index(int(numbers[0])) + _HEIGHTS[kind]
        rows.setdefault(y, []).append(name)
    places = {name: ((i + 1) / (len(row) + 1), y) for y, row in rows.items() for i, name in enumerate(row)}
    return {name: (0.92 if name.partition(".")[0].endswith("ff") else x, y) for name, (x, y) in places.items()}


_COLUMNS = ("clean", "corrupted", "answer", "wrong")


class CircuitTask(NamedTuple):
    """A behaviour as pairs of prompts, with the right and a wrong answer to each clean one."""

    clean: list[str]
    corrupted: list[str]
    answers: list[str]
    wrong: list[str]
    targets: list[str] | None = None  # encoder-decoder only: the decoder's text before the answer

    def first(self, n: int) -> CircuitTask:
        """The first n pairs."""
        return CircuitTask(*(None if column is None else column[:n] for column in self))  # type: ignore[arg-type]

    def targets_for(self, model: Model) -> list[str] | None:
        """The decoder's input in an encoder-decoder; only its start token if the task has no targets."""
        if not model.is_encoder_decoder:
            return None
        return [""] * len(self.clean) if self.targets is None else self.targets

    def metrics(self, model: Model) -> list[Metric]:
        """The logit of each answer minus that of the wrong one."""
        return [logit_difference(model, *both) for both in zip(self.answers, self.wrong, strict=True)]


def read_task(path: str | Path) -> CircuitTask:
    """Read a CSV, TSV, JSON Lines or Parquet table with the columns clean, corrupted, answer and wrong; for an
    encoder-decoder also target, the decoder's text before the answer."""
    rows = [record.fields for record in open_records(Path(path), "clean").read()]
    for name in _COLUMNS:
        if not rows or name not in rows[0]:
            have = ", ".join(rows[0]) if rows else "no rows"
            raise BadData(f"{path} has {have}; the task of a circuit needs the columns {', '.join(_COLUMNS)}")
    targets = [str(row["target"]) for row in rows] if "target" in rows[0] else None
    clean, corrupted, answers, wrong = ([str(row[name]) for row in rows] for name in _COLUMNS)
    return CircuitTask(clean, corrupted, answers, wrong, targets)


def repeats_task(n: int) -> CircuitTask:
    """Induction on the corpus ``repeats``."""
    rows = list(induction_pairs(n))
    return CircuitTask(*([row[name] for row in rows] for name in _COLUMNS))


def find_circuit(
    model: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric | Sequence[Metric],
    *,
    faithfulness: float = 0.85,
    max_share: float = 1.0,
    steps: int = 5,
    target: Any = None,
) -> Circuit:
    """The fewest edges, in the order of their EAP-IG scores, whose mean faithfulness over the pairs is high enough.

    Edges that lie on no path from the embeddings to the logits are left out. The circuit is then pruned: edges without
    which it still reaches ``faithfulness`` are removed.

    faithfulness  the mean faithfulness to reach
    max_share     upper bound on the edges, as a share of all
    steps         integration steps of EAP-IG
    target        encoder-decoder only: the decoder's input for each pair
    """
    graph, scores = edge_scores(model, clean, corrupted, metric, steps=steps, target=target)
    pairs = read_pairs(model, clean, corrupted, metric, (target, target))
    runners = [CircuitRunner(model, graph, *pair) for pair in pairs]

    def mean(kept: Tensor) -> float:
        return sum(runner.faithfulness(kept) for runner in runners) / len(runners)

    order = scores.abs().flatten().argsort(descending=True)
    limit = int(max_share * int(graph.possible.sum()))
    kept = torch.zeros_like(graph.possible)
    for n in _growing_sizes(limit):
        kept = edges_on_paths(graph, _mark_first(order, n, scores.shape) & graph.possible)
        if mean(kept) >= faithfulness:
            break
    kept = _prune(graph, kept, scores, mean, faithfulness)
    ordered = sorted(kept.nonzero().tolist(), key=lambda at: -abs(float(scores[at[0], at[1]])))
    edges = {Edge(graph.writers[w], graph.readers[r]): float(scores[w, r]) for w, r in ordered}
    reached, others = mean(kept), mean(graph.possible & ~kept)
    least = reached - max((mean(_without(graph, kept, *edge)) for edge in ordered), default=0.0)
    return Circuit(edges, int(graph.possible.sum()), reached, 1 - others, least)


def _growing_sizes(limit: int) -> Iterator[int]:
    """1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14 … up to the limit, growing by about a fifth."""
    n = 1
    while n < limit:
        yield n
        n += max(1, n // 5)
    yield limit


def _mark_first(order: Tensor, n: int, shape: Sequence[int]) -> Tensor:
    """Booleans of this shape, True at the first n of the flat indices ``order``."""
    marked = torch.zeros(order.numel(), dtype=torch.bool)
    marked[order[:n]] = True
    return marked.reshape(tuple(shape))


def edges_on_paths(graph: ResidualGraph, kept: Tensor) -> Tensor:
    """The edges that lie on a path from the embeddings to the logits."""
    edges = {(writer, reader) for writer, reader in kept.nonzero().tolist()}
    while True:
        have_input = set(graph.roots).union(*(graph.feeds[reader] for _, reader in edges))
        have_output = {writer for writer, _ in edges}
        last = len(graph.readers) - 1
        on_path = {(w, r) for w, r in edges if w in have_input and (r == last or graph.feeds[r] & have_output)}
        if on_path == edges:
            break
        edges = on_path
    result = torch.zeros_like(kept)
    for writer, reader in edges:
        result[writer, reader] = True
    return result


def _without(graph: ResidualGraph, kept: Tensor, writer: int, reader: int) -> Tensor:
    """The circuit without an edge, and without the edges that are then on no path."""
    fewer = kept.clone()
    fewer[writer, reader] = False
    return edges_on_paths(graph, fewer)


def _prune(
    graph: ResidualGraph, kept: Tensor, scores: Tensor, mean: Callable[[Tensor], float], faithfulness: float
) -> Tensor:
    """Remove edges, from the smallest score up, as long as the circuit still reaches ``faithfulness``."""
    edges = sorted(kept.nonzero().tolist(), key=lambda at: abs(float(scores[at[0], at[1]])))
    for writer, reader in edges:
        fewer = _without(graph, kept, writer, reader)
        if kept[writer, reader] and mean(fewer) >= faithfulness:
            kept = fewer
    return kept
