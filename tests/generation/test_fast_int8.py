"""Int8: the product is what whole numbers give, rows do not see each other, and a quantised model stays a model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.small import inputs_of, small
from processor import needs_vnni
from regard.layers import quantised_linear
from regard.layers.quantised_linear import Int8Embedding, Int8Linear, quantise, quantise_weight

TORCH = torch.Generator().manual_seed(0)


def made(n_in: int, n_out: int, bias: bool = True) -> Int8Linear:
    torch.manual_seed(n_in)
    return Int8Linear.of(nn.Linear(n_in, n_out, bias=bias))


def by_hand(linear: Int8Linear, x: Tensor) -> Tensor:
    """In float64 and int64, one row after the other."""
    rows = []
    for row in x.double():
        step = row.abs().max() / 127
        q = (row / step).round().long() if step > 0 else torch.zeros(len(row), dtype=torch.int64)
        rows.append((linear.weight.long() @ q).double() * step * linear.scale.double())
    y = torch.stack(rows)
    return y if linear.bias is None else y + linear.bias.double()


@needs_vnni
@pytest.mark.parametrize("n_rows", [1, 2, 5, 33])
@pytest.mark.parametrize(("n_in", "n_out"), [(8, 5), (64, 48), (512, 300)])
def test_the_product_is_that_of_integer_product(n_rows: int, n_in: int, n_out: int) -> None:
    linear = made(n_in, n_out)
    x = torch.randn(n_rows, n_in, generator=TORCH) * torch.logspace(-3, 3, n_rows)[:, None]
    told = by_hand(linear, x)
    # A number half-way between two steps may go either way: one step of one input, at most.
    one_step = x.abs().amax(1, keepdim=True) / quantised_linear._input_levels() * linear.scale.max() * 127
    assert ((linear(x) - told).abs() <= 2 * one_step).all()
    assert ((linear(x) - told).abs().mean(1) <= 0.02 * one_step[:, 0]).all() or quantised_linear._input_levels() != 127
    torch.testing.assert_close(linear._integer_product(x) + linear.bias, told.float(), rtol=1e-3, atol=0.02)


def test_it_is_near_the_linear_map_it_came_from() -> None:
    torch.manual_seed(0)
    linear, x = nn.Linear(256, 128), torch.randn(7, 3, 256)
    told = linear(x)
    error = (Int8Linear.of(linear)(x) - told).norm() / told.norm()
    assert error < 0.02


@pytest.mark.parametrize("n_rows", [1, 3, 17])
def test_a_row_does_not_see_its_neighbours(n_rows: int) -> None:
    linear, x = made(64, 32), torch.randn(n_rows, 64, generator=TORCH)
    loud = torch.cat([x, 1e4 * torch.randn(5, 64, generator=TORCH)])
    together = linear(loud)[:n_rows]
    for row in range(n_rows):
        alone = linear(x[row : row + 1])
        # One row alone is scaled by another way of dividing: at most a step of single inputs.
        torch.testing.assert_close(together[row : row + 1], alone, rtol=0, atol=2e-2)
    if n_rows > 1:
        assert torch.equal(linear(x), together)


def test_zeros_and_what_is_no_number() -> None:
    linear = made(16, 8)
    assert linear.bias is not None
    for n_rows in (1, 4):
        assert torch.equal(linear(torch.zeros(n_rows, 16)), linear.bias.expand(n_rows, -1))
        x = torch.randn(n_rows, 16, generator=TORCH)
        x[0, 3] = torch.nan
        assert linear(x)[0].isnan().all()
    assert linear(torch.zeros(0, 16)).shape == (0, 8)
    mixed = torch.randn(3, 16, generator=TORCH)
    mixed[1] = 0
    assert torch.equal(linear(mixed)[1], linear.bias)


def test_weights_of_zeros() -> None:
    weight, scale = quantise_weight(torch.zeros(3, 4))
    assert not weight.any()
    assert torch.equal(scale, torch.ones(3))


def test_other_types_and_shapes_come_back_as_they_were() -> None:
    linear = made(16, 8)
    for dtype in (torch.float64, torch.bfloat16):
        assert linear(torch.randn(2, 3, 16, dtype=dtype)).dtype == dtype
    assert linear(torch.randn(2, 3, 16)).shape == (2, 3, 8)


@needs_vnni
def test_without_the_packed_product(monkeypatch: pytest.MonkeyPatch) -> None:
    linear, x = made(64, 32), torch.randn(5, 64, generator=TORCH)
    packed = linear(x)
    monkeypatch.setattr(quantised_linear, "_can_pack", lambda: False)
    torch.testing.assert_close(linear(x), packed, rtol=0, atol=2e-2)


def test_loading_other_numbers_is_noticed() -> None:
    linear, other, x = made(16, 8), made(16, 8), torch.randn(3, 16, generator=TORCH)
    linear(x)
    state = {name: value.flip(0) for name, value in other.state_dict().items()}
    assert sorted(state) == ["bias", "scale", "weight"]
    linear.load_state_dict(state)
    assert torch.equal(linear(x), other(x).flip(1))
    assert torch.equal(copy.deepcopy(linear)(x), linear(x))


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="weight must be int8"):
        Int8Linear(torch.zeros(3, 4), torch.ones(3))
    with pytest.raises(ValueError, match=r"scale of shape \(3,\)"):
        Int8Linear(torch.zeros(3, 4, dtype=torch.int8), torch.ones(4))


MODELS: dict[str, dict[str, Any]] = {
    "transformer-base": {},
    "gpt2": {},
    "llama-1b": {},
    "t5-small": {},
    "captioner": {},
    "bert-base-masked": {},
}


@needs_vnni
@pytest.mark.parametrize(("name", "fields"), [*MODELS.items(), ("transformer-base", {"target_vocab_size": 19})])
def test_a_quantised_model_says_nearly_the_same(name: str, fields: dict[str, Any]) -> None:
    model = small(name, **fields)
    inputs = inputs_of(model.config)
    with torch.no_grad():
        told = model(*inputs)
        got = quantise(copy.deepcopy(model))(*inputs)
    assert got.shape == told.shape
    assert (got - told).norm() / told.norm() < 0.08
    assert not torch.equal(got, told)


def test_a_tied_table_is_stored_once() -> None:
    model = small("transformer-base")
    quantise(model)
    assert isinstance(model.token, Int8Embedding)
    names = list(model.state_dict())
    assert "token.weight" in names
    assert not any(name.startswith("head.") and name.endswith("weight") for name in names)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    same = copy.deepcopy(model)
    assert same.head._tied[0] is same.token  # type: ignore[union-attr, index]
    assert all(x.dtype in (torch.int8, torch.float32) for x in model.state_dict().values())


def test_an_untied_head_has_its_own_matrix() -> None:
    model = small("llama-1b")
    quantise(model)
    assert model.state_dict()["head.output.weight"].dtype == torch.int8


def test_a_compiled_map_is_the_same() -> None:
    linear, x = made(32, 16), torch.randn(3, 32, generator=TORCH)
    compiled = torch.compile(linear, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), linear(x), rtol=0, atol=2e-2)
