"""Position biases: the published numbers, one definition for every tile and frame, gradients on every backend."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.attention import Additive, Dot, Frame, XLRelative, attend, masks
from regard.attention.attend import prepare
from regard.attention.backends import capable_backends
from regard.attention.biases import (
    Alibi,
    Bias,
    DenseBias,
    RelativeBias,
    Sum,
    T5Bias,
    alibi_slopes,
    skew,
    toeplitz,
    toeplitz_backward,
    unskew,
)

from .helpers import Sizes, inputs

H, D = 4, 3
ALL = slice(None)


def dense_bias() -> Bias:
    return DenseBias(nn.Parameter(torch.randn(2, H, 11, 11)))


BIASES: dict[str, Callable[[], Bias]] = {
    "alibi": lambda: Alibi(H),
    "t5": lambda: T5Bias(H, n_buckets=8, max_distance=20),
    "t5 causal": lambda: T5Bias(H, n_buckets=8, max_distance=20, bidirectional=False),
    "xl": lambda: XLRelative(H, D, d_model=6),
    "dense": dense_bias,
    "sum": lambda: Sum(Alibi(H), T5Bias(H, n_buckets=4, max_distance=9), XLRelative(H, D, d_model=6)),
}
READ_CONTENT = ("xl", "sum")
TRAINABLE = [name for name in BIASES if name != "alibi"]


def build(name: str, dtype: torch.dtype = torch.float64) -> Bias:
    torch.manual_seed(0)
    bias = BIASES[name]().to(dtype)
    for parameter in bias.parameters():
        nn.init.normal_(parameter, std=0.5)
    if isinstance(bias, DenseBias):
        bias.values = nn.Parameter(bias.values.detach().to(dtype))
    return bias


# ---- T5


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("n_buckets", "max_distance"), [(32, 128), (8, 20), (4, 3), (64, 1000)])
def test_t5_buckets_are_transformers_own(bidirectional: bool, n_buckets: int, max_distance: int) -> None:
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    wanted = T5Attention._relative_position_bucket(distance, bidirectional, n_buckets, max_distance)
    bias = T5Bias(H, n_buckets, max_distance, bidirectional)
    assert torch.equal(bias.bucket(distance), wanted)
    assert torch.equal(bias.at(distance), bias.w[wanted].T)


def test_t5_far_distances_share_the_last_bucket() -> None:
    bias = T5Bias(1)
    assert bias.bucket(torch.tensor([0, -7, -8, -127, -128, -10_000])).tolist() == [0, 7, 8, 15, 15, 15]
    assert bias.bucket(torch.tensor([1, 7, 10_000])).tolist() == [17, 23, 31]
    assert T5Bias(1, bidirectional=False).bucket(torch.tensor([3, 0, -15, -200])).tolist() == [0, 0, 15, 31]


# ---- ALiBi


def test_alibi_slopes_are_the_published_ones() -> None:
    assert alibi_slopes(8) == [2.0**-n for n in range(1, 9)]  # 1/2 … 1/256
    assert alibi_slopes(16) == [2.0 ** (-n / 2) for n in range(1, 17)]
    # 12 heads: those of 8, then every second one of 16 (Press et al.'s own code)
    assert alibi_slopes(12) == pytest.approx([2.0**-n for n in range(1, 9)] + [2.0 ** (-n / 2) for n in (1, 3, 5, 7)])
    assert alibi_slopes(1) == [2.0**-8]


def test_alibi_grows_with_the_distance() -> None:
    frame, heads = Frame.aligned(1, 8, 3, 3), torch.zeros(1, 8, 3, 2)
    wanted = torch.tensor([[0, -1, -2], [-1, 0, -1], [-2, -1, 0]])
    for h, tile in enumerate(Alibi(8).dense(frame, heads, heads)[0]):
        assert torch.equal(tile, wanted * 2.0 ** -(h + 1))


@pytest.mark.parametrize("n_heads", [8, 12])
def test_alibi_is_that_of_transformers_bloom(n_heads: int) -> None:
    """BLOOM adds slope · j instead of -slope · (i - j): under a causal mask the same up to a constant of each row."""
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    theirs = build_alibi_tensor(torch.ones(1, 9, dtype=torch.long), n_heads, torch.float32).view(n_heads, 9)
    heads = torch.zeros(1, n_heads, 9, 2)
    ours = Alibi(n_heads).dense(Frame.of(heads, heads), heads, heads)[0]
    last = ours[:, -1] - ours[:, -1, :1]  # the last query sees every key
    torch.testing.assert_close(last, theirs - theirs[:, :1])


# ---- one definition for every tile and frame


def frames() -> dict[str, Frame]:
    gaps = torch.tensor([5, -1, 7, 3, 4, -1, 6, 0, 1, 2, 10])
    rows = torch.stack([gaps, gaps.flip(0)])
    return {
        "aligned": Frame.aligned(2, H, 11, 11),
        "moved": Frame.aligned(2, H, 11, 11, q_start=4, k_start=2),
        "gaps": Frame(2, H, torch.arange(11), gaps),
        "gaps, limited": Frame(2, H, torch.arange(11), gaps, limit=12),
        "rows": Frame(2, H, rows, rows),
    }


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("where", frames())
def test_a_tile_is_a_part_of_the_whole(name: str, where: str) -> None:
    bias, frame = build(name), frames()[where]
    q, k, _ = inputs(Sizes(2, H, H, 11, 11, D))
    operands = bias.operands(frame)
    dense = bias.dense(frame, q, k).expand(2, H, 11, 11)
    index = torch.tensor([9, 0, 4])
    for rows, cols in ((slice(2, 7), slice(5, 11)), (slice(10, 11), ALL), (index, slice(1, 4)), (ALL, index)):
        wanted = dense[:, :, rows][..., cols]
        tile = bias.tile(rows, cols, frame, operands, q[:, :, rows], k[:, :, cols])
        torch.testing.assert_close(tile.expand_as(wanted), wanted)


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.parametrize("where", frames())
def test_some_heads_of_some_sequences(name: str, where: str) -> None:
    bias, frame = build(name), frames()[where]
    q, k, _ = inputs(Sizes(2, H, H, 11, 11, D))
    whole = bias.dense(frame, q, k).expand(2, H, 11, 11)
    part = frame.part(range(1, 2), range(1, 3))
    found = bias.dense(part, q[1:, 1:3], k[1:, 1:3])
    torch.testing.assert_close(found.expand(1, 2, 11, 11), whole[1:, 1:3])


@pytest.mark.parametrize("name", ["alibi", "t5", "t5 causal"])
@pytest.mark.parametrize("where", frames())
def test_relative_biases_are_functions_of_the_distance(name: str, where: str) -> None:
    bias, frame = build(name), frames()[where]
    assert isinstance(bias, RelativeBias)
    heads = torch.zeros(2, H, 11, D, dtype=torch.float64)
    dense = bias.dense(frame, heads, heads).expand(2, H, 11, 11)
    q_pos, k_pos = frame.q_pos.expand(2, 11), frame.k_pos.expand(2, 11)
    for b, i, j in ((0, 0, 0), (1, 3, 7), (0, 10, 2), (1, 10, 10), (0, 4, 9)):
        distance = k_pos[b, j] - q_pos[b, i]
        torch.testing.assert_close(dense[b, :, i, j], bias.at(distance))


@pytest.mark.parametrize("where", frames())
def test_xl_reads_content_and_distance(where: str) -> None:
    bias, frame = build("xl"), frames()[where]
    assert isinstance(bias, XLRelative)
    q, k, _ = inputs(Sizes(2, H, 2, 11, 11, D))
    dense = bias.dense(frame, q, k)
    q_pos, k_pos = frame.q_pos.expand(2, 11), frame.k_pos.expand(2, 11)
    for b, h, i, j in ((0, 0, 0, 0), (1, 3, 3, 7), (0, 2, 10, 2), (1, 1, 5, 10)):
        r = bias.w_r.view(H, D, 6)[h] @ bias.encodings((k_pos[b, j] - q_pos[b, i])[None])[0].double()
        wanted = (q[b, h, i] @ r + bias.u[h] @ k[b, h // 2, j] + bias.v[h] @ r) / math.sqrt(D)
        torch.testing.assert_close(dense[b, h, i, j], wanted)


def test_a_sum_is_the_sum() -> None:
    bias, frame = build("sum"), frames()["gaps"]
    q, k, _ = inputs(Sizes(2, H, H, 11, 11, D))
    wanted = sum(part.dense(frame, q, k) for part in bias.parts)
    torch.testing.assert_close(bias.dense(frame, q, k), wanted)
    assert bias.reads_content
    assert bias.trainable
    assert not Sum(Alibi(H), Alibi(H)).trainable
    assert not Sum(Alibi(H)).reads_content


@pytest.mark.parametrize("shape", [(5, 7), (H, 5, 7), (2, H, 5, 7), (1, 1, 5, 7), (2, 1, 5, 7)])
def test_a_plain_tensor_is_a_bias(shape: tuple[int, ...]) -> None:
    q, k, v = inputs(Sizes(2, H, 2, 5, 7, D))
    values = torch.randn(shape, dtype=torch.float64)
    wanted = torch.softmax(q @ k.repeat_interleave(2, 1).transpose(-1, -2) / math.sqrt(D) + values, -1)
    found = attend(q, k, v, bias=values, weights=True).weights
    torch.testing.assert_close(found, wanted)


def test_a_bias_of_minus_infinity_hides_like_a_mask() -> None:
    q, k, v = inputs(Sizes(1, 1, 1, 3, 3, D), grad=True)
    values = torch.tensor([[0.0, -math.inf, 0.0], [-math.inf] * 3, [0.0] * 3], dtype=torch.float64)
    for backend in ("reference", "tiled"):
        found = attend(q, k, v, bias=values, backend=backend).output
        grads = torch.autograd.grad(found.sum(), (q, k, v))
        assert (found[0, 0, 1] == 0).all()
        assert all(torch.isfinite(g).all() for g in grads)
        torch.testing.assert_close(found, attend(q, k, v, mask=values == 0).output)


# ---- training


def gradients(bias: Bias, backend: str, frame: Frame, n_kv_heads: int) -> list[Tensor]:
    q, k, v = inputs(Sizes(2, H, n_kv_heads, 11, 11, D), grad=True)
    found = attend(q, k, v, bias=bias, mask=masks.causal(), frame=frame, backend=backend).output
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    own = [bias.values] if isinstance(bias, DenseBias) else list(bias.parameters())
    return list(torch.autograd.grad(found, [q, k, v, *own], upstream))


CASES = [
    (name, backend)
    for name in TRAINABLE
    for feature in ["content bias" if name in READ_CONTENT else "trainable bias"]
    for backend in capable_backends("dot", "cpu", "backward", frozenset({feature}))
    if backend != "reference"
]


@pytest.mark.parametrize(("name", "backend"), CASES)
@pytest.mark.parametrize("where", frames())
@pytest.mark.parametrize("n_kv_heads", [H, 2])
def test_trains_on_every_backend_that_takes_it(name: str, backend: str, where: str, n_kv_heads: int) -> None:
    bias, frame = build(name), frames()[where]
    ours, wanted = (gradients(copy.deepcopy(bias), b, frame, n_kv_heads) for b in (backend, "reference"))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    assert any(grad.abs().max() > 0 for grad in wanted[3:])


@pytest.mark.parametrize("name", TRAINABLE)
def test_gradcheck_through_tiles(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finite differences, with tiles so small that every row and column has several."""
    monkeypatch.setattr(Dot, "largest_tile", 1)
    bias = build(name)
    if isinstance(bias, DenseBias):
        bias.values = nn.Parameter(torch.randn(1, H, 40, 70, dtype=torch.float64))
    q, k, v = inputs(Sizes(1, H, 2, 40, 70, D), grad=True)
    call = prepare(q, k, v, bias=bias)
    assert call.plan().kinds.shape == (2, 2)
    own = [bias.values] if isinstance(bias, DenseBias) else list(bias.parameters())

    def run(*_: Tensor) -> Tensor:
        return attend(q, k, v, bias=bias, backend="tiled").output

    assert torch.autograd.gradcheck(run, [q, k, v, *own], fast_mode=True)


def test_gradients_add_up_over_many_tiles() -> None:
    """More rows and columns than one tile holds, and not a multiple of it."""
    bias = build("t5")
    q, k, v = inputs(Sizes(1, H, 2, 530, 270, D), grad=True)
    found = [
        torch.autograd.grad(attend(q, k, v, bias=bias, backend=backend).output.square().sum(), bias.w)[0]
        for backend in ("tiled", "reference")
    ]
    torch.testing.assert_close(found[0], found[1])


def test_half_precision_queries_with_a_full_precision_bias() -> None:
    q, k, v = inputs(Sizes(1, H, H, 5, 5, 8), dtype=torch.bfloat16)
    bias = Alibi(H)
    wanted = attend(q.float(), k.float(), v.float(), bias=bias).output
    for backend in ("reference", "tiled", "sdpa"):
        found = attend(q, k, v, bias=bias, backend=backend).output
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), wanted, rtol=0.03, atol=0.03)


# ---- diagonals


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 4), (4, 1), (3, 5), (5, 3)])
def test_diagonals(rows: int, cols: int) -> None:
    values = torch.randn(2, rows + cols - 1)
    by_row = torch.randn(2, rows, rows + cols - 1)
    for i in range(rows):
        for j in range(cols):
            assert torch.equal(toeplitz(values, rows)[:, i, j], values[:, j - i + rows - 1])
            assert torch.equal(skew(by_row)[:, i, j], by_row[:, i, j - i + rows - 1])
    tile = torch.randn(2, rows, cols)
    assert torch.equal(skew(unskew(tile)), tile)
    # a transpose is what makes <A x, y> = <x, Aᵀ y>
    torch.testing.assert_close((toeplitz(values, rows) * tile).sum(), (values * toeplitz_backward(tile)).sum())
    torch.testing.assert_close((skew(by_row) * tile).sum(), (by_row * unskew(tile)).sum())


def test_a_new_bias_is_its_tile_or_its_function_of_distance() -> None:
    frame, heads = Frame.aligned(1, 1, 2, 2), torch.zeros(1, 1, 2, 2)
    with pytest.raises(NotImplementedError):
        Bias().dense(frame, heads, heads)
    with pytest.raises(NotImplementedError):
        RelativeBias().dense(frame, heads, heads)


def test_a_tile_that_is_one_value_a_head_is_not_laid_out() -> None:
    """Far from the diagonal T5's bias is level; the tile is then a view, and still the right one."""
    bias, frame = T5Bias(3, n_buckets=8, max_distance=16), Frame.aligned(1, 3, 200, 200)
    q = torch.zeros(1, 3, 200, 4)
    with torch.no_grad():
        operands = bias.operands(frame)
        level = bias.tile(slice(150, 180), slice(10, 60), frame, operands, q[:, :, :30], q[:, :, :50])
        laid_out = bias.tile(slice(150, 180), slice(140, 190), frame, operands, q[:, :, :30], q[:, :, :50])
        dense = bias.dense(frame, q, q)
    assert level.shape == laid_out.shape == (1, 3, 30, 50)
    assert level.stride()[2:] == (0, 0)
    assert laid_out.stride()[2:] != (0, 0)
    assert torch.equal(level, dense[:, :, 150:180, 10:60])
    assert torch.equal(laid_out, dense[:, :, 150:180, 140:190])


@pytest.mark.parametrize(
    "options", [{"bias": XLRelative(H, D)}, {"mechanism": Additive(H, D)}], ids=("bias", "mechanism")
)
def test_the_formula_reads_half_precision_parameters_in_fp32(options: dict[str, nn.Module]) -> None:
    q, k, v = inputs(Sizes(), dtype=torch.bfloat16)
    parts: dict[str, Any] = {name: part.to(torch.bfloat16) for name, part in options.items()}
    formula, tiled = (attend(q, k, v, backend=backend, **parts).output for backend in ("reference", "tiled"))
    torch.testing.assert_close(formula, tiled, atol=2e-2, rtol=2e-2)
