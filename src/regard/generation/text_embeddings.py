"""``embed``: texts as vectors that are close if the texts are similar in meaning."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..data.record_files import Records
from ..errors import BadData, UsageError
from ..foundation.files import atomic_file
from ..models import Model, ModelOrPath, open_model
from .cached_engine import check_logits
from .generate import inference
from .generation_config import GenerateConfig
from .prompts import length_batches, max_text_length, pad_sources, source_tensors
from .text_codec import ModelTokenizers, split_special_tokens

_FILE_BATCH = 4096  # texts embedded at a time while a file is written


def embed(model: ModelOrPath, texts: str | Sequence[str], *, prompt: str | None = None) -> NDArray[np.float32]:
    """One vector per text (n, d_model), in the order of the texts; dot products are cosines if they are normalised.

    A sentence-transformers directory determines pooling, normalisation and maximum length; any other model uses the
    mean of its states. ``prompt`` names one of the model's prompts, which is put before each text.
    """
    model = open_model(model)
    check_can_embed(model)
    texts = [texts] if isinstance(texts, str) else list(texts)
    vectors = np.zeros((len(texts), model.config.d_model), np.float32)
    rows = encode_to_embed(model, texts, prompt)[0]
    with inference(model):
        sources = source_tensors(rows, None, model.config, truncate=True) if rows else []
        lengths = [len(source) for source in sources]
        for batch in length_batches(model, GenerateConfig(), lengths, [0] * len(sources)):
            padded = pad_sources([sources[index] for index in batch], model)
            embedded = check_logits(model.embed(padded.values, padding_mask=padded.padding_mask), "vectors")
            vectors[batch] = embedded.cpu().numpy()
    return vectors


def check_can_embed(model: Model) -> None:
    """Raise unless the model reads texts with attention or a state-space model."""
    if model.config.source != "text" or model.is_recurrent:
        kind = f"architecture={model.config.architecture!r} and source={model.config.source!r}"
        raise ValueError(f"this model has {kind}: it does not embed texts")


def encode_to_embed(model: Model, texts: Sequence[str], prompt: str | None = None) -> tuple[list[list[int]], int]:
    """Token ids of texts, each at most ``embed_len`` long with its special tokens, and how many were cut."""
    tokenizer, config = ModelTokenizers(model).source, model.config
    max_len = min(config.embed_len or max_text_length(config), max_text_length(config))
    prefix = model.processor.prompt(prompt)
    rows: list[list[int]] = []
    n_cut = 0
    for text, row in zip(texts, tokenizer.encode_stream(prefix + text for text in texts), strict=True):
        if len(row) > max_len:
            first, ids, last = split_special_tokens(tokenizer, prefix + text)
            row = [*first, *ids[: max_len - len(first) - len(last)], *last]
            n_cut += 1
        if not row:
            raise ValueError(f"text {len(rows)} is empty: there is nothing to embed")
        rows.append(row)
    return rows, n_cut


@dataclass
class EmbeddedFile:
    """What ``embed_file`` reports."""

    out: str
    texts: int
    width: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        return f"{self.out}: {self.texts:,} vectors, {self.width} wide"


def embed_file(
    model: Model,
    records: Records,
    out: Path,
    *,
    prompt: str | None = None,
    progress: Callable[[str], None] = lambda line: None,
) -> EmbeddedFile:
    """Write the vector of every record: a .npy file is one array (n, d_model) of float32, a .jsonl file has one line
    per record.

    A blank text is an error, because row i of the array is record i.
    """
    write = {".npy": _write_npy, ".jsonl": _write_jsonl}.get(out.suffix)
    if write is None:
        raise UsageError(f"--out {out} is neither .npy nor .jsonl")
    n = 0
    for record in records.read():
        n += 1
        if not record.text.strip():
            raise BadData(f"{records.place(record.line)}: there is no text to embed")

    def parts() -> Iterator[tuple[list[str], NDArray[np.float32]]]:
        done, rows = 0, records.read()
        while texts := [record.text for record in islice(rows, _FILE_BATCH)]:
            yield texts, embed(model, texts, prompt=prompt)
            done += len(texts)
            progress(f"{done:,} of {n:,} texts")

    width = model.config.d_model
    with atomic_file(out) as file:
        write(file, (n, width), parts())
    return EmbeddedFile(str(out), n, width)


def _write_npy(file: Any, shape: tuple[int, int], parts: Iterable[tuple[list[str], NDArray[np.float32]]]) -> None:
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    for _, vectors in parts:
        file.write(np.ascontiguousarray(vectors, "<f4").tobytes())


def _write_jsonl(file: Any, shape: tuple[int, int], parts: Iterable[tuple[list[str], NDArray[np.float32]]]) -> None:
    for texts, vectors in parts:
        for text, vector in zip(texts, vectors.tolist(), strict=True):
            file.write(embedding_line(text, vector).encode("utf-8", "backslashreplace") + b"\n")


def embedding_line(text: str, vector: list[float]) -> str:
    """A text and its vector as one line of JSON."""
    return json.dumps({"text": text, "embedding": vector}, ensure_ascii=False)
