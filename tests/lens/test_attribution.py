"""Parts of logits and scores: they sum to the whole, and each is what the model loses without it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.small import inputs_of, small, small_config, source_of
from regard.attention.mechanisms import General
from regard.layers.quantised_linear import quantise
from regard.lens.activations import ActivationRecord, capture
from regard.lens.capture import attention_sites
from regard.lens.contributions import token_contributions
from regard.lens.head_roles import head_roles
from regard.lens.head_weights import copying_scores, ov_circuit
from regard.lens.interventions import patch, switch_off
from regard.lens.residual import Place, text_embeddings
from regard.lens.residual_graph import ResidualGraph
from regard.models import Model

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "grouped, rope": ("llama-1b", {"n_kv_heads": 2}),
    "windowed": ("mistral-7b", {}),
    "post-norm translator": ("transformer-base", {}),
    "t5": ("t5-small", {}),
    "masked": ("bert-base-masked", {}),
    "classifier": ("sentiment", {}),
    "vit": ("vit-tiny", {}),
    "captioner": ("captioner", {}),
    "norms on both sides": ("llama-1b", {"norm_place": "both"}),
    "norms of outputs": ("llama-1b", {"norm_place": "output", "qk_norm": True}),
    "parallel": ("gpt2", {"parallel_residual": "one-norm"}),
    "alibi": ("gpt2", {"positions": "alibi"}),
    "transformer-xl": ("gpt2", {"positions": "xl"}),
    "shared layers": ("gpt2", {"share_layers": True}),
    "without residual": ("gpt2", {"residual": False}),
    "fourier": ("bert-base-masked", {"mixer": "fourier"}),
    "sigmoid": ("gpt2", {"mixer": "sigmoid"}),
    "differential": ("transformer-base", {"mixer": "differential"}),
    "head without bias": ("bert-base-masked", {"head_transform_bias": False}),
    "several class tokens": ("vit-tiny", {"pooling": "class-tokens", "class_tokens": 2}),
    "first token and mean": ("vit-tiny", {"pooling": "first-and-mean"}),
}


@pytest.fixture(params=MODELS, ids=str, scope="module")
def record(request: pytest.FixtureRequest) -> ActivationRecord:
    name, fields = MODELS[request.param]
    model = small(name, **fields)
    return capture(model, *inputs_of(model.config))


def test_parts_sum_to_the_logit(record: ActivationRecord) -> None:
    for position, prompt, token in ((-1, 0, None), (2, 1, 1)):
        found = record.logit_attribution(token, position=position, prompt=prompt)
        index = record.index(prompt, position)
        token = (
            int(record.logits[prompt].argmax(-1).flatten()[0 if record.logits.dim() == 2 else index])
            if token is None
            else token
        )
        logit = record.logits[prompt, token] if record.logits.dim() == 2 else record.logits[prompt, index, token]
        assert found.logit == pytest.approx(float(logit), abs=1e-5)
        assert found.total == pytest.approx(found.logit, abs=1e-4)
        assert sum(value for _, value in found.writers()) == pytest.approx(found.total)
        difference = record.logit_attribution(token, position=position, prompt=prompt, against=2)
        assert difference.total == pytest.approx(difference.logit, abs=1e-4)


def test_a_network_is_its_neurons_and_a_head_the_tokens_it_reads(record: ActivationRecord) -> None:
    found = record.logit_attribution(position=2)
    for layer in range(2):
        assert float(found.neurons(layer=layer).sum()) == pytest.approx(float(found.parts["ff"][layer]), abs=1e-6)
        for kind in {"self", "cross", "encoder"} & set(found.parts):
            moved = found.tokens(layer=layer, kind=kind).sum(-1)
            torch.testing.assert_close(moved, found.parts[kind][layer], atol=1e-5, rtol=1e-4)


def test_pairs_of_writers_sum_to_the_score(record: ActivationRecord) -> None:
    for kind, layers in attention_sites(record.model).items():
        for layer in range(len(layers)):
            found = record.why(layer=layer, head=1, row=3, col=2, kind=kind, prompt=1)
            call = record.call(layer=layer, kind=kind)
            score = call.tile(slice(3, 4), slice(2, 3), masked=False)[1, 1, 0, 0]
            assert found.score == pytest.approx(float(score.detach()), abs=1e-4)
            assert found.total == pytest.approx(found.score, abs=1e-4)
            assert sum(found.parts.values()) + found.position_bias == pytest.approx(found.total)


def plain(n_layers: int = 1) -> Model:
    """A model whose states nothing rescales, so that a part is what is missing without it."""
    return small("gpt2", norm="none", n_layers=n_layers)


def test_a_part_is_what_the_logit_loses_without_it() -> None:
    model = plain()
    record = capture(model, *inputs_of(model.config))
    found = record.logit_attribution(5)
    with torch.no_grad():
        for head in range(4):
            with (
                switch_off(model, [("self", 0, head)]),
                patch(model, {"decoder.blocks.0.ff.output": record["decoder.blocks.0.ff.output"]}),
            ):
                lost = record.logits[0, -1, 5] - model(*record.inputs.tensors)[0, -1, 5]
            assert float(lost) == pytest.approx(float(found.parts["self"][0, head]), abs=1e-5)
        neuron = int(found.neurons(layer=0).abs().argmax())
        without = lambda x: x.index_fill(-1, torch.tensor([neuron]), 0)  # noqa: E731
        with patch(model, {"decoder.blocks.0.ff.neurons": without}):
            lost = record.logits[0, -1, 5] - model(*record.inputs.tensors)[0, -1, 5]
        assert float(lost) == pytest.approx(float(found.neurons(layer=0)[neuron]), abs=1e-5)


def test_a_score_without_a_writer_is_smaller_by_the_pairs_it_is_part_of() -> None:
    model = plain(n_layers=2)
    record = capture(model, *inputs_of(model.config))
    found = record.why(layer=1, head=2, row=4, col=1)
    fixed = {"decoder.blocks.0.ff.output": record["decoder.blocks.0.ff.output"]}
    with switch_off(model, [("self", 0, 3)]), patch(model, fixed):
        other = capture(model, *inputs_of(model.config)).why(layer=1, head=2, row=4, col=1)
    pairs = [value for names, value in found.parts.items() if "self.0.3" in names]
    assert found.score - other.score == pytest.approx(sum(pairs), abs=1e-5)


def test_wrong_questions_are_answered_in_a_sentence() -> None:
    model = small("transformer-base")
    record = capture(model, *inputs_of(model.config))
    with pytest.raises(ValueError, match="position=99: this prompt has"):
        record.logit_attribution(position=99)
    with pytest.raises(ValueError, match="is not one of the 31 outputs"):
        record.logit_attribution(31)
    with pytest.raises(ValueError, match="does not contribute to this logit directly"):
        record.logit_attribution(3).tokens(layer=0, kind="encoder")
    with pytest.raises(ValueError, match="prompt=3: the record has 3 prompts"):
        record.why(layer=0, head=0, row=0, col=0, prompt=3)
    with pytest.raises(ValueError, match="layer=2: this model has 2 layers"):
        record.logit_attribution(3).neurons(layer=2)
    with pytest.raises(ValueError, match="layer=2: the self attention has 2 layers"):
        record.logit_attribution(3).tokens(layer=2)
    some = capture(model, *inputs_of(model.config), positions=[1])
    with pytest.raises(ValueError, match="capture all of them"):
        some.why(layer=0, head=0, row=1, col=1)
    with pytest.raises(ValueError, match="position 2 was not captured"):
        some.logit_attribution(position=2)
    assert some.logit_attribution(3, position=1).total == pytest.approx(record.logit_attribution(3, position=1).total)


def test_layers_and_prompts_may_be_counted_from_the_end() -> None:
    model = small("gpt2")
    record = capture(model, [[5, 6, 7], [8, 9]])
    found, same = (record.logit_attribution(4, prompt=prompt) for prompt in (-1, 1))
    assert found.total == same.total
    assert torch.equal(found.neurons(layer=-1), same.neurons(layer=1))
    assert torch.equal(found.tokens(layer=-1), same.tokens(layer=1))
    pair = {"head": 0, "row": 1, "col": 0}
    assert torch.equal(record.why(layer=-1, **pair).pairs, record.why(layer=1, **pair).pairs)
    assert torch.equal(record.head_results(layer=-1), record.head_results(layer=1))


def test_an_encoder_s_scores_are_of_the_source_s_tokens() -> None:
    model = small("t5-small")
    record = capture(model, [[5, 6, 7, 8, 9, 10, 11]], [[3, 4]])
    scores = record.call(layer=1, kind="encoder").tile(masked=False)[0, 1]
    for row, col in ((-1, -1), (5, 6)):  # beyond the end of the target
        found = record.why(layer=1, head=1, row=row, col=col, kind="encoder")
        assert found.score == pytest.approx(float(scores[row, col].detach()), abs=1e-4)
        assert found.total == pytest.approx(found.score, abs=1e-4)


def test_global_tokens_have_projections_of_their_own() -> None:
    model = small("bert-base-masked", window=3, global_tokens=2, global_projections=True)
    record = capture(model, *inputs_of(model.config))
    scores = record.call(layer=1).tile(masked=False)[0, 2]
    for row, col in ((1, 4), (4, 1)):
        found = record.why(layer=1, head=2, row=row, col=col)
        assert found.score == pytest.approx(float(scores[row, col].detach()), abs=1e-4)
        assert found.total == pytest.approx(found.score, abs=1e-4)
    with pytest.raises(ValueError, match="one value for global and one for other queries"):
        record.logit_attribution(4).tokens(layer=1)


def test_what_cannot_be_split_is_told() -> None:
    record = capture(model := small("sentiment", pooling="map"), *inputs_of(model.config))
    with pytest.raises(ValueError, match="not linear in the states"):
        record.logit_attribution(1)
    record = capture(model := small("gpt2", experts=2), *inputs_of(model.config))
    with pytest.raises(ValueError, match="it has experts"):
        record.logit_attribution(4).neurons(layer=0)
    record = capture(model := small("bert-base-masked", mixer="linformer"), *inputs_of(model.config))
    with pytest.raises(ValueError, match="only a score that is a dot product"):
        record.why(layer=0, head=0, row=1, col=1)
    model = small("gpt2")
    model.decoder.blocks[1].attention.mechanism = General(4, 6)  # a dot product, but of queries that it projects first
    with pytest.raises(ValueError, match="only a score that is a dot product"):
        capture(model, *inputs_of(model.config)).why(layer=1, head=0, row=1, col=1)
    assert head_roles(model, [[5, 6, 7, 8, 5, 9]]).scores["inhibition"].isnan().all()


def test_a_resampler_stands_between_the_decoder_and_the_source() -> None:
    model = small("captioner", norm_place="pre", text_model=small_config("gpt2"), resampler_tokens=3)
    record = capture(model, source_of(model.config, batch=1), [[3, 4, 5]])
    found = record.logit_attribution(4)
    assert found.total == pytest.approx(found.logit, abs=1e-4)
    for ask in (
        lambda: record.why(layer=1, head=1, row=1, col=2, kind="cross"),
        lambda: token_contributions(record),
        lambda: ResidualGraph(model),
    ):
        with pytest.raises(ValueError, match="reads the vectors of a resampler"):
            ask()


def test_integers_are_not_taken_for_weights() -> None:
    model = quantise(small("gpt2"))
    record = capture(model, *inputs_of(model.config))
    for ask in (
        lambda: record.logit_attribution(1),
        lambda: record.why(layer=1, head=0, row=2, col=1),
        lambda: record.head_results(layer=0),
        lambda: token_contributions(record),
        lambda: ResidualGraph(model),
        lambda: ov_circuit(model, 0, 0),
        lambda: head_roles(model),
        lambda: copying_scores(model),
        lambda: capture(model, [[5, 6]], grad=True),
    ):
        with pytest.raises(ValueError, match="int8 weights cannot be split"):
            ask()
    sinusoids = quantise(small("gpt2", positions="sinusoidal"))
    record = capture(sinusoids, *inputs_of(sinusoids.config))
    _, vectors = text_embeddings(record, Place("decoder", 1, 3))
    torch.testing.assert_close(sum(vectors.values()), record.at("decoder", 1, 3))
