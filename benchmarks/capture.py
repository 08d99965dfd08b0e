"""The cost of interpretability: a full capture compared with transformer-lens, attribution, a patching sweep.

    OMP_NUM_THREADS=2 python benchmarks/capture.py
    python benchmarks/capture.py capture --length 512 --layers 4        # one of the three, and smaller

All models have GPT-2's sizes and random weights. Memory is the growth of the peak resident memory of a separate process
since it has read a short text. The sweep patches the residual stream of every layer and token, in batches that compute
only what a patch can change, and again with one patch at a time through the whole model.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measuring import print_bar, reset_peak_resident, resident_bytes

import regard
from regard.lens.interventions import patch
from regard.lens.patching import logit_difference, patching_sweep

GIB = 2**30


def random_tokens(length: int, vocab_size: int = 50257) -> list[list[int]]:
    """One text of distinct tokens."""
    return [random.Random(0).sample(range(vocab_size), length)]


def save_model(folder: Path, length: int, layers: int) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=length, n_layer=layers)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def measure_capture(contender: str, folder: str, length: int) -> dict[str, float]:
    """Seconds of a full capture, and bytes: at its peak, and held after it."""
    if contender == "regard":
        model = regard.load(folder)
        run: Any = lambda ids: regard.capture(model, ids)  # noqa: E731  # one of two ways to run it
    else:
        from transformer_lens.model_bridge import TransformerBridge

        bridge = TransformerBridge.boot_transformers(folder, device="cpu")
        run = lambda ids: bridge.run_with_cache(torch.tensor(ids))  # noqa: E731  # one of two ways to run it
    with torch.no_grad():
        run(random_tokens(16))
        before, start = reset_peak_resident(), time.perf_counter()
        held = run(random_tokens(length))
        seconds = time.perf_counter() - start
    figures = {"seconds": seconds, "peak": resident_bytes("VmHWM") - before, "held": resident_bytes("VmRSS") - before}
    return figures if held is not None else {}


def measure_attribution(length: int, layers: int, whole: int) -> dict[str, float]:
    """Seconds and peak bytes of the attribution of one logit, from a capture of its position; with ``whole``, from a
    capture of all activations, and what each head of the last layer moved from each token."""
    torch.manual_seed(0)
    model = regard.build("gpt2", max_len=length, n_layers=layers).eval()
    kept: dict[str, Any] = {} if whole else {"positions": [-1]}
    regard.capture(model, random_tokens(16), **kept).logit_attribution(7)
    before, start = reset_peak_resident(), time.perf_counter()
    found = regard.capture(model, random_tokens(length), **kept).logit_attribution(7)
    error = abs(found.total - found.logit)
    if whole:
        error += abs(float(found.tokens(layer=layers - 1).sum() - found.parts["self"][-1].sum()))
    return {"seconds": time.perf_counter() - start, "peak": resident_bytes("VmHWM") - before, "error": error}


def measure_sweep(length: int, layers: int, sample: int) -> dict[str, float]:
    """Seconds and processor seconds of a sweep in batches, and of the same patches one by one, and the largest
    difference of an effect. The latter are extrapolated from ``sample`` patches, half of them before the sweep and half
    after it, since the load of the machine may change."""
    torch.manual_seed(0)
    model = regard.build("gpt2", max_len=length, n_layers=layers).eval()
    clean, corrupted = random_tokens(length), [random_tokens(length)[0][:1] + random_tokens(length + 1)[0][2:]]
    metric = logit_difference(model, 7, 9)
    record = regard.capture(model, clean, sites="*.input")
    with torch.no_grad():
        ends = [float(metric(model(torch.tensor(ids)))) for ids in (clean, corrupted)]
    places = [(n // length, n % length) for n in range(layers * length)]
    chosen = random.Random(1).sample(places, sample)
    values, single, batched = {}, Stopwatch(), Stopwatch()
    for half in (chosen[: sample // 2], chosen[sample // 2 :]):
        for layer, position in half:
            site = f"decoder.blocks.{layer}.input"
            with single, torch.no_grad(), patch(model, {site: record[site]}, [position]):
                values[layer, position] = float(metric(model(torch.tensor(corrupted))))
        if not batched.seconds:
            with batched:
                found = patching_sweep(model, clean, corrupted, metric)
    effects = {place: (value - ends[1]) / (ends[0] - ends[1]) for place, value in values.items()}
    return {
        "batched": batched.seconds,
        "batched_processor": batched.processor_seconds,
        "one_by_one": single.seconds / sample * len(places),
        "one_by_one_processor": single.processor_seconds / sample * len(places),
        "gap": max(abs(effect - float(found.effects[place])) for place, effect in effects.items()),
    }


class Stopwatch:
    """Seconds and processor seconds spent in its ``with`` blocks."""

    seconds = processor_seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter(), time.process_time()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._start[0]
        self.processor_seconds += time.process_time() - self._start[1]


def run_in_process(*arguments: object) -> dict[str, float]:
    """Call the measurement of that name in a process of its own."""
    command = [sys.executable, __file__, "--measure", *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare_captures(length: int, layers: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), length, layers)
        both = {name: run_in_process("capture", name, folder, length) for name in ("regard", "transformer-lens")}
    for name, x in both.items():
        sizes = f"peak {x['peak'] / GIB:.2f} GiB, held {x['held'] / GIB:.2f} GiB"
        print(f"{name:18} {length:,} tokens, {layers} layers: {x['seconds']:.1f} s, {sizes}", flush=True)
    ours, theirs = both["regard"], both["transformer-lens"]
    good = print_bar("full capture: peak, relative to transformer-lens", ours["peak"] / theirs["peak"], 1 / 3, "×")
    return good & print_bar(
        "full capture: time, relative to transformer-lens", ours["seconds"] / theirs["seconds"], 1.0, "×"
    )


def check_attribution(length: int, layers: int) -> bool:
    one, whole = (run_in_process("attribution", length, layers, whole) for whole in (0, 1))
    print(f"one logit after {length:,} tokens: {one['seconds']:.1f} s; with all activations {whole['seconds']:.1f} s")
    good = print_bar("its parts: peak growth", one["peak"] / GIB, 2.0, "GiB")
    good &= print_bar("with every activation, by token too: peak growth", whole["peak"] / GIB, 2.0, "GiB")
    return good & print_bar("parts against the logit: error", max(one["error"], whole["error"]), 1e-3, "")


def check_sweep(length: int, layers: int, sample: int) -> bool:
    x = run_in_process("sweep", length, layers, sample)
    print(
        f"{layers} layers × {length} tokens: {x['batched']:.1f} s, one by one {x['one_by_one']:.1f} s (from {sample})"
    )
    good = print_bar("sweep: one by one over batched", x["one_by_one"] / x["batched"], 5.0, "×", at_least=True)
    ratio = x["one_by_one_processor"] / x["batched_processor"]
    good &= print_bar("the same in processor seconds", ratio, 5.0, "×", at_least=True)
    return good & print_bar("largest difference of an effect", x["gap"], 1e-3, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["capture", "attribution", "sweep"])
    parser.add_argument("--length", type=int, help="tokens; 2,048, 4,096 and 64 unless given")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--sample", type=int, default=24, help="patches made one by one")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        name, *rest = options.measure
        if name == "capture":
            figures = measure_capture(rest[0], rest[1], int(rest[2]))
        else:
            figures = {"attribution": measure_attribution, "sweep": measure_sweep}[name](*map(int, rest))
        print(json.dumps(figures))
        return 0
    good, layers = True, options.layers
    if "capture" in options.what:
        good &= compare_captures(options.length or 2048, layers)
    if "attribution" in options.what:
        good &= check_attribution(options.length or 4096, layers)
    if "sweep" in options.what:
        good &= check_sweep(options.length or 64, layers, options.sample)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
