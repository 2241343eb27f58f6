"""One worker as its agent sees it: its pipes, its lines, its log, its end; and the socket where workers report."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyhosts.control.agent import host_state
from manyhosts.control.agent.log import Lines, Log
from manyhosts.control.agent.store_lines import StoreLines
from manyhosts.control.loop import Channel, Loop, Message
from manyhosts.control.protocol import Ended, FromAgent, Output, Unlogged
from manyhosts.control.wire_format import see_depth

_DRAIN_S = 1.0
"""How long the pipes of a worker that has ended may stay open: something that it started may have left its group."""
_GLIMPSE_S = 10.0
_LAST_WORDS = "  what():"
"""What C++ prints before the text of an uncaught exception."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerId:
    """What one worker of a host was started as."""

    rank: int
    local_rank: int
    generation: int
    """How often the workers had been started before."""
    member: int
    """Its own number, which no other worker of the run ever has."""

    @property
    def name(self) -> str:
        """What the fork server calls it."""
        return f"worker {self.member}"

    def to_json(self) -> dict[str, Any]:
        """What the head knows it by."""
        return {"rank": self.rank, "generation": self.generation, "member": self.member}


class WatchedWorker:
    """Reads what a worker writes until it has ended and everything is read; then reports its end to the head."""

    def __init__(  # noqa: PLR0913  # each is a fact of its own
        self,
        loop: Loop,
        worker_id: WorkerId,
        *,
        log: Path,
        log_bytes: int,
        error_file: Path,
        report: Callable[[FromAgent], None],
        show: Callable[[Output], None],
        on_failure: Callable[[WatchedWorker], None],
        before_end: Callable[[], None],
        on_imported: Callable[[list[str]], None],
    ) -> None:
        """`report` sends a message to the head, and `show` what the worker has printed: complete lines.

        `log_bytes` is how large its log grows before another one is begun; 0: no limit.

        `on_failure` is called when the worker says that its program has failed, before its process ends.

        `on_imported` is called once, with the modules that its program has imported.
        `before_end` is called when it has ended, before its end is reported to the head.
        """
        self._loop, self._report, self._error_file = loop, report, error_file
        self._pass_on = show
        self._on_failure, self._before_end, self._on_imported = on_failure, before_end, on_imported
        self.worker_id = worker_id
        self.process = 0
        self.ended = False
        self._status: tuple[int, int] | None = None
        self._finished = False
        self._exchanges: int | None = None
        self._last_words = ""
        self._error: dict[str, Any] | None = None
        self._lines = {"out": Lines(), "err": Lines()}
        self._records = b""
        self._pipes: dict[str, int] = {}
        self._stack_pipe = -1
        self.keepers: list[int] = []
        """Processes that write to the log what processes of the worker print after its end."""
        self._kills_before = host_state.kills()
        self._peak_bytes = 0
        self._log = Log(log, log_bytes, lambda why: report(Unlogged(**worker_id.to_json(), why=why)))
        loop.after(_GLIMPSE_S, self._flush_partial_line)

    def open_pipes(self) -> list[int]:
        """Start to listen. Returns the worker's ends: stdout, stderr, its line to the agent, the one for its stack."""
        theirs = []
        for stream in ("out", "err", "line"):
            reading, writing = os.pipe()
            self._pipes[stream] = reading
            theirs.append(writing)
            self._watch(stream)
        self._stack_pipe, writing = os.pipe()
        os.set_blocking(self._stack_pipe, False)
        return [*theirs, writing]

    def take_stack(self) -> str:
        """What it, and the processes that it has forked, have written about where they are since the last call."""
        text = b""
        with contextlib.suppress(OSError):
            while self._stack_pipe >= 0 and (chunk := os.read(self._stack_pipe, 1 << 16)):
                text += chunk
        return text.decode(errors="replace")

    def end(self, code: int, number: int, peak_bytes: int = 0) -> None:
        """The process has ended, with an exit code or by a signal. What is still in its pipes is read first.

        `peak_bytes` is the most memory that it had.
        """
        if self._status is None:
            self._peak_bytes = peak_bytes
            self._status = (code, number)
            self._conclude()
            self._loop.after(_DRAIN_S, self._close_pipes)

    def _watch(self, stream: str) -> None:
        self._loop.watch(self._pipes[stream], lambda: self._read(stream))

    def _read(self, stream: str) -> None:
        chunk = os.read(self._pipes[stream], 1 << 16)
        if not chunk:
            self._close(stream)
            self._conclude()
        elif stream == "line":
            *records, self._records = (self._records + chunk).split(b"\n")
            for record in records:
                self._note(json.loads(record))
        else:
            self._log.write(stream, chunk)
            self._show(stream, self._lines[stream].feed(chunk))

    def _note(self, record: dict[str, Any]) -> None:
        if record["record"] == "finished":
            self._finished = record["code"] == 0
            self._exchanges = record.get("exchanges")
            if not self._finished:
                self._on_failure(self)
        elif record["record"] == "failed":
            self._error = record
            self._log.note(record.get("text", ""))
        elif record["record"] == "imported":
            self._on_imported(record["modules"])

    def _show(self, stream: str, lines: list[str]) -> None:
        if lines:
            self._last_words = next((line.strip() for line in lines if _LAST_WORDS in line), self._last_words)
            self._pass_on(Output(**self.worker_id.to_json(), stream=stream, lines=lines))

    def _flush_partial_line(self) -> None:
        if not self.ended:
            self._log.flush_partial_line()
            for stream, lines in self._lines.items():
                self._show(stream, lines.partial_line())
            self._loop.after(_GLIMPSE_S, self._flush_partial_line)

    def _close(self, stream: str) -> None:
        if stream in self._pipes:
            pipe = self._pipes.pop(stream)
            self._loop.unwatch(pipe)
            os.close(pipe)
            if stream in self._lines:
                self._log.end(stream)
                self._show(stream, self._lines[stream].end())

    def _close_pipes(self) -> None:
        for stream in ("out", "err"):
            if stream in self._pipes and self._status == (0, 0):
                self._hand_over(self._pipes[stream])
        for stream in ("out", "err", "line"):
            self._close(stream)
        self._conclude()

    def _hand_over(self, pipe: int) -> None:
        """A process that a finished worker started still runs: a closed pipe would end it at its next write."""
        with contextlib.suppress(OSError), self._log.path.open("ab") as log:
            words = ["cat"]
            keeper = subprocess.Popen(words, stdin=pipe, stdout=log, stderr=subprocess.DEVNULL, start_new_session=True)
            self.keepers.append(keeper.pid)

    def _conclude(self) -> None:
        if self._pipes or self._status is None or self.ended:
            return
        self.ended = True
        self._log.close()
        if self._stack_pipe >= 0:
            os.close(self._stack_pipe)
            self._stack_pipe = -1
        self._before_end()
        code, number = self._status
        self._report(
            Ended(
                **self.worker_id.to_json(),
                code=code,
                signal=number,
                finished=self._finished,
                exchanges=self._exchanges,
                last_words=self._last_words,
                error=self._error or self._error_in_file(),
                **self._memory(),
            )
        )

    def _memory(self) -> dict[str, Any]:
        """Whether want of memory has ended a process since this one was started, and what is known of that."""
        before, now = self._kills_before, host_state.kills()
        killed = before.own is not None and now.own is not None and now.own > before.own
        limit, of_cgroup = host_state.limit_bytes() if killed else (0, False)
        reported = {"killed": killed, "peak": self._peak_bytes, "limit": limit, "of_cgroup": of_cgroup}
        return {"out_of_memory": killed or now.machine > before.machine, "memory": reported}

    def _error_in_file(self) -> dict[str, Any] | None:
        """What a program that was not forked by us has written about its end (torchelastic's `record` does)."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            message = json.loads(self._error_file.read_text())["message"]
            return {"summary": message["message"], "text": message["extraInfo"]["py_callstack"]}
        return None


class ReportServer:
    """The Unix socket to which workers send their reports."""

    def __init__(
        self,
        loop: Loop,
        address: Path,
        on_report: Callable[[int, str, dict[str, Any]], None],
        on_membership: Callable[[int, str, dict[str, Any]], None],
        store: StoreLines,
    ) -> None:
        """`on_report` receives reports of workers (by local rank), `on_membership` what concerns who trains together.

        `store` is asked what workers ask of the store that the head keeps.
        """
        self.address = address
        self._loop, self._on_report, self._on_membership = loop, on_report, on_membership
        self._store = store
        self._lines: dict[int, Channel] = {}
        """The connections of members, by number."""
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(address))
        self._listening.listen(128)
        self._listening.setblocking(False)
        self._channels: set[Channel] = set()
        loop.watch(self._listening, self._accept)

    @property
    def members(self) -> frozenset[int]:
        """The workers, by number, that hear what the head has to say."""
        return frozenset(self._lines)

    def close(self) -> None:
        """Close all channels."""
        for channel in self._channels:
            channel.close()
        self._loop.unwatch(self._listening)
        self._listening.close()

    def drain(self) -> None:
        """Take everything that has been handed in: a worker that has ended must not have its last words lost."""
        self._accept()
        for channel in list(self._channels):
            while channel.read():
                pass

    def send(self, member: int, message: Message) -> None:
        """Pass on the head's message to a worker. One that has gone gets nothing."""
        if member in self._lines:
            content = {name: value for name, value in message.items() if name != "message"}
            self._lines[member].send(message["message"], **content)

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                self._add(self._listening.accept()[0])

    def _add(self, connection: socket.socket) -> None:
        channel = Channel(self._loop, connection, lambda message: self._take(channel, message), lambda: forget(channel))
        self._channels.add(channel)

        def forget(channel: Channel) -> None:
            self._channels.discard(channel)
            self._store.forget(channel)
            self._lines = {member: line for member, line in self._lines.items() if line is not channel}

    def _take(self, channel: Channel, message: Message) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):  # a worker that speaks nonsense harms only itself
            see_depth(message)
            if "store" in message:
                self._store.ask(channel, message)
                return
            if "member" in message:
                self._lines[int(message["member"])] = channel
                self._on_membership(int(message["member"]), str(message["kind"]), dict(message["fields"]))
                return
            self._on_report(int(message["worker"]), str(message["kind"]), dict(message["fields"]))
