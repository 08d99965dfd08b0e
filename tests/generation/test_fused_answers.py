"""Fusion-in-Decoder: passages side by side, an index to look them up in, and the source of every word."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import cli
from regard.config import ModelConfig
from regard.errors import BadModelFile
from regard.generation import GenerateConfig
from regard.generation.fused_answers import _words
from regard.generation.generate import generate
from regard.generation.passage_index import PassageIndex, build_index, nearest, read_passages
from regard.models import Model
from regard.text import Processor
from regard.text.tokenizer_training import train_tokenizer

from .spoken import translator

NAMES = ("Anna", "Boris", "Chen", "Dora", "Emil", "Farah")
THINGS = ("apple", "bell", "candle", "drum", "egg", "flute", "glove", "hat")
SMALL = (
    *("model.d_model=32", "model.n_heads=2", "model.d_ff=48", "model.n_layers=1", "model.max_len=32"),
    *("data.max_len=32", "data.max_target_len=4", "data.tokenizer=words", "data.valid_fraction=0.1"),
    *("train.precision=fp32", "train.compile=off", "train.device=cpu", "train.samples=0", "train.eval_every=0"),
    *("train.batch_tokens=1024", "train.steps=150", "train.warmup=10"),
)


def write_questions(path: Path, n: int = 300) -> str:
    """Who has what: the name stands in one of three passages."""
    draw, lines = np.random.default_rng(0), []
    for number in range(n):
        names, things = draw.permutation(NAMES)[:3].tolist(), draw.permutation(THINGS)[:3].tolist()
        passages = [f"{name} has the {thing}" for name, thing in zip(names, things, strict=True)]
        right = number % 3
        lines.append({"question": f"who has the {things[right]}", "answer": names[right], "passages": passages})
    path.write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    return str(path)


def run(*words: Any) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("answer")
    data = write_questions(folder / "questions.jsonl")
    assert run("train", "answer", f"data={data}", f"train.out={folder / 'run'}", *SMALL, "--quiet") == 0
    return folder / "run"


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    return regard.build("transformer-tiny", vocab_size=40, n_layers=2, d_model=16, n_heads=2, d_ff=24).eval()


@torch.no_grad()
def test_passages_are_read_apart_and_seen_together(model: Model) -> None:
    """The decoder's states are those over the concatenated states of each passage without padding."""
    rows = [[5, 6, 7, 2], [8, 9, 2], [10, 11, 12, 13, 2]]
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)[None]
    real = torch.arange(5) < torch.tensor([len(row) for row in rows])[:, None]
    target = torch.tensor([[1, 14, 15]])
    logits = model(source, target, source_padding_mask=real[None])
    states = torch.cat([model.encode(torch.tensor([row])).states for row in rows], 1)
    memory = type(model.encode(source[0]))(states)
    assert model.head is not None
    alone = model.head(model.decode(target, memory), model.output_table)
    torch.testing.assert_close(logits, alone, atol=1e-5, rtol=0)


@pytest.mark.parametrize("fields", [{}, {"beam": 3}, {"cache": "static"}])
def test_a_batch_of_questions_is_each_by_itself(model: Model, fields: dict[str, Any]) -> None:
    questions = [[[5, 6, 7, 2], [8, 9, 2]], [[10, 2]], [[4, 5, 2], [6, 7, 8, 9, 2], [11, 2]]]
    config = GenerateConfig(max_new_tokens=6, **fields)
    together = generate(model, questions, config).tokens
    assert together == [generate(model, [one], config).tokens[0] for one in questions]
    alone = generate(model, [[10, 2]], config).tokens[0]
    assert together[1] == alone  # of one passage, an ordinary source


def test_answers_and_where_they_come_from(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passages = ["Anna has the bell", "Chen has the drum", "Emil has the hat"]
    assert run("answer", trained, "who has the drum", *(w for p in passages for w in ("--passage", p)), "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["results"]
    assert found["text"] in NAMES
    assert [word["text"] for word in found["words"]] == [found["text"]]
    assert sum(found["shares"]) == pytest.approx(1, abs=1e-5)
    assert len(found["passages"]) == 3
    assert run("answer", trained, "who has the drum", "--passage", passages[0], "--passage", passages[1]) == 0
    first, marked, *used = capsys.readouterr().out.splitlines()
    assert marked in (f"{first} [1]", f"{first} [2]")
    assert len(used) == 2
    assert run("answer", trained, "who?") == 2
    assert "give either --index DIR" in capsys.readouterr().err


def test_shares_are_the_cross_attention() -> None:
    """All of it goes to the passages; to the only one where there is one."""
    speaker = translator()
    found = regard.answer(speaker, "the cat", [["sat on it", "a dog ran too"]], max_new_tokens=4)[0]
    assert sum(found.shares) == pytest.approx(1, abs=1e-5)
    assert 0 <= found.source < 2
    single = regard.answer(speaker, "the cat", [["sat on it"]], max_new_tokens=4)[0]
    assert single.shares == pytest.approx([1.0], abs=1e-5)


def test_an_answer_ends_before_a_stop_string() -> None:
    speaker, passages = translator(), ["sat on it", "a dog ran too"]
    whole = regard.answer(speaker, "the cat", [passages], max_new_tokens=12)[0]
    stop = whole.text[len(whole.text) // 2 :][:2]
    found = regard.answer(speaker, "the cat", [passages], max_new_tokens=12, stop=stop)[0]
    assert found.text == whole.text[: whole.text.index(stop)]
    assert len(found.words) <= len(whole.words)
    with pytest.raises(ValueError, match="give a list of texts for each question"):
        regard.answer(speaker, "the cat", passages)  # type: ignore[arg-type]


def test_evaluation_says_how_many_are_exact(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", trained, "--json") == 0
    found = json.loads(capsys.readouterr().out)["splits"]["valid"]
    assert 0 <= found["exact"] <= found["f1"] <= 1


# ------------------------------------------------------------------------------------- the index


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return translator().save(tmp_path_factory.mktemp("embedder") / "model")


def test_an_index_finds_what_was_put_in(embedder: Path, trained: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "a.txt").write_text("the cat sat\n\na dog ran\n", encoding="utf-8")
    (tmp_path / "b.csv").write_text("text,n\n고양이가,1\nthe dog sat too,2\n", encoding="utf-8")
    files = [tmp_path / "a.txt", tmp_path / "b.csv"]
    assert run("index", *files, tmp_path / "idx", "--model", embedder, "--words", 4, "--json") == 0
    assert json.loads(capsys.readouterr().out)["passages"] == 4
    index = PassageIndex.open(tmp_path / "idx")
    assert [index.passage(n).place.rpartition("/")[2] for n in range(4)] == ["a.txt:1", "a.txt:3", "b.csv:2", "b.csv:3"]
    for number in range(4):
        found = index.search([index.passage(number).text], 2)[0]
        assert found[0].text == index.passage(number).text
        assert found[0].score == pytest.approx(1, abs=1e-5)
        assert found[0].score >= found[1].score  # type: ignore[operator]
    assert run("answer", trained, "who has the hat", "--index", tmp_path / "idx", "--passages", 3, "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["results"][0]["passages"]) == 3
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        index.search(["the cat"], 0)
    with pytest.raises(ValueError, match="words=0 must be at least 1"):
        build_index(files, tmp_path / "none", model=str(embedder), words=0)
    np.save(tmp_path / "idx" / "vectors.npy", np.zeros((2, 3), np.float32))
    with pytest.raises(BadModelFile, match="is damaged"):
        PassageIndex.open(tmp_path / "idx")
    with pytest.raises(BadModelFile, match="it is not an index"):
        PassageIndex.open(tmp_path)
    with pytest.raises(FileExistsError):
        build_index(files, tmp_path, model=str(embedder))


def test_a_graph_finds_what_comparing_all_finds(embedder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Through FAISS; a damaged graph is refused, and where FAISS is not installed all vectors are compared."""
    pytest.importorskip("faiss", reason="faiss is not installed: pip install regard[index]")
    lines = [f"the {a} {b} ran to {c}\n" for a in ("cat", "dog", "king") for b in "abcdef" for c in "stuvwxyz"]
    (tmp_path / "t.csv").write_text("text\n" + "".join(lines), encoding="utf-8")
    plain, graph = tmp_path / "plain", tmp_path / "graph"
    build_index([tmp_path / "t.csv"], plain, model=str(embedder))
    assert run("index", tmp_path / "t.csv", graph, "--model", embedder, "--graph") == 0
    asked = [line.strip() for line in lines[::7]]
    wanted, found = (PassageIndex.open(folder).search(asked, 5) for folder in (plain, graph))
    pairs = [(x.place, y.place) for one, two in zip(wanted, found, strict=True) for x, y in zip(one, two, strict=True)]
    assert sum(x == y for x, y in pairs) >= 0.98 * len(pairs), "ties may come in another order"
    assert [x[0].text for x in found] == asked
    damaged = (graph / "graph.faiss").read_bytes()
    (graph / "graph.faiss").write_bytes(damaged[:-1] + bytes([damaged[-1] ^ 1]))
    with pytest.raises(BadModelFile, match=r"graph\.faiss has another SHA-256"):
        PassageIndex.open(graph).search(asked)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert PassageIndex.open(graph).search(asked, 5) == wanted


def test_a_graph_needs_faiss(embedder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    (tmp_path / "t.txt").write_text("the cat\n", encoding="utf-8")
    assert run("index", tmp_path / "t.txt", tmp_path / "idx", "--model", embedder, "--graph") == 1
    said = 'a graph needs faiss, which is not installed: pip install "regard[index]"'
    assert said in capsys.readouterr().err
    assert not (tmp_path / "idx").exists()


def test_half_a_surrogate_in_a_table_can_be_indexed(embedder: Path, tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"text": "the \\ud800 cat"}\n', encoding="utf-8")
    build_index([tmp_path / "t.jsonl"], tmp_path / "idx", model=str(embedder))
    assert PassageIndex.open(tmp_path / "idx").passage(0).text == "the ? cat"
    assert run("embed", embedder, "--file", tmp_path / "t.jsonl", "--out", tmp_path / "vectors.jsonl") == 0
    assert json.loads((tmp_path / "vectors.jsonl").read_bytes())["text"] == "the \ud800 cat"


def test_passages_end_with_lines_where_they_can(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("one two\nthree four five\n\nsix " + "seven " * 9 + "\n", encoding="utf-8")
    cut = [(x.text, x.place.rpartition(":")[2]) for x in read_passages(tmp_path / "t.txt", 5)]
    assert cut == [
        ("one two three four five", "1"),
        ("six seven seven seven seven", "4"),
        ("seven " * 4 + "seven", "4"),
    ]


def test_a_document_on_one_long_line_is_indexed_whole(tmp_path: Path) -> None:
    numbers = " ".join(map(str, range(30_000)))  # 168,889 characters
    (tmp_path / "t.txt").write_text(f"{numbers}\nlast\n", encoding="utf-8")
    cut = list(read_passages(tmp_path / "t.txt", 100))
    assert [x.text for x in cut] == [*(" ".join(map(str, range(n, n + 100))) for n in range(0, 30_000, 100)), "last"]
    assert {x.place for x in cut[:-1]} == {f"{tmp_path / 't.txt'}:1"}


def test_an_index_refuses_a_line_it_cannot_read_and_a_missing_file_before_it_embeds(
    embedder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad, missing, out = (tmp_path / name for name in ("good.txt", "bad.txt", "missing.txt", "idx"))
    good.write_text("the cat\n", encoding="utf-8")
    bad.write_bytes(b"the cat\nwith a \0 in it\n")
    assert run("index", bad, out, "--model", embedder) == 1
    assert f"{bad}:2: a NUL character" in capsys.readouterr().err
    monkeypatch.setattr("regard.generation.passage_index._EMBED_BATCH", 1)
    monkeypatch.setattr("regard.generation.passage_index.embed", None)  # calling it would raise a TypeError
    assert run("index", good, missing, out, "--model", embedder) == 2
    assert f"there is no file {missing}" in capsys.readouterr().err
    table = write_questions(tmp_path / "questions.jsonl", 2)
    assert run("index", table, out, "--model", embedder, "--column", "title") == 2
    assert f"--column title: {table} has the columns question, answer, passages" in capsys.readouterr().err
    assert not out.exists()


def test_special_tokens_are_not_words_of_an_answer() -> None:
    tokenizer = train_tokenizer(["Anna has the cat"], "words", template="bos-eos")
    tokenizers = SimpleNamespace(target=tokenizer)
    ids = [tokenizer.bos_id, *tokenizer.encode("Anna has", special=False), tokenizer.bos_id, tokenizer.unk_id]
    assert _words(tokenizers, ids) == [("Anna", [1]), ("has", [2])]  # type: ignore[arg-type]


def test_the_nearest_of_many_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.generation.passage_index._SEARCH_BLOCK", 7)
    draw = np.random.default_rng(0)
    asked, vectors = draw.normal(size=(3, 4)).astype("f"), draw.normal(size=(40, 4)).astype("f")
    scores, numbers = nearest(asked, vectors, 5)
    right = np.argsort(-(asked @ vectors.T), axis=1)[:, :5]
    np.testing.assert_array_equal(numbers, right)
    np.testing.assert_allclose(scores, np.take_along_axis(asked @ vectors.T, right, 1), rtol=1e-6)


def test_an_answer_is_marked_in_passages_that_have_a_token() -> None:
    tokenizer = train_tokenizer(["who has the cat", "Anna has it"], "words", template="bos-eos")
    sizes = {"vocab_size": tokenizer.size, "d_model": 16, "n_heads": 2, "n_layers": 1, "d_ff": 16, "max_len": 24}
    torch.manual_seed(0)
    reader = regard.build(ModelConfig(architecture="encoder", head="span", **sizes)).eval()
    reader.processor = Processor(source=tokenizer)
    (found,) = regard.answer(reader, "who has it", [["", "Anna has the cat"]])
    assert found.text in "Anna has the cat"
    assert (found.source, found.shares) == (1, [0.0, 1.0])
    with pytest.raises(ValueError, match="has a token left next to the question"):
        regard.answer(reader, "who has it", [["", ""]])
    with torch.no_grad():
        next(reader.parameters()).fill_(torch.nan)
    with pytest.raises(ValueError, match="the model's logits are NaN"):
        regard.answer(reader, "who has it", [["Anna", "Anna has the cat"]])


def test_what_a_run_says_to_type_next_can_be_typed(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follows = json.loads((trained / "evaluation.json").read_bytes())["next_command"]
    program, *typed = shlex.split(follows)
    assert (program, typed[0]) == ("regard", "answer")
    assert run(*typed) == 0
