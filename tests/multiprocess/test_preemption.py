"""A signal to any one worker stops all of them at one step, with a snapshot, and with the code that schedulers know."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from commands import alive_workers, finish, kill_all, start, summary, wait_for_step
from runs import Recipe, step_lines

pytestmark = pytest.mark.multiprocess
STEPS = 400
RECIPE = Recipe(samples=150, batch=16, duration=f"{STEPS} steps", dropout=0.3, augment=True, accuracy=False)


@pytest.mark.parametrize(("name", "place"), [("SIGTERM", 1), ("SIGUSR1", 0)])
def test_signal_to_one_worker_stops_all_and_the_same_command_goes_on(tmp_path: Path, name: str, place: int) -> None:
    process = start(2, tmp_path / "run", RECIPE, pids=tmp_path / "pids")
    try:
        wait_for_step(process, tmp_path / "run", 3)
        os.kill(alive_workers(tmp_path / "pids")[place], signal.Signals[name])
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 128 + signal.Signals[name], output
    ended = summary(tmp_path / "run")
    assert (ended["status"], ended["reason"]) == ("interrupted", f"asked to stop by {name}")
    assert (tmp_path / "run" / "snapshots" / f"step-{ended['steps']:08d}" / "manifest.json").exists()
    finish(start(2, tmp_path / "run", RECIPE))
    assert [line["step"] for line in step_lines(tmp_path / "run")] == list(range(1, STEPS + 1))
    assert summary(tmp_path / "run")["steps_redone"] == 0


def test_limit_on_time_is_agreed_by_all(tmp_path: Path) -> None:
    process = start(3, tmp_path, Recipe(samples=150, batch=16, duration="1000000 steps or 1s", accuracy=False))
    output = finish(process)
    assert process.returncode == 0, output
    assert "are over" in str(summary(tmp_path)["reason"]), output
