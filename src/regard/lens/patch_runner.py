"""Run a model once per patch, computing only the activations that the patch can change.

A patch changes neither the layers below it nor, in a causal model, the tokens before it. Their activations are kept
from one unpatched pass, and each patched run starts at its own layer and token. In the last layer, a metric that reads
one token needs only the keys and values of the others. Runs that start at the same token are rows of one batch, which
grows layer by layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention import Dot, MultiHeadAttention
from ..attention.cache import GrowingCache, ModelCache
from ..attention.edits import has_edits, use_edit
from ..attention.mechanisms import CappedDot
from ..attention.score_matrix import AttentionCall
from ..foundation.cancellation import check_cancelled
from ..foundation.progress import track
from ..generation.generate import inference
from ..models import Model
from .activations import Metric, PassInputs, capture_inputs, logits_of_states
from .capture import hook_site, stacks
from .interventions import SiteEdit

_TOKENS_AT_ONCE = 1 << 14  # upper bound on the tokens of a batch, to bound its memory
_FEW_TOKENS = 256  # a smaller batch is no faster: reading the weights takes most of the time


class Patch(NamedTuple):
    """One replacement at a hook site."""

    site: str
    unit: int | None = None  # a head or neuron; None: all of them
    position: int | None = None  # a token; None: all of them

    @property
    def layer(self) -> int:
        return int(self.site.split(".")[2]) if ".blocks." in self.site else 0

    def write(self, x: Tensor, row: int, new: Tensor) -> None:
        """Patch row ``row`` of x (B, …, T, width) in place with ``new`` (…, T, width); x may lack the first tokens."""
        missing = new.shape[-2] - x.shape[-2]
        new = new[..., missing:, :]
        where: list[Any] = [slice(None)] * new.dim()
        if self.unit is not None:
            where[0 if new.dim() == 3 else -1] = self.unit
        if self.position is not None:
            where[1 if new.dim() == 3 else 0] = self.position - missing
        x[row][tuple(where)] = new[tuple(where)].to(x)


@dataclass(frozen=True)
class LogitDifference:
    """A metric that reads one position: the logit of one token (or class) minus that of another."""

    token: int
    against: int
    position: int

    def __call__(self, logits: Tensor) -> Tensor:
        at = logits if logits.dim() == 2 else logits[:, self.position]
        return at[:, self.token] - at[:, self.against]


class PatchRunner:
    """Patched runs of one prompt, started from the activations of its unpatched pass (``record``).

    is_resumable  whether runs may start at a layer above the first
    is_causal     whether they may also start at a later token, with the keys and values of those before it in a cache
    """

    def __init__(self, model: Any, inputs: PassInputs) -> None:
        self.model, self.inputs, self.n_tokens = model, inputs, max(*inputs.lengths, *inputs.source_lengths)
        by_name: dict[str, Any] = dict(stacks(model))
        self.name = next(iter(by_name)) if len(by_name) == 1 else ""
        self.stack: Any = by_name.get(self.name)
        blocks = [] if self.stack is None else list(self.stack.blocks)
        # Layers that share a module are told apart by counting its calls, so all of them have to run. Edits made by the
        # caller may act on positions, on the stack's input or on the causal mask, so they need whole passes.
        has_own_blocks = self.stack is not None and len(blocks) == self.stack.n_layers
        self.is_resumable = has_own_blocks and not inputs.masks and not has_edits(model)
        heads = [block.attention for block in blocks]
        # Other mechanisms may change keys and values before scoring them, so the recorded ones do not fit a cache.
        is_plain = all(isinstance(x, MultiHeadAttention) and type(x.mechanism) in (Dot, CappedDot) for x in heads)
        self.is_causal = self.is_resumable and is_plain and getattr(self.stack, "causal", False)
        sites = [f"{self.name}.blocks.*.input"] if self.is_resumable else []
        self.record = capture_inputs(model, inputs, sites=sites)

    def run_patches(
        self, patches: Sequence[Patch], new: Mapping[str, Tensor], metric: Metric, batch: int = 64
    ) -> Tensor:
        """The metric under each patch on its own (patches,), at most ``batch`` patches in a forward pass.

        new  by site, the replacement activations (1, …, T, width)
        """
        order: list[int] = []
        results: list[Tensor] = []
        for group in track(self.groups(patches, batch), "patches", len(patches), len):
            check_cancelled()
            with inference(self.model), use_edit(_row_edits(self.model, [patches[index] for index in group], new)):
                results.append(self.run([patches[index] for index in group], metric))
            order += group
        return torch.cat(results)[torch.tensor(order).argsort()]

    def groups(self, patches: Sequence[Patch], batch: int) -> list[list[int]]:
        """Groups of patch indices that run as one batch, each sorted by layer."""
        batch = min(batch, max(1, _TOKENS_AT_ONCE // self.n_tokens))
        if not self.is_resumable:
            return [list(range(start, min(start + batch, len(patches)))) for start in range(0, len(patches), batch)]
        starts = [(patch.position or 0) if self.is_causal else 0 for patch in patches]
        is_last = [patch.layer == self.stack.n_layers - 1 for patch in patches]  # these need all tokens of that layer
        groups: list[list[int]] = []
        for index in sorted(range(len(patches)), key=lambda i: (is_last[i], starts[i], patches[i].layer)):
            last = groups[-1] if groups else []
            if last and len(last) < batch and is_last[last[0]] == is_last[index]:
                n_wasted, n_run = starts[index] - starts[last[0]], self.n_tokens - starts[last[0]]
                if n_wasted <= n_run // 16 or (len(last) + 1) * n_run <= _FEW_TOKENS:
                    last.append(index)
                    continue
            groups.append([index])
        return [sorted(group, key=lambda i: patches[i].layer) for group in groups]

    def run(self, patches: Sequence[Patch], metric: Metric) -> Tensor:
        """The metric of one run per patch (n,), each starting at its patch's layer; ``patches`` are sorted by layer."""
        if not self.is_resumable:
            return metric(self.model(*(x.expand(len(patches), *x.shape[1:]) for x in self.inputs.tensors)))
        model, layers = self.model, [patch.layer for patch in patches]
        start = min(patch.position or 0 for patch in patches) if self.is_causal else 0
        position = None  # the only one whose logits the metric reads, if known
        if isinstance(metric, LogitDifference) and model.head is not None:
            position = metric.position % self.n_tokens
        if position == self.n_tokens - 1:
            is_cut = self.is_causal and layers[-1] < self.stack.n_layers - 1
            states = self._run_layers(layers, start, last_token=is_cut)[:, -1]
        else:
            states = self._run_layers(layers, start)
            before = self.record.final_states[:, :start].expand(len(states), -1, -1)
            states = torch.cat((before, states), 1)  # (n, T, M)
            states = states if position is None else states[:, position]
        return metric(logits_of_states(model, {}, states))

    def _run_layers(self, layers: list[int], start: int, *, last_token: bool = False) -> Tensor:
        """Final states of n runs that start at these layers: (n, T - start, M), or (n, 1, M) with ``last_token``."""
        x, last = self.record[f"{self.name}.blocks.{layers[0]}.input"][:0, start:], self.stack.n_layers - 1
        for layer in range(layers[0], last + 1):
            begin = self.record[f"{self.name}.blocks.{layer}.input"][:, start:]
            x = torch.cat((x, begin.expand(layers.count(layer), -1, -1)))
            cache = self._cache(layer, len(x), start) if self.is_causal else None
            if layer == last and last_token and cache is not None:
                block = self.stack.blocks[layer]
                norm = block.residuals().attention.before
                block.attention.store_keys(x if norm is None else norm(x), cache.layers[layer])
                x = x[:, -1:]
            x = self.stack(x, first=layer, stop=None if layer == last else layer + 1, cache=cache)
        return x

    def _cache(self, layer: int, n: int, start: int) -> ModelCache:
        """A cache for n rows that holds this layer's unpatched keys and values of the tokens before ``start``."""
        caches = [GrowingCache() for _ in range(self.stack.n_layers)]
        if start:
            call = self.record.call(layer=layer)
            k, v = (heads[:, :, :start].expand(n, -1, -1, -1) for heads in (call.k, call.v))
            caches[layer].update(k, v)
        return ModelCache(caches)


def _row_edits(model: Model, patches: Sequence[Patch], new: Mapping[str, Tensor]) -> SiteEdit:
    """The edit that applies patch n to row n of a batch."""
    rows: dict[str, list[tuple[int, Patch]]] = {}
    for row, patch in enumerate(patches):
        rows.setdefault(patch.site, []).append((row, patch))

    def change(site: str, patched: list[tuple[int, Patch]], call: AttentionCall | None, x: Tensor) -> Tensor:
        x = x.clone()
        for row, patch in patched:
            patch.write(x, row, new[site][0])
        return x

    return SiteEdit(model, {hook_site(model, site): partial(change, site, patched) for site, patched in rows.items()})
