"""Answering questions from passages: each passage is encoded with the question, and the decoder attends to all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from ...data.batching import BatchPlan, group_by_length, truncate
from ...data.examples import Example, Question
from ...data.token_files import Pieces, TokenFile, whole_documents
from ...generation import GenerateConfig
from ...generation.fused_answers import question_with_passage
from ...generation.generate import generate
from ...models import Model
from ...text.processor import Processor
from ..loss import Batch
from ..metrics.retrieval_metrics import answer_exactness, answer_f1
from ..metrics.statistics import Statistics, mean_statistics
from .task import MAX_TOKENIZER_TEXTS, AnswerResults, ExampleResult, SkippedExamples
from .translation import Translate, encode_with_end


class AnswerQuestions(Translate):
    """Encoder-decoders whose sources are P passages, (B, P, S) (Fusion-in-Decoder, Izacard & Grave 2021)."""

    name = "answer"
    command = "answer"
    kinds = ("questions",)
    criterion = "exact"
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "exact": "exact"}

    def _new_processor(self) -> Processor:
        examples = cast(list[Question], self.first(self.source.train, MAX_TOKENIZER_TEXTS))
        return Processor(source=self._new_tokenizer([text for x in examples for text in self._texts(x)]))

    def example_words(self) -> list[str]:
        example = cast(Question, next(iter(self.first(self.source.valid or self.source.train, 1))))
        return [example.question, *(word for x in example.passages[:1] for word in ("--passage", x))]

    def _texts(self, example: Question) -> list[str]:
        return [*self._source_texts(example), example.answer]

    def _source_texts(self, example: Example) -> list[str]:
        """The question with each of its first ``data.passages`` passages."""
        question = cast(Question, example)
        return [question_with_passage(question.question, x) for x in question.passages[: self.config.data.passages]]

    @cached_property
    def _rows(self) -> tuple[TokenFile, TokenFile]:
        """The tokens of all passages, question after question, and of the answers."""

        def passages() -> Pieces:
            texts = (text for x in self._tracked_train("passages") for text in self._source_texts(x))
            return whole_documents(encode_with_end(self._source, texts))

        def answers() -> Pieces:
            texts = (cast(Question, x).answer for x in self._tracked_train("answers"))
            return whole_documents([self._target.bos_id, *ids] for ids in encode_with_end(self._target, texts))

        source = self._tokens(f"passages {self.config.data.passages}", self._source, passages)
        return source, self._tokens("answers", self._target, answers)

    @cached_property
    def _starts(self) -> np.ndarray:
        """Training example i has the passages _starts[i] to _starts[i + 1] - 1."""
        return np.cumsum([0, *(len(self._source_texts(x)) for x in self.first(self.source.train))])

    @cached_property
    def batch_plan(self) -> BatchPlan:
        """The tokens of all passages count towards a batch; passages longer than max_len are cut."""
        data, (passages, answers) = self.config.data, self._rows
        sizes = np.minimum(passages.sizes, data.max_len)
        longest = np.maximum.reduceat(sizes, self._starts[:-1]) * np.diff(self._starts)
        self.skipped = SkippedExamples(n_cut=int((passages.sizes > data.max_len).sum()), max_len=data.max_len)
        lengths = np.stack([longest, np.minimum(answers.sizes, self._max_target_len)], axis=1)
        return self._plan_by_length(lengths)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        passages, answers = self._rows
        sources = [[passages.document(n) for n in range(*self._starts[i : i + 2])] for i in index]
        return self._collate_passages(sources, [answers.document(i) for i in index])

    def _encode_sources(self, examples: Sequence[Example]) -> list[list[list[int]]]:
        texts = [self._source_texts(x) for x in examples]
        rows = iter(list(encode_with_end(self._source, (text for each in texts for text in each))))
        return [[next(rows) for _ in each] for each in texts]

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        sources, questions = self._encode_sources(examples), cast(Sequence[Question], examples)
        answers = encode_with_end(self._target, (x.answer for x in questions))
        targets = [[self._target.bos_id, *row] for row in answers]
        max_len = self.config.data.max_len
        self.n_held_out_cut = sum(len(row) > max_len for rows in sources for row in rows)
        lengths = [len(rows) * min(max_len, max(map(len, rows))) for rows in sources]
        for group in group_by_length(lengths, max(self.config.train.batch_tokens, 4096)):
            yield group, self._collate_passages([sources[i] for i in group], [targets[i] for i in group])

    def _collate_passages(self, sources: list[list[list[int]]], targets: list[list[int]]) -> Batch:
        data, pad_id = self.config.data, self._source.pad_id
        n_passages = max(map(len, sources))
        rows = truncate([row for each in sources for row in (*each, *[[]] * (n_passages - len(each)))], data.max_len)[0]
        max_source, max_target = self._max_lengths
        padded = self._pad(rows, pad_id, max_source)
        source, padding_mask = (x.unflatten(0, (len(sources), n_passages)) for x in padded)  # (B, P, S)
        targets = truncate(targets, self._max_target_len)[0]
        without_bos = [row[1:] for row in targets]
        decoder_input, labels = self._pad_targets(without_bos, targets[0][0], self._target.pad_id, max_target)
        n_tokens = sum(map(len, rows)) + sum(map(len, targets))
        return Batch((source, decoder_input), labels, {"source_padding_mask": padding_mask}, n_tokens)

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        """Exact match, ignoring case and punctuation, and the F1 of words."""
        questions = cast(Sequence[Question], examples)
        outputs, references = self._write(model, questions, **decoding), [x.answer for x in questions]
        exact, overlap = answer_exactness(outputs, references), answer_f1(outputs, references)
        each = zip(questions, outputs, overlap, strict=True)
        rows = [ExampleResult(x.question, x.answer, output, float(score)) for x, output, score in each]
        return {"n": len(rows), "exact": float(exact.mean()), "f1": float(overlap.mean())}, rows

    def _write(self, model: Model, examples: Iterable[Example], **decoding: Any) -> list[str]:
        """The answers that the model generates."""
        sources = [truncate(rows, self.config.data.max_len)[0] for rows in self._encode_sources(list(examples))]
        config = GenerateConfig(max_new_tokens=max(1, self._max_target_len - 1), **decoding)
        outputs = [""] * len(sources)
        for group in group_by_length([len(x) * max(map(len, x)) for x in sources], max(512, 16384 // config.beam)):
            generated = generate(model, [sources[i] for i in group], config)
            for i, tokens in zip(group, generated.tokens, strict=True):
                outputs[i] = self._target.decode(tokens)
        return outputs

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return [mean_statistics("exact", answer_exactness(outputs, references))]
