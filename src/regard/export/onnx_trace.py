"""Trace a graph with torch, translate it to ONNX and write it to a file.

torch.onnx.export traces a module, traces it again to decompose operations that it cannot translate, and rewrites the
result with about a hundred patterns. Only the first step is needed here: ``_translations`` adds the operations of
regard's models that torch's own table lacks, so that none needs decomposing, and ONNX Runtime applies such patterns
when it loads a file.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ..errors import RegardError, first_line, silence_warnings
from ..foundation.plugins import import_optional
from .onnx_graphs import Graph

OPSET = 20  # the first opset with Gelu as a single operator
_INT64, _BOOL = 7, 9  # in onnx.TensorProto
_MAX_INLINE_BYTES = 1_500_000_000  # larger weights go to a second file: a protobuf holds at most 2³¹ bytes
_REGISTRIES: dict[int, Any] = {}  # torch's translation tables, by opset


@torch.no_grad()
def write_graph(graph: Graph, path: Path) -> list[str]:
    """Trace a graph, write it and return the names of its outputs. The file contains no local paths."""
    optimizer = import_optional("onnxscript.optimizer", "writing ONNX files", "export")
    outputs = list(graph.compute(dict(zip(graph.input_names, graph.examples, strict=True))))
    try:
        program = _trace(graph, outputs)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise RegardError(f"this model cannot be written as ONNX: {first_line(cause)}") from error
    optimizer.fold_constants(program.model)
    optimizer.remove_unused_nodes(program.model)
    _strip_metadata(program.model)
    n_bytes = sum(p.numel() * p.element_size() for p in graph.parameters())
    program.save(path, external_data=n_bytes > _MAX_INLINE_BYTES)
    return outputs


def _trace(graph: Graph, outputs: list[str], decompose: bool = False) -> Any:
    """Run torch's exporter without its unnecessary work.

    It does not decompose a program whose operations all have translations, does not cache the shapes of operations
    that never recur, and reads its table of translations only once.
    """
    with (
        nullcontext() if decompose else _decompose_if_needed(),
        _read_translations_once(),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        silence_warnings("torch.onnx"),  # warns about torchvision and axis names
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            return torch.onnx.export(
                graph,
                (graph.examples,),
                dynamo=True,
                dynamic_shapes=(graph.axes,),
                input_names=graph.input_names,
                output_names=outputs,
                opset_version=OPSET,
                custom_translation_table=_translations(),
                optimize=False,
                verbose=False,
            )
        except torch.onnx.OnnxExporterError:
            if decompose:
                raise
    return _trace(graph, outputs, decompose=True)  # a user-defined mechanism may use an operation without a translation


@contextmanager
def _decompose_if_needed() -> Iterator[None]:
    """Context in which the exporter runs decompositions only on programs that contain operations to decompose."""
    run_decompositions = ExportedProgram.run_decompositions

    def run_if_needed(program: ExportedProgram, table: Any = None, **options: Any) -> ExportedProgram:
        graphs = [cast(GraphModule, module).graph for module in program.graph_module.modules()]
        for graph in graphs:
            graph.eliminate_dead_code()
        targets = {node.target for graph in graphs for node in graph.nodes if node.op == "call_function"}
        if any(_needs_decomposition(target, table or {}) for target in targets):
            return run_decompositions(program, table, **options)
        return program

    with patch.object(ExportedProgram, "run_decompositions", run_if_needed):
        yield


@contextmanager
def _read_translations_once() -> Iterator[None]:
    """Context in which the exporter copies its table of some 800 translations instead of parsing it again."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # a torch version without this class: export is only slower
        yield
        return
    read = ONNXRegistry.from_torchlib

    def copy_registry(opset_version: int = OPSET) -> Any:
        if opset_version not in _REGISTRIES:
            _REGISTRIES[opset_version] = read(opset_version=opset_version)
        registry = copy.copy(_REGISTRIES[opset_version])
        registry.functions = {operation: list(known) for operation, known in registry.functions.items()}
        return registry

    with patch.object(ONNXRegistry, "from_torchlib", staticmethod(copy_registry)):
        yield


def _needs_decomposition(target: Any, table: dict[Any, Any]) -> bool:
    """Whether the exporter decomposes an operation; assertions are dropped, and size arithmetic is not an operation."""
    if not isinstance(target, torch._ops.OperatorBase):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return not target.name().startswith("aten::_assert") and (target in table or target._schema.is_mutable)


def _translations() -> dict[Any, Any]:
    """Translations of operations that torch's exporter lacks, or has only after decomposition."""
    from onnxscript import opset18 as op

    attention = {torch.ops.aten.scaled_dot_product_attention.default: _attention_translation(op)}
    return {**_array_translations(op), **attention, **_recurrent_translations(op)}


def _array_translations(op: Any) -> dict[Any, Any]:
    """Sorting, casts, logic, transposes and norms."""

    def sort(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        """TopK over the whole axis, which keeps the order of ties."""
        length = op.Reshape(op.Gather(op.Shape(self), dim), [1])
        values, indices = op.TopK(op.Cast(self, to=_INT64), length, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, self), indices

    def stable_argsort(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        return sort(self, stable, dim, descending)[1]

    def argsort(self: Any, dim: int = -1, descending: bool = False) -> Any:
        return sort(self, True, dim, descending)[1]

    def to_dtype(
        self: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None
    ) -> Any:
        return op.Cast(self, to=dtype)

    def logic(of_booleans: Any, of_integers: Any) -> Any:
        def translate(self: Any, other: Any) -> Any:
            return of_booleans(self, other) if self.dtype == _BOOL else of_integers(self, other)

        return translate

    and_ = logic(op.And, op.BitwiseAnd)

    def and_scalar(self: Any, other: int) -> Any:
        return and_(self, op.CastLike(other, self))

    def square(self: Any) -> Any:
        return op.Mul(self, self)

    def move_axis(self: Any, source: int, destination: int) -> Any:
        axes = list(range(len(self.shape)))
        axes.insert(destination % len(axes), axes.pop(source))
        return op.Transpose(self, perm=axes)

    def reverse_axes(self: Any) -> Any:
        return op.Transpose(self, perm=list(range(len(self.shape)))[::-1])

    def rms_norm(self: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
        mean_square = op.ReduceMean(op.Mul(self, self), list(range(-len(normalized_shape), 0)), keepdims=1)
        eps = torch.finfo(torch.float32).eps if eps is None else eps
        normed = op.Div(self, op.Sqrt(op.Add(mean_square, eps)))
        return normed if weight is None else op.Mul(normed, weight)

    aten = torch.ops.aten
    return {
        aten.sort.stable: sort,
        aten.argsort.stable: stable_argsort,
        aten.argsort.default: argsort,
        aten.to.dtype: to_dtype,
        aten.__or__.Tensor: logic(op.Or, op.BitwiseOr),
        aten.__and__.Tensor: and_,
        aten.__and__.Scalar: and_scalar,
        aten.__xor__.Tensor: logic(op.Xor, op.BitwiseXor),
        aten.square.default: square,
        aten.movedim.int: move_axis,
        aten.numpy_T.default: reverse_axes,
        aten.rms_norm.default: rms_norm,
    }


def _attention_translation(op: Any) -> Callable[..., Any]:
    def sdpa(
        q: Any,
        k: Any,
        v: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """softmax(q kᵀ scale + mask) v. ONNX Runtime fuses this transpose into the product, unlike the one of torch's
        own translation, which takes half of the time of a decode step."""
        d_head, n_groups, repeats = q.shape[3], k.shape[1], q.shape[1] // k.shape[1]
        sizes, n_queries, n_keys = op.Shape(q, end=3), op.Shape(q, start=2, end=3), op.Shape(k, start=2, end=3)
        d_value, axes = op.Shape(v, start=3), [0, 1, 3, 2]
        # One factor per dimension: a scalar would be fused into the product, whose kernel for one query takes none.
        q = op.Mul(q, [d_head**-0.5 if scale is None else scale] * d_head)
        if repeats > 1:  # (B, G, repeats, T, D) · (B, G, 1, D, S): the product repeats the keys without copying them
            q, axes = op.Reshape(q, [0, n_groups, repeats, -1, d_head]), [0, 1, 2, 4, 3]
            k, v = op.Unsqueeze(k, [2]), op.Unsqueeze(v, [2])
        scores = op.MatMul(q, op.Transpose(k, perm=axes))
        grouped = op.Shape(scores)
        if repeats > 1:
            scores = op.Reshape(scores, op.Concat(sizes, n_keys, axis=0))
        if is_causal:
            rows, columns = (op.Range(0, op.Squeeze(n, [0]), 1) for n in (n_queries, n_keys))
            scores = op.Where(op.GreaterOrEqual(op.Unsqueeze(rows, [1]), columns), scores, -math.inf)
        elif attn_mask is not None:
            is_mask = attn_mask.dtype == _BOOL
            scores = op.Where(attn_mask, scores, -math.inf) if is_mask else op.Add(scores, attn_mask)
        weights = op.Softmax(scores, axis=-1)
        if repeats == 1:
            return op.MatMul(weights, v)
        return op.Reshape(op.MatMul(op.Reshape(weights, grouped), v), op.Concat(sizes, d_value, axis=0))

    return sdpa


def _recurrent_translations(op: Any) -> dict[Any, Any]:
    """The layers of LSTMs and GRUs, which ``onnx_graphs`` traces as single operations."""

    def stack(weights: Any, order: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """W, R and B of all directions as in ONNX: torch's weights with their gates reordered."""
        rows = torch.arange(weights[0].shape[0]).unflatten(0, (len(order), -1))[list(order)].flatten().tolist()
        w_x, w_h, b_x, b_h = ([op.Gather(w, rows, axis=0) for w in weights[i::4]] for i in range(4))
        biases = [op.Concat(x, h, axis=0) for x, h in zip(b_x, b_h, strict=True)]
        w, r, b = (op.Concat(*(op.Unsqueeze(x, [0]) for x in parts), axis=0) for parts in (w_x, w_h, biases))
        return w, r, b

    def options(h: Any, bidirectional: bool) -> dict[str, Any]:
        return {"hidden_size": h.shape[2], "direction": "bidirectional" if bidirectional else "forward"}

    def join_directions(y: Any) -> Any:
        return op.Reshape(op.Transpose(y, perm=[2, 0, 1, 3]), [0, 0, -1])  # (T, directions, B, units) → (B, T, M)

    def lstm(x: Any, h: Any, c: Any, weights: Any, bidirectional: bool) -> Any:
        w, r, b = stack(weights, (0, 3, 1, 2))  # i f g o → i o f g
        steps = op.Transpose(x, perm=[1, 0, 2])
        y, h, c = op.LSTM(steps, w, r, b, None, h, c, **options(h, bidirectional))
        return join_directions(y), h, c

    def gru(x: Any, h: Any, weights: Any, bidirectional: bool) -> Any:
        w, r, b = stack(weights, (1, 0, 2))  # r z n → z r n
        steps = op.Transpose(x, perm=[1, 0, 2])
        y, h = op.GRU(steps, w, r, b, None, h, linear_before_reset=1, **options(h, bidirectional))
        return join_directions(y), h

    return {torch.ops.regard.lstm.default: lstm, torch.ops.regard.gru.default: gru}


def _strip_metadata(model: Any) -> None:
    """Remove the source locations that the exporter stores for each node, because they contain local paths."""
    for graph in (model.graph, *model.functions.values()):
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
        for value in (*graph.inputs, *graph.outputs):
            value.metadata_props.clear()
    for value in model.graph.initializers.values():
        value.metadata_props.clear()
    model.metadata_props.clear()
