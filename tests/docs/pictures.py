"""The pictures of docs/learn, drawn by the library itself.

After a change that is meant:  python -m tests.docs.pictures
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from regard.attention.masks import causal, dilated, prefix, strided, window
from regard.layers import Sinusoidal
from regard.training.optimiser import cosine, noam, paper_lr, warmup_stable_decay

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
INK, RED, GREY = "#2b2622", "#c0392b", "#a89f97"


def positions(figure: Any) -> None:
    """Sinusoids of 100 positions, and the products of every two."""
    waves = Sinusoidal(64)(torch.arange(100))
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.45))
    left.imshow(waves.numpy(), cmap="RdBu", aspect="auto", interpolation="nearest")
    left.set(xlabel="dimension", ylabel="position", title="PE(pos)")
    right.imshow((waves @ waves.T).numpy(), cmap="magma", interpolation="nearest")
    right.set(xlabel="position", ylabel="position", title="PE(i) · PE(j)")


def scale(figure: Any) -> None:
    """The 20 largest of 1,000 weights, mean over rows, for random heads of several widths."""
    made = torch.Generator().manual_seed(0)
    axes = figure.subplots(1, 2, sharey=True)
    for axis, title in zip(axes, ("softmax(q · k)", "softmax(q · k / √d)"), strict=True):
        for d, colour in ((4, GREY), (64, INK), (1024, RED)):
            q, k = torch.randn(2, 1000, d, generator=made)
            scores = q @ k.T / (d**0.5 if "√" in title else 1.0)
            largest = scores.softmax(-1).topk(20).values.mean(0).numpy()
            axis.plot(range(1, 21), largest, color=colour, label=f"d = {d}")
        axis.set(title=title, xlabel="rank of the key", ylim=(1e-4, 1.2), yscale="log", xticks=(1, 5, 10, 15, 20))
    axes[0].set_ylabel("weight")
    axes[0].legend(frameon=False)


def masks(figure: Any) -> None:
    """Who may look at whom, among 64."""
    shown = {
        "causal()": causal(),
        "causal() & window(12)": causal() & window(12),
        "causal() | prefix(16)": causal() | prefix(16),
        "causal() & strided(8)": causal() & strided(8),
        "causal() & dilated(6, 3)": causal() & dilated(6, 3),
    }
    for axis, (name, mask) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        axis.imshow(mask.dense(64)[0, 0].numpy(), cmap="Greys", vmin=0, vmax=1.3, interpolation="nearest")
        axis.set_title(name, fontsize=7.5, family="monospace")
        axis.set(xticks=(), yticks=())


def schedule(figure: Any) -> None:
    """Three ways for a learning rate to go."""
    steps = range(1, 40_001, 50)
    peak = paper_lr(512, 4000)
    axis = figure.subplots()
    for name, factor, colour in (
        ("noam, the paper's", noam(4000), RED),
        ("cosine", cosine(4000, 40_000), INK),
        ("wsd: up, level, down", warmup_stable_decay(4000, 40_000), GREY),
    ):
        axis.plot(steps, [peak * factor(step) for step in steps], color=colour, label=name)
    axis.set(xlabel="step", ylabel="learning rate", xlim=(0, 40_000), ylim=(0, None))
    axis.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    axis.legend(frameon=False)


PICTURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "learn-positions.png": (positions, (7.4, 3.4)),
    "learn-scale.png": (scale, (7.4, 2.8)),
    "learn-masks.png": (masks, (9.0, 2.1)),
    "learn-schedule.png": (schedule, (6.0, 2.6)),
}


def draw(name: str, file: Path) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    paint, size = PICTURES[name]
    figure = Figure(figsize=size, dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    paint(figure)
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Software": None})


if __name__ == "__main__":
    for name in PICTURES:
        draw(name, IMAGES / name)
