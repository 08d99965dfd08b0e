"""The length at which attention, which grows with it, passes the matrices of a layer, which do not."""

from __future__ import annotations

from collections.abc import Callable

from ...config import ModelConfig
from ...config.mixers import keys_per_query
from ...models.flops import Flops, StackShape, mixing_flops, stacks_of
from .pieces import Setting

PAPER, ALL_PAIRS, SEEN = "T²·d = T·d²", "all pairs = the layer's matrices", "the same, hidden pairs not counted"
_FAR = 1 << 40
"""Tokens. What is not reached by then never is: keys met grow with the length, or stop at a window."""


def crossover(config: ModelConfig, setting: Setting, flops: list[Flops]) -> dict[str, float | None]:
    """T = d is the paper's; beside all matrices of a layer attention takes longer to weigh as much. None: never does.

    ``flops`` are those of ``setting``: what the matrices of the last stack take for each token.
    """
    if config.architecture == "recurrent" or not config.mixing.pairs:
        return dict.fromkeys((PAPER, ALL_PAIRS, SEEN))
    stack = stacks_of(config, setting.length, setting.source_length)[-1]
    kinds = ("projections", "cross projections", "feed-forward")
    matrices = sum(part.forward for part in flops if part.part == stack.name and part.kind in kinds)
    wanted = matrices / (setting.batch * stack.length)
    layers = [_keys_of(config, stack, layer) for layer in range(stack.n_layers)]

    def all_pairs(n: int) -> float:
        return stack.n_layers * _attention(config, stack, n)

    def seen(n: int) -> float:
        return sum(_attention(config, stack, keys(n)) for keys in layers)

    return {PAPER: float(config.d_model), ALL_PAIRS: _first(all_pairs, wanted), SEEN: _first(seen, wanted)}


def _attention(config: ModelConfig, stack: StackShape, keys: float) -> float:
    """Of one token in one layer; Transformer-XL's distances cost as much again as its keys."""
    distances = 4.0 * stack.q_width * keys if config.positions == "xl" else 0.0
    return mixing_flops(config, stack, keys) + distances


def _first(attention: Callable[[int], float], wanted: float) -> float | None:
    """The shortest text, in tokens, for which a token's attention takes what was wanted."""
    low, high = 0, 1
    while attention(high) < wanted:
        low, high = high, 2 * high
        if high > _FAR:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if attention(middle) < wanted else (low, middle)
    return float(high)


def _keys_of(config: ModelConfig, stack: StackShape, layer: int) -> Callable[[int], float]:
    """Keys that a query of this layer meets, by length."""

    def met(n: int) -> float:
        return keys_per_query(config, layer, n, causal=stack.causal, has_memory=stack.memory is not None)

    if config.sparsity != "bigbird":
        return met
    # Its blocks are gone through pair by pair, too slow for long texts. But n whole blocks have a + b·n + c·n² pairs.
    places = [n_blocks * config.sparsity_size for n_blocks in (8, 16, 32)]
    pairs = [n * met(n) for n in places]

    def along(n: int) -> float:
        return met(n) if n <= places[-1] else _parabola(places, pairs, n) / n

    return along


def _parabola(at: list[int], values: list[float], x: int) -> float:
    """Through three points (Lagrange)."""
    (a, b, c), (u, v, w) = at, values
    return (
        u * (x - b) * (x - c) / ((a - b) * (a - c))
        + v * (x - a) * (x - c) / ((b - a) * (b - c))
        + w * (x - a) * (x - b) / ((c - a) * (c - b))
    )
