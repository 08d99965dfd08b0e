"""Activation patching: which part mattered. Sweeps over sites, and first-order estimates from one backward pass.

A model runs on a corrupted prompt with one activation replaced by that of the clean prompt. The effect is how far the
metric comes back: (patched − corrupted) / (clean − corrupted), 0 for nothing and 1 for all of it (Vig et al. 2020, Meng
et al. 2022). Many patches run as rows of one batch.

Attribution patching estimates all effects at once as (clean − corrupted) · gradient (Nanda 2023). Behind a saturated
softmax the gradient of queries and keys is 0 though their effect is not; there AtP* computes the attention anew and
estimates only what follows it (Kramár et al. 2024, §3.1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention.backends import run
from ..attention.edits import use_edit
from ..attention.score_matrix import AttentionCall
from ..foundation.progress import track
from ..generation.generate import inference
from ..generation.text_codec import ModelTokenizers
from ..models import Model
from .activations import ActivationRecord, Metric, PassInputs, capture_inputs, read_pass_inputs
from .capture import attention_name, attention_sites, hook_site, resolve_kind, stacks
from .interventions import SiteEdit

Over = Literal["residual", "attention", "cross_attention", "ff", "neurons", "heads", "q", "k", "v"]
_HEADS = ("heads", "q", "k", "v")


class Patch(NamedTuple):
    """One replacement: the activation of a site, whole or of one head or neuron, at all tokens or at one."""

    site: str
    unit: int | None = None
    position: int | None = None

    def write(self, x: Tensor, row: int, new: Tensor) -> None:
        """Replace row ``row`` of x (B, …, T, width) by ``new`` (…, T, width), in place."""
        where: list[Any] = [slice(None)] * new.dim()
        if self.unit is not None:
            where[0 if new.dim() == 3 else -1] = self.unit
        if self.position is not None:
            where[1 if new.dim() == 3 else 0] = self.position
        x[row][tuple(where)] = new[tuple(where)].to(x)


@dataclass(frozen=True, eq=False)
class PatchingResult:
    """The effect of each patch, averaged over pairs of prompts."""

    effects: Tensor  # one number for each index of the axes
    axes: tuple[str, ...]  # "layer", then "head" or "neuron" and "position" where there are any
    clean: float  # the metric's mean on the clean prompts
    corrupted: float

    def top(self, k: int = 10) -> list[tuple[tuple[int, ...], float]]:
        """Index and effect of the k patches of the largest effect, either sign."""
        flat, shape = self.effects.flatten(), self.effects.shape
        best = flat.abs().topk(min(k, flat.numel())).indices
        return [(tuple(int(i) for i in torch.unravel_index(n, shape)), float(flat[n])) for n in best]

    def __repr__(self) -> str:
        sizes = " × ".join(f"{n} {axis}s" for axis, n in zip(self.axes, self.effects.shape, strict=True))
        return f"PatchingResult({sizes}; metric {self.corrupted:.3f} corrupted, {self.clean:.3f} clean)"


class PatchTargets(NamedTuple):
    """What is patched: ``over`` which activations, token by token or not, of which kind of attention or stack."""

    over: Over
    by_position: bool
    kind: str

    def site(self, layer: int) -> str:
        if self.over in _HEADS:
            return f"{attention_name(self.kind, layer)}.{self.over}"
        block = f"{'encoder' if self.kind == 'encoder' else 'decoder'}.blocks.{layer}"
        ends = {"residual": "input", "neurons": "ff.neurons"}
        return f"{block}.{ends.get(self.over, f'{self.over}.output')}"

    def axes(self) -> tuple[str, ...]:
        unit = {"neurons": "neuron"} | dict.fromkeys(_HEADS, "head")
        named = ("layer", unit.get(self.over), "position" if self.by_position else None)
        return tuple(name for name in named if name is not None)

    def shape(self, record: ActivationRecord) -> tuple[int, ...]:
        """The sizes of the axes after "layer"."""
        x = record[self.site(0)][0]
        units = {"neurons": x.shape[-1]} | dict.fromkeys(_HEADS, x.shape[0])
        sizes = (units.get(self.over), x.shape[-2] if self.by_position else None)
        return tuple(size for size in sizes if size is not None)

    def patches(self, layer: int, record: ActivationRecord) -> list[Patch]:
        """Every patch of one layer, in the order of the axes."""
        has_unit = self.over == "neurons" or self.over in _HEADS
        sizes = self.shape(record)
        units: Sequence[int | None] = range(sizes[0]) if has_unit else [None]
        positions: Sequence[int | None] = range(sizes[-1]) if self.by_position else [None]
        return [Patch(self.site(layer), unit, position) for unit in units for position in positions]


def logit_difference(model: Model, token: int | str, against: int | str, position: int = -1) -> Metric:
    """A metric: the logit of one token minus that of another after ``position``, or of two classes."""
    names = [token, against]
    tokens = ModelTokenizers(model) if any(isinstance(name, str) for name in names) else None
    ids = [int(name) if tokens is None else tokens.token_id(name) for name in names]

    def difference(logits: Tensor) -> Tensor:
        at = logits if logits.dim() == 2 else logits[:, position]
        return at[:, ids[0]] - at[:, ids[1]]

    return difference


def patching_sweep(
    model: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric | Sequence[Metric],
    *,
    over: Over = "residual",
    by_position: bool | None = None,
    kind: str | None = None,
    target: tuple[Any, Any] | None = None,
    batch: int = 64,
) -> PatchingResult:
    """Patch each part of a model in turn and measure what comes back.

    clean, corrupted  prompts of equally many tokens, one or several of each
    metric            a function of the logits, one for all prompts or one for each
    over              "residual" (the states before each layer), "attention", "cross_attention" or "ff" (what each
                      adds), "neurons", or by head "heads", "q", "k", "v"
    by_position       one token at a time; None: yes, except for heads and neurons
    kind              of attention for heads, "self", "cross" or "encoder"; for the rest "encoder" is the encoder
    target            of an encoder-decoder: what the decoder is fed in the clean and in the corrupted run
    batch             patches in one forward pass
    """

    def effects(targets: PatchTargets, good: PassInputs, bad: PassInputs, own: Metric) -> tuple[Tensor, Tensor]:
        n_layers = _n_layers(model, targets)
        record = capture_inputs(model, good, sites=[targets.site(layer) for layer in range(n_layers)])
        baseline = capture_inputs(model, bad, sites=[])
        patches = [patch for layer in range(n_layers) for patch in targets.patches(layer, record)]
        found = run_patches(model, bad, patches, record, own, batch)
        ends = torch.stack([own(record.logits).mean(), own(baseline.logits).mean()])
        return (found - ends[1]).reshape(n_layers, *targets.shape(record)), ends

    targets = _targets(model, over, by_position, kind)
    return _average_effects(targets, read_pairs(model, clean, corrupted, target), metric, effects)


def attribution_patching(
    model: Model,
    clean: Any,
    corrupted: Any,
    metric: Metric | Sequence[Metric],
    *,
    over: Over = "heads",
    by_position: bool | None = None,
    kind: str | None = None,
    target: tuple[Any, Any] | None = None,
    qk_fix: bool = True,
) -> PatchingResult:
    """First-order estimates of ``patching_sweep``'s effects, from two forward passes and one backward pass.

    For queries and keys the attention is computed anew (AtP*); ``qk_fix=False`` trusts the gradient there too (AtP).
    """

    def effects(targets: PatchTargets, good: PassInputs, bad: PassInputs, own: Metric) -> tuple[Tensor, Tensor]:
        sites = [targets.site(layer) for layer in range(_n_layers(model, targets))]
        outputs = [site.rpartition(".")[0] + ".heads" for site in sites] if over in ("q", "k") else []
        record = capture_inputs(model, good, sites=sites)
        other = capture_inputs(model, bad, sites=[*sites, *outputs], grad=True)
        gradients = other.gradients(own)
        estimates = []
        for layer, site in enumerate(sites):
            if outputs and qk_fix:
                new, old = (each.call(layer=layer, kind=targets.kind) for each in (record, other))
                estimates.append(_refit_attention(targets, new, old, gradients[outputs[layer]]))
            else:
                product = (record[site] - other[site].detach()) * gradients[site]
                estimates.append(_sum_to_axes(targets, product[0]))
        ends = torch.stack([own(record.logits).mean(), own(other.logits.detach()).mean()])
        return torch.stack(estimates), ends

    targets = _targets(model, over, by_position, kind)
    return _average_effects(targets, read_pairs(model, clean, corrupted, target), metric, effects)


@torch.no_grad()
def _refit_attention(targets: PatchTargets, clean: AttentionCall, corrupted: AttentionCall, gradient: Tensor) -> Tensor:
    """AtP*: heads' outputs with clean queries or keys, minus the corrupted ones, times the gradient of the outputs.

    A query changes its own row only, so one call tells all positions; keys are changed one position at a time.
    """
    before = run(corrupted, "auto").output
    point: Literal["q", "k"] = "q" if targets.over == "q" else "k"
    new: Tensor = getattr(clean, point)
    if targets.over == "q" or not targets.by_position:
        after = run(_with(corrupted, point, new), "auto").output
        product = (after - before) * gradient
        if targets.over == "k":  # query heads that share a key head
            product = product.unflatten(1, (new.shape[1], -1)).sum(2)
        return _sum_to_axes(targets, product[0])
    estimates = []
    for position in range(new.shape[2]):
        keys = corrupted.k.clone()
        keys[:, :, position] = new[:, :, position]
        product = (run(_with(corrupted, "k", keys), "auto").output - before) * gradient
        estimates.append(product[0].sum((-1, -2)).unflatten(0, (new.shape[1], -1)).sum(1))
    return torch.stack(estimates, dim=1)  # (G, positions)


def _with(call: AttentionCall, point: Literal["q", "k"], x: Tensor) -> AttentionCall:
    return replace(call, q=x) if point == "q" else replace(call, k=x)


def _sum_to_axes(targets: PatchTargets, x: Tensor) -> Tensor:
    """x (…, T, width) summed over what is patched together."""
    if targets.over == "neurons":
        return x.T if targets.by_position else x.sum(0)
    x = x.sum(-1)
    return x if targets.by_position else x.sum(-1)


def run_patches(
    model: Model, corrupted: PassInputs, patches: Sequence[Patch], clean: ActivationRecord, metric: Metric, batch: int
) -> Tensor:
    """The metric of a corrupted prompt under each patch alone (patches,), ``batch`` of them in a forward pass."""
    results = []
    groups = [patches[start : start + batch] for start in range(0, len(patches), batch)]
    for group in track(groups, "patches", len(patches), len):
        rows: dict[str, list[tuple[int, Patch]]] = {}
        for row, patch in enumerate(group):
            rows.setdefault(patch.site, []).append((row, patch))

        def change(site: str, here: list[tuple[int, Patch]], call: AttentionCall | None, x: Tensor) -> Tensor:
            x = x.clone()
            for row, patch in here:
                patch.write(x, row, clean[site][0])
            return x

        edit = SiteEdit(model, {hook_site(model, site): partial(change, site, here) for site, here in rows.items()})
        tensors = [x.expand(len(group), *x.shape[1:]) for x in corrupted.tensors]
        with inference(model), use_edit(edit):
            results.append(metric(model(*tensors)))
    return torch.cat(results)


def read_pairs(
    model: Model, clean: Any, corrupted: Any, target: tuple[Any, Any] | None = None
) -> list[tuple[PassInputs, PassInputs]]:
    """Clean and corrupted prompts as the model's inputs, pair by pair; both of a pair have equally many tokens."""
    targets = (None, None) if target is None else target
    good, bad = (_single(read_pass_inputs(model, *both)) for both in zip((clean, corrupted), targets, strict=True))
    if len(good) != len(bad):
        raise ValueError(f"there are {len(good)} clean prompts and {len(bad)} corrupted ones")
    for index, (a, b) in enumerate(zip(good, bad, strict=True)):
        if [x.shape for x in a.tensors] != [x.shape for x in b.tensors]:
            sizes = f"{a.lengths[0]} tokens clean and {b.lengths[0]} corrupted"
            raise ValueError(f"pair {index} has {sizes}; a token takes the place of the token at the same position")
    return list(zip(good, bad, strict=True))


def _single(inputs: PassInputs) -> list[PassInputs]:
    """Every prompt of a batch on its own, without padding."""
    lengths = [inputs.source_lengths, inputs.lengths][-len(inputs.tensors) :]
    return [
        PassInputs(
            tuple(
                x[i : i + 1, : own[i]] if x.dim() == 2 else x[i : i + 1]
                for x, own in zip(inputs.tensors, lengths, strict=True)
            ),
            {},
            [inputs.lengths[i]],
            [inputs.source_lengths[i]],
        )
        for i in range(len(inputs.lengths))
    ]


def _targets(model: Model, over: Over, by_position: bool | None, kind: str | None) -> PatchTargets:
    by_position = over not in ("neurons", *_HEADS) if by_position is None else by_position
    if over in _HEADS:
        return PatchTargets(over, by_position, resolve_kind(model, kind))
    return PatchTargets(over, by_position, "encoder" if kind == "encoder" or model.is_encoder_only else "self")


def _n_layers(model: Model, targets: PatchTargets) -> int:
    if targets.over in _HEADS:
        return len(attention_sites(model)[targets.kind])
    return stacks(model)["encoder" if targets.kind == "encoder" else "decoder"].n_layers


def _average_effects(
    targets: PatchTargets,
    pairs: list[tuple[PassInputs, PassInputs]],
    metric: Metric | Sequence[Metric],
    effects: Callable[[PatchTargets, PassInputs, PassInputs, Metric], tuple[Tensor, Tensor]],
) -> PatchingResult:
    """The mean over pairs of each pair's effects, as shares of its own difference between clean and corrupted."""
    shares, ends = [], []
    for index, (good, bad) in enumerate(pairs):
        change, (clean, corrupted) = effects(
            targets, good, bad, metric[index] if isinstance(metric, Sequence) else metric
        )
        if clean == corrupted:
            raise ValueError(f"the metric of pair {index} is the same on both prompts, so nothing can come back")
        shares.append((change / (clean - corrupted)).detach().cpu())
        ends.append((float(clean), float(corrupted)))
    means = [sum(values) / len(values) for values in zip(*ends, strict=True)]
    if any(share.shape != shares[0].shape for share in shares):
        raise ValueError("prompts of unequal length cannot be averaged by position; give by_position=False")
    return PatchingResult(torch.stack(shares).mean(0), targets.axes(), means[0], means[1])
