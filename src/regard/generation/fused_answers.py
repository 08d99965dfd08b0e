"""``answer``: answer a question from passages, and trace each word to the passage it came from.

Each passage is encoded independently, together with the question; the decoder attends to the states of all passages
(Fusion-in-Decoder, Izacard & Grave 2021). The source of a word is the passage that received the most cross-attention,
averaged over layers and heads, while the word was generated.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..attention import record
from ..data.batching import cut_pair, pair_segments, truncate
from ..models import Model, ModelOrPath, open_model
from .cached_engine import check_logits
from .generate import generate, inference
from .passage_index import Passage, PassageIndex, open_index
from .prompts import max_text_length, pad_sources, source_tensors
from .text_codec import ModelTokenizers, resolve_config
from .text_generation import check_can_translate, decode_texts

_LONGEST_SPAN = 30  # tokens of an extracted answer, as in BERT's evaluation on SQuAD


def question_with_passage(question: str, passage: str) -> str:
    """The encoder's input for one passage."""
    return f"question: {question} context: {passage}"


@dataclass(frozen=True)
class AnswerWord:
    """A word of an answer, the passage it came from, and that passage's share of the attention."""

    text: str
    passage: int  # counted from 0
    share: float


@dataclass(frozen=True)
class Answered:
    """The answer to a question, its words with their sources, and the passages that were read."""

    question: str
    text: str
    score: float
    words: list[AnswerWord]
    passages: list[Passage]
    shares: list[float]  # share of the attention to each passage, over the whole answer

    @property
    def source(self) -> int:
        """The passage with the largest share."""
        return max(range(len(self.shares)), key=self.shares.__getitem__)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """The answer, then each word with the number of its passage, then the passages with the largest shares."""
        words = [f"{word.text} [{word.passage + 1}]" for word in self.words]
        rows = zip(self.shares, self.passages, range(1, len(self.shares) + 1), strict=True)
        ranked = sorted(rows, key=lambda row: -row[0])
        passages = [f"  [{n}] {share:.0%} {x.place} {x.text}".rstrip() for share, x, n in ranked[:3]]
        return "\n".join([self.text, " ".join(words), *passages])


def answer(
    model: ModelOrPath,
    questions: str | Sequence[str],
    passages: Sequence[Sequence[str]] | None = None,
    *,
    index: PassageIndex | str | Path | None = None,
    n_passages: int = 5,
    prompt: str | None = None,
    **fields: Any,
) -> list[Answered]:
    """Answer one or several questions from ``passages``, a list per question, or from the nearest ones of an ``index``.

    model   an encoder-decoder, such as one trained by `regard train answer`, or an encoder with head='span' (a BERT
            for question answering), which extracts the answer from one of the passages
    prompt  name of the prompt that the index's model puts before a question
    fields  fields of GenerateConfig: beam, max_new_tokens …
    """
    model = open_model(model)
    if model.config.head != "span":
        check_can_translate(model)
    questions = [questions] if isinstance(questions, str) else list(questions)
    if (passages is None) == (index is None):
        raise ValueError("give either passages, a list per question, or an index to search")
    if index is not None:
        retrieved = open_index(index).search(questions, n_passages, prompt=prompt)
    else:
        if any(isinstance(texts, str) for texts in passages or ()):
            raise ValueError("passages is a list of texts; give a list of texts for each question")
        retrieved = [[Passage(text) for text in texts] for texts in passages or ()]
    if len(retrieved) != len(questions) or not all(retrieved):
        n_lists, n_questions = len(retrieved), len(questions)
        raise ValueError(f"there are {n_lists} lists of passages for {n_questions} questions, and none may be empty")
    pairs = zip(questions, retrieved, strict=True)
    if model.config.head == "span":
        if fields:
            raise ValueError(f"{', '.join(fields)}: only for models that generate; this one extracts its answers")
        return [_extract_answer(model, question, texts) for question, texts in pairs]
    return [_generate_answer(model, question, texts, fields) for question, texts in pairs]


def _generate_answer(model: Model, question: str, passages: list[Passage], fields: dict[str, Any]) -> Answered:
    tokenizers = ModelTokenizers(model)
    config, strings = resolve_config(model, None, {"max_new_tokens": 64, **fields}, tokenizers)
    max_new_tokens = max_text_length(model.config, target=True) - 1
    config = config.with_(max_new_tokens=max(1, min(config.max_new_tokens, max_new_tokens)))
    rows = tokenizers.encode_inputs([question_with_passage(question, x.text) for x in passages], "passage")
    rows, _ = truncate(rows, model.config.max_len)
    best = decode_texts(generate(model, [rows], config, strings=strings), tokenizers, strings)[0][0]
    ids = best.tokens
    if strings is not None:  # without the tokens of a stop string
        ids = ids[: bisect_left(range(len(ids)), len(best.text), key=lambda n: len(tokenizers.decode(ids[:n])))]
    by_token = _passage_shares(model, rows, ids)  # (T, P)
    words = []
    for text, tokens in _words(tokenizers, ids):
        shares = by_token[tokens].mean(0)
        words.append(AnswerWord(text, int(shares.argmax()), float(shares.max())))
    overall = by_token.mean(0) if len(by_token) else torch.full((len(rows),), 1 / len(rows))
    return Answered(question, best.text, best.score, words, passages, overall.tolist())


def _extract_answer(model: Model, question: str, passages: list[Passage]) -> Answered:
    """The best span of any passage: max over i ≤ j of start_i + end_j (Devlin et al. 2019, §4.2).

    Shares are the softmax over the scores of the passages' best spans; a passage without tokens has share 0.
    """
    tokenizer = ModelTokenizers(model).source
    separator, max_len = tokenizer.separator_id, max_text_length(model.config)
    if separator is None:
        raise ValueError("the tokenizer has no separator token, so the model cannot read a question with a passage")
    rows = list(tokenizer.encode_pairs((question, x.text) for x in passages))
    rows = [cut_pair(row, separator, max_len) for row in rows]
    with inference(model):
        padded = pad_sources(source_tensors(rows, None, model.config, truncate=False), model)
        segments = {"segments": pair_segments(padded.values, separator)} if model.config.n_segments > 1 else {}
        logits = model(padded.values, padding_mask=padded.padding_mask, **segments).float().cpu()
    scores, spans = [], []
    for row, (starts, ends) in zip(rows, (x.unbind(-1) for x in logits), strict=True):
        first = max(n for n, token in enumerate(row[:-1]) if token == separator) + 1
        score, start, end = _best_span(starts[first : len(row) - 1], ends[first : len(row) - 1])
        scores.append(score)
        spans.append(row[first + start : first + end])
    if max(scores) == -torch.inf:
        raise ValueError(f"no passage for {question!r} has a token left next to the question")
    shares = check_logits(torch.tensor(scores)).softmax(0)
    best = int(shares.argmax())
    text = tokenizer.decode(spans[best])
    words = [AnswerWord(word, best, float(shares[best])) for word in text.split()]
    return Answered(question, text, scores[best], words, passages, shares.tolist())


def _best_span(starts: Tensor, ends: Tensor) -> tuple[float, int, int]:
    """Score, start and end (exclusive) of the best span, from start and end logits (T,); (-inf, 0, 0) if T is 0."""
    if not len(starts):
        return -torch.inf, 0, 0
    sums = starts[:, None] + ends[None]
    allowed = torch.ones_like(sums, dtype=torch.bool).triu().tril(_LONGEST_SPAN - 1)
    best = int(sums.masked_fill(~allowed, -torch.inf).argmax())
    start, end = divmod(best, len(starts))
    return float(sums[start, end]), start, end + 1


def _passage_shares(model: Model, rows: list[list[int]], tokens: list[int]) -> Tensor:
    """(T, P): for each generated token, the share of the cross-attention that went to each passage."""
    sources = pad_sources(source_tensors([rows], None, model.config, truncate=False), model)
    begin = [] if model.config.bos_id is None else [model.config.bos_id]
    target = torch.tensor([[*begin, *tokens]], device=model.device)[:, : len(tokens)]  # the last token is not an input
    if not tokens:
        return torch.zeros(0, len(rows))
    with inference(model), record(model, values=False) as recorder:
        model.hidden(sources.values, target, source_padding_mask=sources.padding_mask)
    names = dict.fromkeys(site.name for site in model.attention_sites() if site.kind == "cross")
    weights = torch.stack([recorder.map(name).dense()[0].mean(0).cpu() for name in names]).mean(0)
    lengths = [len(row) for row in rows]  # the states of the passages are concatenated, and padded at the end
    return torch.stack([part.sum(-1) for part in weights[:, : sum(lengths)].split(lengths, dim=-1)], dim=-1)


def _words(tokenizers: ModelTokenizers, ids: list[int]) -> list[tuple[str, list[int]]]:
    """The words of an answer, each with the indices of its tokens; special tokens are not part of its text."""
    words: list[tuple[str, list[int]]] = []
    for span in (span for span in tokenizers.target.token_spans(ids) if span.start < span.end):
        text, tokens = span.text, list(range(span.first, span.last))
        if words and not text[:1].isspace() and not words[-1][0][-1:].isspace():
            words[-1] = words[-1][0] + text, [*words[-1][1], *tokens]
        else:
            words.append((text, tokens))
    return [(text.strip(), tokens) for text, tokens in words if text.strip()]
