"""Sources from files: every form is read, every bad line is named, and the held-out part is what it claims to be."""

from __future__ import annotations

import datetime
import gzip
import json
import logging
import struct
import sys
import types
import unicodedata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from regard.config import DataConfig
from regard.data.describe import describe
from regard.data.examples import ImageExample, Labelled, Pair, ReadReport, Text, key_of
from regard.data.images import image_batch, open_upright, read_idx
from regard.data.record_files import open_records, row_encoder
from regard.data.sources import Source, open_source
from regard.data.splits import sha256_of
from regard.data.table_files import _BINARY, read_lines
from regard.errors import BadData, RegardError, UsageError
from regard.text.image_processor import ImageProcessor

REAL = Path(__file__).resolve().parents[3] / "shared" / "data"


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def everything(source: Source) -> list[Any]:
    return [*source.train, *source.valid]


def whole(*args: Any, **options: Any) -> list[Any]:
    """All examples, nothing held out."""
    return list(open_source(*args, valid_fraction=0.0, **options).train)


# -------------------------------------------------------------------------------- every form

PAIRS = [Pair("Go.", "가."), Pair("Hi.", "안녕."), Pair("Run!", "뛰어!")]
FORMS = {
    "p.tsv": "Go.\t가.\nHi.\t안녕.\nRun!\t뛰어!\n",
    "crlf.tsv": "Go.\t가.\r\nHi.\t안녕.\r\nRun!\t뛰어!\r\n",
    "no_last_newline.tsv": "Go.\t가.\nHi.\t안녕.\nRun!\t뛰어!",
    "bom.tsv": "\ufeffGo.\t가.\nHi.\t안녕.\nRun!\t뛰어!\n",
    "tabs.txt": "Go.\t가.\nHi.\t안녕.\nRun!\t뛰어!\n",
    "header.tsv": "source\ttarget\nGo.\t가.\nHi.\t안녕.\nRun!\t뛰어!\n",
    "p.csv": 'source,target\nGo.,가.\n"Hi.",안녕.\nRun!,"뛰어!"\n',
    "tabs.csv": 'source\ttarget\nGo.\t가.\nHi.\t안녕.\n"Run!"\t뛰어!\n',
    "semicolons.csv": "source;target\nGo.;가.\nHi.;안녕.\nRun!;뛰어!\n",
    "p.jsonl": "".join(json.dumps({"source": p.source, "target": p.target, "n": 1}) + "\n" for p in PAIRS),
    "t.jsonl": "".join(json.dumps({"translation": {"en": p.source, "ko": p.target}}) + "\n" for p in PAIRS),
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("packed", [False, True])
def test_pairs_in_every_form_are_the_same_pairs(tmp_path: Path, name: str, packed: bool) -> None:
    content = FORMS[name].encode()
    path = write(tmp_path / (f"{name}.gz" if packed else name), gzip.compress(content, mtime=0) if packed else content)
    assert whole(path) == PAIRS


def test_parallel_files_by_name_by_list_and_by_folder(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write(tmp_path / f"{part}.en", "Go.\nHi.\nRun!\n")
        write(tmp_path / f"{part}.ko", "가.\n안녕.\n뛰어!\n")
    sides = [tmp_path / "train.en", tmp_path / "train.ko"]
    assert whole(sides) == whole(f"{sides[0]},{sides[1]}") == PAIRS
    folder = open_source(tmp_path)
    assert list(folder.train) == PAIRS
    assert list(folder.valid) == PAIRS
    assert folder.split.how == "files of their own"
    assert folder.report.n_read == 6
    assert whole(tmp_path, columns=("ko", "en"))[0] == Pair("가.", "Go.")
    write(tmp_path / "train.fr", "Va.\nSalut.\nCours!\n")
    with pytest.raises(ValueError, match=r"files ending in en, fr, ko, columns=None; say which two"):
        open_source(tmp_path)


def test_files_of_different_lengths_are_not_parallel_even_when_told_to_skip(tmp_path: Path) -> None:
    sides = [write(tmp_path / "a.en", "a\nb\nc\n"), write(tmp_path / "a.ko", "가\n나\n")]
    with pytest.raises(BadData, match=r"has 3 lines and .*a\.ko has 2, so they are not parallel"):
        open_source(sides, bad_lines="skip")


@pytest.mark.parametrize(
    ("content", "options"),
    [
        ("good\tI liked it\nbad\tI did not\n" * 4, {}),
        ("I liked it\tgood\nI did not\tbad\n" * 4, {}),
        ("I liked it\tgood\nI did not\tbad\n", {"kind": "labelled"}),
        ("id\tdocument\tlabel\n1\tI liked it\tgood\n2\tI did not\tbad\n", {}),
        ("id\tx\ty\n1\tI liked it\tgood\n2\tI did not\tbad\n", {"columns": ("x", "y"), "kind": "labelled"}),
        ("1\tI liked it\tgood\n2\tI did not\tbad\n", {"columns": "1,2", "kind": "labelled"}),
    ],
)
def test_labels_first_last_or_by_name(tmp_path: Path, content: str, options: dict[str, Any]) -> None:
    source = open_source(write(tmp_path / "l.tsv", content), valid_fraction=0.0, **options)
    assert source.labels == ("bad", "good")
    assert source.train[:2] == [Labelled("I liked it", 1), Labelled("I did not", 0)]


def test_numeric_labels_sort_as_numbers_and_csv_cells_may_hold_line_ends(tmp_path: Path) -> None:
    rows = "".join(f'"text, {n}\nsecond line",{n}\n' for n in range(12))
    source = open_source(write(tmp_path / "l.csv", "text,label\n" + rows), valid_fraction=0.0)
    assert source.labels == tuple(map(str, range(12)))
    assert source.train[10] == Labelled("text, 10\nsecond line", 10)


def test_three_unnamed_columns_are_asked_about_and_named_ones_ignored(tmp_path: Path) -> None:
    path = write(tmp_path / "p.tsv", "Go.\t가.\tby CM\nHi.\t안녕.\n")
    with pytest.raises(ValueError, match="has 3 columns without names; say which to use: columns=0,1"):
        open_source(path)
    assert whole(path, columns=(0, 1)) == PAIRS[:2]
    with pytest.raises(ValueError, match=r"columns has 'x', but .* has the columns Go\., 가\., by CM"):
        open_source(path, columns=("x", "y"))


@pytest.mark.parametrize(
    ("documents", "texts"),
    [
        ("whole", ["a\n b \n\n \nc\n"]),
        ("line", ["a", " b ", "c"]),
        ("blank", ["a\n b \n", "c\n"]),
    ],
)
def test_a_text_file_in_three_ways_keeps_its_spaces(tmp_path: Path, documents: str, texts: list[str]) -> None:
    path = write(tmp_path / "t.txt", "a\r\n b \n\n \nc\n")
    assert whole(path, documents=documents) == [Text(text) for text in texts]


def test_one_document_is_cut_near_its_end_and_a_folder_of_documents_by_hash(tmp_path: Path) -> None:
    one = open_source(write(tmp_path / "one.txt", "0123456789" * 10), valid_fraction=0.1)
    assert [x.text for x in everything(one)] == ["0123456789" * 9, "0123456789"]  # type: ignore[union-attr]
    for n in range(30):
        write(tmp_path / "many" / f"{n}.txt", f"document {n}")
    many = open_source(tmp_path / "many", valid_rows=7)
    assert (len(many.train), len(many.valid)) == (23, 7)


# -------------------------------------------------------------------------------- Parquet


def parquet(path: Path, columns: dict[str, list[Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pytest.importorskip("pyarrow.parquet").write_table(pytest.importorskip("pyarrow").table(columns), path, **options)
    return path


def test_parquet_is_read_as_other_tables_are(tmp_path: Path) -> None:
    """Pairs by known names, by the columns that are asked for, nested, in several files, in folders, and in tables."""
    ours = {"n": [1, 2, 3], "source": [p.source for p in PAIRS], "target": [p.target for p in PAIRS]}
    path = parquet(tmp_path / "p.parquet", ours, row_group_size=2)
    assert whole(path) == whole(path, columns=("source", "target")) == whole(path, columns=(1, 2)) == PAIRS
    assert whole(parquet(tmp_path / "n.parquet", {"translation": [{"en": p[1], "ko": p[2]} for p in rows()]})) == PAIRS
    numbered = parquet(tmp_path / "n.parquet", {"n": [7], "translation": [{"en": "a", "ko": "b"}]})
    assert whole(numbered) == whole(numbered, columns=(0, 1)) == [Pair("a", "b")]
    assert whole(numbered, columns=("n", "translation.ko")) == [Pair("7", "b")]
    more = write(tmp_path / "more.csv", "source,target\nNo.,아니.\n")
    assert whole([path, more]) == [*PAIRS, Pair("No.", "아니.")]
    parts = [parquet(tmp_path / f"both/{part}.parquet", ours) for part in ("train", "valid")]
    assert [list(open_source(tmp_path / "both").valid), list(open_source(path, valid=parts[1]).valid)] == [PAIRS] * 2
    for column in ("ko", "ko.more", 3):
        with pytest.raises(ValueError, match=rf"columns has '?{column}'?, but .* has the columns n, source, target"):
            open_source(path, columns=("source", column))
    with pytest.raises(ValueError, match="has the columns n, en, ko; say which are to be used: columns=en,ko"):
        open_source(parquet(tmp_path / "odd.parquet", dict(zip(("n", "en", "ko"), ours.values(), strict=True))))


def rows() -> list[tuple[int, str, str]]:
    return [(number, pair.source, pair.target) for number, pair in enumerate(PAIRS)]


def test_labels_documents_and_captions_from_parquet(tmp_path: Path) -> None:
    """Numbers and dates are text, a list may hold captions, and only the columns that are used are read."""
    labelled = {"text": ["good film", "bad film"] * 4, "label": [1, 0] * 4, "score": [0.5] * 8}
    source = open_source(parquet(tmp_path / "l.parquet", labelled), valid_fraction=0.0)
    assert (source.labels, source.train[0]) == (("0", "1"), Labelled("good film", 1))
    scored = open_source(
        tmp_path / "l.parquet", columns=("text", "score"), problem_type="regression", valid_fraction=0.0
    )
    assert scored.train[0] == Labelled("good film", 0.5)
    days = [datetime.date(2024, 1, n) for n in (1, 2)]
    assert whole(parquet(tmp_path / "t.parquet", {"text": ["a", "b"]})) == [Text("a"), Text("b")]
    assert whole(parquet(tmp_path / "d.parquet", {"source": days, "target": ["x", "y"]}))[0] == Pair("2024-01-01", "x")
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    captions = {"image": ["a.png", "b.png"], "captions": [["one", "two"], ["three"]], "pixels": [b"x" * 99] * 2}
    assert [x.captions for x in whole(parquet(tmp_path / "c.parquet", captions))] == [("one", "two"), ("three",)]
    described = describe(source).to_dict()
    assert (described["kind"], described["labels"], described["bad_lines"]["read"]) == ("labelled", {"0": 4, "1": 4}, 8)


def test_bad_rows_of_parquet_are_named_and_a_damaged_file_is(tmp_path: Path) -> None:
    pairs = {"source": ["a", None, "  ", "d" * 200, "e\u0301"], "target": ["x", "y", "z", "w", "v"]}
    path = parquet(tmp_path / "p.parquet", pairs)
    with pytest.raises(BadData) as caught:
        open_source(path, max_chars=100)
    reasons = {2: "missing field: 'source'", 3: "empty: column 1 of 2", 4: "text too long: column 1 of 2"}
    assert {line.line: line.reason for line in caught.value.lines} == reasons
    assert whole(path, max_chars=100, bad_lines="skip") == [Pair("a", "x"), Pair("é", "v")]
    with pytest.raises(BadData, match="not a text: 'text' is bytes"):
        open_source(parquet(tmp_path / "b.parquet", {"text": [b"\xff\xfe"]}))
    damaged = write(tmp_path / "damaged.parquet", path.read_bytes()[:-20])
    with pytest.raises(BadData, match="cannot be read as Parquet"):
        open_source(damaged)
    with pytest.raises(BadData, match=r"is a Parquet table, which must be named \.parquet, not a text file"):
        open_source(write(tmp_path / "p.tsv", path.read_bytes()))


def test_training_on_parquet_without_its_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(
        RegardError, match=r'Parquet needs pyarrow, which is not installed: pip install "regard\[data\]"'
    ):
        open_source(write(tmp_path / "x.parquet", b"PAR1"))


# -------------------------------------------------------------------------------- bad lines

BAD = (
    b"Go.\t\xea\xb0\x80.\n"
    b"one column\n"
    b"a\tb\tc\n"
    b"\xff\xfe broken\tx\n"
    b"\tno source\n"
    b"no target\t  \n" + b"x" * 1_000_000 + b"\ty\n" + b"\n"
    b"nul\0\tx\n"
    b"Hi.\t\xec\x95\x88\xeb\x85\x95.\n"
)
REASONS = {
    2: "wrong column count: 1 instead of 2",
    3: "wrong column count: 3 instead of 2",
    4: "invalid UTF-8: byte 0xff at 0",
    5: "empty: column 1 of 2",
    6: "empty: column 2 of 2",
    7: "line too long: 1,000,003 bytes, more than max_chars=100000",
    9: "a NUL character: the file may not be text",
}


def test_every_bad_line_is_named_with_its_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "p.tsv", BAD)
    with pytest.raises(BadData) as caught:
        open_source(path, kind="pairs")
    assert {line.line: line.reason for line in caught.value.lines} == REASONS
    assert caught.value.n_bad == len(REASONS)
    for number, reason in REASONS.items():
        assert f"{path}:{number}: {reason}" in str(caught.value)


def test_bad_lines_are_left_out_when_told_to_and_counted_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "p.tsv", BAD)
    with caplog.at_level(logging.WARNING):
        source = open_source(path, kind="pairs", bad_lines="skip", valid_fraction=0.0)
    assert list(source.train) == PAIRS[:2]
    assert (source.report.n_read, source.report.n_bad) == (9, 7)  # a blank line is none
    assert source.report.reasons["wrong column count"] == 2
    assert "7 bad lines of 9; left out" in caplog.text


def test_the_first_twenty_are_listed_and_all_are_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "p.tsv", "a\tb\n" + "x\n" * 50)
    with pytest.raises(BadData, match="50 bad lines of 51") as caught:
        open_source(path)
    assert len(caught.value.lines) == 20
    assert str(caught.value).endswith("… and 30 more")


@pytest.mark.parametrize("n", [99_999, 100_000, 100_001, 400_004, 400_007, 400_008, 400_009, 3_000_000])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_a_line_is_too_long_from_one_character_more_on_and_the_next_is_whole(
    tmp_path: Path, n: int, bom: bytes
) -> None:
    path = write(tmp_path / "t.txt", bom + b"x" * n + b"\nnext\n")
    report = ReadReport()
    lines = list(read_lines(path, report, DataConfig()))
    assert lines == [(1, "x" * n if n <= 100_000 else None), (2, "next")]
    assert report.n_bad == (n > 100_000)


@given(raw=st.lists(st.binary(max_size=12).filter(lambda x: b"\n" not in x), max_size=8))
def test_any_bytes_give_as_many_lines_as_there_are(tmp_path_factory: pytest.TempPathFactory, raw: list[bytes]) -> None:
    path = write(tmp_path_factory.getbasetemp() / "any.txt", b"".join(line + b"\n" for line in raw))
    report = ReadReport()
    if raw and raw[0].startswith((b"\xff\xfe", b"\xfe\xff", *_BINARY)):
        return  # UTF-16, whose lines end elsewhere, or no text at all
    lines = list(read_lines(path, report, DataConfig()))
    assert [number for number, _ in lines] == list(range(1, len(raw) + 1))
    assert sum(line is None for _, line in lines) == report.n_bad


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "missing field: 'source'"),
        ('{"source": "a"}', "missing field: 'target'"),
        ('{"source": "a", "target": {"x": 1}}', "not a text: 'target' is dict"),
        ('{"source": "a", "target": "\\ud800"}', "half of a surrogate pair: column 2 of 2"),
        ('{"source": "a", "target": " "}', "empty: column 2 of 2"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_bad_json_lines(tmp_path: Path, line: str, reason: str) -> None:
    path = write(tmp_path / "p.jsonl", '{"source": "a", "target": "b"}\n' + line + "\n")
    with pytest.raises(BadData) as caught:
        open_source(path)
    assert caught.value.lines[0].line == 2
    assert caught.value.lines[0].reason.startswith(reason)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("p.tsv", "\n{}\t{}\n\n{}\t{}\n\n"),
        ("p.csv", "\nsource,target\n\n{},{}\n  \n{},{}\n\n"),
        ("p.jsonl", '\n{{"source": "{}", "target": "{}"}}\n\n{{"source": "{}", "target": "{}"}}\n\n'),
    ],
)
def test_blank_lines_between_the_rows_of_a_table_are_no_rows(tmp_path: Path, name: str, text: str) -> None:
    path = write(tmp_path / name, text.format(*(side for pair in PAIRS[:2] for side in (pair.source, pair.target))))
    source = open_source(path, valid_fraction=0.0)
    assert (list(source.train), source.report.n_read, source.report.n_bad) == (PAIRS[:2], 2, 0)


def test_held_out_examples_that_are_all_trained_on_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [f"{pair.source}\t{pair.target}\n" for pair in PAIRS]
    path, copy = write(tmp_path / "p.tsv", "".join(rows)), write(tmp_path / "copy.tsv", "".join(rows))
    open_source(path, valid=str(copy))
    assert "p.tsv: the held-out examples are the training examples themselves" in caplog.text
    caplog.clear()
    open_source(path, valid=str(write(tmp_path / "one.tsv", rows[0])))
    assert not caplog.text


def test_a_column_name_that_occurs_twice_is_not_chosen_by_name(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.csv", "text,text,label\nno,a,x\nno,b,y\nno,c,x\n")
    with pytest.raises(ValueError, match=r"twice.csv has several columns 'text'; choose by number: columns=0,2"):
        open_source(path)
    source = open_source(path, columns=(1, 2), header=True, kind="labelled", valid_fraction=0.0)
    assert list(source.train) == [Labelled("a", 0), Labelled("b", 1), Labelled("c", 0)]


def test_objects_of_two_fields_with_other_names_are_guessed_as_tables_are(tmp_path: Path) -> None:
    for name in ("p.jsonl", "p.json"):
        objects = [json.dumps({"en": pair.source, "ko": pair.target}) for pair in PAIRS]
        path = write(tmp_path / name, "\n".join(objects) if name == "p.jsonl" else f"[{','.join(objects)}]")
        assert list(open_source(path, valid_fraction=0.0).train) == PAIRS
    stars = [json.dumps({"stars": n % 2, "review": f"a film of {n} minutes"}) for n in range(8)]
    path = write(tmp_path / "stars.jsonl", "\n".join(stars))
    assert open_source(path, kind="labelled", valid_fraction=0.0).train[1] == Labelled("a film of 1 minutes", 1)
    path = write(tmp_path / "pairs.json", '[{"source": "a", "target": "b", "caption": "c"}]')
    assert list(open_source(path, kind="pairs", valid_fraction=0.0).train) == [Pair("a", "b")]
    path = write(tmp_path / "alpaca.json", json.dumps([{"instruction": "Add 1 and 2.", "input": "", "output": "3"}]))
    assert open_source(path, valid_fraction=0.0).kind == "chats"


@pytest.mark.parametrize("name", ["r.csv", "r.jsonl", "r.json", "r.parquet"])
def test_columns_that_are_chosen_mean_the_same_in_every_table(tmp_path: Path, name: str) -> None:
    bodies, stars = [f"a film of {n} minutes" for n in range(8)], [str(n % 2) for n in range(8)]
    objects = [{"n": n, "body": body, "stars": star} for n, (body, star) in enumerate(zip(bodies, stars, strict=True))]
    texts = {
        ".csv": "n,body,stars\n" + "".join(f"{x['n']},{x['body']},{x['stars']}\n" for x in objects),
        ".jsonl": "\n".join(map(json.dumps, objects)),
        ".json": json.dumps(objects),
    }
    path = tmp_path / name
    if name == "r.parquet":
        parquet(path, {"n": list(range(8)), "body": bodies, "stars": stars})
    else:
        write(path, texts[path.suffix])
    for columns in (("body", "stars"), (1, 2)):
        source = open_source(path, columns=columns, valid_fraction=0.0)
        assert (source.kind, source.labels, source.train[1]) == ("labelled", ("0", "1"), Labelled(bodies[1], 1))
    assert whole(path, columns=("n", "body"))[1] == Pair("1", bodies[1])


def test_two_json_lists_are_two_tables_and_not_parallel_lines(tmp_path: Path) -> None:
    """Written one object per line, they have the same number of lines."""
    objects = [json.dumps({"source": pair.source, "target": pair.target}) for pair in PAIRS]
    paths = [write(tmp_path / name, "[\n" + ",\n".join(objects) + "\n]\n") for name in ("a.json", "b.json")]
    assert whole(paths) == [*PAIRS, *PAIRS]


def test_bad_csv_records_are_named_by_the_line_they_start_in(tmp_path: Path) -> None:
    path = write(tmp_path / "l.csv", b'text,label\n"two\nlines",a\nonly\n\xff,b\nfew\n"never closed,b\n')
    with pytest.raises(BadData) as caught:
        open_source(path)
    found = {line.line: line.reason.split(":")[0] for line in caught.value.lines}
    assert found == {4: "wrong column count", 5: "invalid UTF-8", 6: "wrong column count", 7: "malformed CSV"}


def test_an_unknown_label_is_a_bad_line_also_in_valid(tmp_path: Path) -> None:
    train = write(tmp_path / "train.tsv", "text\tlabel\nx\ta\ny\tb\n")
    valid = write(tmp_path / "valid.tsv", "text\tlabel\nz\tc\n")
    with pytest.raises(BadData, match=r"valid\.tsv:2: unknown label: 'c' is not one of a, b"):
        open_source(train, valid=valid)
    with pytest.raises(BadData, match=r"train\.tsv:3: unknown label: 'b' is not one of a, z"):
        open_source(train, labels="a,z")
    assert DataConfig(labels="1,0", columns="0,text").labels == ("1", "0")
    assert DataConfig(labels="1,0", columns="0,text").columns == (0, "text")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.tsv", b"\xff\xfeG\0o\0\xff", "is not UTF-16 text"),
        ("x.tsv.gz", gzip.compress(b"a\tb\n" * 1000, mtime=0)[:-9], "is not a complete gzip file"),
        ("x.tsv.gz", b"not gzip", "is not a complete gzip file"),
        ("x.tsv", b"", "has no example to train on"),
        ("x.json", b"{", "is not JSON"),
    ],
)
def test_files_that_cannot_be_read_at_all(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(BadData, match=message):
        open_source(write(tmp_path / name, content))


def test_a_held_out_table_of_a_few_rows_is_read_as_the_training_table(tmp_path: Path) -> None:
    """Ten rows with three labels look like pairs; the training table, or known labels, show what they are."""
    names = ("bad", "fair", "good")
    train = "".join(f"{names[n % 3]}\tfilm {n}\n" for n in range(90))
    write(tmp_path / "train.tsv", train)
    few = write(tmp_path / "valid.tsv", "".join(f"{names[n % 3]}\tplay {n}\n" for n in range(10)))
    assert open_source(few).kind == "pairs"
    for source in (
        open_source(tmp_path / "train.tsv", valid=few),
        open_source(tmp_path / "train.tsv", valid=few, columns=(1, 0)),
        open_source(tmp_path),
    ):
        assert (source.kind, source.labels) == ("labelled", names)
        assert [(x.text, x.label) for x in source.valid] == [(f"play {n}", n % 3) for n in range(10)]
    known = open_source(few, labels=names, valid_fraction=0)
    assert [(x.text, x.label) for x in known.train] == [(f"play {n}", n % 3) for n in range(10)]


def test_unknown_names_and_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there is no file .*nowhere"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="there is no file en_ko; did you mean en-ko"):
        open_source("en_ko")
    with pytest.raises(ValueError, match="has no field 'column'; did you mean 'columns'"):
        open_source(tmp_path, column=(0, 1))
    with pytest.raises(ValueError, match=r"valid_fraction=1\.5 must lie in"):
        open_source(tmp_path, valid_fraction=1.5)


def test_decomposed_text_is_composed_and_counted_unless_told_not_to(tmp_path: Path) -> None:
    path = write(tmp_path / "p.tsv", "Go.\t\u1100\u1161.\n")
    source = open_source(path, valid_fraction=0.0, kind="pairs")
    assert source.train[0] == Pair("Go.", "가.")
    assert source.report.n_normalised == 1
    assert whole(path, normalise="none", kind="pairs") == [Pair("Go.", "\u1100\u1161.")]


# -------------------------------------------------------------------------------- what is held out


def test_all_answers_to_one_question_go_to_one_side_and_the_split_stays(tmp_path: Path) -> None:
    rows = [(f"question {n % 400}", f"answer {n}") for n in range(2000)]
    path = write(tmp_path / "p.tsv", "".join(f"{a}\t{b}\n" for a, b in rows))
    source = open_source(path, valid_fraction=0.25)
    train, valid = ({x.source for x in side} for side in (source.train, source.valid))  # type: ignore[union-attr]
    assert not train & valid
    assert 0.15 < len(valid) / 400 < 0.35
    assert sorted(map(repr, everything(source))) == sorted(repr(Pair(*row)) for row in rows)
    again = open_source(path, valid_fraction=0.25)
    assert (again.split, again.sha256) == (source.split, source.sha256)
    assert source.split.valid_sha256 == sha256_of(source.valid)
    assert open_source(path, valid_fraction=0.25, split_seed=1).split.valid_sha256 != source.split.valid_sha256
    # More lines do not move those that were there.
    more = write(tmp_path / "more.tsv", path.read_text() + "another\tone\n")
    assert set(source.valid) <= set(open_source(more, valid_fraction=0.25).valid)


def test_the_hash_of_the_split_is_known(tmp_path: Path) -> None:
    path = write(tmp_path / "p.tsv", "".join(f"s {n}\tt {n}\n" for n in range(20)))
    source = open_source(path, valid_rows=3)
    assert [x.source for x in source.valid] == ["s 2", "s 3", "s 9"]  # type: ignore[union-attr]
    assert source.split.how == "by hash of the source side, valid_rows=3, split_seed=0"


@pytest.mark.parametrize(("how", "n", "dropped"), [("no", 5, 0), ("exact", 4, 1), ("source", 2, 3)])
def test_deduplicated(tmp_path: Path, how: str, n: int, dropped: int) -> None:
    path = write(tmp_path / "p.tsv", "a\tx\na\ty\na\tx\nb\tx\na\tz\n")
    source = open_source(path, deduplicated=how, valid_fraction=0.0, kind="pairs")
    assert (len(source.train), source.n_duplicates) == (n, dropped)
    assert source.train[0] == Pair("a", "x")


# -------------------------------------------------------------------------------- images


def picture(path: Path, size: tuple[int, int] = (8, 6), colour: str = "red", mode: str = "RGB") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("c.tsv", "a.png\tone\na.png\ttwo\nb.png\tthree\n"),
        ("c.json", '{"a.png": ["one", "two"], "b.png": "three"}'),
        ("c.json", '[{"image": "a.png", "captions": ["one", "two"]}, {"image": "b.png", "caption": "three"}]'),
        (
            "c.json",
            '{"images": [{"id": 1, "file_name": "a.png"}, {"id": 2, "file_name": "b.png"}], "annotations": '
            '[{"image_id": 1, "caption": "one"}, {"image_id": 1, "caption": "two"}, '
            '{"image_id": 2, "caption": "three"}]}',
        ),
        ("c.jsonl", '{"image": "a.png", "captions": ["one", "two"]}\n{"image": "b.png", "captions": ["three"]}\n'),
    ],
)
def test_captions_in_every_form(tmp_path: Path, name: str, content: str) -> None:
    for image in ("a.png", "b.png"):
        picture(tmp_path / "images" / image)
    examples = whole(write(tmp_path / name, content))
    assert [(x.image.name, x.captions) for x in examples] == [("a.png", ("one", "two")), ("b.png", ("three",))]


def test_a_name_that_no_file_system_allows_is_a_bad_line(tmp_path: Path) -> None:
    names = ["a.png", "b.png", "한" * 100 + "/a.png", "x" * 300 + ".png"]
    for number, name in enumerate(names[:2]):
        picture(tmp_path / "images" / name, (8, 9 + number))
    rows = "".join(f"{name},{'ab'[n % 2]}\n" for n, name in enumerate(names))
    table = write(tmp_path / "t.csv", f"image,label\n{rows}")
    assert len(everything(open_source(table, valid_fraction=0.5, bad_lines="skip"))) == 2
    read = [Path(record.text) for record in open_records(table, images=True).read()]
    assert [path.name for path in read[:2]] == names[:2]
    assert len(read) == 4


def test_names_of_files_in_decomposed_hangul(tmp_path: Path) -> None:
    """As archives from macOS have them: in folders and files, and in tables that name them either way."""
    forms: list[Literal["NFC", "NFD"]] = ["NFC", "NFD"]
    for on_disk, folder in zip(forms, ("composed", "decomposed"), strict=True):
        names = [unicodedata.normalize(on_disk, f"{label}/사진{n}.png") for label in ("고양이", "개") for n in range(4)]
        for number, name in enumerate(names):
            picture(tmp_path / folder / "images" / name, (8, 9 + number))
        of_folder = open_source(tmp_path / folder / "images", valid_fraction=0.5)
        assert of_folder.labels == ("개", "고양이")
        assert len(everything(of_folder)) == 8
        for written in forms:
            rows = [f"{unicodedata.normalize(written, name)},{'ab'[n // 4]}\n" for n, name in enumerate(names)]
            table = write(tmp_path / folder / f"{written}.csv", f"image,label\n{''.join(rows)}")
            of_table = open_source(table, valid_fraction=0.5)
            images = [x.image for x in everything(of_table)]
            assert sorted(images) == sorted(tmp_path / folder / "images" / name for name in names)
            records = list(open_records(table, images=True).read())  # found in the folder "images", as in training
            assert [Path(x.text) for x in records] == [tmp_path / folder / "images" / name for name in names]


def test_unusable_images_are_bad_lines(tmp_path: Path) -> None:
    picture(tmp_path / "good.png")
    picture(tmp_path / "huge.png", (300, 300))
    whole_file = picture(tmp_path / "x.png", (64, 64)).read_bytes()
    write(tmp_path / "cut.png", whole_file[: len(whole_file) // 2])
    write(tmp_path / "text.png", "not an image")
    picture(tmp_path.parent / "outside.png")
    names = ["good", "huge", "cut", "text", "missing", "../outside"]
    path = write(tmp_path / "c.tsv", "".join(f"{name}.png\ta caption of {name}\n" for name in names))
    with pytest.raises(BadData) as caught:
        open_source(path, max_pixels=10_000)
    reasons = [line.reason for line in caught.value.lines]
    assert [line.line for line in caught.value.lines] == [2, 3, 4, 5, 6]
    parts = [
        "300 × 300 pixels, more than",
        "cut.png cannot be decoded",
        "text.png cannot be",
        "no such file",
        "outside its",
    ]
    for reason, part in zip(reasons, parts, strict=True):
        assert part in reason


def test_a_folder_for_each_class(tmp_path: Path) -> None:
    for label in ("cat", "dog"):
        for n in range(3):
            picture(tmp_path / label / f"{n}.png")
    source = open_source(tmp_path, valid_fraction=0.0)
    assert source.labels == ("cat", "dog")
    assert [x.label for x in source.train] == [0, 0, 0, 1, 1, 1]  # type: ignore[union-attr]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def test_idx_files(tmp_path: Path) -> None:
    images = np.arange(40 * 4 * 4, dtype=np.uint8).reshape(40, 4, 4)
    images[:, 0, 0] = np.arange(40)
    labels = np.arange(40, dtype=np.uint8) % 10
    write(tmp_path / "train-images-idx3-ubyte.gz", gzip.compress(idx(images), mtime=0))
    write(tmp_path / "train-labels-idx1-ubyte.gz", gzip.compress(idx(labels), mtime=0))
    source = open_source(tmp_path, valid_rows=8)
    assert (len(source.train), len(source.valid), source.labels) == (32, 8, tuple("0123456789"))
    seen = {int(x.image[0, 0]): x.label for x in everything(source)}
    assert seen == {n: n % 10 for n in range(40)}
    assert source.split.how == "by hash of the pixels, valid_rows=8, split_seed=0"
    folder = tmp_path / "held"
    for label in "01":
        (folder / label).mkdir(parents=True)
        Image.fromarray(images[int(label)]).save(folder / label / "x.png")
    held_out = open_source(tmp_path, valid=folder)
    assert (len(held_out.train), len(held_out.valid)) == (40, 2), "held-out images need not be IDX files too"
    write(tmp_path / "val-images-idx3-ubyte", idx(images[:2]))
    write(tmp_path / "val-labels-idx1-ubyte", idx(labels[:2] + 9))
    with pytest.raises(BadData, match="has the label 10, but labels names only 10"):
        open_source(tmp_path)
    write(tmp_path / "train-labels-idx1-ubyte.gz", gzip.compress(idx(labels[:-1]), mtime=0))
    with pytest.raises(BadData, match=r"has shape \(40, 4, 4\), but .* has \(39,\)"):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0", "is not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "is not an IDX file of bytes"),
        (b"\0\0\x08\x01\0\0", "ends within its header"),
        (b"\0\0\x08\x01\0\0\0\x04abc", "declares 4 bytes, but has 3"),
        (b"\0\0\x08\x01\0\0\0\x02abc", "declares 2 bytes, but has more"),
        (b"\0\0\x08\x02\xff\xff\xff\xff\xff\xff\xff\xff", "declares 18,446,744,065,119,617,025 bytes, more than"),
    ],
)
def test_bad_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(BadData, match=message):
        read_idx(write(tmp_path / "x", content))


def test_pixels_are_turned_resized_and_laid_on_white(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    image = Image.new("RGB", (8, 4), "red")
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(path, exif=exif)
    assert (open_upright(path).size, open_upright(path).mode) == ((4, 8), "RGB")
    clear = Image.new("RGBA", (2, 2), (0, 0, 0, 0))
    assert open_upright(clear, channels=1).getextrema() == (255, 255)
    assert all(open_upright(np.zeros(shape, np.uint8)).mode == "RGB" for shape in ((4, 4), (4, 4, 1), (4, 4, 3)))


def test_image_batches_are_a_function_of_seed_epoch_and_index() -> None:
    rng = np.random.default_rng(0)
    examples = [ImageExample(rng.integers(0, 256, (8, 8), dtype=np.uint8)) for _ in range(6)]
    processor = ImageProcessor((8, 8), (0.25,), (0.5,))
    plain = image_batch(examples, [0, 3], processor)
    assert plain.shape == (2, 1, 8, 8)
    np.testing.assert_allclose(plain[1, 0].numpy(), (examples[3].image / 255 - 0.25) / 0.5, rtol=1e-5, atol=1e-6)
    options: dict[str, Any] = {"shift": 2, "flip": True, "seed": 7}
    alone, together = (image_batch(examples, rows, processor, epoch=1, **options) for rows in ([3], [0, 3, 5]))
    assert alone[0].equal(together[1])
    epochs = [image_batch(examples, range(6), processor, epoch=epoch, **options) for epoch in range(4)]
    assert not any(epochs[0].equal(other) for other in epochs[1:])
    for moved in epochs:  # nothing is invented: every value stands in the original
        for n in range(6):
            originals = image_batch(examples, [n], processor)
            assert set(moved[n].flatten().tolist()) <= set(originals.flatten().tolist())


# -------------------------------------------------------------------------------- hf: and embedded


class Table(list[dict[str, Any]]):
    """As much of a dataset as is used."""

    @property
    def features(self) -> dict[str, Any]:
        names = types.SimpleNamespace(names=["bad", "good"])
        return {key: names if key == "label" else None for key in self[0]}


@pytest.mark.parametrize(
    ("rows", "expected", "labels"),
    [
        ([{"text": "x", "label": 1}, {"text": "y", "label": 0}], [Labelled("x", 1), Labelled("y", 0)], ("bad", "good")),
        ([{"translation": {"en": "Go.", "ko": "가."}}], PAIRS[:1], None),
        ([{"text": "a document"}], [Text("a document")], None),
    ],
)
def test_hugging_face_datasets(
    monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], expected: list[Any], labels: tuple[str, ...] | None
) -> None:
    asked = []

    def load_dataset(name: str, configuration: str | None) -> dict[str, Table]:
        asked.append((name, configuration))
        return {"train": Table(rows), "validation": Table(rows[:1])}

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    source = open_source("hf:someone/something:small")
    assert asked == [("someone/something", "small")]
    assert list(source.train) == expected
    assert list(source.valid) == expected[:1]
    assert source.labels == labels


def test_hugging_face_pairs_of_texts_have_the_names_of_their_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"premise": f"p{n}", "hypothesis": "h", "label": n % 2} for n in range(8)]
    load = types.SimpleNamespace(load_dataset=lambda *_: {"train": Table(rows), "validation": Table(rows[:2])})
    monkeypatch.setitem(sys.modules, "datasets", load)
    source = open_source("hf:someone/something")
    assert source.labels == ("bad", "good")
    assert list(source.valid) == [Labelled("p0", 0, "h"), Labelled("p1", 1, "h")]
    with pytest.raises(ValueError, match="columns has 'verdict', but hf:x has the columns premise, hypothesis, label"):
        open_source("hf:x", columns=("premise", "verdict"), kind="labelled")


def test_without_the_library_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(RegardError, match="needs datasets, which is not installed"):
        open_source("hf:someone/something")


class Counting:
    """A corpus without end."""

    name, splits = "counting", ("train", "valid", "long")

    def size(self, split: str) -> int | None:
        return None if split == "train" else 5

    def example(self, split: str, index: int) -> Pair:
        return Pair(f"{split} {index}", str(index))


def test_an_embedded_corpus_is_a_source() -> None:
    source = open_source(Counting(), epoch_examples=50)
    assert (source.kind, len(source.train), len(source.valid), len(source.others["long"])) == ("pairs", 50, 5, 5)
    assert source.train[-1] == Pair("train 49", "49")
    with pytest.raises(IndexError):
        source.train[50]
    with pytest.raises(ValueError, match="deduplicated does not apply to the embedded corpus counting"):
        open_source(Counting(), deduplicated="exact")


@pytest.mark.parametrize(
    ("name", "kind", "others"),
    [
        ("en-ko", "pairs", ["combinations", "longer"]),
        ("shapes", "captions", ["combinations"]),
        ("stdlib", "text", ["packages"]),
    ],
)
def test_the_embedded_corpora_open_by_name(name: str, kind: str, others: list[str]) -> None:
    options = {} if name == "stdlib" else {"epoch_examples": 20, "valid_rows": 10}
    source = open_source(name, **options)
    assert (source.kind, list(source.others)) == (kind, others)
    assert len(source.valid) >= 10
    first = source.train[0]
    assert key_of(first) == key_of(open_source(name, **options).train[0])
    assert isinstance(first, {"pairs": Pair, "captions": ImageExample, "text": Text}[kind])
    if isinstance(first, ImageExample):
        assert first.captions
        assert image_batch(source.train, [0, 1], ImageProcessor((64, 64))).shape == (2, 3, 64, 64)
    if name != "stdlib":
        assert open_source(name, epoch_examples=21).split.train_sha256 != source.split.train_sha256


# -------------------------------------------------------------------------------- real files


@pytest.mark.parametrize(
    ("name", "options", "kind", "n_train", "n_valid"),
    [
        ("multi30k", {"columns": ("en", "de")}, "pairs", 29_000, 1_014),
        ("tatoeba-en-ko/kor.txt", {"columns": (0, 1)}, "pairs", 3_619, 179),
        ("sst", {}, "labelled", 8_544, 1_101),
        ("nsmc/three_class_valid.tsv", {"valid_rows": 1000}, "labelled", 11_000, 1_000),
        ("wikitext-2/valid.txt", {"documents": "line"}, "text", None, None),
        ("sotu", {}, "text", 220, 13),
    ],
)
def test_real_files(name: str, options: dict[str, Any], kind: str, n_train: int | None, n_valid: int | None) -> None:
    if not (REAL / name).exists():
        pytest.skip(f"{name} is not in shared/data beside the checkout")
    source = open_source(REAL / name, **options)
    assert source.kind == kind
    assert source.report.n_bad == 0
    if n_train is not None:
        assert (len(source.train), len(source.valid)) == (n_train, n_valid)


# ---- encodings, headers and what a table holds


@pytest.mark.parametrize("encoding", ["cp949", "utf-16", "utf-16-le-bom", "utf-8-sig"])
def test_other_encodings_are_detected_and_noted(tmp_path: Path, encoding: str) -> None:
    text = "".join(f"sentence {n}\t문장 {n}번입니다.\r\n" for n in range(30))
    raw = b"\xff\xfe" + text.encode("utf-16-le") if encoding == "utf-16-le-bom" else text.encode(encoding)
    path = write(tmp_path / "pairs.tsv", raw)
    source = open_source(path, valid_fraction=0.0)
    assert list(source.train) == [Pair(f"sentence {n}", f"문장 {n}번입니다.") for n in range(30)]
    noted = {"cp949": "cp949", "utf-8-sig": None}.get(encoding, "utf-16")
    assert source.report.encodings.get(str(path)) == noted
    assert "encodings" in source.report.to_dict() or noted is None


def test_an_encoding_can_be_named_and_a_wrong_one_is_said(tmp_path: Path) -> None:
    path = write(tmp_path / "pairs.csv", "".join(f"Straße {n},street {n}\n" for n in range(9)).encode("latin-1"))
    assert open_source(path, encoding="latin-1", valid_fraction=0.0).train[0] == Pair("Straße 0", "street 0")
    with pytest.raises(BadData, match="invalid UTF-8"):
        open_source(path)
    with pytest.raises(BadData, match=r"is not UTF-16 text"):
        open_source(path, encoding="utf-16")
    with pytest.raises(ValueError, match="'klingon' is an unknown encoding"):
        DataConfig(encoding="klingon")


@pytest.mark.parametrize(
    ("head", "rows", "header"),
    [
        ("en,ko", [f"sentence {n},문장 {n}" for n in range(6)], True),
        ("English,Korean", [f"sentence {n},문장 {n}" for n in range(6)], True),
        ("review,stars", [f"a film {n},{n % 5 + 1}" for n in range(6)], True),
        ("opinion,verdict", [f"a film {n},{('good', 'bad')[n % 2]}" for n in range(12)], True),
        ("Hi,Hallo", [f"sentence {n},Satz {n}" for n in range(6)], False),
        ("Hello there,good", [f"a film {n},{('good', 'bad')[n % 2]}" for n in range(12)], False),
        ("en,ko", ["en,ko", "sentence,문장"], False),  # a name that comes again is none
    ],
)
def test_a_header_is_told_from_data(tmp_path: Path, head: str, rows: list[str], header: bool) -> None:
    source = open_source(write(tmp_path / "t.csv", "\n".join([head, *rows]) + "\n"), valid_fraction=0.0)
    assert len(source.train) == len(rows) + (not header)


@pytest.mark.parametrize("name", ["text", "Review", "sentence", "source", "리뷰"])
def test_the_only_column_may_have_any_known_name(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "one.csv", f"{name}\nI loved it\nboring\n")
    assert [record.text for record in open_records(path).read()] == ["I loved it", "boring"]
    assert list(open_source(path, valid_fraction=0.0).train) == [Text("I loved it"), Text("boring")]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "text"}, "has 2 columns without names; say which to use: columns=0$"),
        ({"kind": "triplets"}, "has 2 columns without names; say which to use: columns=0,1,2"),
        ({"kind": "questions"}, "has 2 columns without names; say which to use: columns=0,1,2"),
        ({"kind": "text", "columns": (0, 1)}, "columns=0,1: .* is read for text, not 2 columns"),
        ({"kind": "triplets", "columns": (0, 1)}, "is read for anchor and positive and negative, not 2 columns"),
        ({"kind": "pairs", "columns": (0, 1, 0)}, "is read for source and target, not 3 columns"),
    ],
)
def test_a_kind_takes_its_own_number_of_columns(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "p.tsv", "".join(f"{pair.source}\t{pair.target}\n" for pair in PAIRS))
    with pytest.raises(ValueError, match=message):
        open_source(path, **options)


def test_same_names_in_different_folders_are_different_images(tmp_path: Path) -> None:
    for name, colour in (("circle", 10), ("square", 200)):
        (tmp_path / name).mkdir()
        for n in range(4):
            Image.new("L", (4, 4), colour + n).save(tmp_path / name / f"{n:03}.png")
    (tmp_path / "square/copy.png").write_bytes((tmp_path / "circle/000.png").read_bytes())
    described = describe(open_source(tmp_path, valid_fraction=0.0))
    assert (described.duplicates, described.repeated_sources) == (0, 1)
    assert len(open_source(tmp_path, valid_fraction=0.0, deduplicated="source").train) == 8


def test_a_cell_of_a_csv_file_may_be_as_long_as_max_chars(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f"text,label\n{'x' * 200_000},a\n" + "".join(f"w{n},b\n" for n in range(20)), encoding="utf-8")
    with pytest.raises(BadData, match="200,002 characters, more than max_chars=100000"):
        open_source(path)
    assert max(len(x.text) for x in open_source(path, max_chars=300_000, valid=str(path)).train) == 200_000  # type: ignore[union-attr]


def test_half_of_a_surrogate_pair_goes_out_as_it_came_in(tmp_path: Path) -> None:
    """JSON can escape what UTF-8 cannot encode."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "\\ud800 가"}\n', encoding="utf-8")
    records = open_records(path)
    (record,) = records.read()
    assert row_encoder("jsonl", records, {})(record.fields) == path.read_bytes()
    assert row_encoder("tsv", records, {})(record.fields) == "\ud800 가\n".encode("utf-8", "surrogatepass")


def test_the_columns_of_json_lines_are_those_of_the_first_object_also_after_blank_lines(tmp_path: Path) -> None:
    records = open_records(write(tmp_path / "p.jsonl", '\n\n{"id": 1, "text": "a"}\n\n{"id": 2, "text": "b"}\n'))
    assert records.columns == ("id", "text")
    assert [record.text for record in records.read()] == ["", "", "a", "", "b"]


def test_records_of_a_json_list_and_of_nested_columns(tmp_path: Path) -> None:
    both = [{"translation": {"en": "one", "ko": "하나"}}, {"translation": {"en": "two", "ko": "둘"}}]
    for name in ("p.json", "p.jsonl", "p.parquet"):
        path = tmp_path / name
        if name == "p.parquet":
            parquet(path, {"translation": [x["translation"] for x in both]})
        else:
            path.write_text(json.dumps(both) if name == "p.json" else "\n".join(map(json.dumps, both)))
        assert [record.text for record in open_records(path, "translation.en").read()] == ["one", "two"]
        with pytest.raises(BadData, match=r"not a text but a dict; say which part to read: column=translation\.en"):
            list(open_records(path).read())
