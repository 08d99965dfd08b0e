"""``tiled`` against torch's fused kernel: a long sequence on the CPU, forward and backward, gradients included.

    python benchmarks/tiled.py                  # length 16,384: the bars below
    python benchmarks/tiled.py --length 4096    # a quick look

Every run has a process of its own. The contenders take turns, so that a busy machine is busy for all of them; the best
run of each counts.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass

from regard.experiments.bench_attention import Setup, contenders, measure_contender
from regard.experiments.benchmarking import format_table
from regard.experiments.sweep_runner import LocalRunner

MOST_MIB = 512
MOST_TIMES_SDPA = {"sdpa": None, "tiled": 2.0, "tiled+t5": 3.0}


@dataclass
class Best:
    seconds: float = float("inf")
    peak_bytes: int = 0


def measure(setup: Setup, rounds: int) -> tuple[dict[str, Best], int]:
    """The best of each contender, and the number of threads."""
    best = {name: Best() for name in MOST_TIMES_SDPA}
    threads = 0
    with LocalRunner() as runner:
        for n in range(rounds):
            for name, found in best.items():
                print(f"round {n + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
                answer = runner.submit(measure_contender, (name, setup, 0.0)).result()
                found.seconds = min(found.seconds, answer["seconds"])
                found.peak_bytes = max(found.peak_bytes, answer["peak_bytes"])
                threads = answer["threads"]
    return best, threads


def verdicts(best: dict[str, Best]) -> list[tuple[str, bool]]:
    """Each bar as a sentence, and whether it was reached."""
    found: list[tuple[str, bool]] = []
    for name, most in MOST_TIMES_SDPA.items():
        if most is None:
            continue
        ratio, mib = best[name].seconds / best["sdpa"].seconds, best[name].peak_bytes / 2**20
        found.append((f"{name}: {ratio:.2f}× the time of sdpa, at most {most:g}×", ratio <= most))
        found.append((f"{name}: {mib:,.0f} MiB peak resident growth, less than {MOST_MIB} MiB", mib < MOST_MIB))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in turns")
    options = parser.parse_args()
    setup = Setup(options.length, backward=True)
    best, threads = measure(setup, options.rounds)
    one_matrix = setup.n_heads * setup.length**2 * 4 / 2**20
    print(
        f"length {setup.length:,}, {setup.n_heads} heads of width {setup.d_head}, fp32, causal, forward and backward, "
        f"CPU threads: {threads}\none matrix of scores or weights would hold {one_matrix:,.0f} MiB\n"
    )
    rows = [
        [
            contenders()[name].title,
            f"{found.seconds:,.2f}",
            f"{found.seconds / best['sdpa'].seconds:.2f}×",
            f"{found.peak_bytes / 2**20:,.0f}",
        ]
        for name, found in best.items()
    ]
    print(format_table([["", "time, s", "of sdpa", "peak growth, MiB"], *rows]))
    print()
    for sentence, reached in verdicts(best):
        print(f"{'PASS' if reached else 'FAIL'}  {sentence}")
    return 0 if all(reached for _, reached in verdicts(best)) else 1


if __name__ == "__main__":
    sys.exit(main())
