"""What keeps a model from learning few texts by heart: BPE-dropout, and two passes that must agree (R-Drop)."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch
import torch.nn.functional as F

import regard
from regard import cli
from regard.config import TrainConfig
from regard.data.bpe_dropout import BpeDropout, cut_word
from regard.data.packing import IGNORE
from regard.text.tokenizer_training import train_tokenizer
from regard.training.loss import Batch, batch_loss, r_drop_loss

from .runs import assert_same, resume, train, write_data

TEXTS = ["the nearest river", "rivers are near the unrelated relation", "", "näher am Fluss: 강가, relating rivers"]


def test_words_are_cut_as_the_tokenizer_cuts_them_where_nothing_is_left_out() -> None:
    tokenizer = train_tokenizer(TEXTS, "bpe", 300)
    plain = BpeDropout(tokenizer, TEXTS, 0.0).rows(0, [3, 0, 2, 1])
    assert plain == tokenizer.encode_all([TEXTS[i] for i in (3, 0, 2, 1)])


def test_each_epoch_cuts_texts_anew_and_says_the_same() -> None:
    tokenizer = train_tokenizer(TEXTS, "bpe", 300)
    dropout = BpeDropout(tokenizer, TEXTS, 0.3, seed=1)
    epochs = [dropout.rows(epoch, [0, 1, 2, 3]) for epoch in range(6)]
    assert all([tokenizer.decode(row) for row in rows] == TEXTS for rows in epochs)
    assert len({tuple(map(tuple, rows)) for rows in epochs}) == 6
    assert [dropout.rows(4, [i])[0] for i in (3, 1)] == [epochs[4][3], epochs[4][1]], "whatever else is in the batch"
    assert BpeDropout(tokenizer, TEXTS, 0.3, seed=1).rows(5, [0, 1, 2, 3]) == epochs[5]
    assert BpeDropout(tokenizer, TEXTS, 0.3, seed=2).rows(5, [0, 1, 2, 3]) != epochs[5]


def test_a_merge_is_left_out_as_often_as_asked() -> None:
    ranks = {("a", "b"): 0}
    random = Random(0)
    cut = [cut_word("ab", ranks, 0.25, random) for _ in range(4000)]
    assert abs(cut.count(["a", "b"]) / 4000 - 0.25) < 0.03


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_half_of_the_papers(smoothing: float) -> None:
    torch.manual_seed(0)
    model = regard.build(
        "gpt2", vocab_size=11, d_model=8, n_heads=2, n_layers=1, d_ff=8, embedding_dropout=0.4, init_std=0.5
    )
    tokens, targets = torch.randint(0, 11, (2, 5)), torch.randint(0, 11, (2, 5))
    targets[1, 3:] = IGNORE
    batch = Batch((tokens,), targets)
    torch.manual_seed(1)
    ours = r_drop_loss(model.train(), batch, smoothing, weight=3.0)
    torch.manual_seed(1)
    logits = model(torch.cat([tokens, tokens])).chunk(2)
    (p, q), kept = (F.log_softmax(x, -1) for x in logits), targets != IGNORE
    divergence = sum(F.kl_div(x, y, log_target=True, reduction="none") for x, y in ((p, q), (q, p)))
    entropy = sum(
        F.cross_entropy(x.flatten(0, 1), targets.flatten(), label_smoothing=smoothing, reduction="sum") for x in logits
    )
    assert torch.allclose(ours, (entropy + 3.0 / 2 * divergence[kept].sum()) / 2, rtol=1e-5)
    assert divergence[kept].sum() > 0.01, "the passes differ"
    model.eval()
    assert torch.equal(r_drop_loss(model, batch), batch_loss(model, batch)), "held-out data"


def test_a_run_with_both_goes_on_exactly(tmp_path: Path) -> None:
    data = write_data("translate", tmp_path)
    words = ("data.tokenizer=bpe", "data.vocab_size=300", "data.bpe_dropout=0.2", "train.r_drop=2", "train.steps=6")
    train("translate", tmp_path / "whole", data, *words)
    train("translate", tmp_path / "parts", data, *words, "train.stop_at=3")
    resume(tmp_path / "parts")
    assert_same(tmp_path / "whole", tmp_path / "parts")
    train("translate", tmp_path / "plain", data, *words[:2], *words[3:])
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "whole", tmp_path / "plain")


@pytest.mark.parametrize(
    ("task", "words", "says"),
    [
        ("classify", ["data.bpe_dropout=0.1"], "is for the task translate"),
        ("translate", ["data.bpe_dropout=0.1", "data.tokenizer=words"], "is for data.tokenizer=bpe"),
        ("classify", ["train.r_drop=1", "data.problem_type=multi_label"], "compares probabilities"),
    ],
)
def test_what_has_no_merges_or_no_probabilities_is_refused(
    task: str, words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [f"data={write_data(task, tmp_path)}", *words]
    assert cli.main(["train", task, "--quiet", f"train.out={tmp_path / 'run'}", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_model_is_compared_with_itself_or_with_a_teacher() -> None:
    with pytest.raises(ValueError, match="cannot be combined with teacher"):
        TrainConfig(r_drop=1, teacher="runs/teacher")
