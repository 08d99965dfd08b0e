"""Which backend can do what: the one table behind ``auto``, the error messages and the parametrised tests."""

from __future__ import annotations

from typing import NamedTuple

MASKS = ("causal", "padding", "mask")
BIASES = ("bias", "trainable bias", "content bias")
DROPOUT = ("dropout", "seed")
FEATURES = ("plain", *MASKS, *BIASES, "gqa", *DROPOUT, "weights")
"""plain: nothing special · causal, padding, mask (any) · bias (fixed), trainable bias, content bias (reads q and k) ·
gqa: fewer key than query heads · dropout on the weights, fixed by a seed · weights: returns them."""

DOT = ("dot", "general")
ADDITIVE = ("additive", "concat")
KERNEL = ("linear", "performer")
DEVICES = ("cpu", "cuda", "mps")
OTHER = "mps"  # devices not listed (meta, xpu …) are taken to do what this one does: torch's own operations
DIRECTIONS = ("forward", "backward")


class Capability(NamedTuple):
    backend: str
    mechanism: str
    device: str
    direction: str
    feature: str


class _Row(NamedTuple):
    backend: str
    mechanisms: tuple[str, ...]
    devices: tuple[str, ...]
    directions: tuple[str, ...]
    features: tuple[str, ...]


_ROWS = (
    _Row("reference", DOT + ADDITIVE, DEVICES, DIRECTIONS, FEATURES),
    _Row("reference", KERNEL, DEVICES, DIRECTIONS, ("plain", *MASKS, "gqa", *DROPOUT, "weights")),
    _Row("reference", ("linformer",), DEVICES, DIRECTIONS, ("plain", "padding", "gqa", *DROPOUT, "weights")),
    _Row("tiled", DOT + ADDITIVE, DEVICES, DIRECTIONS, ("plain", *MASKS, *BIASES, "gqa", *DROPOUT)),
    _Row("tiled", ("linformer",), DEVICES, DIRECTIONS, ("plain", "padding", "gqa", *DROPOUT)),
    _Row("sdpa", DOT, DEVICES, DIRECTIONS, ("plain", *MASKS, "bias", "trainable bias", "gqa", "dropout")),
    _Row("sdpa", ("linformer",), DEVICES, DIRECTIONS, ("plain", "padding", "gqa", "dropout")),
    _Row("flex", DOT, ("cuda",), DIRECTIONS, ("plain", *MASKS, "bias", "trainable bias", "gqa")),
    _Row("flex", DOT, ("cpu",), ("forward",), ("plain", *MASKS, "bias", "trainable bias", "gqa")),
    _Row("linear", KERNEL, DEVICES, DIRECTIONS, ("plain", "causal", "padding", "gqa")),
)

CAPABILITIES = frozenset(
    Capability(row.backend, mechanism, device, direction, feature)
    for row in _ROWS
    for mechanism in row.mechanisms
    for device in row.devices
    for direction in row.directions
    for feature in row.features
)

BACKENDS = tuple(dict.fromkeys(row.backend for row in _ROWS))


def missing(backend: str, mechanism: str, device: str, direction: str, features: frozenset[str]) -> list[str]:
    """The features a backend lacks for this mechanism on this device, in the table's order."""
    device = device if device in DEVICES else OTHER
    asked = [f for f in FEATURES if f in features]
    return [f for f in asked if Capability(backend, mechanism, device, direction, f) not in CAPABILITIES]


def able(mechanism: str, device: str, direction: str, features: frozenset[str]) -> list[str]:
    """The backends that can do all of it."""
    return [b for b in BACKENDS if not missing(b, mechanism, device, direction, features | {"plain"})]
