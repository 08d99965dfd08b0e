"""A captioner around a language model that stays as it is: gates, resampler, weights, captions, what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import regard
from regard import cli
from regard.errors import UsageError
from regard.models import EncoderDecoder
from regard.recipes import run_config
from regard.training.run_directory import RunDirectory

from .test_contrast import SMALL as PAIRS
from .test_contrast import write_captions

IMAGES = [word for word in PAIRS if "d_shared" not in word and "tokenizer" not in word and "max_len" not in word]
LANGUAGE = (
    *("model.d_model=24", "model.n_layers=2", "model.n_heads=2", "model.d_ff=32", "model.max_len=16"),
    *("data.max_len=16", "data.tokenizer=words", "data.documents=line", "train.warmup=2", "train.steps=30"),
    *("train.batch_tokens=128", "train.device=cpu", "train.samples=0", "train.eval_every=0", "train.save_every=0"),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flamingo")
    captions = write_captions(folder)
    texts = [line.split("\t")[1] for line in captions.read_text(encoding="utf-8").splitlines()]
    (folder / "texts.txt").write_text("\n".join(texts) + "\n", encoding="utf-8")
    words = [f"data={folder / 'texts.txt'}", *LANGUAGE, f"train.out={folder / 'writer'}"]
    regard.train(run_config("lm", words), style="quiet")
    words = [f"data={captions}", *IMAGES, f"train.language_model={folder / 'writer'}", "train.steps=60"]
    words += ["model.resampler_tokens=3", "data.max_len=12", f"train.out={folder / 'run'}"]
    regard.train(run_config("caption", words), style="quiet")
    return folder


def test_the_language_model_stays_as_it_is_and_the_gates_open(world: Path) -> None:
    language, model = regard.load(world / "writer").state_dict(), regard.load(world / "run")
    assert isinstance(model, EncoderDecoder)
    ours = model.state_dict()
    for name, x in language.items():
        name = name.replace("token.", "target_token.", 1) if name.startswith("token.") else name
        name = f"target_{name}" if name.startswith("embeddings.") else name
        assert torch.equal(ours[name], x), name
    gates = [x for name, x in ours.items() if name.endswith("cross_gate.gate")]
    assert len(gates) == 2
    assert all(float(gate.abs()) > 1e-3 for gate in gates)


@torch.no_grad()
def test_with_its_gates_closed_it_is_the_language_model(world: Path) -> None:
    language, model = regard.load(world / "writer"), regard.load(world / "run")
    for name, p in model.named_parameters():
        if name.endswith("cross_gate.gate"):
            p.zero_()
    tokens = torch.tensor([[1, 5, 6, 7]])
    torch.testing.assert_close(model(torch.randn(1, 3, 16, 16), tokens), language(tokens))


def test_captions_looks_and_evaluation(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = str(world / "images" / "0.png")
    assert cli.main(["caption", str(world / "run"), image, "--beam", "2", "--json"]) == 0
    greedy = regard.caption(world / "run", image)
    assert greedy.best[0].text
    seen = regard.look(world / "run", image)
    assert seen.kinds == ("encoder", "self", "cross")
    assert len(seen.cols(kind="cross")) == 3
    capsys.readouterr()
    assert cli.main(["eval", str(world / "run"), "--json"]) == 0
    (split,) = json.loads(capsys.readouterr().out)["splits"].values()
    assert {"loss", "bleu_4", "cider"} <= set(split)


def test_a_directory_of_hugging_face_serves_too(world: Path, tmp_path: Path) -> None:
    saved = regard.load(world / "writer").save(tmp_path / "writer")
    words = [f"data={world / 'captions.tsv'}", *IMAGES, f"train.language_model={saved}", "train.steps=2"]
    words += ["data.max_len=12", f"train.out={tmp_path / 'run'}"]
    words = [word.replace(str(saved), os.path.relpath(saved)) for word in words]
    regard.train(run_config("caption", words), style="quiet")
    assert RunDirectory.open(tmp_path / "run").config.train.language_model == str(saved), "found from any folder"
    model = regard.load(tmp_path / "run")
    assert model.config.text_model is not None
    assert regard.cost(model.config, batch=1, length=8).flops_forward.total > 0


def test_what_is_refused(world: Path, tmp_path: Path) -> None:
    words = [f"data={world / 'captions.tsv'}", *IMAGES, f"train.out={tmp_path / 'x'}"]
    with pytest.raises(UsageError, match="is not a language model"):
        regard.train(run_config("caption", [*words, f"train.language_model={world / 'run'}"]), style="quiet")
    with pytest.raises(UsageError, match="the task contrast has none"):
        regard.train(run_config("contrast", [*words, f"train.language_model={world / 'writer'}"]), style="quiet")
    with pytest.raises(ValueError, match="are for a captioner of images"):
        regard.build("gpt2", resampler_tokens=3)
