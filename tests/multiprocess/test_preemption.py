"""A signal to any one worker stops all of them at one step, with a snapshot, and with the code that schedulers know."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
from commands import alive_workers, finish, kill_all, start, summary, wait_for_step
from launching import wait_until
from runs import Recipe, step_lines

pytestmark = pytest.mark.multiprocess
STEPS = 400
RECIPE = Recipe(samples=150, batch=16, duration=f"{STEPS} steps", dropout=0.3, augment=True, accuracy=False)


@pytest.mark.parametrize(("name", "place"), [("SIGUSR1", 1), pytest.param("SIGTERM", 0, marks=pytest.mark.slow)])
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


WAITS_WITH_ITS_STEP = """
import os, time
from pathlib import Path

import torch
from torch import nn

import manyhosts as mh
from manyhosts.training.process_session import ProcessSession

Path(os.environ["PIDS"], f"{os.environ['RANK']}-{os.getpid()}").touch()
RUN = Path(os.environ["PIDS"]).parent
steps = 0


def wait(done):
    while not done():
        time.sleep(0.01)


def step(model, batch):
    global steps
    steps += 1
    if steps == 6 and (RUN / "lost").exists():
        membership = ProcessSession.current()._worlds[0].membership
        wait(lambda: membership.change_asked)  # another worker wants to join
        (RUN / "joins").touch()
        wait((RUN / "gone").exists)
    if steps == 5:
        (RUN / "begun").touch()
        wait((RUN / "lost").exists)
    return model(batch[0]).square().mean()


mh.Trainer(
    model=lambda: nn.Linear(4, 4),
    step=step,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
    weight="samples",
    virtual_workers=2,  # so that one continues alone
    data=mh.Data(train=torch.utils.data.TensorDataset(torch.ones(64, 4)), batch_size=8),
    snapshots=mh.Snapshots(every="1000 steps"),
).fit("1000000 steps")
"""


def test_run_that_is_stopped_while_a_new_worker_is_lost_is_interrupted_and_not_failed(tmp_path: Path) -> None:
    """Those that are left wait for a group that the new one was to be in, and are told that the run is ending."""
    (tmp_path / "script.py").write_text(WAITS_WITH_ITS_STEP)
    process = start(2, tmp_path / "run", RECIPE, pids=tmp_path / "pids", script=tmp_path / "script.py")
    try:
        wait_until((tmp_path / "begun").exists, "both train")
        first = alive_workers(tmp_path / "pids")
        os.kill(first[1], signal.SIGKILL)
        (tmp_path / "lost").touch()
        wait_until((tmp_path / "joins").exists, "another in its place")
        [new] = set(alive_workers(tmp_path / "pids")) - set(first)
        os.kill(new, signal.SIGSTOP)  # so that it does not end by itself
        process.send_signal(signal.SIGTERM)
        os.kill(new, signal.SIGKILL)
        wait_until(lambda: not psutil.pid_exists(new), "it is gone")
        (tmp_path / "gone").touch()
        output = finish(process)
    except BaseException:
        kill_all(process)
        raise
    assert process.returncode == 130, output
    ended = summary(tmp_path / "run")
    assert (ended["status"], ended["reason"]) == ("interrupted", "asked to stop by SIGTERM"), output
    assert (tmp_path / "run" / "snapshots" / f"step-{ended['steps']:08d}" / "manifest.json").exists(), output
    assert "resume with: manyhosts run" in output
