"""GGUF: what is written is what llama.cpp, transformers and we read; what has no form there is refused by name."""

from __future__ import annotations

import functools
import json
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers

import regard
from models.small import shaken, small
from regard import cli
from regard.config import RopeScalingConfig
from regard.errors import BadModelFile
from regard.export import export, open_engine
from regard.export.engines import GgufEngine
from regard.hub import gguf_file
from regard.hub.gguf_file import GgufDirectory, gguf_obstacles, write_gguf
from regard.models import Model, build
from regard.text.chat import PLAIN
from regard.text.gguf_vocabulary import PROBES, gguf_vocabulary, tokenizer_of_gguf
from regard.text.processor import Processor
from regard.text.tokenizer import SPACE, Tokenizer
from regard.text.tokenizer_training import Template, train_tokenizer
from training.runs import words_of, write_data

from .translators import pairs

try:
    import llama_cpp
except ImportError:
    llama_cpp = None  # type: ignore[assignment]

needs_llama_cpp = pytest.mark.skipif(
    llama_cpp is None, reason='needs llama.cpp, which is built from source: pip install -e ".[llama-cpp]"'
)
LLAMA3 = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_len": 8192}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("llama-1b", {"n_kv_heads": 2}),
    "one key head, tied": ("llama-1b", {"n_kv_heads": 1, "tie_head": True}),
    "biases, wider heads": ("llama-1b", {"qkv_bias": True, "out_bias": True, "ff_bias": True, "d_head": 10}),
    "mistral": ("mistral-7b", {"window": 24}),
    "qwen2": ("llama-1b", {"qkv_bias": True, "tie_head": True}),
    "qwen3": ("llama-1b", {"qk_norm": True}),
    "linear scaling": ("llama-1b", {"rope_scaling": {"kind": "linear", "factor": 4.0}}),
    "yarn": ("llama-1b", {"rope_scaling": {"kind": "yarn", "factor": 4.0, "original_max_len": 16}}),
    "llama3 scaling": ("llama-1b", {"rope_scaling": LLAMA3, "rope_base": 500000.0, "d_head": 32}),
}
each_case = pytest.mark.parametrize(("name", "fields"), CASES.values(), ids=CASES)
PROMPTS = ("The teacher", "고양이가", "A dog 😀", "선생님은 책을", "Don't", "1, 2, 3\n")


@functools.cache
def writer(template: Template = "none") -> Model:
    """A LLaMA with a byte-level tokenizer and grouped heads; its weights are random, its choices clear."""
    tokenizer = train_tokenizer([text for pair in pairs() for text in pair], "bpe", 360, template)
    torch.manual_seed(0)
    model = build(
        "llama-1b",
        **{"vocab_size": tokenizer.size + 2, "d_model": 64, "n_heads": 4, "n_kv_heads": 2, "d_ff": 96, "n_layers": 2},
        **{"max_len": 64, "pad_id": 0, "bos_id": 2 if template == "none" else 1, "eos_id": 2},
    )
    model.processor = Processor(source=tokenizer)
    return shaken(model).eval()


@functools.cache
def sentencepiece() -> Tokenizer:
    """A tokenizer as LLaMA 2 has it: merges in the order of scores, a token for every byte, ▁ before a text."""
    pieces = [SPACE, *"aehtscrdogn", "가", "나"]
    merged = ["th", f"{SPACE}th", "the", f"{SPACE}the", "he", "ca", "cat", f"{SPACE}cat", "가나", "og", "dog"]
    vocab = {
        t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *pieces, *merged])
    }
    merges = [(t[:at], t[at:]) for t in merged for at in range(1, len(t)) if t[:at] in vocab and t[at:] in vocab]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)])
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(parts)
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(backend.to_str().encode()).with_special_ids(pad=0, bos=1, eos=2, unk=0)


def logits(model: Model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]))[0].float()


# ------------------------------------------------------------------------------------- the file


def test_fields_and_tensors_of_the_file(tmp_path: Path) -> None:
    model = writer()
    assert model.processor is not None
    write_gguf(model, tmp_path / "model.gguf")
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = model.config
    for key, value in {
        "general.architecture": "llama",
        "llama.context_length": 64,
        "llama.embedding_length": 64,
        "llama.block_count": 2,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": False,
    }.items():
        assert fields[key] == value, key
    assert fields["llama.rope.freq_base"] == 10000.0
    assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert tokens[:5] == ["<pad>", "<bos>", "<eos>", "<unk>", "<mask>"]
    assert tokens[-2:] == ["[PAD360]", "[PAD361]"]
    assert (kinds[2], kinds[5], kinds[-1]) == (gguf.TokenType.CONTROL, gguf.TokenType.NORMAL, gguf.TokenType.UNUSED)
    merges = json.loads(model.processor.tokenizer.content)["model"]["merges"]
    assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]

    tensors = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors}
    state = model.state_dict()
    assert torch.equal(tensors["token_embd.weight"], state["token.weight"])
    assert torch.equal(tensors["output.weight"], state["head.weight"])
    query, key, value = state["decoder.blocks.1.attention.w_qkv.weight"].split((64, 32, 32))
    assert torch.equal(tensors["blk.1.attn_v.weight"], value)
    for name, ours, heads in (("q", query, 4), ("k", key, 2)):  # as llama.cpp's own converter permutes them
        theirs = ours.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(ours.shape)
        assert torch.equal(tensors[f"blk.1.attn_{name}.weight"], theirs)
    gate, up = state["decoder.blocks.0.ff.w_in.weight"].chunk(2)
    assert torch.equal(tensors["blk.0.ffn_gate.weight"], gate)
    assert torch.equal(tensors["blk.0.ffn_up.weight"], up)


@each_case
def test_read_back_it_is_the_same_model(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = small(name, **fields)
    write_gguf(model, tmp_path / "model.gguf")
    back = regard.load(tmp_path / "model.gguf")
    assert torch.equal(logits(back, [5, 9, 3, 30, 7]), logits(model, [5, 9, 3, 30, 7]))
    for field in ("rope_scaling", "rope_base", "norm_eps", "tie_head", "head_width", "max_len", "qkv_bias", "ff_bias"):
        assert getattr(back.config, field) == getattr(model.config, field)


@pytest.mark.parametrize(("float_type", "bound"), [("f16", 0.02), ("bf16", 0.15), ("q8_0", 0.15)])
def test_smaller_numbers(float_type: Any, bound: float, tmp_path: Path) -> None:
    model = writer()
    for kind in ("f32", float_type):
        write_gguf(model, tmp_path / f"{kind}.gguf", kind)
    assert (tmp_path / f"{float_type}.gguf").stat().st_size < 0.7 * (tmp_path / "f32.gguf").stat().st_size
    assert GgufDirectory(tmp_path / f"{float_type}.gguf").float_type == float_type
    back = regard.load(tmp_path / f"{float_type}.gguf", dtype="float32")
    with torch.no_grad():
        for name, x in back.named_parameters():
            wanted = model.state_dict()[name]
            assert (x - wanted).abs().max() <= (2**-8 if float_type == "bf16" else 2**-7) * wanted.abs().max(), name
            assert torch.equal(x, wanted) == (x.dim() == 1), name  # norms stay in float32
    gap = (logits(back, [5, 9, 3]) - logits(model, [5, 9, 3])).abs().max()
    assert 0 < gap < bound * logits(model, [5, 9, 3]).abs().max()


@pytest.mark.parametrize("name", ["grouped heads", "one key head, tied", "qwen2"])  # their Qwen 3 has heads of 128 only
def test_transformers_reads_the_same_numbers(name: str, tmp_path: Path) -> None:
    """By what from_pretrained(gguf_file=…) calls, which itself wants accelerate."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    model = small(CASES[name][0], **CASES[name][1])
    write_gguf(model, tmp_path / "model.gguf")
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**load_gguf_checkpoint(tmp_path / "model.gguf")["config"])
    )
    tensors = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=theirs)["tensors"]
    left_out = theirs.load_state_dict(tensors, strict=False)
    assert not left_out.unexpected_keys
    assert set(left_out.missing_keys) <= ({"lm_head.weight"} if model.config.tie_head else set())
    ids = [5, 9, 3, 30, 7]
    with torch.no_grad():
        torch.testing.assert_close(theirs.eval()(torch.tensor([ids])).logits[0], logits(model, ids), atol=1e-4, rtol=0)


def test_a_damaged_file_is_a_bad_model_file(tmp_path: Path) -> None:
    write_gguf(writer(), tmp_path / "model.gguf")
    content = (tmp_path / "model.gguf").read_bytes()
    for number, part in enumerate((content[:2], content[:300], content[:-5000], b"GGUF" + content[8:])):
        (tmp_path / f"{number}.gguf").write_bytes(part)
        with pytest.raises(BadModelFile, match=rf"{number}\.gguf cannot be read"):
            regard.load(tmp_path / f"{number}.gguf")
    changed = content.replace(
        b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
        b"general.architecture\x08\0\0\0\x05\0\0\0\0\0\0\0mamba",
    )
    assert changed != content
    (tmp_path / "other.gguf").write_bytes(changed)
    with pytest.raises(BadModelFile, match="architecture 'mamba'; regard reads llama, qwen2, qwen3"):
        regard.load(tmp_path / "other.gguf")


@pytest.mark.parametrize(
    ("added", "scaling"),
    [
        ({"llama.rope.scaling.factor": 4.0}, RopeScalingConfig(kind="linear", factor=4.0)),
        ({"llama.rope.scale_linear": 2.0}, RopeScalingConfig(kind="linear", factor=2.0)),
        ({"llama.rope.scaling.type": "none", "llama.rope.scaling.factor": 4.0}, None),
        ({"llama.rope.scaling.attn_factor": 1.5}, "rope.scaling.attn_factor=1.5; regard supports 1.0"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8; regard supports 16"),
    ],
)
def test_positions_are_read_as_llama_cpp_reads_them(
    added: dict[str, Any], scaling: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = gguf_file.gguf_fields(writer())
    monkeypatch.setattr(gguf_file, "gguf_fields", lambda model: {**fields, **added})
    write_gguf(writer(), tmp_path / "model.gguf")
    if isinstance(scaling, str):
        with pytest.raises(BadModelFile, match=scaling):
            regard.load(tmp_path / "model.gguf")
    else:
        assert regard.load(tmp_path / "model.gguf").config.rope_scaling == scaling


# ------------------------------------------------------------------------------------- tokenizers


@pytest.mark.parametrize("kind", ["bpe", "bytes", "sentencepiece"])
@pytest.mark.parametrize("template", ["none", "eos", "bos-eos"])
def test_a_tokenizer_there_and_back(kind: Any, template: Template) -> None:
    tokenizer = sentencepiece() if kind == "sentencepiece" else train_tokenizer(PROBES, kind, None, template)
    fields = gguf_vocabulary(tokenizer, build_config(tokenizer))
    back = Tokenizer(tokenizer_of_gguf(fields))
    assert back.is_native == tokenizer.is_native
    for text in (*PROBES, "the cat the dog", "  spaces ", "<eos>"):
        assert back.encode(text) == tokenizer.encode(text), text
        assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text))
    assert fields["tokenizer.ggml.model"] == ("llama" if kind == "sentencepiece" else "gpt2")
    if kind == "sentencepiece":
        scores = dict(zip(fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"], strict=True))
        assert scores["th"] > scores["the"] > scores["cat"] > scores["og"]


def build_config(tokenizer: Tokenizer, **fields: Any) -> Any:
    return writer().config.with_(vocab_size=tokenizer.size, bos_id=1, eos_id=2, **fields)


@pytest.mark.parametrize("kind", ["chars", "words", "unigram"])
def test_a_tokenizer_that_llama_cpp_has_not_is_refused(kind: Any) -> None:
    tokenizer = train_tokenizer(PROBES, kind, 80 if kind == "unigram" else None)
    with pytest.raises(ValueError, match="it runs byte-level BPE, which"):
        gguf_vocabulary(tokenizer, build_config(tokenizer))


def test_a_word_rule_is_recognised_by_its_regex() -> None:
    """Llama 3 and Qwen 2 cut words before the bytes; a rule that has no name there is refused."""
    file = json.loads(train_tokenizer(PROBES * 3, "bpe", 300).content)
    file["added_tokens"] = [token for token in file["added_tokens"] if token["content"] in ("<bos>", "<eos>")]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    regex = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    regex += r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for pattern, wanted in ((regex, "qwen2"), (regex.replace(r"\p{N}|", r"\p{N}{1,3}|"), "llama-bpe"), ("[a-z]", None)):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        file["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
        file["model"]["ignore_merges"] = wanted == "llama-bpe"
        tokenizer = Tokenizer(json.dumps(file).encode())
        if wanted is not None:
            assert gguf_vocabulary(tokenizer, build_config(tokenizer))["tokenizer.ggml.pre"] == wanted
            continue
        with pytest.raises(ValueError, match="has no tokenizer like"):
            gguf_vocabulary(tokenizer, build_config(tokenizer))


# ------------------------------------------------------------------------------------- export


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("gpt2", {}, "this one has the architecture of gpt2"),
        ("transformer-tiny", {}, "architecture='encoder-decoder'"),
        ("llama-1b", {"activation": "geglu"}, "activation='geglu'"),
        ("llama-1b", {"activation": "relu2"}, "activation='relu2'"),
        ("mistral-7b", {}, "window=4"),
        ("llama-1b", {"rope_scaling": {"kind": "dynamic", "factor": 2.0}}, "rope_scaling="),
        ("llama-1b", {"positions": "alibi"}, "positions='alibi'"),
    ],
)
def test_a_model_of_another_line_is_refused(name: str, fields: dict[str, Any], said: str, tmp_path: Path) -> None:
    model = small(name, **fields)
    assert said.removeprefix("this one has ") in "; ".join(gguf_obstacles(model.config))
    with pytest.raises(ValueError, match="GGUF is for models of the LLaMA line, and this one has") as raised:
        export(model, "gguf", tmp_path / "out")
    assert said in str(raised.value)
    assert not (tmp_path / "out").exists()


LLAMA_WORDS = (
    *("model=llama-1b", "model.d_model=32", "model.n_heads=4", "model.n_kv_heads=2", "model.d_ff=48"),
    *("model.n_layers=2", "data.tokenizer=bpe", "data.vocab_size=300", "train.steps=3", "train.ship_to=gguf"),
)


def test_what_cannot_be_gguf_is_refused_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, out = write_data("lm", tmp_path), tmp_path / "run"
    for words, said in (
        (
            ["train.ship_to=gguf"],
            "train.ship_to=gguf: GGUF is for models of the LLaMA line, and this one has activation=",
        ),
        ([*LLAMA_WORDS, "data.tokenizer=chars"], "train.ship_to=gguf: llama.cpp has no tokenizer like tokenizer.json"),
    ):
        assert cli.main(["train", "lm", *words_of("lm", data, *words, f"train.out={out}")]) == 2
        assert said in capsys.readouterr().err
        assert not out.exists()


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaMA trained and exported by the command line."""
    folder = tmp_path_factory.mktemp("gguf")
    words = words_of("lm", write_data("lm", folder), *LLAMA_WORDS, f"train.out={folder / 'run'}")
    assert cli.main(["train", "lm", *words, "--quiet"]) == 0
    quick = ("--shapes", "4", "--no-compile")
    assert cli.main(["export", str(folder / "run"), "gguf", str(folder / "shipped"), *quick]) == 0
    assert cli.main(["export", str(folder / "run"), "gguf-q8_0", str(folder / "small"), *quick]) == 0
    return folder / "shipped"


def test_an_export_is_compared_and_the_file_can_be_used_alone(
    shipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    certificate = json.loads((shipped / "certificate.json").read_bytes())
    rows = {row["name"]: row for row in certificate["comparisons"]}
    assert certificate["kinds"] == ["gguf"]
    assert (rows["gguf"]["same_text"], rows["gguf"]["max_abs"]) == (1.0, rows["read back"]["max_abs"])
    if llama_cpp is None:
        assert rows["llama.cpp"]["skipped"] == "llama-cpp-python is not installed"
    else:
        assert rows["llama.cpp"]["same_text"] == rows["llama.cpp tokens"]["same_text"] == 1.0
        assert rows["llama.cpp"]["max_abs"] < 1e-4
    rounded = {
        row["name"]: row for row in json.loads((shipped.parent / "small/certificate.json").read_bytes())["comparisons"]
    }
    assert set(rounded["gguf"]["bounds"].values()) == {None}
    manifest = json.loads((shipped / "manifest.json").read_bytes())
    assert "model.gguf" in manifest["files"]
    assert manifest["training"]["run"] == "run"

    shutil.copy(shipped / "model.gguf", tmp_path / "alone.gguf")
    capsys.readouterr()
    said = []
    for model in (shipped, tmp_path / "alone.gguf", tmp_path):
        assert cli.main(["generate", str(model), "one two", "--max-new-tokens", "6"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] != ""
    assert cli.main(["info", str(tmp_path / "alone.gguf")]) == 0
    assert "llama: decoder" in capsys.readouterr().out


def test_two_forms_of_the_file_need_two_directories(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"kind gguf and kind gguf-f16 both write model\.gguf"):
        export(writer(), ["gguf", "gguf-f16"], tmp_path / "out")


def chatting() -> Model:
    model = writer.__wrapped__()
    assert model.processor is not None
    model.processor = Processor(source=model.processor.source, chat_template=PLAIN)
    return model


def test_a_chat_template_goes_along(tmp_path: Path) -> None:
    write_gguf(chatting(), tmp_path / "model.gguf")
    assert gguf.GGUFReader(tmp_path / "model.gguf").get_field("tokenizer.chat_template").contents() == PLAIN
    back = regard.load(tmp_path / "model.gguf")
    assert back.processor is not None
    assert back.processor.chat_template == PLAIN


# ------------------------------------------------------------------------------------- llama.cpp itself


@needs_llama_cpp
@each_case
def test_llama_cpp_computes_the_same_logits(name: str, fields: dict[str, Any], tmp_path: Path) -> None:
    model = small(name, **fields)
    folder = export(model, "gguf", tmp_path / "out", n_shapes=6, compiled=False)
    rows = {row["name"]: row for row in json.loads((folder / "certificate.json").read_bytes())["comparisons"]}
    assert rows["llama.cpp"]["max_abs"] < 1e-4
    assert rows["llama.cpp"]["same_text"] == 1.0


class OurLlama:
    """The part of llama.cpp's interface that the engine uses, computed by our model."""

    def __init__(self, path: str, **options: Any) -> None:
        self.model, self.n_tokens, self._ids = small("llama-1b"), 0, list[int]()

    @torch.no_grad()
    def eval(self, tokens: list[int]) -> None:
        self._ids = [*self._ids[: self.n_tokens], *tokens]
        self.scores = self.model(torch.tensor([self._ids]))[0].numpy()


def test_forbidden_tokens_never_occur(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(Llama=OurLlama, GGML_TYPE_F32=0)
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)  # type: ignore[arg-type]  # which need not be installed
    model, rows = small("llama-1b"), [[5, 6, 7], [8, 9]]
    usual = regard.generation.generate(model, rows, max_new_tokens=12).tokens
    model.config = model.config.with_(forbidden_ids=(usual[0][0], usual[1][0]))
    engine = GgufEngine(tmp_path / "model.gguf", model.config, None)
    found = engine.write(rows, max_new_tokens=12)
    assert found == regard.generation.generate(model, rows, max_new_tokens=12).tokens != usual


@needs_llama_cpp
@pytest.mark.parametrize("template", ["none", "bos-eos"])
def test_llama_cpp_has_the_same_tokens(template: Template, tmp_path: Path) -> None:
    for model in (writer(template), spm_writer()):
        assert model.processor is not None
        write_gguf(model, tmp_path / "model.gguf")
        runtime = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
        tokenizer = model.processor.tokenizer
        texts = [
            *PROBES[:-1],
            *PROMPTS,
            *(text for pair in pairs() for text in pair),
            "the cat 가나 dog",
            " two  spaces ",
        ]
        for text in texts:
            ids = tokenizer.encode(text)
            assert runtime.tokenize(text.encode(), add_bos=True, special=False) == ids, text
            spelled = runtime.detokenize(ids).decode()  # which adds or drops a space at the start
            assert spelled.lstrip(" ") == tokenizer.decode(ids).lstrip(" "), text


def spm_writer() -> Model:
    model = small("llama-1b", vocab_size=sentencepiece().size)
    model.processor = Processor(source=sentencepiece())
    return model


@needs_llama_cpp
@pytest.mark.parametrize(("float_type", "error"), [("f32", 0.0), ("f16", 0.02), ("bf16", 0.1), ("q8_0", 0.2)])
def test_llama_cpp_writes_the_same_text(float_type: Any, error: float, tmp_path: Path) -> None:
    """By its own sampler at temperature 0, as its users run it. Rounded weights are compared with the same rounded;
    llama.cpp rounds what is multiplied with them too, so that a token may differ where two are nearly as likely."""
    write_gguf(writer(), tmp_path / "model.gguf", float_type)
    model = regard.load(tmp_path / "model.gguf", dtype="float32")
    cache = dict.fromkeys(("type_k", "type_v"), llama_cpp.GGML_TYPE_F32)
    runtime = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, verbose=False, n_threads=1, **cache)
    for prompt in PROMPTS:
        assert model.processor is not None
        ids = model.processor.tokenizer.encode(prompt)
        wanted = regard.generate(model, [ids], max_new_tokens=24).tokens[0]
        found: list[int] = []
        for token in runtime.generate(runtime.tokenize(prompt.encode()), temp=0.0):
            if token == runtime.token_eos() or len(found) == 24:
                break
            found.append(token)
        same = next((n for n, (a, b) in enumerate(zip(wanted, found, strict=False)) if a != b), len(wanted))
        assert found == wanted or margin(model, [*ids, *wanted[:same]]) < error, (prompt, same)


def margin(model: Model, ids: list[int]) -> float:
    """How far the logit of the likeliest next token is above that of the second."""
    best = logits(model, ids)[-1].topk(2).values
    return float(best[0] - best[1])


@needs_llama_cpp
def test_llama_cpp_reads_a_chat_as_the_same_tokens(tmp_path: Path) -> None:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    model, messages = chatting(), [("user", "The teacher 고양이"), ("assistant", "A dog"), ("user", "네")]
    write_gguf(model, tmp_path / "model.gguf")
    runtime = llama_cpp.Llama(str(tmp_path / "model.gguf"), vocab_only=True, verbose=False)
    tokens = {"bos_token": "<eos>", "eos_token": "<eos>"}
    assert [runtime._model.token_get_text(x) for x in (runtime.token_bos(), runtime.token_eos())] == ["<eos>", "<eos>"]
    formatter = Jinja2ChatFormatter(runtime.metadata["tokenizer.chat_template"], **tokens)
    prompt = formatter(messages=[{"role": role, "content": content} for role, content in messages]).prompt
    assert model.processor is not None
    assert model.processor.chat is not None
    wanted = model.processor.chat.encode_prompt(messages)
    assert runtime.tokenize(prompt.encode(), add_bos=True, special=True) == wanted


@needs_llama_cpp
def test_the_engine_writes_texts_and_refuses_what_it_has_not(shipped: Path) -> None:
    engine, own = open_engine(shipped, "gguf", threads=1), open_engine(shipped, "torch")
    texts = ["one two", "three", "four 다섯 😀"]
    assert engine.generate(texts, max_new_tokens=12) == own.generate(texts, max_new_tokens=12)
    with pytest.raises(ValueError, match="the gguf engine does not support beam=2; the torch engine does"):
        engine.generate(texts, beam=2)
    with pytest.raises(ValueError, match="cannot translate text"):
        engine.translate(texts)
