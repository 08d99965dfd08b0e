"""A graph traced by torch, translated to ONNX and written to a file.

torch.onnx.export traces a module; decomposes what ONNX does not know by tracing everything a second time; and rewrites
the result by some hundred patterns. Only the first is needed here: ``_translations`` has what regard's models use
beside torch's own table, so that nothing is left to decompose, and ONNX Runtime finds the patterns as it loads a file.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

from ..errors import RegardError, silence_warnings
from .onnx_graphs import Graph

OPSET = 20  # the first with Gelu as one operation
_MAX_INLINE_BYTES = 1_500_000_000  # of weights in one file; a protobuf ends at 2³¹
_REGISTRIES: dict[int, Any] = {}  # torch's tables of translations, by opset


@torch.no_grad()
def write_graph(graph: Graph, path: Path) -> list[str]:
    """Trace a graph, write it and return the names of its outputs. The file holds no paths of this machine."""
    try:
        import onnxscript.optimizer
    except ImportError:
        raise RegardError(
            'ONNX files are written by onnxscript, which is not installed: pip install "regard[export]"'
        ) from None
    outputs = list(graph.compute(dict(zip(graph.input_names, graph.examples, strict=True))))
    try:
        program = _trace(graph, outputs)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        reason = str(cause).strip().split("\n")[0]
        raise RegardError(f"this model cannot be written as ONNX: {reason}") from error
    onnxscript.optimizer.fold_constants(program.model)
    onnxscript.optimizer.remove_unused_nodes(program.model)
    _strip_metadata(program.model)
    n_bytes = sum(p.numel() * p.element_size() for p in graph.parameters())
    program.save(path, external_data=n_bytes > _MAX_INLINE_BYTES)
    return outputs


def _trace(graph: Graph, outputs: list[str], decompose: bool = False) -> Any:
    """torch's exporter without what it need not do: to decompose a program in which every operation has a translation,
    to cache the shapes of operations that never come again, to read its table of translations more than once."""
    with (
        nullcontext() if decompose else _decompose_if_needed(),
        _read_translations_once(),
        torch._dynamo.config.patch(fake_tensor_cache_enabled=False),
        silence_warnings("torch.onnx"),  # about torchvision and the names of axes
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
    return _trace(graph, outputs, decompose=True)  # an operation of somebody's own mechanism has no translation


@contextmanager
def _decompose_if_needed() -> Iterator[None]:
    """Within it, a program without operations that the exporter would decompose is not traced again for their sake."""
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
    """Within it, the exporter copies its table of some 800 translations instead of reading their signatures again."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another version of torch: it is slower, that is all
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
    """Assertions are dropped, and arithmetic with sizes is no operation of torch."""
    if not isinstance(target, torch._ops.OperatorBase):
        return False
    if not isinstance(target, torch._ops.OpOverload):
        return True
    return not target.name().startswith("aten::_assert") and (target in table or target._schema.is_mutable)


def _translations() -> dict[Any, Any]:
    """Operations that torch's exporter translates not at all, or only after decomposing them."""
    from onnxscript import opset18 as op

    int64, boolean = 7, 9  # in onnx.TensorProto

    def sort(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        """TopK of everything: ties stay in their order."""
        length = op.Reshape(op.Gather(op.Shape(self), dim), [1])
        values, indices = op.TopK(op.Cast(self, to=int64), length, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, self), indices

    def stable_argsort(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        return sort(self, stable, dim, descending)[1]

    def argsort(self: Any, dim: int = -1, descending: bool = False) -> Any:
        return sort(self, True, dim, descending)[1]

    def to_dtype(
        self: Any, dtype: int, non_blocking: bool = False, copy: bool = False, memory_format: Any = None
    ) -> Any:
        return op.Cast(self, to=dtype)

    def or_(self: Any, other: Any) -> Any:
        return op.Or(self, other) if self.dtype == boolean else op.BitwiseOr(self, other)

    def and_(self: Any, other: Any) -> Any:
        return op.And(self, other) if self.dtype == boolean else op.BitwiseAnd(self, other)

    def xor(self: Any, other: Any) -> Any:
        return op.Xor(self, other) if self.dtype == boolean else op.BitwiseXor(self, other)

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

    def stack(weights: Any, order: tuple[int, ...]) -> tuple[Any, Any, Any]:
        """Weights of each direction as ONNX has them: W, R and both biases, the gates in another order."""
        rows = torch.arange(weights[0].shape[0]).unflatten(0, (len(order), -1))[list(order)].flatten().tolist()
        w_x, w_h, b_x, b_h = ([op.Gather(w, rows, axis=0) for w in weights[i::4]] for i in range(4))
        biases = [op.Concat(x, h, axis=0) for x, h in zip(b_x, b_h, strict=True)]
        w, r, b = (op.Concat(*(op.Unsqueeze(x, [0]) for x in some), axis=0) for some in (w_x, w_h, biases))
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

    aten, regard = torch.ops.aten, torch.ops.regard
    return {
        aten.sort.stable: sort,
        aten.argsort.stable: stable_argsort,
        aten.argsort.default: argsort,
        aten.to.dtype: to_dtype,
        aten.__or__.Tensor: or_,
        aten.__and__.Tensor: and_,
        aten.__and__.Scalar: and_scalar,
        aten.__xor__.Tensor: xor,
        aten.square.default: square,
        aten.movedim.int: move_axis,
        aten.numpy_T.default: reverse_axes,
        aten.rms_norm.default: rms_norm,
        regard.lstm.default: lstm,
        regard.gru.default: gru,
    }


def _strip_metadata(model: Any) -> None:
    """Remove the source lines that the exporter stores for each node, which are paths of this machine."""
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
