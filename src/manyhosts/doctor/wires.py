"""Connections between two hosts, tried out: whether they open, how long a word takes, how much goes through.

Runs on the hosts, with the standard library of Python 3.8 or newer alone. Who listens does so on one address, and only
serves whoever can prove that it knows the examination's token, which itself is never sent.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

CHALLENGE_BYTES = 16
_PROOF_BYTES = 32
_CONNECT_S = 4.0
_SILENCE_S = 5.0
_WORDS = 20
_WORD = b"manyhosts doctor" * 4
_CHUNK = bytes(1 << 18)
_MOST_STRANGERS = 64
_STRANGER_LIMIT_S = 5.0
"""How long a connection may take to show that it knows the token, however slowly it writes."""
_PAUSE_S = 0.2
_IP_MTU, _IPV6_MTU, _TCP_MAXSEG = 14, 24, 2


class Doorman:
    """Serves connections on threads of their own, and lets no number of strangers keep others out."""

    def __init__(self, listening: socket.socket, serve: Callable[[socket.socket], None]) -> None:
        """`serve` is given each connection, says by `let_in` that it is none of a stranger's, and closes it."""
        self._listening, self._serve = listening, serve
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []
        self._is_open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def let_in(self, connection: socket.socket) -> None:
        """Its other end has shown that it knows the token; or the connection is over."""
        with self._lock:
            if connection in self._strangers:
                self._strangers.remove(connection)

    def close(self) -> None:
        """Take no more connections."""
        self._is_open = False
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _accept(self) -> None:
        while self._is_open:
            try:
                connection, _ = self._listening.accept()
                with self._lock:
                    self._strangers.append(connection)
                    oldest = self._strangers.pop(0) if len(self._strangers) > _MOST_STRANGERS else None
                if oldest is not None:
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)  # its thread wakes, and closes it
                threading.Thread(target=self._answer, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no more files, or threads: in a while there may be
                time.sleep(_PAUSE_S)

    def _answer(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            self.let_in(connection)


class Listener:
    """Answers connections of other hosts on threads of its own, until `close`."""

    def __init__(self, address: str, token: str) -> None:
        """Listen on a free port of `address`."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listening = socket.create_server((address, 0), family=family, backlog=64)
        self._token = token
        self.port: int = listening.getsockname()[1]
        self._doorman = Doorman(listening, self._answer)

    def close(self) -> None:
        """Take no more connections."""
        self._doorman.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            challenge = os.urandom(CHALLENGE_BYTES)
            connection.settimeout(_SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(challenge)
            proof = receive(connection, _PROOF_BYTES, _STRANGER_LIMIT_S)
            if not hmac.compare_digest(proof, _proof(self._token, challenge)):
                return
            self._doorman.let_in(connection)
            connection.settimeout(_SILENCE_S)
            if receive(connection, 1) == b"e":
                while True:
                    connection.sendall(receive(connection, len(_WORD)))
            _take_all(connection)


def try_out(address: str, port: int, token: str, seconds: float) -> dict[str, Any]:
    """Measure what goes from here to a listener: `latency_s` there and back, `bandwidth` in bytes in a second, `mtu`.

    Takes little more than `seconds`. `trouble` says in its place why nothing could be measured, and `stage` how far it
    came: connect, talk, or send.
    """
    stage = "connect"
    try:
        with _opened(address, port, token, b"e") as connection:
            stage = "talk"
            latency_s = min(_echo_s(connection) for _ in range(_WORDS))
            sizes = _packet_sizes(connection)
        with _opened(address, port, token, b"s") as connection:
            stage = "send"
            bandwidth = _send_for(connection, seconds)
    except (OSError, ValueError) as error:
        return {"trouble": getattr(error, "strerror", None) or str(error) or type(error).__name__, "stage": stage}
    return {"latency_s": latency_s, "bandwidth": bandwidth, **sizes}


def _opened(address: str, port: int, token: str, wish: bytes) -> socket.socket:
    connection = socket.create_connection((address, port), timeout=_CONNECT_S)
    try:
        connection.settimeout(_SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(_proof(token, receive(connection, CHALLENGE_BYTES)) + wish)
    except BaseException:
        connection.close()
        raise
    return connection


def _echo_s(connection: socket.socket) -> float:
    begin = time.perf_counter()
    connection.sendall(_WORD)
    receive(connection, len(_WORD))
    return time.perf_counter() - begin


def _send_for(connection: socket.socket, seconds: float) -> float:
    """Send as much as goes through in `seconds`. Returns what the other side says came in a second."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        connection.sendall(_CHUNK)
    connection.shutdown(socket.SHUT_WR)
    connection.settimeout(_SILENCE_S + seconds)
    answer = bytearray()
    while not answer.endswith(b"\n"):
        came = connection.recv(4096)
        if not came:
            raise ValueError("the other side ended in the middle")
        answer += came
    return float(json.loads(answer)["bandwidth"])


def _take_all(connection: socket.socket) -> None:
    """Count what comes until the other side has said all, and tell it how fast it came.

    The first half is not counted: switches and shapers let a burst pass, and TCP begins slowly.
    """
    room = memoryview(bytearray(1 << 18))
    arrivals = [(time.perf_counter(), 0)]
    total = 0
    while came := connection.recv_into(room):
        total += came
        arrivals.append((time.perf_counter(), total))
    middle = (arrivals[0][0] + arrivals[-1][0]) / 2
    begin, before = next(((when, bytes_) for when, bytes_ in arrivals if when >= middle), arrivals[0])
    end, after = arrivals[-1]
    if end <= begin:
        begin, before = arrivals[0]
    connection.sendall(json.dumps({"bandwidth": (after - before) / max(end - begin, 1e-9)}).encode() + b"\n")


def _packet_sizes(connection: socket.socket) -> dict[str, Any]:
    """How large packets on the way of `connection` may be, as far as this system says."""
    found: dict[str, Any] = {"mtu": None, "segment": None}
    is_six = connection.family == socket.AF_INET6
    asked = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_six else (socket.IPPROTO_IP, _IP_MTU)
    with contextlib.suppress(OSError):
        found["mtu"] = struct.unpack("i", connection.getsockopt(*asked, 4))[0]
    with contextlib.suppress(OSError):
        found["segment"] = connection.getsockopt(socket.IPPROTO_TCP, _TCP_MAXSEG)
    return found


def _proof(token: str, challenge: bytes) -> bytes:
    return hmac.new(token.encode(), challenge, hashlib.sha256).digest()


def receive(connection: socket.socket, count: int, within_s: float = 0.0) -> bytes:
    """Exactly `count` bytes; where `within_s` is given, all of them in that time.

    Raises:
        OSError: they did not come in time.
        ValueError: the other side ended before.
    """
    deadline = time.monotonic() + within_s
    came = bytearray()
    while len(came) < count:
        if within_s:
            connection.settimeout(max(1e-3, deadline - time.monotonic()))
        chunk = connection.recv(count - len(came))
        if not chunk:
            raise ValueError("the other side closed the connection")
        came += chunk
    return bytes(came)
