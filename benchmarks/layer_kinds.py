"""Self-attention, recurrence and convolution: measured times, and the operations of table 1 of the paper.

    PYTHONPATH=src python benchmarks/layer_kinds.py
    PYTHONPATH=src python benchmarks/layer_kinds.py --lengths 128,512,2048 --widths 64,256 --json layer_kinds.json

One layer of each kind over (1, T, d), forward, fp32, on one core of this CPU: multi-head attention, an LSTM, and a
convolution of width three. The tables have times and operations; the last has the exponents of the times in T and d.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.attention import MultiHeadAttention
from regard.experiments.benchmarking import fit_exponent, format_table
from regard.experiments.cost_report import format_count

KERNEL = 3


def layers(width: int) -> dict[str, tuple[Callable[[Tensor], object], Callable[[int], float]]]:
    """For each kind: its forward pass on (1, T, d), and its operations at a length, including projections."""
    attention = MultiHeadAttention(width, max(1, width // 64)).eval()
    lstm = nn.LSTM(width, width, batch_first=True).eval()
    convolution = nn.Conv1d(width, width, KERNEL, padding=1).eval()
    return {
        "self-attention": (attention, lambda t: 8.0 * t * width**2 + 4.0 * t * t * width),
        "recurrent": (lstm, lambda t: 16.0 * t * width**2),
        "convolutional": (lambda x: convolution(x.transpose(1, 2)), lambda t: 2.0 * KERNEL * t * width**2),
    }


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    """The best processor time of as many runs as fit, at least two, after a warm-up."""
    run()
    found, until = [], time.process_time() + seconds
    while len(found) < 2 or time.process_time() < until:
        started = time.process_time()
        run()
        found.append(time.process_time() - started)
    return min(found)


@torch.no_grad()
def measure(lengths: list[int], widths: list[int], seconds: float) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for width in widths:
        for name, (run, flops) in layers(width).items():
            for length in lengths:
                x = torch.randn(1, length, width)
                taken = best_seconds(lambda run=run, x=x: run(x), seconds)  # type: ignore[misc]  # bound for this turn
                rows.append({"kind": name, "d": width, "T": length, "flops": flops(length), "seconds": taken})
    return rows


def table(rows: list[dict[str, float | str]], lengths: list[int], widths: list[int]) -> str:
    kinds = list(dict.fromkeys(str(row["kind"]) for row in rows))
    found = {(row["kind"], row["d"], row["T"]): row for row in rows}
    blocks = []
    for width in widths:
        lines = [[f"d = {width}", *(f"{kind}, {unit}" for unit in ("ms", "op") for kind in kinds), "fastest"]]
        for length in lengths:
            here = [found[kind, width, length] for kind in kinds]
            times = [f"{1e3 * float(row['seconds']):.3f}" for row in here]
            fastest = str(min(here, key=lambda row: float(row["seconds"]))["kind"])
            lines.append([f"  T = {length}", *times, *(format_count(float(row["flops"])) for row in here), fastest])
        blocks.append(format_table(lines))
    powers = [["time grows as", "T^, measured", "T^, operations", "d^, measured", "steps that wait"]]
    for kind in kinds:
        wide, long = widths[-1], lengths[-1]
        by_length = fit_exponent(lengths, [float(found[kind, wide, t]["seconds"]) for t in lengths])
        counted = fit_exponent(lengths, [float(found[kind, wide, t]["flops"]) for t in lengths])
        by_width = fit_exponent(widths, [float(found[kind, d, long]["seconds"]) for d in widths])
        steps = "T" if kind == "recurrent" else "1"
        powers.append([f"  {kind}", *["-" if p is None else f"{p:.2f}" for p in (by_length, counted, by_width)], steps])
    return "\n\n".join([*blocks, format_table(powers)])


def numbers(text: str) -> list[int]:
    return sorted(int(word) for word in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=numbers, default=[64, 256, 1024, 2048])
    parser.add_argument("--widths", type=numbers, default=[64, 256, 512])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each measurement")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)  # processor time is then the time of the run
    rows = measure(args.lengths, args.widths, args.seconds)
    print(table(rows, args.lengths, args.widths))
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
