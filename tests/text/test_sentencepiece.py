"""SentencePiece models read without the package: the same ids, and a whole run with one."""

from __future__ import annotations

import io
import json
import random
import sys
import unicodedata
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import cli
from regard.data.corpora import open_corpus
from regard.errors import BadData, UsageError
from regard.text.sentencepiece_model import SentencePieceModel, load_tokenizer
from regard.training.run_directory import RunDirectory

sentencepiece = pytest.importorskip("sentencepiece")

PAIRS: list[Any] = [open_corpus("en-ko").example("train", index) for index in range(300)]
LINES = [text for pair in PAIRS for text in (pair.source, pair.target)]
LINES += ["주의력만 있으면 됩니다. ①②③ ｶﾅ ﬁne café naïve 東京タワー 🙂👩‍👩‍👧 <html> a  b"] * 3
LETTERS = "abcde  ▁.,!? 가나다고양이 éß①ﬁ\u3000\t🙂👩\u200d👧\u200b…東京<0x41></s><s>[]\ufeff\x01\r\n"
TEXTS = [
    *("", "  ", " a", "a ", "  a  b  ", "▁", "▁a", "a▁", "\n", "</s>", "<s> x", "<0x41>", "<unk>", "👩‍👩‍👧 가족"),
    *("[X]", "[X] a", "a [X]b", "x[X][Y]", unicodedata.normalize("NFD", "고양이가 앉았다 café"), "ｶﾅ ①②"),
]
MODELS: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram"},
    "bpe": {"model_type": "bpe"},
    "unigram-bytes": {"model_type": "unigram", "byte_fallback": True, "character_coverage": 0.98},
    "bpe-as-llama": {
        **{"model_type": "bpe", "byte_fallback": True, "character_coverage": 0.98},
        **{"normalization_rule_name": "identity", "remove_extra_whitespaces": False},
    },
    "unigram-symbols": {
        **{"model_type": "unigram", "user_defined_symbols": ["[X]", "[Y]"]},
        **{"add_dummy_prefix": False, "pad_id": 3},
    },
    "bpe-as-t5": {
        **{"model_type": "bpe", "user_defined_symbols": ["[X]", "[Y]"]},
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    },
    "folded": {"model_type": "bpe", "normalization_rule_name": "nmt_nfkc_cf", "split_by_whitespace": False},
}


def trained(size: int = 600, **options: Any) -> bytes:
    made = io.BytesIO()
    lines = iter(LINES)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=made, vocab_size=size, minloglevel=2, hard_vocab_limit=False, **options
    )
    return made.getvalue()


def random_texts(n: int) -> list[str]:
    chance, texts = random.Random(1), list(TEXTS)
    for _ in range(n):
        line = chance.choice(LINES)
        place = chance.randrange(len(line) + 1)
        texts += [line, line[:place] + chance.choice(LETTERS) + line[place:]]
        texts.append("".join(chance.choices(LETTERS, k=chance.randint(1, 40))))
    return texts


@pytest.mark.parametrize("name", MODELS)
def test_the_ids_are_sentencepieces(name: str) -> None:
    content = trained(**MODELS[name])
    theirs = sentencepiece.SentencePieceProcessor()
    theirs.LoadFromSerializedProto(content)
    ours = SentencePieceModel.parse(content, name).tokenizer()
    for text in random_texts(200):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, repr(text)
        if theirs.unk_id() not in ids:
            assert ours.decode(ids) == theirs.decode(ids), repr(text)
    assert [ours.token(index) for index in range(len(theirs))] == [theirs.id_to_piece(n) for n in range(len(theirs))]
    given = {"unk": theirs.unk_id(), "bos": theirs.bos_id(), "eos": theirs.eos_id(), "pad": theirs.pad_id()}
    known = {key: index for key, index in given.items() if index >= 0}
    assert known.items() <= ours.special_ids.items()
    added = sorted(index for key, index in ours.special_ids.items() if key not in known)
    assert added == list(range(len(theirs), ours.size))  # what the file lacks comes after its own


def test_what_is_no_model_of_a_known_kind_is_refused(tmp_path: Path) -> None:
    content, file = trained(size=500, model_type="char"), tmp_path / "x.model"
    for raw, said in (
        (content, r"x\.model is a char model; only unigram and bpe models are supported"),
        (b"", "is not a SentencePiece model"),
        (content[: len(content) // 2], "is not a SentencePiece model"),
        (b"\xff" * 50, "is not a SentencePiece model"),
        (b"{}", "is not a SentencePiece model"),
    ):
        file.write_bytes(raw)
        with pytest.raises(BadData, match=said):
            load_tokenizer(file)
    with pytest.raises(UsageError, match=r"there is no file .*nothing\.model"):
        load_tokenizer(tmp_path / "nothing.model")
    with pytest.raises(ValueError, match=r"is not one of chars, .*, nor a tokenizer.json or a SentencePiece \.model"):
        load_tokenizer(tmp_path / "x.vocab")


def test_a_run_with_one_from_start_to_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, pairs = tmp_path / "joint.model", tmp_path / "pairs.tsv"
    model.write_bytes(trained(model_type="unigram"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)  # it is not needed
    monkeypatch.chdir(tmp_path)
    pairs.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS[:60]), encoding="utf-8")
    words = ["data.max_len=64", "model.max_len=64", "model.d_model=16", "model.n_heads=2", "model.n_layers=1"]
    words += ["train.steps=2", "train.warmup=1", "train.samples=0", "train.eval_examples=2", "train.device=cpu"]
    command = ["train", "translate", "data=pairs.tsv", "data.tokenizer=joint.model", *words, "train.out=run"]
    assert cli.main([*command, "model.d_ff=16", "train.batch_tokens=256", "--quiet"]) == 0, capsys.readouterr().err
    expected = load_tokenizer(model, "eos")
    run = RunDirectory.open("run")
    assert run.config.model.vocab_size == expected.size
    assert run.config.data.tokenizer == str(model)  # found from any folder
    shipped = regard.load("run").save("shipped")
    for opened in (run.processor, regard.load("run").processor, regard.load(shipped).processor):
        for text in ("[polite] The cat sat.</s>", "고양이가 <s>"):
            ids = opened.source.encode(text)
            assert ids == expected.encode(text)
            assert ids.index(expected.eos_id) == len(ids) - 1  # what is typed is text
        assert {"pad", "bos", "eos", "unk"} <= opened.source.special_ids.keys()
    assert json.loads((shipped / "tokenizer_config.json").read_text())["split_special_tokens"] is True
    assert len(regard.translate("run", ["The cat sat.", "a"], max_new_tokens=4)) == 2
    assert cli.main(["eval", "run", "--limit", "2", "--json"]) == 0
    assert cli.main(["train", "--resume", "run", "train.steps=3", "--quiet"]) == 0, capsys.readouterr().err
    assert cli.main(["data", "describe", "pairs.tsv", "data.tokenizer=joint.model"]) == 0, capsys.readouterr().err
