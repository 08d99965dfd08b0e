"""Attention whose weights are known because they were put there, and models that read the embedded corpora."""

from __future__ import annotations

from functools import cache
from itertools import islice

import torch
from torch import Tensor

from generation.spoken import made
from regard.attention import AttentionMap
from regard.data.corpora import examples, open_corpus
from regard.models import Model
from regard.text.image_processor import ImageProcessor
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer


def map_of(weights: Tensor) -> AttentionMap:
    """A map whose weights are these, (H, T, S) with rows that sum to 1: scores that are their logarithms."""
    n_heads, _, n_keys = weights.shape
    keys = torch.eye(n_keys).expand(1, n_heads, -1, -1)
    return AttentionMap(weights.clamp(min=1e-30).log()[None], keys, scale=1.0)


def pointing_at(targets: list[int], n_keys: int, n_heads: int = 1) -> Tensor:
    """Rows that look at one key each, (H, T, S)."""
    return torch.nn.functional.one_hot(torch.tensor(targets), n_keys).float().expand(n_heads, -1, -1)


@cache
def en_ko_translator(preset: str = "transformer-base", kind: str = "bpe") -> Model:
    """Untrained, but with tokenizers that know the corpus."""
    pairs = [(x.source, x.target) for x in islice(examples(open_corpus("en-ko"), "train"), 400)]
    size = 500 if kind == "bpe" else None
    source, target = (train_tokenizer(side, kind, size, "eos") for side in zip(*pairs, strict=True))  # type: ignore[arg-type]
    sizes = {"vocab_size": source.size, "target_vocab_size": target.size}
    return made(preset, Processor(source=source, target=target), **sizes)


@cache
def shapes_captioner() -> Model:
    texts = [x.caption for x in islice(examples(open_corpus("shapes"), "train"), 300)]
    tokenizer = train_tokenizer(texts, "words", None, "eos")
    sizes = {"vocab_size": tokenizer.size, "image_size": 64, "patch_size": 8, "max_target_len": 40}
    return made("captioner", Processor(target=tokenizer, image=ImageProcessor((64, 64))), **sizes)
