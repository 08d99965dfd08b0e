"""Text in, text out: ``generate``, ``translate``, ``caption``, ``classify`` and ``stream``, for one or many inputs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor

from ..data.batching import cut_pair, pair_segments
from ..models import Model, ModelOrPath, open_model
from .cached_engine import check_logits
from .constrained_search import Term
from .generate import Generated, inference, stream_tokens
from .generate import generate as generate_tokens
from .generation_config import GenerateConfig
from .glossary import Glossary, TermEncoder
from .prompts import (
    Rows,
    check_prompts,
    default_output_length,
    image_pixels,
    length_batches,
    max_text_length,
    pad_sources,
    read_inputs,
    source_tensors,
    token_rows,
)
from .speculative import DraftStatistics
from .stop_conditions import Decode, Finish, StopStrings, decode_after, first_stop_token, stop_prefix_start, text_pieces
from .text_codec import ModelTokenizers, Stop, is_chat, merge_config, resolve_config, split_stops

Messages = Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]]  # one chat or several


@dataclass(frozen=True)
class GeneratedText:
    """One generated text, without its prompt and without the end token or stop."""

    text: str
    score: float  # log P / length penalty, as in ``Hypothesis``
    finish: Finish  # the model's end token, a stop, or the limit
    tokens: list[int]  # the generated tokens, including those of a stop string but not the end token
    missing_terms: tuple[str, ...] = ()  # glossary terms that did not fit or cannot be encoded

    def with_missing(self, terms: Sequence[str]) -> GeneratedText:
        """A copy whose ``missing_terms`` are those of ``terms`` that the text does not contain."""
        return replace(self, missing_terms=tuple(term for term in terms if term not in self.text))


class GeneratedTexts(list[str]):
    """The best text of each prompt: a list of strings with details. Printing it prints the texts."""

    def __init__(self, n_best: Sequence[list[GeneratedText]], drafted: DraftStatistics | None = None) -> None:
        super().__init__(texts[0].text for texts in n_best)
        self.n_best = list(n_best)  # the texts of each prompt, best first
        self.drafted = drafted  # how many tokens of a draft model were accepted

    @property
    def best(self) -> list[GeneratedText]:
        return [texts[0] for texts in self.n_best]

    @property
    def scores(self) -> list[float]:
        return [text.score for text in self.best]

    @property
    def tokens(self) -> list[list[int]]:
        return [text.tokens for text in self.best]

    @property
    def finishes(self) -> list[Finish]:
        return [text.finish for text in self.best]

    def __str__(self) -> str:
        return "\n".join(self)


@overload
def generate(
    model: ModelOrPath, inputs: str | Sequence[str] | Messages, config: GenerateConfig | None = None, **fields: Any
) -> GeneratedTexts: ...
@overload
def generate(
    model: ModelOrPath,
    inputs: Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor],
    config: GenerateConfig | None = None,
    **fields: Any,
) -> Generated: ...
def generate(
    model: ModelOrPath,
    inputs: str | Rows | Messages,
    config: GenerateConfig | None = None,
    *,
    target: str | Rows | None = None,
    padding_mask: Tensor | None = None,
    draft: ModelOrPath | None = None,
    draft_tokens: int = 4,
    **fields: Any,
) -> GeneratedTexts | Generated:
    """Continue one or several prompts, or, with an encoder-decoder, write a target for one or several sources.

    model   a model or its path; the same for draft
    inputs  text, token ids or messages (``[{"role": "user", "content": "…"}]``, formatted by the model's chat
            template), or a list of one of these; token ids return ``Generated``, the others ``GeneratedTexts``;
            for an image encoder pixels (B, C, height, width) or regions (B, R, d_region)
    target  encoder-decoder: the beginning of the texts
    padding_mask    (B, T), True at the real tokens of a padded tensor
    draft   a smaller model with the same tokens that proposes draft_tokens at a time: the same texts, sooner (greedy
            only)
    fields  fields of GenerateConfig, instead of a config or on top of it; here ``stop`` may be a string or a list of
            strings, ``prefix`` a string, and ``logit_bias`` may have tokens as keys, spelled as in the vocabulary
    Many texts are split into batches of similar length. A text does not depend on the others in its batch.
    """
    model = open_model(model)
    if is_text(inputs) and padding_mask is not None:
        raise ValueError("padding_mask needs token ids as a tensor; texts have no padding")
    tokenizers = text_tokenizers(model) if is_text(inputs) else ModelTokenizers(model)
    config, strings = resolve_config(model, config, fields, tokenizers)
    beginnings = tokenizers.encode_beginning(target) if isinstance(target, str) else target
    options: dict[str, Any] = {"draft": _open_draft(model, draft), "draft_tokens": draft_tokens, "target": beginnings}
    if not is_text(inputs):
        return generate_tokens(model, inputs, config, padding_mask=padding_mask, strings=strings, **options)
    rows = tokenizers.encode_inputs(inputs)
    return _generate_batches(model, tokenizers, rows, config, strings, options)


def translate(
    model: ModelOrPath,
    texts: str | Sequence[str],
    config: GenerateConfig | None = None,
    *,
    beam: int | None = None,
    max_new_tokens: int | None = None,
    glossary: Glossary | Mapping[str, str] | None = None,
    source_language: str | None = None,
    target_language: str | None = None,
    **fields: Any,
) -> GeneratedTexts:
    """Translate one or several texts by beam search, with beam=4 unless a beam or a config is given.

    Without max_new_tokens, a translation may be about twice as long as its source. Fields as in ``generate``.
    glossary  terms and their translations: if a text contains a term, its translation contains the term's translation,
              placed where it is most likely (``constrained_search``) and scored without a length penalty unless one is
              given; ``missing_terms`` of a text are those that did not fit
    source_language, target_language  for multilingual models (mBART, M2M-100, NLLB), named as in their tokenizer:
              "eng_Latn", or "en"
    """
    model = open_model(model)
    check_can_translate(model)
    glossary = Glossary(glossary) if isinstance(glossary, Mapping) else glossary
    tokenizers = text_tokenizers(model)
    arguments = {"beam": beam, "max_new_tokens": max_new_tokens}
    fields |= {name: value for name, value in arguments.items() if value is not None}
    by_source = max_new_tokens is None and (config is None or "max_new_tokens" not in config.model_fields_set)
    options: dict[str, Any] = {name: fields.pop(name) for name in ("target", "draft", "draft_tokens") if name in fields}
    options["draft"] = _open_draft(model, options.get("draft"))
    if options["draft"] is None and config is None:
        fields = {"beam": default_beam(fields), **fields}
    if target_language is not None:  # the first token of the target
        beginning = tokenizers.encode_beginning(fields.get("prefix") or ())
        fields["prefix"] = (tokenizers.language_id(target_language), *beginning)
    config, strings = resolve_config(model, config, fields, tokenizers)
    if isinstance(options.get("target"), str):
        options["target"] = tokenizers.encode_beginning(options["target"])
    rows = tokenizers.encode_inputs(texts, "source")
    if source_language is not None:
        language = tokenizers.language_id(source_language)
        rows = [tokenizers.with_language(row, language) for row in rows]
    lengths = [default_output_length(model.config, len(row)) for row in rows]
    limits = [max(length, config.min_new_tokens) for length in lengths] if by_source else None
    if glossary is None:
        return _generate_batches(model, tokenizers, rows, config, strings, options, limits)
    if config.samples or config.groups > 1 or options["draft"] is not None:
        raise ValueError("glossary=… needs greedy or beam search, without sampling, groups or a draft")
    encoder = TermEncoder(tokenizers.target)
    required = [glossary.targets(text) for text in ([texts] if isinstance(texts, str) else texts)]
    terms = [encoder.terms(targets) for targets in required]
    options["in_word"] = encoder.in_word
    n_best = _generate_batches(model, tokenizers, rows, config, strings, options, limits, terms).n_best
    pairs = zip(n_best, required, strict=True)
    return GeneratedTexts([[text.with_missing(targets) for text in best] for best, targets in pairs])


def caption(
    model: ModelOrPath,
    images: Any,
    config: GenerateConfig | None = None,
    *,
    beam: int | None = None,
    max_new_tokens: int | None = None,
    **fields: Any,
) -> GeneratedTexts:
    """Caption one or several images: paths, Pillow images, arrays of bytes, or pixels (B, C, height, width).

    By beam search, with beam=4 unless a beam or a config is given; fields as in ``generate``.
    """
    model = open_model(model)
    check_can_caption(model)
    tokenizers, pixels = ModelTokenizers(model), image_pixels(model, images)
    arguments = {"beam": beam, "max_new_tokens": max_new_tokens}
    fields |= {name: value for name, value in arguments.items() if value is not None}
    if config is None:
        max_length = max_text_length(model.config, target=True) - 1
        fields = {"beam": default_beam(fields), "max_new_tokens": max_length, **fields}
    config, strings = resolve_config(model, config, fields, tokenizers)
    return _generate_batches(model, tokenizers, pixels, config, strings, {})


def stream(
    model: ModelOrPath,
    inputs: str | Rows | Messages,
    decode: Decode | None = None,
    config: GenerateConfig | None = None,
    *,
    stop: Stop | None = None,
    target: str | Rows | None = None,
    draft: ModelOrPath | None = None,
    draft_tokens: int = 4,
    **fields: Any,
) -> Iterator[str]:
    """The text for one prompt or source, piece by piece, without the end token and stop strings.

    A piece never ends within a character. ``decode`` defaults to the model's tokenizer. Fields as in ``generate``.
    """
    model, draft = open_model(model), None if draft is None else open_model(draft)
    fields |= {} if stop is None else {"stop": stop}
    if decode is None:
        tokenizers = text_tokenizers(model) if is_text(inputs) else ModelTokenizers(model)
        if is_text(inputs):
            inputs = tokenizers.encode_inputs(inputs)
        config, stop_strings = resolve_config(model, config, fields, tokenizers)
        strings = () if stop_strings is None else stop_strings.strings
        target = tokenizers.encode_beginning(target) if isinstance(target, str) else target
        before = inputs if tokenizers.continues_prompt else target
        decode = tokenizers.decode if before is None else decode_after(tokenizers.decode, token_rows(before)[0])
    else:
        strings, sequences = split_stops(fields.pop("stop", ()))
        config = merge_config(model, config, fields | ({"stop": sequences} if sequences else {}))
    tokens = stream_tokens(model, inputs, config, target=target, draft=draft, draft_tokens=draft_tokens)
    content = _drop_stop_tokens(tokens, model.config.eos_id, config)
    return text_pieces(content, decode, strings, first_stop_token(config))


def _drop_stop_tokens(tokens: Iterable[int], eos_id: int | None, config: GenerateConfig) -> Iterator[int]:
    """The tokens without the end token or the stop sequence that ends them."""
    pending: tuple[int, ...] = ()
    for token in tokens:
        if token == eos_id:
            yield from pending
            return
        pending = (*pending, token)
        ready = stop_prefix_start(pending, config.stop)
        yield from pending[:ready]
        pending = pending[ready:]
    ends = [len(stop) for stop in config.stop if pending[-len(stop) :] == stop]
    yield from pending[: len(pending) - max(ends, default=0)]


def is_text(inputs: Any) -> bool:
    """Whether the inputs are texts or chats rather than token ids or pixels."""
    if isinstance(inputs, str) or is_chat(inputs):
        return True
    return isinstance(inputs, list | tuple) and any(isinstance(x, str) or is_chat(x) for x in inputs)


def default_beam(fields: Mapping[str, Any]) -> int:
    """4 as in the paper, or 1 for sampling."""
    values = [fields.get(name) for name in ("sample", "temperature", "top_k", "top_p", "min_p")]
    return 4 if all(value is None or value is False for value in values) else 1


def text_tokenizers(model: Model) -> ModelTokenizers:
    """The tokenizers of a model that reads and writes text; raises for other models."""
    if model.config.source != "text":
        raise ValueError(f"this model reads source={model.config.source!r}, not text: regard.caption describes images")
    if model.config.architecture == "encoder":
        raise TypeError("a model with architecture='encoder' writes no text")
    return ModelTokenizers(model)


def check_texts(model: Model, texts: Sequence[str], truncate: bool = False) -> None:
    """Raise if any of the texts is too long or empty, before the first one is processed."""
    _check_rows(model, text_tokenizers(model).encode_inputs(texts), GenerateConfig(truncate=truncate))


def check_can_continue(model: Model) -> None:
    """Raise unless the model continues a text."""
    text_tokenizers(model)
    _check_kind(model, ("decoder",), "text", "continue a prompt")


def check_can_translate(model: Model) -> None:
    """Raise unless the model reads text with an encoder and writes text."""
    _check_kind(model, ("encoder-decoder", "recurrent"), "text", "translate texts")


def check_can_caption(model: Model) -> None:
    """Raise unless the model reads images and writes text."""
    _check_kind(model, ("encoder-decoder",), "image", "caption images")


def _check_kind(model: Model, architectures: tuple[str, ...], source: str, purpose: str) -> None:
    config = model.config
    if config.architecture not in architectures or config.source != source or config.head != "lm":
        kind = f"architecture={config.architecture!r}, source={config.source!r} and head={config.head!r}"
        raise ValueError(f"this model has {kind}: it does not {purpose}")


def _generate_batches(
    model: Model,
    tokenizers: ModelTokenizers,
    inputs: Tensor | list[list[int]],
    config: GenerateConfig,
    strings: StopStrings | None,
    options: dict[str, Any],
    limits: list[int] | None = None,
    terms: Sequence[Sequence[Term]] | None = None,
) -> GeneratedTexts:
    """The texts for rows of ids or for images, in their order; ``limits`` override max_new_tokens for each row.

    The target in ``options`` is one for all rows or one per row. Rows whose ``terms`` have equally many tokens share a
    search.
    """
    target = options.pop("target", None)
    targets = [] if target is None else token_rows(target, name="target")
    _check_rows(model, inputs, config, targets or None)
    limits = [config.max_new_tokens] * len(inputs) if limits is None else limits
    n_patches = (model.config.image_size // model.config.patch_size) ** 2
    lengths = [n_patches if isinstance(row, Tensor) else len(row) for row in inputs]
    texts: list[list[GeneratedText]] = [[] for _ in inputs]
    drafted = None
    term_sizes = [0] * len(inputs) if terms is None else [sum(term.size for term in row) for row in terms]
    for batch in _batches(model, config, lengths, limits, term_sizes):
        limited = config.with_(max_new_tokens=limits[batch[0]])
        selected = inputs[batch] if isinstance(inputs, Tensor) else [inputs[index] for index in batch]
        batch_terms = [terms[index] for index in batch] if terms is not None and term_sizes[batch[0]] else None
        batch_targets = [targets[index] for index in batch] if len(targets) > 1 else targets or None
        generated = generate_tokens(
            model, selected, limited, strings=strings, terms=batch_terms, target=batch_targets, **options
        )
        for index, hypotheses in zip(batch, decode_texts(generated, tokenizers, strings), strict=True):
            texts[index] = hypotheses
        if generated.drafted is not None:
            drafted = generated.drafted if drafted is None else drafted + generated.drafted
    return GeneratedTexts(texts, drafted)


def _batches(
    model: Model, config: GenerateConfig, lengths: list[int], limits: list[int], term_sizes: list[int]
) -> Iterator[list[int]]:
    """``length_batches`` of rows with equally many tokens in their terms, which determine the number of beams."""
    for size in sorted(set(term_sizes)):
        rows = [index for index, other in enumerate(term_sizes) if other == size]
        wide = config.with_(beam=config.beam * (1 + size)) if size else config
        for batch in length_batches(model, wide, [lengths[i] for i in rows], [limits[i] for i in rows]):
            yield [rows[i] for i in batch]


def decode_texts(
    generated: Generated, tokenizers: ModelTokenizers, strings: StopStrings | None
) -> list[list[GeneratedText]]:
    """Tokens as text, each decoded after its prompt."""
    texts = []
    for prompt, hypotheses in zip(generated.prompts, generated.hypotheses, strict=True):
        decode, decoded = decode_after(tokenizers.decode, prompt), []
        for hypothesis in hypotheses:
            content = hypothesis.content
            text = decode(content)
            if strings is not None:
                text = "".join(text_pieces(content, decode, strings.strings, strings.n_least))
            decoded.append(GeneratedText(text, hypothesis.score, hypothesis.finish, content))
        texts.append(decoded)
    return texts


def _check_rows(model: Model, inputs: Rows, config: GenerateConfig, targets: Rows | None = None) -> None:
    """Check all inputs before the first batch, so that an error has a text's number among all inputs."""
    if len(inputs):
        checked = read_inputs(model, inputs, config, target=targets)
        check_prompts(checked.rows, model.config, config, "prompt" if checked.sources is None else "target")


def _open_draft(model: Model, draft: ModelOrPath | None) -> Model | None:
    """The draft model, which must have the model's tokenizer."""
    if draft is None:
        return None
    draft = open_model(draft)
    processors = (model.processor, draft.processor)
    ours, theirs = (None if x is None else getattr(x.target or x.source, "content", None) for x in processors)
    if ours is not None and theirs is not None and ours != theirs:
        raise ValueError("the draft has a different tokenizer than the model")
    return draft


@dataclass(frozen=True)
class Classified:
    """The prediction for one input: its most likely class, its labels, or a number (see problem type)."""

    label: str  # as in a file: several labels are joined, a;b
    probability: float  # of the most likely label; NaN for a number
    all: dict[str, float]  # every class with its probability, most likely first
    labels: tuple[str, ...] = ()
    value: float | None = None


def classify(model: ModelOrPath, inputs: Any, *, truncate: bool = False, threshold: float = 0.5) -> list[Classified]:
    """Classify one or several texts (text or token ids) or images (as for ``caption``).

    A list of tuples is a list of text pairs. ``truncate`` shortens texts that are too long, which are errors otherwise.
    A multi-label model predicts the labels whose probability is above ``threshold``.
    """
    model = open_model(model)
    check_can_classify(model)
    with inference(model):
        if model.config.source == "image":
            dtype, pixels = next(model.parameters()).dtype, image_pixels(model, inputs)
            logits = torch.cat([model(part.to(model.device, dtype)).float().cpu() for part in pixels.split(64)])
        else:
            rows, separator = _encode_texts(model, inputs, truncate)
            sources = source_tensors(rows, None, model.config, truncate)
            logits, lengths = torch.zeros(len(sources), model.config.n_classes), [len(source) for source in sources]
            for batch in length_batches(model, GenerateConfig(), lengths, [0] * len(sources)):
                padded = pad_sources([sources[index] for index in batch], model)
                options = {} if separator is None else {"segments": pair_segments(padded.values, separator)}
                logits[batch] = model(padded.values, padding_mask=padded.padding_mask, **options).float().cpu()
    return rank_classes(model, check_logits(logits), threshold)


def _encode_texts(model: Model, inputs: Any, truncate: bool) -> tuple[Any, int | None]:
    """Token ids of texts or text pairs; for pairs, also the separator token if the model has segments."""
    tokenizers = ModelTokenizers(model)
    if isinstance(inputs, list) and inputs and all(isinstance(x, tuple) and is_text(x) for x in inputs):
        rows, separator = list(tokenizers.source.encode_pairs(inputs)), tokenizers.source.separator_id
        max_len = max_text_length(model.config)
        if truncate and separator is not None:
            rows = [cut_pair(row, separator, max_len) for row in rows]
        return rows, separator if model.config.n_segments > 1 else None
    if is_text(inputs):
        check_reads_single_texts(model)
    return tokenizers.encode_inputs(inputs, "text") if is_text(inputs) else inputs, None


def check_reads_single_texts(model: Model) -> None:
    """Raise ValueError if the model is a classifier of pairs of texts."""
    if model.processor is not None and model.processor.reads_pairs:
        raise ValueError("this model reads pairs of texts: give the second text, too")


def rank_classes(model: Model, logits: Tensor, threshold: float = 0.5) -> list[Classified]:
    """The prediction for each row of logits (N, classes); a multi-label one has the labels above ``threshold``."""
    names, problem_type, results = class_names(model), model.config.problem_type, []
    if problem_type == "regression":
        return [Classified(f"{value:.6g}", math.nan, {}, value=value) for value in logits[:, 0].tolist()]
    is_single = problem_type == "single_label"
    for probabilities in (logits.softmax(-1) if is_single else logits.sigmoid()).tolist():
        ranked = sorted(zip(names, probabilities, strict=False), key=lambda pair: -pair[1])
        above = tuple(name for name, p in zip(names, probabilities, strict=False) if p > threshold)
        labels = (ranked[0][0],) if is_single else above
        results.append(Classified(";".join(labels), ranked[0][1], dict(ranked), labels))
    return results


def check_can_classify(model: Model) -> None:
    """Raise unless the model has a classification head."""
    if model.config.architecture == "two-tower":
        raise ValueError("this model needs the names of the classes: --classes NAMES, or regard.zero_shot in Python")
    if model.config.head != "classify":
        raise ValueError(f"this model has head={model.config.head!r}, but classification needs head='classify'")


def class_names(model: Model) -> Sequence[str]:
    """The names of the classes; without names, the default ones of transformers."""
    labels = None if model.processor is None else model.processor.labels
    return labels or [f"LABEL_{index}" for index in range(model.config.n_classes)]
