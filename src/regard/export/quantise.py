"""Int8 models as directories: int8 weights and their scales in safetensors, marked in config.json.

``layers.quantised_linear`` rounds linear layers, token tables and the output matrix to int8 with one scale per row. The
columns that meet the largest inputs stay float32; they are found by running the model on random inputs. q and k are
still tapped where they are computed, so the attention maps of an int8 model are exactly those of that model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from .. import hub
from ..errors import BadModelFile
from ..foundation.files import write_atomic
from ..foundation.jsonio import read_json, to_json
from ..generation.generate import inference
from ..hub.hf_family import label_fields
from ..layers.quantised_linear import Int8Linear
from ..layers.quantised_linear import quantise as round_in_place
from ..models import Model, build
from ..models.build import check_has_numbers
from ..models.components import TokenHead
from ..text import read_processor

MARK = "regard_quantisation"  # the field of config.json that says how the weights are quantised
_OLDER_SCHEME = {"kind": "int8", "weights": "symmetric, a scale a row", "inputs": "symmetric, a scale a token"}
_SCHEME = {**_OLDER_SCHEME, "columns": "float32 for the largest inputs, one of 64, at least 4"}
_ROWS, _LENGTH = 8, 32  # random tokens or pixels on which the inputs are measured
_MAX_SHARD_BYTES = 5 * 10**9


def quantise(model: Model) -> Model:
    """An int8 copy of the model, for inference."""
    if any(isinstance(module, Int8Linear) for module in model.modules()):
        raise ValueError("this model is quantised already")
    check_has_numbers(model, "quantise")
    return cast(Model, round_in_place(copy.deepcopy(model), _measure_inputs(model)))


def _measure_inputs(model: Model) -> dict[str, Tensor]:
    """The largest magnitude of each input of every linear layer, (in,) by the layer's name.

    Measured on random tokens or pixels: outlier inputs are caused by the weights, whatever the model reads.
    """
    sizes = _empty_sizes(model)
    names = {module: name for name, module in model.named_modules()}

    def record(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = module.hidden(args[0]) if isinstance(module, TokenHead) else args[0]
        sizes[names[module]] = torch.maximum(sizes[names[module]], x.detach().float().abs().flatten(0, -2).amax(0))

    hooks = [model.get_submodule(name).register_forward_pre_hook(record) for name in sizes]
    try:
        with inference(model):
            model(*_random_inputs(model))
    finally:
        for hook in hooks:
            hook.remove()
    return sizes


def _empty_sizes(model: Model) -> dict[str, Tensor]:
    """Zeros (in,) for every linear layer, by its name, and for the output matrix, as "head"."""
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    sizes = {name: linear.weight.new_zeros(linear.in_features, dtype=torch.float32) for name, linear in linears.items()}
    if model.head is not None:
        matrix = model.output_table if model.head.weight is None else model.head.weight
        sizes["head"] = matrix.new_zeros(matrix.shape[1], dtype=torch.float32)
    return sizes


def _random_inputs(model: Model) -> tuple[Tensor, ...]:
    config, generator, device = model.config, torch.Generator().manual_seed(0), model.device

    def tokens(n_tokens: int, longest: int) -> Tensor:
        ids = torch.randint(n_tokens, (_ROWS, min(_LENGTH, longest)), generator=generator)
        if config.bos_id is not None:
            ids[:, 0] = config.bos_id
        return ids.to(device)

    dtype = next(model.parameters()).dtype
    if config.source == "image":
        source = torch.randn(_ROWS, config.n_channels, config.image_size, config.image_size, generator=generator)
    elif config.source == "regions":
        source = torch.randn(_ROWS, _LENGTH, config.d_region + config.d_box, generator=generator)
    else:
        source = tokens(config.vocab_size, config.max_len)
    source = source.to(device, dtype) if source.is_floating_point() else source
    if config.architecture in ("encoder", "decoder"):
        return (source,)
    return source, tokens(config.output_vocab_size, config.max_target_len or config.max_len)


def write_int8(model: Model, folder: Path) -> None:
    """Write a quantised model: int8 weights and scales, config.json, tokenizers and card; no manifest."""
    config, processor = model.config, model.processor
    tensors = {name: x.detach().cpu().clone().contiguous() for name, x in model.state_dict().items()}
    index = hub.write_safetensors(folder, tensors, _MAX_SHARD_BYTES)
    files: dict[str, bytes] = {} if processor is None else dict(processor.files(config))
    if index is not None:
        files["model.safetensors.index.json"] = to_json(index)
    # The model type is regard's own, because transformers would read the integers as weights.
    fields: dict[str, Any] = {"model_type": "regard", "regard": config.model_dump(mode="json"), MARK: _SCHEME}
    if processor is not None and processor.labels is not None:
        fields |= label_fields(processor.labels)
    files["config.json"] = to_json(fields)
    written = hub.WrittenConfig(fields, (), ("weights are int8, in a format of regard's own",))
    files["README.md"] = hub.model_card(model, written, build(config, device="meta").n_parameters).encode()
    for name, content in files.items():
        write_atomic(folder / name, content)


def is_quantised(path: str | Path) -> bool:
    """Whether a directory's config.json marks its weights as int8."""
    config = Path(path) / "config.json"
    return config.is_file() and MARK in read_json(config)


class Int8Directory(NamedTuple):
    """A checked directory of an int8 model whose weights have not been read yet."""

    directory: hub.Directory
    weights: hub.Weights
    model: Model  # on the meta device, with ``.config``, ``.processor`` and ``.provenance``
    n_parameters: int  # before quantisation


def open_int8(path: str | Path, *, verify: bool = True) -> Model:
    """The int8 model in a directory, with ``.config`` and ``.processor``. Raises BadModelFile for invalid files."""
    _, weights, described, _ = check_int8(path, verify=verify)
    fitting = hub.Fitting(described, {name: name for name in weights.layout})
    model = hub.fill(fitting, (), weights, torch.device("cpu"), None).requires_grad_(False)
    model.processor, model.provenance = described.processor, described.provenance
    model.training_record = described.training_record
    return model


def check_int8(path: str | Path, *, verify: bool = True) -> Int8Directory:
    """Check a directory of an int8 model without reading its weights."""
    directory = hub.Directory(path, verify=verify)
    fields = directory.config()
    if (scheme := fields.get(MARK)) not in (_SCHEME, _OLDER_SCHEME):
        raise BadModelFile(f"{directory.root}: config.json has {MARK}={scheme!r}; regard reads {_SCHEME}")
    resolved, weights = hub.read_config(fields), directory.weights()
    config, n_tensors = resolved.config, len(weights.layout)
    for name in ("n_layers", "n_decoder_layers"):  # even on the meta device, building layers takes memory
        count = getattr(config, name)
        if not config.share_layers and count is not None and count > n_tensors:
            raise BadModelFile(f"{directory.root}: config.json has {name}={count}, but there are {n_tensors} tensors")
    model = build(config, device="meta")
    n_parameters = model.n_parameters
    model = cast(Model, round_in_place(model, _empty_sizes(model) if scheme == _SCHEME else None))
    _check_tensors(directory.root, model, weights)
    model.processor = read_processor(directory, fields, config)
    model.provenance = hub.Provenance(directory.root, resolved.model_type, directory.verified)
    model.training_record = directory.training_record
    return Int8Directory(directory, weights, model, n_parameters)


def _check_tensors(root: Path, model: Model, weights: hub.Weights) -> None:
    expected, actual = model.state_dict(), weights.layout
    faults = [f"{name} is missing" for name in sorted(set(expected) - set(actual))]
    faults += [f"{name} is not a tensor of this model" for name in sorted(set(actual) - set(expected))]
    for name in (name for name in actual if name in expected):
        stored, needed = (f"{tuple(x.shape)} of {_dtype_name(x)}" for x in (actual[name], expected[name]))
        if stored != needed:
            faults.append(f"{name} is {stored}, not {needed}")
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise BadModelFile(f"{root}: the tensors do not fit config.json; {'; '.join(faults[:5])}{more}")


def _dtype_name(x: Tensor) -> str:
    return "float" if x.is_floating_point() else str(x.dtype).removeprefix("torch.")
