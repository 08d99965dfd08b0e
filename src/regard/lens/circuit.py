"""Circuits: the few edges between parts of a model that carry a behaviour.

Writers (the embeddings, heads, feed-forward networks) add to the residual stream; readers (a head's query, key and
value, a feed-forward network, the logits) take their input from it. An edge is a writer's share of a reader's input.
Edge attribution patching scores every edge at once, (clean − corrupted) · gradient (Syed et al. 2023), with gradients
averaged along the way from the corrupted embeddings to the clean ones (EAP-IG, Hanna et al. 2024). The model then runs
with the chosen edges alone: every other share has its corrupted value.

faithfulness  (circuit − corrupted) / (clean − corrupted) of the metric
completeness  1 − the same of the model without the circuit: what the circuit leaves out should do nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import MultiHeadAttention
from ..attention.attend import prepare
from ..attention.backends import run
from ..data.corpora.repeats import induction_pairs
from ..data.record_files import open_records
from ..errors import BadData
from ..foundation.plotting import INK, SOFT, new_figure
from ..foundation.progress import track
from ..generation.generate import inference
from ..models import Model
from ..models.block import Block
from .activations import ActivationRecord, Metric, PassInputs, capture_inputs
from .interventions import patch
from .patching import logit_difference, read_pairs


class Edge(NamedTuple):
    """From what one part wrote to what another reads."""

    writer: str  # "embedding", "self.0.3" (layer, head), "ff.1"
    reader: str  # "self.1.2.q", "self.1.0.k" (of a key head), "ff.1", "logits"


class ResidualGraph:
    """The writers and readers of a decoder, in the order of the forward pass."""

    def __init__(self, model: Any) -> None:
        stack = model.decoder if model.is_decoder_only else None
        blocks = [] if stack is None else [stack.blocks[layer % len(stack.blocks)] for layer in range(stack.n_layers)]
        if not blocks or any(not _is_plain(block) for block in blocks):
            raise ValueError("circuits are found in decoders with heads, a residual stream and norms before each part")
        self.blocks: list[Block] = blocks
        self.writers: list[str] = ["embedding"]
        self.readers: list[str] = []
        self.feeds: list[set[int]] = []  # for each reader: the writers whose input it is
        self._n_before: list[int] = []  # for each reader: how many writers come before it
        for layer, block in enumerate(blocks):
            self._add_layer(layer, block)
        self._add_reader("logits", set())

    def _add_layer(self, layer: int, block: Block) -> None:
        module: Any = block.attention
        start, n = len(self.writers), module.n_heads
        for side, n_heads in (("q", n), ("k", module.n_kv_heads), ("v", module.n_kv_heads)):
            for head in range(n_heads):
                group = range(start + head * n // n_heads, start + (head + 1) * n // n_heads)
                self._add_reader(f"self.{layer}.{head}.{side}", set(group))
        if block.parallel:  # the feed-forward network reads what attention reads
            self._add_reader(f"ff.{layer}", {start + n})
        self.writers += [f"self.{layer}.{head}" for head in range(n)]
        if not block.parallel:
            self._add_reader(f"ff.{layer}", {start + n})
        self.writers.append(f"ff.{layer}")

    def _add_reader(self, name: str, feeds: set[int]) -> None:
        self.readers.append(name)
        self.feeds.append(feeds)
        self._n_before.append(len(self.writers))

    @cached_property
    def possible(self) -> Tensor:
        """Which edges there are (writers, readers)."""
        return torch.arange(len(self.writers))[:, None] < torch.tensor(self._n_before)

    def edges(self, kept: Tensor) -> list[Edge]:
        return [Edge(self.writers[w], self.readers[r]) for w, r in kept.nonzero().tolist()]


def _is_plain(block: Any) -> bool:
    has_parts = isinstance(block.attention, MultiHeadAttention) and block.ff is not None
    return has_parts and block.norm_place == "pre" and block.residual


@dataclass(frozen=True, eq=False)
class Circuit:
    """Edges that carry a behaviour, and how much of it."""

    edges: dict[Edge, float]  # with their scores, the largest first
    n_possible: int
    faithfulness: float
    completeness: float

    @property
    def share(self) -> float:
        """The circuit's edges as a share of all."""
        return len(self.edges) / self.n_possible

    def heads(self) -> list[tuple[int, int]]:
        """(layer, head) of the heads that write in the circuit."""
        names = {edge.writer for edge in self.edges if edge.writer.startswith("self.")}
        return sorted((int(layer), int(head)) for _, layer, head in (name.split(".") for name in names))

    def to_dict(self) -> dict[str, Any]:
        edges = [{"from": edge.writer, "to": edge.reader, "score": score} for edge, score in self.edges.items()]
        numbers = {"faithfulness": self.faithfulness, "completeness": self.completeness, "n_possible": self.n_possible}
        return {**numbers, "edges": edges}

    def to_text(self) -> str:
        """The numbers, then every edge with its score."""
        lines = [
            f"{display_name(edge.writer):>9} → {display_name(edge.reader):<10} {score:+.3f}"
            for edge, score in self.edges.items()
        ]
        size = f"{len(self.edges)} of {self.n_possible} edges ({self.share:.1%})"
        return "\n".join(
            [f"{size}, faithfulness {self.faithfulness:.3f}, completeness {self.completeness:.3f}", *lines]
        )

    def draw(self, path: str | Path) -> Path:
        """A picture: parts by layer from the embeddings up to the logits, edges as wide as their scores."""
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
            bend = {"q": -0.08, "k": 0.08}.get(side, 0.0)  # side by side
            style = {"arrowstyle": "-|>", "color": colour, "lw": 0.6 + 3 * abs(score) / largest}
            style |= {"shrinkA": 14, "shrinkB": 14, "connectionstyle": f"arc3,rad={bend}"}
            panel.annotate("", end, start, arrowprops=style)
        for name, (x, y) in places.items():
            box = {"boxstyle": "round,pad=0.35", "facecolor": "white", "edgecolor": SOFT}
            panel.text(x, y, display_name(name), ha="center", va="center", fontsize=9, color=INK, bbox=box)
        panel.set_ylim(-0.3, max(y for _, y in places.values()) + 0.3)
        panel.text(0.0, 1.0, "q blue, k red, v green", transform=panel.transAxes, fontsize=8, color=SOFT, va="top")
        figure.savefig(path, facecolor="white")
        return Path(path)

    def __repr__(self) -> str:
        size = f"{len(self.edges)} of {self.n_possible} edges, {self.share:.1%}"
        return f"Circuit({size}, faithfulness {self.faithfulness:.2f}, completeness {self.completeness:.2f})"


def _part(reader: str) -> str:
    """The part that a reader belongs to: "self.1.2.q" reads for "self.1.2"."""
    return reader[:-2] if reader.endswith((".q", ".k", ".v")) else reader


def display_name(name: str) -> str:
    """A part or reader as people read it, layers and heads from 1: "self.0.3.k" is "L1H4 k", "ff.1" is "L2 MLP"."""
    kind, *numbers = name.split(".")
    if kind == "self":
        return f"L{int(numbers[0]) + 1}H{int(numbers[1]) + 1} {''.join(numbers[2:])}".strip()
    return f"L{int(numbers[0]) + 1} MLP" if kind == "ff" else name


def _layout(edges: Iterable[Edge]) -> dict[str, tuple[float, float]]:
    """Where each part is drawn: heads of a layer side by side, its feed-forward network above them."""
    names = {name for edge in edges for name in (edge.writer, _part(edge.reader))} | {"embedding", "logits"}
    layers = sorted({int(name.split(".")[1]) for name in names if "." in name})
    height = {"embedding": 0.0, "logits": 2.0 * len(layers) + 1}
    rows: dict[float, list[str]] = {}
    for name in sorted(names, key=lambda name: [int(x) if x.isdigit() else 0 for x in name.split(".")[1:]]):
        y = height.get(name, -1.0)
        if y < 0:
            y = 2.0 * layers.index(int(name.split(".")[1])) + (1.6 if name.startswith("ff") else 0.8)
        rows.setdefault(y, []).append(name)
    places = {name: ((i + 1) / (len(row) + 1), y) for y, row in rows.items() for i, name in enumerate(row)}
    return {name: (0.92 if name.startswith("ff") else x, y) for name, (x, y) in places.items()}


def edge_scores(
    model: Model, clean: Any, corrupted: Any, metric: Metric | Sequence[Metric], *, steps: int = 5
) -> tuple[ResidualGraph, Tensor]:
    """EAP-IG: the estimated effect of every edge (writers, readers), averaged over the pairs; ``steps=1`` is EAP."""
    graph = ResidualGraph(model)
    pairs = read_pairs(model, clean, corrupted)
    total = torch.zeros(len(graph.writers), len(graph.readers))
    for index, (good, bad) in enumerate(track(pairs, "pairs", len(pairs), lambda pair: 1)):
        own = metric[index] if isinstance(metric, Sequence) else metric
        a, b = (capture_inputs(model, inputs) for inputs in (good, bad))
        change = _written(graph, a) - _written(graph, b)  # (writers, T, M)
        ends = torch.stack([own(x.logits).mean() for x in (a, b)])
        mean = torch.zeros(())
        for step in range(1, steps + 1):
            at = b["decoder"] + (a["decoder"] - b["decoder"]) * step / steps
            with patch(model, {"decoder": at}):
                mean = mean + _reader_gradients(graph, capture_inputs(model, bad, grad=True), own) / steps
        scores = torch.einsum("wtm,rtm->wr", change, mean) / (ends[0] - ends[1])
        total += scores.cpu() / len(pairs)
    return graph, total * graph.possible


_COLUMNS = ("clean", "corrupted", "answer", "wrong")


@torch.no_grad()
def _written(graph: ResidualGraph, record: ActivationRecord) -> Tensor:
    """What each writer added (writers, T, M); biases are the same in every pass and left out of heads."""
    parts = [record["decoder"]]
    for layer in range(len(graph.blocks)):
        parts += [record.head_results(layer=layer)[0], record[f"decoder.blocks.{layer}.ff.output"]]
    return torch.cat(parts)


def _reader_gradients(graph: ResidualGraph, record: ActivationRecord, metric: Metric) -> Tensor:
    """d metric / d residual stream as each reader alone sees it (readers, T, M)."""
    gradients = record.gradients(metric)
    rows: list[Tensor] = []
    for layer, block in enumerate(graph.blocks):
        name, norms = f"decoder.blocks.{layer}", block.residuals()
        x = record[f"{name}.input"].detach().requires_grad_()
        module: Any = block.attention
        heads = module.qkv(_apply(norms.attention.before, x))
        for point, made in zip(("q", "k", "v"), heads, strict=True):
            gradient = gradients[f"{name}.attention.{point}"]
            each = torch.eye(made.shape[1], device=x.device)[:, None, :, None, None] * gradient  # one head at a time
            found = torch.autograd.grad(made, x, each, is_grads_batched=True, retain_graph=True)[0]
            rows.append(found[:, 0])
        x = record[f"{name}.input" if block.parallel else f"{name}.after_attention"].detach().requires_grad_()
        before = norms.ff.before if norms.ff.before is not None else norms.attention.before
        read = _apply(before, x)
        rows.append(torch.autograd.grad(read, x, gradients[f"{name}.ff.input"])[0])
    rows.append(gradients[f"decoder.blocks.{len(graph.blocks) - 1}.output"])
    return torch.cat(rows)


def _apply(norm: Any, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


class CircuitRunner:
    """Runs a model on a clean prompt with chosen edges; every other share of a reader's input is the corrupted one."""

    def __init__(self, model: Model, graph: ResidualGraph, good: PassInputs, bad: PassInputs, metric: Metric) -> None:
        self.model, self.graph, self.metric = model, graph, metric
        self.clean, self.corrupted = (capture_inputs(model, x) for x in (good, bad))
        self.old = _written(graph, self.corrupted)
        with torch.no_grad():
            self.ends = [float(metric(x.logits).mean()) for x in (self.clean, self.corrupted)]

    def faithfulness(self, kept: Tensor) -> float:
        """The share of the metric that the edges ``kept`` (writers, readers) bring back."""
        clean, corrupted = self.ends
        return (float(self.metric(self.logits(kept)).mean()) - corrupted) / (clean - corrupted)

    def logits(self, kept: Tensor) -> Tensor:
        """Logits (1, T, V) with these edges."""
        model: Any = self.model
        kept = kept.to(self.old)
        change = torch.zeros_like(self.old)  # of each writer, from corrupted to what it writes in this run
        change[0] = self.clean["decoder"][0] - self.old[0]
        writer, reader = 1, 0

        def read(base: Tensor, n: int) -> Tensor:
            """The inputs of the next n readers (n, T, M)."""
            nonlocal reader
            share = torch.einsum("wr,wtm->rtm", kept[:writer, reader : reader + n], change[:writer])
            reader += n
            return base + share

        with inference(model):
            for layer, block in enumerate(self.graph.blocks):
                name, module = f"decoder.blocks.{layer}", block.attention
                assert isinstance(module, MultiHeadAttention) and block.ff is not None
                norms, n = block.residuals(), module.n_heads + 2 * module.n_kv_heads
                heads = self._heads(layer, _apply(norms.attention.before, read(self.corrupted[f"{name}.input"], n)))
                weight = module.w_o.weight.unflatten(1, (module.n_heads, module.d_head))
                results = torch.einsum("htd,mhd->htm", heads, weight)
                before = norms.ff.before if norms.ff.before is not None else norms.attention.before
                own = slice(writer, writer + module.n_heads)
                ff_input = read(self.corrupted[f"{name}.input"], 1) if block.parallel else None
                change[own], writer = results - self.old[own], own.stop
                if ff_input is None:
                    ff_input = read(self.corrupted[f"{name}.after_attention"], 1)
                change[writer] = block.ff(_apply(before, ff_input))[0] - self.old[writer]
                writer += 1
            final = read(self.corrupted[f"decoder.blocks.{len(self.graph.blocks) - 1}.output"], 1)
            return model.head(_apply(model.decoder.norm, final), model.output_table)

    def _heads(self, layer: int, x: Tensor) -> Tensor:
        """The outputs (H, T, D) of heads whose queries, keys and values read the rows of x (H + 2 G, T, M)."""
        module: Any = self.graph.blocks[layer].attention
        call = self.corrupted.call(layer=layer)
        counts = [module.n_heads, module.n_kv_heads, module.n_kv_heads]
        # Every row is projected to all heads, and of each the one that reads it is taken.
        made = module.qkv(x)
        starts = [0, counts[0], counts[0] + counts[1]]
        q, k, v = (
            heads[start : start + n].diagonal(dim1=0, dim2=1).permute(2, 0, 1)[None]
            for heads, start, n in zip(made, starts, counts, strict=True)
        )
        remade = prepare(q, k, v, call.mask, call.bias, mechanism=module.mechanism, frame=call.frame)
        return run(remade, "auto").output[0]


class CircuitTask(NamedTuple):
    """A behaviour as pairs of prompts, and what is right and wrong after each clean one."""

    clean: list[str]
    corrupted: list[str]
    answers: list[str]
    wrong: list[str]

    def first(self, n: int) -> CircuitTask:
        """The first n pairs."""
        return CircuitTask(*(column[:n] for column in self))

    def metrics(self, model: Model) -> list[Metric]:
        """The logit of each answer minus that of the wrong one."""
        return [logit_difference(model, *both) for both in zip(self.answers, self.wrong, strict=True)]


def read_task(path: str | Path) -> CircuitTask:
    """A table with the columns clean, corrupted, answer and wrong: CSV, TSV, JSON Lines or Parquet."""
    rows = [record.fields for record in open_records(Path(path), "clean").read()]
    for name in _COLUMNS:
        if not rows or name not in rows[0]:
            have = ", ".join(rows[0]) if rows else "no rows"
            raise BadData(f"{path} has {have}; a circuit's task needs the columns {', '.join(_COLUMNS)}")
    return CircuitTask(*([str(row[name]) for row in rows] for name in _COLUMNS))


def repeats_task(n: int) -> CircuitTask:
    """Induction, on the corpus `repeats`."""
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
) -> Circuit:
    """The fewest edges, by their EAP-IG scores, whose mean faithfulness reaches the one asked for.

    Edges that lie on no path from the embeddings to the logits are left out; then each edge whose loss costs nothing.
    """
    graph, scores = edge_scores(model, clean, corrupted, metric, steps=steps)
    pairs = read_pairs(model, clean, corrupted)
    metrics = list(metric) if isinstance(metric, Sequence) else [metric] * len(pairs)
    runners = [CircuitRunner(model, graph, *pair, own) for pair, own in zip(pairs, metrics, strict=True)]

    def mean(kept: Tensor) -> float:
        return sum(runner.faithfulness(kept) for runner in runners) / len(runners)

    order = scores.abs().flatten().argsort(descending=True)
    limit = int(max_share * int(graph.possible.sum()))
    kept = torch.zeros_like(graph.possible)
    for n in _growing(limit):
        kept = edges_on_paths(graph, _first(order, n, scores.shape) & graph.possible)
        if mean(kept) >= faithfulness:
            break
    kept = _prune(graph, kept, scores, mean, faithfulness)
    ordered = sorted(kept.nonzero().tolist(), key=lambda at: -abs(float(scores[at[0], at[1]])))
    edges = {Edge(graph.writers[w], graph.readers[r]): float(scores[w, r]) for w, r in ordered}
    without = mean(graph.possible & ~kept)
    return Circuit(edges, int(graph.possible.sum()), mean(kept), 1 - without)


def _growing(limit: int) -> Iterator[int]:
    """1, 2, 3, 4, 5, 6, 8, 10 … up to the limit: steps of about a fifth."""
    n = 1
    while n < limit:
        yield n
        n += max(1, n // 5)
    yield limit


def _first(order: Tensor, n: int, shape: Sequence[int]) -> Tensor:
    chosen = torch.zeros(order.numel(), dtype=torch.bool)
    chosen[order[:n]] = True
    return chosen.reshape(tuple(shape))


def edges_on_paths(graph: ResidualGraph, kept: Tensor) -> Tensor:
    """The edges that lie on a path from the embeddings to the logits."""
    edges = {(writer, reader) for writer, reader in kept.nonzero().tolist()}
    while True:
        fed = {0}.union(*(graph.feeds[reader] for _, reader in edges))  # writers that have an input
        used = {writer for writer, _ in edges}
        last = len(graph.readers) - 1
        on_path = {(w, r) for w, r in edges if w in fed and (r == last or graph.feeds[r] & used)}
        if on_path == edges:
            break
        edges = on_path
    result = torch.zeros_like(kept)
    for writer, reader in edges:
        result[writer, reader] = True
    return result


def _prune(
    graph: ResidualGraph, kept: Tensor, scores: Tensor, mean: Callable[[Tensor], float], faithfulness: float
) -> Tensor:
    """The circuit without the edges, from the smallest score up, that it can lose and stay as faithful as asked."""
    edges = sorted(kept.nonzero().tolist(), key=lambda at: abs(float(scores[at[0], at[1]])))
    for writer, reader in edges:
        fewer = kept.clone()
        fewer[writer, reader] = False
        fewer = edges_on_paths(graph, fewer)
        if kept[writer, reader] and mean(fewer) >= faithfulness:
            kept = fewer
    return kept
