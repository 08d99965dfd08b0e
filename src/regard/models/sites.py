"""Hook sites: the named activations of a Transformer, which can be captured and edited, and sites derived from them.

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

Derived sites are computed from others when they are read; they are not stored and cannot be replaced.

decoder.blocks.3.attention.results       what each head writes: its output through w_o         (B, H, T, M)
decoder.blocks.3.attention.scale         what the norm before attention divides by             (B, T, 1)
decoder.blocks.3.ff.scale                the same for the norm before the feed-forward network (B, T, 1)
decoder.scale                            what the last norm divides by                         (B, T, 1)
logits                                   of tokens; of a classifier (B, C), of a tagger (B, T, C) (B, T, V)

In a post-norm layer the scales are those of the norms after attention and after the feed-forward network. A norm on
the output of a sub-layer (norm_place "output", the second norm of "both") has no site, and an attention that combines
its maps before w_o has no ``results``.

A layer with cross-attention also has ``cross_attention`` and ``after_cross_attention``; an encoder's sites begin with
"encoder". "decoder.blocks.3" is short for its output, "decoder.blocks.3.attention" for its heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import nn

from ..attention import MultiHeadAttention
from ..attention.state_space import StateSpaceMixer
from ..layers import LayerNorm, RMSNorm
from .block import Block, Stack, SublayerNorms
from .components import ClassHead, TagHead
from .experts import Experts


class HookSite(NamedTuple):
    """A point in the forward pass where an activation can be captured and, unless it is derived, replaced."""

    name: str
    shape: str  # "(B, T, M)"
    owner: nn.Module  # the stack, layer or attention that computes it; for a scale its norm, for logits the head
    point: str  # which of the owner's activations: "input", "heads", "ff.neurons"
    call: int  # which call of the owner in one pass: layers that share a module are its calls 0, 1 …
    sources: tuple[str, ...] = ()  # for a derived site: the sites whose sum it is computed from

    @property
    def is_derived(self) -> bool:
        return bool(self.sources)

    def __repr__(self) -> str:
        return f"HookSite({self.name!r}, {self.shape!r}{', derived' if self.is_derived else ''})"


STATES, HEADS, KEYS = "(B, T, M)", "(B, H, T, D)", "(B, G, S, D)"
NEURONS, CHOICES = "(B, T, F)", "(B, T, E)"
RESULTS, SCALE = "(B, H, T, M)", "(B, T, 1)"
LOGITS, CLASSES, TAGS = "(B, T, V)", "(B, C)", "(B, T, C)"


def stack_sites(name: str, stack: nn.Module | None) -> list[HookSite]:
    """The sites of a Stack or HierarchicalStack in the order of the forward pass; any other module has none."""
    sites: list[HookSite] = []
    if isinstance(stack, Stack):
        sites.append(HookSite(name, STATES, stack, "input", 0))
        for layer, block in enumerate(stack.layers):
            sites += _layer_sites(f"{name}.blocks.{layer}", block, layer // len(stack.blocks))
    for number, stage in enumerate(getattr(stack, "stages", ())):
        sites += stack_sites(f"{name}.stages.{number}", stage)
    norm = getattr(stack, "norm", None)
    if sites and isinstance(norm, LayerNorm | RMSNorm):
        sites.append(HookSite(f"{name}.scale", SCALE, norm, "scale", 0, (sites[-1].name,)))
    return sites


def logits_site(head: nn.Module, source: str) -> HookSite:
    """The logits that a head computes from the last layer's output."""
    shape = CLASSES if isinstance(head, ClassHead) else TAGS if isinstance(head, TagHead) else LOGITS
    return HookSite("logits", shape, head, "logits", 0, (source,))


def _layer_sites(name: str, block: Block, call: int) -> Iterator[HookSite]:
    def site(point: str, shape: str = STATES) -> HookSite:
        return HookSite(f"{name}.{point}", shape, block, point, call)

    yield site("input")
    for part, module in (("attention", block.attention), ("cross_attention", block.cross_attention)):
        if module is None:
            continue
        yield from _scale_before(site(f"{part}.input"))
        yield site(f"{part}.input")
        if isinstance(module, MultiHeadAttention):
            for point, shape in (("q", HEADS), ("k", KEYS), ("v", KEYS), ("heads", HEADS)):
                yield HookSite(f"{name}.{part}.{point}", shape, module, point, call)
            if module.writes_by_head:
                heads = (f"{name}.{part}.heads",)
                yield HookSite(f"{name}.{part}.results", RESULTS, module, "results", call, heads)
        elif isinstance(module, StateSpaceMixer):
            yield HookSite(f"{name}.{part}.heads", HEADS, module, "heads", call)
        yield site(f"{part}.output")
        yield from _scale_after(site(f"{part}.input"))
        if not block.parallel:
            yield site(f"after_{part}")
    if block.ff is not None:
        yield from _scale_before(site("ff.input"))
        yield site("ff.input")
        if isinstance(block.ff, Experts):
            yield HookSite(f"{name}.ff.router", CHOICES, block.ff, "router", call)
        else:
            yield site("ff.neurons", NEURONS)
        yield site("ff.output")
        yield from _scale_after(site("ff.input"))
    yield site("output")


def _scale_before(sublayer_input: HookSite) -> Iterator[HookSite]:
    """The scale of the norm before a sub-layer, if there is one."""
    norms, state = norms_around(sublayer_input)
    yield from _scale(sublayer_input, norms.before, (state,))


def _scale_after(sublayer_input: HookSite) -> Iterator[HookSite]:
    """The scale of the norm of the residual sum after a sub-layer, if there is one."""
    norms, state = norms_around(sublayer_input)
    output = sublayer_input.name.removesuffix("input") + "output"
    yield from _scale(sublayer_input, norms.total, (state, output) if sublayer_input.owner.residual else (output,))


def _scale(sublayer_input: HookSite, norm: Any, sources: tuple[str, ...]) -> Iterator[HookSite]:
    if isinstance(norm, LayerNorm | RMSNorm):
        name = sublayer_input.name.removesuffix("input") + "scale"
        yield HookSite(name, SCALE, norm, "scale", sublayer_input.call, sources)


def norms_around(sublayer_input: HookSite) -> tuple[SublayerNorms, str]:
    """Given the input site of a sub-layer: the norms around the sub-layer, and the site of the residual stream before
    it."""
    block: Any = sublayer_input.owner
    norms = block.residuals()
    middle = "after_attention" if block.cross_attention is None else "after_cross_attention"
    part, state = {
        "attention.input": (norms.attention, "input"),
        "cross_attention.input": (norms.cross, "after_attention"),
        "ff.input": (norms.ff, "input" if norms.parallel else middle),
    }[sublayer_input.point]
    return part, sublayer_input.name.removesuffix(sublayer_input.point) + state


def full_name(name: str) -> str:
    """The full name of a site, from its short form."""
    if name.endswith("attention"):  # "after_attention" is a state, not a module
        return name if name.endswith(("after_attention", "after_cross_attention")) else f"{name}.heads"
    return f"{name}.output" if name.rpartition(".blocks.")[2].isdigit() else name
