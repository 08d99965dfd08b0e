"""The history of a run in a browser: its heads at every checkpoint, after few tokens and two thousand; models without
checkpoints have no such view."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import regard
from generation.spoken import language_model
from regard.data.corpora.repeats import WORDS
from regard.lens.head_history import head_history
from regard.web.served_models import ServedModel, open_models

from .browsing import Tab, serving
from .test_first_minutes import PHONE


def train(folder: Path, name: str, task: str, **fields: Any) -> Path:
    """Three steps with a checkpoint after each; the model could read 2,100 tokens."""
    data: dict[str, Any] = {"source": "repeats", "tokenizer": "words", "max_len": 64, "epoch_examples": 40}
    sizes = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 16, "max_len": 2100}
    steps = {"steps": 3, "warmup": 1, "save_every": 1, "keep": 3, "eval_batches": 1, "batch_tokens": 256}
    model: dict[str, Any] = {"positions": "learned", **sizes, **fields}
    how = {**steps, "device": "cpu", "compile": "off", "out": str(folder / name)}
    regard.train(regard.RunConfig(task=task, data={**data, "valid_rows": 8}, model=model, train=how))
    return folder / name


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "repeats", "lm", architecture="decoder", head="lm")


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs"), "masked", "mlm", architecture="encoder", head="masked-lm")


@pytest.fixture(scope="module")
def home(run: Path, masked_run: Path) -> Iterator[str]:
    runs = open_models([run, masked_run], "cpu")
    with serving([*runs, ServedModel("speaker", "speaker", language_model())]) as address:
        yield address


def test_history(tab: Tab, run: Path) -> None:
    tab.open(model="repeats", text="ni ko fu ni ko", view="history", pattern="previous")
    exact = head_history(run)

    def check() -> None:
        assert {"1", "2", "3"} <= set(tab.texts())
        assert {"step", "스텝"} & set(tab.texts()), "the axis has a name"

    tab.in_both_languages(("History", "학습 과정"), check)
    table = tab.files()
    shown = {tuple(line[:4]): float(line[4]) for line in table[1:] if line[4]}
    assert shown["2", "previous", "1", "0"] == pytest.approx(float(exact.scores["previous"][1, 1, 0]), abs=1e-6)
    assert shown["3", "loss", "", ""] == pytest.approx(exact.loss[2], abs=1e-5)
    tab.page.click('.stage [data-value="first"]')
    tab.settled()
    assert tab.state["pattern"] == "first"


@pytest.mark.parametrize("n_tokens", [16, 2000])
def test_few_tokens_and_two_thousand(tab: Tab, run: Path, masked_run: Path, n_tokens: int) -> None:
    """An encoder's checkpoints read the text itself, a language model's random tokens beside it."""
    text = " ".join(WORDS[n * n % len(WORDS)] for n in range(n_tokens))
    tab.open(model="masked", text=text, view="history", pattern="previous")
    exact = head_history(masked_run, text)
    assert regard.look(masked_run, text).weights(layer=0, head=0).shape[-1] >= n_tokens
    for at, step in enumerate(exact.steps):
        shown = {tuple(line[1:4]): float(line[4]) for line in tab.table()[1:] if line[0] == str(step) and line[4]}
        for pattern, scores in exact.scores.items():
            for place, score in zip(product("01", "01"), scores[at].flatten().tolist(), strict=True):
                assert shown.get((pattern, *place), math.nan) == pytest.approx(score, abs=1e-6, nan_ok=True)
    tab.page.set_viewport_size(PHONE)
    tab.settled()
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    tab.open(model="repeats", text=text, view="history")
    assert {"1", "2", "3"} <= set(tab.texts())
    assert float(tab.table()[-1][4]) == pytest.approx(head_history(run).repeat_loss[-1], abs=1e-5)


def test_only_a_run_with_checkpoints_has_a_history(tab: Tab) -> None:
    tab.open(model="speaker", text="the cat")
    assert "history" not in tab.tabs()
    look = tab.page.evaluate(
        """async () => (await fetch("/api/looks", { method: "POST", headers: { "Content-Type": "application/json" },
          body: JSON.stringify({ model: "speaker", text: "the cat" }) })).json()"""
    )
    refused = tab.page.evaluate(f"async () => (await fetch('/api/looks/{look['id']}/history?kind=self')).json()")
    assert "no history" in refused["error"]
    tab.complaints.clear()
