"""A page that runs its model: exported, opened in Chromium or Node.js, compared with the model."""

from __future__ import annotations

import base64
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import regard
from generation.spoken import captioner, classifier, image_classifier, language_model
from regard.errors import RegardError
from regard.export import web_certificate, web_runtime
from regard.text import Processor
from regard.text.tokenizer_training import train_tokenizer

TEXTS = [
    "the cat sat on the mat",
    "a dog saw the cat",
    "the dog ran, and the cat slept",
    "고양이가 잤다",
    "개가 고양이를 보았다",
]


def small_translator() -> regard.Model:
    tokenizer = train_tokenizer(TEXTS, "bpe", 300)
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_len": 32, "vocab_size": tokenizer.size}
    model = regard.build("transformer-tiny", **sizes).eval()
    model.processor = Processor(tokenizer, tokenizer)
    return model


def test_a_page_is_its_model(tmp_path: Path) -> None:
    folder = regard.export(small_translator(), "web", tmp_path / "page", n_shapes=3)
    certificate = json.loads((folder / "certificate.json").read_bytes())
    rows = {row["name"]: row for row in certificate["comparisons"]}
    assert rows["page tokens"]["same_text"] == rows["page"]["same_text"] == 1.0
    assert rows["page weights"]["max_abs"] < 1e-5
    index = (folder / "index.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in index
    assert "https:" not in index
    assert not (folder / "static" / "page" / "compare.mjs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("make", [language_model, classifier, image_classifier, captioner])
def test_pages_of_other_families(make: Callable[[], regard.Model], tmp_path: Path) -> None:
    folder = regard.export(make(), "web", tmp_path / "page", n_shapes=2)
    rows = {row["name"]: row for row in json.loads((folder / "certificate.json").read_bytes())["comparisons"]}
    assert rows["page tokens"]["same_text"] == rows["page"]["same_text"] == 1.0
    assert rows["page weights"]["max_abs"] < 1e-5


def test_a_page_stands_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory of its own"):
        regard.export(small_translator(), ["web", "onnx"], tmp_path / "page")


def test_a_folder_without_the_libraries(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match="has no onnxruntime-web"):
        web_runtime.find_runtime(tmp_path)


def test_a_program_that_says_much_and_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a pipe holds: a program whose pipe is full waits for ever."""
    monkeypatch.setattr(web_certificate, "_TIMEOUT_S", 20)
    script = "import sys; sys.stderr.write('x' * 300_000 + ' no display'); sys.exit(3)"
    with pytest.raises(RegardError, match=r"ended without an answer: x+ no display$"):
        web_certificate._await_answer([sys.executable, "-c", script], {"answered": threading.Event(), "answers": []})


def test_numbers_that_are_none_are_far_from_any() -> None:
    packed = base64.b64encode(np.array([1.0, np.nan], "<f4").tobytes()).decode()
    assert web_certificate._distance(packed, torch.tensor([1.0, 2.0])) > 1e30
    assert web_certificate._distance(packed, torch.tensor([1.0])) > 1e30
    same = base64.b64encode(np.array([1.0, 2.5], "<f4").tobytes()).decode()
    assert web_certificate._distance(same, torch.tensor([1.0, 2.0])) == 0.5
