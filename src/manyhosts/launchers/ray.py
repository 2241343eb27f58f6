"""One agent per node of a Ray cluster: one that the user has, or that `ray start` made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any, ClassVar

from manyhosts.control import variables
from manyhosts.control.agent.agent import TOKEN
from manyhosts.control.display import Display
from manyhosts.control.head.head import Head
from manyhosts.control.job import Job, Plan
from manyhosts.errors import ConfigError, LaunchError
from manyhosts.hosts import addresses
from manyhosts.launchers import choices, extras

_PATIENCE_S = 60
_ADDRESS = "RAY_ADDRESS"


class Ray:
    """Has Ray place one agent on each of several nodes, with this process as their head."""

    OPTIONS: ClassVar[Mapping[str, str]] = {
        "address": "the cluster, HOST:PORT; by default what RAY_ADDRESS says, or the one that runs here",
        "cpus": "CPUs that Ray keeps for us on each node (default 1)",
        "gpus": "GPUs that Ray keeps for us on each node (default 0)",
        "python": "the Python on every node, if it is not where it is here",
    }

    def plan(self, job: Job) -> Plan:
        """One agent on each of `nodes` different nodes; which they are is Ray's to say.

        Raises:
            ConfigError: hosts are named, or an option is unknown.
        """
        choices.check("ray", job, self.OPTIONS)
        choices.count(job.options, "cpus", 1)
        if job.hosts:
            raise ConfigError("Ray chooses the hosts", where="--hosts", fix="use --nodes N")
        if not choices.gpus(job.options).isdecimal():
            raise ConfigError(f"gpus is {job.options['gpus']!r}", where="-o gpus", fix="give a whole number")
        job = choices.with_a_worker_for_each_gpu(job)
        return Plan(
            job=job,
            hosts=tuple(f"a node of the Ray cluster ({node + 1} of {job.nodes})" for node in range(job.nodes)),
            agents=tuple(tuple(_agent_words(job, "ADDRESS:PORT", node)) for node in range(job.nodes)),
            workers=variables.of_all(job),
        )

    def submit(self, plan: Plan, display: Display) -> int:
        """Run the job to its end.

        Raises:
            LaunchError: Ray is not installed, was not reached, or has too few nodes.
            ManyhostsError: workers failed; the error is that of the one that failed first.
        """
        ray = extras.load("ray", what="Ray", extra="ray")
        extras.load("ray.util", what="Ray", extra="ray")
        job = plan.job
        address = job.options.get("address") or os.environ.get(_ADDRESS, "auto")
        try:
            ray.init(address=address, log_to_driver=True, logging_level="ERROR", configure_logging=False)
        except Exception as cause:
            raise LaunchError(
                f"there is no Ray cluster to be reached at {address}: {str(cause).splitlines()[0]}",
                where=f"-o address={address}",
                fix="start one with `ray start --head`, or give its address with -o address=HOST:PORT or RAY_ADDRESS",
            ) from cause
        group = None
        try:
            group = _reserve(ray, job)
            nodes = _nodes_of(ray, group)
            head_address = addresses.towards([node["NodeManagerAddress"] for node in nodes])
            names = [node["NodeManagerHostname"] for node in nodes]

            def start_agent(node: int, head: str, token: str) -> _Agent:
                return _Agent(ray, _begin(ray, group, job, node, _agent_words(job, head, node), token))

            return Head(job, names, start_agent, display, address=head_address).run()
        finally:
            if group is not None:
                ray.util.remove_placement_group(group)
            ray.shutdown()


class _Agent:
    """A task of Ray's that is an agent, as the head holds it."""

    def __init__(self, ray: Any, task: Any) -> None:
        self._ray, self._task = ray, task

    def poll(self) -> int | None:
        done, _ = self._ray.wait([self._task], timeout=0)
        return self._code() if done else None

    def wait(self, timeout: float | None = None) -> int:
        done, _ = self._ray.wait([self._task], timeout=timeout)
        if not done:
            raise subprocess.TimeoutExpired("the agent", timeout or 0)
        return self._code()

    def terminate(self) -> None:
        self._ray.cancel(self._task)

    def kill(self) -> None:
        self._ray.cancel(self._task, force=True)

    def _code(self) -> int:
        try:
            return int(self._ray.get(self._task))
        except Exception:  # cancelled, or lost with its node: whatever Ray calls it
            return 1


def be_agent(words: list[str], token: str, cpus: int) -> int:
    """What Ray runs on a node: an agent as a process of its own, which goes when its task does."""
    own = dict(os.environ)
    if own.get("OMP_NUM_THREADS") == str(cpus):
        del own["OMP_NUM_THREADS"]  # set by Ray for its task; our workers share out the host's cores
    process = subprocess.Popen(words, env={**own, TOKEN: token}, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return process.wait()
    except BaseException:  # Ray cancels a task by an exception in it
        process.terminate()
        process.wait()
        raise


def _reserve(ray: Any, job: Job) -> Any:
    """A placement group with room for an agent on each of as many nodes."""
    bundle = {"CPU": choices.count(job.options, "cpus", 1), "GPU": int(choices.gpus(job.options))}
    bundle = {kind: count for kind, count in bundle.items() if count}
    group = ray.util.placement_group([bundle] * job.nodes, strategy="STRICT_SPREAD")
    ready, _ = ray.wait([group.ready()], timeout=_PATIENCE_S)
    if not ready:
        alive = [node for node in ray.nodes() if node["Alive"]]
        ray.util.remove_placement_group(group)
        raise LaunchError(
            f"Ray found no {job.nodes} nodes with {bundle} free within {_PATIENCE_S} s; it has {len(alive)} nodes",
            where="the Ray cluster",
            fix="see `ray status`; ask for fewer --nodes, or for less with -o cpus= and -o gpus=",
        )
    return group


def _nodes_of(ray: Any, group: Any) -> list[dict[str, Any]]:
    """The nodes of the group's bundles, in their order."""
    by_bundle = ray.util.placement_group_table(group)["bundles_to_node_id"]
    by_id = {node["NodeID"]: node for node in ray.nodes()}
    return [by_id[by_bundle[number]] for number in sorted(by_bundle)]


def _begin(ray: Any, group: Any, job: Job, node: int, words: list[str], token: str) -> Any:
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    cpus = choices.count(job.options, "cpus", 1)
    task = ray.remote(be_agent).options(
        num_cpus=cpus,
        num_gpus=int(choices.gpus(job.options)),
        max_retries=0,  # the head starts a lost agent again, and knows why
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=node),
    )
    return task.remote(words, token, cpus)


def _agent_words(job: Job, head: str, node: int) -> list[str]:
    python = job.options.get("python", sys.executable)
    return [python, "-P", "-m", "manyhosts.control.agent.node", "--head", head, "--nodes", str(node)]
