"""Where in a model attention happens: by kind ("self", "cross", "encoder") and layer, whatever the architecture."""

from __future__ import annotations

import re
from typing import NamedTuple

from torch import nn

from ..attention import MultiHeadAttention
from ..models import Block, Model, Recurrent
from ..models.recurrent.alignment import Alignment
from ..models.stack import Stack

Head = tuple[str, int, int]
"""(kind, layer, head)."""

_PLACE = re.compile(
    r"(?P<stack>encoder|decoder)(?:\.blocks\.(?P<layer>\d+)(?:\.(?P<part>attention|cross_attention))?)?(?:\.output)?"
)


class Place(NamedTuple):
    """A place whose activations can be read and replaced."""

    name: str
    owner: nn.Module
    """The stack whose input it is, the layer whose output it is, or the attention whose heads it is."""
    turn: int
    """Layers may share one module: which of its calls in a pass is meant, 0 where they do not."""


def attentions(model: Model) -> dict[str, list[nn.Module]]:
    """The attention modules of each kind, one a layer; shared layers have the same one several times."""
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    if isinstance(model, Recurrent):
        own = model.decoder.cross_attention
        return {} if own is None else {"cross": [own]}
    found: dict[str, list[nn.Module]] = {}
    for name, stack in stacks(model).items():
        layers = [block_of(stack, layer) for layer in range(stack.n_layers)]
        inner: list[nn.Module] = [x.attention for x in layers if isinstance(x.attention, MultiHeadAttention)]
        cross: list[nn.Module] = [x.cross_attention for x in layers if x.cross_attention is not None]
        found |= {"encoder" if name == "encoder" else "self": inner} if inner else {}
        found |= {"cross": cross} if cross else {}
    return found


def stacks(model: Model) -> dict[str, Stack]:
    """The encoder and the decoder, as far as there are any; a recurrent model has neither."""
    both = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
    return {name: stack for name, stack in both.items() if isinstance(stack, Stack)}


def block_of(stack: Stack, layer: int) -> Block:
    """A layer of a stack; where layers are shared, each is the same one."""
    block = stack.blocks[layer % len(stack.blocks)]
    assert isinstance(block, Block)
    return block


def the_only_kind(model: Model, kind: str | None) -> str:
    """The kind that is meant: the one given, or the only one, or the decoder's own."""
    kinds = list(attentions(model))
    if not kinds:
        raise ValueError("this model has no attention weights in any of its layers")
    if kind is None:
        return kinds[0] if len(kinds) == 1 else "self"
    if kind not in kinds:
        raise ValueError(f"kind={kind!r} is not one of the kinds of attention this model has: {', '.join(kinds)}")
    return kind


def attention_at(model: Model, kind: str, layer: int) -> nn.Module:
    """The attention module of a layer; one sentence where there is none."""
    modules = attentions(model)[the_only_kind(model, kind)]
    if not 0 <= layer < len(modules):
        have = f"this model has {len(modules)}, 0 to {len(modules) - 1}"
        raise ValueError(f"layer={layer} is not one of the {kind} attention's layers: {have}")
    return modules[layer]


def check_head(model: Model, kind: str, layer: int, head: int) -> nn.Module:
    """The attention module that has this head."""
    module = attention_at(model, kind, layer)
    n_heads = heads_of(module)
    if not 0 <= head < n_heads:
        have = f"there are {n_heads}, 0 to {n_heads - 1}"
        raise ValueError(f"head={head} is not one of the {kind} attention's heads: {have}")
    return module


def heads_of(module: nn.Module) -> int:
    """How many heads an attention has."""
    if isinstance(module, MultiHeadAttention):
        return module.n_heads
    assert isinstance(module, Alignment)
    return 1


def place_of(model: Model, name: str) -> Place:
    """ "decoder" is what its first layer reads, "decoder.blocks.3" what layer 3 gives on (B, T, M),
    "decoder.blocks.3.attention" or "….cross_attention" what its heads return (B, H, T, D)."""
    parts = _PLACE.fullmatch(name)
    found = stacks(model)
    if parts is None or parts["stack"] not in found:
        have = [f"{own}, {own}.blocks.0 to {own}.blocks.{stack.n_layers - 1}" for own, stack in found.items()]
        raise ValueError(f"place={name!r} is none of this model's: {'; '.join(have) or 'it has no stack of layers'}")
    stack = found[parts["stack"]]
    if parts["layer"] is None:
        return Place(name, stack, 0)
    layer = int(parts["layer"])
    if layer >= stack.n_layers:
        raise ValueError(f"place={name!r}: the {parts['stack']} has {stack.n_layers} layers, 0 to {stack.n_layers - 1}")
    block = block_of(stack, layer)
    owner = block if parts["part"] is None else getattr(block, parts["part"])
    if owner is None or (parts["part"] is not None and not isinstance(owner, MultiHeadAttention)):
        raise ValueError(f"place={name!r}: this layer has no such attention")
    return Place(name, owner, layer // len(stack.blocks))
