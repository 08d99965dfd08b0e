"""Bulk answers by several processes, on this machine or on a Ray cluster.

The batches of a file are distributed in shards and collected in order, so that the output is the same as that of one
process with one thread, and a command that was stopped resumes at the first missing shard. Plain Ray tasks are enough
for this: Ray Data would split the file into blocks of its own, which keep neither the batches nor their order.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING

import typer

from regard.errors import RegardError, UsageError

if TYPE_CHECKING:
    from regard.experiments.sweep_runner import Runner
    from regard.generation.bulk_prediction import Answer, AnswerBatches, Answerer

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


def check_workers(ctx: typer.Context) -> None:
    """Raise UsageError for an unknown --on, and for workers without --file and --out."""
    from regard.experiments.sweep_runner import check_runner

    on, jobs = ctx.params["on"], ctx.params["jobs"]
    check_runner(on)
    if uses_workers(ctx) and (ctx.params["file"] is None or ctx.params["out"] is None):
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
