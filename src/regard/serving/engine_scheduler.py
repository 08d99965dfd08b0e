"""The same API over runtimes that only return finished texts (CTranslate2): requests with equal configs share a batch.

A stream from such a runtime is a single piece, and options that it lacks (log P, stop strings, response formats) are
refused by name. The torch model is loaded as well: it encodes the inputs and computes attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

from ..export.engines import Engine, OnnxEngine, open_engine
from ..generation.beam_search import Hypothesis
from ..models import Model
from ..web.requests import Limits
from ..web.served_models import ServedModel, name_models, open_models
from .api_models import ApiModel
from .running_text import FailureEvent, SearchEvent, TextRequest
from .scheduler import Scheduler

ServingEngine = Literal["torch", "onnx", "ctranslate2"]


class EngineScheduler(Scheduler):
    """A scheduler that hands batches of requests with the same config to an engine."""

    def __init__(self, model: Model, engine: Engine, **options: Any) -> None:
        self.engine = engine
        super().__init__(model, **options)

    def submit(self, *requests: TextRequest) -> None:
        for request in requests:
            options = request.new_constraint, request.strings, request.n_top
            if options != (None, None, None) or request.reading.limit == 0:
                names = "response_format, stop, logprobs and max_tokens=0"
                raise ValueError(f"the {self.engine.name} engine does not support {names}; use --engine torch")
        super().submit(*requests)

    def _advance_texts(self) -> None:
        """Decode one batch of waiting requests to their ends."""
        requests = self._next_batch()
        if not requests:
            return
        self._count()
        for request in requests:
            request.started = time.monotonic()
            self.statistics.prompt_tokens += request.n_prompt
        try:
            hypotheses = self._decode(requests)
        except Exception as error:
            for request in requests:
                self.end(request, FailureEvent(error))
            return
        for request, hypothesis in zip(requests, hypotheses, strict=True):
            request.n_tokens += len(hypothesis.tokens)
            self.statistics.written_tokens += len(hypothesis.tokens)
            self.report(request, SearchEvent([hypothesis]), is_urgent=True)
            self.end(request)

    def _next_batch(self) -> list[TextRequest]:
        """Take the next request out of the queue, with as many others of the same config as fit into a batch."""
        with self._changed:
            waiting = self._waiting.in_order()
            matching = [request for request in waiting if request.config == waiting[0].config]
            batch = matching[: max(1, self.max_rows // matching[0].size)] if matching else []
            self._waiting.remove(set(batch))
            self._running |= set(batch)
        return batch

    def _decode(self, requests: Sequence[TextRequest]) -> list[Hypothesis]:
        """The text of each request; an engine returns no scores."""
        config = requests[0].config
        if config.beam > 1:
            config = config.with_(early_stopping=self.engine.early_stopping)
        inputs = [request.reading.inputs for request in requests]
        rows = [one.rows[0] if one.sources is None else one.sources[0].tolist() for one in inputs]
        limits = [request.reading.limit for request in requests]
        return [
            Hypothesis(tokens, math.nan, "length" if len(tokens) >= limit else "end", 0, [0] * len(tokens))
            for tokens, limit in zip(self.engine.write(rows, config), limits, strict=True)
        ]


def open_served(
    paths: Sequence[str | Path], device: str, engine: ServingEngine, limits: Limits
) -> list[ServedModel | ApiModel]:
    """Load runs and model directories for an engine."""
    if engine == "torch":
        return list(open_models(paths, device))
    if engine == "onnx":
        return list(name_models([(str(path), cast(OnnxEngine, open_engine(path, engine)).model) for path in paths]))
    models = open_models(paths, "cpu")
    return [
        ApiModel(served, limits, EngineScheduler(served.model, open_engine(path, engine), max_waiting=limits.waiting))
        for served, path in zip(models, paths, strict=True)
    ]
