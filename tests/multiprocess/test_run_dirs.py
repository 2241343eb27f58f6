"""Workers that were given different run directories are told so when they begin, and do not wait for each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks
from sharded import Case, make_trainer

from manyhosts.errors import ConfigError

pytestmark = pytest.mark.multiprocess


def given_own(rank: int, folder: Path, *, leader_alone: bool) -> str:
    try:
        if leader_alone:
            make_trainer(Case(strategy="ddp"), folder if rank == 0 else None)  # type: ignore[arg-type]  # as scripts do
        else:
            make_trainer(Case(strategy="ddp"), folder / f"at-{rank}")
    except ConfigError as error:
        return error.what
    return ""


def both_ways(rank: int, folder: Path) -> list[str]:
    return [given_own(rank, folder, leader_alone=each) for each in (False, True)]


def test_workers_with_other_run_directories_are_told_both_names(tmp_path: Path) -> None:
    for named, alone in run_ranks(2, both_ways, tmp_path):
        assert named == (
            f"the workers are given different run directories: rank 0 '{tmp_path}/at-0', rank 1 '{tmp_path}/at-1'"
        )
        assert alone == f"the workers are given different run directories: rank 0 '{tmp_path}', rank 1 none"
    assert not (tmp_path / "at-0").exists()
