"""Does a state-space layer grow linearly with the text, and does it learn as much as attention?

    python benchmarks/mamba.py time                # one layer on a GPU, forward and backward, up to 65,536 tokens
    python benchmarks/mamba.py loss                # on the embedded text, a Transformer of as many parameters beside it

Attention in the table is torch's fused causal kernel between the same projections.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measuring import gpu_seconds, print_verdict, train_on_tokens

from regard.attention.state_space import Mamba2
from regard.config import ModelConfig
from regard.data.corpora.stdlib_text import Stdlib
from regard.experiments.benchmarking import fit_exponent, format_table
from regard.text.tokenizer_training import train_tokenizer

LENGTHS = (2048, 4096, 8192, 16384, 32768, 65536)
LARGEST_POWER, LARGEST_GAP = 1.1, 0.1
WIDTH, HEADS, D_HEAD, STATE = 1024, 32, 64, 128


def layers() -> dict[str, Any]:
    """A Mamba-2 layer and an attention of the same width, in bf16, as functions of x (1, T, M)."""
    mamba = Mamba2(WIDTH, HEADS, D_HEAD, STATE).to("cuda", torch.bfloat16)
    w_qkv, w_o = (torch.nn.Linear(a, b, bias=False).to("cuda", torch.bfloat16) for a, b in ((1024, 3072), (1024, 1024)))

    def attention(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (16, 64)).transpose(1, 2) for part in w_qkv(x).chunk(3, -1))
        return w_o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    return {"mamba2": mamba, "attention": attention, "mamba2, compiled": torch.compile(mamba, dynamic=True)}


def median_ms(run: Callable[[], object], rounds: int = 5) -> float:
    """The median time on the GPU, after two calls to warm up."""
    return 1e3 * statistics.median([gpu_seconds(run) for _ in range(rounds + 2)][2:])


def compare_growth() -> int:
    """Time by length, and the power of the length at which it grows from 8,192 tokens on."""
    rows, powers = [["", *(f"{n:,}" for n in LENGTHS), "grows as"]], {}
    for name, layer in layers().items():
        for backward in (False, True):
            times = []
            for length in LENGTHS:
                x = torch.randn(1, length, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=backward)

                def run(x: torch.Tensor = x, layer: Any = layer, backward: bool = backward) -> None:
                    with torch.set_grad_enabled(backward):
                        y = layer(x)
                        if backward:
                            y.float().square().mean().backward()

                times.append(median_ms(run))
            kind = f"{name}, forward and backward" if backward else name
            powers[kind] = fit_exponent(LENGTHS[-3:], times[-3:])
            rows.append([kind, *(f"{ms:.2f}" for ms in times), f"T^{powers[kind]:.2f}"])
            print(rows[-1], flush=True)
    print(format_table(rows), end="\n\n")
    worst = max(power for name, power in powers.items() if name.startswith("mamba2"))
    passed = print_verdict(worst <= LARGEST_POWER, f"time grows as T^{worst:.2f} at most (bar {LARGEST_POWER})")
    return 0 if passed else 1


def configs() -> dict[str, ModelConfig]:
    """Two decoders of nearly as many parameters."""
    line: dict[str, Any] = {"architecture": "decoder", "norm": "rms", "norm_place": "pre", "max_len": 256}
    line |= dict.fromkeys(("qkv_bias", "out_bias", "ff_bias"), False) | {"vocab_size": 4096, "d_model": 256}
    sizes = {"n_heads": 8, "d_head": 64, "mixer_size": 64, "d_ff": 0, "n_layers": 12}
    return {
        "transformer": ModelConfig(**line, positions="rope", activation="swiglu", n_heads=4, n_layers=6, d_ff=784),
        "mamba2": ModelConfig(**line, positions="none", mixer="mamba2", **sizes),
    }


def valid_loss(kind: str, seed: int, n_steps: int, lr: float, rows: int) -> float:
    """Train on the standard library's text; the loss on held-out modules, in nats per token."""
    corpus, device = Stdlib(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    texts = {split: [corpus.example(split, n).text for n in range(corpus.size(split))] for split in ("train", "valid")}
    tokenizer = train_tokenizer(texts["train"][::8], kind="bpe", vocab_size=4096)
    encoded = (tokenizer.encode_all(texts[split], special=False) for split in ("train", "valid"))
    train, valid = (torch.tensor([i for line in lines for i in line], device=device) for lines in encoded)
    config, valid = configs()[kind].with_(init_std=0.02), valid[: (1 << 18) + 1]
    return train_on_tokens(kind, config, train, valid, seed=seed, n_steps=n_steps, lr=lr, rows=rows)


def compare_losses(n_steps: int, lr: float, rows: int) -> int:
    """Train both models at once, each in its own process."""
    options = ["--steps", str(n_steps), "--lr", str(lr), "--rows", str(rows)]
    runs = {
        kind: subprocess.Popen([sys.executable, __file__, "one", kind, *options], stdout=subprocess.PIPE, text=True)
        for kind in configs()
    }
    losses = {kind: float(run.communicate()[0]) for kind, run in runs.items()}
    gap = losses["mamba2"] - losses["transformer"]
    sentence = f"Mamba 2 ends {gap:+.4f} nats per token from the Transformer (bar {LARGEST_GAP})"
    return 0 if print_verdict(gap <= LARGEST_GAP, sentence) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="what", required=True)
    parts.add_parser("time")
    both, one = parts.add_parser("loss"), parts.add_parser("one")
    one.add_argument("kind")
    one.add_argument("--seed", type=int, default=0)
    for part in (both, one):
        part.add_argument("--steps", type=int, default=600)
        part.add_argument("--lr", type=float, default=2e-3)
        part.add_argument("--rows", type=int, default=64, help="texts of a step")
    options = parser.parse_args()
    if options.what == "time":
        return compare_growth()
    if options.what == "loss":
        return compare_losses(options.steps, options.lr, options.rows)
    print(valid_loss(options.kind, options.seed, options.steps, options.lr, options.rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
