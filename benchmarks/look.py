"""What it costs to look: memory of a look at a long text, time of a tile and of an overview of a longer one.

    OMP_NUM_THREADS=2 python benchmarks/look.py
    python benchmarks/look.py --device cuda          # what a fresh look at a long text answers on a GPU

Memory is measured in a process of its own, as the growth of the peak resident set over what it was after the model had
read a short text: q and k of 12 layers × 12 heads at 4,096 tokens are 302 MB of it, logits would be 823 MB.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import regard
from regard.lens import Look

MB = 10**6


def resident(field: str) -> int:
    """VmRSS or VmHWM of this process, in bytes (Linux)."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def model_for(length: int, layers: int, positions: str = "learned") -> regard.Model:
    torch.manual_seed(0)
    return regard.build("gpt2", n_layers=layers, max_len=length, positions=positions).eval()


def measure_memory(length: int, layers: int) -> int:
    model = model_for(length, layers)
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    regard.look(model, ids[:64]).weights(layer=0, head=0)  # code and buffers that any first pass loads
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # the peak starts anew
    before = resident("VmRSS")
    look = regard.look(model, ids)
    after_pass = resident("VmHWM") - before
    kept = sum(
        x.q.nbytes + x.k.nbytes for seen in look._taken.seen.attentions.values() for x in seen if x.k is not None
    )
    start = time.perf_counter()
    look.pooled(layer=layers - 1, head=3, h=256, w=256)
    shown = time.perf_counter() - start
    grown = resident("VmHWM") - before
    print(f"q and k {kept / MB:.0f} MB; peak growth {after_pass / MB:.0f} MB in the pass, {grown / MB:.0f} MB after")
    print(f"a head's overview {shown:.2f} s")
    return grown


def median(ask: Callable[[], object], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def verdict(what: str, value: float, bar: float, unit: str) -> bool:
    good = value <= bar
    print(f"{what:58}{value:>10.1f} {unit:3}{bar:>8.0f} {unit:3} {'PASS' if good else 'FAIL'}", flush=True)
    return good


def measure_time(length: int) -> bool:
    """One layer is enough: what is asked of a head does not depend on the others."""
    model = model_for(length, 1, "rope")
    look: Look = regard.look(model, torch.randint(model.config.vocab_size, (length,)).tolist())
    last, middle = slice(length - 256, length), slice(length // 2, length // 2 + 256)
    fresh = iter(range(12))
    questions: list[tuple[str, Callable[[], object], float, int]] = [
        (
            "tile 256×256, last rows, one head, asked first",
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
            "overview 256×256, one head, asked first",
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
    for what, ask, bar, repeats in questions:
        if "known rows" in what:
            start = time.perf_counter()
            ask()
            print(
                f"{'(the first time: the normalisers of 12 heads)':58}{1e3 * (time.perf_counter() - start):>10.1f} ms"
            )
        good &= verdict(what, 1e3 * median(ask, repeats), bar, "ms")
    return good


def measure_gpu(length: int, device: str) -> bool:
    """Questions to layers that nobody has asked yet: none of their normalisers are known. The first compiles."""
    model = model_for(length, 6).to(device)
    ids = torch.randint(model.config.vocab_size, (length,)).tolist()
    last, middle = slice(length - 256, length), slice(length // 2, length // 2 + 256)
    questions: list[tuple[str, Callable[[Look, int], object], float]] = [
        ("tile 256×256, one head", lambda look, n: look.weights(layer=n, head=3, rows=last, cols=middle), 30),
        ("tile 256×256, mean of 12 heads", lambda look, n: look.weights(layer=n, rows=last, cols=middle), 30),
        ("entropy of 12 heads", lambda look, n: look.entropy(layer=n), 60),
        ("three largest weights of every row of a head", lambda look, n: look.map(layer=n).head(0, 3).top(3), 60),
        ("overview 256×256, mean of 12 heads", lambda look, n: look.pooled(layer=n, h=256, w=256), 60),
    ]
    good = True
    for what, ask, bar in questions:
        look, taken = regard.look(model, ids), []
        for layer in range(6):
            torch.cuda.synchronize()
            start = time.perf_counter()
            ask(look, layer)
            torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        good &= verdict(what, 1e3 * statistics.median(taken[1:]), bar, "ms")
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
        return 0 if verdict("growth", measure_memory(options.memory_length, options.layers) / MB, 400, "MB") else 1
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"gpt2, {options.layers} layers × 12 heads, {options.memory_length:,} tokens")
    sizes = ["--memory-length", str(options.memory_length), "--layers", str(options.layers)]
    missed = subprocess.run([sys.executable, __file__, "--memory-only", *sizes]).returncode
    print(f"\n12 heads, rope, causal, {options.length:,} tokens")
    return 1 if not measure_time(options.length) or missed else 0


if __name__ == "__main__":
    sys.exit(main())
