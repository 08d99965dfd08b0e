"""Tiny models that read and write: each with a tokenizer trained here, saved and loaded as users would."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from PIL import Image

import regard
from models.small import shaken
from regard.models import Model
from regard.text.image_processor import ImageProcessor
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import TokenizerKind, train_tokenizer

LINES = [
    "the cat sat on the mat.",
    "a dog ran, and the cat ran too.",
    "주의력만 있으면 됩니다.",
    "고양이가 매트 위에 앉았다.",
    "ROMEO: what light through yonder window breaks?",
    "JULIET: o Romeo, Romeo!\nwherefore art thou Romeo?",
]
SIZES: dict[str, Any] = {"d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 32, "dropout": 0.0}
IDS = {"pad_id": 0, "bos_id": 1, "eos_id": 2}


def made(preset: str, processor: Processor | None, seed: int = 0, **fields: Any) -> Model:
    """A random model whose every parameter matters."""
    torch.manual_seed(seed)
    model = shaken(regard.build(preset, **{**SIZES, **IDS, "max_len": 96, **fields})).eval()
    model.processor = processor
    return model


def language_model(kind: TokenizerKind = "bpe", seed: int = 0, preset: str = "gpt2", **fields: Any) -> Model:
    tokenizer = train_tokenizer(LINES, kind, 300 if kind == "bpe" else None)
    return made(preset, Processor(source=tokenizer), seed, vocab_size=tokenizer.size, **fields)


def translator(preset: str = "transformer-base", joint: bool = True, **fields: Any) -> Model:
    source = train_tokenizer(LINES, "bpe", 300, "eos")
    target = None if joint else train_tokenizer(LINES[2:4], "chars", None, "eos")
    sizes = {"vocab_size": source.size, "target_vocab_size": None if target is None else target.size}
    return made(preset, Processor(source=source, target=target), **sizes, **fields)


def captioner(**fields: Any) -> Model:
    tokenizer = train_tokenizer(LINES, "bpe", 280, "eos")
    image = ImageProcessor((16, 16))
    sizes = {"vocab_size": tokenizer.size, "image_size": 16, "patch_size": 4, "max_target_len": 20}
    return made("captioner", Processor(target=tokenizer, image=image), **sizes, **fields)


def classifier(**fields: Any) -> Model:
    tokenizer = train_tokenizer(LINES, "bpe", 300, "bos-eos")
    labels = ("cats", "dogs", "plays")
    return made(
        "bert-base",
        Processor(source=tokenizer, labels=labels),
        vocab_size=tokenizer.size,
        **{"head": "classify", "n_classes": 3, **fields},
    )


def image_classifier(**fields: Any) -> Model:
    labels = ("red", "green", "blue")
    return made(
        "vit-tiny",
        Processor(image=ImageProcessor((16, 16)), labels=labels),
        n_classes=3,
        n_channels=3,
        image_size=16,
        patch_size=4,
        **fields,
    )


def tokenizer_of(model: Model) -> Tokenizer:
    return cast(Tokenizer, model.processor.target or model.processor.source)


def picture(path: Path, colour: tuple[int, int, int] = (200, 30, 30), size: tuple[int, int] = (20, 12)) -> Path:
    Image.new("RGB", size, colour).save(path)
    return path
