"""A reader follows docs/research.md: their own file, one entry, and their mechanism is everywhere the others are.

The code of the mechanism is the code of the guide, taken from its Markdown.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from generation.spoken import LINES
from models.small import decode
from regard.attention import Dot, Frame
from regard.cli import completion
from regard.config import MIXERS, ModelConfig, mixers
from regard.config.overrides import parse_overrides
from regard.errors import BadModelFile, UsageError
from regard.experiments import ablate
from regard.experiments.ablations import ablation
from regard.experiments.bench_attention import Setup, build_run, choose_contenders
from regard.foundation import plugins
from regard.generation import generate
from regard.lens.patching import logit_difference
from regard.lens.residual_graph import path_patching
from regard.models import Decoder
from regard.text.processor import Processor
from regard.text.tokenizer_training import train_tokenizer
from web.served import asking, numbers, opened

ROOT = Path(__file__).resolve().parents[1]
SIZES: dict[str, Any] = {
    **{"d_model": 24, "n_layers": 2, "n_heads": 4, "d_ff": 32, "max_len": 64},
    **{"pad_id": 0, "bos_id": 1, "eos_id": 2},
}


def code_of_the_guide() -> str:
    text = (ROOT / "docs" / "research.md").read_text(encoding="utf-8")
    (code,) = re.findall(r'^```python title="cosine.py"\n(.*?)^```$', text, flags=re.MULTILINE | re.DOTALL)
    return str(code)


@pytest.fixture
def cosine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with nothing but the reader's file in it; nothing is registered yet."""
    (tmp_path / "cosine.py").write_text(code_of_the_guide(), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delenv(plugins.MIXERS_VARIABLE, raising=False)
    before = dict(MIXERS)
    yield tmp_path
    MIXERS.clear()
    MIXERS.update(before)
    os.environ.pop(plugins.MIXERS_VARIABLE, None)
    sys.modules.pop("cosine", None)


@pytest.fixture
def model(cosine: Path) -> Decoder:
    """A small language model that mixes with it."""
    mixers.register("cosine:Cosine")
    tokenizer = train_tokenizer(LINES, "bpe", 300)
    torch.manual_seed(0)
    made = regard.build("gpt2", **SIZES, mixer="cosine", vocab_size=tokenizer.size)
    made.processor = Processor(source=tokenizer)
    assert isinstance(made, Decoder)
    return made


def formula(model: Decoder, tokens: Tensor) -> Tensor:
    """The weights (H, T, T) of the first layer, as the paper writes them."""
    block = model.decoder.blocks[0]
    x = block.attention_norm(model.embeddings(model.token(tokens)))
    attention = block.attention
    q, k, _ = F.linear(x, attention.w_qkv.weight, attention.w_qkv.bias)[0].unflatten(-1, (3, 4, 6)).unbind(1)
    scores = torch.stack(
        [
            torch.stack([F.cosine_similarity(q[i, h][None], k[:, h]) for i in range(len(q))])
            * attention.mechanism.log_t[h].exp()
            for h in range(4)
        ]
    )
    hidden = torch.ones(len(q), len(q)).triu(1).bool()
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def test_the_guide_is_short() -> None:
    lines = [line for line in code_of_the_guide().splitlines() if line.strip()]
    assert len(lines) <= 30


def test_it_trains_and_every_gradient_is_right(model: Decoder) -> None:
    torch.manual_seed(1)
    tokens = torch.randint(3, 200, (4, 12))
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=3e-3), []
    for _ in range(15):
        loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        losses.append(loss.item())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.9 * losses[0]
    assert not [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    mechanism = model.decoder.blocks[0].attention.mechanism.double()
    q, k, v = (torch.randn(2, 4, 5, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor, log_t: Tensor, backend: str) -> Tensor:
        return regard.attend(q, k, v, mask=regard.attention.masks.causal(), mechanism=mechanism, backend=backend).output

    for backend in ("sdpa", "tiled", "reference"):
        assert torch.autograd.gradcheck(lambda *x: attend(*x, backend), (q, k, v, mechanism.log_t), fast_mode=True)  # noqa: B023  # called at once


@torch.no_grad()
def test_looking_shows_the_formula(model: Decoder) -> None:
    model.eval()
    look = regard.look(model, LINES[0])
    wanted = formula(model, look.inputs[0])
    for head in range(4):
        torch.testing.assert_close(look.weights(layer=0, head=head), wanted[head], atol=1e-6, rtol=1e-5)


@torch.no_grad()
def test_it_goes_token_by_token(model: Decoder) -> None:
    model.eval().double()
    tokens = torch.randint(3, 200, (3, 10), generator=torch.Generator().manual_seed(4))
    for cache in (model.new_cache(), model.new_cache(3, 16)):
        torch.testing.assert_close(decode(model, (tokens,), cache), model(tokens))
    prompt = tokens[0].tolist()
    written = generate(model, prompt, max_new_tokens=8, min_new_tokens=8).tokens[0]
    for n, token in enumerate(written):
        logits = model(torch.tensor([prompt + written[:n]]))[0, -1]
        logits[2] = -torch.inf
        assert token == int(logits.argmax())


@torch.no_grad()
def test_the_explorer_shows_it(model: Decoder) -> None:
    model.eval()
    with asking({"mine": model}) as client:
        look = opened(client, "mine", text=LINES[0])
        n = len(regard.look(model, LINES[0]).rows())
        tile = numbers(client, look, "tile", kind="self", layer=0, head=2, r0=0, r1=n, c0=0, c1=n)
    wanted = formula(model, regard.look(model, LINES[0]).inputs[0])[2]
    torch.testing.assert_close(tile.reshape(n, n), wanted, atol=1e-6, rtol=1e-5)


def test_cost_and_bench_know_it(model: Decoder) -> None:
    dot = regard.build("gpt2", **SIZES, vocab_size=model.config.vocab_size)
    assert model.n_parameters == dot.n_parameters + 2 * 4
    (contender,) = choose_contenders(["cosine"])
    assert contender.grows == 2
    build_run("cosine", Setup(length=40, n_heads=2, d_head=8, backward=True))()


@pytest.mark.slow
def test_the_shoot_out_has_a_row_for_it(cosine: Path) -> None:
    """With nothing said but where it is: the processes that train, and those that measure, find it too."""
    os.environ[plugins.MIXERS_VARIABLE] = "cosine:Cosine"
    small = ["model.d_model=16", "model.n_heads=2", "model.d_ff=16", "model.n_layers=1", "model.max_len=16"]
    small += ["data.max_len=16", "train.steps=2", "train.warmup=1", "train.batch_tokens=64", "train.eval_batches=1"]
    (cosine / "book.txt").write_text((ROOT / "LICENSE").read_text(encoding="utf-8"), encoding="utf-8")
    sweep = ablation("mechanisms", ["data.source=book.txt", *small], seeds=1)
    assert "cosine" in [cell.name for cell in sweep.cells]
    fewer = [cell for cell in sweep.cells if cell.name in ("cosine", "fourier")]
    report = ablate(replace(sweep, cells=tuple(fewer)), out=cosine / "out", jobs=1)
    assert report["cosine"].n_done == report["fourier"].n_done == 1, report.to_dict()["cells"]
    row = next(cell for cell in report.to_dict()["cells"] if cell["name"] == "cosine")
    assert row["step_ms"] > 0
    assert row["parameters"] == report.base.mean_of("parameters") + 2
    assert "cosine" in (cosine / "out" / "table.md").read_text(encoding="utf-8")
    assert (cosine / "out" / "tradeoff.png").stat().st_size > 10_000


# ---- who may have code run


def test_a_typed_name_is_imported(cosine: Path) -> None:
    assert "cosine" not in MIXERS
    assert parse_overrides(["model.mixer=cosine:Cosine"]) == {"model": {"mixer": "cosine:Cosine"}}
    assert ModelConfig(mixer="cosine:Cosine").mixing is MIXERS["cosine"]
    assert os.environ[plugins.MIXERS_VARIABLE] == "cosine:Cosine", "children of this process know it too"
    with pytest.raises(UsageError, match=r"^model\.mixer=cosin:Cosine: there is no module 'cosin', here"):
        parse_overrides(["model.mixer=cosin:Cosine"])
    with pytest.raises(UsageError, match="cosine has no Sine"):
        parse_overrides(["model.mixer=cosine:Sine"])


@pytest.mark.parametrize("place", ["cosines/__init__.py", "cosines/angles.py"])
def test_a_folder_of_ones_own_is_found_too(cosine: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a command that is installed, whose path does not begin where it is started."""
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder not in ("", str(cosine))])
    (cosine / "cosines").mkdir()
    code = code_of_the_guide()
    (cosine / place).write_text(code[: code.index("MIXERS[")], encoding="utf-8")
    name = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".") + ":Cosine"
    try:
        assert mixers.register(name).family.__name__ == "Cosine"
    finally:
        for module in ("cosines", "cosines.angles"):
            sys.modules.pop(module, None)


def test_the_tab_key_runs_nothing(cosine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugins.MIXERS_VARIABLE, " cosine:Cosine, nowhere:None,, not a name,dot")
    offered = completion._values("model.mixer", "")
    own = ["cosine:Cosine", "nowhere:None", "not a name"]
    assert offered == [f"model.mixer={name}" for name in (*MIXERS, *own)]
    assert completion._values("model.mixer", "cos") == ["model.mixer=cosine:Cosine"]
    assert "cosine" not in sys.modules
    assert "cosine" not in MIXERS


@pytest.mark.slow
def test_a_file_never_has_anything_imported(model: Decoder, tmp_path: Path) -> None:
    """A saved model that names a mechanism opens where it is registered; elsewhere it is refused in one sentence."""
    folder = tmp_path / "saved"
    model.save(folder)
    there = regard.load(folder)
    torch.testing.assert_close(there(torch.tensor([[5, 6, 7]])), model.eval()(torch.tensor([[5, 6, 7]])))
    config = json.loads((folder / "config.json").read_text())
    for place, mixer in (("one", "cosine:Cosine"), ("two", "cosine")):
        config["regard"]["mixer"] = mixer
        shutil.copytree(folder, tmp_path / place)
        (tmp_path / place / "cosine.py").write_text(code_of_the_guide(), encoding="utf-8")
        (tmp_path / place / "config.json").write_text(json.dumps(config))
        (tmp_path / place / "manifest.json").unlink(missing_ok=True)
    code = """
        import os, sys, regard
        for place in ("one", "two"):
            os.chdir(f"{sys.argv[1]}/{place}")
            sys.path.insert(0, ".")
            try:
                regard.load(".")
            except Exception as error:
                print(error)
        print("cosine" in sys.modules)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), plugins.MIXERS_VARIABLE: ""}
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    one, two, imported = done.stdout.splitlines()
    assert "mixer='cosine:Cosine' is not registered" in one
    assert "mixer='cosine' is not one of dot" in two
    assert imported == "False", "the file beside the model was not imported"


def test_an_unregistered_name_is_a_bad_model_file(model: Decoder, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    model.save(folder)
    MIXERS.pop("cosine")
    os.environ.pop(plugins.MIXERS_VARIABLE)
    with pytest.raises(BadModelFile, match="mixer='cosine' is not one of dot"):
        regard.load(folder)


# ---- inside the package: a copy of it, one file more and one entry more


@pytest.mark.slow
def test_one_file_and_one_entry_in_the_package(tmp_path: Path) -> None:
    package = tmp_path / "src" / "regard"
    shutil.copytree(ROOT / "src" / "regard", package, ignore=shutil.ignore_patterns("__pycache__", "static"))
    code = code_of_the_guide()
    (package / "attention" / "cosine.py").write_text(code[: code.index("MIXERS[")], encoding="utf-8")
    table = package / "config" / "mixers.py"
    entry = (
        'MIXERS: dict[str, Mixer] = {\n    "cosine": Mixer("regard.attention.cosine:Cosine", "cosine similarity"),\n'
    )
    table.write_text(table.read_text("utf-8").replace("MIXERS: dict[str, Mixer] = {\n", entry), encoding="utf-8")
    said = (
        "import regard, torch; from regard.experiments.ablations import ablation\n"
        "model = regard.build('gpt2', d_model=16, n_heads=2, n_layers=1, d_ff=16, vocab_size=30, mixer='cosine')\n"
        "print(model(torch.tensor([[1, 2, 3]])).shape, type(model.decoder.blocks[0].attention.mechanism).__name__)\n"
        "print([cell.name for cell in ablation('mechanisms').cells])\n"
        "print(regard.__file__)"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src"), plugins.MIXERS_VARIABLE: ""}
    done = subprocess.run([sys.executable, "-c", said], env=environment, capture_output=True, text=True, cwd=tmp_path)
    shape, cells, where = done.stdout.splitlines()[-3:] if done.returncode == 0 else (done.stderr, "", "")
    assert shape == "torch.Size([1, 3, 30]) Cosine"
    assert "'cosine'" in cells
    assert str(tmp_path) in where


class TalkingScores(torch.nn.Module, Dot):
    """Talking heads (Shazeer et al. 2020) where they do not belong: a tile is asked for some of the heads."""

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.mix = torch.nn.Parameter(torch.eye(n_heads) + 0.1 * torch.randn(n_heads, n_heads))

    def operands(self, frame: Frame) -> tuple[Tensor, ...]:
        return (self.mix[frame.heads],)

    def tile(self, q: Tensor, k: Tensor, operands: tuple[Tensor, ...] = ()) -> Tensor:
        return torch.einsum("hg,bgrc->bhrc", operands[0], super().tile(q, k))


class TalkingHeads(torch.nn.Module, Dot):
    """The same as one dot product of all heads' queries, weighted, with all heads' keys."""

    def __init__(self, n_heads: int, d_head: int) -> None:
        super().__init__()
        self.scale = d_head**-0.5
        self.mix = torch.nn.Parameter(torch.eye(n_heads) + 0.1 * torch.randn(n_heads, n_heads))

    def queries(self, q: Tensor) -> Tensor:  # (B, H, T, H · D)
        return torch.einsum("hg,bgtd->bhtgd", self.mix, q).flatten(3)

    def keys(self, k: Tensor) -> Tensor:  # (B, H, S, H · D), the same for all heads
        return k.transpose(1, 2).flatten(2)[:, None].expand(-1, k.shape[1], -1, -1)


def test_heads_that_mix_their_scores_are_read_exactly_or_not_at_all() -> None:
    torch.manual_seed(0)
    looks = {}
    for mechanism in (TalkingHeads, TalkingScores):
        model = regard.build("gpt2", **SIZES, vocab_size=31).eval()
        for block in model.decoder.blocks:
            block.attention.mechanism = mechanism(4, 6)
        look = looks[mechanism] = regard.look(model, [5, 6, 7, 8, 9])
        record = regard.capture(model, [5, 6, 7, 8, 9])
        q, k, _ = model.decoder.blocks[0].attention.qkv(record["decoder.blocks.0.attention.input"])
        mix = model.decoder.blocks[0].attention.mechanism.mix
        scores = torch.einsum("hg,bgrc->bhrc", mix, q @ k.transpose(2, 3) * 6**-0.5)
        hidden = torch.ones(5, 5).triu(1).bool()
        expected = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        torch.testing.assert_close(look.map(layer=0).tile(), expected)
        metric = logit_difference(model, 4, 5)
        with pytest.raises(ValueError, match="separate attention heads"):  # a query reaches every head's output
            path_patching(model, [5, 6, 7], [5, 8, 7], metric, [("self.0.1", "self.1.1.q", "logits")])
        if mechanism is TalkingHeads:
            torch.testing.assert_close(look.weights(layer=0, head=1), expected[0, 1])
    with pytest.raises(ValueError, match=r"TalkingScores\.tile mixes heads, so it cannot score one head alone"):
        looks[TalkingScores].weights(layer=0, head=1)
