"""The output formats of classes, labels, numbers and tags: a line of text, cells of a table, a JSON object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..models import Model
from ..text.words import split_words
from .bulk_prediction import Answer, Answerer, image_check, text_check
from .tag_words import tag
from .text_codec import ModelTokenizers
from .text_generation import check_reads_single_texts, class_names, classify


def label_answerer(
    model: Model,
    *,
    truncate: bool = False,
    top: int = 1,
    probabilities: bool = False,
    threshold: float | None = None,
    has_pairs: bool = False,
) -> Answerer:
    """The answers of a classifier or tagger. With ``has_pairs``, an input is two texts separated by a tab."""
    is_number, is_tagger = model.config.problem_type == "regression", model.config.head == "tag"
    given = {"top": top if top > 1 else None, "probabilities": probabilities or None, "threshold": threshold}
    extra = [f"{name}={value}" for name, value in given.items() if value is not None]
    if extra and (is_number or is_tagger):
        raise ValueError(f"{extra[0]} is for classes, which this model does not predict")
    if has_pairs and (is_tagger or model.config.source == "image"):
        raise ValueError(f"this model reads one {model.config.source} at a time, not pairs of texts")
    if is_tagger:
        return _tag_answerer(model, truncate)
    if not has_pairs:
        check_reads_single_texts(model)
    label_threshold = 0.5 if threshold is None else threshold

    def answer(inputs: list[str]) -> list[Answer]:
        texts = [_split_pair(text) for text in inputs] if has_pairs else inputs
        return [to_answer(result) for result in classify(model, texts, truncate=truncate, threshold=label_threshold)]

    def cells(answer: Answer) -> dict[str, Any]:
        return {**label_cells(answer), **{f"p_{name}": p for name, p in answer.get("all", {}).items()}}

    to_answer, label_cells, line, new_columns = _FORMATS[model.config.problem_type](threshold, top)
    if probabilities and not is_number:
        new_columns |= {f"p_{name}": float for name in class_names(model)}
    blank: Answer = {"value": None} if is_number else {"label": None, "labels": [], "probability": None, "all": {}}
    return Answerer(answer, blank, new_columns, cells, line, _check(model, truncate, has_pairs))


# A result as an answer, an answer as cells and as a line, and the new columns of a table.
Format = tuple[Callable[[Any], Answer], Callable[[Answer], dict[str, Any]], Callable[[Answer], str], dict[str, type]]


def _one_class(threshold: float | None, top: int) -> Format:
    """The most likely class and its probability; no class if that is below the threshold."""

    def to_answer(result: Any) -> Answer:
        is_sure = threshold is None or result.probability >= threshold
        return {"label": result.label if is_sure else None, "probability": result.probability, "all": result.all}

    def line(answer: Answer) -> str:
        ranked = list(answer["all"].items())[:top]
        if ranked and answer["label"] is None:
            ranked[0] = ("", ranked[0][1])
        return "\t".join(f"{label}\t{p:.4f}" for label, p in ranked)

    def cells(answer: Answer) -> dict[str, Any]:
        return {"predicted_label": answer["label"], "probability": answer["probability"]}

    return to_answer, cells, line, {"predicted_label": str, "probability": float}


def _many_labels(threshold: float | None, top: int) -> Format:
    """The predicted labels with their probabilities; with ``top`` above 1, the most likely ones, predicted or not."""

    def line(answer: Answer) -> str:
        if top > 1:
            return "\t".join(f"{label}\t{p:.4f}" for label, p in list(answer["all"].items())[:top])
        probabilities = ";".join(f"{answer['all'][label]:.4f}" for label in answer["labels"])
        return f"{';'.join(answer['labels'])}\t{probabilities}" if answer["all"] else ""

    def cells(answer: Answer) -> dict[str, Any]:
        return {"predicted_labels": ";".join(answer["labels"])}

    return lambda result: {"labels": list(result.labels), "all": result.all}, cells, line, {"predicted_labels": str}


def _number(threshold: float | None, top: int) -> Format:
    def line(answer: Answer) -> str:
        return "" if answer["value"] is None else f"{answer['value']:.6g}"

    def cells(answer: Answer) -> dict[str, Any]:
        return {"predicted_value": answer["value"]}

    return lambda result: {"value": result.value}, cells, line, {"predicted_value": float}


_FORMATS: dict[str, Callable[[float | None, int], Format]] = {
    "single_label": _one_class,
    "multi_label": _many_labels,
    "regression": _number,
}


def _tag_answerer(model: Model, truncate: bool) -> Answerer:
    """``Anna/B-PER lives/O`` as a line; the tags separated by spaces as a cell."""

    def answer(texts: list[str]) -> list[Answer]:
        results = tag(model, texts, truncate=truncate)
        return [{**asdict(result), "entities": [asdict(entity) for entity in result.entities]} for result in results]

    def line(answer: Answer) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(answer["words"], answer["tags"], strict=True))

    tokenizer = ModelTokenizers(model).source
    check = text_check(
        lambda texts: [tokenizer.encode_words(split_words(text))[0] for text in texts], model.config, truncate
    )
    blank: Answer = {"words": [], "tags": [], "probabilities": [], "entities": []}
    columns = {"predicted_tags": str}
    return Answerer(answer, blank, columns, lambda answer: {"predicted_tags": " ".join(answer["tags"])}, line, check)


def _check(model: Model, truncate: bool, has_pairs: bool) -> Callable[[str], bool]:
    """The ``Answerer.check`` for the inputs of a classifier."""
    if model.config.source == "image":
        return image_check
    tokenizers = ModelTokenizers(model)
    if has_pairs:
        encode = tokenizers.source.encode_pairs
        return text_check(lambda texts: list(encode(map(_split_pair, texts))), model.config, truncate)
    return text_check(lambda texts: tokenizers.encode_inputs(texts, "text"), model.config, truncate)


def _split_pair(text: str) -> tuple[str, str]:
    first, _, second = text.partition("\t")
    if not first.strip() or not second.strip():
        raise ValueError("one of the two texts of the pair is empty")
    return first, second
