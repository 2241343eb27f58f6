"""A run directory is one run's at a time; a run that was stopped says the command that resumes it, and it does."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from commands import SCRIPT, alive_workers, finish, kill_all, steps_done, summary, wait_for_step
from launching import MANYHOSTS, environment, run, wait_until
from ranks import run_ranks
from runs import Recipe, make_trainer, samples_by_step, step_lines, trained

from manyhosts.errors import ConfigError
from manyhosts.records import run_lock

pytestmark = pytest.mark.multiprocess
STEPS = 120
SLOW = Recipe(samples=150, batch=16, duration=f"{STEPS} steps", augment=True, accuracy=False, sample_s=0.05)
PYTHON = [sys.executable, str(SCRIPT)]


def command(folder: Path, words: Sequence[str], recipe: Recipe, **variables: str) -> subprocess.Popen[str]:
    paths = [str(SCRIPT.parents[1]), *os.environ["PYTHONPATH"].split(os.pathsep)]
    own = {"RECIPE": json.dumps(asdict(recipe)), "PIDS": str(folder / "pids"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        words,
        cwd=folder,
        env={**environment(), "PYTHONPATH": os.pathsep.join(paths), **own, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def to_command(process: subprocess.Popen[str], pids: Path) -> None:
    process.send_signal(signal.SIGINT)


def to_workers(process: subprocess.Popen[str], pids: Path) -> None:
    """As `scancel --signal=INT` does: the numbers of these signals must not be summed."""
    for pid in alive_workers(pids):
        os.kill(pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("words", "workers", "interrupt"),
    [
        (PYTHON, 1, to_command),
        ([*MANYHOSTS, "run", "--workers", "2", str(SCRIPT)], 2, to_command),
        ([*MANYHOSTS, "run", "--workers", "3", str(SCRIPT)], 3, to_workers),
    ],
    ids=["python", "head", "workers"],
)
def test_run_is_alone_and_after_ctrl_c_goes_on_by_the_command_that_it_says(
    tmp_path: Path, words: list[str], workers: int, interrupt: Callable[..., None]
) -> None:
    (tmp_path / "pids").mkdir()
    first = command(tmp_path, words, SLOW)
    try:
        wait_until(lambda: list(tmp_path.glob("runs/*/metrics.jsonl")) != [], "it trains")
        [run_dir] = tmp_path.glob("runs/*")
        wait_for_step(first, run_dir, 1)
        refused = {"run": [*MANYHOSTS, "run", "--resume", "last", "--workers", "2", str(SCRIPT)]}
        if words is PYTHON:
            refused["detached"] = [*MANYHOSTS, "run", "--detach", "--run-dir", str(run_dir), str(SCRIPT)]
        else:
            refused["python"] = PYTHON
        for how, other in refused.items():
            second = command(tmp_path, other, SLOW, **({"MANYHOSTS_RUN_DIR": str(run_dir)} if how == "python" else {}))
            said = finish(second)
            assert second.returncode == 2, said
            assert f"process {first.pid} on host {os.uname().nodename}" in said
        assert not (run_dir / "detached").exists()
        assert first.poll() is None
        interrupt(first, tmp_path / "pids")
        said = finish(first)
    except BaseException:
        kill_all(first)
        raise
    assert first.returncode == 130, said
    assert summary(run_dir)["reason"] == "asked to stop by SIGINT (Ctrl-C)", said
    assert "interrupted ─ asked to stop by SIGINT (Ctrl-C)" in said
    stopped_at = steps_done(run_dir)
    [again] = [line.partition("resume with: ")[2] for line in said.splitlines() if "resume with: " in line]
    assert goes_on(tmp_path, again) == 0
    assert [line["step"] for line in step_lines(run_dir)] == list(range(1, STEPS + 1))
    assert summary(run_dir)["steps_redone"] == 0
    assert stopped_at < STEPS
    trained(workers, replace(SLOW, sample_s=0), tmp_path / "whole")
    assert summary(run_dir)["weights_sha256"] == summary(tmp_path / "whole")["weights_sha256"]
    assert samples_by_step(run_dir) == samples_by_step(tmp_path / "whole")
    assert list(tmp_path.glob("runs/*")) == [run_dir], "no other directory was begun"


def goes_on(folder: Path, again: str) -> int:
    """The exit code of what a user types who copies the line."""
    typed = shlex.split(again)
    variables = dict([typed.pop(0).split("=", 1)]) if "=" in typed[0] else {}
    words = [*MANYHOSTS, *typed[1:]] if typed[0] == "manyhosts" else typed
    process = command(folder, words, replace(SLOW, sample_s=0), **variables)
    said = finish(process)
    assert process.returncode == 0, said
    return process.returncode


def attempt(rank: int, run_dir: Path) -> Any:
    try:
        make_trainer(Recipe(duration="2 steps", accuracy=False), run_dir).fit("2 steps")
    except ConfigError as error:
        return error.what
    return "trained"


def train_where_nothing_is_named(rank: int, folder: Path) -> str:
    os.chdir(folder)
    made = make_trainer(Recipe(accuracy=False), None)
    return str(made.fit("2 steps").run_dir.relative_to(folder))


def test_empty_name_of_a_run_directory_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYHOSTS_RUN_DIR", "")
    first, second = run_ranks(2, train_where_nothing_is_named, tmp_path)
    assert first == second
    assert [f"runs/{path.name}" for path in (tmp_path / "runs").iterdir()] == [first], "one for all"


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_workers_that_nobody_of_ours_launched_are_refused_alike(tmp_path: Path, workers: int) -> None:
    lock = run_lock.take(tmp_path / "run", "of this process")
    assert lock is not None
    reported = run_ranks(workers, attempt, tmp_path / "run")
    assert len(set(reported)) == 1
    assert f"process {os.getpid()} on host" in reported[0]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [run_lock.NAME], "nothing was written"
    lock.release()
    assert run_ranks(workers, attempt, tmp_path / "run") == ["trained"] * workers


def compete(rank: int, run_dir: Path, go: Path) -> str:
    os.environ.pop(run_lock.VARIABLE, None)
    wait_until(go.exists, "all are there")
    try:
        run_lock.take(run_dir, run_lock.token_of_this_run())
    except ConfigError:
        return "refused"
    (go.parent / f"taken-{rank}").touch()
    wait_until(lambda: len(list(go.parent.glob("done-*"))) == 3, "the others were refused")
    return "taken"


def compete_and_tell(rank: int, run_dir: Path, go: Path) -> str:
    (go.parent / f"here-{rank}").touch()
    if rank == 0:
        wait_until(lambda: len(list(go.parent.glob("here-*"))) == 4, "all are there")
        go.touch()
    reported = "refused"
    try:
        reported = compete(rank, run_dir, go)
    finally:
        (go.parent / f"done-{rank}").touch()
    return reported


def test_of_four_that_come_at_the_same_moment_one_has_the_directory(tmp_path: Path) -> None:
    reported = run_ranks(4, compete_and_tell, tmp_path / "run", tmp_path / "go")
    assert sorted(reported) == ["refused"] * 3 + ["taken"]


FAILS = """
    import torch, manyhosts as mh
    from torch import nn
    def step(model, batch):
        if model.training and next(counted) >= 12:  # not in a look, which would only say so
            raise ValueError("a slip")
        return model(batch[0]).square().mean()
    counted = iter(range(1000))
    trainer = mh.Trainer(
        model=lambda: nn.Linear(2, 1), step=step, optimizer=lambda p: torch.optim.Adam(p, lr=0.1),
        data=mh.Data(train=torch.utils.data.TensorDataset(torch.ones(64, 2)), batch_size=4),
        snapshots=mh.Snapshots(every="2 steps"),
    )
    trainer.fit("1 epochs")
"""


def test_run_that_failed_says_the_command_too_and_one_that_never_began_does_not(tmp_path: Path) -> None:
    ended = run(tmp_path, FAILS, arguments=["--size", "3 4"])
    assert ended.code == 1, ended.err
    script = str(tmp_path / "script.py")
    typed = ["manyhosts", "run", "--run-dir", str(tmp_path / "run"), script, "--size", "3 4"]
    assert ended.err.splitlines()[-1] == f"  resume: {shlex.join(['manyhosts', 'run', '--run-dir', 'run', *typed[4:]])}"
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    [run_dir] = tmp_path.glob("runs/*")
    again = f"MANYHOSTS_RUN_DIR=runs/{run_dir.name} {shlex.join([sys.executable, script])}"
    assert done.stderr.splitlines()[-1] == f"manyhosts: resume with: {again}"
    never = run(tmp_path, "raise ValueError('at once')", name="never.py")
    assert never.code == 2, "another script's directory"
