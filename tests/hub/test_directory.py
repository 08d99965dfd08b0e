"""Reading directories that others wrote: every layout of weights, and what stands beside them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers, trainers

from regard.errors import BadModelFile
from regard.io import describe, load
from regard.text.image_processor import ImageProcessor
from regard.text.processor import Processor
from regard.text.tokenizer import Tokenizer

from .helpers import THEIRS, VOCAB, copy, edit_json, ours, speaks, theirs

TEXT = ["the cat sat on the mat", "the dog saw the cat", "하늘이 맑다", "a mat, a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory of transformers', written once for each kind; not to be changed."""
    root = tmp_path_factory.mktemp("theirs")

    def of(kind: str) -> Path:
        if not (root / kind).exists():
            theirs(kind).save_pretrained(root / kind)
        return root / kind

    return of


Folder = Callable[[str], Path]


@pytest.mark.parametrize("kind", THEIRS)
def test_every_family_loads(folder: Folder, kind: str) -> None:
    model = load(folder(kind))
    assert not model.training
    assert model.provenance.path == folder(kind)
    assert model.provenance.model_type == kind.removesuffix("-classes")
    assert model.provenance.verified == "unverified"
    assert not any(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert all(p.requires_grad for p in model.parameters())
    torch.testing.assert_close(speaks(model), speaks(theirs(kind)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama", "t5"])
def test_shards(folder: Folder, tmp_path: Path, kind: str) -> None:
    theirs(kind).save_pretrained(tmp_path, max_shard_size="6KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert speaks(load(tmp_path)).equal(speaks(load(folder(kind))))


def as_pickle(source: Path, target: Path, n_files: int) -> Path:
    """The same directory with its weights as PyTorch wrote them once."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    tensors = load_file(source / "model.safetensors")
    names = [f"pytorch_model-{i}.bin" for i in range(n_files)] if n_files > 1 else ["pytorch_model.bin"]
    place = {name: names[i % n_files] for i, name in enumerate(tensors)}
    for file in names:
        torch.save({name: x for name, x in tensors.items() if place[name] == file}, target / file)
    if n_files > 1:
        (target / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": place}))
    return target


@pytest.mark.parametrize("n_files", [1, 3])
def test_pickles_only_when_asked(folder: Folder, tmp_path: Path, n_files: int) -> None:
    directory = as_pickle(folder("gpt2"), tmp_path / "pickled", n_files)
    with pytest.raises(BadModelFile, match="allow_pickle=True"):
        load(directory)
    assert speaks(load(directory, allow_pickle=True)).equal(speaks(load(folder("gpt2"))))


def test_safetensors_is_taken_where_both_are(folder: Folder, tmp_path: Path) -> None:
    directory = copy(folder("gpt2"), tmp_path / "both")
    (directory / "pytorch_model.bin").write_bytes(b"not even a pickle")
    assert speaks(load(directory)).equal(speaks(load(folder("gpt2"))))


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float64"])
def test_dtype_converts_and_positions_stay_exact(folder: Folder, dtype: torch.dtype | str) -> None:
    model = load(folder("llama"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16 if dtype != "float64" else torch.float64}
    rope = next(m for m in model.modules() if type(m).__name__ == "Rope")
    assert rope.short.dtype == torch.float32
    torch.testing.assert_close(speaks(model).float(), speaks(theirs("llama")), atol=0.1, rtol=0.1)


@pytest.mark.parametrize("dtype", ["int8", torch.int64, "float3", "nn"])
def test_dtype_must_be_a_floating_type(folder: Folder, dtype: torch.dtype | str) -> None:
    with pytest.raises(ValueError, match="dtype="):
        load(folder("gpt2"), dtype=dtype)


def test_a_file_in_half_precision_stays_so(tmp_path: Path) -> None:
    theirs("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {p.dtype for p in load(tmp_path).parameters()} == {torch.bfloat16}


def test_mixed_types_stay_mixed(folder: Folder, tmp_path: Path) -> None:
    def half_of_it(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: x if "ln_" in name else x.to(torch.bfloat16) for name, x in tensors.items()}

    model = load(rewrite(copy(folder("gpt2"), tmp_path / "mixed"), half_of_it))
    kinds = {name: p.dtype for name, p in model.named_parameters()}
    assert {kinds[name] for name in kinds if "norm" in name} == {torch.float32}
    assert {kinds[name] for name in kinds if "norm" not in name} == {torch.bfloat16}


def test_a_device_that_is_full_is_not_the_files_fault(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "clone", full)
    with pytest.raises(torch.OutOfMemoryError):
        load(folder("gpt2"))


def test_device(folder: Folder) -> None:
    assert load(folder("llama"), device="cpu").device == torch.device("cpu")
    with torch.device("meta"):  # a default that others set must not leak into the building of it
        model = load(folder("llama"), device="cpu")
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"cpu"}
    speaks(model)


@pytest.mark.parametrize("positions", ["alibi", "rope", "t5", "xl", "learned", "sinusoidal", "none"])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_what_no_file_holds_is_right_after_loading(tmp_path: Path, positions: str, dtype: torch.dtype | None) -> None:
    """Slopes and rotary tables are in no file, and a model built on meta has lost them."""
    model = ours(positions=positions)
    again = load(model.save(tmp_path / "model"), dtype=dtype)
    torch.testing.assert_close(speaks(again), speaks(model.to(dtype)), atol=0, rtol=0)


# ------------------------------------------------------------------------------------- names that are no mistake


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    path = directory / "model.safetensors"
    tensors = {name: x.clone() for name, x in change(load_file(path)).items()}
    path.unlink()
    save_file(tensors, path, metadata={"format": "pt"})
    return directory


def test_names_without_their_first_word(folder: Folder, tmp_path: Path) -> None:
    """The first GPT-2 was published so, with its mask buffers."""
    directory = rewrite(
        copy(folder("gpt2"), tmp_path / "first"),
        lambda tensors: {
            **{name.removeprefix("transformer."): x for name, x in tensors.items()},
            **{f"h.{i}.attn.bias": torch.ones(1, 1, 24, 24) for i in range(2)},
        },
    )
    assert speaks(load(directory)).equal(speaks(load(folder("gpt2"))))


@pytest.mark.parametrize("both", [True, False])
def test_a_tied_matrix_under_its_second_name(folder: Folder, tmp_path: Path, both: bool) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        table = tensors["transformer.wte.weight"] if both else tensors.pop("transformer.wte.weight")
        return {**tensors, "lm_head.weight": table}

    directory = rewrite(copy(folder("gpt2"), tmp_path / "tied"), change)
    assert speaks(load(directory)).equal(speaks(load(folder("gpt2"))))


def test_a_snapshot_of_the_cache_is_made_of_links(folder: Folder, tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "abc", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    shutil.copytree(folder("gpt2"), blobs)
    for name in os.listdir(blobs):
        (snapshot / name).symlink_to(Path("../../blobs") / name)
    assert speaks(load(snapshot)).equal(speaks(load(folder("gpt2"))))


# ------------------------------------------------------------------------------------- text, images, labels


@pytest.fixture(scope="module")
def tokenizer() -> Backend:
    made = Backend(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    made.train_from_iterator(TEXT, trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=special, show_progress=False))
    return made


def test_tokenizer_json(folder: Folder, tmp_path: Path, tokenizer: Backend) -> None:
    directory = copy(folder("gpt2"), tmp_path / "with")
    wanted = tokenizer.encode(TEXT[0]).ids
    tokenizer.enable_truncation(2)  # the file's own limits are not the caller's
    (directory / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    tokenizer.no_truncation()
    processor = load(directory).processor
    assert processor.source is processor.tokenizer
    assert (processor.target, processor.image, processor.labels) == (None, None, None)
    assert processor.tokenizer.encode(TEXT[0]) == wanted
    assert processor.tokenizer.decode(wanted) == tokenizer.decode(wanted)
    assert processor.tokenizer.size == tokenizer.get_vocab_size()
    assert load(folder("gpt2")).processor is None


def test_processor_goes_through_save_and_transformers_opens_it(tmp_path: Path, tokenizer: Backend) -> None:
    model = ours(positions="learned", norm_place="pre", activation="gelu_tanh")
    model.processor = Processor(source=Tokenizer(tokenizer.to_str().encode()))
    saved = model.save(tmp_path / "model")
    again = load(saved)
    assert again.processor.tokenizer.encode(TEXT[2]) == tokenizer.encode(TEXT[2]).ids
    their_tokenizer = hf.AutoTokenizer.from_pretrained(saved)
    assert their_tokenizer(TEXT[1])["input_ids"] == tokenizer.encode(TEXT[1]).ids
    assert (their_tokenizer.pad_token, their_tokenizer.eos_token) == ("<pad>", "</s>")
    assert describe(saved).to_dict()["tokens"] == {"source": tokenizer.get_vocab_size()}


def test_a_pair_of_tokenizers(tmp_path: Path, tokenizer: Backend) -> None:
    model = ours(architecture="encoder-decoder", target_vocab_size=VOCAB, sinusoid_layout="halves")
    content = tokenizer.to_str().encode()
    model.processor = Processor(source=Tokenizer(content), target=Tokenizer(content))
    processor = load(saved := model.save(tmp_path / "model")).processor
    assert processor.source.encode(TEXT[0]) == processor.target.encode(TEXT[0]) == tokenizer.encode(TEXT[0]).ids
    assert 'PreTrainedTokenizerFast(tokenizer_file="…/tokenizer.source.json")' in (saved / "README.md").read_text(
        "utf-8"
    )
    with pytest.raises(ValueError, match=r"there are 2 tokenizers; use processor\.source or processor\.target"):
        _ = processor.tokenizer


def test_an_image_has_no_source_text(tmp_path: Path, tokenizer: Backend) -> None:
    model = ours(architecture="encoder-decoder", source="image", image_size=8, patch_size=4)
    model.processor = Processor(
        target=Tokenizer(tokenizer.to_str().encode()), image=ImageProcessor((8, 8), (0.1,) * 3, (0.2,) * 3)
    )
    processor = load(model.save(tmp_path / "model")).processor
    assert processor.source is None
    assert processor.tokenizer is processor.target
    assert processor.image == ImageProcessor((8, 8), (0.1,) * 3, (0.2,) * 3)


@pytest.fixture(scope="module")
def marian(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Marian's files: two SentencePiece models and one vocabulary that numbers the pieces of both."""
    import sentencepiece

    root = tmp_path_factory.mktemp("marian")
    pieces: list[str] = []
    for side, lines in (("source", TEXT[:2] * 20), ("target", TEXT[2:] * 20)):
        (root / f"{side}.txt").write_text("\n".join(lines), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(root / f"{side}.txt"),
            model_prefix=str(root / side),
            vocab_size=20,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        os.replace(root / f"{side}.model", root / f"{side}.spm")
        model = sentencepiece.SentencePieceProcessor(model_file=str(root / f"{side}.spm"))
        pieces += [model.id_to_piece(i) for i in range(3, len(model))]
    vocab = list(dict.fromkeys(["</s>", "<unk>", *pieces, ">>kor<<", "<pad>"]))
    (root / "vocab.json").write_text(json.dumps({piece: i for i, piece in enumerate(vocab)}), encoding="utf-8")
    (root / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "ko"}))
    return root


def test_marians_pair(folder: Folder, marian: Path, tmp_path: Path) -> None:
    directory = copy(folder("marian"), tmp_path / "marian")
    for name in ("source.spm", "target.spm", "vocab.json", "tokenizer_config.json"):
        shutil.copy(marian / name, directory)
    processor = load(directory).processor
    their_tokenizer = hf.MarianTokenizer.from_pretrained(directory)
    spelled = ("the </s> cat", "<unk> the", "the<pad>cat", "</s>>>kor<< the </s", ">>kor<<>>kor<< cat", ">><<\n<pad>")
    for text in (*TEXT, ">>kor<< the cat", "", "unseen Ω", *spelled):
        assert processor.source.encode(text) == their_tokenizer(text)["input_ids"]
        ids = their_tokenizer(text_target=text)["input_ids"]
        assert processor.target.encode(text) == ids
        assert processor.target.decode(ids) == their_tokenizer.decode(ids, skip_special_tokens=True)
    saved = load(directory).save(tmp_path / "saved")
    assert load(saved).processor.target.encode(TEXT[2]) == processor.target.encode(TEXT[2])
    assert hf.MarianTokenizer.from_pretrained(saved)(TEXT[0])["input_ids"] == processor.source.encode(TEXT[0])


def test_without_sentencepiece_the_model_loads_and_its_text_says_why(
    folder: Folder, marian: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib
    import sys

    directory = copy(folder("marian"), tmp_path / "marian")
    for name in ("source.spm", "target.spm", "vocab.json"):
        shutil.copy(marian / name, directory)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    model = load(directory)
    assert model.processor.source.size > 3
    with pytest.raises(Exception, match=r"source\.spm needs sentencepiece, which is not installed"):
        model.processor.source.encode("the cat")


@pytest.mark.parametrize(
    "said",
    [
        {"num_labels": 5, "id2label": {"0": "bad", "1": "good"}},
        {"num_labels": 2, "id2label": {"0": "bad", "1": "good"}},
        {"id2label": {"0": "bad", "1": "so", "2": "good"}},
        {"num_labels": 4, "id2label": None},
        {},
    ],
)
def test_classes_are_counted_as_transformers_counts_them(said: dict[str, Any], tmp_path: Path) -> None:
    """Of two numbers that differ ``num_labels`` counts, and the names are forgotten."""
    sizes = {
        "vocab_size": 9,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 8,
    }
    theirs = hf.BertForSequenceClassification(hf.BertConfig(**sizes, **said))
    theirs.save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    kept = {name: value for name, value in fields.items() if name not in ("id2label", "label2id")}
    (tmp_path / "config.json").write_text(json.dumps(kept | said))
    assert hf.AutoConfig.from_pretrained(tmp_path).num_labels == theirs.num_labels
    model = load(tmp_path)
    assert model.config.n_classes == theirs.num_labels
    named = "num_labels" not in said or said["num_labels"] == 2
    wanted = tuple((said.get("id2label") or {}).values()) if named else ()
    assert (() if model.processor is None else model.processor.labels or ()) == wanted


def test_labels_and_image(folder: Folder, tmp_path: Path) -> None:
    from PIL import Image

    assert load(folder("vit")).processor.labels == ("cat", "dog", "숲")
    assert load(folder("bert")).processor is None
    assert load(folder("bert-classes")).processor is None, "LABEL_0 is no name"
    directory = copy(folder("vit"), tmp_path / "vit")
    maker = hf.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.2, 0.3, 0.4], image_std=[0.5, 0.6, 0.7], resample=2
    )
    maker.save_pretrained(directory)
    model = load(directory)
    picture = Image.effect_noise((30, 21), 80).convert("RGB")
    pixels = model.processor.image(picture)
    assert pixels.shape == (1, 3, 8, 8)
    theirs_too = torch.as_tensor(maker(picture, return_tensors="pt")["pixel_values"])
    torch.testing.assert_close(
        pixels, theirs_too, atol=0.02, rtol=0
    )  # theirs may resize on tensors, within a grey level
    saved = model.save(tmp_path / "saved")
    assert load(saved).processor.labels == ("cat", "dog", "숲")
    assert load(saved).processor.image == model.processor.image
    assert hf.AutoConfig.from_pretrained(saved).id2label == {0: "cat", 1: "dog", 2: "숲"}


def test_labels_must_name_the_classes(folder: Folder, tmp_path: Path) -> None:
    directory = copy(folder("bert-classes"), tmp_path / "bert")
    edit_json(directory / "config.json", id2label={"0": "a", "1": "b", "7": "c"})
    with pytest.raises(BadModelFile, match="does not name 3 classes"):
        load(directory)


def test_describe_reads_no_numbers_and_says_the_same(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    open_file = safetensors.safe_open

    class HeadersOnly:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            self.file = open_file(*arguments, **named)

        def __enter__(self) -> HeadersOnly:
            return self

        def __exit__(self, *error: object) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            assert name != "get_tensor", "a tensor was read"
            return getattr(self.file, name)

    model = load(folder("t5"))
    monkeypatch.setattr(safetensors, "safe_open", HeadersOnly)
    with pytest.raises(AssertionError, match="a tensor was read"):
        load(folder("t5"))
    said = describe(folder("t5"))
    assert said.config == model.config
    assert said.n_parameters == model.n_parameters == theirs("t5").num_parameters()
    assert said.dtypes == ("float32",)
    assert set(said.files) == set(os.listdir(folder("t5")))
    assert said.to_dict()["verified"] is False


@pytest.mark.parametrize("pooler", [True, False])
def test_whether_an_encoder_has_a_pooler_is_read_off_its_tensors(tmp_path: Path, pooler: bool) -> None:
    """No field of a foreign config.json says it."""
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    encoder = hf.BertModel(hf.BertConfig(vocab_size=20, **sizes), add_pooling_layer=pooler)
    encoder.save_pretrained(tmp_path)
    assert "has_pooler" not in json.loads((tmp_path / "config.json").read_text())
    model = load(tmp_path)
    assert model.config.pooler == ("tanh" if pooler else "none")
    assert any("pooler" in name for name in model.state_dict()) == pooler
