"""Hook sites: the activations of a Transformer by name, where edits read and replace them.

decoder                                  input of the first layer: embeddings                  (B, T, M)
decoder.blocks.3.input                   the residual stream before layer 3                    (B, T, M)
decoder.blocks.3.attention.input         what attention reads, after its norm                  (B, T, M)
decoder.blocks.3.attention.q             queries as they are scored: normalised, rotated       (B, H, T, D)
decoder.blocks.3.attention.k, .v         keys and values                                       (B, G, S, D)
decoder.blocks.3.attention.heads         output of each head, before w_o                       (B, H, T, D)
decoder.blocks.3.attention.output        what attention adds to the residual stream            (B, T, M)
decoder.blocks.3.after_attention         the residual stream between attention and feed-forward (B, T, M)
decoder.blocks.3.ff.input, .ff.output    what the feed-forward network reads, and adds         (B, T, M)
decoder.blocks.3.ff.neurons              its hidden layer, after activation and gate           (B, T, F)
decoder.blocks.3.ff.router               probabilities of its experts, where it has any        (B, T, E)
decoder.blocks.3.output                  the residual stream after layer 3                     (B, T, M)

``cross_attention`` and ``after_cross_attention`` are there where a layer attends to a memory; an encoder's sites begin
with "encoder". "decoder.blocks.3" is short for its output, "decoder.blocks.3.attention" for its heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn

from ..attention import MultiHeadAttention
from ..attention.state_space import Mamba2
from .block import Block, Stack
from .experts import Experts


class HookSite(NamedTuple):
    """A place in the forward pass where an activation can be read and replaced."""

    name: str
    shape: str  # "(B, T, M)"
    owner: nn.Module  # the stack, layer or attention that computes it
    point: str  # which of the owner's activations: "input", "heads", "ff.neurons"
    call: int  # which call of the owner in one pass: layers that share a module are its calls 0, 1 …


STATES, HEADS, KEYS = "(B, T, M)", "(B, H, T, D)", "(B, G, S, D)"
NEURONS, CHOICES = "(B, T, F)", "(B, T, E)"


def stack_sites(name: str, stack: Stack) -> Iterator[HookSite]:
    """The sites of a stack in the order of the forward pass."""
    yield HookSite(name, STATES, stack, "input", 0)
    for layer in range(stack.n_layers):
        block = stack.blocks[layer % len(stack.blocks)]  # layers may share blocks
        assert isinstance(block, Block)
        yield from _layer_sites(f"{name}.blocks.{layer}", block, layer // len(stack.blocks))


def _layer_sites(name: str, block: Block, call: int) -> Iterator[HookSite]:
    def site(point: str, shape: str = STATES) -> HookSite:
        return HookSite(f"{name}.{point}", shape, block, point, call)

    yield site("input")
    for part, module in (("attention", block.attention), ("cross_attention", block.cross_attention)):
        if module is None:
            continue
        yield site(f"{part}.input")
        if isinstance(module, MultiHeadAttention):
            for point, shape in (("q", HEADS), ("k", KEYS), ("v", KEYS), ("heads", HEADS)):
                yield HookSite(f"{name}.{part}.{point}", shape, module, point, call)
        elif isinstance(module, Mamba2):
            yield HookSite(f"{name}.{part}.heads", HEADS, module, "heads", call)
        yield site(f"{part}.output")
        if not block.parallel:
            yield site(f"after_{part}")
    if block.ff is not None:
        yield site("ff.input")
        if isinstance(block.ff, Experts):
            yield HookSite(f"{name}.ff.router", CHOICES, block.ff, "router", call)
        else:
            yield site("ff.neurons", NEURONS)
        yield site("ff.output")
    yield site("output")


def full_name(name: str) -> str:
    """The listed name of a site, from its short form."""
    if name.endswith("attention"):  # not "after_attention", which is no module
        return name if name.endswith(("after_attention", "after_cross_attention")) else f"{name}.heads"
    return f"{name}.output" if name.rpartition(".blocks.")[2].isdigit() else name
