"""All predictions: epochs, evaluations, what fits, and what it costs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from measured_training import MEASURED, group, machines

from manyhosts.config.local_steps import LocalSGD
from manyhosts.config.strategies import DDP, Single
from manyhosts.planner.measured import Network, Tried
from manyhosts.planner.predict import epoch_seconds, predictions, validation_seconds, ways
from manyhosts.planner.strategies.strategy import STRATEGIES

ALONE = STRATEGIES.load("single")(Single())
DATA_PARALLEL = STRATEGIES.load("ddp")(DDP())


def test_epoch_is_its_steps_the_short_one_too_and_its_validations() -> None:
    whole = epoch_seconds(MEASURED, group(1), ALONE)
    assert whole == pytest.approx(8 * (2.4 + 0.06))
    assert epoch_seconds(replace(MEASURED, samples=67), group(1), ALONE) == pytest.approx(whole + 0.9 + 0.06)
    looked_at = replace(MEASURED, validation_samples=160, validation_s_per_sample=0.1, epoch_other_s=1.0)
    assert epoch_seconds(looked_at, group(1), ALONE) == pytest.approx(whole + 16 + 1)
    often = replace(looked_at, validate_every_steps=4)
    assert epoch_seconds(often, group(1), ALONE) == pytest.approx(whole + 2 * 16 + 1)


def test_batch_that_grows_makes_fewer_steps_as_long_as_before() -> None:
    grows = replace(MEASURED, batch_grows=True)
    assert epoch_seconds(grows, group(4), DATA_PARALLEL) == pytest.approx(epoch_seconds(grows, group(1), ALONE) / 4)


def test_evaluation_lasts_as_long_as_the_worker_with_most_parts_of_it_needs() -> None:
    measured = replace(MEASURED, validation_samples=160, validation_parts=20, validation_s_per_sample=0.1)
    assert validation_seconds(measured, group(3)) == pytest.approx(16 * 7 / 20)
    assert validation_seconds(MEASURED, group(3)) == 0


def test_every_strategy_and_compression_is_predicted_and_one_worker_has_one_way() -> None:
    found = predictions(MEASURED, machines(4), [(1, 1), (2, 1)], ways(MEASURED))
    assert [(each.workers, each.strategy, each.compression) for each in found] == [
        (1, "single", "none"), (2, "ddp", "none"), (2, "ddp", "bf16"), (2, "local-sgd", "none"), (2, "diloco", "none"),
    ]  # fmt: skip
    assert {
        "workers", "nodes", "strategy", "compression", "step_seconds", "epoch_seconds", "efficiency",
        "communication_exposed", "memory_bytes", "price", "fits",
    } <= found[0].to_json().keys()  # fmt: skip


def test_each_number_of_machines_is_predicted_on_the_network_that_it_was_seen_to_have() -> None:
    by_size = {
        nodes: Tried(nodes=nodes, workers_per_node=1, network=Network(latency_s=0.0, bytes_per_second=speed))
        for nodes, speed in ((2, 1000.0), (8, 125.0))
    }
    measured = replace(MEASURED, tried=tuple(by_size.values()))
    sizes = [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1)]
    known = replace(machines(8), as_measured=True)
    plain = ways(MEASURED)[:1]
    for each in predictions(measured, known, sizes, plain)[1:]:
        network = by_size[2 if each.workers < 4 else 8].network
        [alone] = predictions(MEASURED, machines(8, network=network), [(each.nodes, 1)], plain)
        assert each.step == alone.step
    in_catalog = predictions(measured, machines(8), sizes, plain)
    assert [each.step for each in in_catalog] == [
        each.step for each in predictions(MEASURED, machines(8), sizes, plain)
    ]


def test_virtual_workers_have_one_way_and_no_more_workers_than_parts() -> None:
    measured = replace(MEASURED, virtual_workers=2)
    found = predictions(measured, machines(4), [(1, 1), (2, 1), (3, 1)], ways(measured))
    assert [(each.strategy, each.fits) for each in found] == [("virtual-workers", True)] * 2 + [
        ("virtual-workers", False)
    ]
    assert "3 workers share 2 virtual ones" in found[-1].why_not


def test_settings_of_the_script_take_the_place_of_defaults() -> None:
    rare = ways(MEASURED, LocalSGD(sync_every=1000))[2]
    slow = group(2, bytes_per_second=10)
    assert rare.model.step(MEASURED, slow).seconds < ways(MEASURED)[2].model.step(MEASURED, slow).seconds


def test_efficiency_is_the_speed_over_that_of_as_many_alone_and_price_counts_machines() -> None:
    kind = machines(4, price=3.6, network=Network(latency_s=0, bytes_per_second=1000))
    one, four = predictions(MEASURED, kind, [(1, 1), (4, 1)], ways(MEASURED)[:1])
    assert one.efficiency == pytest.approx(1)
    assert four.efficiency == pytest.approx(one.epoch_seconds / four.epoch_seconds / 4)
    assert four.price == pytest.approx(4 * 3.6 * four.epoch_seconds / 3600)


@pytest.mark.parametrize(
    ("change", "device", "says"),
    [
        ({"device_memory_bytes": 7000}, "cuda", "a worker needs 8.0 kB, and there are 7.0 kB"),
        ({"device_memory_bytes": 9000}, "cuda", ""),
        ({"device_memory_bytes": 9000}, "cpu", "2 workers of a machine need 19.0 kB, and there are 9.0 kB"),
        ({"global_batch": 1}, "cuda", "2 workers share a batch of 1 samples"),
        ({}, "cpu", ""),
    ],
)
def test_what_does_not_fit_says_why(change: dict[str, int], device: str, says: str) -> None:
    measured = replace(MEASURED, device=device, **change)  # type: ignore[arg-type]
    [found] = predictions(measured, machines(1, 2), [(1, 2)], ways(measured)[:1])
    assert (found.why_not, found.fits) == (says, not says)


@given(st.integers(1, 100), st.integers(1, 12))
def test_sizes_of_a_catalog_are_distinct_and_end_with_all(count: int, workers: int) -> None:
    found = machines(count, workers).sizes()
    assert len(found) == len(set(found))
    assert (1, 1) in found
    assert (count, workers) in found
    assert all(nodes <= count and each <= workers for nodes, each in found)
