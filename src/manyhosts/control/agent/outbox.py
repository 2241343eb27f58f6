"""Lines of a host's workers on their way to the head, as many as it takes.

They never hold a worker up: where the head does not keep up, the oldest are left out, and the head is told how many.
The logs have them all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from manyhosts.control.agent.head_connection import HeadConnection

MOST_WAITING_BYTES = 16 << 20
_ON_THE_WAY_BYTES = 1 << 20
"""What may stand in the channel: heartbeats wait behind it."""
_AGAIN_S = 0.02

After = Callable[[float, Callable[[], None]], object]


class Outbox:
    """What waits for room in `channel`."""

    def __init__(self, channel: HeadConnection, after: After) -> None:
        """`after` calls back after so many seconds."""
        self._channel, self._after = channel, after
        self._waiting: deque[tuple[int, dict[str, Any]]] = deque()
        """The size of each `output` message, and its fields."""
        self._size = 0
        self._missed: dict[int, tuple[dict[str, Any], int]] = {}
        """By member: the fields that name it, and how many of its lines were left out."""
        self._calls_again = False

    def put(self, worker: dict[str, int], stream: str, lines: list[str]) -> None:
        """Send `lines` when there is room."""
        size = sum(map(len, lines)) + len(lines)
        self._waiting.append((size, {**worker, "stream": stream, "lines": lines}))
        self._size += size
        if self._size > MOST_WAITING_BYTES:
            self._leave_out()
        self._pump()

    def flush(self) -> None:
        """Hand all of it to the channel: what is sent next belongs behind it."""
        while self._waiting or self._missed:
            self._send_next()

    def _leave_out(self) -> None:
        while self._size > MOST_WAITING_BYTES // 2:
            size, fields = self._waiting.popleft()
            self._size -= size
            worker = {name: fields[name] for name in ("rank", "generation", "member")}
            _, missed = self._missed.get(fields["member"], (worker, 0))
            self._missed[fields["member"]] = worker, missed + len(fields["lines"])

    def _send_next(self) -> None:
        for worker, missed in self._missed.values():
            self._channel.send("unshown", **worker, lines=missed)
        self._missed.clear()
        if self._waiting:
            size, fields = self._waiting.popleft()
            self._size -= size
            self._channel.send("output", **fields)

    def _pump(self) -> None:
        while self._waiting and self._channel.backlog_bytes < _ON_THE_WAY_BYTES:
            self._send_next()
        if self._waiting and not self._calls_again:
            self._calls_again = True
            self._after(_AGAIN_S, self._again)

    def _again(self) -> None:
        self._calls_again = False
        self._pump()
