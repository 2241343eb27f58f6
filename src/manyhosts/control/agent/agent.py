"""The agent: one process per host that belongs to a run. What it does there is the supervisor's.

    python -m manyhosts.control.agent.agent --head HOST:PORT --node N

Where the head has started it on its own machine, it is given one end of a pair of sockets: `--head fd:NUMBER`.

It ends when the head says so, when the head is gone, and when it is asked to twice.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

from manyhosts.control import titles, variables
from manyhosts.control.agent.head_connection import connect
from manyhosts.control.agent.processes import adopt_orphans
from manyhosts.control.agent.supervisor import Origin, Supervisor
from manyhosts.control.loop import Loop
from manyhosts.hosts import interfaces


def main(words: list[str] | None = None) -> int:
    """Be the agent of this host. Returns its exit code.

    The run's token is in the environment, or is the first line of the standard input.
    """
    parser = argparse.ArgumentParser(prog="manyhosts agent")
    parser.add_argument("--head", required=True, help="host:port, or fd:NUMBER")
    parser.add_argument("--node", type=int, required=True, help="this host's number, from 0")
    parser.add_argument("--address", default="", help="where other hosts reach this one")
    parser.add_argument(
        "--stdin", action="store_true", help="its first worker reads the standard input of this process"
    )
    parser.add_argument("--launcher", type=int, default=0, help="a process of this host that ends with the launcher")
    parser.add_argument("--interface", default="", help="the interface that has that address")
    asked = parser.parse_args(words)
    for name in interfaces.VARIABLES if asked.interface else ():
        os.environ.setdefault(name, asked.interface)
    born_with_it = asked.head.startswith("fd:")
    token = "" if born_with_it else os.environ.pop(variables.TOKEN, "") or sys.stdin.readline().strip()
    if not (token or born_with_it):
        sys.stderr.write("manyhosts: this agent was given no secret, by which it would know its head\n")
        return 2
    try:
        connection = connect(asked.head)
    except OSError as error:
        sys.stderr.write(f"manyhosts: this host cannot reach the head at {asked.head}: {error}\n")
        return 3
    agent = serve(
        connection,
        asked.head,
        node=asked.node,
        token=token,
        address=asked.address,
        origin=Origin(stdin=asked.stdin, launcher=asked.launcher),
    )
    return 0 if agent.was_taken_in else 3


def serve(
    connection: socket.socket,
    head: str,
    *,
    node: int,
    token: str,
    address: str,
    origin: Origin | None = None,
) -> Supervisor:
    """Be the agent of this host until the head, which `connection` leads to, has said that all is over, or is lost.

    Returns:
        What was the agent; its `verdict` is the exit code of the run, where the head has said one.
    """
    titles.set_title(f"manyhosts agent of node {node}", "manyhosts agent")
    adopt_orphans()
    loop = Loop()
    # First the signals, which the loop hears when it runs: what the supervisor makes on this host must be taken away.
    loop.on_signals([signal.SIGTERM, signal.SIGINT, signal.SIGHUP], lambda number: agent.ask_to_leave(number))
    agent = Supervisor(
        loop,
        connection,
        head,
        node=node,
        token=token,
        address=address,
        origin=origin,
    )
    try:
        loop.run(until=lambda: agent.done)
    finally:
        agent.leave()
    return agent


if __name__ == "__main__":
    sys.exit(main())
