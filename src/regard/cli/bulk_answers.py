"""Bulk answers on the command line: printed, as one JSON document, or written to a file, by one process or several.

`regard.generation.bulk_prediction` does the work; this module formats the answers and decides where they go. For
several processes, on this machine or on a Ray cluster, the batches of a file are distributed in shards and collected in
order, so that the output is the same as that of one process with one thread, and a command that was stopped resumes at
the first missing shard. Plain Ray tasks are enough for this: Ray Data would split the file into blocks of its own,
which keep neither the batches nor their order.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.errors import RegardError, UsageError

from . import terminal

if TYPE_CHECKING:
    from regard.data.record_files import Record, Records
    from regard.experiments.sweep_runner import Runner
    from regard.generation.bulk_prediction import Answer, AnswerBatches, Answerer

_LINES_AT_ONCE = 512
_OTHER_TABLES = (".xlsx", ".xls", ".ods", ".json", ".arrow", ".feather", ".orc", ".avro", ".pq", ".db", ".sqlite")


def answer_to_dict(texts: Any) -> Answer:
    fields = ("text", "score", "finish", "tokens")
    return join_texts([{name: getattr(text, name) for name in fields} for text in texts])


def join_texts(texts: list[Answer]) -> Answer:
    """The best text for an input; with several texts, also all of them as n_best."""
    return {**texts[0], **({"n_best": texts} if len(texts) > 1 else {})}


def text_lines(answer: Answer) -> str:
    """One line per text; with several texts for an input, each line begins with the score."""
    texts, echo = answer.get("n_best", [answer]), answer.get("echo", "")
    return "\n".join(f"{x['score']:.4f}\t{echo}{x['text']}" if len(texts) > 1 else f"{echo}{x['text']}" for x in texts)


def text_answerer(
    answer: Callable[[list[str]], list[Answer]],
    column: str,
    check: Callable[[str], bool],
    *,
    line: Callable[[Answer], str] = text_lines,
    n_best: int = 1,
) -> Answerer:
    """The answerer of a command that generates text: answers have a ``text`` and a ``score``; a table gets columns for
    each of the ``n_best`` texts."""
    from regard.generation.bulk_prediction import Answerer

    suffixes = ["", *(f"_{n}" for n in range(2, n_best + 1))]

    def cells(answer: Answer) -> dict[str, Any]:
        texts = zip(suffixes, answer.get("n_best", [answer]), strict=False)
        return {f"{name}{n}": x[key] for n, x in texts for name, key in ((column, "text"), ("score", "score"))}

    new_columns = {f"{name}{n}": kind for n in suffixes for name, kind in ((column, str), ("score", float))}
    return Answerer(answer, {"text": "", "score": None}, new_columns, cells, line, check)


def predict(
    ctx: typer.Context,
    model: str,
    max_len: int,
    answerer: Answerer,
    records: Records | None,
    out: Path | None,
    as_json: bool,
    settings: dict[str, Any],
    **document: Any,
) -> None:
    """Answer records and print the answers or write them to a file; without records, answer stdin line by line."""
    if hand_over(answerer):
        return
    from regard.generation import bulk_prediction as bulk

    if records is None:
        if out is not None:
            raise UsageError(f"--stream answers on stdout: leave out --out {out}")
        _answer_stdin(answerer, as_json)
        return
    if records.form == "parquet" and out is None and not as_json:
        raise UsageError(f"{records.name} cannot be printed: give --out F.parquet or --json")
    summary = bulk.check_records(records, answerer.check)  # raises before anything is written if a record is refused
    if out is not None:
        settings = {"model": model, "weights": bulk.newest_weights(model), **settings}
        options: dict[str, Any] = {"batch_size": _LINES_AT_ONCE, "progress": terminal.progress}
        with answer_elsewhere(ctx, n_batches=-(-summary.n_rows // _LINES_AT_ONCE)) as options["answer_batches"]:
            bulk.predict_to_file(records, answerer, summary, out, settings=settings, **options)
        document |= {"out": str(out), **summary.to_dict()}
    else:
        document["results"] = _answer_records(records, answerer, summary.n_rows, as_json)
    if as_json:
        terminal.print_json({"model": model, **document})
    if out is not None or summary.n_cut:
        terminal.progress(f"{summary.to_text(max_len)}{'' if out is None else f'; wrote {out}'}")


def _answer_stdin(answerer: Answerer, as_json: bool) -> None:
    from regard.data.record_files import text_records
    from regard.generation import bulk_prediction as bulk

    for number, text in enumerate(terminal.stdin_lines(), start=1):
        record = text_records([text], "stdin", number)
        bulk.check_records(record, answerer.check)
        ((_, answer),) = next(bulk.answer_records(record.read(), answerer, 1))
        line = terminal.one_line(answerer.line(answer))
        _write(json.dumps({"input": text, **answer}, ensure_ascii=False) if as_json else line)


def _answer_records(records: Records, answerer: Answerer, n_rows: int, as_json: bool) -> list[Answer]:
    """Answer records and print them as lines or as the table that they came from; with ``as_json``, return them."""
    from regard.data.record_files import row_encoder
    from regard.generation import bulk_prediction as bulk

    results: list[Answer] = []
    new, join = bulk.table_rows(records, answerer)
    encode = row_encoder(records.form, records, new)
    is_table, n_done = records.form not in ("lines", "folder"), 0
    if is_table and not as_json:
        _write(encode(None).decode(), end="")
    for answered in bulk.answer_records(records.read(), answerer, _LINES_AT_ONCE):
        n_done += len(answered)
        if as_json:
            results += [{"input": record.text, **answer} for record, answer in answered]
        elif is_table:
            _write("".join(encode(join(*pair)).decode() for pair in answered), end="")
        else:
            _write("\n".join(_with_name(records, *pair, answerer) for pair in answered))
        if records.name:
            terminal.progress(f"{n_done:,} of {n_rows:,} {'lines' if records.form == 'lines' else 'rows'}")
    return results


def _with_name(records: Records, record: Record, answer: Answer, answerer: Answerer) -> str:
    """An answer as a line; for an image in a folder, the line begins with its name."""
    line = answerer.line(answer)
    return f"{record.fields['image']}\t{line}" if records.form == "folder" else line


def _write(text: str, end: str = "\n") -> None:
    sys.stdout.write(f"{text}{end}")
    sys.stdout.flush()


# ------------------------------------------------------------------------------------- by several processes


_SHARD_BATCHES = 8  # batches of 512 texts: enough work to hide the transfer
_MAX_ATTEMPTS = 3  # for a shard whose process was killed
# In a worker, the command runs until it would start to answer, and leaves its answerer here.
_answerers: ContextVar[list[Answerer] | None] = ContextVar("answerers", default=None)


@dataclass(frozen=True)
class Shard:
    """Batches of texts, and the command that answers them."""

    command: str
    params: bytes  # the pickled parameters of the command; shards with the same parameters share one open model
    batches: list[list[str]]


def hand_over(answerer: Answerer) -> bool:
    """In a worker, keep the answerer for ``_open_answerer`` and return True: the command is done. Otherwise False."""
    if (answerers := _answerers.get()) is None:
        return False
    answerers.append(answerer)
    return True


@lru_cache(maxsize=1)
def _open_answerer(command: str, params: bytes) -> Answerer:
    """The answerer of a command, which is run in this worker for the sake of ``hand_over``."""
    from regard.cli import build_commands

    from .options import GlobalOptions

    callback = build_commands("en").commands[command]
    answerers: list[Answerer] = []
    token = _answerers.set(answerers)
    try:
        with typer.Context(callback, info_name=command, obj=GlobalOptions()) as context:
            context.params = pickle.loads(params)  # written by this program, for its own workers
            callback.callback(**context.params)
    finally:
        _answerers.reset(token)
    return answerers[0]


def answer_shard(shard: Shard) -> list[list[Answer]]:
    """Answer a shard in a worker, which has one core."""
    import torch

    torch.set_num_threads(1)
    return list(_open_answerer(shard.command, shard.params).answer_batches(shard.batches))


def uses_workers(ctx: typer.Context) -> bool:
    """Whether --on or --jobs requests other processes."""
    return ctx.params["on"] != "local" or (ctx.params["jobs"] or 1) > 1


def check_files(ctx: typer.Context) -> None:
    """Raise for an --out that cannot be written, an unknown --on, and workers without --file and --out."""
    from regard.data.record_files import TABLE_SUFFIXES, form_of
    from regard.experiments.sweep_runner import check_runner

    on, jobs, file, out = (ctx.params[name] for name in ("on", "jobs", "file", "out"))
    from_table = file is not None and form_of(file) not in ("lines", "folder")
    suffix = "" if out is None else out.suffix.lower()
    is_odd = suffix in _OTHER_TABLES or (from_table and suffix not in ("", ".gz"))
    terminal.check_out(out, (*TABLE_SUFFIXES, ".txt") if is_odd else (), source=file)
    check_runner(on)
    if uses_workers(ctx) and None in (file, out):
        option = f"--jobs {jobs}" if on == "local" else f"--on {on}"
        raise UsageError(f"{option} needs a file of inputs and one for the answers: --file F --out F")


@contextmanager
def answer_elsewhere(ctx: typer.Context, n_batches: int) -> Iterator[AnswerBatches | None]:
    """Context with a function that answers batches in other processes; None if this process is to answer them."""
    if not uses_workers(ctx):
        yield None
        return
    from regard.experiments.sweep_runner import open_runner

    command, params = str(ctx.info_name), pickle.dumps({**ctx.params, "on": "local", "jobs": None})
    with open_runner(ctx.params["on"], ctx.params["jobs"], -(-n_batches // _SHARD_BATCHES) or 1, fresh=False) as runner:
        yield lambda batches: _answer_in_order(runner, command, params, batches)


def _answer_in_order(
    runner: Runner, command: str, params: bytes, batches: Iterator[list[str]]
) -> Iterator[list[Answer]]:
    shards = iter(lambda: Shard(command, params, list(islice(batches, _SHARD_BATCHES))), Shard(command, params, []))
    waiting: deque[tuple[Shard, Future[list[list[Answer]]]]] = deque()

    def send(n: int) -> None:
        waiting.extend((shard, runner.submit(answer_shard, shard)) for shard in islice(shards, n))

    send(2 * runner.workers)
    while waiting:
        shard, future = waiting.popleft()
        answers = _result(runner, shard, future)
        send(1)
        yield from answers


def _result(runner: Runner, shard: Shard, future: Future[list[list[Answer]]]) -> list[list[Answer]]:
    """The answers of a shard; one whose process was killed is sent again."""
    from regard.experiments.sweep_runner import JobFailed, JobLost

    for attempt in range(1, _MAX_ATTEMPTS + 1):
        try:
            return future.result()
        except JobLost as lost:
            if attempt == _MAX_ATTEMPTS:
                raise RegardError(
                    f"a shard was lost {attempt} times: {lost}; run the same command to resume there"
                ) from None
            future = runner.submit(answer_shard, shard)
        except JobFailed as failed:
            raise RegardError(f"a shard cannot be answered: {failed}") from None
    raise AssertionError("unreachable: the last attempt returns or raises")
