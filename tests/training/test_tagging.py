"""A tag for every word: read from CoNLL files and JSON lines, trained, measured in entities, saved, asked again."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

import regard
from regard import cli
from regard.config.data_config import TokenizerKind
from regard.data.examples import Tagged
from regard.data.sources import open_source
from regard.errors import BadData, UsageError
from regard.recipes import run_config
from regard.text.tokenizer_training import train_tokenizer
from regard.text.words import entity_spans, split_words
from regard.training.loss import IGNORE
from regard.training.metrics.classification_metrics import tagging
from regard.training.tasks import open_task
from web.served import asking, opened

from .runs import TINY, metrics

PEOPLE, PLACES = ("Anna", "Boris", "Chen Li"), ("Paris", "New York", "Seoul")
SMALL = (
    *TINY,
    *("data.tokenizer=bpe", "data.vocab_size=300", "train.batch_tokens=512", "model.d_model=32", "model.dropout=0"),
    *("model.embedding_dropout=0", "model.classifier_dropout=0", "data.hide_rate=0"),
)


def write_conll(path: Path, n: int = 100) -> Path:
    """Who lives where, as CoNLL-2003 has it: word, part of speech, tag."""
    draw, lines = random.Random(3), ["-DOCSTART- -X- O", ""]
    for _ in range(n):
        who, where = draw.choice(PEOPLE), draw.choice(PLACES)
        for words, kind in ((who, "PER"), ("lives in", ""), (where, "LOC"), (".", "")):
            for i, word in enumerate(words.split()):
                tag = f"{'I' if i else 'B'}-{kind}" if kind else "O"
                lines.append(f"{word} {'NNP' if kind else 'X'} {tag}")
        lines.append("")
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def words_of_tags(data: Path, *more: str) -> list[str]:
    """Later words take the place of earlier ones."""
    return list({word.partition("=")[0]: word for word in (f"data={data}", *SMALL, *more)}.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tags")
    data, out = write_conll(folder / "sentences.conll"), folder / "run"
    more = ("train.steps=40", "train.eval_every=20", "train.lr=0.01", "train.class_weights=balanced")
    model = ("model=bert-base", "model.n_layers=1", "model.n_heads=2", "model.d_ff=32", "model.max_len=24")
    words = words_of_tags(data, *more, *model, f"train.out={out}", "data.valid_fraction=0.4")
    assert cli.main(["train", "tag", "--quiet", *words]) == 0
    return out


def test_training_and_evaluation_count_entities_and_words(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["eval", str(run), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["splits"]["valid"]
    last = [line for line in metrics(run) if "valid_loss" in line][-1]
    assert report["loss"] == pytest.approx(last["valid_loss"], rel=1e-4)
    assert report["f1"] == pytest.approx(last["f1"])
    assert last["f1"] > 0.5
    assert [row["label"] for row in report["classes"]] == ["LOC", "PER"]
    assert cli.main(["eval", str(run), "--against", str(run)]) == 0
    assert "entity F1" in capsys.readouterr().out


def test_the_model_directory_is_a_token_classifier_of_transformers(run: Path) -> None:
    from transformers import AutoModelForTokenClassification

    theirs = AutoModelForTokenClassification.from_pretrained(run / "model").eval()
    assert list(theirs.config.id2label.values()) == ["O", "B-LOC", "B-PER", "I-LOC", "I-PER"]
    model = regard.load(run / "model")
    ids, first = model.processor.tokenizer.encode_words(["Anna", "lives", "in", "New", "York"])
    said = theirs(torch.tensor([ids])).logits[0, first].detach().softmax(-1).max(-1)
    (answer,) = regard.tag(model, "Anna lives in New York")
    assert answer.tags == [theirs.config.id2label[i] for i in said.indices.tolist()]
    assert answer.probabilities == pytest.approx(said.values.tolist(), abs=1e-4)
    assert all(entity.text in "Anna lives in New York" for entity in answer.entities)
    assert regard.tag(model, [["Anna", "lives"], ["Seoul"]])[1].words == ["Seoul"]
    assert regard.evaluate(run / "model", str(run.parent / "sentences.conll")).metrics["f1"] > 0.5


def test_the_explorer_opens_it(run: Path) -> None:
    with asking({"tags": regard.load(run)}) as client:
        assert client.get("/api/models").json()[0]["task"] == "tag"
        assert opened(client, "tags", text="Anna lives in Paris")["kinds"]


# ------------------------------------------------------------------------------------- what is read


def test_conll_conllu_and_json_lines_are_read(tmp_path: Path) -> None:
    source = open_source(write_conll(tmp_path / "a.conll", 3), valid_fraction=0.0)
    assert (source.kind, source.labels[0]) == ("tagged", "O")  # type: ignore[index]
    assert len(source.train) == 3
    parts = open_source(tmp_path / "a.conll", columns=(0, 1), valid_fraction=0.0)
    assert parts.labels == ("NNP", "X")
    rows = "# text = I am\n1-2\tI'm\t_\t_\n1\tI\tI\tPRON\n2\tam\tbe\tAUX\n\n1\tGo\tgo\tVERB\n"
    (tmp_path / "b.conllu").write_text(rows, encoding="utf-8")
    universal = open_source(tmp_path / "b.conllu", valid_fraction=0.0)
    assert list(universal.train) == [Tagged(("I", "am"), (1, 0)), Tagged(("Go",), (2,))]
    lines = [{"tokens": ["I", "am"], "ner_tags": [0, 3]}, {"tokens": ["Go"], "ner_tags": [3]}]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert open_source(tmp_path / "c.jsonl", valid_fraction=0.0).labels == ("0", "3")


def test_data_describe_counts_tags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "describe", str(write_conll(tmp_path / "a.conll", 20)), "--json"]) == 0
    described = json.loads(capsys.readouterr().out)
    assert described["kind"] == "tagged"
    assert described["labels"]["B-PER"] == described["labels"]["B-LOC"] == described["n_train"]
    assert described["tokens"]["text"]["total"] > 0


def test_lines_without_a_tag_are_bad(tmp_path: Path) -> None:
    (tmp_path / "a.conll").write_text("Anna B-PER\nlives\nin O\n", encoding="utf-8")
    with pytest.raises(BadData, match=r"a\.conll:2: no word with its tag"):
        open_source(tmp_path / "a.conll")
    (tmp_path / "b.jsonl").write_text('{"tokens": ["a", "b"], "tags": ["O"]}\n', encoding="utf-8")
    with pytest.raises(BadData, match="2 words, 1 tags"):
        open_source(tmp_path / "b.jsonl")


@pytest.mark.parametrize("kind", ["chars", "bytes", "words", "bpe", "unigram"])
def test_the_first_token_of_each_word_has_its_tag(kind: TokenizerKind) -> None:
    words = ["Zoë", "said", "한국어", "naïvely", "U.N.", "!"]
    size = 300 if kind in ("bpe", "unigram") else None
    tokenizer = train_tokenizer([" ".join(words)] * 3, kind, size, "bos-eos")
    ids, first = tokenizer.encode_words(words)
    assert ids == tokenizer.encode(" ".join(words))
    assert first == sorted(first)
    assert len(set(first)) == len(words)
    for place, word in zip(first, words, strict=True):
        assert word[0] in tokenizer.decode(ids[place : place + 4])


def test_words_past_max_len_are_not_learned_and_are_tagged_as_o(tmp_path: Path) -> None:
    data = write_conll(tmp_path / "a.conll", 20)
    config = run_config("tag", words_of_tags(data, "data.max_len=5"))
    task = open_task(config, open_source(config.data))
    batch = task.batch(0)
    assert batch.inputs[0].shape[1] <= 6
    assert int((batch.targets != IGNORE).sum(1).max()) <= 3
    assert task.skipped.n_cut == len(task.source.train)
    bad = run_config("tag", words_of_tags(data, "train.sampling=balanced"))
    with pytest.raises(UsageError, match="are for labels of whole texts"):
        open_task(bad, open_source(bad.data))


# ------------------------------------------------------------------------------------- what is measured


def test_entities_count_as_in_seqeval_and_conlleval() -> None:
    """The example of seqeval's README, and conlleval's reading of an I without a B."""
    truth = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    said = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    found = tagging(said, truth)
    assert (found.f1, found.accuracy) == (0.5, 0.8)
    assert [(row.label, row.f1) for row in found.classes] == [("MISC", 0.0), ("PER", 1.0)]
    assert entity_spans(["I-A", "I-A", "I-B", "B-B", "O", "S-C", "B-D", "E-D"]) == [
        *(("A", 0, 1), ("B", 2, 2), ("B", 3, 3), ("C", 5, 5), ("D", 6, 7)),
    ]
    parts = tagging([["N", "V", "N"]], [["N", "V", "V"]])
    assert parts.f1 == pytest.approx(2 / 3)
    assert parts.accuracy == pytest.approx(2 / 3)


def test_a_text_is_split_into_words_and_marks() -> None:
    assert split_words("It's in New-York, U.S.A.!") == ["It's", "in", "New-York", ",", "U.S.A", ".", "!"]
