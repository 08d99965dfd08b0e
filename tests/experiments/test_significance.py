"""Student, Welch and Dunnett against numbers from tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from regard.experiments.significance import compare, dunnett, estimate, t_two_sided, welch


@pytest.mark.parametrize(
    ("t", "df", "p"),
    [
        (12.706, 1, 0.05),
        (4.303, 2, 0.05),
        (2.776, 4, 0.05),
        (4.604, 4, 0.01),
        (2.086, 20, 0.05),
        (1.960, 1e7, 0.05),
        (0.0, 5, 1.0),
        (1.0, 1, 0.5),
    ],
)
def test_student_as_in_the_tables(t: float, df: float, p: float) -> None:
    assert t_two_sided(t, df) == pytest.approx(p, rel=2e-3)
    assert t_two_sided(-t, df) == t_two_sided(t, df)


def test_welch_on_an_example_worked_by_hand() -> None:
    # means 3 and 6, variances 2.5 and 10, n = 5: t = -3/√2.5, df = 2.5² / (0.5²/4 + 2²/4)
    a, b = [1.0, 2, 3, 4, 5], [2.0, 4, 6, 8, 10]
    assert welch(a, b) == pytest.approx(t_two_sided(3 / math.sqrt(2.5), 6.25 / 1.0625))
    assert welch(a, b) == pytest.approx(0.1075, abs=5e-4)
    assert welch(a, a) == 1.0


def test_without_spread_or_without_a_second_seed() -> None:
    assert welch([1.0, 1.0], [1.0, 1.0]) == 1.0
    assert welch([1.0, 1.0], [2.0, 2.0]) == 0.0
    assert welch([1.0], [2.0, 3.0]) is None


def spread(mean: float, n: int, sd: float = 1.0) -> list[float]:
    """n values with exactly this mean and standard deviation."""
    places = [k - (n - 1) / 2 for k in range(n)]
    scale = sd / math.sqrt(sum(x * x for x in places) / (n - 1))
    return [mean + scale * x for x in places]


@pytest.mark.parametrize(
    ("n_cells", "n", "critical"),
    # Dunnett's two-sided 5 % points, df = (cells + 1) (n - 1): his tables of 1964.
    [(1, 11, 2.09), (4, 5, 2.65), (3, 6, 2.54), (2, 5, 2.50), (4, 3, 2.89)],
)
def test_dunnett_as_in_his_tables(n_cells: int, n: int, critical: float) -> None:
    base = spread(0.0, n)
    cells = {f"{k}": spread(0.0, n) for k in range(n_cells - 1)} | {"far": spread(critical * math.sqrt(2 / n), n)}
    found = dunnett(base, cells)
    assert found["far"] == pytest.approx(0.05, abs=0.002)
    assert all(found[f"{k}"] == 1.0 for k in range(n_cells - 1))


def test_dunnett_of_one_cell_is_students_test() -> None:
    a, b = [1.0, 2, 3, 4, 5], [3.0, 4, 5, 6, 7]
    assert dunnett(a, {"b": b})["b"] == pytest.approx(t_two_sided(2.0, 8), abs=0.003)
    assert dunnett(a, {"b": b}) == dunnett(a, {"b": b})


def test_a_wide_cell_is_kept_out_of_the_pool_and_tested_by_itself() -> None:
    cells = {"near": [1.1, 1.11, 1.12], "same": [1.0, 1.02, 0.98], "wide": [5.0, 9.0, 7.0]}
    found = compare([1.0, 1.01, 0.99], cells)
    assert found.apart == ("wide",)
    alone = welch(cells["wide"], [1.0, 1.01, 0.99])
    assert alone is not None
    assert found.p["wide"] == pytest.approx(2 * alone), "two families share the error"
    assert found.p["near"] < 0.01 < 0.5 < found.p["same"]


def test_a_wide_base_sends_all_cells_to_welch() -> None:
    base, cells = [1.0, 9.0, 5.0], {"a": [1.0, 1.01, 0.99], "b": [9.0, 9.02, 8.98], "c": [5.0, 5.01, 4.99]}
    found = compare(base, cells)
    assert found.apart == ("a", "b", "c")
    assert found.p["a"] == pytest.approx(min(1.0, 3 * (welch(cells["a"], base) or 0)))


def test_constant_cells_say_nothing_about_the_spread_of_others() -> None:
    base, cell = [15.8, 15.3, 16.6], [14.0, 14.6, 13.6]
    alone = dunnett(base, {"cell": cell})["cell"]
    for constant in ([0.0, 0.0, 0.0], [0.001, 0.002, 0.0]):
        found = dunnett(base, {"cell": cell, "constant": constant})
        assert found["constant"] < 0.001
        assert alone < found["cell"] < 2.2 * alone, "corrected for two cells, not helped by the one that stands still"


def test_under_the_null_hypothesis_five_of_a_hundred_sweeps_find_something() -> None:
    draw = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        base, *others = draw.standard_normal((6, 3)).tolist()
        wrong += min(compare(base, {f"{n}": values for n, values in enumerate(others)}).p.values()) < 0.05
    assert 0.01 < wrong / 300 < 0.09


def test_with_nothing_to_compare() -> None:
    assert compare([1.0], {"a": [1.0, 2.0]}).p == {}
    assert compare([1.0, 2.0], {"a": [1.0]}).p == {}
    assert compare([1.0, 1.0], {"a": [1.0, 1.0], "b": [2.0, 2.0]}).p == {"a": 1.0, "b": 0.0}


def test_mean_and_standard_error() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.se) == pytest.approx((2.0, 1 / math.sqrt(3)))
    assert estimate([4.0]).se is None
