"""``tag``: a tag for every word of a text, and the entities they spell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..models import Model, ModelOrPath, open_model
from ..text.words import entity_spans, has_entities, split_words
from .generate import inference
from .generation_config import GenerateConfig
from .prompts import length_batches, pad_sources, source_tensors
from .text_codec import ModelTokenizers
from .text_generation import class_names


@dataclass(frozen=True)
class Entity:
    """Consecutive words that name one thing."""

    type: str
    text: str
    first: int  # its words: first to last, inclusive
    last: int
    probability: float  # the least of its words' tags


@dataclass(frozen=True)
class TaggedWords:
    """The words of a text, each with its tag and that tag's probability."""

    words: list[str]
    tags: list[str]
    probabilities: list[float]

    @property
    def entities(self) -> list[Entity]:
        """Where tags are B-X, I-X and O."""
        spans = entity_spans(self.tags) if has_entities(self.tags) else []
        return [
            Entity(kind, " ".join(self.words[a : b + 1]), a, b, min(self.probabilities[a : b + 1]))
            for kind, a, b in spans
        ]

    def __str__(self) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(self.words, self.tags, strict=True))


def tag(
    model: ModelOrPath, texts: str | Sequence[str] | Sequence[Sequence[str]], *, truncate: bool = False
) -> list[TaggedWords]:
    """The tags of one text or of several; a text may come as a list of its words.

    ``truncate`` cuts too long a text short, which is otherwise an error; words past the cut, and words without a token,
    get the tag O, or the first one, with probability 0.
    """
    model = open_model(model)
    check_can_tag(model)
    tokenizer, names = ModelTokenizers(model).source, class_names(model)
    outside = "O" if "O" in names else names[0]
    several = [texts] if isinstance(texts, str) else texts
    sentences = [split_words(x) if isinstance(x, str) else list(x) for x in several]
    for index, words in enumerate(sentences):
        if not words:
            raise ValueError(f"text {index} is empty: there is nothing to tag")
    encoded = [tokenizer.encode_words(words) for words in sentences]
    results: list[TaggedWords | None] = [None] * len(sentences)
    with inference(model):
        sources = source_tensors([ids for ids, _ in encoded], None, model.config, truncate) if encoded else []
        lengths = [len(source) for source in sources]
        for batch in length_batches(model, GenerateConfig(), lengths, [0] * len(sources)):
            padded = pad_sources([sources[index] for index in batch], model)
            logits = model(padded.values, padding_mask=padded.padding_mask).float()
            best = torch.max(logits.softmax(-1), dim=-1)
            for index, chances, tags in zip(batch, best.values.tolist(), best.indices.tolist(), strict=True):
                places = [p if p < lengths[index] else -1 for p in encoded[index][1]]
                said = [(names[tags[p]], chances[p]) if p >= 0 else (outside, 0.0) for p in places]
                results[index] = TaggedWords(sentences[index], [x for x, _ in said], [p for _, p in said])
    return [result for result in results if result is not None]


def check_can_tag(model: Model) -> None:
    """Raise unless the model has a head for tags."""
    if model.config.head != "tag":
        raise ValueError(f"this model has head={model.config.head!r}; only with head='tag' does it tag words")
