"""Two towers trained on a caption file: losses, recall both ways, classes by their names, looks, refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard import cli
from regard.cli import generation_commands
from regard.recipes import run_config
from regard.training.loss import info_nce, pairwise_sigmoid
from regard.training.metrics.retrieval_metrics import retrieval_ranks
from web.served import asked, asking, numbers, opened

COLOURS = {"red": (220, 30, 30), "green": (30, 200, 40), "blue": (40, 40, 220), "white": (250, 250, 250)}
TEXT = {"architecture": "decoder", "head": "none", "pooling": "end", "positions": "learned", "norm_place": "pre"}
TEXT |= {"d_model": 24, "n_layers": 1, "n_heads": 2, "d_ff": 32}
SMALL = (
    *("model.image_size=16", "model.patch_size=8", "model.d_model=32", "model.n_layers=1", "model.n_heads=2"),
    *("model.d_ff=48", "model.d_shared=16", "data.tokenizer=words", "data.max_len=12", "model.max_len=12"),
    *("data.valid_fraction=0.25", "train.batch_size=8", "train.warmup=5", "train.lr=4e-3", "train.device=cpu"),
    *("train.samples=1", "train.eval_every=0", "train.save_every=0", "train.log_every=20"),
)


def write_captions(folder: Path) -> Path:
    """Squares of four colours, each image with two captions, as ``image TAB caption``."""
    noise, lines = np.random.default_rng(1), []
    (folder / "images").mkdir(parents=True)
    for number in range(32):
        name, colour = list(COLOURS.items())[number % 4]
        pixels = np.clip(np.array(colour) + noise.integers(-25, 26, (16, 16, 3)), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{number}.png")
        lines += [f"{number}.png\ta photo of a {name} square", f"{number}.png\tthis one is {name} all over"]
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder / "captions.tsv"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("contrast")
    words = [f"data={write_captions(folder)}", *SMALL, "train.steps=100", f"train.out={folder / 'run'}"]
    run = run_config("contrast", [*words, f"model.text_model={json.dumps(TEXT)}"])
    regard.train(run, style="quiet")
    return folder


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_it_learns_which_caption_belongs_to_which_image(world: Path) -> None:
    found = json.loads((world / "run" / "evaluation.json").read_text())
    metrics = found.get("metrics", found)
    # Two images of a colour cannot be told apart: of eight held-out images, a right one is among the first five.
    assert metrics["text_recall_5"] > 0.9
    assert metrics["image_recall_5"] > 0.9


def test_images_are_held_out_with_all_their_captions(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (split,) = ask(capsys, "eval", str(world / "run"))["splits"].values()
    n_images, metrics = split["n"], split
    assert metrics["n_texts"] == 2 * n_images
    assert {"loss", "text_recall_1", "text_recall_10", "image_recall_1", "mean_recall"} <= set(metrics)


def test_classes_by_their_names(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images = [str(world / "images" / f"{n}.png") for n in range(4)]
    words = ("--classes", "red, green, blue, white", "--template", "a photo of a {} square")
    answers = ask(capsys, "classify", str(world / "run"), *images, *words)
    labels = [x["label"] for x in answers["results"]]
    assert labels == list(COLOURS)
    classifier = regard.zero_shot(world / "run", list(COLOURS), ["a photo of a {} square", "this one is {} all over"])
    assert [x.label for x in regard.classify(classifier, images)] == list(COLOURS)
    assert regard.look(classifier, images[0]).kinds == ("encoder",)


def test_a_file_that_another_template_began_is_not_gone_on_with(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command was given decides whether it goes on where one that was stopped had come to."""
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(generation_commands, "predict", lambda *args, **document: given.append(args[-1]))
    for template in ("a {}", "a photo of a {}"):
        words = ["classify", str(world / "run"), str(world / "images" / "0.png"), "--classes", "red,blue"]
        assert cli.main([*words, "--template", template]) == 0
    assert given[0] != given[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "--classes NAMES"),
        (("--classes", "red"), "two or more different names"),
        (("--classes", "red,blue", "--template", "a photo"), "has no {}"),
        (("--template", "a {}"), "--template needs --classes"),
    ],
)
def test_what_is_refused(world: Path, words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["classify", str(world / "run"), str(world / "images" / "0.png"), *words]) != 0
    assert said in capsys.readouterr().err


def test_a_look_at_both_towers(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = world / "images" / "0.png"
    seen = regard.look(world / "run", image, "a photo of a red square")
    assert seen.kinds == ("encoder", "self")
    assert "red" in [label.text for label in seen.rows(kind="self")]
    assert len(seen.rows(kind="encoder")) == 1 + 4
    assert cli.main(["look", str(world / "run"), str(image), "--target", "a red square"]) == 0


def test_with_its_fields_it_is_a_clip_for_transformers_too(world: Path, tmp_path: Path) -> None:
    run = run_config("contrast", [f"data={world / 'captions.tsv'}", *SMALL, f"model.text_model={json.dumps(TEXT)}"])
    clip = regard.build(run.model.with_(pooling="first", patch_bias=False, embedding_norm=True, eos_id=3, bos_id=4))
    clip.save(tmp_path / "clip")
    assert json.loads((tmp_path / "clip" / "config.json").read_text())["model_type"] == "clip"
    assert regard.load(tmp_path / "clip").config == clip.config


def test_a_config_file_holds_the_text_tower(world: Path, tmp_path: Path) -> None:
    from regard.config.config_file import save_config_file

    run = run_config("contrast", [f"data={world / 'captions.tsv'}", *SMALL, f"model.text_model={json.dumps(TEXT)}"])
    for suffix in ("json", "yaml", "toml"):
        save_config_file(tmp_path / f"run.{suffix}", run)
        assert run_config(config_file=tmp_path / f"run.{suffix}").model == run.model


def test_cost_counts_both_towers() -> None:
    config = run_config("contrast").model
    parts = regard.cost(config, batch=2, length=8).flops_forward.parts
    assert {"encoder", "decoder"} <= {name.split(" ")[0] for name in parts}


def test_the_losses_are_their_formulas() -> None:
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    rows = -sum(math.log(logits[i].softmax(-1)[i]) for i in range(4))
    cols = -sum(math.log(logits[:, i].softmax(-1)[i]) for i in range(4))
    assert float(info_nce(logits)) == pytest.approx((rows + cols) / 2, rel=1e-5)
    pairs = [(1 if i == j else -1) * float(logits[i, j]) for i in range(4) for j in range(4)]
    assert float(pairwise_sigmoid(logits)) == pytest.approx(sum(math.log(1 + math.exp(-x)) for x in pairs), rel=1e-5)


def test_recall_counts_every_caption_of_an_image_and_no_ties() -> None:
    images = np.eye(3)
    texts, owner = np.array([[1, 0, 0], [0, 1, 0], [0, 0.9, 1.0], [0.2, 0.1, 0.9]]), np.array([0, 0, 1, 2])
    ranks = retrieval_ranks(images, texts, owner)
    assert ranks.texts.tolist() == [0, 2, 1, 0]
    assert ranks.images.tolist() == [0, 1, 1]
    assert ranks.recalls()["image_recall_1"] == 0.5
    same = retrieval_ranks(np.ones((3, 2)), np.ones((4, 2)), owner)
    assert same.recalls()["text_recall_1"] == same.recalls()["image_recall_1"] == 0


@pytest.mark.parametrize("command", ["translate", "generate", "embed"])
def test_another_command_says_what_two_towers_are_for(
    world: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(world / "run"), "a red square"]) == 1
    run = world / "run"
    assert f"it is for contrast: regard classify {run} --classes NAMES" in capsys.readouterr().err


def test_the_explorer_computes_the_weights_of_the_image_tower(world: Path) -> None:
    with asking({"two": regard.load(world / "run")}) as client:
        seen = opened(client, "two")
        weight = numbers(client, seen, "tile", kind="encoder", layer=0, head=0, r0=0, r1=1, c0=0, c1=1)
        steps = asked(client, seen, "walk", kind="encoder", layer=0, head=0, row=0, col=0)
        assert steps["weight"] == pytest.approx(float(weight), abs=1e-6)
        assert len(steps["v"]) == len(steps["q"])
