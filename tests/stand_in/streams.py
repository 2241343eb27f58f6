"""Streams and events of the stand-in: queues of work that is done as late as it can be.

A stream does nothing by itself. What was launched on it runs when somebody waits for it: the host, or another stream by
an event. So whoever forgets to wait reads what was there before, every time and not one time in a thousand. A thread
runs what nobody has waited for in a while, as a GPU would have long ago. While a collective waits for other workers,
those of other groups continue, as they do on a GPU.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

COLLECTIVES = "collectives"
"""The name of streams on which groups of workers exchange."""
_GLANCE_S = 0.0002
Work = Callable[[], object]
"""False says that it is not done yet, and is to be asked again."""

idle_s = 0.2
"""After so long without any call of the host's, what is queued runs all the same."""
early = False
"""Whether side streams do their work at once instead: who forgets to have them wait finds that out."""

_lock = threading.RLock()
_forbidden = 0
_touched = time.monotonic()


class HiddenSynchronisation(RuntimeError):
    """The host waited for the device where it must not."""


class Stream:
    """Work in order of launch."""

    def __init__(self, name: str = "side") -> None:
        self.name = name
        self.launched = self.done = 0
        self._waiting: deque[Work] = deque()
        self._is_busy = False
        all_streams.append(self)

    def launch(self, work: Work) -> None:
        """Queue it."""
        global _touched
        with _lock:
            self._waiting.append(work)
            self.launched += 1
            _touched = time.monotonic()
            runs_now = early and self is not _main and not self._is_busy
        if runs_now:
            self.run_until(self.launched)

    def advance(self, position: int) -> bool:
        """Do of what was launched before `position` all that need not wait for other workers. Whether it is done."""
        with _lock:
            while self.done < position:
                if self._is_busy or not self._do_next():
                    return False
            return True

    def _do_next(self) -> bool:
        # A thread that PyTorch has not given its number of threads yet computes convolutions with one for each core,
        # and so with other bits, which a busy machine would show: there is much then that no one has waited for.
        torch.get_num_threads()
        self._is_busy, is_done = True, True
        try:
            is_done = self._waiting[0]() is not False
        finally:
            self._is_busy = False
            if is_done:
                self._waiting.popleft()
                self.done += 1
        return is_done

    def run_until(self, position: int) -> None:
        """Do what was launched before `position`."""
        while not self.advance(position):
            time.sleep(_GLANCE_S)
            for other in list(all_streams):
                if other.name == COLLECTIVES:
                    other.advance(other.launched)

    def wait_event(self, event: Event) -> None:
        """What is launched from now on begins after what `event` stands behind."""
        self.launch(event.reach)

    def wait_stream(self, other: Stream) -> None:
        """What is launched from now on begins after what was launched on `other`."""
        self.wait_event(other.record_event())

    def record_event(self) -> Event:
        """A new event behind what was launched so far."""
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        """The host waits."""
        note_synchronisation("Stream.synchronize")
        self.run_until(self.launched)


class Event:
    """A place between two pieces of work of a stream."""

    def __init__(self, *, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self.stream: Stream | None = None
        self.position = 0
        self.time = 0.0

    def record(self, stream: Stream | None = None) -> None:
        """Behind what was launched so far on `stream`, or on the current one."""
        self.stream = stream or current_stream()
        self.time = 0.0
        is_idle = self.stream.done == self.stream.launched
        self.stream.launch(self._pass)
        self.position = self.stream.launched
        if is_idle:
            self.stream.run_until(self.position)  # as on a GPU that has nothing to do

    def _pass(self) -> None:
        self.time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        """Have `stream`, or the current one, wait for it."""
        (stream or current_stream()).wait_event(self)

    def reach(self) -> bool:
        """Do what is before it. Whether it has been passed."""
        return self.stream is None or self.stream.advance(self.position)

    def query(self) -> bool:
        """Whether it has been passed."""
        return self.stream is None or self.stream.done >= self.position

    def synchronize(self) -> None:
        """The host waits."""
        if self.stream is not None:
            self.stream.run_until(self.position)

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this one to `end`."""
        assert self.enable_timing, "an event without timing was asked for its time"
        assert end.enable_timing, "an event without timing was asked for its time"
        assert self.query(), "the event has not been passed yet"
        assert end.query(), "the event has not been passed yet"
        return (end.time - self.time) * 1000


all_streams: list[Stream] = []
_main = Stream("main")
_current = threading.local()


def current_stream() -> Stream:
    """That of this thread."""
    return getattr(_current, "stream", _main)


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Launch on `stream` within."""
    before = current_stream()
    _current.stream = stream
    try:
        yield
    finally:
        _current.stream = before


def synchronize() -> None:
    """The host waits for everything."""
    note_synchronisation("synchronize")
    run_everything()


def run_everything() -> None:
    """Do what is queued, the side streams last: who relies on them without waiting for them is found out."""
    for stream in list(all_streams):
        stream.run_until(stream.launched)


def note_synchronisation(what: str) -> None:
    """The host waits for the device because of `what`."""
    global _forbidden
    if _forbidden and threading.current_thread() is threading.main_thread():
        _forbidden = 0  # what comes of the failure may wait
        raise HiddenSynchronisation(what)


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Within, a host that waits for the device is an error."""
    global _forbidden
    _forbidden += 1
    try:
        yield
    finally:
        _forbidden = max(0, _forbidden - 1)


def _run_what_nobody_waits_for() -> None:
    while True:
        time.sleep(min(idle_s / 4, 0.05))
        if time.monotonic() - _touched > idle_s:
            try:
                for stream in list(all_streams):
                    stream.advance(stream.launched)
            except BaseException:  # shown here, since nobody waits for it
                traceback.print_exc()


threading.Thread(target=_run_what_nobody_waits_for, name="stand-in", daemon=True).start()
