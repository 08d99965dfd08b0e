"""``capture``: one pass of a model, on its fast path, with the activations of chosen hook sites kept.

Attention patterns are not among them: they are recomputed from q and k when they are read. Compiled models run eagerly
during the pass; fused attention stays fused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from fnmatch import fnmatchcase
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..attention import AttentionMap
from ..attention.attention_map import Pick, as_span
from ..attention.edits import use_edit
from ..attention.score_matrix import AttentionCall
from ..foundation.checks import did_you_mean
from ..generation.generate import inference
from ..generation.prompts import image_pixels, token_rows
from ..generation.text_codec import ModelTokenizers
from ..models import Model, ModelOrPath, open_model
from ..models.base_model import mask_from_padding
from ..models.components import vision_inputs
from ..models.sites import HookSite, full_name
from .capture import attention_name, attention_sites, resolve_kind, write_target
from .capture_inputs import read_target_ids
from .interventions import SiteEdit

if TYPE_CHECKING:
    from .attribution import LogitAttribution
    from .why import ScoreSplit

Metric = Callable[[Tensor], Tensor]  # logits (B, T, V) or (B, classes) → a number, or one for each prompt (B,)


class PassInputs(NamedTuple):
    """What a model is called with, for one or several prompts padded on the right."""

    tensors: tuple[Tensor, ...]  # (tokens,), (pixels,) or (source, target)
    masks: dict[str, Tensor]  # the padding masks, by argument name; none where all prompts are of one length
    lengths: list[int]  # of what the predicting stack reads
    source_lengths: list[int]  # of what the encoder reads, where there is a decoder too


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

    what       a text or several, token ids, or images, as ``regard.look`` reads them
    target     of an encoder-decoder: what the decoder is fed, a text for each source; generated greedily if missing
    sites      names or patterns of ``model.sites()``, "decoder.blocks.3" or "*.ff.neurons"; None: all of them
    positions  keep only these tokens of every site; None: all of them
    grad       keep the graph, for ``ActivationRecord.gradients``
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
) -> ActivationRecord:
    """``capture`` of inputs that were read before."""
    kept: dict[str, Tensor] = {}
    calls: dict[HookSite, AttentionCall] = {}

    def keep(name: str, call: AttentionCall | None, x: Tensor) -> Tensor:
        if grad and not x.requires_grad:
            x = x.detach().requires_grad_()
        whole = x if grad else x.detach()
        kept[name] = whole if positions is None else _select(whole, positions)
        return x

    def keep_call(site: HookSite, call: AttentionCall) -> AttentionCall:
        calls[site] = call
        return call

    chosen = select_sites(model, sites)
    attentions = [site for layers in attention_sites(model).values() for site in layers] if positions is None else []
    edit = SiteEdit(
        model,
        {site: partial(keep, site.name) for site in chosen},
        {site: partial(keep_call, site) for site in attentions},
    )
    with inference(model), use_edit(edit), torch.enable_grad() if grad else nullcontext():
        run: Any = model.hidden
        states = run(*inputs.tensors, **inputs.masks)
    return ActivationRecord(model, inputs, kept, calls, states, positions)


def select_sites(model: Model, sites: str | Iterable[str] | None) -> list[HookSite]:
    """The sites of these names and patterns, in the order of the forward pass."""
    every = model.sites()
    if sites is None:
        return list(every.values())
    names = [full_name(name) for name in ([sites] if isinstance(sites, str) else sites)]
    for name in names:
        if not any(fnmatchcase(site, name) for site in every):
            raise ValueError(f"{name!r} matches none of model.sites(){did_you_mean(name, every)}")
    return [site for site in every.values() if any(fnmatchcase(site.name, name) for name in names)]


def _select(x: Tensor, positions: Pick) -> Tensor:
    """Some tokens of x (…, T, width) in memory of their own."""
    return x[..., as_span(positions, x.shape[-2], "positions", x.device), :].clone()


class ActivationRecord(Mapping[str, Tensor]):
    """The activations of one pass: ``record["decoder.blocks.3.ff.neurons"]`` is (B, T, F); B counts the prompts.

    Prompts of unequal length are padded on the right; ``record.lengths`` says how far each is real. In every method
    ``prompt`` counts from 0, ``position`` too and from a prompt's own end if negative.
    """

    def __init__(
        self,
        model: Model,
        inputs: PassInputs,
        activations: dict[str, Tensor],
        calls: dict[HookSite, AttentionCall],
        states: Tensor,
        positions: Pick | None,
    ) -> None:
        self.model, self.inputs, self.positions = model, inputs, positions
        self._activations, self._calls, self._states = activations, calls, states

    def __getitem__(self, name: str) -> Tensor:
        if full_name(name) not in self._activations:
            known = "was not captured" if full_name(name) in self.model.sites() else "is none of model.sites()"
            raise KeyError(f"{name!r} {known}{did_you_mean(full_name(name), self._activations)}")
        return self._activations[full_name(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._activations)

    def __len__(self) -> int:
        return len(self._activations)

    def __repr__(self) -> str:
        n_bytes = sum(x.nbytes for x in self._activations.values())
        return f"ActivationRecord({len(self.lengths)} prompts, {len(self)} sites, {n_bytes / 2**20:,.1f} MiB)"

    @property
    def lengths(self) -> list[int]:
        """The number of tokens of each prompt, of the target where there is a decoder beside an encoder."""
        return self.inputs.lengths

    @property
    def final_states(self) -> Tensor:
        """The last layer's states after the final norm (B, T, M), which the head reads."""
        return self._states

    @cached_property
    def logits(self) -> Tensor:
        """Logits of all positions (B, T, V), or of the classes (B, classes)."""
        model, states = self.model, self._states
        with torch.set_grad_enabled(states.requires_grad):
            if model.class_head is not None:
                return model.class_head(states, mask_from_padding(self.inputs.masks.get("padding_mask")))
            if model.head is None:
                raise ValueError("this model has no head, so it has no logits")
            return model.head(states, model.output_table)

    def attention(self, *, layer: int, kind: str | None = None) -> AttentionMap:
        """The weights of one layer's heads, computed from q and k when they are read."""
        site = attention_sites(self.model)[resolve_kind(self.model, kind)][layer]
        if site not in self._calls:
            raise ValueError("attention is recomputed from all queries and keys: capture without positions=")
        return AttentionMap.of(self._calls[site])

    def call(self, *, layer: int, kind: str | None = None) -> AttentionCall:
        """Queries, keys, values, mask and bias of one layer's attention."""
        return self._calls[attention_sites(self.model)[resolve_kind(self.model, kind)][layer]]

    def head_results(self, *, layer: int, kind: str | None = None) -> Tensor:
        """What each head writes to the residual stream before any norm of it: head_h W_o,h   (B, H, T, M)"""
        kind = resolve_kind(self.model, kind)
        module: Any = attention_sites(self.model)[kind][layer].owner
        weight = module.w_o.weight.unflatten(1, (module.n_heads, module.d_head))  # (M, H, D)
        return torch.einsum("bhtd,mhd->bhtm", self[f"{attention_name(kind, layer)}.heads"], weight)

    def gradients(self, metric: Metric | Tensor) -> dict[str, Tensor]:
        """d metric / d activation of every captured site; those that the metric does not depend on are left out.

        metric  a function of the logits, or a number computed from ``record.logits``. The parameters' ``grad`` stays
                as it is.
        """
        if not self._states.requires_grad:
            raise ValueError("this record has no graph: capture with grad=True")
        value = metric if isinstance(metric, Tensor) else metric(self.logits)
        names = list(self._activations)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            value.sum(), [self._activations[name] for name in names], retain_graph=True, allow_unused=True
        )
        return {name: gradient for name, gradient in zip(names, found, strict=True) if gradient is not None}

    def index(self, prompt: int, position: int, *, source: bool = False) -> int:
        """A position of a prompt (of its source), counted from 0."""
        lengths = self.inputs.source_lengths if source else self.lengths
        if not -len(lengths) <= prompt < len(lengths):
            raise ValueError(f"prompt={prompt}: there are {len(lengths)}, 0 to {len(lengths) - 1}")
        length = lengths[prompt]
        if not -length <= position < length:
            raise ValueError(f"position={position}: this prompt has {length} tokens, 0 to {length - 1}")
        return position % length

    def at(self, name: str, prompt: int, position: int) -> Tensor:
        """The activation of one token at a site, fp64: (width,), or (heads, width)."""
        x = self[name]
        if self.positions is not None:  # the record holds some tokens only
            n_tokens = max(self.inputs.source_lengths if name.startswith("encoder") else self.lengths)
            span = as_span(self.positions, n_tokens, "positions", x.device)
            held = list(range(n_tokens))[span] if isinstance(span, slice) else span.tolist()
            if position not in held:
                raise ValueError(f"position {position} was not captured: positions={self.positions}")
            position = held.index(position)
        return x[prompt][..., position, :].detach().double()

    def logit_attribution(
        self, token: int | str | None = None, *, position: int = -1, prompt: int = 0, against: int | str | None = None
    ) -> LogitAttribution:
        """What each part of the model wrote into one logit; see ``lens.attribution``."""
        from .attribution import logit_attribution

        return logit_attribution(self, token, position=position, prompt=prompt, against=against)

    def why(self, *, layer: int, head: int, row: int, col: int, kind: str | None = None, prompt: int = 0) -> ScoreSplit:
        """The score of one query and key, split by who wrote the query's side and who the key's; see ``lens.why``."""
        from .why import split_score

        return split_score(self, resolve_kind(self.model, kind), layer, head, row, col, prompt)


def read_pass_inputs(model: Model, what: Any, target: Any = None) -> PassInputs:
    """Texts, token ids or images as the tensors that a model is called with."""
    config = model.config
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
    """What the decoder is fed for each source: the given targets, or what the model writes."""
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
    lengths = [len(row) for row in rows]
    width = max(lengths)
    tokens = torch.tensor([[*row, *[pad_id or 0] * (width - len(row))] for row in rows], device=device)
    if min(lengths) == width:
        return tokens, None, lengths
    real = torch.arange(width, device=device) < torch.tensor(lengths, device=device)[:, None]
    return tokens, real, lengths
