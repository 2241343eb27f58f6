"""Jobs that continue without this terminal: how they are named, asked after, read and ended."""

from __future__ import annotations

import codecs
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from manyhosts.control.display import Display
from manyhosts.control.plan import Plan
from manyhosts.errors import LaunchError

State = Literal["waiting", "running", "done", "failed", "cancelled", "unknown"]
_LOOK_S = 2.0
_ENDS = {"done": 0, "failed": 1, "cancelled": 130, "unknown": 3}


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of a job."""

    state: State
    reason: str = ""
    """Why, in the engine's words."""
    hosts: str = ""
    """Where it runs, in the engine's words."""
    log: str = ""
    """Where its output is kept."""
    code: int | None = None
    """Its exit code, where the engine reports it."""

    @property
    def over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.state not in ("waiting", "running")

    @property
    def exit_code(self) -> int:
        """What a command that has waited for it ends with."""
        if self.state == "failed" and self.code:
            return self.code
        return _ENDS.get(self.state, 0)

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)


@runtime_checkable
class Jobs(Protocol):
    """Keeps jobs that live by themselves, called by words: handles."""

    def send(self, plan: Plan) -> str:
        """Hand the job over. Returns its name at this engine.

        Raises:
            LaunchError: the engine refused, or was not reached.
        """

    def status(self, name: str) -> Status:
        """Its state. A job that the engine no longer knows is `unknown`.

        Raises:
            LaunchError: the engine was not reached.
        """

    def logs(self, name: str, *, follow: bool) -> Iterator[str]:
        """What it has printed, line by line; with `follow`, also what comes, until it is over.

        Raises:
            LaunchError: there is no log to be had.
        """

    def cancel(self, name: str) -> None:
        """End it. No error for one that is over, or was cancelled before.

        Raises:
            LaunchError: the engine was not reached.
        """


def send_and_follow(
    jobs: Jobs,
    target: str,
    plan: Plan,
    display: Display,
    *,
    wait: Callable[[float], None] = time.sleep,
) -> int:
    """Hand the job over, say by which handle it is known, and show why it waits and what it prints until it is over.

    Ctrl-C and SIGTERM cancel it, also those that come while the engine is still being asked to take it.

    Returns:
        Its exit code.

    Raises:
        LaunchError: the engine refused, or was not reached.
    """
    for note in plan.notes:
        display.warn(f"manyhosts: {note}")
    name = ""
    with _Interrupts() as interrupts:
        try:
            with interrupts.deferred():
                name = jobs.send(plan)
                display.say(f"manyhosts: sent as {target}://{name}")
            return _follow(jobs, name, display, wait)
        except LaunchError:
            if name:
                display.warn(
                    f"manyhosts: this does not end the job: ask after it with `manyhosts status {target}://{name}`"
                )
            raise
        except KeyboardInterrupt:
            if not name:
                display.warn(f"manyhosts: interrupted before {target} had answered: see there whether it has the job")
                return 130
            display.warn("manyhosts: the job is being cancelled")
            with contextlib.suppress(KeyboardInterrupt), interrupts.deferred():
                jobs.cancel(name)
            return 130


def _follow(jobs: Jobs, name: str, display: Display, wait: Callable[[float], None]) -> int:
    """Show why the job waits, and what it prints, until it is over. Returns its exit code."""
    reported = ""
    while (status := jobs.status(name)).state == "waiting":
        if status.reason and status.reason != reported:
            reported = status.reason
            display.warn(f"manyhosts: the job waits: {reported}")
        wait(_LOOK_S)
    _show(jobs, name, display, wait)
    status = jobs.status(name)
    if status.state != "done":
        why = f": {status.reason}" if status.reason.lower() not in ("", status.state) else ""
        display.warn(f"manyhosts: the job {'has ' if status.state == 'failed' else 'is '}{status.state}{why}")
    return status.exit_code


def _show(jobs: Jobs, name: str, display: Display, wait: Callable[[float], None]) -> None:
    for line in jobs.logs(name, follow=True):
        display.line(line, "", is_error=False)
    while not jobs.status(name).over:
        wait(_LOOK_S)


class _Interrupts:
    """While entered, SIGTERM does what Ctrl-C does: a launcher that is ended must not leave its job in the queue."""

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._is_held = self._has_come = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():  # which alone handles signals
            self._before = {number: signal.signal(number, self._interrupt) for number in self._SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """The first signal waits for the end of this block: what is done here is undone only when it is done.

        A second one does not wait, for the engine may take minutes to answer.
        """
        self._is_held, self._has_come = True, False
        try:
            yield
        finally:
            self._is_held = False
        if self._has_come:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: object) -> None:
        waits = self._is_held and not self._has_come
        self._has_come = True
        if not waits:
            raise KeyboardInterrupt


def tail(read: Callable[[], str], over: Callable[[], bool], wait: Callable[[float], None]) -> Iterator[str]:
    """The lines of a growing text until `over`; `read` returns what has come since the last call."""
    rest = ""
    while True:
        last = over()
        *lines, rest = (rest + read()).split("\n")
        yield from lines
        if last:
            break
        wait(_LOOK_S)
    if rest:
        yield rest


def growing(path: Path) -> Callable[[], str]:
    """What reads on in a file that may not be there yet: each call returns what has come since the last."""
    read, known, decoder = 0, 0, codecs.getincrementaldecoder("utf-8")(errors="replace")

    def more() -> str:
        nonlocal read, known
        if not path.exists():
            return ""
        with path.open("rb") as file:
            chunk, now = b"", os.fstat(file.fileno()).st_ino
            if now != known:  # the first look, or the file was full, and another took its place
                chunk, read, known = _put_aside(path, known, read), 0, now
            file.seek(read)
            new = file.read()
        read += len(new)
        return decoder.decode(chunk + new)

    return more


def _put_aside(path: Path, known: int, read: int) -> bytes:
    """What is yet to be read of the log before this one: see `control.agent.log`."""
    with contextlib.suppress(FileNotFoundError), Path(f"{path}.1").open("rb") as file:
        file.seek(read if os.fstat(file.fileno()).st_ino == known else 0)
        return file.read()
    return b""
