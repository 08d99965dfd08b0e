"""The pattern scores of heads over the checkpoints of a run: when each head learned its pattern.

Every checkpoint reads the same texts, by default random tokens repeated once, and its heads get the scores of
``lens.patterns``. A head is born at the first checkpoint from which its score stays above a threshold. The induction
heads of a language model appear abruptly, and the loss on repeated tokens falls with them (Olsson et al. 2022).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..errors import BadModelFile
from ..foundation.cancellation import check_cancelled
from ..foundation.plotting import SOFT, new_figure, style_panel
from ..foundation.progress import track
from ..models import Model, open_model
from .look import Look, look
from .notebook import figure_html
from .patterns import nan_to_none

PATTERNS = ("previous", "induction", "repeated", "first")  # scored by default
LEAST = 0.4  # the score from which a head has a pattern, as in ``HeadPatterns.label``
_STEP = re.compile(r"step-(\d+)")  # folder of a checkpoint
_COLOURS = ("#1668dc", "#d4380d", "#389e0d", "#722ed1", "#d48806", "#08979c", "#c41d7f", "#595959")


@dataclass(frozen=True, eq=False)
class HeadHistory:
    """Scores of heads at every checkpoint of a run."""

    kind: str
    steps: list[int]
    scores: dict[str, Tensor]  # by pattern, (steps, L, H); NaN where no query has a key of the pattern
    loss: list[float]  # mean -log p of the texts' tokens at each step, in nats; NaN if the model predicts none
    repeat_loss: list[float]  # the same over bigrams that occur earlier in their text

    def births(self, pattern: str = "induction", least: float = LEAST) -> dict[tuple[int, int], int]:
        """{(layer, head): step} of the heads that have the pattern at the end, with the step from which they had it."""
        if pattern not in self.scores:
            raise ValueError(f"pattern={pattern!r} was not scored; {', '.join(self.scores)} were")
        has = self.scores[pattern] >= least  # (steps, L, H)
        lasting = has.flip(0).cumprod(0).flip(0).bool()  # at this step and all later ones
        return {
            (layer, head): self.steps[int(lasting[:, layer, head].nonzero()[0])]
            for layer, head in lasting[-1].nonzero().tolist()
        }

    def to_dict(self) -> dict[str, Any]:
        """A dictionary for JSON: scores as nested lists [step][layer][head], None for NaN."""
        births = {
            pattern: [
                {"layer": layer, "head": head, "step": step} for (layer, head), step in self.births(pattern).items()
            ]
            for pattern in self.scores
        }
        scores = {name: nan_to_none(x.tolist()) for name, x in self.scores.items()}
        losses = {"loss": nan_to_none(self.loss), "repeat_loss": nan_to_none(self.repeat_loss)}
        return {"kind": self.kind, "steps": self.steps, **losses, "scores": scores, "births": births}

    def to_text(self) -> str:
        """A line for each step with the losses and the best head of each pattern; then the birth of each head."""
        names = list(self.scores)
        lines = ["    step    loss  repeat  " + "  ".join(f"{name:>18}" for name in names)]
        for at, step in enumerate(self.steps):
            cells = [f"{step:8d}", f"{self.loss[at]:6.3f}", f"{self.repeat_loss[at]:6.3f}"]
            lines.append("  ".join([*cells, *(f"{self._best(name, at):>18}" for name in names)]))
        for name in names:
            born = [f"L{layer + 1}H{head + 1} {step}" for (layer, head), step in self.births(name).items()]
            lines.append(f"{name} from step: {', '.join(born) or '-'}")
        return "\n".join(lines)

    def _best(self, name: str, at: int) -> str:
        """The highest score at a step, and its head."""
        x = self.scores[name][at].nan_to_num(-1.0)
        layer, head = divmod(int(x.argmax()), x.shape[1])
        return f"{float(x[layer, head]):.2f} L{layer + 1}H{head + 1}" if float(x.max()) >= 0 else "-"

    def draw(self, file: str | Path) -> Path:
        """Draw a panel for each pattern with a line for each head; heads that have the pattern at the end are named."""
        self._figure().savefig(file, facecolor="white")
        return Path(file)

    def _figure(self) -> Any:
        n = len(self.scores)
        figure = new_figure(7, 1.2 + 1.7 * n)
        panels = figure.subplots(n + 1, 1, sharex=True)
        for panel, (name, x) in zip(panels, self.scores.items(), strict=False):
            born = list(self.births(name))
            panel.plot(self.steps, x.flatten(1).tolist(), color="#c9d1d9", linewidth=0.8)
            for number, (layer, head) in enumerate(born[: len(_COLOURS)]):
                label = f"L{layer + 1}H{head + 1}"
                panel.plot(self.steps, x[:, layer, head].tolist(), color=_COLOURS[number], linewidth=1.6, label=label)
            panel.set_ylim(-0.02, 1.02)
            panel.set_title(name, fontsize=10, color=SOFT, loc="left")
            if born:
                panel.legend(fontsize=7, frameon=False, loc="upper left", ncol=2)
        for values, label in ((self.loss, "all tokens"), (self.repeat_loss, "repeated")):
            panels[-1].plot(self.steps, values, linewidth=1.6, label=label)
        panels[-1].set_title("loss", fontsize=10, color=SOFT, loc="left")
        panels[-1].set_xlabel("step", color=SOFT, fontsize=9)
        panels[-1].legend(fontsize=7, frameon=False)
        for panel in panels:
            style_panel(panel)
        figure.tight_layout()
        return figure

    def _repr_html_(self) -> str:
        return figure_html(self._figure())

    def __repr__(self) -> str:
        return f"HeadHistory({self.kind}, {len(self.steps)} steps, {len(self.births())} induction heads)"


def head_history(
    run: str | Path,
    what: Any = None,
    target: Any = None,
    *,
    kind: str | None = None,
    patterns: Sequence[str] = PATTERNS,
    steps: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> HeadHistory:
    """Score the heads of every checkpoint of a run.

    what    texts, or rows of token ids; None: repeated random tokens, the same for every checkpoint
    target  encoder-decoder only: the decoder's input for each text
    kind    kind of attention, "self", "cross" or "encoder"
    steps   some of the checkpoints; None: all that the run has kept (see ``train.keep``)
    """
    available = checkpoint_steps(run)
    selected = available if steps is None else list(steps)
    if missing := sorted(set(selected) - set(available)):
        raise ValueError(f"{run} has no checkpoint of step {missing[0]}; it has {', '.join(map(str, available))}")
    scores: dict[str, list[Tensor]] = {name: [] for name in patterns}
    losses: list[tuple[float, float]] = []
    resolved_kind = ""
    for step in track(selected, "checkpoints", len(selected), lambda step: 1):
        check_cancelled()
        model = open_model(f"{run}@{step}", device)
        looks = _look_at_each(model, what, target)
        by_text = [each.patterns(kind=kind) for each in looks]
        for name in patterns:
            if name not in by_text[0].scores:
                raise ValueError(f"{name!r} is not one of the patterns {', '.join(by_text[0].scores)}")
            scores[name].append(torch.stack([each.scores[name] for each in by_text]).nanmean(0))
        losses.append(_losses(looks))
        resolved_kind = by_text[0].kind
    return HeadHistory(
        resolved_kind,
        selected,
        {name: torch.stack(values) for name, values in scores.items()},
        [both[0] for both in losses],
        [both[1] for both in losses],
    )


def checkpoint_steps(run: str | Path) -> list[int]:
    """The steps of the checkpoints in a run directory."""
    folder = Path(run) / "checkpoints"
    matches = [_STEP.fullmatch(path.name) for path in folder.iterdir()] if folder.is_dir() else []
    steps = sorted(int(match[1]) for match in matches if match)
    if not steps:
        raise BadModelFile(f"{run} has no checkpoints, so it has no history: give a run that regard train wrote")
    return steps


def repeated_tokens(model: Model, n: int = 4, length: int = 24) -> list[list[int]]:
    """n rows of ``length`` distinct random tokens followed by the same tokens again; without special tokens."""
    config = model.config
    special = {config.pad_id, config.bos_id, config.eos_id}
    vocabulary = [token for token in range(config.vocab_size) if token not in special]
    length = min(length, len(vocabulary), (config.max_len or 2 * length) // 2)
    rows = []
    for row in range(n):
        drawn = torch.randperm(len(vocabulary), generator=torch.Generator().manual_seed(row))[:length].tolist()
        rows.append([vocabulary[index] for index in drawn] * 2)
    return rows


def _look_at_each(model: Model, what: Any, target: Any) -> list[Look]:
    if what is None:
        if model.config.source != "text" or model.is_encoder_decoder:
            raise ValueError("repeated random tokens are for models of one text; give this model an input")
        return [look(model, row) for row in repeated_tokens(model)]
    if not isinstance(what, list | tuple) or (what and isinstance(what[0], int)):
        return [look(model, what, target)]
    if not what:
        raise ValueError("there are no texts to look at")
    targets = target if isinstance(target, list | tuple) else [target] * len(what)
    if len(targets) != len(what):
        raise ValueError(f"there are {len(targets)} targets for {len(what)} sources")
    return [look(model, *both) for both in zip(what, targets, strict=True)]


@torch.no_grad()
def _losses(looks: list[Look]) -> tuple[float, float]:
    """Mean -log p of all tokens that a decoder predicts, and of those that end a repeated bigram."""
    all_losses, repeat_losses = [], []
    for each in looks:
        if not each.model.is_decoder_only or each.model.head is None:
            return math.nan, math.nan
        tokens = each.inputs[0][0]
        loss = cross_entropy(each.logits()[:-1], tokens[1:], reduction="none").tolist()
        all_losses += loss
        bigrams: set[tuple[int, int]] = set()
        for bigram, value in zip(pairwise(tokens.tolist()), loss, strict=True):
            if bigram in bigrams:
                repeat_losses.append(value)
            bigrams.add(bigram)
    mean = sum(all_losses) / len(all_losses) if all_losses else math.nan
    return mean, sum(repeat_losses) / len(repeat_losses) if repeat_losses else math.nan
