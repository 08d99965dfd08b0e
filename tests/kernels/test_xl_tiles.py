"""The tiles of Transformer-XL's kernels: pairs of half precision are joined and rotated like single numbers.

TRITON_INTERPRET=1 pytest tests/kernels          # without a GPU, where triton is installed
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
pytestmark = [] if INTERPRETED else gpu
DEVICE = "cpu" if INTERPRETED else "cuda"

if INTERPRETED or torch.cuda.is_available():
    import triton
    import triton.language as tl

    from regard.kernels.xl_kernels import join_halves, pack, turn, unpack

    @triton.jit
    def join_and_turn(x, y, out, BACK: tl.constexpr, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        first = tl.load(x + at)
        joined = join_halves(pack(first, BLOCK), pack(tl.load(y + at), BLOCK), BLOCK)
        tl.store(out + at, unpack(turn(joined, BACK, BLOCK), first.dtype, BLOCK))


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("block", [16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_halves_are_joined_and_rows_rotated(dtype: torch.dtype, block: int, back: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    x, y = (torch.randn(block, block, generator=draw).to(DEVICE, dtype) for _ in range(2))
    a, b = torch.arange(block, device=DEVICE)[:, None], torch.arange(block, device=DEVICE)
    wanted = torch.where(a + b < block, x, y).gather(1, (b + a if back else b - a) % block)
    found = torch.empty_like(x)
    join_and_turn[(1,)](x, y, found, back, block)
    assert torch.equal(found, wanted)
