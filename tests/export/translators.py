"""Tiny models that read and write text: one that has learnt a few sentences by heart, so that BLEU means something."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from models.small import shaken
from regard.data import open_corpus
from regard.models import Model, build
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import train_tokenizer

QUICK: dict[str, Any] = {"n_shapes": 6, "compiled": False}  # of an export's certificate


@functools.cache
def pairs(count: int = 60) -> tuple[tuple[str, str], ...]:
    """Sentences and their translations, the shortest first."""
    corpus = open_corpus("en-ko")
    examples = [corpus.example("train", index) for index in range(count)]
    return tuple(sorted(((x.source, x.target) for x in examples), key=lambda pair: (len(pair[0]) + len(pair[1]), pair)))


@functools.cache
def tokenizers(joint: bool) -> tuple[Tokenizer, Tokenizer]:
    sources, targets = zip(*pairs(), strict=True)
    if joint:
        both = train_tokenizer([text for pair in pairs() for text in pair], "bpe", 360, "eos")
        return both, both
    return train_tokenizer(sources, "bpe", 360, "eos"), train_tokenizer(targets, "bpe", 360, "eos")


def translator(joint: bool = True, **fields: Any) -> Model:
    """Random weights, a real tokenizer."""
    source, target = tokenizers(joint)
    sizes: dict[str, Any] = {"d_model": 32, "n_heads": 4, "d_ff": 64, "n_layers": 2, "max_len": 64}
    ids = {"pad_id": source.pad_id, "bos_id": source.bos_id, "eos_id": source.eos_id}
    vocabularies = {"vocab_size": source.size, "target_vocab_size": None if joint else target.size}
    torch.manual_seed(0)
    model = build("transformer-tiny", **{**sizes, **ids, **vocabularies, "dropout": 0.0, **fields})
    model.processor = Processor(source=source, target=None if joint else target)
    return shaken(model).eval()


@functools.cache
def learned() -> Model:
    """A translator that knows twelve sentences by heart; nobody may change it."""
    source, target = tokenizers(True)
    model = translator(d_model=48, d_ff=96, max_len=80)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    rows = [(source.encode(a), [target.bos_id, *target.encode(b)]) for a, b in pairs()[:12]]
    width, height = max(len(a) for a, _ in rows), max(len(b) for _, b in rows)
    read = torch.tensor([a + [0] * (width - len(a)) for a, _ in rows])
    said = torch.tensor([b + [0] * (height - len(b)) for _, b in rows])
    optimiser = torch.optim.Adam(model.parameters(), lr=4e-3)
    for _ in range(400):
        logits = model(read, said[:, :-1], source_padding_mask=read != 0)
        loss = F.cross_entropy(logits.flatten(0, 1), said[:, 1:].flatten(), ignore_index=0)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if loss.item() < 0.004:
            return model.eval()
    raise AssertionError(f"the sentences were not learnt: the loss is {loss.item()}")


@functools.cache
def writer() -> Model:
    """A language model with a tokenizer; its weights are random."""
    tokenizer = train_tokenizer([text for pair in pairs() for text in pair], "bpe", 360, "bos-eos")
    torch.manual_seed(0)
    model = build(
        "gpt2",
        **{"vocab_size": tokenizer.size, "d_model": 32, "n_heads": 4, "d_ff": 64, "n_layers": 2, "max_len": 64},
        **{"pad_id": tokenizer.pad_id, "bos_id": tokenizer.bos_id, "eos_id": tokenizer.eos_id},
    )
    model.processor = Processor(target=tokenizer)
    return shaken(model).eval()
