"""Attention in four lines, and why the scores are divided by √d.

You learn: attention is a weighted mean, softmax(Q Kᵀ / √d) V; each row of weights sums to 1; and without √d the weights
of wide vectors collapse onto one word, so that almost no gradient flows to the others.

    python examples/mini_attention.py
    python examples/mini_attention.py "any sentence of yours"
"""

import argparse
import math

import torch

import regard


def attention(q, k, v, scale):
    """The formula as it stands in the paper (Vaswani et al. 2017, eq. 1)."""
    scores = q @ k.mT * scale  # (T, T): how well each query fits each key
    weights = scores.softmax(-1)  # each row a distribution
    return weights @ v, weights  # a weighted mean of the values


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sentence", nargs="?", default="나는 오늘 학교에 간다")
    args = parser.parse_args()
    torch.manual_seed(0)
    words, d = args.sentence.split(), 16
    x = torch.randn(len(words), d)  # random vectors stand for the words
    out, weights = attention(x, x, x, 1 / math.sqrt(d))

    print("each row: where this word looks (mostly at itself: x·x is large, and nothing is learned yet)")
    for word, row in zip(words, weights, strict=True):
        print("  ".join(f"{float(weight):.2f} {other}" for other, weight in zip(words, row, strict=True)), " ←", word)

    heads = x[None, None]  # regard speaks of (batch, heads, words, width)
    ours = regard.attend(heads, heads, heads, weights=True)
    error = float((ours.output[0, 0] - out).abs().max())
    print(f"\nregard.attend differs from the four lines by {error:.1e}")

    print("\nhow many of 64 words a random query really looks at, exp(entropy)")
    print("   width     with √d  without")
    spread = {}
    for width in (4, 16, 64, 256, 1024):
        q, k = torch.randn(200, width), torch.randn(64, width)
        for name, scale in (("with", width**-0.5), ("without", 1.0)):
            _, found = attention(q, k, k, scale)
            spread[name, width] = float(torch.special.entr(found).sum(-1).exp().mean())
        print(f"{width:8} {spread['with', width]:11.1f} {spread['without', width]:8.1f}")
    return {"weights": weights, "error": error, "spread": spread}


if __name__ == "__main__":
    main()
