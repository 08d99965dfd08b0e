"""Steps and seconds until the paper's recipe and the modern one translate most held-out sentences without a mistake.

python benchmarks/recipes_to_exact.py --out runs/recipes     # the embedded grammar; several minutes on two cores
python benchmarks/recipes_to_exact.py train.steps=5000 --out runs/longer --recipes paper
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from pathlib import Path

import regard
from regard.recipes import run_config
from regard.training.loop import StepRecord

RECIPES = {"paper": "paper", "modern": "en-ko"}


class Reached(Exception):
    """Enough sentences are exactly right."""


def measure(name: str, share: float, out: Path, words: list[str]) -> dict[str, float | int | str | None]:
    """Train until the share of exact translations is reached, or to the recipe's end."""
    train = {"eval_every": 100, "samples": 0, "out": str(out / name)}
    config = run_config("translate", words, preset=RECIPES[name], train=train)

    seen: list[tuple[int, float]] = []  # (step, exact) of every evaluation

    def stop(record: StepRecord) -> None:
        if "exact" in record.metrics:
            seen.append((record.step, record.metrics["exact"]))
            if seen[-1][1] >= share:
                raise Reached

    began = time.process_time()
    with contextlib.suppress(Reached):
        regard.train(config, style="quiet", callbacks=[stop])
    lines = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    step, exact = seen[-1]
    return {
        "recipe": name,
        "steps": step if exact >= share else None,
        "exact": round(exact, 3),
        "training_seconds": round(max(line.get("train_seconds", 0.0) for line in lines), 1),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.9)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("words", nargs="*", help="fields of the runs, as in regard train")
    options = parser.parse_args()
    for name in options.recipes:
        print(json.dumps(measure(name, options.share, options.out, options.words)), flush=True)


if __name__ == "__main__":
    main()
