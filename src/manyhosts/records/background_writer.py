"""Work done next to the training loop: handed over in an instant, dealt with in batches by a thread."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class BackgroundWriter(Generic[T]):
    """Gathers what it is given and hands it to `work` in batches, in order, every `every_s` seconds.

    `put` costs as much as an append. `work` is called with an empty batch too, so that it can do what is due with time;
    it is never called twice at once. Where it raises, the thread ends and the error comes out of the next call here.
    """

    def __init__(self, work: Callable[[list[T]], None], *, every_s: float, name: str) -> None:
        self._work = work
        self._every_s = every_s
        self._waiting: deque[T] = deque()
        self._turn = threading.Lock()
        self._ended = threading.Event()
        self._failure: Exception | None = None
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._keep_working, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)  # a script that fails leaves its last half second too

    def put(self, item: T) -> None:
        """Hand over `item`."""
        if self._failure is not None:
            raise self._failure
        self._waiting.append(item)

    def flush(self) -> None:
        """Deal with everything that was handed over, before this returns."""
        self._work_off()

    def close(self) -> None:
        """Deal with what is left and end the thread. Safe to call twice."""
        if self._ended.is_set():
            return
        self._ended.set()
        atexit.unregister(self._at_exit)
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._work_off()

    def _keep_working(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self._work_off()
            except Exception as failure:
                self._failure = failure
                return

    def _work_off(self) -> None:
        with self._turn:
            if self._failure is not None:
                raise self._failure
            self._work([self._waiting.popleft() for _ in range(len(self._waiting))])

    def _at_exit(self) -> None:
        if (
            self._failure is None and os.getpid() == self._process
        ):  # a forked child holds copies, and must not write them
            self.close()
