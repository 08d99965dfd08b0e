"""Supervised fine-tuning on chats: learning the assistant's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...config import DataConfig, ModelConfig, RunConfig
from ...data.batching import BatchPlan, group_by_length
from ...data.examples import Chat, Example, Pair, Preference
from ...data.packing import IGNORE
from ...data.sources import Source
from ...generation import GenerateConfig
from ...generation.text_generation import generate
from ...models import Model
from ...text.chat import ANSWERS, PLAIN, ChatTemplate, EncodedChat, Message, read_template
from ...text.processor import Processor
from ...text.tokenizer import EOS, PAD
from ..loss import Batch
from ..metrics import translation_metrics as metrics
from ..metrics.statistics import Statistics
from .task import MAX_TOKENIZER_TEXTS, AnswerResults, ExampleResult, Task

_MAX_CONTEXT = 1024  # context for models with a longer one whose training context is unknown


class ChatTask(Task):
    """Decoders that answer messages; the chat template of the processor writes messages as text."""

    command = "generate"
    needs_positions = True

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        super().__init__(config, source, processor)
        if self.processor.chat_template is None:  # a run stores its template; the file of a new one may change later
            name = config.data.chat_template
            self.processor = replace(self.processor, chat_template=PLAIN if name is None else read_template(name))

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        return DataConfig(max_len=min(model.max_len, _MAX_CONTEXT))

    def _new_processor(self) -> Processor:
        """A tokenizer trained on messages as the plain template writes them."""
        texts = [text for x in self.first(self.source.train, MAX_TOKENIZER_TEXTS) for text in _texts(x)]
        return Processor(source=self._new_tokenizer(texts))

    @property
    def model_config(self) -> ModelConfig:
        fields = self._token_fields(self.tokenizer)
        if self.tokenizer.is_native:
            fields |= {"bos_id": EOS, "eos_id": EOS}
        return self.config.model.with_(max_len=self._max_width, **fields)

    @cached_property
    def _template(self) -> ChatTemplate:
        chat = self.processor.chat
        assert chat is not None
        return chat

    def _encode(self, examples: Sequence[Example]) -> list[EncodedChat]:
        return [self._template.encode(messages_of(x)) for x in examples]

    def _plan_to_max_len(self, lengths: NDArray[np.int64]) -> BatchPlan:
        """Batches of chats with these lengths, (n,) or (n, 2). Chats longer than ``data.max_len`` are dropped or, with
        ``too_long=truncate``, cut."""
        data, cut = self.config.data, self.config.data.too_long == "truncate"
        shortest = int(lengths.reshape(len(lengths), -1).max(1).min())
        if shortest > data.max_len and not cut:
            fault = f"every chat has more than data.max_len={data.max_len} tokens, the shortest {shortest:,}"
            raise ValueError(f"{fault}; data.too_long=truncate cuts their beginnings")
        return self._plan_by_length(self._limit_lengths(lengths, cut), data.max_len)

    def _collate(self, rows: Sequence[EncodedChat]) -> Batch:
        """Tokens (B, T), with the next token as the target if it is part of an answer; long chats keep their end.

        Padding is on the right, where a causal decoder does not attend, so no mask is needed.
        """
        max_len = self.config.data.max_len
        ids = [row.ids[-max_len:] for row in rows]
        answers = [[token if x else IGNORE for token, x in zip(row.ids, row.is_answer, strict=True)] for row in rows]
        tokens, _ = self._pad(ids, self.tokenizer.special_ids.get("pad", PAD), self._max_width)
        targets = torch.full_like(tokens, IGNORE)
        for row, answer in enumerate(answers):
            next_tokens = answer[-max_len:][1:]
            targets[row, : len(next_tokens)] = torch.tensor(next_tokens)
        return Batch((tokens,), targets, n_tokens=sum(map(len, ids)))

    def _write_answers(self, model: Model, chats: Sequence[Sequence[Message]], **decoding: Any) -> list[str]:
        """Generate the last answer of each chat, with at most 2 n + 16 tokens where the true one has n."""
        outputs, references = [""] * len(chats), [chat[-1][1] for chat in chats]
        lengths = [len(ids) for ids in self.tokenizer.encode_all(references, special=False)]
        limits = [max(1, min(2 * n + 16, model.config.max_len // 2)) for n in lengths]
        prompts = [
            self._template.encode_prompt(chat[:-1])[-(model.config.max_len - limit) :]
            for chat, limit in zip(chats, limits, strict=True)
        ]
        for group in group_by_length([len(ids) for ids in prompts], max(512, 16384 // decoding.get("beam", 1))):
            limit = min(max(limits[i] for i in group), model.config.max_len - len(prompts[group[0]]))
            config = GenerateConfig(max_new_tokens=limit, **decoding)
            generated = generate(model, [prompts[i] for i in group], config)
            for i, tokens in zip(group, generated.tokens, strict=True):
                outputs[i] = self.tokenizer.decode(tokens).strip()
        return outputs


class SupervisedFineTuning(ChatTask):
    """Predict the assistant's answers from the messages before them; only answers have a loss (Ouyang et al. 2022)."""

    name = "sft"
    kinds = ("chats", "pairs")
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "chrf": "chrf", "exact": "exact"}
    evaluation_options = ("beam", "length_penalty")

    @cached_property
    def _encoded_rows(self) -> list[EncodedChat]:
        return self._encode(self.first(self.source.train))

    @cached_property
    def batch_plan(self) -> BatchPlan:
        return self._plan_to_max_len(np.array([len(row.ids) for row in self._encoded_rows]))

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        return self._collate([self._encoded_rows[i] for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        rows, max_len = self._encode(examples), self.config.data.max_len
        self.n_held_out_cut = sum(len(row.ids) > max_len for row in rows)
        lengths = [min(len(row.ids), max_len) for row in rows]
        for group in group_by_length(lengths, max(self.config.train.batch_tokens, 4096)):
            yield group, self._collate([rows[i] for i in group])

    def answers(self, model: Model, examples: Sequence[Example], **decoding: Any) -> AnswerResults:
        chats = [messages_of(x) for x in examples]
        references = [chat[-1][1] for chat in chats]
        outputs = self._write_answers(model, chats, **decoding)
        each = zip(chats, references, outputs, metrics.sentence_chrf(outputs, references), strict=True)
        rows = [ExampleResult(chat[-2][1], reference, output, chrf / 100) for chat, reference, output, chrf in each]
        exact, chrf = (x.corpus() for x in self.answer_statistics(outputs, references))
        return {"n": len(rows), "chrf": chrf, "exact": exact}, rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return [measure(outputs, references) for measure in (metrics.exact_statistics, metrics.chrf_statistics)]


def messages_of(example: Example) -> tuple[Message, ...]:
    """The messages of a chat; a pair is a question (source) and its answer (target)."""
    if isinstance(example, Pair):
        return ("user", example.source), (ANSWERS, example.target)
    return cast(Chat, example).messages


def _texts(example: Example) -> list[str]:
    """Texts to train a tokenizer on: each message as the plain template writes it and, like encoded answers, alone."""
    if isinstance(example, Preference):
        messages = [*example.prompt, (ANSWERS, example.chosen), (ANSWERS, example.rejected)]
    else:
        messages = [*messages_of(example)]
    return [text for role, content in messages for text in (f"{role}:\n{content}\n\n", content)]
