"""An agent that an engine has started asks its head for the run's secret: see `control.enrolment`."""

from __future__ import annotations

import sys
import time

from manyhosts.control import enrolment
from manyhosts.control.agent import head_connection
from manyhosts.control.agent.head_client import HeadClient
from manyhosts.control.handshake import Enrol, Secret
from manyhosts.errors import LaunchError

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
            token = client.hear(Secret).token
        except LaunchError as error:
            raise _NotKnownYet(error.what, where=head, fix="") from error
    if not token:
        raise _NotKnownYet(f"the head at {head} did not know this agent in time", where=head, fix="")
    return token
