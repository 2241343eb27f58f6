"""A disk that is full when training ends: an older snapshot makes room, or the run ends as a failure and says why."""

from __future__ import annotations

import contextlib
import errno
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from commands import summary
from ranks import run_ranks
from runs import Recipe, events, make_trainer, trained

import manyhosts as mh
from manyhosts.errors import TrainingError
from manyhosts.records.manifest import verify
from manyhosts.snapshot import disk

pytestmark = pytest.mark.multiprocess
RECIPE = Recipe(duration="6 steps", accuracy=False, trainer={"snapshots": {"every": "2 steps", "keep": 5}})


def bytes_in(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):  # which passes over a folder that another worker has removed
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.stat(os.path.join(place, name)).st_size
    return total


def fit(rank: int, run_dir: Path, room: int) -> Any:
    """Train on a disk that takes `room` bytes of snapshots."""
    write = disk.Disk.write

    def write_within(self: disk.Disk, file: Any, data: Any) -> None:
        if bytes_in(run_dir / "snapshots") + len(data) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)
        write(self, file, data)

    disk.Disk.write = write_within  # type: ignore[method-assign]
    try:
        return asdict(make_trainer(RECIPE, run_dir).fit(RECIPE.duration))["weights_sha256"]
    except TrainingError as error:
        return str(error)
    finally:
        disk.Disk.write = write  # type: ignore[method-assign]


def saved(run_dir: Path) -> list[str]:
    """What is no rest of a try, which the next one removes."""
    return sorted(path.name for path in (run_dir / "snapshots").iterdir() if path.suffix != ".half")


@pytest.mark.parametrize("workers", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_full_disk_at_the_end_costs_an_older_snapshot_or_is_no_success(tmp_path: Path, workers: int) -> None:
    whole = summary_of(workers, tmp_path / "whole")
    one = bytes_in(tmp_path / "whole" / "snapshots" / "step-00000006")

    weights = run_ranks(workers, fit, tmp_path / "two", int(2.6 * one))
    assert weights == [whole] * workers
    assert summary(tmp_path / "two")["status"] == "completed"
    assert saved(tmp_path / "two") == ["step-00000004", "step-00000006"]
    verify(tmp_path / "two" / "snapshots" / "step-00000006")
    assert [note["text"] for note in events(tmp_path / "two", "note") if "full" in note["text"]] == [
        "the disk is full: step-00000002 was removed"
    ]

    reported = run_ranks(workers, fit, tmp_path / "one", int(1.6 * one))
    assert len({one_told.partition("\n  resume: ")[0] for one_told in reported}) == 1, (
        "the first also says how to continue"
    )
    assert reported[0].startswith("the snapshot of the last step, 6, could not be written: ")
    assert os.strerror(errno.ENOSPC) in reported[0]
    assert "step-00000002" in reported[0], "the last good one is named"
    ended = summary(tmp_path / "one")
    assert (ended["status"], ended["steps"]) == ("failed", 6)
    assert str(ended["reason"]).startswith("the snapshot of the last step")
    assert saved(tmp_path / "one") == ["step-00000002"], "the newest whole one stays"
    assert run_ranks(workers, fit, tmp_path / "one", 100 * one) == [whole] * workers, "with room it continues"


def summary_of(workers: int, run_dir: Path) -> str:
    trained(workers, RECIPE, run_dir)
    return str(summary(run_dir)["weights_sha256"])


def test_file_in_the_place_of_a_folder_is_named_before_the_first_step(tmp_path: Path) -> None:
    for name in ("snapshots", "best", "tensorboard"):
        run_dir = tmp_path / name
        run_dir.mkdir()
        (run_dir / name).touch()
        with pytest.raises(mh.errors.ConfigError, match=f"{name} in the run directory is a file"):
            make_trainer(RECIPE, run_dir).fit("2 steps")
        assert sorted(path.name for path in run_dir.iterdir()) == sorted([name, "lock.json"])
