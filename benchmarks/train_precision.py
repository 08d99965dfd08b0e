"""The gain of train.precision=auto on this CPU, and why attention is computed in fp32 there.

python benchmarks/train_precision.py
python benchmarks/train_precision.py --compile          # also compiled: half a minute for each model
python benchmarks/train_precision.py --attention        # torch's fused attention alone, by length
"""

from __future__ import annotations

import argparse
import contextlib
import math
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from measuring import print_verdict

from regard.experiments.benchmarking import format_table
from regard.models import build
from regard.training.compilation import Compiled
from regard.training.loss import Batch, Objective
from regard.training.precision import Precision

BAR = 1.5
SHAPES = ((128, 64, 12), (128, 64, 64), (128, 256, 16), (256, 64, 32), (256, 256, 8))  # width, context, batch


def best_of(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The best milliseconds of each, in turns, after a warm-up."""
    best = dict.fromkeys(runs, math.inf)
    for turn in range(rounds + 1):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            if turn:
                best[name] = min(best[name], (time.perf_counter() - started) * 1e3)
    return best


def gradient_pass(objective: torch.nn.Module, batch: Batch, name: str) -> None:
    with Precision("bf16" if "bf16" in name else "fp32", "cpu").forward():
        loss = objective(batch)
    torch.autograd.grad(loss, list(objective.parameters()))


def time_passes(width: int, context: int, size: int, rounds: int, compiled: bool) -> dict[str, float]:
    """A language model of 4 layers over 65 characters: forward and backward."""
    fields = {"vocab_size": 65, "d_model": width, "n_layers": 4, "n_heads": 4, "d_ff": 4 * width, "max_len": context}
    objective = Objective(build("gpt2", **fields, pad_id=0, bos_id=1, eos_id=2))
    tokens = torch.randint(0, 65, (size, context + 1))
    batch = Batch((tokens[:, :-1],), tokens[:, 1:], n_tokens=size * context)
    runs: dict[str, Callable[[], object]] = {
        "fp32": lambda: gradient_pass(objective, batch, "fp32"),
        "bf16": lambda: gradient_pass(objective, batch, "bf16"),
    }
    if compiled:
        for name in ("fp32 compiled", "bf16 compiled"):
            fast = Compiled(objective)
            runs[name] = lambda fast=fast, name=name: gradient_pass(fast, batch, name)
    return best_of(runs, rounds)


def time_attention(length: int, d_head: int, rounds: int) -> dict[str, float]:
    """Causal self-attention of 4 heads over 2,048 tokens, forward and backward, as views of one product."""

    def run(dtype: torch.dtype, inside: torch.dtype) -> None:
        x = torch.randn(2048 // length, length, 3, 4, d_head, dtype=dtype, requires_grad=True)
        q, k, v = (part.transpose(1, 2).to(inside) for part in x.unbind(2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).to(dtype)
        out.backward(torch.ones_like(out))

    half, whole = torch.bfloat16, torch.float32
    return best_of(
        {
            "fp32": lambda: run(whole, whole),
            "bf16": lambda: run(half, half),
            "fp32 between casts": lambda: run(half, whole),
        },
        rounds,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="turns of each")
    parser.add_argument("--compile", action="store_true", help="compiled passes too")
    parser.add_argument("--attention", action="store_true", help="attention alone")
    options = parser.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}; best of {options.rounds}, in ms\n")
    if options.attention:
        cells = {(d, t): time_attention(t, d, options.rounds) for d in (32, 64) for t in (64, 128, 256, 512, 1024)}
        names = list(next(iter(cells.values())))
        rows = [[f"{d} wide, {t} long", *[f"{ms[n]:.2f}" for n in names], ""] for (d, t), ms in cells.items()]
        print(format_table([["", *names, ""], *rows]))
        return 0
    ratios, rows = [], []
    for shape in SHAPES:
        with contextlib.redirect_stderr(None):
            ms = time_passes(*shape, options.rounds, options.compile)
        # What auto takes: the faster precision, and compiled where the run is long enough for it.
        ratios.append(ms["fp32"] / min(ms.values()))
        cells_of_row = [f"{value:.1f} ({ms['fp32'] / value:.2f}×)" for value in ms.values()]
        rows.append(["width {}, context {}, batch {}".format(*shape), *cells_of_row, ""])
        if len(rows) == 1:
            rows.insert(0, ["", *ms, ""])
    print(format_table(rows), end="\n\n")
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    sentence = f"the fastest choice is {mean:.2f}× fp32 eager (geometric mean; bar {BAR}×)"
    return 0 if print_verdict(mean >= BAR, sentence) else 1


if __name__ == "__main__":
    raise SystemExit(main())
