"""A subclass of regard.Model from outside the package: trained, resumed, loaded, written with, served, refused."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention.masks import causal
from regard.errors import BadModelFile, UsageError
from regard.layers import TokenEmbedding
from regard.lens.activations import capture
from regard.models import Stack
from regard.models.build import import_model_class, model_class, model_class_name
from regard.models.components import TokenHead
from regard.serving.scheduler import Scheduler
from serving.test_batching import Asked

QUICK: dict[str, Any] = {"steps": 6, "warmup": 1, "samples": 0, "precision": "fp32", "compile": "off", "device": "cpu"}
SMALL: dict[str, Any] = {"d_model": 16, "n_layers": 2, "n_heads": 2, "d_ff": 32, "max_len": 32}
MODULE = """
from torch import nn
import regard
from regard.layers import TokenEmbedding
from regard.models.components import TokenHead

class GruModel(regard.Model):
    is_decoder_only = True

    def __init__(self, config):
        super().__init__(config)
        self.token = TokenEmbedding(config.vocab_size, config.d_model)
        self.rnn = nn.GRU(config.d_model, config.d_model, config.n_layers, batch_first=True)
        self.head = TokenHead(config, config.vocab_size, tied=True)

    def hidden(self, tokens, **options):
        return self.rnn(self.token(tokens))[0]

class NoModel:
    pass
"""


@regard.register_model
class GruModel(regard.Model):
    """A language model that is no Transformer."""

    is_decoder_only = True

    def __init__(self, config: regard.ModelConfig) -> None:
        super().__init__(config)
        self.token = TokenEmbedding(config.vocab_size, config.d_model)
        self.rnn = nn.GRU(config.d_model, config.d_model, config.n_layers, batch_first=True)
        self.head = TokenHead(config, config.vocab_size, tied=True)

    def hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        states: Tensor = self.rnn(self.token(tokens))[0]
        return states


class StackModel(GruModel):
    """A stack over vectors that it makes in its own way."""

    def __init__(self, config: regard.ModelConfig) -> None:
        super().__init__(config)
        self.decoder = Stack(config, causal=True)

    def hidden(self, tokens: Tensor, **options: Any) -> Tensor:
        return self.decoder(super().hidden(tokens), mask=causal())


NAME = model_class_name(GruModel)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("own") / "hamlet.txt"
    file.write_text("to be, or not to be, that is the question\n" * 200, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def run(text: Path) -> Path:
    out = text.parent / "run"
    data = {"source": str(text), "tokenizer": "bytes", "max_len": 32}
    regard.train("lm", data=data, model={"model_class": NAME, **SMALL}, train={**QUICK, "out": str(out)})
    return out


def test_it_is_trained_and_loaded(run: Path) -> None:
    model = regard.load(run)
    assert type(model) is GruModel
    assert model.config.model_class == NAME
    assert json.loads((run / "run.json").read_text())["model"]["model_class"] == NAME
    texts = regard.generate(run, ["to be", "to be, or not"], max_new_tokens=5)
    assert all(len(x) > 0 for x in texts)


def test_the_lens_says_what_it_does_not_have() -> None:
    model = GruModel(regard.ModelConfig(architecture="decoder", **SMALL, vocab_size=30)).eval()
    with pytest.raises(ValueError, match="the layers of this model do not share one residual stream"):
        capture(model, torch.tensor([[1, 2, 3]])).logit_attribution(1)


def test_greedy_text_is_that_of_the_logits(run: Path) -> None:
    model = regard.load(run)
    ids = model.processor.source.encode("to be")
    tokens = torch.tensor([ids])
    for _ in range(8):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    expected = model.processor.source.decode(tokens[0, len(ids) :].tolist())
    assert regard.generate(model, "to be", max_new_tokens=8) == [expected]


def test_it_resumes_to_the_same_weights(run: Path, text: Path, tmp_path: Path) -> None:
    data = {"source": str(text), "tokenizer": "bytes", "max_len": 32}

    def stop(record: Any) -> None:
        if record.step == 3:
            raise KeyboardInterrupt

    fields = {**QUICK, "out": str(tmp_path / "run"), "save_every": 2}
    with pytest.raises(KeyboardInterrupt):
        regard.train("lm", data=data, model={"model_class": NAME, **SMALL}, train=fields, callbacks=[stop])
    regard.resume(tmp_path / "run")
    for one, other in zip(regard.load(run).parameters(), regard.load(tmp_path / "run").parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_instance_is_trained_in_place(text: Path, tmp_path: Path) -> None:
    config = regard.ModelConfig(architecture="decoder", vocab_size=261, bos_id=None, eos_id=None, norm="layer")
    model = GruModel(config.with_(**SMALL))
    assert model.token is not None
    before = model.token.weight.clone()
    data = {"source": str(text), "tokenizer": "bytes", "max_len": 32}
    regard.train("lm", data=data, model=model, train={**QUICK, "out": str(tmp_path / "run")})
    assert model.config.model_class == NAME
    assert not torch.equal(before, model.token.weight)
    assert type(regard.load(tmp_path / "run")) is GruModel


def test_a_stack_is_in_the_lens_without_our_embeddings() -> None:
    config = regard.ModelConfig(architecture="decoder", vocab_size=30, norm_place="pre", **SMALL)
    record = regard.capture(StackModel(config).eval(), [[5, 6, 7]])
    attribution = record.logit_attribution(4)
    assert "embedding" in attribution.parts
    assert attribution.total == pytest.approx(attribution.logit, abs=1e-5)
    why = record.why(layer=1, head=0, row=2, col=1)
    assert why.total == pytest.approx(why.score, abs=1e-5)
    with pytest.raises(ValueError, match="no attention to look at: it is built with model_class="):
        regard.look(GruModel(config.with_(model_class=NAME)), [5, 6, 7])


def test_it_is_served(run: Path) -> None:
    model = regard.load(run)
    rows = [model.processor.source.encode(text) for text in ("to be", "to be, or not")]
    scheduler = Scheduler(model)
    try:
        requests = [Asked(scheduler, row, max_new_tokens=6) for row in rows]
        served = [request.tokens() for request in requests]
    finally:
        scheduler.close()
    assert served == regard.generate(model, ["to be", "to be, or not"], max_new_tokens=6).tokens


def test_what_only_built_in_classes_have_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="only built-in classes are exported to ONNX"):
        regard.export(regard.load(run), "onnx", tmp_path / "onnx")
    with pytest.raises(ValueError, match="cost counts what the built-in classes do"):
        regard.cost(run)
    with pytest.raises(UsageError, match=r"model is a Linear: your own models must be subclasses of regard\.Model"):
        regard.train("lm", model=nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_name_in_a_file_is_never_imported(run: Path, tmp_path: Path) -> None:
    (tmp_path / "strange.py").write_text("raise SystemExit('this ran')")
    config = regard.load(run).config.with_(model_class="strange:Mine")
    with pytest.raises(ValueError, match=r"model_class='strange:Mine' is not registered.*REGARD_MODELS=strange:Mine"):
        model_class(config)
    shutil.copytree(run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "model")  # as before the end of training
    (tmp_path / "run" / "manifest.json").unlink()
    file = tmp_path / "run" / "run.json"
    file.write_text(file.read_text().replace(json.dumps(NAME), '"strange:Mine"'))
    with pytest.raises(BadModelFile, match=r"run\.json holds an invalid value: model_class='strange:Mine' is not"):
        regard.load(tmp_path / "run")


def test_a_typed_name_is_imported(text: Path, tmp_path: Path) -> None:
    (tmp_path / "own_models.py").write_text(MODULE)
    command = [sys.executable, "-m", "regard"]
    words = ["data.tokenizer=bytes", "data.max_len=32", *(f"model.{k}={v}" for k, v in SMALL.items())]
    words += [f"train.{k}={v}" for k, v in QUICK.items()]

    def train(name: str) -> list[str]:
        return [
            *command,
            "train",
            "lm",
            f"data={text}",
            f"model.model_class=own_models:{name}",
            "train.out=run",
            *words,
        ]

    environment = {k: v for k, v in os.environ.items() if k != "REGARD_MODELS"}

    def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            words, cwd=tmp_path, env=environment | variables, capture_output=True, text=True, check=False
        )

    assert (done := call(*train("GruModel"))).returncode == 0, done.stderr
    generate = [*command, "generate", "run", "to be", "--max-new-tokens", "4"]
    refused = call(*generate)
    assert refused.returncode != 0
    assert "own_models:GruModel" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert (done := call(*generate, REGARD_MODELS="own_models:GruModel")).returncode == 0, done.stderr
    wrong = call(*train("NoModel"))
    assert wrong.returncode == 1
    assert "is not a subclass of regard.Model" in wrong.stderr


def test_typed_names_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, message in (
        ("nowhere:Mine", "there is no module"),
        ("json:Mine", "json has no Mine"),
        ("x", "not of the"),
    ):
        with pytest.raises(ValueError, match=message):
            import_model_class(name)


def test_a_class_may_take_a_cache() -> None:
    class Cached(GruModel):
        decodes_by_token = True

    config = regard.ModelConfig(architecture="decoder", vocab_size=261, model_class=NAME, norm="layer", **SMALL)
    assert Cached(config).decodes_by_token
    assert not GruModel(config).decodes_by_token
