"""What a worker's script has imported, and whether a fork server may load it for the workers to come.

A replacement runs the script again, and most of that time goes into imports. A fork server that has loaded the same
packages takes it away. But what it has, every worker has: so a child of it tries first, as a worker would, and what
starts a thread, opens something that stays open, makes a temporary file or asks which worker it is, is left to the
script.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

_PATIENCE_S = 120
"""A trial that takes longer is given up."""


def imported_since(before: Collection[str]) -> list[str]:
    """The installed modules that this process has imported and that are not among `before`, in order.

    The script and the modules next to it are not among them: they may be about to change.
    """
    places = _installed()
    return [
        name
        for name, module in list(sys.modules.items())
        if name not in before and not name.startswith("__") and _is_installed(name, module, places)
    ]


def _is_installed(name: str, module: Any, places: tuple[str, ...]) -> bool:
    spec = vars(module).get("__spec__") if hasattr(module, "__dict__") else None  # a lazy module must stay so
    if spec is None or spec.name != name:
        return False  # made by a program, or known by another name: it comes with the one that it belongs to
    return name.partition(".")[0] == "manyhosts" or str(spec.origin).startswith(places)


def _installed() -> tuple[str, ...]:
    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    paths |= {*site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{path}{os.sep}" for path in paths if path)


def load(names: Iterable[str]) -> None:
    """Import `names`. One that cannot be imported is left to the script, whose traceback will say why."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


@contextmanager
def silence() -> Iterator[None]:
    """Let nothing that is printed to the standard error come through: the first worker has shown it already."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


# The trial.


@dataclass(frozen=True, slots=True)
class Assessment:
    """How far a trial came."""

    good: tuple[str, ...]
    """What may be loaded."""
    rest: tuple[str, ...]
    """What is yet to be tried; the package at which the trial ended is not among it."""


def try_out(names: Sequence[str], private: Collection[str], report: int) -> None:
    """In a child of the fork server: import `names` until one leaves a trace, and write that one's place to `report`.

    `private` are the variables in which workers differ.
    """
    signal.alarm(_PATIENCE_S)
    with silence():
        traces = _Traces(private)
        place = next((place for place, name in enumerate(names) if traces.left_by(lambda: load([name]))), len(names))  # noqa: B023  # called at once
    os.write(report, json.dumps(place).encode())


def assess(names: Sequence[str], report: bytes) -> Assessment:
    """What a trial of `names` has shown; nothing good can be said of one that did not come to its end."""
    try:
        place = int(report)
    except ValueError:
        return Assessment((), ())
    spoilt = names[place].partition(".")[0] if place < len(names) else ""
    rest = (name for name in names[place + 1 :] if name.partition(".")[0] != spoilt)
    return Assessment(tuple(names[:place]), tuple(rest))


class _Traces:
    """What an import may leave in a process that its children must not have twice."""

    def __init__(self, private: Collection[str]) -> None:
        self._private, self._marked = frozenset(private), False
        self._threads, self._open = _threads(), _open_files()
        environment: Any = os.environ
        encode = environment.encodekey

        def noting(name: str) -> bytes:
            self._marked = self._marked or name in self._private
            return bytes(encode(name))

        environment.encodekey = noting
        sys.addaudithook(self._note)

    def _note(self, event: str, _: object) -> None:
        self._marked = self._marked or event in ("tempfile.mkdtemp", "tempfile.mkstemp")

    def left_by(self, act: Callable[[], None]) -> bool:
        """Whether there is anything after `act` that was not there before."""
        act()
        torch: Any = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "cuda") and torch.cuda.is_initialized():
            return True
        return self._marked or not _open_files() <= self._open or self._threads_that_stay()

    def _threads_that_stay(self) -> bool:
        """Whether more threads run than would survive a fork. Those of OpenBLAS, say, end for it and are restarted."""
        if _threads() <= self._threads:
            return False
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        return _threads() > self._threads


def _threads() -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _open_files() -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # the listing's own is closed again
                found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found
