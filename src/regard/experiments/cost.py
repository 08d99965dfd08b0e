"""``regard.cost``: the cost of a model before it is built: parameters, operations, memory, cache, time.

Every figure is computed from the config alone, in a second and without a GPU. Times are lower bounds; the other figures
were compared with measurements (docs/cost.md): operations with torch's counter, caches with the cache objects, training
memory with a GPU's allocator.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from ..config import ModelConfig, TrainConfig
from ..errors import UsageError
from ..foundation.checks import check_positive
from ..models import Model
from ..models.model_flops import Flops, count, n_patches, stacks_of
from ..presets import PRESETS, preset
from ..training.loss import SHARE_OF_MEMORY
from .cost_devices import CPU, Device, find_device, source_tokens, time_floors
from .cost_report import Amount, Cost, TrainingVariant
from .flops_estimate import (
    CACHE_DTYPE_BYTES,
    CacheDtype,
    ParameterGroup,
    crossover,
    kv_cache,
    layer_kinds,
    parameter_groups,
)
from .memory_estimate import Attention, Precision, Setting, training_memory


def cost(
    model: str | Path | ModelConfig | Model,
    batch: int = 1,
    length: int | None = None,
    *,
    source_length: int | None = None,
    train: TrainConfig | None = None,
    device: str = "h200",
    cache: CacheDtype = "bf16",
    **fields: Any,
) -> Cost:
    """The cost of a preset, a ModelConfig, a built model, a run or a model directory; ``fields`` override its config.

    length         tokens of the text, or of the target in an encoder-decoder; None: max_len
    source_length  tokens of the source in an encoder-decoder
    train          precision, optimiser, checkpointing, ema, accumulate and label_smoothing of training
    device         the device whose speeds give the lower bounds of the times
    cache          the dtype of the KV cache
    """
    name, config, recipe = resolve_model(model, fields)
    if config.model_class is not None:
        raise ValueError(f"model_class={config.model_class!r} is your own: cost counts what the built-in classes do")
    if cache not in CACHE_DTYPE_BYTES:
        raise UsageError(f"cache={cache!r} is not one of {', '.join(CACHE_DTYPE_BYTES)}")
    length = _longest(config) if length is None else length
    _check_lengths(config, batch, length, source_length)
    speeds = find_device(device)
    setting = _setting(config, recipe if train is None else train, speeds, batch, length, source_length)
    groups = parameter_groups(config)
    flops = count(config, batch, length, source_length)
    layers = kv_cache(config, batch, length, source_length, cache)
    memory = None if config.architecture == "recurrent" else training_memory(config, groups, setting)
    return Cost(
        name=name,
        config=config,
        setting=setting,
        device=speeds,
        parameters=Amount({f"{group.part} {group.kind}": group.number for group in groups}, "parameters"),
        flops_forward=_flops_amount(flops, "forward"),
        flops_backward=_flops_amount(flops, "backward"),
        flops_forward_seen=_flops_amount(flops, "forward_seen"),
        flops_backward_seen=_flops_amount(flops, "backward_seen"),
        flops_all_experts=_flops_of_all_experts(config, batch, length, source_length),
        attention_matrix=_attention_matrix(config, setting),
        kv_cache=Amount({f"{layer.kind} {layer.layer}": layer.bytes for layer in layers}),
        cache_layers=tuple(layers),
        cache_numbers=cache,
        training=memory,
        variants=() if memory is None else _training_variants(config, groups, setting),
        floors=time_floors(config, speeds, setting, groups, flops, memory, layers),
        crossover=crossover(config, batch, length, source_length, flops),
        layer_kinds=tuple(layer_kinds(length, config.d_model, window=config.window)),
    )


def resolve_model(
    model: str | Path | ModelConfig | Model, fields: dict[str, Any]
) -> tuple[str, ModelConfig, TrainConfig]:
    """The name, config and training config of a model; reads configs only, never weights."""
    name, recipe = str(model), TrainConfig()
    if isinstance(model, Model | ModelConfig):
        name, config = "the given model", model if isinstance(model, ModelConfig) else model.config
    elif not Path(model).is_dir() and (name in PRESETS or not Path(model).exists()):
        config = preset(name)  # its error for an unknown name lists the presets
    else:
        from ..hub import read_config
        from ..hub.hf_directory import Directory
        from ..training.run_directory import RUN_FILE, RunDirectory

        if (Path(model) / RUN_FILE).is_file():
            run = RunDirectory.open(Path(model)).config
            config, recipe = run.model, run.train
        else:
            config = read_config(Directory(Path(model), verify=False).config()).config
    changes = "".join(f" {field}={value}" for field, value in fields.items())
    return name + changes, config.with_(**fields) if fields else config, recipe


def _longest(config: ModelConfig) -> int:
    """The most tokens of a text, or of the target in an encoder-decoder; of an image encoder its patches."""
    if config.architecture == "encoder" and config.source == "image":
        return n_patches(config)
    return (config.max_target_len if config.architecture == "encoder-decoder" else None) or config.max_len


def _check_lengths(config: ModelConfig, batch: int, length: int, source_length: int | None) -> None:
    try:
        check_positive(batch=batch, length=length, source_length=source_length)
    except ValueError as error:
        raise UsageError(str(error)) from None
    has_source = config.architecture in ("encoder-decoder", "recurrent")
    if source_length is not None and not has_source:
        raise UsageError(f"source_length={source_length} means nothing to architecture={config.architecture!r}")
    if source_length is not None and config.source == "image":
        n = n_patches(config)
        raise UsageError(f"source_length={source_length}: an image of image_size={config.image_size} has {n} patches")
    limited = config.positions == "learned" or config.mixing.built_for_length
    if config.architecture == "recurrent" or not limited:
        return
    reason = f"for which mixer={config.mixer!r} is built"
    if config.positions == "learned":
        reason = "where learned positions end"
    field = "max_target_len" if has_source and config.max_target_len else "max_len"
    limit = getattr(config, field)
    if length > limit and (config.architecture != "encoder" or config.source == "text"):
        raise UsageError(f"length={length} is longer than {field}={limit}, {reason}")
    if source_length is not None and config.source == "text" and source_length > config.max_len:
        raise UsageError(f"source_length={source_length} is longer than max_len={config.max_len}, {reason}")


def _training_variants(
    config: ModelConfig, groups: list[ParameterGroup], setting: Setting
) -> tuple[TrainingVariant, ...]:
    """The memory of training with each attention, without and with checkpointing."""
    variants = []
    for attention, checkpointing in product(get_args(Attention), (False, True)):
        memory = training_memory(config, groups, replace(setting, attention=attention, checkpointing=checkpointing))
        variants.append(TrainingVariant(attention, checkpointing, memory.activations, memory.peak))
    return tuple(variants)


def _setting(
    config: ModelConfig, train: TrainConfig, device: Device, batch: int, length: int, source_length: int | None
) -> Setting:
    precision: Precision = "fp32" if device.name == CPU else device.half_type
    if train.precision != "auto":  # fp8 training uses bf16 outside of matrix products
        precision = "bf16" if train.precision == "fp8" else train.precision
    return Setting(
        batch,
        length,
        source_length,
        precision=precision,
        attention="reference" if config.attention_backend == "reference" else "fused",
        checkpointing=train.checkpointing,
        optimiser=train.optimiser,
        ema=train.ema is not None,
        accumulate=train.accumulate,
        smoothing=train.label_smoothing,
        counted=0.15 if config.head == "masked-lm" else 1.0,
        working=precision == "bf16" and device.name != CPU,
        logit_bytes=Setting.logit_bytes if device.memory is None else device.memory / SHARE_OF_MEMORY,
    )


def _flops_amount(flops: list[Flops], field: str) -> Amount:
    totals: dict[str, float] = {}
    for part in flops:
        name = f"{part.part} {part.kind}"
        totals[name] = totals.get(name, 0.0) + getattr(part, field)
    return Amount(totals, "operations")


def _flops_of_all_experts(config: ModelConfig, batch: int, length: int, source_length: int | None) -> float:
    dense = config if config.experts is None else config.with_(experts_per_token=config.experts)
    return sum(part.forward for part in count(dense, batch, length, source_length))


def _attention_matrix(config: ModelConfig, setting: Setting) -> Amount:
    """B · H · T · S numbers per layer; a mechanism without pairwise scores has no matrix."""
    parts: dict[str, float] = {}
    for stack in stacks_of(config, setting.length, setting.source_length):
        rows = setting.width * setting.batch * stack.n_layers * stack.n_heads * stack.length
        if config.mixing.pairs:
            parts[f"{stack.name} attention"] = float(rows * stack.length)
        if stack.memory is not None and (config.mixing.pairs or not config.mixing.cross):
            parts[f"{stack.name} cross attention"] = float(rows * stack.memory)
    if config.architecture == "recurrent" and config.alignment != "none":
        source = source_tokens(config, setting) or 0
        parts["decoder attention"] = float(setting.width * setting.batch * setting.length * source)
    return Amount(parts)
