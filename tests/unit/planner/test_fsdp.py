"""What a worker of `fsdp` holds and waits for, by arithmetic that can be done on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest
from measured_training import MEASURED, group, machines

from manyhosts.config.fully_sharded import FSDP
from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.config.strategies import DDP
from manyhosts.errors import ConfigError
from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import InParts, Network
from manyhosts.planner.predict import predictions, ways
from manyhosts.planner.recommend import recommend
from manyhosts.planner.strategies.strategy import STRATEGIES, StrategyModel

CUT = replace(MEASURED, unit_bytes=(300, 300, 300, 100), compression={})
"""Three blocks, and a rest of 100 bytes: P = G = 1000, O = 2000."""


def model(**options: object) -> StrategyModel:
    return STRATEGIES.load("fsdp")(FSDP(**options))  # type: ignore[arg-type]


def test_worker_holds_its_parts_and_what_is_whole_for_a_while() -> None:
    held = model(zero=3).memory(replace(CUT, device="cuda", tail_bytes=40), group(4))
    assert (held.parameters, held.gradients, held.optimizer, held.buffers) == (250, 250, 500, 16)
    # Before the second block: two thirds of 2000, the tail's gradients, and of the last block its summed part and what
    # was sent; the rest and two blocks gathered. Before the last one there is more of activations.
    assert held.total == 250 + 500 + 16 + max(2000 + 40 + 700, round(2000 * 2 / 3) + 40 + 75 + 300 + 700)


def test_copies_hold_more_and_parameters_in_bf16_less() -> None:
    whole, gathered = model().memory(CUT, group(4)), model(gather="bf16").memory(CUT, group(4))
    assert whole.total - gathered.total == (100 + 300 + 300) / 2
    assert model(shard=2).memory(CUT, group(4)).optimizer == 1000


def test_on_an_instant_network_a_step_takes_what_it_takes_with_ddp() -> None:
    """But for the update: each worker steps its part alone."""
    alike = STRATEGIES.load("ddp")(DDP()).step(CUT, group(4))
    for zero in (1, 2, 3):
        step = model(zero=zero).step(CUT, group(4))
        assert step.update == pytest.approx(alike.update / 4)
        assert step.seconds - step.update == pytest.approx(alike.seconds - alike.update)


def test_what_parts_cost_beside_the_wire_is_counted_as_it_was_measured() -> None:
    """Copies into places are in there; each micro-batch costs it again, and zero=3 gathers once more."""
    instant = replace(CUT.compute[0], forward_s=0.0, backward_s=0.0)
    known = replace(
        CUT, compute=(instant,), copy_s_per_byte=0.001, in_parts=InParts(passes_s=5, regather_s=2, update_s=1)
    )
    unknown = replace(known, in_parts=None)
    for zero, more in ((1, 5), (3, 7)):
        with_parts, without = (model(zero=zero).step(each, group(2)) for each in (known, unknown))
        assert with_parts.compute - without.compute == pytest.approx(more)
        assert with_parts.update - without.update == pytest.approx(1)
        times = {1: 1.0 + 2.0, 3: 1.9 + 2.0}[zero]  # placing, and rows of gradients
        assert without.communication_exposed - with_parts.communication_exposed == pytest.approx(times)
    crowded = model(zero=1).step(replace(known, contention={2: 1.5}), group(1, 2))
    assert crowded.compute - model(zero=1).step(replace(unknown, contention={2: 1.5}), group(1, 2)).compute == 7.5
    twice = replace(known, micro_batch=known.global_batch // 4)
    assert model(zero=1).step(twice, group(2)).compute - model(zero=1).step(
        replace(twice, in_parts=None), group(2)
    ).compute == pytest.approx(2 * 5)


def test_what_is_exchanged_beside_passes_needs_the_cores_too() -> None:
    """Four workers of a machine with one core: sending a byte keeps one busy for a thousandth of a second."""
    instant = replace(CUT.compute[0], forward_s=0.0, backward_s=0.0)
    measured = replace(CUT, compute=(instant,), cores=1, threads=1)
    network = Network(latency_s=0.0, bytes_per_second=1e12, processor_s_per_byte=0.001)
    machine = Machines(name="", count=1, workers=4, between=network, within=network)
    found = model(zero=2).step(measured, machine.group(1, 4)).communication_exposed
    assert found == pytest.approx(4 * 0.001 * (750 + 750), rel=1e-3)  # what is gathered, and the rows of sums


def test_what_no_pass_hides_is_waited_for() -> None:
    """On a wire of 1000 B/s between 2 workers: a block is gathered in 0.15 s, and a pass over it takes less."""
    slow = group(2, bytes_per_second=1000)
    measured = replace(CUT, device="cuda", compute=(replace(CUT.compute[0], forward_s=0.0, backward_s=0.0),))
    exposed = {zero: model(zero=zero).step(measured, slow).communication_exposed for zero in (1, 2, 3)}
    gather = summed = 1000 / 2 / 1000
    assert exposed[1] == exposed[2] == pytest.approx(gather + summed)
    assert exposed[3] == pytest.approx(gather + 0.9 * gather + summed)  # the rest stays whole between both passes


def test_sums_in_bf16_send_half() -> None:
    slow = group(4, bytes_per_second=1000)
    measured = replace(CUT, device="cuda", compute=(replace(CUT.compute[0], forward_s=0.0, backward_s=0.0),))
    for shard, half_s in ((None, 0.75 / 2), (2, 0.5 / 2 + 0.5 / 2)):  # of two copies, the sum over them, too
        exact, rounded = (
            model(zero=1, shard=shard, reduce=reduce).step(measured, slow).communication_exposed
            for reduce in ("exact", "bf16")
        )
        assert exact - rounded == pytest.approx(half_s)


def test_what_is_copied_is_waited_for_however_fast_the_wire_is() -> None:
    """A thousandth of a second for a byte: gathering copies it twice, and a sum twice between CPUs."""
    instant = replace(CUT.compute[0], forward_s=0.0, backward_s=0.0)
    measured = replace(CUT, compute=(instant,), copy_s_per_byte=0.001)
    exposed = {zero: model(zero=zero).step(measured, group(2)).communication_exposed for zero in (2, 3)}
    assert exposed == {2: pytest.approx(2.0 + 2.0), 3: pytest.approx(2.0 + 1.8 + 2.0)}
    crowded = model(zero=2).step(replace(measured, contention={2: 1.5}), group(1, 2)).communication_exposed
    assert crowded == pytest.approx(1.5 * 4.0)
    on_gpu = model(zero=2).step(replace(measured, device="cuda"), group(2)).communication_exposed
    assert on_gpu == pytest.approx(1.0), "where it is put in its place"


def test_long_passes_hide_all_but_the_first_and_the_last() -> None:
    slow = group(2, bytes_per_second=1000)
    measured = replace(CUT, device="cuda", compute=(replace(CUT.compute[0], forward_s=100.0, backward_s=100.0),))
    exposed = model(zero=2).step(measured, slow).communication_exposed
    assert exposed == pytest.approx(0.05 + 0.05 + 0.15)  # gathering the rest; the sums of it and of the last block
    again = model(zero=3).step(measured, slow).communication_exposed
    assert again == pytest.approx(exposed + 0.15)  # the block that the backward pass begins with


def test_no_more_than_one_unit_is_gathered_ahead() -> None:
    """A unit of 10 bytes hides little of the next one, however long the one before it takes."""
    measured = replace(CUT, device="cuda", unit_bytes=(600, 10, 390, 0), compute=CUT.compute[:1], global_batch=2)
    passes = replace(measured.compute[0], forward_s=1.0, backward_s=0.0)
    exposed = (
        model(zero=2).step(replace(measured, compute=(passes,)), group(2, bytes_per_second=1000)).communication_exposed
    )
    assert exposed == pytest.approx(0.3 + (0.195 - 0.01) + 0.5)  # the first block; the last one; all sums


def test_micro_batches_gather_again_with_zero_3_alone() -> None:
    slow = group(2, bytes_per_second=1000)
    once = replace(CUT, device="cuda", compute=(replace(CUT.compute[0], forward_s=0.0, backward_s=0.0),))
    twice = replace(once, micro_batch=2)
    exposed = {zero: model(zero=zero).step(twice, slow).communication_exposed for zero in (1, 2, 3)}
    assert exposed[1] == pytest.approx(0.5 + 0.5)
    assert exposed[2] == pytest.approx(0.5 + 2 * 0.5)
    assert exposed[3] == pytest.approx(2 * (0.5 + 0.45 + 0.5))


def test_plan_has_fsdp_where_the_model_can_be_cut_and_advises_it_where_nothing_else_fits() -> None:
    assert not [way for way in ways(MEASURED) if way.strategy == "fsdp"]
    found = predictions(CUT, machines(4), [(1, 1), (4, 1)], ways(CUT))
    assert [each.setting for each in found if each.strategy == "fsdp"] == ["zero=1", "zero=2", "zero=3"]
    assert recommend(found).best.strategy != "fsdp"
    small = replace(CUT, device="cuda", device_memory_bytes=5_000)
    found = predictions(small, machines(4), [(1, 1), (4, 1)], ways(small))
    assert not [each for each in found if each.strategy in ("single", "ddp") and each.fits]
    assert recommend(found).best.strategy == "fsdp"
    assert "4 workers on 4 machines with fsdp (zero=" in recommend(found).why


def test_copies_of_hosts_are_those_of_so_many_workers() -> None:
    by_host, counted = model(shard="host"), model(shard=2)
    for nodes in (1, 3):
        assert by_host.step(CUT, group(nodes, 2)) == counted.step(CUT, group(nodes, 2))
        assert by_host.memory(CUT, group(nodes, 2)) == counted.memory(CUT, group(nodes, 2))
    found = predictions(CUT, machines(3, 2), [(3, 2)], ways(CUT, FSDP(shard="host")))
    assert all(each.fits for each in found if each.strategy == "fsdp")


def test_copies_that_the_workers_cannot_be_shared_out_to_are_told() -> None:
    found = predictions(CUT, machines(3), [(3, 1)], ways(CUT, FSDP(shard=2)))
    reported = {each.why_not for each in found if each.strategy == "fsdp"}
    assert reported == {"3 workers cannot share copies of the model among 2 each"}
    found = predictions(CUT, machines(3, 2), [(3, 2)], ways(CUT, FSDP(shard=3)))
    reported = {each.why_not for each in found if each.strategy == "fsdp"}
    assert reported == {"copies among 3 workers end within hosts of 2: that is not planned"}


def test_model_without_units_is_refused() -> None:
    with pytest.raises(ConfigError, match="not found to train in parts"):
        model().memory(MEASURED, group(2))
    with pytest.raises(ConfigError, match="the units hold 7"):
        replace(MEASURED, unit_bytes=(7,))


def test_copies_that_step_alone_sum_no_gradients_and_meet_part_by_part() -> None:
    slow = group(4, bytes_per_second=1000)
    measured = replace(CUT, device="cuda", compute=(replace(CUT.compute[0], forward_s=0.0, backward_s=0.0),))
    together = model(shard=2).step(measured, slow).communication_exposed  # half a second of it for the other copy
    outer = DiLoCo(shard=2, sync_every=8, fragments=1, overlap_steps=0, outer_compression="none")
    for config, meeting_s in ((outer, 0.5), (LocalSGD(shard=2, sync_every=8), 0.516)):
        alone = STRATEGIES.load(config.name)(config)
        assert alone.step(measured, slow).communication_exposed == pytest.approx(together - 0.5 + meeting_s / 8)
    held = STRATEGIES.load(outer.name)(outer).memory(CUT, slow)
    assert held.total == model(shard=2).memory(CUT, slow).total + 5 * 500
    found = predictions(CUT, machines(3), [(3, 1)], ways(CUT, outer))
    [reported] = [each.why_not for each in found if each.strategy == "fsdp+diloco"]
    assert reported == "3 workers cannot share copies of the model among 2 each"
