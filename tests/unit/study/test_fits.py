"""Laws of scaling: what was put in comes out."""

from __future__ import annotations

import random

import pytest

from manyhosts.study.fits import LAWS, Fit, best, fit, fits

TRUE = {"amdahl": (0.07,), "gustafson": (0.2,), "universal": (0.05, 0.002)}


def law(name: str, n: float) -> float:
    return LAWS[name].speed_up(n, *TRUE[name])


@pytest.mark.parametrize("name", LAWS)
def test_a_law_gives_back_its_coefficients(name: str) -> None:
    sizes = [1, 2, 4, 8, 16]
    found = fit(name, sizes, [law(name, n) for n in sizes])
    assert found is not None
    assert tuple(found.coefficients.values()) == pytest.approx(TRUE[name])
    assert found.error < 1e-12
    assert found.speed_up(32) == pytest.approx(law(name, 32))


@pytest.mark.parametrize("name", LAWS)
def test_the_interval_holds_the_true_coefficient_as_often_as_it_says(name: str) -> None:
    held = total = 0
    for seed in range(200):
        draw = random.Random(seed)
        sizes = [n for n in (2, 4, 8) for _ in range(3)]
        noisy = [law(name, n) * draw.gauss(1, 0.02) for n in sizes]
        found = fit(name, [1, *sizes], [1, *noisy])
        assert found is not None
        assert found.intervals is not None
        for (low, high), value in zip(found.intervals.values(), TRUE[name], strict=True):
            held, total = held + (low <= value <= high), total + 1
    assert held / total == pytest.approx(0.95, abs=0.03)


def test_too_few_sizes_give_no_interval_and_then_no_fit() -> None:
    exact = fit("amdahl", [1, 2], [1, 1.4])
    assert exact is not None
    assert exact.speed_up(2) == pytest.approx(1.4)
    assert exact.intervals is None
    assert fit("universal", [1, 2, 2], [1, 1.4, 1.5]) is None
    assert list(fits([1, 2], [1, 1.4])) == ["amdahl", "gustafson"]
    assert fits([1], [1]) == {}
    assert best({}) is None


def test_coefficients_are_never_below_zero() -> None:
    found = fits([1, 2, 4, 8], [1, 2.1, 4.3, 8.9])  # faster than ideal
    for each in found.values():
        assert set(each.coefficients.values()) == {0.0}
        assert each.fastest() is None


def test_how_far_a_worker_pays_and_where_it_gets_slower() -> None:
    found = Fit(law="universal", coefficients={"contention": 0.05, "pairs": 0.002}, intervals=None, error=0.0)
    peak = found.fastest()
    assert peak == pytest.approx((0.95 / 0.002) ** 0.5)
    assert found.speed_up(peak) > max(found.speed_up(peak - 1), found.speed_up(peak + 1))
    pays = found.pays_up_to(0.5)
    assert found.speed_up(pays) - found.speed_up(pays - 1) >= 0.5 > found.speed_up(pays + 1) - found.speed_up(pays)
