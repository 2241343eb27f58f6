"""What workers tell each other before they are connected: a small table of the group that meets, kept by the head.

Questions come through agents (`cluster.store_line` lists them) and concern one group of workers, the newest. Where that
has lost a worker, everybody who waits is told so, and whoever asks later. What stands here is written down for a head
that takes over, with the questions that wait.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_MOST_BYTES = 16 << 20
"""The table's limit: a head that takes over reads it from a file that is written again and again."""
_BROKEN = "a worker of this group is lost"


class Asker(NamedTuple):
    """Who is to be answered."""

    node: int
    line: int
    """A connection of a worker to its agent."""
    id: int
    """A question on it."""


Answer = Callable[..., None]
"""Is told the asker, and `value` or `error`."""


class Board:
    """The table of one group, and those who wait for something to be put there."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._group = (-1, -1)
        """The start of the job, and the group in it, that this is the table of."""
        self._closed = (-1, -1)
        """The last group that is no more."""
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._waiting: list[tuple[Asker, str, list[str]]] = []

    def written_down(self) -> dict[str, Any]:
        """All of it, for another head."""
        return {
            "group": self._group,
            "closed": self._closed,
            "values": self._values,
            "waiting": [[list(asker), do, names] for asker, do, names in self._waiting],
        }

    def go_on_from(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it."""
        self._group, self._closed = _pair(written["group"]), _pair(written["closed"])
        self._values = dict(written["values"])
        self._bytes = sum(len(value) for value in self._values.values())
        self._waiting = [(Asker(*asker), do, names) for asker, do, names in written["waiting"]]

    def close(self, start: int, group: int) -> None:
        """A worker of that group is lost: nobody waits in it any more, or meets in it from now on."""
        self._closed = max(self._closed, (start, group))
        if self._group <= self._closed:
            self._clear()

    def ask(self, asker: Asker, do: str, fields: Mapping[str, Any]) -> None:
        """Answer a question, now or when there is what it waits for."""
        try:
            group = _pair(fields["group"])
            if group <= self._closed or group < self._group:
                self._answer(asker, error=_BROKEN)
                return
            if group > self._group:
                self._clear()
                self._group = group
            if do in ("get", "wait"):
                self._waiting.append((asker, do, [str(name) for name in fields["names"]]))
            else:
                self._answer(asker, value=self._change(do, fields))
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            self._answer(asker, error=f"the store could not do {do!r}: {cause}")
        self._look()

    def _change(self, do: str, fields: Mapping[str, Any]) -> Any:
        if do == "set":
            for name, value in dict(fields["values"]).items():
                self._put(str(name), str(value))
            return None
        if do == "check":
            return all(name in self._values for name in fields["names"])
        if do == "names":
            return list(self._values)
        name = str(fields["name"])
        now = self._values.get(name)
        if do == "add":
            total = int(b64decode(now or "") or b"0") + int(fields["amount"])
            self._put(name, b64encode(str(total).encode()).decode())
            return total
        if do == "compare_set":
            if now == fields["expected"] or (now is None and not fields["expected"]):
                self._put(name, str(fields["desired"]))
            return self._values.get(name, fields["expected"])
        if do == "append":
            self._put(name, b64encode(b64decode(now or "") + b64decode(fields["value"])).decode())
            return None
        if do == "delete":
            self._bytes -= len(now or "")
            return self._values.pop(name, None) is not None
        raise ValueError("there is no such question")

    def _put(self, name: str, value: str) -> None:
        size = self._bytes + len(value) - len(self._values.get(name, ""))
        if size > _MOST_BYTES:
            raise ValueError(f"it holds at most {_MOST_BYTES >> 20} MB")
        self._values[name], self._bytes = value, size

    def _look(self) -> None:
        """Answer those who have waited for what is there now."""
        waiting, self._waiting = self._waiting, []
        for asker, do, names in waiting:
            if all(name in self._values for name in names):
                self._answer(asker, value=[self._values[name] for name in names] if do == "get" else None)
            else:
                self._waiting.append((asker, do, names))

    def _clear(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._values, self._bytes = {}, 0
        for asker, _, _ in waiting:
            self._answer(asker, error=_BROKEN)


def _pair(group: Any) -> tuple[int, int]:
    start, number = group
    return int(start), int(number)
