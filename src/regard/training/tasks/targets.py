"""The targets of a classifier (``data.problem_type``): one class, any number of labels, or a number.

A Target turns labels into tensors, formats answers as text, and computes their metrics.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from ...data.examples import Label, label_text
from ...foundation.jsonio import to_jsonable
from ..loss import label_losses
from ..metrics import classification_metrics
from ..metrics.statistics import Statistics


@dataclass(frozen=True)
class Answers:
    """The answers of a model, with their scores and metrics."""

    outputs: list[str]
    scores: list[float]  # one per answer, at most 1
    metrics: dict[str, float]
    details: dict[str, Any]


class Target(ABC):
    """Base class of targets; ``labels`` are the names of the classes."""

    problem_type: ClassVar[Any]
    criterion: ClassVar[str]
    metric_keys: ClassVar[Mapping[str, str]]

    def __init__(self, labels: tuple[str, ...]) -> None:
        self.labels = labels

    @property
    def n_outputs(self) -> int:
        """The number of logits per input."""
        return len(self.labels)

    @abstractmethod
    def tensor(self, labels: Sequence[Label]) -> Tensor:
        """The targets of a batch."""

    @abstractmethod
    def measure(self, logits: Tensor, labels: Sequence[Label]) -> Answers:
        """The answers given by logits (N, n_outputs), scored against the true labels."""

    @abstractmethod
    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> list[Statistics]:
        """The contribution of each answer to each metric, for paired comparisons."""

    def losses(self, logits: Tensor, labels: Sequence[Label]) -> Tensor:
        """The loss of each example (N,)."""
        losses = label_losses(logits, self.tensor(labels), self.problem_type)
        return losses if losses.dim() == 1 else losses.mean(-1)

    def text(self, label: Label) -> str:
        return label_text(label, self.labels)

    def balanced_weights(self, labels: Sequence[Label]) -> Tensor:
        """The factor of each class for ``train.class_weights=balanced``."""
        raise NotImplementedError

    def weights(self, factors: Tensor, targets: Tensor) -> Tensor:
        """The factor of each target of a batch, from the factors of the classes."""
        return factors[targets.clamp(min=0)]  # ignored targets are negative; their loss is 0


class OneClass(Target):
    """Softmax over classes."""

    problem_type = "single_label"
    criterion = "accuracy"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "accuracy": "accuracy", "macro_f1": "f1"}

    def tensor(self, labels: Sequence[Label]) -> Tensor:
        return torch.tensor(labels)

    def measure(self, logits: Tensor, labels: Sequence[Label]) -> Answers:
        """The score of an answer is the probability of the true class."""
        predicted, probabilities = logits.argmax(-1).tolist(), logits.softmax(-1)
        results = classification_metrics.classification(predicted, cast(Sequence[int], labels), self.labels)
        scores = [float(probabilities[i, cast(int, label)]) for i, label in enumerate(labels)]
        details = {name: to_jsonable(getattr(results, name)) for name in ("classes", "confusion")}
        metrics = {"accuracy": results.accuracy, "f1": results.macro_f1}
        return Answers([self.labels[each] for each in predicted], scores, metrics, details)

    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> list[Statistics]:
        predicted, true = ([self.labels.index(label) for label in each] for each in (outputs, references))
        macro_f1 = classification_metrics.macro_f1_statistics(predicted, true, len(self.labels))
        return [classification_metrics.accuracy_statistics(predicted, true), macro_f1]

    def balanced_weights(self, labels: Sequence[Label]) -> Tensor:
        """n / (classes · n of the class) (King & Zeng 2001), as in scikit-learn."""
        counts = np.bincount(cast(Sequence[int], labels), minlength=len(self.labels))
        return torch.from_numpy(counts.sum() / ((counts > 0).sum() * np.maximum(counts, 1))).float()


class ManyLabels(Target):
    """A sigmoid for each label; labels with a probability above ½ are predicted."""

    problem_type = "multi_label"
    criterion = "f1"
    metric_keys: ClassVar[Mapping[str, str]] = {
        "loss": "valid_loss",
        "macro_f1": "f1",
        "micro_f1": "micro_f1",
        "exact": "exact",
    }

    def tensor(self, labels: Sequence[Label]) -> Tensor:
        multi_hot = torch.zeros(len(labels), self.n_outputs)
        for row, each in enumerate(labels):
            multi_hot[row, list(cast(tuple[int, ...], each))] = 1.0
        return multi_hot

    def measure(self, logits: Tensor, labels: Sequence[Label]) -> Answers:
        """The score of an answer is the mean probability given to the true value, yes or no, of each label."""
        truth, probabilities, predicted = self.tensor(labels), logits.sigmoid(), logits > 0
        scores = torch.where(truth > 0, probabilities, 1 - probabilities).mean(-1).tolist()
        outputs = [self.text(tuple(row.nonzero()[:, 0].tolist())) for row in predicted]
        results = classification_metrics.multi_label(predicted.numpy(), truth.numpy() > 0, self.labels)
        metrics = {"f1": results.macro_f1, "micro_f1": results.micro_f1, "exact": results.exact}
        return Answers(outputs, scores, metrics, {"classes": to_jsonable(results.classes)})

    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> list[Statistics]:
        return classification_metrics.multi_label_statistics(
            *(self._label_matrix(texts) for texts in (outputs, references))
        )

    def _label_matrix(self, texts: Sequence[str]) -> Any:
        rows = [tuple(self.labels.index(name) for name in text.split(";") if name) for text in texts]
        return self.tensor(rows).numpy() > 0

    def balanced_weights(self, labels: Sequence[Label]) -> Tensor:
        """n without the label / n with it, the factor on the loss of positive targets (PyTorch's ``pos_weight``)."""
        n_with = self.tensor(labels).sum(0)
        return (len(labels) - n_with) / n_with.clamp(min=1)

    def weights(self, factors: Tensor, targets: Tensor) -> Tensor:
        return torch.where(targets > 0, factors, 1.0)


class Number(Target):
    """Regression: one logit, trained with the squared error."""

    problem_type = "regression"
    criterion = "pearson"
    metric_keys: ClassVar[Mapping[str, str]] = {
        "loss": "valid_loss",
        "mse": "valid_loss",
        "pearson": "pearson",
        "spearman": "spearman",
    }

    @property
    def n_outputs(self) -> int:
        return 1

    def tensor(self, labels: Sequence[Label]) -> Tensor:
        return torch.tensor(labels, dtype=torch.float32)

    def measure(self, logits: Tensor, labels: Sequence[Label]) -> Answers:
        """The score of an answer is minus its distance from the truth."""
        values, truth = logits[:, 0].double().numpy(), np.asarray(labels, dtype=np.float64)
        metrics = classification_metrics.regression(values, truth)
        return Answers([self.text(x) for x in values.tolist()], (-abs(values - truth)).tolist(), metrics, {})

    def statistics(self, outputs: Sequence[str], references: Sequence[str]) -> list[Statistics]:
        return classification_metrics.regression_statistics(
            *(np.array([float(x) for x in y]) for y in (outputs, references))
        )


TARGETS: Mapping[str, type[Target]] = {target.problem_type: target for target in (OneClass, ManyLabels, Number)}
