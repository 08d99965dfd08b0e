"""``tag``: a tag for every word of a text, and the entities that the tags mark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..models import Model, ModelOrPath, open_model
from ..text.words import entity_spans, has_entities, split_words
from .cached_engine import check_logits
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
    first: int  # index of its first word
    last: int  # index of its last word, inclusive
    probability: float  # the lowest of its words' tags


@dataclass(frozen=True)
class TaggedWords:
    """The words of a text, each with its tag and that tag's probability."""

    words: list[str]
    tags: list[str]
    probabilities: list[float]

    @property
    def entities(self) -> list[Entity]:
        """The entities spelled by tags B-X, I-X and O; empty for other tags."""
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
    """Tag the words of one or several texts; a text may be a list of its words.

    ``truncate`` shortens texts that are too long, which are errors otherwise. Words beyond the cut and words without a
    token get probability 0 and the tag O, or the first tag if there is no O.
    """
    model = open_model(model)
    check_can_tag(model)
    tokenizer, names = ModelTokenizers(model).source, class_names(model)
    outside = "O" if "O" in names else names[0]
    batch_texts = [texts] if isinstance(texts, str) else texts
    sentences = [split_words(text) if isinstance(text, str) else list(text) for text in batch_texts]
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
            best, choices = (x.cpu() for x in logits.softmax(-1).max(-1))
            for index, row, tags in zip(batch, best, choices.tolist(), strict=True):
                probabilities = check_logits(row[: lengths[index]]).tolist()
                tokens = [token if token < lengths[index] else -1 for token in encoded[index][1]]  # of each word
                word_tags = [names[tags[token]] if token >= 0 else outside for token in tokens]
                word_probabilities = [probabilities[token] if token >= 0 else 0.0 for token in tokens]
                results[index] = TaggedWords(sentences[index], word_tags, word_probabilities)
    return [result for result in results if result is not None]


def check_can_tag(model: Model) -> None:
    """Raise unless the model has a tagging head."""
    if model.config.head != "tag":
        raise ValueError(f"this model has head={model.config.head!r}, but tagging needs head='tag'")
