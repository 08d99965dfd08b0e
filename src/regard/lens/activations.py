"""``capture``: one forward pass of a model on its fast path that keeps the activations of chosen hook sites.

Attention patterns are not stored but recomputed from q and k when they are read; likewise derived sites, and the widest
activations from narrower ones. Compiled models run eagerly during the pass; fused attention stays fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cached_property, partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..attention import AttentionMap
from ..attention.attention_map import Pick, as_span
from ..attention.edits import has_edits, use_edit
from ..attention.score_matrix import AttentionCall
from ..foundation.checks import did_you_mean
from ..generation.generate import inference
from ..generation.prompts import image_pixels, token_rows
from ..generation.text_codec import ModelTokenizers
from ..models import Model, ModelOrPath, TwoTower, open_model
from ..models.base_model import mask_from_padding
from ..models.components import vision_inputs
from ..models.sites import CLASSES, HookSite, full_name, norms_around
from .capture import attention_name, attention_site, attention_sites, resolve_layer, write_target
from .capture_inputs import read_target_ids
from .interventions import SiteEdit
from .notebook import table_html
from .residual import check_float_weights, norm_before, norm_scale

if TYPE_CHECKING:
    from .attribution import LogitAttribution
    from .why import ScoreSplit

Metric = Callable[[Tensor], Tensor]  # logits (B, T, V) or (B, classes) → a scalar, or one value per prompt (B,)


class PassInputs(NamedTuple):
    """The arguments of one forward pass over one or several prompts, padded on the right."""

    tensors: tuple[Tensor, ...]  # (tokens,), (pixels,) or (source, target)
    masks: dict[str, Tensor]  # padding masks by argument name; empty if all prompts have the same length
    lengths: list[int]  # tokens of each prompt in the stack that predicts: the target's in an encoder-decoder
    source_lengths: list[int]  # tokens of each source in an encoder-decoder; otherwise equal to ``lengths``

    def lengths_in(self, stack: str) -> list[int]:
        """The tokens of each prompt in a stack, given by its name or that of a site or an attention in it."""
        return self.source_lengths if stack.startswith("encoder") else self.lengths


def capture(
    model: ModelOrPath,
    what: Any,
    target: Any = None,
    *,
    sites: str | Iterable[str] | None = None,
    positions: Pick | None = None,
    grad: bool = False,
    device: torch.device | str | None = None,
) -> ActivationRecord:
    """Run a model and keep its activations.

    what       one or several texts, rows of token ids, or images, as ``regard.look`` reads them
    target     encoder-decoder only: the decoder's input, one text per source; None generates it greedily
    sites      names or patterns of ``model.sites()``, "decoder.blocks.3" or "*.ff.neurons"; None: all. For a derived
               site ("*.attention.results"), the activations it is computed from are kept
    positions  keep only these tokens at every site; None: all
    grad       keep the autograd graph for ``ActivationRecord.gradients``
    """
    model = open_model(model, device)
    model = getattr(model, "_orig_mod", model)
    inputs = read_pass_inputs(model, what, target)
    return capture_inputs(model, inputs, sites=sites, positions=positions, grad=grad)


def capture_inputs(
    model: Model,
    inputs: PassInputs,
    *,
    sites: str | Iterable[str] | None = None,
    positions: Pick | None = None,
    grad: bool = False,
    keep_calls: bool | None = None,
) -> ActivationRecord:
    """``capture`` of inputs that have been read already.

    keep_calls  keep q, k and v of every attention; None: only if all positions are kept
    """
    if grad:
        check_float_weights(model)
    kept: dict[str, Tensor | RecomputedActivation] = {}
    calls: dict[HookSite, AttentionCall] = {}
    # Computed later, an activation would lack this pass's edits and autograd graph; with positions= it is small anyway.
    may_recompute = positions is None and not grad and not has_edits(model)

    def keep(site: HookSite, call: AttentionCall | None, x: Tensor) -> Tensor:
        if may_recompute and (recomputed := recompute_later(site, kept)) is not None:
            kept[site.name] = recomputed
            return x
        x, kept[site.name] = _keep_with_gradient(x, positions) if grad else (x, _select(x.detach(), positions))
        return x

    def keep_call(site: HookSite, call: AttentionCall) -> AttentionCall:
        calls[site] = call
        return call

    names = {name for site in select_sites(model, sites) for name in (site.name, *site.sources)}
    selected = [site for name, site in model.sites().items() if name in names]
    keep_calls = positions is None if keep_calls is None else keep_calls
    attentions = [site for layers in attention_sites(model).values() for site in layers] if keep_calls else []
    edit = SiteEdit(
        model,
        {site: partial(keep, site) for site in selected if not site.is_derived},
        {site: partial(keep_call, site) for site in attentions},
    )
    with inference(model), use_edit(edit), torch.enable_grad() if grad else nullcontext():
        run: Any = model.hidden
        states = run(*inputs.tensors, **inputs.masks)
    activations: dict[str, Tensor | RecomputedActivation] = {}
    for site in selected:
        if site.name == "logits":
            head_input = states if site.shape == CLASSES else _select(states, positions)
            compute_logits = partial(logits_of_states, model, inputs.masks)
            activations[site.name] = RecomputedActivation(site, model, compute_logits, head_input)
        else:
            activations[site.name] = derive_later(site, kept) if site.is_derived else kept[site.name]
    return ActivationRecord(model, inputs, activations, calls, states, positions)


def select_sites(model: Model, sites: str | Iterable[str] | None) -> list[HookSite]:
    """The sites that match these names and patterns, in the order of the forward pass."""
    all_sites = model.sites()
    if sites is None:
        return list(all_sites.values())
    patterns = [full_name(name) for name in ([sites] if isinstance(sites, str) else sites)]
    for pattern in patterns:
        if not any(fnmatchcase(site, pattern) for site in all_sites):
            raise ValueError(f"{pattern!r} matches none of model.sites(){did_you_mean(pattern, all_sites)}")
    return [site for site in all_sites.values() if any(fnmatchcase(site.name, pattern) for pattern in patterns)]


def _select(x: Tensor, positions: Pick | None) -> Tensor:
    """Some tokens of x (…, T, width), copied so that x can be freed; x itself for None."""
    return x if positions is None else x[..., as_span(positions, x.shape[-2], "positions", x.device), :].clone()


def _keep_with_gradient(x: Tensor, positions: Pick | None) -> tuple[Tensor, Tensor]:
    """The activation with which a pass goes on, and the one to keep: part of it, so that it has a gradient.

    Two sites may hold one tensor (the input of a sub-layer without a norm is the state); as views of it they have
    gradients of their own.
    """
    x = x.view_as(x) if x.requires_grad else x.detach().requires_grad_()
    kept = _select(x, positions)
    if positions is not None:
        x = x.clone()
        x[..., as_span(positions, x.shape[-2], "positions", x.device), :] = kept
    return x, kept


class ActivationRecord(Mapping[str, Tensor]):
    """The activations of one pass over B prompts: ``record["decoder.blocks.3.ff.neurons"]`` is (B, T, F).

    Prompts of unequal length are padded on the right; ``record.lengths`` has their true lengths. In every method
    ``prompt`` and ``position`` count from 0; a negative position counts from the end of its prompt.
    """

    def __init__(
        self,
        model: Model,
        inputs: PassInputs,
        activations: dict[str, Tensor | RecomputedActivation],
        calls: dict[HookSite, AttentionCall],
        states: Tensor,
        positions: Pick | None,
    ) -> None:
        self.model, self.inputs, self.positions = model, inputs, positions
        self._activations, self._calls, self._states = activations, calls, states

    def __getitem__(self, name: str) -> Tensor:
        if full_name(name) not in self._activations:
            fault = "was not captured" if full_name(name) in self.model.sites() else "is not in model.sites()"
            raise KeyError(f"{name!r} {fault}{did_you_mean(full_name(name), self._activations)}")
        x = self._activations[full_name(name)]
        return x if isinstance(x, Tensor) else x.compute()

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    def _repr_html_(self) -> str:
        sites, later = self.model.sites(), "computed when read"
        rows = [
            (name, sites[name].shape, str(tuple(x.shape)) if isinstance(x, Tensor) else later)
            for name, x in self._activations.items()
        ]
        return table_html(("site", "shape", "here"), rows, repr(self))

    def __repr__(self) -> str:
        n_bytes = sum(x.nbytes for x in self._activations.values() if isinstance(x, Tensor))
        return f"ActivationRecord({len(self.lengths)} prompts, {len(self)} sites, {n_bytes / 2**20:,.1f} MiB)"

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt; in an encoder-decoder, of each target."""
        return self.inputs.lengths

    @property
    def final_states(self) -> Tensor:
        """The input of the head: the last layer's states after the final norm (B, T, M)."""
        return self._states

    @cached_property
    def logits(self) -> Tensor:
        """Logits of all positions (B, T, V), or of a classifier (B, classes)."""
        with torch.set_grad_enabled(self._states.requires_grad):
            return logits_of_states(self.model, self.inputs.masks, self._states)

    def attention(self, *, layer: int, kind: str | None = None) -> AttentionMap:
        """The attention map of one layer, whose weights are computed from q and k when they are read."""
        return AttentionMap.of(self.call(layer=layer, kind=kind))

    def call(self, *, layer: int, kind: str | None = None) -> AttentionCall:
        """Queries, keys, values, mask and bias of one layer's attention."""
        site = attention_site(self.model, *resolve_layer(self.model, kind, layer))
        if site not in self._calls:
            raise ValueError("attention is recomputed from the queries and keys of all positions: capture all of them")
        return self._calls[site]

    def head_results(self, *, layer: int, kind: str | None = None) -> Tensor:
        """The output of each head, head_h W_o,h, before any norm of the sub-layer's output   (B, H, T, M)"""
        kind, layer = resolve_layer(self.model, kind, layer)
        module = attention_site(self.model, kind, layer).owner
        return results_of_heads(module, self[f"{attention_name(kind, layer)}.heads"])

    def norm_scale(self, name: str) -> Tensor:
        """The divisor of the norm that produced a sub-layer's input, "decoder.blocks.3.ff.input", or "final_states"
        (B, T)."""
        norm, before = norm_before(self.model, full_name(name))
        return norm_scale(norm, self[before])

    @torch.enable_grad()  # also inside the caller's no_grad
    def gradients(self, metric: Metric | Tensor) -> dict[str, Tensor]:
        """d metric / d activation for every captured site, without those that the metric does not depend on.

        Derived sites have no gradient; the activations they are computed from do. The parameters' ``grad`` is left
        unchanged.

        metric  a function of the logits, or a tensor computed from ``record.logits``
        """
        if not self._states.requires_grad:
            raise ValueError("this record has no graph: capture with grad=True")
        value = metric if isinstance(metric, Tensor) else metric(self.logits)
        names = [name for name, x in self._activations.items() if isinstance(x, Tensor)]
        gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
            value.sum(), [self[name] for name in names], retain_graph=True, allow_unused=True
        )
        return {name: gradient for name, gradient in zip(names, gradients, strict=True) if gradient is not None}

    def index(self, prompt: int, position: int, *, source: bool = False) -> int:
        """Check a position of a prompt (or of its source) and resolve a negative one."""
        lengths = self.inputs.source_lengths if source else self.lengths
        if not -len(lengths) <= prompt < len(lengths):
            raise ValueError(f"prompt={prompt}: the record has {len(lengths)} prompts, 0 to {len(lengths) - 1}")
        length = lengths[prompt]
        if not -length <= position < length:
            raise ValueError(f"position={position}: this prompt has {length} tokens, 0 to {length - 1}")
        return position % length

    def at(self, name: str, prompt: int, position: int) -> Tensor:
        """The activation of one token at a site in fp64: (width,), or (heads, width)."""
        if self.positions is not None:
            n_tokens = max(self.inputs.lengths_in(name))
            span = as_span(self.positions, n_tokens, "positions", self._states.device)
            captured = list(range(n_tokens))[span] if isinstance(span, slice) else span.tolist()
            if position not in captured:
                raise ValueError(f"position {position} was not captured: positions={self.positions}")
            position = captured.index(position)
        x, at = self._activations.get(full_name(name)), (prompt, position)
        token = x.compute(at) if isinstance(x, RecomputedActivation) else token_of(self[name], at)
        return token[0, ..., 0, :].detach().double()

    def logit_attribution(
        self, token: int | str | None = None, *, position: int = -1, prompt: int = 0, against: int | str | None = None
    ) -> LogitAttribution:
        """Split one logit into the contributions of the model's parts; see ``lens.attribution``."""
        from .attribution import logit_attribution

        return logit_attribution(self, token, position=position, prompt=prompt, against=against)

    def why(self, *, layer: int, head: int, row: int, col: int, kind: str | None = None, prompt: int = 0) -> ScoreSplit:
        """Split the score of one query and key by the writers of the query and of the key; see ``lens.why``."""
        from .why import split_score

        return split_score(self, *resolve_layer(self.model, kind, layer), head, row, col, prompt)


class RecomputedActivation:
    """An activation that a module computes from others (…, T, width) of the record when it is read."""

    def __init__(
        self, site: HookSite, module: nn.Module, run: Callable[..., Tensor], *states: Tensor | RecomputedActivation
    ) -> None:
        self.site, self.run, self.states = site, run, states
        self.module: Any = module
        self._weights = self._weight_versions()

    def compute(self, at: tuple[int, int] | None = None) -> Tensor:
        """The whole activation, or that of one (prompt, position): (1, …, 1, width)."""
        name = self.site.name
        if self._weight_versions() != self._weights:
            remedy = "capture again" if self.site.is_derived else f'capture(…, sites="{name}") stores it'
            raise ValueError(f"{name} is computed when it is read, but the weights have changed since; {remedy}")
        if at is not None and self.site.shape == CLASSES:
            raise ValueError(f"{name} {CLASSES} belong to a whole prompt, not to one position")
        states = [token_of(x, at) if isinstance(x, Tensor) else x.compute(at) for x in self.states]
        with inference(self.module), torch.set_grad_enabled(any(x.requires_grad for x in states)):
            return self.run(*states)

    def _weight_versions(self) -> list[int]:
        return [x._version for x in (*self.module.parameters(), *self.module.buffers())]


def token_of(x: Tensor, at: tuple[int, int] | None) -> Tensor:
    """One (prompt, position) of x (B, …, T, width), as (1, …, 1, width); x itself for None."""
    return x if at is None else x[at[0], None][..., at[1], None, :]


def recompute_later(site: HookSite, kept: Mapping[str, Tensor | RecomputedActivation]) -> RecomputedActivation | None:
    """A wide activation as a function of a narrower one that is kept; None if it has to be stored.

    Neurons are recomputed from the input of their network, the input of a sub-layer from the residual stream.
    """
    block: Any = site.owner
    stem = site.name.removesuffix(site.point)
    if site.point == "ff.neurons" and (states := kept.get(f"{stem}ff.input")) is not None:
        return RecomputedActivation(site, block.ff, block.ff.neurons, states)
    if site.point in ("attention.input", "ff.input"):
        norms, before = norms_around(site)
        if isinstance(norm := norms.before, nn.Module) and isinstance(states := kept.get(before), Tensor):
            return RecomputedActivation(site, norm, norm, states)
    return None


def derive_later(site: HookSite, kept: Mapping[str, Tensor | RecomputedActivation]) -> RecomputedActivation:
    """A derived site other than the logits as a function of activations that are kept."""
    owner: Any = site.owner
    run = partial(results_of_heads, owner) if site.point == "results" else partial(_scale_of_sum, owner)
    return RecomputedActivation(site, owner, run, *(kept[name] for name in site.sources))


def results_of_heads(module: Any, heads: Tensor) -> Tensor:
    """What each head of an attention writes: head_h W_o,h   (B, H, T, D) → (B, H, T, M)"""
    check_float_weights(module)
    return torch.einsum("bhtd,mhd->bhtm", heads, module.head_outputs())


def _scale_of_sum(norm: Any, *states: Tensor) -> Tensor:
    return norm_scale(norm, reduce(torch.add, states))[..., None]


def logits_of_states(model: Model, masks: Mapping[str, Tensor], states: Tensor) -> Tensor:
    """The logits of a model's head, from its final states."""
    if model.class_head is not None:
        return model.class_head(states, mask_from_padding(masks.get("padding_mask")))
    if model.head is None:
        raise ValueError("this model has no head, so it has no logits")
    return model.head(states, model.output_table)


def read_pass_inputs(model: Model, what: Any, target: Any = None) -> PassInputs:
    """Texts, token ids or images as the tensors of a forward pass."""
    config = model.config
    if isinstance(model, TwoTower):
        raise ValueError("two towers run separately, so there is no single pass to capture; regard.look shows both")
    if target is not None and not model.is_encoder_decoder:
        raise ValueError("target is for models with an encoder and a decoder")
    if config.source != "text":
        pixels = image_pixels(model, what) if config.source == "image" else torch.as_tensor(what).to(model.device)
        source = pixels[None] if pixels.dim() == 2 else pixels
        embed: Any = model.embeddings
        with inference(model):
            n_tokens = embed(*vision_inputs(config, source[:1])).shape[1]
        sources: list[Any] = list(source.unbind())
        masks, lengths = {}, [n_tokens] * len(source)
    else:
        texts = [what] if isinstance(what, str) else what
        is_text = isinstance(texts, list | tuple) and any(isinstance(text, str) for text in texts)
        sources = ModelTokenizers(model).encode_inputs(texts) if is_text else token_rows(texts)
        source, padding_mask, lengths = _pad_right(sources, config.pad_id, model.device)
        masks = {} if padding_mask is None else {"padding_mask": padding_mask}
    if not model.is_encoder_decoder:
        return PassInputs((source,), masks, lengths, lengths)
    rows = _target_rows(model, source, sources, masks.get("padding_mask"), target)
    fed, target_mask, target_lengths = _pad_right(rows, config.pad_id, model.device)
    masks = {f"source_{name}": mask for name, mask in masks.items()}
    if target_mask is not None:
        masks["target_padding_mask"] = target_mask
    return PassInputs((source, fed), masks, target_lengths, lengths)


def _target_rows(model: Model, source: Tensor, sources: list[Any], mask: Tensor | None, target: Any) -> list[list[int]]:
    """The decoder's input for each source: the given targets, or greedily generated ones."""
    if target is None:
        return [write_target(model, source[i : i + 1] if mask is None else [row]) for i, row in enumerate(sources)]
    targets = [target] if isinstance(target, str) else target
    is_text = isinstance(targets, list | tuple) and any(isinstance(text, str) for text in targets)
    rows = [read_target_ids(model, row) for row in (targets if is_text else token_rows(targets, name="target"))]
    if len(rows) != len(sources):
        raise ValueError(f"there are {len(rows)} targets for {len(sources)} sources")
    return rows


def _pad_right(
    rows: list[list[int]], pad_id: int | None, device: torch.device
) -> tuple[Tensor, Tensor | None, list[int]]:
    """Token ids (B, T), the padding mask (None if no row is padded), and the lengths of the rows."""
    lengths = [len(row) for row in rows]
    if not min(lengths, default=0):
        raise ValueError("a prompt is empty: there is nothing to capture")
    width = max(lengths)
    tokens = torch.tensor([[*row, *[pad_id or 0] * (width - len(row))] for row in rows], device=device)
    if min(lengths) == width:
        return tokens, None, lengths
    real = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    return tokens, real, lengths
