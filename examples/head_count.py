"""How many heads? One layer must fetch two digits from two places, and say which stood where.

You learn: heads are places that one layer can look at at once. A single head averages what it looks at, so it settles
for one of the two digits; from two heads on the task is solved. More heads than places bring nothing more here.

    python examples/head_count.py [--steps 300] [--heads 1,2,4,8]
"""

import argparse

import torch
import torch.nn.functional as F

import regard

N, LENGTH = 6, 16  # digits 0 … 5, in rows of 16
SIZES = {"vocab_size": N * N, "d_model": 64, "n_layers": 1, "d_ff": 256, "max_len": LENGTH, "positions": "rope"}


def batch(size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits, and at each place a number made of two: the digit one before, and the digit three before."""
    x = torch.randint(N, (size, LENGTH), generator=generator)
    return x, N * x.roll(1, 1) + x.roll(3, 1)


def accuracy_of(n_heads: int, steps: int, seed: int) -> float:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = regard.build("gpt2", **SIZES, n_heads=n_heads, tie_head=False)
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 6e-3, total_steps=steps)
    for _ in range(steps):
        x, targets = batch(64, generator)
        loss = F.cross_entropy(model(x)[:, 3:].flatten(0, 1), targets[:, 3:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
    x, targets = batch(500, generator)
    return (model.eval()(x).argmax(-1) == targets)[:, 3:].float().mean().item()


def main() -> dict[int, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--heads", default="1,2,4,8")
    args, accuracies = parser.parse_args(), {}
    print(f"right by chance: {100 / N**2:.0f} %; knowing one of the two digits: {100 / N:.0f} %")
    for n_heads in map(int, args.heads.split(",")):
        runs = [accuracy_of(n_heads, args.steps, seed) for seed in (0, 1)]
        accuracies[n_heads] = sum(runs) / len(runs)
        print(f"{n_heads} × width {64 // n_heads:2}: {100 * runs[0]:.0f} % and {100 * runs[1]:.0f} % right (two seeds)")
    return accuracies


if __name__ == "__main__":
    main()
