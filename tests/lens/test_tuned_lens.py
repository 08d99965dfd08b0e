"""The lens of every token against the head applied by hand, and a tuned lens that learns and is read again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from generation.spoken import language_model
from models.small import inputs_of, small
from regard.cli import main
from regard.errors import BadData, BadModelFile
from regard.lens.activations import capture
from regard.lens.tuned_lens import TunedLens, layer_logits, read_texts, train_tuned_lens


@pytest.mark.parametrize("name", ["gpt2", "transformer-base", "bert-base-masked"])
def test_every_token_after_every_sublayer(name: str) -> None:
    model = small(name)
    record = capture(model, *inputs_of(model.config))
    found = layer_logits(record, prompt=1, sublayers=True)
    stack = "encoder" if name.startswith("bert") else "decoder"
    parts = ["attention", *(["cross_attention"] if name == "transformer-base" else []), "ff"]
    assert found.steps == ["embedding", *(f"{part}.{layer}" for layer in range(2) for part in parts)]
    norm = getattr(model, stack).norm
    states = record[f"{stack}.blocks.0.after_attention"][1]
    with torch.no_grad():
        said = model.head((states if norm is None else norm(states))[None], model.output_table)[0].log_softmax(-1)
        own = said[torch.arange(len(said)), torch.tensor(found.tokens)]
    torch.testing.assert_close(found.log_probability[1], own)
    assert found.rank[1].tolist() == (said > own[:, None]).sum(-1).tolist()
    assert found.best[-1].tolist() == record.logits[1].argmax(-1).tolist()
    assert float(found.divergence[-1].abs().max()) < 1e-5
    assert float(found.divergence[0].min()) > 0
    assert layer_logits(record, tokens=5).tokens == [5] * record.lengths[0]
    with pytest.raises(ValueError, match="tokens has 2 entries for"):
        layer_logits(record, tokens=[5, 6])


def test_a_tuned_lens_comes_nearer_and_leaves_the_model_alone(tmp_path: Path) -> None:
    model = small("gpt2")
    before = {name: p.clone() for name, p in model.named_parameters()}
    rows = torch.randint(3, 31, (24, 9), generator=torch.Generator().manual_seed(1)).tolist()
    found = train_tuned_lens(model, rows, steps=40, batch=4)
    assert len(found.after) == 1
    assert found.after[0] < 0.8 * found.before[0]
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())
    file = found.lens.save(tmp_path / "lens.safetensors")
    record = capture(model, rows[:1])
    again = layer_logits(record, lens=TunedLens.load(file, model))
    assert torch.equal(again.divergence, layer_logits(record, lens=found.lens).divergence)
    assert not torch.equal(again.divergence[1], layer_logits(record).divergence[1])
    assert torch.equal(again.divergence[2], layer_logits(record).divergence[2])  # the last layer needs no map
    with pytest.raises(BadModelFile, match="is not a tuned lens of this model"):
        TunedLens.load(file, small("gpt2", d_model=32))


def test_a_model_in_half_precision_has_one_too() -> None:
    model = small("gpt2").bfloat16()
    rows = [row.tolist() for row in inputs_of(model.config, batch=8)[0]]
    found = train_tuned_lens(model, rows, steps=20, batch=4)
    assert sum(found.after) < sum(found.before)
    logits = layer_logits(capture(model, [rows[0]]), lens=found.lens)
    assert logits.divergence.isfinite().all()


def test_texts_are_cut_to_what_the_model_reads_and_one_layer_is_too_few() -> None:
    rows = [[3, 4, 5] * 20] * 4
    assert len(train_tuned_lens(small("gpt2"), rows, steps=1).after) == 1
    with pytest.raises(ValueError, match="needs at least two layers"):
        train_tuned_lens(small("gpt2", n_layers=1), rows, steps=1)


def test_the_command_trains_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    language_model().save(tmp_path / "lm")
    texts, out = tmp_path / "texts.txt", tmp_path / "lens.safetensors"
    texts.write_text("the cat sat\n\nthe dog ran\n" * 4)
    command = ["lens", str(tmp_path / "lm"), str(texts), "--steps", "2", "--out", str(out), "--device", "cpu"]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["tuned_lens"]) == len(found["logit_lens"]) == 1
    assert out.is_file()
    assert main(["lens", str(tmp_path / "lm"), str(tmp_path / "none.txt")]) == 2
    assert f"there is no file {tmp_path / 'none.txt'}" in capsys.readouterr().err


def test_texts_of_any_encoding_are_read_and_other_files_refused(tmp_path: Path) -> None:
    (tmp_path / "cp949.txt").write_bytes("\n고양이가 앉았다\n개가 뛰었다\n새가 난다\n".encode("cp949"))
    assert read_texts(str(tmp_path / "cp949.txt"), 2) == ["고양이가 앉았다", "개가 뛰었다"]
    (tmp_path / "latin.txt").write_bytes("caf\xe9\nthe\n".encode("latin-1"))
    with pytest.raises(BadData, match=r"1 of 2 lines cannot be read; the first: .*latin\.txt:1"):
        read_texts(str(tmp_path / "latin.txt"), 2)
    (tmp_path / "image.txt").write_bytes(b"\x89PNG\r\n\x1a\n0000")
    with pytest.raises(BadData, match="not a text file"):
        read_texts(str(tmp_path / "image.txt"), 2)
