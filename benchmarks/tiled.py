"""``tiled`` against torch's fused kernel: a long sequence on the CPU, forward and backward, gradients included.

    python benchmarks/tiled.py                  # length 16,384: the bars below
    python benchmarks/tiled.py --length 4096    # a quick look

Every run has a process of its own. The contenders take turns, so that a busy machine is busy for all of them; the best
run of each counts.
"""

from __future__ import annotations

import argparse
import sys

from measuring import best_measurements, print_verdict

from regard.experiments.bench_attention import Setup, contenders
from regard.experiments.benchmarking import format_table

MOST_MIB = 512
MOST_TIMES_SDPA = {"sdpa": None, "tiled": 2.0, "tiled+t5": 3.0}


def verdicts(best: dict[str, dict[str, float]]) -> list[tuple[bool, str]]:
    """Whether each bar was reached, and a sentence about it."""
    rows = []
    for name, most in MOST_TIMES_SDPA.items():
        if most is not None:
            ratio, mib = best[name]["seconds"] / best["sdpa"]["seconds"], best[name]["peak_bytes"] / 2**20
            rows.append((ratio <= most, f"{name}: {ratio:.2f}× the time of sdpa, at most {most:g}×"))
            rows.append((mib < MOST_MIB, f"{name}: {mib:,.0f} MiB peak resident growth, less than {MOST_MIB} MiB"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=2, help="runs of each, in turns")
    options = parser.parse_args()
    setup = Setup(options.length, backward=True)
    best = best_measurements({name: (name, setup) for name in MOST_TIMES_SDPA}, options.rounds, 0.0)
    one_matrix = setup.n_heads * setup.length**2 * 4 / 2**20
    print(
        f"length {setup.length:,}, {setup.n_heads} heads of width {setup.d_head}, fp32, causal, forward and backward, "
        f"CPU threads: {best['sdpa']['threads']}\none matrix of scores or weights would hold {one_matrix:,.0f} MiB\n"
    )
    rows = [
        [
            contenders()[name].title,
            f"{run['seconds']:,.2f}",
            f"{run['seconds'] / best['sdpa']['seconds']:.2f}×",
            f"{run['peak_bytes'] / 2**20:,.0f}",
        ]
        for name, run in best.items()
    ]
    print(format_table([["", "time, s", "of sdpa", "peak growth, MiB"], *rows]))
    print()
    passed = [print_verdict(*row) for row in verdicts(best)]
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
