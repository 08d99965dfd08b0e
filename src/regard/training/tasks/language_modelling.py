"""Language models: what comes next, and what was hidden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ...config import ModelConfig
from ...data.batching import BatchPlan, mask_tokens
from ...data.examples import Example, Text
from ...data.packing import PackedRow, PackedRows, TokenBlocks
from ...data.token_files import TokenFile, cached_tokens
from ...generation import generate
from ...models import Model
from ...text.processor import Processor
from ...text.tokenizer import EOS, MASK, Tokenizer
from ..loss import IGNORE, Batch
from .task import Task, uneven

__all__ = ["LanguageModel", "MaskedLanguageModel", "Texts"]


class Texts(Task):
    """Documents as one long row of tokens."""

    kinds = ("text",)
    tokens_folder: Path | None = None
    """Where tokens are kept, mapped into memory; None: they are held."""

    def _new_processor(self) -> Processor:
        texts = [cast(Text, x).text for x in self._first(self.source.train, 200_000)]
        return Processor(source=self._tokenizer(texts))

    @property
    def _tokens(self) -> Tokenizer:
        return cast(Tokenizer, self.processor.source)

    @property
    def context(self) -> int:
        return self.config.data.max_len

    @property
    def model_config(self) -> ModelConfig:
        ids = {**self._ids, "bos_id": EOS} if self._separated else {**self._ids, "bos_id": None, "eos_id": None}
        return self.config.model.with_(
            vocab_size=self._tokens.size, max_len=max(self.context, self.config.model.max_len), **ids
        )

    @property
    def _separated(self) -> bool:
        """Whether documents are told apart. A single text has neither beginning nor end worth learning."""
        packing = self.config.data.packing
        return len(self.source.train) > 1 if packing == "auto" else packing == "documents"

    def _documents(self, examples: Sequence[Example]) -> Iterator[list[int]]:
        """Each between two <eos>, as GPT-2 has them, where they are told apart."""
        for ids in self._tokens.encode_stream((cast(Text, x).text for x in examples), special=False):
            yield [self._tokens.eos_id, *ids, self._tokens.eos_id] if self._separated else ids

    def token_file(self, examples: Sequence[Example]) -> TokenFile:
        """The tokens of some texts, in their order."""
        return TokenFile.of(list(self._documents(examples)), self._tokens.size)

    @cached_property
    def _train(self) -> TokenFile:
        if self.tokens_folder is None:
            return self.token_file(self.source.train)
        about = f"{self.source.split.train_sha256} {self._separated}"
        return cached_tokens(
            self.tokens_folder,
            about,
            self._tokens.sha256,
            self._tokens.size,
            lambda: self._documents(self.source.train),
        )

    @property
    def _rows(self) -> int:
        """Rows of a batch."""
        train = self.config.train
        rows = max(1, train.batch_tokens // self.context)
        return rows if train.batch_size is None else min(rows, train.batch_size)

    @cached_property
    def _packed(self) -> PackedRows:
        return PackedRows(self._train, self.context, self.config.train.seed)

    @property
    def ragged(self) -> bool:
        return uneven(len(self._packed), self._rows)

    @cached_property
    def _order(self) -> BatchPlan:
        return BatchPlan.by_examples(len(self._packed), self._rows, seed=self.config.train.seed)

    def _packed_batch(self, number: int) -> tuple[int, Any, PackedRow]:
        epoch, place = self._order.at(number)
        index = self._order.batch(epoch, place)
        return epoch, index, self._packed.batch(epoch, index)


class LanguageModel(Texts):
    """The next token from those before it (Bengio et al. 2003; Radford et al. 2018)."""

    @cached_property
    def _blocks(self) -> TokenBlocks:
        return TokenBlocks(self._train.tokens, self.context)

    @property
    def ragged(self) -> bool:
        return self._separated and super().ragged

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count() if self._separated else max(1, len(self._blocks) // self._rows)

    def batch(self, number: int) -> Batch:
        if self._separated:
            _, _, packed = self._packed_batch(number)
            return _next_token(packed)
        return _plain(*self._blocks.random(self.config.train.seed, number, self._rows))

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        """Rows of a context each, one after the other; every token but the first of a document is asked for."""
        file = self.token_file(examples)
        at_once = max(1, 32768 // self.context)
        if self._separated:
            rows = PackedRows(file, self.context, shuffle=False)
            for first in range(0, len(rows), at_once):
                index = list(range(first, min(first + at_once, len(rows))))
                yield index, _next_token(rows.batch(0, index))
            return
        if len(file.tokens) < 2:  # nothing comes next
            return
        blocks = TokenBlocks(file.tokens, min(self.context, len(file.tokens) - 1))
        for first in range(0, len(blocks), at_once):
            index = list(range(first, min(first + at_once, len(blocks))))
            yield index, _plain(*blocks.sequential(first, at_once))

    def sample(self, model: Model, n: int) -> list[dict[str, str]]:
        """Continuations of what held-out texts begin with."""
        shown: list[dict[str, str]] = []
        for example in self._first(self.source.valid, n):
            ids = self._tokens.encode(cast(Text, example).text[:2000], special=False)[:12]
            if not ids:
                continue
            room = max(1, min(80, model.config.max_len - len(ids)))
            made = generate(model, ids, max_new_tokens=room, temperature=0.8, top_k=40, seed=len(shown))
            shown.append({"source": self._tokens.decode(ids), "output": self._tokens.decode(made.tokens[0])})
        return shown


class MaskedLanguageModel(Texts):
    """The hidden tokens of a text from those around them (Devlin et al. 2019)."""

    @property
    def batches_per_epoch(self) -> int:
        return self._order.count()

    def batch(self, number: int) -> Batch:
        epoch, index, packed = self._packed_batch(number)
        return self._masked(packed, epoch, [int(i) for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        rows = PackedRows(self.token_file(examples), self.context, shuffle=False)
        at_once = max(1, 32768 // self.context)
        for first in range(0, len(rows), at_once):
            index = list(range(first, min(first + at_once, len(rows))))
            yield index, self._masked(rows.batch(0, index), -1, index)

    def _masked(self, packed: PackedRow, epoch: int, index: list[int]) -> Batch:
        made = [
            mask_tokens(
                row,
                vocab_size=self._tokens.size,
                mask_id=MASK,
                share=self.config.data.mask_rate,
                seed=self.config.train.seed,
                epoch=epoch,
                index=which,
            )
            for row, which in zip(packed.tokens, index, strict=True)
        ]
        tokens, targets = (
            torch.from_numpy(np.stack([getattr(x, name) for x in made])) for name in ("inputs", "targets")
        )
        keep = torch.from_numpy(packed.documents >= 0)
        return Batch((tokens,), targets, {"keep": keep}, int(keep.sum()))


def _plain(tokens: np.ndarray, targets: np.ndarray) -> Batch:
    return Batch((torch.from_numpy(tokens),), torch.from_numpy(targets), n_tokens=tokens.size)


def _next_token(packed: PackedRow) -> Batch:
    tokens, targets, documents, positions = (
        torch.from_numpy(x) for x in (packed.tokens, packed.targets, packed.documents, packed.positions)
    )
    n_tokens = int((documents >= 0).sum())
    if bool((documents == documents[:, :1]).all()):  # each row within one document: nothing to keep apart
        return Batch((tokens,), targets, n_tokens=n_tokens)
    return Batch((tokens,), targets, {"documents": documents, "positions": positions}, n_tokens)


assert IGNORE == -100  # what data/packing.py and data/batching.py write where nothing is asked
