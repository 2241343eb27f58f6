"""Tells every listener what happened; one that fails is named and dropped, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from manyhosts.events import Event, Listener

_LOG = logging.getLogger("manyhosts")


class Broadcast:
    """One listener in front of many. Only what is no `Exception` (Ctrl-C, an exit) comes through from them."""

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self.listeners = list(listeners)

    def __call__(self, event: Event) -> None:
        """Tell `event` to all."""
        for listener in self.listeners:  # dropping one makes a new list, so this one goes on undisturbed
            try:
                listener(event)
            except Exception as error:
                self._drop(listener, error)

    def flush(self) -> bool:
        """Have all that was told on the disk, where a listener writes. The loop calls it before each snapshot.

        Returns whether it is there.
        """
        return self._call_all("flush")

    def close(self) -> None:
        """Let every listener finish. Safe to call twice."""
        self._call_all("close")

    def _call_all(self, name: str) -> bool:
        good = True
        for listener in self.listeners:
            method: Callable[[], None] = getattr(listener, name, _nothing)
            try:
                method()
            except Exception as error:  # it may work the next time: a full disk has room again
                _LOG.warning("the listener %s could not %s: %s", _name(listener), name, _in_words(error))
                good = False
        return good

    def _drop(self, listener: Listener, error: Exception) -> None:
        self.listeners = [other for other in self.listeners if other is not listener]
        words = "the listener %s failed and is told no more; training goes on: %s"
        _LOG.warning(words, _name(listener), _in_words(error))


def _name(listener: Listener) -> str:
    return getattr(listener, "__qualname__", None) or type(listener).__qualname__


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _nothing() -> None:
    """What a listener does at a call that it does not know."""
