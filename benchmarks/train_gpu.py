"""Training on a GPU: GPT-2 124M and Transformer base in bf16 and fp8, against plain torch and transformers.

    python benchmarks/train_gpu.py --json FILE

Bars: GPT-2 at 64 × 1,024 tokens at least 1.05 times nanoGPT's step in bf16 and 1.2 times in fp8, with the same loss
within 0.005 over 500 steps (fp8: 0.02 over 1,000) from the same weights; Transformer base at 256 × (64 + 64) tokens at
least 1.4 times a compiled ``nn.Transformer`` and twice a compiled Marian. Losses are compared as means of 50 steps, at
a batch of 16, on the text of the standard library.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from generate_gpu import library_tokens
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.experiments.bench_train import PlainGPT, bench_train, plain_step, regard_step
from regard.models import Decoder, build
from regard.presets import preset
from regard.training.loss import Batch
from regard.training.precision import Precision

DEVICE = torch.device("cuda")
SHAPES = {"gpt2": (64, 1024), "transformer-base": (256, 64)}
BARS = {("gpt2", "bf16"): 1.05, ("gpt2", "fp8"): 1.2, ("transformer-base", "bf16"): 1.4}
SMOOTHED = 50  # steps whose losses are averaged before they are compared


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
        step = plain_step(plain, Precision("bf16", DEVICE), True)
    else:
        step = regard_step(config, Precision(which, DEVICE), True)  # type: ignore[arg-type]  # bf16 or fp8
    losses = torch.stack([step(batch) for batch in text_batches(tokens, steps)])
    return losses.float().cpu().unfold(0, SMOOTHED, SMOOTHED).mean(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--steps", type=int, default=1000, help="of the loss curves; 0: only speeds")
    args = parser.parse_args()
    found: dict[str, object] = {}
    for name, (batch, length) in SHAPES.items():
        for precision in ("bf16", "fp8"):
            peers = ("regard", "torch", "transformers") if precision == "bf16" else ("regard",)
            torch._dynamo.reset()
            result = bench_train(
                preset(name), name, batch=batch, length=length, precision=precision, contenders=peers, device=DEVICE
            )  # type: ignore[arg-type]  # literals
            print(result.to_text(), flush=True)
            found[f"{name} {precision}"] = result.to_dict()
    if args.steps:
        tokens, config = library_tokens(), preset("gpt2")
        curves = {which: loss_curve(config, which, tokens, args.steps) for which in ("torch", "bf16", "fp8")}
        for which in ("bf16", "fp8"):
            gap = (curves[which] - curves["torch"]).abs().max().item()
            print(f"{which}: loss at most {gap:.4f} from plain torch's over {args.steps:,} steps", flush=True)
        found["losses"] = {which: curve.tolist() for which, curve in curves.items()}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
