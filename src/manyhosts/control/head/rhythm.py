"""How long the silence of a host is nothing special, learned from its silences of the last ten minutes.

A host on a quiet network is heard every half second; one that is overloaded, or behind a bad link, now and then has
silences of seconds. What counts is the longest of them, for what comes through such a network has a long tail: no
variance describes it, and an average forgets it. A silence is told that is longer than three times all others of ten
minutes, so that ever longer ones are told ever more rarely: of silences up to T s, at most 1 + log3(T / LEAST_S) are.
"""

from __future__ import annotations

from collections import deque

LEAST_S = 2.25
"""No silence shorter than this is worth a word."""
_TIMES = 3.0
"""So many times the longest silence that was usual is not."""
_SPAN_S = 30.0
_SPANS = 20


class Rhythm:
    """The silences of one host."""

    def __init__(self) -> None:
        self._longest: deque[tuple[float, float]] = deque()
        """When each span of 30 s began, and the longest silence that ended in it."""

    def note(self, now: float, silence_s: float) -> None:
        """A silence has ended. `now` never goes back."""
        while self._longest and now - self._longest[0][0] > _SPAN_S * _SPANS:
            self._longest.popleft()
        if self._longest and now - self._longest[-1][0] < _SPAN_S:
            began, longest = self._longest[-1]
            self._longest[-1] = began, max(longest, silence_s)
        else:
            self._longest.append((now, silence_s))

    @property
    def overdue_s(self) -> float:
        """From when on a silence is worth a word, in seconds."""
        return max(LEAST_S, _TIMES * max((longest for _, longest in self._longest), default=0.0))
