"""From logits to weights: tasks, the loss, the recipe, one straight loop, checkpoints that are never half written."""

from .evaluating import EvaluationReport, evaluate
from .trainer import TrainResult, resume, train

__all__ = ["EvaluationReport", "TrainResult", "evaluate", "resume", "train"]
