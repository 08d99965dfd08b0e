"""What a model learns from the embedded corpora in a few minutes on two cores: exact match on held-out examples.

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

from measuring import print_verdict

import regard
from regard.data.corpora.enko import lookup_accuracy
from regard.recipes import run_config

N = 1000
SPLITS = ("combinations", "longer")


def exact_match(run: Path, split: str) -> float:
    """Share of held-out examples whose output is the reference, letter by letter."""
    return float(regard.evaluate(run, split=split, limit=N, beam=1).metrics["exact"])


def train_and_evaluate(
    task: str, words: list[str], folder: Path, splits: tuple[str, ...]
) -> tuple[float, dict[str, float]]:
    """Seconds of regard.train, and the exact match by split."""
    config = run_config(task, [*words, f"train.out={folder}"])
    started = time.perf_counter()
    regard.train(config, style="quiet")
    seconds = time.perf_counter() - started
    return seconds, {split: exact_match(folder, split) for split in splits}


def print_row(name: str, seconds: float | None, scores: dict[str, float]) -> None:
    shares = "  ".join(f"{split} {100 * share:5.1f} %" for split, share in scores.items())
    print(f"{name:28} {'' if seconds is None else f'{seconds:5.0f} s':>8}  {shares}", flush=True)


def en_ko(folder: Path, lstm: bool) -> dict[str, bool]:
    lookup = {split: lookup_accuracy(split, N) for split in SPLITS}
    print_row("word lookup", None, lookup)
    if lstm:
        plain = ["model=lstm-plain", "model.d_model=256", "model.n_layers=1", "train.optimiser=adamw", "train.lr=2e-3"]
        print_row("LSTM without attention", *train_and_evaluate("translate", plain, folder / "lstm", SPLITS))
    seconds, scores = train_and_evaluate("translate", [], folder / "transformer", SPLITS)
    print_row("Transformer, preset en-ko", seconds, scores)
    return {
        f"lookup ≤ 20 %: {100 * lookup['combinations']:.1f}": lookup["combinations"] <= 0.2,
        f"combinations ≥ 95 % in 180 s: {100 * scores['combinations']:.1f} in {seconds:.0f} s": (
            scores["combinations"] >= 0.95 and seconds < 180
        ),
    }


def shapes(folder: Path) -> dict[str, bool]:
    seconds, scores = train_and_evaluate("caption", [], folder / "shapes", ("valid",))
    print_row("captioner, preset shapes", seconds, scores)
    return {f"shapes ≥ 90 %: {100 * scores['valid']:.1f} in {seconds:.0f} s": scores["valid"] >= 0.9}


def main() -> int:
    parser = argparse.ArgumentParser(description="The embedded corpora, learned.")
    parser.add_argument("corpora", nargs="*", default=["en-ko", "shapes"])
    parser.add_argument("--no-lstm", action="store_true", help="leave the LSTM out")
    parser.add_argument("--keep", type=Path, help="a folder for the runs; without it they are removed")
    args = parser.parse_args()
    checks: dict[str, Any] = {}
    with nullcontext(args.keep) if args.keep else tempfile.TemporaryDirectory() as name:
        if "en-ko" in args.corpora:
            checks |= en_ko(Path(name), not args.no_lstm)
        if "shapes" in args.corpora:
            checks |= shapes(Path(name))
    for bar, passed in checks.items():
        print_verdict(passed, bar)
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
