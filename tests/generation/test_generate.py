"""What goes in and what comes out: prompts of all shapes, ends of all kinds, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from models.small import small, source_of
from regard.generation import GenerateConfig, Generated, generate, stream_tokens
from regard.models import Model

EOS = 2


def model_of(name: str = "gpt2", **fields: Any) -> Model:
    return small(name, **fields).double()


def new(model: Model, prompt: Any, **fields: Any) -> list[int]:
    return generate(model, prompt, **{"max_new_tokens": 8, **fields}).hypotheses[0][0].tokens


# ---- what goes in


def test_one_prompt_in_every_shape() -> None:
    model = model_of()
    told = new(model, [5, 6, 7])
    for same in ([[5, 6, 7]], torch.tensor([5, 6, 7]), torch.tensor([[5, 6, 7]]), (5, 6, 7), [torch.tensor([5, 6, 7])]):
        assert new(model, same) == told
    assert new(model, list(np.array([5, 6, 7]))) == told
    assert new(model, torch.tensor([5, 6, 7], dtype=torch.int32)) == told


def test_images_and_regions_come_alone_or_together() -> None:
    for name in ("captioner", "captioner-regions"):
        model = model_of(name)
        source = source_of(model.config)  # float32, though the model is float64
        together = generate(model, source, max_new_tokens=5)
        assert len(together) == 3
        assert generate(model, source[1], max_new_tokens=5).tokens[0] == together.tokens[1]
        assert generate(model, list(source), max_new_tokens=5).tokens == together.tokens


def test_an_empty_prompt_begins_with_bos() -> None:
    model = model_of()
    assert generate(model, []).prompts == [[1]]
    assert generate(model, [[5], []]).prompts == [[5], [1]]
    assert new(model, []) == new(model, [1])
    with pytest.raises(ValueError, match="prompt 1 is empty, and this model has no bos_id"):
        generate(model_of(bos_id=None), [[5], []])


def test_a_target_begins_with_bos_and_goes_on_from_what_is_given() -> None:
    model = model_of("transformer-base")
    told = new(model, [5, 6])
    made = generate(model, [5, 6], target=told[:3], max_new_tokens=5)
    assert made.prompts == [[1, *told[:3]]]
    assert made.hypotheses[0][0].tokens == told[3:8]
    assert generate(model, [[5, 6], [7]], target=[[4], [1, 3]], max_new_tokens=1).prompts == [[1, 4], [1, 3]]
    assert generate(model, [[5, 6], [7]], target=[4], max_new_tokens=1).prompts == [[1, 4], [1, 4]]


def test_truncation_keeps_the_end_of_a_prompt_and_the_beginning_of_a_source() -> None:
    model = model_of()  # max_len 24
    long = list(range(3, 30)) * 2
    made = generate(model, long, truncate=True, max_new_tokens=10)
    assert made.prompts == [long[-14:]]
    assert len(made.hypotheses[0][0].tokens) == 10
    assert generate(model, long, truncate=True, max_new_tokens=100).prompts == [long[-12:]]  # half stays the prompt's
    assert generate(model, [1, *long], truncate=True, max_new_tokens=10).prompts == [[1, *long[-13:]]]
    assert generate(model, long[:14], truncate=True, max_new_tokens=10).prompts == [long[:14]]
    translator = model_of("transformer-base")
    for source, short in ((long, long[:24]), ([*long, EOS], [*long[:23], EOS])):
        assert new(translator, source, truncate=True) == new(translator, short)


def test_a_text_ends_where_the_model_does() -> None:
    model = model_of()
    made = generate(model, [[5] * 20, [6, 7]], max_new_tokens=9, logit_bias={EOS: -1e9})
    assert [len(some[0].tokens) for some in made.hypotheses] == [4, 9]
    assert made.best[0].finish == made.best[1].finish == "length"


@pytest.mark.parametrize(
    ("inputs", "fields", "error", "sentence"),
    [
        (
            [5] * 24,
            {},
            ValueError,
            "prompt 0 has 24 tokens, and max_len=24 leaves no room; truncate=True keeps its end",
        ),
        ([[5], [5] * 30], {}, ValueError, "prompt 1 has 30 tokens"),
        ([5, 31], {}, ValueError, "prompt 0 holds token 31, but the vocabulary has 31: 0 to 30"),
        ([5, -1], {}, ValueError, "prompt 0 holds token -1"),
        ("ROMEO:", {}, ValueError, "this model has no tokenizer for text to read"),
        (["a", "b"], {}, ValueError, "this model has no tokenizer for text to read"),
        ([5, 6.5], {}, TypeError, "prompt must hold token ids"),
        (torch.zeros(1, 2, 3), {}, TypeError, "got torch.float32 of shape (1, 2, 3)"),
        (torch.zeros(0, 3, dtype=torch.int64), {}, ValueError, "there is no prompt: the batch is empty"),
        ([5], {"beam": 32}, ValueError, "beam=32 is larger than the vocabulary of 31 tokens"),
        ([5], {"stop": [[4, 99]]}, ValueError, "stop holds the unknown token 99; the vocabulary has 31: 0 to 30"),
        ([5], {"prefix": [31]}, ValueError, "prefix holds the unknown token 31"),
        ([5], {"logit_bias": {77: 1.0}}, ValueError, "logit_bias holds the unknown token 77"),
        ([5], {"temperature": 0.0}, ValueError, "temperature=0.0 must be a positive number"),
        ([5], {"target": [5]}, ValueError, "target is for models with an encoder"),
        ([5], {"padding_mask": torch.ones(1, 1)}, ValueError, "padding_mask needs prompt as a tensor"),
        (
            torch.ones(1, 4, dtype=torch.int64),
            {"padding_mask": torch.ones(1, 3)},
            ValueError,
            "padding_mask has shape (1, 3)",
        ),
        ([5], {"n_beams": 3}, ValueError, "GenerateConfig has no field 'n_beams'"),
    ],
)
def test_what_a_decoder_refuses(inputs: Any, fields: dict[str, Any], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as refused:
        generate(model_of(), inputs, **fields)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "inputs", "fields", "sentence"),
    [
        ("transformer-base", [], {}, "source 0 is empty"),
        ("transformer-base", [[5], []], {}, "source 1 is empty"),
        ("transformer-base", [5] * 25, {}, "source 0 has 25 tokens, but max_len=24; truncate=True keeps its beginning"),
        ("transformer-base", [40], {}, "source 0 holds token 40"),
        ("transformer-base", [5], {"target": [40]}, "target 0 holds token 40"),
        ("transformer-base", [5], {"target": [5] * 24, "truncate": True}, "target 0 has 25 tokens, and max_len=24"),
        ("transformer-base", [[5], [6], [7]], {"target": [[3], [4]]}, "there are 2 targets for 3 sources"),
        ("transformer-base", torch.zeros(0, 3, dtype=torch.int64), {}, "there is no source"),
        ("captioner", torch.zeros(16, 16), {}, "source='image' takes floating-point tensors (channels, height, width)"),
        ("captioner", torch.zeros(3, 16, 16, dtype=torch.uint8), {}, "source='image' takes floating-point tensors"),
        ("captioner", [torch.zeros(3, 16, 16), torch.zeros(3, 8, 8)], {}, "sources of different sizes"),
        ("captioner", [torch.zeros(3, 16, 16), torch.zeros(1, 16, 16)], {}, "sources of different sizes"),
        ("captioner", torch.zeros(3, 16, 16), {"padding_mask": torch.ones(1, 3)}, "does not match image sources"),
        ("captioner-regions", torch.zeros(0, 10), {}, "source='regions' takes floating-point tensors"),
        (
            "captioner-regions",
            torch.zeros(2, 4, 10),
            {"padding_mask": torch.ones(2, 3)},
            "does not match regions sources",
        ),
    ],
)
def test_what_a_model_with_an_encoder_refuses(name: str, inputs: Any, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as refused:
        generate(model_of(name), inputs, **fields)
    assert "\n" not in str(refused.value)


# ---- what comes out


ON = {"max_new_tokens": 8, "logit_bias": {EOS: -1e9}, "no_repeat_ngram": 1}  # eight different tokens, and no end


def test_a_text_ends_at_its_end_token_or_stop_sequence_or_for_want_of_room() -> None:
    model = model_of()
    (cut,) = generate(model, [5, 6], **ON).best
    assert (cut.finish, len(cut.tokens), cut.content) == ("length", 8, cut.tokens)
    (ended,) = generate(model, [5, 6], **{**ON, "logit_bias": {EOS: 1e9}}).best
    assert (ended.finish, ended.tokens, ended.content) == ("end", [EOS], [])
    for cache in ("growing", "static"):
        (stopped,) = generate(model, [5, 6], stop=[[30, 30], cut.tokens[3:5]], cache=cache, **ON).best
        assert (stopped.finish, stopped.tokens, stopped.content) == ("stop", cut.tokens[:5], cut.tokens[:3])
    (longest,) = generate(model, [5, 6], stop=[cut.tokens[3:5], cut.tokens[2:5], cut.tokens[4:5]], **ON).best
    assert longest.content == cut.tokens[:2]


def test_a_stop_sequence_lies_in_the_new_tokens_and_after_the_shortest_length() -> None:
    model = model_of()
    told = new(model, [5, 6], **ON)
    assert new(model, [5, 6], stop=[[6, told[0]]], **ON) == told  # half of it is the prompt's
    assert new(model, [5, 6], stop=[told[0]], **ON) == told[:1]
    assert new(model, [5, 6], stop=told, min_new_tokens=4, **ON) == told[:4]


def test_the_shortest_length_holds_for_every_search() -> None:
    model = model_of()
    for fields in ({}, {"beam": 4, "n_best": 4}, {"sample": True, "seed": 1, "n_best": 4}):
        made = generate(model, [5, 6], logit_bias={EOS: 5.0}, min_new_tokens=4, max_new_tokens=7, **fields)
        assert all(len(text.tokens) >= 4 and EOS not in text.tokens[:3] for text in made.hypotheses[0])


def test_a_prefix_comes_first_in_every_text() -> None:
    for name in ("gpt2", "transformer-base", "luong-lstm"):
        for fields in ({}, {"beam": 3, "n_best": 3}, {"sample": True, "n_best": 3, "seed": 0}):
            made = generate(model_of(name), [[5, 6], [7]], prefix=[9, 4], max_new_tokens=5, **fields)
            assert all(text.tokens[:2] == [9, 4] for some in made.hypotheses for text in some)


def test_scores_are_the_models_log_probabilities() -> None:
    model = model_of()
    for fields in ({}, {"temperature": 1.5, "top_k": 8, "seed": 4, "n_best": 3}, {"beam": 3, "n_best": 3}):
        made = generate(model, [5, 6], max_new_tokens=6, length_penalty=0.5, **fields)
        for text in made.hypotheses[0]:
            with torch.no_grad():
                logits = model(torch.tensor([[5, 6, *text.tokens[:-1]]]))[0, 1:].log_softmax(-1)
            log_prob = logits.gather(1, torch.tensor(text.tokens)[:, None]).sum().item()
            assert text.score == pytest.approx(log_prob / len(text.tokens) ** 0.5, abs=1e-4)
        scores = [text.score for text in made.hypotheses[0]]
        assert scores == sorted(scores, reverse=True)
        assert made.scores == scores[:1]


def test_seeds() -> None:
    model = model_of()

    def drawn(**fields: Any) -> list[list[int]]:
        made = generate(model, [5, 6], max_new_tokens=8, temperature=2.0, n_best=4, **fields)
        return [text.tokens for text in made.hypotheses[0]]

    assert drawn(seed=1) == drawn(seed=1)
    assert drawn(seed=1) != drawn(seed=2)
    assert len({tuple(text) for text in drawn(seed=1)}) == 4
    torch.manual_seed(0)
    first, second = drawn(), drawn()
    assert first != second
    torch.manual_seed(0)
    assert drawn() == first


def test_one_draw_is_the_first_of_several() -> None:
    model = model_of()
    several = generate(model, [5], sample=True, seed=9, n_best=5, max_new_tokens=6)
    one = generate(model, [5], sample=True, seed=9, max_new_tokens=6)
    assert one.hypotheses[0][0].tokens in [text.tokens for text in several.hypotheses[0]]


def test_drawing_among_one_is_greedy() -> None:
    model = model_of()
    assert new(model, [5, 6], top_k=1, seed=0) == new(model, [5, 6])


def test_a_beam_finds_texts_at_least_as_good_as_greedy() -> None:
    model, better = model_of(), 0
    for prompt in range(3, 23):
        fields = {"max_new_tokens": 4, "logit_bias": {EOS: -1e9}}
        one, many = (generate(model, [prompt], beam=beam, **fields).scores[0] for beam in (1, 20))
        assert many >= one - 1e-6
        better += many > one + 1e-6
    assert better > 0


def test_configs_and_fields_go_together() -> None:
    model, config = model_of(), GenerateConfig(max_new_tokens=3)
    assert generate(model, [5], config).tokens == generate(model, [5], max_new_tokens=3).tokens
    assert len(generate(model, [5], config, n_best=2, beam=2).hypotheses[0]) == 2
    assert isinstance(generate(model, [5], config), Generated)


def test_the_model_is_left_as_it_was() -> None:
    model = model_of("transformer-base", dropout=0.5)
    model.train()
    frozen = next(model.children())
    frozen.eval()
    before = [module.training for module in model.modules()]
    told = new(model, [5, 6])
    assert [module.training for module in model.modules()] == before
    assert new(model.eval(), [5, 6]) == told  # without dropout in either case
    model.train()
    with pytest.raises(ValueError, match="source 0 is empty"):
        generate(model, [])
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert torch.is_grad_enabled()


# ---- token by token


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "bahdanau-gru", "captioner"])
def test_a_stream_is_the_same_text(name: str) -> None:
    model = model_of(name)
    source = [5, 6, 7] if model.config.source == "text" else source_of(model.config)[0]
    for fields in ({}, {"temperature": 1.5, "seed": 3}):
        assert list(stream_tokens(model, source, max_new_tokens=8, **fields)) == new(model, source, **fields)


def test_a_stream_computes_only_what_is_asked_for() -> None:
    model = model_of(dropout=0.5).train()
    calls: list[int] = []
    model.token.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr, operator]
    tokens = stream_tokens(model, [5, 6], max_new_tokens=8, logit_bias={EOS: -1e9})
    told = new(model, [5, 6], logit_bias={EOS: -1e9})
    calls.clear()
    first = [next(tokens), next(tokens)]
    assert len(calls) == 2
    assert first == told[:2]
    assert model.training  # between two tokens it is its owner's
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("inputs", "fields", "sentence"),
    [
        ([5], {"beam": 2}, "beam=2 has no text before all is done"),
        ([5], {"sample": True, "n_best": 2}, "n_best=2 has no text before all is done"),
        ([[5], [6]], {}, "a stream is one text, got 2"),
        ([99], {}, "prompt 0 holds token 99"),
    ],
)
def test_what_a_stream_refuses_at_once(inputs: Any, fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        stream_tokens(model_of(), inputs, **fields)  # before the first token is asked for
