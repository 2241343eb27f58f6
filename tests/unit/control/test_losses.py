"""What is said of agents that are gone, or silent."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from dataclasses import dataclass

import pytest

from manyhosts.control.head import failures
from manyhosts.control.head.state import ExternalAgent
from manyhosts.control.loop import Channel, Loop


@dataclass
class Line:
    """A connection whose other side has not answered for so long; None where nobody knows."""

    unanswered_s: float | None


class Agent(ExternalAgent):
    """One whose process has ended so, or runs."""

    def __init__(self, code: int | None) -> None:
        self.code = code

    def poll(self) -> int | None:
        return self.code


@pytest.mark.parametrize(
    ("code", "number", "said"),
    [
        (-9, 0, "its agent is gone: killed by SIGKILL"),
        (3, 0, "its agent is gone: it ended with exit code 3"),
        (255, 0, "its agent is gone: it was killed, or ssh has lost the host (exit code 255)"),
        (None, 0, "its agent is gone"),
        (None, errno.ECONNRESET, "its agent is gone: Connection reset by peer"),
        (None, errno.ETIMEDOUT, "there is no answer from its host: it is switched off, or cut off"),
        (255, errno.EHOSTUNREACH, "there is no answer from its host: it is switched off, or cut off"),
    ],
)
def test_end_of_an_agent_is_told_with_what_is_known(code: int | None, number: int, said: str) -> None:
    trouble = OSError(number, "Connection reset by peer") if number else None
    assert failures.why_connection_ended(Agent(code), trouble) == said


@pytest.mark.parametrize("number", [0, errno.ECONNRESET])
def test_process_that_ends_a_moment_after_its_connection_is_waited_for(number: int) -> None:
    trouble = OSError(number, "Connection reset by peer") if number else None
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(0.05); raise SystemExit(4)"])
    for _ in range(20):  # a busy machine takes longer to start it than it is waited for
        if (said := failures.why_connection_ended(process, trouble)).startswith(f"{failures.GONE}: it ended"):
            break
    assert said == "its agent is gone: it ended with exit code 4"


@pytest.mark.parametrize(
    ("unanswered_s", "said"),
    [
        (None, ", and the connection to its agent is open still"),
        (0.4, ", but its system still answers: the agent is frozen, or the host overloaded"),
        (9.8, ", and its system does not answer: it is switched off, or cut off"),
    ],
)
def test_silent_host_is_told_with_what_its_system_does(unanswered_s: float | None, said: str) -> None:
    reported = failures.why_silent(10.2, Line(unanswered_s))
    assert reported == f"the host has given no sign of life for 10 s{said}"


def test_system_that_has_just_answered_is_known_to() -> None:
    loop = Loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        calling = socket.create_connection(listening.getsockname())
        called, _ = listening.accept()
        ends = [Channel(loop, each, lambda message: None, lambda: None) for each in (calling, called)]
        ends[0].send("hello")
        answered = ends[0].unanswered_s
        for end in ends:
            end.close()
        assert answered is not None
        assert answered < 60
        assert ends[0].unanswered_s is None, "it is closed"
    loop.close()
