"""Direct logit attribution: one logit as the sum of the contributions of all parts of the model.

The output row of a token is carried back through the final norm and down the residual stream (``lens.residual``), so
the parts, biases included, sum to the logit. A nonlinear layer of the output head (BERT's transform, a pooler's tanh)
is linearised: f(u) is read as u · (f(u) / u) with the quotient held fixed. With a soft cap, the parts sum to the logit
before the cap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..generation.text_codec import ModelTokenizers
from ..models.components import ClassHead, Pooler, TagHead, TokenHead
from .capture import attention_name, attention_site, resolve_layer
from .contributions import head_values
from .look import check_index
from .notebook import table_html
from .residual import (
    Place,
    ResidualSplit,
    check_float_weights,
    layer_block,
    output_matrix,
    readout_before_norm,
    residual_stack,
    split_residual,
)

if TYPE_CHECKING:
    from .activations import ActivationRecord


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """The contribution of each part of a model to one logit (or to the difference of two).

    parts  "token", "position" … (): embeddings;  "self", "cross" or "encoder" (layers, H): heads;  "ff" (layers,):
           feed-forward networks;  "mixer" (layers,): token mixers without heads;  "bias" (): all biases
    """

    logit: float  # as the model computes it, before a soft cap
    parts: dict[str, Tensor]
    record: ActivationRecord
    splits: list[tuple[Place, ResidualSplit]]  # one per position that the logit is read from

    @property
    def total(self) -> float:
        """The sum of all parts: the logit."""
        return float(sum(part.sum() for part in self.parts.values()))

    def by_layer(self) -> Tensor:
        """The contribution of each layer: its heads and its feed-forward network   (layers,)"""
        layers = [part.flatten(1).sum(1) if part.dim() > 1 else part for part in self.parts.values() if part.dim()]
        return torch.stack(layers).sum(0)

    def writers(self) -> Iterator[tuple[str, float]]:
        """(name, contribution) of every part: "token", "self.0.3", "ff.1", "bias"."""
        names = [name for name, _ in self.splits[0][1].writers()]
        sums = torch.stack([torch.stack([part[0] for _, part in split.writers()]) for _, split in self.splits]).sum(0)
        return zip(names, sums.tolist(), strict=True)

    def top(self, k: int = 10) -> list[tuple[str, float]]:
        """The k parts with the largest absolute contribution."""
        return sorted(self.writers(), key=lambda part: -abs(part[1]))[:k]

    @torch.no_grad()
    def neurons(self, *, layer: int) -> Tensor:
        """The contribution of each neuron of a feed-forward network   (F,)"""
        model, stack = self.record.model, self.splits[0][0].stack
        layer = check_index("layer", layer, residual_stack(model, stack).n_layers, "")
        name = f"{stack}.blocks.{layer}.ff"
        if f"{name}.neurons" not in model.sites():
            raise ValueError("this model has no neurons that all tokens share: it has experts, or no networks")
        weight = layer_block(model, stack, layer).ff.w_out.weight.double()
        total = torch.zeros(())
        for place, split in self.splits:
            neurons = self.record.at(f"{name}.neurons", place.prompt, place.position)
            total = total + split.readouts[name][0] @ weight * neurons
        return total

    @torch.no_grad()
    def tokens(self, *, layer: int, kind: str | None = None) -> Tensor:
        """The contribution of each head, split by the token it attends to: a_ij v_j W_o read as a logit   (H, S)"""
        kind, layer = resolve_layer(self.record.model, kind, layer)
        if kind not in self.parts:
            raise ValueError(f"kind={kind!r} does not contribute to this logit directly; {', '.join(self.parts)} do")
        module: Any = attention_site(self.record.model, kind, layer).owner
        attention = self.record.attention(layer=layer, kind=kind)
        weight = module.head_outputs().double()
        total = torch.zeros(())
        for place, split in self.splits:
            readout = torch.einsum("m,mhd->hd", split.readouts[attention_name(kind, layer)][0], weight)
            values = head_values(self.record, kind, layer, place.prompt).double()  # (H, S, D)
            row = attention.tile(slice(place.position, place.position + 1))[place.prompt, :, 0].double()  # (H, S)
            total = total + row * torch.einsum("hsd,hd->hs", values, readout)
        return total

    def _repr_html_(self) -> str:
        return table_html(("part", "wrote"), self.top(16), f"logit {self.logit:.3f}, its largest parts")

    def __repr__(self) -> str:
        best = ", ".join(f"{name} {value:+.2f}" for name, value in self.top(5))
        return f"LogitAttribution({self.logit:.3f} = {best} …)"


@torch.no_grad()
def logit_attribution(
    record: ActivationRecord,
    token: int | str | None = None,
    *,
    position: int = -1,
    prompt: int = 0,
    against: int | str | None = None,
) -> LogitAttribution:
    """Split the logit of a token after ``position``, or of a class.

    token    id or text of the token, index or name of the class; None: the most likely one
    against  another token or class: split the difference of the two logits
    """
    model: Any = record.model
    check_float_weights(model)
    name = "encoder" if model.is_encoder_only else "decoder"
    index = record.index(prompt, position)
    head = model.class_head if model.class_head is not None else model.head
    if head is None:
        raise ValueError("this model has no head, so it has no logits to split")
    logits = _logits(record, head, prompt, index)
    outputs = [int(logits.argmax()) if token is None else output_index(model, token)]
    outputs += [] if against is None else [output_index(model, against)]
    signs = torch.tensor([1.0, -1.0][: len(outputs)], dtype=torch.float64, device=model.device)
    stack = residual_stack(model, name)
    readings = _head_readings(record, head, prompt, index, outputs, signs)
    splits: list[tuple[Place, ResidualSplit]] = []
    for at, readout, constant in readings:
        place = Place(name, prompt, at)
        state = record.at(f"{name}.blocks.{stack.n_layers - 1}.output", prompt, at)
        readout, bias = readout_before_norm(stack.norm, state, readout)
        split = split_residual(record, place, stack.n_layers, readout)
        split.bias += bias + constant
        splits.append((place, split))
    return LogitAttribution(float(signs @ logits[outputs].double()), _sum_parts(splits), record, splits)


def _sum_parts(splits: list[tuple[Place, ResidualSplit]]) -> dict[str, Tensor]:
    """The parts, summed over the positions that a logit is read from."""
    total: dict[str, Tensor] = {}
    for _, split in splits:
        parts = {**split.embeddings, **split.heads, "mixer": split.mixers, "ff": split.ff, "bias": split.bias}
        for name, part in parts.items():
            total[name] = total.get(name, 0) + part[..., 0]
    if not total["mixer"].any():
        del total["mixer"]
    return total


Reading = tuple[int, Tensor, Tensor]  # a position, the readout (1, M) of its final state, and a constant (1,)


def _head_readings(
    record: ActivationRecord, head: Any, prompt: int, index: int, outputs: list[int], signs: Tensor
) -> list[Reading]:
    """The logit as a sum of linear readouts of the final states (after the norm) of one or several positions."""
    final = record.final_states[prompt].detach().double()  # (T, M)
    if isinstance(head, TokenHead):
        readout = (signs @ output_matrix(record.model)[outputs].double() * head.scale)[None]
        constant = readout.new_zeros(1) if head.bias is None else (signs @ head.bias[outputs].double())[None]
        if head.transform is not None:
            readout, more = _through_dense(head.transform, head.activation, head.norm, final[index], readout)
            constant = constant + more
        return [(index, readout, constant)]
    if isinstance(head, TagHead):
        return [(index, *_class_readout(head.out, outputs, signs))]
    if len(head.others):  # one linear layer per class token, and the mean of their logits
        shares = [_class_readout(out, outputs, signs / (1 + len(head.others))) for out in (head.out, *head.others)]
        return [(at, readout, constant) for at, (readout, constant) in enumerate(shares)]
    return _pooled_readings(record, head.pooler, prompt, final, *_class_readout(head.out, outputs, signs))


def _class_readout(out: Any, outputs: list[int], signs: Tensor) -> tuple[Tensor, Tensor]:
    """The readout (1, M) and the constant (1,) of a linear layer over classes."""
    return (signs @ out.weight[outputs].double())[None], (signs @ out.bias[outputs].double())[None]


def _pooled_readings(
    record: ActivationRecord, pooler: Pooler, prompt: int, final: Tensor, readout: Tensor, constant: Tensor
) -> list[Reading]:
    """A readout of the pooled vector as readouts of the states, each with its weight in the pooling."""
    length = record.lengths[prompt]
    if pooler.kind == "map":
        raise ValueError("pooling='map' is not linear in the states, so its logits cannot be split")
    if pooler.kind == "first-and-mean":
        first, mean = readout.chunk(2, dim=-1)
        n_pooled = length - pooler.prefix
        others = [(at, mean / n_pooled, torch.zeros_like(constant)) for at in range(pooler.prefix, length)]
        return [(0, first, constant), *others]
    if pooler.kind in ("first", "class-tokens"):
        weights = [(0, 1.0)]
    else:
        scores = final.new_zeros(length)
        if pooler.query is not None:
            scores = final[:length] @ pooler.query.double() / final.shape[-1] ** 0.5
        weights = list(enumerate(scores.softmax(0).tolist()))
    if pooler.dense is not None:
        pooled = torch.stack([final[at] * weight for at, weight in weights]).sum(0)
        readout, more = _through_dense(pooler.dense, pooler.activation, None, pooled, readout)
        constant = constant + more
    share = constant / len(weights)
    return [(at, readout * weight, share) for at, weight in weights]


def _through_dense(dense: Any, f: Any, norm: Any, x: Tensor, readout: Tensor) -> tuple[Tensor, Tensor]:
    """A readout of norm(f(u)), u = W x + b, as one of x, with f(u) / u and the norm's scale fixed; and a constant."""
    weight = dense.weight.double()
    bias = weight.new_zeros(len(weight)) if dense.bias is None else dense.bias.double()
    u = weight @ x + bias
    readout, constant = readout_before_norm(norm, f(u), readout)
    readout = readout * torch.where(u == 0, torch.zeros_like(u), f(u) / u)
    return readout @ weight, constant + readout @ bias


def _logits(record: ActivationRecord, head: Any, prompt: int, index: int) -> Tensor:
    """The model's logits at one position, or of the classes of a prompt, before a soft cap."""
    if isinstance(head, TokenHead):  # at one position only: the logits of all may not fit into memory
        return linear(head.hidden(record.final_states[prompt, index]), output_matrix(record.model), head.bias)
    return record.logits[prompt] if isinstance(head, ClassHead) else record.logits[prompt, index]


def output_index(model: Any, output: int | str) -> int:
    """The index of a token or class among a model's logits; a token may be given as text, a class by its name."""
    is_classifier = model.class_head is not None
    if isinstance(output, str) and is_classifier:
        names = [] if model.processor is None else list(model.processor.labels or [])
        if output not in names:
            raise ValueError(f"{output!r} is not one of the classes: {', '.join(names) or 'they have no names'}")
        return names.index(output)
    number = ModelTokenizers(model).token_id(output) if isinstance(output, str) else int(output)
    n_outputs = model.config.n_classes if is_classifier else model.config.output_vocab_size
    if not 0 <= number < n_outputs:
        raise ValueError(f"{number} is not one of the {n_outputs} outputs of this model")
    return number
