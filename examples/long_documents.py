"""Long documents: a window makes attention linear in length, and depth carries news across windows.

You learn: with a window of w each token looks at w keys, so time grows with T and not with T². Nothing is out of reach
for it: after L layers a token has heard from L · (w − 1) tokens back, which the gradient shows.

    python examples/long_documents.py [document.txt] [--longest 8192] [--window 128]
"""

import argparse
import time
from pathlib import Path

import torch

import regard
from regard.attention.masks import causal, window
from regard.data.corpora import open_corpus

SIZES = {"vocab_size": 256, "d_model": 32, "n_heads": 2, "n_kv_heads": 2, "d_ff": 64}


@torch.no_grad()
def seconds(length: int, mask) -> float:
    q, k, v = (torch.randn(1, 4, length, 32) for _ in range(3))
    regard.attend(q, k, v, mask=mask)  # the first call prepares
    started = time.perf_counter()
    regard.attend(q, k, v, mask=mask)
    return time.perf_counter() - started


def reach(model: regard.Model, tokens: torch.Tensor) -> int:
    """How many tokens back the last output still depends on what was read."""
    tapped = []
    model.token.register_forward_hook(lambda module, inputs, out: tapped.append(out) or out.retain_grad())
    model(tokens)[0, -1].sum().backward()
    return tokens.shape[1] - 1 - int(tapped[0].grad[0].abs().sum(-1).nonzero().min())


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a long text; unless given, a module of Python's own library")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--window", type=int, default=128)
    args, times, reached = parser.parse_args(), {}, {}
    print("tokens    everything     window")
    for length in (args.longest // 8, args.longest // 4, args.longest // 2, args.longest):
        times[length] = seconds(length, causal()), seconds(length, causal() & window(args.window))
        print(f"{length:6} {1e3 * times[length][0]:10.1f} ms {1e3 * times[length][1]:7.1f} ms")
    text = Path(args.file).read_text() if args.file else open_corpus("stdlib").example("train", 0).text
    tokens = torch.tensor([list(text.encode()[: min(1024, args.longest)])])
    for n_layers in (1, 2, 4):
        model = regard.build("llama-1b", **SIZES, n_layers=n_layers, window=32)
        reached[n_layers] = reach(model, tokens)
        print(f"{n_layers} layer(s) with a window of 32: the last token hears from {reached[n_layers]} tokens back")
    return {"times": times, "reached": reached}


if __name__ == "__main__":
    main()
