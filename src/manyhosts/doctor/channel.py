"""A connection between the doctor and a host probe that an engine has started: encrypted, and both prove themselves.

Runs on the hosts, too, with the standard library of Python 3.8 or newer alone; making a certificate is for the doctor.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from manyhosts.control import proof, tls

_LONGEST_LINE = 16 << 20
_LONGEST_PROOF = 1 << 14
"""What somebody may send who has not shown yet that it knows the secret."""


class Channel:
    """Lines of text over one connection. One thread may read while others write."""

    def __init__(self, connection: socket.socket, own: tls.Tls) -> None:
        self._socket, self._tls = connection, own
        self._lock = threading.Lock()
        self._came = bytearray()
        self._longest = _LONGEST_PROOF

    def trust(self) -> None:
        """The other side has shown that it knows the secret: its lines may be long, and it may take its time."""
        self._longest = _LONGEST_LINE
        self._socket.settimeout(None)

    def write(self, text: str) -> None:
        """Send `text`.

        Raises:
            OSError: the other side is gone.
        """
        with self._lock:
            self._tls.send(text.encode())
            self._socket.sendall(self._tls.take())

    def flush(self) -> None:
        """Nothing waits to be sent."""

    def __iter__(self) -> Iterator[str]:
        """The other side's lines, until it ends.

        Raises:
            OSError: it has sent what is no TLS, or too much for one line.
        """
        while (line := self.line()) != "":
            yield line

    def line(self, deadline: float | None = None) -> str:
        """The next line with its end; nothing where there is none any more. `deadline`: by the monotonic clock.

        Raises:
            OSError: see `__iter__`; or none came in time.
        """
        while (end := self._came.find(b"\n")) < 0:
            if len(self._came) > self._longest:
                raise OSError("a line without an end")
            if deadline is not None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError("no line in time")  # however much else came, or how slowly
                self._socket.settimeout(left_s)
            sent = b"" if self._tls.has_ended else self._socket.recv(1 << 16)
            if not sent:
                return ""
            with self._lock:
                self._came += self._tls.receive(sent)
                if going := self._tls.take():
                    self._socket.sendall(going)
        text = self._came[: end + 1].decode(errors="replace")
        del self._came[: end + 1]
        return text

    def close(self) -> None:
        """Let go of the other side. Safe to call twice."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def call(connection: socket.socket, token: str, within_s: float) -> Channel:
    """The side that has opened `connection`: a channel to a peer that proves that it knows `token`.

    Raises:
        OSError: the other side does not, or says nothing.
    """
    own = tls.call()
    found, caller, deadline = Channel(connection, own), proof.Caller(token), time.monotonic() + within_s
    found.write(json.dumps(caller.call()) + "\n")
    shown = caller.proof_for(_said(found, deadline), own.fingerprint)
    if not shown:
        raise OSError("what listens there does not know the secret of this examination")
    found.write(json.dumps({"proof": shown}) + "\n")
    found.trust()
    return found


def answer(connection: socket.socket, identity: tls.Identity, token: str, within_s: float) -> Channel | None:
    """The side that was called: a channel to a peer that proves in time that it knows `token`, or None.

    Raises:
        OSError: the other side speaks no TLS, or is gone.
    """
    found = Channel(connection, identity.answer())
    answerer, deadline = proof.Answerer(token, identity.fingerprint), time.monotonic() + within_s
    prove = answerer.prove(_said(found, deadline))
    if prove is None:
        return None
    found.write(json.dumps(prove) + "\n")
    if not answerer.is_proven_by(_said(found, deadline).get("proof")):
        return None
    found.trust()
    return found


def _said(channel: Channel, deadline: float) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(channel.line(deadline))
        if isinstance(found, dict):
            return found
    return {}
