"""What a training step holds, tensor by tensor, and how high it gets.

Derived from what autograd keeps of this repository's own code: a step is walked forward and backward in pieces (an
embedding, each sub-layer, the loss), each of which keeps some tensors until its backward pass and needs others only
for a moment. The peak is the highest point of that walk, or of the optimiser's step after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...config import ModelConfig
from ...models.flops import source_places
from .parameters import Weights
from .pieces import MUON_AT_ONCE, Piece, Setting, pieces_of, source_numbers


@dataclass(frozen=True)
class TrainingMemory:
    """Bytes of one training step on one device."""

    weights: float
    optimiser: float
    ema: float
    inputs: float
    """The batch itself."""
    gradients: float
    activations: float
    """Held at the end of the forward pass: what autograd keeps, and half-precision copies of weights."""
    copies: float
    """Of that, the copies."""
    attention_matrices: float
    """Of that, scores and weights of token pairs."""
    workspace: float
    after_forward: float
    peak_forward: float
    peak_backward: float
    peak_step: float
    by_part: dict[str, float]
    """What autograd keeps, by piece."""

    @property
    def peak(self) -> float:
        return max(self.peak_forward, self.peak_backward, self.peak_step)

    @property
    def where(self) -> str:
        """When the peak is reached."""
        names = {"the forward pass": self.peak_forward, "the backward pass": self.peak_backward}
        return max({**names, "the optimiser's step": self.peak_step}.items(), key=lambda item: item[1])[0]


def training_memory(config: ModelConfig, weights: list[Weights], setting: Setting) -> TrainingMemory:
    """The walk."""
    number = sum(part.number for part in weights)
    by_muon = sum(part.muon for part in weights) if setting.optimiser == "muon" else 0
    static = {
        "weights": 4.0 * number,
        "optimiser": 8.0 * (number - by_muon) + 4.0 * by_muon,
        "ema": 4.0 * number if setting.ema else 0.0,
        "inputs": _inputs(config, setting),
        "workspace": float(setting.workspace),
    }
    pieces = list(pieces_of(config, weights, setting))
    held = sum(static.values()) + (4.0 * number if setting.accumulate > 1 else 0.0)
    walk = _checkpointed if setting.checkpointing else _plain
    after, peak_forward, peak_backward = walk(pieces, held, grads_are_there=setting.accumulate > 1)
    step = sum(static.values()) + 4.0 * number + _optimiser_temporaries(by_muon)
    kept = _kept(pieces, setting)
    copies = sum(piece.share.cast for piece in pieces)
    matrices = sum(bytes_ for piece in pieces for name, bytes_ in piece.saved.items() if name.startswith("pairs"))
    return TrainingMemory(
        **static,
        gradients=4.0 * number,
        activations=after - held,
        copies=copies,
        attention_matrices=matrices,
        after_forward=after,
        peak_forward=peak_forward,
        peak_backward=peak_backward,
        peak_step=step,
        by_part=kept,
    )


def _inputs(config: ModelConfig, setting: Setting) -> float:
    """Tokens and targets as 64-bit numbers, pixels and regions as fp32."""
    tokens = 16.0 * setting.batch * setting.length
    if config.architecture == "encoder-decoder" and config.source == "text":
        tokens += 9.0 * setting.batch * source_places(config, setting.length, setting.source_length)
    return tokens + 4.0 * setting.batch * source_numbers(config, setting)


def _kept(pieces: list[Piece], setting: Setting) -> dict[str, float]:
    found: dict[str, float] = {}
    for piece in pieces:
        if setting.checkpointing and piece.layer is not None:
            entry = piece.saved.get("input", 0.0) if piece.name.endswith(" attention") else 0.0
        else:
            entry = piece.kept
        found[piece.name] = found.get(piece.name, 0.0) + entry
    return found


def _plain(pieces: list[Piece], held: float, grads_are_there: bool) -> tuple[float, float, float]:
    """Held after the forward pass, and the peaks of both."""
    live = peak_forward = held
    for piece in pieces:
        peak_forward = max(peak_forward, live + piece.kept + piece.share.cast + piece.forward)
        live += piece.kept + piece.share.cast
    after = peak_backward = live
    for piece in reversed(pieces):
        grads = 0.0 if grads_are_there else piece.share.grads
        peak_backward = max(peak_backward, live + grads + piece.backward)
        live += grads - piece.kept - piece.share.cast
    return after, peak_forward, peak_backward


def _checkpointed(pieces: list[Piece], held: float, grads_are_there: bool) -> tuple[float, float, float]:
    """The same where each layer keeps its input alone and is computed again on the way back."""
    groups = list(_by_layer(pieces))
    live = peak_forward = held
    casts = 0.0  # autocast keeps its copies of the weights to the end of the forward pass
    for group in groups:
        alone = group[0].layer is None
        casts += sum(piece.share.cast for piece in group)
        widest = max(piece.kept + piece.forward for piece in group)
        kept = group[0].kept if alone else group[0].saved.get("input", 0.0)
        peak_forward = max(peak_forward, live + casts + (widest if alone else kept + widest))
        live += kept + (group[0].share.cast if alone else 0.0)
        casts -= group[0].share.cast if alone else 0.0
    after = live
    peak_backward = live
    for group in reversed(groups):
        alone = group[0].layer is None
        kept = group[0].kept if alone else group[0].saved.get("input", 0.0)
        again = 0.0 if alone else sum(piece.kept + piece.share.cast for piece in group) - kept
        inner = live + again
        for piece in reversed(group):
            grads = 0.0 if grads_are_there else piece.share.grads
            peak_backward = max(peak_backward, inner + grads + piece.backward)
            inner += grads - piece.kept - piece.share.cast
        live += sum(0.0 if grads_are_there else piece.share.grads for piece in group) - kept
        live -= group[0].share.cast if alone else 0.0
    return after, peak_forward, peak_backward


def _by_layer(pieces: list[Piece]) -> Iterator[list[Piece]]:
    group: list[Piece] = []
    for piece in pieces:
        if group and (piece.layer is None or piece.layer != group[0].layer):
            yield group
            group = []
        group.append(piece)
    if group:
        yield group


def _optimiser_temporaries(by_muon: int) -> float:
    """Fused Adam has none. Muon holds all its updates and their directions, and makes some orthogonal at a time."""
    if not by_muon:
        return 0.0
    return 8.0 * by_muon + 2.0 * min(by_muon, MUON_AT_ONCE)
