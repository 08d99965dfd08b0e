"""Knowledge distillation: a small model learns from the probabilities or from the outputs of a large one.

Word-level, in the loss (Hinton et al. 2015; Kim & Rush 2016), for student p, teacher q and temperature t:
    (1 - w) · -log p(target)  +  w · t² · KL(q_t ‖ p_t)
Sequence-level (Kim & Rush 2016): the teacher translates the training set with beam search, and a student is trained on
these pairs like on any others. Marian's student models are made this way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
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
from ..errors import BadData, UsageError
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
    """The sum of the distillation loss over the targets of a batch; in eval mode, plain ``batch_loss``."""
    if teacher is None or not model.training:
        return batch_loss(model, batch, smoothing)
    logits = model(*batch.inputs, **batch.options)
    with torch.no_grad():
        teacher_logits = teacher(*batch.inputs, **batch.options)
    log_p, log_q = (F.log_softmax(x.float() / temperature, dim=-1) for x in (logits, teacher_logits))
    divergence = F.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    soft = torch.where(batch.targets != IGNORE, divergence, 0.0).sum()
    hard = cross_entropy(logits, batch.targets, smoothing, batch.weights)
    return (1 - weight) * hard + weight * temperature**2 * soft


def loss_of_run(recipe: TrainConfig, task: Task) -> LossFunction:
    """The loss of the task; with a teacher that of distillation, with train.r_drop that of R-Drop."""
    if recipe.r_drop:
        return partial(r_drop_loss, weight=recipe.r_drop)
    if recipe.teacher is None:
        return task.loss
    return partial(distillation_loss, weight=recipe.teacher_weight, temperature=recipe.teacher_temperature)


def open_teacher(path: str, task: Task, student: ModelConfig) -> Model:
    """The model at ``path``, frozen; UsageError unless it has the tokens or classes of the student."""
    from ..io import load

    if type(task).loss is not batch_loss:
        raise UsageError(f"train.teacher={path}: the task {task.name} has its own loss and takes no teacher")
    if (problem := task.config.data.problem_type) != "single_label":
        raise UsageError(f"train.teacher={path} teaches classes and tokens, not data.problem_type={problem}")
    teacher = load(path)
    config = teacher.config
    same_sizes = config.output_vocab_size == student.output_vocab_size and config.n_classes == student.n_classes
    if not same_sizes or not same_processors(task.processor, teacher.processor):
        outputs = "classes" if task.has_labels else "tokens"
        hint = "data.labels=… names those of the teacher" if task.has_labels else "leave out data.tokenizer"
        raise UsageError(f"train.teacher={path} has other {outputs} than this run; {hint}")
    if config.positions == "learned" and task.config.data.max_len > config.max_len:
        raise UsageError(f"train.teacher={path} reads {config.max_len} tokens; data.max_len={config.max_len} fits it")
    return teacher.requires_grad_(False).eval()


@dataclass(frozen=True)
class DistilledPairs:
    """The files with the training data of a student, and their sizes."""

    path: Path
    pairs: int
    empty: int  # sources left out because their translation was empty
    valid: Path | None  # the held-out pairs of the teacher's run, unchanged
    beam: int

    def to_dict(self) -> dict[str, Any]:
        return {name: str(x) if isinstance(x, Path) else x for name, x in asdict(self).items()}

    def to_text(self) -> str:
        left_out = f", {self.empty:,} empty ones left out" if self.empty else ""
        held_out = "" if self.valid is None else f" data.valid={self.valid}"
        lines = [f"{self.path}: {self.pairs:,} sources with the teacher's translations, beam {self.beam}{left_out}"]
        if self.valid is not None:
            lines.append(f"{self.valid}: the held-out pairs of the run, with their own targets")
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

    data  fields of DataConfig; without a source, the training pairs of the teacher's run. Held-out pairs, if any, are
          copied to a second file: ``pairs.tsv`` and ``pairs.valid.tsv``
    """
    target = pair_file(out)
    teacher = open_predictor(path, resolve_device(device))
    if teacher.task_class is not Translate:
        raise UsageError(f"{path} is for the task {teacher.config.task}; sequences are distilled from a translator")
    fields = dict(data or {})
    config, _ = data_config_for(teacher, fields)
    read = f"{config.source},{config.valid}".split(",")
    check_not_read(target, read)
    source = open_source(config)
    task = cast(Translate, task_for(teacher, source, config, fields, teacher.config.train.seed))
    held_out = [cast(Pair, x) for x in task.first(source.valid)]
    valid = target.with_suffix(f".valid{target.suffix}") if held_out else None
    if valid is not None:
        check_not_read(valid, read)
    pairs, texts = [], [cast(Pair, x).source for x in task.first(source.train, limit)]
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        part = texts[start : start + _TEXTS_AT_ONCE]
        translated = task.translate(teacher.model, part, beam=beam, length_penalty=length_penalty)
        pairs += [Pair(text, output) for text, output in zip(part, translated, strict=True) if output.strip()]
        progress(f"{min(start + _TEXTS_AT_ONCE, len(texts)):,} of {len(texts):,} sources")
    if not pairs:
        n_empty = f"{len(texts):,} empty"
        raise BadData(f"no source of {source.name} gave a pair: {n_empty}; the teacher may need more training")
    write_atomic(target, _pair_lines(pairs, target.suffix))
    if valid is not None:
        write_atomic(valid, _pair_lines(held_out, target.suffix))
    return DistilledPairs(target, len(pairs), len(texts) - len(pairs), valid, beam)


def pair_file(out: str | Path) -> Path:
    """The path of a file for pairs; UsageError for another ending than .tsv and .jsonl."""
    if Path(out).suffix not in (".tsv", ".jsonl"):
        raise UsageError(f"{out}: pairs are written as .tsv or .jsonl")
    return Path(out)


def check_not_read(out: Path, read: Iterable[str | Path]) -> None:
    """Raise UsageError for an output that is one of the files to read, or a file in a folder to read."""
    files = {Path(str(name).strip()).expanduser().resolve() for name in read}
    if out.exists() and not files.isdisjoint((out.resolve(), *out.resolve().parents)):
        raise UsageError(f"{out} is the file to read, which would be lost; choose another")


def pair_line(source: str, target: str, suffix: str) -> str:
    """A pair as a line of a file with this suffix."""
    if suffix == ".jsonl":
        return json.dumps({"source": source, "target": target}, ensure_ascii=False) + "\n"
    # Tabs and line breaks inside a text would break the table.
    return "\t".join(" ".join(text.split()) for text in (source, target)) + "\n"


def _pair_lines(pairs: list[Pair], suffix: str) -> bytes:
    return "".join(pair_line(x.source, x.target, suffix) for x in pairs).encode("utf-8", "surrogatepass")
