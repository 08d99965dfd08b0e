"""A cost for people and for machines: tables as plain text, and one JSON document."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..table import Row, aligned
from .amounts import Amount, bytes_text, count_text, time_text

if TYPE_CHECKING:
    from .finding import Cost


def table(found: Cost, training: bool = True) -> str:
    """All of it, one table below the other."""
    blocks = [headline(found), _parameters(found), _flops(found), _inference(found)]
    if training:
        blocks.append(_training(found))
    return "\n\n".join([*blocks, _times(found, training), _crossover(found), _kinds(found)])


def headline(found: Cost) -> str:
    from .finding import source_of

    config, setting = found.config, found.setting
    source = source_of(found)
    beside = "" if source is None else f", source of {source}"
    return (
        f"{found.name}: {config.architecture}, {count_text(found.parameters.total)} parameters; "
        f"batch {setting.batch}, length {setting.length}{beside}, {setting.precision}"
    )


def _rows(amount: Amount, shown: Any) -> list[Row]:
    total = amount.total or 1.0
    rows = [
        Row(f"  {part}", [shown(value)], f"{100 * value / total:.1f} %")
        for part, value in amount.parts.items()
        if value
    ]
    return [*rows, Row("  all", [shown(amount.total)], "")]


def _parameters(found: Cost) -> str:
    return aligned([Row("parameters", ["number"], "share"), *_rows(found.parameters, lambda n: f"{n:,.0f}")])


def _flops(found: Cost) -> str:
    columns = (found.flops_forward, found.flops_backward, found.flops_forward_seen, found.flops_backward_seen)
    rows = [Row("operations of a batch", ["forward", "backward", "forward, seen"], "backward, seen")]
    for part in found.flops_forward.parts:
        *first, last = (count_text(column.parts[part]) for column in columns)
        rows.append(Row(f"  {part}", first, last))
    *first, last = (count_text(column.total) for column in columns)
    return aligned([*rows, Row("  all", first, last)]) + "\n  seen: pairs of tokens that a mask hides are not counted"


def _inference(found: Cost) -> str:
    setting = found.setting
    rows = [
        Row("memory without training", [""], ""),
        Row("  weights", [bytes_text(setting.width * found.parameters.total)], setting.precision),
        Row("  attention matrices, if they were stored", [bytes_text(found.attention_matrix.total)], "all layers"),
    ]
    if found.cache_layers:
        rows.append(Row("  KV cache", [bytes_text(found.kv_cache.total)], found.cache_numbers))
        rows += [Row(f"    {name}", [text], each) for name, text, each in _cache(found)]
    return aligned(rows)


def _cache(found: Cost) -> Iterable[tuple[str, str, str]]:
    """Layers that keep alike, in one line."""
    alike: dict[tuple[str, int, int], list[int]] = {}
    for one in found.cache_layers:
        alike.setdefault((one.kind, one.tokens, one.bytes), []).append(one.layer)
    for (kind, tokens, size), layers in alike.items():
        which = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers ({layers[0]} to {layers[-1]})"
        what = {"all": "every token", "window": "a window", "cross": "the source"}.get(kind, kind)
        yield f"{which}, {what}: {tokens}", bytes_text(size * len(layers)), f"{bytes_text(size)} each"


def _training(found: Cost) -> str:
    memory, setting = found.training, found.setting
    if memory is None:
        return "training memory is predicted for Transformers only"
    how = f"{setting.optimiser}, {setting.attention} attention" + (", checkpointed" if setting.checkpointing else "")
    rows = [
        Row(f"memory of a training step ({how})", ["bytes"], ""),
        Row("  weights, fp32", [bytes_text(memory.weights)], ""),
        Row("  gradients", [bytes_text(memory.gradients)], ""),
        Row("  optimiser's state", [bytes_text(memory.optimiser)], setting.optimiser),
    ]
    if memory.ema:
        rows.append(Row("  moving average", [bytes_text(memory.ema)], ""))
    rows.append(Row("  activations", [bytes_text(memory.activations)], "kept for the backward pass"))
    rows += [Row(f"    {part}", [bytes_text(size)], "") for part, size in found.activations.parts.items() if size]
    rows.append(Row("  peak", [bytes_text(memory.peak)], f"in {memory.where}"))
    if (most := found.device.memory) is not None:
        rows.append(Row("  of the device's", [bytes_text(most)], _fits(memory.peak, most)))
    others = [Row("attention, checkpointing", ["activations"], "peak")]
    for one in found.variants:
        name = f"  {one.attention}, {'each layer' if one.checkpointing else 'none'}"
        others.append(Row(name, [bytes_text(one.activations)], bytes_text(one.peak)))
    return aligned(rows) + "\n\n" + aligned(others)


def _fits(peak: float, memory: float) -> str:
    return f"{100 * peak / memory:.1f} %" if peak <= memory else f"does not fit: {peak / memory:.1f} times too much"


def _times(found: Cost, training: bool) -> str:
    device, floors = found.device, found.floors
    measured = any(floor.measured is not None for floor in floors.values())
    longer = "at least" if device.ceiling else "longer"
    columns = ["compute", "bandwidth", longer, *(["as measured"] if measured else [])]
    rows = [Row(f"time {_how(found)}, on {device.name}", columns, "bound by")]
    for name, floor in floors.items():
        if name == "training step" and not training:
            continue
        times = [floor.compute, floor.bandwidth, floor.seconds, *([floor.measured or 0.0] if measured else [])]
        rows.append(Row(f"  {name}", [time_text(x) for x in times], floor.bound))
    speeds = (
        f"  {count_text(device.half)}FLOP/s in {device.half_type}, {count_text(device.single)}FLOP/s in "
        f"{device.single_type}, {count_text(device.bandwidth)}B/s: {device.source}"
    )
    if measured and (reached := device.reached) is not None:
        best = f"{count_text(reached.half)}FLOP/s, {count_text(reached.bandwidth)}B/s"
        speeds += f"\n  as measured: the same at {best}, reached by {reached.how}; no floor"
    return aligned(rows) + "\n" + speeds


def _how(found: Cost) -> str:
    """A speed that was measured may be beaten: times at it are none that cannot be undercut."""
    return "at least" if found.device.ceiling else "at measured speed"


def _crossover(found: Cost) -> str:
    rows = [Row("where attention passes the matrices", ["length"], "")]
    for name, length in found.crossover.items():
        rows.append(Row(f"  {name}", ["never" if length is None else f"{length:,.0f}"], ""))
    return aligned(rows)


def _kinds(found: Cost) -> str:
    rows = [
        Row(f"one layer, T = {found.setting.length}, d = {found.config.d_model}", ["operations", "", "steps"], "path")
    ]
    for kind in found.layer_kinds:
        entries = [kind.complexity, count_text(kind.flops), f"{kind.sequential:,.0f}"]
        rows.append(Row(f"  {kind.name}", entries, f"{kind.path_text} = {kind.path:,.0f}"))
    note = "  steps: that wait for each other; path: between the two tokens farthest apart (k = 3, r = "
    window = min(found.config.window or max(1, found.setting.length // 8), found.setting.length)
    return aligned(rows) + f"\n{note}{window})"


def document(found: Cost) -> dict[str, Any]:
    """Everything as JSON."""
    from ...hub import changed_fields

    memory = found.training
    return {
        "name": found.name,
        "config": changed_fields(found.config),
        "setting": asdict(found.setting),
        "device": asdict(found.device),
        "parameters": found.parameters.document(),
        "flops_forward": found.flops_forward.document(),
        "flops_backward": found.flops_backward.document(),
        "flops_forward_seen": found.flops_forward_seen.document(),
        "flops_backward_seen": found.flops_backward_seen.document(),
        "attention_matrix": found.attention_matrix.document(),
        "kv_cache": {
            **found.kv_cache.document(),
            "numbers": found.cache_numbers,
            "layers": [asdict(one) for one in found.cache_layers],
        },
        "activations": None if memory is None else found.activations.document(),
        "training": None if memory is None else {**asdict(memory), "peak": memory.peak, "where": memory.where},
        "variants": [asdict(one) for one in found.variants],
        "floors": {
            name: {**asdict(floor), "seconds": floor.seconds, "bound": floor.bound}
            for name, floor in found.floors.items()
        },
        "crossover": found.crossover,
        "layer_kinds": [asdict(kind) for kind in found.layer_kinds],
    }


@dataclass(frozen=True)
class Comparison:
    """Two costs side by side."""

    first: Cost
    second: Cost

    def document(self) -> dict[str, Any]:
        return {"first": self.first.document(), "second": self.second.document()}

    def table(self, training: bool = True) -> str:
        first, second = self.first, self.second
        rows = [Row("", [first.name, second.name], "ratio")]
        for name, shown, values in self._lines(training):
            a, b = values
            ratio = f"{b / a:.2f} ×" if a and b is not None else ""
            rows.append(Row(name, [shown(a), "-" if b is None else shown(b)], ratio))
        return "\n".join([headline(first), headline(second), "", aligned(rows)])

    def _lines(self, training: bool) -> Iterable[tuple[str, Any, tuple[float, float | None]]]:
        both = (self.first, self.second)

        def of(get: Any) -> tuple[float, float | None]:
            return get(both[0]), get(both[1])

        yield "parameters", count_text, of(lambda x: x.parameters.total)
        yield "operations, forward", count_text, of(lambda x: x.flops_forward.total)
        yield "operations, forward, seen", count_text, of(lambda x: x.flops_forward_seen.total)
        yield "operations, backward", count_text, of(lambda x: x.flops_backward.total)
        yield "attention matrices, if stored", bytes_text, of(lambda x: x.attention_matrix.total)
        yield f"KV cache, {self.first.cache_numbers}", bytes_text, of(lambda x: x.kv_cache.total)
        if training and all(one.training is not None for one in both):
            for name in ("weights", "optimiser", "gradients", "activations", "peak"):
                yield f"training: {name}", bytes_text, of(lambda x, name=name: getattr(x.training, name))
        for name in self.first.floors:
            if name in self.second.floors and (training or name != "training step"):
                yield f"{name}, {_how(self.first)}", time_text, of(lambda x, name=name: x.floors[name].seconds)
