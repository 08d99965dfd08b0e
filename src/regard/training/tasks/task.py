"""What every task provides: batches, a loss, metrics, samples, and how a trained model of its kind is scored."""

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
from numpy.typing import NDArray
from torch import Tensor

from ...config import DataConfig, Kind, ModelConfig, RunConfig, TrainConfig
from ...config.data_config import TokenizerKind
from ...config.train_config import TASK_MODELS
from ...data.batching import BatchPlan, pad
from ...data.example_files import ExampleFile
from ...data.examples import Chat, Example, ImageExample, Labelled, Pair, Preference, Tagged, Text
from ...data.hashing import stable_key, uniform
from ...data.images import has_colours, image_batch
from ...data.packing import IGNORE
from ...data.source_cache import LARGE
from ...data.sources import Source
from ...data.splits import held_out_note, stratified_sample
from ...data.token_files import Pieces, TokenFile, cached_tokens
from ...errors import BadData, RegardError, UsageError
from ...foundation.files import cache_folder
from ...foundation.progress import track
from ...models import Model
from ...text.image_processor import ImageProcessor
from ...text.processor import Processor
from ...text.sentencepiece_model import load_tokenizer
from ...text.tokenizer import PAD, Tokenizer
from ...text.tokenizer_training import TOKENIZER_KINDS, Template, cached_tokenizer, first_texts, train_tokenizer
from ..loss import Batch, batch_loss, token_losses
from ..metrics.language_metrics import TextLosses, loss_statistics, perplexity
from ..metrics.statistics import Statistics
from ..precision import Precision

MAX_TOKENIZER_TEXTS, MAX_TOKENIZER_CHARACTERS = 200_000, 1 << 25  # a tokenizer learns nothing from more


@dataclass(frozen=True, slots=True)
class ExampleResult:
    """One evaluated example: what was asked, expected and produced, and how good that is (at most 1)."""

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


@dataclass(frozen=True, eq=False)
class Scores:
    """A model's results on one set of examples."""

    n: int
    metrics: dict[str, Any]
    rows: list[ExampleResult]
    n_tokens: int
    seconds: float  # of the pass that computes the loss
    details: dict[str, Any] = field(default_factory=dict)
    losses: tuple[NDArray[Any], NDArray[Any]] | None = None  # of each example: summed, and its number of targets
    texts: TextLosses | None = None  # of a language model: the loss of every token
    comet: Statistics | None = None  # of translations, where it was asked for

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
    """Data → batches → loss, and a model's answers → metrics. A batch is a pure function of its number.

    A subclass says which models and sources it is for, how examples become batches (``batch_plan``, ``_train_batch``,
    ``valid_groups``), and what answers are worth (``answers``, ``answer_statistics``).
    """

    name: ClassVar[str]  # of the RunConfig; a subclass of one's own keeps that of the task whose defaults it uses
    kinds: ClassVar[tuple[Kind, ...]]  # sources it can learn from
    template: ClassVar[Template] = "none"
    tokenizer_kind: ClassVar[TokenizerKind] = "bpe"  # what data.tokenizer=auto means
    command: ClassVar[str] = "look"  # of the command line: what tries a trained model
    criterion: ClassVar[str] = "valid_loss"  # what train.metric=auto means; smaller is better for losses
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss"}  # what train.metric may be, and its name here
    eval_examples: ClassVar[int | None] = 200  # what train.eval_examples=none means; None: all
    reports_perplexity: ClassVar[bool] = True
    evaluation_options: ClassVar[tuple[str, ...]] = ()  # which of beam, length_penalty, stride mean something
    processor_parts: ClassVar[tuple[str, ...]] = ("source",)  # what a model directory must bring
    has_labels: ClassVar[bool] = False
    needs_mask_token: ClassVar[bool] = False
    needs_positions: ClassVar[bool] = False  # whether data.max_len may not exceed a table of learned positions

    skipped: SkippedExamples = SkippedExamples()
    n_held_out_cut: int = 0  # held-out texts that ``valid_groups`` last cut to what the model can read
    tokens_folder: Path | None = None  # where encoded training texts are stored; None: in memory
    _sample: Sequence[int] = ()  # the held-out examples that ``_valid_sample`` chose

    loss = staticmethod(batch_loss)  # (model, batch, smoothing) → the sum of the loss over the batch's targets

    def reference_model(self, model: Model) -> Model | None:
        """A frozen model that the loss compares ``model`` with, its last argument; None: there is none."""
        return None

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        self.config, self.source = config, source
        self.processor = processor if processor is not None else self._new_processor()

    # What a task must define.

    @property
    @abstractmethod
    def model_config(self) -> ModelConfig:
        """The config's model with what the data decide: vocabulary, classes, lengths, special tokens."""

    @abstractmethod
    def _new_processor(self) -> Processor:
        """Tokenizers, image processor and labels, made from the training data."""

    @property
    @abstractmethod
    def batch_plan(self) -> BatchPlan:
        """Which training examples make up which batch."""

    @abstractmethod
    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        """The training examples at ``index`` as a batch."""

    @abstractmethod
    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Held-out examples once each: batches, and which example each row belongs to (of texts: which row)."""

    # Batches.

    @property
    def notes(self) -> list[str]:
        """What to say of the training data before the first step."""
        return [note for note in (held_out_note(self.source.split), self.skipped.to_text()) if note is not None]

    def batch(self, number: int) -> Batch:
        """Training batch ``number`` of the whole run, counted from 0."""
        epoch, place = self.batch_plan.at(number)
        return self._train_batch(epoch, self.batch_plan.batch(epoch, place).tolist())

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
        """The config with what must be known of the data before anything is made from it."""
        return config.with_(data=config.data.with_(kind=source.kind)) if source.kind_implied else config

    # A model without a run directory.

    @classmethod
    def accepts(cls, model: ModelConfig) -> bool:
        """Whether a model of this config was made for the task."""
        return (model.architecture, model.source, model.head) in TASK_MODELS[cls.name]

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        """How a model read its data, where only its config says so."""
        return DataConfig(max_len=model.max_len, max_target_len=model.max_target_len or model.max_len)

    def check_model(self, model_name: str, model: ModelConfig) -> None:
        """Raise ValueError where the examples do not fit a trained model."""
        max_len = self.config.data.max_len
        if self.needs_positions and model.positions == "learned" and max_len > model.max_len:
            raise ValueError(f"max_len={max_len}, but the positions of {model_name} end at {model.max_len}")

    @classmethod
    def check_config(cls, config: RunConfig) -> None:
        """Raise UsageError for a metric that the task does not measure, or for fields that mean nothing to it."""
        cls.best_metric(config)
        for name in () if cls.has_labels else ("class_weights", "sampling"):
            if getattr(config.train, name) != TrainConfig.model_fields[name].default:
                raise UsageError(f"train.{name} is for tasks with classes, which {cls.name} does not have")

    # Evaluation.

    @classmethod
    def metric_table(cls, config: RunConfig) -> tuple[str, Mapping[str, str]]:
        """``criterion`` and ``metric_keys``, where they depend on the data."""
        return cls.criterion, cls.metric_keys

    @classmethod
    def best_metric(cls, config: RunConfig) -> str:
        """The metric of ``validate`` that the best checkpoint and patience go by."""
        train, (criterion, keys) = config.train, cls.metric_table(config)
        if train.metric != "auto" and train.metric not in keys:
            known = ", ".join(keys)
            raise UsageError(f"train.metric={train.metric} is not measured by the task {cls.name}, which has {known}")
        name = criterion if train.metric == "auto" else keys[train.metric]
        if train.eval_examples == 0 and not name.endswith("loss"):
            raise UsageError(f"train.eval_examples=0 leaves no {name} to choose the best by; add train.metric=loss")
        return name

    def _valid_sample(self, n: int | None) -> list[Example]:
        """``n`` of the held-out examples, the same ones in every run on this data; None: all."""
        valid = self.source.valid
        if n is None or n >= len(valid):
            return self.first(valid)
        if len(self._sample) != n:
            self._sample = stratified_sample(self.first(valid), n, self.config.data.split_seed)
        return [valid[index] for index in self._sample]

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int = 1, length_penalty: float = 1.0
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        """Metrics beside the loss, and the model's output for each example; nothing where the loss is all there is."""
        return {}, []

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        """What each answer contributes to every metric, for paired comparisons."""
        return []

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """The first held-out examples with the model's output, to be shown during training."""
        _, rows = self.answers(model, self.first(self.source.valid, n), beam=1, length_penalty=1.0)
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
        """Metrics on the validation set, as a run records them: the loss of the first batches, answers to a sample of
        the examples. ``loss_of(batch)`` sums over a batch's targets; ``decoding``: beam and length_penalty."""
        total, count = 0.0, 0
        for batch in itertools.islice(self.valid_batches(self.first(self.source.valid)), n_batches):
            total += float(loss_of(batch))
            count += batch.n_targets
        if not count:
            raise BadData(f"{self.source.name} has nothing held out to evaluate on")
        found: dict[str, float | str] = {"valid_loss": total / count}
        if self.reports_perplexity:
            found["perplexity"] = math.exp(min(total / count, 700))
        return {**found, **self.answers(model, self._valid_sample(n_examples), **decoding)[0]}

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """Loss and answer of every example, as a report has them. ``precision`` is that of the loss; generation uses
        the weights as is. ``options``: those of ``evaluation_options``."""
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
        answered, rows = self.answers(model, examples, **options)
        rows = [replace(row, loss=float(each)) for row, each in zip(rows, sums / counts, strict=True)]
        found: dict[str, Any] = {"loss": loss, "perplexity": perplexity(loss), **answered}
        found.pop("n", None)
        return Scores(len(examples), found, rows, n_tokens, seconds, losses=(sums, counts))

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        """The statistics of every metric that two models on the same examples can be compared by."""

        def statistics(scores: Scores) -> list[Statistics]:
            assert scores.losses is not None
            found = self.answer_statistics([row.output for row in scores.rows], [row.target for row in scores.rows])
            # A mean loss over other tokens is another quantity.
            return [*found, loss_statistics(*scores.losses)] if same_tokens else found

        return list(zip(statistics(ours), statistics(theirs), strict=True))

    def check_finite(self, loss: float) -> float:
        if not math.isfinite(loss):
            name = self.source.name
            raise RegardError(f"the loss on {name} is {loss}: the weights, or what they make of it, are broken")
        return loss

    def examples(self, split: str = "valid", n: int | None = None) -> list[Example]:
        """The first examples of a set: train, valid, or another one the source holds out."""
        sets = {"valid": self.source.valid, **self.source.others, "train": self.source.train}
        if split not in sets:
            raise ValueError(f"split={split!r} is none of {', '.join(sets)}")
        return self.first(sets[split], n)

    def example_words(self) -> list[str]:
        """A held-out example as the words that come after ``command`` and the run."""
        return [self.example_input()]

    def example_input(self) -> str:
        """A held-out example as one would type it for ``command``: a text, or an image file."""
        example = next(iter(self.first(self.source.valid or self.source.train, 1)))
        match example:
            case Pair(source=text) | Labelled(text=text) | Tagged(text=text):
                return text
            case Text(text=text):
                return " ".join(text.split()[:4])
            case Chat() | Preference():
                return example.prompt[-1][1]
        return str(example.image) if isinstance(example.image, Path) else "IMAGE.png"

    # Helpers for subclasses.

    @staticmethod
    def first(examples: Sequence[Example], n: int | None = None) -> list[Example]:
        return [examples[index] for index in range(len(examples) if n is None else min(n, len(examples)))]

    @property
    def tokenizer(self) -> Tokenizer:
        """Of a task that has one."""
        return self.processor.tokenizer

    def _new_tokenizer(self, texts: Iterable[str]) -> Tokenizer:
        """The tokenizer the config names: read from its file, else trained on these texts."""
        data = self.config.data
        kind = self.tokenizer_kind if data.tokenizer == "auto" else data.tokenizer
        if kind in TOKENIZER_KINDS:
            size = data.vocab_size if kind in ("bpe", "unigram") else None
            train = cached_tokenizer if self._is_large else train_tokenizer
            some = first_texts(texts, MAX_TOKENIZER_TEXTS, MAX_TOKENIZER_CHARACTERS)
            return train(some, cast(TokenizerKind, kind), size, self.template)
        return load_tokenizer(kind, self.template)

    def _token_fields(self, tokenizer: Tokenizer) -> dict[str, int | None]:
        """The fields of a model that its tokenizer decides. A foreign model's table may have rows without a token."""
        size, ids = tokenizer.size, tokenizer.special_ids
        if not tokenizer.is_native and not (tokenizer.has_literal_special_tokens and self.config.train.init is None):
            size = max(size, self.config.model.vocab_size)
        return {"vocab_size": size, "pad_id": ids.get("pad", PAD), "bos_id": ids.get("bos"), "eos_id": ids.get("eos")}

    @property
    def _is_large(self) -> bool:
        """Whether what is made of the training texts is stored for all runs."""
        return isinstance(self.source.train, ExampleFile) and self.source.train.n_bytes > LARGE

    def _tokens(self, what: str, tokenizer: Tokenizer, make: Callable[[], Pieces], folder: Path | None) -> TokenFile:
        """The tokens of the training texts, ``make``: in memory, or in a folder of this run, or, where they are many,
        in one that all runs share. ``what`` tells them from others of the same data and tokenizer."""
        about = f"{self.source.split.train_sha256} {what}"
        if self._is_large:
            shared = cache_folder() / "tokens"
            return cached_tokens(shared, about, tokenizer.sha256, tokenizer.size, make, older=folder)
        if folder is None:
            return TokenFile.of_pieces(make(), tokenizer.size)
        return cached_tokens(folder, about, tokenizer.sha256, tokenizer.size, make)

    def _tracked_train(self, what: str) -> Iterator[Example]:
        """The training examples one after the other, with a bar."""
        return track(self.source.train, f"tokenising {what}", len(self.source.train), lambda example: 1)

    def _plan_by_length(self, lengths: Any, max_len: int | None = None) -> BatchPlan:
        train = self.config.train
        return BatchPlan(
            lengths, train.batch_tokens, seed=train.seed, max_len=max_len, shuffle=True, max_examples=train.batch_size
        )

    def _rows_per_batch(self, tokens_per_row: int) -> int:
        """As many rows of equal length as batch_tokens and batch_size allow."""
        train = self.config.train
        rows = max(1, train.batch_tokens // tokens_per_row)
        return rows if train.batch_size is None else min(rows, train.batch_size)

    def _plan_by_rows(self, n_rows: int, tokens_per_row: int) -> BatchPlan:
        return BatchPlan.by_examples(n_rows, self._rows_per_batch(tokens_per_row), seed=self.config.train.seed)

    def _pad(self, rows: Sequence[Sequence[int]], pad_id: int, max_width: int) -> torch.Tensor:
        """tokens (B, T), T rounded up for fewer distinct shapes, unless the model's positions end before.

        A GPU computes eight columns as fast as one; on a CPU every column costs, and short texts have few.
        """
        device = self.config.train.device
        multiple = 2 if device == "cpu" or (device == "auto" and not torch.cuda.is_available()) else 8
        longest = max(map(len, rows))
        width = max(longest, min(-(-longest // multiple) * multiple, max_width))
        return pad([*rows, [pad_id] * width], pad_id)[:-1]

    def _hide_tokens(self, rows: list[list[int]], epoch: int, index: Sequence[int]) -> list[list[int]]:
        """Training rows with ``data.hide_rate`` of their tokens masked (Gal & Ghahramani 2016), special ones apart."""
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


class ImageTask(Task):
    """A task whose models read images, a patch being a token."""

    processor_parts: ClassVar[tuple[str, ...]] = ("image",)

    @classmethod
    def complete_config(cls, config: RunConfig, source: Source) -> RunConfig:
        """With three channels where data.channels=auto and one of the first images has colours."""
        config = super().complete_config(config, source)
        if config.data.channels != "auto":
            return config
        model, data = config.model, config.data.with_(channels="model")
        images = (cast(ImageExample, source.train[index]).image for index in range(min(len(source.train), 200)))
        if model.n_channels < 3 and config.train.init is None and any(map(has_colours, images)):
            model = model.with_(n_channels=3)
        return config.with_(model=model, data=data)

    def _new_image_processor(self) -> ImageProcessor:
        model, half = self.config.model, (0.5,) * self.config.model.n_channels
        return ImageProcessor((model.image_size, model.image_size), half, half)

    @property
    def _n_patches(self) -> int:
        return (self.config.model.image_size // self.config.model.patch_size) ** 2

    def _pixels(self, examples: Sequence[Example], index: Sequence[int], epoch: int | None = None) -> Tensor:
        """pixels (B, C, H, W) of the images at ``index``, normalised; in an ``epoch`` of training also augmented."""
        model, data, image = self.config.model, self.config.data, self.processor.image
        assert image is not None
        shift, flip = (0, False) if epoch is None else (data.shift, data.flip)
        return image_batch(
            cast(Sequence[ImageExample], examples),
            index,
            size=model.image_size,
            channels=model.n_channels,
            mean=image.mean,
            std=image.std,
            shift=shift,
            flip=flip,
            seed=self.config.train.seed,
            epoch=epoch or 0,
        )


def index_groups(n: int, size: int) -> Iterator[list[int]]:
    """0 … n - 1 in order, ``size`` at a time."""
    return (list(range(first, min(first + size, n))) for first in range(0, n, size))


def group_by_length(sizes: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Indices in groups of similar length, longest first, each of at most ``max_tokens``."""
    order = np.argsort(np.asarray(sizes), kind="stable")[::-1].tolist()
    group: list[int] = []
    for index in order:
        if group and (len(group) + 1) * sizes[group[0]] > max_tokens:
            yield group
            group = []
        group.append(index)
    if group:
        yield group


def truncate(rows: list[list[int]], max_len: int) -> tuple[list[list[int]], int]:
    """Rows of at most ``max_len`` tokens, each keeping its last token, which ends it; and how many were cut."""
    n_longer = sum(len(row) > max_len for row in rows)
    return [row if len(row) <= max_len else [*row[: max_len - 1], row[-1]] for row in rows], n_longer
