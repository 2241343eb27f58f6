"""The fork server of a host as its agent sees it: a process that has loaded what the script needs, and forks workers.

That process itself is `agent.fork_server_process`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from manyhosts.control.agent import standby
from manyhosts.control.agent.log import Lines
from manyhosts.control.loop import Loop
from manyhosts.control.tracebacks import is_idle_notice

_REST_S = 2.0
_START = (
    "import sys; sys.flags.safe_path or sys.path.pop(0);"
    " from manyhosts.control.agent.fork_server_process import main; main()"
)
"""Python's argument for `-c`: the folder of the script takes the place in `sys.path` that is freed here."""
_SETTLED_S = 5.0
"""So long must workers have trained before it is worth loading anything for those that may follow them."""


class ForkServer:
    """The fork server of one host."""

    def __init__(  # noqa: PLR0913  # each is a fact of its own
        self,
        loop: Loop,
        *,
        preload: Sequence[str],
        environment: Mapping[str, str],
        folder: str,
        scratch: Path,
        stdin: bool,
        name: str = "",
        launcher: int = 0,
        stays_s: float = 0.0,
        on_event: Callable[[dict[str, Any]], None],
        on_warm: Callable[[list[str]], None],
        on_end: Callable[[], None],
        on_words: Callable[[str], object],
    ) -> None:
        """Start it, or take over that of an agent before. Requests wait while it loads `preload`; `on_end` is called if
        it ends unasked.

        `name` is what it is known by for the next agent (`agent.standby`), which may find it while `launcher` lives, a
        process of this host; empty where none may. With `stays_s` it is known so for so long after `rest`, too.

        `stdin`: workers may read what comes on the standard input of this process.
        `on_warm` receives the modules loaded later, because workers imported them; `on_words` what it and the
        store print.
        """
        self._loop, self._on_event, self._on_warm, self._on_end = loop, on_event, on_warm, on_end
        self._on_words = on_words
        self._is_warming = False
        self._came = bytearray()
        self.ready = False
        """Whether it has loaded what it was to load."""
        self._process: subprocess.Popen[bytes] | standby.Adopted
        adopt = partial(standby.adopt, name, environment, preload, scratch, launcher=launcher, stdin=stdin)
        if name and (adopted := adopt()) is not None:
            self._process, self._socket = adopted, adopted.socket
        else:
            self._socket, theirs = socket.socketpair()
            words = [str(theirs.fileno()), json.dumps(list(preload)), str(scratch), name, str(launcher), str(stays_s)]
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, *words],
                pass_fds=[theirs.fileno()],
                env=dict(environment),
                cwd=folder,
                stdin=None if stdin else subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
            theirs.close()
        loop.watch(self._socket, self._read)
        assert self._process.stderr is not None, "it was asked for as a pipe"
        self._words, self._lines = self._process.stderr, Lines()
        loop.watch(self._words, self._pass_on)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def ask(self, do: str, descriptors: Sequence[int] = (), **fields: Any) -> None:
        """Send one request, with the descriptors it needs. They stay open here."""
        line = json.dumps({"do": do, **fields}).encode() + b"\n"
        with contextlib.suppress(OSError):  # its end is noticed when we read
            sent = socket.send_fds(self._socket, [line], list(descriptors)) if descriptors else 0
            self._socket.sendall(line[sent:])

    def warm(self, modules: Sequence[str]) -> None:
        """Have it load what a worker has imported, for those to come. Once: all run the same program."""
        if modules and not self._is_warming:
            self._is_warming = True
            self._loop.after(_SETTLED_S, lambda: self.ask("warm", modules=list(modules)))

    def close(self, *, spare: bool = False) -> None:
        """End it, and with it every worker. `spare`: leave processes that finished workers started running."""
        if spare:
            self.ask("spare")
        self.ask("end")
        self._loop.unwatch(self._socket)
        self._socket.close()
        try:
            self._process.wait(timeout=2 if self.ready else 0)  # while it loads, it has no workers to end
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self._forget_words()

    def rest(self, *, spare: bool) -> bool:
        """End every worker, and leave it to the next run. Whether it is there for that; else `close` is to come."""
        if not self.ready:
            return False
        if spare:
            self.ask("spare")
        self.ask("rest")
        self._loop.unwatch(self._socket)
        self._socket.settimeout(_REST_S)
        try:
            while self._socket.recv(1 << 16):  # it lets go when all workers have ended
                pass
        except OSError:
            return False
        self._socket.close()
        self._forget_words()
        return True

    def _pass_on(self) -> None:
        """What the fork server and the store have to say goes where this agent's own words go, but for idle notices."""
        chunk = os.read(self._words.fileno(), 1 << 16)
        lines = self._lines.feed(chunk) if chunk else self._lines.end()
        self._on_words("".join(f"{line}\n" for line in lines if not is_idle_notice(line)))
        if not chunk:
            self._forget_words()

    def _forget_words(self) -> None:
        self._loop.unwatch(self._words)
        self._words.close()

    def _read(self) -> None:
        try:
            chunk = os.read(self._socket.fileno(), 1 << 16)
        except OSError:
            chunk = b""
        self._came += chunk
        *lines, rest = self._came.split(b"\n")
        self._came = bytearray(rest)
        for line in lines:
            event = json.loads(line)
            if event["event"] == "ready":
                self.ready = True
            elif event["event"] == "warm":
                self._on_warm(event["modules"])
            else:
                self._on_event(event)
        if not chunk:
            self._loop.unwatch(self._socket)
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._forget_words()
            self._on_end()
