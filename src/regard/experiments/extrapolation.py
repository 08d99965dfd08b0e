"""Length extrapolation: a language model trained at one length, asked at 2, 4 and 8 times that (Press et al. 2022, §2).

The same held-out text at every length: it is cut into pieces so long, and every token is predicted from what stands
before it in its piece. Longer pieces give more to look at: a scheme that goes beyond its training gets better, one that
does not gets worse. A table of learned positions ends where training ended: it cannot be asked at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..foundation.files import write_atomic
from ..models import Model
from ..training.systems import data_for, open_data, open_system, task_for
from ..training.tasks.language_modelling import Texts
from .sweep_report import Report, RowOf

__all__ = ["FACTORS", "WORDS", "Lengths", "lengths", "losses", "losses_by_length"]

ABOUT = (
    "A language model trained at one length and asked at 1, 2, 4 and 8 times that, with every position scheme. "
    "The base has rotary positions."
)
RECIPE = "stdlib"
WORDS = (
    *("data.tokenizer=bytes", "data.max_len=128", "data.packing=blocks"),
    *("model.d_model=64", "model.n_layers=2", "model.n_heads=4", "model.d_ff=256", "model.max_len=128"),
    *("model.qk_norm=false", "model.scale_embeddings=true"),
    *("train.steps=400", "train.warmup=30", "train.batch_tokens=2048", "train.eval_batches=16"),
    *("train.precision=fp32", "train.compile=off", "train.eval_every=0", "train.save_every=0", "train.samples=0"),
)
FACTORS = (1, 2, 4, 8)
METRICS = tuple(f"loss_{factor}x" for factor in FACTORS)
_TOKENS = 1 << 16
"""Held-out tokens that are predicted at every length, out of so many texts at most."""
_TEXTS = 24
_AT_ONCE = 1 << 14


def losses(run: Path) -> dict[str, Any]:
    """The losses of a finished run, ``loss_1x`` … ``loss_8x``; ``cannot`` says why one is missing."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    system = open_system(run, device)
    data, whole = data_for(system, {})
    task = task_for(system, open_data(data, whole, system), data, {}, system.config.train.seed)
    tokens = cast(Texts, task).token_file(task.examples("valid", _TEXTS)).tokens
    length = system.config.data.max_len
    found, cannot = losses_by_length(system.model, tokens, [factor * length for factor in FACTORS])
    named = {f"loss_{n // length}x": loss for n, loss in found.items()}
    return {**named, "cannot": {f"loss_{n // length}x": why for n, why in cannot.items()}}


def losses_by_length(
    model: Model, tokens: np.ndarray, lengths: list[int], most: int = _TOKENS
) -> tuple[dict[int, float], dict[int, str]]:
    """Mean -log p of the same tokens, in pieces of each length; and why there is none, where the model refuses."""
    longest = max(lengths)
    n_pieces = min(most, len(tokens) - 1) // longest
    if n_pieces < 1:
        raise ValueError(f"{len(tokens):,} held-out tokens are less than one piece of {longest + 1:,}")
    starts = np.linspace(0, len(tokens) - 1 - longest, n_pieces).astype(np.int64)  # spread over all of the text
    read = torch.from_numpy(np.stack([tokens[start : start + longest + 1] for start in starts]).astype(np.int64))
    found, cannot = {}, {}
    for length in lengths:
        try:
            found[length] = _loss(model, read[:, :-1].reshape(-1, length), read[:, 1:].reshape(-1, length))
        except ValueError as error:
            cannot[length] = str(error)
    return found, cannot


@torch.no_grad()
def _loss(model: Model, inputs: Tensor, targets: Tensor) -> float:
    total = 0.0
    rows = max(1, _AT_ONCE // inputs.shape[1])
    for some, wanted in zip(inputs.split(rows), targets.split(rows), strict=True):
        logits = model(some.to(model.device)).float()
        total += float(F.cross_entropy(logits.flatten(0, 1), wanted.to(model.device).flatten(), reduction="sum"))
    return total / targets.numel()


# ------------------------------------------------------------------------------------- the report


@dataclass(frozen=True)
class Lengths(Report):
    """The sweep's table with lengths for titles, and "cannot" where a scheme ends."""

    @property
    def length(self) -> int:
        """That of training."""
        return self.sweep.config(self.base.cell).data.max_len

    def cannot(self, row: RowOf, metric: str) -> str | None:
        """Why a finished run has no such loss."""
        for run in row.runs.values():
            if run is not None and metric in (run["metrics"].get("cannot") or {}):
                return str(run["metrics"]["cannot"][metric])
        return None

    def _lines(self) -> list[list[str]]:
        head, *lines = super()._lines()
        titles = {metric: f"loss at {factor * self.length:,}" for metric, factor in zip(METRICS, FACTORS, strict=True)}
        return [[titles.get(text, text) for text in head], *lines]

    def _number(self, row: RowOf, name: str) -> str:
        return "cannot  " if self.cannot(row, name) else super()._number(row, name)

    def said(self) -> list[str]:
        ends = [(row, why) for row in self.rows if (why := self.cannot(row, METRICS[-1]))]
        more = [f"{row.cell.name}: cannot be asked beyond its training: {why}" for row, why in ends]
        return [*super().said(), *more, "every column predicts the same held-out text; lengths.png draws it"]


def lengths(report: Report, say: Callable[[str], None] | None = None, measure: bool = False) -> Lengths:
    """The report of an extrapolation: table and picture written. Its runs have measured all there is."""
    from .shootout_figure import draw_lengths

    found = Lengths(report.sweep, report.out, report.columns, report.rows)
    write_atomic(found.out / "table.md", found.markdown().encode())
    if any(row.n_done for row in found.rows):
        draw_lengths(found, found.out / "lengths.png")
    return found
