"""How many keys a query meets: all of them, a window, a sparse pattern; half of it where the future is hidden."""

from __future__ import annotations

from .model import ModelConfig


def keys_met(config: ModelConfig, layer: int, length: int, *, hidden: bool, beside: bool = False) -> float:
    """On average over a text, in one layer. ``hidden``: the future is; ``beside``: in a decoder next to an encoder."""
    if config.shifted_windows is not None and not beside:
        return min(config.shifted_windows**2, length)
    if config.sparsity == "strided":
        return _strided(config.sparsity_size, length, hidden)
    if config.sparsity == "bigbird":
        return _bigbird(config.sparsity_size, config.sparsity_random / 100, length, hidden)
    windowed = config.window is not None and (config.window_layers is None or layer in config.window_layers)
    window = min(config.window or length, length) if windowed else length
    before = window - window * (window - 1) / (2 * length)  # the first queries see fewer
    return before if hidden else 2 * before - 1 if window < length else length


def _strided(stride: int, length: int, hidden: bool) -> float:
    near = min(stride, length)
    before = near - near * (near - 1) / (2 * length)
    whole, rest = divmod(length, stride)
    far = (stride * whole * (whole - 1) / 2 + rest * whole) / length  # Σ ⌊i / stride⌋ / T
    return before + far if hidden else 2 * (before + far) - 1


def _bigbird(size: int, share: float, length: int, hidden: bool) -> float:
    """Expected: which of the other blocks are open is chance."""
    blocks = [min(size, length - start) for start in range(0, length, size)]
    met = 0.0
    for row, n_queries in enumerate(blocks):
        last = row if hidden else len(blocks) - 1
        near = {0, *range(max(0, row - 1), min(row + 1, last) + 1)} if row or hidden else set(range(len(blocks)))
        keys = sum(blocks[col] * (1.0 if col in near else share) for col in range(last + 1))
        met += n_queries * (keys - (n_queries - 1) / 2 if hidden else keys)
    return met / length
