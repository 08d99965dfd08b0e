"""The paper's ablations by name: what each changes, relative to the base it is given (Vaswani et al. 2017, table 3).

An axis is a function of the base's config, so that ``regard ablate heads model.d_model=512`` asks what fits there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config import RunConfig
from . import extrapolation, shootout
from .ablating import ablate
from .sweep import Cell, Sweep, named_words, unknown
from .sweep_report import Report

__all__ = ["AXES", "SWEEPS", "ablate", "ablation"]

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


def _cells(
    field: str, values: Iterable[object], base: object, prefix: str = "", more: Sequence[str] = ()
) -> list[Cell]:
    """One cell a value, the base's own left out."""
    label = prefix or f"{field.rpartition('.')[2]}="
    made = []
    for value in dict.fromkeys(values):
        if value != base:
            made.append(Cell(f"{label}{value}", (f"{field}={value}", *(f"{name}={value}" for name in more))))
    return made


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


@dataclass(frozen=True)
class Named:
    """A sweep by name: a base and what of it is changed."""

    about: str
    recipe: str
    words: tuple[str, ...]
    axes: tuple[tuple[str, Axis], ...]
    """With the letters of their groups."""
    metrics: tuple[str, ...] = ("valid_loss", "perplexity", "bleu")
    measures: tuple[str, ...] = ()
    ending: str = ""
    """Of ``FINISHED``."""

    def sweep(self, name: str, words: Sequence[str] = (), seeds: int = 3) -> Sweep:
        base = Sweep(name, self.recipe, self.words, seeds=tuple(range(seeds)), metrics=self.metrics, about=self.about)
        base = replace(base.with_words(words), measures=self.measures, ending=self.ending)
        config = base.config(base.rows[0])
        cells = tuple(replace(cell, group=group) for group, axis in self.axes for cell in axis(config))
        return replace(base, cells=cells).without_base()


def _one(name: str) -> Named:
    about = " ".join((AXES[name].__doc__ or "").split())
    return Named(about, "en-ko", SMALL, (("", AXES[name]),))


def _only(axis: Axis, *names: str) -> Axis:
    return lambda base: [cell for cell in axis(base) if cell.name in names]


def _narrower(base: RunConfig) -> list[Cell]:
    return d_k(base)[:2]


SWEEPS: dict[str, Named] = {
    **{name: _one(name) for name in AXES if name != "mask"},
    "mask": Named(
        "The decoder may look at what it must predict: training loss collapses, and writing fails.",
        "en-ko",
        SMALL,
        (("", mask),),
        ("train_loss", "valid_loss", "loss_token_by_token", "bleu"),
        ("regard.experiments.token_by_token:measure",),
    ),
    "mechanisms": Named(
        shootout.ABOUT,
        shootout.RECIPE,
        shootout.WORDS,
        (("A", shootout.mechanisms), ("B", shootout.patterns), ("C", shootout.positions)),
        shootout.METRICS,
        ending="mechanisms",
    ),
    "extrapolation": Named(
        extrapolation.ABOUT,
        extrapolation.RECIPE,
        extrapolation.WORDS,
        (("", shootout.positions),),
        extrapolation.METRICS,
        ("regard.experiments.extrapolation:losses",),
        "extrapolation",
    ),
    "paper": Named(
        "The rows of the paper's table 3 and two it left out (F), on Multi30k English → German: data=FOLDER.",
        "multi30k",
        PAPER,
        (
            *(("A", heads), ("B", _narrower), ("C", _only(depth, "N=2", "N=4")), ("C", d_ff), ("D", dropout)),
            *(("D", label_smoothing), ("E", _only(positions, "positions=learned", "positions=none"))),
            *(("F", _only(norm, "no norm")), ("F", residual)),
        ),
        ("valid_loss", "perplexity", "bleu", "test_bleu"),
    ),
}


FINISHED: dict[str, Callable[[Report, Callable[[str], None] | None, bool], Report]] = {
    **{"mechanisms": shootout.shot, "extrapolation": extrapolation.lengths}
}
"""Reports that say more than the table: what a step costs, what cannot be asked. The last argument is whether something
may be measured for it."""


def ablation(name: str, words: Sequence[str] = (), *, seeds: int = 3) -> Sweep:
    """The sweep of that name with words about its base."""
    if name not in SWEEPS:
        raise unknown("ablation", name, SWEEPS)
    return SWEEPS[name].sweep(name, named_words(words), seeds)


def listing() -> dict[str, dict[str, Any]]:
    """Every ablation with what it is about and its cells, as they are with the base it comes with."""
    found: dict[str, dict[str, Any]] = {}
    for name, named in SWEEPS.items():
        cells = [cell.name for cell in named.sweep(name).cells]
        found[name] = {"about": named.about, "recipe": named.recipe, "cells": cells}
    about = "Softmax saturation with and without 1/√d_k: gradients against d_k, computed and predicted; trains nothing."
    return {**found, "scaling": {"about": about, "recipe": None, "cells": []}}
