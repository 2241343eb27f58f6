"""What a plan advises, and the reason that it gives."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_training import INSTANT, MEASURED, machines

from manyhosts.errors import ConfigError
from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import Measured, Network
from manyhosts.planner.predict import predictions, ways
from manyhosts.planner.recommend import SAME_STEPS, TOLERANCE, Recommendation, recommend


def advice(*kinds: Machines, measured: Measured = MEASURED) -> Recommendation:
    return recommend([each for kind in kinds for each in predictions(measured, kind, kind.sizes(), ways(measured))])


def link(bytes_per_second: float, latency_s: float = 0.0) -> Network:
    return Network(latency_s=latency_s, bytes_per_second=bytes_per_second)


def test_on_a_network_that_costs_nothing_all_machines_train_and_nothing_is_lost() -> None:
    found = advice(machines(8), measured=replace(MEASURED, update_s=0.0, step_other_s=0.0))
    assert (found.best.workers, found.best.strategy, found.best.compression) == (8, "ddp", "none")
    assert found.otherwise is None
    assert found.why.startswith("8 workers on 8 machines with ddp: an epoch in 2.4 s, at 100 % efficiency. ")
    assert "The limit is computing" in found.why


def test_workers_that_are_said_to_be_faster_than_so_many_are_doubted() -> None:
    found = predictions(MEASURED, machines(2), machines(2).sizes(), ways(MEASURED))
    assert "quiet machine" not in recommend(found).why
    slowed = [replace(each, efficiency=2.7 if each.workers > 1 else 1.0) for each in found]
    assert "That is more than 2 times as fast as one" in recommend(slowed).why


def test_limit_is_what_more_workers_do_not_shrink() -> None:
    assert "The limit is the optimizer's step, 14 % of a step of 0.36 s." in advice(machines(8)).why


def test_on_a_slow_network_less_is_sent_and_the_reason_is_named() -> None:
    found = advice(machines(4, network=link(400)))
    assert found.best.compression == "bf16"
    assert "exchanges that no computing hides" in found.why


def test_on_a_network_that_hardly_carries_anything_one_machine_trains_alone() -> None:
    found = advice(machines(4, network=link(100)))
    assert (found.best.workers, found.best.strategy) == (1, "single")
    assert found.otherwise is not None
    assert found.otherwise.strategy in ("local-sgd", "diloco")
    assert "step alone between exchanges" in found.why


def test_size_that_is_hardly_faster_is_not_worth_its_machines() -> None:
    # All of the time is the update, which no worker shares.
    measured = replace(MEASURED, update_s=10_000.0)
    assert advice(machines(8), measured=measured).best.workers == 1


def test_up_and_out_are_compared_and_priced() -> None:
    measured = replace(MEASURED, device="cuda")
    large = machines(1, 8, name="large", price=40.0)
    small = Machines(name="small", count=8, between=link(500), within=INSTANT, price=1.0)
    found = advice(large, small, measured=measured)
    assert found.up is not None
    assert found.out is not None
    assert (found.best.machines, found.best.nodes, found.best.workers) == ("large", 1, 8)
    assert "Scale up: 8 workers (large) with ddp is" in found.why
    assert "the best way out, whose limit is exchanges that no computing hides" in found.why
    assert "the cheapest" in found.why
    other = advice(large, replace(small, between=INSTANT, speed=2.0), measured=measured)
    assert (other.best.machines, other.best.nodes) == ("small", 8)
    assert "Scale out: 8 workers on 8 machines (small) with ddp is 2 times as fast" in other.why


def test_what_does_not_fit_is_never_advised_and_nothing_that_fits_is_said() -> None:
    measured = replace(MEASURED, device="cuda", device_memory_bytes=6000)
    found = advice(machines(8), measured=measured)
    assert found.best.fits
    with pytest.raises(ConfigError, match="fits on none of these machines: a worker needs"):
        advice(machines(8), measured=replace(measured, device_memory_bytes=10))


def test_advice_is_plain_json() -> None:
    found = advice(machines(2)).to_json()
    assert found["workers"] == 2
    assert found["why"]
    assert found["next"]["workers"] in (1, 2)


@settings(max_examples=15)
@given(
    st.floats(1, 1e6), st.floats(0, 1), st.integers(1, 9), st.integers(1, 4), st.none() | st.floats(0.01, 100)
)  # fmt: skip
def test_advice_is_within_five_percent_of_the_fastest_that_keeps_the_steps(
    bytes_per_second: float, latency_s: float, count: int, each: int, price: float | None
) -> None:
    kind = machines(count, each, network=link(bytes_per_second, latency_s), price=price)
    found = predictions(MEASURED, kind, kind.sizes(), ways(MEASURED))
    best = recommend(found).best
    fastest = min(each.epoch_seconds for each in found if each.fits and each.strategy in SAME_STEPS)
    assert best.epoch_seconds <= fastest * TOLERANCE * (1 + 1e-9)
