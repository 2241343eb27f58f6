"""Connections between two hosts, tried out: whether they open, how long a word takes, how much goes through.

Runs on the hosts, with the standard library of Python 3.8 or newer alone. Who listens does so on one address. Both ends
prove that they know the examination's token, which itself is never sent, and so does the answer with what was measured.
Nothing else is worth reading: what is sent are zeros, and they are not encrypted, as that would be measured, too.
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
_LONGEST_ANSWER = 1 << 12
_CONNECT_S = 4.0
_SILENCE_S = 5.0
_WORDS = 20
_MORE_WORDS, _MORE_WORDS_S = 400, 0.5
"""So many more, or for so long, to see whether any gets lost: of a way that is idle but for them, none does."""
_WORD = b"manyhosts doctor" * 4
_CHUNK = bytes(1 << 18)
_MOST_STRANGERS = 64
_STRANGER_LIMIT_S = 5.0
"""How long a connection may take to show that it knows the token, however slowly it writes."""
_PAUSE_S = 0.2
_IP_MTU, _IPV6_MTU, _TCP_MAXSEG = 14, 24, 2
_TCP_INFO_BYTES, _SENT_AGAIN_AT, _SENT_AT = 140, 100, 136
"""Of Linux's struct tcp_info: its size up to tcpi_segs_out, and where that and tcpi_total_retrans are."""


class ConnectionGate:
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
        self._doorman = ConnectionGate(listening, self._answer)

    def close(self) -> None:
        """Take no more connections."""
        self._doorman.close()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError):
            challenge = os.urandom(CHALLENGE_BYTES)
            connection.settimeout(_SILENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(challenge)
            said = receive(connection, CHALLENGE_BYTES + _PROOF_BYTES, _STRANGER_LIMIT_S)
            both = challenge + said[:CHALLENGE_BYTES]
            if not hmac.compare_digest(said[CHALLENGE_BYTES:], _proof(self._token, b"calls", both)):
                return
            self._doorman.let_in(connection)
            connection.settimeout(_SILENCE_S)
            connection.sendall(_proof(self._token, b"answers", both))
            if receive(connection, 1) == b"e":
                while True:
                    connection.sendall(receive(connection, len(_WORD)))
            measured = _take_all(connection)
            connection.sendall(measured + _proof(self._token, b"measured", both + measured).hex().encode() + b"\n")


def try_out(address: str, port: int, token: str, seconds: float) -> dict[str, Any]:
    """Measure what goes from here to a listener: `latency_s` there and back, `bandwidth` in bytes in a second, `mtu`;
    `lost`, the share of packets that had to be sent again, where this system counts them.

    Takes little more than `seconds`. `trouble` says in its place why nothing could be measured, and `stage` how far it
    came: connect, talk, or send.
    """
    stage = "connect"
    try:
        with contextlib.closing(_Way(address, port)) as way:
            stage = "talk"
            connection = way.begin(token, b"e")
            latency_s = min(_echo_s(connection) for _ in range(_WORDS))
            sizes = _packet_sizes(connection)
            lost_idle = _lost_of_words(connection)
        with contextlib.closing(_Way(address, port)) as way:
            connection = way.begin(token, b"s")
            stage = "send"
            bandwidth = way.send_for(seconds)
            lost = _lost(connection)
    except (OSError, ValueError) as error:
        return {"trouble": getattr(error, "strerror", None) or str(error) or type(error).__name__, "stage": stage}
    if lost_idle == 0:
        lost = 0.0  # whatever was lost, it was in a queue that was full, as happens on a way that is well
    return {"latency_s": latency_s, "bandwidth": bandwidth, "lost": lost, **sizes}


class _Way:
    """A connection to a listener, both of whose ends prove that they know the token."""

    def __init__(self, address: str, port: int) -> None:
        self._socket = socket.create_connection((address, port), timeout=_CONNECT_S)
        self._token, self._both = "", b""

    def begin(self, token: str, wish: bytes) -> socket.socket:
        """Prove who is there, and say what is wished: e for an echo, s to send.

        Raises:
            OSError: nothing came in time.
            ValueError: what listens there does not know the token.
        """
        connection = self._socket
        connection.settimeout(_SILENCE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own = os.urandom(CHALLENGE_BYTES)
        self._token, self._both = token, receive(connection, CHALLENGE_BYTES) + own
        connection.sendall(own + _proof(token, b"calls", self._both) + wish)
        if not hmac.compare_digest(receive(connection, _PROOF_BYTES), _proof(token, b"answers", self._both)):
            raise ValueError("what listens there does not know the secret of this examination")
        return connection

    def send_for(self, seconds: float) -> float:
        """Send as much as goes through in `seconds`. Returns what the other side says came in a second."""
        connection = self._socket
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(_CHUNK)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(_SILENCE_S + seconds)
        answer = bytearray()
        while answer.count(b"\n") < 2:
            came = connection.recv(4096)
            if not came or len(answer) > _LONGEST_ANSWER:
                raise ValueError("the other side ended in the middle")
            answer += came
        measured, shown = answer.split(b"\n")[:2]
        measured += b"\n"
        if not hmac.compare_digest(
            bytes(shown), _proof(self._token, b"measured", self._both + measured).hex().encode()
        ):
            raise ValueError("what was measured was changed on the way")
        return float(json.loads(measured)["bandwidth"])

    def close(self) -> None:
        """Let go of the other side."""
        self._socket.close()


def _echo_s(connection: socket.socket) -> float:
    begin = time.perf_counter()
    connection.sendall(_WORD)
    receive(connection, len(_WORD))
    return time.perf_counter() - begin


def _lost_of_words(connection: socket.socket) -> float | None:
    """What `_lost` says of words that go one by one."""
    end = time.perf_counter() + _MORE_WORDS_S
    for _ in range(_MORE_WORDS):
        if time.perf_counter() > end:
            break
        _echo_s(connection)
    return _lost(connection)


def _lost(connection: socket.socket) -> float | None:
    """Which share of what went out on `connection` was sent again; None where this system does not say."""
    with contextlib.suppress(OSError, AttributeError):
        facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        if len(facts) == _TCP_INFO_BYTES:
            again, sent = (struct.unpack_from("I", facts, place)[0] for place in (_SENT_AGAIN_AT, _SENT_AT))
            return float(again / max(1, sent))
    return None


def _take_all(connection: socket.socket) -> bytes:
    """Count what comes until the other side has said all. Returns a line that says how fast it came.

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
    return json.dumps({"bandwidth": (after - before) / max(end - begin, 1e-9)}).encode() + b"\n"


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


def _proof(token: str, side: bytes, said: bytes) -> bytes:
    return hmac.new(token.encode(), side + b" " + said, hashlib.sha256).digest()


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
