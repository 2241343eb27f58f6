"""An engine: one way to start a job on hosts. What each states about itself, and what all of them share.

An engine that starts agents by a command needs `hosts` and `command` alone; one that keeps jobs has `send`, `status`,
`logs` and `cancel` as well (`detached.Jobs`). Everything else has a default. Other packages add theirs by an entry
point in the group `manyhosts.launchers`.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, cast

from manyhosts.control import job_file, variables
from manyhosts.control.display import Display, PlainDisplay
from manyhosts.control.job import HIDDEN, Job
from manyhosts.control.plan import CERTIFICATE, HEAD, Later, Plan, filled, text_of
from manyhosts.control.screen import Screen
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses, containers
from manyhosts.hosts.containers import Container
from manyhosts.launchers import choices, container_options, detached
from manyhosts.launchers.detached import Jobs

SECRET = Later("token", HIDDEN)
"""The secret by which the agents of a run are recognised."""


class Engine:
    """One way to start a job on hosts. The attributes are what others ask about it, the doctor among them."""

    NAME: ClassVar[str]
    """As in `--on NAME`."""
    OPTIONS: ClassVar[Mapping[str, str]] = {}
    """What `-o KEY=VALUE` may ask of it: key → what it means."""
    CHOOSES_HOSTS: ClassVar[str] = ""
    """What is given in place of `--hosts`, where the engine chooses the hosts: a part of a sentence."""
    ENCRYPTS: ClassVar[bool] = False
    """Whether it sees to `--encrypt` itself."""
    SHARES_DISK: ClassVar[bool] = True
    """Whether its hosts are to have the run directory and the script on a disk that they share."""
    USES_SSH: ClassVar[bool] = False
    """Whether its hosts are reached through ssh, one by one, and need nothing but Python to be asked."""
    CALLS_BACK: ClassVar[bool] = True
    """Whether its hosts can open connections to this machine."""
    ADDRESS: ClassVar[str] = variables.CHOSEN_AT_START
    """Where workers find the first host, as far as that is known before."""
    NODE_NUMBER: ClassVar[str] = ""
    """The variable with the number, from 0, of each process that one command has started."""
    ONE_COMMAND: ClassVar[bool] = True
    """Whether one command starts the agents of all hosts; else each is started by a command of its own."""
    TASK_VARIABLES: ClassVar[Sequence[str]] = ()
    """Variables of its tasks, `*` for any letters, that would make a worker believe that it is one of them."""
    RUNTIMES: ClassVar[Sequence[str]] = ()
    """What starts containers for its agents, where they can run in any."""
    ENVIRONMENT: ClassVar[Mapping[str, str]] = {}
    """Set for the command that starts agents."""

    def __init__(self, present: Mapping[str, str] | None = None, wait: Callable[[float], None] = time.sleep) -> None:
        """`present` are the variables that show whether this is inside an allocation, say; by default those here."""
        self._present = os.environ if present is None else present
        self._wait = wait

    # What an engine states.

    def hosts(self, job: Job) -> Sequence[str]:
        """Where `job` will run, by node: the hosts of this allocation, or those that the user has named.

        Raises:
            ConfigError: there are not as many.
        """
        raise NotImplementedError

    def command(self, job: Job, hosts: Sequence[str], nodes: Sequence[int]) -> Sequence[str]:
        """What starts the agents of `nodes`; each is what `agent` says."""
        raise NotImplementedError

    def allocation(self, job: Job) -> Sequence[str]:
        """The command that gets hosts as `job` would, and runs the command that follows it there; none if needless."""
        return ()

    @property
    def inside(self) -> str:
        """Which allocation this process is in, as no other one is called; empty where it is in none."""
        return ""

    def there(self, job: Job) -> Job:
        """`job` as its hosts see it, where they have other paths than this machine."""
        return job

    def shares_disk(self, job: Job) -> bool:
        """Whether the hosts of `job` have its run directory on a disk that they share."""
        return self.SHARES_DISK

    def address(self, plan: Plan) -> str:
        """Where this machine listens, so that the hosts of `plan` reach it.

        Raises:
            LaunchError: the name of one does not resolve.
        """
        return addresses.towards(plan.hosts)

    def forget(self, name: str) -> None:
        """Take away what the engine keeps of a job that is over, where it is asked to."""

    # What engines share.

    def check(self, job: Job) -> Job:
        """See that this engine can be asked for `job`. Returns it with a worker for each GPU that is asked for.

        Raises:
            ConfigError: hosts are named, an option is unknown or empty, or encryption cannot be seen to.
        """
        choices.check(self.NAME, job, self.OPTIONS, encrypts=self.ENCRYPTS)
        if job.hosts and self.CHOOSES_HOSTS:
            raise ConfigError(f"{self.NAME} chooses the hosts", where="--hosts", fix=f"use {self.CHOOSES_HOSTS}")
        self.container(job)
        return choices.with_a_worker_for_each_gpu(job) if "gpus" in self.OPTIONS else job

    def plan(self, job: Job) -> Plan:
        """Decide everything, touch nothing: same job and same `present`, same plan.

        Raises:
            ConfigError: the job makes no sense here.
        """
        job = self.check(job)
        hosts = tuple(self.hosts(job))
        job = job if job.nodes_are_chosen else replace(job, nodes=len(hosts))
        everybody = range(job.nodes)
        return Plan(
            job=job,
            hosts=hosts[: job.nodes],
            agents=tuple(
                self.agent(job, [node]) if self.ONE_COMMAND else tuple(self.command(job, hosts, [node]))
                for node in everybody
            ),
            workers=variables.of_all(job, address=self.ADDRESS),
            command=tuple(self.command(job, hosts, everybody)) if self.ONE_COMMAND else (),
            environment=dict(self.ENVIRONMENT),
            files={} if self.container(job) is None else containers.files(),
        )

    def submit(self, plan: Plan, display: Display) -> int:
        """Carry `plan` out, to its end. Returns the exit code: 0, or 130 if it was interrupted.

        Raises:
            LaunchError: a host could not be reached, or the engine refused.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        # Here, because commands that only ask after a job should not wait for what heads need to be loaded.
        from manyhosts.launchers import placed

        if not plan.hosts:  # the engine keeps the job, and the head runs where it places it
            return detached.send_and_follow(cast(Jobs, self), self.NAME, plan, display, wait=self._wait)
        program = (plan.command or plan.agents[0])[0]
        if shutil.which(program) is None:
            raise LaunchError(
                f"there is no {program} on this machine",
                where="PATH",
                fix="start this where that engine's programs are, on its login node, say, or install them",
            )
        return placed.run(
            plan, lambda nodes: self._command_for(plan, nodes), display, address=self.address, inside=self.inside
        )

    def run(self, job: Job, display: Display | None = None) -> int:
        """Plan and submit `job`; where there is no `display`, in plain lines. Returns the exit code.

        Raises:
            ManyhostsError: as `plan` and `submit`.
        """
        with Screen(sys.stdout, sys.stderr, logs=job.run_dir / "logs") as screen:
            return self.submit(self.plan(job), display or PlainDisplay(screen.out, screen.err))

    def agent(self, job: Job, nodes: Sequence[int]) -> tuple[str, ...]:
        """What a host runs to be one of `nodes`: which one, the engine's variable says where there are several."""
        several = ("--number", self.NODE_NUMBER) if self.NODE_NUMBER else ()
        forgotten = ("--forget", ",".join(self.TASK_VARIABLES)) if self.TASK_VARIABLES else ()
        words = ("--head", HEAD, "--certificate", CERTIFICATE, *several, *forgotten)
        which = ("--nodes", ",".join(map(str, nodes)))
        agent = (self.python(job), "-P", "-m", "manyhosts.control.agent.node", *words, *which)
        container = self.container(job)
        return agent if container is None else tuple(self.contained(container, agent))

    def contained(self, container: Container, agent: Sequence[str]) -> Sequence[str]:
        """What starts `agent` in a container of its host."""
        return container_options.planned(container, container.looked_after(agent))

    def container(self, job: Job) -> Container | None:
        """What agents run in, where it is a container.

        Raises:
            ConfigError: an option about it makes no sense.
        """
        return container_options.of(job, self.RUNTIMES)

    def python(self, job: Job) -> str:
        """The Python that hosts run: in a container, that of the image."""
        own = container_options.PYTHONS[0] if container_options.IMAGE in job.options and self.RUNTIMES else ""
        return job.options.get("python", own or sys.executable)

    def batch(self, job: Job) -> tuple[tuple[str, ...], dict[str, object]]:
        """The command that becomes the head of `job` inside an allocation, and the file that it reads."""
        path = str(job.run_dir / "job.json")
        in_image = self.container(job) is not None  # but the head is outside, where this is
        python = sys.executable if in_image else self.python(job)
        words = (python, "-P", "-m", "manyhosts.launchers.batch", self.NAME, path)
        return words, {path: job_file.shown(job)}

    def write_files(self, plan: Plan) -> None:
        """Write the files of a job that is to be queued, readable by their owner alone.

        Raises:
            ConfigError: this is inside an allocation, where nothing is queued.
        """
        if plan.hosts:
            raise ConfigError(
                "an allocation ends with its shell, and so does what runs in it",
                where="--detach",
                fix="leave --detach out, or start it outside of this allocation",
            )
        (plan.job.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        for path, content in plan.files.items():
            job_file.write_hidden(text_of(filled(content, job_file.values_of(plan.job))), Path(path))

    def _command_for(self, plan: Plan, nodes: Sequence[int]) -> Sequence[str]:
        """The command for some nodes: that of a lost one is started again alone."""
        if plan.command and len(nodes) == plan.job.nodes:
            return plan.command
        return self.command(plan.job, plan.hosts, nodes) if plan.command else plan.agents[nodes[0]]
