"""Interventions against models that were built that way, and against the model as it was before."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

from models.small import inputs_of, shaken, small, small_config, source_of
from regard.attention import MultiHeadAttention, edits, record
from regard.generation import generate
from regard.lens.capture import attention_modules, n_heads_of
from regard.lens.interventions import attention_scale, edit_head, no_causal_mask, patch, switch_off, watch
from regard.models import Model, build

FAMILIES = {
    **{"decoder": "gpt2", "grouped": "llama-1b", "windowed": "mistral-7b", "translator": "transformer-base"},
    **{"t5": "t5-small", "encoder": "bert-base-masked", "classifier": "sentiment", "vit": "vit-tiny"},
    **{"swin": "swin-tiny", "captioner": "captioner", "regions": "captioner-regions"},
}


@pytest.fixture(params=FAMILIES, ids=str)
def model(request: pytest.FixtureRequest) -> Model:
    fields = {"n_kv_heads": 2} if request.param == "grouped" else {}
    return small(FAMILIES[request.param], **fields)


def run(model: Model, seed: int = 2) -> Tensor:
    inputs = list(inputs_of(model.config))
    inputs[0] = source_of(model.config, seed=seed)
    with torch.no_grad():
        return model(*inputs)


def twin(model: Model, **fields: Any) -> Model:
    """The same parameters under another config."""
    made = build(model.config.with_(**fields)).eval()
    made.load_state_dict(model.state_dict())
    return made


# ---- heads switched off


def test_a_head_that_is_off_is_one_whose_output_columns_are_zero(model: Model) -> None:
    for kind, modules in attention_modules(model).items():
        for layer, head in ((0, 1), (len(modules) - 1, modules[0].n_heads - 1)):
            without = copy.deepcopy(model)
            attention = attention_modules(without)[kind][layer]
            assert isinstance(attention, MultiHeadAttention)
            with torch.no_grad():
                attention.w_o.weight[:, head * attention.d_head : (head + 1) * attention.d_head] = 0
            with switch_off(model, [(kind, layer, head)]):
                found = run(model)
            torch.testing.assert_close(found, run(without), atol=1e-6, rtol=1e-5)
            assert (found - run(model)).abs().max() > 1e-4


def test_all_heads_off_leave_nothing_of_the_memory() -> None:
    model = small("transformer-base")
    off = [("cross", layer, head) for layer in range(2) for head in range(4)]
    with switch_off(model, off):
        here, there = run(model, seed=2), run(model, seed=5)
    assert torch.equal(here, there)
    assert not torch.equal(run(model, seed=2), run(model, seed=5))


def test_layers_that_share_their_parameters_are_still_several() -> None:
    shared = small("bert-base-masked", share_layers=True, n_layers=3)
    apart = build(shared.config.with_(share_layers=False)).eval()
    state = dict(shared.state_dict())
    state |= {
        name.replace("blocks.0.", f"blocks.{layer}."): x
        for name, x in shared.state_dict().items()
        for layer in (1, 2)
        if ".blocks.0." in name
    }
    apart.load_state_dict(state)
    torch.testing.assert_close(run(shared), run(apart))
    steer = torch.randn(24, generator=torch.Generator().manual_seed(0))
    for layer in range(3):
        for intervene in (
            lambda m, at=layer: switch_off(m, [("encoder", at, 1)]),
            lambda m, at=layer: attention_scale(m, 3.0, layers=[at]),
            lambda m, at=layer: patch(m, {f"encoder.blocks.{at}": lambda x: x + steer}),
            lambda m, at=layer: patch(m, {f"encoder.blocks.{at}.attention": lambda x: x * 2}),
        ):
            with intervene(shared), intervene(apart):
                found, wanted = run(shared), run(apart)
                assert torch.equal(found, run(shared))  # counted anew in every pass
            torch.testing.assert_close(found, wanted)
            assert (wanted - run(apart)).abs().max() > 1e-4


# ---- weights of one's own


def test_a_head_told_to_look_where_it_looks_changes_nothing(model: Model) -> None:
    for kind, modules in attention_modules(model).items():
        layer = len(modules) - 1
        with record(model) as seen:
            before = run(model)
        name = next(n for n, m in model.named_modules() if m is modules[layer])
        found = seen.map(name)
        for weights in (found.part(heads=1), found.dense()[:, 1]):
            with edit_head(model, kind, layer, 1, weights):
                torch.testing.assert_close(run(model), before, atol=2e-6, rtol=1e-5)
        uniform = torch.full(found.shape[2:], 1 / found.shape[3])
        with edit_head(model, kind, layer, 1, uniform):
            assert (run(model) - before).abs().max() > 1e-5


def test_an_edited_head_returns_the_weighted_values() -> None:
    model = small("llama-1b", n_kv_heads=2)
    weights = torch.rand(9, 9).softmax(-1)
    with edit_head(model, "self", 0, 3, weights), record(model) as seen:
        run(model)
    one = seen.attentions["decoder.blocks.0.attention"][0]
    assert one.v is not None
    assert one.output is not None
    assert one.v.shape[1] == 2
    torch.testing.assert_close(one.output[:, 3], weights @ one.v[:, 1])
    with edit_head(model, "self", 0, 3, weights[[2, 5]], rows=[2, 5]), record(model) as some:
        run(model)
    partly = some.attentions["decoder.blocks.0.attention"][0].output
    with record(model) as plain:
        run(model)
    whole = plain.attentions["decoder.blocks.0.attention"][0].output
    assert partly is not None
    assert whole is not None
    torch.testing.assert_close(partly[:, 3, [2, 5]], one.output[:, 3, [2, 5]])
    rest = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(partly[:, 3, rest], whole[:, 3, rest])


# ---- activations of another run


def test_a_run_patched_with_its_own_activations_is_itself(model: Model) -> None:
    names = [f"{stack}.blocks.{layer}" for stack in ("encoder", "decoder") for layer in range(2)]
    names = ["encoder", "decoder", *names, *(f"{name}.attention" for name in names)]
    names = [name for name in names if hasattr(model, name.split(".")[0])]
    with watch(model, names) as seen:
        before = run(model)
    assert sorted(seen) == sorted(names)
    assert seen[names[-1]].dim() == 4
    with patch(model, seen):
        assert torch.equal(run(model), before)


def test_patching_all_that_is_read_makes_it_the_other_run(model: Model) -> None:
    last = "encoder.blocks.1" if hasattr(model, "encoder") else "decoder.blocks.1"
    with watch(model, [last]) as seen:
        other = run(model, seed=9)
    with patch(model, seen):
        found = run(model)
    torch.testing.assert_close(found, other)
    assert (run(model) - other).abs().max() > 1e-4


def test_a_patch_at_one_position_is_not_seen_before_it() -> None:
    model = small("gpt2")
    with watch(model, ["decoder.blocks.0"]) as seen:
        run(model, seed=9)
    before = run(model)
    for value in (seen["decoder.blocks.0"], seen["decoder.blocks.0"][:, 4:5]):
        with patch(model, {"decoder.blocks.0": value}, positions=[4]):
            after = run(model)
        assert torch.equal(after[:, :4], before[:, :4])
        assert ((after - before).abs().amax(-1)[:, 4:] > 1e-5).all()
    with patch(model, {"decoder.blocks.1": seen["decoder.blocks.0"]}, positions=-1):
        assert torch.equal(run(model)[:, :-1], before[:, :-1])


def test_a_head_is_patched_alone() -> None:
    model = small("transformer-base")
    place = "decoder.blocks.1.cross_attention"
    with watch(model, [place]) as other:
        run(model, seed=9)
    with patch(model, {("cross", 1, 2): other[place][:, 2]}), watch(model, [place]) as found:
        run(model)
    with watch(model, [place]) as plain:
        run(model)
    assert torch.equal(found[place][:, 2], other[place][:, 2])
    assert torch.equal(found[place][:, [0, 1, 3]], plain[place][:, [0, 1, 3]])


# ---- how attention is computed


@pytest.mark.parametrize("name", ["gpt2", "llama-1b", "mistral-7b", "transformer-base", "captioner"])
def test_without_the_causal_mask_it_is_the_model_built_without_one(name: str) -> None:
    model = small(name)
    seeing = twin(model, causal=False)
    with no_causal_mask(model), record(model) as seen:
        torch.testing.assert_close(run(model), run(seeing))
    weights = seen.map("decoder.blocks.0.attention").dense()
    assert (weights.triu(1).sum((-1, -2)) > 0.1).all()
    assert (run(model) - run(seeing)).abs().max() > 1e-3


def test_padding_stays_hidden_without_the_causal_mask() -> None:
    model = small("gpt2")
    tokens = source_of(model.config)
    keep = torch.ones(tokens.shape, dtype=torch.bool)
    keep[:, 6:] = False
    with no_causal_mask(model), torch.no_grad():
        a = model(tokens, padding_mask=keep)[:, :6]
        b = model(torch.where(keep, tokens, 5), padding_mask=keep)[:, :6]
    assert torch.equal(a, b)


@pytest.mark.parametrize("factor", [-1.0, 0.0, 4.0])
def test_another_scale_is_that_of_a_model_built_with_it(model: Model, factor: float) -> None:
    config = model.config
    d_head = config.d_head or config.d_model // config.n_heads
    own = d_head**-0.5 if config.attention_scale is None else config.attention_scale
    with attention_scale(model, factor):
        torch.testing.assert_close(run(model), run(twin(model, attention_scale=own * factor)), atol=1e-5, rtol=1e-4)


def test_scale_reaches_the_relative_positions_of_transformer_xl() -> None:
    model = small("gpt2", positions="xl")
    with attention_scale(model, 2.0):
        torch.testing.assert_close(run(model), run(twin(model, attention_scale=2 * 6**-0.5)))
    assert all(module.position_bias.scale == pytest.approx(6**-0.5) for module in attention_modules(model)["self"])


def test_what_is_recorded_is_what_was_computed() -> None:
    model = small("gpt2")
    with attention_scale(model, 0.0, layers=[1]), record(model) as seen:
        run(model)
    flat, own = (seen.map(f"decoder.blocks.{layer}.attention").dense() for layer in (1, 0))
    torch.testing.assert_close(flat[0, 0], torch.ones(9, 9).tril() / torch.arange(1, 10)[:, None])
    assert (own - flat).abs().max() > 0.01


# ---- recurrent models


def test_recurrent_attention_can_be_switched_off_and_scaled() -> None:
    for name in ("luong-lstm", "bahdanau-gru"):
        model = small(name)
        with switch_off(model, [("cross", 0, 0)]), record(model) as seen:
            off = run(model)
        (one,) = seen.attentions["decoder.cross_attention"]
        assert one.output is not None
        assert not one.output.any()
        assert (off - run(model)).abs().max() > 1e-4
    model = small("luong-lstm")
    with attention_scale(model, 0.0), record(model) as seen:
        run(model)
    weights = seen.map("decoder.cross_attention").dense()
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / weights.shape[-1]))
    with attention_scale(model, 1.0):
        changed = run(model)
    torch.testing.assert_close(changed, run(model), atol=1e-6, rtol=1e-5)


# ---- leaving no trace

ALL: dict[str, Callable[[Model], AbstractContextManager[object]]] = {
    "switch_off": lambda m: switch_off(m, [(kind, 0, 0) for kind in attention_modules(m)]),
    "scale": lambda m: attention_scale(m, 3.0),
    "edit": lambda m: patch(m, {f"{'encoder' if hasattr(m, 'encoder') else 'decoder'}.blocks.0": lambda x: -x}),
    "watch": lambda m: watch(m, []),
}


@pytest.mark.parametrize("name", ALL)
def test_afterwards_the_model_is_what_it_was(model: Model, name: str) -> None:
    before, state = run(model), copy.deepcopy(model.state_dict())
    with ALL[name](model):
        changed = run(model)
    with pytest.raises(RuntimeError, match="something else"), ALL[name](model):
        _fail(run(model))
    assert edits._edits == ()
    assert torch.equal(run(model), before)
    assert torch.equal(changed, before) == (name == "watch")
    assert all(torch.equal(x, state[key]) for key, x in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def _fail(_: Tensor) -> None:
    raise RuntimeError("something else")


def test_an_exception_inside_the_model_leaves_no_trace_either() -> None:
    model = small("gpt2")
    before = run(model)
    said = "4 queries and 4 keys, this pass has 9 and 9"
    with pytest.raises(ValueError, match=said), edit_head(model, "self", 1, 0, torch.rand(4, 4)):
        run(model)
    said = r"at decoder.blocks.0 has shape \(3, 5, 24\), but the one it replaces has shape \(3, 9, 24\)"
    short = {"decoder.blocks.0": torch.zeros(3, 5, 24)}
    with pytest.raises(ValueError, match=said), patch(model, short), switch_off(model, [("self", 0, 0)]):
        run(model)
    with pytest.raises(ValueError, match=r"has shape \(24,\)"), patch(model, {"decoder": torch.zeros(24)}, [1]):
        run(model)
    assert edits._edits == ()
    assert torch.equal(run(model), before)


def test_a_function_may_return_another_dtype() -> None:
    model = small("gpt2")
    for positions in (None, [1]):
        with patch(model, {"decoder.blocks.0": lambda x: x.double()}, positions):
            assert torch.equal(run(model), run(small("gpt2")))


def test_interventions_nest_and_end_in_any_order() -> None:
    model = small("gpt2")
    plain = run(model)
    first, second = switch_off(model, [("self", 0, 0)]), attention_scale(model, 2.0)
    first.__enter__()
    one = run(model)
    second.__enter__()
    both = run(model)
    first.__exit__(None, None, None)
    other = run(model)
    second.__exit__(None, None, None)
    results = [plain, one, both, other]
    assert all(not torch.equal(a, b) for n, a in enumerate(results) for b in results[:n])
    assert torch.equal(run(model), plain)


def test_other_models_and_other_threads_are_left_alone() -> None:
    model, other = small("gpt2"), small("gpt2")
    before, found = run(model), []
    with switch_off(model, [("self", 0, 0)]):
        assert torch.equal(run(other), before)
        thread = threading.Thread(target=lambda: found.append(run(model)))
        thread.start()
        thread.join()
        assert not torch.equal(run(model), before)
    assert torch.equal(found[0], before)


@pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
def test_decoding_is_changed_too(name: str) -> None:
    """The fast way of decoding goes past the layers, so it has to step aside."""
    model = small(name)
    source = source_of(model.config, batch=1)
    off = [(kind, layer, head) for kind in attention_modules(model) for layer in (0, 1) for head in (0, 1)]
    fields = {"max_new_tokens": 6, "sample": False}
    plain = generate(model, source, **fields).tokens[0]
    with switch_off(model, off):
        found = generate(model, source, **fields).tokens[0]
        tokens = source if name == "gpt2" else torch.tensor([[1]])
        for token in found:
            with torch.no_grad():
                logits = model(tokens) if name == "gpt2" else model(source, tokens)
            assert int(logits[0, -1].argmax()) == token
            tokens = torch.cat([tokens, torch.tensor([[token]])], dim=1)
    assert found
    assert found != plain
    assert generate(model, source, **fields).tokens[0] == plain


def test_a_compiled_model_is_changed_as_well() -> None:
    model = small("gpt2")
    before = run(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    tokens = inputs_of(model.config)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*tokens), before)
        with switch_off(compiled, [("self", 1, 1)]):
            found = compiled(*tokens)
        with switch_off(model, [("self", 1, 1)]):
            torch.testing.assert_close(found, run(model))
        assert (found - before).abs().max() > 1e-4
        torch.testing.assert_close(compiled(*tokens), before)


def test_gradients_pass_through_an_intervention() -> None:
    model = shaken(build(small_config("gpt2"))).eval()
    with switch_off(model, [("self", 0, 1)]):
        model(*inputs_of(model.config)).square().mean().backward()
    weight = model.decoder.blocks[0].attention.w_o.weight
    by_head = weight.grad.unflatten(1, (4, 6)).abs().sum((0, 2))
    assert by_head[1] == 0
    assert (by_head[[0, 2, 3]] > 0).all()


# ---- mistakes


@pytest.mark.parametrize(
    ("intervene", "said"),
    [
        (
            lambda m: switch_off(m, [("self", 2, 0)]),
            "layer=2: the self attention has 2 layers, 0 to 1",
        ),
        (
            lambda m: switch_off(m, [("self", 0, 4)]),
            "head=4: the self attention has 4 heads, 0 to 3",
        ),
        (
            lambda m: switch_off(m, [("cross", 0, 0)]),
            "kind='cross' is not one of the kinds of attention this model has: self",
        ),
        (lambda m: switch_off(m, [("self", 0)]), r"a head is \(kind, layer, number\)"),
        (lambda m: patch(m, {"decoder.blocks.7": torch.zeros(1)}), "the decoder has 2 layers, 0 to 1"),
        (
            lambda m: patch(m, {"encoder": torch.zeros(1)}),
            r"place='encoder' is not in model.sites\(\): the decoder has 2 layers",
        ),
        (lambda m: patch(m, {"decoder.blocks.0.cross_attention": torch.zeros(1)}), "did you mean decoder.blocks.0"),
        (lambda m: attention_scale(m, float("nan")), "factor=nan must be a finite number"),
        (lambda m: no_causal_mask(m, layers=[5]), "layer=5: the self attention has 2 layers"),
    ],
)
def test_mistakes_are_told_in_a_sentence(intervene: Any, said: str) -> None:
    model = small("gpt2")
    with pytest.raises(ValueError, match=said), intervene(model):
        pass
    assert edits._edits == ()


def test_what_a_model_does_not_have_is_told() -> None:
    with pytest.raises(ValueError, match="no causal mask to remove"), no_causal_mask(small("vit-tiny")):
        pass
    said = "cross attention has scores of 'additive'"
    with pytest.raises(ValueError, match=said), attention_scale(small("bahdanau-gru"), 2.0):
        pass
    with pytest.raises(ValueError, match="no attention weights"), switch_off(small("lstm-plain"), [("cross", 0, 0)]):
        pass


def test_kinds_of_every_family(model: Model) -> None:
    found = {kind: (len(modules), n_heads_of(modules[0])) for kind, modules in attention_modules(model).items()}
    architecture = model.config.architecture
    wanted = {"decoder": ["self"], "encoder": ["encoder"], "encoder-decoder": ["encoder", "self", "cross"]}
    assert list(found) == wanted[architecture]
    assert all(sizes == (2, 4) for sizes in found.values())


def test_edits_of_two_threads_may_end_in_any_order() -> None:
    """Whoever ends last leaves compiled models compiled again."""
    import torch._dynamo  # noqa: F401  what is compiled has loaded it
    from torch._dynamo import eval_frame

    model, before = small("gpt2"), eval_frame._stance
    first, second = switch_off(model, [("self", 0, 0)]), switch_off(model, [("self", 1, 1)])
    first.__enter__()
    second.__enter__()
    assert eval_frame._stance.stance == "force_eager"
    first.__exit__(None, None, None)
    assert eval_frame._stance.stance == "force_eager"
    second.__exit__(None, None, None)
    assert eval_frame._stance == before
