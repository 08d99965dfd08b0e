"""``regard.cost``: what a model costs before it is built: parameters, operations, memory, cache, time.

Every figure comes from the config alone, in a second and without a GPU. Times are floors; the rest was compared with
measurements (docs/cost.md): operations with torch's counter, caches with the cache objects, training memory with a
GPU's allocator.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...config import ModelConfig, TrainConfig
from ...errors import UsageError
from ...models.flops import Flops, count, n_patches, source_places, stacks_of
from ...presets import PRESETS, preset
from .amounts import Amount
from .cache import SIZES, CacheLayer, Numbers, kv_cache
from .crossing import crossover
from .devices import Device, device_of
from .floors import Floor, floors_of
from .layers import LayerKind, layer_kinds
from .memory import TrainingMemory, training_memory
from .parameters import Weights, weights_of
from .pieces import Attention, Precision, Setting

__all__ = ["Cost", "Floor", "cost"]


@dataclass(frozen=True)
class Variant:
    """Training memory under one choice of attention and checkpointing."""

    attention: str
    checkpointing: bool
    activations: float
    peak: float


@dataclass(frozen=True)
class Cost:
    """What ``cost`` found. Amounts have a total and parts; all memory is in bytes, all times in seconds."""

    name: str
    config: ModelConfig
    setting: Setting
    device: Device
    parameters: Amount
    flops_forward: Amount
    """Every query against every key: what torch's counter sees of the plain formula."""
    flops_backward: Amount
    flops_forward_seen: Amount
    """Only the pairs a mask lets through: about half of attention where the future is hidden."""
    flops_backward_seen: Amount
    attention_matrix: Amount
    """Weights of all pairs, were they stored, in the precision of the products."""
    kv_cache: Amount
    cache_layers: tuple[CacheLayer, ...]
    cache_numbers: Numbers
    training: TrainingMemory | None
    """None for recurrent models."""
    variants: tuple[Variant, ...]
    floors: dict[str, Floor]
    """Of a forward pass, a training step, and the last token of each text in decoding."""
    crossover: dict[str, float | None]
    """Lengths from which on attention outweighs matrices, in three conventions; None: it never does."""
    layer_kinds: tuple[LayerKind, ...]

    @property
    def activations(self) -> Amount:
        """What autograd keeps of a forward pass, by part."""
        if self.training is None:
            raise ValueError("architecture='recurrent': training memory is predicted for Transformers only")
        copies = {"copies of weights": self.training.copies} if self.training.copies else {}
        return Amount({**self.training.by_part, **({} if self.setting.checkpointing else copies)})

    def document(self) -> dict[str, Any]:
        from .text import document

        return document(self)

    def table(self, training: bool = True) -> str:
        from .text import table

        return table(self, training)

    def draw(self, file: str | Path) -> Path:
        from .figure import draw

        return draw(self, Path(file))


def cost(
    model: str | Path | ModelConfig,
    batch: int = 1,
    length: int | None = None,
    *,
    source_length: int | None = None,
    train: TrainConfig | None = None,
    device: str = "h200",
    cache: Numbers = "bf16",
    **fields: Any,
) -> Cost:
    """The cost of a preset, a ModelConfig, a run or a model directory, any field of the model overridden.

    ``length`` is that of the text (beside an encoder: the target; None: max_len), ``source_length`` that of the source.
    ``train`` says how it is trained: precision, optimiser, checkpointing, ema, accumulate, label_smoothing. ``device``
    sets the floors under the times, ``cache`` the numbers of the KV cache.
    """
    name, config, recipe = config_of(model, fields)
    train = recipe if train is None else train
    if cache not in SIZES:
        raise UsageError(f"cache={cache!r} is none of {', '.join(SIZES)}")
    length = _length(config) if length is None else length
    _check(config, batch, length, source_length)
    place = device_of(device)
    setting = _setting(config, train, place, batch, length, source_length)
    weights = weights_of(config)
    flops = count(config, batch, length, source_length)
    layers = kv_cache(config, batch, length, source_length, cache)
    predicted = config.architecture != "recurrent"
    memory = training_memory(config, weights, setting) if predicted else None
    return Cost(
        name=name,
        config=config,
        setting=setting,
        device=place,
        parameters=Amount({f"{part.part} {part.kind}": part.number for part in weights}, "parameters"),
        flops_forward=_flops(flops, "forward"),
        flops_backward=_flops(flops, "backward"),
        flops_forward_seen=_flops(flops, "forward_seen"),
        flops_backward_seen=_flops(flops, "backward_seen"),
        attention_matrix=_matrix(config, setting),
        kv_cache=Amount({f"{one.kind} {one.layer}": one.bytes for one in layers}),
        cache_layers=tuple(layers),
        cache_numbers=cache,
        training=memory,
        variants=_variants(config, weights, setting) if predicted else (),
        floors=floors_of(config, place, setting, weights, flops, memory, layers),
        crossover=crossover(config, setting, flops),
        layer_kinds=tuple(layer_kinds(length, config.d_model, window=config.window)),
    )


def config_of(model: str | Path | ModelConfig, fields: dict[str, Any]) -> tuple[str, ModelConfig, TrainConfig]:
    """Name, config and recipe of what was given; only configs are read, never weights."""
    name, config, recipe = _given(model, fields)
    changed = "".join(f" {field}={value}" for field, value in fields.items())
    return name + changed, config, recipe


def _given(model: str | Path | ModelConfig, fields: dict[str, Any]) -> tuple[str, ModelConfig, TrainConfig]:
    if isinstance(model, ModelConfig):
        return "the given model", model.with_(**fields) if fields else model, TrainConfig()
    if str(model) in PRESETS and not Path(model).is_dir():
        return str(model), preset(str(model), **fields), TrainConfig()
    path = Path(model)
    if not path.exists():
        preset(str(model))  # says which names there are
    from ...hub import read_config
    from ...hub.directory import Directory
    from ...training.run_directory import RUN_FILE, RunDirectory

    if (path / RUN_FILE).is_file():
        run = RunDirectory.open(path).config
        return str(path), run.model.with_(**fields) if fields else run.model, run.train
    config = read_config(Directory(path, verify=False).config()).config
    return str(path), config.with_(**fields) if fields else config, TrainConfig()


def _length(config: ModelConfig) -> int:
    if config.architecture == "encoder" and config.source == "image":
        return n_patches(config)
    return (config.max_target_len if config.architecture == "encoder-decoder" else None) or config.max_len


def _check(config: ModelConfig, batch: int, length: int, source_length: int | None) -> None:
    """Refuse what the model itself would refuse."""
    for name, value in (("batch", batch), ("length", length), ("source_length", source_length)):
        if value is not None and value < 1:
            raise UsageError(f"{name}={value} must be at least 1")
    two = config.architecture in ("encoder-decoder", "recurrent")
    if source_length is not None and not two:
        raise UsageError(f"source_length={source_length} means nothing to architecture={config.architecture!r}")
    if source_length is not None and config.source == "image":
        places = n_patches(config)
        raise UsageError(
            f"source_length={source_length}: an image of image_size={config.image_size} has {places} patches"
        )
    if config.architecture == "recurrent":
        return
    ends = config.positions == "learned" or config.mixing.built_for_length
    why = "learned positions end" if config.positions == "learned" else f"mixer={config.mixer!r} is built for that"
    most = (config.max_target_len if two else None) or config.max_len
    given = [("length", length, most)] if config.architecture != "encoder" or config.source == "text" else []
    if source_length is not None and config.source == "text":
        given.append(("source_length", source_length, config.max_len))
    for name, value, limit in given:
        if ends and value > limit:
            field = "max_target_len" if limit == config.max_target_len and name == "length" else "max_len"
            raise UsageError(f"{name}={value} is longer than {field}={limit}, where {why}")


def _setting(
    config: ModelConfig, train: TrainConfig, device: Device, batch: int, length: int, source_length: int | None
) -> Setting:
    precision: Precision = "fp32" if device.name == "cpu" else "fp16" if device.half_type == "fp16" else "bf16"
    return Setting(
        batch,
        length,
        source_length,
        precision=precision if train.precision == "auto" else train.precision,
        attention="reference" if config.attention_backend == "reference" else "fused",
        checkpointing=train.checkpointing,
        optimiser=train.optimiser,
        ema=train.ema is not None,
        accumulate=train.accumulate,
        smoothing=train.label_smoothing,
        counted=0.15 if config.head == "masked-lm" else 1.0,
    )


def _flops(parts: list[Flops], field: str) -> Amount:
    found: dict[str, float] = {}
    for part in parts:
        name = f"{part.part} {part.kind}"
        found[name] = found.get(name, 0.0) + getattr(part, field)
    return Amount(found, "operations")


def _matrix(config: ModelConfig, setting: Setting) -> Amount:
    """B · H · T · S numbers a layer; what has no scores of pairs has no matrix."""
    found: dict[str, float] = {}
    for stack in stacks_of(config, setting.length, setting.source_length):
        rows = setting.width * setting.batch * stack.n_layers * stack.n_heads * stack.length
        if config.mixing.pairs:
            found[f"{stack.name} attention"] = float(rows * stack.length)
        if stack.memory is not None and (config.mixing.pairs or not config.mixing.cross):
            found[f"{stack.name} cross attention"] = float(rows * stack.memory)
    if config.architecture == "recurrent" and config.alignment != "none":
        source = setting.length if setting.source_length is None else setting.source_length
        found["decoder attention"] = float(setting.width * setting.batch * setting.length * source)
    return Amount(found)


def _variants(config: ModelConfig, weights: list[Weights], setting: Setting) -> tuple[Variant, ...]:
    found = []
    kinds: tuple[Attention, ...] = ("fused", "reference")
    for attention in kinds:
        for checkpointing in (False, True):
            chosen = replace(setting, attention=attention, checkpointing=checkpointing)
            memory = training_memory(config, weights, chosen)
            found.append(Variant(attention, checkpointing, memory.activations, memory.peak))
    return tuple(found)


def source_of(found: Cost) -> int | None:
    """Places of the source, where there is one beside the text."""
    if found.config.architecture == "encoder-decoder":
        return source_places(found.config, found.setting.length, found.setting.source_length)
    if found.config.architecture == "recurrent":
        setting = found.setting
        return setting.length if setting.source_length is None else setting.source_length
    return None
