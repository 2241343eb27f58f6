"""A worker's questions to the store that the head keeps, over the socket of its agent.

One connection for each group of workers, one JSON object per line. A question is

    {"store": do, "id": n, "fields": {"group": [start, group], …}}

and is answered by `{"message": "answer", "id": n, "value": …}`, or with `error` in place of `value`. What is asked:

    set          values          name → text
    get, wait    names           answered when all of them are there; the texts, or null
    get_all      begin, size     the texts at begin + 0, begin + 1, … when all are there
    add          name, amount    the new number
    compare_set  name, expected, desired   the text that is there now
    append       name, value
    check        names           whether all of them are there
    delete       name            whether it was there
    names                        all of them, in order
    open                         have a TCPStore listen: its address and port
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from manyhosts.cluster import reports

PORT = "MANYHOSTS_STORE"
"""The port of the TCPStore that the workers may use, also where a script has chosen another for processes of its
own."""
SHUT = "MANYHOSTS_STORE_IS_SHUT"
"""Set where that port is opened only when a worker has asked for it."""
_OPENING_S = 300.0
"""How long the host that keeps the TCPStore may take to open it: it loads torch for that."""


class StoreGone(RuntimeError):
    """The group has lost a worker, or the agent is gone: no answer will come."""


class StoreTimeout(RuntimeError):
    """There was no answer in time."""


class StoreLine:
    """One worker's questions for one group, one at a time. Safe to use from any thread."""

    def __init__(self, address: str, *, start: int, group: int) -> None:
        """`address` is the agent's socket. `start` and `group` count the starts of the job and the groups in it."""
        self._address, self._group = address, [start, group]
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._process = 0
        self._came = b""
        self._asked = 0
        self._is_open = True

    def ask(self, do: str, timeout_s: float, /, **fields: Any) -> Any:
        """The head's answer.

        Raises:
            StoreGone: the group is no more, this line is closed, or the agent is gone.
            StoreTimeout: there was none in `timeout_s` seconds.
        """
        with self._lock:
            try:
                answer = self._ask(do, time.monotonic() + timeout_s, fields)
            except TimeoutError as late:
                if not self._is_open:
                    self._drop()
                raise StoreTimeout(f"no answer in {timeout_s:g} s") from late
            except OSError as cause:
                self._drop()
                raise StoreGone(f"the agent of this host does not answer: {cause}") from cause
        if "error" in answer:
            raise StoreGone(str(answer["error"]))
        return answer["value"]

    def close(self) -> None:
        """End all waiting for answers, in any thread. Nothing can be asked any more."""
        self._is_open = False
        if self._socket is not None and self._process == os.getpid():
            with contextlib.suppress(OSError):  # the agent may have ended it
                self._socket.shutdown(socket.SHUT_RDWR)
            if self._lock.acquire(blocking=False):  # else the thread that waits is woken now, and drops it
                self._drop()
                self._lock.release()

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def _ask(self, do: str, deadline: float, fields: Mapping[str, Any]) -> dict[str, Any]:
        connection = self._connection()
        self._asked += 1
        question = {"store": do, "id": self._asked, "fields": {"group": self._group, **fields}}
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.sendall(json.dumps(question).encode() + b"\n")
        while True:
            line, between, rest = self._came.partition(b"\n")
            if between:
                self._came = rest
                answer: dict[str, Any] = json.loads(line)
                if answer["id"] == self._asked:  # else an earlier question's, whose time was over
                    return answer
                continue
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(1 << 16)
            if not chunk:
                raise ConnectionError("it has ended the connection" if self._is_open else "this group was left")
            self._came += chunk

    def _connection(self) -> socket.socket:
        """The connection of this process: one that was forked from the worker has its own."""
        if not self._is_open:
            raise ConnectionError("this group was left")
        if self._socket is None or self._process != os.getpid():
            self._came, self._process = b"", os.getpid()
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.connect(self._address)
            if not self._is_open:  # closed by another thread meanwhile
                raise ConnectionError("this group was left")
        return self._socket


def open_store() -> None:
    """Have the TCPStore of this run listen, if no worker has asked for it yet, and wait for that.

    Raises:
        StoreGone, StoreTimeout: the head cannot be asked.
    """
    if os.environ.get(SHUT) and (address := os.environ.get(reports.VARIABLE)):
        line = StoreLine(address, start=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")), group=0)
        line.ask("open", _OPENING_S)
        os.environ.pop(SHUT, None)
        line.close()
