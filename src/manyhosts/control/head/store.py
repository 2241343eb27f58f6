"""The rendezvous of the workers: a small table that the head keeps, or a TCPStore that one of the hosts keeps.

Before workers are connected they exchange values through the table. Their questions come through agents
(`cluster.store_line` lists them) and concern one group of workers, the newest. Where that has lost a worker, those
that wait get an error, and so do later questions. The table is saved for a head that takes over, with the
questions that wait.

The TCPStore is for workers that do not use the channel, one at a time. Its port is taken when workers start,
because their variables name it. Where workers are expected to use the channel, it is opened when one
of them asks for it.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.protocol import CloseStore, OpenStore

_MOST_BYTES = 16 << 20
"""The table's limit: a head that takes over reads it from a file that is written again and again."""
_MOST_WORKERS = 1 << 16
_AWAITED = ("names", "begin", "size")
_BROKEN = "a worker of this group is lost"


class Asker(NamedTuple):
    """Who is to be answered."""

    node: int
    line: int
    """A connection of a worker to its agent."""
    id: int
    """A question on it."""


class _Waits:
    """One who waits for several names."""

    def __init__(self, asker: Asker, do: str, fields: Mapping[str, Any]) -> None:
        self.asker, self.do, self.fields = asker, do, fields
        if do == "get_all":
            begin, size = str(fields["begin"]), int(fields["size"])
            if not 0 < size <= _MOST_WORKERS:
                raise ValueError(f"there are no {size} workers")
            self.names = [f"{begin}{rank}" for rank in range(size)]
        else:
            self.names = [str(name) for name in fields["names"]]
        self.seen = 0
        """How many of the names, from the first, were there when they were looked for."""


Answer = Callable[..., None]
"""Called with the asker, and `value` or `error`."""


class KeyValueStore:
    """The table of one group, and those who wait for something to be put there."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._group = (-1, -1)
        """The start of the job, and the group in it, that this is the table of."""
        self._closed = (-1, -1)
        """The last group that is no more."""
        self._values: dict[str, str] = {}
        self._bytes = 0
        self._put_now: list[str] = []
        """What the question that is being answered has put there."""
        self._waiting: dict[str, list[_Waits]] = {}
        """By a name at which there is nothing yet."""

    def to_dict(self) -> dict[str, Any]:
        """All of it, for another head."""
        return {
            "group": self._group,
            "closed": self._closed,
            "values": self._values,
            "waiting": [[list(each.asker), each.do, each.fields] for some in self._waiting.values() for each in some],
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it."""
        self._group, self._closed = _pair(written["group"]), _pair(written["closed"])
        self._values = dict(written["values"])
        self._bytes = sum(len(value) for value in self._values.values())
        self._waiting = {}
        for asker, do, asked in written["waiting"]:
            self._wait(_Waits(Asker(*asker), do, asked))

    def close(self, start: int, group: int) -> None:
        """A worker of that group is lost: end all waiting in it, and refuse to begin any."""
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
            if do in ("get", "wait", "get_all"):
                self._wait(_Waits(asker, do, {name: fields[name] for name in _AWAITED if name in fields}))
            else:
                self._answer(asker, value=self._change(do, fields))
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            self._answer(asker, error=f"the store could not do {do!r}: {cause}")
        put, self._put_now = self._put_now, []
        for name in put:
            for waits in self._waiting.pop(name, ()):
                self._wait(waits)

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
        self._put_now.append(name)

    def _wait(self, waits: _Waits) -> None:
        """Answer one that waits, or have it wait for a name that is not there. Each name is looked for once."""
        while waits.seen < len(waits.names):
            if (name := waits.names[waits.seen]) not in self._values:
                self._waiting.setdefault(name, []).append(waits)
                return
            waits.seen += 1
        found = [self._values.get(name) for name in waits.names]
        if None in found:  # one was taken away again meanwhile
            waits.seen = 0
            self._wait(waits)
        else:
            self._answer(waits.asker, value=None if waits.do == "wait" else found)

    def _clear(self) -> None:
        waiting, self._waiting = self._waiting, {}
        self._values, self._bytes = {}, 0
        for waits in (each for some in waiting.values() for each in some):
            self._answer(waits.asker, error=_BROKEN)


def _pair(group: Any) -> tuple[int, int]:
    start, number = group
    return int(start), int(number)


Then = Callable[[str, int], None]
"""Called with the address and the port of a store."""


class Store:
    """Which host keeps it, and who waits for it."""

    def __init__(self, state: HeadState, agents: Agents, answer: Answer) -> None:
        """`answer` answers a worker that has asked for one that listens."""
        self._state, self._agents, self._answer = state, agents, answer
        self._node: int | None = None
        """The host that has it, or was asked to; None where there is none."""
        self._port = 0
        """0 until it is known."""
        self.shared = True
        """Whether it is more than a free port. On a host without torch it is not: rank 0 opens one there itself."""
        self.listens = False
        """Whether it is served, and not only its port taken."""
        self._is_opening = False
        """Whether the host that has its port was asked to serve it."""
        self._then: Then | None = None
        self._askers: list[Asker] = []
        """Workers that wait until it is served."""
        self._best: Sequence[int] = ()
        self._is_asked_for = False
        """Whether another head has asked for one, and the answer is still to come."""

    @property
    def place(self) -> tuple[str, int] | None:
        """Its address and port, where it has one."""
        return None if self._node is None or not self._port else (self._address(self._node), self._port)

    def _address(self, node: int) -> str:
        """Where the other hosts reach this one."""
        facts = self._agents.nodes[node].facts
        return self._agents.address if facts is None else facts.address

    def open(self, then: Then, *, best: Sequence[int] = (), listens: bool = True) -> None:
        """See that there is one, and call back. A new one is kept by the first node here, of `best`, then of all.

        `listens`: have it served. What a caller wanted that has not been called back yet is forgotten.
        """
        if (place := self.place) is not None and (self.listens or not listens):
            then(*place)
            return
        self._then, self._best = then, best
        if not self._is_asked_for:
            self._ask(listens=listens)

    def serve(self, asker: Asker) -> None:
        """A worker is about to use it: send it the address, once it is served."""
        if self.listens and self.place is not None:
            self._answer(asker, value=list(self.place))
            return
        self._askers.append(asker)
        if self._node is None or (self._port and not self._is_opening):
            self._ask(listens=True)

    def _ask(self, *, listens: bool) -> None:
        if self.place is None:
            here = self._agents.present()
            self._node = next((number for number in (*self._best, *here) if number in here), None)
            self._port = 0
        if self._node is not None:
            self._is_opening = listens
            address, generation = self._address(self._node), self._state.generation
            node = self._agents.nodes[self._node]
            self._agents.send([node], OpenStore(generation=generation, address=address, listens=listens))

    def to_dict(self) -> dict[str, Any]:
        """Which host keeps it, or was asked to, and who waits for it."""
        return {
            "node": self._node,
            "port": self._port,
            "shared": self.shared,
            "listens": self.listens,
            "is_opening": self._is_opening,
            "askers": [list(asker) for asker in self._askers],
        }

    def restore(self, written: Mapping[str, Any]) -> None:
        """Be as another head has left it. A host that was asked has yet to answer, and is not asked again."""
        self._node, self._port, self.shared = written["node"], int(written["port"]), bool(written["shared"])
        self.listens, self._is_opening = bool(written["listens"]), bool(written["is_opening"])
        self._askers = [Asker(*asker) for asker in written["askers"]]
        self._is_asked_for = self._node is not None and not self._port

    def take(self, node: Node, port: int, *, shared: bool, listens: bool) -> None:
        """A node says that it keeps one."""
        if node.number != self._node:
            return  # it was asked before, given up, and is here again
        self._port, self.shared, self.listens = port, shared, listens
        self._is_opening = self._is_asked_for = False
        then, self._then = self._then, None
        if then is not None:
            then(self._address(node.number), port)
        askers, self._askers = self._askers, []
        for asker in askers:
            self.serve(asker)

    def lose(self, node: Node) -> None:
        """A node is gone, and with it the store if it had it. Those that wait for one get that of another."""
        if node.number == self._node:
            self._node, self._port, self._is_asked_for = None, 0, False
            self.listens = self._is_opening = False
            if self._then is not None or self._askers:
                self._ask(listens=bool(self._askers))

    def close(self) -> None:
        """Have everybody who waits at the store, or for it, wait no more. A port that is only taken stays so."""
        askers, self._askers = self._askers, []
        for asker in askers:
            self._answer(asker, error=_BROKEN)
        if (self.listens or self._is_opening) and self._node is not None:
            self._agents.send([self._agents.nodes[self._node]], CloseStore())
            self._node, self._port = None, 0
            self.listens = self._is_opening = False
