"""Sweeps by name: the paper's ablations, the shoot-out of mechanisms, length extrapolation, and softmax saturation.

An axis is a function of the base's config, so that ``regard ablate heads model.d_model=512`` asks what fits there. The
axes are those of Vaswani et al. 2017, table 3, and some it left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor

from ..config import Positions, RunConfig
from ..config.mixers import all_mixers
from ..errors import UsageError
from ..foundation.files import write_atomic
from ..foundation.jsonio import to_json
from ..foundation.suggestions import did_you_mean
from .shootout import extrapolation_report, shootout_report
from .sweep_cell import EXTRAPOLATION_METRICS
from .sweep_report import SweepReport
from .sweep_spec import Cell, Sweep, check_words

Axis = Callable[[RunConfig], Iterable[Cell]]

# The paper's architecture, small, on the embedded English–Korean corpus, with the optimiser that learns it in seconds
# on one core. Precision and compilation are fixed: chosen by measurement, cells might differ in them.
_FAIR = ("train.precision=fp32", "train.compile=off", "train.eval_every=0", "train.save_every=0", "train.samples=0")
SMALL = (
    *("data.epoch_examples=8000", "data.valid_rows=200", "data.vocab_size=1000", "data.max_len=64"),
    *("model=transformer-base", "model.d_model=64", "model.n_layers=2", "model.n_heads=4", "model.d_ff=256"),
    *("model.max_len=64", "model.dropout=0.0", "model.embedding_dropout=0.0"),
    *("train.optimiser=muon", "train.muon_lr=0.03", "train.lr=4e-3", "train.weight_decay=0"),
    *("train.warmup=30", "train.steps=250", "train.batch_tokens=768", "train.eval_examples=1", *_FAIR),
)
# The paper's model at half the width and depth on Multi30k: post-norm, sinusoids, ReLU, Adam with its β and ε, its
# schedule, no clipping, label smoothing 0.1, dropout 0.1. A moving average of the weights stands for its average of the
# last checkpoints.
PAPER = (
    *("data.columns=en,de", "data.vocab_size=8000", "data.max_len=100"),
    *("model=transformer-base", "model.d_model=256", "model.n_layers=3", "model.n_heads=8", "model.d_ff=1024"),
    *("model.max_len=128", "train.optimiser=adam", "train.lr=1e-3", "train.betas=0.9,0.98", "train.eps=1e-9"),
    *("train.weight_decay=0", "train.schedule=noam", "train.warmup=400", "train.clip=none"),
    *("train.label_smoothing=0.1", "train.ema=0.995", "train.steps=1200", "train.batch_tokens=4096"),
    *("train.beam=1", "train.eval_examples=1"),
    *_FAIR,
)


# A masked language model, as an encoder lets every mechanism play: Linformer and FNet cannot hide a future. Bytes, so
# that every run learns something within a minute; plain q and k, as Performer and linear attention were written for;
# sinusoids, which all of them can take (learned positions stay longer than this on the plateau of having none).
SHOOTOUT = (
    *("data.tokenizer=bytes", "data.max_len=64", "data.mask_rate=0.3"),
    *("model.d_model=64", "model.n_layers=2", "model.n_heads=4", "model.d_ff=256", "model.max_len=64"),
    *("model.positions=sinusoidal", "model.qk_norm=false", "model.scale_embeddings=true"),
    *("train.steps=500", "train.warmup=30", "train.batch_tokens=1024", "train.muon_lr=0.03", "train.lr=4e-3"),
    *(*_FAIR, "train.eval_batches=16"),
)
EXTRAPOLATION = (
    *("data.tokenizer=bytes", "data.max_len=128", "data.packing=blocks"),
    *("model.d_model=64", "model.n_layers=2", "model.n_heads=4", "model.d_ff=256", "model.max_len=128"),
    *("model.qk_norm=false", "model.scale_embeddings=true"),
    *("train.steps=400", "train.warmup=30", "train.batch_tokens=2048", "train.eval_batches=16", *_FAIR),
)


def _cells(
    field: str, values: Iterable[object], base: object, prefix: str = "", more: Sequence[str] = ()
) -> list[Cell]:
    """One cell a value, the base's own left out."""
    label = prefix or f"{field.rpartition('.')[2]}="
    return [
        Cell(f"{label}{value}", tuple(f"{name}={value}" for name in (field, *more)))
        for value in dict.fromkeys(values)
        if value != base
    ]


def heads(base: RunConfig) -> list[Cell]:
    """More heads, each narrower: the same compute."""
    fitting = [h for h in (1, 2, 4, 8, 16) if base.model.d_model % h == 0]
    return _cells("model.n_heads", fitting, base.model.n_heads, "h=")


def d_k(base: RunConfig) -> list[Cell]:
    """Narrower and wider heads, their number kept: of keys and values both, where the paper narrows keys alone."""
    width = base.model.head_width
    return _cells("model.d_head", [max(1, width // 4), max(1, width // 2), width * 2], width, "d_k=")


def d_ff(base: RunConfig) -> list[Cell]:
    """Half and double the feed-forward network."""
    return _cells("model.d_ff", [max(1, base.model.d_ff // 2), base.model.d_ff * 2], base.model.d_ff)


def depth(base: RunConfig) -> list[Cell]:
    """Fewer and more layers."""
    return _cells("model.n_layers", [1, 2, 4, 6], base.model.n_layers, "N=")


def size(base: RunConfig) -> list[Cell]:
    """Half and double the width, heads and feed-forward network kept."""
    width = base.model.d_model
    return _cells("model.d_model", [width // 2, width * 2], width)


def dropout(base: RunConfig) -> list[Cell]:
    """On sub-layers and embeddings, as in the paper."""
    return _cells("model.dropout", [0.0, 0.1, 0.2, 0.3], base.model.dropout, "dropout=", ("model.embedding_dropout",))


def label_smoothing(base: RunConfig) -> list[Cell]:
    """How much of each target is spread over all tokens."""
    return _cells("train.label_smoothing", [0.0, 0.1, 0.2], base.train.label_smoothing, "smoothing=")


def positions(base: RunConfig) -> list[Cell]:
    """Learned instead of sinusoidal positions (the paper's row E), rotated ones, and none at all."""
    return _cells("model.positions", ["sinusoidal", "learned", "rope", "none"], base.model.positions, "positions=")


def norm(base: RunConfig) -> list[Cell]:
    """LayerNorm before the sub-layers instead of after, RMSNorm, and no norm."""
    place = "pre" if base.model.norm_place == "post" else "post"
    kinds = [kind for kind in ("layer", "rms") if kind != base.model.norm]
    return [
        Cell(f"{place}-norm", (f"model.norm_place={place}",)),
        *(Cell(f"norm={kind}", (f"model.norm={kind}",)) for kind in kinds),
        Cell("no norm", ("model.norm=none",)),
    ]


def residual(base: RunConfig) -> list[Cell]:
    """Without the connections around sub-layers."""
    return [Cell("no residual", ("model.residual=false",))]


def attention(base: RunConfig) -> list[Cell]:
    """q·k without its 1/√d_k, additive attention, linear attention, and a window of 5 keys."""
    return [
        Cell("not scaled", ("model.attention_scale=1.0",)),
        Cell("additive", ("model.mixer=additive",)),
        Cell("linear", ("model.mixer=linear",)),
        Cell("window=5", ("model.window=5",)),
    ]


def mask(base: RunConfig) -> list[Cell]:
    """The decoder may look at what it must predict."""
    return [Cell("no mask", ("model.causal=false",))]


def warmup(base: RunConfig) -> list[Cell]:
    """No warm-up, a quarter, four times as long; the peak of the learning rate is kept."""
    steps = base.train.warmup
    return _cells("train.warmup", [0, steps // 4, steps * 4], steps)


AXES: dict[str, Axis] = {
    **{"heads": heads, "d_k": d_k, "d_ff": d_ff, "depth": depth, "size": size, "dropout": dropout},
    **{"positions": positions, "norm": norm, "residual": residual, "attention": attention, "mask": mask},
    **{"label-smoothing": label_smoothing, "warmup": warmup},
}


def mechanisms(base: RunConfig) -> list[Cell]:
    """Every entry of the table of mechanisms, one's own too; ranks and features are half the length."""
    causal, size = base.model.has_decoder and base.model.causal, max(1, base.data.max_len // 2)
    return [
        Cell(name.replace(":", "."), (f"model.mixer={name}", *([f"model.mixer_size={size}"] if entry.size else [])))
        for name, entry in all_mixers().items()
        if name != base.model.mixer and (entry.causal or not causal)
    ]


def sparse_patterns(base: RunConfig) -> list[Cell]:
    """The scaled dot product restricted to a window, strides or BigBird's blocks: about a quarter of the keys each."""
    length = base.data.max_len
    return [
        Cell("window", (f"model.window={max(1, length // 8)}",)),
        Cell("strided", ("model.sparsity=strided", f"model.sparsity_size={max(1, length // 8)}")),
        Cell("bigbird", ("model.sparsity=bigbird", f"model.sparsity_size={max(1, length // 16)}")),
    ]


def all_positions(base: RunConfig) -> list[Cell]:
    """Every position scheme."""
    return _cells("model.positions", get_args(Positions), base.model.positions, "positions=")


@dataclass(frozen=True)
class NamedSweep:
    """A sweep by name: a base and what of it is changed."""

    about: str
    recipe: str
    words: tuple[str, ...]
    axes: tuple[tuple[str, Axis], ...]  # with the letters of their groups
    metrics: tuple[str, ...] = ("valid_loss", "perplexity", "bleu")
    measures: tuple[str, ...] = ()
    ending: str = ""  # of ``EXTENDED_REPORTS``

    def sweep(self, name: str, words: Sequence[str] = (), seeds: int = 3) -> Sweep:
        base = Sweep(name, self.recipe, self.words, seeds=tuple(range(seeds)), metrics=self.metrics, about=self.about)
        base = replace(base.with_words(words), measures=self.measures, ending=self.ending)
        config = base.config(base.rows[0])
        cells = tuple(replace(cell, group=group) for group, axis in self.axes for cell in axis(config))
        return replace(base, cells=cells).without_base_copies()


def _single_axis(name: str) -> NamedSweep:
    about = " ".join((AXES[name].__doc__ or "").split())
    return NamedSweep(about, "en-ko", SMALL, (("", AXES[name]),))


def _only(axis: Axis, *names: str) -> Axis:
    return lambda base: [cell for cell in axis(base) if cell.name in names]


def _narrower_heads(base: RunConfig) -> list[Cell]:
    return d_k(base)[:2]


SWEEPS: dict[str, NamedSweep] = {
    **{name: _single_axis(name) for name in AXES if name != "mask"},
    "mask": NamedSweep(
        "The decoder may look at what it must predict: training loss collapses, and writing fails.",
        "en-ko",
        SMALL,
        (("", mask),),
        ("train_loss", "valid_loss", "loss_token_by_token", "bleu"),
        ("regard.experiments.sweep_cell:measure_token_by_token",),
    ),
    "mechanisms": NamedSweep(
        "Every attention mechanism, sparse pattern and position scheme in one masked language model on one corpus: "
        "what each learns, and what a training step costs. "
        "The base is the scaled dot product with sinusoidal positions.",
        "stdlib-masked",
        SHOOTOUT,
        (("A", mechanisms), ("B", sparse_patterns), ("C", all_positions)),
        ("valid_loss", "perplexity"),
        ending="mechanisms",
    ),
    "extrapolation": NamedSweep(
        "A language model trained at one length and asked at 1, 2, 4 and 8 times that, with every position scheme. "
        "The base has rotary positions.",
        "stdlib",
        EXTRAPOLATION,
        (("", all_positions),),
        EXTRAPOLATION_METRICS,
        ("regard.experiments.sweep_cell:measure_lengths",),
        "extrapolation",
    ),
    "paper": NamedSweep(
        "The rows of the paper's table 3 and two it left out (F), on Multi30k English → German: data=FOLDER.",
        "multi30k",
        PAPER,
        (
            *(("A", heads), ("B", _narrower_heads), ("C", _only(depth, "N=2", "N=4")), ("C", d_ff), ("D", dropout)),
            *(("D", label_smoothing), ("E", _only(positions, "positions=learned", "positions=none"))),
            *(("F", _only(norm, "no norm")), ("F", residual)),
        ),
        ("valid_loss", "perplexity", "bleu", "test_bleu"),
    ),
}


# Reports that say more than the table; the last argument is whether something may be measured for it.
EXTENDED_REPORTS: dict[str, Callable[[SweepReport, Callable[[str], None] | None, bool], SweepReport]] = {
    "mechanisms": shootout_report,
    "extrapolation": extrapolation_report,
}


def unknown_ablation(name: str, names: Iterable[str]) -> UsageError:
    names = list(names)
    return UsageError(f"there is no ablation {name!r}{did_you_mean(name, names)} (all: {', '.join(names)})")


def ablation(name: str, words: Sequence[str] = (), *, seeds: int = 3) -> Sweep:
    """The sweep of that name with words about its base."""
    if name not in SWEEPS:
        raise unknown_ablation(name, SWEEPS)
    return SWEEPS[name].sweep(name, check_words(words), seeds)


def list_ablations() -> dict[str, dict[str, Any]]:
    """Every ablation with what it is about and its cells, as they are with the base it comes with."""
    ablations: dict[str, dict[str, Any]] = {}
    for name, named in SWEEPS.items():
        cells = [cell.name for cell in named.sweep(name).cells]
        ablations[name] = {"about": named.about, "recipe": named.recipe, "cells": cells}
    about = "Softmax saturation with and without 1/√d_k: gradients against d_k, computed and predicted; trains nothing."
    return {**ablations, "scaling": {"about": about, "recipe": None, "cells": []}}


# ------------------------------------------------------------------------------------- softmax saturation

SATURATED = 30  # from d_k = 30 ln n on, the spread of n scores is far wider than what one softmax tells apart
WIDTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class ScalingPoint:
    """One d_k, with or without the factor; J = diag(p) − p pᵀ is the softmax's Jacobian."""

    d_k: int
    scaled: bool
    passed: float  # mean of ‖J‖_F over queries: how much of a gradient passes
    passed_median: float
    predicted: float | None  # the mean by theory; None where neither limit, variance 1 or saturation, is near
    gradient: float  # mean norm of the scores' gradient for a random gradient of the weights, by autograd: √E = ‖J‖_F
    largest: float  # mean of the largest weight
    saturated: float  # share of the queries whose largest weight is over 0.99


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
        """With and without, by d_k."""
        by_width = {(point.d_k, point.scaled): point for point in self.points}
        return [(by_width[d, True], by_width[d, False]) for d in sorted({point.d_k for point in self.points})]

    def to_text(self) -> str:
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


def jacobian_norm(p: Tensor) -> Tensor:
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


def measure_scaling(
    out: str | Path = "runs/ablate-scaling",
    *,
    widths: tuple[int, ...] = WIDTHS,
    n_keys: int = 64,
    n_queries: int = 2000,
    seed: int = 0,
) -> Scaling:
    """Draw queries and keys, compute their softmax with and without 1/√d_k, write scaling.json and scaling.png."""
    from .sweep_figures import draw_scaling

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    points = []
    for d_k in widths:
        scores = _scores(d_k, n_keys, n_queries, seed)
        for scaled in (True, False):
            points.append(_point(scores / math.sqrt(d_k) if scaled else scores, d_k, scaled, seed))
    result = Scaling(n_keys, tuple(points), folder)
    write_atomic(folder / "scaling.json", to_json(result.to_dict()))
    draw_scaling(result, folder / "scaling.png")
    return result


def _scores(d_k: int, n_keys: int, n_queries: int, seed: int) -> Tensor:
    """q·k of every query with keys of its own. (queries, keys)"""
    draw = torch.Generator().manual_seed(seed)
    rows = []
    for start in range(0, n_queries, 100):
        n = min(100, n_queries - start)
        q, k = torch.randn(n, d_k, generator=draw), torch.randn(n, n_keys, d_k, generator=draw)
        rows.append(torch.einsum("qd,qkd->qk", q, k))
    return torch.cat(rows).double()


def _point(scores: Tensor, d_k: int, scaled: bool, seed: int) -> ScalingPoint:
    n = scores.shape[1]
    scores = scores.detach().requires_grad_()
    weights = scores.softmax(-1)
    draw = torch.Generator().manual_seed(seed + 1)
    weights.backward(torch.randn(weights.shape, generator=draw, dtype=weights.dtype))
    assert scores.grad is not None
    norms, largest = jacobian_norm(weights.detach()), weights.detach().max(-1).values
    saturated = d_k >= SATURATED * math.log(n)
    predicted = predicted_scaled(n) if scaled else predicted_unscaled(n, d_k) if saturated else None
    return ScalingPoint(
        d_k=d_k,
        scaled=scaled,
        passed=float(norms.mean()),
        passed_median=float(norms.median()),
        predicted=predicted,
        gradient=float(scores.grad.norm(dim=-1).mean()),
        largest=float(largest.mean()),
        saturated=float((largest > 0.99).double().mean()),
    )
