"""Averaged weights: the recurrence, the way in and out of a model, exact continuation, means of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from regard.training.averaging import Ema, average


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(dtype)


def move(net: nn.Module, seed: int = 1) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for param in net.parameters():
            param.add_(torch.randn_like(param))


def values(net: nn.Module) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in net.named_parameters()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_recurrence_with_its_warm_up(dtype: torch.dtype) -> None:
    net = model(dtype)
    ema, expected = Ema(net, 0.3), {name: x.double() for name, x in values(net).items()}
    for decay in (1 / 10, 2 / 11, 3 / 12, 0.3, 0.3):  # (1 + n) / (10 + n) until it passes 0.3
        move(net)
        ema.update()
        expected = {name: decay * expected[name] + (1 - decay) * x for name, x in values(net).items()}
    with ema.averaged_weights():
        found = values(net)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}
    for name, x in expected.items():
        torch.testing.assert_close(found[name].double(), x, **tolerance)


def test_swapped_puts_everything_back_even_after_an_error() -> None:
    net = model(torch.bfloat16)
    ema = Ema(net, 0.9)
    move(net)
    ema.update()
    before, places = values(net), [param.data_ptr() for param in net.parameters()]
    averages = {name: x.clone() for name, x in ema.state_tensors().items()}

    def fail() -> None:
        with ema.averaged_weights():
            assert any(not torch.equal(x, before[name]) for name, x in values(net).items())
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert_equal(values(net), before)
    assert_equal(ema.state_tensors(), averages)
    assert places == [param.data_ptr() for param in net.parameters()]


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net[0].requires_grad_(False)
    ema = Ema(net, 0.9)
    assert not any("0.weight" in name for name in ema.state_tensors())


def test_it_goes_on_exactly() -> None:
    runs = []
    for stop_and_go in (False, True):
        net = model()
        ema = Ema(net, 0.99)
        for step in range(6):
            move(net, step)
            ema.update()
            if stop_and_go and step == 2:
                kept, weights = {name: x.clone() for name, x in ema.state_tensors().items()}, values(net)
                net = model()
                net.load_state_dict(weights)
                ema = Ema(net, 0.99)
                ema.load_state_tensors(kept)
        runs.append(ema.state_tensors())
    assert_equal(*runs)


def test_the_mean_of_checkpoints() -> None:
    states = [
        {"w": torch.randn(5, 3) * 1000, "half": torch.randn(4).bfloat16(), "n": torch.tensor(i)} for i in range(7)
    ]
    asked: list[int] = []

    def stream() -> Iterator[dict[str, Tensor]]:
        for i, state in enumerate(states):
            asked.append(i)
            yield state

    found = average(stream())
    assert asked == list(range(7))
    assert torch.equal(found["w"], torch.stack([state["w"].double() for state in states]).mean(0).float())
    assert found["half"].dtype == torch.bfloat16
    assert found["n"] == 6
    assert_equal(average([states[0]]), states[0])
    assert average([states[0]])["w"].data_ptr() != states[0]["w"].data_ptr()
