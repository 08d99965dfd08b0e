"""One model, several engines, the library's own functions: the same settings give the same texts."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import tokenizers as hf
from tokenizers import decoders, models, pre_tokenizers

import regard
from export.translators import pairs, translator, writer
from models.small import small
from regard.export.ctranslate2_export import export_ctranslate2
from regard.export.engines import Ct2Engine, TorchEngine
from regard.models import Model
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer


def metaspace_writer() -> Model:
    """A language model whose tokenizer writes a space before every word, as SentencePiece does."""
    words = ["<pad>", "<s>", "</s>", *(f"▁w{n}" for n in range(28))]
    backend = hf.Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="▁w0"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model = small("gpt2")
    model.processor = Processor(source=Tokenizer(backend.to_str().encode(), "tokenizer.json"))
    return model


def test_what_follows_a_prompt_begins_with_its_space() -> None:
    model, prompts = metaspace_writer(), ["w3 w4", "w9"]
    wanted = regard.generate(model, prompts, max_new_tokens=4)
    assert any(text.startswith(" w") for text in wanted)
    assert TorchEngine(model).generate(prompts, max_new_tokens=4) == list(wanted)


def test_a_prompt_loses_its_end_token_in_an_engine_too() -> None:
    model, prompts = copy.deepcopy(writer()), [text for text, _ in pairs()[:3]]
    assert model.processor is not None
    model.processor = Processor(source=model.processor.target)
    found = TorchEngine(model).generate(prompts, max_new_tokens=8, beam=2)
    assert found == list(regard.generate(model, prompts, max_new_tokens=8, beam=2))


def test_translations_have_the_defaults_of_regard_translate() -> None:
    model = translator(head_bias=True)
    assert model.head is not None
    model.head.bias.data[model.config.eos_id] += 6.0  # type: ignore[index]  # texts end at different lengths
    texts = [text for text, _ in pairs()[:40]]
    wanted = list(regard.translate(model, texts))
    assert TorchEngine(model).translate(texts) == wanted
    assert wanted != list(regard.translate(model, texts, early_stopping=True))


def test_ctranslate2_refuses_to_stop_otherwise_than_it_does(tmp_path: Path) -> None:
    pytest.importorskip("ctranslate2")
    model = translator()
    export_ctranslate2(model, tmp_path)
    engine, texts = Ct2Engine(tmp_path, model.config, model.processor, threads=1), [text for text, _ in pairs()[:4]]
    with pytest.raises(
        ValueError, match="the ctranslate2 engine does not support early_stopping=False with beam=4; use True"
    ):
        engine.translate(texts, early_stopping=False)
    assert engine.translate(texts) == TorchEngine(model).translate(texts, early_stopping=True)
    assert engine.translate(texts, beam=1, early_stopping=False) == TorchEngine(model).translate(texts, beam=1)
