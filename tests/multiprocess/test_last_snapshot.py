"""Where nobody continues, a worker that is left saves what it holds, and the next start continues from there."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from launching import HANGS_S, agents, alive, family, run, wait_until
from preloaded import descendants
from runs import CHANCY, events, restarts, samples_by_step, step_lines, trained

from manyhosts.records.manifest import NAME, found_in

pytestmark = pytest.mark.multiprocess
STEPS = 60
RECIPE = replace(
    CHANCY,
    schedule=True,
    accuracy=False,
    sample_s=0.002,
    trainer={"virtual_workers": 4, "snapshots": {"every": "10000 steps"}, "validate_every": "10000 steps"},
)
LONG = replace(RECIPE, duration="100000 steps")
UNDISTURBED = replace(RECIPE, duration=f"{STEPS} steps")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    trained(1, UNDISTURBED, run_dir)
    return run_dir


VALIDATED = replace(
    RECIPE,
    duration="14 steps",
    validation_sample_s=0.15,
    data={"loader_workers": 0},
    trainer={**RECIPE.trainer, "validate_every": "7 steps"},
)
"""Every seventh step is validated, which takes some seconds."""


def validations(run_dir: Path) -> list[tuple[object, ...]]:
    return [(line["step"], line["values"], line["best"]) for line in events(run_dir, "validation")]


def saved(run_dir: Path) -> list[int]:
    """The steps of the snapshots that are whole."""
    return [found.step for found in found_in(run_dir / "snapshots") if found.how == "" and (found.path / NAME).exists()]


def lose_head(process: subprocess.Popen[str], pids: Path) -> None:
    everything = family(process)
    process.kill()
    process.communicate()
    wait_until(lambda: not alive(everything), "all have ended")


def lose_head_and_leader(process: subprocess.Popen[str], pids: Path) -> None:
    """The launcher and the leader stand still; then the connections to the launcher end, as those of a lost host do."""
    everything, leader = family(process), psutil.Process(alive_workers(pids)[0])
    for each in (psutil.Process(process.pid), leader):
        each.send_signal(signal.SIGSTOP)
    beside = agents(everything)[0]
    beside = [beside, *descendants(beside)]
    others = [each for each in everything if each not in beside]
    process.kill()
    try:
        wait_until(lambda: not alive(others), "those that are left have ended")
    finally:
        for each in beside:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.communicate()
    wait_until(lambda: not alive(everything), "all have ended")


def freeze_hosts(process: subprocess.Popen[str], pids: Path) -> None:
    """All hosts but one stand still: too few are left, and the head says that nobody continues."""
    everything, until = set(family(process)), time.monotonic() + HANGS_S
    [stays, *_] = agents(family(process))
    while process.poll() is None and time.monotonic() < until:
        with suppress(psutil.NoSuchProcess):  # also those that come in the place of hosts that were given up
            for agent in agents(family(process)):
                for each in (agent, *descendants(agent)) if agent != stays else ():
                    everything.add(each)
                    each.send_signal(signal.SIGSTOP)
        time.sleep(0.05)
    for each in everything:  # those that stand still hold what it printed to
        with suppress(psutil.NoSuchProcess):
            each.kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 4, output
    assert "was lost: the host has given no sign of life" in output


LOSSES: dict[str, tuple[int, list[str], Callable[[subprocess.Popen[str], Path], None]]] = {
    "head, 1 worker": (1, [], lose_head),
    "head, 3 workers": (3, [], lose_head),
    "head and leader": (1, ["--nodes", "2"], lose_head_and_leader),
    "hosts": (1, ["--nodes", "2:3", "--hang-timeout", "4"], freeze_hosts),
}


@pytest.mark.parametrize(
    "loss",
    [
        "head, 1 worker",
        pytest.param("head, 3 workers", marks=pytest.mark.slow),
        "head and leader",
        pytest.param("hosts", marks=pytest.mark.slow),
    ],
)
def test_worker_that_is_left_saves_its_step_and_the_next_start_goes_on_there(
    loss: str, tmp_path: Path, undisturbed: Path
) -> None:
    workers, options, lose = LOSSES[loss]
    run_dir, pids = tmp_path / "run", tmp_path / "pids"
    process = start(workers, run_dir, LONG, options, pids=pids)
    try:
        wait_for_step(process, run_dir, 7)
        before = steps_done(run_dir)
        lose(process, pids)
    except BaseException:
        kill_all(process)
        raise
    [step] = saved(run_dir)
    assert before <= step < STEPS
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, step + 1))
    again = start(1, run_dir, UNDISTURBED, [])
    output = finish(again)
    assert again.returncode == 0, output
    ended, whole = summary(run_dir), summary(undisturbed)
    assert ended["weights_sha256"] == whole["weights_sha256"], output
    assert ended["steps_redone"] == 0, output
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in step_lines(run_dir)] == [line["loss"] for line in step_lines(undisturbed)]
    assert samples_by_step(run_dir) == samples_by_step(undisturbed)


@pytest.mark.slow
def test_worker_that_is_left_saves_before_each_restart_and_when_those_are_used_up(
    tmp_path: Path, undisturbed: Path
) -> None:
    run_dir, script = tmp_path / "run", Path(__file__).with_name("failing_script.py")
    process = start(3, run_dir, UNDISTURBED, ["--restarts", "1", "--env", "FAILS=1"], script=script)
    output = finish(process)
    assert process.returncode == 1, output
    assert "starting all workers again (restart 1 of 1)" in output
    *_, before, last = [line["step"] for line in events(run_dir, "snapshot")]
    assert 0 < before < last < STEPS
    assert f"continues after step {before}" in output
    assert saved(run_dir) == [last, before]
    again = start(2, run_dir, UNDISTURBED, [], script=script)
    output = finish(again)
    assert again.returncode == 0, output
    assert f"continues after step {last}" in output
    assert summary(run_dir)["weights_sha256"] == summary(undisturbed)["weights_sha256"]
    assert [line["loss"] for line in step_lines(run_dir)] == [line["loss"] for line in step_lines(undisturbed)]
    assert samples_by_step(run_dir) == samples_by_step(undisturbed)
    assert sum(line["steps_redone"] for line in restarts(run_dir)) == 0


def test_the_end_that_the_leader_has_told_is_told_once(tmp_path: Path) -> None:
    run_dir, script = tmp_path / "run", Path(__file__).with_name("failing_script.py")
    process = start(2, run_dir, UNDISTURBED, ["--env", "FAILS=0"], script=script)
    output = finish(process)
    assert process.returncode == 1, output
    assert "saved step" in output, "the worker that is left has led"
    assert [line["reason"] for line in events(run_dir, "end")] == ["RuntimeError: no step at start 0"]
    assert sum(line.startswith("failed ") for line in output.splitlines()) == 1, output
    [step] = saved(run_dir)
    assert summary(run_dir)["steps"] == step, "though the leader had not come so far"


@pytest.fixture(scope="module")
def validated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("validated")
    trained(1, replace(VALIDATED, validation_sample_s=0.0), run_dir)
    return run_dir


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_validation_that_was_cut_off_is_made_once_where_the_run_goes_on(
    workers: int, tmp_path: Path, validated: Path
) -> None:
    run_dir, pids = tmp_path / "run", tmp_path / "pids"
    process = start(workers, run_dir, VALIDATED, [], pids=pids)
    try:
        wait_for_step(process, run_dir, 7)
        assert validations(run_dir) == []
        lose_head(process, pids)
    except BaseException:
        kill_all(process)
        raise
    assert (saved(run_dir), validations(run_dir)) == ([7], [])
    again = start(2, run_dir, replace(VALIDATED, validation_sample_s=0.0), [])
    output = finish(again)
    assert again.returncode == 0, output
    assert summary(run_dir)["weights_sha256"] == summary(validated)["weights_sha256"], output
    assert summary(run_dir)["best"] == summary(validated)["best"]
    assert validations(run_dir) == validations(validated)
    for kind in ("step", "epoch", "validation", "snapshot"):
        lines = [(line["step"], line.get("path")) for line in events(run_dir, kind)]
        assert lines == sorted(set(lines)), kind
    assert [line["loss"] for line in step_lines(run_dir)] == [line["loss"] for line in step_lines(validated)]


LOST_IN_AN_UPDATE = """
    import os, signal
    import torch
    from torch import nn
    import manyhosts as mh

    class Meets(mh.Callback):
        def after_step(self, moment):
            if moment.step == 3:
                if os.environ["RANK"] == "1":
                    os.kill(os.getpid(), signal.SIGKILL)
                trainer.world.barrier()

    rows = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    trainer = mh.Trainer(
        model=lambda: nn.Linear(4, 2),
        loss=nn.MSELoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        data=mh.Data(train=torch.utils.data.TensorDataset(rows, rows[:, :2]), batch_size=8),
        callbacks=[Meets()],
    )
    trainer.fit("12 steps")
"""


def test_run_whose_workers_are_all_in_the_midst_of_a_step_ends_where_there_is_no_snapshot(tmp_path: Path) -> None:
    ended = run(tmp_path, LOST_IN_AN_UPDATE, "--workers", "2")
    assert ended.code == 4, ended.err
    assert "workers were lost while the model changed, and there is no snapshot to go back to" in ended.err
