"""What an engine starts on every node: an agent that finds out by itself which node it is.

    python -m manyhosts.control.agent.node --engine slurm --nodes 0,1,2 --head HOST:PORT

The run's token is in the environment, as for `manyhosts.control.agent.agent`.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import sys
from collections.abc import Mapping, MutableMapping

from manyhosts.control.agent import agent
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError
from manyhosts.hosts import addresses

NUMBERS = {"slurm": "SLURM_PROCID", "kubernetes": "JOB_COMPLETION_INDEX"}
"""Engine → the variable in which it says which of the processes that it has started together this one is."""

_OF_A_TASK = re.compile(
    r"(OMPI|PMIX|PMI|PRTE)_.*|SLURM_(PROCID|LOCALID|NODEID|GTIDS|NTASKS|NPROCS|TASKS_PER_NODE|STEP.*|TASK_PID|SRUN_.*)"
)


def number_of(engine: str, variables: Mapping[str, str]) -> int:
    """Which of the processes that `engine` has started together this one is, from 0.

    Raises:
        ConfigError: the engine has not said it.
    """
    name = NUMBERS[engine]
    if not variables.get(name, "").isdecimal():
        raise ConfigError(
            f"{name} is {variables.get(name, 'not set')!r}, so this process does not know which node it is",
            where="environment",
            fix=f"this is started by `manyhosts run --on {engine}`, not by hand",
        )
    return int(variables[name])


def forget_task(variables: MutableMapping[str, str]) -> None:
    """Take out what would make a worker believe that it is the engine's task: its rank is another one."""
    for name in list(variables):
        if _OF_A_TASK.fullmatch(name):
            del variables[name]


def use_interface(head: str, variables: MutableMapping[str, str]) -> str:
    """Have Gloo and NCCL use the interface that leads to the host `head`. Returns this host's address there.

    Raises:
        LaunchError: there is no way to it.
    """
    try:
        there = str(socket.getaddrinfo(head, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as cause:
        raise LaunchError(
            f"the name of the head, {head}, does not resolve: {cause.strerror}",
            where=f"host {socket.gethostname()}",
            fix="see that the name server of this host knows it",
        ) from cause
    address = addresses.way_to(there)
    if not address:
        raise LaunchError(
            f"this host has no route to the head at {there}",
            where=f"host {socket.gethostname()}",
            fix="see that all hosts are on one network",
        )
    if name := addresses.interface_of(address):
        variables.setdefault("GLOO_SOCKET_IFNAME", name)
        variables.setdefault("NCCL_SOCKET_IFNAME", name)
    return address


def main(words: list[str] | None = None) -> int:
    """Be the agent of this node. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="manyhosts node")
    parser.add_argument("--engine", choices=sorted(NUMBERS), help="who has started several together")
    parser.add_argument("--nodes", required=True, help="the nodes that are started together: 0,1,2")
    parser.add_argument("--head", required=True, help="host:port")
    asked = parser.parse_args(words)
    try:
        nodes = asked.nodes.split(",")
        node = nodes[number_of(asked.engine, os.environ) if asked.engine else 0]
        forget_task(os.environ)
        address = use_interface(addresses.address_and_port(asked.head)[0], os.environ)
    except ManyhostsError as error:
        sys.stderr.write(f"manyhosts: {error}\n")
        return error.exit_code
    return agent.main(["--head", asked.head, "--node", node, "--address", address])


if __name__ == "__main__":
    sys.exit(main())
