"""From which length on is causal linear attention faster than torch's fused softmax attention?

python benchmarks/linear.py
python benchmarks/linear.py --backward --lengths 256,512,1024
"""

from __future__ import annotations

import argparse
import sys

from measuring import best_measurements, crossing_length, print_verdict

from regard.experiments.bench_attention import Setup
from regard.experiments.benchmarking import fit_exponent, format_table

NAMES = ("sdpa", "linear", "performer")


def measure(lengths: list[int], rounds: int, backward: bool) -> dict[str, list[float]]:
    """The best seconds of each contender at each length."""
    best: dict[str, list[float]] = {name: [] for name in NAMES}
    for length in lengths:
        print(f"length {length:,}", file=sys.stderr, flush=True)
        jobs = {name: (name, Setup(length, backward=backward)) for name in NAMES}
        for name, run in best_measurements(jobs, rounds, 0.2).items():
            best[name].append(run["seconds"])
    return best


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="128,256,512,1024,2048,4096,8192")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each")
    parser.add_argument("--backward", action="store_true", help="forward and backward")
    options = parser.parse_args()
    lengths = sorted({int(word) for word in options.lengths.split(",")})
    best = measure(lengths, options.rounds, options.backward)
    direction = "forward and backward" if options.backward else "forward"
    print(f"causal, 8 heads of width 64, fp32, {direction}; time in ms\n")
    rows = [
        [
            name,
            *[f"{s * 1e3:,.2f}" for s in times],
            f"T^{power:.2f}" if (power := fit_exponent(lengths, times)) else "–",
        ]
        for name, times in best.items()
    ]
    print(format_table([["", *[f"{length:,}" for length in lengths], "grows like"], *rows]), end="\n\n")
    for name in NAMES[1:]:
        at = crossing_length(lengths, best[name], best["sdpa"])
        if at is None:
            print(f"{name} is not faster than sdpa up to length {lengths[-1]:,}")
        else:
            times = best["sdpa"][-1] / best[name][-1]
            print(f"{name} is faster than sdpa from length {at:,.0f} on; {times:.1f}× at {lengths[-1]:,}")
    is_faster = crossing_length(lengths, best["linear"], best["sdpa"]) is not None
    return 0 if print_verdict(is_faster, "causal linear attention beats sdpa from some length on") else 1


if __name__ == "__main__":
    sys.exit(main())
