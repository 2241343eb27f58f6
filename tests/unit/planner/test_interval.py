"""The interval of a prediction: wider for each thing that was uncertain, and as wide as past plans have needed."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from measured_training import MEASURED, machines

from manyhosts.config.strategies import DDP
from manyhosts.planner.interval import interval, past, score, width_of
from manyhosts.planner.measured import Measured, Network
from manyhosts.planner.predict import Prediction, predictions, ways

SLOW = Network(latency_s=1e-3, bytes_per_second=2000.0)


def predicted(measured: Measured = MEASURED, network: Network = SLOW, compression: str = "none") -> Prediction:
    """Of 4 machines; MEASURED has passes that do not spread."""
    steady = replace(measured, compute=tuple(replace(each, spread_s=0.0) for each in measured.compute))
    asked = [way for way in ways(steady, DDP()) if way.strategy == "ddp" and way.compression == compression]
    [found] = predictions(steady, machines(4, network=network), [(4, 1)], asked)
    return found


def test_step_is_inside_its_range_and_the_range_is_told() -> None:
    each = predicted()
    low, high = each.step_range
    assert low < each.step.seconds < high
    assert math.log(high / each.step.seconds) == pytest.approx(past().width * each.deviation)
    assert each.to_json()["step_seconds_range"] == [low, high]


def test_messages_that_differ_widen_it_and_only_where_they_are_waited_for() -> None:
    uneven = replace(SLOW, spread=0.3)
    assert predicted(network=uneven).deviation > 1.5 * predicted().deviation
    fast = Network(latency_s=1e-9, bytes_per_second=1e15)
    assert predicted(network=replace(fast, spread=0.3)).deviation == pytest.approx(predicted(network=fast).deviation)


def test_passes_that_differ_widen_it() -> None:
    uneven = [replace(each, spread_s=0.3 * each.forward_s) for each in MEASURED.compute]
    asked = ways(MEASURED, DDP())[:1]
    [found] = predictions(replace(MEASURED, compute=tuple(uneven)), machines(4), [(4, 1)], asked)
    assert found.deviation > predicted(network=machines(4).between).deviation


def test_a_compression_whose_arithmetic_differs_widens_its_own_alone() -> None:
    packs = replace(MEASURED.compression["bf16"], arithmetic_s=3.0)
    uneven = replace(MEASURED, compression={"bf16": replace(packs, spread=0.5)})
    steady = replace(MEASURED, compression={"bf16": packs})
    assert predicted(uneven, compression="bf16").deviation > predicted(steady, compression="bf16").deviation
    assert predicted(uneven).deviation == predicted(steady).deviation


def test_workers_that_take_unlike_from_each_other_widen_it_on_one_machine() -> None:
    uneven = replace(MEASURED, contention_spread=0.4)
    [alone, two] = predictions(uneven, machines(1, 2), [(1, 1), (1, 2)], ways(uneven, DDP())[:1])
    [_, steady] = predictions(MEASURED, machines(1, 2), [(1, 1), (1, 2)], ways(MEASURED, DDP())[:1])
    assert two.deviation > 1.5 * steady.deviation
    assert alone.deviation < two.deviation


def test_width_holds_nine_of_ten_of_what_it_was_not_made_from() -> None:
    """Whatever errors are distributed like; here with a long tail."""
    draw = random.Random(5)
    scores = [abs(draw.gauss(0, 1)) ** 3 for _ in range(4000)]
    width = width_of(scores[:2000])
    assert 0.88 < sum(each <= width for each in scores[2000:]) / 2000 < 0.92
    assert width_of([float(each) for each in range(1, 20)]) == 18.0
    assert width_of([1.0, 3.0, 2.0]) == 3.0, "of so few, the largest"


def test_score_is_in_multiples_of_what_was_uncertain() -> None:
    each = predicted()
    low, high = interval(each.step.seconds, each.deviation)
    assert score(high, each.step.seconds, each.deviation) == pytest.approx(past().width)
    assert score(low, each.step.seconds, each.deviation) == pytest.approx(past().width)
    assert score(2.0, 2.0, each.deviation) == 0.0
