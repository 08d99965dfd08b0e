"""The graphs of an exported web page: those of ``onnx_graphs`` with switches as inputs and all activations as outputs.

A page shows the same views as the server: weights from q and k, a token's path through a layer, the text generated
again with heads switched off. Its graphs therefore have the further inputs

    gates         (attentions, H): a factor on the output of each head; 1 as trained, 0 to switch it off
    score_factor  (1,): a factor on the scaled dot products; 1 as trained
    see_all       (1,), decoders: whether the causal mask is removed
    depths        (N,), decoders: the layer after which each state of ``wanted`` is read; n_layers as trained
    depth         (1,), encoder-only models: the same for the whole input

and return the activations under the names of ``model.sites()``, and the vectors whose sum is the embedding. The same
file serves generation, which requests only logits and cache, and the views, which request activations.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ..attention import MultiHeadAttention
from ..attention.biases import Bias, RelativeBias
from ..attention.edits import use_edit
from ..attention.frame import Site
from ..attention.mask import And
from ..attention.masks import Causal, Mask, Window
from ..attention.mechanisms import CappedDot, Dot
from ..attention.score_matrix import AttentionCall
from ..config import ModelConfig
from ..errors import RegardError
from ..layers import Embeddings
from ..lens.capture import attention_name, attention_sites
from ..lens.interventions import SiteEdit, without_causal
from ..lens.labels import token_text
from ..models import Model, Stack
from ..models.base_model import mask_from_padding
from .onnx_graphs import (
    Axes,
    DecoderGraph,
    EncoderGraph,
    EncoderOnlyGraph,
    Graph,
    head_output,
    traceable,
)

_UNSEEN = (".router", "attention.input")  # sites that no view uses


@dataclass(frozen=True, eq=False)
class Flag(Mask):
    """A mask that allows all keys or none, as an input of the graph says."""

    on: Tensor  # (1,) bool

    def allows(self, at: Site) -> Tensor:
        return self.on[0] & (at.i >= at.i) & (at.j >= at.j)


class Observer:
    """Collects the activations of one stack in a forward pass, and applies the graph's switches."""

    def __init__(self, model: Model, stack: str) -> None:
        self.model, self.stack = model, stack
        self.activations: dict[str, Tensor] = {}
        sites = model.sites()
        self.sites = {name: site for name, site in sites.items() if self._is_shown(name) and not site.is_derived}
        self.kinds = [kind for kind in attention_sites(model) if (kind == "encoder") == (stack == "encoder")]
        self.attentions = [
            (kind, layer, site) for kind in self.kinds for layer, site in enumerate(attention_sites(model)[kind])
        ]

    def _is_shown(self, name: str) -> bool:
        return (name == self.stack or name.startswith(f"{self.stack}.")) and not name.endswith(_UNSEEN)

    @property
    def n_layers(self) -> int:
        stack: Stack = getattr(self.model, self.stack)
        return stack.n_layers

    def switches(self) -> dict[str, tuple[Tensor, Axes]]:
        """The switches as graph inputs, with the model's trained behaviour as their example values."""
        n_heads = max(cast(MultiHeadAttention, site.owner).n_heads for *_, site in self.attentions)
        gates: dict[str, tuple[Tensor, Axes]] = {
            "gates": (torch.ones(len(self.attentions), n_heads), {}),
            "score_factor": (torch.ones(1), {}),
        }
        return gates if self.stack == "encoder" else gates | {"see_all": (torch.zeros(1, dtype=torch.bool), {})}

    def edit(self, inputs: dict[str, Tensor]) -> SiteEdit:
        """The edit that applies these switches in one forward pass."""
        self.activations = {}
        outputs = {site: partial(self._collect, name) for name, site in self.sites.items()}
        calls = {}
        for n, (kind, layer, site) in enumerate(self.attentions):
            gates = inputs["gates"][n, : cast(MultiHeadAttention, site.owner).n_heads, None, None]
            name = f"{attention_name(kind, layer)}.heads"
            outputs[self.sites[name]] = partial(self._gate, name, gates)
            calls[site] = partial(
                self._change_call, inputs["score_factor"], inputs.get("see_all") if kind == "self" else None
            )
        return SiteEdit(self.model, outputs, calls)

    def _collect(self, name: str, call: AttentionCall | None, x: Tensor) -> Tensor:
        self.activations[name] = x
        return x

    def _gate(self, name: str, gates: Tensor, call: AttentionCall | None, x: Tensor) -> Tensor:
        return self._collect(name, call, x * gates)

    @staticmethod
    def _change_call(factor: Tensor, see_all: Tensor | None, call: AttentionCall) -> AttentionCall:
        mask = call.mask
        if see_all is not None and mask is not None:
            open_mask, flag = without_causal(mask), Flag(see_all)
            mask = mask | (flag if open_mask is None else flag & open_mask)
        return replace(call, q=call.q * factor, mask=mask)

    def layer_states(self) -> Tensor:
        """The input of the first layer and the output of every layer, before the last norm: (layers + 1, B, T, M)."""
        names = [self.stack, *(f"{self.stack}.blocks.{layer}.output" for layer in range(self.n_layers))]
        return torch.stack([self.activations[name] for name in names])

    def last_norm(self, states: Tensor) -> Tensor:
        norm = getattr(self.model, self.stack).norm
        return states if norm is None else norm(states)

    def outputs(
        self, tokens: Tensor | None, positions: Tensor | None, embeddings: Any, table: Any
    ) -> dict[str, Tensor]:
        """The collected activations, and the vectors whose sum is the embedding of a text."""
        out = dict(self.activations)
        if tokens is not None and isinstance(embeddings, Embeddings):
            out[f"{self.stack}.token"] = table(tokens)
            if embeddings.segment is not None:
                vector = embeddings.segment.weight[0] * embeddings.segment.scale
                out[f"{self.stack}.segment"] = vector.expand(*tokens.shape, len(vector))
            if embeddings.position is not None:
                at = torch.arange(tokens.shape[1]) if positions is None else positions
                vectors = embeddings.position(at, table.weight.dtype)
                out[f"{self.stack}.position"] = vectors.expand(*tokens.shape, vectors.shape[-1])
        # Two sites may be the same tensor, but a graph output has only one name.
        return {name: x.clone() for name, x in out.items()}


def _add_inputs(graph: Graph, inputs: dict[str, tuple[Tensor, Axes]]) -> None:
    graph.input_names += list(inputs)
    graph.examples += tuple(example for example, _ in inputs.values())
    graph.axes += tuple(axes for _, axes in inputs.values())


class PageEncoderOnlyGraph(EncoderOnlyGraph):
    """source, switches and depth → logits or states as if that layer were the last, and all activations."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, False)
        self.observer = Observer(model, "encoder")
        n_layers = torch.tensor([self.observer.n_layers])
        _add_inputs(self, {**self.observer.switches(), "depth": (n_layers, {})})

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        model, observer, padding_mask = self.model, self.observer, inputs.get("keep")
        with use_edit(observer.edit(inputs)):
            model.hidden(inputs["source"], padding_mask=padding_mask, segments=inputs.get("segments"))
        states = observer.last_norm(observer.layer_states().index_select(0, inputs["depth"])[0])
        if model.classifier is not None:
            out = {"logits": model.classifier(states, mask_from_padding(padding_mask))}
        else:
            out = {"logits": model.detector(states)} if model.detector is not None else head_output(model, states)
        tokens = inputs["source"] if model.config.source == "text" else None
        return out | observer.outputs(tokens, None, model.embeddings, model.token)


class PageEncoderGraph(EncoderGraph):
    """Encoder of an encoder-decoder, with its switches and activations."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, False)
        self.observer = Observer(model, "encoder")
        _add_inputs(self, self.observer.switches())

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with use_edit(self.observer.edit(inputs)):
            out = super().compute(inputs)
        tokens = inputs["source"] if self.model.config.source == "text" else None
        return out | self.observer.outputs(tokens, None, self.model.embeddings, self.model.token)


class PageDecoderGraph(DecoderGraph):
    """Decoder with its switches, a depth for each wanted token, and the activations of the new tokens."""

    def __init__(self, model: Model) -> None:
        super().__init__(model, False)
        self.observer = Observer(model, "decoder")
        wanted, axes = self.examples[2], self.axes[2]
        depths = torch.full_like(wanted, self.observer.n_layers)
        _add_inputs(self, {**self.observer.switches(), "depths": (depths, axes)})

    def compute(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        with use_edit(self.observer.edit(inputs)):
            out = super().compute(inputs)
        model = self.model
        if model.is_encoder_decoder:
            embeddings, table = model.target_embeddings, model.target_table
        else:
            embeddings, table = model.embeddings, model.token
        return out | self.observer.outputs(inputs["tokens"], inputs["positions"], embeddings, table)

    def _wanted_states(self, inputs: dict[str, Tensor], states: Tensor) -> Tensor:
        rows = self.observer.layer_states()[inputs["depths"], :, inputs["wanted"]]  # (N, B, M)
        return self.observer.last_norm(rows.transpose(0, 1))


def page_graphs(model: Model) -> dict[str, Graph]:
    """The graphs of a model for a page, by name. Raises RegardError for a model that a page cannot show."""
    describe_attention(model)
    model = traceable(model)
    if model.is_encoder_only:
        return {"model": PageEncoderOnlyGraph(model)}
    if model.is_decoder_only:
        return {"decoder": PageDecoderGraph(model)}
    return {"encoder": PageEncoderGraph(model), "decoder": PageDecoderGraph(model)}


# ---- descriptions that a page needs in addition to the graphs


def describe_attention(model: Model) -> dict[str, list[dict[str, Any]]]:
    """What a page needs to compute weights from q and k, by kind and layer in the order of ``gates``: the name of the
    attention, its sizes, the factor on q · k, its mask and its bias by distance."""
    if model.is_recurrent or not attention_sites(model) or model.config.stages is not None:
        raise RegardError("a page shows Transformers with one or two stacks of layers, which this model is not")
    described: dict[str, list[dict[str, Any]]] = {}
    for kind, sites in attention_sites(model).items():
        stack: Stack = model.encoder if kind == "encoder" else model.decoder
        for layer, (site, block) in enumerate(zip(sites, stack.layers, strict=True)):
            module = site.owner
            if not isinstance(module, MultiHeadAttention):
                raise RegardError(f"a page computes attention from q and k, and mixer={model.config.mixer!r} has none")
            mask = None if kind == "cross" else block.mask
            bias = None if kind == "cross" else module.position_bias or stack.position_bias
            described.setdefault(kind, []).append(
                {
                    "site": attention_name(kind, layer),
                    "heads": module.n_heads,
                    "kv_heads": module.n_kv_heads,
                    "d_head": module.d_head,
                    **_describe_scores(module),
                    "sinks": None if module.sinks is None else module.sinks.logits.tolist(),
                    "causal": kind == "self" and stack.causal,
                    "window": _describe_window(mask),
                    "bias": _describe_bias(bias, model),
                }
            )
    return described


def _describe_scores(module: MultiHeadAttention) -> dict[str, float | None]:
    mechanism = module.mechanism
    if not isinstance(mechanism, Dot) or mechanism.kind not in ("dot", "capped"):
        raise RegardError(f"a page computes weights from dot products; mechanism={mechanism.name!r} has other scores")
    cap = mechanism.cap if isinstance(mechanism, CappedDot) else None
    return {"factor": mechanism.factor(module.d_head), "cap": cap}


def _describe_window(mask: Mask | None) -> list[int] | None:
    """The number of keys a query sees up to and including itself, and the number after it; None without a window."""
    if isinstance(mask, And) and isinstance(mask.a, Causal):
        mask = mask.b
    if mask is None or isinstance(mask, Causal):
        return None
    if isinstance(mask, Window):
        return [mask.size, mask.ahead]
    raise RegardError(f"a page supports causal masks and windows; this model has a mask of type {type(mask).__name__}")


def _describe_bias(bias: Bias | None, model: Model) -> dict[str, Any] | None:
    """The bias of each head at every distance (key position - query position), starting at ``low``."""
    if bias is None:
        return None
    if not isinstance(bias, RelativeBias):
        raise RegardError(
            f"a page supports biases by distance, such as ALiBi's and T5's, but not {type(bias).__name__}"
        )
    longest = max(model.config.max_len, model.config.max_target_len or 0)
    distances = torch.arange(1 - longest, longest, device=model.device)
    with torch.no_grad():
        return {"low": 1 - longest, "values": bias.at(distances).float().tolist()}


def describe_vocabulary(tokenizer: Any, config: ModelConfig) -> dict[str, Any] | None:
    """How tokens spell a text, so that a page labels them as ``lens.labels`` does; None without a tokenizer.

    native  whether the tokenizer is one of regard's own: a token after special tokens still counts as the first
    pieces  by id: the bytes that a token adds to a text, as Latin-1; None for a token without bytes
    first   by id: the bytes of a token at the start of a text, if they differ
    names   by id, for tokens without bytes: the name, and whether the token is special (start, end, padding)
    parts   by id, for tokens that are parts of a character: the label of such a token on its own
    """
    if tokenizer is None:
        return None
    pieces: list[str | None] = []
    first, names, parts = {}, {}, {}
    for index in range(max(tokenizer.size, config.vocab_size, config.output_vocab_size)):
        token = tokenizer.token(index)
        if token is None or token in tokenizer._special_tokens:
            (span,) = tokenizer.token_spans([index])
            names[index] = [span.text, span.special]
            pieces.append(None)
            continue
        at_start, later = (tokenizer._spell(token, is_first).decode("latin-1") for is_first in (True, False))
        pieces.append(later)
        if at_start != later:
            first[index] = at_start
        if "\ufffd" in later.encode("latin-1").decode("utf-8", "replace"):
            parts[index] = token_text(index, tokenizer, config)
    return {"native": tokenizer.is_native, "pieces": pieces, "first": first, "names": names, "parts": parts}
