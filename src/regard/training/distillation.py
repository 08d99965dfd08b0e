"""Knowledge distillation: a small model learns from a large one, from its probabilities or from what it writes.

Word-level, in the loss (Hinton et al. 2015; Kim & Rush 2016), with student p, teacher q and both softened by t:
    (1 - w) · -log p(target)  +  w · t² · KL(q_t ‖ p_t)
Sequence-level (Kim & Rush 2016): the teacher's beam search translates the training set, and a student learns from that
as from any other pairs. Marian's students are made in this way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..config import ModelConfig, TrainConfig
from ..data.examples import Pair
from ..data.packing import IGNORE
from ..data.sources import open_source
from ..errors import UsageError
from ..foundation.device import resolve_device
from ..foundation.files import write_atomic
from ..models import Model
from .finetuning import same_processors
from .loss import Batch, LossFunction, batch_loss, cross_entropy, r_drop_loss
from .predictors import data_config_for, open_predictor, task_for
from .tasks import Task
from .tasks.translation import Translate

_TEXTS_AT_ONCE = 1024


def distillation_loss(
    model: Model,
    batch: Batch,
    smoothing: float = 0.0,
    teacher: Model | None = None,
    *,
    weight: float = 0.5,
    temperature: float = 1.0,
) -> Tensor:
    """The sum over a batch's targets. Held-out data, where nothing is learned, has the loss of the data alone."""
    if teacher is None or not model.training:
        return batch_loss(model, batch, smoothing)
    logits = model(*batch.inputs, **batch.options)
    with torch.no_grad():
        taught = teacher(*batch.inputs, **batch.options)
    log_p, log_q = (F.log_softmax(x.float() / temperature, dim=-1) for x in (logits, taught))
    divergence = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    soft = torch.where(batch.targets != IGNORE, divergence, 0.0).sum()
    hard = cross_entropy(logits, batch.targets, smoothing, batch.weights)
    return (1 - weight) * hard + weight * temperature**2 * soft


def loss_of_run(recipe: TrainConfig, task: Task) -> LossFunction:
    """The task's loss or, with a teacher, that of distillation, or with train.r_drop that of two passes."""
    if recipe.r_drop:
        return partial(r_drop_loss, weight=recipe.r_drop)
    if recipe.teacher is None:
        return task.loss
    return partial(distillation_loss, weight=recipe.teacher_weight, temperature=recipe.teacher_temperature)


def open_teacher(path: str, task: Task, student: ModelConfig) -> Model:
    """The model at ``path``, frozen; UsageError unless it answers the same questions in the same tokens or classes."""
    from ..io import load

    if type(task).loss is not batch_loss:
        raise UsageError(f"train.teacher={path}: the task {task.name} has a loss of its own, without a teacher")
    if (problem := task.config.data.problem_type) != "single_label":
        raise UsageError(f"train.teacher={path} teaches classes and tokens, not data.problem_type={problem}")
    teacher = load(path)
    theirs = teacher.config
    same_sizes = theirs.output_vocab_size == student.output_vocab_size and theirs.n_classes == student.n_classes
    if not same_sizes or not same_processors(task.processor, teacher.processor):
        what = "classes" if task.has_labels else "tokens"
        hint = "data.labels=… names those of the teacher" if task.has_labels else "leave out data.tokenizer"
        raise UsageError(f"train.teacher={path} has other {what} than this run; {hint}")
    if theirs.positions == "learned" and task.config.data.max_len > theirs.max_len:
        raise UsageError(f"train.teacher={path} reads {theirs.max_len} tokens; data.max_len={theirs.max_len} fits it")
    return teacher.requires_grad_(False).eval()


@dataclass(frozen=True)
class DistilledPairs:
    """Where a student's training data are, and how many pairs there are."""

    path: Path
    pairs: int
    empty: int  # sources that the teacher had no words for: left out
    valid: Path | None  # the pairs the teacher's run held out, as they were
    beam: int

    def to_dict(self) -> dict[str, Any]:
        return {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self).items()}

    def to_text(self) -> str:
        left_out = f", {self.empty:,} empty ones left out" if self.empty else ""
        held_out = "" if self.valid is None else f" data.valid={self.valid}"
        lines = [f"{self.path}: {self.pairs:,} sources with the teacher's translations, beam {self.beam}{left_out}"]
        if self.valid is not None:
            lines.append(f"{self.valid}: what the run held out, with its own targets")
        return "\n".join([*lines, f"next: regard train translate data.source={self.path}{held_out}"])


def distill(
    path: str | Path,
    out: str | Path,
    data: Mapping[str, Any] | None = None,
    *,
    beam: int = 4,
    length_penalty: float = 1.0,
    limit: int | None = None,
    device: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
) -> DistilledPairs:
    """Translate a training set with a teacher and write the pairs to ``out`` (.tsv or .jsonl), for a student.

    data  fields of DataConfig; without a source, the pairs the teacher's run learned from. The pairs held out, where
          there are any, go to a second file as they are: ``pairs.tsv`` and ``pairs.valid.tsv``
    """
    target = Path(out)
    if target.suffix not in (".tsv", ".jsonl"):
        raise UsageError(f"{target}: pairs are written as .tsv or .jsonl")
    teacher = open_predictor(path, resolve_device(device))
    if teacher.task_class is not Translate:
        raise UsageError(f"{path} is for the task {teacher.config.task}; sequences are distilled from a translator")
    fields = dict(data or {})
    config, _ = data_config_for(teacher, fields)
    source = open_source(config)
    task = cast(Translate, task_for(teacher, source, config, fields, teacher.config.train.seed))
    pairs, texts = [], [cast(Pair, x).source for x in task.first(source.train, limit)]
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        part = texts[start : start + _TEXTS_AT_ONCE]
        translated = task.translate(teacher.model, part, beam=beam, length_penalty=length_penalty)
        pairs += [Pair(text, output) for text, output in zip(part, translated, strict=True) if output.strip()]
        progress(f"{min(start + _TEXTS_AT_ONCE, len(texts)):,} of {len(texts):,} sources")
    write_atomic(target, _pair_lines(pairs, target.suffix))
    held_out = [cast(Pair, x) for x in task.first(source.valid)]
    valid = target.with_suffix(f".valid{target.suffix}") if held_out else None
    if valid is not None:
        write_atomic(valid, _pair_lines(held_out, target.suffix))
    return DistilledPairs(target, len(pairs), len(texts) - len(pairs), valid, beam)


def _pair_lines(pairs: list[Pair], suffix: str) -> bytes:
    if suffix == ".jsonl":
        rows = (json.dumps({"source": x.source, "target": x.target}, ensure_ascii=False) for x in pairs)
    else:  # tabs and line ends separate cells and rows
        rows = ("\t".join(" ".join(text.split()) for text in (x.source, x.target)) for x in pairs)
    return "".join(f"{row}\n" for row in rows).encode("utf-8", "surrogatepass")
