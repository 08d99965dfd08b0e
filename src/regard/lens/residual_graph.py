"""The residual stream as a graph of writers and readers, and forward passes restricted to some of its edges.

Writers (embeddings, heads, feed-forward networks) add to the residual stream; readers (a head's query, key and value, a
feed-forward network, the logits) take their input from it. An edge is a writer's share of a reader's input. An
encoder-decoder has two streams: the keys and values of its cross-attention read the encoder's.

Edge attribution patching scores all edges at once as (clean − corrupted) · gradient (Syed et al. 2023), with gradients
averaged along the line from the corrupted to the clean embeddings (EAP-IG, Hanna et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention import MultiHeadAttention
from ..attention.attend import prepare
from ..attention.backends import run
from ..foundation.checks import did_you_mean
from ..foundation.progress import track
from ..generation.generate import inference
from ..models import Model
from ..models.block import SublayerNorms
from .activations import ActivationRecord, Metric, PassInputs, capture_inputs, logits_of_states
from .capture import Head, stacks
from .interventions import patch
from .patching import check_ends_differ, read_pairs
from .residual import check_float_weights, check_reads_source
from .why import random_heads


class Edge(NamedTuple):
    """From the output of a writer to the input of a reader."""

    writer: str  # "embedding", "source" (the encoder's embedding before a decoder), "self.0.3" (layer, head), "ff.1"
    reader: str  # "self.1.2.q", "cross.1.0.k" (a key head), "ff.1", "logits"


class GraphSublayer(NamedTuple):
    """An attention or a feed-forward network in the graph."""

    kind: str  # "encoder", "self" or "cross" attention; "ff", "encoder_ff"
    layer: int
    module: Any
    site: str  # hook site of the state that it reads
    norm: Any  # the norm between that state and the module
    scale: Any  # the layer scale or gate on the module's output; None: it has none
    readers: slice  # its readers and writers, as indices of the graph
    writers: slice
    sees: slice  # the writers whose outputs are in that state

    @property
    def name(self) -> str:
        """The prefix of its hook sites: "decoder.blocks.1.attention"."""
        part = {"cross": "cross_attention", "ff": "ff", "encoder_ff": "ff"}.get(self.kind, "attention")
        return f"{self.site.partition('.blocks.')[0]}.blocks.{self.layer}.{part}"


class ResidualGraph:
    """The writers and readers of a model, in the order of the forward pass."""

    def __init__(self, model: Any) -> None:
        check_float_weights(model)
        by_name = stacks(model)
        blocks: dict[str, list[Any]] = {name: stack.layers for name, stack in by_name.items()}
        if not by_name or not all(_is_supported(block) for layers in blocks.values() for block in layers):
            raise ValueError(
                "circuits need a pre-norm model with a residual stream and separate attention heads in every layer"
            )
        if len({layers[0].attention.d_model for layers in blocks.values()}) > 1:
            raise ValueError("circuits need an encoder and a decoder of the same width")
        check_reads_source(model)
        self.writers: list[str] = []
        self.readers: list[str] = []
        self.feeds: list[set[int]] = []  # for each reader: the writers whose output depends on it
        self.sublayers: list[GraphSublayer] = []
        self.roots: dict[int, str] = {}  # writers that are embeddings → their hook sites
        self.last: str = ""  # hook site of the state that the logits read
        self.last_norm: Any = None
        self.memory: tuple[slice, str, Any] = (slice(0, 0), "", None)  # the encoder's writers, last state and norm
        self._sees: list[slice] = []  # for each reader: the earlier writers of its stream
        stream = slice(0, 0)
        for name, layers in blocks.items():
            start = len(self.writers)
            self.roots[start] = name
            self.writers.append("source" if name == "encoder" and len(by_name) == 2 else "embedding")
            for layer, block in enumerate(layers):
                self._add_layer(name, layer, block, start)
            stream = slice(start, len(self.writers))
            self.last, self.last_norm = f"{name}.blocks.{len(layers) - 1}.output", by_name[name].norm
            if name == "encoder":
                self.memory = (stream, self.last, self.last_norm)
        self._add_readers(["logits"], [set()], stream)

    def _add_layer(self, stack: str, layer: int, block: Any, start: int) -> None:
        name, norms, before = f"{stack}.blocks.{layer}", block.residuals(), len(self.writers)
        kind = "encoder" if stack == "encoder" else "self"
        self._add_attention(kind, layer, block.attention, f"{name}.input", norms.attention, start)
        site = f"{name}.after_attention"
        if block.cross_attention is not None:
            self._add_attention("cross", layer, block.cross_attention, site, norms.cross, start)
            site = f"{name}.after_cross_attention"
        sees = slice(start, before if block.parallel else len(self.writers))
        kind, n = "encoder_ff" if stack == "encoder" else "ff", len(self.writers)
        readers = self._add_readers([f"{kind}.{layer}"], [{n}], sees)
        norm = norms.ff.before if norms.ff.before is not None else norms.attention.before
        site = f"{name}.input" if block.parallel else site
        self.writers.append(f"{kind}.{layer}")
        ends = (readers, slice(n, n + 1), sees)
        self.sublayers.append(GraphSublayer(kind, layer, block.ff, site, norm, norms.ff.output, *ends))

    def _add_attention(self, kind: str, layer: int, module: Any, site: str, norms: SublayerNorms, start: int) -> None:
        sees, n = slice(start, len(self.writers)), module.n_heads
        first = len(self.readers)
        for side, n_heads in (("q", n), ("k", module.n_kv_heads), ("v", module.n_kv_heads)):
            size = n // n_heads  # query heads per key head
            groups = [set(range(sees.stop + head * size, sees.stop + (head + 1) * size)) for head in range(n_heads)]
            names = [f"{kind}.{layer}.{head}.{side}" for head in range(n_heads)]
            self._add_readers(names, groups, self.memory[0] if kind == "cross" and side != "q" else sees)
        self.writers += [f"{kind}.{layer}.{head}" for head in range(n)]
        ends = (slice(first, len(self.readers)), slice(sees.stop, len(self.writers)), sees)
        self.sublayers.append(GraphSublayer(kind, layer, module, site, norms.before, norms.output, *ends))

    def _add_readers(self, names: list[str], feeds: list[set[int]], sees: slice) -> slice:
        start = len(self.readers)
        self.readers += names
        self.feeds += feeds
        self._sees += [sees] * len(names)
        return slice(start, len(self.readers))

    @cached_property
    def possible(self) -> Tensor:
        """Which edges exist (writers, readers)."""
        index = torch.arange(len(self.writers))[:, None]
        start, stop = (torch.tensor([getattr(sees, end) for sees in self._sees]) for end in ("start", "stop"))
        return (index >= start) & (index < stop)

    @torch.no_grad()
    def writer_outputs(self, record: ActivationRecord) -> Tensor:
        """The output of each writer (writers, T, M), without the bias of w_o, which belongs to no head.

        In an encoder-decoder, the shorter of the two streams is padded with zeros.
        """
        parts: list[Tensor] = [torch.empty(0)] * len(self.writers)
        for index, site in self.roots.items():
            parts[index] = record[site][0]
        for part in self.sublayers:
            if isinstance(part.module, MultiHeadAttention):
                results = record.head_results(layer=part.layer, kind=part.kind)[0]
                parts[part.writers] = _apply(part.scale, results).unbind(0)
            else:
                parts[part.writers] = [record[f"{part.name}.output"][0]]
        return _stack_padded(parts)

    @torch.enable_grad()
    def reader_gradients(self, record: ActivationRecord, metric: Metric) -> Tensor:
        """d metric / d residual stream through each reader alone (readers, T, M)."""
        gradients = record.gradients(metric)
        rows: list[Tensor] = []
        for part in self.sublayers:
            x = record[part.site].detach().requires_grad_()
            read = _apply(part.norm, x)
            if not isinstance(part.module, MultiHeadAttention):
                rows += torch.autograd.grad(read, x, gradients[f"{part.name}.input"])[0].unbind(0)
                continue
            states, memory = [x] * 3, None
            if part.kind == "cross":
                encoded = record[self.memory[1]].detach().requires_grad_()
                memory, states = _apply(self.memory[2], encoded), [x, encoded, encoded]
            call = record.call(layer=part.layer, kind=part.kind)
            qkv = _head_inputs(part.module, read, memory)
            # The recorded gradients are those of what the mechanism has made of the queries and keys.
            scored = part.module.mechanism.prepare(*qkv, call.mask, call.frame)[:3]
            for point, plain, heads, state in zip(("q", "k", "v"), qkv, scored, states, strict=True):
                own = torch.eye(plain.shape[1], device=x.device).repeat_interleave(heads.shape[1] // plain.shape[1], 1)
                per_head = own[:, None, :, None, None] * gradients[f"{part.name}.{point}"]
                batched = torch.autograd.grad(heads, state, per_head, is_grads_batched=True, retain_graph=True)[0]
                rows += batched[:, 0].unbind(0)
        rows += gradients[self.last].unbind(0)
        return _stack_padded(rows)


def _is_supported(block: Any) -> bool:
    attention = block.attention
    if not isinstance(attention, MultiHeadAttention) or attention.n_global or attention.mechanism.kind == "summary":
        return False
    is_plain = block.ff is not None and block.norm_place == "pre" and block.residual
    return is_plain and attention.writes_by_head and not _mixes_heads(attention)


@torch.no_grad()
def _mixes_heads(module: MultiHeadAttention) -> bool:
    """Whether a head's output depends on another head's query, key or value; found by changing those of the first."""
    q, k, v = random_heads(module)
    new_q, new_k, new_v = (torch.cat((-x[:, :1], x[:, 1:]), 1) for x in (q, k, v))
    before, of_query, of_key = (
        run(prepare(*heads, mechanism=module.mechanism), "auto").output
        for heads in ((q, k, v), (new_q, k, v), (q, new_k, new_v))
    )
    size = module.n_heads // module.n_kv_heads
    return not (torch.equal(of_query[:, 1:], before[:, 1:]) and torch.equal(of_key[:, size:], before[:, size:]))


def _apply(norm: Any, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _stack_padded(rows: Sequence[Tensor]) -> Tensor:
    """Matrices (T, M) as one tensor; shorter ones are padded with zeros."""
    longest = max(len(row) for row in rows)
    return torch.stack([row if len(row) == longest else pad(row, (0, 0, 0, longest - len(row))) for row in rows])


def _head_inputs(module: MultiHeadAttention, x: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values: all from x, or keys and values from the memory."""
    return module.qkv(x) if memory is None else (module.query_heads(x), *module.memory_heads(memory))


def edge_scores(
    model: Model, clean: Any, corrupted: Any, metric: Metric | Sequence[Metric], *, steps: int = 5, target: Any = None
) -> tuple[ResidualGraph, Tensor]:
    """EAP-IG: the estimated effect of every edge (writers, readers), averaged over the pairs; ``steps=1`` is EAP.

    target  encoder-decoder only: the decoder's input for each pair
    """
    graph = ResidualGraph(model)
    pairs = read_pairs(model, clean, corrupted, metric, (target, target))
    total = torch.zeros(len(graph.writers), len(graph.readers))
    for index, (good, bad, pair_metric) in enumerate(track(pairs, "pairs", len(pairs), lambda pair: 1)):
        a, b = (capture_inputs(model, inputs) for inputs in (good, bad))
        change = graph.writer_outputs(a) - graph.writer_outputs(b)  # (writers, T, M)
        ends = torch.stack([pair_metric(x.logits).mean() for x in (a, b)])
        check_ends_differ(index, *ends)
        mean = torch.zeros(())
        for step in range(1, steps + 1):
            share = step / steps
            between: dict[str | Head, Any] = {
                name: b[name] + (a[name] - b[name]) * share for name in graph.roots.values()
            }
            with patch(model, between):
                mean = mean + graph.reader_gradients(capture_inputs(model, bad, grad=True), pair_metric) / steps
        scores = torch.einsum("wtm,rtm->wr", change, mean) / (ends[0] - ends[1])
        total += scores.cpu() / len(pairs)
    return graph, total * graph.possible


class CircuitRunner:
    """Runs a model on a clean prompt with chosen edges; along all others, readers get the corrupted values."""

    def __init__(self, model: Model, graph: ResidualGraph, good: PassInputs, bad: PassInputs, metric: Metric) -> None:
        self.model, self.graph, self.metric = model, graph, metric
        self.clean, self.corrupted = (capture_inputs(model, x) for x in (good, bad))
        self.old = graph.writer_outputs(self.corrupted)
        self.new = graph.writer_outputs(self.clean)
        with torch.no_grad():
            self.ends = [float(metric(x.logits).mean()) for x in (self.clean, self.corrupted)]

    def faithfulness(self, kept: Tensor) -> float:
        """The share of the metric that the edges ``kept`` (writers, readers) restore."""
        clean, corrupted = self.ends
        return (float(self.metric(self.logits(kept)).mean()) - corrupted) / (clean - corrupted)

    def logits(self, kept: Tensor, sender: int | None = None) -> Tensor:
        """Logits with the edges ``kept``; the writer ``sender``, if given, has its clean output."""
        kept = kept.to(self.old)
        change = torch.zeros_like(self.old)  # of each writer: its output in this run minus the corrupted one
        clean_writers = {*self.graph.roots, *(() if sender is None else (sender,))}
        for index in clean_writers:
            change[index] = self.new[index] - self.old[index]

        def read(site: str, readers: Iterable[int], sees: slice) -> Tensor:
            """The inputs of some readers (readers, T, M)."""
            base = self.corrupted[site]
            restored = torch.einsum("wr,wtm->rtm", kept[sees][:, list(readers)], change[sees, : base.shape[1]])
            return base + restored

        with inference(self.model):
            for part in self.graph.sublayers:
                readers = range(*part.readers.indices(len(self.graph.readers)))
                if isinstance(part.module, MultiHeadAttention):
                    n = part.module.n_heads if part.kind == "cross" else len(readers)
                    x = _apply(part.norm, read(part.site, readers[:n], part.sees))
                    memory = None
                    if part.kind == "cross":
                        sees, site, norm = self.graph.memory
                        memory = _apply(norm, read(site, readers[n:], sees))
                    outputs = self._heads(part, x, memory)
                else:
                    outputs = part.module(_apply(part.norm, read(part.site, readers, part.sees)))
                outputs = _apply(part.scale, outputs)
                for index, row in zip(range(*part.writers.indices(len(self.old))), outputs, strict=True):
                    if index != sender:
                        change[index, : len(row)] = row - self.old[index, : len(row)]
            last = len(self.graph.readers) - 1
            final = _apply(self.graph.last_norm, read(self.graph.last, [last], self.graph._sees[last]))
            return logits_of_states(self.model, {}, final)

    def _heads(self, part: GraphSublayer, x: Tensor, memory: Tensor | None) -> Tensor:
        """The outputs of heads (H, T, M), where each query, key and value head has its own input.

        Self-attention: x (H + 2 G, T, M) for queries, keys and values. Cross-attention: x (H, T, M) for the queries,
        ``memory`` (2 G, S, M) for keys and values.
        """
        module, call = part.module, self.corrupted.call(layer=part.layer, kind=part.kind)
        counts = [module.n_heads, module.n_kv_heads, module.n_kv_heads]
        first_key = 0 if memory is not None else module.n_heads
        starts = [0, first_key, first_key + module.n_kv_heads]
        # Each input is projected to all heads; the diagonal keeps the head that reads it.
        q, k, v = (
            heads[start : start + n].diagonal(dim1=0, dim2=1).permute(2, 0, 1)[None]
            for heads, start, n in zip(_head_inputs(module, x, memory), starts, counts, strict=True)
        )
        shared = {"mechanism": module.mechanism, "frame": call.frame, "sinks": call.sinks}
        remade = prepare(q, k, v, call.mask, call.bias, **shared)
        return torch.einsum("htd,mhd->htm", run(remade, "auto").output[0], module.head_outputs())


def path_patching(
    model: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric | Sequence[Metric],
    paths: Sequence[Sequence[str]],
    *,
    target: Any = None,
) -> dict[tuple[str, ...], float]:
    """The effect along single paths (Wang et al. 2022; Goldowsky-Dill et al. 2023), averaged over pairs.

    paths  each a writer followed by readers, ("self.0.3", "self.1.2.k", "logits"). In the clean run, only the first
           reader sees the writer's corrupted output; only the next reader sees what that changes; and so on

    1 is the whole difference between clean and corrupted, 0 is none of it.
    """
    graph = ResidualGraph(model)
    edges = {tuple(path): _path_edges(graph, path) for path in paths}
    effects = dict.fromkeys(edges, 0.0)
    pairs = read_pairs(model, clean, corrupted, metric, (target, target))
    for index, (good, bad, pair_metric) in enumerate(track(pairs, "pairs", len(pairs), lambda pair: 1)):
        # Clean and corrupted change places: everything but the path keeps its clean value.
        runner = CircuitRunner(model, graph, bad, good, pair_metric)
        check_ends_differ(index, *runner.ends)
        corrupted_value, clean_value = runner.ends
        for path, (sender, kept) in edges.items():
            patched = float(pair_metric(runner.logits(kept, sender)).mean())
            effects[path] += (patched - clean_value) / (corrupted_value - clean_value) / len(pairs)
    return effects


def _path_edges(graph: ResidualGraph, path: Sequence[str]) -> tuple[int, Tensor]:
    """The index of a path's first writer, and its edges (writers, readers)."""
    kept = torch.zeros_like(graph.possible)
    if len(path) < 2 or path[-1] != "logits":
        raise ValueError(f"a path is a writer followed by readers, the last of them logits; got {' → '.join(path)}")
    if path[0] not in graph.writers:
        raise ValueError(f"{path[0]!r} is not a writer of this model{did_you_mean(path[0], graph.writers)}")
    writers = {graph.writers.index(path[0])}
    for name in path[1:]:
        if name not in graph.readers:
            raise ValueError(f"{name!r} is not a reader of this model{did_you_mean(name, graph.readers)}")
        reader = graph.readers.index(name)
        for writer in writers:
            if not graph.possible[writer, reader]:
                raise ValueError(f"{name} does not read the output of {graph.writers[writer]}")
            kept[writer, reader] = True
        writers = graph.feeds[reader]
    return graph.writers.index(path[0]), kept
