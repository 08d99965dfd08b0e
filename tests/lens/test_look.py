"""Every weight that a look shows is the model's own: fused, cached, beam-searched, in int8, in every family."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from generation.spoken import captioner, classifier, language_model, translator
from models.small import small, small_config, source_of, target_of
from regard.attention import record
from regard.export.quantise import quantise
from regard.generation import GenerateConfig, generate
from regard.lens import Look
from regard.models import Model, build
from regard.presets import PRESETS

from .dense import Matrices, written_out

FAMILIES = tuple(name for name in PRESETS if name != "lstm-plain")
VARIANTS: dict[str, dict[str, Any]] = {
    "gpt2": {"positions": "alibi"},
    "llama-1b": {"qk_norm": True, "window": 3},
    "bert-base": {"positions": "xl", "share_layers": True},
    "transformer-tiny": {"mixer": "linear"},
    "sentiment": {"mixer": "performer"},
}


def given(model: Model) -> tuple[Any, list[int] | None]:
    """What to look at, and a target where there is an encoder beside a decoder."""
    source = source_of(model.config, 1)
    what = source[0].tolist() if model.config.source == "text" else source
    both = model.config.architecture in ("encoder-decoder", "recurrent")
    return what, target_of(model.config, 1)[0].tolist() if both else None


def assert_equal(look: Look, matrices: Matrices, tolerance: float = 1e-5) -> None:
    for kind in look.kinds:
        for layer, (place, call) in enumerate(look._capture.sites[kind]):
            wanted = matrices[place][call] if place in matrices else torch.cat(matrices[f"{place}.steps"], 2)
            for head in range(look.heads(kind=kind)):
                found = look.weights(layer=layer, head=head, kind=kind)
                assert (found - wanted[0, head]).abs().max() < tolerance, (kind, layer, head)
            assert (look.weights(layer=layer, kind=kind) - wanted[0].mean(0)).abs().max() < tolerance


def referenced(name: str, look: Look, **fields: Any) -> Matrices:
    """The same parameters and inputs through the backend that is the formula, dense."""
    twin = build(small_config(name, attention_backend="reference", **fields)).eval()
    twin.load_state_dict(look.model.state_dict())
    with torch.no_grad(), written_out(twin) as matrices:
        twin.hidden(*look.inputs)  # type: ignore[operator]
    return matrices


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_are_the_reference_s(name: str) -> None:
    look = regard.look(small(name), *given(small(name)))
    assert_equal(look, referenced(name, look))
    for kind in look.kinds:
        assert (
            look.weights(layer=-1, head=0, kind=kind).sum(-1).allclose(torch.ones(len(look.rows(kind=kind))), atol=1e-5)
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_so_are_those_of_other_mechanisms_biases_and_masks(name: str) -> None:
    model = small(name, **VARIANTS[name])
    look = regard.look(model, *given(model))
    assert_equal(look, referenced(name, look, **VARIANTS[name]))


@pytest.mark.parametrize("name", FAMILIES)
def test_an_int8_model_shows_its_own_weights(name: str) -> None:
    rounded, (what, target) = quantise(small(name)), given(small(name))
    with written_out(rounded) as matrices:
        look = regard.look(rounded, what, target)
    assert_equal(look, matrices)
    far = regard.look(small(name), what, target).weights(layer=-1, head=0, kind=look.kinds[-1]) - look.weights(
        layer=-1, head=0, kind=look.kinds[-1]
    )
    assert 0 < far.abs().max() < 0.5, "int8 is near, and not the same"


def steps_of(matrices: Matrices, place: str, first: int) -> list[Tensor]:
    """The weights of each decoding step (B, H, 1, S): of the prompt its last row."""
    if f"{place}.steps" in matrices:
        return matrices[f"{place}.steps"][first - 1 :]
    return [x[:, :, -1:] for x in matrices[place]]


@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize(
    "name", ["gpt2", "llama-1b", "transformer-base", "t5-small", "captioner", "bahdanau-gru", "luong-lstm"]
)
def test_a_written_text_looks_as_it_did_while_it_was_written(name: str, beam: int) -> None:
    """Step by step through the cache, along the ancestry of the beam that won."""
    model = small(name)
    what, _ = given(model)
    inputs = what if isinstance(what, Tensor) else [what]
    config = GenerateConfig(beam=beam, n_best=beam, max_new_tokens=8, cache="static")
    with record(model), written_out(model) as matrices:  # a recorder keeps decoding on the path that has taps
        made = generate(model, inputs, config)
    look = regard.look(model, what, generate=config.with_(n_best=1))
    best, n_prompt = made.best[0], len(made.prompts[0])
    assert look.generated is not None
    assert look.generated.best[0].tokens == best.tokens
    for kind in look.kinds:
        if kind == "encoder":
            continue
        for layer, (place, _) in enumerate(look._capture.sites[kind]):
            shown = torch.stack(
                [look.weights(layer=layer, head=head, kind=kind) for head in range(look.heads(kind=kind))]
            )
            for t, (row, step) in enumerate(zip(best.beams, steps_of(matrices, place, n_prompt), strict=False)):
                then = step[row, :, 0]  # (H, S): slots not yet written have weight 0
                width = min(then.shape[-1], shown.shape[-1])
                at = n_prompt - 1 + t
                if at < shown.shape[1]:
                    assert (then[:, :width] - shown[:, at, :width]).abs().max() < 1e-5, (kind, layer, t)
                    assert then[:, width:].abs().sum() < 1e-5


def test_some_beam_changes_its_row() -> None:
    """Without that the test above would not follow anything."""
    model = small("transformer-base")
    look = regard.look(model, given(model)[0], generate={"beam": 4, "max_new_tokens": 8})
    assert look.generated is not None
    assert len(set(look.generated.best[0].beams)) > 1


def test_a_compiled_model_and_one_in_training_are_looked_at_as_they_are() -> None:
    model = small("gpt2", dropout=0.3)
    wanted = regard.look(model, [5, 6, 7]).weights(layer=1, head=0)
    model.train()
    assert torch.equal(regard.look(model, [5, 6, 7]).weights(layer=1, head=0), wanted)
    assert model.training
    assert torch.equal(regard.look(torch.compile(model), [5, 6, 7]).weights(layer=1, head=0), wanted)  # type: ignore[arg-type]


# ---- what is kept


def test_only_q_and_k_are_kept_each_in_memory_of_its_own() -> None:
    look = regard.look(small("gpt2"), list(range(3, 12)))
    seen = [x for calls in look._capture.recorder.attentions.values() for x in calls]
    assert len(seen) == 2
    for one in seen:
        assert one.k is not None
        assert one.v is None
        assert one.output is None
        for kept in (one.q, one.k):
            assert kept.untyped_storage().nbytes() == kept.nbytes == 4 * 9 * 24
    assert look._capture.recorder.tensors == {}


def test_logits_are_formed_for_one_position_alone() -> None:
    model = small("gpt2")
    sizes: list[int] = []
    model.head.register_forward_hook(lambda _, given, out: sizes.append(out.shape[1]))  # type: ignore[union-attr]
    look = regard.look(model, list(range(3, 12)))
    assert sizes == []
    found = look.next(4, k=31)
    assert sizes == [1]
    with torch.no_grad():
        wanted = model(torch.tensor([list(range(3, 12))]))[0, 4].softmax(-1)
    assert [x.token for x in found] == wanted.argsort(descending=True).tolist()
    assert sum(x.probability for x in found) == pytest.approx(1, abs=1e-5)
    assert found[0].probability == pytest.approx(float(wanted.max()), abs=1e-6)


@pytest.mark.parametrize("length", [2048, 2049, 2600])
@pytest.mark.parametrize("name", ["gpt2", "llama-1b"])
def test_a_long_text_goes_through_in_pieces_and_gives_the_same(name: str, length: int) -> None:
    model = small(name, max_len=4096)
    tokens = torch.randint(31, (1, length))
    look = regard.look(model, tokens)
    whole = model.hidden(tokens)[0].detach()  # type: ignore[operator]  # with gradients nothing is cut
    torch.testing.assert_close(look.hidden(), whole, rtol=1e-4, atol=1e-5)
    row = look.weights(layer=1, head=2, rows=length - 1)[0]
    assert float(row.sum()) == pytest.approx(1, abs=1e-5)


def test_looks_taken_by_several_threads_do_not_mix() -> None:
    model, texts = small("gpt2"), [[n, n + 1, n + 2, 3] for n in range(3, 11)]
    wanted = [regard.look(model, text).weights(layer=1, head=0) for text in texts]
    found: dict[int, Tensor] = {}
    threads = [
        threading.Thread(target=lambda n=n: found.__setitem__(n, regard.look(model, texts[n]).weights(layer=1, head=0)))
        for n in range(len(texts))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[n], wanted[n]) for n in range(len(texts)))


# ---- what can be asked


@pytest.fixture(scope="module")
def seen() -> Look:
    return regard.look(translator(), "the cat sat on the mat.", "고양이가 앉았다.")


def test_tiles_tops_and_overviews_agree_with_the_matrix(seen: Look) -> None:
    for kind in seen.kinds:
        dense = seen.weights(layer=1, head=2, kind=kind)
        torch.testing.assert_close(
            seen.weights(layer=1, head=2, rows=slice(1, 4), cols=[0, 2], kind=kind), dense[1:4][:, [0, 2]]
        )
        torch.testing.assert_close(seen.weights(layer=-1, head=-2, rows=1, kind=kind), dense[1:2])
        for n, looks in enumerate(seen.top(2, layer=1, head=2, kind=kind)):
            assert looks.row is seen.rows(kind=kind)[n]
            values = dense[n][dense[n] > 0].sort(descending=True).values[:2]
            assert [weight for _, weight in looks.at] == pytest.approx(values.tolist())
            assert looks.at[0][0] is seen.cols(kind=kind)[int(dense[n].argmax())]
        entropy = -(dense * dense.clamp(min=1e-30).log()).sum(-1)
        torch.testing.assert_close(seen.entropy(kind=kind, layer=1)[2], entropy, atol=1e-4, rtol=1e-4)
        assert seen.pooled(kind=kind, layer=1, head=2, h=500, w=500).shape == dense.shape
        torch.testing.assert_close(seen.pooled(kind=kind, layer=1, head=2, h=1, w=1)[0, 0], dense.mean())
        mean = torch.stack([seen.pooled(kind=kind, layer=1, head=head, h=2, w=3) for head in range(4)]).mean(0)
        torch.testing.assert_close(seen.pooled(kind=kind, layer=1, head=None, h=2, w=3), mean)


def test_distance_and_rollout(seen: Look) -> None:
    dense = torch.stack([seen.weights(layer=0, head=head) for head in range(4)])
    place = torch.arange(dense.shape[-1])
    far = (dense * (place[:, None] - place).abs()).sum(-1)
    torch.testing.assert_close(seen.distance(kind="self", layer=0), far)
    flow = seen.rollout(kind="self")
    torch.testing.assert_close(flow.sum(-1), torch.ones(len(flow)))
    torch.testing.assert_close(seen.rollout(kind="self", rows=[2]), flow[2:3])
    with pytest.raises(ValueError, match="kind='cross' attends to another text"):
        seen.rollout(kind="cross")
    with pytest.raises(ValueError, match="so they have no distance"):
        seen.distance(kind="cross")


def test_distance_across_an_image_is_in_patches_and_the_class_token_is_nowhere() -> None:
    look = regard.look(small("vit-tiny"), torch.randn(1, 16, 16))
    dense = torch.stack([look.weights(layer=0, head=head) for head in range(look.heads())])
    far = look.distance(layer=0)
    place = torch.tensor([(n // 4, n % 4) for n in range(16)]).float()
    wanted = (dense[:, 1:, 1:] * torch.cdist(place, place)).sum(-1)
    torch.testing.assert_close(far[:, 1:], wanted)
    assert far[:, 0].abs().max() == 0


def test_so_it_is_in_a_stage_of_an_image_encoder() -> None:
    model = small("swin-tiny", stages=(1, 1), stage_heads=(2, 4), class_tokens=0, pooling="mean")
    look = regard.look(model, torch.randn(3, 16, 16))
    assert torch.equal(look.weights(), look.weights(kind="stage0"))  # the first kind, as there is no "self"
    place = torch.tensor([(n // 4, n % 4) for n in range(16)]).float()
    dense = look.map(layer=0, kind="stage0").tile()[0]
    torch.testing.assert_close(look.distance(), (dense * torch.cdist(place, place)).sum(-1))


def test_what_a_look_is_at() -> None:
    look = regard.look(captioner(), torch.randn(3, 16, 16))
    assert look.kinds == ("encoder", "self", "cross")
    assert look.image is not None
    assert [x.text for x in look.cols(kind="cross")][:3] == ["[class]", "patch 0,0", "patch 0,1"]
    assert look.cols(kind="cross")[6].box == (0.25, 0.25, 0.5, 0.5)
    assert look.text is None
    assert isinstance(look.target_text, str)
    assert len(look.inputs) == 2
    language = regard.look(language_model(), "the cat", generate={"max_new_tokens": 4, "min_new_tokens": 4})
    assert language.generated is not None
    assert language.text is not None
    assert language.text.startswith("the cat")
    assert len(language.rows()) == len(language.generated.prompts[0]) + 4
    text = regard.look(classifier(), "the dog ran")
    assert text.kinds == ("encoder",)
    assert [x.special for x in text.rows()][:: len(text.rows()) - 1] == [True, True]
    assert repr(text).startswith("Look(encoder 2×4 of ")


def test_a_row_of_cross_attention_is_named_by_the_token_that_is_written_there(seen: Look) -> None:
    read, written = seen.tokens(kind="self"), seen.tokens(kind="cross")
    assert read[0] == seen.model.config.bos_id
    assert written[-1] == seen.model.config.eos_id
    assert written[:-1] == read[1:]
    cut = regard.look(translator(), "the cat", generate={"max_new_tokens": 3, "min_new_tokens": 3})
    assert [x.text for x in cut.rows(kind="cross")][-1] == "…", "nobody knows what would have come"


def test_the_target_may_be_ids_and_may_have_its_end_already(seen: Look) -> None:
    ids = [x for x in seen.tokens(kind="cross") if x is not None]
    again = regard.look(seen.model, "the cat sat on the mat.", ids)
    torch.testing.assert_close(
        again.weights(layer=1, head=1, kind="cross"), seen.weights(layer=1, head=1, kind="cross")
    )


# ---- what is refused


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda x: x.weights(layer=2, head=0), r"layer=2: this model has self attention in 2 layers, 0 … 1"),
        (lambda x: x.weights(layer=0, head=-5, kind="cross"), r"head=-5: this model has 4 heads, 0 … 3"),
        (
            lambda x: x.weights(layer=0, head=0, kind="both"),
            r"kind='both': this model has 'encoder' and 'self' and 'cross' atten",
        ),
        (lambda x: x.weights(layer=0, head=0, rows=99), r"rows=99 is out of range for size"),
        (lambda x: x.next(99), r"position=99: there are \d+ tokens, 0 … \d+"),
        (lambda x: x.next(0, temperature=-1.0), r"temperature=-1.0 must be a positive number"),
        (lambda x: x.top(0), r"k=0 must be at least 1"),
        (lambda x: x.pooled(h=0), r"h=0 must be at least 1"),
        (lambda x: x.words().pooled(reduce="min"), r"reduce='min' is neither 'mean' nor 'max'"),
    ],
)
def test_what_is_out_of_range_is_said_in_one_sentence(seen: Look, ask: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ask(seen)


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: small("gpt2"), ([3] * 25,), "text has 25 tokens, but this model reads at most max_len=24"),
        (lambda: small("gpt2"), ([31],), "text holds token 31, but the vocabulary has 31: 0 to 30"),
        (lambda: small("gpt2"), ([],), "text is empty"),
        (lambda: small("gpt2"), ("the cat",), "no tokenizer for text to read"),
        (lambda: small("gpt2"), ([3], [4]), "target is for models with an encoder"),
        (lambda: small("gpt2"), ([[3], [4]],), "a look reads one text, got 2"),
        (lambda: small("bert-base"), ([3], [4]), "target is for models that write text"),
        (lambda: small("transformer-base"), ([3], [4] * 24), "target has 25 tokens, but"),
        (lambda: small("lstm-plain"), ([3], [4]), "no attention to look at: it is built with alignment='none'"),
        (lambda: small("bert-base", mixer="fourier"), ([3, 4],), "no attention to look at.*mixer='fourier'"),
        (lambda: small("vit-tiny"), (torch.randn(2, 3, 16, 16),), "a look reads one image, got 2"),
        (lambda: small("captioner-regions"), (torch.randn(2, 5, 10),), "the regions of one image"),
    ],
)
def test_bad_input_is_said_in_one_sentence(make: Any, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        regard.look(make(), *arguments)


def test_target_and_generate_exclude_each_other_and_a_model_is_needed() -> None:
    with pytest.raises(ValueError, match="target and generate are both given"):
        regard.look(small("transformer-base"), [3], [4], generate={"beam": 2})
    with pytest.raises(TypeError, match="not Linear"):
        regard.look(torch.nn.Linear(2, 2), [3])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device=cuda is for loading"):
        regard.look(small("gpt2"), [3], device="cuda")


def test_linformer_looks_at_summaries() -> None:
    model = small("bert-base", mixer="linformer", mixer_size=4)
    look = regard.look(model, list(range(3, 12)))
    assert [x.text for x in look.cols()] == [f"summary {n}" for n in range(4)]
    assert look.weights(layer=0, head=0).shape == (9, 4)


def test_a_directory_is_opened(tmp_path: Any) -> None:
    model = translator()
    model.save(tmp_path / "m")
    look = regard.look(tmp_path / "m", "the cat", "고양이", device="cpu")
    assert torch.equal(look.weights(layer=0, head=0), regard.look(model, "the cat", "고양이").weights(layer=0, head=0))
