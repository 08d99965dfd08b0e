"""Parameters by part, read off the model itself: it is built on meta, where nothing is allocated."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ...config import ModelConfig
from ...models.block import Block
from ...models.build import build
from ...training.optimiser import roles


@dataclass(frozen=True)
class Weights:
    """The parameters of one part of a model."""

    part: str
    """Of which stack, or embedding and head."""
    kind: str
    number: int
    cast: int
    """Those of them that a half-precision product takes a copy of."""
    muon: int
    """Those that Muon trains where it is chosen."""
    layers: int = 1
    """Layers they are spread over."""


def weights_of(config: ModelConfig) -> list[Weights]:
    """Every parameter once, tied ones where they are first met."""
    model = build(config, device="meta")
    by_muon = {role.param for role in roles(model) if role.in_layer}
    multiplied = {module.weight for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    found: dict[tuple[str, str], list[int]] = {}
    for name, p in model.named_parameters():
        cast = p.numel() if p in multiplied or _projects(name) or (p.dim() == 1 and _bias_of_product(name)) else 0
        entry = found.setdefault(_place(name), [0, 0, 0])
        for n, value in enumerate((p.numel(), cast, p.numel() if p in by_muon else 0)):
            entry[n] += value
    layers = {
        name.split(".")[0]: sum(isinstance(part, Block) for part in stack.modules())
        for name, stack in model.named_children()
    }
    if config.share_layers:  # one block serves them all
        layers = dict.fromkeys(layers, config.n_layers)
    return [
        Weights(part, kind, number, cast, muon, max(1, layers.get(part, 1)))
        for (part, kind), (number, cast, muon) in found.items()
    ]


def _projects(name: str) -> bool:
    """Matrices that are no Linear of their own but are multiplied with all the same."""
    return name.endswith(("patches.weight", "head.weight", "w_r")) or ".mechanism.w_" in name


def _bias_of_product(name: str) -> bool:
    return name.endswith(".bias") and any(f".{part}." in f".{name}" for part in _PRODUCTS)


_PRODUCTS = ("w_qkv", "w_query", "w_kv", "w_o", "w_in", "w_out", "transform", "projection", "patches", "out", "dense")
_KINDS = {
    "attention": "attention",
    "cross_attention": "cross attention",
    "ff": "feed-forward",
    "attention_norm": "norms",
    "cross_norm": "norms",
    "ff_norm": "norms",
    "rnn": "cells",
    "ahead": "cells",
    "back": "cells",
    "norm": "norms",
    "position_bias": "position bias",
}


def _place(name: str) -> tuple[str, str]:
    """`encoder.blocks.0.ff.w_in.weight` → encoder, feed-forward; `token.weight` → embedding, tokens."""
    words = name.split(".")
    if words[0] in ("token", "target_token"):
        return "embedding", "tokens" if words[0] == "token" else "target tokens"
    if words[0] in ("embeddings", "target_embeddings"):
        return "embedding", "positions" if "position" in words else "other"
    if words[0] in ("encoder", "decoder"):
        kind = next((_KINDS[word] for word in words[1:] if word in _KINDS), "other")
        return words[0], kind
    return ("bridge", "states") if words[0] == "bridge" else ("head", words[0] if words[0] != "head" else "logits")
