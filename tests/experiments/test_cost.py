"""``regard.cost`` against what it predicts: torch's counter, the model's parameters, caches, a GPU's allocator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from measuring import LiveBytes, saved_bytes
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.attention.cache import CrossCache
from regard.config import ModelConfig, TrainConfig
from regard.config.mixers import keys_per_query
from regard.errors import UsageError
from regard.experiments.cost_devices import last_token_flops
from regard.experiments.cost_report import format_bytes, format_count, format_seconds
from regard.experiments.flops_estimate import ALL_PAIRS, SEEN, kv_cache, parameter_groups
from regard.experiments.memory_estimate import Setting, training_memory
from regard.models.build import build
from regard.models.model_flops import count, source_places
from regard.presets import PRESETS
from regard.training.loss import Batch, Objective

MEASURED = Path(__file__).resolve().parents[2] / "docs" / "results" / "memory.json"
TINY: dict[str, Any] = {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4, "d_ff": 64, "max_len": 64}


def inputs_of(config: ModelConfig, batch: int, length: int, source: int, device: str) -> tuple[torch.Tensor, ...]:
    def ids(n: int) -> torch.Tensor:
        return torch.ones(batch, n, dtype=torch.long, device=device)

    if config.has_encoder and config.source == "image":
        first = torch.ones(batch, config.n_channels, config.image_size, config.image_size, device=device)
    elif config.source == "regions":
        first = torch.ones(batch, source_places(config, length, None), config.d_region + config.d_box, device=device)
    else:
        first = ids(source if config.architecture in ("encoder-decoder", "recurrent") else length)
    return (first,) if config.architecture in ("encoder", "decoder") else (first, ids(length))


# ------------------------------------------------------------------------------------- operations


@pytest.mark.parametrize("name", PRESETS)
def test_operations_are_those_torch_counts_on_every_preset(name: str) -> None:
    """On meta nothing is computed, so the largest are as good as the smallest; LSTM and GRU are counted there too."""
    config = ModelConfig(**{**PRESETS[name], "attention_backend": "reference"})
    if config.n_layers > 3:
        config = config.with_(n_layers=3)  # layers are alike
    length, source = (12, 10) if config.architecture == "recurrent" else (24, 20)
    model = build(config, device="meta").eval()
    with FlopCounterMode(display=False) as forward:
        result = model(*inputs_of(config, 2, length, source, "meta"))
    with FlopCounterMode(display=False) as backward:
        result.float().sum().backward()
    found = count(config, 2, length, source if config.source == "text" else None)
    assert sum(part.forward for part in found) == pytest.approx(forward.get_total_flops(), rel=1e-9)
    # Not everything wants a gradient: the first state of a recurrent decoder, the query of a mean over a text.
    rel = 0.01 if config.architecture == "recurrent" else 1e-4
    assert sum(part.backward for part in found) == pytest.approx(backward.get_total_flops(), rel=rel)


def test_recurrent_operations_by_hand() -> None:
    """An LSTM layer: four gates of d units read d + d numbers, multiply and add, for every token."""
    config = ModelConfig(
        architecture="recurrent",
        cell="lstm",
        alignment="dot",
        d_model=8,
        n_layers=1,
        bidirectional=False,
        vocab_size=11,
    )
    parts = {(part.part, part.kind): part.forward for part in count(config, batch=3, length=5, source_length=7)}
    assert parts["encoder", "cells"] == 3 * 7 * 2 * 4 * 8 * (8 + 8)
    assert parts["decoder", "cells"] == 3 * 5 * 2 * 4 * 8 * (8 + 8 + 8)  # token, what was attended to, state
    assert parts["decoder", "attention"] == 3 * 5 * 7 * 2 * 8 * 2
    assert parts["bridge", "states"] == 3 * 2 * 2 * 8 * 8
    assert parts["decoder", "readout"] == 3 * 5 * 2 * 16 * 8
    assert parts["head", "logits"] == 3 * 5 * 2 * 8 * 11


def test_the_causal_half_is_a_column_of_its_own() -> None:
    found = regard.cost("gpt2", 1, 1024)
    full, seen = found.flops_forward["decoder attention"], found.flops_forward_seen["decoder attention"]
    assert full == 12 * 4 * 1024 * 1024 * 768
    assert seen == pytest.approx(full * 1025 / 2048)
    assert found.flops_forward["decoder projections"] == found.flops_forward_seen["decoder projections"]
    assert (
        regard.cost("bert-base", 1, 128).flops_forward.total
        == regard.cost("bert-base", 1, 128).flops_forward_seen.total
    )


@pytest.mark.parametrize("mixer", ["dot", "additive", "linformer", "fourier"])
def test_other_mixers_cost_what_torch_counts(mixer: str) -> None:
    size = {"mixer_size": 8} if mixer == "linformer" else {}
    positions = "learned"
    config = ModelConfig(
        **TINY, architecture="encoder", head="none", mixer=mixer, positions=positions, attention_backend="auto", **size
    )
    model = build(config.with_(attention_backend="reference") if mixer != "fourier" else config, device="meta").eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs_of(config, 2, 24, 24, "meta"))
    assert sum(part.forward for part in count(config, 2, 24)) == pytest.approx(counter.get_total_flops(), rel=0.01)


IMAGES: dict[str, Any] = {**TINY, "source": "image", "image_size": 16, "patch_size": 4, "positions": "learned"}
WRITER: dict[str, Any] = {**TINY, "architecture": "decoder", "norm_place": "pre", "d_model": 48}
READERS: dict[str, dict[str, Any]] = {
    "resampler": {"architecture": "encoder-decoder", "resampler_tokens": 3},
    "language model of another width": {"architecture": "encoder-decoder", "text_model": WRITER, "resampler_tokens": 3},
    "map": {"architecture": "encoder", "head": "classify", "n_classes": 5, "pooling": "map"},
    "clip": {
        "architecture": "two-tower",
        "head": "none",
        "d_shared": 12,
        "text_model": {**WRITER, "head": "none", "pooling": "end"},
    },
    "siglip": {"architecture": "two-tower", "head": "none", "pooling": "map", "contrast": "sigmoid"},
}
READERS["siglip"]["text_model"] = {**WRITER, "architecture": "encoder", "head": "none", "pooling": "last"}
READERS["siglip"]["text_model"]["d_model"] = TINY["d_model"]


@pytest.mark.parametrize("fields", READERS.values(), ids=READERS)
def test_what_reads_an_image_costs_what_torch_counts(fields: dict[str, Any]) -> None:
    config = ModelConfig(**IMAGES | fields, attention_backend="reference")
    if config.text_model is not None:
        config = config.with_(text_model=config.text_model.with_(attention_backend="reference"))
    model = build(config, device="meta").eval()
    with FlopCounterMode(display=False) as counter:
        model(*inputs_of(config, 2, 24, 24, "meta"))
    assert sum(part.forward for part in count(config, 2, 24)) == pytest.approx(counter.get_total_flops(), rel=1e-9)


@pytest.mark.parametrize("length", [24, 130])
@pytest.mark.parametrize("architecture", ["encoder", "decoder"])
@pytest.mark.parametrize(("mixer", "features"), [("linear", 8), ("performer", 12)])
def test_linear_mixers_cost_what_they_declare(mixer: str, features: int, architecture: str, length: int) -> None:
    """Declared: features are made, a state of features × D is added to and read, for each head and token.

    By convention not declared, but computed: the state's row of sums, and the scores inside a causal chunk.
    """
    size = {"mixer_size": features} if mixer == "performer" else {}
    fields = {**TINY, "max_len": 256, "architecture": architecture, "mixer": mixer, **size}
    config = ModelConfig(**fields, head="none" if architecture == "encoder" else "lm")
    n_heads, d_head, tokens = 4, 8, 2 * length
    making = 2 * 2 * d_head * features if mixer == "performer" else 0  # of q and of k
    declared = 2 * tokens * n_heads * (making + 2 * 2 * features * d_head)  # in two layers
    found = count(config, 2, length)
    assert sum(part.forward for part in found if part.kind == "attention") == declared
    model = build(config).eval()  # meta knows no autocast, which these turn off
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs_of(config, 2, length, length, "cpu"))
    chunk = min(64, length)
    padded = 2 * -(-length // chunk) * chunk  # a last chunk is filled up with zeros
    sums = 2 * n_heads * (2 * 2 * features * (d_head + 1)) * (padded if architecture == "decoder" else tokens)
    if architecture == "decoder":
        sums += 2 * padded * n_heads * 2 * chunk * (features + d_head + 1)
    others = sum(part.forward for part in found if part.kind != "attention")
    assert counter.get_total_flops() == others + 2 * tokens * n_heads * making + sums


@pytest.mark.parametrize("n_kv_heads", [4, 2])
@pytest.mark.parametrize("source", [24, 100, 5])
@pytest.mark.parametrize(("mixer", "features"), [("additive", 0), ("linear", 8), ("performer", 12)])
def test_cross_attention_makes_the_keys_of_each_source_token_once(
    mixer: str, features: int, source: int, n_kv_heads: int
) -> None:
    size = {"mixer_size": features} if mixer == "performer" else {}
    config = ModelConfig(**TINY | {"max_len": 128}, mixer=mixer, n_kv_heads=n_kv_heads, **size)
    model = build(config).eval()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*inputs_of(config, 2, 24, source, "cpu"))
    modules = counter.get_flop_counts().items()
    counted = sum(sum(by_operator.values()) for name, by_operator in modules if name.endswith(".cross_attention"))
    found = count(config, 2, 24, source)
    # By convention not declared, but computed: the state's row of sums, in two layers.
    sums = 2 * 2 * 2 * features * (24 * 4 + source * n_kv_heads)
    assert counted == sum(part.forward for part in found if part.kind.startswith("cross")) + sums


# ------------------------------------------------------------------------------------- parameters

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "llama-7b": 6_738_415_616,
    "mistral-7b": 7_241_732_096,
    "bert-base": 109_482_240,
    "t5-small": 60_506_624,
    "vit-base-16": 86_567_656,
}


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_are_exact_on_every_preset(name: str) -> None:
    config = ModelConfig(**PRESETS[name])
    parts = parameter_groups(config)
    assert sum(part.number for part in parts) == build(config, device="meta").n_parameters
    assert sum(part.number for part in parts) == PUBLISHED.get(name, sum(part.number for part in parts))
    assert all(part.number > 0 and 0 <= part.cast <= part.number and 0 <= part.muon <= part.number for part in parts)


# ------------------------------------------------------------------------------------- cache

HEADS = [("mha", {}), ("gqa", {"n_kv_heads": 2}), ("mqa", {"n_kv_heads": 1})]
WINDOWS = [("all", {}), ("ring", {"window": 8}), ("some layers", {"window": 8, "window_layers": (1,)})]


@pytest.mark.parametrize("numbers", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("window", [fields for _, fields in WINDOWS], ids=[name for name, _ in WINDOWS])
@pytest.mark.parametrize("heads", [fields for _, fields in HEADS], ids=[name for name, _ in HEADS])
def test_the_cache_is_as_large_as_the_cache_objects(
    heads: dict[str, Any], window: dict[str, Any], numbers: Any
) -> None:
    config = ModelConfig(**TINY, architecture="decoder", positions="rope", **heads, **window)
    cache = build(config).new_cache(3, 40, "model" if numbers == "fp32" else numbers)
    found = kv_cache(config, 3, 40, dtype=numbers)
    assert [one.bytes for one in found] == [layer.memory() for layer in cache.layers]
    if numbers == "bf16":  # a model that is bf16 itself keeps as much
        halved = build(config).bfloat16().new_cache(3, 40)
        assert [one.bytes for one in found] == [layer.memory() for layer in halved.layers]


def test_what_cross_attention_keeps_of_a_source() -> None:
    config = ModelConfig(**TINY, architecture="encoder-decoder", n_kv_heads=2)
    model = build(config).eval()
    cache = model.new_cache(2, 16)
    with torch.no_grad():
        memory = model.encode(torch.ones(2, 9, dtype=torch.long))
        model.decode(torch.ones(2, 1, dtype=torch.long), memory, cache=cache)
    held = [layer.memory() for layer in cache.cross if isinstance(layer, CrossCache)]
    found = kv_cache(config, 2, 16, 9, "fp32")
    assert [one.bytes for one in found if one.kind == "cross"] == held
    assert sum(one.bytes for one in found) == cache.memory()


def test_the_loss_of_a_captioner_takes_the_memory_of_its_language_models_loss() -> None:
    """Its output table is as wide as the language model, not as the encoder."""
    fields = {**IMAGES, "architecture": "encoder-decoder", "resampler_tokens": 3, "text_model": WRITER}
    captioner, alone = (ModelConfig(**x) for x in (fields, WRITER))
    losses = [training_memory(x, parameter_groups(x), Setting(2, 20)).by_part["loss"] for x in (captioner, alone)]
    assert losses[0] == losses[1]
    assert captioner.d_model != alone.d_model


@pytest.mark.parametrize("text", [None, {}, {"window": 8, "n_kv_heads": 2, "positions": "rope"}])
def test_the_cache_of_a_captioner_is_that_of_its_language_model(text: dict[str, Any] | None) -> None:
    """It keeps the keys of the resampler's vectors, not of the patches."""
    fields: dict[str, Any] = {"architecture": "encoder-decoder", "resampler_tokens": 3}
    fields |= {} if text is None else {"text_model": WRITER | {"n_layers": 3} | text}
    config = ModelConfig(**IMAGES | fields)
    model = build(config).eval()
    cache = model.new_cache(2, 20)
    with torch.no_grad():
        memory = model.encode(torch.ones(2, config.n_channels, 16, 16))
        model.decode(torch.ones(2, 1, dtype=torch.long), memory, cache=cache)
    assert sum(one.bytes for one in kv_cache(config, 2, 20, dtype="fp32")) == cache.memory()


@pytest.mark.parametrize("name", ["bahdanau-gru", "luong-lstm", "lstm-plain"])
def test_a_recurrent_state_has_one_size(name: str) -> None:
    config = ModelConfig(**{**PRESETS[name], "vocab_size": 50, "d_model": 16})
    model = build(config).eval()
    cache = model.new_cache(2, 8)
    with torch.no_grad():
        memory = model.encode(torch.ones(2, 7, dtype=torch.long))
        model.decode(torch.ones(2, 3, dtype=torch.long), memory, cache=cache)
    assert sum(one.bytes for one in kv_cache(config, 2, 8, 7, "fp32")) == cache.memory()


# ------------------------------------------------------------------------------------- memory

SHAPES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("gelu, pre-norm", {"architecture": "decoder", "norm_place": "pre", "activation": "gelu"}, {}),
    ("relu, post-norm", {"architecture": "decoder"}, {}),
    ("swiglu", {"architecture": "decoder", "norm_place": "pre", "activation": "swiglu"}, {}),
    ("rope", {"architecture": "decoder", "positions": "rope", "norm_place": "pre"}, {}),
    ("reference", {"architecture": "decoder", "attention_backend": "reference"}, {"attention": "reference"}),
    ("pairs", {"architecture": "encoder-decoder"}, {"source_length": 48}),
    ("window", {"architecture": "decoder", "window": 8, "norm_place": "pre"}, {}),
]


@pytest.mark.parametrize(("changes", "how"), [shape[1:] for shape in SHAPES], ids=[shape[0] for shape in SHAPES])
def test_what_autograd_keeps(changes: dict[str, Any], how: dict[str, Any]) -> None:
    """Layer norm, activations, products and torch's attention keep the same on a CPU in fp32 as on a GPU."""
    config = ModelConfig(**{**TINY, "d_model": 64, "d_ff": 256, "vocab_size": 64, **changes})
    setting = Setting(4, 64, precision="fp32", workspace=0, **how)
    model = build(config).train()
    source = torch.ones(4, setting.source_length or 64, dtype=torch.long)
    text = torch.ones(4, 64, dtype=torch.long)
    two = config.architecture == "encoder-decoder"
    options = {"source_padding_mask": torch.ones_like(source, dtype=torch.bool)} if two else {}
    batch = Batch((source, text) if two else (text,), text, options, n_counted=256)
    objective = Objective(model)
    known = [*model.parameters(), *model.buffers(), source, text, *options.values()]
    found, tensors = saved_bytes(lambda: objective(batch), known)
    expected = sum(training_memory(config, parameter_groups(config), setting).by_part.values())
    assert expected == pytest.approx(found, rel=0.03), sorted(tensors, key=lambda x: -x[2])[:12]


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_of_a_pass(checkpointing: bool) -> None:
    """All of a forward and backward pass followed tensor by tensor on a CPU: what a GPU's allocator would have said."""
    config = ModelConfig(
        **{**TINY, "vocab_size": 64, "d_model": 64, "d_ff": 256, "n_layers": 6},
        **{"architecture": "decoder", "norm_place": "pre", "activation": "gelu"},
    )
    model = build(config).train()
    model.use_checkpointing(checkpointing)
    text = torch.ones(16, 64, dtype=torch.long)
    batch, objective = Batch((text,), text, n_counted=1024), Objective(model)
    live = LiveBytes([*model.parameters(), text])
    with live:
        objective(batch).backward()
    setting = Setting(16, 64, precision="fp32", workspace=0, checkpointing=checkpointing)
    found = training_memory(config, parameter_groups(config), setting)
    assert found.peak - found.optimiser - found.inputs / 2 == pytest.approx(live.peak, rel=0.06)


def test_living_bytes_are_counted() -> None:
    live = LiveBytes()
    with live:
        a = torch.zeros(1000)
        b = a.view(10, 100) + 1  # a view is no new memory
        assert live.now == 8000
        del a
        assert live.now == 4000
        del b
    assert (live.now, live.peak) == (0, 8000)


def _rows() -> list[dict[str, Any]]:
    return [row for row in json.loads(MEASURED.read_text(encoding="utf-8"))["rows"] if "measured" in row]


def test_peak_memory_is_within_a_tenth_of_what_a_gpu_measured() -> None:
    """docs/results/memory.json holds what benchmarks/memory_gpu.py measured; predictions are made anew."""
    rows = _rows()
    assert len(rows) >= 12
    ratios = {}
    for row in rows:
        config = ModelConfig(**row["model"])
        found = training_memory(config, parameter_groups(config), Setting(**row["setting"]))
        ratios[row["name"]] = found.peak / row["measured"]["peak"]
        assert found.peak == pytest.approx(row["predicted"], rel=1e-3), f"docs/cost.md says otherwise of {row['name']}"
    assert all(0.9 < ratio < 1.1 for ratio in ratios.values()), ratios
    settings = [row["setting"] for row in rows]
    assert {True, False} == {setting["checkpointing"] for setting in settings}
    assert {"fp32", "bf16"} <= {setting["precision"] for setting in settings}
    assert {"fused", "reference"} == {setting["attention"] for setting in settings}
    assert {"decoder", "encoder"} <= {row["model"].get("architecture") for row in rows}


def test_checkpointing_and_fused_attention_save_memory() -> None:
    peaks = {(one.attention, one.checkpointing): one for one in regard.cost("gpt2", 8, 1024).variants}
    assert peaks["fused", True].activations < peaks["fused", False].activations < peaks["reference", False].activations
    assert peaks["fused", True].peak < peaks["fused", False].peak < peaks["reference", False].peak
    muon = regard.cost("gpt2", 1, 64, train=TrainConfig(optimiser="muon")).training
    adam = regard.cost("gpt2", 1, 64, train=TrainConfig(optimiser="adam", ema=0.99, accumulate=4)).training
    assert muon is not None
    assert adam is not None
    assert adam.optimiser == 8 * 124_439_808
    assert adam.ema == 4 * 124_439_808
    assert adam.optimiser > muon.optimiser > adam.optimiser / 2


def test_bf16_on_a_gpu_has_working_weights_beside_fp32_ones_and_a_bf16_stream() -> None:
    """One GPU trains with ``training.working_weights``; fp16 and a CPU have autocast, which copies weights."""
    n = 124_439_808
    half, fp16 = (regard.cost("gpt2", 16, 1024, train=TrainConfig(precision=x)) for x in ("bf16", "fp16"))
    assert half.training is not None
    assert fp16.training is not None
    assert (half.setting.working, fp16.setting.working) == (True, False)
    assert (half.training.weights, fp16.training.weights) == (6 * n, 4 * n)
    assert half.training.copies == 0 < fp16.training.copies
    assert half.training.activations < 0.85 * fp16.training.activations
    assert half.training.peak < fp16.training.peak
    assert half.training.gradients == 4 * n
    assert "weights, fp32 and bf16" in half.to_text()
    alone = regard.cost("gpt2", 1, 8, train=TrainConfig(precision="bf16")).training  # hardly any activations
    assert alone is not None
    assert alone.peak_backward == pytest.approx((6 + 8 + 6) * n, rel=0.2), "gradients twice, for a moment"
    assert not regard.cost("gpt2", 1, 8, train=TrainConfig(precision="bf16"), device="cpu").setting.working


# ------------------------------------------------------------------------------------- the rest


def test_amounts_have_parts_that_add_up() -> None:
    found = regard.cost("transformer-base", 4, 32, source_length=48)
    for amount in (found.parameters, found.flops_forward, found.flops_backward, found.activations, found.kv_cache):
        assert float(amount) == pytest.approx(sum(amount.parts.values()))
        assert all(value >= 0 for value in amount.parts.values())
    assert int(found.parameters) == 63_082_496
    assert found.attention_matrix["decoder cross attention"] == 2 * 4 * 6 * 8 * 32 * 48
    assert found.crossover["T²·d = T·d²"] == 512


def test_floors_are_the_longer_of_computing_and_moving() -> None:
    found = regard.cost("gpt2", 1, 1024, device="a100")
    step, token = found.floors["training step"], found.floors["one token of each text"]
    assert step.seconds == max(step.compute, step.bandwidth)
    assert token.bound == "memory bandwidth"
    cache = 12 * 2 * 1024 * 768 * 2  # bytes of keys and values; the place for padding is not read, nor are positions
    assert token.bandwidth == pytest.approx((2 * 123_653_376 + cache) / 2.039e12)
    assert step.compute == pytest.approx(3 * found.flops_forward_seen.total / 312e12)
    twice = regard.cost("gpt2", 1, 1024, device="a100", train=TrainConfig(accumulate=2)).floors["training step"]
    assert twice.compute == pytest.approx(2 * step.compute)
    assert step.bandwidth < twice.bandwidth < 2 * step.bandwidth  # the optimiser's own is moved once
    once = regard.cost("llama-7b", 1, 1).floors["forward pass"]
    assert once.bandwidth == pytest.approx(2 * (6_738_415_616 - 32_000 * 4096) / 4.8e12)  # a table is looked up


def test_floors_are_at_the_makers_figures() -> None:
    """What one program reached on an H200 stands beside them: another could be faster."""
    found = regard.cost("gpt2", 8, 1024)
    step = found.floors["training step"]
    assert step.compute == pytest.approx(3 * found.flops_forward_seen.total / 989.4e12)
    assert found.floors["forward pass"].measured == pytest.approx(found.flops_forward_seen.total / 804e12)
    assert all(floor.measured is not None and floor.measured > floor.seconds for floor in found.floors.values())
    assert "989.4 TFLOP/s in bf16, 494.7 TFLOP/s in TF32, 4.8 TB/s: the maker's figures" in found.to_text()
    assert "as measured: the same at 804 TFLOP/s, 4.27 TB/s" in found.to_text()
    single = regard.cost("gpt2", 8, 1024, train=TrainConfig(precision="fp32"))
    assert single.floors["training step"].compute == pytest.approx(2 * step.compute)  # TF32
    assert single.floors["training step"].measured is None
    assert "as measured" not in single.to_text()
    old = regard.cost("gpt2", device="v100")
    assert old.setting.precision == "fp16"
    assert "125 TFLOP/s in fp16, 15.7 TFLOP/s in fp32, 900 GB/s" in old.to_text()


def test_a_cpu_is_measured_and_promises_no_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    found = regard.cost("transformer-tiny", 1, 8, device="cpu")
    assert found.device.memory is not None
    assert found.device.memory > 1e8
    assert "time at measured speed, on cpu" in found.to_text()
    assert "at least" not in found.to_text()
    monkeypatch.delattr("os.sysconf")  # Windows has none
    found = regard.cost("transformer-tiny", 1, 8, device="cpu")
    assert found.device.memory is None
    assert "of the device's" not in found.to_text()


@pytest.mark.parametrize(
    "changes",
    [
        {"architecture": "decoder"},
        {"architecture": "decoder", "positions": "rope", "n_kv_heads": 2},
        {"architecture": "encoder-decoder"},
        {"architecture": "recurrent", "cell": "lstm", "alignment": "dot"},
        {"architecture": "recurrent", "cell": "gru", "alignment": "additive"},
    ],
)
def test_the_last_token_costs_what_torch_counts(changes: dict[str, Any]) -> None:
    """Decoding it after the others are in the cache."""
    fields = TINY if changes["architecture"] != "recurrent" else {"vocab_size": 97, "d_model": 32, "n_layers": 2}
    config = ModelConfig(**fields, **changes, attention_backend="reference")
    model = build(config).eval()
    text, cache = torch.ones(2, 12, dtype=torch.long), model.new_cache()
    with torch.no_grad():
        memory = () if config.architecture == "decoder" else (model.encode(torch.ones(2, 7, dtype=torch.long)),)
        decode = model if config.architecture == "decoder" else model.decode
        decode(text[:, :11], *memory, cache=cache)
        with FlopCounterMode(display=False) as counter:
            found = decode(text[:, 11:], *memory, cache=cache)
            if memory:
                model.head(found, model.output_table)
    source = None if config.architecture == "decoder" else 7
    assert last_token_flops(config, Setting(2, 12, source)) == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_the_last_token_meets_its_window() -> None:
    """Mistral at twice its window: 4,096 keys in each of 32 layers, not 8,192."""
    found = regard.cost("mistral-7b", 1, 8192)
    matrices = sum(found.flops_forward[part] for part in ("decoder projections", "decoder feed-forward", "head"))
    expected = matrices / 8192 + 32 * 4 * 4096 * 4096
    token = found.floors["one token of each text"]
    assert token.compute == pytest.approx(expected / 989.4e12)
    strided = regard.cost("gpt2", 1, 1000, sparsity="strided", sparsity_size=64)
    places = 64 + 999 // 64  # the last 64, and one in 64 before them
    assert last_token_flops(strided.config, strided.setting) == pytest.approx(
        strided.flops_forward["decoder feed-forward"] * 1.5 / 1000 + 2 * 768 * 50_257 + 12 * 4 * 768 * places
    )
    assert strided.floors["one token of each text"].bandwidth == pytest.approx(
        2 * (123_653_376 + 12 * 2 * 768 * places) / 4.8e12
    )


@pytest.mark.parametrize(
    ("name", "fields", "all_pairs", "seen"),
    [
        ("gpt2", {}, 4608, 9215),  # (T + 1) / 2 keys on average
        ("gpt2", {"window": 6000}, 4608, 12_929),
        ("gpt2", {"window": 4608}, 4608, None),
        ("gpt2", {"window": 64, "window_layers": (0, 1)}, 4608, 11_033),
        ("bert-base", {}, 4608, 4608),
        ("bert-base", {"window": 64}, 4608, None),
        ("bert-base", {"window": 3000}, 4608, 6469),
        ("bert-base", {"sparsity": "strided"}, 4608, 286_849),
        ("swin-tiny", {}, 640, None),
        ("gpt2", {"sparsity": "bigbird", "sparsity_random": 0.0}, 4608, None),
        ("gpt2", {"mixer": "linear"}, None, None),
    ],
)
def test_where_attention_passes_the_matrices(
    name: str, fields: dict[str, Any], all_pairs: int | None, seen: int | None
) -> None:
    """By the definition, too: at that length attention takes as much as the matrices, a token before it does not."""
    found = regard.cost(name, 1, **fields)
    assert (found.crossover[ALL_PAIRS], found.crossover[SEEN]) == (all_pairs, seen)

    def share(length: int) -> float:
        parts = {part.kind: part.forward_seen for part in count(found.config, 1, length)}
        return parts["attention"] / (parts["projections"] + parts["feed-forward"])

    if seen is not None:
        assert share(seen) >= 1 > share(seen - 1)
    elif all_pairs is not None and not found.config.shifted_windows:
        assert share(1 << 14) < 1


def test_where_a_random_pattern_passes_the_matrices() -> None:
    """Past 32 blocks the pairs are a parabola of the blocks: as if each of them had been counted."""
    found = regard.cost("gpt2", 1, sparsity="bigbird", sparsity_random=40.0)
    length = int(found.crossover[SEEN] or 0)
    near = round(length / 64) * 64
    assert keys_per_query(found.config, 0, near, causal=True) == pytest.approx(4608, rel=0.005)
    assert near > 32 * 64


@pytest.mark.parametrize(
    ("given", "options", "complaint"),
    [
        ("gpt2", {"length": 2048}, "length=2048 is longer than max_len=1024, where learned positions end"),
        ("gpt3", {}, "there is no preset 'gpt3'; did you mean 'gpt2'?"),
        ("gpt2", {"device": "h20"}, "there is no device 'h20'; did you mean h200?"),
        ("gpt2", {"cache": "int4"}, "cache='int4' is not one of fp32, bf16, int8"),
        ("gpt2", {"batch": 0}, "batch=0 must be at least 1"),
        ("gpt2", {"source_length": 4}, "source_length=4 means nothing to architecture='decoder'"),
        ("captioner", {"source_length": 4}, "source_length=4: an image of image_size=112 has 49 patches"),
    ],
)
def test_what_cannot_be_meant_is_one_sentence(given: str, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises((UsageError, ValueError)) as error:
        regard.cost(given, **options)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_a_preset_its_config_and_a_built_model_cost_the_same() -> None:
    config = ModelConfig(**{**PRESETS["transformer-tiny"]})
    built = build(config, device="meta")
    by_name = regard.cost("transformer-tiny", 2, 16)
    for given in (config, built):
        assert {**regard.cost(given, 2, 16).to_dict(), "name": by_name.name} == by_name.to_dict()
    recurrent = build("lstm-plain", vocab_size=50, d_model=16)
    assert int(regard.cost(recurrent, 1, 8).parameters) == recurrent.n_parameters
    assert regard.cost(built, 2, 16, d_ff=32).parameters.total < by_name.parameters.total


def test_a_run_and_a_model_directory_have_costs(tmp_path: Path) -> None:
    config = ModelConfig(**TINY, architecture="decoder", positions="rope")
    build(config).save(tmp_path / "model")
    found = regard.cost(tmp_path / "model", 2, 32)
    assert int(found.parameters) == build(config, device="meta").n_parameters
    wider = regard.cost(str(tmp_path / "model"), 2, 32, d_ff=128)
    assert wider.parameters.total > found.parameters.total
    assert wider.name.endswith("d_ff=128")


# ------------------------------------------------------------------------------------- the command


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    from regard.cli import main

    code = main(["cost", *words])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "transformer-tiny", "--batch", "4", "--length", "32")
    assert code == 0
    for wanted in ("1,949,696", "operations of a batch", "KV cache", "T²·d = T·d²", "recurrent"):
        assert wanted in out
    assert "training step" not in out
    words = ("train.optimiser=muon", "train.checkpointing=true", "model.n_layers=3")
    code, out, _ = run(capsys, "transformer-tiny", *words, "--batch", "4", "--length", "32", "--training")
    assert code == 0
    assert "muon, fused attention, checkpointed" in out


def test_json_is_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "sentiment", "--batch", "4", "--length", "32", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["parameters"]["total"] == 7_256_323
    assert document["training"]["peak"] > document["training"]["weights"]
    code, out, _ = run(capsys, "luong-lstm", "--length", "8", "--compare", "bahdanau-gru", "--json")
    assert code == 0
    assert set(json.loads(out)) == {"first", "second"}
    assert json.loads(out)["first"]["training"] is None


def test_two_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "sentiment", "model.n_layers=8", "--length", "64", "--compare", "sentiment", "--training"
    )
    assert code == 0
    assert "sentiment n_layers=8" in out
    ratio = next(line for line in out.splitlines() if line.startswith("attention matrices")).split()[-2]
    assert ratio == "0.50"


@pytest.mark.parametrize(("name", "suffix"), [("transformer-tiny", "png"), ("vit-tiny", "svg")])
def test_a_picture_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, suffix: str) -> None:
    file = tmp_path / f"cost.{suffix}"
    assert run(capsys, name, "--batch", "2", "--plot", str(file))[0] == 0
    assert file.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("gpt2", "--plot", "cost.txt"), "--plot cost.txt is not one of .png, .svg, .pdf"),
        (("gpt2", "--plot", "nowhere/cost.png"), "there is no directory nowhere"),
        (("gpt2", "model.n_head=4"), "there is no model.n_head; did you mean model.n_heads?"),
        (("gpt2", "data.source=x"), "only model.* and train.* can be given here"),
        (("gpt2", "model=bert-base"), "name the model first"),
        (("gpt2", "--batch", "0"), "regard: --batch 0 must be at least 1"),
        (("gpt2", "--cache", "fp8"), "regard: --cache 'fp8' is not one of fp32, bf16, int8"),
    ],
)
def test_bad_words_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], complaint: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert complaint in err
    assert len(err.strip().splitlines()) == 1


def test_numbers_that_round_up_take_the_next_unit() -> None:
    assert [format_count(n) for n in (999.4e6, 999.94e6, 999.96e6, 1e9)] == ["999.4 M", "999.9 M", "1 G", "1 G"]
    sizes = [1023, 1023.994 * 1024, 1023.996 * 1024, 2**20]
    assert [format_bytes(n) for n in sizes] == ["1023 B", "1023.99 KiB", "1.00 MiB", "1.00 MiB"]
    seconds = [0.9994, 0.9996, 1.0, 999.4, 12_345.0]
    assert [format_seconds(x) for x in seconds] == ["999 ms", "1 s", "1 s", "999 s", "12,345 s"]
