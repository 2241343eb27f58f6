"""What is known of an agent that is gone, or that says nothing any more, in words that follow the name of a worker."""

from __future__ import annotations

import errno
import time

from manyhosts.control.head.failures import signal_name
from manyhosts.control.head.placement import AgentProcess
from manyhosts.control.loop import Channel

GONE = "its agent is gone"
_NO_ANSWER = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN)
_ENDED_THERE = (errno.ECONNRESET, errno.EPIPE)
"""The other side has closed, perhaps before it had read everything."""
_LOST_BY_SSH = 255
_TO_END_S = 0.2
"""A connection ends a moment before its process does."""
_ANSWERS_S = 6.0
"""A system that is asked every 2 s whether it is there has answered within that time, if it is."""


def of_end(agent: AgentProcess, channel: Channel) -> str:
    """Why a connection may have ended that nobody had closed here."""
    trouble = channel.trouble
    if trouble is not None and trouble.errno in _NO_ANSWER:
        return "there is no answer from its host: it is switched off, or cut off"
    code = agent.poll()
    until = time.monotonic() + _TO_END_S
    ended_there = trouble is None or trouble.errno in _ENDED_THERE
    while code is None and ended_there and time.monotonic() < until:
        time.sleep(0.01)
        code = agent.poll()
    if code is None:
        return f"{GONE}: {trouble.strerror}" if trouble is not None and trouble.strerror else GONE
    if code == _LOST_BY_SSH:
        return f"{GONE}: it was killed, or ssh has lost the host (exit code {code})"
    return f"{GONE}: " + (f"killed by {signal_name(-code)}" if code < 0 else f"it ended with exit code {code}")


def of_silence(seconds: float, channel: Channel | None, held_s: float = 0.0) -> str:
    """What is known of a host whose agent says nothing; `channel` is None where its connection has broken.

    `held_s`: it has shown that it lives, and that it waits for something of its own system for so long.
    """
    if held_s:
        return f"its agent lives, and has waited for a disk or the like for {held_s:.0f} s"
    what = f"the host has given no sign of life for {seconds:.0f} s"
    if channel is None:
        return f"{what}, and does not call again: it is switched off, or cut off"
    unanswered_s = channel.unanswered_s
    if unanswered_s is None:
        return f"{what}, and the connection to its agent is open still"
    if unanswered_s < _ANSWERS_S:
        return f"{what}, but its system still answers: the agent is frozen, or the host overloaded"
    return f"{what}, and its system does not answer: it is switched off, or cut off"
