"""The model of a step: worked out by hand, and what must hold whatever was measured."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_training import MEASURED, group

from manyhosts.communication import buckets, comm_queue, tree_sum
from manyhosts.communication.compression import feedback
from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.config.strategies import DDP
from manyhosts.errors import ConfigError
from manyhosts.planner import compute
from manyhosts.planner.measured import Bucket, Compression, Compute, Measured, Network, Tried
from manyhosts.planner.predict import ways
from manyhosts.planner.slowest import expected_largest
from manyhosts.planner.step import Step, timeline
from manyhosts.planner.strategies import ddp, local_sgd, virtual
from manyhosts.planner.strategies.ddp import DataParallelModel
from manyhosts.planner.strategies.diloco import DiLoCoModel, taken_from_passes
from manyhosts.planner.strategies.strategy import STRATEGIES
from manyhosts.strategies import local_updates

VIRTUAL = replace(MEASURED, virtual_workers=4)


def step_of(
    strategy: str, config: object, measured: Measured = MEASURED, *, workers: int = 2, **network: float
) -> Step:
    return STRATEGIES.load(strategy)(config).step(measured, group(workers, **network))


def test_step_of_two_workers_is_what_is_worked_out_by_hand() -> None:
    step = step_of("ddp", DDP(), bytes_per_second=1000)
    # 4 samples each: forward until 0.4 s, backward until 1.2 s. The first bucket is ready at 0.6 s, and two workers
    # each pass on half of its 400 bytes twice: until 1.0 s. The second is ready at 1.2 s and takes 0.6 s.
    assert step.compute == pytest.approx(1.2)
    assert step.communication_exposed == pytest.approx(0.6)
    assert step.seconds == pytest.approx(1.2 + 0.6 + 0.05 + 0.01)


def test_buckets_wait_for_the_one_before() -> None:
    slow = step_of("ddp", DDP(), bytes_per_second=250)
    # 1.6 s from 0.6 s on, then 2.4 s: until 4.6 s, 3.4 s after the dataset_forward.
    assert slow.communication_exposed == pytest.approx(3.4)


def test_latency_is_paid_for_every_message_of_a_ring() -> None:
    step = step_of("ddp", DDP(), workers=4, latency_s=0.1)
    # 2 samples each: 0.2 + 0.4 s. Buckets of 6 messages: 0.6 s each, ready at 0.3 s and 0.6 s; the last ends at 1.5 s.
    assert step.communication_exposed == pytest.approx(0.9)


def test_micro_batches_leave_only_the_last_backward_pass_to_hide_behind() -> None:
    cut = replace(MEASURED, micro_batch=2)
    step = step_of("ddp", DDP(), cut, bytes_per_second=1000)
    # As many samples, but the last backward pass runs from 0.8 to 1.2 s: buckets are ready at 0.9 s and 1.2 s.
    assert step.compute == pytest.approx(1.2)
    assert step.communication_exposed == pytest.approx(1.3 + 0.6 - 1.2)


def test_compression_computes_while_it_sends_and_takes_cores_where_none_are_free() -> None:
    way = Compression(arithmetic_s=1.0, reduced_bytes=500, gathered_bytes=0, exchanges=2)
    free = replace(MEASURED, compression={"bf16": way})
    step = step_of("ddp", DDP(compression="bf16"), free, bytes_per_second=1000)
    # First bucket: packed from 0.6 to 0.8 s, 200 bytes until 1.0 s, unpacked at 1.2 s. Second: packed from 1.2 to
    # 1.5 s in the other queue, sent until 1.8 s, unpacked at 2.1 s, 0.9 s after the passes. A last word is 64 bytes.
    assert step.communication_exposed == pytest.approx(0.9 + 0.064)
    taken = step_of("ddp", DDP(compression="bf16"), replace(free, cores=1), bytes_per_second=1000)
    # One core: packed beside passes until 1.0 s, sent until 1.2 s, unpacked beside them until 1.6 s, when both end.
    # The second has the core alone: packed until 1.9 s, sent until 2.2 s, unpacked at 2.5 s. Nothing counts twice.
    assert taken.communication_exposed == pytest.approx(1.3 + 0.064)
    without = DDP(compression="bf16", error_feedback=False)  # nothing is kept: the loss travels with the gradients
    assert step_of("ddp", without, free, bytes_per_second=1000).communication_exposed == pytest.approx(0.9)


def test_arithmetic_on_several_threads_takes_as_many_cores_from_the_passes() -> None:
    way = Compression(arithmetic_s=0.2, processor_s=0.6, reduced_bytes=0, gathered_bytes=0, exchanges=2)
    measured = replace(MEASURED, compression={"bf16": way}, buckets=(Bucket(bytes=1000, ready=0.0),), cores=4)
    [free, taken] = (
        step_of("ddp", DDP(compression="bf16"), each).communication_exposed
        for each in (measured, replace(measured, cores=2))
    )
    assert free == pytest.approx(0), "three beside one are four"
    assert taken == pytest.approx(0.2), "for 0.4 s all run half as fast, and the passes lose 0.2 s"


def test_sums_through_owners_are_as_fast_as_whole_messages_were_seen_to_be() -> None:
    way = Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=1, through_owners=True)
    network = Network(latency_s=0.0, bytes_per_second=1000.0, owners_bytes_per_second=800.0)
    two = replace(group(2), between=network)
    assert ddp.wire_of(two, way, share=1.0, exchanges=1, exact=1000) == pytest.approx(500 / 800)
    ring = replace(way, through_owners=False)
    assert ddp.wire_of(two, ring, share=1.0, exchanges=1, exact=1000) == pytest.approx(500 / 1000)
    unknown = replace(two, between=replace(network, owners_bytes_per_second=0.0))
    assert ddp.wire_of(unknown, way, share=1.0, exchanges=1, exact=1000) == pytest.approx(500 / 1000)
    assert network.slower(2.0).owners_bytes_per_second == 400


def test_compression_takes_no_core_from_passes_that_wait() -> None:
    one = replace(MEASURED, cores=1)
    assert [taken_from_passes(each, group(2)) for each in (one, replace(one, cores=2))] == [1.0, 0.0]
    assert taken_from_passes(replace(one, cores=4, threads=4), group(2)) == 1.0, "its passes have all four"
    assert taken_from_passes(replace(one, cores=6, threads=2), group(1, 2)) == 0.0, "two of six are free"
    waits = replace(one, pass_cores=0.1)
    assert taken_from_passes(waits, group(2)) == pytest.approx(0.1 * 0.1)
    assert taken_from_passes(replace(waits, cores=2), group(1, 4)) == pytest.approx(0.6 * 0.1)
    assert taken_from_passes(replace(one, device="cuda"), group(2)) == 0.0


def test_hosts_of_one_machine_wait_for_its_cores_however_fast_the_wire_is() -> None:
    way = Compression(arithmetic_s=0.5, processor_s=0.5, reduced_bytes=500, gathered_bytes=0, exchanges=2)
    measured = replace(MEASURED, cores=2, compression={"bf16": way}, pass_cores=0.0)
    four = group(4)
    busy = Network(latency_s=0.0, bytes_per_second=1e30, processor_s_per_message=0.01, processor_s_per_byte=0.0002)
    [apart, crowded] = (replace(four, between=busy, hosts_per_machine=hosts) for hosts in (1, 4))
    model = STRATEGIES.load("ddp")(DDP(compression="bf16"))
    # 2 samples each: 0.2 + 0.4 s, the first bucket at 0.3 s. Packing takes a core 0.5 s; two sums of 6 messages 0.12 s;
    # 2 x 3/4 of 500 bytes 0.15 s. With two cores of its own the second bucket, from 0.6 s on, is packed 0.15 s, sent
    # 0.15 s and unpacked 0.15 s: until 1.05 s; where four share two cores, half a core does all of it until 1.84 s.
    assert model.step(measured, apart).communication_exposed == pytest.approx(1.05 - 0.6)
    assert model.step(replace(measured, contention_of_hosts={4: 1.0}), crowded).communication_exposed == pytest.approx(
        1.84 - 0.6
    )
    plain = STRATEGIES.load("ddp")(DDP()).step(replace(measured, contention_of_hosts={4: 1.0}), crowded)
    # As it is: two sums of 6 messages, and 1,500 bytes, 0.42 s; until 0.3 + 0.84 s.
    assert plain.communication_exposed == pytest.approx(1.14 - 0.6)
    slow = STRATEGIES.load("ddp")(DDP()).step(measured, replace(crowded, between=replace(busy, bytes_per_second=100.0)))
    assert slow.communication_exposed > 10, "a wire that takes longer hides what the cores do"
    # Passes that compute want the same half of a core for the 0.3 s that are left of them: until 0.3 + 1.54 + 0.3 s.
    computes = model.step(replace(measured, contention_of_hosts={4: 1.0}, pass_cores=None), crowded)
    assert computes.communication_exposed == pytest.approx(2.14 - 0.6)
    assert (computes.update, computes.other) == (pytest.approx(2 * 0.05), pytest.approx(2 * 0.01))


def test_workers_of_hosts_that_are_one_machine_share_its_cores() -> None:
    measured = replace(MEASURED, cores=2)
    lab = replace(group(4), hosts_per_machine=4)
    assert (lab.per_machine, group(4).per_machine, replace(group(2, 3), hosts_per_machine=4).per_machine) == (4, 1, 6)
    assert compute.slowdown(measured, lab) == 2
    reported = replace(measured, contention={4: 3.0}, contention_of_hosts={4: 1.5})  # a device that a host has once
    assert (compute.slowdown(reported, lab), compute.slowdown(reported, group(1, 4))) == (1.5, 3.0)
    assert compute.crowding(measured, lab) == 2
    assert compute.crowding(replace(measured, device="cuda"), lab) == 1
    assert compute.crowding(measured, group(4)) == 1


def tried(steps: dict[str, float], *, nodes: int = 2, measured: Measured = MEASURED) -> Measured:
    """What was measured, and real steps of so many hosts behind cables that carry 1000 bytes a second."""
    network = Network(latency_s=0.0, bytes_per_second=1000.0)
    known = Tried(nodes=nodes, workers_per_node=1, network=network, steps=steps)
    return ddp.compared(replace(measured, tried=(known,)), DDP())


def test_a_step_is_as_long_as_a_real_one_of_as_many_workers_took() -> None:
    step = step_of("ddp", DDP(), tried({"none": 3.7}), bytes_per_second=1000)
    # By its parts 1.2 + 0.6 + 0.05 s, as above: what is not in them is waiting for exchanges. A step is more than that.
    assert step.communication_exposed == pytest.approx(0.6 + 3.7 - 1.85)
    assert step.seconds == pytest.approx(3.7 + 0.01)
    quicker = step_of("ddp", DDP(), tried({"none": 1.5}), bytes_per_second=1000)
    assert quicker.seconds == pytest.approx(1.5 + 0.01)


def test_other_numbers_of_workers_and_other_networks_are_as_many_times_longer_than_their_parts() -> None:
    twice = tried({"none": 2 * 1.85})
    for workers, speed in ((4, 1000.0), (2, 250.0), (8, 1e9)):
        plain = step_of("ddp", DDP(), workers=workers, bytes_per_second=speed)
        longer = step_of("ddp", DDP(), twice, workers=workers, bytes_per_second=speed)
        assert longer.seconds - 0.01 == pytest.approx(2 * (plain.seconds - 0.01))
    assert step_of("ddp", DDP(), twice, workers=1) == step_of("ddp", DDP(), workers=1), "one exchanges nothing"
    alone = step_of("ddp", DDP(), workers=1)
    settled = ddp.compared(replace(MEASURED, full_step_s=0.8 * alone.seconds), DDP())
    assert step_of("ddp", DDP(), settled, workers=1).seconds == pytest.approx(0.8 * alone.seconds)
    assert step_of("single", None, settled, workers=1).compute == pytest.approx(0.8 * alone.compute)
    assert step_of("ddp", DDP(), settled) == step_of("ddp", DDP())
    within = group(1, 2, bytes_per_second=1000)
    model = DataParallelModel(DDP())
    assert model.step(twice, within) == model.step(MEASURED, within), "workers of one host were not tried"


def test_a_compression_that_was_not_timed_is_as_far_off_as_those_that_send_alike() -> None:
    own = Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=2, through_owners=True)
    ring = replace(own, through_owners=False)
    both = replace(MEASURED, compression={"bf16": own, "fp16": own, "powersgd": ring, "topk": ring})
    by_parts = ddp.of_passes(step_of("ddp", DDP(compression="bf16"), both, bytes_per_second=1000))
    found = tried({"bf16": 3 * by_parts, "none": 1.85}, measured=both)
    assert ddp.times_of(found.tried[0], found, "fp16") == pytest.approx(3)
    assert ddp.times_of(found.tried[0], found, "none") == pytest.approx(1)
    assert ddp.times_of(found.tried[0], found, "powersgd") == 1


def test_what_is_made_worse_is_still_seen_in_a_step_that_was_timed() -> None:
    known, network = tried({"none": 3.7}), group(2, bytes_per_second=1000)
    model = DataParallelModel(DDP())
    assert model.step(known.slower(compute=1.1), network).seconds > 1.05 * model.step(known, network).seconds
    assert model.step(known, network.slower(1.5)).seconds > 1.05 * model.step(known, network).seconds


def test_loaders_fetch_on_while_a_step_takes_longer() -> None:
    slow = replace(MEASURED, loader_samples_per_second=1.0, loader_processor_s=0.0)
    before = step_of("ddp", DDP(), slow, bytes_per_second=1000)
    after = step_of("ddp", DDP(), tried({"none": 2.85}, measured=slow), bytes_per_second=1000)
    assert (before.data_wait, after.data_wait) == (pytest.approx(4 - 1.86), pytest.approx(4 - 2.86))
    known = tried({"none": 2.85}, measured=slow).tried[0]
    full = ddp.compared(replace(slow, tried=(replace(known, full_step_s=5.0),)), DDP())
    assert step_of("ddp", DDP(), full, bytes_per_second=1000).seconds == pytest.approx(5.0)
    assert step_of("ddp", DDP(), full, workers=4, bytes_per_second=1e9).seconds == pytest.approx(5.0 / 4 * 2)
    fast = replace(slow, loader_samples_per_second=1e6, tried=(replace(known, full_step_s=5.0),))
    assert step_of("ddp", DDP(), fast, bytes_per_second=1000).data_wait == 0
    assert step_of("ddp", DDP(), ddp.compared(fast, DDP()), bytes_per_second=1000).seconds == pytest.approx(5.0)


def test_compression_that_was_not_measured_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'topk'.* was not measured"):
        step_of("ddp", DDP(compression="topk"))


def test_gathered_bytes_reach_every_other_worker() -> None:
    way = Compression(arithmetic_s=0.0, reduced_bytes=0, gathered_bytes=100, exchanges=2)
    measured = replace(MEASURED, compression={"topk": way}, buckets=(Bucket(bytes=1000, ready=1.0),))
    step = step_of("ddp", DDP(compression="topk"), measured, workers=4, bytes_per_second=1000)
    assert step.communication_exposed == pytest.approx(3 * 0.1 + 2 * 3 / 4 * 0.064)


def test_virtual_workers_send_the_second_half_when_the_passes_are_over() -> None:
    step = step_of("virtual-workers", None, VIRTUAL, bytes_per_second=1000)
    # 2 parts of 2 samples: the last backward pass runs from 0.8 to 1.2 s. Halves of 0.2 s from 0.9 s on, and 0.3 s from
    # 1.2 s on; then the second halves, 0.5 s.
    assert step.communication_exposed == pytest.approx(0.8)


def test_local_sgd_pays_for_the_model_once_in_a_round() -> None:
    step = step_of("local-sgd", LocalSGD(sync_every=4), bytes_per_second=1000)
    assert step.communication_exposed == pytest.approx(1.016 / 4 + 0.064)


def test_diloco_hides_a_fragment_behind_a_step() -> None:
    hidden = step_of("diloco", DiLoCo(outer_compression="none"), bytes_per_second=1000)
    assert hidden.communication_exposed == pytest.approx(0.064)
    late = DiLoCo(outer_compression="none", overlap_steps=0)
    assert step_of("diloco", late, bytes_per_second=1000).communication_exposed == pytest.approx(0.064 + 4 * 0.25 / 8)


def test_batch_norm_exchanges_in_both_passes_and_nothing_hides_it() -> None:
    measured = replace(MEASURED, batch_norm_layers=10, batch_norm_bytes=80)
    plain, step = (step_of("ddp", DDP(), each, latency_s=0.001) for each in (MEASURED, measured))
    assert step.communication_exposed - plain.communication_exposed == pytest.approx(10 * 0.001 + 10 * 0.002)


def test_batch_norm_of_workers_on_one_host_exchanges_through_memory() -> None:
    measured = replace(MEASURED, batch_norm_layers=10, batch_norm_bytes=80)
    of_host = replace(group(1, 2), within=Network(latency_s=0.001, bytes_per_second=1e9))
    lines = timeline(measured, of_host)
    assert lines.batch_norm_forward == lines.batch_norm_backward == pytest.approx(10 * 3e-5)


def test_batch_norm_messages_of_hosts_that_share_cores_take_these_in_turn() -> None:
    measured = replace(MEASURED, cores=2, batch_norm_layers=10, batch_norm_bytes=80, contention_of_hosts={4: 1.0})
    network = Network(latency_s=0.001, bytes_per_second=1e30, processor_s_per_message=0.002)
    [apart, crowded] = (
        timeline(measured, replace(group(4), between=network, hosts_per_machine=hosts)) for hosts in (1, 4)
    )
    # 3 messages of a gathering and 6 of a sum, 1 ms each; or 2 ms of a core, of which four workers have two.
    assert apart.batch_norm_forward == pytest.approx(10 * 3 * 0.001)
    assert crowded.batch_norm_forward == pytest.approx(10 * 3 * 0.002 * 2)
    assert crowded.batch_norm_backward == pytest.approx(10 * 6 * 0.002 * 2)
    assert crowded.processor_s == pytest.approx(10 * 9 * 0.002)


def test_each_meeting_within_the_passes_waits_for_the_slowest() -> None:
    noisy = replace(MEASURED, compute=(replace(MEASURED.compute[0], spread_s=0.2),), micro_batch=4)
    plain, meets = (
        step_of("ddp", DDP(), each).straggler
        for each in (noisy, replace(noisy, batch_norm_layers=4, batch_norm_bytes=8))
    )
    assert meets == pytest.approx(3 * plain), "nine stretches, each of which varies by a third"


def test_slowest_of_the_workers_is_waited_for() -> None:
    noisy = replace(MEASURED, compute=(replace(MEASURED.compute[0], spread_s=0.2),), micro_batch=1)
    step = step_of("ddp", DDP(), noisy, workers=4)
    assert step.straggler == pytest.approx(math.sqrt(2) * 0.2 * expected_largest(4))
    assert step_of("single", None, noisy, workers=1).straggler == 0


def test_loader_processes_are_waited_for_as_far_as_they_are_slower_than_the_step() -> None:
    slow = replace(MEASURED, loader_samples_per_second=2.0)
    assert step_of("ddp", DDP(), slow).seconds == pytest.approx(4 / 2.0)
    by_itself = replace(slow, loader_processes=0)
    assert step_of("ddp", DDP(), by_itself).data_wait == pytest.approx(2.0)
    assert step_of("ddp", DDP(), by_itself).seconds == pytest.approx(2.0 + 1.26)


def test_workers_of_a_machine_share_its_cores_and_its_loaders_do() -> None:
    measured = replace(MEASURED, cores=4, threads=4)
    alone, beside = (compute.passes(measured, group(1, each)).total for each in (1, 2))
    assert beside == pytest.approx(alone)  # half of the samples, with half of the cores
    assert compute.passes(replace(measured, threads=1), group(1, 2)).total == pytest.approx(alone / 2)
    reported = replace(measured, contention={2: 1.25})
    assert compute.passes(reported, group(1, 2)).total == pytest.approx(alone / 2 * 1.25)
    assert compute.passes(replace(measured, device="cuda"), group(1, 2)).total == pytest.approx(alone / 2)


def test_loaders_that_wait_share_the_cores_with_more_others_than_loaders_that_compute() -> None:
    slow = replace(MEASURED, loader_samples_per_second=2.0, loader_processes=0, cores=2)
    [computes, waits] = (
        [STRATEGIES.load("ddp")(DDP()).step(each, group(1, workers)).data_wait for workers in (2, 4)]
        for each in (slow, replace(slow, loader_processor_s=0.1))
    )
    assert computes == pytest.approx([4 / 2.0, 2 / 2.0 * 2]), "four workers on two cores: each gets half of one"
    assert waits == pytest.approx([4 / 2.0, 2 / 2.0]), "four times 0.1 s are less than two cores have in 0.5 s"
    busy = replace(slow, loader_processor_s=0.4)
    assert STRATEGIES.load("ddp")(DDP()).step(busy, group(1, 4)).data_wait == pytest.approx(2 * 4 * 0.4 / 2)


def test_loader_processes_share_the_cores_with_the_rest_of_the_step() -> None:
    slow = replace(MEASURED, loader_samples_per_second=10.0, loader_processor_s=0.1, cores=2, contention={4: 2.0})
    step = STRATEGIES.load("ddp")(DDP()).step(slow, group(1, 4))
    # Two samples each: 0.2 s of loading, 0.6 s of passes and 0.06 s beside; four times that on two cores.
    assert step.seconds == pytest.approx(4 * (0.2 + 0.6 + 0.06) / 2)
    elsewhere = STRATEGIES.load("ddp")(DDP()).step(replace(slow, device="cuda"), group(1, 4))
    assert elsewhere.data_wait == 0, "a GPU computes meanwhile"


def test_ring_passes_a_machine_once_however_many_workers_it_has() -> None:
    one, four = group(4, 1, bytes_per_second=1000), group(4, 4, bytes_per_second=1000)
    assert one.all_reduce(1000) == pytest.approx(2 * 3 / 4)
    # 16 workers: 30 rounds of a sixteenth of the bytes; three of the workers send within the machine meanwhile.
    assert four.all_reduce(1000) == pytest.approx(3 * 30 / 16)
    assert replace(four, within=group(1).within).all_reduce(1000) == pytest.approx(30 / 16)


def test_machines_exchange_what_is_compressed_once() -> None:
    way = Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=1)
    two_by_two = replace(group(2, 2, bytes_per_second=1000), within=group(1).within)
    assert ddp.wire_of(two_by_two, way, share=1.0, exchanges=1, exact=1000) == pytest.approx(0.5)


def test_constants_of_the_model_are_those_of_the_code_it_describes() -> None:
    assert ddp.QUEUES == comm_queue.QUEUES_ON_CPU
    assert ddp.CHUNK_BYTES == feedback.CHUNK_BYTES
    assert tree_sum.ON_CPU.segment_bytes == virtual.SEGMENT_BYTES
    assert tree_sum.ON_CPU.lag == virtual.LAG
    assert local_sgd._AT_ONCE == local_updates.BUCKET_BYTES
    assert buckets.GradientBuckets  # whose order the schedule follows


def test_memory_is_what_each_strategy_holds() -> None:
    two = group(2)
    held = {(way.strategy, way.compression): way.model.memory(MEASURED, two) for way in ways(MEASURED)}
    plain = held["ddp", "none"]
    assert (plain.parameters, plain.gradients, plain.optimizer, plain.activations) == (1000, 1000, 2000, 4000)
    snapshot = (1000 + 2000 + 16) // 2
    assert plain.total == 8016 + snapshot
    assert held["ddp", "bf16"].total == plain.total + 2000
    assert held["local-sgd", "none"].total == plain.total  # the copy that travels is smaller than activations were
    assert held["diloco", "none"].total == plain.total + 5000
    [way] = ways(VIRTUAL)
    # Passes of 2 samples; the sum of the part before and this worker's chunks of all sums beside the gradient.
    assert way.model.memory(VIRTUAL, two).total == 6016 + 2000 + snapshot


seconds = st.floats(0, 10)
sizes = st.lists(
    st.tuples(st.integers(1, 300), seconds, seconds, st.floats(0, 1)),
    min_size=1,
    max_size=5,
    unique_by=lambda each: each[0],
)


@st.composite
def trainings(draw: st.DrawFn) -> Measured:
    found = sorted(draw(sizes))
    buckets = draw(st.lists(st.tuples(st.integers(1, 10**9), st.floats(0, 1)), min_size=1, max_size=5))
    ready = sorted(share for _, share in buckets)
    total = sum(size for size, _ in buckets)
    way = Compression(arithmetic_s=draw(seconds), reduced_bytes=total // 2, gathered_bytes=total // 100, exchanges=12)
    return replace(
        MEASURED,
        compute=tuple(
            Compute(samples=samples, forward_s=forward, backward_s=backward, spread_s=spread, activation_bytes=1)
            for samples, forward, backward, spread in found
        ),
        buckets=tuple(Bucket(bytes=size, ready=share) for (size, _), share in zip(buckets, ready, strict=True)),
        gradient_bytes=total,
        global_batch=draw(st.integers(1, 256)),
        micro_batch=draw(st.none() | st.integers(1, 64)),
        virtual_workers=draw(st.none() | st.integers(1, 9)),
        batch_norm_layers=draw(st.integers(0, 3)),
        batch_norm_bytes=1000,
        compression={"int8": way},
        loader_processes=draw(st.integers(0, 2)),
        loader_samples_per_second=draw(st.floats(1, 1000)),
    )  # fmt: skip


@settings(max_examples=60)
@given(trainings(), st.integers(1, 40))
def test_more_workers_never_compute_longer(measured: Measured, workers: int) -> None:
    fewer, more = (compute.passes(measured, group(count)).total for count in (workers, workers + 1))
    assert more <= fewer * (1 + 1e-9)


@settings(max_examples=60)
@given(trainings(), st.integers(2, 16))
def test_network_that_takes_no_time_exposes_nothing(measured: Measured, workers: int) -> None:
    free = replace(measured, compression={"int8": replace(measured.compression["int8"], arithmetic_s=0.0)})
    for way in ways(free):
        step = way.model.step(free, group(workers))
        assert step.communication_exposed <= 1e-9 * max(1.0, step.compute)


@settings(max_examples=60)
@given(trainings(), st.integers(1, 4), st.integers(1, 4), st.floats(0, 0.1), st.floats(1e3, 1e10), st.floats(1, 10))
def test_worse_network_never_makes_a_step_shorter(
    measured: Measured, nodes: int, each: int, latency_s: float, bytes_per_second: float, worse: float
) -> None:
    for way in ways(measured):
        good, late, slow = (
            way.model.step(measured, group(nodes, each, latency_s=latency, bytes_per_second=speed)).seconds
            for latency, speed in (
                (latency_s, bytes_per_second),
                (latency_s * worse, bytes_per_second),
                (latency_s, bytes_per_second / worse),
            )
        )
        assert good <= late * (1 + 1e-9)
        assert good <= slow * (1 + 1e-9)


@settings(max_examples=60)
@given(trainings(), st.integers(2, 8), st.floats(0, 0.1), st.floats(1e3, 1e10))
def test_step_is_never_shorter_than_what_is_in_it(
    measured: Measured, workers: int, latency_s: float, bytes_per_second: float
) -> None:
    network = group(workers, latency_s=latency_s, bytes_per_second=bytes_per_second)
    for way in ways(measured):
        step = way.model.step(measured, network)
        assert min(step.parts().values()) >= 0
        assert step.seconds == pytest.approx(sum(step.parts().values()))
        if way.strategy == "ddp" and way.compression == "none":
            wire = sum(network.all_reduce(bucket.bytes) for bucket in measured.buckets)
            assert step.seconds >= wire * (1 - 1e-9)


def test_measured_sizes_are_joined_by_lines_and_noise_makes_no_larger_pass_shorter() -> None:
    points = [
        Compute(samples=size, forward_s=seconds, backward_s=0, spread_s=0, activation_bytes=0)
        for size, seconds in ((4, 1.0), (8, 3.0), (16, 2.0), (32, 7.0))
    ]
    found = [compute.seconds(points, size, lambda each: each.forward_s) for size in (1, 4, 6, 8, 16, 24, 40)]
    assert found == pytest.approx([1.0, 1.0, 2.0, 3.0, 3.0, 5.0, 7.0 + 8 * 7 / 32])
    flat = [replace(points[0], samples=8), replace(points[1], samples=16)]  # 1 s and 3 s: no negative a
    assert compute.seconds(flat, 32, lambda each: each.forward_s) == pytest.approx(6.0)
    begun = [points[0], replace(points[1], forward_s=1.5)]  # 0.5 s however small, and 0.125 s for a sample
    assert compute.seconds(begun, 16, lambda each: each.forward_s) == pytest.approx(2.5)
    assert compute.seconds(points[:1], 8, lambda each: each.forward_s) == pytest.approx(2.0)


def test_diloco_without_measured_compression_is_refused() -> None:
    with pytest.raises(ConfigError, match="'int8'"):
        DiLoCoModel(DiLoCo()).step(MEASURED, group(2))
