"""Starting from other weights, frozen parts, and LoRA: what is copied, what learns, and what a saved model holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from models.small import inputs_of, shaken, small, small_config
from regard.models import Model, build
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import train_tokenizer
from regard.training.finetuning import LoraLinear, add_lora, freeze, merge, start_from

DEFAULT = ("w_qkv", "w_q", "w_kv", "w_o")
ATTENTIVE = ["gpt2", "llama-1b", "bert-base", "t5-small", "t5-v1.1-small", "vit-tiny", "transformer-tiny"]
RECURRENT = {"bahdanau-gru": "readout", "luong-lstm": "combine"}


def lora_names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters() if ".lora_a." in name or ".lora_b." in name]


def fresh(name: str, **fields: Any) -> Model:
    torch.manual_seed(7)
    return build(small_config(name, **fields))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def tokenizer(*texts: str) -> Tokenizer:
    return train_tokenizer(texts or ("abc", "cab"), "chars")


# ------------------------------------------------------------------------------------- starting from


def test_everything_is_copied_where_everything_fits() -> None:
    old, new = small("gpt2"), fresh("gpt2")
    started = start_from(new, "somewhere", old)
    assert set(started.copied) == set(old.state_dict())
    assert (started.new, started.unused, started.partly, started.differs) == ({}, (), (), {})
    assert all(torch.equal(x, old.state_dict()[name]) for name, x in new.state_dict().items())
    old.token.weight.data.zero_()
    assert new.token.weight.abs().sum() > 0  # a copy, not the same memory


def test_a_saved_directory_is_started_from(tmp_path: Path) -> None:
    old = small("bert-base-masked")
    old.save(tmp_path / "old")
    new = fresh("bert-base-masked")
    started = start_from(new, str(tmp_path / "old"), regard.load(tmp_path / "old"))
    assert not started.new
    tokens = inputs_of(old.config)
    assert torch.equal(new.eval()(*tokens), old(*tokens))


def test_a_classifier_from_a_masked_language_model_has_a_new_head() -> None:
    old, new = small("bert-base-masked"), fresh("bert-base", head="classify", n_classes=3)
    first = state(new)
    started = start_from(new, "x", old)
    assert set(started.new) == {f"classifier.{n}" for n in ("out.weight", "out.bias", *POOLER)}
    assert all(name.startswith("head.") for name in started.unused)
    assert all(torch.equal(new.state_dict()[name], first[name]) for name in started.new)
    assert torch.equal(new.encoder.blocks[1].ff.w_in.weight, old.encoder.blocks[1].ff.w_in.weight)
    assert "weights copied" in started.to_text()
    assert json.loads(json.dumps(started.to_dict()))["path"] == "x"


POOLER = ("pooler.dense.weight", "pooler.dense.bias")


def test_an_encoders_pooler_becomes_the_classifiers() -> None:
    old, new = small("bert-base"), fresh("bert-base", head="classify", n_classes=3)
    started = start_from(new, "x", old)
    assert set(started.new) == {"classifier.out.weight", "classifier.out.bias"}
    assert torch.equal(new.classifier.pooler.dense.weight, old.pooler.dense.weight)
    assert started.unused == ()


def test_another_number_of_classes_is_a_new_head() -> None:
    old, new = small("sentiment", n_classes=3), fresh("sentiment", n_classes=5)
    started = start_from(new, "x", old)
    assert set(started.new) == {"classifier.out.weight", "classifier.out.bias"}
    assert started.new["classifier.out.bias"] == "of shape 3 there, 5 here"


@pytest.mark.parametrize(
    ("theirs", "ours", "copied"),
    [
        (("bad", "good"), ("bad", "good"), True),
        (("bad", "good"), ("ham", "spam"), False),
        (None, ("ham", "spam"), True),
    ],
)
def test_a_head_over_other_classes_is_new(theirs: Any, ours: Any, copied: bool) -> None:
    old, new = small("sentiment", n_classes=2), fresh("sentiment", n_classes=2)
    words = tokenizer()
    old.processor = Processor(source=words, labels=theirs)
    started = start_from(new, "x", old, Processor(source=words, labels=ours))
    assert ("classifier.out.weight" in started.copied) is copied


def test_token_tables_go_with_their_tokens() -> None:
    old = small("gpt2", tie_head=False)
    old.processor = Processor(source=tokenizer("abc"))
    same, other = Processor(source=Tokenizer(old.processor.source.content)), Processor(source=tokenizer("xyz"))
    assert "token.weight" in start_from(fresh("gpt2", tie_head=False), "x", old, same).copied
    for processor in (other, None):
        new = fresh("gpt2", tie_head=False)
        first = new.token.weight.clone()
        started = start_from(new, "x", old, processor)
        assert set(started.new) == {"token.weight", "head.weight"}
        assert set(started.new.values()) == {"the tokens differ"}
        assert torch.equal(new.token.weight, first)
        assert "decoder.blocks.0.ff.w_in.weight" in started.copied


def test_source_and_target_tokens_are_compared_apart() -> None:
    fields = {"target_vocab_size": 29}
    old, new = small("transformer-tiny", **fields), fresh("transformer-tiny", **fields)
    words = tokenizer("abc")
    old.processor = Processor(source=words, target=tokenizer("def"))
    started = start_from(new, "x", old, Processor(source=words, target=tokenizer("xyz")))
    assert "token.weight" in started.copied
    assert set(started.new) == {"target_token.weight"}


@pytest.mark.parametrize("max_len", [10, 40])
def test_learned_positions_of_another_length_are_copied_as_far_as_both_go(max_len: int) -> None:
    old, new = small("gpt2"), fresh("gpt2", max_len=max_len)
    first = state(new)["embeddings.position.weight"]
    started = start_from(new, "x", old)
    both, (here, there) = min(max_len, 24), (new.embeddings.position.weight, old.embeddings.position.weight)
    assert started.partly == started.unlearned == ("embeddings.position.weight",)
    assert torch.equal(here[:both], there[:both])
    assert torch.equal(here[both:], first[both:])


def test_what_weights_of_the_same_shape_mean_is_compared() -> None:
    started = start_from(fresh("gpt2", n_heads=2), "x", small("gpt2"))
    assert started.differs == {"n_heads": (4, 2), "n_kv_heads": (4, 2)}
    assert "n_heads was 4 there and is 2 here" in started.to_text()


def test_nothing_fits_is_refused() -> None:
    new = fresh("gpt2", d_model=16, d_ff=20, max_len=8)
    first = state(new)
    with pytest.raises(
        ValueError, match=r"train.init=old: none of its weights fit this model .*d_model is 24 there and 16"
    ):
        start_from(new, "old", small("gpt2"))
    assert all(torch.equal(x, first[name]) for name, x in new.state_dict().items())


def test_a_bf16_model_is_started_from_in_fp32() -> None:
    old, new = small("gpt2").bfloat16(), fresh("gpt2")
    start_from(new, "x", old)
    assert new.token.weight.dtype == torch.float32
    assert torch.equal(new.token.weight, old.token.weight.float())


# ------------------------------------------------------------------------------------- freezing


@pytest.mark.parametrize(
    ("pattern", "example", "not_this"),
    [
        ("encoder.*", "encoder.blocks.0.ff.w_in.weight", "decoder.blocks.0.ff.w_in.weight"),
        ("encoder", "encoder.norm.weight", "decoder.norm.weight"),
        ("*.w_o.weight", "decoder.blocks.1.attention.w_o.weight", "decoder.blocks.1.ff.w_out.weight"),
        ("token.weight", "token.weight", "encoder.norm.weight"),
    ],
)
def test_frozen_parameters_do_not_learn(pattern: str, example: str, not_this: str) -> None:
    model = fresh("t5-small")
    frozen = freeze(model, [pattern])
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert example in frozen
    assert not_this in trained
    assert trained.isdisjoint(frozen)
    model(*inputs_of(model.config)).sum().backward()
    assert all((p.grad is None) == (name in frozen) for name, p in model.named_parameters())


@pytest.mark.parametrize(
    ("pattern", "near"), [("encodr.*", "encoder"), ("tokens.weight", "token.weight"), ("*.w_ou.weight", "w_out.weight")]
)
def test_a_pattern_that_names_nothing_is_an_error(pattern: str, near: str) -> None:
    model = fresh("t5-small")
    with pytest.raises(ValueError, match=r"matches no parameter; the nearest are ") as error:
        freeze(model, ["token.*", pattern])
    assert near in str(error.value)
    assert all(p.requires_grad for p in model.parameters())  # not half frozen


def test_something_must_be_left_to_train() -> None:
    with pytest.raises(ValueError, match=r"freeze=\* leaves no parameter to train"):
        freeze(fresh("gpt2"), ["*"])


# ------------------------------------------------------------------------------------- LoRA


@torch.no_grad()
def said(model: Model, inputs: tuple[Tensor, ...]) -> Tensor:
    """Its output; without gradients, since torch takes other kernels where a bias is trained, and rounds otherwise."""
    return model(*inputs)


def learn(model: Model, steps: int = 3) -> None:
    """A few steps on random targets."""
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.05)
    for _ in range(steps):
        optimiser.zero_grad()
        model(*inputs_of(model.config)).square().mean().backward()
        optimiser.step()


def targets_of(name: str) -> tuple[str, ...]:
    return (RECURRENT[name],) if name in RECURRENT else DEFAULT


@pytest.mark.parametrize("name", [*ATTENTIVE, *RECURRENT])
def test_lora_starts_as_the_base_learns_and_merges_back(name: str, tmp_path: Path) -> None:
    model = small(name)
    inputs, before = inputs_of(model.config), state(model)
    base = said(model.requires_grad_(False), inputs)  # torch's GRU, too, rounds otherwise where nothing is trained
    add_lora(model, 2, None, targets_of(name))
    assert torch.equal(said(model, inputs), base)
    learn(model)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained == lora_names(model)
    assert all(torch.equal(x, before[n]) for n, x in model.state_dict().items() if n in before)
    adapted = said(model, inputs)
    assert not torch.allclose(adapted, base)
    merge(model)
    assert not any(isinstance(module, LoraLinear) for module in model.modules())
    assert list(model.state_dict()) == list(before)
    assert all(type(part) is not LoraLinear for part in model.modules())
    torch.testing.assert_close(said(model, inputs), adapted, rtol=1e-4, atol=1e-4)
    model.save(tmp_path / "saved")
    loaded = regard.load(tmp_path / "saved")
    assert torch.equal(said(loaded, inputs), said(model, inputs))


def test_merging_adds_scaled_products_to_the_rows_they_belong_to() -> None:
    model = small("llama-1b")  # grouped heads: q has more rows than k and v
    attention = model.decoder.blocks[0].attention
    before = attention.w_qkv.weight.detach().clone()
    add_lora(model, 3, 6.0, ["w_qkv"])
    layer = attention.w_qkv
    assert set(layer.lora_a) == {"q", "k", "v"}
    with torch.no_grad():
        for part in layer.lora_b.values():
            part.normal_()
    additions = [2.0 * layer.lora_b[n].double() @ layer.lora_a[n].double() for n in ("q", "k", "v")]
    merge(model)
    wanted = (before.double() + torch.cat(additions)).float()
    assert torch.equal(model.decoder.blocks[0].attention.w_qkv.weight, wanted)


def test_merging_what_never_learned_changes_no_bit() -> None:
    model = small("t5-v1.1-small")
    before = state(model)
    merge(add_lora(model, 4, None, [*DEFAULT, "w_in", "w_out"]))
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("name", "targets", "adapted"),
    [
        ("gpt2", ["w_q", "w_v"], {"attention.w_qkv": {"q", "v"}}),  # as in the paper, §4.2
        ("gpt2", ["w_qkv"], {"attention.w_qkv": {"q", "k", "v"}}),
        ("gpt2", ["w_in"], {"ff.w_in": {"whole"}}),
        ("llama-1b", ["w_up"], {"ff.w_in": {"up"}}),
        ("llama-1b", ["w_in"], {"ff.w_in": {"gate", "up"}}),
        ("t5-small", ["w_q"], {"attention.w_qkv": {"q"}, "cross_attention.w_query": {"q"}}),
        ("t5-small", ["w_kv"], {"cross_attention.w_kv": {"k", "v"}}),
        ("gpt2", ["decoder.blocks.*.w_o"], {"attention.w_o": {"whole"}}),
    ],
)
def test_targets_name_layers_or_matrices_of_joined_layers(name: str, targets: list[str], adapted: Any) -> None:
    model = small(name)
    inputs = inputs_of(model.config)
    base = said(model, inputs)
    add_lora(model, 2, None, targets)
    found = {n: set(layer.lora_a) for n, layer in model.named_modules() if isinstance(layer, LoraLinear)}
    short = {".".join(n.split(".")[-2:]): parts for n, parts in found.items()}
    assert short == adapted
    assert torch.equal(said(model, inputs), base)
    learn(model)
    out = said(model, inputs)
    merge(model)
    torch.testing.assert_close(said(model, inputs), out, rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(rank=st.integers(1, 7), alpha=st.floats(0.5, 32), d_in=st.integers(1, 9), cuts=st.integers(1, 6), rows=st.data())
def test_any_parts_of_any_layer(rank: int, alpha: float, d_in: int, cuts: int, rows: Any) -> None:
    sizes = [rows.draw(st.integers(1, 5)) for _ in range(cuts)]
    adapted = rows.draw(st.sets(st.integers(0, cuts - 1), min_size=1))
    ends = [sum(sizes[: n + 1]) for n in range(cuts)]
    parts = {str(n): slice(end - size, end) for n, (size, end) in enumerate(zip(sizes, ends, strict=True))}
    layer = LoraLinear(nn.Linear(d_in, sum(sizes)), rank, alpha, parts, {str(n) for n in adapted}).double()
    with torch.no_grad():
        for part in layer.lora_b.values():
            part.normal_()
    x = torch.randn(2, 3, d_in, dtype=torch.float64)
    torch.testing.assert_close(layer.merged()(x), layer(x))


def test_an_unmerged_run_is_resumed_from_its_file(tmp_path: Path) -> None:
    model = add_lora(small("gpt2"), 2, None, DEFAULT)
    learn(model)
    save_file(state(model), tmp_path / "x.safetensors")
    torch.manual_seed(99)
    again = add_lora(build(model.config), 2, None, DEFAULT)
    again.load_state_dict(load_file(tmp_path / "x.safetensors"))
    inputs = inputs_of(model.config)
    assert torch.equal(said(again.eval(), inputs), said(model, inputs))
    assert [n for n, p in again.named_parameters() if p.requires_grad] == lora_names(model)
    learn(model)
    learn(again)
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())


def test_a_new_head_learns_beside_the_additions() -> None:
    old, model = small("sentiment", n_classes=3), fresh("sentiment", n_classes=5)
    started = start_from(model, "x", old)
    add_lora(model, 2, None, DEFAULT, keep=started.unlearned)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained == {"classifier.out.weight", "classifier.out.bias", *lora_names(model)}
    learn(model)
    assert "classifier.out.weight" in merge(model).state_dict()


def test_layers_shared_by_all_are_adapted_once() -> None:
    model = small("bert-base", share_layers=True, n_layers=3)
    inputs = inputs_of(model.config)
    base = said(model, inputs)
    add_lora(model, 2, None, DEFAULT)
    assert torch.equal(said(model, inputs), base)
    assert sum(isinstance(part, LoraLinear) for part in model.modules()) == 2


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        (
            "gpt2",
            ["w_outt"],
            r"lora_targets=w_outt is not a linear layer of this model, which has w_in, w_o, w_out, w_qkv",
        ),
        ("gpt2", ["w_qkv", "nothing"], "lora_targets=nothing is not a linear layer"),
        ("gpt2", ["w_kv"], "lora_targets=w_kv is not a linear layer"),
        ("luong-lstm", list(DEFAULT), "which has .*combine"),
    ],
)
def test_a_target_that_is_no_layer_is_an_error(name: str, targets: list[str], message: str) -> None:
    model = small(name)
    with pytest.raises(ValueError, match=message):
        add_lora(model, 2, None, targets)
    assert all(p.requires_grad for p in model.parameters())


def test_lora_on_lora_is_refused() -> None:
    model = add_lora(small("gpt2"), 2)
    with pytest.raises(ValueError, match="already has a low-rank addition"):
        add_lora(model, 2)


def test_lora_runs_compiled_and_in_bf16() -> None:
    model = add_lora(shaken(fresh("gpt2")), 2, None, ["w_q", "w_v", "w_o"])
    inputs = inputs_of(model.config)
    torch._dynamo.reset()
    fast = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(fast(*inputs), model(*inputs))
    with torch.autocast("cpu", torch.bfloat16):
        model(*inputs).float().sum().backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if n in lora_names(model))
