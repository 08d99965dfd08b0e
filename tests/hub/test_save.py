"""Writing directories: the same model comes back, transformers opens it where it can, and a crash spoils nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

from forked_shell import Shell
from regard.config import ModelConfig, RopeScalingConfig
from regard.foundation import files
from regard.foundation.files import previous_version, replace_directory
from regard.hub import behaviour, differences, write_config
from regard.io import load, save
from regard.models import build
from regard.presets import PRESETS, preset

from .helpers import SMALL, THEIRS, bits, copy, ours, same_bits, speaks, theirs

OURS: dict[str, dict[str, Any]] = {
    "decoder": {},
    "rope": {"positions": "rope", "rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_len": 8}},
    "alibi": {"positions": "alibi", "n_heads": 3, "d_model": 24},
    "xl": {"positions": "xl"},
    "performer": {"mixer": "performer", "mixer_size": 12},
    "linear": {"mixer": "linear"},
    "additive": {"mixer": "additive"},
    "linformer": {"architecture": "encoder", "head": "none", "mixer": "linformer", "mixer_size": 4},
    "fourier": {"architecture": "encoder", "head": "none", "mixer": "fourier"},
    "strided": {"sparsity": "strided", "sparsity_size": 3},
    "bigbird": {"architecture": "encoder", "head": "none", "sparsity": "bigbird", "sparsity_size": 2},
    "no norm": {"norm": "none", "residual": False},
    "encoder": {"architecture": "encoder", "head": "classify", "pooling": "attention", "n_classes": 3},
    "two vocabularies": {"architecture": "encoder-decoder", "target_vocab_size": 45, "n_decoder_layers": 1},
    "captioner": {"architecture": "encoder-decoder", "source": "image", "image_size": 8, "patch_size": 4},
    "windows": {
        **{"architecture": "encoder", "source": "image", "image_size": 8, "patch_size": 2, "shifted_windows": 2},
        **{"head": "classify", "positions": "learned"},
    },
    "recurrent": {"architecture": "recurrent", "alignment": "general", "bidirectional": False},
    "recurrent, smaller than what it does not read": {
        **{"architecture": "recurrent", "d_model": 4, "n_layers": 1, "d_ff": 10**6, "n_heads": 3},
        **{"positions": "none", "tie_head": False, "head_bias": True},
    },
    "bos none": {"bos_id": None, "eos_id": None},
}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# ------------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize("kind", OURS)
def test_load_gives_back_what_save_took(tmp_path: Path, kind: str) -> None:
    model = ours(**OURS[kind])
    again = load(save(model, tmp_path / "one"))
    assert again.config == model.config
    assert again.provenance.verified == "verified"
    assert same_bits(again.state_dict(), model.state_dict())
    assert bits(speaks(again)) == bits(speaks(model))
    assert contents(save(again, tmp_path / "two")) == contents(tmp_path / "one")


@pytest.mark.parametrize("kind", THEIRS)
def test_from_transformers_and_back(tmp_path: Path, kind: str) -> None:
    original = theirs(kind)
    original.save_pretrained(tmp_path / "theirs")
    model = load(tmp_path / "theirs")
    saved = model.save(tmp_path / "ours")
    back, told = type(original).from_pretrained(saved, output_loading_info=True)
    assert not any(told.values()), told
    assert same_bits(back.state_dict(), original.state_dict())
    assert speaks(back.eval()).equal(speaks(original))
    again = load(saved)
    assert again.config == model.config
    assert same_bits(again.state_dict(), model.state_dict())
    assert contents(again.save(tmp_path / "twice")) == contents(saved)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtype_is_kept_there_too(tmp_path: Path, dtype: torch.dtype) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh").to(dtype)
    saved = model.save(tmp_path / "model")
    assert {p.dtype for p in load(saved).parameters()} == {dtype}
    assert hf.AutoModelForCausalLM.from_pretrained(saved, dtype="auto").dtype == dtype


def test_our_own_model_opens_in_transformers(tmp_path: Path) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh", dropout=0.3, embedding_dropout=0.2)
    back = hf.AutoModelForCausalLM.from_pretrained(model.save(tmp_path / "model"))
    assert isinstance(back, hf.GPT2LMHeadModel)
    torch.testing.assert_close(speaks(back.eval()), speaks(model), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("most", [1, 2000, 5000])
def test_shards(tmp_path: Path, most: int) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh")
    saved = save(model, tmp_path / "model", most_shard_bytes=most)
    parts = sorted(saved.glob("model-*-of-*.safetensors"))
    assert len(parts) > 2
    assert not (saved / "model.safetensors").exists()
    assert same_bits(load(saved).state_dict(), model.state_dict())
    back = hf.AutoModelForCausalLM.from_pretrained(saved)
    torch.testing.assert_close(speaks(back.eval()), speaks(model), atol=1e-5, rtol=1e-5)


def test_tensors_that_share_memory_or_lie_askew(tmp_path: Path) -> None:
    model = ours()
    first, second = model.decoder.blocks[0].ff, model.decoder.blocks[1].ff
    first.w_in.weight = nn.Parameter(torch.randn(16, 24).T)  # not contiguous
    second.w_in.weight = nn.Parameter(torch.randn(48, 16)[::2])
    second.w_out = first.w_out
    again = load(model.save(tmp_path / "model"))
    assert same_bits(again.state_dict(), model.state_dict())
    assert again.decoder.blocks[0].ff.w_out.weight is not again.decoder.blocks[1].ff.w_out.weight


def test_a_model_without_numbers_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="meta device"):
        build("gpt2", device="meta").save(tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_training_goes_on_after_loading_and_the_file_stays(tmp_path: Path) -> None:
    saved = ours().save(tmp_path / "model")
    before = contents(saved)
    model = load(saved).train()
    model(torch.randint(0, 40, (2, 8))).sum().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    assert contents(saved) == before
    model.save(saved)  # over the very files its numbers came from
    assert same_bits(load(saved).state_dict(), model.state_dict())


# ------------------------------------------------------------------------------------- which has a twin


TWINS = {
    **dict.fromkeys(("transformer-tiny", "transformer-base", "transformer-big"), "marian"),
    **dict.fromkeys(("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl"), "gpt2"),
    **{"llama-7b": "llama", "llama-1b": "llama", "mistral-7b": "mistral"},
    **{"bert-base": "bert", "bert-base-masked": "bert"},
    **{"t5-small": "t5", "t5-base": "t5", "t5-v1.1-small": "t5"},
    **{"vit-base-16": "vit", "vit-tiny": "vit"},
    **dict.fromkeys(("sentiment", "swin-tiny", "captioner", "captioner-regions"), "regard"),
    **dict.fromkeys(("bahdanau-gru", "luong-lstm", "lstm-plain"), "regard"),
}


def test_the_table_of_twins_is_whole() -> None:
    assert set(TWINS) == set(PRESETS)


@pytest.mark.parametrize("name", TWINS)
def test_which_preset_has_a_twin(name: str) -> None:
    written = write_config(preset(name))
    assert written.model_type == TWINS[name]
    assert bool(written.obstacles) == (TWINS[name] == "regard")


@pytest.mark.parametrize(
    ("name", "fields", "obstacle"),
    [
        ("gpt2", {"positions": "sinusoidal"}, "positions='sinusoidal' (gpt2 has 'learned')"),
        ("gpt2", {"norm_place": "post"}, "norm_place='post' (gpt2 has 'pre')"),
        ("gpt2", {"window": 8}, "window=8 (gpt2 has None)"),
        ("gpt2", {"mixer": "linear"}, "mixer='linear' (gpt2 has 'dot')"),
        ("gpt2", {"sparsity": "strided"}, "sparsity='strided' (gpt2 has 'none')"),
        ("llama-1b", {"activation": "relu"}, "activation='relu' (llama has 'swiglu')"),
        ("llama-1b", {"positions": "alibi"}, "positions='alibi' (llama has 'rope')"),
        ("t5-small", {"head": "none", "qkv_bias": True}, "qkv_bias=True (t5 has False)"),
        ("transformer-base", {"sinusoid_layout": "interleaved"}, "sinusoid_layout='interleaved' (marian has 'halves')"),
        ("captioner", {}, "source='image' (marian has 'text')"),
        ("luong-lstm", {}, "architecture='recurrent' (gpt2 has 'decoder')"),
    ],
)
def test_what_stands_in_the_way_is_named(name: str, fields: dict[str, Any], obstacle: str) -> None:
    assert write_config(preset(name, **fields)).obstacles == (obstacle,)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {"rope_base": 5.0, "t5_buckets": 4, "sinusoid_layout": "halves"}),  # features that are off
        ("gpt2", {"n_classes": 7, "pooling": "mean", "image_size": 32, "cell": "gru", "n_decoder_layers": 3}),
        ("gpt2", {"attention_backend": "reference", "dropout": 0.3, "attention_dropout": 0.1, "init_std": None}),
        ("gpt2", {"n_kv_heads": 12, "d_head": 64, "attention_scale": 0.125}),  # what None means, said aloud
        ("llama-1b", {"dropout": 0.1}),
        ("vit-tiny", {"vocab_size": 7, "pad_id": 3, "max_len": 12, "tie_head": False}),
        ("bert-base", {"bos_id": 5, "eos_id": None, "logit_scale": 3.0}),
        ("t5-small", {"max_len": 77, "n_decoder_layers": 6, "d_decoder_ff": 2048}),
        ("transformer-base", {"max_len": 12}),
        ("mistral-7b", {"window_layers": tuple(range(32))}),
    ],
)
def test_a_field_that_decides_nothing_costs_no_twin(name: str, fields: dict[str, Any]) -> None:
    plain, changed = preset(name), preset(name, **fields)
    assert changed != plain
    assert behaviour(changed) == behaviour(plain)
    assert not write_config(changed).obstacles


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt2", {"vocab_size": 11}),
        ("gpt2", {"max_len": 11}),
        ("gpt2", {"eos_id": 3}),
        ("gpt2", {"n_kv_heads": 1}),
        ("gpt2", {"head_bias": True}),
        ("gpt2", {"norm_eps": 1e-6}),
        ("llama-1b", {"rope_base": 5.0}),
        ("llama-1b", {"window": 7}),
        ("t5-small", {"t5_buckets": 16}),
        ("sentiment", {"n_classes": 7}),
        ("sentiment", {"pooling": "first"}),
        ("vit-tiny", {"image_size": 32}),
        ("captioner-regions", {"d_region": 7}),
        ("luong-lstm", {"alignment": "dot"}),
        ("luong-lstm", {"n_decoder_layers": 1}),
        ("transformer-base", {"n_decoder_layers": 3}),
        ("transformer-base", {"target_vocab_size": 37000}),
        ("bert-base", {"pooler": "none"}),
        ("mistral-7b", {"window_layers": (1, 3)}),
    ],
)
def test_a_field_that_decides_is_a_difference(name: str, fields: dict[str, Any]) -> None:
    plain, changed = preset(name), preset(name, **fields)
    assert [one.field for one in differences(plain, changed)] == list(fields)
    assert differences(plain, plain) == []


def test_rotary_scaling_counts_by_value() -> None:
    one = preset("llama-1b", rope_scaling=RopeScalingConfig(kind="linear", factor=2.0))
    other = preset("llama-1b", rope_scaling=RopeScalingConfig(kind="linear", factor=2.0, beta_fast=None))
    assert behaviour(one) == behaviour(other)
    assert [x.field for x in differences(one, preset("llama-1b"))] == ["rope_scaling"]


def test_without_a_twin_the_log_and_the_card_say_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="regard"):
        saved = ours(positions="sinusoidal", norm_place="pre", activation="gelu_tanh").save(tmp_path / "model")
    (record,) = caplog.records
    for text in (record.getMessage(), (saved / "README.md").read_text(encoding="utf-8")):
        assert "transformers has no twin of this model" in text
        assert "positions='sinusoidal' (gpt2 has 'learned')" in text
    assert "from transformers import" not in (saved / "README.md").read_text(encoding="utf-8")


def test_a_model_with_attention_is_compared_with_types_that_have_it() -> None:
    """FNet, which has fewer fields that can differ, is not the nearest type."""
    fields = {"positions": "rope", "norm": "rms", "norm_place": "pre", "ff_bias": False, "pooling": "mean"}
    modern = preset("bert-base", qk_norm=True, **fields)
    assert not any("fnet" in obstacle for obstacle in write_config(modern).obstacles)
    (obstacle,) = write_config(preset("bert-base", mixer="additive", **fields)).obstacles
    assert obstacle.startswith("mixer='additive' (")


def test_the_card_says_how_to_open_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh")
    card = (model.save(tmp_path / "model") / "README.md").read_text(encoding="utf-8")
    assert not caplog.records
    for fact in (f"{model.n_parameters:,} parameters", "GPT2LMHeadModel", "| d_model | 16 |", "regard.load("):
        assert fact in card


def test_the_whole_config_is_kept_beside_the_twins(tmp_path: Path) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh", n_classes=9, attention_backend="tiled")
    assert load(model.save(tmp_path / "model")).config == model.config


# ------------------------------------------------------------------------------------- all or nothing


def test_a_path_of_many_parts_is_made(tmp_path: Path) -> None:
    assert load(ours().save(tmp_path / "a" / "b" / "c")).provenance.path == tmp_path / "a" / "b" / "c"


def test_a_link_to_the_directory_stays_a_link(tmp_path: Path) -> None:
    ours().save(tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    ours(d_ff=8).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert load(tmp_path / "real").config.d_ff == 8


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    load(ours().save(tmp_path / "model"))


@pytest.mark.parametrize("manifest", [True, False])
def test_a_strangers_file_is_never_deleted(tmp_path: Path, manifest: bool) -> None:
    saved = ours().save(tmp_path / "model") if manifest else tmp_path / "model"
    (saved / "deep").mkdir(parents=True)
    (saved / "deep" / "thesis.txt").write_text("three years of work")
    with pytest.raises(FileExistsError, match=r"deep/thesis\.txt, not written by regard"):
        ours(d_ff=8).save(saved)
    assert (saved / "deep" / "thesis.txt").read_text() == "three years of work"


def test_a_directory_of_transformers_is_not_replaced(tmp_path: Path) -> None:
    theirs("gpt2").save_pretrained(tmp_path / "model")
    before = contents(tmp_path / "model")
    with pytest.raises(FileExistsError, match="not written by regard"):
        load(tmp_path / "model").save(tmp_path / "model")
    assert contents(tmp_path / "model") == before


def test_a_file_is_not_replaced_by_a_directory(tmp_path: Path) -> None:
    (tmp_path / "model").write_text("a file")
    with pytest.raises(FileExistsError, match="is a file"):
        ours().save(tmp_path / "model")


@pytest.mark.parametrize("moment", ["write_atomic", "fsync", "_swap"])
def test_a_failure_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str) -> None:
    saved = ours().save(tmp_path / "model")
    before = contents(saved)

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for module in ("regard.foundation.files", "regard.hub.hf_directory", "regard.io"):
        if hasattr(sys.modules[module], moment):
            monkeypatch.setattr(f"{module}.{moment}", no_space)
    with pytest.raises(OSError, match="No space left"):
        ours(d_ff=8).save(saved)
    assert contents(saved) == before
    assert os.listdir(tmp_path) == ["model"]


def test_without_exchange_two_renames_do_and_the_moment_between_is_survived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    saved = ours().save(tmp_path / "model")
    ours(d_ff=8).save(saved)
    assert load(saved).config.d_ff == 8
    assert os.listdir(tmp_path) == ["model"]
    os.rename(saved, previous_version(saved))  # where a crash between the two would leave it
    assert load(saved).config.d_ff == 8
    ours(d_ff=12).save(saved)
    assert load(saved).config.d_ff == 12
    assert os.listdir(tmp_path) == ["model"]


def test_leftovers_of_a_crash_go_and_a_save_in_progress_stays(tmp_path: Path) -> None:
    (tmp_path / ".model.0a0a0a0a.saving").mkdir()
    (tmp_path / ".model.0a0a0a0a.saving" / "half").write_text("x")
    (tmp_path / ".other.0a0a0a0a.saving").mkdir()
    with replace_directory(tmp_path / "model") as first, replace_directory(tmp_path / "model") as second:
        assert first.is_dir()
        (first / "a").write_text("1")
        (second / "a").write_text("2")
    assert (tmp_path / "model" / "a").read_text() == "1"  # the block that ended last
    assert sorted(os.listdir(tmp_path)) == [".other.0a0a0a0a.saving", "model"]


CRASHES = """
import os, random, signal, sys, time
from pathlib import Path
import torch
from regard.config import ModelConfig
from regard.io import load, save
from regard.models import build

torch.set_num_threads(1)
target = Path(sys.argv[1])
config = ModelConfig(architecture="decoder", d_model=64, n_layers=4, n_heads=2, vocab_size=500)

def constant(value):
    model = build(config)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model

zero, one = constant(0.0), constant(1.0)
save(zero, target)
start = time.perf_counter()
save(one, target)
lasts = time.perf_counter() - start
seen = set()
for kill in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        while True:
            save(zero, target)
            save(one, target)
    time.sleep(2 * lasts * random.Random(kill).random())
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    model = load(target)
    assert model.provenance.verified == "verified"
    values = {value for p in model.parameters() for value in p.unique().tolist()}
    assert values in ({0.0}, {1.0}), values
    seen |= values
save(zero, target)
assert os.listdir(target.parent) == [target.name], os.listdir(target.parent)
print("whole", sorted(seen))
"""


READING = """
import os, signal, sys
from pathlib import Path
import torch
from regard.config import ModelConfig
from regard.io import load, save
from regard.models import build

torch.set_num_threads(1)
target = Path(sys.argv[1])

def constant(value):
    sizes = {"d_model": 8, "n_layers": 1, "n_heads": 2, "d_ff": 8 + 8 * value, "vocab_size": 9}
    model = build(ModelConfig(architecture="decoder", **sizes))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(value)
    return model

zero, one = constant(0), constant(1)
save(zero, target)
child = os.fork()
if child == 0:
    while True:
        save(one, target)
        save(zero, target)
try:
    seen = []
    while len(seen) < 60 or len(set(seen)) < 2:  # on a busy machine the one that saves may wait for its turn
        assert len(seen) < 10_000, seen[-1]
        model = load(target)
        (value,) = {value for p in model.parameters() for value in p.unique().tolist()}
        assert model.config.d_ff == 8 + 8 * value
        seen.append(int(value))
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
assert set(seen) == {0, 1}
print("whole")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks and kills a process that saves")
@pytest.mark.parametrize("script", [CRASHES, READING], ids=["killed while saving", "read while saving"])
def test_a_directory_is_always_whole(bash: Shell, tmp_path: Path, script: str) -> None:
    answer = subprocess.run(
        [bash.python, "-c", script, str(tmp_path / "runs" / "model"), "10"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("whole")


def test_the_section_of_ours_must_agree_with_theirs(tmp_path: Path) -> None:
    from regard.errors import BadModelFile

    from .helpers import edit_json

    saved = ours(positions="learned", norm_place="pre", activation="gelu_tanh").save(tmp_path / "model")
    folder = copy(saved, tmp_path / "copy")
    edit_json(folder / "config.json", n_head=4, layer_norm_epsilon=1e-6)
    with pytest.raises(BadModelFile, match=r"contradicts itself.*n_heads=2 and 4, norm_eps=1e-05 and 1e-06"):
        load(folder, verify=False)


def test_config_has_every_field_so_that_defaults_may_change(tmp_path: Path) -> None:
    import json

    saved = ours().save(tmp_path / "model")
    section = json.loads((saved / "config.json").read_text(encoding="utf-8"))["regard"]
    assert set(section) == set(ModelConfig.model_fields)
    assert {name: section[name] for name in SMALL} == SMALL
