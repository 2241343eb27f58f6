"""A conversation with a head in which each answer is waited for: before a process becomes an agent."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeVar

from manyhosts.control import tls
from manyhosts.control.handshake import FromCalled, FromCaller, Offer
from manyhosts.control.wire_format import by_name, content_of, read
from manyhosts.errors import LaunchError
from manyhosts.records.json_text import parsed

ANSWER_S = 20.0
"""How long a head may take to answer: it may be busy with the start of others."""
_LONGEST_ANSWER, _LONGEST_OFFER = 1 << 14, 64 << 20
"""Bytes. An offer comes from a head that has proven itself, and names every file of a project."""


Answer = TypeVar("Answer", bound=FromCalled)


class HeadClient:
    """Messages over one encrypted connection, each waited for."""

    def __init__(self, connection: socket.socket, place: str) -> None:
        """`place` is where `connection` leads to, as host:port."""
        connection.settimeout(ANSWER_S)
        self._connection, self._place, self._tls = connection, place, tls.call()
        self._came = bytearray()
        self._carry()

    def fingerprint(self) -> bytes:
        """SHA-256 of the certificate that the other side has shown, and has the key of. Nothing was sent to it yet.

        Raises:
            LaunchError: it does not speak TLS.
        """
        self._take(until=lambda: self._tls.is_up)
        return self._tls.fingerprint

    def say(self, message: FromCaller) -> None:
        """Send a message.

        Raises:
            LaunchError: the other side is gone.
        """
        self._tls.send(json.dumps({"message": message.NAME, **content_of(message)}).encode() + b"\n")
        self._carry()

    def receive(self, kind: type[Answer]) -> Answer:
        """The next message, which is of this `kind`.

        Raises:
            LaunchError: none came, or another one.
        """
        self._take(until=lambda: b"\n" in self._came, most=_LONGEST_OFFER if kind is Offer else _LONGEST_ANSWER)
        first, _, rest = bytes(self._came).partition(b"\n")
        self._came = bytearray(rest)
        try:
            found = parsed(first)
            return read(found if isinstance(found, dict) else {}, by_name(kind))
        except ValueError as cause:
            raise self.trouble("it has said nothing that this version understands") from cause

    def _take(self, until: Callable[[], bool], most: int = 0) -> None:
        """`most`: bytes that it may say until then."""
        deadline = time.monotonic() + ANSWER_S
        while not until():
            if len(self._came) > most:
                raise self.trouble("it says more than a head does")
            try:
                self._connection.settimeout(max(1e-3, deadline - time.monotonic()))
                chunk = b"" if self._tls.has_ended else self._connection.recv(1 << 16)
                if not chunk:
                    raise self.trouble("it has hung up")
                if time.monotonic() > deadline:
                    raise TimeoutError  # it says a little now and then
                self._came += self._tls.receive(chunk)
                self._carry()
            except ssl.SSLError as cause:
                raise self.trouble("it does not speak TLS as a head does") from cause
            except TimeoutError as cause:
                said = "no more than a part of an answer" if self._came else "nothing"
                raise self.trouble(f"it has said {said} for {ANSWER_S:.0f} s") from cause
            except OSError as cause:
                raise self.trouble(cause.strerror or str(cause)) from cause

    def _carry(self) -> None:
        if words := self._tls.take():
            try:
                self._connection.sendall(words)
            except OSError as cause:
                raise self.trouble(cause.strerror or str(cause)) from cause

    def trouble(self, why: str) -> LaunchError:
        """What listens there is no head, or is none any more."""
        return LaunchError(
            f"what listens at {self._place} does not answer as the head of a run: {why}",
            where=self._place,
            fix="see that this is the address and port that `manyhosts run --on join` shows, and that it runs still",
        )
