"""Several heads: the same number of parameters, several places looked at.

You learn: multi-head attention is H small attentions side by side on slices of the same matrices; more heads cost no
parameters; and what one head must average, two heads can keep apart.

    python examples/multi_head.py [--heads 4]
"""

import argparse

import torch

import regard


def by_hand(layer: regard.MultiHeadAttention, x: torch.Tensor) -> torch.Tensor:
    """Each head alone, its output beside the others', one last matrix (Vaswani et al. 2017, §3.2.2)."""
    d = layer.d_head
    outputs = []
    for head in range(layer.n_heads):
        own = slice(head * d, (head + 1) * d)  # this head's rows of the big matrices
        q, k, v = x @ layer.w_q[own].T, x @ layer.w_k[own].T, x @ layer.w_v[own].T
        outputs.append((q @ k.mT / d**0.5).softmax(-1) @ v)
    return layer.w_o(torch.cat(outputs, -1))


@torch.no_grad()
def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=4)
    args = parser.parse_args()
    torch.manual_seed(0)
    layer = regard.MultiHeadAttention(d_model=64, n_heads=args.heads, qkv_bias=False).eval()
    x = torch.randn(2, 10, 64)
    error = float((layer(x) - by_hand(layer, x)).abs().max())
    print(f"{args.heads} heads by hand and in one go differ by {error:.1e}")

    sizes = {h: sum(p.numel() for p in regard.MultiHeadAttention(64, h).parameters()) for h in (1, 2, 4, 8, 16)}
    print("parameters by number of heads:", ", ".join(f"{h}: {n:,}" for h, n in sizes.items()))

    # Four words with the values 1, 2, 3, 4. Which two were looked at? One head answers with their mean: 1 and 4, or 2
    # and 3, it is 2.5 both times. Two heads answer with two numbers.
    values = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def answer(pair: tuple[int, int], heads: int) -> list[float]:
        wanted = [[pair[0], pair[1]]] if heads == 1 else [[pair[0]], [pair[1]]]
        q = torch.tensor([[[[50.0 if word in own else 0.0 for word in range(4)]] for own in wanted]])  # (1, H, 1, 4)
        k = torch.eye(4).expand(1, heads, 4, 4)
        v = values.expand(1, heads, 4)[..., None]
        return [round(x, 2) for x in regard.attend(q, k, v).output.flatten().tolist()]

    answers = {(pair, heads): answer(pair, heads) for pair in ((0, 3), (1, 2)) for heads in (1, 2)}
    for (pair, heads), answer in answers.items():
        print(f"looking at words {pair[0] + 1} and {pair[1] + 1} with {heads} head{'s' * (heads > 1)}: {answer}")
    return {"error": error, "sizes": sizes, "answers": answers}


if __name__ == "__main__":
    main()
