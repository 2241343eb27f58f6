"""A hundred workers that meet ask the head as often as there are workers, and not for each pair of them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from swarm import Swarm, swarm

WORKERS, HOSTS = 100, 10


@pytest.fixture(scope="module")
def hundred(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarm]:
    with swarm(tmp_path_factory.mktemp("head"), WORKERS, HOSTS) as made:
        yield made


@pytest.mark.parametrize("group", [0, 1], ids=["at the start", "after a loss"])
def test_hundred_workers_meet_with_two_questions_each_and_fewer_writes(hundred: Swarm, group: int) -> None:
    meeting = hundred.meet(group)
    addresses = [b"%d of %d " % (rank, group) * 12 for rank in range(WORKERS)]
    assert meeting.found == [addresses] * WORKERS
    assert meeting.questions <= 2 * WORKERS, "each has put its address there, and asked for all at most once"
    assert meeting.writes < meeting.questions, "what comes together is written down together"


def test_those_that_do_not_know_how_many_they_are_meet_all_the_same(tmp_path: Path) -> None:
    with swarm(tmp_path, 6, 2) as few:
        meeting = few.meet(0, together=False)
    assert meeting.found == [[b"%d of 0 " % rank * 12 for rank in range(6)]] * 6


def at_the_head(swarm: Swarm) -> dict[str, Any]:
    """What the board has, asked in the thread that changes it."""
    answer: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    swarm.head.after(0, lambda: answer.put(swarm.board.to_dict()))
    return answer.get(timeout=60)


def test_all_who_wait_for_one_that_is_lost_are_told(hundred: Swarm) -> None:
    reported: list[str] = []

    def work(rank: int) -> None:
        try:
            hundred.work(rank, 7, [])
        except dist.DistStoreError as error:
            reported.append(str(error))

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORKERS - 1)]
    for thread in threads:
        thread.start()
    while sum(len(some) for some in at_the_head(hundred)["waiting"]) < 3 * HOSTS:
        pass  # a question of each host waits at the head
    hundred.head.after(0, lambda: hundred.board.close(0, 7))
    for thread in threads:
        thread.join()
    assert len(reported) == WORKERS - 1
    assert all("a worker of this group is lost" in each for each in reported)
