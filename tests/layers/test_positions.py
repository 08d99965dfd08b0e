"""Absolute positions: the paper's formula, Marian's layout, BART's offset, and padding slots."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.layers import Learned, Sinusoidal


@settings(max_examples=50, deadline=None)
@given(d_model=st.integers(1, 33), position=st.integers(0, 10**6), column=st.integers(0, 32))
def test_sinusoidal_is_the_papers_formula(d_model: int, position: int, column: int) -> None:
    column %= d_model
    value = Sinusoidal(d_model)(torch.tensor([position]), torch.float64)[0, column].item()
    angle = position / 10000 ** (2 * (column // 2) / d_model)
    expected = math.sin(angle) if column % 2 == 0 else math.cos(angle)
    assert value == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("d_model", [16, 15])
def test_halves_is_marians_layout(d_model: int) -> None:
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    theirs = MarianSinusoidalPositionalEmbedding(300, d_model).create_weight()
    ours = Sinusoidal(d_model, layout="halves")(torch.arange(300))
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_layouts_hold_the_same_numbers() -> None:
    positions = torch.arange(50)
    halves = Sinusoidal(8, layout="halves")(positions)
    interleaved = Sinusoidal(8)(positions)
    torch.testing.assert_close(interleaved[:, 0::2], halves[:, :4], atol=0, rtol=0)
    torch.testing.assert_close(interleaved[:, 1::2], halves[:, 4:], atol=0, rtol=0)


def test_a_shift_is_a_linear_map() -> None:
    """The reason the paper gives for the formula: PE(pos + k) is one rotation of PE(pos), whatever pos is."""
    table = Sinusoidal(6)(torch.arange(40), torch.float64)
    shift = torch.linalg.lstsq(table[:20], table[7:27]).solution
    torch.testing.assert_close(table[13:33] @ shift, table[20:40], atol=1e-8, rtol=0)


@pytest.mark.parametrize("shape", [(7,), (2, 7), (3, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_shapes_and_dtypes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    positions = torch.randint(0, 20, shape)
    for module in (Sinusoidal(10), Learned(20, 10), Learned(20, 10, offset=2)):
        out = module(positions, dtype)
        assert out.shape == (*shape, 10)
        assert out.dtype == dtype


def test_sinusoidal_far_beyond_any_table_keeps_fp32_precision() -> None:
    position = 1_000_003
    out = Sinusoidal(4)(torch.tensor([position]))
    expected = [math.sin(position), math.cos(position), math.sin(position / 100), math.cos(position / 100)]
    torch.testing.assert_close(out[0], torch.tensor(expected), atol=1e-7, rtol=0)


def test_sinusoidal_stores_nothing() -> None:
    assert not Sinusoidal(8, max_len=16).state_dict()


@pytest.mark.parametrize("module", [Sinusoidal(6), Sinusoidal(6, max_len=9), Learned(9, 6), Learned(9, 6, offset=2)])
def test_padding_slots_give_zeros_and_take_no_gradient(module: torch.nn.Module) -> None:
    positions = torch.tensor([[-1, -1, 0, 1], [0, 1, 2, 8]])
    out = module(positions)
    assert torch.equal(out[0, :2], torch.zeros(2, 6))
    assert out[1, 0].abs().sum() > 0
    if isinstance(module, Learned):
        module(torch.tensor([-1, -1, 3])).sum().backward()
        touched = module.weight.grad.abs().sum(-1).nonzero().flatten().tolist()  # type: ignore[union-attr]
        assert touched == [3 + module.offset]


def test_learned_is_barts_with_its_offset() -> None:
    from transformers.models.bart.modeling_bart import BartLearnedPositionalEmbedding

    theirs = BartLearnedPositionalEmbedding(12, 6)
    ours = Learned(12, 6, offset=2)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours(torch.arange(12)), theirs(torch.zeros(1, 12, dtype=torch.long))[0])


def test_out_of_range_is_said_clearly() -> None:
    with pytest.raises(ValueError, match="positions go up to 9, but max_len=9 allows at most 8"):
        Learned(9, 4, offset=2)(torch.tensor([0, 9]))
    with pytest.raises(ValueError, match="positions go up to 16, but max_len=16"):
        Sinusoidal(4, max_len=16)(torch.tensor([16]))
    with pytest.raises(ValueError, match="positions go down to -2"):
        Learned(9, 4)(torch.tensor([-2]))
    with pytest.raises(TypeError, match=r"positions must be int64 or int32, not torch\.float32"):
        Learned(9, 4)(torch.tensor([0.5]))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ValueError, match=r"layout='halfs' is not known; did you mean 'halves'\?"):
        Sinusoidal(4, layout="halfs")
    with pytest.raises(ValueError, match="d_model=0 must be at least 1"):
        Sinusoidal(0)
    with pytest.raises(ValueError, match="max_len=0 must be at least 1"):
        Learned(0, 4)
    with pytest.raises(ValueError, match="offset=-1 must not be negative"):
        Learned(4, 4, offset=-1)


def test_works_inside_vmap() -> None:
    """Per-example gradients look at one example at a time, where there is no value to check."""
    learned = Learned(8, 4)
    positions = torch.randint(-1, 8, (5, 3))
    assert torch.equal(torch.func.vmap(learned)(positions), learned(positions))
