"""Why attention divides by √d_k (Vaswani et al. 2017, section 3.2.1): softmax saturation, computed and predicted.

For q, k with independent entries of mean 0 and variance 1, q·k has variance d_k. Through the softmax's Jacobian
J = diag(p) − p pᵀ the gradient that reaches the scores shrinks as p nears one-hot; ‖J‖_F says how much of it passes.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json

__all__ = ["Scaling", "passed", "predicted_scaled", "predicted_unscaled", "scaling"]

SATURATED = 30
"""From d_k = 30 ln n on, the spread of n scores is far wider than what one softmax tells apart."""
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Point:
    """One d_k, with or without the factor."""

    d_k: int
    scaled: bool
    passed: float
    """Mean of ‖J‖_F over queries."""
    passed_median: float
    predicted: float | None
    """The same from theory; None where neither limit, variance 1 or saturation, is near."""
    gradient: float
    """Mean norm of the gradient that a random gradient of the weights leaves at the scores, by autograd: √E = ‖J‖_F."""
    largest: float
    """Mean of the largest weight."""
    saturated: float
    """Share of the queries whose largest weight is over 0.99."""


@dataclass(frozen=True)
class Scaling:
    """The table and the picture."""

    n_keys: int
    points: tuple[Point, ...]
    out: Path

    def document(self) -> dict[str, Any]:
        return {"n_keys": self.n_keys, "out": str(self.out), "points": [asdict(point) for point in self.points]}

    def pairs(self) -> list[tuple[Point, Point]]:
        """With and without, by d_k."""
        by_width = {(point.d_k, point.scaled): point for point in self.points}
        return [(by_width[d, True], by_width[d, False]) for d in sorted({point.d_k for point in self.points})]

    def table(self) -> str:
        lines = [
            f"How much gradient passes the softmax over {self.n_keys} keys (‖diag(p) − ppᵀ‖, mean over queries)",
            "",
            "         with 1/√d_k                      without",
            "  d_k    passes  predicted  saturated     passes  predicted   median  saturated",
        ]
        for scaled, plain in self.pairs():
            left = f"{scaled.passed:7.4f}    {_or_dash(scaled.predicted)}    {scaled.saturated:7.1%}"
            right = f"{plain.passed:8.4f}    {_or_dash(plain.predicted)} {plain.passed_median:8.1e}"
            lines.append(f"{scaled.d_k:5}   {left}   {right}    {plain.saturated:7.1%}")
        (first, _), (last, plain) = self.pairs()[0], self.pairs()[-1]
        lines += [
            "",
            "With 1/√d_k the scores keep variance 1 and the gradient stays: "
            f"{first.passed:.3f} at d_k = {first.d_k}, {last.passed:.3f} at {last.d_k}.",
            f"Without it their variance is d_k: at d_k = {plain.d_k}, {plain.saturated:.0%} of the queries put over "
            f"99 % on one key, and the typical (median) query passes {plain.passed_median:.0e} of its gradient.",
            "Predicted: with it, from log-normal weights; without it, for large d_k: the mean falls as c/√d_k, by the "
            "chance that the two largest scores nearly tie; the median falls much faster.",
            f"{self.out / 'scaling.png'}",
        ]
        return "\n".join(lines)


def _or_dash(value: float | None) -> str:
    return "      –" if value is None else f"{value:7.4f}"


def passed(p: Tensor) -> Tensor:
    """‖diag(p) − p pᵀ‖_F of every row: √(Σp² − 2Σp³ + (Σp²)²). (…, n) → (…)"""
    second, third = (p**2).sum(-1), (p**3).sum(-1)
    return (second - 2 * third + second**2).clamp_min(0).sqrt()


def predicted_scaled(n: int) -> float:
    """Of n keys whose scores have variance 1: weights are log-normal, Σp² ≈ e/n and Σp³ ≈ e³/n²."""
    return math.sqrt(math.e / n - 2 * math.e**3 / n**2 + (math.e / n) ** 2)


def predicted_unscaled(n: int, d_k: int) -> float:
    """Of saturated scores: only where the two largest nearly tie does anything pass. With a gap g between them
    ‖J‖_F = 2p(1 − p), p = 1/(1 + e^−g), and ∫ 2p(1 − p) dg = 1, so E‖J‖_F → the density of g at 0:
    n(n − 1) ∫ φ(z)² Φ(z)^(n−2) dz / √d_k."""
    z = torch.linspace(-9, 9, 20001, dtype=torch.float64)
    density = torch.exp(-(z**2)) / (2 * math.pi)
    below = torch.special.ndtr(z)
    return float(n * (n - 1) * torch.trapezoid(density * below ** (n - 2), z)) / math.sqrt(d_k)


def scaling(
    out: str | Path = "runs/ablate-scaling",
    *,
    widths: tuple[int, ...] = WIDTHS,
    n_keys: int = 64,
    n_queries: int = 2000,
    seed: int = 0,
) -> Scaling:
    """Draw queries and keys, look at their softmax with and without 1/√d_k, write scaling.json and scaling.png."""
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    points = []
    for d_k in widths:
        scores = _scores(d_k, n_keys, n_queries, seed)
        for scaled in (True, False):
            points.append(_point(scores / math.sqrt(d_k) if scaled else scores, d_k, scaled, seed))
    found = Scaling(n_keys, tuple(points), folder)
    write_atomic(folder / "scaling.json", to_json(found.document()))
    _draw(found, folder / "scaling.png")
    return found


def _scores(d_k: int, n_keys: int, n_queries: int, seed: int) -> Tensor:
    """q·k of every query with keys of its own. (queries, keys)"""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for start in range(0, n_queries, 100):
        n = min(100, n_queries - start)
        q, k = torch.randn(n, d_k, generator=draw), torch.randn(n, n_keys, d_k, generator=draw)
        rows.append(torch.einsum("qd,qkd->qk", q, k))
    return torch.cat(rows).double()


def _point(scores: Tensor, d_k: int, scaled: bool, seed: int) -> Point:
    n = scores.shape[1]
    scores = scores.detach().requires_grad_()
    weights = scores.softmax(-1)
    draw = torch.Generator().manual_seed(seed + 1)
    weights.backward(torch.randn(weights.shape, generator=draw, dtype=weights.dtype))
    assert scores.grad is not None
    norms, largest = passed(weights.detach()), weights.detach().max(-1).values
    saturated = d_k >= SATURATED * math.log(n)
    predicted = predicted_scaled(n) if scaled else predicted_unscaled(n, d_k) if saturated else None
    return Point(
        d_k=d_k,
        scaled=scaled,
        passed=float(norms.mean()),
        passed_median=float(norms.median()),
        predicted=predicted,
        gradient=float(scores.grad.norm(dim=-1).mean()),
        largest=float(largest.mean()),
        saturated=float((largest > 0.99).double().mean()),
    )


def _draw(found: Scaling, file: Path) -> None:
    from ..foundation.plotting import INK, style_panel
    from .sweep_figure import BETTER, WORSE, _figure

    figure = _figure(11, 4.6)
    left, right = figure.subplots(1, 2)
    widths = [scaled.d_k for scaled, _ in found.pairs()]
    for place, (name, colour) in enumerate((("with 1/√d_k", BETTER), ("without", WORSE))):
        points = [pair[place] for pair in found.pairs()]
        left.plot(widths, [x.passed for x in points], "o-", color=colour, label=f"{name}: mean")
        left.plot(widths, [max(x.passed_median, 1e-12) for x in points], ".:", color=colour, label=f"{name}: median")
        known = [(x.d_k, x.predicted) for x in points if x.predicted is not None]
        if known:
            left.plot(*zip(*known, strict=True), "--", color=INK, linewidth=1, alpha=0.8)
        right.plot(widths, [x.largest for x in points], "o-", color=colour, label=f"{name}: mean of the largest weight")
        right.plot(
            widths, [x.saturated for x in points], ".:", color=colour, label=f"{name}: share of queries over 0.99"
        )
    left.plot([], [], "--", color=INK, linewidth=1, label="predicted mean")
    left.set_yscale("log")
    left.set_ylim(1e-5, 1)
    for panel, title in (
        (left, "Gradient that passes the softmax, ‖diag(p) − ppᵀ‖"),
        (right, "How sharp attention is"),
    ):
        style_panel(panel)
        panel.set_xscale("log", base=2)
        panel.set_xticks(widths, [str(d) for d in widths])
        panel.set_xlabel("d_k", color=INK)
        panel.set_title(title, loc="left", fontsize=11, color=INK)
        panel.legend(frameon=False, fontsize=8.5)
    figure.savefig(file, facecolor="white")
