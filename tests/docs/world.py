"""A folder as a reader of the documents has it: small real files of every kind, and data sets in their own layout."""

from __future__ import annotations

import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.corpora import open_corpus

ROOT = Path(__file__).resolve().parents[2]
_GOOD = ("a warm and funny film", "the best two hours of this year", "wonderful music and a clever story", "I loved it")
_BAD = ("slow and far too long", "the worst acting I have seen", "a dull story with no end", "I want my money back")


def make(folder: Path) -> None:
    """What the documents call pairs.tsv, book.txt, reviews.csv, claims.csv, plots.jsonl, ratings.csv, people.conll,
    captions.tsv, photos/, pictures/, sentences.txt, korean.txt, chats.jsonl, preferences.jsonl and questions.jsonl."""
    folder.mkdir(parents=True, exist_ok=True)
    _pairs(folder / "pairs.tsv")
    pairs = [line.split("\t") for line in (folder / "pairs.tsv").read_text(encoding="utf-8").splitlines()[:4]]
    for side, name in enumerate(("sentences.txt", "korean.txt")):
        (folder / name).write_text("".join(f"{pair[side]}\n" for pair in pairs), encoding="utf-8")
    (folder / "book.txt").write_text((ROOT / "LICENSE").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "reviews.csv").write_text(_table(",", "text,label"), encoding="utf-8")
    _labels(folder)
    _chats(folder)
    _scenes(folder)
    _questions(folder)


def _labels(folder: Path, n: int = 64) -> None:
    """Two texts and a class, texts with several labels, texts with a number, words with tags."""
    claims, plots, ratings, people = ["premise,hypothesis,label"], [], ["text,score"], []
    for k in range(n):
        claims.append(f"a man plays {k} guitars,somebody {('makes music', 'sleeps')[k % 2]},{('yes', 'no')[k % 2]}")
        plots.append(json.dumps({"text": f"{_GOOD[k % 4]} {k}", "labels": ["war"] * (k % 2) + ["love"] * (k % 3 > 0)}))
        ratings.append(f"{(_GOOD, _BAD)[k % 2][k % 4]} {k},{4.5 - 3 * (k % 2)}")
        name, town = ("Anna", "Boris", "Chen")[k % 3], ("Paris", "Seoul", "York")[k % 7 % 3]
        people += [f"{name} B-PER", "lives O", "in O", f"{town} B-LOC", f"{k} O", ". O", ""]
    files = {"claims.csv": claims, "plots.jsonl": plots, "ratings.csv": ratings, "people.conll": people}
    for file, lines in files.items():
        (folder / file).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _pairs(file: Path, n: int = 80) -> None:
    corpus = open_corpus("en-ko")
    made: list[Any] = [corpus.example("train", index) for index in range(n)]
    file.write_text("".join(f"{x.source}\t{x.target}\n" for x in made), encoding="utf-8")


def _chats(folder: Path, n: int = 40) -> None:
    """Sums: what is asked and answered, and which of two answers is preferred."""
    sums = [(f"{k} plus {k + 1}?", f"It is {2 * k + 1}.", f"{2 * k}!") for k in range(n)]
    chats = [{"prompt": prompt, "completion": answer} for prompt, answer, _ in sums]
    preferences = [{"prompt": prompt, "chosen": answer, "rejected": other} for prompt, answer, other in sums]
    for name, records in (("chats", chats), ("preferences", preferences)):
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def _questions(folder: Path, n: int = 40) -> None:
    """Who has what, in one of two passages."""
    lines = []
    for k in range(n):
        passages = [f"Anna has {k} apples", f"Boris has {k} drums"]
        lines.append(json.dumps({"question": f"who has {k} drums?", "answer": "Boris", "passages": passages}))
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(between: str, head: str, n: int = 64) -> str:
    rows = [(f"{(_GOOD, _BAD)[k % 2][k % 4]} {k}", ("good", "bad")[k % 2]) for k in range(n)]
    return "\n".join([head, *(between.join(row) for row in rows)]) + "\n"


def _scenes(folder: Path, n: int = 24) -> None:
    """Drawn scenes as photographs with captions, and sorted into folders by what is in them."""
    corpus = open_corpus("shapes")
    (folder / "photos").mkdir()
    lines = []
    for index in range(n):
        scene: Any = corpus.example("train", index)
        scene.pillow().save(folder / "photos" / f"{index}.png")
        lines.append(f"{index}.png\t{scene.caption}")
        kind = folder / "pictures" / ("even", "odd")[index % 2]
        kind.mkdir(parents=True, exist_ok=True)
        scene.pillow().save(kind / f"{index}.png")
    (folder / "captions.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    scene.pillow().save(folder / "photo.png")


def make_data_sets(folder: Path) -> None:
    """data/, as docs/results.md names it: the layout of the real ones, a few lines in each."""
    data = folder / "data"
    for name in ("shakespeare", "multi30k", "nsmc", "fashion-mnist", "software-en-ko", "flickr8k", "wikitext-2", "sst"):
        (data / name).mkdir(parents=True)
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    for name in ("shakespeare/input.txt", "wikitext-2/train.txt", "wikitext-2/valid.txt"):
        (data / name).write_text(text, encoding="utf-8")
    _pairs(folder / "all.tsv")
    pairs = [line.split("\t") for line in (folder / "all.tsv").read_text(encoding="utf-8").splitlines()]
    for name, endings in (("multi30k", ("en", "de")), ("software-en-ko", ("en", "ko"))):
        for part in ("train", "val" if name == "multi30k" else "valid", "test_2016_flickr"):
            for side, ending in enumerate(endings):
                lines = [pair[side] for pair in pairs[: 80 if part == "train" else 8]]
                (data / name / f"{part}.{ending}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = [line.split(",") for line in _table(",", "text,label").splitlines()[1:]]
    for part in ("binary_train", "three_class_train", "three_class_valid"):
        lines = [
            "id\tdocument\tlabel",
            *(f"{k}\t{text} {part}\t{int(x == 'good')}" for k, (text, x) in enumerate(rows)),
        ]
        (data / "nsmc" / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for part in ("train", "valid"):
        lines = [f"{'positive' if x == 'good' else 'negative'}\t{text} {part}" for text, x in rows]
        (data / "sst" / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    _pictures(data)


def _pictures(data: Path, n: int = 32) -> None:
    drawn = np.random.default_rng(0).integers(0, 255, (n, 28, 28), dtype=np.uint8)
    with gzip.open(data / "fashion-mnist" / "train-images-idx3-ubyte.gz", "wb") as file:
        file.write(struct.pack(">4i", 0x0803, n, 28, 28) + drawn.tobytes())
    with gzip.open(data / "fashion-mnist" / "train-labels-idx1-ubyte.gz", "wb") as file:
        file.write(struct.pack(">2i", 0x0801, n) + bytes(k % 10 for k in range(n)))
    corpus = open_corpus("shapes")
    (data / "flickr8k" / "images").mkdir()
    for part, start in (("train", 0), ("valid", 16)):
        lines = []
        for index in range(start, start + 16):
            scene: Any = corpus.example("train", index)
            scene.pillow().save(data / "flickr8k" / "images" / f"{index}.jpg")
            lines += [f"{index}.jpg\t{scene.caption}"] * 2
        (data / "flickr8k" / f"{part}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
