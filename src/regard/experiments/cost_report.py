"""A cost as text tables, a JSON document and a figure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from ..config import ModelConfig
from ..errors import UsageError
from ..foundation.plotting import INK, SOFT, new_figure, style_panel
from ..models.model_flops import count, stacks_of
from .benchmarking import format_table
from .cost_devices import Device, Floor, source_tokens
from .flops_estimate import ALL_PAIRS, EXPERTS, CacheDtype, CacheLayer, LayerKind, kv_cache
from .memory_estimate import Setting, TrainingMemory


@dataclass(frozen=True)
class Amount:
    """A quantity and its parts: ``float(amount)`` is the total, ``amount["decoder"]`` that of the decoder's parts."""

    parts: Mapping[str, float]
    unit: str = "bytes"

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __float__(self) -> float:
        return float(self.total)

    def __int__(self) -> int:
        return int(self.total)

    def __getitem__(self, name: str) -> float:
        """The sum of the parts called ``name`` or beginning with it."""
        values = [value for part, value in self.parts.items() if part == name or part.startswith(f"{name} ")]
        if not values:
            raise KeyError(name)
        return sum(values)

    def to_dict(self) -> dict[str, object]:
        return {"total": self.total, "unit": self.unit, "parts": dict(self.parts)}


@dataclass(frozen=True)
class TrainingVariant:
    """Training memory under one choice of attention and checkpointing."""

    attention: str
    checkpointing: bool
    activations: float
    peak: float


@dataclass(frozen=True)
class Cost:
    """The result of ``cost``. Amounts have a total and parts; memory is in bytes, times are in seconds."""

    name: str
    config: ModelConfig
    setting: Setting
    device: Device
    parameters: Amount
    flops_forward: Amount  # every query against every key, as torch's counter counts the plain formula
    flops_backward: Amount
    flops_forward_seen: Amount  # without the pairs that a mask hides; about half of causal attention
    flops_backward_seen: Amount
    flops_all_experts: float  # forward, if every token went through every expert; equals flops_forward without experts
    attention_matrix: Amount  # all attention weights, if they were stored, in the precision of the matrix products
    kv_cache: Amount
    cache_layers: tuple[CacheLayer, ...]
    cache_numbers: CacheDtype
    training: TrainingMemory | None  # None for recurrent models
    variants: tuple[TrainingVariant, ...]
    floors: dict[str, Floor]  # for a forward pass, a training step, and decoding the last token of each text
    crossover: dict[str, float | None]  # lengths from which attention takes more operations than matrices; None: never
    layer_kinds: tuple[LayerKind, ...]

    @property
    def active_parameters(self) -> float:
        """The parameters that one token uses: all except those of experts it is not routed to."""
        experts = sum(n for part, n in self.parameters.parts.items() if part.endswith(f" {EXPERTS}"))
        share = 1.0 if self.config.experts is None else self.config.experts_per_token / self.config.experts
        return self.parameters.total - experts * (1 - share)

    @property
    def activations(self) -> Amount:
        """The bytes that autograd saves in a forward pass, by part."""
        if self.training is None:
            raise ValueError("architecture='recurrent': training memory is predicted for Transformers only")
        copies = {"copies of weights": self.training.copies} if self.training.copies else {}
        return Amount({**self.training.by_part, **({} if self.setting.checkpointing else copies)})

    def to_dict(self) -> dict[str, Any]:
        """All figures, as JSON-compatible values."""
        from ..hub import changed_fields

        flops = ("flops_forward", "flops_backward", "flops_forward_seen", "flops_backward_seen")
        layers, memory, training = [asdict(layer) for layer in self.cache_layers], self.training, None
        if memory is not None:
            training = {**asdict(memory), "peak": memory.peak, "where": memory.where}
        floors = {name: {**asdict(x), "seconds": x.seconds, "bound": x.bound} for name, x in self.floors.items()}
        return {
            "name": self.name,
            "config": changed_fields(self.config),
            "setting": asdict(self.setting),
            "device": asdict(self.device),
            **{name: getattr(self, name).to_dict() for name in ("parameters", *flops, "attention_matrix")},
            "active_parameters": self.active_parameters,
            "flops_all_experts": self.flops_all_experts,
            "kv_cache": {**self.kv_cache.to_dict(), "numbers": self.cache_numbers, "layers": layers},
            "activations": None if memory is None else self.activations.to_dict(),
            "training": training,
            "variants": [asdict(variant) for variant in self.variants],
            "floors": floors,
            "crossover": self.crossover,
            "layer_kinds": [asdict(kind) for kind in self.layer_kinds],
        }

    def to_text(self, training: bool = True) -> str:
        """All tables, one after the other."""
        lengths = [[f"  {name}", "never" if n is None else f"{n:,.0f}", ""] for name, n in self.crossover.items()]
        crossover = format_table([["where attention passes the matrices", "length", ""], *lengths])
        blocks = [headline(self), _parameter_table(self), _flops_table(self), _inference_table(self)]
        blocks += [_training_table(self)] if training else []
        return "\n\n".join([*blocks, _time_table(self, training), crossover, _layer_kind_table(self)])

    def draw(self, file: str | Path) -> Path:
        """Draw operations, their growth with length, training memory and cache; ``file`` is a PNG, SVG or PDF."""
        file = Path(file)
        check_plot(file)
        figure = new_figure(14, 9.4, dpi=130)
        panels = figure.subplots(2, 2).flat
        figure.subplots_adjust(left=0.13, right=0.97, top=0.87, bottom=0.07, wspace=0.34, hspace=0.42)
        for panel, draw in zip(panels, (_draw_operations, _draw_growth, _draw_memory, _draw_cache), strict=True):
            draw(panel, self)
        figure.text(0.03, 0.95, f"What {self.name} costs", fontsize=17, weight="bold", color=INK)
        figure.text(0.03, 0.918, headline(self).partition(": ")[2], fontsize=11, color=SOFT)
        figure.savefig(file, facecolor="white")
        return file


def format_bytes(n: float) -> str:
    """1536 → 1.50 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1023.995:  # 1024.00 with two decimals
            return f"{n:.0f} B" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1024
    return f"{n:.2f} TiB"


def format_count(n: float) -> str:
    """124439808 → 124.4 M."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= 0.99995 * size:  # 1000 with four digits
            return f"{n / size:.4g} {unit}"
    return f"{n:.4g}"


def format_seconds(seconds: float) -> str:
    if seconds >= 999.5:
        return f"{seconds:,.0f} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size:  # 1000 with three digits, which ``g`` writes as 1e+03
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


# ------------------------------------------------------------------------------------- text


def headline(cost: Cost) -> str:
    setting, source = cost.setting, source_tokens(cost.config, cost.setting)
    source_text = "" if source is None else f", source of {source}"
    return (
        f"{cost.name}: {cost.config.architecture}, {format_count(cost.parameters.total)} parameters; "
        f"batch {setting.batch}, length {setting.length}{source_text}, {setting.precision}"
    )


def _parameter_table(cost: Cost) -> str:
    total = cost.parameters.total
    parts = [[f"  {part}", f"{n:,.0f}", f"{100 * n / total:.1f} %"] for part, n in cost.parameters.parts.items() if n]
    if cost.config.experts is not None:
        active = cost.active_parameters
        which = f"  active: {cost.config.experts_per_token} of {cost.config.experts} experts per token"
        parts.append([which, f"{active:,.0f}", f"{100 * active / total:.1f} %"])
    return format_table([["parameters", "number", "share"], *parts, ["  all", f"{total:,.0f}", ""]])


def _flops_table(cost: Cost) -> str:
    columns = (cost.flops_forward, cost.flops_backward, cost.flops_forward_seen, cost.flops_backward_seen)
    rows = [["operations of a batch", "forward", "backward", "forward, seen", "backward, seen"]]
    for part in cost.flops_forward.parts:
        rows.append([f"  {part}", *(format_count(column.parts[part]) for column in columns)])
    rows.append(["  all", *(format_count(column.total) for column in columns)])
    if cost.config.experts is not None:
        rows.append(["  all, if every expert were used", format_count(cost.flops_all_experts), "", "", ""])
    return f"{format_table(rows)}\n  seen: pairs of tokens that a mask hides are not counted"


def _inference_table(cost: Cost) -> str:
    setting, matrices = cost.setting, format_bytes(cost.attention_matrix.total)
    rows = [
        ["memory without training", "", ""],
        ["  weights", format_bytes(setting.width * cost.parameters.total), setting.precision],
        ["  attention matrices, if they were stored", matrices, "all layers"],
    ]
    if cost.cache_layers:
        rows.append(["  KV cache", format_bytes(cost.kv_cache.total), cost.cache_numbers])
    equal_layers: dict[tuple[str, int, int], list[int]] = {}  # layers with equal caches share a line
    for layer in cost.cache_layers:
        equal_layers.setdefault((layer.kind, layer.tokens, layer.bytes), []).append(layer.layer)
    for (kind, tokens, size), layers in equal_layers.items():
        first, last = layers[0] + 1, layers[-1] + 1  # people count from 1
        which = f"layer {first}" if len(layers) == 1 else f"{len(layers)} layers ({first} to {last})"
        scope = {"all": "every token", "window": "a window", "cross": "the source"}.get(kind, kind)
        total, each = format_bytes(size * len(layers)), format_bytes(size)
        rows.append([f"    {which}, {scope}: {tokens}", total, f"{each} each"])
    return format_table(rows)


def _training_table(cost: Cost) -> str:
    memory, setting = cost.training, cost.setting
    if memory is None:
        return "training memory is predicted for Transformers only"
    how = f"{setting.optimiser}, {setting.attention} attention" + (", checkpointed" if setting.checkpointing else "")
    rows = [
        [f"memory of a training step ({how})", "bytes", ""],
        ["  weights, fp32 and bf16" if setting.working else "  weights, fp32", format_bytes(memory.weights), ""],
        ["  gradients", format_bytes(memory.gradients), ""],
        ["  optimiser's state", format_bytes(memory.optimiser), setting.optimiser],
        *([["  moving average", format_bytes(memory.ema), ""]] if memory.ema else []),
        ["  activations", format_bytes(memory.activations), "kept for the backward pass"],
        *([f"    {part}", format_bytes(size), ""] for part, size in cost.activations.parts.items() if size),
        ["  peak", format_bytes(memory.peak), f"in {memory.where}"],
    ]
    if (available := cost.device.memory) is not None:
        share = memory.peak / available
        fits = f"{100 * share:.1f} %" if share <= 1 else f"does not fit: {share:.1f} times too much"
        rows.append(["  of the device's", format_bytes(available), fits])
    variants = [["attention, checkpointing", "activations", "peak"]]
    for x in cost.variants:
        name = f"  {x.attention}, {'each layer' if x.checkpointing else 'none'}"
        variants.append([name, format_bytes(x.activations), format_bytes(x.peak)])
    return format_table(rows) + "\n\n" + format_table(variants)


def _time_table(cost: Cost, training: bool) -> str:
    device = cost.device
    floors = {name: floor for name, floor in cost.floors.items() if training or name != "training step"}
    measured = any(floor.measured is not None for floor in cost.floors.values())
    columns = ["compute", "bandwidth", "at least" if device.ceiling else "longer", *["as measured"] * measured]
    rows = [[f"time {device.wording}, on {device.name}", *columns, "bound by"]]
    for name, floor in floors.items():
        times = (floor.compute, floor.bandwidth, floor.seconds, floor.measured or 0.0)
        rows.append([f"  {name}", *map(format_seconds, times[: len(columns)]), floor.bound])
    speeds = (
        f"  {format_count(device.half)}FLOP/s in {device.half_type}, {format_count(device.single)}FLOP/s in "
        f"{device.single_type}, {format_count(device.bandwidth)}B/s: {device.source}"
    )
    if measured and (reached := device.reached) is not None:
        best = f"{format_count(reached.half)}FLOP/s, {format_count(reached.bandwidth)}B/s"
        speeds += f"\n  as measured: the same at {best}, reached by {reached.how}; not a lower bound"
    return format_table(rows) + "\n" + speeds


def _layer_kind_table(cost: Cost) -> str:
    length = cost.setting.length
    rows = [[f"one layer, T = {length}, d = {cost.config.d_model}", "operations", "", "steps", "path"]]
    for kind in cost.layer_kinds:
        path = f"{kind.path_text} = {kind.path:,.0f}"
        rows.append([f"  {kind.name}", kind.complexity, format_count(kind.flops), f"{kind.sequential:,.0f}", path])
    window = min(cost.config.window or max(1, length // 8), length)
    note = f"steps: one after another; path: between the two tokens farthest apart (k = 3, r = {window})"
    return f"{format_table(rows)}\n  {note}"


@dataclass(frozen=True)
class CostComparison:
    """Two costs side by side."""

    first: Cost
    second: Cost

    def to_dict(self) -> dict[str, Any]:
        return {"first": self.first.to_dict(), "second": self.second.to_dict()}

    def to_text(self, training: bool = True) -> str:
        first, second = self.first, self.second
        lines: list[tuple[str, Callable[[float], str], str]] = [
            ("parameters", format_count, "parameters.total"),
            ("operations, forward", format_count, "flops_forward.total"),
            ("operations, forward, seen", format_count, "flops_forward_seen.total"),
            ("operations, backward", format_count, "flops_backward.total"),
            ("attention matrices, if stored", format_bytes, "attention_matrix.total"),
            (f"KV cache, {first.cache_numbers}", format_bytes, "kv_cache.total"),
        ]
        if training and first.training is not None and second.training is not None:
            names = ("weights", "optimiser", "gradients", "activations", "peak")
            lines += [(f"training: {name}", format_bytes, f"training.{name}") for name in names]
        values = [(name, text_of, *map(attrgetter(path), (first, second))) for name, text_of, path in lines]
        for name, floor in first.floors.items():
            if name in second.floors and (training or name != "training step"):
                both = floor.seconds, second.floors[name].seconds
                values.append((f"{name}, {first.device.wording}", format_seconds, *both))
        rows = [[name, text_of(a), text_of(b), f"{b / a:.2f} ×" if a else ""] for name, text_of, a, b in values]
        table = format_table([["", first.name, second.name, "ratio"], *rows])
        return "\n".join([headline(first), headline(second), "", table])


# ------------------------------------------------------------------------------------- figure

# Okabe and Ito's palette, distinguishable with any kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A7A7A", "#F0E442", "#000000")
SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """Raise UsageError for a file that cannot be drawn, before any work is done."""
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {file} is not one of {', '.join(SUFFIXES)}")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"--plot {file} cannot be written: there is no directory {file.parent}")


def _style(panel: Any, title: str, grid: str) -> None:
    panel.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    style_panel(panel, grid)


def _write_instead(panel: Any, text: str) -> None:
    panel.text(0.5, 0.5, text, ha="center", color=SOFT, transform=panel.transAxes)
    panel.set_axis_off()


def _style_lengths(panel: Any, length: int, xlabel: str) -> None:
    """Style an axis of lengths, with a line at the setting's length."""
    panel.axvline(length, color="#999999", linewidth=1, linestyle=":")
    panel.set_xlabel(xlabel, fontsize=10, color=INK)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _legend(panel: Any, **options: Any) -> None:
    panel.legend(frameon=False, fontsize=9, labelcolor=SOFT, **options)


def _draw_operations(panel: Any, cost: Cost) -> None:
    """Forward operations by part; those hidden by a mask are paler."""
    parts = [part for part, value in cost.flops_forward.parts.items() if value]
    full = [cost.flops_forward.parts[part] for part in parts]
    seen = [cost.flops_forward_seen.parts[part] for part in parts]
    unit, power = _power_of_ten(max(full))
    heights = list(range(len(parts)))[::-1]
    panel.barh(heights, [value / unit for value in full], color="#BBD7EA", height=0.62, label="hidden by the mask")
    panel.barh(heights, [value / unit for value in seen], color=COLOURS[0], height=0.62, label="seen")
    for height, value in zip(heights, full, strict=True):
        panel.text(value / unit, height, f" {100 * value / sum(full):.0f} %", va="center", fontsize=9, color=SOFT)
    panel.set_yticks(heights, parts)
    panel.set_xlim(0, 1.12 * max(full) / unit)
    panel.set_xlabel(f"10{power} operations", fontsize=10, color=INK)
    _style(panel, "Operations of a forward pass", "x")
    if full != seen:
        _legend(panel, loc="lower right", bbox_to_anchor=(1.02, 1.0), ncols=2)


def _power_of_ten(largest: float) -> tuple[float, str]:
    for size, power in ((1e15, "¹⁵"), (1e12, "¹²"), (1e9, "⁹"), (1e6, "⁶")):
        if largest >= size:
            return size, power
    return 1.0, "⁰"


def _draw_growth(panel: Any, cost: Cost) -> None:
    """Operations per token: constant for matrices, growing with length for attention."""
    length = cost.setting.length
    top = max(2.0 * (cost.crossover[ALL_PAIRS] or 4.0 * length), 2.0 * length)
    lengths = sorted({max(1, round(top * share)) for share in (0.002, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)})
    curves: dict[str, list[float]] = {"all matrices": [], "attention": [], "attention, seen": []}
    for n in lengths:
        flops = count(cost.config, 1, n)
        attention = [part for part in flops if part.kind in ("attention", "cross attention", "distances")]
        curves["all matrices"].append(sum(p.forward for p in flops if p not in attention) / n)
        curves["attention"].append(sum(p.forward for p in attention) / n)
        curves["attention, seen"].append(sum(p.forward_seen for p in attention) / n)
    unit, power = _power_of_ten(max(max(values) for values in curves.values()))
    styles = ((COLOURS[0], "-"), (COLOURS[5], "-"), (COLOURS[5], "--"))
    for (label, values), (colour, dash) in zip(curves.items(), styles, strict=True):
        if label != "attention, seen" or values != curves["attention"]:
            panel.plot(lengths, [x / unit for x in values], color=colour, linestyle=dash, linewidth=2, label=label)
    panel.text(length, panel.get_ylim()[1], " this length", fontsize=9, color=SOFT, va="top")
    panel.set_ylabel(f"10{power} operations per token, forward", fontsize=10, color=INK)
    _style_lengths(panel, length, "length T")
    _style(panel, "What grows with the length", "both")
    _legend(panel, loc="upper left", bbox_to_anchor=(0.0, 0.93))


def _draw_memory(panel: Any, cost: Cost) -> None:
    """Training memory with and without fused attention and checkpointing; the last part is needed only at the peak."""
    memory = cost.training
    _style(panel, "Memory of a training step, GiB", "x")
    if memory is None:
        return _write_instead(panel, "predicted for Transformers only")
    gib = 2.0**30
    fixed = {"weights": memory.weights, "optimiser": memory.optimiser, "moving average": memory.ema}
    names = []
    for height, variant in zip(range(len(cost.variants))[::-1], cost.variants, strict=True):
        names.append(f"{variant.attention},\n{'checkpointed' if variant.checkpointing else 'not checkpointed'}")
        parts = {**fixed, "activations": variant.activations}
        parts["gradients, and for a moment"] = max(0.0, variant.peak - sum(parts.values()) - memory.workspace)
        left = 0.0
        for (label, value), colour in zip(parts.items(), COLOURS, strict=False):
            if value:
                label_once = label if height == 0 else None
                panel.barh(height, value / gib, left=left, color=colour, height=0.62, label=label_once)
            left += value / gib
        panel.text(variant.peak / gib, height, f" {variant.peak / gib:.1f}", va="center", fontsize=9.5, color=INK)
    panel.set_yticks(range(len(names))[::-1], names)
    panel.set_xlim(0, 1.1 * max(variant.peak for variant in cost.variants) / gib)
    _legend(panel, loc="upper center", bbox_to_anchor=(0.45, -0.08), ncols=5)


def _draw_cache(panel: Any, cost: Cost) -> None:
    """KV cache against length, with keys of every head, of groups, and of a single head."""
    config, setting = cost.config, cost.setting
    _style(panel, f"Cache of decoding, MiB, {cost.cache_numbers}, batch {setting.batch}", "both")
    if not cost.cache_layers or config.architecture == "recurrent":
        reason = "a recurrent state has one size at any length" if cost.cache_layers else "an encoder has none"
        return _write_instead(panel, reason)
    lengths = [max(1, round(setting.length * share / 8)) for share in range(1, 17)]
    stack = stacks_of(config, setting.length, setting.source_length)[-1]
    own = config.n_kv_heads or stack.n_heads
    for n, heads in enumerate(sorted({stack.n_heads, own, max(1, stack.n_heads // 4), 1}, reverse=True)):
        if config.n_heads % heads or stack.n_heads % heads:
            continue
        changed, is_own = config.with_(n_kv_heads=heads), heads == own
        caches = (kv_cache(changed, setting.batch, t, setting.source_length, cost.cache_numbers) for t in lengths)
        sizes = [sum(layer.bytes for layer in layers) / 2**20 for layers in caches]
        width, dash, note = (2.6, "-", ", this model") if is_own else (1.6, "--", "")
        label = f"{heads} key heads{note}"
        panel.plot(lengths, sizes, color=COLOURS[n], linewidth=width, linestyle=dash, label=label)
    _style_lengths(panel, setting.length, "tokens")
    _legend(panel, loc="upper left")
