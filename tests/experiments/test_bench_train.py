"""`regard bench train`: our step and its peers in one run, and what cannot be measured is said in one sentence."""

from __future__ import annotations

import json

import pytest

from models.small import small_config
from regard import cli
from regard.experiments.bench_train import CONTENDERS, bench_train


@pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
def test_every_contender_makes_steps(name: str) -> None:
    result = bench_train(small_config(name), name, batch=2, length=8, steps=2)
    assert [case.contender for case in result.cases] == list(CONTENDERS)
    for case in result.cases:
        if case.step_s is None:
            assert case.note == "transformers is not installed"
        else:
            assert case.tokens_per_s == pytest.approx(2 * 8 / case.step_s)
    assert result.to_text().splitlines()[0].startswith(f"{name}, 2 × 8 tokens: fp32, eager, cpu")
    json.dumps(result.to_dict(), allow_nan=False)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "model.n_layers=1 model.d_model=16 model.n_heads=2 model.d_ff=32 model.vocab_size=50"
    sizes += " model.pad_id=0 model.bos_id=1 model.eos_id=2"
    words = f"bench train gpt2 {sizes} --batch 2 --length 8 --steps 1 --peers regard,torch --device cpu --json".split()
    assert cli.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert [case["contender"] for case in found["cases"]] == ["regard", "torch"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("gpt2 --peers jax", "'jax' is not one of regard, torch, transformers"),
        ("gpt2 --peers ,", "'' is not one of regard, torch, transformers"),
        ("gpt2 model.n_heads=7", "d_model=768 is not divisible by n_heads=7"),
        ("gpt3", "there is no preset 'gpt3'; did you mean 'gpt2'?"),
        ("gpt2 model=bert-base", "model=bert-base: name the model first, regard bench train bert-base"),
        ("gpt2 --length 5000 --device cpu", "5000 tokens do not fit into max_len=1024 of gpt2"),
        ("bert-base", "bert-base is not a decoder or encoder-decoder of text"),
    ],
)
def test_bad_words_are_usage_errors(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "train", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
