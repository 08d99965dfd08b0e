"""Direct logit attribution: one logit as the sum of what every part of the model wrote into it.

The head's row of a token is carried back through the final norm and down the residual stream (``lens.residual``), so
the parts sum to the logit, biases included. Where a head has a nonlinear layer (BERT's transform, a pooler's tanh), its
activation f(u) is read as u · (f(u) / u) with the quotient held fixed; a soft cap is left out: the parts sum to the
logit before it.
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
from .residual import Place, ResidualSplit, readout_before_norm, split_residual

if TYPE_CHECKING:
    from .activations import ActivationRecord


@dataclass(frozen=True, eq=False)
class LogitAttribution:
    """What each part of a model wrote into one logit (or into the difference of two).

    parts  "token", "position" … (): the embeddings;  "self", "cross" or "encoder" (layers, H): heads;  "ff" (layers,):
           feed-forward networks;  "mixer" (layers,);  "bias" (): everything that does not depend on the text
    """

    logit: float  # the model's own, before a soft cap
    parts: dict[str, Tensor]
    record: ActivationRecord
    splits: list[tuple[Place, ResidualSplit]]  # one for each position that the logit is read from, readouts weighted

    @property
    def total(self) -> float:
        """The sum of all parts: the logit."""
        return float(sum(part.sum() for part in self.parts.values()))

    def by_layer(self) -> Tensor:
        """What each layer wrote: its heads and its feed-forward network   (layers,)"""
        layers = [part.flatten(1).sum(1) if part.dim() > 1 else part for part in self.parts.values() if part.dim()]
        return torch.stack(layers).sum(0)

    def writers(self) -> Iterator[tuple[str, float]]:
        """Every part by name, "token", "self.0.3", "ff.1", "bias"."""
        names = [name for name, _ in self.splits[0][1].writers()]
        sums = torch.stack([torch.stack([part[0] for _, part in split.writers()]) for _, split in self.splits]).sum(0)
        return zip(names, sums.tolist(), strict=True)

    def top(self, k: int = 10) -> list[tuple[str, float]]:
        """The k parts of the largest size, either sign."""
        return sorted(self.writers(), key=lambda part: -abs(part[1]))[:k]

    @torch.no_grad()
    def neurons(self, *, layer: int) -> Tensor:
        """What each neuron of a feed-forward network wrote   (F,)"""
        total = torch.zeros(())
        for place, split in self.splits:
            name = f"{place.stack}.blocks.{layer}"
            weight = _stack(self.record, place).blocks[layer % len(_stack(self.record, place).blocks)].ff.w_out.weight
            neurons = self.record.at(f"{name}.ff.neurons", place.prompt, place.position)
            total = total + split.readouts[f"{name}.ff"][0] @ weight.double() * neurons
        return total

    @torch.no_grad()
    def tokens(self, *, layer: int, kind: str | None = None) -> Tensor:
        """What each head moved from each token it attends to: a_ij v_j W_o, read into the logit   (H, S)"""
        kind = resolve_kind(self.record.model, kind)
        if kind not in self.parts:
            raise ValueError(f"kind={kind!r} writes nothing into this logit directly; {', '.join(self.parts)} do")
        module: Any = attention_sites(self.record.model)[kind][layer].owner
        call = self.record.call(layer=layer, kind=kind)
        attention = AttentionMap.of(call)
        weight = module.w_o.weight.double().unflatten(1, (module.n_heads, module.d_head))  # (M, H, D)
        total = torch.zeros(())
        for place, split in self.splits:
            readout = torch.einsum("m,mhd->hd", split.readouts[attention_name(kind, layer)][0], weight)
            values = call.v[place.prompt].double().repeat_interleave(module.n_heads // call.v.shape[1], 0)  # (H, S, D)
            row = attention.tile(slice(place.position, place.position + 1))[place.prompt, :, 0].double()  # (H, S)
            total = total + row * torch.einsum("hsd,hd->hs", values, readout)
        return total

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

    token    its id or text, a class's number or name; None: the most likely one
    against  another one: the difference of the two logits is split
    """
    model: Any = record.model
    name = "decoder" if not model.is_encoder_only else "encoder"
    index = record.index(prompt, position)
    head = model.class_head if model.class_head is not None else model.head
    if head is None:
        raise ValueError("this model has no head, so it has no logits to split")
    chosen = [_output_index(record, token, prompt, index)]
    chosen += [] if against is None else [_output_index(record, against, prompt, index)]
    signs = torch.tensor([1.0, -1.0][: len(chosen)], dtype=torch.float64, device=model.device)
    n_layers = _stack(record, Place(name, prompt, index)).n_layers
    readings = _head_readings(record, head, prompt, index, chosen, signs)
    splits: list[tuple[Place, ResidualSplit]] = []
    for at, readout, constant in readings:
        place = Place(name, prompt, at)
        norm = _stack(record, place).norm
        state = record.at(f"{name}.blocks.{n_layers - 1}.output", prompt, at)
        readout, bias = readout_before_norm(norm, state, readout)
        split = split_residual(record, place, n_layers, readout)
        split.bias += bias + constant
        splits.append((place, split))
    return LogitAttribution(_logit(record, head, prompt, index, chosen, signs), _sum_parts(splits), record, splits)


def _sum_parts(splits: list[tuple[Place, ResidualSplit]]) -> dict[str, Tensor]:
    """The parts of all positions that a logit is read from, added."""
    total: dict[str, Tensor] = {}
    for _, split in splits:
        parts = {**split.embeddings, **split.heads, "mixer": split.mixers, "ff": split.ff, "bias": split.bias}
        for name, part in parts.items():
            total[name] = total.get(name, 0) + part[..., 0]
    if not total["mixer"].any():
        del total["mixer"]
    return total


Reading = tuple[int, Tensor, Tensor]  # a position, the readout (1, M) of its final state there, and a constant (1,)


def _head_readings(
    record: ActivationRecord, head: Any, prompt: int, index: int, chosen: list[int], signs: Tensor
) -> list[Reading]:
    """The logit as a sum of linear readouts of the final states, normalised, of one position or of several."""
    final = record.final_states[prompt].detach().double()  # (T, M)
    if isinstance(head, TokenHead):
        table = record.model.output_table if head.weight is None else head.weight
        readout = (signs @ table[chosen].double() * head.scale)[None]
        constant = readout.new_zeros(1) if head.bias is None else (signs @ head.bias[chosen].double())[None]
        if head.transform is not None:
            u = head.transform.weight.double() @ final[index] + head.transform.bias.double()
            active = head.activation(u)
            readout, bias = readout_before_norm(head.norm, active, readout)
            readout, more = _through_dense(head.transform, u, active, readout)
            constant = constant + bias + more
        return [(index, readout, constant)]
    weight, bias = head.out.weight[chosen].double(), head.out.bias[chosen].double()
    readout, constant = (signs @ weight)[None], (signs @ bias)[None]
    if isinstance(head, TagHead):
        return [(index, readout, constant)]
    assert isinstance(head, ClassHead)
    return _pooled_readings(record, head.pooler, prompt, final, readout, constant)


def _pooled_readings(
    record: ActivationRecord, pooler: Pooler, prompt: int, final: Tensor, readout: Tensor, constant: Tensor
) -> list[Reading]:
    """A readout of the pooled vector as one of the states: each position has the weight that the pooling gave it."""
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
    """A readout of f(W x + b) as one of x, with f(u) / u held fixed, and a constant."""
    readout = readout * torch.where(u == 0, torch.zeros_like(u), active / u)
    return readout @ dense.weight.double(), readout @ dense.bias.double()


def _logit(record: ActivationRecord, head: Any, prompt: int, index: int, chosen: list[int], signs: Tensor) -> float:
    """The model's own logit, or difference of two, before a soft cap."""
    states = record.final_states[prompt : prompt + 1]
    with torch.no_grad():
        if isinstance(head, TokenHead):
            table = record.model.output_table if head.weight is None else head.weight
            hidden = head.hidden(states[:, index : index + 1])[0, 0]
            logits = table[chosen] @ hidden + (0 if head.bias is None else head.bias[chosen])
        else:
            logits = record.logits[prompt] if isinstance(head, ClassHead) else record.logits[prompt, index]
            logits = logits[chosen]
    return float(signs @ logits.double())


def _output_index(record: ActivationRecord, token: int | str | None, prompt: int, index: int) -> int:
    """A token's id or a class's number."""
    model = record.model
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
    return getattr(record.model, place.stack)
