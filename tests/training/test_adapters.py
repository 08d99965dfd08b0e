"""LoRA adapters as directories of the ``peft`` package, written and read; transformers' own layers are the judge."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from hub.helpers import speaks, theirs
from regard import cli
from regard.errors import BadModelFile

from .runs import write_data
from .test_initial_model import hf_directory, start

PREFIX = "base_model.model."
CLASSES = {"gpt2": "AutoModelForCausalLM", "llama": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM"}
CASES = [("gpt2", "lm"), ("llama", "lm"), ("t5", "translate"), ("bert", "classify"), ("roberta", "classify")]


def merged_by_hand(adapter: Path, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What peft's merge_and_unload does, from the two files alone."""
    fields = json.loads((adapter / "adapter_config.json").read_bytes())
    tensors = {name.removeprefix(PREFIX): x for name, x in load_file(adapter / "adapter_model.safetensors").items()}
    out = dict(weights)
    for name, a in tensors.items():
        module, is_a, _ = name.partition(".lora_A.")
        if is_a:
            rank, alpha = fields["rank_pattern"].get(module, fields["r"]), fields["alpha_pattern"].get(module)
            assert len(a) == rank
            assert any(module == x or module.endswith(f".{x}") for x in fields["target_modules"])
            delta = (alpha or fields["lora_alpha"]) / rank * (tensors[f"{module}.lora_B.weight"] @ a)
            out[f"{module}.weight"] = out[f"{module}.weight"] + (delta.T if fields["fan_in_fan_out"] else delta)
        elif ".lora_B." not in name:
            assert any(name.startswith(f"{x}.") for x in fields["modules_to_save"])
            out[name] = a
    return out


@pytest.mark.parametrize(("kind", "task"), CASES)
def test_a_run_writes_its_additions_as_peft_does(kind: str, task: str, tmp_path: Path) -> None:
    init, run = hf_directory(kind, tmp_path / "theirs"), tmp_path / "run"
    start(task, init, run, write_data(task, tmp_path), "train.lora=2", "train.lr=0.05")
    adapter, merged = run / "adapter", regard.load(run / "model")
    fields = json.loads((adapter / "adapter_config.json").read_bytes())
    expected = {"lm": "CAUSAL_LM", "translate": "SEQ_2_SEQ_LM", "classify": "SEQ_CLS"}[task]
    assert (fields["peft_type"], fields["task_type"]) == ("LORA", expected)
    assert fields["base_model_name_or_path"] == str(init)
    loaded = regard.load(adapter)
    assert loaded.config == merged.config
    assert loaded.processor.source.content == merged.processor.source.content
    for name, x in merged.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], x, rtol=1e-6, atol=1e-6)
    if kind in CLASSES:  # a new head is in the adapter alone
        before = getattr(hf, CLASSES[kind]).from_pretrained(init)
        after = getattr(hf, CLASSES[kind]).from_pretrained(run / "model")
        by_hand = merged_by_hand(adapter, before.state_dict())
        moved = [name for name, x in by_hand.items() if not torch.equal(x, before.state_dict()[name])]
        assert moved
        for name, x in after.state_dict().items():
            torch.testing.assert_close(by_hand[name], x, rtol=1e-5, atol=1e-5)


def foreign_adapter(folder: Path, base: Path, **fields: Any) -> Path:
    """As peft writes one for q_proj and v_proj: no config.json, no manifest."""
    folder.mkdir()
    tensors = {}
    torch.manual_seed(3)
    for layer in range(2):
        for name, rows in (("q", 16), ("v", 8)):
            module = f"{PREFIX}model.layers.{layer}.self_attn.{name}_proj"
            tensors[f"{module}.lora_A.weight"] = torch.randn(3, 16)
            tensors[f"{module}.lora_B.weight"] = torch.randn(rows, 3)
    save_file(tensors, folder / "adapter_model.safetensors")
    content = {"peft_type": "LORA", "base_model_name_or_path": str(base), "r": 3, "lora_alpha": 6, "bias": "none"}
    content |= {
        "target_modules": ["q_proj", "v_proj"],
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
    }
    (folder / "adapter_config.json").write_text(json.dumps(content | fields), encoding="utf-8")
    return folder


def test_an_adapter_of_pefts_is_loaded_merged(tmp_path: Path) -> None:
    model = theirs("llama")
    model.save_pretrained(tmp_path / "base")
    adapter = foreign_adapter(tmp_path / "adapter", tmp_path / "base")
    model.load_state_dict(merged_by_hand(adapter, model.state_dict()))
    torch.testing.assert_close(speaks(regard.load(adapter)), speaks(model), rtol=1e-5, atol=1e-5)
    assert cli.main(["info", str(adapter), "--json"]) == 0
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(BadModelFile, match=r"base_model_name_or_path='.*base', which is not a local directory"):
        regard.load(adapter)


def test_a_run_starts_from_an_adapter(tmp_path: Path) -> None:
    base = hf_directory("llama", tmp_path / "base")
    adapter = foreign_adapter(tmp_path / "adapter", base)
    started = start("lm", adapter, tmp_path / "run", write_data("lm", tmp_path))
    assert (started["new"], started["left"]) == ({}, [])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "has peft_type='IA3'; regard reads LORA"),
        ({"use_dora": True}, "has use_dora=True, which regard does not read"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "has layer_replication=.*, which regard does not read"),
        ({"init_lora_weights": "pissa"}, "has init_lora_weights='pissa', which regard does not read"),
        ({"alpha_pattern": {".*q_proj": 12}}, "has alpha_pattern=.*, which regard does not read"),
        ({"base_model_name_or_path": "gpt2"}, "is for another model"),
    ],
)
def test_an_adapter_that_cannot_be_read_says_why(fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    theirs("llama").save_pretrained(tmp_path / "base")
    theirs("gpt2").save_pretrained(tmp_path / "adapter-of" / "gpt2")
    adapter = foreign_adapter(tmp_path / "adapter-of" / "x", tmp_path / "base", **fields)
    if "base_model_name_or_path" in fields:
        shutil.move(tmp_path / "adapter-of" / "gpt2", adapter / "gpt2")
    with pytest.raises(BadModelFile, match=said):
        regard.load(adapter)
