"""The inputs on which an exported model is compared: random batches of random shapes, and a file of the user.

contents of the file   metric                                                   task
pairs                  BLEU, and the share of identical translations            translation
lines of text          the share of identical translations; perplexity          translation; language models
labelled texts         accuracy                                                 classification
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ..config import DataConfig, ModelConfig
from ..data.examples import Labelled, Pair, ReadReport
from ..data.sources import open_source
from ..data.table_files import read_lines
from ..errors import BadData
from ..generation.text_generation import class_names, classify
from ..training.metrics.translation_metrics import bleu_tokenizer, translation
from .engines import Ct2Engine, Engine, TorchEngine

_MAX_ROWS = 4
_MAX_LENGTH = 24
BATCH = 32  # rows per forward pass


@dataclass(frozen=True, eq=False)
class ParityCase:
    """One ragged batch."""

    source: Tensor  # (B, S) ids, (B, C, height, width) pixels, (B, R, d) regions
    padding_mask: Tensor | None  # of the source, (B, S)
    target: Tensor | None  # (B, T) ids, for a model with an encoder and a decoder
    lengths: list[int] | None  # of the output rows; None: the output is one vector per row

    def drop_padding(self, out: Tensor) -> Tensor:
        """The output at real tokens, rows concatenated."""
        if self.lengths is None or out.dim() == 2:
            return out
        return torch.cat([row[:length] for row, length in zip(out, self.lengths, strict=True)])

    def rows(self, ids: Tensor) -> list[list[int]]:
        """The rows of ids (B, T) without padding."""
        assert self.lengths is not None
        return [row[:length].tolist() for row, length in zip(ids, self.lengths, strict=True)]

    def sources(self) -> list[list[int]]:
        """The sources without padding."""
        if self.padding_mask is None:
            return self.source.tolist()
        return [row[real].tolist() for row, real in zip(self.source, self.padding_mask, strict=True)]

    def first_prompt(self) -> list[int]:
        """The first source; for a language model, the first half of the first text as a prompt."""
        row = self.sources()[0]
        return row if self.target is not None else row[: max(1, len(row) // 2)]

    @property
    def has_size_one(self) -> bool:
        tensors = (self.source, self.source if self.target is None else self.target)
        return any(1 in x.shape[:2] for x in tensors)


def largest_sizes(cases: list[ParityCase]) -> dict[str, int]:
    """The largest batch, source and target size, for the certificate."""
    sizes = {"rows": max(len(case.source) for case in cases)}
    targets = [case.target.shape[1] for case in cases if case.target is not None]
    if cases[0].source.dim() < 4:
        sizes["source" if targets else "length"] = max(case.source.shape[1] for case in cases)
    return sizes | ({"target": max(targets)} if targets else {})


def task_name(config: ModelConfig) -> str:
    if config.architecture == "decoder":
        return "language model"
    if config.architecture == "encoder":
        return {"classify": "classification", "masked-lm": "masked language model"}.get(config.head, "encoder")
    if config.architecture == "two-tower":
        return "images and texts"
    return "translation" if config.source == "text" else "captioning"


def make_cases(config: ModelConfig, count: int, seed: int) -> list[ParityCase]:
    """``count`` batches of one to four ragged rows, whose lengths start at one token."""
    generator = torch.Generator().manual_seed(seed)
    return [_case(config, generator) for _ in range(count)]


def _case(config: ModelConfig, generator: torch.Generator) -> ParityCase:
    n_rows = _random_size(_MAX_ROWS, generator)
    padding_mask = None
    if config.source == "image":
        shape = (n_rows, config.n_channels, config.image_size, config.image_size)
        source, lengths = torch.randn(shape, generator=generator), None
    else:
        lengths = [_random_size(min(_MAX_LENGTH, config.max_len - 1), generator) for _ in range(n_rows)]
        padding_mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        if config.source == "regions":
            source = torch.randn(n_rows, max(lengths), config.d_region + config.d_box, generator=generator)
        else:
            source = _ids(config, config.vocab_size, (n_rows, max(lengths)), generator)
            source = source.masked_fill(~padding_mask, config.pad_id)
    if config.architecture in ("decoder", "encoder"):
        pooled = config.head == "classify"
        return ParityCase(source, padding_mask, None, None if pooled else lengths)
    max_length = min(_MAX_LENGTH, (config.max_target_len or config.max_len) - 1)
    lengths = [_random_size(max_length, generator) for _ in range(n_rows)]
    target = _ids(config, config.output_vocab_size, (n_rows, max(lengths)), generator)
    if config.bos_id is not None:
        target[:, 0] = config.bos_id
    if config.architecture == "two-tower":  # logits by image and text; a text may be pooled at its end token
        target[:, -1] = target[:, -1] if config.eos_id is None else config.eos_id
        return ParityCase(source, None, target, None)
    return ParityCase(source, padding_mask, target, lengths)


def _random_size(most: int, generator: torch.Generator) -> int:
    return int(torch.randint(1, max(1, most) + 1, (), generator=generator))


def _ids(config: ModelConfig, n_tokens: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Random tokens other than padding, beginning and end, if the vocabulary has others."""
    special = {config.pad_id, config.bos_id, config.eos_id}
    ordinary = torch.tensor([index for index in range(n_tokens) if index not in special] or [0])
    return ordinary[torch.randint(len(ordinary), shape, generator=generator)]


Score = tuple[float, list[str] | None]  # an engine's metric on the file, and its texts if it generates any


class FileCheck(NamedTuple):
    """A metric on a file. ``sign`` is 1 if more is better; ``score`` raises TypeError if it needs logits and the engine
    returns none."""

    metric: str
    sign: int
    n: int
    score: Callable[[Engine], Score]


def check_file(
    model: TorchEngine, engines: Sequence[tuple[str, Engine, float | None]], path: Path, beam: int
) -> dict[str, Any]:
    """The task's metric on a file, for the model and for each engine (name, engine, bound)."""
    check = _file_check(model, path, beam)
    own_value, own_texts = check.score(model)
    rows: list[dict[str, Any]] = []
    for name, engine, bound in engines:
        try:
            value, texts = check.score(engine)
        except TypeError as error:
            rows.append({"name": name, "skipped": str(error)})
            continue
        same = None
        if own_texts is not None and texts is not None:
            same = sum(a == b for a, b in zip(own_texts, texts, strict=True)) / check.n
        row = {"name": name, "value": round(value, 4), "worse_by": round(check.sign * (own_value - value), 4)}
        rows.append({**row, "same_text": same, "bound": bound})
    return {
        "file": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "n": check.n,
        "metric": check.metric,
        "value": round(own_value, 4),
        "engines": rows,
    }


def _file_check(model: TorchEngine, path: Path, beam: int) -> FileCheck:
    config = model.config
    if config.architecture == "decoder":
        lines = _lines(path)
        return FileCheck("perplexity", -1, len(lines), lambda engine: _perplexity(engine, lines))
    if config.architecture == "encoder" and config.head == "classify" and config.source == "text":
        return _accuracy_check(model, path)
    if config.source != "text" or config.architecture == "encoder":
        raise ValueError(f"architecture={config.architecture!r}, source={config.source!r}: a file cannot be checked")
    opened = open_source(path, valid_fraction=0.0)
    if opened.kind != "pairs":
        return _same_translations_check(model, _lines(path), beam)
    pairs = [example for example in opened.train if isinstance(example, Pair)]
    references = [pair.target for pair in pairs]
    tokenize = bleu_tokenizer(references)

    def score(engine: Engine) -> Score:
        texts = engine.translate([pair.source for pair in pairs], beam=beam, truncate=True, early_stopping=True)
        return float(translation(texts, references, tokenize)["bleu"]), texts

    return FileCheck(f"BLEU ({tokenize})", 1, len(pairs), score)


def _lines(path: Path) -> list[str]:
    report = ReadReport()
    lines = [line for _, line in read_lines(path, report, DataConfig(normalise="none")) if line and line.strip()]
    if report.n_bad:
        raise BadData(str(report.first[0]))
    if not lines:
        raise BadData(f"{path} has no lines of text to check")
    return lines


def _same_translations_check(model: TorchEngine, lines: list[str], beam: int) -> FileCheck:
    """Without references, translations are compared with the model's own."""
    wanted = model.translate(lines, beam=beam, truncate=True, early_stopping=True)

    def score(engine: Engine) -> Score:
        texts = wanted if engine is model else engine.translate(lines, beam=beam, truncate=True, early_stopping=True)
        return 100 * sum(a == b for a, b in zip(texts, wanted, strict=True)) / len(lines), texts

    return FileCheck("same translations in percent", 1, len(lines), score)


def _accuracy_check(model: TorchEngine, path: Path) -> FileCheck:
    labels = None if model.processor is None else model.processor.labels
    options: dict[str, Any] = {} if labels is None else {"labels": labels}
    if model.config.problem_type != "single_label":
        raise BadData(f"{path}: a file can be checked only with a classifier of one class per text")
    opened = open_source(path, valid_fraction=0.0, **options)
    examples = [example for example in opened.train if isinstance(example, Labelled)]
    if opened.kind != "labelled":
        raise BadData(f"{path} holds {opened.kind}; a classifier is checked with texts and their labels")

    texts = [x.text if x.second is None else (x.text, x.second) for x in examples]
    numbers = {name: number for number, name in enumerate(class_names(model.model))}

    def score(engine: Engine) -> Score:
        guesses = classify(cast(TorchEngine, engine).model, texts, truncate=True)  # no other engine runs a classifier
        hits = sum(numbers[guess.label] == example.label for guess, example in zip(guesses, examples, strict=True))
        return 100 * hits / len(examples), None

    return FileCheck("accuracy in percent", 1, len(examples), score)


@torch.no_grad()
def _perplexity(engine: Engine, lines: list[str]) -> Score:
    """exp of the mean negative log-likelihood of each token given the preceding tokens of its line."""
    tokenizer, max_len = engine.tokenizer("target"), engine.config.max_len
    rows = [row[:max_len] for row in map(tokenizer.encode, lines)]
    rows = [row for row in rows if len(row) > 1]
    if not rows:
        raise BadData("no line is longer than one token, so there is nothing to predict")
    log_probs: list[float] = []
    for row in rows:
        if isinstance(engine, Ct2Engine):
            log_probs += engine.log_probs([], [row])[0][: len(row) - 1]
        else:
            logits = engine.token_logits(torch.tensor([row]))[0, :-1]
            log_probs += logits.log_softmax(-1).gather(1, torch.tensor(row[1:])[:, None])[:, 0].tolist()
    return math.exp(-math.fsum(log_probs) / len(log_probs)), None
