"""A run that was killed and started again by the same command ends with the bits of one that nothing happened to."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from commands import finish, kill_all, start, steps_done, summary, wait_for_step
from runs import CHANCY, Recipe, samples_by_step, step_lines, trained

pytestmark = pytest.mark.multiprocess
STEPS = 60


def recipe(loader_workers: int) -> Recipe:
    data = {"loader_workers": loader_workers}
    return replace(CHANCY, duration=f"{STEPS} steps", schedule=True, accuracy=False, data=data)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs that nothing happened to, by the number of workers; no bit depends on who reads, or who starts them."""
    folders = {workers: tmp_path_factory.mktemp(f"whole-{workers}") for workers in (1, 2)}
    for workers, folder in folders.items():
        trained(workers, recipe(0), folder)
    return folders


@pytest.mark.parametrize(
    ("workers", "loader_workers"),
    [(1, 0), (2, 2), pytest.param(1, 2, marks=pytest.mark.slow), pytest.param(2, 0, marks=pytest.mark.slow)],
)
def test_killed_run_ends_with_the_bits_of_an_undisturbed_one(
    whole: dict[int, Path], workers: int, loader_workers: int, tmp_path: Path
) -> None:
    slow = ["--set", "snapshots.every=7 steps"]
    broken = tmp_path / "broken"
    kills = 0
    for _ in range(2):
        process = start(workers, broken, recipe(loader_workers), slow)
        wait_for_step(process, broken, min(steps_done(broken) + random.randint(1, 25), STEPS - 1))
        if process.poll() is None:
            kill_all(process)
            kills += 1
        else:
            finish(process)
    output = finish(start(workers, broken, recipe(loader_workers), slow))
    assert summary(broken)["status"] == "completed", output
    assert summary(broken)["weights_sha256"] == summary(whole[workers])["weights_sha256"]
    assert [line["step"] for line in step_lines(broken)] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in step_lines(broken)] == [line["loss"] for line in step_lines(whole[workers])]
    assert samples_by_step(broken) == samples_by_step(whole[workers])
    assert summary(broken)["restarts"] == kills


def test_finished_run_says_so_and_exits_well(tmp_path: Path) -> None:
    first = start(1, tmp_path, Recipe(duration="3 steps"))
    finish(first)
    seconds = summary(tmp_path)["seconds"]
    again = start(1, tmp_path, Recipe(duration="3 steps"))
    output = finish(again)
    assert summary(tmp_path)["seconds"] == seconds, "no time of training is added where nothing was trained"
    assert (first.returncode, again.returncode) == (0, 0)
    assert "this run is finished" in output
    assert [line["step"] for line in step_lines(tmp_path)] == [1, 2, 3]


def test_longer_duration_goes_on_from_the_end(tmp_path: Path) -> None:
    finish(start(1, tmp_path / "twice", Recipe(duration="3 steps")))
    finish(start(1, tmp_path / "twice", Recipe(duration="8 steps")))
    trained(1, Recipe(duration="8 steps"), tmp_path / "once")
    assert summary(tmp_path / "twice")["weights_sha256"] == summary(tmp_path / "once")["weights_sha256"]
    assert summary(tmp_path / "twice")["restarts"] == 0, "to continue after an orderly end is no restart"


def test_first_signal_makes_a_snapshot_at_a_common_step_and_the_run_goes_on_later(
    whole: dict[int, Path], tmp_path: Path
) -> None:
    long = recipe(0)
    process = start(2, tmp_path / "asked", long)
    wait_for_step(process, tmp_path / "asked", 5)
    process.terminate()
    output = finish(process)
    assert process.returncode != 0
    stopped_at = summary(tmp_path / "asked")["steps"]
    assert summary(tmp_path / "asked")["status"] == "interrupted", output
    assert isinstance(stopped_at, int)
    assert stopped_at < STEPS
    finish(start(2, tmp_path / "asked", long))
    assert summary(tmp_path / "asked")["weights_sha256"] == summary(whole[2])["weights_sha256"]
    assert summary(tmp_path / "asked")["steps_redone"] == 0
