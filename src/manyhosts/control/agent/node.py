"""What an engine starts on every node: an agent that finds out by itself which node it is.

    python -m manyhosts.control.agent.node --number SLURM_PROCID --nodes 0,1,2 --head HOST:PORT \\
        --certificate FINGERPRINT

It is given no secret: it asks the head, which it knows by its certificate (see `control.enrolment`).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase

from manyhosts.control.agent import agent
from manyhosts.control.agent.enrolling import enrol
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError
from manyhosts.hosts import addresses, interfaces, remote_probe


def number_in(name: str, variables: Mapping[str, str]) -> int:
    """Which of the processes that an engine has started together this one is, from 0, as the variable `name` says.

    Raises:
        ConfigError: it does not say.
    """
    if not variables.get(name, "").isdecimal():
        raise ConfigError(
            f"{name} is {variables.get(name, 'not set')!r}, so this process does not know which node it is",
            where="environment",
            fix="this is started by `manyhosts run --on`, not by hand",
        )
    return int(variables[name])


def forget_task(patterns: Sequence[str], variables: MutableMapping[str, str]) -> None:
    """Take out what would make a worker believe that it is the engine's task: its rank is another one."""
    for name in [name for name in variables if any(fnmatchcase(name, pattern) for pattern in patterns)]:
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
    address = remote_probe.way_to(there)
    if not address:
        raise LaunchError(
            f"this host has no route to the head at {there}",
            where=f"host {socket.gethostname()}",
            fix="see that all hosts are on one network",
        )
    if name := addresses.interface_of(address):
        interfaces.use(name, variables)
    return address


def main(words: list[str] | None = None) -> int:
    """Be the agent of this node. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="manyhosts node")
    parser.add_argument("--nodes", required=True, help="the nodes that are started together: 0,1,2")
    parser.add_argument("--number", metavar="NAME", help="the variable that says which of them this one is")
    parser.add_argument("--forget", default="", help="variables that workers do not get: NAME,OTHER_*")
    parser.add_argument("--head", required=True, help="host:port")
    parser.add_argument("--certificate", required=True, help="the SHA-256 of the head's certificate, in hexadecimal")
    asked = parser.parse_args(words)
    try:
        nodes = asked.nodes.split(",")
        node = nodes[number_in(asked.number, os.environ) if asked.number else 0]
        forget_task(asked.forget.split(","), os.environ)
        address = use_interface(addresses.address_and_port(asked.head)[0], os.environ)
        token = enrol(asked.head, asked.certificate)
    except ManyhostsError as error:
        sys.stderr.write(f"manyhosts: {error}\n")
        return error.exit_code
    except OSError as error:
        sys.stderr.write(f"manyhosts: this host cannot reach the head at {asked.head}: {error}\n")
        return 3
    return agent.main(["--head", asked.head, "--node", node, "--address", address], token)


if __name__ == "__main__":
    sys.exit(main())
