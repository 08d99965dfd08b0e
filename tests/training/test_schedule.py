"""Learning rates, number by number."""

from __future__ import annotations

import math

import pytest

from regard.config import TrainConfig
from regard.training.optimiser import constant, cosine, noam, paper_lr, schedule_of, warmup_stable_decay


@pytest.mark.parametrize(("d_model", "warmup"), [(512, 4000), (1024, 4000), (128, 10)])
def test_the_papers_rates(d_model: int, warmup: int) -> None:
    """lrate = d_model^-0.5 · min(step^-0.5, step · warmup^-1.5)   (eq. 3)"""
    train = TrainConfig(schedule="noam", warmup=warmup, lr=paper_lr(d_model, warmup))
    factor = schedule_of(train)
    for step in (1, 2, warmup - 1, warmup, warmup + 1, 10 * warmup, 100_000):
        paper = d_model**-0.5 * min(step**-0.5, step * warmup**-1.5)
        assert train.lr * factor(step) == pytest.approx(paper, rel=1e-12)


def test_known_values() -> None:
    assert paper_lr(512, 4000) == pytest.approx(6.987712429686843e-4)
    assert [noam(4)(step) for step in (1, 2, 4, 16)] == [0.25, 0.5, 1.0, 0.5]
    assert [constant(4)(step) for step in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert [cosine(10, 110)(step) for step in (1, 10, 60, 110, 200)] == pytest.approx([0.1, 1.0, 0.5, 0.0, 0.0])
    assert cosine(10, 110, 0.1)(110) == pytest.approx(0.1)
    assert cosine(0, 100)(25) == pytest.approx(0.5 + 0.5 * math.cos(math.pi / 4))
    wsd = warmup_stable_decay(10, 100, decay=0.2, floor=0.5)
    assert [wsd(step) for step in (5, 10, 11, 80, 90, 100, 120)] == pytest.approx([0.5, 1, 1, 1, 0.75, 0.5, 0.5])


@pytest.mark.parametrize("name", ["noam", "cosine", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 20, 90, 150])
def test_every_schedule_rises_to_its_peak_and_stays_positive(name: str, warmup: int) -> None:
    train = TrainConfig.model_validate({"schedule": name, "warmup": warmup, "steps": 100, "floor": 0.05})
    factors = [schedule_of(train)(step) for step in range(1, 101)]
    assert all(0 < factor <= 1 for factor in factors)
    up = factors[: min(warmup, 100)]
    assert up == pytest.approx([step / warmup for step in range(1, len(up) + 1)])
    down = factors[max(warmup - 1, 0) :]
    assert down == sorted(down, reverse=True)
    if name in ("cosine", "wsd") and warmup < 100:
        assert factors[-1] == pytest.approx(0.05)
