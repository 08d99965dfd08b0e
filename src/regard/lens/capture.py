"""The capture behind a look: one pass on the fast path with the recorder on; and a model's attentions by kind.

An attention is named by kind ("self", "cross", "encoder") and layer, other activations as ``models.sites`` lists them.
The pass stops at the last hidden states: logits of all positions are never formed. Attention depends on a text and not
on the search that wrote it, so one pass over the written text shows what every decoding step saw.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..attention import MultiHeadAttention, record
from ..attention.state_space import Mamba2
from ..attention.taps import Recorder
from ..foundation.checks import did_you_mean
from ..generation import GenerateConfig, Generated
from ..generation.generate import generate as generate_tokens
from ..generation.generate import inference
from ..generation.prompts import default_output_length, max_text_length
from ..generation.text_codec import resolve_config
from ..models import Model, Stack
from ..models.sites import HEADS, HookSite, full_name
from .capture_inputs import SourceInput, decode_ids, read_source, read_target_ids, read_token_ids, tokenizers
from .labels import Label, label_of_thing, numbered_labels, token_labels

if TYPE_CHECKING:
    from PIL.Image import Image

Head = tuple[str, int, int]  # (kind, layer, head)
GenerateOptions = Mapping[str, Any] | GenerateConfig  # a GenerateConfig or its fields


def hook_site(model: Model, name: str) -> HookSite:
    """The site of this name, which may be short: "decoder.blocks.3" for its output, see ``models.sites``."""
    sites = getattr(model, "_orig_mod", model).sites()
    if full_name(name) in sites:
        return sites[full_name(name)]
    have = [f"the {own} has {stack.n_layers} layers, 0 to {stack.n_layers - 1}" for own, stack in stacks(model).items()]
    near = did_you_mean(full_name(name), sites)
    raise ValueError(f"place={name!r} is none of model.sites(): {'; '.join(have) or 'it has no stack of layers'}{near}")


def stacks(model: Model) -> dict[str, Stack]:
    """The encoder and the decoder, as far as there are any; a recurrent model has neither."""
    both = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
    return {name: stack for name, stack in both.items() if isinstance(stack, Stack)}


def attention_sites(model: Model) -> dict[str, list[HookSite]]:
    """The attentions of each kind, one a layer; layers that share a module differ in ``call``."""
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    sites: dict[str, list[HookSite]] = {}
    for name, kind, _, module in model.attention_sites():
        layers = sites.setdefault(kind, [])
        layers.append(HookSite(name, HEADS, module, "heads", sum(site.owner is module for site in layers)))
    return sites


def attention_name(kind: str, layer: int) -> str:
    """The name of an attention as ``models.sites`` lists it: "decoder.blocks.3.cross_attention"."""
    stack, part = "encoder" if kind == "encoder" else "decoder", "cross_attention" if kind == "cross" else "attention"
    return f"{stack}.blocks.{layer}.{part}"


def attention_modules(model: Model) -> dict[str, list[nn.Module]]:
    """The modules of ``attention_sites``; layers that share a module have it several times."""
    return {kind: [site.owner for site in sites] for kind, sites in attention_sites(model).items()}


def resolve_kind(model: Model, kind: str | None) -> str:
    """The kind that was given, checked; for None the only one there is, or else "self"."""
    kinds = list(attention_sites(model))
    if not kinds:
        raise ValueError("this model has no attention weights in any of its layers")
    if kind is None:
        return kinds[0] if len(kinds) == 1 else "self"
    if kind not in kinds:
        raise ValueError(f"kind={kind!r} is not one of the kinds of attention this model has: {', '.join(kinds)}")
    return kind


def attention_site(model: Model, kind: str, layer: int, head: int = 0) -> HookSite:
    """The attention of one layer, which must have this head."""
    sites = attention_sites(model)[resolve_kind(model, kind)]
    checks = ("layer", layer, len(sites), "this model has"), ("head", head, n_heads_of(sites[0].owner), "there are")
    for name, number, total, have in checks:
        if not 0 <= number < total:
            where = f"the {kind} attention's {name}s: {have} {total}, 0 to {total - 1}"
            raise ValueError(f"{name}={number} is not one of {where}")
    return sites[layer]


def n_heads_of(module: nn.Module) -> int:
    """How many heads an attention has; a recurrent model's has one."""
    return module.n_heads if isinstance(module, MultiHeadAttention | Mamba2) else 1


@dataclass(frozen=True, eq=False)
class Capture:
    """The inputs of one pass, what the recorder kept of it, and labels for people."""

    inputs: tuple[Tensor, ...]  # (tokens,), (pixels,) or (source, target)
    states: Tensor  # the last hidden states (T, M), of the decoder where there is one
    sites: dict[str, list[tuple[str, int]]]  # by kind and layer: the recorder's name of the site, and the call there
    recorder: Recorder
    rows: dict[str, list[Label]]
    cols: dict[str, list[Label]]
    text: str | None = None
    target_text: str | None = None
    image: Image | None = None
    generated: Generated | None = None


def capture_look(model: Model, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    """Read the input, generate a continuation or a target where that is needed, and run the model once."""
    if not isinstance(model, Model):
        raise TypeError(f"regard.look takes a model of regard's or its directory, not {type(model).__name__}")
    run = _capture_encoder_decoder if model.is_encoder_decoder else _capture_encoder
    run = _capture_decoder if model.is_decoder_only else run
    with inference(model):
        return _name_attentions(model, run(model, what, target, generate))


def _capture_decoder(model: Any, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None:
        raise ValueError("target is for models with an encoder; a language model's text is all there is")
    ids, generated = read_token_ids(model, what, "text"), None
    if generate is not None:
        generated = _generate(model, [ids], None, generate)
        ids = [*generated.prompts[0], *generated.best[0].content]
    tokens = torch.tensor([ids], device=model.device)
    with record_attention(model, len(ids)) as recorder:
        states = model.hidden(tokens)[0]
    tokenizer = tokenizers(model)[0]
    labels = {"self": token_labels(ids, tokenizer, model.config)}
    text = what if isinstance(what, str) and generated is None else decode_ids(ids, tokenizer)
    return Capture((tokens,), states, {}, recorder, labels, labels, text, generated=generated)


def _capture_encoder(model: Any, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None or generate is not None:
        given = "target" if target is not None else "generate"
        raise ValueError(f"{given} is for models that write text; one with architecture='encoder' only reads")
    source = read_source(model, what)
    with record_attention(model, len(source.labels)) as recorder:
        states = model.hidden(source.values)[0]
    labels = {"encoder": source.labels}
    return Capture((source.values,), states, {}, recorder, labels, labels, source.text, image=source.image)


def _capture_encoder_decoder(model: Any, what: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None and generate is not None:
        raise ValueError("target and generate are both given: the target is either known or to be written")
    source, generated, eos_id = read_source(model, what), None, model.config.eos_id
    if target is None:
        prompts = source.values if model.config.source != "text" else source.values.tolist()
        generated = _generate(model, prompts, source, {} if generate is None else generate)
        fed, has_end = [*generated.prompts[0], *generated.best[0].content], generated.best[0].finish == "end"
    else:
        fed, has_end = read_target_ids(model, target), True
    tokens = torch.tensor([fed], device=model.device)
    with record_attention(model, max(len(source.labels), len(fed))) as recorder:
        states = model.hidden(source.values, tokens)[0]
    tokenizer = tokenizers(model)[1]
    read = token_labels(fed, tokenizer, model.config)
    # A row of cross-attention is named by the token that is written after it.
    written = token_labels([*fed[1:], *([eos_id] if has_end and eos_id is not None else [])], tokenizer, model.config)
    if len(written) < len(fed):
        written.append(label_of_thing("…", len(written), special=True))
    rows = {"encoder": source.labels, "self": read, "cross": written}
    cols = {"encoder": source.labels, "self": read, "cross": source.labels}
    target_text = target if isinstance(target, str) else decode_ids(fed, tokenizer)
    inputs = (source.values, tokens)
    return Capture(inputs, states, {}, recorder, rows, cols, source.text, target_text, source.image, generated)


def _name_attentions(model: Model, capture: Capture) -> Capture:
    """The capture with the sites of the kinds of attention that were recorded in every layer."""
    recorded = capture.recorder.attentions
    sites = {
        kind: [(site.name, site.call) for site in layers]
        for kind, layers in attention_sites(model).items()
        if all(site.name in recorded for site in layers)
    }
    if not sites:
        how = f"mixer={model.config.mixer!r}" if not model.is_recurrent else "alignment='none'"
        raise ValueError(f"this model has no attention to look at: it is built with {how}")
    cols = dict(capture.cols)
    for kind, ((name, call), *_) in sites.items():
        k = recorded[name][call].k
        if k is not None and k.shape[2] != len(cols[kind]):  # Linformer attends to sums of keys
            cols[kind] = numbered_labels("summary", k.shape[2])
    return replace(capture, sites=sites, cols=cols)


def write_target(model: Model, source: Any) -> list[int]:
    """What an encoder-decoder writes greedily for one source, as its decoder is fed it."""
    limit = max(1, max_text_length(model.config, target=True) - 1)
    if model.config.source == "text":
        limit = default_output_length(model.config, len(source[0]), multiple=1)
    generated = generate_tokens(model, source, GenerateConfig(max_new_tokens=limit))
    return [*generated.prompts[0], *generated.best[0].content]


def _generate(model: Model, prompts: Any, source: SourceInput | None, options: GenerateOptions) -> Generated:
    if isinstance(options, GenerateConfig):
        return generate_tokens(model, prompts, options)
    fields = dict(options)
    if source is not None and model.config.source == "text":
        fields.setdefault("max_new_tokens", default_output_length(model.config, len(source.labels), multiple=1))
    elif source is not None:  # a caption may be as long as the decoder can hold
        fields.setdefault("max_new_tokens", max(1, max_text_length(model.config, target=True) - 1))
    config, strings = resolve_config(model, None, fields)
    return generate_tokens(model, prompts, config, strings=strings)


_recorder_lock = threading.Lock()


@contextmanager
def record_attention(model: nn.Module, n_tokens: int) -> Iterator[Recorder]:
    """Record q and k inside the block. A process has one recorder, so a second look waits for the first."""
    with _recorder_lock, return_freed_memory(n_tokens), record(model, values=False) as recorder:
        yield recorder


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_DEFAULT_MMAP_THRESHOLD = 32 << 20  # what glibc adapts to after the first large tensors


@contextmanager
def return_freed_memory(n_tokens: int) -> Iterator[None]:
    """Inside the block glibc maps large tensors one by one, so that freed memory goes back to the system at once.

    On its heap the tensors that a look keeps lie between temporary ones, and the holes stay allocated: 100 MB and more
    at 4,096 tokens. Short texts and other C libraries change nothing.
    """
    mallopt = _mallopt() if n_tokens >= 1024 else None
    if mallopt is None:
        yield
        return
    mallopt(_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_TRIM_THRESHOLD, 2 * _DEFAULT_MMAP_THRESHOLD)
        mallopt(_MMAP_THRESHOLD, _DEFAULT_MMAP_THRESHOLD)


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018 — other C libraries give these numbers other meanings, or none
        return library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
