"""Rows through shared memory: the bits of Gloo's, without Gloo, and nobody waits for one who is gone."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from manyhosts.cluster.place import Place
from manyhosts.communication import shared_rows
from manyhosts.communication.batch_norm import make_global
from manyhosts.communication.shared_norm import acting
from manyhosts.communication.world import World
from manyhosts.errors import CommunicationError

pytestmark = pytest.mark.multiprocess
CUT = (3, None, 5)
"""What each worker has of the batch; the second has a ghost."""


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.BatchNorm2d(4, affine=False)
    ).double()


def gradients_and_buffers(model: nn.Module, samples: Tensor, weights: Tensor) -> list[Tensor]:
    (model(samples) * weights).sum().backward()
    return [*(each.grad for each in model.parameters() if each.grad is not None), *model.buffers()]


def train(rank: int, able: list[bool]) -> dict[str, Any]:
    """Through memory where every worker is able to; what was exchanged by Gloo is counted."""
    world = World(Place.from_environment())
    model = network()
    batch = make_global(model, world)
    assert batch is not None
    torch.manual_seed(1)
    samples, weights = torch.randn(8, 1, 9, 9).double(), torch.randn(8, 4, 5, 5).double()
    begin = sum(count or 0 for count in CUT[:rank])
    count = CUT[rank]
    own = slice(begin, begin + (count or 1))
    batch.ghost = count is None
    calls: list[str] = []
    gather = dist.all_gather

    def counted(*words: Any, **more: Any) -> Any:
        calls.append("gather")
        return gather(*words, **more)

    with (
        patch.object(shared_rows, "is_possible", lambda: able[rank]),
        patch.object(dist, "all_gather", counted),
        acting(batch),
    ):
        found = gradients_and_buffers(model, samples[own], weights[own] * (count is not None))
    for each in found[: len(list(model.parameters()))]:
        world.all_reduce(each)
    world.leave()
    return {"found": found, "calls": len(calls), "memory": batch.is_shared_memory, "rows": shared_rows_mapped()}


def shared_rows_mapped() -> list[str]:
    """What this process has of such memory."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "manyhosts-rows-" in line]


def test_batch_norm_of_workers_on_one_host_needs_no_gloo_and_has_the_same_bits() -> None:
    through_memory = run_ranks(3, train, [True] * 3)
    by_gloo = run_ranks(3, train, [True, True, False])  # one that is not able to is enough
    assert [each["memory"] for each in through_memory] == [True] * 3
    assert [each["memory"] for each in by_gloo] == [False] * 3
    assert [each["calls"] for each in through_memory] == [0] * 3
    assert [each["calls"] for each in by_gloo] == [4] * 3, "one exchange a layer each way"
    for ours, theirs in zip(through_memory, by_gloo, strict=True):
        assert len(ours["rows"]) == 1, "they went through memory"
        assert "memfd:" in ours["rows"][0], "which has no name, and so cannot be left in /dev/shm"
        assert all(torch.equal(one, other) for one, other in zip(ours["found"], theirs["found"], strict=True))
    model = network()
    torch.manual_seed(1)
    samples, weights = torch.randn(8, 1, 9, 9).double(), torch.randn(8, 4, 5, 5).double()
    alone = gradients_and_buffers(model.train(), samples, weights)
    for ours, theirs in zip(through_memory[0]["found"], alone, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def exchange(rank: int) -> str:
    world = World(Place.from_environment(), timeout_s=60)
    rows = shared_rows.among(world, 1000, same_host=True, timeout_s=60)
    assert rows is not None
    torch.manual_seed(rank)
    for number in range(400):
        own = torch.randn(1 + number % 1000, dtype=torch.float64 if number % 3 else torch.float32)
        assert torch.equal(rows.stack(own), world.stack(own)), f"exchange {number}"
    if rank == 1:
        rows.close()  # as the system does for one that ends, however it ends
    else:
        with pytest.raises(CommunicationError, match="rank 0 waited in a BatchNorm layer for rank 1, which is gone"):
            rows.stack(torch.ones(3))
    world.barrier()
    world.leave()
    return "done"


def test_nothing_is_left_of_it_where_its_maker_is_killed_before_others_have_it() -> None:
    class Members:
        rank, size, device = 0, 2, torch.device("cpu")

        def broadcast(self, reported: Tensor) -> Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return reported

    before = set(os.listdir("/dev/shm"))
    if (process := os.fork()) == 0:
        shared_rows.among(Members(), 8, same_host=True)  # type: ignore[arg-type]
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert not [name for name in set(os.listdir("/dev/shm")) - before if "manyhosts" in name]


def test_memory_of_a_process_that_is_another_one_from_here_is_not_taken() -> None:
    """As in a container whose processes are counted by themselves."""
    descriptor, reported = shared_rows._make(4096)
    process, number, _ = reported.decode().split()
    os.close(shared_rows._open(reported))
    with pytest.raises(FileNotFoundError):
        shared_rows._open(f"{process} {number} 0123456789abcdef".encode())
    os.close(descriptor)


def test_rows_are_those_of_gloo_and_a_worker_that_is_gone_is_not_waited_for() -> None:
    assert run_ranks(2, exchange) == ["done", "done"]


def abort(rank: int) -> str:
    world = World(Place.from_environment(), timeout_s=60)
    rows = shared_rows.among(world, 8, same_host=True, timeout_s=60)
    assert rows is not None
    world.barrier()
    world._broken_at = 1.0  # as `World.abort` leaves it, from another thread
    if rank == 0:
        with pytest.raises(CommunicationError):
            rows.stack(torch.ones(3))
    return "done"


def test_wait_ends_when_the_group_is_broken() -> None:
    assert run_ranks(2, abort) == ["done", "done"]


def notes_of_a_run(rank: int, folder: str) -> list[str]:
    from runs import Recipe, make_trainer

    notes: list[str] = []
    recipe = Recipe(
        samples=64, batch=4, batch_norm=True, trainer={"listeners": [lambda event: notes.append(str(event))]}
    )
    make_trainer(recipe, Path(folder)).fit("15 steps")
    return [note for note in notes if "BatchNorm over the batch" in note]


def test_price_of_the_exchanges_is_measured_in_the_first_steps_and_said_once(tmp_path: Path) -> None:
    reported, silent = run_ranks(2, notes_of_a_run, str(tmp_path / "run"))
    assert len(reported) == 1
    assert "of 2 workers: 3 exchanges through shared memory take" in reported[0]
    assert silent == [], "the leader tells it"
