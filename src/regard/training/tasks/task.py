"""The base class of all tasks: batches, loss, metrics, samples, and the evaluation of a trained model."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...config import DataConfig, Kind, ModelConfig, RunConfig, TrainConfig
from ...config.data_config import TokenizerKind
from ...config.train_config import TASK_MODELS
from ...data.batching import BatchPlan, pad
from ...data.example_files import LARGE, ExampleFile
from ...data.examples import Chat, Example, ImageExample, Preference, Text, key_of
from ...data.hashing import stable_key, uniform
from ...data.packing import IGNORE
from ...data.sources import Source
from ...data.splits import held_out_note, stratified_sample
from ...data.token_files import Pieces, TokenFile, cached_tokens
from ...errors import BadData, RegardError, UsageError
from ...foundation.files import cache_folder
from ...foundation.progress import track
from ...generation.generate import inference
from ...models import Model
from ...text.processor import Processor
from ...text.sentencepiece_model import load_tokenizer
from ...text.tokenizer import PAD, Tokenizer
from ...text.tokenizer_training import (
    TOKENIZER_KINDS,
    Template,
    cached_tokenizer,
    first_texts,
    train_tokenizer,
    with_nfc,
)
from ..loss import Batch, batch_loss, shift_targets, token_losses
from ..metrics.language_metrics import TextLosses, loss_statistics, perplexity
from ..metrics.statistics import Statistics
from ..precision import Precision

MAX_TOKENIZER_TEXTS, MAX_TOKENIZER_CHARACTERS = 200_000, 1 << 25  # more would not improve a tokenizer


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """One evaluated example: source, target, the output of the model, and a score of at most 1."""

    source: str
    target: str | list[str]
    output: str
    score: float
    loss: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def first_target(self) -> str:
        return self.target if isinstance(self.target, str) else self.target[0]

    @property
    def is_correct(self) -> bool:
        return self.output == self.target or (isinstance(self.target, list) and self.output in self.target)


AnswerResults = tuple[dict[str, float | str], list[ExampleResult]]  # metrics, and the result of each example


@dataclass(frozen=True, eq=False)
class Scores:
    """The results of a model on one set of examples."""

    n: int
    metrics: dict[str, Any]
    rows: list[ExampleResult]
    n_tokens: int
    seconds: float  # time of the pass that computes the loss
    details: dict[str, Any] = field(default_factory=dict)
    losses: tuple[NDArray[Any], NDArray[Any]] | None = None  # per example: summed loss, number of targets
    texts: TextLosses | None = None  # language models: the loss of every token
    comet: Statistics | None = None  # translations: COMET, if requested

    @property
    def tokens_per_second(self) -> float:
        return self.n_tokens / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class SkippedExamples:
    """Training examples that were dropped or cut because they are too long."""

    n_dropped: int = 0
    n_cut: int = 0
    max_len: int = 0

    def to_text(self) -> str | None:
        dropped, cut = (f"{n:,} example{'s' * (n != 1)}" for n in (self.n_dropped, self.n_cut))
        if self.n_dropped:
            return f"{dropped} longer than max_len={self.max_len} left out"
        return f"{cut} longer than max_len={self.max_len} cut short" if self.n_cut else None


class Task(ABC):
    """Turns data into batches and a loss, and the outputs of a model into metrics. A batch depends only on its number.

    A subclass defines which models and sources it is for, how examples become batches (``batch_plan``,
    ``_train_batch``, ``valid_groups``), and how outputs are scored (``answers``, ``answer_statistics``).
    """

    name: ClassVar[str]  # RunConfig.task; your own subclass keeps the name of the task whose defaults it uses
    kinds: ClassVar[tuple[Kind, ...]]  # kinds of sources it can learn from
    template: ClassVar[Template] = "none"
    tokenizer_kind: ClassVar[TokenizerKind] = "bpe"  # data.tokenizer=auto
    command: ClassVar[str] = "look"  # the `regard` command that tries a trained model
    criterion: ClassVar[str] = "valid_loss"  # train.metric=auto; smaller is better for losses
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss"}  # values of train.metric → names in ``validate``
    eval_examples: ClassVar[int | None] = 200  # the default of train.eval_examples; None: all
    reports_perplexity: ClassVar[bool] = True
    evaluation_options: ClassVar[tuple[str, ...]] = ()  # those of beam, length_penalty and stride that apply
    processor_parts: ClassVar[tuple[str, ...]] = ("source",)  # parts of the processor that a model directory must have
    has_labels: ClassVar[bool] = False
    needs_mask_token: ClassVar[bool] = False
    needs_positions: ClassVar[bool] = False  # data.max_len must not exceed a table of learned positions

    skipped: SkippedExamples = SkippedExamples()
    n_held_out_cut: int = 0  # held-out texts that the last ``valid_groups`` cut to the length the model can read
    tokens_folder: Path | None = None  # where encoded training texts are stored; None: in memory
    _sample: Sequence[int] = ()  # indices of the held-out examples chosen by ``_valid_sample``

    loss = staticmethod(batch_loss)  # (model, batch, smoothing) → the sum of the loss over the batch's targets

    def reference_model(self, model: Model) -> Model | None:
        """A frozen model that is passed to the loss as its last argument; None if the loss needs none."""
        return None

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        self.config, self.source = config, source
        self.processor = processor if processor is not None else self._new_processor()

    # Abstract methods.

    @property
    @abstractmethod
    def model_config(self) -> ModelConfig:
        """The model config with the fields that follow from the data: vocabulary, classes, lengths, special tokens."""

    @abstractmethod
    def _new_processor(self) -> Processor:
        """Tokenizers, image processor and labels, made from the training data."""

    @property
    @abstractmethod
    def batch_plan(self) -> BatchPlan:
        """Which training examples each batch consists of."""

    @abstractmethod
    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        """The training examples at ``index`` as a batch."""

    @abstractmethod
    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Each held-out example once, in batches, with the index of each row's example (plain text: of the row)."""

    # Batches.

    @property
    def notes(self) -> list[str]:
        """Notes about the training data, printed before the first step."""
        return [note for note in (held_out_note(self.source.split), self.skipped.to_text()) if note is not None]

    def batch(self, number: int) -> Batch:
        """Training batch ``number`` of the whole run, counted from 0."""
        epoch, position = self.batch_plan.at(number)
        return self._train_batch(epoch, self.batch_plan.batch(epoch, position).tolist())

    @property
    def batches_per_epoch(self) -> int:
        return self.batch_plan.count()

    @property
    def ragged(self) -> bool:
        """Whether batches differ in shape."""
        return True

    def valid_batches(self, examples: Sequence[Example]) -> Iterator[Batch]:
        return (batch for _, batch in self.valid_groups(examples))

    @classmethod
    def complete_config(cls, config: RunConfig, source: Source) -> RunConfig:
        """The config with fields that must be read from the data before anything is built."""
        return config.with_(data=config.data.with_(kind=source.kind)) if source.kind_implied else config

    # Models without a run directory.

    @classmethod
    def accepts(cls, model: ModelConfig) -> bool:
        """Whether the task trains models of this config."""
        return (model.architecture, model.source, model.head) in TASK_MODELS[cls.name]

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        """The data config of a model without a run, as far as its own config tells."""
        return DataConfig(max_len=model.max_len, max_target_len=model.max_target_len or model.max_len)

    def check_model(self, model_name: str, model: ModelConfig) -> None:
        """Raise ValueError if the examples do not fit a trained model."""
        max_len = self.config.data.max_len
        if self.needs_positions and model.positions == "learned" and max_len > model.max_len:
            raise ValueError(f"max_len={max_len}, but the positions of {model_name} end at {model.max_len}")

    @classmethod
    def check_config(cls, config: RunConfig) -> None:
        """Raise UsageError for a metric that the task does not measure, or fields that do not apply to it."""
        cls.best_metric(config)
        for name in () if cls.has_labels else ("class_weights", "sampling"):
            if getattr(config.train, name) != TrainConfig.model_fields[name].default:
                raise UsageError(f"train.{name} is for tasks with classes, which {cls.name} does not have")

    # Evaluation.

    @classmethod
    def metric_table(cls, config: RunConfig) -> tuple[str, Mapping[str, str]]:
        """``criterion`` and ``metric_keys``; override it if they depend on the data."""
        return cls.criterion, cls.metric_keys

    @classmethod
    def best_metric(cls, config: RunConfig) -> str:
        """The metric of ``validate`` that decides about the best checkpoint and patience."""
        train, (criterion, keys) = config.train, cls.metric_table(config)
        if train.metric != "auto" and train.metric not in keys:
            known = ", ".join(keys)
            raise UsageError(f"train.metric={train.metric} is not measured by the task {cls.name}, which has {known}")
        name = criterion if train.metric == "auto" else keys[train.metric]
        if train.eval_examples == 0 and not name.endswith("loss"):
            raise UsageError(f"train.eval_examples=0 leaves no {name} to choose the best by; add train.metric=loss")
        return name

    def _valid_sample(self, n: int | None) -> list[Example]:
        """``n`` held-out examples, the same in every run on this data; None: all."""
        valid = self.source.valid
        if n is None or n >= len(valid):
            return self.first(valid)
        if len(self._sample) != n:
            self._sample = stratified_sample(self.first(valid), n, self.config.data.split_seed)
        return [valid[index] for index in self._sample]

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int = 1, length_penalty: float = 1.0
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        """Metrics besides the loss, and the model's output for each of one or more examples; empty if the task has only
        a loss."""
        return {}, []

    def _answers_of_score(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        """``answers`` of a task that generates no text: the metrics of ``score`` in fp32 without the loss."""
        with inference(model):
            scores = self.score(model, examples, Precision("fp32", model.device))
        return {"n": scores.n, **{name: x for name, x in scores.metrics.items() if name != "loss"}}, scores.rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        """The contribution of each answer to each metric, for paired comparisons."""
        return []

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """The first held-out examples with the model's output, to be shown during training."""
        _, rows = self.answers(model, self.first(self.source.valid, n))
        return [{"source": row.source, "target": row.first_target, "output": row.output} for row in rows]

    def validate(
        self,
        model: Model,
        loss_of: Callable[[Batch], Tensor],
        *,
        n_batches: int | None = None,
        n_examples: int | None = None,
        **decoding: Any,
    ) -> dict[str, float | str]:
        """Metrics on the validation set, as a run records them: the loss of the first ``n_batches``, and the answers to
        a sample of ``n_examples``. ``loss_of(batch)`` sums over targets; ``decoding``: beam and length_penalty."""
        total, count = 0.0, 0
        for batch in itertools.islice(self.valid_batches(self.first(self.source.valid)), n_batches):
            total += float(loss_of(batch))
            count += batch.n_targets
        if not count:
            raise BadData(f"{self.source.name} has no held-out examples to evaluate on")
        metrics: dict[str, float | str] = {"valid_loss": total / count}
        if self.reports_perplexity:
            metrics["perplexity"] = math.exp(min(total / count, 700))
        sample = self._valid_sample(n_examples)
        return {**metrics, **(self.answers(model, sample, **decoding)[0] if sample else {})}

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """The loss and the answer of every example, for a report. ``precision`` applies to the loss only, not to
        generation. ``options``: those of ``evaluation_options``."""
        sums, counts = np.zeros(len(examples)), np.zeros(len(examples), dtype=np.int64)
        n_tokens, start = 0, time.perf_counter()
        for index, batch in self.valid_groups(examples):
            with precision.forward():
                losses, _ = token_losses(model, batch.to(model.device))
            example_of_target = np.asarray(index)[torch.nonzero(batch.targets != IGNORE)[:, 0].numpy()]
            np.add.at(sums, example_of_target, losses.cpu().double().numpy())
            np.add.at(counts, example_of_target, 1)
            n_tokens += batch.n_tokens
        seconds = time.perf_counter() - start
        loss = self.check_finite(float(sums.sum() / counts.sum()))
        answer_metrics, rows = self.answers(model, examples, **options)
        rows = [replace(row, loss=float(each)) for row, each in zip(rows, sums / counts, strict=True)]
        metrics: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss), **answer_metrics}
        metrics.pop("n", None)
        return Scores(len(examples), metrics, rows, n_tokens, seconds, losses=(sums, counts))

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        """The statistics of each metric by which two models can be compared on the same examples."""

        def statistics(scores: Scores) -> list[Statistics]:
            assert scores.losses is not None
            answers = self.answer_statistics([row.output for row in scores.rows], [row.target for row in scores.rows])
            # Mean losses over different tokens are not comparable.
            return [*answers, loss_statistics(*scores.losses)] if same_tokens else answers

        return list(zip(statistics(ours), statistics(theirs), strict=True))

    def check_finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            name = self.source.name
            raise RegardError(f"the loss on {name} is {loss}: weights or activations are not finite")
        return loss

    def examples(self, split: str = "valid", n: int | None = None) -> list[Example]:
        """The first ``n`` examples of a set: train, valid, or another one that the source holds out."""
        sets = {"valid": self.source.valid, **self.source.others, "train": self.source.train}
        if split not in sets:
            raise ValueError(f"split={split!r} is not one of {', '.join(sets)}")
        return self.first(sets[split], n)

    def example_words(self) -> list[str]:
        """A held-out example as arguments of ``command``, after the run."""
        return [self.example_input()]

    def example_input(self) -> str:
        """A held-out example as an argument of ``command``: a text, or an image file."""
        example = next(iter(self.first(self.source.valid or self.source.train, 1)))
        match example:
            case Text(text=text):
                return " ".join(text.split()[:4])
            case Chat() | Preference():
                return example.prompt[-1][1]
            case ImageExample(image=image):
                return str(image) if isinstance(image, Path) else "IMAGE.png"
        return str(key_of(example))

    # Helpers for subclasses.

    @staticmethod
    def first(examples: Sequence[Example], n: int | None = None) -> list[Example]:
        return [examples[index] for index in range(len(examples) if n is None else min(n, len(examples)))]

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of a task that has only one."""
        return self.processor.tokenizer

    def _new_tokenizer(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer that the config names: read from a file, or trained on these texts."""
        data = self.config.data
        kind = self.tokenizer_kind if data.tokenizer == "auto" else data.tokenizer
        if kind in TOKENIZER_KINDS:
            size = data.vocab_size if kind in ("bpe", "unigram") else None
            train = cached_tokenizer if self._is_large else train_tokenizer
            sample = first_texts(texts, MAX_TOKENIZER_TEXTS, MAX_TOKENIZER_CHARACTERS)
            tokenizer = train(sample, cast(TokenizerKind, kind), size, self.template)
            return tokenizer if data.normalise == "none" else with_nfc(tokenizer)
        return load_tokenizer(kind, self.template)

    def _token_fields(self, tokenizer: Tokenizer) -> dict[str, int | None]:
        """The fields of a model that follow from its tokenizer. A foreign embedding may have rows without a token."""
        size, ids = tokenizer.size, tokenizer.special_ids
        if not tokenizer.is_native and not (tokenizer.has_literal_special_tokens and self.config.train.init is None):
            size = max(size, self.config.model.vocab_size)
        return {"vocab_size": size, "pad_id": ids.get("pad", PAD), "bos_id": ids.get("bos"), "eos_id": ids.get("eos")}

    @property
    def _is_large(self) -> bool:
        """Whether tokenizers and tokens of the training texts are cached for all runs."""
        return isinstance(self.source.train, ExampleFile) and self.source.train.n_bytes > LARGE

    def _tokens(
        self, name: str, tokenizer: Tokenizer, make: Callable[[], Pieces], folder: Path | None = None
    ) -> TokenFile:
        """The tokens of the training texts as computed by ``make()``: in memory, in a folder of this run or, if there
        are many, in a cache shared by all runs. ``name`` tells apart tokens of the same data and tokenizer."""
        key = f"{self.source.split.train_sha256} {name}"
        if self._is_large:
            shared = cache_folder() / "tokens"
            return cached_tokens(shared, key, tokenizer.sha256, tokenizer.size, make, older=folder)
        if folder is None:
            return TokenFile.of_pieces(make(), tokenizer.size)
        return cached_tokens(folder, key, tokenizer.sha256, tokenizer.size, make)

    def _tracked_train(self, name: str) -> Iterator[Example]:
        """The training examples in order, with a progress bar."""
        return track(self.source.train, f"tokenising {name}", len(self.source.train), lambda example: 1)

    @property
    def _max_width(self) -> int:
        """The largest number of tokens in a row of a batch."""
        return max(self.config.data.max_len, self.config.model.max_len)

    @property
    def _max_target_len(self) -> int:
        """The largest number of tokens of a target."""
        return self.config.data.max_target_len or self.config.data.max_len

    def _limit_lengths(self, lengths: NDArray[np.int64], cut: bool) -> NDArray[np.int64]:
        """The lengths of training examples (n,) or (n, sides), at most ``data.max_len`` if longer ones are ``cut``;
        ``skipped`` counts those that are cut or, if not, dropped by a plan with this limit."""
        max_len = self.config.data.max_len
        n_longer = int((lengths.reshape(len(lengths), -1).max(1) > max_len).sum())
        self.skipped = SkippedExamples(n_longer * (not cut), n_longer * cut, max_len)
        return np.minimum(lengths, max_len) if cut else lengths

    def _plan_by_length(self, lengths: Any, max_len: int | None = None) -> BatchPlan:
        train = self.config.train
        return BatchPlan(lengths, train.batch_tokens, seed=train.seed, max_len=max_len, max_examples=train.batch_size)

    def _rows_per_batch(self, tokens_per_row: int) -> int:
        """The number of rows of equal length that batch_tokens and batch_size allow."""
        train = self.config.train
        rows = max(1, train.batch_tokens // tokens_per_row)
        return rows if train.batch_size is None else min(rows, train.batch_size)

    def _plan_by_rows(self, n_rows: int, tokens_per_row: int) -> BatchPlan:
        """Batches of rows of equal length."""
        return BatchPlan(np.ones(n_rows), self._rows_per_batch(tokens_per_row), seed=self.config.train.seed)

    def _pad(self, rows: Sequence[Sequence[int]], pad_id: int, max_width: int) -> tuple[Tensor, Tensor]:
        """Tokens and a padding mask (B, T), with T rounded up to a multiple for fewer distinct shapes, but not beyond
        ``max_width``. The mask goes by lengths, since some models pad with a token that also occurs in texts.

        A GPU computes eight columns as fast as one; on a CPU every column costs time.
        """
        device = self.config.train.device
        multiple = 2 if device == "cpu" or (device == "auto" and not torch.cuda.is_available()) else 8
        longest = max(map(len, rows))
        width = max(longest, min(-(-longest // multiple) * multiple, max_width))
        return pad(rows, pad_id, width), torch.arange(width) < torch.tensor([len(row) for row in rows])[:, None]

    def _pad_targets(
        self, rows: Sequence[Sequence[int]], first: int, pad_id: int, max_width: int
    ) -> tuple[Tensor, Tensor]:
        """The decoder input, which begins with the token ``first``, and the targets, each (B, T)."""
        tokens, _ = self._pad(rows, IGNORE, max_width)
        decoder_input, targets = shift_targets(F.pad(tokens, (1, 0), value=first), IGNORE)
        return decoder_input.masked_fill(decoder_input == IGNORE, pad_id), targets

    def _hide_tokens(self, rows: list[list[int]], epoch: int, index: Sequence[int]) -> list[list[int]]:
        """Training rows with a share ``data.hide_rate`` of their tokens masked (Gal & Ghahramani 2016), except special
        tokens."""
        rate, tokenizer = self.config.data.hide_rate, self.processor.source
        if not rate or tokenizer is None:
            return rows
        mask_id, special = tokenizer.mask_id, tokenizer.all_special_ids
        seed, out = self.config.train.seed, []
        for row, which in zip(rows, index, strict=True):
            hidden = uniform(stable_key("hide", seed, epoch, int(which)), np.arange(len(row))) < rate
            pairs = zip(row, hidden, strict=True)
            out.append([mask_id if is_hidden and token not in special else token for token, is_hidden in pairs])
        return out
