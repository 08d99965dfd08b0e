"""What a demo is asked for: the recipe of en-ko, with the words typed. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..config import RunConfig
from ..errors import UsageError
from ..recipes import run_config

RECIPE = "en-ko"
N_JUDGED = 500
"""Held-out sentences that are translated to see how good the model is."""
# Over the recipe: killed without warning, a demo loses seconds of training, not minutes; and what the end of training
# measures on held-out sentences is measured on as many as the stage after it takes.
_OWN_WORDS = {"train.save_every": "100", "data.valid_rows": str(N_JUDGED)}


def demo_config(root: Path, words: Sequence[str]) -> RunConfig:
    """The run; words that would make it another demo are refused."""
    typed = {word.partition("=")[0] for word in words}
    if "train.out" in typed:
        raise UsageError("train.out is the demo's own: --out DIR says where")
    if typed & {"data", "data.source"}:
        raise UsageError("the demo learns en-ko; with your own pairs: regard train translate data.source=pairs.tsv")
    own = [f"{name}={value}" for name, value in _OWN_WORDS.items() if name not in typed]
    return run_config("translate", [*words, *own, f"train.out={root / 'run'}"], preset=RECIPE)
