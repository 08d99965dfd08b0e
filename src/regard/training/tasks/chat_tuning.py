"""Chats: learning to answer as the examples do (supervised fine-tuning)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np
import torch

from ...config import DataConfig, ModelConfig, RunConfig
from ...data.batching import BatchPlan
from ...data.examples import Chat, Example, Pair, Preference
from ...data.packing import IGNORE
from ...data.sources import Source
from ...generation import GenerateConfig
from ...generation.text_generation import generate
from ...models import Model
from ...text.chat import ANSWERS, PLAIN, ChatTemplate, EncodedChat, Message, read_template
from ...text.processor import Processor
from ...text.tokenizer import EOS
from ..loss import Batch
from ..metrics import translation_metrics as metrics
from ..metrics.statistics import Statistics
from .task import MAX_TOKENIZER_TEXTS, ExampleResult, SkippedExamples, Task, group_by_length

_MAX_CONTEXT = 1024  # of a model that can read more and does not say what it was trained with


class ChatTask(Task):
    """Decoders that answer messages, written as text by the chat template of their processor."""

    command = "generate"
    needs_positions = True

    def __init__(self, config: RunConfig, source: Source, processor: Processor | None = None) -> None:
        super().__init__(config, source, processor)
        template, given = self.processor.chat_template, config.data.chat_template
        if given is not None or template is None:
            template = PLAIN if given is None else read_template(given)
        self.processor = replace(self.processor, chat_template=template)

    @classmethod
    def data_defaults(cls, model: ModelConfig) -> DataConfig:
        return DataConfig(max_len=min(model.max_len, _MAX_CONTEXT))

    def _new_processor(self) -> Processor:
        """A tokenizer that also knows the words of the plain template."""
        texts = [text for x in self.first(self.source.train, MAX_TOKENIZER_TEXTS) for text in _texts(x)]
        return Processor(source=self._new_tokenizer(texts))

    @property
    def model_config(self) -> ModelConfig:
        fields = self._token_fields(self.tokenizer)
        if self.tokenizer.is_native:
            fields |= {"bos_id": EOS, "eos_id": EOS}
        return self.config.model.with_(max_len=self._max_width, **fields)

    @property
    def _max_width(self) -> int:
        return max(self.config.data.max_len, self.config.model.max_len)

    @cached_property
    def _template(self) -> ChatTemplate:
        chat = self.processor.chat
        assert chat is not None
        return chat

    def _encode(self, examples: Sequence[Example]) -> list[EncodedChat]:
        return [self._template.encode(messages_of(x)) for x in examples]

    def _check_lengths(self, lengths: Sequence[int]) -> None:
        """Count what is longer than ``data.max_len``: left out, or with ``too_long=truncate`` cut at the beginning."""
        data = self.config.data
        n_longer = sum(length > data.max_len for length in lengths)
        if n_longer == len(lengths) and data.too_long != "truncate":
            most = f"every chat has more than data.max_len={data.max_len} tokens, the shortest {min(lengths):,}"
            raise ValueError(f"{most}; data.too_long=truncate cuts their beginnings")
        which = "n_cut" if data.too_long == "truncate" else "n_dropped"
        self.skipped = SkippedExamples(**{which: n_longer}, max_len=data.max_len)

    def _collate(self, rows: Sequence[EncodedChat]) -> Batch:
        """tokens (B, T) and the next token of each that is an answer's; of longer chats their last tokens.

        What pads a row stands after everything it has, where a decoder does not look.
        """
        most = self.config.data.max_len
        ids = [row.ids[-most:] for row in rows]
        answers = [[index if x else IGNORE for index, x in zip(row.ids, row.is_answer, strict=True)] for row in rows]
        tokens = self._pad(ids, self.tokenizer.pad_id if "pad" in self.tokenizer.special_ids else 0, self._max_width)
        targets = torch.full_like(tokens, IGNORE)
        for row, wanted in enumerate(answers):
            following = wanted[-most:][1:]
            targets[row, : len(following)] = torch.tensor(following)
        return Batch((tokens,), targets, n_tokens=sum(map(len, ids)))

    def _write_answers(
        self, model: Model, chats: Sequence[Sequence[Message]], *, beam: int = 1, length_penalty: float = 1.0
    ) -> list[str]:
        """The model's last answer to each chat, of at most twice as many tokens as the true one and 16 more."""
        outputs, references = [""] * len(chats), [chat[-1][1] for chat in chats]
        limits = [2 * len(ids) + 16 for ids in self.tokenizer.encode_all(references, special=False)]
        room = [max(1, min(limit, model.config.max_len // 2)) for limit in limits]
        prompts = [
            self._template.encode_prompt(chat[:-1])[-(model.config.max_len - most) :]
            for chat, most in zip(chats, room, strict=True)
        ]
        for group in group_by_length([len(ids) for ids in prompts], max(512, 16384 // beam)):
            limit = min(max(room[i] for i in group), model.config.max_len - len(prompts[group[0]]))
            config = GenerateConfig(max_new_tokens=limit, beam=beam, length_penalty=length_penalty)
            generated = generate(model, [prompts[i] for i in group], config)
            for place, tokens in zip(group, generated.tokens, strict=True):
                outputs[place] = self.tokenizer.decode(tokens).strip()
        return outputs


class SupervisedFineTuning(ChatTask):
    """The assistant's answers from what stands before them; only answers have a loss (Ouyang et al. 2022)."""

    name = "sft"
    kinds = ("chats", "pairs")
    metric_keys: ClassVar[Mapping[str, str]] = {"loss": "valid_loss", "chrf": "chrf", "exact": "exact"}
    evaluation_options = ("beam", "length_penalty")

    @cached_property
    def _encoded_rows(self) -> list[EncodedChat]:
        return self._encode(self.first(self.source.train))

    @cached_property
    def batch_plan(self) -> BatchPlan:
        lengths, most = [len(row.ids) for row in self._encoded_rows], self.config.data.max_len
        self._check_lengths(lengths)
        cut = self.config.data.too_long == "truncate"
        return self._plan_by_length(np.minimum(lengths, most) if cut else lengths, most)

    def _train_batch(self, epoch: int, index: list[int]) -> Batch:
        return self._collate([self._encoded_rows[i] for i in index])

    def valid_groups(self, examples: Sequence[Example]) -> Iterator[tuple[list[int], Batch]]:
        rows, most = self._encode(examples), self.config.data.max_len
        self.n_held_out_cut = sum(len(row.ids) > most for row in rows)
        lengths = [min(len(row.ids), most) for row in rows]
        for group in group_by_length(lengths, max(self.config.train.batch_tokens, 4096)):
            yield group, self._collate([rows[i] for i in group])

    def answers(
        self, model: Model, examples: Sequence[Example], *, beam: int = 1, length_penalty: float = 1.0
    ) -> tuple[dict[str, float | str], list[ExampleResult]]:
        if not examples:
            return {}, []
        chats = [messages_of(x) for x in examples]
        references = [chat[-1][1] for chat in chats]
        outputs = self._write_answers(model, chats, beam=beam, length_penalty=length_penalty)
        each = zip(chats, references, outputs, metrics.sentence_chrf(outputs, references), strict=True)
        rows = [ExampleResult(chat[-2][1], reference, output, chrf / 100) for chat, reference, output, chrf in each]
        exact, chrf = (x.corpus() for x in self.answer_statistics(outputs, references))
        return {"n": len(rows), "chrf": chrf, "exact": exact}, rows

    def answer_statistics(self, outputs: list[str], references: list[Any]) -> list[Statistics]:
        return [measure(outputs, references) for measure in (metrics.exact_statistics, metrics.chrf_statistics)]


def messages_of(example: Example) -> tuple[Message, ...]:
    """The messages of a chat; the source of a pair is a question, its target the answer."""
    if isinstance(example, Pair):
        return ("user", example.source), (ANSWERS, example.target)
    return cast(Chat, example).messages


def _texts(example: Example) -> list[str]:
    """What a tokenizer learns from: messages as the plain template writes them, and alone, as answers are encoded."""
    if isinstance(example, Preference):
        messages = [*example.prompt, (ANSWERS, example.chosen), (ANSWERS, example.rejected)]
    else:
        messages = [*messages_of(example)]
    return [text for role, content in messages for text in (f"{role}:\n{content}\n\n", content)]
