"""Int8 models as directories: whole numbers and their scales in safetensors, a mark in config.json, no pickle.

``layers.quantised_linear`` rounds linear maps, token tables and the output matrix, one scale a row. q and k
are still tapped where they are made, so the attention maps of an int8 model are exactly that model's.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from .. import hub
from ..config import ModelConfig
from ..errors import BadModelFile
from ..foundation.files import write_atomic
from ..foundation.jsonio import parse_json, to_json
from ..layers.quantised_linear import Int8Linear
from ..layers.quantised_linear import quantise as round_in_place
from ..models import Model, build
from ..text import read_processor

MARK = "regard_quantisation"
"""The field of config.json that says the weights are quantised, and how."""
_HOW: dict[str, Any] = {"kind": "int8", "weights": "symmetric, a scale a row", "inputs": "symmetric, a scale a token"}
_MOST_SHARD_BYTES = 5 * 10**9


def quantise(model: Model) -> Model:
    """A copy of the model in int8, for inference."""
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("this model is quantised already")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model is on the meta device: it has no numbers to quantise")
    return cast(Model, round_in_place(copy.deepcopy(model)))


def int8_files(model: Model, folder: Path) -> None:
    """Write a quantised model: model.safetensors with int8 and scales, config.json that says so, its tokenizers.

    The manifest is the caller's, who may have more to add.
    """
    config, processor = model.config, model.processor
    index = hub.write_safetensors(folder, _tensors(model), _MOST_SHARD_BYTES)
    files: dict[str, bytes] = {} if processor is None else dict(processor.files(config))
    if index is not None:
        files["model.safetensors.index.json"] = to_json(index)
    # transformers would read the whole numbers as weights, so the directory is nobody's but ours.
    fields: dict[str, Any] = {"model_type": "regard", "regard": config.model_dump(mode="json"), MARK: _HOW}
    labels = None if processor is None else processor.labels
    if labels is not None:
        fields["id2label"] = {str(number): label for number, label in enumerate(labels)}
        fields["label2id"] = {label: number for number, label in enumerate(labels)}
    files["config.json"] = to_json(fields)
    written = hub.WrittenConfig(fields, (), ("weights are int8, in a form of our own",))
    files["README.md"] = hub.model_card(model, written).encode()
    for name, content in files.items():
        write_atomic(folder / name, content)


def is_quantised(path: str | Path) -> bool:
    """Whether a directory's config.json says that its weights are int8."""
    config = Path(path) / "config.json"
    return config.is_file() and MARK in parse_json(config.read_bytes(), config)


@dataclass(frozen=True)
class Int8Directory:
    """A directory of an int8 model that has passed every check short of reading its numbers."""

    directory: hub.Directory
    weights: hub.Weights
    model: Model
    """On the meta device, with ``.config``, ``.processor`` and ``.provenance``."""
    n_parameters: int
    """Of the model it was rounded from."""

    def load(self) -> Model:
        """With its numbers, on the CPU."""
        fitting = hub.Fitting(self.model, {name: name for name in self.weights.layout})
        model = hub.fill(fitting, (), self.weights, torch.device("cpu"), None).requires_grad_(False)
        model.processor, model.provenance = self.model.processor, self.model.provenance
        return model


def open_int8(path: str | Path, *, verify: bool = True) -> Model:
    """The int8 model in a directory, with ``.config`` and ``.processor``. Anything wrong is a BadModelFile."""
    return check_int8(path, verify=verify).load()


def check_int8(path: str | Path, *, verify: bool = True) -> Int8Directory:
    """What a directory says of its int8 model, checked; the numbers themselves are not read yet."""
    directory = hub.Directory(path, verify=verify)
    fields = directory.config()
    if fields.get(MARK) != _HOW:
        raise BadModelFile(f"{directory.root}: config.json has {MARK}={fields.get(MARK)!r}; regard reads {_HOW}")
    resolved, weights = hub.read_config(fields), directory.weights()
    _need_layers(directory, resolved.config, len(weights.layout))
    model = build(resolved.config, device="meta")
    n_parameters = model.n_parameters
    model = cast(Model, round_in_place(model))
    _need_fit(directory.root, model, weights)
    model.processor = read_processor(directory, fields, resolved.config)
    model.provenance = hub.Provenance(directory.root, resolved.model_type, directory.verified)
    return Int8Directory(directory, weights, model, n_parameters)


def _tensors(model: Model) -> dict[str, Tensor]:
    """The state, each tensor with memory of its own."""
    return {name: x.detach().cpu().clone().contiguous() for name, x in model.state_dict().items()}


def _need_layers(directory: hub.Directory, config: ModelConfig, n_tensors: int) -> None:
    """A config may claim any number of layers, and building them takes memory even when they are empty."""
    for name in ("n_layers", "n_decoder_layers"):
        count = getattr(config, name)
        if not config.share_layers and count is not None and count > n_tensors:
            raise BadModelFile(f"{directory.root}: config.json has {name}={count}, but there are {n_tensors} tensors")


def _need_fit(root: Path, model: Model, weights: hub.Weights) -> None:
    wanted = model.state_dict()
    faults = [f"{name} is missing" for name in sorted(set(wanted) - set(weights.layout))]
    faults += [f"{name} belongs to nothing" for name in sorted(set(weights.layout) - set(wanted))]
    for name, x in weights.layout.items():
        if name in wanted and (x.shape != wanted[name].shape or _sort(x) != _sort(wanted[name])):
            have, need = (f"{tuple(y.shape)} of {_sort(y)}" for y in (x, wanted[name]))
            faults.append(f"{name} is {have}, not {need}")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise BadModelFile(f"{root}: the tensors do not fit config.json; {'; '.join(faults[:5])}{more}")


def _sort(x: Tensor) -> str:
    return "float" if x.is_floating_point() else str(x.dtype).removeprefix("torch.")
