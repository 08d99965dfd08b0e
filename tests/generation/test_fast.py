"""The engine for CPUs writes what the plain engine writes, for every model it takes, and leaves the others alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.small import DECODING, small
from regard.attention.taps import record
from regard.generation import GenerateConfig, Generated, decode_loop, generate
from regard.generation.beam_search import BeamSearch, block_topk
from regard.generation.cached_engine import DecodingEngine
from regard.generation.cpu_engine import CpuEngine, accelerate, cpu_obstacle
from regard.generation.generate import prepare
from regard.generation.prompts import read_inputs
from regard.layers.quantised_linear import quantise
from regard.models import Decoder, Model

from .test_engine import FEATURES, SEARCHES, TARGETS, inputs_for, texts, write

TAKEN = ("transformer-tiny", "transformer-base", "transformer-big", "gpt2", "llama-7b", "llama-1b", "captioner-regions")
WITH_FEATURES = ("none", "sinusoidal", "rope", "grouped heads", "shared layers")


@pytest.fixture
def plainly(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls a function with the plain engine alone."""

    def run(call: Any) -> Any:
        with monkeypatch.context() as patch:
            for module in (BeamSearch.__module__, decode_loop.__module__):
                patch.setattr(f"{module}.accelerate", lambda engine: engine)
            return call()

    return run


def taken(model: Model) -> bool:
    config = GenerateConfig()
    with torch.no_grad():
        engine, _ = prepare(model, read_inputs(model, inputs_for(model), config), config)
        return isinstance(accelerate(engine), CpuEngine)


def same_as_plain(model: Model, plainly: Any, **more: Any) -> None:
    """All searches, over ragged inputs, of which some end before others."""
    items = inputs_for(model)
    for name, fields in SEARCHES.items():
        fields = {**fields, **more}
        got, told = write(model, items, TARGETS, **fields), plainly(lambda f=fields: write(model, items, TARGETS, **f))
        assert texts(got) == texts(told), name
        for mine, theirs in zip(got.hypotheses, told.hypotheses, strict=True):
            assert [text.score for text in mine] == pytest.approx([text.score for text in theirs], abs=1e-4)
            assert [text.beams for text in mine] == [text.beams for text in theirs]


@pytest.mark.parametrize("name", TAKEN)
def test_every_model_it_takes(name: str, plainly: Any) -> None:
    model = small(name).double()
    assert taken(model)
    same_as_plain(model, plainly)


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_every_feature_it_takes(name: str, plainly: Any) -> None:
    model = small("gpt2", **FEATURES[name]).double()
    assert taken(model)
    same_as_plain(model, plainly)


@pytest.mark.parametrize("fields", [{"qk_norm": True}, {"norm": "rms"}, {"norm_place": "post"}, {"residual": False}])
def test_layers_of_other_shapes(fields: dict[str, Any], plainly: Any) -> None:
    model = small("gpt2", **fields).double()
    assert taken(model)
    same_as_plain(model, plainly)


@pytest.mark.parametrize("name", ["transformer-base", "llama-1b"])
def test_packed_weights_write_the_same(name: str, plainly: Any) -> None:
    model = small(name)  # float32: weights are packed
    assert taken(model)
    same_as_plain(model, plainly)


@pytest.mark.parametrize("name", ["transformer-base", "llama-1b", "gpt2"])
def test_int8_writes_the_same(name: str, plainly: Any) -> None:
    model = small(name)
    quantise(model)
    assert taken(model)
    same_as_plain(model, plainly)


def test_long_texts_of_many_beams(plainly: Any) -> None:
    """Longer than the room there is at first, so that columns are dropped, and room is made, several times."""
    model = small("gpt2", max_len=200).double()

    def long(**fields: Any) -> Generated:
        return generate(model, [[5, 6, 7], [8], [9, 10]], max_new_tokens=150, min_new_tokens=100, **fields)

    for fields in ({"beam": 5, "n_best": 5}, {}, {"sample": True, "seed": 1, "n_best": 3}):
        assert texts(long(**fields)) == texts(plainly(lambda f=fields: long(**f)))


@pytest.mark.parametrize("change", ["in place", "data", "loaded", "another"])
def test_changed_weights_are_packed_again(change: str, plainly: Any) -> None:
    model = small("gpt2")
    assert isinstance(model, Decoder)
    before = generate(model, [[5, 6]], max_new_tokens=12, beam=2).hypotheses[0][0].score
    weight = model.decoder.blocks[0].attention.w_qkv.weight  # type: ignore[union-attr]
    with torch.no_grad():
        if change == "in place":
            weight.mul_(-3)
        elif change == "data":
            weight.data.mul_(-3)
        elif change == "loaded":
            model.load_state_dict({name: x * 1.5 for name, x in model.state_dict().items()})
        else:
            model.decoder.blocks[0].attention.w_qkv.weight = torch.nn.Parameter(weight * -3)  # type: ignore[union-attr]
    again = generate(model, [[5, 6]], max_new_tokens=12, beam=2)
    assert again.hypotheses[0][0].score != pytest.approx(before, abs=1e-3)
    told = plainly(lambda: generate(model, [[5, 6]], max_new_tokens=12, beam=2))
    assert texts(again) == texts(told)
    assert again.scores == pytest.approx(told.scores, abs=1e-4)


def test_what_stays_with_the_plain_engine() -> None:
    for name in DECODING:
        model = small(name)
        own = (
            model.config.window or model.config.positions in ("t5", "alibi") or model.config.architecture == "recurrent"
        )
        assert taken(model) == (not own), name
    for feature in ("alibi", "t5", "xl", "additive", "linear", "performer", "window", "dynamic", "longrope"):
        assert not taken(small("gpt2", **FEATURES[feature])), feature
    assert not taken(small("gpt2", attention_backend="reference"))


def test_it_gives_way_to_whoever_looks() -> None:
    """A recorder and hooks see every step."""
    model = small("gpt2")
    with record(model) as seen:
        assert not taken(model)
        generate(model, [5, 6], max_new_tokens=4)
    assert len(seen.attentions["decoder.blocks.0.attention"]) >= 4
    calls: list[int] = []
    handle = model.get_submodule("decoder.blocks.1").register_forward_hook(lambda *_: calls.append(1))
    made = generate(model, [5, 6], max_new_tokens=4, min_new_tokens=4)
    handle.remove()
    assert len(calls) == len(made.hypotheses[0][0].tokens) == 4
    assert taken(model)


def test_gradients_and_static_caches_are_for_the_plain_engine() -> None:
    model = small("gpt2")
    assert isinstance(model, Decoder)
    assert cpu_obstacle(DecodingEngine(model)) is not None  # gradients are on
    with torch.no_grad():
        assert cpu_obstacle(DecodingEngine(model)) is None
        assert cpu_obstacle(DecodingEngine(model, cache="static")) is not None


def test_it_says_what_it_cannot_do() -> None:
    model = small("gpt2")
    assert isinstance(model, Decoder)
    with torch.no_grad():
        engine = accelerate(DecodingEngine(model))
    with pytest.raises(NotImplementedError, match="one token at a time"):
        engine.decode_tokens(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(NotImplementedError, match="cannot truncate"):
        engine.truncate(1)


def test_large_models_are_not_held_twice(monkeypatch: pytest.MonkeyPatch, plainly: Any) -> None:
    from regard.generation import cpu_engine

    monkeypatch.setattr(cpu_engine, "_MAX_PACKED_BYTES", 100)
    model = small("transformer-base")
    assert cpu_engine.packed_weights(model) is None
    assert taken(model)
    same_as_plain(model, plainly)


@pytest.mark.parametrize(("n_all", "n"), [(31, 5), (64, 1), (1000, 1), (4096, 8), (4099, 8), (32000, 8), (33333, 24)])
def test_top_is_topk(n_all: int, n: int) -> None:
    scores = torch.randn(5, n_all, generator=torch.Generator().manual_seed(n_all))
    scores[1] = -torch.inf
    scores[1, n_all - 1] = 0.5  # the best one last
    scores[2, : n_all // 2] = -torch.inf
    got, where = block_topk(scores, n)
    told = scores.topk(n).values
    assert torch.equal(got, told)
    assert torch.equal(scores.gather(1, where), told)
    for row in (0, 3, 4):
        assert len(set(where[row].tolist())) == n


@pytest.mark.parametrize(
    "fields", [{"beam": 4}, {"beam": 3, "min_new_tokens": 2}, {"beam": 2, "repetition_penalty": 1.4}]
)
def test_candidates_by_beam_are_those_of_all_beams(fields: dict[str, Any]) -> None:
    """Also where sums round to the same number, and the order is whatever sorting all of them makes it."""
    generator = torch.Generator().manual_seed(4)
    config = GenerateConfig(**fields)
    search = BeamSearch(None, config, eos_id=2)  # type: ignore[arg-type]
    n_tied = 0
    for case in range(20):
        logits = (torch.randn(6, config.beam, 9000, generator=generator) * 4).round() / 4  # many alike
        logits[1:3] += torch.randn(2, config.beam, 9000, generator=generator)  # and some not
        so_far = -300 * torch.rand(6, config.beam, generator=generator)
        so_far[5, 1:] = -torch.inf
        before = torch.randint(9000, (6, config.beam, 5), generator=generator)
        got = search._candidates(logits, before, so_far, None, 1, 0)
        score, _, index = search._topk(logits, before, so_far, None, 1)
        _, tied = search._topk_per_beam(logits, before, so_far, None, 1)
        n_tied += int(tied.sum())
        assert torch.equal(got.beam * 9000 + got.token, index), case
        assert torch.equal(got.score, score)
    assert 0 < n_tied < 120
