"""Passes each event to each listener; one that fails, or that training waits for, is named, and training continues."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

from manyhosts.errors import check_run
from manyhosts.events import Event, Listener

_LOG = logging.getLogger("manyhosts")
_SLOW_AFTER_S, _SLOW_SHARE = 10.0, 0.1
"""A listener is slow that has taken such a share of the time, so long after the first event: some load a library."""


class Broadcast:
    """One listener in front of many. Only what is no `Exception` (Ctrl-C, an exit) comes through from them."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self.listeners = list(listeners)
        self._hear: dict[type[Event], list[tuple[int, Callable[[Event], object]]]] = {}
        """By the kind of an event, those that hear of it, with their places."""
        self.failures: Counter[int] = Counter()
        """How often each has failed, by its place."""
        self._spent = [0.0] * len(self.listeners)
        """Seconds that training has waited for each; -inf where that was said."""
        self._began = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Pass `event` to all. A listener that fails misses what it failed at, and nothing else."""
        begin = time.perf_counter()
        kind = type(event)
        for place, listener in self._hear.get(kind) or self._hearing(kind):
            try:
                found = listener(event)
                if found is not None:
                    check_run(found, what="it", where="mh.Trainer(listeners=…)")
            except Exception as error:
                self.failures[place] += 1
                if self.failures[place] == 1:
                    words = "the listener %s failed at %s of step %d%s; training continues, and so do its calls: %s"
                    who, where = _name(self.listeners[place]), _where(error)
                    _LOG.warning(words, who, kind.__name__, event.step, where, _in_words(error))
            begin, before = time.perf_counter(), begin
            self._spent[place] = spent = self._spent[place] + begin - before
            if spent > _SLOW_SHARE * (begin - self._began) > _SLOW_SHARE * _SLOW_AFTER_S:
                self._name_slow(place, begin - self._began)

    def _hearing(self, kind: type[Event]) -> list[tuple[int, Callable[[Event], object]]]:
        """Those that hear of events of this kind: all but those who say `HEARS`, and not this one."""
        calls = enumerate(cast(list[Callable[[Event], object]], self.listeners))
        self._hear[kind] = [(place, each) for place, each in calls if kind in getattr(each, "HEARS", (kind,))]
        return self._hear[kind]

    def _name_slow(self, place: int, passed: float) -> None:
        words = "training waits for the listener %s: %.1f of %.1f s until now; have it do its work on a thread"
        _LOG.warning(words, _name(self.listeners[place]), self._spent[place], passed)
        self._spent[place] = -math.inf  # once

    def flush(self) -> bool:
        """Have all that was reported on the disk, where a listener writes. The loop calls it before each snapshot.

        Returns whether it is there.
        """
        return self._call_all("flush")

    def close(self) -> None:
        """Let every listener finish, and say how often one has failed. Safe to call twice."""
        self._call_all("close")
        for place, count in self.failures.items():
            times = "once" if count == 1 else f"{count} times"
            _LOG.warning("the listener %s failed %s: what it keeps is incomplete", _name(self.listeners[place]), times)
        self.failures.clear()

    def _call_all(self, name: str) -> bool:
        good = True
        for listener in self.listeners:
            method: Callable[[], None] = getattr(listener, name, _nothing)
            try:
                method()
            except Exception as error:  # it may work the next time: a full disk has room again
                _LOG.warning("the listener %s could not %s: %s", _name(listener), name, _in_words(error))
                good = good and not getattr(listener, "KEEPS_RECORD", False)
        return good


def _name(listener: Listener) -> str:
    return getattr(listener, "__qualname__", None) or type(listener).__qualname__


def _where(error: Exception) -> str:
    """The line that raised `error`."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if len(frames) > 1 else ""


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """What a listener does at a call that it does not know."""
