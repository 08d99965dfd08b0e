"""Is a mixture of experts worth it? A GPU's utilisation, and losses on a text, against a dense model.

    python benchmarks/experts.py speed                       # a training step at equal active parameters
    python benchmarks/experts.py loss wikitext-2             # a folder with train.txt and valid.txt; 3 seeds each

The dense model's feed-forward network is as wide as the two of eight experts that a token goes through together, so
that active parameters and operations are the same, but for the router. Utilisation counts active operations only.
"""

from __future__ import annotations

import argparse
import json
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

from regard.config import ModelConfig, TrainConfig
from regard.experiments.benchmarking import format_table
from regard.models import build
from regard.models.model_flops import training_flops
from regard.text.tokenizer_training import train_tokenizer
from regard.training.compilation import Compiled
from regard.training.loss import Batch, Objective
from regard.training.optimiser import build_optimiser, cosine
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


def step_of(kind: str, batch_size: int, compiled: bool) -> tuple[Callable[[], float], ModelConfig]:
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


def speed(batch_size: int, n_steps: int, compiled: bool) -> int:
    """Median time of a step and its share of the GPU's peak, dense and routed in turns."""
    steps = {kind: step_of(kind, batch_size, compiled) for kind in ("dense", "experts")}
    times: dict[str, list[float]] = {kind: [] for kind in steps}
    for turn in range(n_steps + 3):
        for kind, (step, _) in steps.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            if turn >= 3:
                times[kind].append(start.elapsed_time(end) / 1e3)
                print(f"{kind}: {start.elapsed_time(end):.1f} ms", file=sys.stderr, flush=True)
    rows, used = [["", "ms a step", "MFU", "active operations", "parameters"]], {}
    for kind, (_, config) in steps.items():
        flops = batch_size * training_flops(config, config.max_len)
        seconds = statistics.median(times[kind])
        used[kind] = flops / seconds / PEAK
        number = build(config, device="meta").n_parameters
        rows.append([kind, f"{1e3 * seconds:.1f}", f"{used[kind]:.3f}", f"{flops:.4g}", f"{number:,}"])
    print(format_table(rows), end="\n\n")
    share = used["experts"] / used["dense"]
    passed = share >= LEAST_SHARE
    how = f"{batch_size} × {SPEED['max_len']} tokens, {'compiled' if compiled else 'eager'}"
    end = f"of the dense model's MFU ({how}; bar {LEAST_SHARE:.0%})"
    print(f"{'PASS' if passed else 'FAIL'}  experts reach {share:.1%} {end}")
    return 0 if passed else 1


def prepare_text(folder: Path, out: Path) -> None:
    """Ids of both texts, by a BPE vocabulary learned from the first."""
    texts = {name: (folder / f"{name}.txt").read_text(encoding="utf-8") for name in ("train", "valid")}
    tokenizer = train_tokenizer(texts["train"].splitlines(), kind="bpe", vocab_size=int(LOSS["vocab_size"]))
    for name, text in texts.items():
        ids = [i for line in tokenizer.encode_all(text.splitlines(keepends=True), special=False) for i in line]
        np.save(out / f"{name}.npy", np.array(ids, dtype=np.uint16))


def learn(kind: str, seed: int, ids: Path, n_steps: int, lr: float, rows: int) -> float:
    """Train one model and return its loss on the held-out text, in nats a token."""
    torch.manual_seed(seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(kind, LOSS, dropout=0.1)
    objective = Objective(build(config, device=str(device))).train()
    train = TrainConfig(optimiser="adamw", lr=lr, weight_decay=0.1, betas=(0.9, 0.95))
    optimiser, schedule = build_optimiser(objective, train), cosine(n_steps // 20, n_steps, 0.05)
    text, valid = (
        torch.from_numpy(np.load(ids / f"{name}.npy").astype(np.int64)).to(device) for name in ("train", "valid")
    )
    length, precision = config.max_len, Precision("bf16" if device.type == "cuda" else "fp32", device.type)
    draws, places = torch.Generator().manual_seed(seed), torch.arange(length + 1, device=device)
    for step in range(1, n_steps + 1):
        starts = torch.randint(len(text) - length - 1, (rows, 1), generator=draws).to(device)
        tokens = text[starts + places]
        with precision.forward():
            loss = objective(Batch((tokens[:, :-1],), tokens[:, 1:], n_counted=rows * length)) / (rows * length)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(objective.parameters(), 1.0)
        optimiser.set_lr(schedule(step))
        optimiser.step()
        optimiser.zero_grad()
        if step % 100 == 0 or step == n_steps:
            found = evaluate(objective, valid, length, precision)
            load = {name: round(float(x), 2) for name, x in objective.router_numbers.items()}
            line = json.dumps({"kind": kind, "seed": seed, "step": step, "valid": round(found, 4), **load})
            print(line, file=sys.stderr, flush=True)
    return found


@torch.no_grad()
def evaluate(objective: Objective, text: torch.Tensor, length: int, precision: Precision) -> float:
    objective.eval()
    whole = text[: (len(text) - 1) // length * length + 1]
    inputs, targets = whole[:-1].view(-1, length), whole[1:].view(-1, length)
    total = 0.0
    for x, y in zip(inputs.split(64), targets.split(64), strict=True):
        with precision.forward():
            total += float(objective(Batch((x,), y, n_counted=y.numel())))
    objective.train()
    return total / targets.numel()


def losses(folder: Path, n_seeds: int, n_steps: int, lr: float, rows: int) -> int:
    """All runs at once, each in a process of its own, which one GPU holds easily."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        prepare_text(folder, Path(place))
        print(f"text ready after {time.perf_counter() - started:.0f} s", flush=True)
        runs = {}
        for kind in ("dense", "experts"):
            for seed in range(n_seeds):
                options = ["--seed", str(seed), "--steps", str(n_steps), "--lr", str(lr), "--rows", str(rows)]
                command = [sys.executable, __file__, "one", kind, place, *options]
                runs[kind, seed] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        found: dict[str, list[float]] = {"dense": [], "experts": []}
        for (kind, _), run in runs.items():
            text, _ = run.communicate()
            found[kind].append(float(text))
    rows_of = [[kind, *(f"{x:.4f}" for x in all_), f"{statistics.mean(all_):.4f}"] for kind, all_ in found.items()]
    print(format_table([["loss", *(f"seed {n}" for n in range(n_seeds)), "mean"], *rows_of]), end="\n\n")
    better = statistics.mean(found["dense"]) - statistics.mean(found["experts"])
    passed = all(math.isfinite(x) for x in found["experts"]) and max(found["experts"]) < min(found["dense"])
    print(
        f"{'PASS' if passed else 'FAIL'}  experts end {better:.4f} nats a token below the dense model "
        f"(bar: every seed below every dense one); {time.perf_counter() - started:.0f} s"
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
        return speed(options.batch, options.steps, not options.eager)
    if options.what == "loss":
        return losses(options.folder, options.seeds, options.steps, options.lr, options.rows)
    print(learn(options.kind, options.seed, options.folder, options.steps, options.lr, options.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
