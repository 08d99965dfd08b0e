"""QLoRA: weights in four bits, additions trained over them, and an ordinary model at the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import regard
from regard import cli
from regard.layers.nf4_linear import BLOCK, NF4Linear, dequantise_nf4, quantise_nf4
from regard.training.finetuning import LoraLinear, add_lora, merge, quantise_frozen
from regard.training.run_directory import RunDirectory

from .runs import assert_same, latest, losses, write_data
from .test_initial_model import FAST, hf_directory


@pytest.mark.parametrize("shape", [(64, 64), (7, 33), (300, 130)])
def test_four_bits_hold_a_weight(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape) * 0.02
    state = quantise_nf4(weight)
    back = dequantise_nf4(*state, shape, torch.float32)
    n = weight.numel()
    assert sum(x.numel() * x.element_size() for x in state) <= n * 4.2 / 8 + BLOCK + 16
    assert (back - weight).square().mean().sqrt() < 0.11 * weight.std(), "NF4's error on normal weights is about 9 %"
    assert (weight - back).abs().max() < 0.2 * weight.abs().max()
    assert torch.equal(dequantise_nf4(*quantise_nf4(torch.zeros(shape)), shape, torch.float32), torch.zeros(shape))


def test_the_product_and_its_gradient_are_those_of_the_rounded_weight() -> None:
    torch.manual_seed(0)
    linear = nn.Linear(40, 24)
    quantised = NF4Linear(linear)
    plain = quantised.plain()
    x = torch.randn(3, 5, 40, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    quantised(x).square().sum().backward()
    plain(y).square().sum().backward()
    assert torch.allclose(quantised(x), plain(y), atol=1e-6)
    assert torch.allclose(x.grad, y.grad, atol=1e-5)
    assert quantised.bias is linear.bias
    with torch.autocast("cpu", torch.bfloat16):
        assert quantised(x).dtype == torch.bfloat16


def test_every_frozen_linear_layer_is_stored_in_four_bits() -> None:
    torch.manual_seed(0)
    model = regard.build("gpt2", vocab_size=60, d_model=64, n_heads=2, n_layers=2, d_ff=128, max_len=16)
    before = sum(p.numel() for name, p in model.named_parameters() if ".w_" in name and p.dim() == 2)
    tokens = torch.randint(0, 60, (2, 9))
    plain = model.eval()(tokens).detach()
    add_lora(model, 2)
    quantise_frozen(model)
    kinds = {type(x) for x in model.modules() if isinstance(x, nn.Linear | NF4Linear)}
    assert kinds == {LoraLinear, NF4Linear}
    held = sum(x.numel() * x.element_size() for name, x in model.named_buffers() if ".frozen." in name)
    assert held < before * 4.3 / 8
    assert not any(".w_" in name and name.endswith("weight") for name, _ in model.named_parameters())
    rounded = model(tokens)
    assert (rounded - plain).abs().max() > 1e-4
    assert torch.allclose(merge(model)(tokens), rounded, atol=1e-4), "what is shipped is what was trained"
    assert {type(x) for x in model.modules() if isinstance(x, nn.Linear)} == {nn.Linear}


def test_a_head_that_is_new_learns_whole(tmp_path: Path) -> None:
    """A classifier of its own over an encoder in four bits; the run is read back with the same layers."""
    init, data = hf_directory("bert", tmp_path / "theirs"), write_data("classify", tmp_path)
    words = [
        f"data={data}",
        f"train.init={init}",
        "train.lora=2",
        "train.quantize=nf4",
        f"train.out={tmp_path / 'run'}",
    ]
    assert cli.main(["train", "classify", "--quiet", *words, *FAST]) == 0
    model = RunDirectory.open(tmp_path / "run").model(merged=False)[0]
    assert type(model.classifier.out) is nn.Linear
    assert any(isinstance(x, NF4Linear) for x in model.modules())
    regard.evaluate(tmp_path / "run", limit=4)


def test_a_run_with_four_bits_learns_goes_on_and_ships(tmp_path: Path) -> None:
    init, data = hf_directory("gpt2", tmp_path / "theirs"), write_data("lm", tmp_path)
    named = {word.partition("=")[0]: word for word in (*FAST, "train.steps=20", "train.lr=1e-2")}
    words = [f"data={data}", "data.documents=line", f"train.init={init}", "train.lora=4", "train.quantize=nf4"]
    words += named.values()
    assert cli.main(["train", "lm", "--quiet", *words, f"train.out={tmp_path / 'whole'}"]) == 0
    assert cli.main(["train", "lm", "--quiet", *words, f"train.out={tmp_path / 'parts'}", "train.stop_at=3"]) == 0
    assert cli.main(["train", "--quiet", "--resume", str(tmp_path / "parts")]) == 0
    assert_same(tmp_path / "whole", tmp_path / "parts")
    seen = losses(tmp_path / "whole")
    assert sum(seen[-4:]) < sum(seen[:4])
    dtypes = {x.dtype for name, x in latest(tmp_path / "whole").tensors("model/").items() if "frozen.codes" in name}
    assert dtypes == {torch.uint8}
    shipped, held = regard.load(tmp_path / "whole"), RunDirectory.open(tmp_path / "whole").model(merged=False)[0]
    tokens = torch.randint(0, 30, (1, 8))
    assert torch.allclose(shipped(tokens), held(tokens), atol=1e-4)
    config = json.loads((tmp_path / "whole/adapter/adapter_config.json").read_bytes())
    assert config["r"] == 4


def test_four_bits_need_additions(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "lm", "train.quantize=nf4"]) == 2
    assert "train.quantize=nf4 needs lora" in capsys.readouterr().err


@pytest.mark.gpu
def test_four_bits_on_a_gpu_give_what_a_cpu_gives() -> None:
    torch.manual_seed(0)
    layer = NF4Linear(nn.Linear(256, 512))
    x = torch.randn(4, 256)
    expected = layer(x)
    again = NF4Linear(layer.plain()).cuda()
    assert torch.allclose(layer.cuda()(x.cuda()).cpu(), expected, atol=1e-4)
    with torch.autocast("cuda", torch.bfloat16):
        assert again(x.cuda()).dtype == torch.bfloat16
