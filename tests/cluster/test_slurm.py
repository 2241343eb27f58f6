"""Real Slurm on four hosts: in an allocation, as a batch job, warned before its limit, by the user's srun."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engines import (
    FOLDER,
    MANYHOSTS,
    environment,
    equal_hashes,
    examined,
    furthest_from_one_process,
    hashes,
    lacks,
    recipe,
    run,
    run_alone,
    share,
)
from launching import BEGINNING, HANGS_S, wait_until
from slurms import start_slurm
from testbed import needs

from manyhosts.lab import Lab

pytestmark = needs("slurmctld", "slurmd", "munged")

LONG = """
import os, signal, time
from pathlib import Path
seen = Path("long-seen")
def save(*_):
    if os.environ["RANK"] == "0":
        seen.write_text("saved")
    os._exit(0)
signal.signal(signal.SIGTERM, save)
print("continues" if seen.exists() else "begins", os.environ["MANYHOSTS_RUN_DIR"], flush=True)
while not seen.exists():
    time.sleep(0.1)
"""
STUCK = """
import os, time
from pathlib import Path
if os.environ["RANK"] == "0":
    Path(os.environ["MANYHOSTS_RUN_DIR"], "run.json").write_text("{}")  # as a Trainer that makes no step
print("knows", len(os.environ["PASSWORD"]), flush=True)
while True:
    time.sleep(0.1)
"""


@pytest.fixture(autouse=True, scope="module")
def folder(four: Lab, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all hosts share."""
    shared = tmp_path_factory.mktemp("shared")
    share(four, shared)
    (shared / "long.py").write_text(LONG)
    (shared / "stuck.py").write_text(STUCK)
    start_slurm(four)
    return shared


def state(four: Lab, handle: str) -> dict[str, str]:
    words = [*MANYHOSTS, "status", "--json", handle]
    found: dict[str, str] = json.loads(four[1].run(words, env=environment()).stdout)
    return found


def wait_for(four: Lab, handle: str, wanted: str, timeout_s: float = HANGS_S) -> None:
    """Wait until the job is `wanted`, or say what it was instead."""
    found = state(four, handle)
    deadline = time.monotonic() + timeout_s
    while found["state"] != wanted:
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s in vain for a job to be {wanted}: {found}"
        time.sleep(0.1)
        found = state(four, handle)


def test_four_hosts_in_an_allocation_train_to_the_weights_of_one_process(
    four: Lab, folder: Path, tmp_path: Path
) -> None:
    words = ["--on", "slurm", "--run-dir", f"{FOLDER}/run", "recipe_script.py"]
    done = run(four[0], words, before=["salloc", "--quiet", "--nodes", "4"])
    assert done.returncode == 0, done.stderr
    found = hashes(done.stdout)
    assert [found[rank][0] for rank in range(4)] == four.names
    assert len({digest for _, digest in found.values()}) == 1
    assert furthest_from_one_process(folder / "run" / "weights-0.npz", tmp_path) < 1e-5


@pytest.mark.slow  # such scripts on hosts: test_foreign_scripts
def test_script_with_lightning_trains_in_an_allocation(four: Lab, folder: Path) -> None:
    words = ["--on", "slurm", "--run-dir", f"{FOLDER}/lightning", "lightning_script.py", "w.pt"]
    done = run(four[0], words, before=["salloc", "--quiet", "--nodes", "2"])
    assert done.returncode == 0, done.stderr
    assert equal_hashes(done.stdout, workers=2), done.stdout
    assert (folder / "w.pt").exists()


def test_unmodified_torchrun_script_runs_as_a_batch_job_that_is_waited_for(four: Lab) -> None:
    words = ["--on", "slurm", "--nodes", "4", "-o", "time=10", "--run-dir", f"{FOLDER}/plain", "torchrun_script.py"]
    done = run(four[1], words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"sum 6 of 4 on (lab\d) sees \[\]", done.stdout)) == four.names
    [handle] = re.findall(r"slurm://\d+", done.stdout)
    assert state(four, handle)["state"] == "done"


@pytest.mark.slow  # the signal: test_preemption; the queue: tests/unit/launchers/test_slurm.py
def test_job_that_is_warned_of_its_limit_goes_on_in_the_same_run_directory(four: Lab, folder: Path) -> None:
    words = ["--on", "slurm", "--nodes", "2", "--detach", "--run-dir", f"{FOLDER}/long", "long.py"]
    handle = run(four[0], words).stdout.strip()
    number = handle.removeprefix("slurm://")
    log = folder / "long" / "logs" / f"slurm-{number}.log"
    wait_until(lambda: log.exists() and log.read_text().count("begins") == 2, "both workers run")
    four[0].run(["scancel", "--batch", "--signal", "USR1", number])
    wait_until(lambda: "queued again" in log.read_text(), "Slurm is asked")
    wait_for(four, handle, "waiting")

    wait_for(four, handle, "done", timeout_s=150)
    assert log.read_text().count(f"continues {FOLDER}/long") == 2
    assert f"begins {FOLDER}/long" in four[0].run([*MANYHOSTS, "logs", handle], env=environment()).stdout


def test_job_is_cancelled_once_and_for_all(four: Lab, folder: Path) -> None:
    (folder / "long-seen").unlink(missing_ok=True)
    words = ["--on", "slurm", "--nodes", "2", "--detach", "--run-dir", f"{FOLDER}/longer", "long.py"]
    handle = run(four[0], words).stdout.strip()
    for _ in range(2):
        four[0].run([*MANYHOSTS, "cancel", handle], env=environment())
    wait_for(four, handle, "cancelled")


def running(four: Lab) -> str:
    """The number of the one job that runs; empty where none does."""
    return str(four[0].run(["squeue", "--noheader", "--states", "R", "--format", "%A"]).stdout).strip()


def test_allocation_that_is_cancelled_while_a_run_starts_in_it_is_said_as_that(four: Lab) -> None:
    wait_until(lambda: not running(four), "no other job")
    words = [*MANYHOSTS, "run", "--on", "slurm", "--run-dir", f"{FOLDER}/taken", "long.py"]
    launcher = four[0].start(
        ["salloc", "--quiet", "--nodes", "2", *words],
        folder=FOLDER,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    wait_until(lambda: bool(running(four)), "it has its nodes")
    number = running(four)
    four[0].run(["scancel", number])
    printed, _ = launcher.communicate(timeout=HANGS_S)
    assert launcher.returncode != 0, printed
    assert f"manyhosts: Slurm has taken the nodes of this run away: job {number} is " in printed
    assert "before it said a word" not in printed


def test_job_that_never_was_and_controller_that_is_down_are_said_as_that(
    make_lab: Callable[..., Lab],
) -> None:
    [host] = hosts = make_lab(1)
    start_slurm(hosts)
    host.path("/root/train.py").write_text("print(1)\n")

    def said(*words: str) -> tuple[int, str]:
        done = host.run([*MANYHOSTS, *words], env=environment(), check=False, timeout_s=HANGS_S)
        return done.returncode, BEGINNING.sub("", done.stderr).splitlines()[0]

    never = "manyhosts: Slurm knows no job 99999: it has long been over, or there never was one"
    assert said("cancel", "slurm://99999") == (3, never)
    [controller] = [process for process, words in host.processes().items() if words.startswith("slurmctld")]
    os.kill(controller, signal.SIGKILL)
    run_words = ("run", "--on", "slurm", "--nodes", "1", "--run-dir", "/root/down", "train.py")
    for words in (("status", "slurm://1"), ("cancel", "slurm://1"), run_words):
        code, first = said(*words)
        assert (code, first.startswith("manyhosts: Slurm's controller does not answer: ")) == (3, True), first
    assert not host.path("/root/down").exists()


def test_launcher_that_is_ended_while_slurm_takes_its_job_leaves_none_in_the_queue(four: Lab, folder: Path) -> None:
    (folder / "long-seen").unlink(missing_ok=True)
    asked, slow = folder / "asked", folder / "slow"
    slow.mkdir()
    (slow / "sbatch").write_text(f'#!/bin/sh\n/usr/bin/sbatch "$@" || exit\ntouch {FOLDER}/asked\nsleep 1\n')
    (slow / "sbatch").chmod(0o755)
    words = [*MANYHOSTS, "run", "--on", "slurm", "--nodes", "2", "--run-dir", f"{FOLDER}/ended", "long.py"]
    variables = environment(PATH=f"{FOLDER}/slow:{os.environ['PATH']}")
    launcher = four[1].start(words, folder=FOLDER, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_until(lambda: asked.exists() or launcher.poll() is not None, "Slurm has taken the job")
    four[1].end(launcher, signal.SIGTERM)
    printed, _ = launcher.communicate(timeout=120)
    assert launcher.returncode == 130, printed
    [handle] = re.findall(r"slurm://\d+", printed)
    wait_for(four, handle, "cancelled")


def test_job_keeps_its_secrets_says_why_another_waits_and_is_not_queued_again_in_vain(four: Lab, folder: Path) -> None:
    secret, run_dir = "hunter2-of-nobody", folder / "stuck"
    words = ["--on", "slurm", "--nodes", "2", "--detach", "--env", "PASSWORD", "--run-dir", f"{FOLDER}/stuck"]
    variables = environment(PASSWORD=secret, FORCE_COLOR="1", CLICOLOR_FORCE="1")
    sent = four[0].run([*MANYHOSTS, "run", *words, "stuck.py"], folder=FOLDER, env=variables)
    handle = sent.stdout.strip()
    number = handle.removeprefix("slurm://")
    log = run_dir / "logs" / f"slurm-{number}.log"
    wait_until(lambda: log.exists() and log.read_text().count("knows 17") == 2, "both workers run")
    found = state(four, handle)
    assert (found["state"], found["reason"], found["code"]) == ("running", "RUNNING", None)
    holding = [path for path in run_dir.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert [(path.name, path.stat().st_mode & 0o777) for path in holding] == [("job.json", 0o600)]
    shown = [["scontrol", "show", "job", "-dd", number], ["scontrol", "write", "batch_script", number, "-"]]
    assert not [words for words in shown if secret in four[1].run(words).stdout]
    assert not [words for host in four for words in host.processes().values() if secret in words]

    words = [
        *MANYHOSTS,
        "run",
        "--on",
        "slurm",
        "--nodes",
        "4",
        "-o",
        "exclusive=yes",
        "--run-dir",
        f"{FOLDER}/waits",
        "torchrun_script.py",
    ]
    waits = four[1].start(words, folder=FOLDER, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert waits.stdout is not None
    assert BEGINNING.match(waits.stdout.readline())
    other = waits.stdout.readline().split()[-1]
    assert any("the job waits: PENDING (" in line for line in iter(waits.stdout.readline, "")), "with Slurm's reason"
    four[1].end(waits, signal.SIGTERM)
    assert waits.communicate(timeout=120)[0].endswith("the job is being cancelled\n")
    wait_until(lambda: state(four, other)["state"] == "cancelled", "it is cancelled")

    four[0].run(["scancel", "--batch", "--signal", "USR1", number])
    wait_until(lambda: state(four, handle)["state"] not in ("running", "waiting"), "it is over")
    assert "no step was saved since this job began, so it is not queued again" in log.read_text()
    assert "\x1b" not in log.read_text(), "no colours in a file"


def test_script_that_the_users_own_srun_starts_knows_its_place(four: Lab) -> None:
    words = ["srun", "--quiet", "--nodes", "2", "env", recipe(), f"MANYHOSTS_RUN_DIR={FOLDER}/own"]
    done = four[0].run([*words, sys.executable, "recipe_script.py"], folder=FOLDER, env=environment(), timeout_s=150)
    found = hashes(done.stdout)
    assert len(found) >= 1, done.stderr
    assert len({digest for _, digest in found.values()}) == 1
    assert "2 workers on 2 hosts" in done.stdout


@pytest.mark.parametrize("gone", ["script", pytest.param("folder", marks=pytest.mark.slow)])
def test_host_of_slurm_that_does_not_share_the_folder_is_named_with_what_it_lacks(four: Lab, gone: str) -> None:
    done = run_alone(four, ["--on", "slurm"], gone, before=["salloc", "--quiet", "--nodes", "4"])
    assert done.returncode == 3, done.stderr
    assert lacks(gone) in done.stderr
    assert "host lab4, /root/alone" in done.stderr
    assert "here\n" not in done.stdout, "nothing has run"


def test_doctor_examines_the_nodes_that_slurm_gives_it(four: Lab, folder: Path) -> None:
    found = examined(four[0], ["--on", "slurm", "--nodes", "2", "--data", f"{FOLDER}/long.py"])
    assert [host["name"] for host in found["hosts"]] == ["lab1", "lab2"]
    assert [finding["what"] for finding in found["findings"] if finding["level"] == "error"] == []
    assert [pair["trouble"] for pair in found["pairs"]] == ["", ""]
    assert (found["exit_code"], found["meeting"]["right"]) == (0, True)
    assert not (folder / "runs").exists()


def test_study_and_plan_are_made_on_the_nodes_that_slurm_gives(four: Lab) -> None:
    def made(verb: str, *words: str) -> dict[str, Any]:
        command = [*MANYHOSTS, verb, "--on", "slurm", "--nodes", "1,2", "--env", recipe(), "--json", *words]
        done = four[0].run(command, folder=FOLDER, env=environment(), check=False, timeout_s=400)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    study = made("study", "--budget", "12 steps", "--run-dir", f"{FOLDER}/study", "recipe_script.py")
    found = [(each["nodes"], each["status"], each["steps"]) for each in study["points"]]
    assert found == [(1, "completed", 12), (2, "completed", 12)]
    assert study["points"][0]["validation"] == pytest.approx(study["points"][1]["validation"], rel=1e-5)
    plan = made("plan", "--seconds", "5", "recipe_script.py")
    assert {each["nodes"] for each in plan["predictions"]} == {1, 2}
    assert plan["recommendation"]["why"]
