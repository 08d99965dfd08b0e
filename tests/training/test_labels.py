"""Labels that are more than one class of one text: pairs of texts, several labels at once, numbers.

Each from a file to a model directory: read, trained, measured, evaluated, saved as transformers has it, asked again.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard import cli
from regard.data.batching import cut_pair, pair_segments
from regard.data.examples import Labelled
from regard.data.sources import open_source
from regard.errors import BadData, UsageError
from regard.recipes import run_config
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import train_tokenizer
from regard.training.metrics import classification_metrics
from regard.training.tasks import open_task
from web.served import asking, opened

from .runs import metrics, words_of

BERT = ("model=bert-base", "model.d_model=16", "model.n_heads=2", "model.d_ff=16", "model.n_layers=1")
KINDS = {
    "pairs": ("data.columns=premise,hypothesis,label",),
    "multi_label": ("data.problem_type=multi_label", "train.class_weights=balanced"),
    "regression": ("data.problem_type=regression", "data.columns=text,score"),
}


def write(kind: str, folder: Path) -> Path:
    """A file that a model of any size can learn: the words say it all."""
    draw = np.random.default_rng(5)
    path = folder / f"{kind}.{'jsonl' if kind == 'multi_label' else 'csv'}"
    lines = {"pairs": ["premise,id,hypothesis,label"], "regression": ["text,score"]}.get(kind, [])
    for i in range(80):
        a, b = draw.integers(0, 2, 2).tolist()
        words = f"{'sun' if a else 'rain'} {'wind' if b else 'calm'} day {i}"
        if kind == "pairs":
            lines.append(
                f"it is {'wet' if a else 'dry'} {i},{i},it is {'wet' if b else 'dry'},{'same' if a == b else 'other'}"
            )
        elif kind == "regression":
            lines.append(f"{words},{2.5 * a - b + 1}")
        else:
            lines.append(json.dumps({"text": words, "labels": ["sunny"] * a + ["windy"] * b}))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=KINDS)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Path]:
    """(kind, its file, a short run on it)."""
    folder = tmp_path_factory.mktemp(request.param)
    data, out = write(request.param, folder), folder / "run"
    more = (*KINDS[request.param], *BERT, "train.steps=60", "train.eval_every=30", "train.lr=0.02", "model.dropout=0")
    words = words_of("classify", str(data), f"train.out={out}", "train.eval_examples=none", *more)
    assert cli.main(["train", "classify", "--quiet", *words]) == 0
    return request.param, data, out


def test_training_measures_and_evaluation_agrees(
    run: tuple[str, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kind, data, out = run
    names = {
        "pairs": {"loss", "accuracy", "f1"},
        "multi_label": {"loss", "f1", "micro_f1", "exact"},
        "regression": {"loss", "pearson", "spearman", "mse"},
    }[kind]
    assert cli.main(["eval", str(out), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["splits"]["valid"]
    assert names <= report.keys()
    last = [line for line in metrics(out) if "valid_loss" in line][-1]
    assert report["loss"] == pytest.approx(last["valid_loss"], rel=1e-4)
    assert all(report[name] == pytest.approx(last[name], rel=1e-4) for name in names - {"loss"})
    assert cli.main(["eval", str(out), f"data.source={data}", "--against", str(out)]) == 0
    assert "80 examples" in capsys.readouterr().out
    if kind == "regression":
        assert report["mse"] == pytest.approx(report["loss"], rel=1e-4)
    if kind == "multi_label":
        assert [row["label"] for row in report["classes"]] == ["sunny", "windy"]


def test_the_model_directory_says_what_its_logits_mean_as_transformers_does(run: tuple[str, Path, Path]) -> None:
    from transformers import AutoModelForSequenceClassification

    kind, data, out = run
    theirs = AutoModelForSequenceClassification.from_pretrained(out / "model").eval()
    expected = {"pairs": "single_label_classification", "multi_label": "multi_label_classification"}
    assert theirs.config.problem_type == expected.get(kind, "regression")
    assert theirs.config.num_labels == (1 if kind == "regression" else 2)
    model = regard.load(out / "model")
    assert model.config.problem_type == {"pairs": "single_label"}.get(kind, kind)
    tokenizer = model.processor.tokenizer
    inputs = ("it is wet 3", "it is dry") if kind == "pairs" else "rain wind day 3"
    (answer,) = regard.classify(model, [inputs])
    if kind == "pairs":
        ids = next(tokenizer.encode_pairs([inputs]))
        types = [0] * (ids.index(tokenizer.eos_id) + 1)
        types += [1] * (len(ids) - len(types))
    else:
        ids, types = tokenizer.encode(inputs), None
    options = {} if types is None else {"token_type_ids": torch.tensor([types])}
    logits = theirs(torch.tensor([ids]), **options).logits[0]
    if kind == "regression":
        assert answer.value == pytest.approx(float(logits[0].detach()), abs=1e-4)
    elif kind == "multi_label":
        probabilities = logits.sigmoid().tolist()
        assert answer.all == pytest.approx({"sunny": probabilities[0], "windy": probabilities[1]}, abs=1e-4)
        assert answer.labels == tuple(name for name in ("sunny", "windy") if answer.all[name] > 0.5)
    else:
        assert answer.all["same"] == pytest.approx(float(logits.detach().softmax(-1)[1]), abs=1e-4)
    assert regard.evaluate(out / "model", {"source": str(data), **_columns(kind)}).metrics["loss"] > 0


def _columns(kind: str) -> dict[str, str]:
    columns = {"pairs": "premise,hypothesis,label", "regression": "text,score"}
    return {"columns": columns[kind]} if kind in columns else {}


def test_a_short_run_has_learned_and_the_explorer_opens_it(run: tuple[str, Path, Path]) -> None:
    kind, _, out = run
    last = [line for line in metrics(out) if "valid_loss" in line][-1]
    least = {"pairs": ("accuracy", 0.4), "multi_label": ("f1", 0.8), "regression": ("pearson", 0.8)}[kind]
    assert last[least[0]] > least[1]
    with asking({"labels": regard.load(out)}) as client:
        assert client.get("/api/models").json()[0]["task"] == "classify"
        assert opened(client, "labels", text="rain wind day")["kinds"]


# ------------------------------------------------------------------------------------- what is read


def test_pairs_are_one_row_with_segments_where_the_model_has_them(tmp_path: Path) -> None:
    data = write("pairs", tmp_path)
    config = run_config("classify", words_of("classify", str(data), *KINDS["pairs"], *BERT))
    task = open_task(config, open_source(config.data))
    first = task.source.train[0]
    assert isinstance(first, Labelled)
    assert first.second in ("it is wet", "it is dry")
    batch = task.batch(0)
    (tokens,), segments = batch.inputs, batch.options["segments"]
    for row, kinds in zip(tokens.tolist(), segments.tolist(), strict=True):
        end = row.index(task.tokenizer.eos_id)
        assert row.count(task.tokenizer.eos_id) == 2
        assert kinds[: end + 1] == [0] * (end + 1)
        assert set(kinds[end + 1 :]) == {1}
    plain = run_config("classify", words_of("classify", str(data), *KINDS["pairs"]))
    assert "segments" not in open_task(plain, open_source(plain.data)).batch(0).options


@pytest.mark.parametrize("names", ["premise,hypothesis,label", "id,Sentence1,Sentence2,Label"])
def test_pairs_are_found_by_the_usual_names(names: str, tmp_path: Path) -> None:
    cells = "7,a,b,yes" if "id" in names else "a,b,yes"
    (tmp_path / "pairs.csv").write_text(f"{names}\n{cells}\n", encoding="utf-8")
    source = open_source(tmp_path / "pairs.csv", valid_fraction=0.0)
    assert list(source.train) == [Labelled("a", 0, "b")]


def test_the_longer_text_of_a_pair_is_cut_first() -> None:
    tokenizer = train_tokenizer(["a b c d e f"], "words", template="bos-eos")
    whole, other = tokenizer.encode_pairs([("a b c d e f", "a b"), ("a b", "a b c d e f")])
    assert len(whole) == len(other) == 11
    cut = cut_pair(whole, tokenizer.eos_id, 8)
    assert cut == [*whole[:4], *whole[-4:]], "the second text is whole"
    assert cut_pair(other, tokenizer.eos_id, 8) == [*other[:4], *other[4:7], tokenizer.eos_id]
    assert len(cut_pair(whole, tokenizer.eos_id, 5)) == 5
    assert cut_pair(whole, tokenizer.eos_id, 11) == whole


@pytest.mark.parametrize("between", [1, 2])  # as in BERT and in RoBERTa
def test_a_pair_without_a_second_text_keeps_its_separators(between: int) -> None:
    separators = [3] * (between + 1)
    assert cut_pair([2, 5, 6, 7, 8, 9, *separators], 3, 7) == [2, 5, 6, 7, 8, 9][: 7 - len(separators)] + separators


def test_a_tokenizer_of_berts_joins_pairs_and_tells_them_apart_as_bert_does() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, pre_tokenizers, processors

    words = {word: index for index, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "c"])}
    backend = Backend(models.WordLevel(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer = Tokenizer(backend.to_str().encode())
    expected = backend.encode("a b", "c")
    (row,) = tokenizer.encode_pairs([("a b", "c")])
    assert row == expected.ids == [2, 4, 5, 3, 6, 3]
    assert tokenizer.separator_id == 3
    assert pair_segments(torch.tensor([row]), 3)[0].tolist() == expected.type_ids


@pytest.mark.parametrize("cell", ["red;round", "red|round", '"red,round"', '"round, red"'])
def test_several_labels_of_a_table(cell: str, tmp_path: Path) -> None:
    path = tmp_path / "things.csv"
    path.write_text(f"text,labels\nball,{cell}\nfog,\ncherry,red\n", encoding="utf-8")
    source = open_source(path, problem_type="multi_label", valid_fraction=0.0)
    assert source.labels == ("red", "round")
    assert [x.label for x in source.train] == [(0, 1), (), (0,)]  # type: ignore[union-attr]


def test_what_is_no_number_is_a_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "scores.tsv"
    path.write_text("text\tscore\ngood\t4.5\nbad\tlow\nodd\tnan\n", encoding="utf-8")
    with pytest.raises(BadData, match="not a number: 'low'") as raised:
        open_source(path, problem_type="regression", columns="text,score")
    assert raised.value.n_bad == 2


def test_lists_of_labels_and_many_numbers_say_what_to_type(tmp_path: Path) -> None:
    path = write("multi_label", tmp_path)
    with pytest.raises(ValueError, match=r"data.problem_type=multi_label for them"):
        open_source(path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.problem_type=regression", "train.class_weights=balanced"], "train.class_weights is for classes"),
        (["data.problem_type=multi_label", "train.sampling=balanced"], "needs one class for each example"),
        (["data.problem_type=regression", "train.metric=accuracy"], "which has loss, mse, pearson, spearman"),
        (["data.problem_type=multilabel"], "did you mean multi_label"),
    ],
)
def test_what_does_not_go_together_is_refused(words: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "x.tsv"
    path.write_text("".join(f"text {i}\t{i}\n" for i in range(40)), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        regard.train(run_config("classify", words_of("classify", str(path), *words, f"train.out={tmp_path / 'run'}")))


def test_images_have_several_labels_too(tmp_path: Path) -> None:
    rows = ["file,labels"]
    for i in range(12):
        Image.fromarray(np.full((8, 8), 20 * i, dtype=np.uint8)).save(tmp_path / f"{i}.png")
        rows.append(f"{i}.png,{';'.join(['dark'] * (i < 6) + ['even'] * (i % 2 == 0))}")
    (tmp_path / "images.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = ["data.problem_type=multi_label", "data.valid_fraction=0.3", "train.steps=2", "train.device=cpu"]
    model = ["model.image_size=8", "model.patch_size=4", "model.d_model=16", "model.n_heads=2", "model.d_ff=16"]
    fields = [f"data={tmp_path / 'images.csv'}", *words, *model, "train.compile=off", f"train.out={tmp_path / 'run'}"]
    result = regard.train(run_config("classify-images", fields), style="off")
    assert {"f1", "micro_f1", "exact"} <= result.metrics.keys()
    (answer,) = regard.classify(result.path, tmp_path / "3.png")
    assert set(answer.all) == {"dark", "even"}
    assert "micro_f1" in regard.evaluate(result.path).metrics


def test_examples_from_memory(tmp_path: Path) -> None:
    fields = {"steps": 1, "out": str(tmp_path / "run"), "device": "cpu", "compile": "off", "samples": 0}
    rows = [(f"sun {i}", f"wind {i}", ["a", "b"][: i % 3]) for i in range(30)]
    config = run_config("classify", words_of("classify", "memory", "data.problem_type=multi_label"), train=fields)
    result = regard.train(config, data=rows, style="off")
    assert regard.load(result.path).processor.labels == ("a", "b")


# ------------------------------------------------------------------------------------- what is measured


def test_the_correlation_of_equal_values_is_zero_also_in_a_resample() -> None:
    draw = np.random.default_rng(0)
    for n in range(2, 12):
        pearson = classification_metrics.regression_statistics(draw.normal(size=n), draw.normal(size=n))[0]
        assert pearson.score(n * pearson.rows).tolist() == [0.0] * n, "one example n times"
        resamples = draw.multinomial(n, [1 / n] * n, size=200)
        assert abs(pearson.score(resamples @ pearson.rows)).max() <= 1


def test_pearson_and_spearman_are_those_of_the_books() -> None:
    draw = np.random.default_rng(1)
    x, y = draw.normal(size=50), draw.normal(size=50)
    y[:10] = y[10:20]  # ties
    found = classification_metrics.regression(x, y)
    assert found["pearson"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    ranks = [[sum(b < a for b in z) + (sum(b == a for b in z) + 1) / 2 for a in z] for z in (x, y)]
    assert found["spearman"] == pytest.approx(np.corrcoef(*ranks)[0, 1])
    assert found["mse"] == pytest.approx(((x - y) ** 2).mean())
    assert classification_metrics.regression(np.ones(3), np.arange(3.0))["pearson"] == 0


def test_f1_of_several_labels() -> None:
    predicted = np.array([[1, 0], [1, 1], [0, 0], [0, 1]], dtype=bool)
    truth = np.array([[1, 0], [1, 0], [1, 0], [0, 1]], dtype=bool)
    found = classification_metrics.multi_label(predicted, truth, ("a", "b"))
    assert found.micro_f1 == pytest.approx(2 * 3 / (4 + 4))
    assert found.macro_f1 == pytest.approx((2 * 2 / (2 + 3) + 2 * 1 / (2 + 1)) / 2)
    assert found.exact == 0.5


def test_labels_that_never_occur_have_an_f1_of_0_and_not_of_nothing() -> None:
    """A nan would never be improved upon, and no checkpoint could hold it."""
    none = np.zeros((3, 2), dtype=bool)
    scores = classification_metrics.multi_label(none, none, ["a", "b"])
    assert (scores.macro_f1, scores.micro_f1, scores.exact) == (0.0, 0.0, 1.0)


def test_a_table_of_one_class_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.csv").write_text("text,label\n" + "".join(f"film {n},good\n" for n in range(40)))
    words = [f"data={tmp_path}/t.csv", f"train.out={tmp_path}/run", "train.steps=1", "train.device=cpu"]
    assert cli.main(["train", "classify", *words]) == 1
    assert "t.csv has one class only, good; data.columns=" in capsys.readouterr().err
    (tmp_path / "pictures/cat").mkdir(parents=True)
    for shade in range(40):
        Image.new("RGB", (8, 8), (shade, 0, 0)).save(tmp_path / f"pictures/cat/{shade}.png")
    assert cli.main(["train", "classify-images", f"data={tmp_path}/pictures", *words[1:]]) == 1
    assert "pictures has one class only, cat\n" in capsys.readouterr().err, "a folder has no columns"
    assert not (tmp_path / "run").exists()
