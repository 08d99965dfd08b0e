"""Training: tasks, losses, optimisers, the training loop, evaluation and atomic checkpoints."""

from .back_translation import back_translate
from .distillation import distill
from .evaluation import EvaluationReport, evaluate
from .loop import StepRecord
from .tasks import Task
from .trainer import TrainResult, resume, train

# fmt: off
__all__ = [
    "EvaluationReport", "StepRecord", "Task", "TrainResult", "back_translate", "distill", "evaluate", "resume", "train",
]
# fmt: on
