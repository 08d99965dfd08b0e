"""The cost of a look: its memory for a long text, and the time of a tile and of an overview for a longer one.

    OMP_NUM_THREADS=2 python benchmarks/look.py
    python benchmarks/look.py --device cuda          # times of a new look at a long text on a GPU

Memory is the growth of the peak resident memory of a separate process since its model has read a short text: q and k of
12 layers × 12 heads at 4,096 tokens are 302 MB of it, logits would be 823 MB.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from measuring import median_seconds, print_bar, reset_peak_resident, resident_bytes, synchronised_time

import regard
from regard.lens import Look

MB = 10**6


def model_for(length: int, layers: int, positions: str = "learned") -> regard.Model:
    torch.manual_seed(0)
    return regard.build("gpt2", n_layers=layers, max_len=length, positions=positions).eval()


def measure_memory(length: int, layers: int) -> int:
    model = model_for(length, layers)
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    regard.look(model, ids[:64]).weights(layer=0, head=0)  # code and buffers that any first pass loads
    before = reset_peak_resident()
    look = regard.look(model, ids)
    after_pass = resident_bytes("VmHWM") - before
    kept = sum(
        x.q.nbytes + x.k.nbytes for seen in look._taken.seen.attentions.values() for x in seen if x.k is not None
    )
    start = time.perf_counter()
    look.pooled(layer=layers - 1, head=3, h=256, w=256)
    seconds = time.perf_counter() - start
    grown = resident_bytes("VmHWM") - before
    print(f"q and k {kept / MB:.0f} MB; peak growth {after_pass / MB:.0f} MB in the pass, {grown / MB:.0f} MB after")
    print(f"a head's overview {seconds:.2f} s")
    return grown


def measure_time(length: int) -> bool:
    """Times for one layer, which do not depend on the others."""
    model = model_for(length, 1, "rope")
    look: Look = regard.look(model, torch.randint(model.config.vocab_size, (length,)).tolist())
    last, middle = slice(length - 256, length), slice(length // 2, length // 2 + 256)
    fresh = iter(range(12))
    queries: list[tuple[str, Callable[[], object], float, int]] = [
        (
            "tile 256×256, last rows, one head, first time",
            lambda: look.weights(layer=0, head=next(fresh), rows=last, cols=middle),
            50,
            3,
        ),
        ("the same tile again", lambda: look.weights(layer=0, head=0, rows=last, cols=middle), 50, 5),
        (
            "tile 256×256, mean of 12 heads, known rows",
            lambda: look.weights(layer=0, head=None, rows=last, cols=middle),
            50,
            5,
        ),
        (
            "overview 256×256, one head, first time",
            lambda: look.pooled(kind=None, layer=0, head=next(fresh), h=256, w=256),
            3e3,
            2,
        ),
        (
            "overview 256×256, mean of 12 heads",
            lambda: look.pooled(kind=None, layer=0, head=None, h=256, w=256),
            3e3,
            1,
        ),
    ]
    good = True
    for what, query, bar, repeats in queries:
        if "known rows" in what:
            start = time.perf_counter()
            query()
            print(
                f"{'(the first time: the normalisers of 12 heads)':58}{1e3 * (time.perf_counter() - start):>10.1f} ms"
            )
        good &= print_bar(what, 1e3 * median_seconds(query, repeats), bar, "ms")
    return good


def measure_gpu(length: int, device: str) -> bool:
    """Times of queries to layers whose normalisers are not known yet. The first layer compiles."""
    model = model_for(length, 6).to(device)
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    last, middle = slice(length - 256, length), slice(length // 2, length // 2 + 256)
    queries: list[tuple[str, Callable[[Look, int], object], float]] = [
        ("tile 256×256, one head", lambda look, n: look.weights(layer=n, head=3, rows=last, cols=middle), 30),
        ("tile 256×256, mean of 12 heads", lambda look, n: look.weights(layer=n, rows=last, cols=middle), 30),
        ("entropy of 12 heads", lambda look, n: look.entropy(layer=n), 60),
        ("three largest weights of every row of a head", lambda look, n: look.map(layer=n).head(0, 3).top(3), 60),
        ("overview 256×256, mean of 12 heads", lambda look, n: look.pooled(layer=n, h=256, w=256), 60),
    ]
    good = True
    for what, query, bar in queries:
        look, times = regard.look(model, ids), []
        for layer in range(6):
            start = synchronised_time()
            query(look, layer)
            times.append(synchronised_time() - start)
        good &= print_bar(what, 1e3 * statistics.median(times[1:]), bar, "ms")
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-length", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--length", type=int, default=16_384)
    parser.add_argument("--memory-only", action="store_true", help="measure memory here, print, and leave")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    if options.device != "cpu":
        print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}, gpt2 in fp32, {options.length:,} tokens")
        return 0 if measure_gpu(options.length, options.device) else 1
    if options.memory_only:
        return 0 if print_bar("growth", measure_memory(options.memory_length, options.layers) / MB, 400, "MB") else 1
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"gpt2, {options.layers} layers × 12 heads, {options.memory_length:,} tokens")
    sizes = ["--memory-length", str(options.memory_length), "--layers", str(options.layers)]
    failed = subprocess.run([sys.executable, __file__, "--memory-only", *sizes]).returncode
    print(f"\n12 heads, rope, causal, {options.length:,} tokens")
    return 1 if not measure_time(options.length) or failed else 0


if __name__ == "__main__":
    sys.exit(main())
