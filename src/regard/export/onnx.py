"""ONNX: a model written as graphs, and opened again as a model that runs in ONNX Runtime.

    export_onnx(model, "out")            out/onnx/: encoder.onnx, decoder.onnx or model.onnx, and onnx.json
    model = open_onnx("out")             a model like any other: call it, or give it to generate
    model.maps(source, target)           its attention, exactly, where it was exported with maps=True

onnx.json says what a program in any language has to know: the config, the special tokens, every input and output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from .. import hub
from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..models import Model
from ..text import read_processor
from .onnx_graphs import graphs_of
from .onnx_maps import weighing_parts
from .onnx_model import OnnxDecoder, OnnxEncoder, OnnxEncoderDecoder
from .onnx_recurrent_model import OnnxRecurrent
from .onnx_running import OnnxModel
from .onnx_session import Session
from .onnx_tracing import OPSET, Graph, write_graph

FOLDER = "onnx"
"""Where in an exported directory the graphs lie."""

DESCRIPTION, MAPS = "onnx.json", "maps.safetensors"
_VERSION = 1
_MOST_JSON = 1 << 20

_KINDS: dict[str, type[Any]] = {
    "encoder": OnnxEncoder,
    "decoder": OnnxDecoder,
    "encoder-decoder": OnnxEncoderDecoder,
    "recurrent": OnnxRecurrent,
}


def export_onnx(model: Model, folder: str | Path, *, maps: bool = False) -> Path:
    """Write the graphs of a model to ``folder/onnx``, which appears whole or not at all; returns that path.

    Weights are float32 whatever the model holds. ``maps`` adds queries and keys as outputs, so that every attention
    weight can be had (``open_onnx(folder).maps``); whoever does not ask for them does not pay for them.
    """
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    if not isinstance(model, Model):
        raise TypeError(f"model is a {type(model).__name__}; ONNX graphs are written of regard's own models")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: it has no numbers to export")
    place = Path(folder) / FOLDER
    with replace_directory(place) as new:
        graphs = {}
        for name, graph in graphs_of(model, maps).items():
            graphs[name] = {"inputs": _inputs(graph), "outputs": write_graph(graph, new / f"{name}.onnx")}
        if parts := _for_maps(model) if maps else {}:
            write_atomic(new / MAPS, save(parts))
        write_atomic(new / DESCRIPTION, to_json(_description(model.config, graphs, maps)))
    return place


def _inputs(graph: Graph) -> dict[str, Any]:
    """Of each input its type and shape; a name stands where the length is free."""
    return {
        name: {
            "type": str(example.dtype).removeprefix("torch."),
            "shape": [axes.get(i, size) for i, size in enumerate(example.shape)],
        }
        for name, example, axes in zip(graph.input_names, graph.examples, graph.axes, strict=True)
    }


def _description(config: ModelConfig, graphs: dict[str, Any], maps: bool) -> dict[str, Any]:
    return {
        "regard_onnx": _VERSION,
        "opset": OPSET,
        "architecture": config.architecture,
        "tokens": {"pad": config.pad_id, "bos": config.bos_id, "eos": config.eos_id},
        "longest": {"source": config.max_len, "target": config.max_target_len or config.max_len},
        "padding": {"keep": "true for what is real", "positions": "0, 1, 2 … over real tokens, -1 for padding"},
        "maps": maps,
        "graphs": graphs,
        "config": config.model_dump(mode="json", exclude_defaults=True),
    }


def _for_maps(model: Model) -> dict[str, Tensor]:
    return {
        f"{place}.{name}": x.detach().cpu().float().contiguous()
        for place, part in weighing_parts(model)
        for name, x in part.state_dict().items()
    }


def open_onnx(folder: str | Path, *, threads: int | None = None, providers: list[str] | None = None) -> OnnxModel:
    """The model in ``folder/onnx``, or in that folder itself, run by ONNX Runtime; with the tokenizers beside it.

    threads    for each operation; None: as many as torch uses
    providers  ONNX Runtime's execution providers, best first; None: the CPU
    Anything wrong with the files is a BadModelFile.
    """
    root = Path(folder)
    place = root / FOLDER if (root / FOLDER / DESCRIPTION).is_file() else root
    config, maps = _read(place)
    kind = _KINDS[config.architecture]
    sessions = {name: Session(place / f"{name}.onnx", threads, providers) for name in kind.graph_names}
    model = kind(config, sessions)
    if maps:
        model.take_parts(_parts(place / MAPS), place)
    if place != root and (root / "config.json").is_file():
        directory = hub.Directory(root)
        model.processor = read_processor(directory, directory.config(), config)
    return model


def _read(place: Path) -> tuple[ModelConfig, bool]:
    path = place / DESCRIPTION
    if not path.is_file():
        raise BadModelFile(f"{place} has no {DESCRIPTION}, so no model was exported to ONNX there")
    if path.stat().st_size > _MOST_JSON:
        raise BadModelFile(f"{path} has {path.stat().st_size} bytes, too many for what it should be")
    match parse_json(path.read_bytes(), path):
        case {"regard_onnx": 1, "config": dict(fields), "maps": bool(maps)}:
            try:
                return ModelConfig(**fields), maps
            except (ValueError, TypeError) as error:
                raise BadModelFile(f"{path} describes no model: {error}") from None
    raise BadModelFile(f"{path} is no description of ONNX graphs that this version of regard reads")


def _parts(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path) if path.exists() else {}  # most models have none
    except (OSError, SafetensorError) as error:
        raise BadModelFile(f"{path} cannot be read: {error}") from None
