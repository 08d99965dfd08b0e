"""What the layers refuse, said in one sentence each."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..foundation.checks import check_positive
from ..foundation.suggestions import unknown_name


def check_ids(name: str, ids: Tensor, low: int, limit: int, limit_name: str) -> None:
    """Refuse ids that are no integers or lie outside low … limit − 1.

    The values are looked at only where that is possible: not while tracing, capturing or on meta. On a GPU the look
    waits for the device, which is cheap beside the device-side assertion it saves: that one ends the process's CUDA.
    """
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name} must be int64 or int32, not {ids.dtype}")
    if not _has_values(ids) or ids.numel() == 0:
        return
    smallest, largest = (int(value) for value in ids.aminmax())
    if largest >= limit:
        raise ValueError(f"{name} goes up to {largest}, but {limit_name}={limit} allows at most {limit - 1}")
    if smallest < low:
        raise ValueError(f"{name} goes down to {smallest}, but the smallest allowed is {low}")


def _has_values(ids: Tensor) -> bool:
    if torch.compiler.is_compiling():
        return False
    if type(ids) is not Tensor or ids.is_meta:  # a fake tensor or another subclass has no values to read
        return False
    if torch._C._functorch.is_functorch_wrapped_tensor(ids):  # inside vmap a value belongs to no single example
        return False
    return not (ids.is_cuda and torch.cuda.is_current_stream_capturing())


LAYOUTS = ("interleaved", "halves")


class Sinusoidal(nn.Module):
    """Fixed sines and cosines (Vaswani et al. 2017, §3.5); computed for the positions asked for, of any size.

    PE(pos, 2i) = sin(pos / 10000^(2i / d_model)),   PE(pos, 2i+1) = cos(pos / 10000^(2i / d_model))

    layout "interleaved" is the paper's order; "halves" has all sines first, then all cosines (Marian, tensor2tensor).
    max_len, when given, only refuses positions beyond it: nothing is stored.
    positions (T,) or (B, T) → (T, M) or (B, T, M)
    """

    def __init__(self, d_model: int, max_len: int | None = None, layout: str = "interleaved") -> None:
        super().__init__()
        check_positive(d_model=d_model, max_len=1 if max_len is None else max_len)
        if layout not in LAYOUTS:
            raise unknown_name("layout", layout, LAYOUTS)
        self.d_model = d_model
        self.max_len = max_len
        self.layout = layout

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if self.max_len is not None:
            check_ids("positions", positions, -1, self.max_len, "max_len")
        # float64 keeps the phase right to the last fp32 digit at any position; Apple's GPUs have none.
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        pair = torch.arange((self.d_model + 1) // 2, dtype=exact, device=positions.device)
        theta = positions.to(exact).unsqueeze(-1) * 10000.0 ** (-2.0 * pair / self.d_model)  # (…, T, M/2)
        if self.layout == "interleaved":
            table = torch.stack((theta.sin(), theta.cos()), dim=-1).flatten(-2)[..., : self.d_model]
        else:
            table = torch.cat((theta.sin(), theta.cos()[..., : self.d_model // 2]), dim=-1)
        table = table.masked_fill(positions.unsqueeze(-1) < 0, 0.0)
        return table.to(dtype or torch.get_default_dtype())

    def extra_repr(self) -> str:
        return f"{self.d_model}, max_len={self.max_len}, layout={self.layout!r}"


class Learned(nn.Embedding):
    """One trained vector per position (Gehring et al. 2017): PE(pos) = weight[pos + offset].

    The first `offset` rows belong to no position (BART and OPT keep 2 such rows); weight is (max_len + offset, M).
    positions (T,) or (B, T), −1 ≤ position < max_len → (T, M) or (B, T, M)
    """

    def __init__(self, max_len: int, d_model: int, offset: int = 0) -> None:
        check_positive(max_len=max_len, d_model=d_model)
        if offset < 0:
            raise ValueError(f"offset={offset} must not be negative")
        super().__init__(max_len + offset, d_model)
        self.max_len = max_len
        self.d_model = d_model
        self.offset = offset

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        check_ids("positions", positions, -1, self.max_len, "max_len")
        rows = F.embedding(positions.clamp(min=0) + self.offset, self.weight)
        rows = rows.masked_fill(positions.unsqueeze(-1) < 0, 0.0)  # also keeps padding out of the gradient
        return rows if dtype is None else rows.to(dtype)

    def extra_repr(self) -> str:
        return f"{self.max_len}, {self.d_model}, offset={self.offset}"


class TokenEmbedding(nn.Embedding):
    """One vector per token, times `scale` (√d_model in Vaswani et al. 2017, §3.4).   ids (B, T) → (B, T, M)

    A padding id is an id like any other; what keeps padding out is the mask.
    """

    def __init__(self, vocab_size: int, d_model: int, scale: float = 1.0) -> None:
        check_positive(vocab_size=vocab_size, d_model=d_model)
        super().__init__(vocab_size, d_model)
        self.vocab_size = vocab_size
        self.d_model = d_model
        self.scale = float(scale)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.embedding_dim**-0.5)

    def forward(self, ids: Tensor) -> Tensor:
        if ids.dim() != 2:
            raise ValueError(f"token ids must be (batch, length), got shape {tuple(ids.shape)}")
        check_ids("token ids", ids, 0, self.vocab_size, "vocab_size")
        vectors = F.embedding(ids, self.weight)
        return vectors if self.scale == 1.0 else vectors * self.scale

    def extra_repr(self) -> str:
        return f"{self.vocab_size}, {self.d_model}, scale={self.scale}"


class Embeddings(nn.Module):
    """projection(dropout(norm(token[ids] + segment[segments] + position[positions]))), each part but token optional.

    segment     a second table for sentence A / B (BERT); no segments given means segment 0 throughout
    position    Sinusoidal or Learned; None where attention itself knows positions (RoPE, ALiBi, T5)
    norm        BERT, BART
    projection  a map from a narrower table to d_model (ALBERT's factorised embedding, Lan et al. 2020, §3.1)
    token       None where the model keeps the table itself, shared by source, target and output: vectors come in
    ids (B, T), positions (T,) or (B, T), by default 0 … T−1, segments (B, T) → (B, T, M)
    """

    def __init__(
        self,
        token: TokenEmbedding | None,
        *,
        segment: TokenEmbedding | None = None,
        position: Sinusoidal | Learned | None = None,
        norm: nn.Module | None = None,
        projection: nn.Linear | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if token is not None:
            _check_width(token.d_model, segment=segment, position=position)
        if token is not None and projection is not None and projection.in_features != token.d_model:
            raise ValueError(f"projection takes width {projection.in_features}, but token has d_model={token.d_model}")
        self.token = token
        self.segment = segment
        self.position = position
        self.norm = norm
        self.projection = projection
        self.dropout = nn.Dropout(dropout)

    def forward(self, ids: Tensor, positions: Tensor | None = None, segments: Tensor | None = None) -> Tensor:
        x: Tensor = ids if self.token is None else self.token(ids)  # (B, T, M)
        if self.segment is not None:
            x = x + (self.segment.weight[0] * self.segment.scale if segments is None else self.segment(segments))
        elif segments is not None:
            raise ValueError("segments were given, but these embeddings have no segment table")
        if self.position is not None:
            if positions is None:
                positions = self._default_positions(x.shape[1], x.device)
            x = x + self.position(positions, x.dtype)
        if self.norm is not None:
            x = self.norm(x)
        x = self.dropout(x)
        return x if self.projection is None else self.projection(x)

    def _default_positions(self, length: int, device: torch.device) -> Tensor:
        max_len = None if self.position is None else self.position.max_len
        if max_len is not None and length > max_len:
            raise ValueError(f"the text has length {length}, but positions end at max_len={max_len}")
        return torch.arange(length, device=device)


def _check_width(d_model: int, **parts: nn.Module | None) -> None:
    for name, part in parts.items():
        if part is not None and part.d_model != d_model:
            raise ValueError(f"{name} has d_model={part.d_model}, but token has d_model={d_model}")


class PatchEmbedding(nn.Module):
    """Cut the image into p × p patches and map each to a vector (Dosovitskiy et al. 2021, eq. 1).

    Equal to a convolution with kernel and stride p, and stored like one, (M, C, p, p); computed as one matrix product,
    which on a GPU keeps fp32 exact where convolutions default to TF32.
    pixels (B, C, h·p, w·p) → (B, h·w, M), patches row by row; images of another size than image_size are taken too
    """

    def __init__(
        self, image_size: int | tuple[int, int], patch: int, channels: int, d_model: int, bias: bool = True
    ) -> None:
        super().__init__()
        height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
        check_positive(height=height, width=width, patch=patch, channels=channels, d_model=d_model)
        self.image_size = (height, width)
        self.patch = patch
        self.channels = channels
        self.d_model = d_model
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
        """Rows and columns of patches in an image of that size."""
        for name, size in (("height", height), ("width", width)):
            if size % self.patch:
                raise ValueError(f"image {name}={size} is not divisible by patch={self.patch}")
        return height // self.patch, width // self.patch

    def forward(self, pixels: Tensor) -> Tensor:
        if pixels.ndim != 4 or pixels.shape[1] != self.channels:
            raise ValueError(f"pixels have shape {tuple(pixels.shape)}, but (B, channels={self.channels}, H, W) is due")
        rows, cols = self.grid_of(pixels.shape[2], pixels.shape[3])
        p = self.patch
        patches = pixels.unflatten(3, (cols, p)).unflatten(2, (rows, p))  # (B, C, rows, p, cols, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, rows·cols, C·p·p)
        return F.linear(patches, self.weight.flatten(1), self.bias)

    def extra_repr(self) -> str:
        return f"{self.image_size}, patch={self.patch}, channels={self.channels}, d_model={self.d_model}"


class VisionEmbeddings(nn.Module):
    """dropout(norm([class tokens; patches] + position)), each part but the patches optional (ViT, eq. 1).

    Positions count the class tokens first, then the patches row by row. A Learned table for image_size is stretched
    bicubically to images of another size (ViT, §3.2).
    pixels (B, C, H, W) → (B, n_class_tokens + patches, M)
    """

    def __init__(
        self,
        patches: PatchEmbedding,
        *,
        position: Learned | Sinusoidal | None = None,
        n_class_tokens: int = 1,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if n_class_tokens < 0:
            raise ValueError(f"n_class_tokens={n_class_tokens} must not be negative")
        if position is not None and position.d_model != patches.d_model:
            raise ValueError(f"position has d_model={position.d_model}, but patches have d_model={patches.d_model}")
        n_positions = n_class_tokens + patches.n_patches
        if isinstance(position, Learned) and position.max_len != n_positions:
            raise ValueError(
                f"position has max_len={position.max_len}, but class tokens and patches make {n_positions}"
            )
        self.patches = patches
        self.position = position
        self.n_class_tokens = n_class_tokens
        self.class_token = nn.Parameter(torch.empty(n_class_tokens, patches.d_model)) if n_class_tokens else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.class_token is not None:
            nn.init.normal_(self.class_token, std=0.02)

    def forward(self, pixels: Tensor) -> Tensor:
        x: Tensor = self.patches(pixels)  # (B, N, M)
        if self.class_token is not None:
            x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        if self.position is not None:
            x = x + self._position_vectors(x, self.patches.grid_of(pixels.shape[2], pixels.shape[3]))
        if self.norm is not None:
            x = self.norm(x)
        out: Tensor = self.dropout(x)
        return out

    def _position_vectors(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        if isinstance(self.position, Learned):
            table = self.position.weight[self.position.offset :]
            if grid != self.patches.grid:
                table = interpolate_positions(table, self.patches.grid, grid, self.n_class_tokens)
            return table.to(x.dtype)
        assert self.position is not None
        n_positions: Tensor = self.position(torch.arange(x.shape[1], device=x.device), x.dtype)
        return n_positions


def interpolate_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int], n_class_tokens: int = 1) -> Tensor:
    """Stretch a learned table (n_class_tokens + old rows·cols, M) bicubically to the new grid; class tokens stay."""
    if table.shape[0] != n_class_tokens + old[0] * old[1]:
        raise ValueError(f"table has {table.shape[0]} rows, but {n_class_tokens} class tokens and a grid {old} differ")
    fixed, image = table[:n_class_tokens], table[n_class_tokens:]
    wide = torch.promote_types(table.dtype, torch.float32)
    image = image.to(wide).unflatten(0, old).permute(2, 0, 1).unsqueeze(0)  # (1, M, rows, cols)
    image = F.interpolate(image, size=new, mode="bicubic", align_corners=False)
    return torch.cat((fixed, image[0].permute(1, 2, 0).flatten(0, 1).to(table.dtype)))


class RegionEmbedding(nn.Module):
    """Given features of image regions, mapped to the model's width (bottom-up attention, Anderson et al. 2018).

    y = dropout(norm(features W_f + boxes W_b)), the boxes (d_box = 4 or 5 numbers, see `box_geometry`) as in ViLBERT.
    features (B, R, d_region), boxes (B, R, d_box) → (B, R, M)
    """

    def __init__(
        self, d_region: int = 2048, *, d_model: int, d_box: int = 0, norm: nn.Module | None = None, dropout: float = 0.0
    ) -> None:
        super().__init__()
        check_positive(d_region=d_region, d_model=d_model)
        if d_box not in (0, 4, 5):
            raise ValueError(f"d_box={d_box} must be 0 (no boxes), 4 (corners) or 5 (corners and area)")
        self.d_region = d_region
        self.d_model = d_model
        self.d_box = d_box
        self.w_feature = nn.Linear(d_region, d_model)
        self.w_box = nn.Linear(d_box, d_model) if d_box else None
        self.norm = norm
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, boxes: Tensor | None = None) -> Tensor:
        if features.shape[-1] != self.d_region:
            raise ValueError(f"features have width {features.shape[-1]}, but d_region={self.d_region}")
        x: Tensor = self.w_feature(features)
        if (0 if boxes is None else boxes.shape[-1]) != self.d_box:
            given = "no boxes were given" if boxes is None else f"boxes have {boxes.shape[-1]} numbers"
            raise ValueError(f"{given}, but d_box={self.d_box}")
        if boxes is not None and self.w_box is not None:
            x = x + self.w_box(boxes)
        if self.norm is not None:
            x = self.norm(x)
        out: Tensor = self.dropout(x)
        return out


def box_geometry(corners: Tensor, height: int, width: int) -> Tensor:
    """Corners (x1, y1, x2, y2) in pixels → (x1/W, y1/H, x2/W, y2/H, area/(W·H)), the five numbers of ViLBERT."""
    scaled = corners / torch.tensor([width, height, width, height], dtype=corners.dtype, device=corners.device)
    area = (scaled[..., 2] - scaled[..., 0]) * (scaled[..., 3] - scaled[..., 1])
    return torch.cat((scaled, area.unsqueeze(-1)), dim=-1)
