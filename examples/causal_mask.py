"""What happens without the causal mask: a perfect score in training, and nonsense in use.

You learn: a language model must not see the word it is asked for. Without the mask its training loss falls towards 0,
because the answer stands in its input; asked for what really comes next, it has learned next to nothing.

    python examples/causal_mask.py [text.txt] [--steps 200]
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F

import regard
from regard.data.corpora import open_corpus

LENGTH = 64
SIZES = {"d_model": 96, "n_layers": 2, "n_heads": 4, "d_ff": 384, "max_len": LENGTH, "positions": "rope"}


def train(causal: bool, tokens: torch.Tensor, steps: int) -> tuple[regard.Model, float]:
    torch.manual_seed(0)
    model = regard.build("gpt2", **SIZES, vocab_size=256, causal=causal)
    optimiser, rows_of = torch.optim.AdamW(model.parameters(), lr=3e-3), tokens.unfold(0, LENGTH + 1, 1)
    for _ in range(steps):
        rows = rows_of[torch.randint(len(rows_of), (32,))]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval(), loss.item()


def in_use(model: regard.Model, tokens: torch.Tensor) -> float:
    """The loss of the last letter alone: nothing stands after it, as when a text is written."""
    rows = tokens.unfold(0, LENGTH + 1, LENGTH + 1)[:400]
    return F.cross_entropy(model(rows[:, :-1])[:, -1], rows[:, -1]).item()


def main() -> dict:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", help="a text; unless given, modules of Python's own library")
    parser.add_argument("--steps", type=int, default=200)
    args, corpus, found = parser.parse_args(), open_corpus("stdlib"), {}
    text = Path(args.file).read_text() if args.file else "".join(corpus.example("train", n).text for n in range(20))
    tokens = torch.tensor(list(text.encode()[:200_000]))
    held_out, seen = tokens.tensor_split([len(tokens) // 5])
    print(f"guessing one of 256 letters costs {math.log(256):.2f} nats")
    for causal, name in ((True, "with the mask"), (False, "without it")):
        model, loss = train(causal, seen, args.steps)
        found[causal] = loss, in_use(model, held_out)
        print(f"{name:14} loss in training {loss:.2f}, in use {found[causal][1]:.2f}")
    return found


if __name__ == "__main__":
    main()
