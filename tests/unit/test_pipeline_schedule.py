"""Where a pipeline is cut and in which order a stage computes: pure functions, against exhaustive search and theory."""

from __future__ import annotations

import random
from itertools import accumulate, chain, combinations, pairwise, product

import pytest

from manyhosts.config.stage_order import (
    Order,
    Pass,
    best_cuts,
    even_cuts,
    loads,
    order_of,
    seconds_of,
    stage_costs,
)


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_has_a_faster_slowest_stage(seed: int) -> None:
    draw = random.Random(seed)
    costs = [draw.choice([1.0, 1.0, 8.0]) * draw.random() for _ in range(draw.randint(4, 9))]
    for stages in range(1, 5):
        found = best_cuts(costs, stages)
        assert found[0] == 0
        assert found[-1] == len(costs)
        assert all(begin < end for begin, end in pairwise(found)), "every stage has a block"
        others = ([0, *inner, len(costs)] for inner in combinations(range(1, len(costs)), stages - 1))
        assert max(loads(costs, found)) == pytest.approx(min(max(loads(costs, cuts)) for cuts in others))


def test_one_block_eight_times_the_others_stands_alone() -> None:
    costs = [1.0, 1.0, 1.0, 8.0, 1.0, 1.0]
    assert max(loads(costs, best_cuts(costs, 3))) == 8.0
    assert max(loads(costs, even_cuts(6, 3))) == 9.0


SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1}
"""With how many stages each worker has."""


@pytest.mark.parametrize("virtual_stages", [None, 3])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_passes_of_a_stage_come_in_the_order_of_the_micro_batches_and_none_waits_for_ever(
    schedule: str, virtual_stages: int | None
) -> None:
    each_has = (virtual_stages if schedule == "interleaved" else None) or SCHEDULES[schedule]
    for workers, micro_batches in product((1, 2, 3, 4), (1, 2, 5, 8, 9)):
        order = order_of(schedule, workers=workers, virtual_stages=each_has, micro_batches=micro_batches)
        for stage in range(workers * each_has):
            own = order.passes[stage % workers]
            for kind in ("forward", "backward", *(["weights"] if schedule == "zero-bubble" else [])):
                numbers = [each.micro_batch for each in own if (each.kind, each.stage) == (kind, stage)]
                assert numbers == list(range(micro_batches))
        assert run_through(order, last=workers * each_has - 1) == set(chain(*order.passes))


def run_through(order: Order, *, last: int) -> set[Pass]:
    """What workers compute that each take their next pass when its inputs are there, in whatever time."""
    done: set[Pass] = set()
    waiting = [list(each) for each in order.passes]
    while ready := [own for own in waiting if own and needs(own[0], last) <= done]:
        done |= {own.pop(0) for own in ready[-1:]}
    return done


def needs(one: Pass, last: int) -> set[Pass]:
    kind, stage, number = one
    if kind == "forward":
        return {Pass("forward", stage - 1, number)} if stage else set()
    before = {Pass("forward" if kind == "backward" else "backward", stage, number)}
    return before | ({Pass("backward", stage + 1, number)} if kind == "backward" and stage < last else set())


@pytest.mark.parametrize(("schedule", "most"), [("1f1b", [4, 3, 2, 1]), ("gpipe", [9] * 4), ("zero-bubble", [4] * 4)])
def test_how_many_micro_batches_are_held_at_most(schedule: str, most: list[int]) -> None:
    last = "weights" if schedule == "zero-bubble" else "backward"
    for own, expected in zip(
        order_of(schedule, workers=4, virtual_stages=1, micro_batches=9).passes, most, strict=True
    ):
        held = list(accumulate({"forward": 1, last: -1}.get(each.kind, 0) for each in own))
        assert max(held) == expected


@pytest.mark.parametrize(("workers", "micro_batches"), [(2, 2), (2, 8), (3, 6), (4, 4), (4, 16), (6, 12)])
def test_the_bubble_is_that_of_the_papers(workers: int, micro_batches: int) -> None:
    def found(schedule: str, virtual_stages: int = 1) -> float:
        own = order_of(schedule, workers=workers, virtual_stages=virtual_stages, micro_batches=micro_batches)
        return own.bubble

    plain = (workers - 1) / (micro_batches + workers - 1)
    assert found("gpipe") == found("1f1b") == pytest.approx(plain)
    for each in (2, 3):
        assert found("interleaved", each) == pytest.approx((workers - 1) / (each * micro_batches + workers - 1))
    assert found("zero-bubble") == pytest.approx((workers - 1) / (3 * micro_batches + workers - 1))


def test_with_one_micro_batch_stages_work_one_after_another() -> None:
    assert order_of("1f1b", workers=4, virtual_stages=1, micro_batches=1).bubble == 0.75


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_seconds_of_a_step_follow_from_its_passes(schedule: str) -> None:
    """Equal stages wait as the bubble says, also where the first one makes its backward passes in one."""
    for workers, micro_batches in product((2, 3, 4), (4, 8)):
        each_has = SCHEDULES[schedule]
        order = order_of(schedule, workers=workers, virtual_stages=each_has, micro_batches=micro_batches)
        stages = workers * each_has
        seconds = seconds_of(order, stage_costs(order, [1.0] * stages, [2.0] * stages))
        assert 1 - 3 * each_has * micro_batches / seconds == pytest.approx(order.bubble)
    order = order_of("1f1b", workers=2, virtual_stages=1, micro_batches=4)
    assert seconds_of(order, stage_costs(order, [1.0, 8.0], [2.0, 16.0])) == 3 + 4 * 24  # the slow one never waits
    # Two messages are waited for: to the slow stage, and back behind its last pass.
    assert seconds_of(order, stage_costs(order, [1.0, 8.0], [2.0, 16.0]), message=0.5) == 3 + 4 * 24 + 2 * 0.5
