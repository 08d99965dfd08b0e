"""Time and memory of queries to the AttentionMap of a long causal attention with a T5 bias.

    python benchmarks/attention_map.py --length 16384 --heads 8 --width 64
    python benchmarks/attention_map.py --device cuda --heads 12 --bias none --repeats 7

"cold" is a new map, which has not computed any normaliser. Memory is the growth of the peak resident memory since
before the first query, so it never falls down the table; on a GPU it is what a query holds in addition to the map.
"""

from __future__ import annotations

import argparse
import resource
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measuring import median_seconds

from regard.attention import masks
from regard.attention.attention_map import AttentionMap
from regard.attention.biases import T5Bias

Query = Callable[[AttentionMap], object]


@dataclass(frozen=True)
class Row:
    what: str
    heads: int
    query: Query
    bar: float | None = None  # seconds
    warm: bool = False
    gpu_bar: float | None = None


def queries(length: int, heads: int, every: bool) -> list[Row]:
    side = min(256, length)
    last = slice(length - side, length)
    middle = slice((length - side) // 2, (length - side) // 2 + side)
    one = heads // 2  # any head will do

    def grid(cells: int) -> int:
        return min(cells, length)

    return [
        Row(f"tile {side}×{side}, last rows", heads, lambda m: m.tile(last, middle), 0.030, warm=True),
        Row(f"tile {side}×{side}, last rows, cold", 1, lambda m: m.head(0, one).tile(last, middle), 0.030),
        Row(f"tile {side}×{side}, last rows, cold", heads, lambda m: m.tile(last, middle), gpu_bar=0.030),
        Row(f"tile {side}×{side}, middle rows, cold", heads, lambda m: m.tile(middle, slice(0, side))),
        Row("row, cold", heads, lambda m: m.row(length - 1)),
        Row("top 10 of a row, cold", heads, lambda m: m.top(10, length - 1)),
        Row("pooled 64×64, cold", 1, lambda m: m.head(0, one).pooled(grid(64), grid(64)), 2.0),
        Row("pooled 256×256, cold", 1, lambda m: m.head(0, one).pooled(grid(256), grid(256)), 2.0),
        Row("pooled 256×256 max, cold", 1, lambda m: m.head(0, one).pooled(grid(256), grid(256), "max"), 2.0),
        Row("pooled 64×64, cold", heads, lambda m: m.pooled(grid(64), grid(64)), 2.0),
        Row("pooled 256×256, cold", heads, lambda m: m.pooled(grid(256), grid(256)), 2.0),
        Row("entropy, cold", 1, lambda m: m.head(0, one).entropy()),
        Row("column sums, cold", 1, lambda m: m.head(0, one).column_sums()),
        *(
            [
                Row("entropy, cold", heads, lambda m: m.entropy(), gpu_bar=0.060),
                Row("column sums, cold", heads, lambda m: m.column_sums()),
                Row("top 10 of every row, cold", heads, lambda m: m.top(10)),
                Row("pooled 256×256 max, cold", heads, lambda m: m.pooled(grid(256), grid(256), "max")),
            ]
            if every
            else []
        ),
    ]


def peak_mib(on_gpu: bool) -> float:
    if on_gpu:
        return torch.cuda.max_memory_allocated() / (1 << 20)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="the median of so many is printed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bias", default="t5", choices=["t5", "none"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of q and k")
    options = parser.parse_args()
    torch.manual_seed(0)
    on_gpu = options.device != "cpu"
    shape = (1, options.heads, options.length, options.width)
    like = {"device": options.device, "dtype": getattr(torch, options.dtype)}
    q, k = torch.randn(shape, **like), torch.randn(shape, **like)
    bias = T5Bias(options.heads).to(options.device) if options.bias == "t5" else None

    def new_map() -> AttentionMap:
        return AttentionMap(q, k, masks.causal(), bias)

    warm = new_map()
    warm.tile(slice(-256, None), 0)  # computes the normalisers of its last rows
    matrix = options.heads * options.length**2 * 4 / (1 << 20)
    sizes = f"{options.heads} heads, length {options.length}, width {options.width}"
    print(f"{sizes}, {options.dtype}, causal, bias {options.bias}")
    where = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}; the matrix would take {matrix:,.0f} MiB\n")
    print(f"{'query':36}{'heads':>6}{'median ms':>12}{'bar ms':>9}{'':>6}{'peak growth MiB':>18}")
    before, n_failed = peak_mib(on_gpu), 0
    for row in queries(options.length, options.heads, on_gpu):
        if on_gpu:
            row.query(new_map())  # compiles
            torch.cuda.reset_peak_memory_stats()
        maps = iter([warm if row.warm else new_map() for _ in range(options.repeats)])
        seconds = median_seconds(lambda row=row, maps=maps: row.query(next(maps)), options.repeats)
        limit = row.gpu_bar or row.bar if on_gpu else row.bar
        bar = "" if limit is None else f"{limit * 1e3:.0f}"
        verdict = "" if limit is None else "PASS" if seconds <= limit else "FAIL"
        n_failed += verdict == "FAIL"
        growth = peak_mib(on_gpu) - before
        print(f"{row.what:36}{row.heads:>6}{seconds * 1e3:>12.1f}{bar:>9}{verdict:>6}{growth:>18.0f}", flush=True)
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
