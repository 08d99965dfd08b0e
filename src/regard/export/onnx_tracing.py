"""What every graph is: named inputs with examples to trace it by, and its way into an ONNX file."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import RegardError
from ..foundation.logs import silence_warnings

Axes = dict[int, str]
"""The axes of a tensor whose length is free, by name."""

OPSET = 20  # the first with Gelu as one operation
_MOST_IN_ONE_FILE = 1_500_000_000  # bytes of weights; a protobuf ends at 2³¹


class Notes:
    """Queries and keys seen while a graph is traced."""

    def __init__(self) -> None:
        self.pages: list[tuple[Tensor, Tensor]] = []

    def write(self, q: Tensor, k: Tensor) -> None:
        self.pages.append((q, k))

    def named(self, *names: str) -> dict[str, Tensor]:
        """As outputs: q_0, k_0, q_1 …"""
        return {f"{name}_{i}": x for i, page in enumerate(self.pages) for name, x in zip(names, page, strict=False)}


class Graph(nn.Module):
    """Something to be written as one ONNX file. ``inputs`` are examples and the names of their free axes."""

    def __init__(self, inputs: dict[str, tuple[Tensor, Axes]]) -> None:
        super().__init__()
        self.input_names = list(inputs)
        self.examples = tuple(example for example, _ in inputs.values())
        self.axes = tuple(axes for _, axes in inputs.values())

    @abstractmethod
    def compute(self, given: dict[str, Tensor]) -> dict[str, Tensor]:
        """The outputs by name."""

    def forward(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(self.compute(dict(zip(self.input_names, inputs, strict=True))).values())


def example_of(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def tokens_like(vocab_size: int, *shape: int) -> Tensor:
    return torch.randint(vocab_size, shape, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def write_graph(graph: Graph, path: Path) -> list[str]:
    """Trace a graph and write it; its outputs' names. Nothing in the file says on which machine it was made."""
    try:
        import onnxscript  # noqa: F401 - is it there?
    except ImportError:
        raise RegardError(
            'ONNX files are written by onnxscript, which is not installed: pip install "regard[export]"'
        ) from None
    outputs = list(graph.compute(dict(zip(graph.input_names, graph.examples, strict=True))))
    with _quietly():
        try:
            program = torch.onnx.export(
                graph,
                (graph.examples,),
                dynamo=True,
                dynamic_shapes=(graph.axes,),
                input_names=graph.input_names,
                output_names=outputs,
                opset_version=OPSET,
                custom_translation_table=_translations(),
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            raise RegardError(f"this model cannot be written as ONNX: {_reason(error)}") from error
    assert program is not None
    _forget_where(program.model)
    n_bytes = sum(p.numel() * p.element_size() for p in graph.parameters())
    program.save(path, external_data=n_bytes > _MOST_IN_ONE_FILE)
    return outputs


def _translations() -> dict[Any, Any]:
    """What torch's exporter has no word for and ONNX has: a stable sort is TopK of everything, ties in their order."""
    from onnxscript import opset18 as op

    int64 = 7  # onnx.TensorProto.INT64

    def stable_sort(self: Any, stable: Any = None, dim: int = -1, descending: bool = False) -> Any:
        length = op.Reshape(op.Gather(op.Shape(self), dim), [1])
        values, indices = op.TopK(op.Cast(self, to=int64), length, axis=dim, largest=int(descending), sorted=1)
        return op.CastLike(values, self), indices

    return {torch.ops.aten.sort.stable: stable_sort}


def _forget_where(model: Any) -> None:
    """The exporter notes for each node from which line of which file it came: paths of this machine."""
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


def _reason(error: Exception) -> str:
    """The innermost cause in one line."""
    while error.__cause__ is not None and isinstance(error.__cause__, Exception):
        error = error.__cause__
    return str(error).strip().split("\n")[0]


@contextmanager
def _quietly() -> Iterator[None]:
    """torch's exporter talks a lot, of torchvision and of names for axes, none of it for whoever exports a model."""
    with silence_warnings("torch.onnx"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
