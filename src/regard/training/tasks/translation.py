"""Translation of a source text into a target text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from ...config import Kind, ModelConfig, RunConfig
from ...data.batching import BatchPlan, group_by_length, truncate
from ...data.bpe_dropout import BpeDropout
from ...data.examples import Example, Pair
from ...data.sources import Source
from ...data.token_files import Pieces, TokenFile, whole_documents
from ...errors import UsageError
from ...generation import GenerateConfig, generate
from ...generation.prompts import default_output_length
from ...models import Model
from ...text.processor import Processor
from ...text.tokenizer import Tokenizer
from ..loss import Batch
from ..metrics import translation_metrics as metrics
from ..metrics.statistics import Statistics
from .task import MAX_TOKENIZER_TEXTS, AnswerResults, ExampleResult, SkippedExamples, Task


class Translate(Task):
    """Encoder-decoders and recurrent models: teacher forcing on the target (Sutskever et al. 2014)."""

    name = "translate"
    command = "translate"
    kinds: ClassVar[tuple[Kind, ...]] = ("pairs",)
    template = "eos"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "bleu": "bleu", "chrf": "chrf", "exact": "exact"}
    evaluation_options = ("beam", "length_penalty")

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        super().__init__(config, source, processor)
        if config.data.bpe_dropout and not all(side.merge_ranks for side in (self._source, self._target)):
            raise UsageError("data.bpe_dropout is for data.tokenizer=bpe: no other kind has merges to skip")

    def _new_processor(self) -> Processor:
        train = [cast(Pair, x) for x in self.first(self.source.train, MAX_TOKENIZER_TEXTS)]
        if self.config.data.joint_vocab:
            return Processor(source=self._new_tokenizer([text for x in train for text in (x.source, x.target)]))
        source = self._new_tokenizer([x.source for x in train])
        return Processor(source=source, target=self._new_tokenizer([x.target for x in train]))

    @property
    def _source(self) -> Tokenizer:
        return cast(Tokenizer, self.processor.source)

    @property
    def _target(self) -> Tokenizer:
        return cast(Tokenizer, self.processor.target or self.processor.source)

    @property
    def model_config(self) -> ModelConfig:
        model, target, target_size = self.config.model, self.processor.target, None
        if target is not None and target.is_native:
            target_size = target.size
        elif target is not None and model.target_vocab_size is not None:  # None for Marian: one vocabulary
            target_size = max(target.size, model.target_vocab_size)
        sizes = {"target_vocab_size": target_size, "max_len": self._max_lengths[0]}
        return model.with_(**sizes, **self._token_fields(self._source))

    @cached_property
    def _train(self) -> tuple[TokenFile, TokenFile]:
        def side(name: str, tokenizer: Tokenizer, first: list[int]) -> TokenFile:
            def pieces() -> Pieces:
                texts = (getattr(x, name) for x in self._tracked_train(f"{name}s"))
                return whole_documents([*first, *ids] for ids in encode_with_end(tokenizer, texts))

            return self._tokens(name, tokenizer, pieces)

        return side("source", self._source, []), side("target", self._target, [self._target.bos_id])

    def _encode(self, examples: Sequence[Example]) -> tuple[list[list[int]], list[list[int]]]:
        """Sources end with <eos>; targets also begin with <bos>."""
        pairs = cast(Sequence[Pair], examples)
        sources = list(encode_with_end(self._source, (x.source for x in pairs)))
        targets = encode_with_end(self._target, (x.target for x in pairs))
        return sources, [[self._target.bos_id, *row] for row in targets]

    @cached_property
    def batch_plan(self) -> BatchPlan:
        data = self.config.data
        lengths = np.stack([side.sizes for side in self._train], axis=1)
        limits = np.asarray([data.max_len, self._max_target_len])
        too_long = np.any(lengths > limits, axis=1)
        if data.too_long == "truncate":
            self.skipped = SkippedExamples(n_cut=int(too_long.sum()), max_len=data.max_len)
            return self._plan_by_length(np.minimum(lengths, limits))
        self.skipped = SkippedExamples(n_dropped=int(too_long.sum()), max_len=data.max_len)
        # The plan has one limit for both sides, so a pair that is too long on one side gets a length beyond it.
        return self._plan_by_length(np.where(too_long[:, None], limits.max() + 1, lengths), int(limits.max()))

    @cached_property
    def _bpe_dropout(self) -> tuple[BpeDropout, BpeDropout]:
        """Sources and targets, segmented differently in every epoch."""

        def side(name: str, tokenizer: Tokenizer) -> BpeDropout:
            texts = (getattr(x, name) for x in self._tracked_train(f"{name}s"))
            return BpeDropout(tokenizer, texts, self.config.data.bpe_dropout, self.config.train.seed)

        return side("source", self._source), side("target", self._target)

    def _train_rows(self, epoch: int, index: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Sources and targets at ``index``. With BPE-dropout, a pair that would become too long is left as it is."""
        sources, targets = ([side.document(i) for i in index] for side in self._train)
        if not self.config.data.bpe_dropout:
            return sources, targets
        new_sources, new_targets = (side.rows(epoch, index) for side in self._bpe_dropout)
        max_source, max_target = self._max_lengths
        for i, (source, target) in enumerate(zip(new_sources, new_targets, strict=True)):
            if len(source) < max_source and len(target) < max_target:
                sources[i] = [*source, self._source.eos_id]
                targets[i] = [self._target.bos_id, *target, self._target.eos_id]
        return sources, targets

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        sources, targets = self._train_rows(epoch, index)
        return self._collate(self._hide_tokens(sources, epoch, index), targets)

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        sources, targets = self._encode(examples)
        max_source, max_target = self._max_lengths
        sources, n_sources = truncate(sources, max_source)
        targets, n_targets = truncate(targets, max_target + 1)
        self.n_held_out_cut = n_sources + n_targets
        lengths = [max(len(s), len(t)) for s, t in zip(sources, targets, strict=True)]
        for group in group_by_length(lengths, max(self.config.train.batch_tokens, 4096)):
            yield group, self._collate([sources[i] for i in group], [targets[i] for i in group])

    @property
    def _max_lengths(self) -> tuple[int, int]:
        """The numbers of tokens that the encoder and the decoder have positions for."""
        return self._max_width, self.config.model.max_target_len or self._max_width

    def _collate(self, sources: list[list[int]], targets: list[list[int]]) -> Batch:
        data = self.config.data
        if data.too_long == "truncate":
            sources = truncate(sources, data.max_len)[0]
            targets = truncate(targets, self._max_target_len)[0]
        max_source, max_target = self._max_lengths
        source, padding_mask = self._pad(sources, self._source.pad_id, max_source)
        # Padded without <bos>: the decoder reads all but the last token, so this is its width.
        without_bos = [row[1:] for row in targets]
        decoder_input, labels = self._pad_targets(without_bos, targets[0][0], self._target.pad_id, max_target)
        n_tokens = sum(map(len, sources)) + sum(map(len, targets))
        return Batch((source, decoder_input), labels, {"source_padding_mask": padding_mask}, n_tokens)

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        pairs = cast(Sequence[Pair], examples)
        outputs = self.translate(model, [x.source for x in pairs], **decoding)
        references = [x.target for x in pairs]
        each = zip(pairs, outputs, metrics.sentence_chrf(outputs, references), strict=True)
        rows = [ExampleResult(x.source, x.target, output, score / 100) for x, output, score in each]
        return metrics.translation(outputs, references), rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        measures = (metrics.bleu_statistics, metrics.chrf_statistics, metrics.exact_statistics)
        return [measure(outputs, references) for measure in measures]

    def translate(self, model: Model, texts: Sequence[str], *, beam: int = 1, length_penalty: float = 1.0) -> list[str]:
        """The translations of the model, generated in groups of texts of similar length."""
        ids, _ = truncate(list(encode_with_end(self._source, texts)), model.config.max_len)
        outputs = [""] * len(ids)
        for group in group_by_length([len(row) for row in ids], max(512, 16384 // beam)):
            limit = default_output_length(model.config, max(len(ids[i]) for i in group), multiple=1)
            config = GenerateConfig(beam=beam, length_penalty=length_penalty, max_new_tokens=limit)
            translated = generate(model, [ids[i] for i in group], config)
            for i, tokens in zip(group, translated.tokens, strict=True):
                outputs[i] = self._target.decode(tokens)
        return outputs


def encode_with_end(tokenizer: Tokenizer, texts: Iterable[str]) -> Iterator[list[int]]:
    """The ids of each text with the end-of-text token, which some foreign tokenizers do not add themselves."""
    end = [] if tokenizer.is_native else [tokenizer.eos_id]
    for row in tokenizer.encode_stream(texts):
        yield row if row[-1:] == end else [*row, *end]
