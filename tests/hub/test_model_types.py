"""The table of model types in docs/ship.md: what is read, how it is saved, and who else runs it.

python tests/hub/test_model_types.py --update    writes the table anew
"""

from __future__ import annotations

import json
import re
import sys
from functools import cache
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoTokenizer

from regard.config import ModelConfig
from regard.export.ctranslate2_export import obstacles as ctranslate2_obstacles
from regard.export.onnx_graphs import onnx_obstacle
from regard.hub import write_config
from regard.hub.families import BY_TYPE
from regard.hub.gguf_file import gguf_obstacles
from regard.hub.hf_family import ForeignFields

sys.path.insert(0, str(Path(__file__).parents[1]))
from generation.spoken import language_model, tokenizer_of, translator
from hub.vllm_requirements import vllm_obstacles

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "ship.md"
BEGIN, END = "<!-- model types: python tests/hub/test_model_types.py --update -->", "<!-- end of model types -->"


@cache
def default_config(model_type: str) -> ModelConfig:
    """Of the sizes that transformers starts from."""
    fields = AutoConfig.for_model(model_type).to_dict()
    for name in ("eos_token_id", "bos_token_id", "decoder_start_token_id"):  # some types leave them to a checkpoint
        fields[name] = fields.get(name) or 1
    return BY_TYPE[model_type].read(ForeignFields(fields))


@cache
def row(model_type: str) -> list[str]:
    config = default_config(model_type)
    written = write_config(config)
    assert not written.obstacles, (model_type, written.obstacles)
    runs = {"CTranslate2": ctranslate2_obstacles(config), "llama.cpp": gguf_obstacles(config)}
    runs["vLLM"] = tuple(vllm_obstacles(written.fields))
    onnx = "–" if onnx_obstacle(config) else "yes"
    others = ", ".join(name for name, reasons in runs.items() if not reasons)
    return [f"`{model_type}`", config.architecture, f"`{written.model_type}`", onnx, "yes", others or "–"]


def table() -> str:
    """Every type has int8 weights; tests/hub/test_type_exports.py exports each as the table says."""
    names = ["model type", "architecture", "saved as", "ONNX", "int8", "also run by"]
    rows = [names, ["---"] * len(names), *map(row, BY_TYPE)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def test_the_table_is_current_and_long() -> None:
    assert len(BY_TYPE) >= 34
    page = PAGE.read_text(encoding="utf-8")
    assert page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table()


def test_every_page_says_how_many_there_are() -> None:
    pages = [path for path in (*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md")) if path.name != "changelog.md"]
    counted = re.compile(r"(\d+)(?= \[?model types)|(?<=모델\s)\d+(?=종)|(?<=모델은 )\d+(?=종)")
    said = [(path.name, found[0]) for path in pages for found in counted.finditer(path.read_text(encoding="utf-8"))]
    assert len(said) >= 7, said
    assert {number for _, number in said} == {str(len(BY_TYPE))}, said


def test_vllm_runs_every_decoder_and_no_encoder_decoder() -> None:
    rows = list(map(row, BY_TYPE))
    assert all(("vLLM" in others) == (architecture == "decoder") for _, architecture, *_, others in rows)


@pytest.mark.parametrize(("preset", "kv_heads"), [("gpt2", None), ("llama-1b", 2), ("mistral-7b", 2)])
def test_an_exported_language_model_is_a_directory_that_vllm_asks_for(
    preset: str, kv_heads: int | None, tmp_path: Path
) -> None:
    model = language_model(preset=preset, n_kv_heads=kv_heads)
    path = model.save(tmp_path / "model")
    fields = json.loads((path / "config.json").read_bytes())
    assert vllm_obstacles(fields) == []
    assert AutoConfig.from_pretrained(path).get_text_config().vocab_size == model.config.vocab_size
    assert (path / "model.safetensors").is_file()
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer("the cat", add_special_tokens=False).input_ids == tokenizer_of(model).encode("the cat")


def test_what_vllm_does_not_run_is_seen(tmp_path: Path) -> None:
    fields = json.loads((translator().save(tmp_path / "translator") / "config.json").read_bytes())
    assert "is not on vLLM's list" in vllm_obstacles(fields)[0]
    decoder = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 9, "n_positions": 4, "n_head": 2}
    assert vllm_obstacles(decoder) == []
    assert vllm_obstacles({**decoder, "n_positions": None, "vocab_size": None}) == [
        "none of max_position_embeddings, n_positions says how long a text may be",
        "vocab_size is missing",
    ]
    assert vllm_obstacles({**decoder, "scale_attn_by_inverse_layer_idx": True, "num_key_value_heads": 3}) == [
        "2 heads cannot share 3 of keys",
        "scale_attn_by_inverse_layer_idx=true is not computed",
    ]


if __name__ == "__main__" and "--update" in sys.argv:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        re.sub(f"{re.escape(BEGIN)}.*{re.escape(END)}", lambda _: f"{BEGIN}\n\n{table()}\n\n{END}", text, flags=re.S),
        encoding="utf-8",
    )
