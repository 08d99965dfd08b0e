"""Models for many languages: the token of the source's language before it, that of the target's written first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers, processors

import regard
from regard.cli import main

WORDS = ["<s>", "<pad>", "</s>", "<unk>", *"abcdefghij", "__en__", "__ko__", "__fr__"]
LANGUAGES = {name: WORDS.index(f"__{name}__") for name in ("en", "ko", "fr")}
SIZES: dict[str, Any] = {
    **{"vocab_size": len(WORDS), "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 24},
    **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 24, "pad_token_id": 1},
    **{"bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "max_position_embeddings": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random M2M-100 whose tokenizer marks texts as English unless told otherwise."""
    path = tmp_path_factory.mktemp("m2m")
    torch.manual_seed(0)
    model = hf.M2M100ForConditionalGeneration(hf.M2M100Config(**SIZES, init_std=0.5))
    model.save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.add_special_tokens([word for word in WORDS if len(word) > 1])
    ends: list[Any] = [("__en__", LANGUAGES["en"]), ("</s>", 2)]
    words.post_processor = processors.TemplateProcessing(single="__en__ $A </s>", special_tokens=ends)
    words.save(str(path / "tokenizer.json"))
    return path


@torch.no_grad()
@pytest.mark.parametrize("beam", [1, 3])
def test_translations_are_theirs(folder: Path, beam: int) -> None:
    theirs, ours = hf.M2M100ForConditionalGeneration.from_pretrained(folder).eval(), regard.load(folder)
    for source, target in (("en", "ko"), ("fr", "en")):
        ids = torch.tensor([[LANGUAGES[source], *(WORDS.index(x) for x in "bdf"), 2]])
        settings: dict[str, Any] = {"num_beams": beam, "max_new_tokens": 6, "do_sample": False, "early_stopping": False}
        told = theirs.generate(ids, forced_bos_token_id=LANGUAGES[target], length_penalty=1.0, **settings)[0].tolist()
        languages: dict[str, Any] = {"source_language": source, "target_language": target}
        got = regard.translate(ours, "b d f", beam=beam, max_new_tokens=6, length_penalty=1.0, **languages).best[0]
        written = [x for x in told[1:] if x not in (1, 2)]
        assert written[0] == LANGUAGES[target]
        assert got.text.split() == [WORDS[x] for x in written if len(WORDS[x]) == 1]


def test_the_command_line_takes_languages(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["translate", str(folder), "b d f", "--max-new-tokens", "6", "--beam", "1", "--json", "--device", "cpu"]
    assert main([*words, "--from", "fr", "--to", "__ko__"]) == 0
    document = json.loads(capsys.readouterr().out)
    languages: dict[str, Any] = {"source_language": "fr", "target_language": "ko"}
    expected = regard.translate(folder, "b d f", beam=1, max_new_tokens=6, **languages).best[0].text
    assert expected in json.dumps(document)
    assert main([*words, "--to", "de"]) in (1, 2)
    assert "'de' is not a language of this model, which has __en__, __ko__, __fr__" in capsys.readouterr().err


def test_a_language_by_the_beginning_of_its_name() -> None:
    from regard.generation.text_codec import ModelTokenizers

    class Named(ModelTokenizers):
        languages: ClassVar[dict[str, int]] = {"en_XX": 7, "ko_KR": 8, "pt_BR": 9, "pt_XX": 10}  # type: ignore[assignment, misc]

        def __init__(self) -> None:
            pass

    named = Named()
    assert (named.language_id("ko"), named.language_id("pt_XX")) == (8, 10)
    with pytest.raises(ValueError, match="'pt' is not a language of this model"):
        named.language_id("pt")
    assert named.with_language([7, 3, 4, 2], 8) == [8, 3, 4, 2]
    assert named.with_language([3, 4, 2, 7], 8) == [3, 4, 2, 8]  # as mBART's first version has it
    assert named.with_language([3, 4, 2], 8) == [8, 3, 4, 2]
