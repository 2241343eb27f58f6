"""Where the time of a run went, and what was lost to which cause."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from studies import Story

from manyhosts.study.times import CAUSES, Spent, Thinned, pooled, shares_lost, spent


def whole_run() -> Story:
    run = Story()
    run.start()
    run.step(5.0, data=1.0)  # the first step: all of it is the start
    run.step(1.0, exposed=0.5, data=0.25)
    run.wait(0.125)
    run.step(1.0, exposed=0.5, stall=0.25)
    run.add("epoch", epoch=0)
    run.validate(2.0, 0.5, best=True)
    run.wait(0.75)  # the best model is written
    run.step(1.0, epoch=1)
    run.wait(0.5)  # a snapshot, whose line comes when it is whole
    run.step(1.0, epoch=1)
    run.lines.append({"event": "snapshot", "step": 4, "time": run.now, "stall_seconds": 0.4})
    run.add("epoch", epoch=1)
    run.validate(2.0, 0.7)
    run.add("end")
    run.wait(9.0)
    run.add("test", seconds=9.0)
    return run


def test_every_second_has_its_cause() -> None:
    run = whole_run()
    found = run.spent()
    assert found.seconds == pytest.approx(
        {
            "compute": 4.0, "communication_exposed": 1.0, "data_wait": 0.25, "straggler": 0.0, "evaluation": 4.0,
            "snapshot": 0.25 + 0.75 + 0.5, "start_up": 6.0, "other": 0.125,
        }
    )  # fmt: skip
    assert found.total == pytest.approx(run.now - 9.0 - 1000.0)
    assert (found.samples, found.steps) == (40, 5)
    assert found.epoch_seconds == pytest.approx((6 + 1.75 + 0.125 + 1.75 + 2.75, 2.5 + 2.0))


def run_of(*times: tuple[float, float, float, float], steps: int = 4) -> dict[str, float]:
    """The seconds of a run whose workers take these times for each step; rank 0's are the first."""
    run = Story()
    run.start()
    run.step(0.5)
    for _ in range(steps):
        compute, exposed, data, stall = times[0]
        run.step(compute, exposed, data, stall)
    run.workers(*times, steps=steps)
    run.step(*times[0])  # nobody has told of this one
    run.add("end")
    return dict(run.spent().seconds)


def lasting(**parts: float) -> dict[str, float]:
    return {**dict.fromkeys(CAUSES, 0.0), "start_up": 0.5, **parts}


def test_what_one_worker_takes_more_than_the_others_is_the_stragglers() -> None:
    found = run_of((1.0, 3.5, 0.0, 0.0), (4.0, 0.5, 0.0, 0.0))
    own = {"compute": 1.0, "communication_exposed": 3.5}  # of the step that nobody has told of
    assert found == pytest.approx(
        lasting(compute=4 * 1.0 + own["compute"], communication_exposed=4 * 0.5 + own["communication_exposed"],
                straggler=4 * 3.0)
    )  # fmt: skip


def test_the_same_is_found_where_the_slow_worker_keeps_the_record() -> None:
    found = run_of((4.0, 0.5, 0.0, 0.0), (1.0, 3.5, 0.0, 0.0))
    assert found["straggler"] == pytest.approx(12.0)
    assert found["communication_exposed"] == pytest.approx(4 * 0.5 + 0.5)


def test_data_that_one_worker_waits_for_holds_the_others_up_and_what_all_wait_for_is_data() -> None:
    assert run_of((1.0, 2.0, 0.0, 0.0), (1.0, 2.0, 0.0, 0.0), (1.0, 0.0, 2.0, 0.0))["straggler"] == pytest.approx(8.0)
    found = run_of((1.0, 0.0, 2.0, 0.0), (1.0, 0.0, 2.0, 0.0))
    assert (found["straggler"], found["data_wait"]) == pytest.approx((0.0, 5 * 2.0))


def test_snapshot_that_the_leader_alone_stands_still_for_is_a_snapshots_cost() -> None:
    found = run_of((1.0, 0.0, 0.0, 2.0), (1.0, 2.0, 0.0, 0.0))
    assert found == pytest.approx(lasting(compute=5.0, snapshot=5 * 2.0))


def test_lines_of_all_workers_take_nothing_from_the_whole_time() -> None:
    times = [(1.0, 1.0, 0.5, 0.0), (0.5, 1.5, 0.0, 0.5), (0.25, 0.25, 2.0, 0.0)]
    assert sum(run_of(*times).values()) == pytest.approx(0.5 + 5 * 2.5)


def slowest_of(*windows: list[float]) -> tuple[str, float] | None:
    """Of a run whose workers compute for so long in each step of each window of four."""
    run = Story()
    run.start()
    run.step(0.5)
    for window in windows:
        times = [(compute, max(window) - compute, 0.0, 0.0) for compute in window]
        for _ in range(4):
            run.step(*times[0])
        run.workers(*times, steps=4)
    run.add("end")
    return run.spent().slowest


def test_one_worker_that_is_slow_is_told_from_pauses_of_all_in_turn() -> None:
    assert slowest_of([1.0, 1.0, 3.0], [1.0, 1.0, 3.0], [1.0, 1.0, 3.0]) == ("worker 2", pytest.approx(1.0))
    found = slowest_of([3.0, 1.0, 1.0], [1.0, 3.0, 1.0], [1.0, 1.0, 3.0])
    assert found is not None
    assert found[1] == pytest.approx(0.0), "each has waited for each"
    assert slowest_of([1.0, 1.0]) is None, "nobody was waited for"


def test_the_time_to_a_loss_is_that_of_the_validation() -> None:
    found = whole_run().spent()
    assert found.lowest_loss() == 0.5
    assert found.seconds_to(0.6) == pytest.approx(6 + 1.75 + 0.125 + 1.75 + 2.0)
    assert found.seconds_to(0.7) == found.seconds_to(0.6)
    assert found.seconds_to(0.4) is None


@pytest.mark.parametrize("has_end", [True, False])
def test_the_time_between_an_end_and_going_on_is_nobodys(has_end: bool) -> None:
    run = Story()
    run.start()
    for _ in range(3):
        run.step(1.0)
    if has_end:
        run.add("end")
    run.wait(500.0)
    run.start()
    run.step(2.0)
    run.step(1.0)
    run.add("end")
    found = run.spent()
    assert found.total == pytest.approx(6.0)
    assert found.seconds["start_up"] == pytest.approx(3.0)
    assert found.steps == 5


def test_a_run_without_a_line_has_spent_nothing() -> None:
    assert spent(()).total == 0


def a_run(*seconds: float, samples: int = 100) -> Spent:
    return Spent(seconds=dict(zip(CAUSES, seconds, strict=True)), samples=samples, steps=10)


def cases() -> Iterator[tuple[Spent, Spent, float]]:
    base = a_run(10.0, 0.0, 1.0, 0.0, 2.0, 0.5, 0.3, 0.1)
    slow = a_run(6.0, 3.0, 0.4, 0.7, 2.0, 0.6, 0.3, 0.2, samples=130)
    fast = a_run(1.0, 0.1, 0.1, 0.0, 0.2, 0.1, 0.1, 0.0)  # faster than ideal
    yield from itertools.product([slow, fast, base], [base], [1.0, 2.0, 7.5])


@pytest.mark.parametrize(("run", "base", "times"), list(cases()))
def test_causes_add_up_to_what_is_lost(run: Spent, base: Spent, times: float) -> None:
    speed_up = (base.total / base.samples) / (run.total / run.samples)
    shares = shares_lost(run, base, times=times)
    assert set(shares) == set(CAUSES)
    assert sum(shares.values()) == pytest.approx(1 - speed_up / times, abs=1e-12)


def test_each_cause_is_charged_with_its_own() -> None:
    base = a_run(8.0, 0.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0)
    shares = shares_lost(a_run(4.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0), base, times=2)
    # ideal is 4 + 1 s: the evaluation is not shared out and costs one second too much, as the exchanges do
    assert shares == pytest.approx({**dict.fromkeys(CAUSES, 0.0), "communication_exposed": 1 / 7, "evaluation": 1 / 7})


def test_several_runs_count_as_one() -> None:
    both = pooled([a_run(*range(8)), a_run(*range(8), samples=50)])
    assert both.total == 2 * sum(range(8))
    assert both.samples == 150


@pytest.mark.parametrize("steps", [0, 1, 7, 255, 256, 257, 5000])
def test_a_long_curve_becomes_a_short_one_with_the_same_mean(steps: int) -> None:
    curve = Thinned()
    for step in range(1, steps + 1):
        curve.add(step / 10, step, float(step))
    found = curve.points()
    assert len(found) <= Thinned.MOST
    assert [step for _, step, _ in found] == sorted({step for _, step, _ in found})
    if found:
        ends = [0, *(step for _, step, _ in found)]
        assert found[-1][:2] == (steps / 10, steps)
        assert [loss for _, _, loss in found] == [(a + 1 + b) / 2 for a, b in itertools.pairwise(ends)]
