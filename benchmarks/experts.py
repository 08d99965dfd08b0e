"""Is a mixture of experts worth it? A GPU's utilisation, and losses on a text, against a dense model.

    python benchmarks/experts.py speed                       # a training step at equal active parameters
    python benchmarks/experts.py loss wikitext-2             # a folder with train.txt and valid.txt; 3 seeds each

The dense model's feed-forward network is as wide as the two of eight experts that a token goes through together, so
that active parameters and operations are the same, but for the router. Utilisation counts active operations only.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import gpu_seconds, print_verdict, train_on_tokens

from regard.config import ModelConfig, TrainConfig
from regard.experiments.benchmarking import format_table
from regard.models import build
from regard.models.model_flops import training_flops
from regard.text.tokenizer_training import train_tokenizer
from regard.training.compilation import Compiled
from regard.training.loss import Batch, Objective
from regard.training.optimiser import build_optimiser
from regard.training.precision import Precision

LEAST_SHARE = 0.8
PEAK = 989e12  # operations a second of an H200 in bf16
SPEED = {"d_model": 2048, "n_heads": 16, "n_layers": 4, "d_ff": 8192, "vocab_size": 32768, "max_len": 2048}
LOSS = {"d_model": 256, "n_heads": 4, "n_layers": 6, "d_ff": 1024, "vocab_size": 8192, "max_len": 256}


def config_of(kind: str, sizes: dict[str, Any], **fields: Any) -> ModelConfig:
    """A decoder of the LLaMA line, dense or with eight experts of half the width, of which two see each token."""
    routed = {"experts": 8, "experts_per_token": 2, "d_ff": sizes["d_ff"] // 2} if kind == "experts" else {}
    line = {"architecture": "decoder", "norm": "rms", "norm_place": "pre", "positions": "rope", "activation": "swiglu"}
    biases = dict.fromkeys(("qkv_bias", "out_bias", "ff_bias"), False)
    return ModelConfig(**{**line, **biases, "init_std": 0.02, **sizes, **routed, **fields})


def training_step(kind: str, batch_size: int, compiled: bool) -> tuple[Callable[[], float], ModelConfig]:
    """A whole training step, optimiser included, as a function that returns the loss."""
    torch.manual_seed(0)
    config, device = config_of(kind, SPEED), torch.device("cuda")
    objective = Objective(build(config, device="cuda")).train()
    optimiser = build_optimiser(objective, TrainConfig(optimiser="adamw", lr=1e-4))
    run: torch.nn.Module = Compiled(objective) if compiled else objective
    tokens = torch.randint(config.vocab_size, (batch_size, config.max_len + 1), device=device)
    batch = Batch((tokens[:, :-1].contiguous(),), tokens[:, 1:].contiguous(), n_counted=batch_size * config.max_len)
    precision = Precision("bf16", "cuda")

    def step() -> float:
        with precision.forward():
            loss = run(batch) / batch.n_targets
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        return loss.detach()

    return step, config


def compare_speed(batch_size: int, n_steps: int, compiled: bool) -> int:
    """Median time of a step and its share of the GPU's peak, dense and routed in turns."""
    steps = {kind: training_step(kind, batch_size, compiled) for kind in ("dense", "experts")}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(n_steps + 3):
        for kind, (step, _) in steps.items():
            seconds = gpu_seconds(step)
            if turn >= 3:  # after a warm-up
                times[kind].append(seconds)
                print(f"{kind}: {1e3 * seconds:.1f} ms", file=sys.stderr, flush=True)
    rows, utilisation = [["", "ms a step", "MFU", "active operations", "parameters"]], {}
    for kind, (_, config) in steps.items():
        flops = batch_size * training_flops(config, config.max_len)
        seconds = statistics.median(times[kind])
        utilisation[kind] = flops / seconds / PEAK
        number = build(config, device="meta").n_parameters
        rows.append([kind, f"{1e3 * seconds:.1f}", f"{utilisation[kind]:.3f}", f"{flops:.4g}", f"{number:,}"])
    print(format_table(rows), end="\n\n")
    share = utilisation["experts"] / utilisation["dense"]
    how = f"{batch_size} × {SPEED['max_len']} tokens, {'compiled' if compiled else 'eager'}; bar {LEAST_SHARE:.0%}"
    passed = print_verdict(share >= LEAST_SHARE, f"experts reach {share:.1%} of the dense model's MFU ({how})")
    return 0 if passed else 1


def prepare_text(folder: Path, out: Path) -> None:
    """Ids of both texts, by a BPE vocabulary learned from the first."""
    texts = {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid")}
    tokenizer = train_tokenizer(texts["train"].splitlines(), kind="bpe", vocab_size=int(LOSS["vocab_size"]))
    for name, text in texts.items():
        ids = [i for line in tokenizer.encode_all(text.splitlines(keepends=True), special=False) for i in line]
        np.save(out / f"{name}.npy", np.array(ids, dtype=np.uint16))


def valid_loss(kind: str, seed: int, ids: Path, n_steps: int, lr: float, rows: int) -> float:
    """Train one model and return its loss on the held-out text, in nats per token."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train, valid = (torch.from_numpy(np.load(ids / f"{name}.npy").astype(np.int64)) for name in ("train", "valid"))
    config = config_of(kind, LOSS, dropout=0.1)
    return train_on_tokens(
        kind, config, train.to(device), valid.to(device), seed=seed, n_steps=n_steps, lr=lr, rows=rows
    )


def compare_losses(folder: Path, n_seeds: int, n_steps: int, lr: float, rows: int) -> int:
    """Train all models at once, each in its own process; they fit on one GPU together."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        prepare_text(folder, Path(place))
        print(f"text ready after {time.perf_counter() - start:.0f} s", flush=True)
        runs = {}
        for kind in ("dense", "experts"):
            for seed in range(n_seeds):
                options = ["--seed", str(seed), "--steps", str(n_steps), "--lr", str(lr), "--rows", str(rows)]
                command = [sys.executable, __file__, "one", kind, place, *options]
                runs[kind, seed] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        losses: dict[str, list[float]] = {"dense": [], "experts": []}
        for (kind, _), run in runs.items():
            losses[kind].append(float(run.communicate()[0]))
    table = [[kind, *(f"{x:.4f}" for x in each), f"{statistics.mean(each):.4f}"] for kind, each in losses.items()]
    print(format_table([["loss", *(f"seed {n}" for n in range(n_seeds)), "mean"], *table]), end="\n\n")
    gain = statistics.mean(losses["dense"]) - statistics.mean(losses["experts"])
    passed = print_verdict(
        all(math.isfinite(x) for x in losses["experts"]) and max(losses["experts"]) < min(losses["dense"]),
        f"experts end {gain:.4f} nats per token below the dense model "
        f"(bar: every seed below every dense one); {time.perf_counter() - start:.0f} s",
    )
    return 0 if passed else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    one = parts.add_parser("speed")
    one.add_argument("--batch", type=int, default=16, help="texts of a step")
    one.add_argument("--steps", type=int, default=10)
    one.add_argument("--eager", action="store_true", help="without torch.compile")
    both, single = parts.add_parser("loss"), parts.add_parser("one")
    both.add_argument("folder", type=Path)
    both.add_argument("--seeds", type=int, default=3)
    single.add_argument("kind")
    single.add_argument("folder", type=Path)
    single.add_argument("--seed", type=int, default=0)
    for part in (both, single):
        part.add_argument("--steps", type=int, default=600)
        part.add_argument("--lr", type=float, default=2e-3)
        part.add_argument("--rows", type=int, default=64, help="texts of a step")
    options = parser.parse_args()
    if options.what == "speed":
        return compare_speed(options.batch, options.steps, not options.eager)
    if options.what == "loss":
        return compare_losses(options.folder, options.seeds, options.steps, options.lr, options.rows)
    print(valid_loss(options.kind, options.seed, options.folder, options.steps, options.lr, options.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
