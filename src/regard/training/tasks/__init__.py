"""The tasks: data, batches, loss and metrics of each kind of training. Code outside this package names none of them."""

from __future__ import annotations

from collections.abc import Mapping

from ...config import ModelConfig, RunConfig
from ...data.sources import Source
from ...errors import UsageError
from ...recipes import unfit_model
from ...text.processor import Processor
from ..loss import batch_loss
from .captioning import CaptionTask
from .chat_tuning import SupervisedFineTuning
from .classification import Classify, ClassifyImages
from .contrast import ContrastTask
from .embedding import Embed
from .language_modelling import LanguageModel, MaskedLanguageModel, TextTask
from .preference_tuning import DirectPreferenceOptimisation
from .question_answering import AnswerQuestions
from .replaced_tokens import ReplacedTokens
from .tagging import Tag
from .task import ExampleResult, Scores, Task
from .translation import Translate

__all__ = ["TASKS", "ExampleResult", "Scores", "Task", "TextTask", "open_task", "task_class_of"]

_CLASSES = (
    Translate,
    LanguageModel,
    MaskedLanguageModel,
    SupervisedFineTuning,
    DirectPreferenceOptimisation,
    Classify,
    ClassifyImages,
    Tag,
    CaptionTask,
    Embed,
    AnswerQuestions,
    ContrastTask,
    ReplacedTokens,
)
_KIND_NAMES = {
    "pairs": "pairs of texts",
    "text": "plain text",
    "labelled": "labelled texts",
    "tagged": "sentences with tags",
    "captions": "images with captions",
    "images": "labelled images",
    "chats": "chats",
    "preferences": "preferences",
    "triplets": "triplets",
    "questions": "questions with passages",
}
TASKS: Mapping[str, type[Task]] = {task.name: task for task in _CLASSES}


def open_task(
    config: RunConfig, source: Source, processor: Processor | None = None, task_class: type[Task] | None = None
) -> Task:
    """The task of a run, with the tokenizers of ``processor`` if given, else with new ones."""
    task_class = task_class or TASKS[config.task]
    if source.kind not in task_class.kinds:
        needed = " or ".join(_KIND_NAMES[kind] for kind in task_class.kinds)
        names = source.schema.names if source.schema is not None else ()
        columns = f" (its columns are {', '.join(names)}; data.columns=… says which to take)" if names else ""
        present = _KIND_NAMES[source.kind]
        raise ValueError(f"{source.name} holds {present}, but task {config.task!r} learns from {needed}{columns}")
    if not task_class.accepts(config.model):
        raise UsageError(unfit_model(config.task, config.model.model_dump()))
    task_class.check_config(config)
    _check_regularisation(config, task_class)
    return task_class(config, source, processor)


def _check_regularisation(config: RunConfig, task_class: type[Task]) -> None:
    if config.train.language_model is not None and config.task != "caption":
        raise UsageError(f"train.language_model writes captions; the task {config.task} has none")
    if config.data.bpe_dropout and not issubclass(task_class, Translate):
        raise UsageError(f"data.bpe_dropout is for the task translate, not for {config.task}")
    if config.train.r_drop and (task_class.loss is not batch_loss or config.data.problem_type != "single_label"):
        raise UsageError("train.r_drop compares probabilities of tokens or classes, which this loss does not have")


def task_class_of(model_name: str, model: ModelConfig) -> type[Task]:
    """The task of a model without a run, by its architecture, input and head."""
    for task_class in TASKS.values():
        if task_class.accepts(model):
            return task_class
    raise ValueError(
        f"{model_name} is a model with architecture={model.architecture!r}, source={model.source!r} and "
        f"head={model.head!r}, for which there is no task"
    )
