"""A hierarchical image encoder: stages of windowed layers, with 2 × 2 patches merged between stages (Swin)."""

from __future__ import annotations

from torch import Tensor, nn

from ..attention.masks import Mask
from ..config import ModelConfig
from . import components
from .block import Stack


def stage_configs(config: ModelConfig) -> list[ModelConfig]:
    """The config of each stage; a config without stages is the only one."""
    if config.stages is None or config.stage_heads is None:
        return [config]
    last = len(config.stages) - 1
    return [
        config.with_(
            stages=None,
            stage_heads=None,
            n_layers=n_layers,
            n_heads=n_heads,
            d_model=config.d_model // 2 ** (last - stage),
            d_ff=config.d_ff // 2 ** (last - stage),
            image_size=config.image_size // 2**stage,  # with an unchanged patch_size: half the grid
        )
        for stage, (n_layers, n_heads) in enumerate(zip(config.stages, config.stage_heads, strict=True))
    ]


class PatchMerging(nn.Module):
    """Concatenates each square of 2 × 2 patches, normalises it and maps it to twice the width (Liu et al. 2021, §3.1).

    (B, grid², M) → (B, grid²/4, 2 M)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.grid = config.image_size // config.patch_size
        self.norm = components.norm(config, 4 * config.d_model)
        self.w = nn.Linear(4 * config.d_model, 2 * config.d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        squares = x.unflatten(1, (self.grid // 2, 2, self.grid // 2, 2))  # (B, row, y, column, x, M)
        squares = squares.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)  # the four patches, column by column
        return self.w(self.norm(squares))


class HierarchicalStack(nn.Module):
    """Stages, each a stack over half the grid of the one before, and a final norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.configs = stage_configs(config)
        starts = [sum(stage.n_layers for stage in self.configs[:number]) for number in range(len(self.configs))]
        self.stages = nn.ModuleList(
            Stack(stage, causal=False, n_before=start, n_total=config.n_layers)
            for stage, start in zip(self.configs, starts, strict=True)
        )
        self.merges = nn.ModuleList(PatchMerging(stage) for stage in self.configs[:-1])
        self.norm = components.norm(config)

    @property
    def grids(self) -> list[int]:
        """Side length of each stage's grid, in patches."""
        return [stage.image_size // stage.patch_size for stage in self.configs]

    def forward(self, x: Tensor, *, mask: Mask | None = None, positions: Tensor | None = None) -> Tensor:
        """Patches of the first stage (B, grid², M₁) → patches of the last stage (B, …, M)."""
        for number, stage in enumerate(self.stages):
            x = stage(x)
            if number < len(self.merges):
                x = self.merges[number](x)
        return self.norm(x)
