"""Random inputs of random shapes for whatever a model reads, the same for the same seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import ModelConfig

_MOST_ROWS = 4
_LONGEST = 24


@dataclass(frozen=True, eq=False)
class Case:
    """One batch. Rows are ragged: ``keep`` says what of the source is real, ``lengths`` how much of each output row."""

    source: Tensor  # (B, S) ids, (B, C, height, width) pixels, (B, R, d) regions
    keep: Tensor | None  # (B, S)
    target: Tensor | None  # (B, T) ids, beside an encoder
    lengths: list[int] | None  # of the rows that come out; None: one vector a row

    def real(self, out: Tensor) -> Tensor:
        """The output at real places, rows one after the other."""
        if self.lengths is None or out.dim() == 2:
            return out
        return torch.cat([row[:length] for row, length in zip(out, self.lengths, strict=True)])

    def rows(self, ids: Tensor) -> list[list[int]]:
        """Rows of what comes out, without padding."""
        assert self.lengths is not None
        return [row[:length].tolist() for row, length in zip(ids, self.lengths, strict=True)]

    def sources(self) -> list[list[int]]:
        """The sources without padding."""
        if self.keep is None:
            return self.source.tolist()
        return [row[real].tolist() for row, real in zip(self.source, self.keep, strict=True)]

    def first(self) -> list[int]:
        """The first source; of a language model, the first half of the first text, as a prompt."""
        row = self.sources()[0]
        return row if self.target is not None else row[: max(1, len(row) // 2)]

    @property
    def has_size_one(self) -> bool:
        tensors = (self.source, self.source if self.target is None else self.target)
        return any(1 in x.shape[:2] for x in tensors)

    @staticmethod
    def most(cases: list[Case]) -> dict[str, int]:
        """The largest of each size, for the document."""
        sizes = {"rows": max(len(case.source) for case in cases)}
        if cases[0].source.dim() < 4:
            sizes["source" if cases[0].target is not None else "length"] = max(case.source.shape[1] for case in cases)
        if cases[0].target is not None:
            sizes["target"] = max(case.target.shape[1] for case in cases if case.target is not None)
        return sizes


def task_of(config: ModelConfig) -> str:
    """What the model does, in a word."""
    if config.architecture == "decoder":
        return "language model"
    if config.architecture == "encoder":
        return {"classify": "classification", "masked-lm": "masked language model"}.get(config.head, "encoder")
    return "translation" if config.source == "text" else "captioning"


def make_cases(config: ModelConfig, count: int, seed: int) -> list[Case]:
    """``count`` batches of one to four ragged rows; padding of every length, rows of one token among them."""
    generator = torch.Generator().manual_seed(seed)
    return [_case(config, generator) for _ in range(count)]


def _case(config: ModelConfig, generator: torch.Generator) -> Case:
    n_rows = _between(1, _MOST_ROWS, generator)
    keep = None
    if config.source == "image":
        shape = (n_rows, config.n_channels, config.image_size, config.image_size)
        source, lengths = torch.randn(shape, generator=generator), None
    else:
        lengths = [_between(1, min(_LONGEST, config.max_len - 1), generator) for _ in range(n_rows)]
        places = torch.arange(max(lengths))
        keep = places < torch.tensor(lengths)[:, None]
        if config.source == "regions":
            source = torch.randn(n_rows, max(lengths), config.d_region + config.d_box, generator=generator)
        else:
            source = _ids(config, config.vocab_size, (n_rows, max(lengths)), generator)
            source = source.masked_fill(~keep, config.pad_id)
    if config.architecture in ("decoder", "encoder"):
        pooled = config.head == "classify"
        return Case(source, keep, None, None if pooled else lengths)
    most = min(_LONGEST, (config.max_target_len or config.max_len) - 1)
    lengths = [_between(1, most, generator) for _ in range(n_rows)]
    target = _ids(config, config.output_vocab_size, (n_rows, max(lengths)), generator)
    if config.bos_id is not None:
        target[:, 0] = config.bos_id
    return Case(source, keep, target, lengths)


def _between(least: int, most: int, generator: torch.Generator) -> int:
    return int(torch.randint(least, max(least, most) + 1, (), generator=generator))


def _ids(config: ModelConfig, n_tokens: int, shape: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Ordinary tokens: those that mark padding, beginning and end are left out where others remain."""
    special = {config.pad_id, config.bos_id, config.eos_id}
    ordinary = torch.tensor([index for index in range(n_tokens) if index not in special] or [0])
    return ordinary[torch.randint(len(ordinary), shape, generator=generator)]
