"""Directories without a tokenizer.json: WordPiece, byte-level BPE and T5's SentencePiece as transformers reads them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import transformers as hf
from tokenizers import ByteLevelBPETokenizer

import regard
from regard.errors import BadModelFile

TEXTS = ["The cat sat, café!", "  two  spaces ", "東京 unaffable", "a [MASK] b <mask> c </s>", "🙂 x\ny", ""]
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
LINES = ["the cat sat on the mat and the dog sat too", "two cats and a dog sat by the mat: x y z café"] * 4


def word_piece(folder: Path) -> None:
    pieces = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        "the",
        "cat",
        "sat",
        "un",
        "##aff",
        "##able",
        ",",
        "!",
        "a",
        "b",
    ]
    (folder / "vocab.txt").write_text("\n".join([*pieces, "cafe", "café", "The", "東", "京", "x", "c"]) + "\n", "utf-8")


def byte_level(folder: Path) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(LINES, vocab_size=300, special_tokens=special, show_progress=False)
    learned.save_model(str(folder))


def byte_level_alone(folder: Path) -> None:
    learned = ByteLevelBPETokenizer()
    learned.train_from_iterator(LINES, vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False)
    learned.save_model(str(folder))


def sentence_piece(folder: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    made = io.BytesIO()
    options = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "vocab_size": 60, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=made, minloglevel=2, model_type="unigram", **options
    )
    (folder / "spiece.model").write_bytes(made.getvalue())


Case = tuple[Any, Any, Any, dict[str, Any]]
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 200}
OPT = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 16}
OPT |= {"word_embed_proj_dim": 16}
CASES: dict[str, Case] = {
    "bert": (word_piece, hf.BertTokenizer, hf.BertModel(hf.BertConfig(**SIZES, vocab_size=22)), {}),
    "bert cased": (
        word_piece,
        hf.BertTokenizer,
        hf.BertModel(hf.BertConfig(**SIZES, vocab_size=22)),
        {"do_lower_case": False, "tokenizer_class": "BertTokenizerFast"},
    ),
    "gpt2": (byte_level_alone, hf.GPT2Tokenizer, hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2)), {}),
    "opt": (
        byte_level,
        hf.GPT2Tokenizer,
        hf.OPTForCausalLM(hf.OPTConfig(**OPT)),
        {**dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>"), "pad_token": "<pad>", "add_bos_token": True}
        | {"tokenizer_class": "GPT2Tokenizer"},
    ),
    "gpt2, both ends": (
        byte_level_alone,
        hf.GPT2Tokenizer,
        hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=16, n_layer=1, n_head=2)),
        {"add_bos_token": True, "add_eos_token": True},
    ),
    "roberta": (byte_level, hf.RobertaTokenizer, hf.RobertaModel(hf.RobertaConfig(**SIZES, vocab_size=300)), {}),
    "t5": (sentence_piece, hf.T5Tokenizer, hf.T5ForConditionalGeneration(hf.T5Config(**T5)), {}),
}


def directory(name: str, folder: Path) -> Path:
    write, _, model, settings = CASES[name]
    model.save_pretrained(folder)
    write(folder)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    return folder


@pytest.mark.parametrize("name", CASES)
def test_ids_are_theirs_and_nothing_is_lost(name: str, tmp_path: Path) -> None:
    folder = directory(name, tmp_path / "old")
    files = {
        file.name: file.read_bytes() for file in folder.iterdir() if file.name.startswith(("vocab", "merges", "spiece"))
    }
    theirs, model = CASES[name][1].from_pretrained(folder), regard.load(folder)
    saved = model.save(tmp_path / "new")
    for tokenizer in (model.processor.source, regard.load(saved).processor.source):
        for text in TEXTS:
            if name == "roberta":  # from such files, transformers 5 leaves the space before <mask> a token of its own
                text = text.replace(" <mask>", "<mask>")
            assert tokenizer.encode(text) == theirs(text)["input_ids"], text
    assert {name: (saved / name).read_bytes() for name in files} == files
    assert (saved / "tokenizer.json").is_file()


@pytest.mark.parametrize("source", ["added_tokens.json", "added_tokens_decoder"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_added_tokens_are_theirs(name: str, source: str, tmp_path: Path) -> None:
    """Two that have an id, and a special one that has none."""
    folder = directory(name, tmp_path / name)
    size = len(CASES[name][1].from_pretrained(folder))
    settings: dict[str, Any] = {"additional_special_tokens": ["<|end|>"], "pad_token": "<|pad|>"}
    settings |= {"pad_token": "[PAD]"} if name == "bert" else {}
    if source == "added_tokens.json":
        (folder / source).write_text(json.dumps({"<new>": size, "<|end|>": size + 1}), "utf-8")
    else:
        new = {"content": "<new>", "lstrip": True, "normalized": False, "rstrip": False, "special": False}
        settings[source] = {str(size): new, str(size + 1): {**new, "content": "<|end|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    theirs, ours = CASES[name][1].from_pretrained(folder), regard.load(folder).processor.source
    for text in ("the <new> cat<new>sat <|end|>", "a<|pad|> b<|end|>\nc"):
        ids = theirs(text)["input_ids"]
        assert size + 1 in ids
        assert ours.encode(text) == ids, text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_an_added_token_with_the_id_of_another_is_refused(tmp_path: Path) -> None:
    folder = directory("bert", tmp_path / "bert")
    (folder / "added_tokens.json").write_text('{"<new>": 30}', "utf-8")
    with pytest.raises(BadModelFile, match="'<new>' has the id 30 there, but 22 in the vocabulary"):
        regard.load(folder)


def test_vocabularies_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = directory("bert", tmp_path / "bert")
    (folder / "vocab.txt").write_text("the\ncat\n", "utf-8")
    with pytest.raises(BadModelFile, match=r"vocab\.txt has no token '\[PAD\]'"):
        regard.load(folder)
    folder = directory("gpt2", tmp_path / "gpt2")
    (folder / "merges.txt").write_text("#version: 0.2\nzz qq\n", "utf-8")
    with pytest.raises(BadModelFile, match=r"merges\.txt does not fit vocab\.json"):
        regard.load(folder)


def test_classes_that_cut_otherwise_are_left_alone(tmp_path: Path) -> None:
    folder = directory("gpt2", tmp_path / "gpt2")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}', "utf-8")
    assert regard.load(folder).processor is None
