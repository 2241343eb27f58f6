"""Slurm: inside an allocation its srun starts the agents; outside one, a batch script is written and queued."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from manyhosts.control import job_file, variables
from manyhosts.control.agent.agent import TOKEN
from manyhosts.control.display import Display
from manyhosts.control.head.head import Head
from manyhosts.control.head.placement import Placement
from manyhosts.control.job import Job, Plan
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses
from manyhosts.launchers import choices, detached
from manyhosts.launchers.commands import Run, run_command
from manyhosts.launchers.detached import State, Status
from manyhosts.launchers.slurm import script as slurm_script
from manyhosts.launchers.slurm.script import OPTIONS, hosts_of

_FIRST_SPECIAL_STEP = 2**32 - 10
"""Steps are counted from 0; those above are Slurm's own: the batch script, an interactive shell."""
_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "REQUEUE_FED", "CONFIGURING"), "waiting"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT"), "running"),
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
}


class Slurm:
    """Starts one agent per node through Slurm."""

    OPTIONS = OPTIONS

    def __init__(
        self,
        present: Mapping[str, str] | None = None,
        run: Run = run_command,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`present` are the variables that tell whether this is inside an allocation; `run` asks Slurm's programs."""
        self._present = os.environ if present is None else present
        self._run, self._wait = run, wait

    def plan(self, job: Job) -> Plan:
        """srun inside an allocation; outside one, a batch script and what it is to run.

        Raises:
            ConfigError: an option is unknown, the allocation is too small, or this is one task of many.
        """
        slurm_script.check(job)
        if job.hosts:
            raise ConfigError("Slurm chooses the hosts", where="--hosts", fix="use --nodes N, and -o nodelist=a,b")
        if int(self._present.get("SLURM_STEP_ID", _FIRST_SPECIAL_STEP)) < _FIRST_SPECIAL_STEP:
            raise ConfigError(
                "this is a task that srun has started, and would start all workers once more",
                where="SLURM_STEP_ID",
                fix="call `manyhosts run --on slurm` without srun: it calls srun itself",
            )
        job = choices.with_a_worker_for_each_gpu(job)
        return self._inside(job) if "SLURM_JOB_ID" in self._present else _outside(job)

    def submit(self, plan: Plan, display: Display) -> int:
        """Run the job to its end; outside an allocation, queue it and show what it prints. Ctrl-C ends it.

        Raises:
            LaunchError: Slurm refused, or was not reached.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        if plan.files:
            return detached.send_and_follow(self, "slurm", plan, display, done="queued", wait=self._wait)
        placement = Placement(
            plan.job.nodes, lambda nodes, head: _srun(plan.job, plan.hosts, nodes, head), {TOKEN: "TOKEN"}
        )
        address = addresses.towards(plan.hosts)
        return Head(plan.job, plan.hosts, placement.start_agent, display, address=address).run()

    def send(self, plan: Plan) -> str:
        """Queue the job. Returns its number.

        Raises:
            ConfigError: this is inside an allocation.
            LaunchError: Slurm refused, or was not reached.
        """
        if not plan.files:
            raise ConfigError(
                "an allocation ends with its shell, and so does what runs in it",
                where="--detach",
                fix="leave --detach out, or start it outside of this allocation",
            )
        (plan.job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for path, text in plan.files.items():
            if path == str(_job_file(plan.job)):
                job_file.write(plan.job, Path(path))  # the plan shows it without what is hidden
            else:
                Path(path).write_text(text)
        return self._run(plan.command).strip().partition(";")[0]  # number;cluster

    def status(self, name: str) -> Status:
        """What scontrol knows of it, or sacct where it is over for long."""
        try:
            told = self._run(["scontrol", "show", "job", "-o", _number(name)])
        except LaunchError as trouble:
            if "Invalid job id" not in trouble.what:
                raise
            return self._status_long_after(name)
        facts = dict(re.findall(r"(\S+?)=(\S*)", told.splitlines()[0]))
        state = facts.get("JobState", "")
        word = _STATES.get(state, "failed")
        reason = facts.get("Reason", "")
        return Status(
            state=word,
            reason=" ".join([state, *([f"({reason})"] if reason not in ("", "None") else [])]),
            hosts=facts.get("NodeList", "").replace("(null)", ""),
            log=facts.get("StdOut", ""),
            code=None if word in ("waiting", "running") else int(facts.get("ExitCode", "0:0").partition(":")[0]),
        )

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """The lines of the batch script's output."""
        status = self.status(name)
        if not status.log:
            raise LaunchError(
                f"Slurm does not know job {name} any more, and so not where its log is",
                where=f"slurm://{name}",
                fix=f"look for logs/slurm-{name}.log in its run directory",
            )
        read = detached.growing(Path(status.log))
        return detached.tail(read, lambda: not follow or self.status(name).over, self._wait)

    def cancel(self, name: str) -> None:
        """scancel, which forgives a job that is over."""
        try:
            self._run(["scancel", _number(name)])
        except LaunchError as trouble:
            if "Invalid job id" not in trouble.what and "already completing" not in trouble.what:
                raise

    def _status_long_after(self, name: str) -> Status:
        told = ""
        with contextlib.suppress(LaunchError):  # this cluster keeps no accounts
            told = self._run(["sacct", "-n", "-X", "-P", "-j", _number(name), "-o", "State,ExitCode,NodeList"])
        state, _, rest = (told.splitlines() or ["|"])[0].partition("|")
        if not state:
            return Status(state="unknown", reason="Slurm does not know it any more")
        code, _, hosts = rest.partition("|")
        word = state.split()[0]  # CANCELLED by 1000
        code = code.partition(":")[0]
        return Status(
            state=_STATES.get(word, "failed"), reason=state, hosts=hosts, code=int(code) if code.isdecimal() else None
        )

    def _inside(self, job: Job) -> Plan:
        nodes = hosts_of(self._present.get("SLURM_JOB_NODELIST", ""))
        if job.nodes > len(nodes):
            raise ConfigError(
                f"this allocation has {len(nodes)} nodes, and --nodes is {job.nodes}",
                where=f"Slurm job {self._present['SLURM_JOB_ID']}",
                fix=f"leave --nodes out, or allocate more: salloc --nodes {job.nodes}",
            )
        if not job.nodes_are_chosen:
            job = replace(job, nodes=len(nodes))
        hosts = tuple(nodes[: job.nodes])
        everybody = range(job.nodes)
        return Plan(
            job=job,
            hosts=hosts,
            agents=tuple(_agent_words(job, "ADDRESS:PORT", str(node)) for node in everybody),
            workers=variables.of_all(job),
            command=tuple(_srun(job, hosts, everybody, "ADDRESS:PORT")),
        )


def _outside(job: Job) -> Plan:
    script = job.run_dir / "job.sbatch"
    shown = job_file.text_of(job_file.without_hidden(job))
    files = {str(script): slurm_script.script(job), str(_job_file(job)): shown}
    return Plan(job=job, hosts=(), agents=(), workers=(), files=files, command=("sbatch", "--parsable", str(script)))


def _job_file(job: Job) -> Path:
    return job.run_dir / "job.json"


def _srun(job: Job, hosts: Sequence[str], nodes: Sequence[int], head: str) -> list[str]:
    """One agent on each of `nodes`. One that fails does not take the others with it: that is for the head to say."""
    count = str(len(nodes))
    cores = ["--cpus-per-task", job.options["cpus"]] if "cpus" in job.options else []
    return [
        *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"),
        *("--nodelist", ",".join(hosts[node] for node in nodes), *cores),
        *("--cpu-bind", "none", "--kill-on-bad-exit=0", "--overlap", "--unbuffered", "--quit-on-interrupt"),
        *_agent_words(job, head, ",".join(map(str, nodes))),
    ]


def _agent_words(job: Job, head: str, nodes: str) -> tuple[str, ...]:
    python = job.options.get("python", sys.executable)
    return (python, "-P", "-m", "manyhosts.control.agent.node", "--head", head, "--engine", "slurm", "--nodes", nodes)


def _number(name: str) -> str:
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise ConfigError(f"{name!r} is no number of a job", where=f"slurm://{name}", fix="write it as slurm://4711")
    return name
