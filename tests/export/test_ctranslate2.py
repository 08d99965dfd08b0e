"""CTranslate2 computes what our models compute, token for token, or says what it cannot."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from models.small import small
from processor import needs_vnni
from regard.errors import BadModelFile
from regard.export.ctranslate2_export import export_ctranslate2, obstacles, vocabulary
from regard.export.engines import Ct2Engine, TorchEngine
from regard.export.quantise import quantise
from regard.generation import GenerateConfig
from regard.models import Model
from regard.text.tokenizer import MarianTokenizer

from .translators import pairs, tokenizers, translator, writer

CASES: list[tuple[str, dict[str, Any]]] = [
    ("transformer-tiny", {}),
    ("transformer-tiny", {"norm_place": "pre"}),
    ("transformer-tiny", {"positions": "rope"}),
    ("transformer-tiny", {"positions": "none", "norm": "rms", "activation": "swiglu"}),
    ("transformer-tiny", {"target_vocab_size": 40, "n_decoder_layers": 3, "n_decoder_heads": 2, "d_decoder_ff": 48}),
    ("transformer-tiny", {"n_kv_heads": 2}),
    ("transformer-tiny", {"d_head": 8}),
    ("transformer-tiny", {"share_layers": True, "norm_bias": False, "qkv_bias": False}),
    ("transformer-tiny", {"sinusoid_layout": "interleaved", "attention_scale": 0.3, "logit_scale": 0.5}),
    (
        "transformer-tiny",
        {"positions": "learned", "position_offset": 2, "embedding_norm": True, "head_bias": True, "tie_head": False},
    ),
    ("t5-small", {}),
    ("t5-v1.1-small", {}),
    ("gpt2", {}),
    ("gpt2", {"norm_place": "post", "activation": "gelu", "scale_embeddings": True}),
    ("gpt2", {"positions": "alibi", "activation": "quick_gelu"}),
    ("gpt2", {"positions": "rope", "rope_scaling": {"kind": "linear", "factor": 2.0}}),
    ("llama-1b", {}),
    ("llama-1b", {"n_kv_heads": 1, "qk_norm": True, "d_head": 8}),
    ("llama-1b", {"activation": "reglu", "d_head": 8, "rope_fraction": 0.5}),
    ("mistral-7b", {"window": None}),
]


def engine_of(model: Model, folder: Path, **options: Any) -> Ct2Engine:
    export_ctranslate2(model, folder)
    return Ct2Engine(folder, model.config, model.processor, threads=1, **options)


def random_rows(vocab_size: int, count: int = 24, longest: int = 12, seed: int = 0) -> list[list[int]]:
    chance = random.Random(seed)
    return [[chance.randrange(3, vocab_size) for _ in range(chance.randint(1, longest))] for _ in range(count)]


def own_log_probs(model: Model, source: list[int], target: list[int]) -> torch.Tensor:
    """Of the target's tokens and the end, by torch."""
    bos, eos = model.config.bos_id, model.config.eos_id
    if model.config.architecture == "decoder":
        logits, follows = model(torch.tensor([target]))[0], [*target[1:], eos]
    else:
        logits, follows = model(torch.tensor([source]), torch.tensor([[bos, *target]]))[0], [*target, eos]
    return logits.log_softmax(-1).gather(1, torch.tensor(follows)[:, None])[:, 0]


@pytest.mark.parametrize(("name", "fields"), CASES, ids=lambda x: x if isinstance(x, str) else "-".join(x) or "plain")
@torch.no_grad()
def test_the_same_numbers_and_the_same_tokens(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = small(name, **fields)
    engine, own = engine_of(model, tmp_path / "ct2"), TorchEngine(model)
    sources = random_rows(model.config.vocab_size)
    targets = random_rows(model.config.output_vocab_size, seed=1)
    for source, target, found in zip(sources, targets, engine.log_probs(sources, targets), strict=True):
        torch.testing.assert_close(torch.tensor(found), own_log_probs(model, source, target), atol=1e-4, rtol=0)
    for beam in (1, 2, 4):
        config = GenerateConfig(beam=beam, max_new_tokens=12, early_stopping=True)
        assert engine.write(sources, config) == own.write(sources, config)


@pytest.mark.parametrize(
    "fields",
    [
        {"length_penalty": 0.0},
        {"length_penalty": 0.6},
        {"length_penalty": 2.0},
        {"length_penalty": 0.6, "penalty_form": "gnmt"},
        {"min_new_tokens": 4, "beam": 1},
        {"max_new_tokens": 3},
        {"max_new_tokens": 500},
    ],
    ids=str,
)
@torch.no_grad()
def test_beam_search_follows_the_same_rules(fields: dict[str, Any], tmp_path: Path) -> None:
    """Texts end early and at different lengths: the end token is made likely."""
    model = small("transformer-tiny", head_bias=True)
    assert model.head is not None
    model.head.bias[model.config.eos_id] += 0.8  # type: ignore[index]
    engine, own = engine_of(model, tmp_path / "ct2"), TorchEngine(model)
    sources = random_rows(model.config.vocab_size, count=60)
    config = GenerateConfig(**{"beam": 3, "early_stopping": True, "max_new_tokens": 16, **fields})
    ours, theirs = own.write(sources, config), engine.write(sources, config)
    assert len({len(row) for row in ours}) > 1
    # Of more finished texts than beams CTranslate2 keeps the best by its own penalty: the other form may miss one.
    least = 60 if config.penalty_form == "hf" else 58
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= least


@pytest.mark.parametrize("name", ["transformer-tiny", "gpt2"])
@torch.no_grad()
def test_a_text_ends_with_any_of_the_end_tokens(name: str, tmp_path: Path) -> None:
    """The other ones that the config names, as in models that chat. CTranslate2's own beams may go on after one."""
    model = small(name, more_eos_ids=tuple(range(10, 18)))
    engine, own = engine_of(model, tmp_path / "ct2"), TorchEngine(model)
    sources = random_rows(10)
    ours = own.write(sources, max_new_tokens=12)
    assert any(len(row) < 12 for row in ours)
    assert engine.write(sources, max_new_tokens=12) == ours
    searched = engine.write(sources, beam=3, max_new_tokens=12, early_stopping=True)
    assert set(range(10, 18)).isdisjoint(token for row in searched for token in row)


@pytest.mark.parametrize("beam", [1, 3])
@torch.no_grad()
def test_forbidden_tokens_never_occur(beam: int, tmp_path: Path) -> None:
    """CTranslate2 forbids them before the softmax: the scores of its beams differ if they were likely, as here."""
    sources, options = random_rows(10), {"beam": beam, "max_new_tokens": 12, "early_stopping": True}
    usual = {token for row in TorchEngine(small("transformer-tiny")).write(sources, **options) for token in row}
    model = small("transformer-tiny", forbidden_ids=tuple(sorted(usual)[:3]))
    rows = [engine.write(sources, **options) for engine in (TorchEngine(model), engine_of(model, tmp_path / "ct2"))]
    assert set(model.config.forbidden_ids).isdisjoint(token for texts in rows for row in texts for token in row)
    assert rows[0] == rows[1] or beam > 1


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("bahdanau-gru", {}, "architecture='recurrent'"),
        ("sentiment", {}, "architecture='encoder'"),
        ("captioner", {}, "source='image'"),
        ("mistral-7b", {}, "window=4"),
        ("gpt2", {"activation": "relu2", "norm": "none"}, "activation='relu2', norm='none'"),
        ("gpt2", {"positions": "xl"}, "positions='xl'"),
        ("gpt2", {"positions": "t5"}, "positions='t5'"),
        ("transformer-tiny", {"positions": "alibi"}, "positions='alibi'"),
        ("gpt2", {"mixer": "additive"}, "mixer='additive'"),
        ("gpt2", {"sparsity": "bigbird"}, "sparsity='bigbird'"),
        ("gpt2", {"qk_norm": True}, "qk_norm=True, norm='layer'"),
        ("llama-1b", {"rope_scaling": {"kind": "dynamic", "factor": 2.0}}, "rope_scaling="),
        ("transformer-tiny", {"residual": False}, "residual=False"),
        ("gpt2", {"eos_id": None}, "eos_id=None"),
    ],
)
def test_what_cannot_be_said_is_named(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = small(name, **fields)
    assert said in ", ".join(obstacles(model.config))
    with pytest.raises(ValueError, match="CTranslate2 cannot run a model with") as raised:
        export_ctranslate2(model, tmp_path / "ct2")
    assert said in str(raised.value)
    assert not (tmp_path / "ct2").exists()


@pytest.mark.parametrize("joint", [True, False], ids=["one vocabulary", "two"])
def test_texts_in_and_out(joint: bool, tmp_path: Path) -> None:
    model = translator(joint)
    engine = engine_of(model, tmp_path / "ct2")
    texts = [source for source, _ in pairs()[:10]] + ["", " ", "한글도 된다", "a\tb"]
    for beam in (1, 4):
        assert engine.translate(texts, beam=beam, max_new_tokens=12) == TorchEngine(model).translate(
            texts, beam=beam, max_new_tokens=12
        )
    assert engine.translate([]) == []
    assert engine.translate([""]) == [""]


def test_a_language_model_continues(tmp_path: Path) -> None:
    model = writer()
    engine = engine_of(model, tmp_path / "ct2")
    prompts = ["The", "A dog and", "고양이", "The teacher gave"]
    assert engine.generate(prompts, max_new_tokens=10) == TorchEngine(model).generate(prompts, max_new_tokens=10)
    with pytest.raises(ValueError, match="cannot translate text"):
        engine.translate(prompts)


def test_a_text_does_not_depend_on_its_neighbours(tmp_path: Path) -> None:
    engine = engine_of(translator(), tmp_path / "ct2")
    texts = [source for source, _ in pairs()[:7]]
    together = engine.translate(texts, max_new_tokens=10)
    assert engine.translate(texts[::-1], max_new_tokens=10)[::-1] == together
    assert [engine.translate([text], max_new_tokens=10)[0] for text in texts] == together
    assert engine.translate(texts, max_new_tokens=10, batch=2) == together


@needs_vnni
@torch.no_grad()
def test_int8_is_chosen_when_it_is_opened(tmp_path: Path) -> None:
    model = small("transformer-tiny")
    engine_of(model, tmp_path / "ct2")
    rounded = Ct2Engine(tmp_path / "ct2", model.config, None, compute_type="int8")
    sources, targets = random_rows(31), random_rows(31, seed=1)
    gaps = [
        (torch.tensor(found) - own_log_probs(model, source, target)).abs().max().item()
        for source, target, found in zip(sources, targets, rounded.log_probs(sources, targets), strict=True)
    ]
    assert 1e-4 < max(gaps) < 0.5
    with pytest.raises(ValueError, match="compute_type='int9'"):
        Ct2Engine(tmp_path / "ct2", model.config, None, compute_type="int9")


def test_bad_input_is_refused_in_the_words_of_generation(tmp_path: Path) -> None:
    model = small("transformer-tiny")
    engine, own = engine_of(model, tmp_path / "ct2"), TorchEngine(model)
    long = [[5] * 30]
    for each in (engine, own):
        with pytest.raises(ValueError, match="source 0 has 30 tokens, but max_len=24"):
            each.write(long)
        with pytest.raises(ValueError, match="source 1 is empty"):
            each.write([[5], []])
        with pytest.raises(ValueError, match="source 0 holds token 99"):
            each.write([[99]])
        with pytest.raises(ValueError, match="this model has no tokenizer"):
            each.translate(["a"])
    with pytest.raises(TypeError, match="texts is a single string"):
        TorchEngine(translator()).translate("a")
    assert engine.write(long, truncate=True, max_new_tokens=5) == own.write(long, truncate=True, max_new_tokens=5)
    for fields, said in (
        ({"temperature": 0.5}, r"does not support temperature=0\.5"),
        ({"no_repeat_ngram": 2}, "does not support no_repeat_ngram=2"),
        ({"beam": 2, "min_new_tokens": 3}, "does not support min_new_tokens=3 with beam=2"),
        ({"beam": 2, "n_best": 2}, "does not support n_best=2"),
    ):
        with pytest.raises(ValueError, match=said):
            engine.write([[5]], **fields)
    with pytest.raises(BadModelFile, match=r"no model\.bin"):
        Ct2Engine(tmp_path, model.config, None)
    (tmp_path / "ct2" / "model.bin").write_bytes(b"no model")
    with pytest.raises(BadModelFile, match="cannot be opened by CTranslate2"):
        Ct2Engine(tmp_path / "ct2", model.config, None)


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantised already"):
        export_ctranslate2(quantise(small("gpt2")), tmp_path / "ct2")


def test_every_id_has_a_word_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = tokenizers(True)
    words = vocabulary(source, source.size + 3)
    assert len(set(words)) == len(words) == source.size + 3
    assert words[: source.size] == [source.token(index) for index in range(source.size)]
    assert vocabulary(None, 3) == ["<0>", "<1>", "<2>"]

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # as without sentencepiece
    odd = MarianTokenizer(b"", {"<1>": 0, "b": 2, "<unk>": 4, "</s>": 5}, "source.spm")
    assert vocabulary(odd, 4) == ["<1>", "<<1>>", "b", "<3>"]
