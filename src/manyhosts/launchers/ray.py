"""One agent per node of a Ray cluster: one that the user has, or that `ray start` made."""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from manyhosts.control import variables
from manyhosts.control.display import Display
from manyhosts.control.enrolment import Enrolment
from manyhosts.control.head.run import Head
from manyhosts.control.head.state import HeadEndpoint
from manyhosts.control.job import Job
from manyhosts.control.plan import CERTIFICATE, HEAD, Plan, filled
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses
from manyhosts.launchers import choices, extras
from manyhosts.launchers.engine import Engine

_PATIENCE_S = 60
_ADDRESS = "RAY_ADDRESS"
_HERE = Path("/tmp/ray/ray_current_cluster")  # noqa: S108  # where Ray itself looks for the cluster it is part of
_CONNECT, _RESERVE, _TASK = "ray.init", "ray.util.placement_group", "ray.remote, for each node"
"""Calls of Ray, by which a plan names what they are given."""


class Ray(Engine):
    """Has Ray place one agent on each of several nodes, with this process as their head."""

    NAME = "ray"
    OPTIONS: ClassVar[Mapping[str, str]] = {
        "address": "the cluster, HOST:PORT; by default what RAY_ADDRESS says, or the one that runs here",
        "cpus": "CPUs that Ray keeps for us on each node (default 1)",
        "gpus": "GPUs that Ray keeps for us on each node (default 0)",
        "python": "the Python on every node, if it is not where it is here",
    }
    CHOOSES_HOSTS = "--nodes N"

    def plan(self, job: Job) -> Plan:
        """One agent on each of `nodes` different nodes; which they are is Ray's to say.

        Raises:
            ConfigError: hosts are named, or an option is unknown.
        """
        job = self.check(job)
        gpus = choices.gpus(job.options)
        if not gpus.isdecimal():
            raise ConfigError(f"gpus is {job.options['gpus']!r}", where="-o gpus", fix="give an integer")
        cpus = choices.count(job.options, "cpus", 1)
        bundle = {kind: count for kind, count in {"CPU": cpus, "GPU": int(gpus)}.items() if count}
        return Plan(
            job=job,
            hosts=tuple(f"a node of the Ray cluster ({node + 1} of {job.nodes})" for node in range(job.nodes)),
            agents=tuple(self.agent(job, [node]) for node in range(job.nodes)),
            workers=variables.of_all(job),
            files={
                _CONNECT: {"address": job.options.get("address") or self._present.get(_ADDRESS, "auto")},
                _RESERVE: {"bundles": [bundle] * job.nodes, "strategy": "STRICT_SPREAD"},
                # The head starts a lost agent again, and knows why.
                _TASK: {"num_cpus": cpus, "num_gpus": int(gpus), "max_retries": 0, "num_returns": "streaming"},
            },
        )

    def address(self, plan: Plan) -> str:
        """Which nodes there are, Ray says when it has placed the job: the way to its head is the way to them."""
        place = plan.files[_CONNECT]["address"]
        with contextlib.suppress(OSError):
            place = _HERE.read_text().strip() if place == "auto" else place
            return addresses.towards([place.removeprefix("ray://").rpartition(":")[0]])
        return addresses.LOOPBACK

    def submit(self, plan: Plan, display: Display) -> int:
        """Run the job to its end.

        Raises:
            LaunchError: Ray is not installed, was not reached, or has too few nodes.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        ray = extras.load("ray", what="Ray", package="ray")
        extras.load("ray.util", what="Ray", package="ray")
        where = plan.files[_CONNECT]
        try:
            ray.init(**where, log_to_driver=True, logging_level="ERROR", configure_logging=False)
        except Exception as cause:
            raise LaunchError(
                f"there is no Ray cluster to be reached at {where['address']}: {str(cause).splitlines()[0]}",
                where=f"-o address={where['address']}",
                fix="start one with `ray start --head`, or give its address with -o address=HOST:PORT or RAY_ADDRESS",
            ) from cause
        group = None
        try:
            group = _reserve(ray, plan.files[_RESERVE])
            nodes = _nodes_of(ray, group)
            head_address = addresses.towards([node["NodeManagerAddress"] for node in nodes])
            names = [node["NodeManagerHostname"] for node in nodes]

            enrolment = Enrolment()

            def start_agent(node: int, head: str, token: str) -> _Agent:
                # Not the token: Ray does not encrypt what it sends.
                words = filled(plan.agents[node], {HEAD.name: head, CERTIFICATE.name: enrolment.certificate})
                return _Agent(ray, _begin(ray, group, plan.files[_TASK], node, words), enrolment.read)

            endpoint = HeadEndpoint(enrolment=enrolment)
            return Head(plan.job, names, start_agent, display, address=head_address, endpoint=endpoint).run()
        finally:
            if group is not None:
                ray.util.remove_placement_group(group)
            ray.shutdown()


class _Agent:
    """A task of Ray's that is an agent, as the head holds it."""

    def __init__(self, ray: Any, task: Any, hear: Callable[[str], object]) -> None:
        """`hear` is given what the agent says first, on a thread."""
        self._ray, self._task, self._read = ray, task, hear
        self._ended = threading.Event()
        self._code = 1
        threading.Thread(target=self._follow, daemon=True).start()

    def poll(self) -> int | None:
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("the agent", timeout or 0)
        return self._code

    def terminate(self) -> None:
        self._ray.cancel(self._task)

    def kill(self) -> None:
        self._ray.cancel(self._task, force=True)

    def _follow(self) -> None:
        try:
            for found in self._task:
                said = self._ray.get(found)
                if isinstance(said, int):
                    self._code = said
                else:
                    self._read(said)
        except Exception:  # cancelled, or lost with its node: whatever Ray calls it
            self._code = 1
        finally:
            self._ended.set()


def be_agent(words: Sequence[str], cpus: int) -> Iterator[str | int]:
    """What Ray runs on a node: an agent as a process of its own, which goes when its task does.

    Yields:
        The line that the agent prints, and its exit code.
    """
    own = dict(os.environ)
    if own.get("OMP_NUM_THREADS") == str(cpus):
        del own["OMP_NUM_THREADS"]  # set by Ray for its task; our workers share out the host's cores
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(words, env=own, stdin=nothing, stdout=pipe, text=True, start_new_session=True)
    assert process.stdout is not None, "it was asked for as a pipe"
    try:
        with process.stdout:
            yield process.stdout.readline()
        yield process.wait()
    except BaseException:  # Ray cancels a task by an exception in it
        process.terminate()
        process.wait()
        raise


def _reserve(ray: Any, asked: Mapping[str, Any]) -> Any:
    """A placement group with room for an agent on each of as many nodes."""
    group = ray.util.placement_group(**asked)
    ready, _ = ray.wait([group.ready()], timeout=_PATIENCE_S)
    if not ready:
        alive = [node for node in ray.nodes() if node["Alive"]]
        ray.util.remove_placement_group(group)
        wanted = f"{len(asked['bundles'])} nodes with {asked['bundles'][0]}"
        raise LaunchError(
            f"Ray found no {wanted} free within {_PATIENCE_S} s; it has {len(alive)} node{'s' * (len(alive) != 1)}",
            where="the Ray cluster",
            fix="see `ray status`; ask for fewer --nodes, or for less with -o cpus= and -o gpus=",
        )
    return group


def _nodes_of(ray: Any, group: Any) -> list[dict[str, Any]]:
    """The nodes of the group's bundles, in their order."""
    by_bundle = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    return [by_id[by_bundle[number]] for number in sorted(by_bundle)]


def _begin(ray: Any, group: Any, asked: Mapping[str, Any], node: int, words: Sequence[str]) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node)
    task = ray.remote(be_agent).options(**asked, scheduling_strategy=place)
    return task.remote(words, asked["num_cpus"])
