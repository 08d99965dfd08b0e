"""Bulk prediction: an answer for every record of a file; all records are checked first, and a stopped job resumes.

Answers go to ``OUT.partial`` as JSON lines, a batch at a time. Once all are there, OUT is written atomically, with each
answer next to its record. A command that was stopped resumes where its partial file ends.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from ..config import ModelConfig
from ..data.images import check_image
from ..data.record_files import Record, Records, form_of, free_name, write_records
from ..errors import BadData
from ..foundation.files import atomic_file
from .prompts import MAX_PIXELS, max_text_length

Answer = dict[str, Any]  # the answer to one input, as printed by `--json`
AnswerBatches = Callable[[Iterator[list[str]]], Iterator[list[Answer]]]  # batches of texts → their answers, in order

_WEIGHTS = (".safetensors", ".onnx", ".bin", ".gguf")


@dataclass(frozen=True)
class Answerer:
    """How one command answers texts or images, and how its answers are written."""

    answer: Callable[[list[str]], list[Answer]]
    blank: Answer  # the answer to a blank text
    new_columns: Mapping[str, type]  # columns added to a table: their names, with str or float
    cells: Callable[[Answer], dict[str, Any]]  # an answer as values of the new columns
    line: Callable[[Answer], str]  # an answer as a line of a text file
    check: Callable[[str], bool]  # whether a text will be cut; raises ValueError or BadData if it cannot be answered

    def answer_batches(self, batches: Iterable[list[str]]) -> Iterator[list[Answer]]:
        return (self.answer(texts) if texts else [] for texts in batches)


@dataclass
class PredictionSummary:
    """The counts that a bulk prediction reports."""

    n_rows: int = 0
    n_blank: int = 0
    n_resumed: int = 0  # rows answered by an earlier, stopped command
    cut: list[int] = field(default_factory=list)  # the first few lines that were cut to the model's max_len
    n_cut: int = 0
    columns: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        return {"rows": self.n_rows, "blank": self.n_blank, "resumed": self.n_resumed, "cut": self.n_cut}

    def to_text(self, max_len: int) -> str:
        parts = [f"{self.n_rows:,} rows"]
        parts += [f"{self.n_resumed:,} of them answered before"] if self.n_resumed else []
        parts += [f"{self.n_blank:,} blank"] if self.n_blank else []
        if self.n_cut:
            lines = ", ".join(map(str, self.cut)) + (" …" if self.n_cut > len(self.cut) else "")
            parts.append(f"{self.n_cut:,} cut to max_len={max_len} (line{'s' * (self.n_cut != 1)} {lines})")
        parts += [f"new columns {', '.join(self.columns)}"] if self.columns else []
        return "; ".join(parts)


def text_check(encode: Callable[[list[str]], list[list[int]]], config: ModelConfig, truncate: bool) -> Any:
    """An ``Answerer.check`` for texts: False if a text fits, True if it will be cut; ValueError if it must not be."""
    is_prompt, max_len = config.architecture == "decoder", max_text_length(config)

    def check(text: str) -> bool:
        n_tokens = len(encode([text])[0]) + is_prompt  # a prompt must leave room for one more token
        if n_tokens > max_len and not truncate:
            limit = "and max_len={} leaves no room" if is_prompt else "but max_len={}"
            kept = "end" if is_prompt else "beginning"
            raise ValueError(f"{n_tokens - is_prompt} tokens, {limit.format(max_len)}; truncate=True keeps its {kept}")
        return n_tokens > max_len

    return check


def image_check(name: str) -> bool:
    """The ``Answerer.check`` for image files."""
    if (fault := check_image(Path(name), MAX_PIXELS, decode=True)) is not None:
        raise BadData(f"{name}: {fault}")
    return False


def check_records(records: Records, check: Callable[[str], bool]) -> PredictionSummary:
    """Count and check every record before the first is answered; an error names the record's line in the file."""
    summary = PredictionSummary()
    for record in records.read():
        summary.n_rows += 1
        if not record.text.strip():
            summary.n_blank += 1
            continue
        try:
            is_cut = check(record.text)
        except BadData as error:  # names the image, which identifies a record of these forms
            if records.form in ("lines", "folder"):
                raise
            raise BadData(f"{records.place(record.line)}: {error}") from None
        except ValueError as error:
            message = re.sub(r"^(source|prompt|text) 0 is ", "", str(error))
            raise BadData(f"{records.place(record.line)}: {message}") from None
        if is_cut:
            summary.n_cut += 1
            summary.cut += [record.line] if len(summary.cut) < 10 else []
    return summary


def answer_records(
    records: Iterator[Record], answerer: Answerer, batch_size: int, answer_batches: AnswerBatches | None = None
) -> Iterator[list[tuple[Record, Answer]]]:
    """Records with their answers, ``batch_size`` at a time; a blank record gets the blank answer.

    ``answer_batches`` replaces ``answerer.answer_batches``; it may read ahead to answer several batches at once.
    """
    waiting: deque[list[Record]] = deque()

    def batches() -> Iterator[list[str]]:
        while batch := list(islice(records, batch_size)):
            waiting.append(batch)
            yield [record.text for record in batch if record.text.strip()]

    for batch_answers in (answer_batches or answerer.answer_batches)(batches()):
        answers = iter(batch_answers)
        yield [(record, next(answers) if record.text.strip() else answerer.blank) for record in waiting.popleft()]


def predict_to_file(
    records: Records,
    answerer: Answerer,
    summary: PredictionSummary,
    out: Path,
    *,
    settings: Mapping[str, Any],
    batch_size: int,
    progress: Callable[[str], None] = lambda line: None,
    lines: Callable[[Record, Answer], str] | None = None,
    answer_batches: AnswerBatches | None = None,
) -> None:
    """Answer all records and write them to ``out``, in the format of its file name or as ``lines(record, answer)``.

    ``settings`` are everything the answers depend on: a partial file with other settings is not resumed.
    """
    partial = out.with_name(f"{out.name}.partial")
    with _open_partial(partial, {**settings, **_identity(records)}) as (file, n_done, is_other):
        summary.n_resumed = n_done
        if n_done:
            progress(f"{partial}: resuming after {n_done:,} rows")
        elif is_other:
            progress(f"{partial} holds answers of another command, file or model: starting from the first row")
        rest = islice(records.read(), n_done, None)
        try:
            for answered in answer_records(rest, answerer, batch_size, answer_batches):
                file.write("".join(f"{json.dumps(answer)}\n" for _, answer in answered).encode())
                file.flush()
                n_done += len(answered)
                progress(f"{n_done:,} of {summary.n_rows:,} rows")
        except KeyboardInterrupt:
            progress(f"stopped after {n_done:,} of {summary.n_rows:,} rows; run the same command again to resume")
            raise
    form = form_of(out)
    with atomic_file(out) as target:
        if form == "lines" and lines is None:  # from the answers alone, without reading the input again
            texts = (f"{answerer.line(answer)}\n" for answer in read_partial(partial))
            target.writelines(text.encode("utf-8", "surrogatepass") for text in texts)
        elif lines is not None:
            pairs = zip(records.read(), read_partial(partial), strict=True)
            target.writelines(lines(*pair).encode("utf-8", "surrogatepass") for pair in pairs)
        else:
            pairs = zip(records.read(), read_partial(partial), strict=True)
            new, join = table_rows(records, answerer)
            summary.columns = list(new)
            write_records(target, form, records, new, (join(record, answer) for record, answer in pairs))
    partial.unlink()


def table_rows(
    records: Records, answerer: Answerer
) -> tuple[dict[str, type], Callable[[Record, Answer], dict[str, Any]]]:
    """The new columns of a table, renamed if their names are taken, and a function that adds them to a record."""
    names = {name: free_name(name, records.columns) for name in answerer.new_columns}

    def join(record: Record, answer: Answer) -> dict[str, Any]:
        cells = answerer.cells(answer)
        return record.fields | {column: cells.get(name) for name, column in names.items()}

    return {column: answerer.new_columns[name] for name, column in names.items()}, join


def read_partial(path: Path) -> Iterator[Answer]:
    """The answers of a partial file."""
    with path.open("rb") as file:
        next(file)
        for line in file:
            yield json.loads(line)


def newest_weights(model: str) -> float:
    """When a model's weights were last written; answers by other weights are not resumed."""
    path = Path(model) if Path(model).is_file() else Path(model.partition("@")[0])
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.suffix in _WEIGHTS]
    return max((file.stat().st_mtime for file in files), default=0.0)


def _identity(records: Records) -> dict[str, Any]:
    """What identifies these records: the size and time of a file, or a hash of their texts."""
    path = Path(records.name)
    if path.is_file():
        stat = path.stat()
        state = {"column": records.column, "encoding": records.encoding, "state": [stat.st_size, stat.st_mtime_ns]}
        return {"file": str(path.resolve()), **state}
    digest = hashlib.sha256()
    for record in records.read():
        digest.update(f"{record.text}\n".encode("utf-8", "surrogatepass"))
    return {"file": records.name, "sha256": digest.hexdigest()}


@contextmanager
def _open_partial(path: Path, settings: dict[str, Any]) -> Iterator[tuple[IO[bytes], int, bool]]:
    """The partial file, open at its end, how many answers it has, and whether it had others: those of other settings
    are not kept."""
    head = f"{json.dumps(settings, sort_keys=True, default=str)}\n".encode()
    n_bytes, n_done, is_other = 0, 0, False
    if path.is_file():
        with path.open("rb") as file:
            is_other = next(file, b"") != head
            if not is_other:
                n_bytes = len(head)
                for line in file:
                    if not line.endswith(b"\n"):  # incomplete: the process died while writing it
                        break
                    n_bytes, n_done = n_bytes + len(line), n_done + 1
    with path.open("ab" if n_bytes else "wb") as file:
        if n_bytes:
            file.truncate(n_bytes)
        else:
            file.write(head)
        yield file, n_done, is_other
