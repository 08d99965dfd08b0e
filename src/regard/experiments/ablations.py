"""Named sweeps: the paper's ablations, a comparison of mechanisms, length extrapolation, and softmax saturation.

ablations.toml defines them. The cells of an axis depend on the base's config, so that ``regard ablate heads
model.d_model=512`` tries the numbers of heads that divide 512.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ..config import Positions, RunConfig
from ..config.mixers import all_mixers
from ..errors import UsageError
from ..foundation.checks import did_you_mean
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json
from .sweep_spec import Cell, Sweep, check_words

_DEFINITIONS = tomllib.loads((files(__package__) / "ablations.toml").read_text(encoding="utf-8"))
AXES: dict[str, dict[str, Any]] = _DEFINITIONS["axes"]


def axis_cells(axis: dict[str, Any], base: RunConfig) -> list[Cell]:
    """The cells of an axis of ablations.toml, without the base's own value."""
    if "cells" in axis:
        return [Cell(cell["name"], tuple(cell["words"])) for cell in axis["cells"]]
    name = axis["field"]
    current = base.model.head_width if name == "model.d_head" else _field_value(base, name)
    least = 1 if name.startswith("model.") else 0
    values = [max(least, int(factor * current)) for factor in axis.get("factors", ())] or axis["values"]
    if "divides" in axis:
        values = [value for value in values if _field_value(base, axis["divides"]) % value == 0]
    return _value_cells(name, (x for x in values if x != current), axis.get("label"), axis.get("also", ()))


def _field_value(config: RunConfig, name: str) -> Any:
    section, _, field = name.partition(".")
    return getattr(getattr(config, section), field)


def _value_cells(
    field: str, values: Iterable[object], label: str | None = None, also: Sequence[str] = ()
) -> list[Cell]:
    label = label or f"{field.rpartition('.')[2]}="
    words = {value: tuple(f"{name}={value}" for name in (field, *also)) for value in values}
    return [Cell(f"{label}{value}", changes) for value, changes in words.items()]


def mechanisms(base: RunConfig) -> list[Cell]:
    """Every registered mechanism, including the user's own; ranks and features are half the length."""
    causal, size = base.model.has_decoder and base.model.causal, max(1, base.data.max_len // 2)
    is_decoder, cells = causal and base.model.architecture == "decoder", []
    for name, entry in all_mixers().items():
        # State spaces are for causal decoders without a source.
        if name != base.model.mixer and (is_decoder if entry.recurrent else entry.causal or not causal):
            sizes = [f"model.mixer_size={size}"] if entry.size else []
            # A state-space model needs no position scheme: it reads tokens in order.
            sizes += ["model.positions=none", "model.qk_norm=false"] if entry.recurrent else []
            cells.append(Cell(name.replace(":", "."), (f"model.mixer={name}", *sizes)))
    return cells


def sparse_patterns(base: RunConfig) -> list[Cell]:
    """The scaled dot product restricted to a window, strides or BigBird's blocks: about a quarter of the keys each."""
    length = base.data.max_len
    return [
        Cell("window", (f"model.window={max(1, length // 8)}",)),
        Cell("strided", ("model.sparsity=strided", f"model.sparsity_size={max(1, length // 8)}")),
        Cell("bigbird", ("model.sparsity=bigbird", f"model.sparsity_size={max(1, length // 16)}")),
    ]


def all_positions(base: RunConfig) -> list[Cell]:
    inside_windows = "window" if base.model.shifted_windows is None else None  # it needs shifted windows
    others = (x for x in get_args(Positions) if x not in (base.model.positions, inside_windows))
    return _value_cells("model.positions", others)


_COMPUTED_AXES = {"mechanisms": mechanisms, "sparse patterns": sparse_patterns, "all positions": all_positions}


@dataclass(frozen=True)
class NamedSweep:
    """A sweep of ablations.toml: a base and the axes along which it is changed."""

    about: str
    recipe: str
    words: Sequence[str]
    axes: Sequence[dict[str, Any]]  # an axis, optionally its group, and fields that replace the axis's own
    metrics: Sequence[str]
    measures: Sequence[str] = ()
    ending: str = ""  # the name of its report in ``extended_reports.extend_report``

    def sweep(self, name: str, words: Sequence[str] = (), seeds: int = 3) -> Sweep:
        base = Sweep(name, self.recipe, tuple(self.words), seeds=tuple(range(seeds)), metrics=tuple(self.metrics))
        base = replace(base, about=self.about, measures=tuple(self.measures), ending=self.ending).with_words(words)
        config, cells = base.config(base.rows[0]), list[Cell]()
        for entry in self.axes:
            compute, axis = _COMPUTED_AXES.get(entry["axis"]), AXES.get(entry["axis"], {}) | entry
            axis_rows = axis_cells(axis, config) if compute is None else compute(config)
            cells += [replace(cell, group=entry.get("group", "")) for cell in axis_rows]
        return replace(base, cells=tuple(cells)).without_base_copies()


_AXIS_SWEEPS = {name: {"about": axis["about"], "axes": [{"axis": name}]} for name, axis in AXES.items()}
SWEEPS = {
    name: NamedSweep(**_DEFINITIONS["base"] | fields)
    for name, fields in (_AXIS_SWEEPS | _DEFINITIONS["sweeps"]).items()
}


def unknown_ablation(name: str, names: Iterable[str]) -> UsageError:
    names = list(names)
    return UsageError(f"there is no ablation {name!r}{did_you_mean(name, names)} (all: {', '.join(names)})")


def ablation(name: str, words: Sequence[str] = (), *, seeds: int = 3) -> Sweep:
    """The sweep called ``name``, with overrides of its base."""
    if name not in SWEEPS:
        raise unknown_ablation(name, SWEEPS)
    return SWEEPS[name].sweep(name, check_words(words), seeds)


def list_ablations() -> dict[str, dict[str, Any]]:
    """Every ablation with its description, its recipe and the cells it has with its own base."""
    ablations: dict[str, dict[str, Any]] = {}
    for name, named in SWEEPS.items():
        cells = [cell.name for cell in named.sweep(name).cells]
        ablations[name] = {"about": named.about, "recipe": named.recipe, "cells": cells}
    about = (
        "Softmax saturation with and without 1/√d_k: gradients against d_k, computed and predicted, without training."
    )
    return {**ablations, "scaling": {"about": about, "recipe": None, "cells": []}}


# ------------------------------------------------------------------------------------- softmax saturation

SATURATED = 30  # from d_k = 30 ln n on, the gap between the largest of n scores is usually well above 1
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class ScalingPoint:
    """Measurements at one d_k, with or without the factor. J = diag(p) − p pᵀ is the Jacobian of the softmax."""

    d_k: int
    scaled: bool
    passed: float  # mean of ‖J‖_F over queries: how much of a gradient passes
    passed_median: float
    predicted: float | None  # the mean in theory; None between its two limits, variance 1 and saturation
    gradient: float  # mean norm of the scores' gradient for a random gradient of the weights, from autograd
    largest: float  # mean of the largest weight
    saturated: float  # share of queries whose largest weight exceeds 0.99


@dataclass(frozen=True)
class Scaling:
    """Why attention divides by √d_k (Vaswani et al. 2017, §3.2.1): softmax saturation, computed and predicted.

    For q, k with independent entries of mean 0 and variance 1, q·k has variance d_k; as p nears one-hot, the gradient
    that reaches the scores through the softmax vanishes.
    """

    n_keys: int
    points: tuple[ScalingPoint, ...]
    out: Path

    def to_dict(self) -> dict[str, Any]:
        return {"n_keys": self.n_keys, "out": str(self.out), "points": [asdict(point) for point in self.points]}

    def pairs(self) -> list[tuple[ScalingPoint, ScalingPoint]]:
        """The points with and without the factor, by d_k."""
        by_width = {(point.d_k, point.scaled): point for point in self.points}
        return [(by_width[d, True], by_width[d, False]) for d in sorted({point.d_k for point in self.points})]

    def to_text(self) -> str:
        lines = [
            f"How much gradient passes the softmax over {self.n_keys} keys (‖diag(p) − ppᵀ‖, mean over queries)\n",
            "         with 1/√d_k                      without",
            "  d_k    passes  predicted  saturated     passes  predicted   median  saturated",
        ]
        for scaled, plain in self.pairs():
            predicted = ["      –" if x.predicted is None else f"{x.predicted:7.4f}" for x in (scaled, plain)]
            left = f"{scaled.passed:7.4f}    {predicted[0]}    {scaled.saturated:7.1%}"
            right = f"{plain.passed:8.4f}    {predicted[1]} {plain.passed_median:8.1e}"
            lines.append(f"{scaled.d_k:5}   {left}   {right}    {plain.saturated:7.1%}")
        (first, _), (last, plain) = self.pairs()[0], self.pairs()[-1]
        lines += [
            "\nWith 1/√d_k the scores keep variance 1 and the gradient stays: "
            f"{first.passed:.3f} at d_k = {first.d_k}, {last.passed:.3f} at {last.d_k}.",
            f"Without it their variance is d_k: at d_k = {plain.d_k}, {plain.saturated:.0%} of the queries put over "
            f"99 % on one key, and the typical (median) query passes {plain.passed_median:.0e} of its gradient.",
            "Predicted: with it, from log-normal weights; without it, for large d_k: the mean falls as c/√d_k, by the "
            "chance that the two largest scores nearly tie; the median falls much faster.",
            f"{self.out / 'scaling.png'}",
        ]
        return "\n".join(lines)


def jacobian_norm(p: Tensor) -> Tensor:
    """‖diag(p) − p pᵀ‖_F of every row: √(Σp² − 2Σp³ + (Σp²)²). (…, n) → (…)"""
    second, third = (p**2).sum(-1), (p**3).sum(-1)
    return (second - 2 * third + second**2).clamp_min(0).sqrt()


def predict_scaled(n: int) -> float:
    """‖J‖_F for n scores of variance 1: the weights are log-normal, so Σp² ≈ e/n and Σp³ ≈ e³/n²."""
    return math.sqrt(math.e / n - 2 * math.e**3 / n**2 + (math.e / n) ** 2)


def predict_unscaled(n: int, d_k: int) -> float:
    """E‖J‖_F for saturated scores, where a gradient passes only if the two largest scores nearly tie.

    With a gap g between them ‖J‖_F = 2p(1 − p), p = 1/(1 + e^−g), and ∫ 2p(1 − p) dg = 1, so E‖J‖_F tends to the
    density of g at 0: n(n − 1) ∫ φ(z)² Φ(z)^(n−2) dz / √d_k.
    """
    z = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = torch.exp(-(z**2)) / (2 * math.pi)
    below = torch.special.ndtr(z)
    return float(n * (n - 1) * torch.trapezoid(density * below ** (n - 2), z)) / math.sqrt(d_k)


def measure_scaling(
    out: str | Path = "runs/ablate-scaling",
    *,
    widths: tuple[int, ...] = WIDTHS,
    n_keys: int = 64,
    n_queries: int = 2000,
    seed: int = 0,
) -> Scaling:
    """Draw queries and keys, measure their softmax with and without 1/√d_k, and write scaling.json and scaling.png."""
    from .sweep_figures import draw_scaling

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    points = []
    for d_k in widths:
        generator, rows = torch.Generator().manual_seed(seed), list[Tensor]()
        for start in range(0, n_queries, 100):
            n = min(100, n_queries - start)
            q, k = torch.randn(n, d_k, generator=generator), torch.randn(n, n_keys, d_k, generator=generator)
            rows.append(torch.einsum("qd,qkd->qk", q, k))
        scores = torch.cat(rows).double()  # (queries, keys): every query has its own keys
        points += [_measure_point(scores / math.sqrt(d_k), d_k, True, seed), _measure_point(scores, d_k, False, seed)]
    result = Scaling(n_keys, tuple(points), folder)
    write_atomic(folder / "scaling.json", to_json(result.to_dict()))
    draw_scaling(result, folder / "scaling.png")
    return result


def _measure_point(scores: Tensor, d_k: int, scaled: bool, seed: int) -> ScalingPoint:
    n = scores.shape[1]
    scores = scores.detach().requires_grad_()
    weights = scores.softmax(-1)
    generator = torch.Generator().manual_seed(seed + 1)
    weights.backward(torch.randn(weights.shape, generator=generator, dtype=weights.dtype))
    assert scores.grad is not None
    norms, largest = jacobian_norm(weights.detach()), weights.detach().max(-1).values
    predicted = None
    if scaled:
        predicted = predict_scaled(n)
    elif d_k >= SATURATED * math.log(n):
        predicted = predict_unscaled(n, d_k)
    return ScalingPoint(
        d_k,
        scaled,
        passed=float(norms.mean()),
        passed_median=float(norms.median()),
        predicted=predicted,
        gradient=float(scores.grad.norm(dim=-1).mean()),
        largest=float(largest.mean()),
        saturated=float((largest > 0.99).double().mean()),
    )
