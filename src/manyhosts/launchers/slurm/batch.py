"""The batch script's only line of work: the head of the job, on its first node; and a new place in the queue in time.

    python -m manyhosts.launchers.slurm.batch RUN_DIR/job.json

Slurm sends SIGUSR1 here some seconds before the time limit. The workers then make a snapshot and end, and the job is
queued again under its own number: it continues from there in the same run directory.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from manyhosts.control import job_file
from manyhosts.control.job import Job
from manyhosts.control.screen import say_last
from manyhosts.errors import ManyhostsError
from manyhosts.launchers import choices
from manyhosts.launchers.commands import run_command
from manyhosts.launchers.slurm.slurm import Slurm
from manyhosts.records.run_directory import RunDirectory

_TO_REQUEUE_S = 15
"""What is kept of the warning for asking Slurm, and for the agents to leave."""


_IN_VAIN = (
    "manyhosts: the time limit is near, and no step was saved since this job began, so it is not queued again: the same"
    " would come out; give it more time with -o time=, or see what its first step waits for\n"
)


def main(words: list[str] | None = None) -> int:
    """Returns the exit code of the run."""
    [path] = sys.argv[1:] if words is None else words
    warned: list[int] = []

    def hear(number: int, _: object) -> None:
        warned.append(number)
        os.kill(os.getpid(), signal.SIGTERM)  # for the head, which asks the workers to save and end

    signal.signal(signal.SIGUSR1, hear)
    try:
        job = _of_this_task(job_file.load(Path(path)))
        before = _newest_snapshot(job.run_dir)
        code = Slurm().run(job)
    except ManyhostsError as error:
        sys.stderr.write(f"manyhosts: {error}\n")
        return error.exit_code
    if warned and code != 0 and choices.yes(job.options, "requeue", default=True):
        # without a run.json it is no trainer of ours, and what another script keeps is not known
        if RunDirectory(job.run_dir).run_json.exists() and _newest_snapshot(job.run_dir) == before:
            say_last(sys.stderr, _IN_VAIN)
            return code
        near = "manyhosts: the time limit is near: the job is queued again, and continues from its last snapshot\n"
        say_last(sys.stderr, near)
        run_command(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]])
    return code


def _newest_snapshot(run_dir: Path) -> str:
    return max((path.name for path in RunDirectory(run_dir).snapshots.glob("step-*")), default="")


def _of_this_task(job: Job) -> Job:
    """`job` with as much time to save as the warning leaves, and with a run directory for each task of an array."""
    warning_s = choices.count(job.options, "warning", 90)
    job = replace(job, farewell_s=max(job.farewell_s, warning_s - _TO_REQUEUE_S))
    task = os.environ.get("SLURM_ARRAY_TASK_ID")
    return replace(job, run_dir=job.run_dir / f"task-{task}") if task is not None else job


if __name__ == "__main__":
    sys.exit(main())
