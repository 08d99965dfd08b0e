"""How classes, labels, numbers and tags are written down: a line of text, cells of a table, an object of JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from ..models import Model
from ..text.words import split_words
from .bulk_prediction import Answer, Answerer, image_check, text_check
from .tag_words import tag
from .text_codec import ModelTokenizers
from .text_generation import class_names, classify


def label_answerer(
    model: Model,
    *,
    truncate: bool = False,
    top: int = 1,
    probabilities: bool = False,
    threshold: float | None = None,
    has_pairs: bool = False,
) -> Answerer:
    """The answers of a classifier or tagger. With ``has_pairs`` an input is two texts with a tab between them."""
    if model.config.head == "tag":
        return _tag_answerer(model, truncate)
    held = 0.5 if threshold is None else threshold

    def answer(inputs: list[str]) -> list[Answer]:
        read = [_split_pair(text) for text in inputs] if has_pairs else inputs
        return [write(found) for found in classify(model, read, truncate=truncate, threshold=held)]

    def cells(answer: Answer) -> dict[str, Any]:
        return {**own_cells(answer), **{f"p_{name}": chance for name, chance in answer.get("all", {}).items()}}

    is_number = model.config.problem_type == "regression"
    write, own_cells, line, new = _SHAPES[model.config.problem_type](threshold, top)
    new |= dict.fromkeys([f"p_{name}" for name in class_names(model)] if probabilities and not is_number else [], float)
    blank: Answer = {"value": None} if is_number else {"label": None, "labels": [], "probability": None, "all": {}}
    return Answerer(answer, blank, new, cells, line, _check(model, truncate, has_pairs))


Shape = tuple[Callable[[Any], Answer], Callable[[Answer], dict[str, Any]], Callable[[Answer], str], dict[str, type]]


def _one_class(threshold: float | None, top: int) -> Shape:
    """The likeliest class and its probability; no class where that is below the threshold."""

    def write(found: Any) -> Answer:
        is_sure = threshold is None or found.probability >= threshold
        return {"label": found.label if is_sure else None, "probability": found.probability, "all": found.all}

    def line(answer: Answer) -> str:
        ranked = list(answer["all"].items())[:top]
        if ranked and answer["label"] is None:
            ranked[0] = ("", ranked[0][1])
        return "\t".join(f"{label}\t{chance:.4f}" for label, chance in ranked)

    def cells(answer: Answer) -> dict[str, Any]:
        return {"predicted_label": answer["label"], "probability": answer["probability"]}

    return write, cells, line, {"predicted_label": str, "probability": float}


def _many_labels(threshold: float | None, top: int) -> Shape:
    """The labels that hold, with their probabilities; with ``top`` above 1, the likeliest, held or not."""

    def line(answer: Answer) -> str:
        if top > 1:
            return "\t".join(f"{label}\t{chance:.4f}" for label, chance in list(answer["all"].items())[:top])
        chances = ";".join(f"{answer['all'][label]:.4f}" for label in answer["labels"])
        return f"{';'.join(answer['labels'])}\t{chances}" if answer["all"] else ""

    def cells(answer: Answer) -> dict[str, Any]:
        return {"predicted_labels": ";".join(answer["labels"])}

    return lambda found: {"labels": list(found.labels), "all": found.all}, cells, line, {"predicted_labels": str}


def _number(threshold: float | None, top: int) -> Shape:
    def line(answer: Answer) -> str:
        return "" if answer["value"] is None else f"{answer['value']:.6g}"

    def cells(answer: Answer) -> dict[str, Any]:
        return {"predicted_value": answer["value"]}

    return lambda found: {"value": found.value}, cells, line, {"predicted_value": float}


_SHAPES: dict[str, Callable[[float | None, int], Shape]] = {
    "single_label": _one_class,
    "multi_label": _many_labels,
    "regression": _number,
}


def _tag_answerer(model: Model, truncate: bool) -> Answerer:
    """``Anna/B-PER lives/O``; of a table, the tags with spaces between them."""

    def answer(texts: list[str]) -> list[Answer]:
        found = tag(model, texts, truncate=truncate)
        return [{**asdict(each), "entities": [asdict(entity) for entity in each.entities]} for each in found]

    def line(answer: Answer) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(answer["words"], answer["tags"], strict=True))

    tokenizer = ModelTokenizers(model).source
    check = text_check(
        lambda texts: [tokenizer.encode_words(split_words(text))[0] for text in texts], model.config, truncate
    )
    blank: Answer = {"words": [], "tags": [], "probabilities": [], "entities": []}
    new = {"predicted_tags": str}
    return Answerer(answer, blank, new, lambda answer: {"predicted_tags": " ".join(answer["tags"])}, line, check)


def _check(model: Model, truncate: bool, has_pairs: bool) -> Callable[[str], bool]:
    """Whether an input will be cut; an error where it may not be."""
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
