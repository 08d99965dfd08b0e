"""`regard bench generate`: what is measured is what was asked for, and what cannot be is said in one sentence."""

from __future__ import annotations

import json

import pytest
import torch

from models.small import small
from regard import cli
from regard.experiments.bench_generate import bench_generate


@pytest.mark.parametrize("name", ["gpt2", "transformer-base"])
def test_every_case_is_measured_and_the_model_stays_as_it_was(name: str) -> None:
    model = small(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    result = bench_generate(
        model, name, batches=(1, 2), beams=(1, 2), weights=("fp32", "bf16", "int8"), n_prompt=4, n_new=6, rounds=1
    )
    cases = [(case.weights, case.batch, case.beam) for case in result.cases]
    assert cases == [(w, n, k) for w in ("fp32", "bf16", "int8") for n in (1, 2) for k in (1, 2)]
    for case in result.cases:
        assert case.first_s > 0
        assert case.step_s >= 0
        # A call for one token may have been the slower one, where both take a millisecond.
        assert case.tokens_per_s >= case.batch * 6 / (case.first_s + 5 * case.step_s) * 0.99
    table = result.to_text().splitlines()
    assert table[0].startswith(f"{name} writes 6 tokens after 4")
    assert len(table) == 4 + len(cases)
    json.dumps(result.to_dict(), allow_nan=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_what_does_not_fit_or_writes_nothing() -> None:
    model = small("gpt2")
    with pytest.raises(ValueError, match=r"10 tokens and 90 new ones do not fit into max_len=24 of gpt2"):
        bench_generate(model, "gpt2", n_prompt=10, n_new=90)
    with pytest.raises(ValueError, match="bert does not generate text from text"):
        bench_generate(small("bert-base"), "bert")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--weights fp8", "'fp8' is not one of fp32, bf16, int8"),
        ("--weights ,", "'' is not one of fp32, bf16, int8"),
        ("--batch 0", "'0' is not a comma-separated list of positive whole numbers"),
        ("--device tpu", "--device tpu is not one of"),
    ],
)
def test_bad_words_are_usage_errors(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "generate", "gpt2", *words.split()]) == 2
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())
