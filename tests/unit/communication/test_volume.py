"""What a worker puts on the wire, reckoned by hand."""

from __future__ import annotations

from manyhosts.communication import volume


def test_sum_over_two_workers_sends_the_payload_once() -> None:
    assert volume.all_reduce_bytes(1000, 2) == 1000


def test_sum_is_a_scatter_and_a_gather_of_the_parts() -> None:
    for workers in (2, 4, 8):
        parts = volume.all_to_all_bytes(800, workers) + volume.all_gather_bytes(800 // workers, workers)
        assert volume.all_reduce_bytes(800, workers) == parts


def test_one_worker_sends_nothing() -> None:
    kinds = (volume.all_reduce_bytes, volume.all_gather_bytes, volume.all_to_all_bytes, volume.broadcast_bytes)
    assert [kind(1000, 1) for kind in kinds] == [0, 0, 0, 0]
