"""Image embeddings: patches (ViT) and features of detected regions."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_not_negative, check_positive
from .positions import Learned, Sinusoidal


class PatchEmbedding(nn.Module):
    """Cut the image into p × p patches and map each to a vector (Dosovitskiy et al. 2021, eq. 1).

    A convolution with kernel size and stride p and weight (M, C, p, p), computed as one matrix product: this is exact
    in fp32 on GPUs, where convolutions default to TF32. Images may differ in size from image_size.
    pixels (B, C, h·p, w·p) → (B, h·w, M), patches row by row
    """

    def __init__(
        self, image_size: int | tuple[int, int], patch: int, channels: int, d_model: int, bias: bool = True
    ) -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        check_positive(height=height, width=width, patch=patch, channels=channels, d_model=d_model)
        self.image_size, self.patch, self.channels, self.d_model = (height, width), patch, channels, d_model
        self.grid = self.grid_of(height, width)
        self.n_patches = self.grid[0] * self.grid[1]
        self.weight = nn.Parameter(torch.empty(d_model, channels, patch, patch))
        self.bias = nn.Parameter(torch.empty(d_model)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1.0 / math.sqrt(self.channels * self.patch * self.patch)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """The number of rows and columns of patches in an image."""
        for name, size in (("height", height), ("width", width)):
            if size % self.patch:
                raise ValueError(f"image {name}={size} is not divisible by patch={self.patch}")
        return height // self.patch, width // self.patch

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.ndim != 4 or pixels.shape[1] != self.channels:
            raise ValueError(f"pixels must be (B, channels={self.channels}, H, W), got shape {tuple(pixels.shape)}")
        rows, cols = self.grid_of(*pixels.shape[2:])
        p = self.patch
        patches = pixels.unflatten(3, (cols, p)).unflatten(2, (rows, p))  # (B, C, rows, p, cols, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, rows·cols, C·p·p)
        return F.linear(patches, self.weight.flatten(1), self.bias)

    def extra_repr(self) -> str:
        return f"{self.image_size}, patch={self.patch}, channels={self.channels}, d_model={self.d_model}"


class VisionEmbeddings(nn.Module):
    """dropout(norm([class tokens; patches] + position)), where every part except the patches is optional (ViT, eq. 1).

    Positions number the class tokens first, then the patches row by row. A Learned table for image_size is interpolated
    bicubically for images of another size (ViT, §3.2). Registers follow the class tokens and have no positions (Darcet
    et al. 2024). ``masked`` patches (B, patches) are replaced by the mask token.
    pixels (B, C, H, W) → (B, n_class_tokens + n_registers + patches, M)
    """

    def __init__(
        self,
        patches: PatchEmbedding,
        *,
        position: Learned | Sinusoidal | None = None,
        n_class_tokens: int = 1,
        n_registers: int = 0,
        mask_token: bool = False,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_not_negative(n_class_tokens=n_class_tokens, n_registers=n_registers)
        if position is not None and position.d_model != patches.d_model:
            raise ValueError(f"position has d_model={position.d_model}, but patches have d_model={patches.d_model}")
        n_tokens = n_class_tokens + patches.n_patches
        if isinstance(position, Learned) and position.max_len != n_tokens:
            max_len = position.max_len
            raise ValueError(f"position has max_len={max_len}, but there are {n_tokens} class tokens and patches")
        self.patches, self.position = patches, position
        self.n_class_tokens, self.n_registers = n_class_tokens, n_registers
        self.class_token = nn.Parameter(torch.empty(n_class_tokens, patches.d_model)) if n_class_tokens else None
        self.registers = nn.Parameter(torch.empty(n_registers, patches.d_model)) if n_registers else None
        self.mask_token = nn.Parameter(torch.empty(patches.d_model)) if mask_token else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for tokens in (self.class_token, self.registers, self.mask_token):
            if tokens is not None:
                nn.init.normal_(tokens, std=0.02)

    def forward(self, pixels: Tensor, masked: Tensor | None = None) -> Tensor:
        x: Tensor = self.patches(pixels)  # (B, N, M)
        if masked is not None:
            if self.mask_token is None:
                raise ValueError("masked patches need a mask token: build the model with mask_token=True")
            x = torch.where(masked[..., None], self.mask_token.to(x.dtype), x)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        if isinstance(self.position, Learned):
            table, grid = self.position.weight[self.position.offset :], self.patches.grid_of(*pixels.shape[2:])
            if grid != self.patches.grid:
                table = interpolate_positions(table, self.patches.grid, grid, self.n_class_tokens)
            x = x + table.to(x.dtype)
        elif self.position is not None:
            x = x + self.position(torch.arange(x.shape[1], device=x.device), x.dtype)
        if self.registers is not None:
            registers = self.registers.to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat((x[:, : self.n_class_tokens], registers, x[:, self.n_class_tokens :]), dim=1)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


def interpolate_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int], n_class_tokens: int = 1) -> Tensor:
    """Interpolate a learned table (n_class_tokens + old rows·cols, M) bicubically to a new grid; keep class tokens."""
    n_rows = n_class_tokens + old[0] * old[1]
    if table.shape[0] != n_rows:
        parts = f"{n_class_tokens} class tokens and a grid of {old} patches"
        raise ValueError(f"table has {table.shape[0]} rows, but {parts} need {n_rows}")
    class_tokens, image = table[:n_class_tokens], table[n_class_tokens:]
    wide = torch.promote_types(table.dtype, torch.float32)
    image = image.to(wide).unflatten(0, old).permute(2, 0, 1).unsqueeze(0)  # (1, M, rows, cols)
    image = F.interpolate(image, size=new, mode="bicubic", align_corners=False)
    return torch.cat((class_tokens, image[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)))


class RegionEmbedding(nn.Module):
    """Features of image regions, projected to the model's width (bottom-up attention, Anderson et al. 2018).

    y = dropout(norm(features W_f + boxes W_b)), with boxes of d_box = 4 or 5 numbers as in ViLBERT (``box_geometry``).
    features (B, R, d_region), boxes (B, R, d_box) → (B, R, M)
    """

    def __init__(
        self, d_region: int = 2048, *, d_model: int, d_box: int = 0, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_positive(d_region=d_region, d_model=d_model)
        if d_box not in (0, 4, 5):
            raise ValueError(f"d_box={d_box} must be 0 (no boxes), 4 (corners) or 5 (corners and area)")
        self.d_region, self.d_model, self.d_box = d_region, d_model, d_box
        self.w_feature = nn.Linear(d_region, d_model)
        self.w_box = nn.Linear(d_box, d_model) if d_box else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, boxes: Tensor | None = None) -> Tensor:
        if features.shape[-1] != self.d_region:
            raise ValueError(f"features have width {features.shape[-1]}, but d_region={self.d_region}")
        x: Tensor = self.w_feature(features)
        d_box = 0 if boxes is None else boxes.shape[-1]
        if d_box != self.d_box:
            problem = "no boxes were given" if boxes is None else f"boxes have {d_box} numbers"
            raise ValueError(f"{problem}, but d_box={self.d_box}")
        if boxes is not None and self.w_box is not None:
            x = x + self.w_box(boxes)
        if self.norm is not None:
            x = self.norm(x)
        return self.dropout(x)


def box_geometry(corners: Tensor, height: int, width: int) -> Tensor:
    """Corners (x1, y1, x2, y2) in pixels → (x1/W, y1/H, x2/W, y2/H, area/(W·H)), as in ViLBERT."""
    scaled = corners / torch.tensor([width, height, width, height], dtype=corners.dtype, device=corners.device)
    area = (scaled[..., 2] - scaled[..., 0]) * (scaled[..., 3] - scaled[..., 1])
    return torch.cat((scaled, area.unsqueeze(-1)), dim=-1)
