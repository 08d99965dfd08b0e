"""The picture of ``regard cost``: what computes, what grows with length, what is held, what decoding keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...foundation.plotting import INK, SOFT, style_panel
from ...models.flops import count, stacks_of
from .cache import kv_cache
from .crossing import ALL_PAIRS

if TYPE_CHECKING:
    from .finding import Cost

# Okabe and Ito's colours, which stay apart for every kind of colour vision.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#7A7A7A", "#F0E442", "#000000")
SUFFIXES = (".png", ".svg", ".pdf")


def check_plot(file: Path) -> None:
    """Refuse a file that cannot become a picture before any work is done."""
    if file.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {file} is none of {', '.join(SUFFIXES)}")
    if not file.resolve().parent.is_dir():
        raise UsageError(f"--plot {file} cannot be written: there is no directory {file.parent}")


def draw(found: Cost, file: Path) -> Path:
    """Write the picture, PNG, SVG or PDF by its name."""
    check_plot(file)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from .text import headline

    figure = Figure(figsize=(14, 9.4), dpi=130, facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2)
    figure.subplots_adjust(left=0.13, right=0.97, top=0.87, bottom=0.07, wspace=0.34, hspace=0.42)
    _operations(panels[0, 0], found)
    _by_length(panels[0, 1], found)
    _memory(panels[1, 0], found)
    _cache(panels[1, 1], found)
    figure.text(0.03, 0.95, f"What {found.name} costs", fontsize=17, weight="bold", color=INK)
    figure.text(0.03, 0.918, headline(found).partition(": ")[2], fontsize=11, color=SOFT)
    figure.savefig(file, facecolor="white")
    return file


def _plain(panel: Any, title: str, grid: str) -> None:
    panel.set_title(title, loc="left", fontsize=12, color=INK, pad=12)
    style_panel(panel, grid)


def _operations(panel: Any, found: Cost) -> None:
    """Forward, part by part, with what a mask hides paler."""
    parts = [part for part, value in found.flops_forward.parts.items() if value]
    full = [found.flops_forward.parts[part] for part in parts]
    seen = [found.flops_forward_seen.parts[part] for part in parts]
    unit, name = _unit(max(full))
    places = list(range(len(parts)))[::-1]
    panel.barh(places, [value / unit for value in full], color="#BBD7EA", height=0.62, label="hidden by the mask")
    panel.barh(places, [value / unit for value in seen], color=COLOURS[0], height=0.62, label="seen")
    for place, value in zip(places, full, strict=True):
        share = f" {100 * value / sum(full):.0f} %"
        panel.text(value / unit, place, share, va="center", fontsize=9, color=SOFT)
    panel.set_yticks(places, parts)
    panel.set_xlim(0, 1.12 * max(full) / unit)
    panel.set_xlabel(f"10{name} operations", fontsize=10, color=INK)
    _plain(panel, "Operations of a forward pass", "x")
    if full != seen:
        panel.legend(frameon=False, fontsize=9, labelcolor=SOFT, loc="lower right", bbox_to_anchor=(1.02, 1.0), ncols=2)


def _unit(largest: float) -> tuple[float, str]:
    for size, name in ((1e15, "¹⁵"), (1e12, "¹²"), (1e9, "⁹"), (1e6, "⁶")):
        if largest >= size:
            return size, name
    return 1.0, "⁰"


def _by_length(panel: Any, found: Cost) -> None:
    """Per token: matrices are level, attention rises with the length."""
    config = found.config
    last = found.crossover[ALL_PAIRS] or 4.0 * found.setting.length
    top = max(2.0 * last, 2.0 * found.setting.length)
    lengths = sorted({max(1, round(top * share)) for share in (0.002, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.7, 0.85, 1.0)})
    curves: dict[str, list[float]] = {"all matrices": [], "attention": [], "attention, seen": []}
    for length in lengths:
        parts = count(config, 1, length)
        attention = [part for part in parts if part.kind in ("attention", "cross attention", "distances")]
        curves["all matrices"].append(sum(p.forward for p in parts if p not in attention) / length)
        curves["attention"].append(sum(p.forward for p in attention) / length)
        curves["attention, seen"].append(sum(p.forward_seen for p in attention) / length)
    unit, name = _unit(max(max(values) for values in curves.values()))
    for (label, values), colour, style in zip(
        curves.items(), COLOURS[:1] + COLOURS[5:6] * 2, ("-", "-", "--"), strict=True
    ):
        if label == "attention, seen" and values == curves["attention"]:
            continue
        panel.plot(lengths, [value / unit for value in values], color=colour, linestyle=style, linewidth=2, label=label)
    panel.axvline(found.setting.length, color="#999999", linewidth=1, linestyle=":")
    panel.text(found.setting.length, panel.get_ylim()[1], " this length", fontsize=9, color=SOFT, va="top")
    panel.set_xlabel("length T", fontsize=10, color=INK)
    panel.set_ylabel(f"10{name} operations a token, forward", fontsize=10, color=INK)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _plain(panel, "What grows with the length", "both")
    panel.legend(frameon=False, fontsize=9, labelcolor=SOFT, loc="upper left", bbox_to_anchor=(0.0, 0.93))


def _memory(panel: Any, found: Cost) -> None:
    """Training under four choices, stacked; what is left to the peak is needed for a moment only."""
    memory = found.training
    _plain(panel, "Memory of a training step, GiB", "x")
    if memory is None:
        panel.text(0.5, 0.5, "predicted for Transformers only", ha="center", color=SOFT, transform=panel.transAxes)
        panel.set_axis_off()
        return
    gib = 2.0**30
    fixed = {"weights": memory.weights, "optimiser": memory.optimiser, "moving average": memory.ema}
    names = []
    for place, one in zip(range(len(found.variants))[::-1], found.variants, strict=True):
        names.append(f"{one.attention},\n{'checkpointed' if one.checkpointing else 'not checkpointed'}")
        parts = {**fixed, "activations": one.activations}
        parts["gradients, and for a moment"] = max(0.0, one.peak - sum(parts.values()) - memory.workspace)
        left = 0.0
        for (label, value), colour in zip(parts.items(), COLOURS, strict=False):
            if value:
                panel.barh(
                    place, value / gib, left=left, color=colour, height=0.62, label=label if place == 0 else None
                )
            left += value / gib
        panel.text(one.peak / gib, place, f" {one.peak / gib:.1f}", va="center", fontsize=9.5, color=INK)
    panel.set_yticks(range(len(names))[::-1], names)
    panel.set_xlim(0, 1.1 * max(one.peak for one in found.variants) / gib)
    panel.legend(frameon=False, fontsize=9, labelcolor=SOFT, loc="upper center", bbox_to_anchor=(0.45, -0.08), ncols=5)


def _cache(panel: Any, found: Cost) -> None:
    """KV cache against length, were keys of every head, of groups, of one head kept."""
    config, setting = found.config, found.setting
    _plain(panel, f"Cache of decoding, MiB, {found.cache_numbers}, batch {setting.batch}", "both")
    if not found.cache_layers or config.architecture == "recurrent":
        why = "an encoder keeps none" if not found.cache_layers else "a recurrent state has one size at any length"
        panel.text(0.5, 0.5, why, ha="center", color=SOFT, transform=panel.transAxes)
        panel.set_axis_off()
        return
    lengths = [max(1, round(setting.length * share / 8)) for share in range(1, 17)]
    stack = stacks_of(config, setting.length, setting.source_length)[-1]
    own = config.n_kv_heads or stack.n_heads
    kinds = {f"{n} key heads": n for n in sorted({stack.n_heads, own, max(1, stack.n_heads // 4), 1}, reverse=True)}
    for n, (label, heads) in enumerate(kinds.items()):
        if config.n_heads % heads or stack.n_heads % heads:
            continue
        changed = config.with_(n_kv_heads=heads)
        source = setting.source_length
        sizes = [
            sum(x.bytes for x in kv_cache(changed, setting.batch, t, source, found.cache_numbers)) for t in lengths
        ]
        mine = heads == own
        panel.plot(
            lengths,
            [size / 2**20 for size in sizes],
            color=COLOURS[n],
            linewidth=2.6 if mine else 1.6,
            linestyle="-" if mine else "--",
            label=f"{label}, this model" if mine else label,
        )
    panel.axvline(setting.length, color="#999999", linewidth=1, linestyle=":")
    panel.set_xlabel("tokens", fontsize=10, color=INK)
    panel.set_ylim(bottom=0)
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panel.legend(frameon=False, fontsize=9, labelcolor=SOFT, loc="upper left")
