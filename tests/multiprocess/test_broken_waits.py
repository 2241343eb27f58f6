"""A wait for workers that are gone ends, also where Gloo does not notice that its sockets are shut."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launching import wait_until
from ranks import run_ranks

from manyhosts.cluster.place import Place
from manyhosts.communication import world as world_module
from manyhosts.communication.world import World, is_connection_error
from manyhosts.errors import CommunicationError

pytestmark = pytest.mark.multiprocess


class Line:
    """A worker's line to an agent that says nothing."""

    joins, is_broken = False, False
    on_broken: Callable[[], None] | None = None


def world_of_a_member() -> World:
    return World(Place.from_environment(), membership=Line())


def left_waiting(rank: int, folder: Path) -> str:
    world = world_of_a_member()
    if rank == 1:
        wait_until((folder / "over").exists, "rank 0 has come back from its wait")
        return ""
    world_module._GRACE_S = 0.1
    world._sockets.shut = lambda: None  # as if Gloo were deaf
    threading.Timer(0.5, world.abort).start()
    try:
        with pytest.raises(CommunicationError) as caught:
            world.all_reduce(torch.ones(4))
    finally:
        (folder / "over").touch()
    assert is_connection_error(caught.value)
    return str(caught.value)


def answered_late(rank: int) -> list[float]:
    world = world_of_a_member()
    time.sleep(3 * world_module._GLANCE.total_seconds() / 2 if rank == 1 else 0)
    return world.all_reduce(torch.full((2,), rank + 1.0)).tolist()


def test_wait_that_gloo_does_not_end_is_ended_when_the_group_is_broken(tmp_path: Path) -> None:
    assert "rank 0 waited for workers that are gone" in run_ranks(2, left_waiting, tmp_path)[0]


def test_wait_for_a_worker_that_is_slow_goes_on_until_it_comes() -> None:
    assert run_ranks(2, answered_late) == [[3.0, 3.0], [3.0, 3.0]]
