"""Steps of the loop that are timed with everything in them."""

from __future__ import annotations

from typing import Any, cast

import pytest

from manyhosts.measure.in_worker import several_workers
from manyhosts.measure.in_worker.several_workers import FullSteps


class Leader:
    """A world in which what the leader has is what all have."""

    def agree(self, value: float) -> float:
        return value


@pytest.mark.parametrize(("step_s", "timed"), [(0.25, 10), (0.01, 25), (30.0, 3)])
def test_as_many_steps_are_timed_as_there_is_time_for_and_the_first_ones_do_not_count(
    step_s: float, timed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step takes a thousand seconds: the loop looks at it."""
    clock = iter(1000 + number * step_s for number in range(100))
    monkeypatch.setattr(several_workers.time, "perf_counter", lambda: next(clock))
    steps = FullSteps(cast(Any, Leader()))
    count = 1
    while not steps.are_over():
        count += 1
    assert count == 6 + timed
    assert steps.seconds == pytest.approx(step_s)
