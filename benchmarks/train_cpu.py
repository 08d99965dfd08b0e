"""Tiny Shakespeare by characters on a processor: our small recipe against nanoGPT's settings for CPUs.

    python benchmarks/train_cpu.py shakespeare/input.txt [--seeds 3]

Both are configs of ours, trained by the same loop from the same file, in turns. nanoGPT's (4 layers, width 128, context
64, batch 12, 2,000 steps, AdamW, learned positions, GELU) runs in fp32 without compilation, as its README has it; ours
is the preset ``shakespeare-small`` with precision and compilation left to ``auto``. The time is that of the whole
``regard.train``: opening the data, choosing, compiling, training, evaluating, saving. The loss is over the whole
validation split, the last tenth of the text, at context 64.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import print_verdict

import regard
from regard.recipes import run_config

NANOGPT = {
    "model": {
        **{"architecture": "decoder", "d_model": 128, "n_layers": 4, "n_heads": 4, "d_ff": 512, "max_len": 64},
        **{"positions": "learned", "norm_place": "pre", "norm_bias": False, "activation": "gelu", "init_std": 0.02},
        **{"qkv_bias": False, "out_bias": False, "ff_bias": False},
    },
    "train": {
        **{"steps": 2000, "batch_tokens": 768, "optimiser": "adamw", "lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8},
        **{"weight_decay": 0.1, "schedule": "cosine", "warmup": 100, "floor": 0.1, "clip": 1.0},
        **{"precision": "fp32", "compile": "off", "eval_every": 0, "save_every": 0, "samples": 0},
    },
}
# Steps of ours that take about a third of nanoGPT's time, and about all of it, on a machine with bf16.
THIRD, WHOLE = 180, 740
SAME_LOSS_IN, LOSS_IN_SAME_TIME = 1 / 3, 1.76


def train_run(config: Any, folder: Path) -> tuple[float, float]:
    """Seconds and validation loss of a whole run."""
    config = config.with_(train=config.train.with_(out=str(folder)))
    started = time.perf_counter()
    result = regard.train(config, style="quiet")
    return time.perf_counter() - started, float(result.metrics["valid_loss"])


def configs(source: str, seed: int) -> dict[str, Any]:
    """The contenders by name."""
    ours = run_config("lm", [f"data.source={source}", f"train.seed={seed}"], preset="shakespeare-small")
    peer = ours.with_(
        model=regard.ModelConfig(**NANOGPT["model"]), train=regard.TrainConfig(**NANOGPT["train"], seed=seed)
    )
    return {
        "nanoGPT's settings": peer,
        "ours, a third": ours.with_(train=ours.train.with_(steps=THIRD)),
        "ours, as long": ours.with_(train=ours.train.with_(steps=WHOLE)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Small models on a processor, against nanoGPT's settings.")
    parser.add_argument("source", help="Tiny Shakespeare as one text file")
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    runs: dict[str, list[tuple[float, float]]] = {}
    print(f"{'seed':>4}  {'config':20}  {'seconds':>8}  {'share':>6}  {'valid loss':>10}")
    for seed in range(args.seeds):
        for name, config in configs(args.source, seed).items():
            with tempfile.TemporaryDirectory() as folder:
                runs.setdefault(name, []).append(train_run(config, Path(folder) / "run"))
            (seconds, loss), base = runs[name][-1], runs["nanoGPT's settings"][-1][0]
            print(f"{seed:>4}  {name:20}  {seconds:8.1f}  {seconds / base:6.2f}  {loss:10.4f}", flush=True)
    mean = {name: [statistics.mean(column) for column in zip(*rows, strict=True)] for name, rows in runs.items()}
    (peer_time, peer_loss), third, whole = mean.values()
    checks = {
        f"nanoGPT's loss {peer_loss:.3f} in at most 1/3 of its {peer_time:.0f} s": (
            f"{third[1]:.3f} in {third[0] / peer_time:.2f}",
            third[1] <= peer_loss and third[0] <= SAME_LOSS_IN * peer_time,
        ),
        f"at most {LOSS_IN_SAME_TIME} in the same time": (
            f"{whole[1]:.3f} in {whole[0] / peer_time:.2f}",
            whole[1] <= LOSS_IN_SAME_TIME and whole[0] <= peer_time,
        ),
    }
    for bar, (value, passed) in checks.items():
        print_verdict(passed, f"{bar}: {value} (means over {args.seeds} seeds)")
    return 0 if all(passed for _, passed in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
