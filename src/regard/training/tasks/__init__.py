"""The tasks: what each makes of its data, and what it asks of a model. The loop knows none of them by name."""

from __future__ import annotations

from collections.abc import Mapping

from ...config import RunConfig
from ...data.sources import Source
from ...text.processor import Processor
from .captioning import Caption
from .classification import Classify, ClassifyImages
from .language_modelling import LanguageModel, MaskedLanguageModel
from .task import Evaluation, Row, Task
from .translation import Translate

__all__ = ["TASKS", "Evaluation", "Row", "Task", "open_task"]

TASKS: Mapping[str, type[Task]] = {
    "translate": Translate,
    "lm": LanguageModel,
    "mlm": MaskedLanguageModel,
    "classify": Classify,
    "classify-images": ClassifyImages,
    "caption": Caption,
}


def open_task(config: RunConfig, source: Source, processor: Processor | None = None) -> Task:
    """The task of a run: with the tokenizers of ``processor`` where there is one, else with new ones."""
    kind = TASKS[config.task]
    if source.kind not in kind.kinds:
        wanted = " or ".join(kind.kinds)
        raise ValueError(f"{source.name} holds {source.kind}, but task {config.task!r} learns from {wanted}")
    return kind(config, source, processor)
