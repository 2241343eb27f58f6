"""What workers tell each other in plain values, and the error of one of them, come to all alike."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

from manyhosts.cluster.place import Place
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.errors import ConfigError, DataError, ManyhostsError
from manyhosts.records.manifest import NewerFormat

pytestmark = pytest.mark.multiprocess

WORKERS = 3
KINDS = [ConfigError, DataError, NewerFormat]
"""Of the error that each worker has, where it is wrong."""
CASES = {"one": [1], "several": [0, 1], "of a kind from elsewhere": [2]}
"""The workers that are wrong."""


def tell(rank: int) -> tuple[list[object], dict[str, tuple[str, str, str, str]]]:
    world = World(Place.from_environment())
    values = gather_plain(world, {"rank": rank, "text": "größer", "none": None, "list": [1.5, rank]})
    raised = {}
    for name, wrong in CASES.items():
        error = KINDS[rank](f"what {rank}", where=f"where {rank}", fix=f"fix {rank}") if rank in wrong else None
        try:
            gather_plain(world, None, error)
        except ManyhostsError as found:
            raised[name] = type(found).__name__, found.what, found.where, found.fix
    return values, raised


@pytest.fixture(scope="module")
def reported() -> list[Any]:
    return run_ranks(WORKERS, tell)


def test_plain_values_come_to_all_by_rank(reported: Any) -> None:
    expected = [{"rank": rank, "text": "größer", "none": None, "list": [1.5, rank]} for rank in range(WORKERS)]
    assert [values for values, _ in reported] == [expected] * WORKERS


@pytest.mark.parametrize(("case", "kind", "first"), [("one", "DataError", 1), ("several", "ConfigError", 0)])
def test_error_of_the_first_worker_is_raised_on_all(reported: Any, case: str, kind: str, first: int) -> None:
    assert [raised[case] for _, raised in reported] == [
        (kind, f"what {first}", f"where {first}", f"fix {first}")
    ] * WORKERS


def test_error_of_a_kind_that_others_may_not_know_comes_as_the_kind_it_derives_from(reported: Any) -> None:
    expected = ("SnapshotError", "what 2", "where 2", "fix 2")
    assert [raised["of a kind from elsewhere"] for _, raised in reported] == [expected] * WORKERS
