"""Where a pipeline is cut and in which order a stage computes: pure functions, against exhaustive search and theory."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest

from manyhosts.strategies.pipeline.schedule import best_cuts, bubble, even_cuts, loads, passes


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


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_backward_passes_come_in_order_behind_their_forward_pass(kind: str, stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        order = list(passes(kind, stage=stage, stages=stages, micro_batches=micro_batches))
        for what in ("forward", "backward"):
            assert [number for each, number in order if each == what] == list(range(micro_batches))
        assert all(order.index(("forward", each)) < order.index(("backward", each)) for each in range(micro_batches))


def test_1f1b_holds_no_more_micro_batches_than_stages_behind_it() -> None:
    for stage in range(4):
        held = most = 0
        for what, _ in passes("1f1b", stage=stage, stages=4, micro_batches=9):
            held += 1 if what == "forward" else -1
            most = max(most, held)
        assert most == 4 - stage


def test_bubble() -> None:
    assert bubble(4, 1) == 0.75
    assert bubble(2, 3) == 0.25
