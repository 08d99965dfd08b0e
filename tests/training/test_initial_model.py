"""``train.init``: a run, or a directory of any Hugging Face family, brings architecture, weights and tokenizers."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from hub.helpers import theirs
from regard import cli
from regard.recipes import run_config
from regard.training.run_directory import RunDirectory

from .runs import NUMBERS, ZAHLEN, metrics, resume, train, write_data

# What stands first in the vocabulary, which of it does what, and what is put around a text.
SPECIAL: dict[str, tuple[list[str], dict[str, str], str]] = {
    "gpt2": (["!", "@", "<|endoftext|>"], {"eos_token": "<|endoftext|>"}, "$A"),
    "llama": (["<unk>", "<s>", "</s>"], {"bos_token": "<s>", "eos_token": "</s>"}, "<s> $A"),
    "t5": (["<pad>", "</s>", "<unk>"], {"pad_token": "<pad>", "eos_token": "</s>"}, "$A </s>"),
    "bart": (["<s>", "<pad>", "</s>", "<mask>"], {"mask_token": "<mask>"}, "<s> $A </s>"),
    "bert": (
        ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"],
        {"cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"},
        "[CLS] $A [SEP]",
    ),
    "roberta": (
        ["<s>", "<pad>", "</s>", "<unk>", "<mask>"],
        {"cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"},
        "<s> $A </s>",
    ),
}
LIKE = {"mistral": "llama", "qwen2": "llama", "qwen3": "llama", "distilbert": "bert", "albert": "bert"}
LIKE["bert-classes"] = "bert"
TASKS = {
    **dict.fromkeys(("gpt2", "llama", "mistral", "qwen2", "qwen3"), ("lm",)),
    **dict.fromkeys(("t5", "bart"), ("translate",)),
    **dict.fromkeys(("bert", "roberta", "distilbert", "albert"), ("mlm", "classify")),
    "bert-classes": ("classify",),
}
FAST = (
    *("train.steps=2", "train.precision=fp32", "train.compile=off", "train.samples=0", "train.eval_examples=4"),
    *("train.batch_tokens=96", "train.warmup=1", "train.device=cpu", "data.valid_fraction=0.2", "train.log_every=1"),
)
STILL = ("train.lr=1e-12", "train.steps=1")


def hf_directory(kind: str, folder: Path) -> Path:
    """A tiny model as transformers writes it, with a tokenizer that has that family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    theirs(kind).save_pretrained(folder)
    special, names, template = SPECIAL[LIKE.get(kind, kind)]
    words = list(dict.fromkeys([*special, "number", ".", *NUMBERS, *ZAHLEN]))[:40]
    unknown = next((x for x in special if "unk" in x.lower()), "number")
    backend = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token=unknown))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    backend.add_special_tokens([x for x in special if len(x) > 1])
    around = [(token, words.index(token)) for token in special if token in template]
    backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=around)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(names), encoding="utf-8")
    return folder


def start(task: str, init: Path, out: Path, data: str, *words: str) -> dict[str, Any]:
    """`regard train TASK data=… train.init=…`, and what became of the weights."""
    named = {word.partition("=")[0]: word for word in (*FAST, *words)}
    lines = ["data.documents=line"] if task in ("lm", "mlm") else []
    asked = [f"data={data}", f"train.init={init}", f"train.out={out}", *lines, *named.values()]
    assert cli.main(["train", task, "--quiet", *asked]) == 0
    return json.loads((out / "started.json").read_bytes())


# ------------------------------------------------------------------------------------- Hugging Face directories


@pytest.mark.parametrize(("kind", "task"), [(kind, task) for kind, tasks in TASKS.items() for task in tasks])
def test_a_hugging_face_directory_is_tuned_with_its_own_tokenizer(kind: str, task: str, tmp_path: Path) -> None:
    init, out = hf_directory(kind, tmp_path / "theirs"), tmp_path / "run"
    started = start(task, init, out, write_data(task, tmp_path))
    heads = ("head.", "classifier.")
    assert all(name.startswith(heads) for name in started["new"]), started["new"]
    assert (started["partly"], started["differs"]) == ([], {})
    before, after = regard.load(init), regard.load(out)
    same = ("architecture", "d_model", "n_layers", "positions", "norm", "activation", "vocab_size", "pad_id", "max_len")
    assert [getattr(after.config, name) for name in same] == [getattr(before.config, name) for name in same]
    for name in ("bos_id", "eos_id"):  # where config.json does not say, tokenizer_config.json does
        assert getattr(before.config, name) in (None, getattr(after.config, name))
    assert after.processor.source.content == (init / "tokenizer.json").read_bytes()
    assert after.processor.source.special_ids == RunDirectory.open(out).processor.source.special_ids
    assert json.loads((out / "model/config.json").read_bytes())["model_type"] == before.provenance.model_type
    regard.evaluate(out, limit=4)


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_its_first_loss_is_that_of_the_model_it_starts_from(task: str, tmp_path: Path) -> None:
    """Every weight and every token stays: nothing but the learning rate could move it."""
    init = hf_directory({"lm": "gpt2", "mlm": "bert"}[task], tmp_path / "theirs")
    data = write_data(task, tmp_path)
    started = start(task, init, tmp_path / "run", data, *STILL)
    assert (started["new"], started["left"]) == ({}, [])
    before, after = regard.load(init).state_dict(), regard.load(tmp_path / "run").state_dict()
    assert all(torch.allclose(x, after[name], atol=1e-6) for name, x in before.items())


def test_a_tuned_run_goes_on_and_holds_its_tokenizer(tmp_path: Path) -> None:
    """Stopped, the directory it came from gone: its own files are enough."""
    init, out = hf_directory("bert", tmp_path / "theirs"), tmp_path / "run"
    start("mlm", init, out, write_data("mlm", tmp_path), "train.steps=4", "train.stop_at=2")
    os.rename(init, tmp_path / "gone")
    assert resume(out).steps == 4
    assert RunDirectory.open(out).processor.source.mask_id == 4


def test_marian_brings_both_its_sentencepiece_models(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    init = tmp_path / "theirs"
    theirs("marian").save_pretrained(init)
    pieces: dict[str, int] = {"</s>": 2, "<unk>": 3, "<pad>": 1}
    for side, words in (("source", NUMBERS), ("target", ZAHLEN)):
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*words, *map(" ".join, itertools.pairwise(words))]),
            model_prefix=str(init / side),
            vocab_size=24,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        os.replace(init / f"{side}.model", init / f"{side}.spm")
        model = sentencepiece.SentencePieceProcessor(model_file=str(init / f"{side}.spm"))
        for piece in map(model.id_to_piece, range(model.get_piece_size())):
            if piece not in pieces and len(pieces) < 40 and not piece.startswith("<"):
                pieces[piece] = next(index for index in range(40) if index not in pieces.values())
    (init / "vocab.json").write_text(json.dumps(pieces), encoding="utf-8")
    started = start("translate", init, tmp_path / "run", write_data("translate", tmp_path))
    assert (started["new"], started["left"]) == ({}, [])
    processor = RunDirectory.open(tmp_path / "run").processor
    assert processor.source.content == regard.load(init).processor.source.content
    assert processor.target.encode("eins")[-1] == processor.target.eos_id == 2


def test_a_vision_model_keeps_its_image_processor(tmp_path: Path) -> None:
    from PIL import Image

    init = tmp_path / "theirs"
    theirs("vit").save_pretrained(init)
    fields = {"size": {"height": 8, "width": 8}, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]}
    (init / "preprocessor_config.json").write_text(json.dumps(fields), encoding="utf-8")
    for number in range(24):
        folder = tmp_path / "pictures" / ("light" if number % 2 else "dark")
        folder.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8), (number * 9, 90, 40 + number % 2 * 100)).save(folder / f"{number}.png")
    started = start("classify-images", init, tmp_path / "run", str(tmp_path / "pictures"))
    assert set(started["new"]) == {"classifier.out.weight", "classifier.out.bias"}
    assert regard.load(tmp_path / "run").processor.image.mean == (0.1, 0.2, 0.3)


# ------------------------------------------------------------------------------------- our own runs


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model with its recipe's own architecture."""
    folder = tmp_path_factory.mktemp("reader")
    sizes = ("model.d_model=16", "model.n_heads=2", "model.d_ff=24", "model.n_layers=1", "train.steps=2")
    texts = write_data("mlm", folder)
    words = [f"data={texts}", "data.tokenizer=bytes", "data.documents=line", *FAST, f"train.out={folder / 'run'}"]
    named = {word.partition("=")[0]: word for word in (*words, *sizes)}
    regard.train(run_config("mlm", list(named.values())), style="quiet")
    return folder / "run"


def test_a_reader_becomes_a_classifier(reader: Path, tmp_path: Path) -> None:
    started = start("classify", reader, tmp_path / "run", write_data("classify", tmp_path))
    assert set(started["new"]) == {"classifier.out.weight", "classifier.out.bias"}
    assert all(name.startswith("head.") for name in started["left"])
    tokenizer = regard.load(tmp_path / "run").processor.source
    assert tokenizer.encode("")[:1] == [tokenizer.bos_id], "a classifier's texts have both marks"
    assert regard.classify(tmp_path / "run", ["one two number 3"])


def test_the_translator_with_two_tokenizers_is_adapted_to_a_domain(tmp_path: Path) -> None:
    data, general, domain = write_data("translate", tmp_path), tmp_path / "general", tmp_path / "domain"
    train("translate", general, data, "train.steps=2", "data.joint_vocab=false", "data.tokenizer=words")
    (tmp_path / "other.tsv").write_text("".join(f"one more {n}\teins {n}\n" for n in range(40)), encoding="utf-8")
    started = start("translate", general, domain, str(tmp_path / "other.tsv"))
    assert (started["new"], started["left"], started["partly"]) == ({}, [], [])
    before, after = (RunDirectory.open(path).processor for path in (general, domain))
    assert (after.source.content, after.target.content) == (before.source.content, before.target.content)
    assert [line for line in metrics(domain) if "bleu" in line]


# ------------------------------------------------------------------------------------- what is typed


def test_typed_fields_override_and_it_says_what_becomes_new(reader: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_data("classify", tmp_path)
    words = [f"data={data}", f"train.init={reader}", *FAST, "data.tokenizer=words", "model.dropout=0.3"]
    assert cli.main(["train", "classify", *words, f"train.out={tmp_path / 'run'}"]) == 0
    assert "new, the tokens differ: token.weight" in capsys.readouterr().err
    config = RunDirectory.open(tmp_path / "run").config
    assert (config.model.d_model, config.model.dropout, config.data.tokenizer) == (16, 0.3, "words")


def test_less_than_half_of_the_body_is_refused(reader: Path, tmp_path: Path, capsys: Any) -> None:
    data, out = write_data("classify", tmp_path), tmp_path / "run"
    words = [f"data={data}", f"train.init={reader}", *FAST, "model.d_ff=200", f"train.out={out}"]
    assert cli.main(["train", "classify", *words]) == 2
    said = capsys.readouterr().err
    assert "% of this model's layers fit its weights (d_ff is 24 there and 200 here)" in said
    assert "train.init_partial=true" in said
    assert not out.exists()
    assert cli.main(["train", "classify", "--quiet", *words, "train.init_partial=true"]) == 0


def test_a_model_of_another_kind_is_refused_in_one_sentence(reader: Path, tmp_path: Path, capsys: Any) -> None:
    data = write_data("lm", tmp_path)
    assert cli.main(["train", "lm", f"data={data}", f"train.init={reader}"]) == 2
    said = capsys.readouterr().err
    assert "has architecture='encoder' and source='text', but the task 'lm' trains decoder models" in said
    assert said.endswith("it can be trained for mlm, classify, tag, electra, embed\n")


def test_a_tuned_models_learning_rate_goes_with_its_width(reader: Path) -> None:
    words = ["data=x.tsv", f"train.init={reader}"]
    tuned = run_config("classify", words).train
    assert (tuned.optimiser, tuned.lr) == ("adamw", 0.0013)
    assert run_config("classify", [*words, "train.lora=2"]).train.lr == pytest.approx(0.013)
    assert run_config("classify", [*words, "train.lr=0.5", "train.lora=2"]).train.lr == 0.5


@pytest.mark.parametrize("kind", ["dinov2", "swin"])
def test_images_are_prepared_in_training_and_evaluation_as_in_predictions(kind: str, tmp_path: Path) -> None:
    """With the image processor of the directory: the shorter side resized bicubically, and the centre cropped."""
    from transformers import Dinov2Config, Dinov2ForImageClassification, SwinConfig, SwinForImageClassification

    if kind == "swin":
        sizes: dict[str, Any] = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 2}
        directory: Any = SwinForImageClassification(SwinConfig(image_size=16, patch_size=4, num_labels=2, **sizes))
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2}
        directory = Dinov2ForImageClassification(Dinov2Config(image_size=16, patch_size=4, num_labels=2, **sizes))
    directory.save_pretrained(tmp_path / "hf")
    fields = {"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 24}, "crop_size": 16}
    (tmp_path / "hf" / "preprocessor_config.json").write_text(json.dumps(fields))
    rng = np.random.default_rng(0)
    for name, colour in (("red", (250, 0, 0)), ("blue", (0, 0, 250))):
        (tmp_path / "data" / name).mkdir(parents=True)
        for n in range(6):  # what shows the class lies in the centre of a wide picture
            pixels = rng.integers(0, 256, (20, 60, 3), dtype=np.uint8)
            pixels[:, 24:36] = colour
            Image.fromarray(pixels).save(tmp_path / "data" / name / f"{name}{n}.png")
    words = [f"data={tmp_path / 'data'}", f"train.init={tmp_path / 'hf'}", *FAST]
    run = regard.train(run_config("classify-images", [*words, f"train.out={tmp_path / 'run'}"]), style="quiet").path
    model = regard.load(run)
    rows = regard.evaluate(run, tmp_path / "data").rows
    assert len(rows) == 12
    for row in rows:
        image = tmp_path / "data" / row.target / row.source
        assert regard.classify(model, image)[0].all[row.target] == pytest.approx(row.score, abs=1e-6)
