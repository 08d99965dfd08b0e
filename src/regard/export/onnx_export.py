"""Export to ONNX: write a model as graphs, and open them as a model that runs in ONNX Runtime.

    export_onnx(model, "out")            out/onnx/: encoder.onnx, decoder.onnx or model.onnx, and onnx.json
    model = open_onnx("out")             a regard model: call it, or pass it to generate
    model.maps(source, target)           its exact attention maps, if exported with maps=True

onnx.json describes the graphs for programs in any language: the config, the special tokens, every input and output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from .. import hub
from ..config import ModelConfig
from ..errors import BadModelFile, silence_warnings
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import read_json, to_json
from ..layers.embeddings import TokenEmbedding
from ..layers.quantised_linear import quantise_weight
from ..models import Model
from ..models.build import check_has_numbers
from ..text import read_processor
from .onnx_graphs import Graph, graphs_of, onnx_obstacle
from .onnx_models import OnnxDecoder, OnnxEncoder, OnnxEncoderDecoder, OnnxRecurrent
from .onnx_runtime import OnnxModel, OnnxSession, score_modules
from .onnx_trace import OPSET, write_graph

FOLDER = "onnx"  # the subfolder of an exported directory with the graphs
DESCRIPTION, MAPS = "onnx.json", "maps.safetensors"
_VERSION = 1
_MAX_JSON_BYTES = 1 << 20

_KINDS: dict[str, type[Any]] = {
    "encoder": OnnxEncoder,
    "decoder": OnnxDecoder,
    "encoder-decoder": OnnxEncoderDecoder,
    "recurrent": OnnxRecurrent,
}


def export_onnx(model: Model, folder: str | Path, *, maps: bool = False, int8: bool = False) -> Path:
    """Write the graphs of a model to ``folder/onnx``, completely or not at all, and return that path.

    Weights are float32; ``int8`` rounds matrices and token tables to int8. ``maps`` adds queries and keys as
    outputs, from which every attention weight can be computed (``open_onnx(folder).maps``).
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; only regard's own models can be exported to ONNX")
    if (obstacle := onnx_obstacle(model.config, maps)) is not None:
        raise ValueError(obstacle)
    check_has_numbers(model, "export")
    target = Path(folder) / FOLDER
    with replace_directory(target) as new:
        graphs = {}
        for name, graph in graphs_of(model, maps).items():
            path = new / f"{name}.onnx"
            graphs[name] = {"inputs": _describe_inputs(graph), "outputs": write_graph(graph, path)}
            if int8:
                round_weights(path, graph)
        tensors = {
            f"{module_name}.{name}": x.detach().cpu().float().contiguous()
            for module_name, module in score_modules(model)
            for name, x in module.state_dict().items()
        }
        if maps and tensors:
            write_atomic(new / MAPS, save(tensors))
        config = model.config
        description = {
            "regard_onnx": _VERSION,
            "opset": OPSET,
            "weights": "int8" if int8 else "float32",
            "architecture": config.architecture,
            "tokens": {"pad": config.pad_id, "bos": config.bos_id, "eos": config.eos_id},
            "longest": {"source": config.max_len, "target": config.max_target_len or config.max_len},
            "padding": {"keep": "true for what is real", "positions": "0, 1, 2 … over real tokens, -1 for padding"},
            "maps": maps,
            "graphs": graphs,
            "config": config.model_dump(mode="json", exclude_defaults=True),
        }
        write_atomic(new / DESCRIPTION, to_json(description))
    return target


def _describe_inputs(graph: Graph) -> dict[str, Any]:
    """The type and shape of each input; a dynamic axis has a name instead of a length."""
    return {
        name: {
            "type": str(example.dtype).removeprefix("torch."),
            "shape": [axes.get(i, size) for i, size in enumerate(example.shape)],
        }
        for name, example, axes in zip(graph.input_names, graph.examples, graph.axes, strict=True)
    }


def open_onnx(folder: str | Path, *, threads: int | None = None, providers: list[str] | None = None) -> OnnxModel:
    """Open the model in ``folder/onnx``, or in ``folder`` itself, with the directory's tokenizers.

    threads    threads per operation; None: as many as torch uses
    providers  ONNX Runtime's execution providers, in order of preference; None: the CPU
    Invalid files raise BadModelFile.
    """
    root = Path(folder)
    graphs = root / FOLDER if (root / FOLDER / DESCRIPTION).is_file() else root
    config, has_maps = _read_description(graphs)
    kind = _KINDS[config.architecture]
    sessions = {name: OnnxSession(graphs / f"{name}.onnx", threads, providers) for name in kind.graph_names}
    model = kind(config, sessions)
    if has_maps:
        path = graphs / MAPS
        try:
            tensors = load_file(path) if path.exists() else {}  # most mechanisms have no parameters
        except (OSError, SafetensorError) as error:
            raise BadModelFile(f"{path} cannot be read: {error}") from None
        model.load_score_parameters(tensors, graphs)
    if graphs != root and (root / "config.json").is_file():
        directory = hub.Directory(root)
        model.processor = read_processor(directory, directory.config(), config)
    return model


def _read_description(folder: Path) -> tuple[ModelConfig, bool]:
    path = folder / DESCRIPTION
    if not path.is_file():
        raise BadModelFile(f"{folder} has no {DESCRIPTION}, so it holds no model exported to ONNX")
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise BadModelFile(f"{path} has {path.stat().st_size} bytes, too many for a description of graphs")
    match read_json(path):
        case {"regard_onnx": 1, "config": dict(fields), "maps": bool(maps)}:
            try:
                return ModelConfig(**fields), maps
            except (ValueError, TypeError) as error:
                raise BadModelFile(f"{path} does not describe a model: {error}") from None
    raise BadModelFile(f"{path} is not a description of ONNX graphs that this version of regard can read")


def round_weights(path: Path, graph: Graph) -> None:
    """Round the token tables of a written graph to int8, one scale per token, and its other constant matrices, one
    scale per column; inputs are quantised at run time.

    The new file uses DynamicQuantizeLinear and MatMulInteger, which are standard ONNX operators.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    file = onnx.load(path)
    del file.graph.value_info[:]  # stale since the exporter folded transposes; the quantiser would reject them
    for name, module in graph.named_modules():
        if isinstance(module, TokenEmbedding):
            _round_table(file.graph, f"{name}.weight")
    external = path.with_name(f"{path.name}.data")
    is_large = external.exists()
    external.unlink(missing_ok=True)
    with silence_warnings("root"):  # it advises pre-processing, which the exporter has already done
        quantize_dynamic(
            file,
            path,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            weight_type=QuantType.QInt8,
            use_external_data_format=is_large,
        )


def _round_table(graph: Any, name: str) -> None:
    """Replace a float table (V, M) by int8 and scales (V,), for the embedding and for the output matrix tied to it."""
    from onnx import TensorProto, helper, numpy_helper

    table = next((tensor for tensor in graph.initializer if tensor.name == name), None)
    if table is None:  # the graph neither embeds tokens nor has a tied output matrix
        return
    int8, scale, axis = f"{name}_int8", f"{name}_scale", f"{name}_axis"
    weight, scales = quantise_weight(torch.tensor(numpy_helper.to_array(table)))
    graph.initializer.remove(table)
    for part, values in ((int8, weight), (scale, scales), (axis, torch.tensor([-1]))):
        graph.initializer.append(numpy_helper.from_array(values.numpy(), part))
    nodes, transposed = list(graph.node), set[str]()
    del graph.node[:]

    def add(operator: str, inputs: list[str], *outputs: str, **attributes: Any) -> str:
        graph.node.append(helper.make_node(operator, inputs, outputs, name=outputs[0], **attributes))
        return outputs[0]

    for node in nodes:
        y = node.output[0]
        if node.op_type == "Gather" and node.input[0] == name:
            vectors = add("Gather", [int8, node.input[1]], f"{y}_int8")
            factors = add("Unsqueeze", [add("Gather", [scale, node.input[1]], f"{y}_scale"), axis], f"{y}_factor")
            add("Mul", [add("Cast", [vectors], f"{y}_float", to=TensorProto.FLOAT), factors], y)
        elif node.op_type == "Transpose" and node.input[0] == name:
            transposed.add(add("Transpose", [int8], y, perm=[1, 0]))
        elif node.op_type == "MatMul" and node.input[1] in transposed:
            x, x_scale, x_zero = f"{y}_x", f"{y}_x_scale", f"{y}_x_zero"
            add("DynamicQuantizeLinear", [node.input[0]], x, x_scale, x_zero)
            product = add("MatMulInteger", [x, node.input[1], x_zero], f"{y}_int32")
            factors = add("Mul", [x_scale, scale], f"{y}_scales")
            add("Mul", [add("Cast", [product], f"{y}_float", to=TensorProto.FLOAT), factors], y)
        else:
            graph.node.append(node)


def has_int8_weights(root: Path) -> bool:
    """Whether an exported directory's ONNX graphs were written with int8 weights."""
    path = root / FOLDER / DESCRIPTION
    return path.is_file() and read_json(path).get("weights") == "int8"
