"""What one forward pass of training is given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .loss import IGNORE

__all__ = ["Batch", "shifted"]


@dataclass(frozen=True, eq=False)
class Batch:
    """The model's arguments, and what it should have said: token ids (B, T), IGNORE where nothing is asked, or (B,)."""

    inputs: tuple[Tensor, ...]
    targets: Tensor
    options: dict[str, Tensor] = field(default_factory=dict)
    n_tokens: int = 0
    """Tokens or patches the model goes through, padding not counted; pairs count both sides."""
    n_counted: int | None = None
    """``n_targets``, counted before the batch went to a device that would have to be waited for."""

    @property
    def n_targets(self) -> int:
        """How many answers the loss is a sum over."""
        return int((self.targets != IGNORE).sum()) if self.n_counted is None else self.n_counted

    def to(self, device: torch.device) -> Batch:
        """On a device; from pinned memory the copy does not wait."""

        def move(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)

        return replace(
            self,
            inputs=tuple(map(move, self.inputs)),
            targets=move(self.targets),
            options={name: move(x) for name, x in self.options.items()},
            n_counted=self.n_targets,
        )

    def pinned(self) -> Batch:
        """In memory the GPU can copy from by itself."""
        options = {name: x.pin_memory() for name, x in self.options.items()}
        inputs = tuple(x.pin_memory() for x in self.inputs)
        return replace(self, inputs=inputs, targets=self.targets.pin_memory(), options=options)


def shifted(target: Tensor, pad_id: int) -> tuple[Tensor, Tensor]:
    """<bos> a b <eos> as what the decoder reads, <bos> a b, and what it must say, a b <eos>. (B, T + 1) → two (B, T)"""
    wanted = target[:, 1:]
    return target[:, :-1].contiguous(), torch.where(wanted == pad_id, IGNORE, wanted)
