"""From logits to weights: tasks, the loss, the recipe, one straight loop, checkpoints that are never half written."""

from .back_translation import back_translate
from .distillation import distill
from .evaluation import evaluate
from .evaluation_report import EvaluationReport
from .loop import StepRecord
from .tasks import Task
from .trainer import TrainResult, resume, train

__all__ = [
    "EvaluationReport",
    "StepRecord",
    "Task",
    "TrainResult",
    "back_translate",
    "distill",
    "evaluate",
    "resume",
    "train",
]
