"""Language models: predicting the next token, or masked tokens."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import DataConfig, ModelConfig
from ...data.batching import BatchPlan, has_partial_batch, index_groups, mask_tokens
from ...data.example_files import ExampleFile, document_parts
from ...data.examples import Example, Text
from ...data.packing import IGNORE, PackedRow, PackedRows, TokenBlocks
from ...data.token_files import Pieces, TokenFile
from ...errors import BadData
from ...foundation.progress import track
from ...generation.text_generation import generate
from ...models import Decoder, Model
from ...text.processor import Processor
from ...text.tokenizer import EOS, cut_parts
from ..loss import Batch, token_losses
from ..metrics.language_metrics import TextLosses, paired_texts
from ..metrics.statistics import Statistics
from ..precision import Precision
from .task import MAX_TOKENIZER_CHARACTERS, MAX_TOKENIZER_TEXTS, ExampleResult, Scores, Task

_MAX_CONTEXT = 1024  # context for models with a longer one whose training context is unknown
_SHOWN_BEFORE = 32  # tokens shown before a passage


class TextTask(Task):
    """Tasks on plain text: documents form one long sequence of tokens."""

    kinds = ("text",)
    needs_positions = True
    _target_offset: ClassVar[int] = 0  # position of a target in the text minus that of its input

    # Abstract methods.

    @abstractmethod
    def _row_batch(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        """Packed rows as a batch with targets; ``epoch`` is -1 for held-out texts."""

    @abstractmethod
    def _text_metrics(self, text_losses: TextLosses) -> dict[str, Any]:
        """Metrics besides loss and perplexity."""

    @abstractmethod
    def _passage_results(self, text_losses: TextLosses, inputs: NDArray[np.int64]) -> Iterator[ExampleResult]:
        """The rows of a report: passages of the scored texts."""

    def _new_processor(self) -> Processor:
        return Processor(source=self._new_tokenizer(self._tokenizer_texts()))

    def _tokenizer_texts(self) -> Iterator[str]:
        """The first texts; if they are too long to use whole, pieces of them at even distances."""
        train = self.source.train
        if not isinstance(train, ExampleFile):
            return (cast(Text, x).text for x in train)
        first = train.select(np.arange(min(len(train), MAX_TOKENIZER_TEXTS)))
        distance = -(-first.n_bytes // MAX_TOKENIZER_CHARACTERS)
        if distance <= 1:
            return (cast(Text, x).text for x in first)
        return (piece for piece, _, _ in islice(cut_parts(document_parts(first)), 0, None, distance))

    @property
    def context(self) -> int:
        return self.config.data.max_len

    @property
    def model_config(self) -> ModelConfig:
        fields = self._token_fields(self.tokenizer)
        if self.tokenizer.is_native:  # a foreign model keeps its special tokens even if they are not used here
            end = EOS if self._separates_documents else None
            fields |= {"bos_id": end, "eos_id": end}
        return self.config.model.with_(max_len=self._max_width, **fields)

    @property
    def _separates_documents(self) -> bool:
        """Whether documents are separated by special tokens. A single text has no beginning or end worth learning."""
        packing = self.config.data.packing
        return len(self.source.train) > 1 if packing == "auto" else packing == "documents"

    def _token_pieces(self, parts: Iterable[tuple[str, bool]]) -> Pieces:
        """Token ids of documents, each between two <eos> as in GPT-2, or between the special tokens of a foreign
        model, if documents are separated."""
        first, last = self._document_marks if self._separates_documents else ([], [])
        is_first = True
        for ids, is_last in self.tokenizer.encode_parts(parts):
            yield [*first * is_first, *ids, *last * is_last], is_last
            is_first = is_last

    @property
    def _document_marks(self) -> tuple[list[int], list[int]]:
        """The tokens before and after a document."""
        ids = self.tokenizer.special_ids
        marks = [ids[name] for name in ("bos", "eos") if name in ids]  # if there is only one, it is used for both
        return ([EOS], [EOS]) if self.tokenizer.is_native else (marks[:1], marks[-1:])

    def token_file(self, examples: Sequence[Example]) -> TokenFile:
        """The tokens of the examples, in order."""
        return TokenFile.of_pieces(self._token_pieces(document_parts(examples)), self.tokenizer.size)

    @cached_property
    def _train(self) -> TokenFile:
        def pieces() -> Pieces:
            train = self.source.train
            n_bytes = train.n_bytes if isinstance(train, ExampleFile) else 0
            size_of = lambda part: len(part[0].encode("utf-8", "surrogatepass"))  # noqa: E731
            return self._token_pieces(track(document_parts(train), "tokenising texts", n_bytes, size_of))

        return self._tokens(str(self._separates_documents), self.tokenizer, pieces, self.tokens_folder)

    @cached_property
    def _packed(self) -> PackedRows:
        return PackedRows(self._train, self.context, self.config.train.seed, self.tokenizer.pad_id)

    @cached_property
    def batch_plan(self) -> BatchPlan:
        return self._plan_by_rows(len(self._packed), self.context)

    @property
    def ragged(self) -> bool:
        return has_partial_batch(self.batch_plan)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        return self._row_batch(self._packed.batch(epoch, index), epoch, index)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        rows = PackedRows(self.token_file(examples), self.context, pad_id=self.tokenizer.pad_id, shuffle=False)
        for index in index_groups(len(rows), max(1, 32768 // self.context)):
            yield index, self._row_batch(rows.batch(0, index), -1, index)

    def score(self, model: Model, examples: Sequence[Example], precision: Precision, **options: Any) -> Scores:
        """The loss of every token as in validation and, with ``stride``, also with a longer context before each."""
        file = self.token_file(examples)
        if len(file.tokens) < 2:
            name = self.source.name
            raise BadData(f"{name} has no held-out examples to evaluate on; data.source=FILE names others")
        losses, predictions = np.full(len(file.tokens), np.nan), np.full(len(file.tokens), -1, dtype=np.int64)
        texts = [cast(Text, x).text for x in examples]
        text_losses = TextLosses(self.tokenizer, texts, file.tokens, file.starts, losses, predictions)
        n_tokens, inputs, start = 0, np.array(file.tokens, dtype=np.int64), time.perf_counter()
        width = min(self.context, len(file.tokens) - 1)  # distance between consecutive rows of ``valid_groups``
        for index, batch in self.valid_groups(examples):
            with precision.forward():
                batch_losses, batch_predictions = token_losses(model, batch.to(model.device))
            row, column = (x.numpy() for x in torch.nonzero(batch.targets != IGNORE, as_tuple=True))
            positions = np.asarray(index)[row] * width + column + self._target_offset
            losses[positions] = batch_losses.cpu().double().numpy()
            predictions[positions] = batch_predictions.cpu().numpy()
            inputs[positions - self._target_offset] = batch.inputs[0].numpy()[row, column]
            n_tokens += batch.n_tokens
        seconds = time.perf_counter() - start
        scores = text_losses.scores()
        values: dict[str, Any] = {"loss": self.check_finite(scores.loss), "perplexity": scores.perplexity}
        values |= self._text_metrics(text_losses)
        rows = list(self._passage_results(text_losses, inputs))
        if (stride := options.get("stride")) is not None:
            with precision.forward():
                text_losses = text_losses.with_stride(cast(Decoder, model), self.context, stride)
            strided = text_losses.scores()  # the better measure, so comparisons use it too
            names = ("loss", "perplexity", "bits_per_character")
            values |= {f"strided_{name}": getattr(strided, name) for name in names}
        values["n_targets"] = scores.n_tokens
        return Scores(len(texts), values, rows, n_tokens, seconds, texts=text_losses)

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        texts = cast(TextLosses, ours.texts), cast(TextLosses, theirs.texts)
        return paired_texts(*texts, masked=self.needs_mask_token)


class LanguageModel(TextTask):
    """Predict the next token from those before it (Bengio et al. 2003; Radford et al. 2018)."""

    name = "lm"
    command = "generate"
    evaluation_options = ("stride",)
    _target_offset = 1

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        return DataConfig(max_len=min(model.max_len, _MAX_CONTEXT))

    def _text_metrics(self, text_losses: TextLosses) -> dict[str, Any]:
        return {"bits_per_character": text_losses.scores().bits_per_character}

    def _passage_results(self, text_losses: TextLosses, inputs: NDArray[np.int64]) -> Iterator[ExampleResult]:
        """Each passage with the tokens before it and the most likely token at each of its positions."""
        decode, is_scored, starts = self.tokenizer.decode, text_losses.is_scored, text_losses.starts
        for passage in text_losses.passages():
            if (targets := is_scored[passage]).any():
                loss = float(text_losses.losses[passage][targets].mean())
                document_start = int(starts[np.searchsorted(starts, passage.start, side="right") - 1])
                before = decode(text_losses.tokens[max(document_start, passage.start - _SHOWN_BEFORE) : passage.start])
                predicted = decode(text_losses.predictions[passage][targets])
                yield ExampleResult(before, decode(text_losses.tokens[passage]), predicted, math.exp(-loss), loss)

    # Text without separate documents is read in blocks: at random offsets for training, consecutive for evaluation.

    @cached_property
    def _blocks(self) -> TokenBlocks:
        if (n_tokens := len(self._train.tokens)) <= self.context:
            few = f"{self.source.name} has {n_tokens:,} tokens to train on, fewer than a row of"
            needed = f"data.max_len={self.context} and the token after it need"
            raise BadData(f"{few} {needed}; set data.max_len to at most {n_tokens - 1}")
        return TokenBlocks(self._train.tokens, self.context)

    @property
    def ragged(self) -> bool:
        return self._separates_documents and super().ragged

    @property
    def batches_per_epoch(self) -> int:
        if self._separates_documents:
            return super().batches_per_epoch
        return max(1, len(self._blocks) // self._rows_per_batch(self.context))

    def batch(self, number: int) -> Batch:
        if self._separates_documents:
            return super().batch(number)
        return _block_batch(*self._blocks.random(self.config.train.seed, number, self._rows_per_batch(self.context)))

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Consecutive rows of one context each; every token but the first of a document is a target."""
        if self._separates_documents:
            yield from super().valid_groups(examples)
        elif len(tokens := self.token_file(examples).tokens) > 1:  # a single token has no next one
            blocks = TokenBlocks(tokens, min(self.context, len(tokens) - 1))
            for index in index_groups(len(blocks), max(1, 32768 // self.context)):
                yield index, _block_batch(*blocks.sequential(index[0], len(index)))

    def _row_batch(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        tokens, targets, documents, positions = (
            torch.from_numpy(x) for x in (packed.tokens, packed.targets, packed.documents, packed.positions)
        )
        n_tokens = int((documents >= 0).sum())
        if bool((documents == documents[:, :1]).all()):  # each row lies in one document: no mask needed
            return Batch((tokens,), targets, n_tokens=n_tokens)
        return Batch((tokens,), targets, {"documents": documents, "positions": positions}, n_tokens)

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """Continuations of the beginnings of held-out texts."""
        samples: list[dict[str, str]] = []
        for example in self.first(self.source.valid, n):
            if ids := self.tokenizer.encode(cast(Text, example).text[:2000], special=False)[:12]:
                room = max(1, min(80, model.config.max_len - len(ids)))
                output = generate(model, ids, max_new_tokens=room, temperature=0.8, top_k=40, seed=len(samples))
                continuation = self.tokenizer.decode(output.tokens[0])
                samples.append({"source": self.tokenizer.decode(ids), "output": continuation})
        return samples


class MaskedLanguageModel(TextTask):
    """Predict masked tokens from those around them (Devlin et al. 2019)."""

    name = "mlm"
    needs_mask_token = True

    @property
    def model_config(self) -> ModelConfig:
        _ = self.tokenizer.mask_id  # raises before the run begins if there is no mask token
        return super().model_config

    def _text_metrics(self, text_losses: TextLosses) -> dict[str, Any]:
        hits = text_losses.predictions == text_losses.tokens
        return {"accuracy": float(hits[text_losses.is_scored].mean())}

    def _passage_results(self, text_losses: TextLosses, inputs: NDArray[np.int64]) -> Iterator[ExampleResult]:
        """Each row with its masks, in the original, and as the model filled it in."""
        is_scored, decode, tokens = text_losses.is_scored, self.tokenizer.decode, text_losses.tokens
        completed = np.where(is_scored, text_losses.predictions, tokens)
        for start in range(0, len(tokens), self.context):
            row = slice(start, min(start + self.context, len(tokens)))
            if (targets := is_scored[row]).any():
                loss = float(text_losses.losses[row][targets].mean())
                masked = "".join(self.tokenizer.span_texts(inputs[row].tolist()))
                yield ExampleResult(masked, decode(tokens[row]), decode(completed[row]), math.exp(-loss), loss)

    def _row_batch(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        rows = [
            mask_tokens(
                row,
                vocab_size=self.tokenizer.size,
                mask_id=self.tokenizer.mask_id,
                special=self.tokenizer.all_special_ids,
                share=self.config.data.mask_rate,
                seed=self.config.train.seed,
                epoch=epoch,
                index=i,
            )
            for row, i in zip(packed.tokens, index, strict=True)
        ]
        tokens, targets = (torch.from_numpy(np.stack([getattr(x, n) for x in rows])) for n in ("inputs", "targets"))
        padding_mask = torch.from_numpy(packed.documents >= 0)
        return Batch((tokens,), targets, {"padding_mask": padding_mask}, int(padding_mask.sum()))


def _block_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch((torch.from_numpy(tokens),), torch.from_numpy(targets), n_tokens=tokens.size)
