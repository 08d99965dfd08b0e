"""``evaluate``: what held-out data says about a trained model, beside another one where asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["EvaluationReport", "evaluate"]


@dataclass(frozen=True)
class EvaluationReport:
    """What was found."""

    metrics: dict[str, Any]


def evaluate(path: str | Path) -> EvaluationReport:
    raise NotImplementedError
