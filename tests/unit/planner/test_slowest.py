"""How late the slowest of several workers is expected."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from manyhosts.planner.slowest import expected_largest


def test_largest_of_few_draws_is_what_the_integral_gives_exactly() -> None:
    assert expected_largest(1) == 0
    assert expected_largest(2) == pytest.approx(1 / math.sqrt(math.pi), abs=2e-3)
    assert expected_largest(3) == pytest.approx(3 / (2 * math.sqrt(math.pi)), abs=2e-3)


def test_largest_of_many_draws_is_that_of_drawing_them() -> None:
    source = random.Random(1)
    drawn = [max(source.gauss(0, 1) for _ in range(16)) for _ in range(4000)]
    assert expected_largest(16) == pytest.approx(statistics.fmean(drawn), abs=0.04)
