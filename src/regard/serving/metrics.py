"""Counts and latencies of requests and schedulers, in Prometheus' text format.

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
_METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}  # invented ones are counted as "other"
_GAUGES = ("waiting", "running", "rows")  # the other fields of SchedulerStatistics are counters

Labels = Mapping[str, str | int]
Sample = tuple[str, Labels, float]  # suffix of the metric's name, labels, value


@dataclass
class SchedulerStatistics:
    """The current load of a scheduler, and counts since it started."""

    waiting: int = 0
    running: int = 0  # requests, including those whose prompt is being read
    rows: int = 0  # rows of all batches
    accepted: int = 0
    refused: int = 0  # because the queue was full
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    prefix_tokens: int = 0  # prompt tokens found in the prefix cache
    written_tokens: int = 0


@dataclass
class Histogram:
    """How many durations fell below each bound, and their sum."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds

    def samples(self, labels: Labels) -> Iterator[Sample]:
        n = 0
        for bound, count in zip((*map(str, _BOUNDS), "+Inf"), self.counts, strict=True):
            n += count
            yield "_bucket", {**labels, "le": bound}, n
        yield "_sum", labels, self.total
        yield "_count", labels, n


class RequestMetrics:
    """The counts of the operations layer; only touched in the event loop's thread."""

    def __init__(self) -> None:
        self.in_progress, self.reloads = 0, 0
        self.requests: Counter[tuple[str, str, int]] = Counter()  # (method, route, status)
        self.keys: Counter[tuple[str, int]] = Counter()  # (name of the key, status)
        self.first_byte: dict[str, Histogram] = defaultdict(Histogram)  # by route
        self.seconds: dict[str, Histogram] = defaultdict(Histogram)  # by route

    def observe(self, method: str, route: str, status: int, key: str, first_byte: float, seconds: float) -> None:
        self.requests[method if method in _METHODS else "other", route, status] += 1
        if key:
            self.keys[key, status] += 1
        self.first_byte[route].observe(first_byte)
        self.seconds[route].observe(seconds)

    def to_text(self, schedulers: Mapping[str, Any]) -> str:
        """All metrics in the text format; ``schedulers`` maps each model to its ``SchedulerStatistics``."""
        requests: list[Sample] = [
            ("", {"method": m, "route": r, "status": s}, n) for (m, r, s), n in sorted(self.requests.items())
        ]
        keys: list[Sample] = [("", {"key": key, "status": status}, n) for (key, status), n in sorted(self.keys.items())]
        parts = [
            _metric("requests_total", "counter", "Requests answered.", requests),
            _metric("key_requests_total", "counter", "Requests answered, by API key.", keys),
            _metric("requests_in_progress", "gauge", "Requests being answered.", [("", {}, self.in_progress)]),
            _metric("reloads_total", "counter", "Reloads of the models.", [("", {}, self.reloads)]),
            _metric("first_byte_seconds", "histogram", "Time to the first byte.", _histograms(self.first_byte)),
            _metric("request_seconds", "histogram", "Time to the complete response.", _histograms(self.seconds)),
        ]
        numbers = {model: asdict(statistics) for model, statistics in schedulers.items()}
        for name in next(iter(numbers.values()), {}):
            samples = [("", {"model": model}, values[name]) for model, values in numbers.items()]
            kind, suffix = ("gauge", "") if name in _GAUGES else ("counter", "_total")
            parts.append(_metric(f"scheduler_{name}{suffix}", kind, f"{name} of a model's scheduler.", samples))
        return "".join(parts)


def _histograms(by_route: Mapping[str, Histogram]) -> Iterator[Sample]:
    for route, histogram in sorted(by_route.items()):
        yield from histogram.samples({"route": route})


def _metric(name: str, kind: str, about: str, samples: Iterable[Sample]) -> str:
    lines = [f"# HELP regard_{name} {about}", f"# TYPE regard_{name} {kind}"]
    for suffix, labels, value in samples:
        pairs = ",".join(f'{key}="{_escape(str(text))}"' for key, text in labels.items())
        lines.append(f"regard_{name}{suffix}{{{pairs}}} {value}" if pairs else f"regard_{name}{suffix} {value}")
    return "\n".join([*lines, ""])


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
