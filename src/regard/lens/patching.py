"""Activation patching: sweeps over hook sites, and first-order estimates from one backward pass.

A model runs on a corrupted prompt with one activation replaced by that of the clean prompt. The effect of the patch is
the share of the metric that it restores, (patched − corrupted) / (clean − corrupted): 0 is none, 1 is all of it (Vig
et al. 2020, Meng et al. 2022). Many patches run as rows of one batch.

Attribution patching estimates all effects at once as (clean − corrupted) · gradient (Nanda 2023). Behind a saturated
softmax the gradient of queries and keys vanishes although their effect does not; there AtP* recomputes the attention
and linearises only what follows it (Kramár et al. 2024, §3.1).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..attention.backends import run
from ..attention.score_matrix import AttentionCall
from ..models import Model
from .activations import ActivationRecord, Metric, PassInputs, capture_inputs, read_pass_inputs
from .attribution import output_index
from .capture import attention_name, attention_sites, resolve_kind, stacks
from .notebook import heatmap_html, table_html
from .patch_runner import LogitDifference, Patch, PatchRunner

Over = Literal["residual", "attention", "cross_attention", "ff", "neurons", "heads", "q", "k", "v"]
Pair = tuple[PassInputs, PassInputs, Metric]  # a clean and a corrupted prompt, and the metric of their logits
_HEADS = ("heads", "q", "k", "v")


@dataclass(frozen=True, eq=False)
class PatchingResult:
    """The effect of each patch, averaged over pairs of prompts."""

    effects: Tensor  # one dimension for each of the axes
    axes: tuple[str, ...]  # "layer", then "head" or "neuron" if patched one by one, then "position" likewise
    clean: float  # mean of the metric on the clean prompts
    corrupted: float  # and on the corrupted ones

    def top(self, k: int = 10) -> list[tuple[tuple[int, ...], float]]:
        """(index, effect) of the k patches with the largest absolute effect."""
        flat, shape = self.effects.flatten(), self.effects.shape
        best = flat.abs().topk(min(k, flat.numel())).indices
        return [(tuple(int(i) for i in torch.unravel_index(n, shape)), float(flat[n])) for n in best]

    def _repr_html_(self) -> str:
        if self.effects.dim() != 2:
            return table_html((" × ".join(self.axes), "effect"), [(str(at), value) for at, value in self.top(16)])
        rows, cols = (
            [f"{axis} {n}" for n in range(size)] for axis, size in zip(self.axes, self.effects.shape, strict=True)
        )
        return heatmap_html(self.effects, rows, cols, repr(self))

    def __repr__(self) -> str:
        sizes = " × ".join(f"{n} {axis}s" for axis, n in zip(self.axes, self.effects.shape, strict=True))
        return f"PatchingResult({sizes}; metric {self.corrupted:.3f} corrupted, {self.clean:.3f} clean)"


class PatchTargets(NamedTuple):
    """The activations that a sweep patches."""

    over: Over
    by_position: bool  # one token at a time
    kind: str  # kind of attention; "encoder" or "self" selects the stack for sites outside attention

    def site(self, layer: int) -> str:
        if self.over in _HEADS:
            return f"{attention_name(self.kind, layer)}.{self.over}"
        block = f"{'encoder' if self.kind == 'encoder' else 'decoder'}.blocks.{layer}"
        points = {"residual": "input", "neurons": "ff.neurons"}
        return f"{block}.{points.get(self.over, f'{self.over}.output')}"

    def axes(self) -> tuple[str, ...]:
        unit = "neuron" if self.over == "neurons" else "head" if self.over in _HEADS else ""
        return ("layer", *filter(None, (unit, "position" if self.by_position else "")))

    def shape(self, record: ActivationRecord) -> tuple[int, ...]:
        """The sizes of the axes after "layer"."""
        x = record[self.site(0)][0]  # (H, T, D), (T, F) or (T, M)
        sizes = {"head": x.shape[0], "neuron": x.shape[-1], "position": x.shape[-2]}
        return tuple(sizes[axis] for axis in self.axes()[1:])

    def patches(self, layer: int, record: ActivationRecord) -> list[Patch]:
        """All patches of one layer, in the order of the axes."""
        sizes = dict(zip(self.axes()[1:], self.shape(record), strict=True))
        positions: Sequence[int | None] = range(sizes.pop("position")) if self.by_position else [None]
        units: Sequence[int | None] = range(*sizes.values()) if sizes else [None]  # heads or neurons
        return [Patch(self.site(layer), unit, position) for unit in units for position in positions]


def logit_difference(model: Model, token: int | str, against: int | str, position: int = -1) -> LogitDifference:
    """A metric: the logit of one token after ``position`` minus that of another; or of two classes."""
    return LogitDifference(output_index(model, token), output_index(model, against), position)


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
    """Patch each part of a model in turn and measure how much of the metric it restores.

    clean, corrupted  one or several prompts each; the two of a pair have the same number of tokens
    metric            a function of the logits: one for all prompts, or one per prompt
    over              "residual" (the states before each layer), "attention", "cross_attention" or "ff" (their outputs),
                      "neurons", or per head "heads", "q", "k", "v"
    by_position       patch one token at a time; None: yes, except for heads and neurons
    kind              the kind of attention for heads, "self", "cross" or "encoder"; otherwise "encoder" for its stack
    target            encoder-decoder only: the decoder's input in the clean and in the corrupted run
    batch             maximum number of patches in one forward pass
    """
    targets = patch_targets(model, over, by_position, kind)
    effects = partial(sweep_effects, model, targets, batch=batch)
    return _average_effects(targets, read_pairs(model, clean, corrupted, metric, target), effects)


def sweep_effects(
    model: Model, targets: PatchTargets, clean: PassInputs, corrupted: PassInputs, metric: Metric, *, batch: int = 64
) -> tuple[Tensor, Tensor]:
    """How much each patch changes the metric of one pair (layers, …), and the metric of clean and corrupted (2,)."""
    n_layers = _n_layers(model, targets)
    record = capture_inputs(model, clean, sites=[targets.site(layer) for layer in range(n_layers)])
    runner = PatchRunner(model, corrupted)
    patches = [patch for layer in range(n_layers) for patch in targets.patches(layer, record)]
    by_run = metric if isinstance(metric, LogitDifference) else partial(_value_of_each, metric)
    values = runner.run_patches(patches, record, by_run, batch)
    ends = torch.stack([metric(record.logits).mean(), metric(runner.record.logits).mean()])
    return (values - ends[1]).reshape(n_layers, *targets.shape(record)), ends


def _value_of_each(metric: Metric, logits: Tensor) -> Tensor:
    """The metric of each row on its own (B,); a metric may return one value for all of them."""
    return torch.stack([metric(row[None]).mean() for row in logits])


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

    qk_fix  recompute the attention for queries and keys (AtP*) instead of relying on their gradient (AtP)
    """
    targets = patch_targets(model, over, by_position, kind)
    effects = partial(estimate_effects, model, targets, qk_fix=qk_fix)
    return _average_effects(targets, read_pairs(model, clean, corrupted, metric, target), effects)


def estimate_effects(
    model: Model,
    targets: PatchTargets,
    clean: PassInputs,
    corrupted: PassInputs,
    metric: Metric,
    *,
    qk_fix: bool = True,
) -> tuple[Tensor, Tensor]:
    """First-order estimates of ``sweep_effects``."""
    sites = [targets.site(layer) for layer in range(_n_layers(model, targets))]
    outputs = [site.rpartition(".")[0] + ".heads" for site in sites] if targets.over in ("q", "k") else []
    record = capture_inputs(model, clean, sites=sites)
    other = capture_inputs(model, corrupted, sites=[*sites, *outputs], grad=True)
    gradients = other.gradients(metric)
    estimates = []
    for layer, site in enumerate(sites):
        if outputs and qk_fix:
            new, old = (each.call(layer=layer, kind=targets.kind) for each in (record, other))
            estimates.append(_recompute_attention(targets, new, old, gradients[outputs[layer]]))
        else:
            product = (record[site] - other[site].detach()) * gradients[site]
            estimates.append(_sum_to_axes(targets, product[0]))
    ends = torch.stack([metric(record.logits).mean(), metric(other.logits.detach()).mean()])
    return torch.stack(estimates), ends


@torch.no_grad()
def _recompute_attention(
    targets: PatchTargets, clean: AttentionCall, corrupted: AttentionCall, gradient: Tensor
) -> Tensor:
    """AtP*: heads' outputs with clean queries or keys, minus the corrupted ones, times the gradient of the outputs.

    A query changes only its own row, so one call serves all positions; keys are changed one position at a time.
    """
    before = run(corrupted, "auto").output
    if targets.over == "q":
        product = (run(replace(corrupted, q=clean.q), "auto").output - before) * gradient
        return _sum_to_axes(targets, product[0])
    n_key_heads, n_keys = clean.k.shape[1:3]
    estimates = []
    for position in range(n_keys) if targets.by_position else [slice(None)]:
        keys = corrupted.k.clone()
        keys[:, :, position] = clean.k[:, :, position]
        product = (run(replace(corrupted, k=keys), "auto").output - before) * gradient
        by_head = product[0].sum((-1, -2))
        estimates.append(by_head.unflatten(0, (n_key_heads, -1)).sum(1))  # over the heads that share a key head
    return torch.stack(estimates, dim=1) if targets.by_position else estimates[0]  # (G, positions) or (G,)


def _sum_to_axes(targets: PatchTargets, x: Tensor) -> Tensor:
    """x (…, T, width) summed over the dimensions that are patched together."""
    if targets.over == "neurons":
        return x.T if targets.by_position else x.sum(0)
    x = x.sum(-1)
    return x if targets.by_position else x.sum(-1)


def read_pairs(
    model: Model, clean: Any, corrupted: Any, metric: Metric | Sequence[Metric], target: tuple[Any, Any] | None = None
) -> list[Pair]:
    """Clean and corrupted prompts as model inputs, in pairs with the same number of tokens, each with its metric."""
    prompts = zip((clean, corrupted), target or (None, None), strict=True)
    good, bad = (_split_prompts(read_pass_inputs(model, *both)) for both in prompts)
    if len(good) != len(bad):
        raise ValueError(f"there are {len(good)} clean prompts and {len(bad)} corrupted ones")
    for index, (a, b) in enumerate(zip(good, bad, strict=True)):
        if [x.shape for x in a.tensors] != [x.shape for x in b.tensors]:
            is_source = a.source_lengths != b.source_lengths
            one, two = (x.source_lengths[0] if is_source else x.lengths[0] for x in (a, b))
            sizes = f"{one} tokens clean and {two} corrupted"
            raise ValueError(f"pair {index} has {sizes}; patches need the same number of tokens in both")
    metrics = list(metric) if isinstance(metric, Sequence) else [metric] * len(good)
    if len(metrics) != len(good):
        raise ValueError(f"there are {len(metrics)} metrics for {len(good)} pairs of prompts")
    return list(zip(good, bad, metrics, strict=True))


def check_ends_differ(pair: int, clean: float | Tensor, corrupted: float | Tensor) -> None:
    """Raise if a pair's metric is the same on both prompts: effects are shares of the difference.

    Rounding in fp32 moves the metric of a deep model by up to 1e-5 of its value, and a share of that is noise. How far
    it moves a metric near 0, such as a difference of equal logits, depends on values that are not known here.
    """
    if math.isclose(clean, corrupted, rel_tol=1e-5):
        raise ValueError(f"the metric of pair {pair} is the same on both prompts, so there is no effect to measure")


def _split_prompts(inputs: PassInputs) -> list[PassInputs]:
    """Each prompt of a batch as inputs of its own, without padding."""
    lengths = [inputs.source_lengths, inputs.lengths][-len(inputs.tensors) :]
    prompts = []
    for i in range(len(inputs.lengths)):
        tensors = tuple(
            x[i : i + 1, : n_tokens[i]] if x.dim() == 2 else x[i : i + 1]
            for x, n_tokens in zip(inputs.tensors, lengths, strict=True)
        )
        prompts.append(PassInputs(tensors, {}, [inputs.lengths[i]], [inputs.source_lengths[i]]))
    return prompts


def patch_targets(model: Model, over: Over, by_position: bool | None, kind: str | None) -> PatchTargets:
    """Resolve the arguments of ``patching_sweep`` for this model."""
    by_position = over not in ("neurons", *_HEADS) if by_position is None else by_position
    if over in _HEADS:
        return PatchTargets(over, by_position, resolve_kind(model, kind))
    stack = "encoder" if kind == "encoder" or model.is_encoder_only else "decoder"
    if stack not in stacks(model):
        raise ValueError(f"over={over!r} needs a stack of layers on one residual stream, and this model has none")
    return PatchTargets(over, by_position, "encoder" if stack == "encoder" else "self")


def _n_layers(model: Model, targets: PatchTargets) -> int:
    if targets.over in _HEADS:
        return len(attention_sites(model)[targets.kind])
    return stacks(model)["encoder" if targets.kind == "encoder" else "decoder"].n_layers


def _average_effects(
    targets: PatchTargets, pairs: list[Pair], effects: Callable[[PassInputs, PassInputs, Metric], tuple[Tensor, Tensor]]
) -> PatchingResult:
    """The mean over pairs of their effects, each as a share of the pair's difference between clean and corrupted."""
    shares, ends = [], []
    for index, pair in enumerate(pairs):
        change, (clean, corrupted) = effects(*pair)
        check_ends_differ(index, clean, corrupted)
        shares.append((change / (clean - corrupted)).detach().cpu())
        ends.append((float(clean), float(corrupted)))
    means = [sum(values) / len(values) for values in zip(*ends, strict=True)]
    if any(share.shape != shares[0].shape for share in shares):
        raise ValueError("effects by position cannot be averaged over prompts of unequal length; use by_position=False")
    return PatchingResult(torch.stack(shares).mean(0), targets.axes(), means[0], means[1])
