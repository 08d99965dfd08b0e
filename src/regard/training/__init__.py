"""From logits to weights: tasks, the loss, the recipe, one straight loop, checkpoints that are never half written."""

from .distillation import distill
from .evaluation import evaluate
from .evaluation_report import EvaluationReport
from .loop import StepRecord
from .tasks import Task
from .trainer import TrainResult, resume, train

__all__ = ["EvaluationReport", "StepRecord", "Task", "TrainResult", "distill", "evaluate", "resume", "train"]
