"""The residual stream as a sum of its writers' outputs, read through a linear map.

A token's state is the sum of its embeddings and the outputs of all heads and feed-forward networks. With the scale of
each norm held at its value in this pass, everything after them is linear, so a readout (K, M) of the state (a logit, a
query) is exactly the sum of the readouts of the parts (Elhage et al. 2021). The readout is carried down the layers
through every norm on the way, so post-norm and sandwich norms are split as exactly as pre-norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention
from ..layers import Embeddings, LayerNorm, LayerScale, RMSNorm, TanhGate
from ..layers.quantised_linear import Int8Linear
from ..models.block import Block, Stack, SublayerNorms
from ..models.experts import Experts
from ..models.sites import norms_around
from ..models.transformer import embedding_positions

if TYPE_CHECKING:
    from .activations import ActivationRecord


class Place(NamedTuple):
    """One token of one prompt in a stack."""

    stack: str  # "encoder" or "decoder"
    prompt: int
    position: int


@dataclass
class ResidualSplit:
    """A readout of a token's state, split by writer. Everything is fp64; the parts sum to the readout."""

    embeddings: dict[str, Tensor]  # "token", "position" and "segment", or one "embedding" for all: (K,)
    heads: dict[str, Tensor]  # by kind of attention: (layers, H, K)
    mixers: Tensor  # (layers, K): token mixers without heads
    ff: Tensor  # (layers, K): feed-forward networks without their biases
    bias: Tensor  # (K,): biases of norms, projections and feed-forward networks
    readouts: dict[str, Tensor] = field(default_factory=dict)  # by sub-layer: the readout of its output (K, M)

    def writers(self) -> Iterator[tuple[str, Tensor]]:
        """Each part (K,) with its name: "token", "self.0.3" (kind, layer, head), "ff.1", "bias"."""
        yield from self.embeddings.items()
        for kind, parts in self.heads.items():
            for layer, by_head in enumerate(parts):
                yield from ((f"{kind}.{layer}.{head}", part) for head, part in enumerate(by_head))
        for name, by_layer in (("mixer", self.mixers), ("ff", self.ff)):
            yield from ((f"{name}.{layer}", part) for layer, part in enumerate(by_layer) if part.any())
        yield "bias", self.bias


def residual_stack(model: Any, name: str) -> Stack:
    """The encoder or the decoder; raises if it is not a stack of layers on one residual stream."""
    stack = getattr(model, name, None)
    if not isinstance(stack, Stack):
        raise ValueError("the layers of this model do not share one residual stream, so there is nothing to split")
    return stack


def layer_block(model: Any, stack: str, layer: int) -> Any:
    """The block of a layer, in a stack given by its name or by a kind of its attention; layers may share a block."""
    return residual_stack(model, "encoder" if stack == "encoder" else "decoder").layers[layer]


def check_float_weights(module: nn.Module) -> None:
    """Raise if a module is quantised: its weights are integers without their scales."""
    if any(isinstance(part, Int8Linear) for part in module.modules()):
        raise ValueError("int8 weights cannot be split or differentiated; use the model that was quantised")


def check_reads_source(model: Any) -> None:
    """Raise if a decoder reads a resampler's vectors instead of the encoder's states."""
    if getattr(model, "resampler", None) is not None:
        raise ValueError("this decoder reads the vectors of a resampler, not the states of source tokens")


def split_residual(
    record: ActivationRecord, place: Place, layer: int, readout: Tensor, part: str = "attention"
) -> ResidualSplit:
    """Split readout (K, M) · x by writer, where x is the state of a token that ``part`` of this layer reads, before its
    norm.

    "attention" reads the output of the layer below, "cross_attention" that of the attention of its own layer.
    """
    n_layers = layer + (part == "cross_attention")  # with the attention of its own layer
    zeros = torch.zeros(n_layers, len(readout), dtype=torch.float64, device=record.model.device)
    split = ResidualSplit({}, {}, zeros.clone(), zeros.clone(), readout.new_zeros(len(readout)))
    reader = _Reader(record, place, split, readout)
    if part == "cross_attention":
        reader.descend(layer, ["attention"])
    for index in reversed(range(layer)):
        reader.descend(index)
    reader.read_embeddings()
    for kind, parts in split.heads.items():
        split.heads[kind] = parts.flip(0)  # they were collected from the last layer down
    return split


class _Reader:
    """Walks down the layers, carrying the readout of the current state."""

    def __init__(self, record: ActivationRecord, place: Place, split: ResidualSplit, readout: Tensor) -> None:
        self.record, self.place, self.split, self.readout = record, place, split, readout

    def descend(self, layer: int, parts: Iterable[str] = ("attention", "cross_attention", "ff")) -> None:
        """Go from the state after a layer, or after some of its sub-layers, to the state before it."""
        block = layer_block(self.record.model, self.place.stack, layer)
        norms, name = block.residuals(), f"{self.place.stack}.blocks.{layer}"
        if norms.parallel:
            self._read(layer, name, "ff", block, norms.ff, self.readout)
            self._read(layer, name, "attention", block, norms.attention, self.readout)
            return
        before_ff = "after_attention" if block.cross_attention is None else "after_cross_attention"
        sublayers = (
            ("ff", norms.ff, before_ff),
            ("cross_attention", norms.cross, "after_attention"),
            ("attention", norms.attention, "input"),
        )
        for part, part_norms, before in sublayers:
            if part in parts and getattr(block, part) is not None:
                self._step(layer, name, part, block, part_norms, before)

    def _step(self, layer: int, name: str, part: str, block: Block, norms: SublayerNorms, before: str) -> None:
        """Go from x' = total(x + y) to x and read y on the way."""
        y = self._at(f"{name}.{part}.output")
        x = self._at(f"{name}.{before}")
        self.readout = self._through(norms.total, x + y if block.residual else y, self.readout)
        self._read(layer, name, part, block, norms, self.readout)
        if not block.residual:
            self.readout = torch.zeros_like(self.readout)

    def _read(self, layer: int, name: str, part: str, block: Block, norms: SublayerNorms, readout: Tensor) -> None:
        """Add the readout of one sub-layer's output to the split."""
        module: Any = getattr(block, part)
        if isinstance(module, Experts):
            self.split.ff[layer] = readout @ self._at(f"{name}.ff.output")
            return
        if part == "ff":
            hidden, project = self._at(f"{name}.ff.neurons"), module.w_out
        elif isinstance(module, MultiHeadAttention) and module.writes_by_head:
            hidden, project = self._at(f"{name}.{part}.heads").flatten(), module.w_o  # (H · D,)
        else:
            self.split.mixers[layer] += readout @ self._at(f"{name}.{part}.output")
            return
        weight = project.weight.double()
        bias = 0 if project.bias is None else project.bias.double()
        readout = self._through(norms.output, weight @ hidden + bias, readout)
        self.split.readouts[f"{name}.{part}"] = readout
        self.split.bias += readout @ bias if project.bias is not None else 0
        if part == "ff":
            self.split.ff[layer] = readout @ (weight @ hidden)
            return
        kind = "cross" if part == "cross_attention" else "encoder" if self.place.stack == "encoder" else "self"
        by_head = ((readout @ weight) * hidden).unflatten(1, (module.n_heads, -1)).sum(-1).T[None]  # (1, H, K)
        above = self.split.heads.get(kind)
        self.split.heads[kind] = by_head if above is None else torch.cat((above, by_head))

    def read_embeddings(self) -> None:
        """Read token, position and segment if the stack reads text, otherwise the first layer's input as one part."""
        whole = self._at(self.place.stack)
        parts = text_embeddings(self.record, self.place)
        if parts is None:
            self.split.embeddings["embedding"] = self.readout @ whole
            return
        module, vectors = parts
        if module.projection is not None:
            self.split.bias += self.readout @ module.projection.bias.double()
            self.readout = self.readout @ module.projection.weight.double()
        self.readout = self._through(module.norm, torch.stack(list(vectors.values())).sum(0), self.readout)
        for name, vector in vectors.items():
            self.split.embeddings[name] = self.readout @ vector

    def _at(self, name: str) -> Tensor:
        return self.record.at(name, self.place.prompt, self.place.position)

    def _through(self, norm: Any, x: Tensor, readout: Tensor) -> Tensor:
        """``readout_before_norm``, with the norm's own bias added to the split."""
        readout, bias = readout_before_norm(norm, x, readout)
        self.split.bias += bias
        return readout


def text_embeddings(record: ActivationRecord, place: Place) -> tuple[Embeddings, dict[str, Tensor]] | None:
    """The vectors whose sum is a token's embedding before its norm; None if the stack does not read text."""
    model: Any = record.model
    is_target = place.stack == "decoder" and model.is_encoder_decoder
    module = getattr(model, "target_embeddings" if is_target else "embeddings", None)  # your own class may have none
    if not isinstance(module, Embeddings):
        return None
    tokens = record.inputs.tensors[-1 if is_target else 0][place.prompt][None]
    at = place.position
    table = model.target_table if is_target else model.token
    token = table(tokens[:, at : at + 1])[0, 0]
    vectors = {"token": token.double()}
    if module.segment is not None:
        vectors["segment"] = module.segment.weight[0].double() * module.segment.scale
    if module.position is not None:
        positions = embedding_positions(model.config, tokens)
        index = torch.tensor([at], device=tokens.device) if positions is None else positions[0, at : at + 1]
        vectors["position"] = module.position(index, token.dtype)[-1].double()
    return module, vectors


def output_matrix(model: Any) -> Tensor:
    """The matrix (V, M) from which a token head computes its logits: its own, or the token table."""
    return model.output_table if model.head.weight is None else model.head.weight


def readout_before_norm(norm: Any, x: Tensor, readout: Tensor) -> tuple[Tensor, Tensor]:
    """A readout (K, M) of a norm's output as one of its input x (M,), with the scale held fixed; and a constant (K,).

    LayerNorm  y = (x − mean x) · weight / σ + bias      RMSNorm  y = x · (weight + offset) / rms
    """
    bias = getattr(norm, "bias", None)
    constant = readout.new_zeros(len(readout)) if bias is None else readout @ bias.double()
    return fold_norm(norm, readout) / norm_scale(norm, x), constant


def fold_norm(norm: Any, readout: Tensor) -> Tensor:
    """A readout (…, M) of a norm's output as one of its input, without the division by the norm's scale."""
    scaled = readout * norm_gain(norm).to(readout)
    return scaled - scaled.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else scaled


def unscaled_norm(norm: Any, x: Tensor) -> Tensor:
    """What a norm, layer scale or gate makes of x (…, M), without its bias and the division by its scale: linear in x.

    The counterpart of ``fold_norm``: this applies the norm to outputs, that to the maps that read them.
    """
    centred = x - x.mean(-1, keepdim=True) if isinstance(norm, LayerNorm) else x
    return centred * norm_gain(norm).to(x)


def norm_gain(norm: Any) -> Tensor:
    """The factors (M,) or (1,) of a norm, a layer scale or a gate, in fp64; 1 where there is none."""
    if norm is None or isinstance(norm, nn.Identity):
        return torch.ones(1, dtype=torch.float64)
    if isinstance(norm, TanhGate):
        return norm.gate.detach().double().tanh()
    if isinstance(norm, LayerNorm | LayerScale):
        return norm.weight.detach().double()
    if isinstance(norm, RMSNorm):
        return norm.weight.detach().double() + norm.offset
    raise ValueError(f"{type(norm).__name__} cannot be split; LayerNorm and RMSNorm can")


def norm_scale(norm: Any, x: Tensor) -> Tensor:
    """The divisor of a norm for x (…, M): the standard deviation (LayerNorm), the root mean square (RMSNorm), or 1 for
    anything else   (…)"""
    if isinstance(norm, LayerNorm):
        return (x.var(-1, unbiased=False) + norm.eps).sqrt()
    return (x.square().mean(-1) + norm.eps).sqrt() if isinstance(norm, RMSNorm) else x.new_ones(x.shape[:-1])


def norm_before(model: Any, name: str) -> tuple[LayerNorm | RMSNorm, str]:
    """The norm that produces a sub-layer's input, "decoder.blocks.3.ff.input", or "final_states"; and the site that it
    normalises."""
    norm: Any = None
    before = ""
    if name == "final_states":
        stack_name = "encoder" if model.is_encoder_only else "decoder"
        stack = residual_stack(model, stack_name)
        norm, before = stack.norm, f"{stack_name}.blocks.{stack.n_layers - 1}.output"
    elif name.endswith(("attention.input", "ff.input")) and name in model.sites():
        norms, before = norms_around(model.sites()[name])
        norm = norms.before
    if not isinstance(norm, LayerNorm | RMSNorm):
        raise ValueError(f"{name!r} is not the output of a norm; give the input of a sub-layer or final_states")
    return norm, before
