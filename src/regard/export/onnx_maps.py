"""Attention maps of an ONNX run: its queries and keys, and the masks, biases and scores of the model they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import Tensor, nn

from ..attention import Frame, MultiHeadAttention, masks
from ..attention.attention_map import AttentionMap
from ..attention.biases import Bias
from ..attention.masks import Mask
from ..attention.mechanisms import Mechanism
from ..attention.score_matrix import ScoreMatrix
from ..models import Block, Stack
from ..models.base_model import padding_mask


def weighing_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """What weights follow from beside q and k: biases and mechanisms, by their place in the model."""
    for place, module in model.named_modules():
        if isinstance(module, Bias | Mechanism):
            yield place, cast(nn.Module, module)


def stack_maps(
    name: str, stack: Stack, found: dict[str, Tensor], source_keep: Tensor | None, positions: Tensor | None = None
) -> dict[str, AttentionMap]:
    """The maps of a stack's layers. An encoder's keys are k_0 …; a decoder, which has ``positions``, caches its own.

    ``source_keep`` says what an encoder's source is padded with, for its own attention and for the decoder's to it.
    """
    out = {}
    for layer in range(stack.n_layers):
        block = stack.blocks[layer % len(stack.blocks)]
        assert isinstance(block, Block)
        place = f"{name}.blocks.{layer}"
        if f"q_{layer}" in found and isinstance(block.attention, MultiHeadAttention):
            q = found[f"q_{layer}"]
            if positions is None:
                k, mask, frame = found[f"k_{layer}"], padding_mask(source_keep), None
            else:
                k, mask, frame = found[f"present_k_{layer}"], None, Frame(q.shape[0], q.shape[1], positions, positions)
            bias = block.attention.position_bias if stack.position_bias is None else stack.position_bias
            own = _all_of(masks.causal() if stack.causal else None, mask, block.mask)
            mechanism = block.attention.mechanism
            out[f"{place}.attention"] = AttentionMap(q, k, own, bias, mechanism=mechanism, frame=frame)
        if f"cross_q_{layer}" in found and block.cross_attention is not None:
            q, k = found[f"cross_q_{layer}"], found[f"cross_k_{layer % len(stack.blocks)}"]
            mechanism = block.cross_attention.mechanism
            out[f"{place}.cross_attention"] = AttentionMap(q, k, padding_mask(source_keep), mechanism=mechanism)
    return out


def recurrent_map(q: Tensor, k: Tensor, source_keep: Tensor | None, mechanism: Mechanism) -> AttentionMap:
    """A recurrent decoder's looks, q (B, 1, T, D) and k (B, 1, S, D) as they are scored."""
    return AttentionMap.of(ScoreMatrix(q, k, padding_mask(source_keep), None, mechanism, Frame.of(q, k)))


def _all_of(*some: Mask | None) -> Mask | None:
    """All masks at once; None where there is none."""
    joined = None
    for mask in some:
        joined = mask if joined is None else joined if mask is None else joined & mask
    return joined
