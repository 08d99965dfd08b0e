"""Every kind of model through one engine: as alone so in company, as by the whole text so step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.small import DECODING, small, source_of
from regard.attention.taps import record
from regard.config import RopeScalingConfig
from regard.generation import GenerateConfig, Generated, generate
from regard.generation.generate import prepare, stream_tokens
from regard.generation.prompts import read_inputs
from regard.models import Decoder, EncoderDecoder, Model, Recurrent

N_NEW = 7
LENGTHS = (6, 1, 4)
TARGETS = [[1, 5, 6], [1], [1, 7]]
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beam": {"beam": 3, "n_best": 3},
    "groups": {"beam": 4, "groups": 2, "diversity_penalty": 1.0, "n_best": 2},
    "drawn": {"sample": True, "seed": 3, "n_best": 2, "top_p": 0.9},
    "filtered": {"repetition_penalty": 1.5, "no_repeat_ngram": 2, "min_new_tokens": 3},
}
FEATURES: dict[str, dict[str, Any]] = {
    **{positions: {"positions": positions} for positions in ("none", "sinusoidal", "rope", "alibi", "t5", "xl")},
    **{mixer: {"mixer": mixer} for mixer in ("additive", "linear", "performer")},
    "window": {"window": 3},
    "mixed windows": {"window": 2, "window_layers": (0,)},
    "strided": {"sparsity": "strided", "sparsity_size": 2},
    "bigbird": {"sparsity": "bigbird", "sparsity_size": 2},
    "grouped heads": {"n_kv_heads": 2},
    "shared layers": {"share_layers": True},
    "dynamic": {"positions": "rope", "max_len": 6, "rope_scaling": RopeScalingConfig(kind="dynamic", factor=4.0)},
    "longrope": {
        "positions": "rope",
        "rope_scaling": RopeScalingConfig(
            kind="longrope", original_max_len=5, short_factor=(1.0, 1.1, 1.3), long_factor=(1.0, 4.0, 9.0)
        ),
    },
}


def inputs_for(model: Model) -> list[Any]:
    """Three prompts or sources of different lengths, where the model reads such."""
    config, generator = model.config, torch.Generator().manual_seed(5)
    if config.source == "text":
        return [torch.randint(3, config.vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]
    source = source_of(config).double()
    return list(source) if config.source == "image" else [x[:n] for x, n in zip(source, LENGTHS, strict=True)]


def write(model: Model, items: list[Any], targets: list[list[int]], **fields: Any) -> Generated:
    target = {} if isinstance(model, Decoder) else {"target": targets}
    return generate(model, items, max_new_tokens=N_NEW, **fields, **target)


def texts(made: Generated) -> list[list[tuple[list[int], str]]]:
    return [[(text.tokens, text.finish) for text in some] for some in made.hypotheses]


@torch.no_grad()
def by_the_whole_text(model: Model, item: Any, target: list[int]) -> list[int]:
    """Greedy, with every step computed from the beginning and no cache."""
    text: list[int] = list(item) if isinstance(model, Decoder) else list(target)
    prepare = len(text)
    for _ in range(N_NEW):
        source = torch.as_tensor(item)[None]
        logits = model(torch.tensor([text])) if isinstance(model, Decoder) else model(source, torch.tensor([text]))
        text.append(int(logits[0, -1].argmax()))
        if text[-1] == model.config.eos_id:
            break
    return text[prepare:]


def check(model: Model, whole: bool = True) -> None:
    model = model.double()
    items = inputs_for(model)
    for n, (name, fields) in enumerate(SEARCHES.items()):
        together = write(model, items, TARGETS, **fields)
        for index in range(3) if name in ("greedy", "beam") else (n % 3,):
            item = items[index]
            alone = write(model, [item], [TARGETS[index]], **fields)
            assert texts(alone)[0] == texts(together)[index], (name, index)
            scores = [text.score for text in together.hypotheses[index]]
            assert scores == pytest.approx([text.score for text in alone.hypotheses[0]], abs=1e-4)
        assert texts(write(model, items, TARGETS, cache="static", **fields)) == texts(together), name
        if name == "greedy" and whole:
            told = [by_the_whole_text(model, item, target) for item, target in zip(items, TARGETS, strict=True)]
            assert [some[0][0] for some in texts(together)] == told


@pytest.mark.parametrize("name", DECODING)
def test_every_model_writes_the_same_alone_in_company_and_without_a_cache(name: str) -> None:
    check(small(name))


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_every_feature_of_a_decoder(features: dict[str, Any]) -> None:
    # Angles that follow the length of the text are others in a cache than in a whole text.
    check(small("gpt2", **features), whole=features.get("rope_scaling") is None)


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "captioner", "captioner-regions", "bahdanau-gru"])
def test_the_head_sees_one_state_a_row(name: str) -> None:
    """Never (B, T, V): the logits of a prompt are those of its last token."""
    model = small(name).double()
    assert isinstance(model, Decoder | EncoderDecoder | Recurrent)
    assert model.head is not None
    seen: list[tuple[int, ...]] = []
    handle = model.head.register_forward_hook(lambda _, args, __: seen.append(tuple(args[0].shape)))
    write(model, inputs_for(model), TARGETS, beam=2)
    handle.remove()
    assert seen[0][:2] == (3, 1)  # a prompt is computed once, not once a beam
    assert {shape[1] for shape in seen} == {1}


def test_an_encoder_runs_once() -> None:
    model = small("transformer-base")
    assert isinstance(model, EncoderDecoder)
    calls: list[int] = []
    model.encoder.register_forward_hook(lambda *_: calls.append(1))
    write(model, inputs_for(model), TARGETS, beam=3)
    assert len(calls) == 1


def test_finished_rows_leave_a_growing_batch_and_stay_in_a_static_one() -> None:
    model, items = small("gpt2").double(), [[5, 6], [5, 6, 7], [8]]
    lengths = [len(some[0][0]) for some in texts(write(model, items, []))]
    stop = write(model, items, []).hypotheses[1][0].tokens[1]  # one text ends at its second token
    sizes: dict[str, list[int]] = {"growing": [], "static": []}
    for cache, seen in sizes.items():
        handle = model.token.register_forward_hook(lambda _, args, __, seen=seen: seen.append(args[0].shape[0]))
        made = write(model, items, [], stop=[stop], cache=cache)
        handle.remove()
        assert made.hypotheses[1][0].finish == "stop"
    assert max(lengths) > 2
    assert set(sizes["static"]) == {3}
    assert sizes["growing"][0] == 3
    assert sizes["growing"][-1] < 3


@pytest.mark.parametrize("cache", ["growing", "static"])
def test_prefill_and_decode_one_token_are_a_forward_pass(cache: str) -> None:
    model = small("llama-1b").double()
    items = inputs_for(model)
    config = GenerateConfig(cache=cache, max_new_tokens=4)
    with torch.no_grad():
        engine, prompts = prepare(model, read_inputs(model, items, config), config)
        logits = [engine.prefill(prompts), *(engine.decode_one_token(torch.tensor(t)) for t in ([3, 4, 5], [6, 7, 8]))]
        engine.select(torch.tensor([2, 0, 1]))
        logits.append(engine.decode_one_token(torch.tensor([9, 9, 9])))
        for row, (item, after) in enumerate(zip(items, ([3, 6], [4, 7], [5, 8]), strict=True)):
            whole = model(torch.tensor([[*item, *after, 9]]))[0, len(item) - 1 :]
            for step in range(3):
                torch.testing.assert_close(logits[step][row], whole[step].float())
            torch.testing.assert_close(logits[3][[2, 0, 1].index(row)], whole[3].float())


@pytest.mark.parametrize(
    ("name", "place"),
    [("transformer-base", "decoder.blocks.1.cross_attention"), ("luong-lstm", "decoder.cross_attention")],
)
def test_attention_can_be_followed_along_a_hypothesis(name: str, place: str) -> None:
    """What a recorder saw of beam row b · K + beams[t] at step t is what the model looks at when it reads the text."""
    model = small(name).double()
    assert isinstance(model, EncoderDecoder | Recurrent)
    sources = [[5, 6, 7, 8], [9, 10, 11, 12]]
    with record(model) as seen:
        made = generate(model, sources, beam=4, n_best=4, max_new_tokens=6, cache="static")
    n_ways = 0
    for b, source in enumerate(sources):
        for text in made.hypotheses[b]:
            with record(model) as again, torch.no_grad():
                model(torch.tensor([source]), torch.tensor([made.prompts[b] + text.tokens[:-1]]))
            read_again = again.map(place).dense()[0]  # (H, T, S)
            for t, beam in enumerate(text.beams):
                row = seen.map(place, step=t).dense()[b * 4 + beam, :, 0]  # (H, S)
                torch.testing.assert_close(row, read_again[:, t])
            n_ways += len(set(text.beams)) > 1
    assert n_ways > 0


def test_the_table_of_parents_leads_to_every_hypothesis() -> None:
    model = small("gpt2").double()
    made = generate(model, [[5, 6], [7]], beam=4, n_best=4, max_new_tokens=6)
    assert made.parents is not None
    for b, some in enumerate(made.hypotheses):
        for text in some:
            for t in range(len(text.tokens) - 1):  # beam beams[t + 1] before step t + 1 came from beams[t] at step t
                assert made.parents[t, b, text.beams[t + 1]] == text.beams[t]


def test_logits_that_are_no_numbers_are_said_so() -> None:
    model = small("gpt2")
    with torch.no_grad():
        model.token.weight[5] = torch.nan  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match="logits are NaN"):
        generate(model, [5])
    later = small("gpt2")
    with torch.no_grad():
        later.embeddings.position.weight[6] = torch.nan  # type: ignore[union-attr, index]
    with pytest.raises(ValueError, match="the search found no text; the model's logits are not finite"):
        generate(later, [[5], [6, 7]], max_new_tokens=7, beam=3)
    for fields in ({}, {"temperature": 1.0, "seed": 0}):
        assert len(generate(later, [5], max_new_tokens=6, **fields).hypotheses[0][0].tokens) == 6
        with pytest.raises(ValueError, match="logits are NaN"):
            generate(later, [5], max_new_tokens=7, **fields)
        with pytest.raises(ValueError, match="logits are NaN"):
            list(stream_tokens(later, [5], max_new_tokens=7, **fields))


def test_a_mixer_of_whole_texts_is_refused() -> None:
    for mixer in ("fourier", "linformer"):
        with pytest.raises(ValueError, match=f"mixer='{mixer}'"):
            generate(small("gpt2", mixer=mixer, positions="learned"), [5])


def test_a_model_without_a_head_is_refused() -> None:
    with pytest.raises(ValueError, match="head='none'"):
        generate(small("gpt2", head="none"), [5])
    with pytest.raises(TypeError, match="writes no text"):
        generate(small("bert-base"), [5])


@pytest.mark.parametrize("name", ["llama-1b", "mistral-7b", "transformer-base", "captioner", "luong-lstm"])
def test_half_precision(name: str) -> None:
    model = small(name).bfloat16()
    items = inputs_for(model)
    for fields in SEARCHES.values():
        made, still = (write(model, items, TARGETS, cache=cache, **fields) for cache in ("growing", "static"))
        assert all(1 <= len(text.tokens) <= N_NEW for some in made.hypotheses for text in some)
        assert len(still) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", DECODING)
def test_cuda_writes_what_the_cpu_writes(name: str) -> None:
    model = small(name).double()
    items = inputs_for(model)
    told = {which: texts(write(model, items, TARGETS, **fields)) for which, fields in SEARCHES.items()}
    model.cuda()
    for which, fields in SEARCHES.items():
        for cache in ("growing", "static"):
            assert texts(write(model, items, TARGETS, cache=cache, **fields)) == told[which], (which, cache)


def padded_tensor(items: list[list[int]]) -> tuple[Tensor, Tensor]:
    width = max(len(item) for item in items)
    ids = torch.tensor([item + [0] * (width - len(item)) for item in items])
    return ids, torch.arange(width) < torch.tensor([len(item) for item in items])[:, None]


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "captioner-regions"])
def test_a_padded_tensor_with_keep_is_a_list(name: str) -> None:
    model = small(name).double()
    items = inputs_for(model)
    if model.config.source == "regions":
        ids = torch.nn.utils.rnn.pad_sequence(items, batch_first=True, padding_value=7.0)
        keep = torch.arange(ids.shape[1]) < torch.tensor(LENGTHS)[:, None]
    else:
        ids, keep = padded_tensor(items)
    assert texts(generate(model, ids, padding_mask=keep, max_new_tokens=5)) == texts(
        generate(model, items, max_new_tokens=5)
    )
