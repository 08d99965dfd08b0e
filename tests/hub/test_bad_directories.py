"""Directories that must not load: each is refused as a BadModelFile that names what is wrong, and runs nothing."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models

from regard.errors import BadModelFile
from regard.hub import BY_TYPE
from regard.io import describe, load

from .helpers import THEIRS, copy, edit_json, ours, speaks, theirs

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "gpt2"
    theirs("gpt2").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def good_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good") / "gpt2"
    theirs("gpt2").save_pretrained(folder, max_shard_size="6KB")
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return copy(good, tmp_path / "model")


@pytest.fixture
def shards(good_shards: Path, tmp_path: Path) -> Path:
    return copy(good_shards, tmp_path / "shards")


def refused(path: Path, *words: str, **options: Any) -> str:
    """Loading and describing are refused alike, in one line that holds the words."""
    with pytest.raises(BadModelFile) as said:
        load(path, **options)
    with pytest.raises(BadModelFile) as said_too:
        describe(path, **options)
    text = str(said.value)
    assert str(said_too.value) == text
    assert said.value.exit_code == 3
    for word in words:
        assert word in text, text
    assert str(path) in text, "which directory it is about"
    return text


def loads_or_says_why(path: Path) -> None:
    said = str(path)
    try:
        load(path)
    except BadModelFile as error:
        said = str(error)
    assert str(path) in said


def rewrite(path: Path, change: Callable[[Tensors], Tensors]) -> None:
    tensors = {name: x.clone() for name, x in change(load_file(path)).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})


def test_the_good_ones_are_good(folder: Path, shards: Path) -> None:
    assert speaks(load(folder)).equal(speaks(load(shards)))


# ------------------------------------------------------------------------------------- the directory


def test_no_such_path(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "there is no directory", "downloads nothing")


def test_a_file(folder: Path) -> None:
    refused(folder / "model.safetensors", "is a file; a model is a directory")


def test_an_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, "has no config.json")


def test_no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    refused(folder, "has no model.safetensors")


def test_a_directory_in_the_place_of_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    refused(folder, "model.safetensors is not a file")


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes among files here")
def test_a_pipe_is_not_waited_for(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "config.json is not a file")


# ------------------------------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[1]", "holds a list, where an object belongs"),
        (b"null", "holds a NoneType"),
        (b'{"n_layer": 1, "n_layer": 2}', "names 'n_layer' twice"),
        (b'{"layer_norm_epsilon": NaN}', "NaN is not a number in JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"{}", "has no model_type"),
    ],
)
def test_config_is_not_one(folder: Path, text: bytes, word: str) -> None:
    (folder / "config.json").write_bytes(text)
    refused(folder, "config.json", word)


@pytest.mark.parametrize(
    ("model_type", "words"),
    [
        ("gpt3", ["did you mean 'gpt2'?"]),
        ("lama", ["did you mean 'llama'?"]),
        ("zzzzzz", ["regard reads " + ", ".join(BY_TYPE)]),
        (3, ["model_type 3"]),
        (["gpt2"], ["model_type ['gpt2']"]),
    ],
)
def test_an_unknown_model_type(folder: Path, model_type: Any, words: list[str]) -> None:
    edit_json(folder / "config.json", model_type=model_type)
    refused(folder, *words)


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "preprocessor_config.json"])
def test_remote_code(folder: Path, name: str) -> None:
    (folder / "evil.py").write_text("raise SystemExit('ran')")
    if not (folder / name).exists():
        (folder / name).write_text("{}")
    edit_json(folder / name, auto_map={"AutoModel": "evil.Model"})
    refused(folder, name, "auto_map", "regard runs none")


def test_quantised(folder: Path) -> None:
    edit_json(folder / "config.json", quantization_config={"quant_method": "gptq"})
    refused(folder, "quantization_config")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"n_embd": None}, "has no 'n_embd'"),
        ({"n_embd": "wide"}, "wide"),
        ({"n_embd": 17}, "d_model=17 is not divisible by n_heads=2"),
        ({"n_embd": -16}, "must be at least 1"),
        ({"n_head": 0}, "must be at least 1"),
        ({"n_layer": [2]}, "n_layers"),
        ({"n_layer": 10**9}, "n_layer=1000000000; regard reads up to"),
        ({"n_layer": 500}, "n_layers=500, but there are only 28 tensors"),
        ({"n_embd": 2**18}, "d_model=262144, but all tensors together hold"),
        ({"vocab_size": 10**30}, "vocab_size"),
        ({"n_positions": 10**30}, "config.json"),
        ({"activation_function": "swish9"}, "activation_function='swish9'"),
        ({"activation_function": {}}, "config.json"),
        ({"architectures": ["GPT2ForSomethingElse"]}, "GPT2ForSomethingElse"),
        ({"architectures": {"a": 1}}, "config.json"),
        ({"architectures": 5}, "config.json"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"is_causal": False}, "is_causal=False"),
        ({"resid_pdrop": 3}, "dropout=3"),
        ({"regard": 5}, "'regard' as a int"),
        ({"regard": {"d_modle": 5}}, "did you mean 'd_model'?"),
        ({"regard": {"d_model": "x"}}, "d_model"),
        ({"regard": {"d_model": 16}}, "contradicts itself"),
        ({"model_type": "regard"}, "no section 'regard'"),
    ],
)
def test_config_says_what_cannot_be(folder: Path, fields: dict[str, Any], word: str) -> None:
    edit_json(folder / "config.json", **fields)
    refused(folder, word)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory of each kind."""
    root = tmp_path_factory.mktemp("every")
    for kind in THEIRS:
        theirs(kind).save_pretrained(root / kind)
    return root


numbers = st.integers(-(10**20), 10**20) | st.integers(-2, 40) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=150, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_any_value_in_any_field_loads_or_is_refused(every: Path, data: st.DataObject) -> None:
    """Nothing but BadModelFile comes out, whatever a field of config.json holds."""
    folder = every / data.draw(st.sampled_from(sorted(THEIRS)))
    before = (folder / "config.json").read_text(encoding="utf-8")
    fields = json.loads(before)
    name = data.draw(st.sampled_from(sorted(fields)))
    (folder / "config.json").write_text(json.dumps(fields | {name: data.draw(json_values)}), encoding="utf-8")
    try:
        loads_or_says_why(folder)
    finally:
        (folder / "config.json").write_text(before, encoding="utf-8")


# ------------------------------------------------------------------------------------- names and shapes


def test_missing_extra_and_misshapen_are_all_listed(folder: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        del tensors["transformer.h.0.attn.c_attn.weight"], tensors["transformer.ln_f.bias"]
        tensors["transformer.h.1.mlp.c_fc.bias"] = torch.zeros(63)
        tensors["transformer.wpe.weight"] = torch.zeros(16, 24)
        return {**tensors, "stowaway": torch.zeros(2), "transformer.h.2.ln_1.weight": torch.zeros(16)}

    rewrite(folder / "model.safetensors", change)
    text = refused(folder)
    missing, unexpected, misshapen = text[text.index("missing:") :].split("; ")
    assert set(missing.removeprefix("missing: ").split(", ")) == {
        "transformer.h.0.attn.c_attn.weight",
        "transformer.ln_f.bias",
    }
    assert set(unexpected.removeprefix("unexpected: ").split(", ")) == {"stowaway", "transformer.h.2.ln_1.weight"}
    assert "transformer.h.1.mlp.c_fc.bias is (63,) instead of (64,)" in misshapen
    assert "transformer.wpe.weight is (16, 24) instead of (24, 16)" in misshapen


@pytest.mark.parametrize("kind", ["llama", "t5", "bert", "bart", "vit"])
def test_a_part_of_a_joined_tensor_is_named_as_the_file_names_it(tmp_path: Path, kind: str) -> None:
    theirs(kind).save_pretrained(tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    names = sorted(load_file(path))
    gone = next(name for name in names if any(word in name for word in ("k_proj", ".key.", "SelfAttention.k")))
    wrong = next(name for name in names if any(word in name for word in ("v_proj", ".value.", "SelfAttention.v")))

    def change(tensors: Tensors) -> Tensors:
        del tensors[gone]
        return {**tensors, wrong: tensors[wrong][:-1]}

    rewrite(path, change)
    refused(tmp_path / "model", f"missing: {gone};", f"misshapen: {wrong} is")


def test_our_own_names(tmp_path: Path) -> None:
    saved = ours().save(tmp_path / "model")

    def change(tensors: Tensors) -> Tensors:
        return {name: x for name, x in tensors.items() if name != "token.weight"} | {"tokken.weight": torch.zeros(1)}

    rewrite(saved / "model.safetensors", change)
    refused(saved, "model.safetensors has")
    refused(saved, "missing: token.weight; unexpected: tokken.weight", verify=False)


def test_whole_numbers_are_no_weights(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda t: {**t, "transformer.ln_f.bias": torch.zeros(16, dtype=torch.int8)})
    refused(folder, "transformer.ln_f.bias is (16,) of torch.int8 instead of (16,)")


def test_tied_by_the_config_but_different(folder: Path) -> None:
    rewrite(folder / "model.safetensors", lambda t: {**t, "lm_head.weight": t["transformer.wte.weight"] + 1})
    with pytest.raises(BadModelFile, match=r"lm_head\.weight and transformer\.wte\.weight are tied"):
        load(folder)


def test_a_second_name_of_the_wrong_shape(folder: Path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return {**tensors, "lm_head.weight": tensors.pop("transformer.wte.weight")[:-1]}

    rewrite(folder / "model.safetensors", change)
    refused(folder, "misshapen: lm_head.weight is (39, 16) instead of (40, 16)")


# ------------------------------------------------------------------------------------- safetensors


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    length = struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, rest: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + rest


@pytest.mark.parametrize("keep", [0, 5, 8, 100, 0.5, 0.99, -1])
def test_cut_off(folder: Path, keep: float) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(keep * len(content)) if 0 < keep < 1 else int(keep)])
    refused(folder, "model.safetensors")


def test_longer_than_its_header_says(folder: Path) -> None:
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    refused(folder, "model.safetensors")


def test_a_header_that_claims_more_than_the_file_holds(folder: Path) -> None:
    path = folder / "model.safetensors"
    for length in (2**62, len(path.read_bytes()) + 1):
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])
        refused(folder, "model.safetensors", "truncated or not a safetensors file")


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [10**9, 10**9]},
        {"shape": [-1, 16]},
        {"data_offsets": [0, 10**15]},
        {"data_offsets": [64, 0]},
        {"dtype": "F4_UNHEARD_OF"},
        {"dtype": "F8_E4M3"},
    ],
)
def test_a_header_that_lies(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "model.safetensors"
    header, rest = header_of(path.read_bytes())
    header["transformer.wte.weight"] |= change
    path.write_bytes(with_header(header, rest))
    refused(folder, "model.safetensors")


def test_a_name_twice_in_a_header(folder: Path) -> None:
    entry = b'"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
    (folder / "model.safetensors").write_bytes(with_header(b"{" + entry + b", " + entry + b"}", bytes(4)))
    refused(folder, "names 'x' twice")


def test_a_page_that_was_downloaded_in_its_place(folder: Path) -> None:
    (folder / "model.safetensors").write_text("<!doctype html><title>404</title>" * 50)
    refused(folder, "model.safetensors", "truncated or not a safetensors file")


@settings(max_examples=100, suppress_health_check=list(HealthCheck), deadline=None)
@given(data=st.data())
def test_a_damaged_header_loads_or_is_refused(every: Path, data: st.DataObject) -> None:
    path = every / "gpt2" / "model.safetensors"
    before = path.read_bytes()
    content = bytearray(before)
    end = 8 + struct.unpack("<Q", content[:8])[0]
    blows = st.tuples(st.integers(0, end - 1), st.integers(0, 255))
    for place, byte in data.draw(st.lists(blows, min_size=1, max_size=3)):
        content[place] = byte
    try:
        path.write_bytes(content)
        loads_or_says_why(path.parent)
    finally:
        path.write_bytes(before)


# ------------------------------------------------------------------------------------- the index of shards


def edit_index(folder: Path, change: Callable[[dict[str, str]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    path.write_text(json.dumps({"weight_map": change(weight_map)}), encoding="utf-8")


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
@pytest.mark.parametrize("how", ["absolute", "dots", "deep dots", "backslash", "drive", "empty", "dot", "nul"])
def test_a_path_in_the_index_that_leads_out(shards: Path, how: str) -> None:
    outside = shards.parent / "outside.safetensors"
    outside.write_bytes(next(shards.glob("model-00001*")).read_bytes())
    way = {
        "absolute": str(outside),
        "dots": "../outside.safetensors",
        "deep dots": "x/../../outside.safetensors",
        "backslash": "..\\outside.safetensors",
        "drive": "C:outside.safetensors",
        "empty": "",
        "dot": ".",
        "nul": "model\0.safetensors",
    }[how]
    edit_index(shards, lambda weights: {name: way if "00001" in file else file for name, file in weights.items()})
    refused(shards, repr(way), "leads out of the directory")


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
@pytest.mark.parametrize("folder_link", [False, True])
def test_a_link_that_leads_out(shards: Path, folder_link: bool) -> None:
    outside = shards.parent / "elsewhere"
    outside.mkdir()
    shard = next(shards.glob("model-00001*"))
    os.rename(shard, outside / shard.name)
    if folder_link:
        (shards / "in").symlink_to(outside)
        edit_index(shards, lambda weights: {n: f"in/{f}" if f == shard.name else f for n, f in weights.items()})
    else:
        shard.symlink_to(outside / shard.name)
    refused(shards, "is a link out of the directory", str(outside))


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
def test_a_link_to_itself(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("model.safetensors")
    refused(folder, "model.safetensors")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none(shards: Path, content: str) -> None:
    (shards / "model.safetensors.index.json").write_text(content)
    refused(shards, "model.safetensors.index.json")


def test_an_index_that_names_no_file_at_all(shards: Path) -> None:
    edit_index(shards, lambda weights: {})
    refused(shards, "config.json has vocab_size=40, but all tensors together hold 0 numbers")


def test_a_shard_that_is_not_there(shards: Path) -> None:
    gone = next(shards.glob("model-00002*"))
    gone.unlink()
    refused(shards, f"has no {gone.name}")


def test_a_tensor_that_its_shard_lacks(shards: Path) -> None:
    edit_index(shards, lambda weights: weights | {"ghost": min(weights.values())})
    refused(shards, "index and files disagree", "lacks ghost")


def test_a_tensor_in_another_shard_than_promised(shards: Path) -> None:
    edit_index(shards, lambda weights: weights | {min(weights): max(weights.values())})
    refused(shards, "lacks")


def test_a_tensor_that_the_index_does_not_name(shards: Path) -> None:
    edit_index(
        shards, lambda weights: {name: file for name, file in weights.items() if name != "transformer.ln_f.bias"}
    )
    refused(shards, "holds transformer.ln_f.bias, which the index does not name")


def test_a_tensor_in_two_shards(shards: Path) -> None:
    first, second = sorted(shards.glob("model-*"))[:2]
    name, x = next(iter(load_file(first).items()))
    rewrite(second, lambda tensors: {**tensors, name: x})
    refused(shards, f"{name} is in both {first.name} and {second.name}")


# ------------------------------------------------------------------------------------- pickles


class Bomb:
    """What a pickle can do to whoever opens it carelessly."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.write_text, (self.marker, "ran"))


def as_bin(folder: Path, content: bytes) -> Path:
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(content)
    return folder


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_runs_nothing_even_when_allowed(folder: Path, tmp_path: Path, zipped: bool) -> None:
    marker = tmp_path / "marker"
    if zipped:
        torch.save({"x": Bomb(marker)}, tmp_path / "bomb")
        as_bin(folder, (tmp_path / "bomb").read_bytes())
    else:
        as_bin(folder, pickle.dumps({"x": Bomb(marker)}, protocol=2))
    refused(folder, "allow_pickle")
    refused(folder, "pytorch_model.bin", allow_pickle=True)
    assert not marker.exists()


@pytest.mark.promise(3, "hostile payloads: pickles, remote code, ways out of the directory, EPS, hooks, bombs")
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"PK\x03\x04", *(pickle.dumps(x, protocol=2) for x in ([1, 2], {"a": "text"}))]
)
def test_a_pickle_that_holds_no_tensors(folder: Path, content: bytes) -> None:
    refused(as_bin(folder, content), "pytorch_model.bin", allow_pickle=True)


# ------------------------------------------------------------------------------------- tokenizers


PANIC = {
    **{"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "pre_tokenizer": None},
    **{"post_processor": None, "decoder": None},
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": []},
}


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"\xff", b'{"version": "1.0", "model": {"type": "BPE", "vocab": {}, "merges": ["a b"]}}'],
)
def test_a_tokenizer_that_is_none(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    refused(folder, "tokenizer.json is not a tokenizer that can be read")


def test_a_tokenizer_that_makes_the_library_panic(folder: Path) -> None:
    """Such a panic is no Exception: it would go through every ``except Exception`` of a server."""
    with pytest.raises(BaseException) as said:  # noqa: PT011
        Tokenizer.from_str(json.dumps(PANIC))
    assert not isinstance(said.value, Exception), "the library no longer panics here; find another way to make it"
    (folder / "tokenizer.json").write_text(json.dumps(PANIC))
    refused(folder, "tokenizer.json is not a tokenizer that can be read: Precompiled")


def test_what_is_not_the_files_fault_goes_through(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "tokenizer.json").write_text(Tokenizer(models.BPE()).to_str())

    def interrupted(text: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tokenizers.Tokenizer", type("Tokenizer", (), {"from_str": staticmethod(interrupted)}))
    with pytest.raises(KeyboardInterrupt):
        load(folder)


@pytest.mark.parametrize("content", [b"", b"garbage" * 20])
def test_a_sentencepiece_model_that_is_none(folder: Path, content: bytes) -> None:
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(content)
    (folder / "vocab.json").write_text(json.dumps({"</s>": 0, "<unk>": 1}))
    refused(folder, "source.spm is not a SentencePiece model")
    (folder / "vocab.json").write_text(json.dumps({"</s>": 0}))
    refused(folder, "vocab.json for source.spm has no token '<unk>'")
    (folder / "vocab.json").write_text(json.dumps({"</s>": "0"}))
    refused(folder, "does not map every token to an integer")


@pytest.mark.parametrize("fields", [{"size": "big"}, {"image_mean": 3}, {"image_std": ["x"] * 3}, {"resample": None}])
def test_an_image_processor_that_is_none(tmp_path: Path, fields: dict[str, Any]) -> None:
    theirs("vit").save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(fields))
    refused(tmp_path / "model", "preprocessor_config.json cannot be read")
