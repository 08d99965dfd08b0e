"""Which backend can do what: the one table behind ``auto``, the error messages and the parametrised tests."""

from __future__ import annotations

from typing import NamedTuple

MASKS = ("causal", "padding", "mask")
BIASES = ("bias", "trainable bias", "content bias")
DROPOUT = ("dropout", "seed")
FEATURES = ("plain", *MASKS, *BIASES, "gqa", *DROPOUT, "weights")
"""plain: nothing special · causal, padding, mask (any) · bias (fixed), trainable bias, content bias (reads q and k) ·
gqa: fewer key than query heads · dropout on the weights, fixed by a seed · weights: returns them."""

KINDS = ("dot", "scores", "kernel", "shares", "summary")
"""Of mechanisms, as ``Mechanism.kind`` has it: dot products · any scores under a softmax · products of feature maps ·
any positive scores, divided by their sum · dot products with a summary of the keys."""
DEVICES = ("cpu", "cuda", "mps")
OTHER = "mps"  # devices not listed (meta, xpu …) are taken to do what this one does: torch's own operations
DIRECTIONS = ("forward", "backward")


class Capability(NamedTuple):
    backend: str
    kind: str
    device: str
    direction: str
    feature: str


class _Row(NamedTuple):
    backend: str
    kinds: tuple[str, ...]
    devices: tuple[str, ...]
    directions: tuple[str, ...]
    features: tuple[str, ...]


_ROWS = (
    _Row("reference", ("dot", "scores"), DEVICES, DIRECTIONS, FEATURES),
    _Row("reference", ("kernel", "shares"), DEVICES, DIRECTIONS, ("plain", *MASKS, "gqa", *DROPOUT, "weights")),
    _Row("reference", ("summary",), DEVICES, DIRECTIONS, ("plain", "padding", "gqa", *DROPOUT, "weights")),
    _Row("tiled", ("dot", "scores"), DEVICES, DIRECTIONS, ("plain", *MASKS, *BIASES, "gqa", *DROPOUT)),
    _Row("tiled", ("summary",), DEVICES, DIRECTIONS, ("plain", "padding", "gqa", *DROPOUT)),
    _Row("sdpa", ("dot",), DEVICES, DIRECTIONS, ("plain", *MASKS, "bias", "trainable bias", "gqa", "dropout")),
    _Row("sdpa", ("summary",), DEVICES, DIRECTIONS, ("plain", "padding", "gqa", "dropout")),
    _Row("flex", ("dot",), ("cuda",), DIRECTIONS, ("plain", *MASKS, "bias", "trainable bias", "gqa")),
    _Row("flex", ("dot",), ("cpu",), ("forward",), ("plain", *MASKS, "bias", "trainable bias", "gqa")),
    _Row("linear", ("kernel",), DEVICES, DIRECTIONS, ("plain", "causal", "padding", "gqa")),
)

CAPABILITIES = frozenset(
    Capability(row.backend, kind, device, direction, feature)
    for row in _ROWS
    for kind in row.kinds
    for device in row.devices
    for direction in row.directions
    for feature in row.features
)

BACKENDS = tuple(dict.fromkeys(row.backend for row in _ROWS))


def missing(backend: str, kind: str, device: str, direction: str, features: frozenset[str]) -> list[str]:
    """The features a backend lacks for this kind of mechanism on this device, in the table's order."""
    device = device if device in DEVICES else OTHER
    asked = [f for f in FEATURES if f in features]
    return [f for f in asked if Capability(backend, kind, device, direction, f) not in CAPABILITIES]


def able(kind: str, device: str, direction: str, features: frozenset[str]) -> list[str]:
    """The backends that can do all of it."""
    return [b for b in BACKENDS if not missing(b, kind, device, direction, features | {"plain"})]
