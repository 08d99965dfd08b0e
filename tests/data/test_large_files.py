"""Files larger than memory: examples and tokens stay on disk, and nothing about them changes."""

from __future__ import annotations

import subprocess
import sys
from itertools import accumulate
from pathlib import Path
from random import Random

import numpy as np
import pytest

from regard.config import DataConfig
from regard.data import example_files
from regard.data.example_files import ExampleWriter, document_parts
from regard.data.examples import Labelled, Pair, Text
from regard.data.sources import open_source
from regard.data.splits import first_occurrences, held_out_mask, held_out_note, sha256_of
from regard.text import tokenizer as tokenizer_module
from regard.text.tokenizer_training import TOKENIZER_KINDS, train_tokenizer

ODD = " \n\t\r\u00a0\u3000ab1.,가나é\u0301\x1c\u200b\u2028'st\x85😀"  # letters that pre-tokenizers treat differently

# In a process of its own: the most memory that opening, tokenising and the first batch take, beside the libraries.
MEASURE = """
import resource, sys
from pathlib import Path
from regard.recipes import run_config
from regard.training.run_inputs import open_run_source, resolve_run
from regard.training.tasks import open_task

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

task, source, tokenizer, folder = sys.argv[1:]
words = [f"data.source={source}", f"data.tokenizer={tokenizer}", "train.device=cpu"]
config, before = run_config(task, words), peak_mib()
inputs = resolve_run(config)
opened = open_task(config, open_run_source(inputs), None, inputs.task_class)
opened.tokens_folder = Path(folder)
opened.batch(0)
print(peak_mib() - before)
"""


def sentences(n: int) -> list[str]:
    random = Random(0)
    words = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=random.randint(2, 9))) for _ in range(3000)]
    weights = list(accumulate(1 / (index + 1) for index in range(len(words))))
    return [" ".join(random.choices(words, cum_weights=weights, k=random.randint(3, 9))) for _ in range(n)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(("task", "most_mib"), [("lm", 150), ("translate", 85)])
def test_memory_does_not_grow_with_the_file(task: str, most_mib: int, tmp_path: Path) -> None:
    """Python's strings and lists of ids took 644 MiB for these 4 MB of text and 137 for these 60,000 pairs, not 75 and
    58."""
    lines, tokenizer, source = sentences(10_000), tmp_path / "tokenizer.json", tmp_path / "large"
    train_tokenizer(lines[:1000], "bpe", 600, "eos").save(tokenizer)
    rows = [f"{line} {number}" for number in range(12) for line in lines]
    if task == "translate":
        rows = [f"{a} {number}\t{b}" for number, (a, b) in enumerate(zip(rows[::2], rows[1::2], strict=True))]
    source.write_text("\n".join(rows) + "\n", encoding="utf-8")
    words = [sys.executable, "-c", MEASURE, task, str(source), str(tokenizer), str(tmp_path / "tokens")]
    used = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300).stdout
    assert int(used) < most_mib


@pytest.mark.parametrize("kind", TOKENIZER_KINDS)
def test_a_text_in_pieces_has_the_tokens_of_the_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = " ".join(sentences(300)) + "".join(Random(1).choices(ODD, k=20_000)) + "\n".join(sentences(300))
    size = 300 if kind in ("bpe", "unigram") else None
    whole = train_tokenizer([text], kind, size)  # type: ignore[arg-type]  # one of them
    ids = whole.encode(text, special=False)
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", 100)
    pieces = list(tokenizer_module.cut_text(text))
    assert len(pieces) > 100
    assert "".join(pieces) == text
    assert train_tokenizer([text], kind, size).content == whole.content  # type: ignore[arg-type]
    parts = [(text[at : at + 777], at + 777 >= len(text)) for at in range(0, len(text), 777)]
    found = list(whole.encode_parts([*parts, ("", True), ("b", True)]))
    assert [x for piece, _ in found for x in piece] == ids + whole.encode("b", special=False)
    assert sum(is_last for _, is_last in found) == 3
    assert whole.encode_all([text, "a b"], special=False) == [ids, whole.encode("a b", special=False)]


def test_a_tokenizer_that_crosses_words_encodes_a_text_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    vocab = {"<pad>": 0, "<bos>": 1, "<eos>": 2, "<unk>": 3, "<mask>": 4, "a": 5, "b": 6, " ": 7, "a ": 8, "a b": 9}
    backend = Backend(models.BPE(vocab, [("a", " "), ("a ", "b")], unk_token="<unk>"))
    tokenizer = tokenizer_module.Tokenizer(backend.to_str().encode())
    monkeypatch.setattr(tokenizer_module, "_PIECE_CHARACTERS", 4)
    text = "b a b a b a b"
    assert 9 in tokenizer.encode(text)
    assert tokenizer.encode_all([text], special=False) == [tokenizer.encode(text, special=False)]


@pytest.mark.parametrize("in_memory", [True, False])
def test_an_example_file_gives_back_what_was_written(in_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_memory:
        monkeypatch.setattr(example_files, "_IN_MEMORY", 10)
    monkeypatch.setattr(example_files, "_ROWS", 3)
    monkeypatch.setattr(example_files, "_PART", 5)
    texts = ["", "가나다", "one", "é\ud800", "long " * 9, "x"]
    pairs, labelled, documents = ExampleWriter(2), ExampleWriter(), ExampleWriter()
    for number, text in enumerate(texts):
        pairs.add(text, text[::-1])
        labelled.add(text, label=number % 2)
        documents.write(text[:2])
        documents.write(text[2:])
        documents.end_text()
    expected = {
        pairs.finish(): [Pair(text, text[::-1]) for text in texts],
        labelled.finish([1, 0]): [Labelled(text, 1 - number % 2) for number, text in enumerate(texts)],
        documents.finish(): [Text(text) for text in texts],
    }
    for found, wanted in expected.items():
        assert list(found) == [found[index] for index in range(len(texts))] == found[:] == wanted
        assert found[-1] == wanted[-1]
        some = found.select(np.asarray([4, 0, 1]))
        assert list(some) == [wanted[4], wanted[0], wanted[1]]
        assert sha256_of(some) == sha256_of(list(some))
        assert found.n_bytes == sum(len(t.encode("utf-8", "surrogatepass")) for t in texts) * found.n_texts
        with pytest.raises(IndexError):
            found[len(texts)]
    joined, whole = "", []
    for part, is_last in document_parts(found):
        joined += part
        if is_last:
            whole, joined = [*whole, joined], ""
    assert whole == texts
    for cut in range(4):
        head, tail = found.split_document(1, cut)
        assert (head[0], tail[0]) == (Text("가나다"[:cut]), Text("가나다"[cut:]))


def test_repeats_are_found_without_a_set(tmp_path: Path) -> None:
    pairs = [Pair(f"source {n % 70}", f"target {n % 90}") for n in range(900)]
    for how, key in (("source", lambda x: x.source), ("exact", lambda x: x)):
        first: dict[object, int] = {}
        for index, pair in enumerate(pairs):
            first.setdefault(key(pair), index)
        assert first_occurrences(pairs, how).tolist() == list(first.values())


def large_file(folder: Path, task: str) -> Path:
    lines = [f"{line} {number}" for number, line in enumerate(sentences(400))]
    cells = {"pairs": "{}\t{}", "labelled": "{}\tclass-{}", "text": "{}"}[task]
    path = folder / f"{task}.{'txt' if task == 'text' else 'tsv'}"
    rows = [cells.format(line, n % 3 if task == "labelled" else line.upper()) for n, line in enumerate(lines)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("kind", ["pairs", "labelled", "text"])
def test_a_large_file_is_read_once(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, options = large_file(tmp_path, kind), {"deduplicated": "exact", "bad_lines": "skip"}
    path.write_text(path.read_text() + "\0\n")
    plain = open_source(path, **options)
    assert not (tmp_path / "cache").exists(), "a small one is not stored"
    monkeypatch.setattr(example_files, "LARGE", 1000)
    first = open_source(path, **options)
    with monkeypatch.context() as patch:
        patch.setattr("regard.data.sources._load_files", lambda *_: pytest.fail("it was read before"))
        second = open_source(path, **options)
        moved = path.rename(tmp_path / "elsewhere" / path.name) if (tmp_path / "elsewhere").mkdir() is None else path
        third = open_source(moved, **options)
    for found in (first, second, third):
        assert list(found.train) == list(plain.train)
        assert list(found.valid) == list(plain.valid)
        assert (found.split, found.sha256, found.labels) == (plain.split, plain.sha256, plain.labels)
        assert found.report.to_dict() == plain.report.to_dict()
        assert found.n_duplicates == plain.n_duplicates
    moved.write_text(moved.read_text().replace("class-1", "class-2").replace("a", "e"))
    assert open_source(moved, **options).sha256 != plain.sha256, "another content is another source"
    assert open_source(moved, **options, valid_rows=3).split.how != plain.split.how or kind == "text"
    for stored in (tmp_path / "cache").rglob("train.texts"):
        stored.write_bytes(b"")
    assert len(open_source(moved, **options).train), "a damaged one is read again"


def test_a_cached_pair_of_tables_is_not_a_table_and_its_held_out_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example_files, "LARGE", 1)
    for name in "ab":
        (tmp_path / f"{name}.tsv").write_text("".join(f"{name}{n}\t{n}\n" for n in range(50)))
    a, b = tmp_path / "a.tsv", tmp_path / "b.tsv"
    assert len(open_source([a, b], kind="pairs").valid) < 10
    held_out = open_source(a, valid=b, kind="pairs")
    assert (len(held_out.train), len(held_out.valid)) == (50, 50)


def test_at_most_five_thousand_are_held_out_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_text("".join(f"{n}\t{n}\n" for n in range(120_000)))
    source = open_source(path, kind="pairs")
    assert len(source.valid) == 5000
    assert source.split.how == "by hash of the source side, valid_fraction=0.05, split_seed=0, at most 5,000 examples"
    assert "5,000 examples; data.valid_rows=… sets another number" in str(held_out_note(source.split))
    everything = open_source(path, kind="pairs", valid_rows=None)  # what runs made before have in their config
    assert 5900 < len(everything.valid) < 6100
    assert held_out_note(everything.split) is None
    assert {x.source for x in source.valid} < {x.source for x in everything.valid}
    assert len(open_source(path, kind="pairs", valid_rows=7).valid) == 7
    small = [Pair(str(n), "") for n in range(1000)]
    assert held_out_mask(small, DataConfig()).tolist() == held_out_mask(small, DataConfig(valid_rows=None)).tolist()


def test_the_held_out_end_of_a_text_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.data.splits.MAX_HELD_OUT_CHARACTERS", 7)
    path = tmp_path / "text.txt"
    path.write_text("가나 " * 1000, encoding="utf-8")
    source = open_source(path)
    assert [x.text for x in source.valid] == [("가나 " * 1000)[-7:]]  # type: ignore[union-attr]
    assert source.split.how == "the last 0.05 of the text, at most 7 characters"
    assert len(open_source(path, valid_rows=None).valid[0].text) == 150  # type: ignore[union-attr]
