"""`regard.evaluate` against numbers computed here, by hand, from the same models."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import regard
from regard import cli
from regard.config import DataConfig
from regard.data.batching import mask_tokens
from regard.data.sources import open_source
from regard.errors import BadModelFile, RegardError
from regard.recipes import run_config
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer
from regard.training import evaluation
from regard.training.metrics.language_metrics import language_model, strided_losses
from regard.training.metrics.statistics import paired_bootstrap
from regard.training.metrics.translation_metrics import chrf_statistics
from regard.training.run_directory import RunDirectory

WORDS = ["red", "blue", "cat", "dog", "sat", "ran", "mat"]
TINY = (
    "model.d_model=16 model.n_layers=1 model.n_heads=2 model.d_ff=32 train.batch_tokens=256 train.lr=0.01 "
    "train.warmup=2 train.eval_every=0 train.samples=0 train.device=cpu train.precision=fp32 train.compile=off "
    "model.dropout=0 model.embedding_dropout=0 data.joint_vocab=true"
)
PAIRS = (
    "data.tokenizer=words data.valid_fraction=0.3 data.max_len=16 model.max_len=16 train.steps=60 train.save_every=20"
)
TEXT = "data.tokenizer=chars data.valid_fraction=0.3 train.steps=4 train.save_every=2"
DOCUMENTS = f"{TEXT} data.documents=blank"
LABELS = "data.tokenizer=words data.max_len=8 data.valid_fraction=0.4 train.steps=8 train.save_every=4"
SHAPES = "data.epoch_examples=24 data.valid_rows=6 model.image_size=32 train.steps=12 train.save_every=6"


def _sentence(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(low, high)))


def _train(folder: Path, task: str, words: str) -> Path:
    config = run_config(task, f"{TINY} train.out={folder} {words}".split())
    return Path(regard.train(config, style="quiet").path)


class House:
    """Data files and the runs trained from them, each when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.root, rng = root, random.Random(1)
        pairs = [_sentence(rng, 1, 4) for _ in range(150)]
        self.write("pairs.tsv", "\n".join(f"{text}\t{text.upper()}" for text in dict.fromkeys(pairs)))
        self.write("test.tsv", "\n".join(f"{text}\t{text.upper()}" for text in ("red cat", "dog sat ran", "mat")))
        self.write("text.txt", "\n".join(_sentence(rng, 2, 8) for _ in range(150)))
        self.write("documents.txt", "\n\n".join(_sentence(rng, 4, 12) for _ in range(40)))
        labelled = [(text, "long" if len(text) > 12 else "short") for _ in range(90) if (text := _sentence(rng, 1, 6))]
        self.write("labels.csv", "text,label\n" + "\n".join(f"{text},{label}" for text, label in labelled))
        self.runs = {
            "translate": ("translate", f"data={self.file('pairs.tsv')} {PAIRS}"),
            "translate-b": ("translate", f"data={self.file('pairs.tsv')} {PAIRS} train.seed=5 train.steps=40"),
            "translate-bpe": ("translate", f"data={self.file('pairs.tsv')} {PAIRS} data.tokenizer=chars train.steps=4"),
            "lm": ("lm", f"data={self.file('text.txt')} {TEXT} data.max_len=32"),
            "lm-bytes": ("lm", f"data={self.file('text.txt')} {TEXT} data.tokenizer=bytes data.max_len=20"),
            "documents": ("lm", f"data={self.file('documents.txt')} {DOCUMENTS} data.max_len=24"),
            "mlm": ("mlm", f"data={self.file('documents.txt')} {DOCUMENTS} data.max_len=24"),
            "classify": ("classify", f"data={self.file('labels.csv')} {LABELS}"),
            "classify-b": ("classify", f"data={self.file('labels.csv')} {LABELS} data.labels=short,long train.seed=3"),
            "caption": ("caption", SHAPES),
            "images": ("classify-images", f"data={self.root / 'pictures'} data.valid_fraction=0.5 train.steps=4"),
        }

    def file(self, name: str) -> Path:
        return self.root / name

    def write(self, name: str, text: str) -> Path:
        self.file(name).write_text(text, encoding="utf-8")
        return self.file(name)

    def __call__(self, name: str) -> Path:
        folder, (task, words) = self.root / f"run-{name}", self.runs[name]
        if not folder.exists():
            if task == "classify-images":
                self._draw()
            seen = {word.partition("=")[0]: word for word in words.split()}  # later words win
            _train(folder, task, " ".join(seen.values()))
        return folder

    def _draw(self) -> None:
        from PIL import Image

        rng = np.random.default_rng(0)
        for label, shade in (("dark", 40), ("light", 200)):
            (self.root / "pictures" / label).mkdir(parents=True)
            for n in range(12):
                pixels = np.clip(rng.normal(shade, 30, (28, 28)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(self.root / "pictures" / label / f"{n}.png")


def _changed(run: Path, copy: Path, file: str, change: Callable[[Any], None]) -> Path:
    """A copy of a run of which one file says something else."""
    shutil.copytree(run, copy)
    document = json.loads((copy / file).read_bytes())
    change(document)
    (copy / file).write_text(json.dumps(document))
    (copy / "manifest.json").unlink()  # as in runs of older versions
    return copy


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield House(tmp_path_factory.mktemp("house"))
    torch.set_num_threads(before)


def _ask(path: str | Path, data: dict[str, Any] | DataConfig | None = None, **options: Any) -> Any:
    return regard.evaluate(path, data, device="cpu", **options)


def _found(run: Path) -> dict[str, Any]:
    return json.loads((run / "evaluation.json").read_bytes())["metrics"]


# ------------------------------------------------------------------------------------- the numbers themselves


@pytest.mark.parametrize("name", ["translate", "lm", "documents", "mlm", "classify", "caption", "images"])
def test_a_run_is_evaluated_as_it_was_at_its_end(house: House, name: str) -> None:
    run = house(name)
    report = _ask(run)
    (split,) = report.splits
    assert split.name == "valid"
    for key, value in _found(run).items():
        ours = split.n if key == "n" else report.metrics[key.removeprefix("valid_")]
        assert ours == (value if isinstance(value, str) else pytest.approx(value, rel=1e-5)), key
    assert report.metrics["tokens_per_second"] > 0
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["splits"]["valid"]["loss"] == split.metrics["loss"]
    if name == "translate":
        assert 0 < report.metrics["exact"] < 1, "a run that is all right or all wrong would test little"


def test_the_loss_of_every_pair_is_its_own(house: House) -> None:
    report, model = _ask(house("translate")), regard.load(house("translate"))
    tokenizer, total, count = model.processor.tokenizer, 0.0, 0
    for row in report.rows:
        source, target = tokenizer.encode(row.source), tokenizer.encode(row.target)
        with torch.no_grad():
            logits = model(torch.tensor([source]), torch.tensor([[1, *target[:-1]]]))
        losses = F.cross_entropy(logits[0], torch.tensor(target), reduction="none")
        assert row.loss == pytest.approx(float(losses.mean()), rel=1e-4)
        total, count = total + float(losses.sum()), count + len(target)
    assert report.metrics["loss"] == pytest.approx(total / count, rel=1e-5)
    assert report.metrics["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)


def test_translations_are_scored_as_sacrebleu_does(house: House) -> None:
    import sacrebleu

    report = _ask(house("translate"))
    outputs, targets = [row.output for row in report.rows], [[row.target for row in report.rows]]
    assert report.metrics["bleu"] == pytest.approx(sacrebleu.corpus_bleu(outputs, targets).score)
    assert report.metrics["chrf"] == pytest.approx(sacrebleu.corpus_chrf(outputs, targets).score)
    assert report.metrics["exact"] == np.mean([row.output == row.target for row in report.rows])
    assert "tok:13a" in report.metrics["bleu_signature"]
    assert "nc:6" in report.metrics["chrf_signature"]


def test_classes_are_counted(house: House) -> None:
    report, model = _ask(house("classify")), regard.load(house("classify"))
    labels, losses, hits = model.processor.labels, [], []
    confusion = [[0, 0], [0, 0]]
    for row in report.rows:
        ids = model.processor.tokenizer.encode(row.source)
        ids = ids if len(ids) <= 8 else [*ids[:7], ids[-1]]
        with torch.no_grad():
            logits = model(torch.tensor([ids]))[0]
        truth, said = labels.index(row.target), int(logits.argmax())
        assert row.output == labels[said]
        assert row.score == pytest.approx(float(logits.softmax(-1)[truth]), rel=1e-4)
        assert row.loss == pytest.approx(-math.log(row.score), rel=1e-4)
        losses.append(row.loss)
        hits.append(said == truth)
        confusion[truth][said] += 1
    details = report["valid"].details
    assert details["confusion"] == confusion
    assert [one["label"] for one in details["classes"]] == list(labels)
    assert [one["n_true"] for one in details["classes"]] == [sum(row) for row in confusion]
    assert report.metrics["accuracy"] == pytest.approx(np.mean(hits))
    assert report.metrics["f1"] == pytest.approx(np.mean([one["f1"] for one in details["classes"]]))
    assert report.metrics["loss"] == pytest.approx(np.mean(losses))
    assert "true ↓ predicted →" in report.to_text()


def _blocks(model: Any, ids: list[int], context: int) -> np.ndarray:
    """-log p of tokens 1, 2 … in blocks that see nothing of each other; the unfinished last one is left out."""
    losses = []
    for first in range(0, (len(ids) - 1) // context * context, context):
        block = torch.tensor(ids[first : first + context + 1])
        with torch.no_grad():
            losses.append(F.cross_entropy(model(block[None, :-1])[0], block[1:], reduction="none"))
    return torch.cat(losses).double().numpy()


def test_a_text_is_read_in_blocks_and_paid_for_by_character(house: House) -> None:
    report, model = _ask(house("lm")), regard.load(house("lm"))
    text = house.file("text.txt").read_text()
    text = text[int(len(text) * 0.7 + 1e-9) :]
    losses = _blocks(model, model.processor.tokenizer.encode(text), 32)
    assert report.metrics["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert report.metrics["n_targets"] == len(losses)
    # One token is one character here, so that as many are paid for as were asked for.
    assert report.metrics["bits_per_character"] == pytest.approx(losses.mean() / math.log(2), rel=1e-5)
    joined = "".join(row.target for row in report.rows)
    assert text.startswith(joined)
    assert report.rows[1].loss == pytest.approx(losses[63:127].mean(), rel=1e-5)  # the first token is not asked for
    assert report.rows[1].source == text[32:64]
    assert "strided_loss" not in report.metrics


def test_strided_perplexity_of_one_text(house: House) -> None:
    report, model = _ask(house("lm"), stride=5), regard.load(house("lm"))
    text = house.file("text.txt").read_text()
    text = text[int(len(text) * 0.7 + 1e-9) :]
    ids = model.processor.tokenizer.encode(text)
    losses = strided_losses(model, np.array(ids), 32, 5)
    wanted = language_model(float(losses.sum(dtype=np.float64)), len(losses), len(text) - 1)
    assert report.metrics["strided_loss"] == pytest.approx(wanted.loss, rel=1e-6)
    assert report.metrics["strided_perplexity"] == pytest.approx(wanted.perplexity, rel=1e-6)
    assert report.metrics["strided_bits_per_character"] == pytest.approx(wanted.bits_per_character, rel=1e-6)
    assert report.metrics["loss"] == _ask(house("lm")).metrics["loss"]
    assert report.options["stride"] == 5


def test_documents_do_not_see_each_other(house: House) -> None:
    report, model = _ask(house("documents"), stride=7), regard.load(house("documents"))
    source = open_source(RunDirectory.open(house("documents")).config.data)
    total, count, characters = 0.0, 0, 0
    for document in source.valid:
        ids = [2, *model.processor.tokenizer.encode(document.text), 2]
        losses = strided_losses(model, np.array(ids), 24, 7)
        total, count, characters = total + float(losses.sum()), count + len(losses), characters + len(document.text)
    assert report["valid"].n == len(source.valid)
    assert report.metrics["strided_loss"] == pytest.approx(total / count, rel=1e-5)
    assert report.metrics["strided_bits_per_character"] == pytest.approx(total / math.log(2) / characters, rel=1e-5)
    assert report.metrics["n_targets"] == count


def test_hidden_tokens_are_guessed(house: House) -> None:
    report, model = _ask(house("mlm")), regard.load(house("mlm"))
    tokenizer, data = model.processor.tokenizer, RunDirectory.open(house("mlm")).config.data
    ids = [token for x in open_source(data).valid for token in (2, *tokenizer.encode(x.text), 2)]
    losses, hits = [], []
    for index, row in enumerate(report.rows):
        whole = ids[24 * index : 24 * (index + 1)]
        # The last row of all is filled up, and what is hidden is drawn for all of it.
        filled = np.array([*whole, *[0] * (24 - len(whole))])
        hidden = mask_tokens(filled, vocab_size=tokenizer.size, mask_id=4, seed=0, epoch=-1, index=index)
        with torch.no_grad():
            logits = model(
                torch.tensor(hidden.inputs[None]), padding_mask=torch.tensor([[n < len(whole) for n in range(24)]])
            )
        asked = hidden.targets >= 0
        own = F.cross_entropy(logits[0][asked], torch.tensor(hidden.targets[asked]), reduction="none")
        said = logits[0].argmax(-1).numpy()
        assert row.loss == pytest.approx(float(own.mean()), rel=1e-4)
        assert row.target == tokenizer.decode(whole)
        assert row.output == tokenizer.decode(np.where(asked, said, filled)[: len(whole)])
        assert row.source.count("<mask>") == (hidden.inputs == 4).sum()
        losses += own.tolist()
        hits += (said[asked] == hidden.targets[asked]).tolist()
    assert len(report.rows) == -(-len(ids) // 24)
    assert report.metrics["n_targets"] == len(hits)
    assert report.metrics["accuracy"] == pytest.approx(np.mean(hits))
    assert report.metrics["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
    assert "bits_per_character" not in report.metrics


@pytest.mark.parametrize("name", ["caption", "translate", "classify"])
def test_an_example_has_the_loss_it_has_alone(house: House, name: str) -> None:
    report = _ask(house(name))
    (alone,) = _ask(house(name), limit=1).rows
    assert alone.loss == pytest.approx(report.rows[0].loss, rel=1e-4)
    assert alone.source == report.rows[0].source
    assert alone.loss != pytest.approx(report.rows[report["valid"].n - 1].loss, rel=1e-4), "two that differ are needed"


# ------------------------------------------------------------------------------------- which examples


def test_a_given_file_is_evaluated_whole_unless_told(house: House) -> None:
    run, test = house("translate"), str(house.file("test.tsv"))
    report = _ask(run, {"source": test})
    assert [row.source for row in report.rows] == ["red cat", "dog sat ran", "mat"]
    assert report.splits[0].name == "whole"
    assert [row.source for row in _ask(run, DataConfig(source=test)).rows] == [row.source for row in report.rows]
    assert [row.source for row in _ask(run, {"source": test}, split="train").rows] == [
        row.source for row in report.rows
    ]
    assert _ask(run, {"source": test, "valid_rows": 1})["valid"].n == 1
    assert _ask(run, {"valid": test})["valid"].rows == report.rows
    assert [row.source for row in _ask(run, {"source": test}, limit=2).rows] == ["red cat", "dog sat ran"]


def test_another_file_is_not_split_as_the_one_learned_from(house: House, tmp_path: Path) -> None:
    """What held out and format meant was that other file; how its columns are read may well be the same."""
    about = {"valid": str(house.file("pairs.tsv")), "deduplicated": "source", "valid_rows": 2, "format": "tsv"}
    run = _changed(house("translate"), tmp_path / "run", "run.json", lambda x: x["data"].update(about))
    twice = house.write(
        "twice.jsonl", '{"source": "red", "target": "RED"}\n' * 2 + '{"source": "mat", "target": "MAT"}\n'
    )
    assert [row.source for row in _ask(run, {"source": str(twice)}).rows] == ["red", "red", "mat"]
    columns = _changed(house("translate"), tmp_path / "columns", "run.json", lambda x: x["data"].update(columns=[1, 0]))
    assert _ask(columns, {"source": house.file("test.tsv")}).rows[0].source == "RED CAT"


def test_classes_keep_their_numbers_in_a_file_that_has_only_some(house: House) -> None:
    run, labels = house("classify"), ("long", "short")
    file = house.write("only-short.csv", "text,label\nred,short\nred cat,short\nmat,short\n")
    report = _ask(run, {"source": str(file)})
    assert {row.target for row in report.rows} == {"short"}
    assert report["whole"].details["classes"][0]["n_true"] == 0
    assert [one["label"] for one in report["whole"].details["classes"]] == list(labels)
    with pytest.raises(RegardError, match="unknown label"):
        _ask(run, {"source": str(house.write("odd.csv", "text,label\nred,short\nblue,tall\n"))})
    with pytest.raises(ValueError, match=r"labels=a,b, but the classes of .* are long, short"):
        _ask(run, {"source": str(file), "labels": ("a", "b")})


def test_every_held_out_set_by_itself(house: House) -> None:
    report = _ask(house("caption"), split="all")
    assert [split.name for split in report.splits] == ["valid", "combinations"]
    alone = _ask(house("caption"), split="combinations")
    assert alone.splits[0].rows == report["combinations"].rows
    assert alone.metrics["loss"] == report["combinations"].metrics["loss"] != report.metrics["loss"]
    assert len(report.rows) == report["valid"].n + report["combinations"].n == 12
    assert all(isinstance(row.target, list) for row in report.rows)
    assert _ask(house("caption"), split="train", limit=5)["train"].n == 5
    assert _ask(house("caption"), {"source": "shapes", "valid_rows": 3})["valid"].n == 3
    with pytest.raises(KeyError, match="longer"):
        report["longer"]


def test_a_step_of_a_run(house: House) -> None:
    early = _ask(f"{house('translate')}@20")
    assert early.weights == "step 20"
    model, _ = RunDirectory.open(house("translate")).model(20)
    row = early.rows[0]
    tokenizer = model.processor.tokenizer
    target = tokenizer.encode(row.target)
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer.encode(row.source)]), torch.tensor([[1, *target[:-1]]]))
    assert row.loss == pytest.approx(float(F.cross_entropy(logits[0], torch.tensor(target))), rel=1e-4)
    assert early.metrics["loss"] > _ask(house("translate")).metrics["loss"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("translate", {"source": "pairs.tsv"}),
        ("lm", {"source": "text.txt", "max_len": 32}),
        ("documents", {"source": "documents.txt", "documents": "blank", "max_len": 24}),
        ("mlm", {"source": "documents.txt", "documents": "blank", "max_len": 24}),
        ("classify", {"source": "labels.csv", "max_len": 8}),
        ("images", {"source": "pictures"}),
        ("caption", {"source": "shapes", "valid_rows": 6, "max_target_len": 32}),
    ],
)
def test_a_model_directory_says_its_task(house: House, name: str, data: dict[str, Any]) -> None:
    run = house(name)
    if "source" in data and data["source"] != "shapes":
        data = {**data, "source": str(house.file(data["source"]))}
    of_run, of_directory = _ask(run, data), _ask(run / "model", data)
    assert of_directory.task == of_run.task
    assert of_directory.splits[0].rows == of_run.splits[0].rows
    same = of_run.metrics.keys() - {"tokens_per_second"}
    assert {key: of_directory.metrics[key] for key in same} == {key: of_run.metrics[key] for key in same}
    with pytest.raises(ValueError, match=r"is a model directory: data\.source=… must name the data"):
        _ask(run / "model")


def test_a_tokenizer_made_elsewhere(house: House, tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Backend(models.BPE({"!": 0, **{c: n for n, c in enumerate(alphabet, 1)}}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 16, "n_layers": 1, "n_heads": 2, "d_ff": 32, "max_len": 48}
    model = regard.build("gpt2", **sizes, pad_id=299, bos_id=299, eos_id=299)
    model.processor = Processor(source=Tokenizer(inner.to_str().encode()))
    model.eval().save(tmp_path / "foreign")
    report = _ask(tmp_path / "foreign", {"source": str(house.file("text.txt"))}, stride=16)
    ids = inner.encode(house.file("text.txt").read_text()).ids
    assert report.metrics["loss"] == pytest.approx(_blocks(model, ids, 48).mean(), rel=1e-5)
    assert report.metrics["strided_loss"] == pytest.approx(
        strided_losses(model, np.array(ids), 48, 16).mean(), rel=1e-5
    )
    with pytest.raises(ValueError, match=r"max_len=64, but the positions of .* end at 48"):
        _ask(tmp_path / "foreign", {"source": str(house.file("text.txt")), "max_len": 64})


def test_texts_longer_than_the_model_can_read(tmp_path: Path, house: House) -> None:
    """Learned positions end at max_len, also where that is no multiple of 8."""
    words = f"data={house.file('labels.csv')} {LABELS} model.max_len=5 model.positions=learned"
    run = _train(tmp_path / "run", "classify", words.replace("data.max_len=8", "data.max_len=5"))
    report = _ask(run)
    n_long = sum(len(row.source.split()) > 3 for row in report.rows)
    assert report.notes == (f"{n_long} texts of valid were cut to the length that {run} can read",)
    assert n_long > 5
    words = f"data={house.file('pairs.tsv')} {PAIRS} model.positions=learned"
    words = words.replace("max_len=16", "max_len=6").replace("steps=60", "steps=4")
    run = _train(tmp_path / "pairs", "translate", words)
    test = house.write("long.tsv", "red cat dog sat ran mat red\tRED CAT DOG SAT RAN MAT RED\nred\tRED\n")
    report = _ask(run, {"source": str(test)})
    assert report.notes == (f"2 texts of {test} were cut to the length that {run} can read",)
    assert all(math.isfinite(row.loss) for row in report.rows)


# ------------------------------------------------------------------------------------- against another


def test_two_runs_on_the_same_pairs(house: House) -> None:
    a, b = house("translate-b"), house("translate")
    report, alone = _ask(b, against=a), _ask(a)
    found = {one.metric: one for one in report["valid"].comparisons}
    assert list(found) == ["BLEU", "chrF", "exact match", "loss"]
    for name, key in (("BLEU", "bleu"), ("chrF", "chrf"), ("exact match", "exact"), ("loss", "loss")):
        assert found[name].a == pytest.approx(alone.metrics[key])
        assert found[name].b == pytest.approx(report.metrics[key])
        assert found[name].difference == pytest.approx(report.metrics[key] - alone.metrics[key])
    outputs = [[row.output for row in one.rows] for one in (alone, report)]
    targets = [row.target for row in report.rows]
    assert found["chrF"] == paired_bootstrap(*(chrf_statistics(x, targets) for x in outputs))
    assert found["loss"].difference < 0, "the one that trained longer is the better one"
    assert report["valid"].other["loss"] == alone.metrics["loss"]
    assert report["valid"].other_rows == alone.rows
    document = report.to_dict()
    assert document["against"] == str(a)
    assert len(document["splits"]["valid"]["against"]["comparisons"]) == 4
    assert "by paired bootstrap" in report.to_text()


def test_loss_over_other_tokens_is_not_compared(house: House) -> None:
    report = _ask(house("translate"), against=house("translate-bpe"))
    assert [one.metric for one in report["valid"].comparisons] == ["BLEU", "chrF", "exact match"]


class StandInForComet:
    """The package's functions, as its README calls them: the longer a translation, the better."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def download_model(self, name: str) -> str:
        self.asked.append(name)
        return f"/hub/{name}/model.ckpt"

    def load_from_checkpoint(self, path: str) -> StandInForComet:
        self.asked.append(path)
        return self

    def predict(self, samples: list[dict[str, str]], batch_size: int, gpus: int, progress_bar: bool) -> Any:
        assert (gpus, progress_bar) == (0, False)
        self.asked.append(samples)
        scores = [len(sample["mt"]) / 100 for sample in samples]
        return SimpleNamespace(scores=scores, system_score=sum(scores) / len(scores))


def test_comet_where_its_package_is_installed(
    house: House, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    package, run = StandInForComet(), str(house("translate"))
    words = [
        "eval",
        run,
        f"data.source={house.file('test.tsv')}",
        "--device",
        "cpu",
        "--comet",
        "Unbabel/wmt22-comet-da",
    ]
    monkeypatch.setitem(sys.modules, "comet", None)
    assert cli.main(words) == 1
    assert "needs comet, which is not installed: pip install unbabel-comet" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "comet", package)
    assert cli.main([*words, "--json", "--against", str(house("translate-b"))]) == 0
    found = json.loads(capsys.readouterr().out)
    name, path, ours, theirs = package.asked
    assert (name, path) == ("Unbabel/wmt22-comet-da", "/hub/Unbabel/wmt22-comet-da/model.ckpt")
    assert [(sample["src"], sample["ref"]) for sample in ours] == [
        (text, text.upper()) for text in ("red cat", "dog sat ran", "mat")
    ]
    split = found["splits"]["whole"]
    assert split["comet"] == pytest.approx(np.mean([len(sample["mt"]) / 100 for sample in ours]))
    (compared,) = (x for x in split["against"]["comparisons"] if x["metric"] == "COMET")
    assert compared["a"] == pytest.approx(np.mean([len(sample["mt"]) / 100 for sample in theirs]))
    assert found["options"]["comet"] == "Unbabel/wmt22-comet-da"
    checkpoint = tmp_path / "mine.ckpt"
    checkpoint.write_bytes(b"")
    package.asked.clear()
    regard.evaluate(run, house.file("test.tsv"), comet=str(checkpoint), device="cpu")
    assert package.asked[0] == str(checkpoint)
    with pytest.raises(ValueError, match=r"is for translations, but .* is for the task 'classify'"):
        regard.evaluate(house("classify"), comet="x")


@pytest.mark.parametrize("option", ["beam", "length_penalty"])
def test_options_of_a_search_are_refused_where_nothing_is_generated(house: House, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=4 is for generated texts, but .* is for the task 'classify'"):
        _ask(house("classify"), **{option: 4})


def test_a_run_against_itself(house: House) -> None:
    for name in ("translate", "lm", "mlm", "classify", "caption"):
        for one in _ask(house(name), against=house(name))["valid"].comparisons:
            assert (one.difference, one.low, one.high, one.p_value) == (0, 0, 0, 1), (name, one.metric)


def test_classes_in_another_order_are_the_same_classes(house: House) -> None:
    a, b = house("classify-b"), house("classify")
    assert regard.load(a).processor.labels == ("short", "long")
    alone, report = _ask(a), _ask(b, {"source": str(house.file("labels.csv"))}, against=a)
    found = {one.metric: one for one in report["whole"].comparisons}
    whole = _ask(a, {"source": str(house.file("labels.csv"))})
    assert list(found) == ["accuracy", "macro F1", "loss"]
    assert found["accuracy"].a == pytest.approx(whole.metrics["accuracy"])
    assert found["macro F1"].a == pytest.approx(whole.metrics["f1"])
    assert found["loss"].a == pytest.approx(whole.metrics["loss"])
    assert found["accuracy"].b == pytest.approx(report.metrics["accuracy"])
    assert alone["valid"].n < whole["whole"].n


def test_language_models_with_the_same_tokens(house: House) -> None:
    run = house("lm")
    report = _ask(run, against=f"{run}@2")
    (found,) = report["valid"].comparisons
    assert found.metric == "loss"
    assert found.b == pytest.approx(report.metrics["loss"])
    assert found.a == pytest.approx(_ask(f"{run}@2").metrics["loss"])
    assert found.n == len(report.rows)
    (strided,) = _ask(run, against=f"{run}@2", stride=4)["valid"].comparisons
    assert strided.b == pytest.approx(_ask(run, stride=4).metrics["strided_loss"])


def test_language_models_with_other_tokens_pay_by_character(house: House) -> None:
    report = _ask(house("lm"), against=house("lm-bytes"))
    (found,) = report["valid"].comparisons
    assert found.metric == "bits per character"
    # Only stretches that both have read to their end are compared: close to, but not, the mean over everything.
    assert found.b == pytest.approx(report.metrics["bits_per_character"], rel=0.02)
    assert found.a == pytest.approx(_ask(house("lm-bytes")).metrics["bits_per_character"], rel=0.02)
    text = house.file("text.txt").read_text()
    text = text[int(len(text) * 0.7 + 1e-9) :]
    losses = np.concatenate(
        [[np.nan], _blocks(regard.load(house("lm")), [*regard.load(house("lm")).processor.tokenizer.encode(text)], 32)]
    )
    stretches = [losses[n : n + 256] for n in range(0, len(text), 256)]
    read = [x for n, x in enumerate(stretches) if not np.isnan(x).any() and len(x) == min(256, len(text) - 256 * n)]
    assert found.n == len(read)
    assert found.b == pytest.approx(np.concatenate(read).mean() / math.log(2), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "other", "sentence"),
    [
        ("translate", "lm", "are for the tasks 'translate' and 'lm', so they cannot be compared"),
        ("lm", "documents", "held out other examples than .* and may have been trained on these"),
    ],
)
def test_what_cannot_be_compared(house: House, name: str, other: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        _ask(house(name), against=house(other))


def test_another_split_of_the_same_file_may_have_been_trained_on(house: House, tmp_path: Path) -> None:
    def held_out(facts: Any) -> None:
        facts["data"]["split"]["valid_sha256"] = "0" * 64

    other = _changed(house("translate-b"), tmp_path / "other", "provenance.json", held_out)
    with pytest.raises(ValueError, match="held out other examples"):
        _ask(house("translate"), against=other)
    test = str(house.file("test.tsv"))
    assert _ask(house("translate"), {"source": test}, against=other)["whole"].comparisons[0].n == 3
    assert _ask(house("translate"), {"valid": test}, against=other)["valid"].comparisons[0].n == 3


def test_models_of_other_classes_are_not_compared(house: House, tmp_path: Path) -> None:
    other = _changed(house("classify"), tmp_path / "other", "labels.json", lambda x: x.update(labels=["short", "tall"]))
    with pytest.raises(ValueError, match="have different classes, long, short and short, tall"):
        _ask(house("classify"), against=other)


# ------------------------------------------------------------------------------------- on disk


def test_outputs_worst_cases_and_report(house: House, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    report = _ask(house("translate"), against=house("translate-b"), out=out)
    assert sorted(x.name for x in out.iterdir()) == ["manifest.json", "outputs.jsonl", "report.json", "worst.md"]
    lines = [json.loads(line) for line in (out / "outputs.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["output"] for line in lines] == [row.output for row in report.rows]
    assert [line["loss"] for line in lines] == [row.loss for row in report.rows]
    assert {"split", "index", "source", "target", "score", "other"} <= lines[0].keys()
    assert lines[3]["other"]["output"] == report["valid"].other_rows[3].output
    assert json.loads((out / "report.json").read_bytes()) == report.to_dict()
    worst, text = report["valid"].worst(), (out / "worst.md").read_text(encoding="utf-8")
    assert [row.score for row in worst] == sorted(row.score for row in worst)
    assert all(row.output != row.target for row in worst)
    assert len(worst) == min(20, sum(row.output != row.target for row in report.rows))
    wrong = sum(row.output != row.target for row in report.rows)
    assert len(report["valid"].worst(10**6)) == wrong < len(report.rows)
    assert min(row.score for row in report.rows) == worst[0].score
    assert text.count("\n### ") == len(worst)
    assert text.index(f"    {worst[0].source}") < text.index(f"    {worst[-1].target}")
    assert not [x for x in out.parent.iterdir() if x != out], "something was left beside it"


def test_an_evaluation_replaces_only_an_evaluation(house: House, tmp_path: Path) -> None:
    run, out = house("translate"), tmp_path / "out"
    _ask(run, out=out, limit=3)
    _ask(run, out=out, limit=2)
    assert len((out / "outputs.jsonl").read_text().splitlines()) == 2
    (out / "worst.md").write_text("my notes")
    with pytest.raises(FileExistsError, match="has been changed since it was written"):
        _ask(run, out=out)
    assert (out / "worst.md").read_text() == "my notes"
    for name in ("mine", "outputs.jsonl"):
        other = tmp_path / f"with-{name}"
        other.mkdir()
        (other / name).write_text("mine")
        with pytest.raises(FileExistsError, match="would be lost"):
            _ask(run, out=other)
        assert (other / name).read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="is a file"):
        _ask(run, out=tmp_path / "file")
    (tmp_path / "empty").mkdir()
    _ask(run, out=tmp_path / "empty", limit=1)
    assert (tmp_path / "empty" / "report.json").exists()


def test_a_failure_while_writing_leaves_the_old_one(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = house("translate"), tmp_path / "out"
    _ask(run, out=out, limit=3)
    before = {x.name: x.read_bytes() for x in out.iterdir()}
    write = evaluation.write_atomic

    def full(path: Path, content: bytes) -> None:
        if path.name == "report.json":
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(evaluation, "write_atomic", full)
    with pytest.raises(OSError, match="No space left"):
        _ask(run, out=out, limit=2)
    assert {x.name: x.read_bytes() for x in out.iterdir()} == before
    assert [x.name for x in tmp_path.iterdir()] == ["out"]


def test_passages_of_a_text_are_ranked_by_loss(house: House, tmp_path: Path) -> None:
    report = _ask(house("lm"), out=tmp_path / "out")
    worst = report["valid"].worst(5)
    assert [row.loss for row in worst] == sorted((row.loss for row in report.rows), reverse=True)[:5]
    assert worst[0].score == pytest.approx(math.exp(-worst[0].loss))


# ------------------------------------------------------------------------------------- options and refusals


def test_beam_and_length_penalty_reach_the_search(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.training.tasks.translation import Translate

    asked: list[dict[str, Any]] = []
    real = Translate.answers

    def answers(self: Translate, model: Any, examples: Any, **options: Any) -> Any:
        asked.append(options)
        return real(self, model, examples, **options)

    monkeypatch.setattr(Translate, "answers", answers)
    assert _ask(house("translate"), limit=2).options["beam"] == 1
    report = _ask(house("translate"), against=house("translate-b"), limit=2, beam=3, length_penalty=0.5)
    assert asked == [{"beam": 1, "length_penalty": 1.0}, *[{"beam": 3, "length_penalty": 0.5}] * 2]
    assert (report.options["beam"], report.options["length_penalty"]) == (3, 0.5)


def test_lower_precision_is_close_but_not_the_same(house: House) -> None:
    exact, rounded = (_ask(house("lm"), precision=name).metrics["loss"] for name in ("fp32", "bf16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.02)


def test_changed_data_is_noted(house: House, tmp_path: Path) -> None:
    assert _ask(house("lm")).notes == ()
    run = _changed(house("lm"), tmp_path / "run", "provenance.json", lambda x: x["data"].update(sha256="0" * 64))
    assert _ask(run).notes == (f"{house.file('text.txt')} has changed since {run} was trained",)


def test_weights_that_are_broken(house: House, tmp_path: Path) -> None:
    model = regard.load(house("translate"))
    with torch.no_grad():
        model.token.weight.fill_(math.nan)
    model.save(tmp_path / "broken")
    with pytest.raises(RegardError, match="losses are NaN"):
        _ask(tmp_path / "broken", {"source": str(house.file("test.tsv"))})


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        ("{root}/nowhere", 3, "there is no run and no model directory {root}/nowhere"),
        ("{run}@7", 3, "{run} has no checkpoint of step 7; there are 20, 40, 60"),
        ("{root}@7", 3, "{root}@7: {root} is not a run, so it has no step 7"),
        ("{run}/model", 1, "{run}/model is a model directory: data.source=… must name the data to evaluate on"),
        (
            "{run} data={root}/text.txt",
            1,
            "{root}/text.txt holds plain text, but task 'translate' learns from pairs of texts",
        ),
        ("{run} data={root}/none.tsv", 2, "there is no file {root}/none.tsv"),
        (
            "{run} data.valid_fraction=0",
            1,
            "{root}/pairs.tsv has no held-out examples to evaluate on; data.source=FILE",
        ),
        ("{run} --split longer", 1, "split='longer' is not one of valid, all, train of {root}/pairs.tsv"),
        ("{run} --stride 4", 1, "stride=4 is for language models, but {run} is for the task 'translate'"),
        ("{run} --out {run}", 1, "{run} holds checkpoints/"),
        ("{run} --precision fp8", 2, "--precision fp8 is not one of fp32, bf16, fp16"),
        ("{run} --precision fp16", 1, "precision='fp16' needs device='cuda', not 'cpu'"),
    ],
)
def test_refusals_on_the_command_line(
    house: House, capsys: pytest.CaptureFixture[str], words: str, code: int, sentence: str
) -> None:
    names = {"root": str(house.root), "run": str(house("translate"))}
    assert cli.main(["eval", *words.format(**names).split(), "--device", "cpu"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"regard: {sentence.format(**names)}")
    assert said.err.count("\n") == 1


@pytest.mark.parametrize("option", ["limit", "beam", "stride"])
def test_numbers_below_one(house: House, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0 must be at least 1"):
        _ask(house("lm"), **{option: 0})


def test_a_field_that_does_not_exist(house: House) -> None:
    with pytest.raises(ValueError, match="no field 'sorce'"):
        _ask(house("lm"), {"sorce": "x"})


def test_a_stride_wider_than_the_context(house: House) -> None:
    with pytest.raises(ValueError, match="stride=33 is not between 1 and context=32"):
        _ask(house("lm"), stride=33)


def test_the_command_answers_people_and_machines(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(house("translate"))
    command = ["eval", run, f"data={house.file('test.tsv')}", "--device", "cpu", "--beam", "2", "--limit", "2"]
    assert cli.main([*command, "--json", "--against", str(house("translate-b"))]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["splits"]["whole"]["n"] == 2
    assert (document["options"]["beam"], document["options"]["limit"]) == (2, 2)
    assert document["splits"]["whole"]["against"]["comparisons"][0]["metric"] == "BLEU"
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    assert said.startswith(run)
    assert "whole: 2 examples" in said
    assert "bleu" in said


def test_korean_stands_in_columns(house: House) -> None:
    from rich.cells import cell_len

    file = house.write("korean.csv", "text,label\n빨간 고양이,short\n빨간 고양이,long\n")  # one of them is wrong
    table = _ask(house("classify"), {"source": str(file)}).to_text()
    shown = [line for line in table.splitlines() if line.startswith(("  source", "  target", "  output"))]
    assert shown[0] == "  source  빨간 고양이"
    assert len({cell_len(line[: line.index(line.split(None, 1)[1])]) for line in shown}) == 1


def test_a_bad_directory_is_code_3(tmp_path: Path) -> None:
    with pytest.raises(BadModelFile):
        _ask(tmp_path)


@pytest.mark.parametrize("stride", [None, 8])
def test_a_loss_that_is_nan_for_some_words_is_an_error(house: House, stride: int | None, tmp_path: Path) -> None:
    """It is not left out of the mean, as tokens without a target are."""
    words = f"data={house.file('documents.txt')} {DOCUMENTS} data.max_len=24 model.tie_head=false"
    model = regard.load(_train(tmp_path / "run", "lm", words))
    with torch.no_grad():
        model.token.weight[model.processor.tokenizer.encode("u")[0]] = math.nan
    model.save(tmp_path / "model")
    with pytest.raises(RegardError, match="NaN"):
        _ask(tmp_path / "model", {"source": house.file("documents.txt"), "documents": "blank"}, stride=stride)
