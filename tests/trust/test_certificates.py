"""Certificates: bounds by the size of the logits, and int8 that outliers do not spoil, or that is refused."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from export.translators import writer
from models.small import small
from processor import needs_vnni
from regard.export import BoundBroken, Bounds, certificate_text, export
from regard.export.quantise import open_int8, quantise
from regard.layers.quantised_linear import quantise as quantise_every_column
from regard.models import Model

QUICK: dict[str, Any] = {"n_shapes": 8, "compiled": False}


def plant_outliers(model: Model, factor: float = 60.0) -> Model:
    """The same function with a few inputs of each linear map as large as those of trained models."""
    model, channels = copy.deepcopy(model), torch.tensor([3, 11])
    with torch.no_grad():
        for block in model.decoder.blocks:  # type: ignore[union-attr]
            for norm, linear in ((block.attention_norm, block.attention.w_qkv), (block.ff_norm, block.ff.w_in)):
                for part in norm.parameters():
                    part[channels] *= factor
                linear.weight[:, channels] /= factor
    return model


def certificate(path: Path) -> dict[str, Any]:
    return json.loads((path / "certificate.json").read_text())


def test_large_logits_are_held_to_their_own_size(tmp_path: Path) -> None:
    """Logits up to some thousands, as exact as fp32 gets: an absolute bound of 1e-4 would refuse them."""
    model = small("gpt2", tie_head=False)
    model.head.weight.data.mul_(400)  # type: ignore[union-attr, operator]
    path = export(model, "safetensors", tmp_path / "out", **QUICK)
    rows = {row["name"]: row for row in certificate(path)["comparisons"]}
    assert rows["fused"]["max_abs"] > 1e-4, "or this test shows nothing"
    assert rows["fused"]["max_abs"] <= rows["fused"]["bounds"]["max_abs"]
    logits = certificate(path)["logits"]
    assert logits["spread"] > 100
    assert 0 < logits["fp32_error"] < 1e-5 * logits["spread"]
    with pytest.raises(BoundBroken, match="fused: max_abs"):
        export(model, "safetensors", tmp_path / "strict", **QUICK, bounds=Bounds(max_abs=1e-10, times_fp32=None))


def spoiled(model: nn.Module, *_: Any) -> nn.Module:
    return quantise_every_column(model)


@needs_vnni
def test_int8_survives_outliers_that_would_spoil_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = plant_outliers(writer())
    (row,) = (
        x for x in certificate(export(model, "int8", tmp_path / "out", **QUICK))["comparisons"] if x["name"] == "int8"
    )
    assert row["loss"] < 0.01
    assert row["same_text"] >= 0.5
    monkeypatch.setattr(sys.modules["regard.export.quantise"], "round_in_place", spoiled)
    with pytest.raises(BoundBroken, match=r"int8: loss=\S+ is more than the bound 0\.01"):
        export(model, "int8", tmp_path / "spoiled", **QUICK)
    assert not (tmp_path / "spoiled").exists()


@pytest.mark.slow
def test_onnx_int8_with_outliers_is_refused(tmp_path: Path) -> None:
    """ONNX's own int8 operations keep no columns in float32."""
    pytest.importorskip("onnxruntime")
    with pytest.raises(BoundBroken, match=r"onnx int8: loss=\S+ is more than the bound 0\.01"):
        export(plant_outliers(writer()), "onnx-int8", tmp_path / "out", **QUICK)
    assert not (tmp_path / "out").exists()


def test_no_text_the_same_is_said() -> None:
    row = {"name": "int8", "shapes": 1, "max_abs": 9.0, "same_text": 0.0, "of": "logits", "bounds": {"same_text": None}}
    document = {"task": "language model", "parameters": 1, "shapes": {"count": 1, "seed": 0}, "comparisons": [row]}
    text = certificate_text(document)
    assert "every bound holds" not in text
    assert "the bounds that are set hold, but no text of int8 is the same" in text


@torch.no_grad()
def test_an_int8_model_is_read_back_with_its_columns_and_an_older_one_without(tmp_path: Path) -> None:
    model, tokens = writer(), torch.arange(3, 20)[None]
    path = export(model, "int8", tmp_path / "out", **QUICK)
    wanted: Tensor = quantise(model)(tokens)
    assert torch.equal(open_int8(path)(tokens), wanted)
    assert torch.equal(open_int8(path).half().float()(tokens).isfinite(), torch.ones_like(wanted, dtype=torch.bool))
    older = quantise_every_column(copy.deepcopy(model))
    assert not any(name.endswith("columns") for name in older.state_dict())
