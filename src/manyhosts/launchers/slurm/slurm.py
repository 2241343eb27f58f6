"""Slurm: inside an allocation its srun starts the agents; outside one, a batch script is written and queued."""

from __future__ import annotations

import contextlib
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from manyhosts.control import job_file
from manyhosts.control.display import Display
from manyhosts.control.job import Job
from manyhosts.control.plan import Plan
from manyhosts.errors import ConfigError, LaunchError, RankLost
from manyhosts.hosts.containers import Container
from manyhosts.launchers import choices, container_options, detached
from manyhosts.launchers.commands import Run, run_command
from manyhosts.launchers.detached import State, Status
from manyhosts.launchers.engine import Engine

_FLAGS = {
    "partition": ("--partition", "the partition to queue in"),
    "account": ("--account", "the account that pays"),
    "time": ("--time", "the time limit, as Slurm writes it: 2:00:00 is two hours, 1-12 a day and a half"),
    "gpus": ("--gpus-per-node", "GPUs of each node: 4, or a100:4"),
    "qos": ("--qos", "the quality of service"),
    "constraint": ("--constraint", "features that the nodes must have"),
    "mem": ("--mem", "memory of each node: 64G; 0 is all"),
    "cpus": ("--cpus-per-task", "cores of each node"),
    "nodelist": ("--nodelist", "the nodes to use"),
    "exclude": ("--exclude", "nodes not to use"),
    "reservation": ("--reservation", "the reservation to use"),
    "array": ("--array", "the run several times, each with a run directory of its own: 0-3, or 0-3%1 one by one"),
    "dependency": ("--dependency", "what to wait for: afterok:4711"),
}
RUNTIMES = (*container_options.OF_FILES, container_options.PYXIS)
"""Not Docker, whose containers are outside of the job: Slurm would neither count nor end them."""
OPTIONS = {
    **{key: meaning for key, (_, meaning) in _FLAGS.items()},
    "exclusive": "yes: no other jobs on these nodes",
    "requeue": "no: do not continue in a new job when the time limit comes or a node fails",
    "warning": "seconds before the time limit at which a snapshot is made and the job queued again (default 90)",
    "python": "the Python on the nodes, or in the container, if it is not where it is here",
    **container_options.options(RUNTIMES),
}


def check(job: Job) -> None:
    """See that Slurm can be asked for `job`.

    Raises:
        ConfigError: an option contradicts another, or a path cannot be written in a batch script.
    """
    choices.yes(job.options, "requeue", default=True)
    choices.yes(job.options, "exclusive", default=False)
    choices.count(job.options, "warning", 90)
    for what, value in (("working directory", str(job.folder)), ("run directory", str(job.run_dir))):
        if not value.isprintable() or '"' in value or "\\" in value:  # it would be read as another line or option
            raise ConfigError(
                f"the {what} is {value!r}, which cannot be written in a batch script",
                where=f"the {what}",
                fix="use one whose path has no quotation marks, backslashes or control characters",
            )
    if choices.gpus(job.options).isdecimal():  # Slurm knows other words, too
        choices.see_that_gpus_are_used(job)


def batch_script(job: Job) -> str:
    """The batch script. It becomes the head of the job, on its first node."""
    run_dir = str(job.run_dir).replace("%", "%%")  # %j and the like have a meaning there
    lines = {
        "--job-name": job.run_id,
        "--nodes": str(job.nodes),
        "--ntasks-per-node": "1",
        "--chdir": str(job.folder),
        "--output": f"{run_dir}/logs/slurm-{'%A_%a' if 'array' in job.options else '%j'}.log",
        "--open-mode": "append",  # a job that was queued again continues in the same log
        "--signal": f"B:USR1@{choices.count(job.options, 'warning', 90)}",
    }
    lines |= {flag: job.options[key] for key, (flag, _) in _FLAGS.items() if key in job.options}
    text = ["#!/bin/bash", *(f"#SBATCH {flag}={_quoted(value)}" for flag, value in lines.items())]
    text.append("#SBATCH --requeue" if choices.yes(job.options, "requeue", default=True) else "#SBATCH --no-requeue")
    text += ["#SBATCH --exclusive"] if choices.yes(job.options, "exclusive", default=False) else []
    python = sys.executable  # outside of containers, whose agents it starts
    if container_options.IMAGE not in job.options:
        python = job.options.get("python", python)
    start = [python, "-P", "-m", "manyhosts.launchers.slurm.batch", str(job.run_dir / "job.json")]
    return "\n".join([*text, f"exec {shlex.join(start)}", ""])


def allocation(job: Job) -> list[str]:
    """The command that gets an allocation as the batch script of `job` would, and runs the command after it there."""
    flags = [f"{flag}={job.options[key]}" for key, (flag, _) in _FLAGS.items() if key in job.options and key != "array"]
    flags += ["--exclusive"] if choices.yes(job.options, "exclusive", default=False) else []
    return ["salloc", "--quiet", f"--nodes={job.nodes}", "--ntasks-per-node=1", *flags]


def hosts_of(nodes: str) -> list[str]:
    """The hosts of what Slurm writes as `gpu[07-09,12],cpu1`, in its order."""
    found = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodes):
        before, opened, rest = part.partition("[")
        inside, _, after = rest.partition("]")
        numbers = []
        for span in inside.split(",") if opened else []:
            first, _, last = span.partition("-")
            numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
        found += [f"{before}{number}{after}" for number in numbers] if opened else [part]
    return found


def _quoted(value: str) -> str:
    return f'"{value}"' if re.search(r"\s", value) else value


_FIRST_SPECIAL_STEP = 2**32 - 10
"""Steps are counted from 0; those above are Slurm's own: the batch script, an interactive shell."""
_DOWN = re.compile(
    r"[Uu]nable to contact slurm controller|Connection refused|Socket timed out|Zero Bytes were transmitted"
)
"""What Slurm's programs say where slurmctld is not there."""
_STATES: dict[str, State] = {
    **dict.fromkeys(("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "REQUEUE_FED", "CONFIGURING"), "waiting"),
    **dict.fromkeys(("RUNNING", "COMPLETING", "STOPPED", "SIGNALING", "STAGE_OUT"), "running"),
    "COMPLETED": "done",
    "CANCELLED": "cancelled",
}


class Slurm(Engine):
    """Starts one agent per node through Slurm."""

    NAME = "slurm"
    OPTIONS = OPTIONS
    CHOOSES_HOSTS = "--nodes N, and -o nodelist=a,b"
    RUNTIMES = RUNTIMES
    NODE_NUMBER = "SLURM_PROCID"
    TASK_VARIABLES = (
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_GTIDS", "SLURM_NTASKS", "SLURM_NPROCS"),
        *("SLURM_TASKS_PER_NODE", "SLURM_STEP*", "SLURM_TASK_PID", "SLURM_SRUN_*", "PMI*"),
    )

    def __init__(
        self,
        present: Mapping[str, str] | None = None,
        run: Run = run_command,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`run` asks Slurm's programs; for the others see `Engine`."""
        super().__init__(present, wait)
        self._run = run

    def check(self, job: Job) -> Job:
        """As of every engine, and that Slurm can be asked for `job`.

        Raises:
            ConfigError: it cannot, or this is one task of many.
        """
        checked = super().check(job)
        check(job)
        if int(self._present.get("SLURM_STEP_ID", _FIRST_SPECIAL_STEP)) < _FIRST_SPECIAL_STEP:
            raise ConfigError(
                "this is a task that srun has started, and would start all workers again",
                where="SLURM_STEP_ID",
                fix="call `manyhosts run --on slurm` without srun: it calls srun itself",
            )
        return checked

    def plan(self, job: Job) -> Plan:
        """srun inside an allocation; outside one, a batch script and what it is to run.

        Raises:
            ConfigError: an option is unknown, the allocation is too small, or this is one task of many.
        """
        if "SLURM_JOB_ID" in self._present:
            return super().plan(job)
        job = self.check(job)
        script = str(job.run_dir / "job.sbatch")
        files = {script: batch_script(job), str(job.run_dir / "job.json"): job_file.shown(job)}
        return Plan(job=job, files=files, command=("sbatch", "--parsable", script))

    @property
    def inside(self) -> str:
        """The number of this job, and how often it was queued again."""
        return ".".join(self._present.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))

    def hosts(self, job: Job) -> Sequence[str]:
        """Those of this allocation.

        Raises:
            ConfigError: there are fewer than `job` asks for.
        """
        hosts = hosts_of(self._present.get("SLURM_JOB_NODELIST", ""))
        if job.nodes > len(hosts):
            raise ConfigError(
                f"this allocation has {len(hosts)} nodes, and --nodes is {job.nodes}",
                where=f"Slurm job {self._present['SLURM_JOB_ID']}",
                fix=f"leave --nodes out, or allocate more: salloc --nodes {job.nodes}",
            )
        return hosts

    def command(self, job: Job, hosts: Sequence[str], nodes: Sequence[int]) -> Sequence[str]:
        """One agent on each of `nodes`. One that fails does not take others with it: that is for the head to say."""
        count = str(len(nodes))
        cores = ["--cpus-per-task", job.options["cpus"]] if "cpus" in job.options else []
        container = self.container(job)
        is_pyxis = container is not None and container.runtime == container_options.PYXIS
        return [
            *("srun", "--nodes", count, "--ntasks", count, "--ntasks-per-node", "1"),
            *("--nodelist", ",".join(hosts[node] for node in nodes), *cores),
            *("--cpu-bind", "none", "--kill-on-bad-exit=0", "--overlap", "--unbuffered", "--quit-on-interrupt"),
            *(container.srun_options() if container is not None and is_pyxis else []),
            *self.agent(job, nodes),
        ]

    def contained(self, container: Container, agent: Sequence[str]) -> Sequence[str]:
        """With Pyxis, srun has started the container already."""
        if container.runtime == container_options.PYXIS:
            return container.looked_after(agent)
        return super().contained(container, agent)

    def submit(self, plan: Plan, display: Display) -> int:
        """As of every engine, once it is seen that srun starts containers, where it is to."""
        self._see_pyxis(plan.job)
        try:
            return super().submit(plan, display)
        except (LaunchError, RankLost) as error:
            if plan.hosts and (state := self._end_of_allocation()):
                raise LaunchError(
                    f"Slurm has taken the nodes of this run away: job {self._present['SLURM_JOB_ID']} is {state}",
                    where=error.where,
                    fix="it was cancelled (scancel), or its time is over: allocate again, and start the same command",
                ) from error
            raise

    def _end_of_allocation(self) -> str:
        """How the job that this is in has ended, in Slurm's words; empty where it continues, or that is unknown."""
        with contextlib.suppress(LaunchError, KeyError):
            status = self.status(self._present["SLURM_JOB_ID"])
            return status.reason if status.over or status.reason.startswith("COMPLETING") else ""
        return ""

    def _see_pyxis(self, job: Job) -> None:
        """See that srun knows containers, where it is to start them.

        Raises:
            LaunchError: it does not.
        """
        wanted = job.options.get(container_options.RUNTIME) == container_options.PYXIS
        if wanted and "--container-image" not in self._ask(["srun", "--help"]):
            raise LaunchError(
                "this Slurm starts no containers: its srun has no option --container-image, which Pyxis gives it",
                where=f"-o {container_options.RUNTIME}={container_options.PYXIS}",
                fix="have Pyxis installed, or use Apptainer: name a file .sif, and leave"
                f" -o {container_options.RUNTIME} out",
            )

    def allocation(self, job: Job) -> Sequence[str]:
        """salloc, outside of an allocation."""
        if "SLURM_JOB_ID" in self._present:
            return ()
        self._see_room(job)
        return allocation(self.check(job))

    def _see_room(self, job: Job) -> None:
        """See that the partition has as many nodes as are asked for: Slurm would queue the job and never start it.

        Raises:
            ConfigError: it has fewer.
        """
        try:
            reported = self._ask(["sinfo", "--noheader", "--format", "%P %D"])
        except LaunchError as trouble:
            if _DOWN.search(trouble.what):
                raise
            return  # this user may not ask: sbatch says what it thinks
        nodes: Counter[str] = Counter()
        for name, count in (line.split() for line in reported.splitlines() if len(line.split()) == 2):
            nodes[name.rstrip("*")] += int(count) if count.isdecimal() else 0
            nodes[""] += int(count) if name.endswith("*") and count.isdecimal() else 0
        asked = job.options.get("partition", "")
        most = max((nodes[name] for name in asked.split(",") if name in nodes), default=job.nodes)
        if job.nodes > most:
            name = f"the partition {asked}" if asked else "Slurm's default partition"
            raise ConfigError(
                f"{name} has {most} nodes, and --nodes is {job.nodes}: the job would wait for ever",
                where=f"-o partition={asked}" if asked else "--nodes",
                fix="ask for fewer, or for another partition with -o partition=NAME: `sinfo` lists them",
            )

    def _ask(self, words: Sequence[str]) -> str:
        """What one of Slurm's programs says.

        Raises:
            LaunchError: it refused, or Slurm is not there to be asked.
        """
        try:
            return self._run(words)
        except LaunchError as trouble:
            if not _DOWN.search(trouble.what):
                raise
            raise LaunchError(
                f"Slurm's controller does not answer: {trouble.what.partition(': ')[2]}",
                where=words[0],
                fix="see `scontrol ping`; running jobs continue without it, and the question can be asked later",
            ) from trouble

    def send(self, plan: Plan) -> str:
        """Queue the job. Returns its number.

        Raises:
            ConfigError: this is inside an allocation.
            LaunchError: Slurm refused, or was not reached.
        """
        self._see_pyxis(plan.job)
        self._see_room(plan.job)
        was_there = plan.job.run_dir.exists()
        self.write_files(plan)
        try:
            sent = self._ask(plan.command)
        except LaunchError as error:
            # Where it did not answer in time the job may be queued all the same.
            if "refused" in error.what and not _DOWN.search(error.what) and not was_there:
                shutil.rmtree(plan.job.run_dir, ignore_errors=True)
            raise
        return sent.strip().partition(";")[0]  # number;cluster

    def status(self, name: str) -> Status:
        """What scontrol knows of it, or sacct where it is over for long."""
        try:
            reported = self._ask(["scontrol", "show", "job", "-o", _number(name)])
        except LaunchError as trouble:
            if "Invalid job id" not in trouble.what:
                raise
            return self._status_long_after(name)
        facts = dict(re.findall(r"(\S+?)=(.*?)(?= [\w/:]+=|$)", reported.splitlines()[0]))
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
        """scancel, which forgives a job that is over, and says nothing of one that it does not know.

        Raises:
            LaunchError: Slurm refuses, or knows no such job.
        """
        if self.status(name).state == "unknown":
            raise LaunchError(
                f"Slurm knows no job {name}: it has long been over, or there never was one",
                where=f"slurm://{name}",
                fix="`squeue --me` lists yours",
            )
        try:
            self._ask(["scancel", _number(name)])
        except LaunchError as trouble:
            if "already completing" not in trouble.what and "Invalid job id" not in trouble.what:
                raise

    def _status_long_after(self, name: str) -> Status:
        reported = ""
        with contextlib.suppress(LaunchError):  # this cluster keeps no accounts
            reported = self._ask(["sacct", "-n", "-X", "-P", "-j", _number(name), "-o", "State,ExitCode,NodeList"])
        state, _, rest = (reported.splitlines() or ["|"])[0].partition("|")
        if not state:
            return Status(state="unknown", reason="Slurm does not know it any more")
        code, _, hosts = rest.partition("|")
        word = state.split()[0]  # CANCELLED by 1000
        code = code.partition(":")[0]
        return Status(
            state=_STATES.get(word, "failed"), reason=state, hosts=hosts, code=int(code) if code.isdecimal() else None
        )


def _number(name: str) -> str:
    if not re.fullmatch(r"\d+(_\d+)?", name):
        raise ConfigError(f"{name!r} is no number of a job", where=f"slurm://{name}", fix="write it as slurm://4711")
    return name
