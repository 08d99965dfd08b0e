"""What the embedded corpora teach in a few minutes on two cores: exact sentences on what was held out.

    python benchmarks/embedded.py [en-ko] [shapes] [--keep FOLDER]

en-ko    a word lookup, an LSTM without attention and the Transformer of the preset, each on held-out predicate–argument
         combinations and on longer sentences. Bar: the Transformer ≥ 95 % exact on combinations in under 3 minutes of
         ``regard.train``, tokenizer and evaluation included; the lookup ≤ 20 %.
shapes   the captioner of the preset on scenes with held-out colour–shape pairs. Bar: ≥ 90 % exact.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import regard
from regard.data.corpora.enko import lookup_accuracy
from regard.recipes import run_config

N = 1000
SPLITS = ("combinations", "longer")


def exact(run: Path, split: str) -> float:
    """Share of held-out examples whose output is the reference, letter by letter."""
    return float(regard.evaluate(run, split=split, limit=N, beam=1).metrics["exact"])


def trained(task: str, words: list[str], folder: Path, splits: tuple[str, ...]) -> tuple[float, dict[str, float]]:
    """(seconds of regard.train, exact match by split)."""
    config = run_config(task, [*words, f"train.out={folder}"])
    started = time.perf_counter()
    regard.train(config, style="quiet")
    seconds = time.perf_counter() - started
    return seconds, {split: exact(folder, split) for split in splits}


def row(name: str, seconds: float | None, found: dict[str, float]) -> None:
    shares = "  ".join(f"{split} {100 * share:5.1f} %" for split, share in found.items())
    print(f"{name:28} {'' if seconds is None else f'{seconds:5.0f} s':>8}  {shares}", flush=True)


def en_ko(folder: Path, lstm: bool) -> dict[str, bool]:
    looked_up = {split: lookup_accuracy(split, N) for split in SPLITS}
    row("word lookup", None, looked_up)
    if lstm:
        plain = ["model=lstm-plain", "model.d_model=256", "model.n_layers=1", "train.optimiser=adamw", "train.lr=2e-3"]
        row("LSTM without attention", *trained("translate", plain, folder / "lstm", SPLITS))
    seconds, found = trained("translate", [], folder / "transformer", SPLITS)
    row("Transformer, preset en-ko", seconds, found)
    return {
        f"lookup ≤ 20 %: {100 * looked_up['combinations']:.1f}": looked_up["combinations"] <= 0.2,
        f"combinations ≥ 95 % in 180 s: {100 * found['combinations']:.1f} in {seconds:.0f} s": (
            found["combinations"] >= 0.95 and seconds < 180
        ),
    }


def shapes(folder: Path) -> dict[str, bool]:
    seconds, found = trained("caption", [], folder / "shapes", ("valid",))
    row("captioner, preset shapes", seconds, found)
    return {f"shapes ≥ 90 %: {100 * found['valid']:.1f} in {seconds:.0f} s": found["valid"] >= 0.9}


def main() -> int:
    parser = argparse.ArgumentParser(description="The embedded corpora, learned.")
    parser.add_argument("corpora", nargs="*", default=["en-ko", "shapes"])
    parser.add_argument("--no-lstm", action="store_true", help="leave the LSTM out")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    asked = parser.parse_args()
    checks: dict[str, Any] = {}
    with nullcontext(asked.keep) if asked.keep else tempfile.TemporaryDirectory() as name:
        if "en-ko" in asked.corpora:
            checks |= en_ko(Path(name), not asked.no_lstm)
        if "shapes" in asked.corpora:
            checks |= shapes(Path(name))
    for bar, passed in checks.items():
        print(f"{'PASS' if passed else 'FAIL'}  {bar}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
