"""How much one request may ask for, how much all looks together may keep, and the sentence where it is more."""

from __future__ import annotations

from dataclasses import dataclass

MEGABYTE = 1_000_000


@dataclass(frozen=True)
class Limits:
    """How much one request may ask for, and how much all looks together may keep."""

    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 20.0
    """A body that trickles in for longer than this is given up."""
    characters: int = 200_000
    """Of a text, before it is tokenised."""
    characters_per_token: int = 64
    """A text is refused unread when even tokens as long as this would not fit into the model's max_len."""
    tokens: int = 16_384
    """Of one look, also where the model could read more."""
    new_tokens: int = 1024
    pixels: int = 16_000_000
    tile: int = 256
    """Rows, and columns, of one answer with exact weights."""
    labels: int = 2048
    response_bytes: int = MEGABYTE
    """Of one answer, whatever it is: 250,000 weights of 4 bytes."""
    beam_nodes: int = 6000
    """Of a beam search's tree; of a larger one what was given up is left out."""
    kept_bytes: int = 2000 * MEGABYTE
    """q and k of all looks together; the one not asked for the longest goes first."""
    kept_looks: int = 64
    model_seconds: float = 300.0
    """For a question that runs a model, waiting for others included."""
    request_seconds: float = 60.0
    """For any other."""
    stream_seconds: float = 600.0
    waiting: int = 64
    """Requests that may wait for the processor."""
    walk_tokens: int = 512
    """Up to this length the model is run again to know the values v of a layer."""


class Refused(Exception):
    """A request that gets a sentence instead of an answer."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
