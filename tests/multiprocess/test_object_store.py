"""Runs of several processes that keep their snapshots in an object store, too, and lose everything else."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import s3
from commands import alive_workers, finish, kill_all, start, steps_done, summary, wait_for_step
from runs import CHANCY, make_trainer, step_lines
from s3 import BUCKET, S3

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]
STEPS = 40
RECIPE = replace(CHANCY, duration=f"{STEPS} steps", schedule=True, accuracy=False, trainer={"virtual_workers": 4})
SLOWLY = replace(RECIPE, sample_s=0.005)  # so that there is time to kill it
VERY_SLOWLY = replace(RECIPE, sample_s=0.02)  # so that a copy is there long before the end, on any machine
EVERY_7 = ["--set", "snapshots.every=7 steps"]


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    if not s3.is_here():
        pytest.skip("s3fs and a server are not in .venv/objects: make test installs them")
    with s3.serve() as made:
        yield made


@pytest.fixture
def bucket(server: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    return server


def copied(run: Path) -> list[int]:
    """The steps whose copies are on record."""
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]] if path.exists() else []
    return [line["step"] for line in lines if line["event"] == "copied"]


def kill_after(process: subprocess.Popen[str], run: Path, step: int, more_than: int) -> None:
    """Kill everything at some time after `step`, with a copy on record that is newer than `more_than`."""
    deadline = time.monotonic() + 150
    while process.poll() is None and time.monotonic() < deadline:
        if steps_done(run) >= step and max(copied(run), default=0) > more_than:
            break
        time.sleep(0.02)
    assert process.poll() is None, "it was to be killed, and came to its end"
    kill_all(process)


@pytest.mark.parametrize("lost", [[2], pytest.param([3, 1, 2], marks=pytest.mark.slow)], ids=["once", "thrice"])
def test_run_that_loses_its_machine_ends_with_the_bits_of_an_undisturbed_one(
    bucket: S3, lost: list[int], tmp_path: Path
) -> None:
    """So many workers on each machine that is lost; three on the last one, whose disk is as empty as the others'."""
    whole = make_trainer(RECIPE, tmp_path / "whole").fit(RECIPE.duration)
    to = ["--set", f"snapshots.to=s3://{BUCKET}/{tmp_path.name}"]
    begun = 0
    for number, workers in enumerate(lost):
        run = tmp_path / f"machine-{number}"
        step = 9 + 9 * number + random.randint(0, 4)
        kill_after(start(workers, run, VERY_SLOWLY, [*EVERY_7, *to]), run, step, begun)
        begun = max(bucket.whole(f"{tmp_path.name}/"))
        assert begun >= 7
        shutil.rmtree(run)
    last = tmp_path / "last"
    output = finish(start(3, last, RECIPE, [*EVERY_7, *to]))
    assert summary(last)["status"] == "completed", output
    assert f"brought the snapshot of step {begun}" in " ".join(output.split()), output
    assert summary(last)["weights_sha256"] == whole.weights_sha256
    assert [line["step"] for line in step_lines(last)] == list(range(1, STEPS + 1))
    assert [line["loss"] for line in step_lines(last)] == [line["loss"] for line in step_lines(tmp_path / "whole")]
    assert summary(last)["restarts"] == len(lost)

    kept = bucket.whole(f"{tmp_path.name}/")
    assert kept[-1] == STEPS
    assert len(kept) <= 3
    folders = {name.split("/")[1] for name in bucket.names(f"{tmp_path.name}/") if "/step-" in name}
    assert len(folders) == len(kept), "what broke off is removed"
    _look_with_the_command(bucket, tmp_path.name, kept)


def _look_with_the_command(bucket: S3, name: str, kept: list[int]) -> None:
    place = f"s3://{BUCKET}/{name}"
    [damaged] = [each for each in bucket.names(f"{name}/step-{kept[-1]:08d}") if "/tensors-00000" in each]
    bucket.flip(damaged)
    code = "import sys; from manyhosts.cli.main import main; sys.exit(main(['snapshots', 'ls', sys.argv[1], '--json']))"
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, timeout=120)
    listed = json.loads(done.stdout)
    assert [(one["step"], one["condition"]) for one in listed if not one["best"]] == [
        (step, "damaged" if step == kept[-1] else "whole") for step in kept[::-1]
    ]
    assert done.stderr == ""


def test_bucket_that_is_not_there_is_said_once_before_the_first_step(bucket: S3, tmp_path: Path) -> None:
    process = start(2, tmp_path / "run", RECIPE, ["--set", "snapshots.to=s3://nobody-has-this/run"])
    output = finish(process)
    assert process.returncode == 2, output
    assert output.count("there is no 'nobody-has-this' to keep snapshots in") == 1, output
    assert "s3://nobody-has-this/run" in output
    assert "Traceback" not in output
    assert not steps_done(tmp_path / "run")


def test_when_the_leader_is_killed_the_next_one_goes_on_copying(tmp_path: Path) -> None:
    run, pids, second = tmp_path / "run", tmp_path / "pids", tmp_path / "second"
    options = [*EVERY_7, "--set", f"snapshots.to={second}"]
    process = start(2, run, SLOWLY, options, pids=pids)
    wait_for_step(process, run, 10)
    os.kill(alive_workers(pids)[0], signal.SIGKILL)
    output = finish(process)
    assert summary(run)["status"] == "completed", output
    assert copied(run)[-1] == STEPS
    assert [path for path in second.glob(f"step-{STEPS:08d}.*/manifest.json")]
