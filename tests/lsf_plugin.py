"""LSF as another package would add it: an engine in one file, named by an entry point in `manyhosts.launchers`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from manyhosts.control.job import Job
from manyhosts.control.plan import Plan
from manyhosts.errors import ConfigError
from manyhosts.launchers import detached
from manyhosts.launchers.commands import run_command
from manyhosts.launchers.detached import State, Status
from manyhosts.launchers.engine import Engine

STATES: dict[str, State] = {"PEND": "waiting", "PSUSP": "waiting", "WAIT": "waiting", "DONE": "done", "EXIT": "failed"}
STATES |= dict.fromkeys(("RUN", "USUSP", "SSUSP", "UNKWN"), "running")


class Lsf(Engine):
    """bsub queues a job or waits for hosts with it; blaunch starts an agent on each of those hosts."""

    NAME = "lsf"
    OPTIONS: ClassVar = {"queue": "the queue", "time": "the time limit: 2:00 is two hours", "python": "the Python"}
    CHOOSES_HOSTS = "--nodes N"
    ONE_COMMAND = False
    TASK_VARIABLES = ("LSF_PM_*", "PMI*")

    def plan(self, job: Job) -> Plan:
        if "LSB_JOBID" in self._present:
            return super().plan(job)
        job = self.check(job)
        command, files = self.batch(job)
        log = ("-o", str(job.run_dir / "logs" / "lsf-%J.log"), "-J", job.run_id)
        return Plan(job=job, files=files, command=(*self._bsub(job), *log, *command))

    def hosts(self, job: Job) -> Sequence[str]:
        names = self._present.get("LSB_HOSTS") or Path(self._present["LSB_DJOB_HOSTFILE"]).read_text()
        hosts = list(dict.fromkeys(names.split()))  # one name for each slot
        if job.nodes > len(hosts):
            what = f"this LSF job has {len(hosts)} hosts, and --nodes is {job.nodes}"
            raise ConfigError(what, where="LSB_HOSTS", fix="leave --nodes out")
        return hosts

    def command(self, job: Job, hosts: Sequence[str], nodes: Sequence[int]) -> Sequence[str]:
        return ["blaunch", "-no-shell", hosts[nodes[0]], *self.agent(job, nodes)]

    def allocation(self, job: Job) -> Sequence[str]:
        return () if "LSB_JOBID" in self._present else (*self._bsub(self.check(job)), "-I")

    def send(self, plan: Plan) -> str:
        self.write_files(plan)
        return re.findall(r"Job <(\d+)>", run_command(plan.command))[0]

    def status(self, name: str) -> Status:
        reported = run_command(["bjobs", "-noheader", "-o", "stat exit_code exec_host output_file delimiter='|'", name])
        state, code, hosts, log = ("" if word == "-" else word for word in reported.strip().split("|"))
        found = Status(state=STATES[state], reason=state, hosts=hosts, log=log.replace("%J", name))
        return replace(found, code=int(code or 0)) if found.over else found

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        read = detached.growing(Path(self.status(name).log))
        return detached.tail(read, lambda: not follow or self.status(name).over, time.sleep)

    def cancel(self, name: str) -> None:
        if not self.status(name).over:
            run_command(["bkill", name])

    def _bsub(self, job: Job) -> Sequence[str]:
        flags = {"queue": "-q", "time": "-W"}
        chosen = [word for key, flag in flags.items() if key in job.options for word in (flag, job.options[key])]
        return ("bsub", "-n", str(job.nodes), "-R", "span[ptile=1]", "-cwd", str(job.folder), *chosen)
