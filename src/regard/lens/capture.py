"""The capture behind a look: one forward pass on the fast path that records q and k; and a model's attentions by kind.

An attention is named by kind ("self", "cross", "encoder") and layer, other activations as ``models.sites`` lists them.
The pass stops at the last hidden states, so the logits of all positions are never materialised. Attention depends only
on the text, not on the search that generated it: one pass over the finished text reproduces what every decode step saw.
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
from ..attention.state_space import StateSpaceMixer
from ..attention.taps import Recorder
from ..foundation.checks import did_you_mean
from ..generation import GenerateConfig, Generated
from ..generation.generate import generate as generate_tokens
from ..generation.generate import inference
from ..generation.prompts import default_output_length, max_text_length
from ..generation.text_codec import resolve_config
from ..generation.zero_shot import text_inputs
from ..models import Model, Stack, TwoTower
from ..models.sites import HEADS, HookSite, full_name
from .capture_inputs import SourceInput, decode_ids, read_source, read_target_ids, read_token_ids, tokenizers
from .labels import Label, label_of_thing, numbered_labels, patch_labels, token_labels

if TYPE_CHECKING:
    from PIL.Image import Image

Head = tuple[str, int, int]  # (kind, layer, head)
GenerateOptions = Mapping[str, Any] | GenerateConfig  # a GenerateConfig or its fields


def hook_site(model: Model, name: str) -> HookSite:
    """The hook site of this name, or of a short one ("decoder.blocks.3" is the block's output, see ``models.sites``).

    Raises ValueError for a derived site: it cannot be replaced.
    """
    sites = getattr(model, "_orig_mod", model).sites()
    if (site := sites.get(full_name(name))) is not None:
        if site.is_derived:
            why = f"it is computed from {' and '.join(site.sources)} when a record is read"
            raise ValueError(f"{site.name} cannot be replaced: {why}; patch {' or '.join(site.sources)} instead")
        return site
    sizes = [f"the {key} has {x.n_layers} layers, 0 to {x.n_layers - 1}" for key, x in stacks(model).items()]
    hint = did_you_mean(full_name(name), sites)
    where = "; ".join(sizes) or "this model has no stack of layers"
    raise ValueError(f"place={name!r} is not in model.sites(): {where}{hint}")


def stacks(model: Model) -> dict[str, Stack]:
    """The model's "encoder" and "decoder" stacks; a recurrent model has neither."""
    both = {name: getattr(model, name, None) for name in ("encoder", "decoder")}
    return {name: stack for name, stack in both.items() if isinstance(stack, Stack)}


def attention_sites(model: Model) -> dict[str, list[HookSite]]:
    """The attentions of each kind, one per layer; the sites of layers that share a module differ in ``call``."""
    model = getattr(model, "_orig_mod", model)  # a compiled model shares its modules with the one it wraps
    sites: dict[str, list[HookSite]] = {}
    for name, kind, _, module in model.attention_sites():
        layers = sites.setdefault(kind, [])
        layers.append(HookSite(name, HEADS, module, "heads", sum(site.owner is module for site in layers)))
    return sites


def attention_name(kind: str, layer: int) -> str:
    """The name of an attention in ``models.sites``: "decoder.blocks.3.cross_attention"."""
    stack = "encoder" if kind == "encoder" else "decoder"
    part = "cross_attention" if kind == "cross" else "attention"
    return f"{stack}.blocks.{layer}.{part}"


def attention_modules(model: Model) -> dict[str, list[nn.Module]]:
    """The modules of ``attention_sites``; a module that several layers share is listed once per layer."""
    return {kind: [site.owner for site in sites] for kind, sites in attention_sites(model).items()}


def resolve_kind(model: Model, kind: str | None) -> str:
    """Check a kind of attention; None stands for "self", or for the first kind of a model without "self"."""
    kinds = list(attention_sites(model))
    if not kinds:
        raise ValueError("this model has no attention weights in any of its layers")
    if kind is None:
        return "self" if "self" in kinds else kinds[0]
    if kind not in kinds:
        raise ValueError(f"kind={kind!r} is not one of the kinds of attention this model has: {', '.join(kinds)}")
    return kind


def resolve_layer(model: Model, kind: str | None, layer: int) -> tuple[str, int]:
    """A kind of attention, checked, and the index of a layer; a negative one counts from the end."""
    kind = resolve_kind(model, kind)
    n_layers = len(attention_sites(model)[kind])
    return kind, layer + n_layers if -n_layers <= layer < 0 else layer


def attention_site(model: Model, kind: str, layer: int, head: int = 0) -> HookSite:
    """The attention of one layer; layer and head are checked."""
    sites = attention_sites(model)[resolve_kind(model, kind)]
    for name, number, total in (("layer", layer, len(sites)), ("head", head, n_heads_of(sites[0].owner))):
        if not 0 <= number < total:
            plural = "" if total == 1 else "s"
            raise ValueError(f"{name}={number}: the {kind} attention has {total} {name}{plural}, 0 to {total - 1}")
    return sites[layer]


def n_heads_of(module: nn.Module) -> int:
    """The number of heads of an attention; that of a recurrent model has one."""
    return module.n_heads if isinstance(module, MultiHeadAttention | StateSpaceMixer) else 1


@dataclass(frozen=True, eq=False)
class Capture:
    """The inputs of one pass, the recorder with its q and k, and the labels of queries and keys."""

    inputs: tuple[Tensor, ...]  # (tokens,), (pixels,) or (source, target)
    states: Tensor  # last hidden states (T, M); those of the decoder if there is one
    sites: dict[str, list[tuple[str, int]]]  # kind → for each layer, the name and call under which it was recorded
    recorder: Recorder
    rows: dict[str, list[Label]]  # by kind: labels of the queries
    cols: dict[str, list[Label]]  # by kind: labels of the keys
    text: str | None = None
    target_text: str | None = None
    image: Image | None = None
    generated: Generated | None = None


def capture_look(model: Model, source: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    """Read the input, generate a continuation or a target if needed, and run the model once."""
    if not isinstance(model, Model):
        raise TypeError(f"regard.look takes a regard model or its directory, not {type(model).__name__}")
    if isinstance(model, TwoTower):
        run = _capture_two_tower
    elif model.is_decoder_only:
        run = _capture_decoder
    elif model.is_encoder_decoder:
        run = _capture_encoder_decoder
    else:
        run = _capture_encoder
    with inference(model):
        return _add_attention_sites(model, run(model, source, target, generate))


def _capture_decoder(model: Any, source: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None:
        raise ValueError("target is for models with an encoder; a language model reads one text only")
    ids, generated = read_token_ids(model, source, "text"), None
    if generate is not None:
        generated = _generate(model, [ids], None, generate)
        ids = [*generated.prompts[0], *generated.best[0].content]
    tokens = torch.tensor([ids], device=model.device)
    with record_attention(model, len(ids)) as recorder:
        states = model.hidden(tokens)[0]
    tokenizer = tokenizers(model)[0]
    labels = {"self": token_labels(ids, tokenizer, model.config)}
    text = source if isinstance(source, str) and generated is None else decode_ids(ids, tokenizer)
    return Capture((tokens,), states, {}, recorder, labels, labels, text, generated=generated)


def _capture_encoder(model: Any, source: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None or generate is not None:
        name = "target" if target is not None else "generate"
        raise ValueError(f"{name} is for models that write text; one with architecture='encoder' only reads")
    inputs = read_source(model, source)
    with record_attention(model, len(inputs.labels)) as recorder:
        states = model.hidden(inputs.values)[0]
    grids = getattr(model.encoder, "grids", ())  # a hierarchical encoder has one grid of patches per stage
    labels = {f"stage{number}": patch_labels(grid, grid, 0) for number, grid in enumerate(grids)}
    labels = labels or {"encoder": inputs.labels}
    return Capture((inputs.values,), states, {}, recorder, labels, labels, inputs.text, image=inputs.image)


def _capture_encoder_decoder(model: Any, source: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    if target is not None and generate is not None:
        raise ValueError("target and generate are both given: give the target or have it generated, not both")
    inputs, generated, eos_id = read_source(model, source), None, model.config.eos_id
    if target is None:
        prompts = inputs.values if model.config.source != "text" else inputs.values.tolist()
        generated = _generate(model, prompts, inputs, {} if generate is None else generate)
        ids, has_end = [*generated.prompts[0], *generated.best[0].content], generated.best[0].finish == "end"
    else:
        ids, has_end = read_target_ids(model, target), True
    tokens = torch.tensor([ids], device=model.device)
    with record_attention(model, max(len(inputs.labels), len(ids))) as recorder:
        states = model.hidden(inputs.values, tokens)[0]
    tokenizer = tokenizers(model)[1]
    read = token_labels(ids, tokenizer, model.config)
    # A row of self-attention is labelled by the token it reads, a row of cross-attention by the token it predicts.
    written = token_labels([*ids[1:], *([eos_id] if has_end and eos_id is not None else [])], tokenizer, model.config)
    if len(written) < len(ids):
        written.append(label_of_thing("…", len(written), special=True))
    rows = {"encoder": inputs.labels, "self": read, "cross": written}
    cols = {"encoder": inputs.labels, "self": read, "cross": inputs.labels}
    target_text = target if isinstance(target, str) else decode_ids(ids, tokenizer)
    tensors = (inputs.values, tokens)
    return Capture(tensors, states, {}, recorder, rows, cols, inputs.text, target_text, inputs.image, generated)


def _capture_two_tower(model: Any, source: Any, target: Any, generate: GenerateOptions | None) -> Capture:
    """Run the image tower over an image and, if there is a ``target``, the text tower over that text."""
    if generate is not None:
        raise ValueError("generate is for models that write text; one with architecture='two-tower' only reads")
    inputs = read_source(model, source)
    if target is None:
        with record_attention(model, len(inputs.labels)) as recorder:
            states = model.image_states(inputs.values)[0]
        labels = {"encoder": inputs.labels}
        return Capture((inputs.values,), states, {}, recorder, labels, labels, image=inputs.image)
    tokens, _ = text_inputs(model, [target])
    ids, tokenizer = tokens[0].tolist(), tokenizers(model)[1]
    with record_attention(model, max(len(inputs.labels), len(ids))) as recorder:
        model.image_states(inputs.values)
        states = model.text_states(tokens)[0]
    labels = {"encoder": inputs.labels, "self": token_labels(ids, tokenizer, model.config)}
    text = target if isinstance(target, str) else decode_ids(ids, tokenizer)
    return Capture((inputs.values, tokens), states, {}, recorder, labels, labels, None, text, inputs.image)


def _add_attention_sites(model: Model, capture: Capture) -> Capture:
    """Fill in ``capture.sites`` with the kinds of attention that were recorded in every layer."""
    recorded = capture.recorder.attentions
    sites = {
        kind: [(site.name, site.call) for site in layers]
        for kind, layers in attention_sites(model).items()
        if all(site.name in recorded for site in layers)
    }
    if not sites:
        field = "alignment" if model.is_recurrent else "mixer" if model.config.model_class is None else "model_class"
        how = f"{field}={getattr(model.config, field)!r}"
        raise ValueError(f"this model has no attention to look at: it is built with {how}")
    cols = dict(capture.cols)
    for kind, ((name, call), *_) in sites.items():
        k = recorded[name][call].k
        if k is not None and k.shape[2] != len(cols[kind]):  # Linformer attends to learned combinations of keys
            cols[kind] = numbered_labels("summary", k.shape[2])
    return replace(capture, sites=sites, cols=cols)


def write_target(model: Model, source: Any) -> list[int]:
    """The target ids that an encoder-decoder generates greedily for one source, as its decoder reads them."""
    limit = _default_target_length(model, len(source[0]))
    generated = generate_tokens(model, source, GenerateConfig(max_new_tokens=limit))
    return [*generated.prompts[0], *generated.best[0].content]


def _generate(model: Model, prompts: Any, source: SourceInput | None, options: GenerateOptions) -> Generated:
    if isinstance(options, GenerateConfig):
        return generate_tokens(model, prompts, options)
    fields = dict(options)
    if source is not None:
        fields.setdefault("max_new_tokens", _default_target_length(model, len(source.labels)))
    config, strings = resolve_config(model, None, fields)
    return generate_tokens(model, prompts, config, strings=strings)


def _default_target_length(model: Model, n_source: int) -> int:
    """The most tokens to generate for a source of ``n_source``; a caption may fill the decoder's maximum length."""
    if model.config.source == "text":
        return default_output_length(model.config, n_source, multiple=1)
    return max(1, max_text_length(model.config, target=True) - 1)


_recorder_lock = threading.Lock()


@contextmanager
def record_attention(model: nn.Module, n_tokens: int) -> Iterator[Recorder]:
    """Record q and k inside the ``with`` block. A process has one recorder, so a second look waits for the first."""
    with _recorder_lock, return_freed_memory(n_tokens), record(model, values=False) as recorder:
        yield recorder


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # malloc.h
_DEFAULT_MMAP_THRESHOLD = 32 << 20  # the maximum of glibc's dynamic threshold, reached after the first large tensors


@contextmanager
def return_freed_memory(n_tokens: int) -> Iterator[None]:
    """Have glibc allocate large tensors with mmap inside the block, so that freeing them returns memory to the system.

    On the heap, the tensors that a look keeps lie between temporary ones and the freed gaps stay allocated: 100 MB and
    more at 4,096 tokens. Does nothing for short texts or with another C library.
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
        library.gnu_get_libc_version  # noqa: B018 — AttributeError unless glibc; elsewhere the numbers mean other things
        return library.mallopt
    except (OSError, AttributeError, TypeError):
        return None
