"""The helper that starts real ranks: answers in order, and clear words when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World

pytestmark = pytest.mark.multiprocess
TESTS = Path(__file__).parents[1]


@dataclass
class Chunk:
    amount: float


def add(rank: int, chunk: Chunk) -> Chunk:
    world = World(Place.from_environment())
    return Chunk(float(world.all_reduce(torch.tensor([rank + chunk.amount]))))


def fail_on_last(rank: int) -> None:
    world = World(Place.from_environment())
    if rank == world.size - 1:
        raise ValueError("a fault put in on purpose")
    world.barrier()


def die_on_first(rank: int) -> None:
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def sleep(rank: int) -> None:
    time.sleep(60)


def read_variable(rank: int) -> str:
    return os.environ["MANYHOSTS_TEST"]


def test_ranks_meet_and_answer_in_order() -> None:
    assert run_ranks(2, add, Chunk(10)) == [Chunk(21.0), Chunk(21.0)]


def test_one_rank_needs_no_group() -> None:
    assert run_ranks(1, add, Chunk(10)) == [Chunk(10.0)]


def test_folders_where_tests_are_started_hide_no_module_of_theirs(tmp_path: Path) -> None:
    for module in TESTS.glob("*.py"):  # `make train` leaves a folder `runs`
        (tmp_path / module.stem).mkdir()
    code = f"import sys; sys.path.insert(0, {str(TESTS)!r}); import ranks, runs; print(ranks.run_ranks(1, runs.Recipe))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("[Recipe(samples=0, "), done.stderr


def test_failing_rank_is_named_with_its_own_traceback() -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1 of 2 failed:.*a fault put in on purpose"):
        run_ranks(2, fail_on_last)


def test_rank_that_dies_is_named_with_its_signal() -> None:
    with pytest.raises(AssertionError, match=r"rank 0 of 2 failed:\ndied of SIGKILL"):
        run_ranks(2, die_on_first)


def test_silent_ranks_are_named_when_the_time_is_over() -> None:
    with pytest.raises(AssertionError, match=r"no answer in time from ranks \[0, 1\] of 2"):
        run_ranks(2, sleep, timeout_s=0.5)


def test_environment_of_the_test_goes_along(monkeypatch: pytest.MonkeyPatch) -> None:
    for word in ("once", "again"):
        monkeypatch.setenv("MANYHOSTS_TEST", word)
        assert run_ranks(1, read_variable) == [word]
