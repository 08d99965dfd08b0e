"""Back-translation (Sennrich et al. 2016): training pairs for a translator from texts in its target language alone.

A translator of the opposite direction writes a source for every text. Beam search gives the most likely source;
sampling gives more varied ones, which help more when there are many texts (Edunov et al. 2018). A tag before each
generated source distinguishes it from real ones (Caswell et al. 2019).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..data.record_files import Record, open_records
from ..errors import BadData
from ..foundation.device import resolve_device
from ..generation import GenerateConfig, translate
from ..generation.bulk_prediction import Answer, Answerer, check_records, newest_weights, predict_to_file
from ..generation.prompts import max_text_length
from ..generation.text_generation import check_can_translate, default_beam, text_tokenizers
from ..models import Model
from .distillation import check_not_read, pair_file, pair_line

_TEXTS_AT_ONCE = 512


@dataclass(frozen=True)
class BackTranslation:
    """The file of pairs, and how many lines were left out."""

    path: Path
    pairs: int
    left_out: dict[str, int]  # number of lines by reason
    resumed: int  # lines translated by an earlier call that was stopped
    decoding: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        counts = {"pairs": self.pairs, "left_out": self.left_out, "resumed": self.resumed}
        return {"path": str(self.path), **counts, "decoding": self.decoding}

    def to_text(self) -> str:
        left_out = _list_counts(self.left_out)
        sampling = {name: value for name, value in self.decoding.items() if name not in ("beam", "sample")}
        how = "sampled" if GenerateConfig(**self.decoding).samples else f"beam {self.decoding['beam']}"
        how += "".join(f", {name} {value}" for name, value in sampling.items())
        lines = [f"{self.path}: {self.pairs:,} pairs ({how}){f'; left out: {left_out}' if left_out else ''}"]
        return "\n".join([*lines, f"next: regard train translate data.source=pairs.tsv,{self.path}"])


def back_translate(
    path: str | Path,
    texts: str | Path,
    out: str | Path,
    *,
    column: str | None = None,
    encoding: str = "auto",
    tag: str | None = None,
    seed: int = 0,
    device: str = "auto",
    progress: Callable[[str], None] = lambda _: None,
    **decoding: Any,
) -> BackTranslation:
    """Translate a file of target-language texts and write pairs for a new translator to ``out`` (.tsv or .jsonl).

    path      a translator of the opposite direction, which reads the language of the texts
    texts     a file with one text per line, or a table of which ``column`` is read
    tag       prefix of every generated source, such as <BT>
    seed      seed for sampling
    decoding  fields of GenerateConfig: beam=5, or sample=True, temperature, top_k, top_p
    Lines that are blank, too long for the translator, or without a finished translation are left out and counted. A
    call that was stopped continues where it was.
    """
    from ..io import load

    target = pair_file(out)
    check_not_read(target, [texts])
    decoding = {"beam": default_beam(decoding), **decoding}
    records = open_records(Path(texts), column, encoding=encoding)
    model = load(path, device=str(resolve_device(device)))
    check_can_translate(model)
    counts = Counter[str]()

    def lines(record: Record, answer: Answer) -> str:
        counts[answer["why"]] += 1
        source = f"{tag} {answer['text']}" if tag else answer["text"]
        return "" if answer["why"] else pair_line(source, " ".join(record.text.split()), target.suffix)

    answer = partial(_answer, model, seed, decoding)
    answerer = Answerer(answer, {"text": "", "why": "blank"}, {}, lambda _: {}, lambda _: "", lambda _: False)
    summary = check_records(records, answerer.check)
    settings = {"model": str(path), "weights": newest_weights(str(path)), "seed": seed, **decoding}
    options: dict[str, Any] = {"settings": settings, "batch_size": _TEXTS_AT_ONCE, "progress": progress}
    predict_to_file(records, answerer, summary, target, lines=lines, **options)
    n_pairs = counts.pop("", 0)
    if not n_pairs:
        target.unlink()
        raise BadData(f"no line of {texts} gave a pair: {_list_counts(counts)}; the translator may need more training")
    return BackTranslation(target, n_pairs, dict(counts), summary.n_resumed, decoding)


def _list_counts(left_out: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {why}" for why, n in left_out.items())


def _answer(model: Model, seed: int, decoding: dict[str, Any], batch: list[str]) -> list[Answer]:
    """The source of each text, or why it has none."""
    max_len = max_text_length(model.config)
    answers: list[Answer] = [{"text": "", "why": "too long"} for _ in batch]
    short = [index for index, row in enumerate(text_tokenizers(model).encode_inputs(batch)) if len(row) <= max_len]
    with torch.random.fork_rng(devices=[]):  # seeded by the texts, so that a resumed call samples the same
        torch.manual_seed(zlib.crc32("\n".join(batch).encode("utf-8", "surrogatepass"), seed % 2**32))
        best = translate(model, [batch[index] for index in short], **decoding).best if short else []
    for index, hypothesis in zip(short, best, strict=True):
        source = " ".join(hypothesis.text.split())
        why = "without an end" if hypothesis.finish == "length" else "" if source else "empty"
        answers[index] = {"text": source, "why": why}
    return answers
