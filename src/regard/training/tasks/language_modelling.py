"""Language models: what comes next, and what was hidden."""

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
from ...data.batching import BatchPlan, has_partial_batch, mask_tokens
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
from .task import MAX_TOKENIZER_CHARACTERS, MAX_TOKENIZER_TEXTS, ExampleResult, Scores, Task, index_groups

_MAX_CONTEXT = 1024  # of a model that can read more and does not say what it was trained with
_SHOWN_BEFORE = 32  # tokens shown before a passage


class TextTask(Task):
    """Documents as one long row of tokens."""

    kinds = ("text",)
    needs_positions = True
    _target_offset: ClassVar[int] = 0  # a target's place in the text is that of its input plus this

    # What the tasks differ in.

    @abstractmethod
    def _row_batch(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        """Packed rows with what is asked about them; ``epoch`` is -1 for held-out texts."""

    @abstractmethod
    def _text_metrics(self, text_losses: TextLosses) -> dict[str, Any]:
        """Metrics beside loss and perplexity."""

    @abstractmethod
    def _passage_results(self, text_losses: TextLosses, inputs: NDArray[np.int64]) -> Iterator[ExampleResult]:
        """What a person is shown of the scored texts."""

    def _new_processor(self) -> Processor:
        return Processor(source=self._new_tokenizer(self._tokenizer_texts()))

    def _tokenizer_texts(self) -> Iterator[str]:
        """The first texts or, of those too long for all of it, pieces at even distances."""
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
        if self.tokenizer.is_native:  # a foreign model knows its marks whether they are used here or not
            end = EOS if self._separates_documents else None
            fields |= {"bos_id": end, "eos_id": end}
        return self.config.model.with_(max_len=max(self.context, self.config.model.max_len), **fields)

    @property
    def _separates_documents(self) -> bool:
        """Whether documents are told apart. A single text has neither beginning nor end worth learning."""
        packing = self.config.data.packing
        return len(self.source.train) > 1 if packing == "auto" else packing == "documents"

    def _token_pieces(self, parts: Iterable[tuple[str, bool]]) -> Pieces:
        """Where they are told apart, each document between two <eos>, as GPT-2 has them, or between a foreign model's
        marks."""
        first, last = self._document_marks if self._separates_documents else ([], [])
        is_first = True
        for ids, is_last in self.tokenizer.encode_parts(parts):
            yield [*first * is_first, *ids, *last * is_last], is_last
            is_first = is_last

    @property
    def _document_marks(self) -> tuple[list[int], list[int]]:
        """What stands before and after a document."""
        ids = self.tokenizer.special_ids
        marks = [ids[name] for name in ("bos", "eos") if name in ids]  # with one of them, it does for both
        return ([EOS], [EOS]) if self.tokenizer.is_native else (marks[:1], marks[-1:])

    def token_file(self, examples: Sequence[Example]) -> TokenFile:
        """The tokens of some texts, in their order."""
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
        """Every token as validation scores it and, with a ``stride``, also with a long context before each."""
        file = self.token_file(examples)
        if len(file.tokens) < 2:
            name = self.source.name
            raise BadData(f"{name} has nothing held out to evaluate on; data.source=FILE names other examples")
        losses, predictions = np.full(len(file.tokens), np.nan), np.full(len(file.tokens), -1, dtype=np.int64)
        texts = [cast(Text, x).text for x in examples]
        text_losses = TextLosses(self.tokenizer, texts, file.tokens, file.starts, losses, predictions)
        n_tokens, inputs, start = 0, np.array(file.tokens, dtype=np.int64), time.perf_counter()
        width = min(self.context, len(file.tokens) - 1)  # tokens that a row of ``valid_groups`` advances
        for index, batch in self.valid_groups(examples):
            with precision.forward():
                batch_losses, likeliest = token_losses(model, batch.to(model.device))
            row, column = (x.numpy() for x in torch.nonzero(batch.targets != IGNORE, as_tuple=True))
            places = np.asarray(index)[row] * width + column + self._target_offset
            losses[places], predictions[places] = batch_losses.cpu().double().numpy(), likeliest.cpu().numpy()
            inputs[places - self._target_offset] = batch.inputs[0].numpy()[row, column]
            n_tokens += batch.n_tokens
        seconds = time.perf_counter() - start
        scores = text_losses.scores()
        values: dict[str, Any] = {"loss": self.check_finite(scores.loss), "perplexity": scores.perplexity}
        values |= self._text_metrics(text_losses)
        rows = list(self._passage_results(text_losses, inputs))
        if (stride := options.get("stride")) is not None:
            with precision.forward():
                text_losses = text_losses.with_stride(cast(Decoder, model), self.context, stride)
            strided = text_losses.scores()  # the better measure, so it is also what is compared
            names = ("loss", "perplexity", "bits_per_character")
            values |= {f"strided_{name}": getattr(strided, name) for name in names}
        values["n_targets"] = scores.n_tokens
        return Scores(len(texts), values, rows, n_tokens, seconds, texts=text_losses)

    def paired_statistics(self, ours: Scores, theirs: Scores, same_tokens: bool) -> list[tuple[Statistics, Statistics]]:
        texts = cast(TextLosses, ours.texts), cast(TextLosses, theirs.texts)
        return paired_texts(*texts, masked=self.needs_mask_token)


class LanguageModel(TextTask):
    """The next token from those before it (Bengio et al. 2003; Radford et al. 2018)."""

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
        """Passages: the tokens before, the passage, and the likeliest token at each of its places."""
        decode, scored, starts = self.tokenizer.decode, text_losses.scored, text_losses.starts
        for place in text_losses.passages():
            if (targets := scored[place]).any():
                loss = float(text_losses.losses[place][targets].mean())
                document_start = int(starts[np.searchsorted(starts, place.start, side="right") - 1])
                before = decode(text_losses.tokens[max(document_start, place.start - _SHOWN_BEFORE) : place.start])
                likeliest = decode(text_losses.predictions[place][targets])
                yield ExampleResult(before, decode(text_losses.tokens[place]), likeliest, math.exp(-loss), loss)

    # A text without documents is read in blocks: at random places to train on, one after the other to evaluate.

    @cached_property
    def _blocks(self) -> TokenBlocks:
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
        """Rows of a context each, one after the other; every token but the first of a document is asked for."""
        if self._separates_documents:
            yield from super().valid_groups(examples)
        elif len(tokens := self.token_file(examples).tokens) > 1:  # else nothing comes next
            blocks = TokenBlocks(tokens, min(self.context, len(tokens) - 1))
            for index in index_groups(len(blocks), max(1, 32768 // self.context)):
                yield index, _block_batch(*blocks.sequential(index[0], len(index)))

    def _row_batch(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        tokens, targets, documents, positions = (
            torch.from_numpy(x) for x in (packed.tokens, packed.targets, packed.documents, packed.positions)
        )
        n_tokens = int((documents >= 0).sum())
        if bool((documents == documents[:, :1]).all()):  # each row within one document: nothing to keep apart
            return Batch((tokens,), targets, n_tokens=n_tokens)
        return Batch((tokens,), targets, {"documents": documents, "positions": positions}, n_tokens)

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """Continuations of what held-out texts begin with."""
        shown: list[dict[str, str]] = []
        for example in self.first(self.source.valid, n):
            if ids := self.tokenizer.encode(cast(Text, example).text[:2000], special=False)[:12]:
                room = max(1, min(80, model.config.max_len - len(ids)))
                output = generate(model, ids, max_new_tokens=room, temperature=0.8, top_k=40, seed=len(shown))
                continuation = self.tokenizer.decode(output.tokens[0])
                shown.append({"source": self.tokenizer.decode(ids), "output": continuation})
        return shown


class MaskedLanguageModel(TextTask):
    """The hidden tokens of a text from those around them (Devlin et al. 2019)."""

    name = "mlm"
    needs_mask_token = True

    @property
    def model_config(self) -> ModelConfig:
        _ = self.tokenizer.mask_id  # says what is missing before a run begins
        return super().model_config

    def _text_metrics(self, text_losses: TextLosses) -> dict[str, Any]:
        hits = text_losses.predictions == text_losses.tokens
        return {"accuracy": float(hits[text_losses.scored].mean())}

    def _passage_results(self, text_losses: TextLosses, inputs: NDArray[np.int64]) -> Iterator[ExampleResult]:
        """Rows as the model saw them, as they were, and as it filled them in."""
        scored, decode, tokens = text_losses.scored, self.tokenizer.decode, text_losses.tokens
        completed = np.where(scored, text_losses.predictions, tokens)
        for first in range(0, len(tokens), self.context):
            place = slice(first, min(first + self.context, len(tokens)))
            if (targets := scored[place]).any():
                loss = float(text_losses.losses[place][targets].mean())
                masked = "".join(self.tokenizer.span_texts(inputs[place].tolist()))
                yield ExampleResult(masked, decode(tokens[place]), decode(completed[place]), math.exp(-loss), loss)

    def _row_batch(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        how = {"vocab_size": self.tokenizer.size, "mask_id": self.tokenizer.mask_id}
        special, rate, seed = self.tokenizer.all_special_ids, self.config.data.mask_rate, self.config.train.seed
        rows = [
            mask_tokens(row, **how, special=special, share=rate, seed=seed, epoch=epoch, index=which)
            for row, which in zip(packed.tokens, index, strict=True)
        ]
        tokens, targets = (torch.from_numpy(np.stack([getattr(x, n) for x in rows])) for n in ("inputs", "targets"))
        padding_mask = torch.from_numpy(packed.documents >= 0)
        return Batch((tokens,), targets, {"padding_mask": padding_mask}, int(padding_mask.sum()))


def _block_batch(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch((torch.from_numpy(tokens),), torch.from_numpy(targets), n_tokens=tokens.size)
