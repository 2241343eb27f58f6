"""A node of a batch engine's job, without a terminal for the head: it runs on the first node, next to the agent.

An engine starts this on every node, in any order. So the head listens at a port that all know,
agents call until somebody answers, and a node that has lost the others ends with a code of its own, for which the
engine starts it again.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from manyhosts.control.agent import agent, head_connection
from manyhosts.control.display import PlainDisplay
from manyhosts.control.head.agent_starter import StartHere
from manyhosts.control.head.run import Head
from manyhosts.control.head.state import AgentProcess, ExternalAgent, HeadEndpoint
from manyhosts.control.job import Job
from manyhosts.control.screen import Screen
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import addresses, interfaces

AGAIN = 75
"""The exit code of a node that was asked to end, or has lost the others: started again, the run continues."""
PATIENCE_S = 900.0
"""How long nodes wait for each other: an engine starts one minutes after another, images have to be pulled."""
_CALL_AGAIN_S = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """Which node this is, and where the others are. The engine says all of it; nothing is guessed."""

    number: int
    hosts: Sequence[str]
    """Names of all nodes in order, for logs and sentences."""
    head: str
    """host:port of the head, as every node reaches it."""
    address: str
    """This node's own address."""
    token: str = field(repr=False)
    """What distinguishes nodes of this run from strangers."""


def run(job: Job, node_info: NodeInfo, *, patience_s: float = PATIENCE_S) -> int:
    """Be one node of `job`. Returns its exit code: that of the run, or `AGAIN`.

    Raises:
        ManyhostsError: nodes did not come, or workers failed (reported on the first node).
    """
    if name := addresses.interface_of(node_info.address):
        interfaces.use(name, os.environ)
    if job.in_place:
        return int(importlib.import_module(job.in_place).be_node(job, node_info, patience_s))
    if node_info.number > 0:
        return _be_agent(node_info, patience_s)
    endpoint = HeadEndpoint(
        token=node_info.token, port=addresses.address_and_port(node_info.head)[1], patience_s=patience_s
    )
    with Screen(sys.stdout, sys.stderr, logs=job.run_dir / "logs") as screen:
        display = PlainDisplay(screen.out, screen.err)
        head = Head(
            job,
            node_info.hosts,
            lambda number, head, token: ExternalAgent(),
            display,
            address=node_info.address,
            endpoint=endpoint,
            start_here=_starter(node_info),
        )
        # The head listens to signals while it runs. An engine that ends this node because another has ended with the
        # run's error must not keep what the error was from being printed.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        code = head.run()
        if code >= 128:  # signals: the engine wants the node back
            display.warn(
                "manyhosts: this node was asked to end; started again, the run continues from its last snapshot"
            )
            return AGAIN
        return code


def _starter(node_info: NodeInfo) -> StartHere:
    def start_here(number: int, connection: socket.socket) -> AgentProcess | None:
        if number > 0:
            return None
        words = [
            sys.executable,
            "-P",
            "-m",
            "manyhosts.control.agent.agent",
            "--head",
            head_connection.inherited(connection),
        ]
        return subprocess.Popen(
            [*words, "--node", "0", "--address", node_info.address],
            stdin=subprocess.DEVNULL,
            pass_fds=(connection.fileno(),),
            start_new_session=True,
        )

    return start_here


def _be_agent(node_info: NodeInfo, patience_s: float) -> int:
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(AGAIN))  # until there is an agent, which does better
    try:
        connection = call(node_info.head, patience_s)
    finally:
        signal.signal(signal.SIGTERM, before)
    own = agent.serve(
        connection, node_info.head, node=node_info.number, token=node_info.token, address=node_info.address
    )
    verdict = own.verdict
    return AGAIN if verdict is None or verdict >= 128 else verdict


def call(head: str, patience_s: float) -> socket.socket:
    """A connection to the head, as soon as it is there.

    Raises:
        LaunchError: it is not to be had within `patience_s`.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            return head_connection.connect(head)
        except OSError as error:  # its name may not be known yet either
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"the first node was not to be reached within {patience_s:.0f} s: {error}",
                    where=f"{head}, from host {socket.gethostname()}",
                    fix="see whether it was started, and what its log says",
                ) from error
            time.sleep(_CALL_AGAIN_S)


def report(error: ManyhostsError) -> int:
    """Print what has ended the run, for the engine's log. Returns the exit code."""
    sys.stderr.write(f"manyhosts: {error}\n")
    sys.stderr.flush()
    return error.exit_code
