"""What a sweep asks of its runs: which metrics are better when smaller, and which runs were never asked for one."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..foundation.suggestions import did_you_mean
from .sweep import Sweep

__all__ = ["not_asked", "smaller_is_better"]

_SMALLER = (
    *("loss", "nll", "perplexity", "ppl", "bits", "bpb", "error", "errors", "mse", "rmse", "mae", "cer", "wer", "ter"),
    *("seconds", "time", "latency", "ms", "memory", "mib", "bytes", "flops", "parameters"),
)


def smaller_is_better(metric: str) -> bool:
    """Told from the words of its name: test_loss, loss_4x, cer, memory_mib."""
    return not set(_SMALLER).isdisjoint(re.split(r"[^a-z]+", metric.lower()))


def not_asked(sweep: Sweep, runs: Sequence[dict[str, Any]]) -> list[str]:
    """What finished runs do not answer: they were done before it was asked, and are not run again."""
    done, lines = [x for x in runs if x["status"] == "done"], list[str]()
    if not done:
        return lines
    for name, source in sweep.tests.items():
        for other, n in Counter(_evaluated_on(x, name, source) for x in done).items():
            if other is None:
                lines.append(f"{_of(n, done)} not evaluated on {name}: done before it was asked")
            elif other != source:
                lines.append(f"{_of(n, done)} evaluated on {name}={other}, not {source}")
    for measure in sweep.measures:
        if n := sum(measure not in x.get("measures", (measure,)) for x in done):
            lines.append(f"{_of(n, done)} not measured by {measure}: done before it was asked")
    return lines + _unknown_metrics(sweep, done)


def _of(n: int, done: Sequence[Any]) -> str:
    return f"{n} of {len(done)} finished runs {'was' if n == 1 else 'were'}"


def _evaluated_on(run: dict[str, Any], name: str, asked: str) -> str | None:
    """The source of a test; a result that does not say is judged by its metrics."""
    if isinstance(run.get("tests"), dict):
        return run["tests"].get(name)
    return asked if any(metric.startswith(f"{name}_") for metric in run["metrics"]) else None


def _unknown_metrics(sweep: Sweep, done: Sequence[dict[str, Any]]) -> list[str]:
    answers = [pair for x in done for pair in (*x.items(), *x["metrics"].items())]
    known = {name for name, value in answers if isinstance(value, int | float) and not isinstance(value, bool)}
    reasons = {name for x in done for name in x["metrics"].get("cannot") or ()}
    lines = []
    for name in sweep.metrics:
        if name not in known | reasons:
            test = name.partition("_")[0]
            hint = (
                "; --test gives it" if test == "test" and test not in sweep.tests else did_you_mean(name, sorted(known))
            )
            lines.append(f"no finished run has the metric {name}{hint}")
    return lines
