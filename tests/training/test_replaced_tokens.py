"""`regard train electra`: a generator proposes, the model tells, and only the model is shipped."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import regard
from regard import cli
from regard.data.packing import IGNORE
from regard.data.sources import open_source
from regard.models import Encoder
from regard.recipes import run_config
from regard.training.run_directory import RunDirectory
from regard.training.tasks import open_task
from regard.training.tasks.replaced_tokens import ReplacedTokens

from .runs import TINY, assert_same, resume, write_data

WORDS = (*TINY, "data.tokenizer=chars", "data.documents=line", "model.generator_width=8", "train.batch_tokens=96")


def test_a_run_ships_the_model_without_the_generator(tmp_path: Path) -> None:
    """Stopped and resumed it is the same run, bit for bit."""
    data = write_data("mlm", tmp_path)
    for name, more in (("whole", ()), ("part", ("train.stop_at=2",))):
        words = [f"data={data}", f"train.out={tmp_path / name}", "train.steps=4", "train.save_every=2", *WORDS, *more]
        assert cli.main(["train", "electra", *words, "--quiet"]) == 0
    resume(tmp_path / "part")
    assert_same(tmp_path / "whole", tmp_path / "part")
    run = RunDirectory.open(tmp_path / "whole")
    state = run.checkpoints().latest().tensors()  # type: ignore[union-attr]
    assert any("generator." in name for name in state)
    assert not any("generator.token" in name for name in state)  # the table is one
    model = regard.load(tmp_path / "whole")
    assert isinstance(model, Encoder)
    assert model.generator is None
    assert model.config.generator_width is None
    tokens = torch.tensor([model.processor.tokenizer.encode("one two .")])
    assert model(tokens).shape == tokens.shape
    assert cli.main(["eval", str(tmp_path / "whole"), "--json"]) == 0
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text("utf-8").splitlines()]
    last = [line for line in lines if "valid_loss" in line][-1]
    assert 0 <= last["replaced_found"] <= 1
    assert 0 < last["accuracy"] <= 1


def test_a_classifier_starts_from_it(tmp_path: Path) -> None:
    data = write_data("mlm", tmp_path)
    words = [f"data={data}", f"train.out={tmp_path / 'detector'}", "train.steps=1", *WORDS]
    assert cli.main(["train", "electra", *words, "--quiet"]) == 0
    config = run_config("classify", ["data=reviews.tsv", f"train.init={tmp_path / 'detector'}"])
    assert (config.model.head, config.model.generator_width) == ("classify", None)


def test_what_is_told_and_what_learns(tmp_path: Path) -> None:
    """Only hidden tokens are replaced; a token drawn right counts as original; the draw passes no gradient."""
    config = run_config("electra", [f"data={write_data('mlm', tmp_path)}", *WORDS])
    task = open_task(config, open_source(config.data))
    assert isinstance(task, ReplacedTokens)
    model = regard.build(task.model_config)
    assert isinstance(model, Encoder)
    assert model.generator is not None
    assert model.generator.token is model.token
    batch = task.batch(0)
    replaced, original, _ = task._replace(model, batch)
    hidden = batch.targets != IGNORE
    assert torch.equal(replaced[~hidden], original[~hidden])
    assert torch.equal(original[hidden], batch.targets[hidden])
    loss = task.loss(model, batch)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    with torch.no_grad():  # the discriminator's loss alone leaves the generator as it is
        model.zero_grad()
    logits = model(replaced, padding_mask=batch.options["padding_mask"])
    logits.sum().backward()
    assert all(p.grad is None for p in model.generator.parameters())
    model.train()
    model.detector.eval()  # type: ignore[union-attr]
    task.answers(model, list(task.source.train)[:2])
    assert model.training
    assert not model.detector.training  # type: ignore[union-attr]
