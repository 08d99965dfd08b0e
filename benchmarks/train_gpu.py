"""Training on a GPU: GPT-2 124M and Transformer base in bf16 and fp8, against plain torch and transformers.

    python benchmarks/train_gpu.py --json FILE
    python benchmarks/train_gpu.py --part typed     # one part: speed, losses or typed

Bars: GPT-2 at 64 × 1,024 tokens at least 1.05 times nanoGPT's step in bf16 and 1.2 times in fp8, with the same loss
within 0.005 over 500 steps (fp8: 0.02 over 1,000) from the same weights; Transformer base at 256 × (64 + 64) tokens at
least 1.4 times a compiled ``nn.Transformer`` and twice a compiled Marian. Losses are compared as means of 50 steps, at
a batch of 16, after a warm-up, on the text of the standard library.

``typed`` runs the command a user types, ``regard train lm model=gpt2 …``, on that text, and the bare step of
``regard bench train`` at the same shape: the command reaches at least 97 % of its speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from generate_gpu import library_tokens
from measuring import print_bar
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.experiments.bench_train import PlainGPT, bench_train, measure_steps, plain_step, random_batch, regard_step
from regard.models import Decoder, build
from regard.presets import preset
from regard.training.loss import Batch
from regard.training.optimiser import constant
from regard.training.precision import Precision

DEVICE = torch.device("cuda")
SHAPES = {"gpt2": (64, 1024), "transformer-base": (256, 64)}
BARS = {("gpt2", "bf16"): 1.05, ("gpt2", "fp8"): 1.2, ("transformer-base", "bf16"): 1.4}
WARMUP = 100  # steps, as in ``regard train``: without them, two runs in bf16 end up to 0.02 apart by rounding alone
SMOOTHED = 50  # steps whose losses are averaged before they are compared
TYPED_BAR, TYPED_STEPS = 0.97, 160
# The recipe of language models trains with Muon, which takes 6 ms of a step by itself; the bare step has AdamW.
TYPED = (
    *("data.tokenizer=words", "data.max_len=1024", "model=gpt2", "train.batch_tokens=65536", "train.batch_size=64"),
    *("train.optimiser=adamw", "train.lr=6e-4", "train.compile=on", "train.samples=0", f"train.steps={TYPED_STEPS}"),
    *("train.eval_every=0", "train.save_every=0"),
)


def copy_weights(plain: PlainGPT, model: Decoder) -> None:
    """Give nanoGPT's model the weights and the activation of ours."""
    pairs: list[tuple[nn.Module, nn.Module]] = [(plain.norm, model.decoder.norm)]  # type: ignore[list-item]  # pre-norm has one
    for layer, block in zip(plain.layers, model.decoder.blocks, strict=True):
        pairs += [(layer.norm_1, block.attention_norm), (layer.norm_2, block.ff_norm)]
        pairs += [(layer.qkv, block.attention.w_qkv), (layer.out, block.attention.w_o)]
        pairs += [(layer.up, block.ff.w_in), (layer.down, block.ff.w_out)]
        layer.gelu = nn.GELU("tanh")
    with torch.no_grad():
        for theirs, ours in pairs:
            theirs.load_state_dict(ours.state_dict())
        plain.token.weight[: len(model.token.weight)] = model.token.weight
        plain.position.weight.copy_(model.embeddings.position.weight)


def text_batches(tokens: Tensor, n: int, batch: int = 16, length: int = 1024) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(0)
    for _ in range(n):
        starts = torch.randint(len(tokens) - length - 1, (batch,), generator=generator)
        rows = torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])
        yield Batch((rows[:, :-1].contiguous(),), rows[:, 1:].contiguous()).to(DEVICE)


def loss_curve(config: ModelConfig, which: str, tokens: Tensor, steps: int) -> Tensor:
    """Losses of training from the same weights: "torch", or ours in that precision."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    if which == "torch":
        model = build(config)
        assert isinstance(model, Decoder)
        plain = PlainGPT(config)
        copy_weights(plain, model)
        step = plain_step(plain, Precision("bf16", DEVICE), True, constant(WARMUP))
    else:
        step = regard_step(config, Precision(which, DEVICE), True, constant(WARMUP))  # type: ignore[arg-type]  # bf16 or fp8
    losses = torch.stack([step(batch) for batch in text_batches(tokens, steps)])
    return losses.float().cpu().unfold(0, SMOOTHED, SMOOTHED).mean(-1)


def library_text(limit: int = 20_000_000) -> str:
    """Python files of the standard library, with its packages."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py"))
    return "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)[:limit]


def typed_speed(folder: Path, precision: str) -> tuple[float, int]:
    """Tokens per second of ``regard train`` after its first 40 steps, and the size of its vocabulary."""
    text, out = folder / "text.txt", folder / precision
    text.write_text(library_text(), encoding="utf-8")
    words = ["lm", f"data.source={text}", *TYPED, f"train.precision={precision}", f"train.out={out}"]
    subprocess.run([sys.executable, "-m", "regard", "train", *words], check=True)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    speeds = [line["tokens_per_s"] for line in lines if line["step"] > 40 and "tokens_per_s" in line]
    return statistics.median(speeds), json.loads((out / "model" / "config.json").read_text())["vocab_size"]


def compare_typed(precision: str) -> dict[str, float]:
    """The speed of the command, and of the bare step over as many steps after it, on a GPU that is equally warm."""
    batch, length = SHAPES["gpt2"]
    with tempfile.TemporaryDirectory() as folder:
        typed, vocab_size = typed_speed(Path(folder), precision)
    config, how = preset("gpt2").with_(vocab_size=vocab_size), Precision(precision, DEVICE)  # type: ignore[arg-type]
    with how.settings():
        inputs = random_batch(config, batch, length).to(DEVICE)
        seconds, _ = measure_steps(regard_step(config, how, True), inputs, DEVICE, TYPED_STEPS)
    bare = batch * length / seconds
    print(f"{precision}, {vocab_size:,} tokens: as typed {typed:,.0f} tokens/s, the bare step {bare:,.0f}")
    print_bar(f"{precision}: regard train as typed, of the bare step", typed / bare, TYPED_BAR, "×", at_least=True)
    return {"typed": typed, "bare": bare, "vocab_size": vocab_size}


def compare_speeds() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, (batch, length) in SHAPES.items():
        for precision in ("bf16", "fp8") if name == "gpt2" else ("bf16",):
            peers = ("regard", "torch", "transformers") if precision == "bf16" else ("regard", "torch")
            torch._dynamo.reset()
            result = bench_train(
                preset(name), name, batch=batch, length=length, precision=precision, contenders=peers, device=DEVICE
            )  # type: ignore[arg-type]  # literals
            print(result.to_text(), flush=True)
            found[f"{name} {precision}"] = result.to_dict()
    return found


def compare_losses(steps: int) -> dict[str, list[float]]:
    tokens, config = library_tokens(), preset("gpt2")
    curves = {which: loss_curve(config, which, tokens, steps) for which in ("torch", "bf16", "fp8")}
    for which, other in (("bf16", "torch"), ("fp8", "bf16")):
        gap = curves[which] - curves[other]
        ends = f"{gap.min():+.4f} and {gap.max():+.4f}, {gap.mean():+.4f} in the mean"
        print(f"{which}: loss above that of {other} over {steps:,} steps: between {ends}", flush=True)
    return {which: curve.tolist() for which, curve in curves.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--part", choices=("speed", "losses", "typed"), help="only this part")
    parser.add_argument("--steps", type=int, default=1000, help="of the loss curves")
    args = parser.parse_args()
    found: dict[str, object] = {}
    if args.part in (None, "speed"):
        found |= compare_speeds()
    if args.part in (None, "losses"):
        found["losses"] = compare_losses(args.steps)
    if args.part in (None, "typed"):
        found["typed"] = {precision: compare_typed(precision) for precision in ("bf16", "fp8")}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
