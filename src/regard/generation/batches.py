"""Many texts in batches of similar length, each small enough for the memory its cache takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..models import Model
from .config import GenerateConfig

_MOST_BYTES = {"cpu": 1 << 30}
_MOST_BYTES_ELSEWHERE = 4 << 30
_SCORES = 16  # bytes that a step holds for each token of the vocabulary: logits, scores, and what is sorted of them


def at_once(model: Model, config: GenerateConfig, lengths: Sequence[int], limits: Sequence[int]) -> Iterator[list[int]]:
    """Indices in groups of one limit of new tokens and similar lengths, longest first.

    ``lengths`` are tokens read, ``limits`` tokens written; what a group may hold is decided by the longest of it.
    """
    copies = max(config.beam, config.n_best)
    place, scores = _bytes_of_a_place(model), _SCORES * model.config.output_vocab_size
    most = _MOST_BYTES.get(model.device.type, _MOST_BYTES_ELSEWHERE)
    order = sorted(range(len(lengths)), key=lambda index: (limits[index], lengths[index]), reverse=True)
    group: list[int] = []
    for index in order:
        if group:
            first = group[0]
            each = copies * ((lengths[first] + limits[first]) * place + scores)
            if limits[index] != limits[first] or (len(group) + 1) * each > most:
                yield group
                group = []
        group.append(index)
    if group:
        yield group


def _bytes_of_a_place(model: Model) -> int:
    """Keys and values of one token in all layers."""
    config = model.config
    n_heads = config.n_kv_heads or config.n_heads
    d_head = config.d_head or config.d_model // config.n_heads
    n_layers = max(config.n_layers, config.n_decoder_layers or 0)
    return 2 * n_layers * n_heads * d_head * next(model.parameters()).element_size()
