"""What a source is said to hold is what it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from regard.data.describe import LengthSummary, describe
from regard.data.sources import open_source
from regard.text.tokenizer_training import train_tokenizer

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    train = "a\tx\na\tx\na\ty\nbb\tyyyy\nccc\tz\nlonger than\tthe others are\n"
    (tmp_path / "train.tsv").write_text(f"source\ttarget\n{train}one column\n")
    (tmp_path / "valid.tsv").write_text("source\ttarget\na\tx\nbb\tnew\nnew\tz\n")
    return tmp_path


def test_counts_repeats_leaks_and_losses(pairs: Path) -> None:
    source = open_source(pairs, bad_lines="skip", kind="pairs")
    texts = [text for x in source.train for text in (x.source, x.target)]  # type: ignore[union-attr]
    tokenizer = train_tokenizer([text for text in texts if "z" not in text], "chars", template="eos")
    found = describe(source, tokenizer, max_len=5)
    assert (found.n_train, found.n_valid, found.looked_at) == (6, 3, 6)
    assert (found.duplicates, found.repeated_sources) == (1, 2)
    assert (found.leaked_sources, found.leaked_examples) == (2, 1)
    assert found.characters["source"].percentiles == {"min": 1, "p50": 1, "p90": 3, "p99": 3, "max": 11}
    assert found.characters["target"].total == 1 + 1 + 1 + 4 + 1 + 14
    assert found.tokens["source"].percentiles["max"] == 12
    assert found.losses is not None
    assert (found.losses.n_longer, found.losses.tokens_lost, found.losses.n_unknown) == (1, 10, 1)
    assert found.bad_lines["bad"] == 1
    assert found.bad_lines["first"][0]["line"] == 8
    assert found.examples[0] == ["a", "x"]


def test_as_a_document_and_as_a_table(pairs: Path) -> None:
    source = open_source(pairs, bad_lines="skip", kind="pairs")
    found = describe(source, train_tokenizer(["a"], "bytes"), max_len=3)
    document = json.loads(json.dumps(found.to_dict(), ensure_ascii=False))
    assert document["split"]["valid_sha256"] == source.split.valid_sha256
    assert document["tokens"]["source"]["percentiles"]["max"] == 11
    table = found.to_text()
    for part in (
        "train 6, valid 3; held out: files of their own",
        "training examples that repeat an earlier one: 1, or at least its source side: 2",
        "held-out examples that are also in train: 1, their source sides: 2",
        "2 examples longer than max_len=3: left out",
        "1 of 10 lines were bad and left out",
        "train.tsv:8: wrong column count: 1 instead of 2",
        "a → x",
    ):
        assert part in table


def test_a_question_counts_its_longest_passage(tmp_path: Path) -> None:
    passages = [["ab", "abcdefgh"], ["abc"], ["a", "ab", "abcdefg"]]
    rows = [{"question": f"q{n}", "answer": "yes", "passages": texts} for n, texts in enumerate(passages)]
    (tmp_path / "qa.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(tmp_path / "qa.jsonl", kind="questions", valid_fraction=0)
    found = describe(source, train_tokenizer(["a"], "bytes"), max_len=5)
    assert found.tokens["passage"].total == 2 + 8 + 3 + 1 + 2 + 7
    assert found.losses is not None
    assert (found.losses.n_longer, found.losses.tokens_lost) == (2, 3 + 2)


def test_a_tokenizer_without_an_unknown_token_has_no_unknown_tokens(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text("".join(f"go {n}\tgeh {n}\n" for n in range(4)))
    tokenizer = train_tokenizer(["a"], "bytes")
    tokenizer.special_ids.pop("unk")  # as in the files of GPT-2
    found = describe(open_source(tmp_path / "p.tsv", valid_fraction=0, kind="pairs"), tokenizer, max_len=5)
    assert found.losses is not None
    assert found.losses.n_unknown == 0


def test_a_chat_that_is_too_long_is_left_out_as_in_training(tmp_path: Path) -> None:
    rows = [{"prompt": "what", "completion": answer} for answer in ("a", "a long answer")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = open_source(tmp_path / "chats.jsonl", valid_fraction=0)
    found = describe(source, train_tokenizer(["a"], "bytes"), max_len=5)
    assert found.examples == [["what", "a"], ["what", "a long answer"]]
    assert "1 example longer than max_len=5: left out" in found.to_text()
    cut = describe(source, train_tokenizer(["a"], "bytes"), max_len=5, too_long="truncate")
    assert "cut short; tokens lost: 8" in cut.to_text()


def test_a_source_held_out_by_hash_never_leaks(tmp_path: Path) -> None:
    (tmp_path / "p.tsv").write_text("".join(f"question {n % 60}\tanswer {n % 90}\n" for n in range(900)))
    found = describe(open_source(tmp_path / "p.tsv", valid_fraction=0.3))
    assert found.n_valid > 0
    assert (found.leaked_sources, found.leaked_examples) == (0, 0)
    assert found.repeated_sources > 500


def test_labels_and_images_are_counted(tmp_path: Path) -> None:
    (tmp_path / "l.tsv").write_text("text\tlabel\none\tb\ntwo\ta\nthree\tb\n")
    found = describe(open_source(tmp_path / "l.tsv", valid_fraction=0.0))
    assert found.labels == {"a": 1, "b": 2}
    assert found.examples[0] == ["one", "b"]
    for n, size in enumerate([(4, 4), (4, 4), (6, 4)]):
        (tmp_path / "cat").mkdir(exist_ok=True)
        Image.new("L", size, n).save(tmp_path / "cat" / f"{n}.png")
    (tmp_path / "l.tsv").unlink()
    images = describe(open_source(tmp_path, valid_fraction=0.0))
    assert images.images == {"4 × 4": 2, "6 × 4": 1}
    assert images.labels == {"cat": 3}
    assert "6 × 4  1" in images.to_text()


def test_lengths_of_nothing() -> None:
    assert LengthSummary.from_sizes([]).percentiles == {}


def test_real_pairs() -> None:
    if not (REAL / "multi30k").is_dir():
        pytest.skip("multi30k is not in shared/data beside the checkout")
    found = describe(open_source(REAL / "multi30k", columns=("en", "de")))
    assert (found.n_train, found.duplicates, found.repeated_sources, found.leaked_sources) == (29_000, 3, 9, 1)
    assert found.bad_lines["read"] == 30_014
