"""Memory and time until the first step on a text of a gigabyte and on five million pairs: the table of docs/results.md.

    PYTHONPATH=src python benchmarks/memory.py --out runs/memory                 # 4 GB of disk, half an hour
    PYTHONPATH=src python benchmarks/memory.py --out runs/memory --share 0.05    # a twentieth of both files

Writes the two files, and starts a training run on each, stopped after 20 steps, twice: the first reads and tokenises,
the second finds the results in the cache. Each run has its own process. ``peak`` is the peak memory of the process,
``above`` the difference from the same run on a small file, which has the same libraries, model and optimiser.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

from measuring import print_verdict

MOST_MIB, MOST_SECONDS = 1536, 180  # above the model; until the first step of the second start
RUN = """
import json, resource, sys, time
started = time.time()
import regard
from regard.recipes import run_config

def first_step(record):
    seconds.setdefault("first", time.time() - started)

seconds, words = {}, sys.argv[2:]
regard.train(run_config(sys.argv[1], words), callbacks=[first_step], style="quiet")
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)
print(json.dumps({"first_step_s": seconds["first"], "seconds": time.time() - started, "peak_mib": peak}))
"""
TINY = (
    *("train.stop_at=20", "train.eval_every=0", "train.save_every=0", "train.batch_tokens=2048", "train.device=cpu"),
    *("train.precision=fp32", "train.compile=off", "model.d_model=64", "model.n_heads=4", "model.d_ff=128"),
    *("model.n_layers=2", "model.max_len=256"),
)


def write_file(path: Path, task: str, size: int) -> None:
    """A text of ``size`` bytes or ``size`` pairs: sentences of words that are as frequent as in a language (Zipf)."""
    random, letters = Random(0), "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(random.choice(letters) for _ in range(random.randint(2, 9))) for _ in range(20_000)]
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(words))))

    def sentence(least: int, most: int) -> str:
        return " ".join(random.choices(words, cum_weights=weights, k=random.randint(least, most)))

    done = 0
    with path.open("w", encoding="utf-8") as file:
        while done < size:
            if task == "translate":
                file.write(f"{sentence(3, 9)} {done}\t{sentence(3, 9)}\n")
                done += 1
            else:
                done += file.write(f"{sentence(5, 30)}\n")


def run_training(task: str, source: Path, out: Path, cache: Path) -> dict[str, Any]:
    """One training run in its own process: its seconds and its peak memory."""
    words = [f"data.source={source}", f"train.out={out}-{time.time_ns()}", *TINY]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.resolve())}
    done = subprocess.run([sys.executable, "-c", RUN, task, *words], env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/memory"))
    parser.add_argument("--share", type=float, default=1.0, help="of a gigabyte, and of five million lines")
    parser.add_argument("--only", choices=("lm", "translate"), help="one of the two files")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    files = {"lm": ("text.txt", int(args.share * 1e9)), "translate": ("pairs.tsv", int(args.share * 5e6))}
    rows, passed = [], True
    for task, (name, size) in files.items():
        if args.only not in (None, task):
            continue
        small, large = args.out / f"small-{name}", args.out / name
        write_file(small, task, 1000 if task == "translate" else 50_000)
        if not large.exists():
            write_file(large, task, size)
        base = run_training(task, small, args.out / "run", args.out / "cache")["peak_mib"]
        for which in ("first", "second"):
            run = run_training(task, large, args.out / "run", args.out / "cache")
            above = run["peak_mib"] - base
            rows.append({"task": task, "start": which, "above_mib": above, **run})
            passed &= print_verdict(
                above < MOST_MIB and (which == "first" or run["first_step_s"] < MOST_SECONDS),
                f"{task} on {large.stat().st_size / 1e6:,.0f} MB, {which} start: peak {run['peak_mib']:,.0f} MiB, "
                f"{above:,.0f} above the same run on a small file; first step after {run['first_step_s']:.0f} s",
            )
    (args.out / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
