"""Do sparse plans skip the work they claim to skip? Patterns at length 8,192 against full ``tiled`` attention.

    python benchmarks/sparse.py
    python benchmarks/sparse.py --length 2048

For each pattern: the share of (query, key) pairs its mask allows, the share its plan computes (blocks, so more), the
speed-up that share promises over computing everything, and the one that was measured. The bar is for the window.
"""

from __future__ import annotations

import argparse
import sys

import torch
from measuring import best_measurements, print_verdict

from regard.attention.attend import prepare
from regard.attention.frame import Frame
from regard.attention.masks import BlockPlan, Mask, causal, everything
from regard.experiments.bench_attention import Setup, sparse_mask
from regard.experiments.benchmarking import format_table

LEAST_SPEED_UP = 5.0
PATTERNS = ("window", "strided", "bigbird")
# Name → (contender, whether it is causal). Every pattern here is causal, so causal attention is the stricter peer.
RUNS = {"full": ("tiled", False), "causal": ("tiled", True), **{name: (name, True) for name in PATTERNS}}


def mask_of(name: str) -> Mask:
    return {"full": everything(), "causal": causal()}.get(name) or sparse_mask(name, is_causal=True)


def plan_of(name: str, setup: Setup) -> BlockPlan:
    """The plan ``tiled`` follows for these sizes."""
    heads = torch.empty(1, setup.n_heads, setup.length, setup.d_head)
    return prepare(heads, heads, heads, mask_of(name)).plan()


def allowed_share(name: str, length: int) -> float:
    """The share of pairs the mask allows, counted stripe by stripe."""
    frame = Frame.aligned(1, 1, length, length)
    stripes = [slice(start, min(start + 512, length)) for start in range(0, length, 512)]
    return sum(int(mask_of(name).tile(rows, slice(None), frame).sum()) for rows in stripes) / length**2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8_192)
    parser.add_argument("--rounds", type=int, default=2, help="turns of each")
    options = parser.parse_args()
    setup = Setup(options.length)
    plans = {name: plan_of(name, setup) for name in RUNS}
    passed = True
    for backward in (False, True):
        jobs = {
            name: (contender, Setup(options.length, causal=is_causal, backward=backward))
            for name, (contender, is_causal) in RUNS.items()
        }
        best = {name: run["seconds"] for name, run in best_measurements(jobs, options.rounds, 0.5).items()}
        direction = "forward and backward" if backward else "forward"
        print(f"\nlength {setup.length:,}, {setup.n_heads} heads of width {setup.d_head}, fp32, {direction}\n")
        head = ["", "allowed", "computed", "blocks", "time, ms", "claimed", "measured", "over causal"]
        rows = [
            [
                name,
                f"{allowed_share(name, setup.length):.1%}",
                f"{plans[name].density:.1%}",
                "{}×{}".format(*plans[name].block),
                f"{seconds * 1e3:,.1f}",
                f"{plans['full'].density / plans[name].density:.1f}×",
                f"{best['full'] / seconds:.1f}×",
                f"{best['causal'] / seconds:.1f}×",
            ]
            for name, seconds in best.items()
        ]
        print(format_table([head, *rows]), end="\n\n")
        for peer in ("full", "causal"):
            speed_up = best[peer] / best["window"]
            sentence = f"window of 256: {speed_up:.1f}× faster than {peer} tiled, at least {LEAST_SPEED_UP:g}×"
            passed &= print_verdict(speed_up >= LEAST_SPEED_UP, sentence)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
