"""An index of passages: texts split into passages, with their vectors in one memory-mapped file.

index.json       the model that computed the vectors, their number and width
passages.jsonl   one passage per line: its text, and the file and line where it begins
offsets.npy      (n,) the byte at which each line of passages.jsonl begins
vectors.npy      (n, width) float32
graph.faiss      optional: a graph of neighbours (HNSW, Malkov & Yashunin 2016) for search without a full scan
manifest.json    SHA-256 of all of them
"""

from __future__ import annotations

import importlib.util
import json
import os
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.record_files import Record, form_of, open_records
from ..errors import BadData, BadModelFile
from ..foundation.checks import check_positive
from ..foundation.files import replace_directory, write_atomic
from ..foundation.jsonio import parse_json, read_json, to_json
from ..foundation.plugins import import_optional
from ..hub.manifest import Manifest, check_replaceable
from ..models import Model, ModelOrPath, open_model
from .text_embeddings import check_can_embed, embed

_EMBED_BATCH = 2048  # passages embedded at a time
_SEARCH_BLOCK = 1 << 16  # vectors compared with the questions at a time
FILES = ("index.json", "passages.jsonl", "offsets.npy", "vectors.npy")
GRAPH, _NEIGHBOURS = "graph.faiss", 32


@dataclass(frozen=True)
class Passage:
    """A part of a text, where it begins, and its similarity to a question."""

    text: str
    place: str = ""  # file:line
    score: float | None = None


@dataclass(frozen=True)
class PassageIndex:
    """Passages that can be searched by meaning."""

    root: Path
    model_path: str
    offsets: NDArray[np.int64]
    vectors: NDArray[np.float32]  # (n, width), memory-mapped

    def __len__(self) -> int:
        return len(self.vectors)

    @classmethod
    def open(cls, path: str | Path) -> PassageIndex:
        """The index in a directory."""
        root = Path(path)
        if not (root / "index.json").is_file():
            raise BadModelFile(f"{root} has no index.json, so it is not an index; regard index FILES {root} makes one")
        fields = read_json(root / "index.json")
        try:
            offsets, vectors = (np.load(root / name, mmap_mode="r", allow_pickle=False) for name in FILES[2:])
        except (OSError, ValueError) as error:
            raise BadModelFile(f"{root} is damaged: {error}") from None
        n, width = fields["passages"], fields["width"]
        if offsets.shape != (n,) or vectors.shape != (n, width) or vectors.dtype != np.float32:
            raise BadModelFile(f"{root} is damaged: its vectors are {vectors.shape}, but index.json says {(n, width)}")
        return cls(root, fields["model"], offsets, vectors)

    def passage(self, number: int) -> Passage:
        with (self.root / FILES[1]).open("rb") as file:
            file.seek(int(self.offsets[number]))
            fields = parse_json(file.readline(), self.root / FILES[1])
        return Passage(fields["text"], fields["place"])

    def search(
        self, questions: Sequence[str], n: int = 5, *, model: ModelOrPath | None = None, prompt: str | None = None
    ) -> list[list[Passage]]:
        """The n nearest passages to each question, nearest first; ``model`` replaces the index's own model."""
        check_positive(n=n)
        queries = embed(self.model_path if model is None else model, list(questions), prompt=prompt)
        if queries.shape[1] != self.vectors.shape[1]:
            width = self.vectors.shape[1]
            raise ValueError(f"the model's vectors are {queries.shape[1]} wide, but those of {self.root} are {width}")
        if self._graph is None:
            scores, numbers = nearest(queries, self.vectors, n)
        else:
            scores, numbers = self._search_graph(queries, n)
        rows = zip(scores.tolist(), numbers.tolist(), strict=True)
        return [[replace(self.passage(k), score=x) for x, k in zip(*row, strict=True) if k >= 0] for row in rows]

    @cached_property
    def _graph(self) -> Any:
        """The graph, if the index has one and FAISS is installed; without it, every vector is compared."""
        if not (self.root / GRAPH).is_file() or importlib.util.find_spec("faiss") is None:
            return None
        manifest = Manifest.read(self.root)
        if manifest is None or GRAPH not in manifest.files:
            raise BadModelFile(f"{self.root} is damaged: no manifest lists its {GRAPH}")
        Manifest({GRAPH: manifest.files[GRAPH]}).check(self.root)  # FAISS trusts what it reads
        graph = _faiss().read_index(str(self.root / GRAPH))
        if (graph.ntotal, graph.d) != self.vectors.shape:
            raise BadModelFile(f"{self.root} is damaged: its {GRAPH} does not match {self.vectors.shape} vectors")
        return graph

    def _search_graph(self, questions: NDArray[np.float32], n: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Like ``nearest``, but approximate: the graph may miss a few, and -1 marks places it could not fill."""
        self._graph.hnsw.efSearch = max(128, 4 * n)
        results: tuple[NDArray[np.float32], NDArray[np.int64]] = self._graph.search(questions, min(n, len(self)))
        return results


def _faiss() -> Any:
    return import_optional("faiss", "a graph", "index")


def _write_graph(folder: Path, vectors: NDArray[np.float32]) -> None:
    faiss = _faiss()
    graph = faiss.IndexHNSWFlat(vectors.shape[1], _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
    graph.add(vectors)
    faiss.write_index(graph, str(folder / GRAPH))


def nearest(
    questions: NDArray[np.float32], vectors: NDArray[np.float32], n: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The n largest products of each question with the vectors, and the numbers of these vectors, both (questions, n).

    Exact, a block of vectors at a time: a million of width 384 are 1.5 GB read once.
    """
    n = min(n, len(vectors))
    best, numbers = np.full((len(questions), 0), -np.inf, np.float32), np.zeros((len(questions), 0), np.int64)
    for start in range(0, len(vectors), _SEARCH_BLOCK):
        products = questions @ np.asarray(vectors[start : start + _SEARCH_BLOCK]).T
        block_numbers = np.broadcast_to(np.arange(start, start + products.shape[1]), products.shape)
        best = np.concatenate([best, products], axis=1)
        numbers = np.concatenate([numbers, block_numbers], axis=1)
        order = np.argsort(-best, axis=1, kind="stable")[:, :n]
        best, numbers = np.take_along_axis(best, order, 1), np.take_along_axis(numbers, order, 1)
    return best, numbers


@dataclass(frozen=True)
class IndexSummary:
    """What ``build_index`` reports."""

    out: str
    model: str
    files: int
    passages: int
    width: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        return f"{self.out}: {self.passages:,} passages of {self.files:,} files, vectors {self.width} wide"


def build_index(
    files: Sequence[str | Path],
    out: str | Path,
    *,
    model: str,
    words: int = 100,
    column: str | None = None,
    encoding: str = "auto",
    device: str | None = None,
    graph: bool = False,
    progress: Callable[[str], None] = lambda line: None,
) -> IndexSummary:
    """Split texts into passages of at most ``words`` words, embed them, and write the index atomically; with a
    ``graph``, FAISS can search more than a million passages quickly."""
    check_positive(words=words)
    if graph:
        _faiss()  # raise before the work
    check_replaceable(Path(out), "writing an index")
    passages = chain.from_iterable([read_passages(Path(file), words, column, encoding) for file in files])
    opened = open_model(model, device)
    check_can_embed(opened)
    with replace_directory(Path(out)) as folder:
        offsets, vectors = _write_passages(folder, passages, opened, progress)
        if not offsets:
            raise BadData(f"{', '.join(map(str, files))}: there is no text to index")
        np.save(folder / "offsets.npy", np.array(offsets))
        np.save(folder / "vectors.npy", vectors)
        if graph:
            _write_graph(folder, vectors)
        fields = {"model": os.path.abspath(model), "passages": len(offsets), "width": int(vectors.shape[1])}
        write_atomic(folder / "index.json", to_json(fields))
        Manifest.of(folder, None).write(folder)
    return IndexSummary(str(out), model, len(files), len(offsets), int(vectors.shape[1]))


def _write_passages(
    folder: Path, passages: Iterator[Passage], model: Model, progress: Callable[[str], None]
) -> tuple[list[int], NDArray[np.float32]]:
    """Write passages.jsonl; returns the offsets of its lines and the vectors."""
    offsets: list[int] = []
    parts: list[NDArray[np.float32]] = []
    with (folder / "passages.jsonl").open("wb") as file:
        while batch := list(islice(passages, _EMBED_BATCH)):
            for passage in batch:
                offsets.append(file.tell())
                line = json.dumps({"text": passage.text, "place": passage.place}, ensure_ascii=False)
                file.write(line.encode("utf-8", "replace") + b"\n")
            parts.append(embed(model, [passage.text for passage in batch]))
            progress(f"{len(offsets):,} passages")
    return offsets, np.concatenate(parts) if parts else np.zeros((0, model.config.d_model), np.float32)


def read_passages(path: Path, words: int, column: str | None = None, encoding: str = "auto") -> Iterator[Passage]:
    """Split a text file into passages, at ends of lines if possible; each row of a table is one or several passages.

    A file that cannot be opened is refused at once, a line that cannot be read when its turn comes.
    """
    is_table = form_of(path) != "lines"
    records = open_records(path, column if is_table else None, encoding=encoding)
    texts = ([record] for record in records.read()) if is_table else [records.read()]
    return chain.from_iterable(_cut_lines(str(path), text, words) for text in texts)


def _cut_lines(name: str, lines: Iterable[Record], words: int) -> Iterator[Passage]:
    """Join lines up to ``words`` words; a blank line ends a passage of at least half as many."""
    pending: list[str] = []  # words of the current passage
    first = 0
    for record in lines:
        line_words = unicodedata.normalize("NFC", record.text).split()
        if pending and (len(pending) + len(line_words) > words or (not line_words and 2 * len(pending) >= words)):
            yield Passage(" ".join(pending), f"{name}:{first}")
            pending = []
        first = first if pending else record.line
        pending += line_words
        n_full = max(0, len(pending) - 1) // words * words
        yield from (Passage(" ".join(pending[n : n + words]), f"{name}:{first}") for n in range(0, n_full, words))
        pending = pending[n_full:]
    if pending:
        yield Passage(" ".join(pending), f"{name}:{first}")


def open_index(index: PassageIndex | str | Path) -> PassageIndex:
    return index if isinstance(index, PassageIndex) else PassageIndex.open(index)
