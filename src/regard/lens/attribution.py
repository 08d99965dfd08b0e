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

from ..attention import AttentionMap
from ..generation.text_codec import ModelTokenizers
from ..models.components import ClassHead, Pooler, TagHead, TokenHead
from .capture import attention_name, attention_sites, resolve_kind
from .notebook import table_html
from .residual import Place, ResidualSplit, readout_before_norm, residual_stack, split_residual

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
        total = torch.zeros(())
        for place, split in self.splits:
            name = f"{place.stack}.blocks.{layer}"
            blocks = _stack(self.record, place).blocks
            weight = blocks[layer % len(blocks)].ff.w_out.weight
            neurons = self.record.at(f"{name}.ff.neurons", place.prompt, place.position)
            total = total + split.readouts[f"{name}.ff"][0] @ weight.double() * neurons
        return total

    @torch.no_grad()
    def tokens(self, *, layer: int, kind: str | None = None) -> Tensor:
        """The contribution of each head, split by the token it attends to: a_ij v_j W_o read as a logit   (H, S)"""
        kind = resolve_kind(self.record.model, kind)
        if kind not in self.parts:
            raise ValueError(f"kind={kind!r} does not contribute to this logit directly; {', '.join(self.parts)} do")
        module: Any = attention_sites(self.record.model)[kind][layer].owner
        call = self.record.call(layer=layer, kind=kind)
        attention = AttentionMap.of(call)
        weight = module.head_outputs().double()
        total = torch.zeros(())
        for place, split in self.splits:
            readout = torch.einsum("m,mhd->hd", split.readouts[attention_name(kind, layer)][0], weight)
            values = call.v[place.prompt].double().repeat_interleave(module.n_heads // call.v.shape[1], 0)  # (H, S, D)
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
    name = "encoder" if model.is_encoder_only else "decoder"
    index = record.index(prompt, position)
    head = model.class_head if model.class_head is not None else model.head
    if head is None:
        raise ValueError("this model has no head, so it has no logits to split")
    outputs = [_output_index(record, token, prompt, index)]
    outputs += [] if against is None else [_output_index(record, against, prompt, index)]
    signs = torch.tensor([1.0, -1.0][: len(outputs)], dtype=torch.float64, device=model.device)
    n_layers = _stack(record, Place(name, prompt, index)).n_layers
    readings = _head_readings(record, head, prompt, index, outputs, signs)
    splits: list[tuple[Place, ResidualSplit]] = []
    for at, readout, constant in readings:
        place = Place(name, prompt, at)
        norm = _stack(record, place).norm
        state = record.at(f"{name}.blocks.{n_layers - 1}.output", prompt, at)
        readout, bias = readout_before_norm(norm, state, readout)
        split = split_residual(record, place, n_layers, readout)
        split.bias += bias + constant
        splits.append((place, split))
    return LogitAttribution(_logit(record, head, prompt, index, outputs, signs), _sum_parts(splits), record, splits)


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
        table = record.model.output_table if head.weight is None else head.weight
        readout = (signs @ table[outputs].double() * head.scale)[None]
        constant = readout.new_zeros(1) if head.bias is None else (signs @ head.bias[outputs].double())[None]
        if head.transform is not None:
            u = head.transform.weight.double() @ final[index] + head.transform.bias.double()
            active = head.activation(u)
            readout, bias = readout_before_norm(head.norm, active, readout)
            readout, more = _through_dense(head.transform, u, active, readout)
            constant = constant + bias + more
        return [(index, readout, constant)]
    weight, bias = head.out.weight[outputs].double(), head.out.bias[outputs].double()
    readout, constant = (signs @ weight)[None], (signs @ bias)[None]
    if isinstance(head, TagHead):
        return [(index, readout, constant)]
    assert isinstance(head, ClassHead)
    return _pooled_readings(record, head.pooler, prompt, final, readout, constant)


def _pooled_readings(
    record: ActivationRecord, pooler: Pooler, prompt: int, final: Tensor, readout: Tensor, constant: Tensor
) -> list[Reading]:
    """A readout of the pooled vector as readouts of the states, each with its weight in the pooling."""
    length = record.lengths[prompt]
    if pooler.kind == "first":
        weights = [(0, 1.0)]
    else:
        scores = final.new_zeros(length)
        if pooler.query is not None:
            scores = final[:length] @ pooler.query.double() / final.shape[-1] ** 0.5
        weights = list(enumerate(scores.softmax(0).tolist()))
    if pooler.dense is not None:
        pooled = torch.stack([final[at] * weight for at, weight in weights]).sum(0)
        u = pooler.dense.weight.double() @ pooled + pooler.dense.bias.double()
        readout, more = _through_dense(pooler.dense, u, pooler.activation(u), readout)
        constant = constant + more
    share = constant / len(weights)
    return [(at, readout * weight, share) for at, weight in weights]


def _through_dense(dense: Any, u: Tensor, active: Tensor, readout: Tensor) -> tuple[Tensor, Tensor]:
    """A readout of f(u), u = W x + b, as one of x with f(u) / u held fixed; and a constant."""
    readout = readout * torch.where(u == 0, torch.zeros_like(u), active / u)
    return readout @ dense.weight.double(), readout @ dense.bias.double()


def _logit(record: ActivationRecord, head: Any, prompt: int, index: int, outputs: list[int], signs: Tensor) -> float:
    """The model's logit, or difference of two, before a soft cap."""
    states = record.final_states[prompt : prompt + 1]
    with torch.no_grad():
        if isinstance(head, TokenHead):
            table = record.model.output_table if head.weight is None else head.weight
            hidden = head.hidden(states[:, index : index + 1])[0, 0]
            logits = table[outputs] @ hidden + (0 if head.bias is None else head.bias[outputs])
        else:
            logits = record.logits[prompt] if isinstance(head, ClassHead) else record.logits[prompt, index]
            logits = logits[outputs]
    return float(signs @ logits.double())


def _output_index(record: ActivationRecord, token: int | str | None, prompt: int, index: int) -> int:
    """The index of a token or class among the logits."""
    model: Any = record.model
    if model.class_head is None:  # one position only: the logits of all may not fit into memory
        logits = model.head(record.final_states[prompt : prompt + 1, index : index + 1], model.output_table)[0, 0]
    else:
        logits = record.logits[prompt] if isinstance(model.class_head, ClassHead) else record.logits[prompt, index]
    if token is None:
        return int(logits.argmax())
    if isinstance(token, str) and model.class_head is not None:
        names = [] if model.processor is None else list(model.processor.labels or [])
        if token not in names:
            raise ValueError(f"{token!r} is not one of the classes: {', '.join(names) or 'they have no names'}")
        return names.index(token)
    number = ModelTokenizers(model).token_id(token) if isinstance(token, str) else token
    if not 0 <= number < logits.shape[-1]:
        raise ValueError(f"{number} is not one of the {logits.shape[-1]} outputs of this model")
    return number


def _stack(record: ActivationRecord, place: Place) -> Any:
    return residual_stack(record.model, place.stack)
