"""An agent that an engine starts on every node: it finds out by itself which node it is.

    python -m manyhosts.control.agent.node --number SLURM_PROCID --nodes 0,1,2 --head HOST:PORT \\
        --certificate FINGERPRINT

It is given no secret: it asks the head, which it knows by its certificate (see `control.enrolment`).
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping, Sequence
from fnmatch import fnmatchcase

from manyhosts.control import enrolment
from manyhosts.control.agent import agent, head_connection
from manyhosts.control.agent.head_client import HeadClient
from manyhosts.control.handshake import Enrol, Secret
from manyhosts.errors import ConfigError, LaunchError, ManyhostsError
from manyhosts.hosts import addresses, interfaces, remote_probe


def number_in(name: str, variables: Mapping[str, str]) -> int:
    """Which of the processes that an engine has started together this one is, from 0, as the variable `name` says.

    Raises:
        ConfigError: it does not say.
    """
    if not variables.get(name, "").isdecimal():
        said = repr(variables[name]) if name in variables else "not set"
        raise ConfigError(
            f"{name} is {said}, so this process does not know which node it is",
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


_PATIENCE_S = 60.0
"""How long the head is asked: what this agent has printed reaches it when the engine has carried it there."""
_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


def enrol(head: str, certificate: str) -> str:
    """The secret of the run whose head listens at `head`, host:port, with the certificate of that fingerprint.

    Raises:
        LaunchError: the other side shows another certificate, or does not recognise this agent in time.
        OSError: the head was not reached.
    """
    key = enrolment.new_key()
    sys.stdout.write(enrolment.announcement(key))
    sys.stdout.flush()
    until, pause_s = time.monotonic() + _PATIENCE_S, _PAUSE_S
    while True:
        try:
            return _ask(head, certificate, key)
        except _NotKnownYet as error:
            if time.monotonic() > until:
                raise LaunchError(error.what, where=head, fix="see whether the run has ended meanwhile") from error
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


class _NotKnownYet(LaunchError):
    """The head does not answer this agent; it may do so in a while."""


def _ask(head: str, certificate: str, key: str) -> str:
    with head_connection.connect(head) as connection:
        try:
            client = HeadClient(connection, head)
            shown = client.fingerprint().hex()
        except LaunchError as error:
            raise _NotKnownYet(error.what, where=head, fix="") from error
        if shown != certificate:
            raise LaunchError(
                f"what listens at {head} is not the head of this run: it shows another certificate; nothing was sent",
                where=head,
                fix="see who has that address and port",
            )
        try:
            client.say(Enrol(key=key))
            token = client.receive(Secret).token
        except LaunchError as error:
            raise _NotKnownYet(error.what, where=head, fix="") from error
    if not token:
        raise _NotKnownYet(f"the head at {head} did not know this agent in time", where=head, fix="")
    return token


if __name__ == "__main__":
    sys.exit(main())
