"""Int8 models to disk and back: the same numbers, the same maps, and nothing trusted that does not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.small import inputs_of, outputs_of, small
from processor import needs_vnni
from regard.attention import record
from regard.errors import BadModelFile
from regard.export.quantise import MARK, is_quantised, open_int8, quantise, write_int8
from regard.generation import generate
from regard.hub import Manifest
from regard.io import describe
from regard.layers.quantised_linear import Int8Linear
from regard.models import build
from regard.presets import PRESETS

from .translators import learned, pairs, translator

DIFFERENT = ("transformer-tiny", "gpt2", "llama-1b", "t5-v1.1-small", "bert-base", "bert-base-masked", "sentiment")
OTHERS = ("vit-tiny", "swin-tiny", "captioner", "captioner-regions", "bahdanau-gru", "luong-lstm")


def written(name: str, folder: Path) -> Path:
    folder.mkdir()
    write_int8(quantise(small(name)), folder)
    return folder


@needs_vnni
@pytest.mark.parametrize("name", [*DIFFERENT, *OTHERS])
@torch.no_grad()
def test_there_and_back_to_the_last_bit(name: str, tmp_path: Path) -> None:
    model = small(name)
    inputs = inputs_of(model.config)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    rounded = quantise(model)
    assert any(isinstance(module, Int8Linear) for module in rounded.modules())
    assert all(torch.equal(x, before[key]) for key, x in model.state_dict().items())
    assert not any(isinstance(module, Int8Linear) for module in model.modules())
    folder = tmp_path / "int8"
    folder.mkdir()
    write_int8(rounded, folder)
    back = open_int8(folder)
    assert torch.equal(outputs_of(back, inputs), outputs_of(rounded, inputs))
    assert back.config == model.config
    assert not back.training
    gap = (outputs_of(rounded, inputs) - outputs_of(model, inputs)).abs().mean()
    assert 0 < gap < 0.1 * outputs_of(model, inputs).abs().mean(), "int8 is near, and not the same"
    assert name in PRESETS


def test_what_lies_in_the_directory(tmp_path: Path) -> None:
    model = translator()
    model.save(tmp_path / "float")
    folder = tmp_path / "int8"
    folder.mkdir()
    write_int8(quantise(model), folder)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["encoder.blocks.0.ff.w_in.weight"].dtype == torch.int8
    assert tensors["encoder.blocks.0.ff.w_in.scale"].dtype == torch.float32
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("int8", "float")]
    assert sizes[0] < 0.5 * sizes[1]
    assert is_quantised(folder)
    assert not is_quantised(tmp_path / "float")
    assert not is_quantised(tmp_path)
    back = open_int8(folder)
    text = pairs()[0][0]
    assert back.processor.source.encode(text) == model.processor.source.encode(text)
    assert json.loads((folder / "config.json").read_text())["model_type"] == "regard"
    assert {file.suffix for file in folder.iterdir()} <= {".json", ".safetensors", ".md"}


@torch.no_grad()
def test_attention_maps_are_those_of_the_int8_model() -> None:
    """Weights written out from the int8 layer's own q and k are what the map gives, and not the float ones."""
    model = small("gpt2")
    rounded = quantise(model)
    (tokens,) = inputs_of(model.config)
    place = "decoder.blocks.0.attention"
    with record(rounded) as seen:
        rounded(tokens)
    with record(model) as plain:
        model(tokens)

    def by_hand() -> Tensor:
        layer = rounded.get_submodule(place)
        x = rounded.embeddings(rounded.token(tokens), torch.arange(tokens.shape[1]))
        x = rounded.get_submodule("decoder.blocks.0.attention_norm")(x)
        q, k, _ = (part.transpose(1, 2) for part in layer.w_qkv(x).unflatten(-1, (3, 4, -1)).unbind(2))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    found = seen.map(place).dense()
    torch.testing.assert_close(found, by_hand(), atol=1e-6, rtol=1e-5)
    assert (found - plain.map(place).dense()).abs().max() > 1e-4


@torch.no_grad()
def test_no_row_depends_on_its_neighbours() -> None:
    rounded = quantise(small("gpt2"))
    (tokens,) = inputs_of(rounded.config)
    alone = torch.cat([rounded(row[None]) for row in tokens])
    torch.testing.assert_close(rounded(tokens), alone, atol=1e-5, rtol=1e-5)
    loud = tokens.clone()
    loud[1] = 30
    torch.testing.assert_close(rounded(loud)[0], alone[0], atol=1e-5, rtol=1e-5)


def test_what_was_learnt_is_still_known() -> None:
    model = learned()
    rounded = quantise(model)
    rows = [model.processor.source.encode(source) for source, _ in pairs()[:12]]
    ours, theirs = generate(model, rows, max_new_tokens=70).tokens, generate(rounded, rows, max_new_tokens=70).tokens
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 11


def test_the_model_is_left_as_it_was() -> None:
    """Also where some of its layers are frozen."""
    model = small("gpt2").train()
    model.decoder.blocks[0].eval()
    before = {name: module.training for name, module in model.named_modules()}
    quantise(model)
    assert {name: module.training for name, module in model.named_modules()} == before


def test_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="quantised already"):
        quantise(quantise(small("gpt2")))


def damaged_tensors(folder: Path, change: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    name = "decoder.blocks.0.ff.w_in.weight"
    if change == "missing":
        del tensors[name]
    elif change == "strange":
        tensors["other"] = torch.zeros(2)
    elif change == "float":
        tensors[name] = tensors[name].float()
    else:
        tensors[name] = tensors[name][:5].clone()
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("missing", r"decoder\.blocks\.0\.ff\.w_in\.weight is missing"),
        ("strange", "other is not a tensor of this model"),
        ("float", r"w_in\.weight is \(32, 24\) of float, not \(32, 24\) of int8"),
        ("shape", r"w_in\.weight is \(5, 24\) of int8, not \(32, 24\) of int8"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: str, said: str, tmp_path: Path) -> None:
    folder = written("gpt2", tmp_path / "int8")
    damaged_tensors(folder, change)
    with pytest.raises(BadModelFile, match=said):
        open_int8(folder)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        (MARK, {"kind": "int4"}, "config.json has regard_quantisation="),
        (MARK, None, "config.json has regard_quantisation=None"),
        ("n_layers", 1000, "n_layers=1000, but there are"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(field: str, value: object, said: str, tmp_path: Path) -> None:
    folder = written("gpt2", tmp_path / "int8")
    fields = json.loads((folder / "config.json").read_text())
    (fields if field == MARK else fields["regard"])[field] = value
    (folder / "config.json").write_text(json.dumps(fields))
    with pytest.raises(BadModelFile, match=said):
        open_int8(folder)


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    folder = written("gpt2", tmp_path / "int8")
    Manifest.of(folder).write(folder)
    open_int8(folder)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(BadModelFile, match=r"model\.safetensors"):
        open_int8(folder)


def test_info_knows_an_int8_directory(tmp_path: Path) -> None:
    folder = written("gpt2", tmp_path / "int8")
    said, model = describe(folder), open_int8(folder)
    assert "int8" in said.dtypes
    assert said.config == model.config
    assert said.n_parameters == build(model.config, device="meta").n_parameters
    assert said.files["model.safetensors"] == (folder / "model.safetensors").stat().st_size
