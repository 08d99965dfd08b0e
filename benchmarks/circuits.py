"""Analysis of a trained induction model: estimated and exhaustive patching, a circuit, and what its heads read.

    python benchmarks/circuits.py                  # trains the recipe `induction` first, a minute on two free cores
    python benchmarks/circuits.py runs/induction   # an existing run

Printed heads are counted from 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import torch
from measuring import print_bar
from torch import Tensor

import regard
from regard.lens.circuit import CircuitTask, find_circuit, repeats_task
from regard.lens.head_history import head_history
from regard.lens.head_roles import head_roles
from regard.lens.interventions import switch_off
from regard.lens.patching import attribution_patching, patching_sweep
from regard.models import Model
from regard.recipes import run_config


def rank_correlation(one: Tensor, other: Tensor) -> float:
    """Spearman's: the correlation of the ranks."""
    ranks = torch.stack([x.flatten().argsort().argsort().double() for x in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


def check_estimates(model: Model, task: CircuitTask) -> bool:
    """Whether attribution patching ranks the heads as patching every head does."""
    pairs = task.clean, task.corrupted, task.metrics(model)
    exact = patching_sweep(model, *pairs, over="heads").effects
    found = attribution_patching(model, *pairs, over="heads").effects
    what = f"Spearman over {exact.numel()} heads, {len(task.clean)} pairs"
    return print_bar(what, rank_correlation(exact, found), 0.9, "", at_least=True)


def check_circuit(model: Model, task: CircuitTask) -> bool:
    found = find_circuit(model, task.clean, task.corrupted, task.metrics(model))
    print(found)
    good = print_bar("circuit: faithfulness", found.faithfulness, 0.85, "", at_least=True)
    good &= print_bar("circuit: share of the edges", 100 * found.share, 15, "%")
    return good & print_bar("circuit: smallest loss without an edge", found.minimality, 0.0, "", at_least=True)


def position_after_first(text: str) -> int:
    """The position after the earlier occurrence of the last word."""
    words = text.split()
    return words.index(words[-1]) + 1


def key_writers(model: Model, texts: Sequence[str], readers: Iterable[int]) -> Tensor:
    """What each head of the first layer adds to the scores with which the readers, heads of the second layer, find the
    position after the earlier occurrence: the mean over texts and readers   (H,)"""
    total = torch.zeros(model.config.n_heads, dtype=torch.float64)
    for text in texts:
        record = regard.capture(model, text)
        for head in readers:
            why = record.why(layer=1, head=head, row=-1, col=position_after_first(text))
            by_key = dict(zip(why.keys, why.pairs.sum(0), strict=True))
            total += torch.stack([by_key[f"self.0.{writer}"] for writer in range(len(total))])
    return total / len(texts)


def weight_on_position(
    model: Model, texts: Sequence[str], readers: Sequence[int], without: Sequence[int] = ()
) -> float:
    """The mean weight of the readers on that position, with some heads of the first layer switched off."""
    weights = []
    with ExitStack() as block:
        if without:
            block.enter_context(switch_off(model, [("self", 0, head) for head in without]))
        for text in texts:
            tile = regard.capture(model, text).attention(layer=1).tile()[0, :, -1, position_after_first(text)]
            weights.append(tile[list(readers)].mean())
    return float(torch.stack(weights).mean())


def check_why(model: Model, texts: Sequence[str]) -> bool:
    """Whether the writers that *why* names are previous-token heads, and no other two heads matter as much."""
    scores = head_roles(model).scores
    readers = (scores["induction"][1] > 0.4).nonzero().flatten().tolist()
    named = sorted(key_writers(model, texts, readers).topk(2).indices.tolist())
    previous_heads = sorted(scores["previous"][0].topk(2).indices.tolist())
    print(f"induction heads of layer 2: {[head + 1 for head in readers]}; why names {[head + 1 for head in named]} of")
    print(f"layer 1, previous-token heads are {[head + 1 for head in previous_heads]}")
    every = combinations(range(model.config.n_heads), 2)
    left = {pair: weight_on_position(model, texts, readers, pair) for pair in every}
    whole = weight_on_position(model, texts, readers)
    print(f"weight there: {whole:.3f}; without a pair of heads {min(left.values()):.3f}")
    print(f"to {max(left.values()):.3f}, without those named {left[tuple(named)]:.3f}")
    good = print_bar(
        "named heads that are previous-token heads", len({*named} & {*previous_heads}), 2, "", at_least=True
    )
    matter_more = sum(weight < left[tuple(named)] for weight in left.values())
    return good & print_bar("pairs of heads that matter more", matter_more, 0, "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", help="a run of the recipe `induction`; trained if missing")
    parser.add_argument("--pairs", type=int, default=32, help="pairs of prompts for the estimates; the circuit has 16")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(options.run or folder) / ("" if options.run else "induction")
        if not options.run:
            regard.train(run_config("lm", [f"train.out={run}"], preset="induction"), style="quiet")
        model = regard.load(run)
        print(head_history(run).to_text())
    good = check_estimates(model, repeats_task(options.pairs))
    good &= check_circuit(model, repeats_task(16))
    return 0 if good & check_why(model, repeats_task(8).clean) else 1


if __name__ == "__main__":
    sys.exit(main())
