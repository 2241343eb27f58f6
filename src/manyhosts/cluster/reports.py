"""What a worker reports to its agent while it trains: one JSON line per report, over the agent's socket.

Kinds that the agent and the head know:

    progress    fields for the display, each replacing the one before: epoch, epochs, step, total_steps, loss, …
    say         a line that stays, shown without a rank: text
    step        the last finished step, so that a hang can be noticed: step. Sent by a Trainer; where a script
                has none, its optimizer steps are counted
    script_probe  what was seen of a training without a Trainer, after its first steps and at its good end: workers,
                world (the size of its process group), apart (a part of the model, or other ways to train together),
                optimizer (one was made), shapes, weights, samples (fingerprints), libraries, steps, ended
    fault       what may be a fault of the script, for the head to compare (`agent.script_faults`): fault, host,
                workers, world, apart, and what belongs to it
    busy        something continues that takes long and is no step (an evaluation, a snapshot): no hang
    rest        no steps are to be expected any more: training has ended
    trainer     a Trainer was made, so the settings of `--set` were heard
    directory   a Trainer's run has begun in a run directory, and can be resumed: path
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

IN_PARTS = "apart"
"""The field that says that workers hold parts of a model, or train together in other ways."""
VARIABLE = "MANYHOSTS_AGENT"
"""Names the agent's socket in the environment of a worker."""

_SHORTEST_PAUSE_S = {"step": 0.5, "busy": 0.5}
_MOST_UNSENT_BYTES = 1 << 20
_calls: dict[str, list[Callable[[], None]]] = {}
_noted: dict[str, int] = {}


def on_report(kind: str, call: Callable[[], None]) -> None:
    """Call `call` once, when this process first reports something of `kind`."""
    _calls.setdefault(kind, []).append(call)


def last_step() -> int | None:
    """The last step that this process has noted; None where it has noted none."""
    return _noted.get("step")


def board_of(address: str | os.PathLike[str], process: int) -> Path:
    """The file next to the agent's socket in which a worker keeps the number of its last step, as 8 bytes."""
    return Path(f"{os.fspath(address)}-{process}")


def step_on(board: Path) -> int | None:
    """The last step that a worker has noted; None where it has noted none."""
    try:
        return int.from_bytes(board.read_bytes()[:8], sys.byteorder) or None
    except OSError:
        return None


def leave_cause(address: str | os.PathLike[str], number: int) -> None:
    """Write next to the agent's socket which signal the head got, before workers are sent theirs."""
    _cause_at(address).write_text(str(number))


def cause() -> int:
    """The signal that the head was sent, before this worker was sent one; 0 where no head has left word of one."""
    try:
        return int(_cause_at(os.environ.get(VARIABLE, "")).read_text())
    except (OSError, ValueError):
        return 0


def _cause_at(address: str | os.PathLike[str]) -> Path:
    return Path(f"{os.fspath(address)}-asked")


class Reporter:
    """Sends reports to the agent that started this worker. Never waits, never raises.

    Where the agent does not read, reports pile up to 1 MiB and then are dropped. Safe to call from any thread; a
    process forked from the worker (a loader, say) sends nothing.
    """

    def __init__(self, address: str, local_rank: int) -> None:
        """Connect to the Unix socket at `address`, as worker number `local_rank` of this host."""
        self._local_rank = local_rank
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._last: dict[str, float] = {}
        self._process = os.getpid()
        self._board = _open_board(board_of(address, self._process))
        self._socket: socket.socket | None = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(5)
            self._socket.connect(address)
            self._socket.setblocking(False)
        except OSError:
            self._give_up()

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Reporter | None:
        """The way to the agent of this worker, or None where no agent started it."""
        variables = os.environ if variables is None else variables
        address = variables.get(VARIABLE)
        if not address:
            return None
        return cls(address, int(variables.get("LOCAL_RANK", "0")))

    def note_step(self, step: int) -> None:
        """Leave the number of the last step where the agent finds it, whatever becomes of this worker."""
        _noted["step"] = step
        if self._board is not None and os.getpid() == self._process:
            self._board[0] = step

    def send(self, kind: str, **fields: object) -> None:
        """Report `fields`, which must be plain JSON values. A `step` or `busy` is sent at most every 0.5 s."""
        if self._socket is None or os.getpid() != self._process:
            return
        for call in _calls.pop(kind, ()):
            call()
        if kind == "step" and isinstance(step := fields.get("step"), int):
            self.note_step(step)
        now = time.monotonic()
        with self._lock:
            if now - self._last.get(kind, -1e9) < _SHORTEST_PAUSE_S.get(kind, 0):
                return
            self._last[kind] = now
            try:
                line = json.dumps({"worker": self._local_rank, "kind": kind, "fields": fields}, default=str)
            except (TypeError, ValueError):
                return
            if len(self._unsent) < _MOST_UNSENT_BYTES:
                self._unsent += line.encode() + b"\n"
            self._push()

    def close(self, timeout_s: float = 1) -> None:
        """Send what is left, for at most `timeout_s` seconds. Safe to call twice."""
        if self._socket is None or os.getpid() != self._process:
            return
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while self._socket is not None and self._unsent and time.monotonic() < deadline:
                self._push()
                time.sleep(0.001 if self._unsent else 0)
            self._give_up()

    def _push(self) -> None:
        """Hand the kernel as much as it takes at once."""
        try:
            while self._socket is not None and self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:
            self._give_up()  # the agent is gone; this worker will hear of it in another way

    def _give_up(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
        self._socket = None


def _open_board(path: Path) -> memoryview | None:
    """A number in memory that others can read as a file; None where there can be none."""
    try:
        with path.open("a+b") as file:
            file.truncate(8)
            return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    except (OSError, ValueError):
        return None
