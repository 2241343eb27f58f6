"""Where host probes report that open a connection to the doctor, and the hosts that have; each must know the token."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from manyhosts.cluster.findings import Finding
from manyhosts.control import tls
from manyhosts.doctor import wires
from manyhosts.doctor.channel import Channel, answer
from manyhosts.errors import LaunchError, ManyhostsError
from manyhosts.hosts import addresses, remote_probe
from manyhosts.records.json_text import parsed

ANSWER_S = 30.0
_ADMISSION_S = 5.0
"""How long one that connects may take to show that it knows the token."""
LATE_S = 25.0
"""How long the others are waited for once a host has reported."""


class Asked(Protocol):
    """A host that answers questions."""

    def facts(self) -> dict[str, Any]:
        """What it said first."""

    def ask(self, question: str, *, timeout_s: float = ..., **details: Any) -> Any:
        """Its answer.

        Raises:
            LaunchError: it could not answer, or is gone.
        """


@dataclass(frozen=True, slots=True)
class Reached:
    """A host that was reached: what it is called, what it said first, and how to ask it."""

    name: str
    hello: Mapping[str, Any]
    asked: Asked


def unreachable(error: ManyhostsError, host: str) -> Finding:
    """What it means that a host was not reached."""
    return Finding(
        level="error", check="reach", what=error.what, where=error.where or f"host {host}", fix=error.fix, kind="reach"
    )


class Connected:
    """A host probe that has opened a connection."""

    def __init__(self, channel: Channel, address: str) -> None:
        """`address`: where it has come from."""
        self._channel, self._address = channel, address
        self._lines: queue.Queue[str] = queue.Queue()
        self._writing = threading.Lock()
        self._facts: dict[str, Any] = {}
        self.name = ""
        threading.Thread(target=self._read, daemon=True).start()

    def facts(self) -> dict[str, Any]:
        """What it said first, and the address it has come from."""
        if not self._facts:
            self._facts = self._next(ANSWER_S)
        self._facts["address"] = self._facts.get("address") or self._address
        return self._facts

    def ask(self, question: str, *, timeout_s: float = ANSWER_S, **details: Any) -> Any:
        """Its answer.

        Raises:
            LaunchError: it could not answer, or is gone.
        """
        self._write(json.dumps({"ask": question, **details}) + "\n")
        said = self._next(timeout_s)
        if "trouble" in said:
            fix = "look at that on the host itself"
            raise LaunchError(f"host {self.name} refused: {said['trouble']}", where=f"host {self.name}", fix=fix)
        return said["answer"]

    def pulse(self) -> None:
        """Give a sign of life."""
        self._write("\n")

    def close(self) -> None:
        """Let go of it: it ends. Safe to call twice."""
        self._channel.close()

    def _write(self, text: str) -> None:
        with self._writing, contextlib.suppress(OSError):  # the wait for the answer reports its end
            self._channel.write(text)

    def _next(self, timeout_s: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            line = ""
        if not line:
            raise LaunchError(
                f"host {self.name} said nothing within {timeout_s:.0f} s, or is gone",
                where=f"host {self.name}",
                fix="see whether it is up, and whether somebody ended the job",
            )
        with contextlib.suppress(ValueError):
            found = parsed(line.removeprefix(remote_probe.MARK))
            if isinstance(found, dict) and not {"answer", "trouble", "group_rank"}.isdisjoint(found):
                return found
        raise LaunchError(
            f"what host {self.name} has answered cannot be read: {line[:40]!r}",
            where=f"host {self.name}",
            fix="see that manyhosts is the same there and here",
        )

    def _read(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            for line in self._channel:
                self._lines.put(line)
        self._lines.put("")


class ProbeServer:
    """Listens at one address for the host probes of an examination, until `close`."""

    def __init__(self, address: str, port: int, token: str) -> None:
        """Port 0 is any free one."""
        self._token, self._identity = token, tls.Identity()
        self._over = threading.Event()
        self._came: list[Connected] = []
        self._listening = addresses.listen(address, port, backlog=64)
        self._doorman = wires.ConnectionGate(self._listening, self._admit)
        threading.Thread(target=self._pulse, daemon=True).start()

    @property
    def place(self) -> str:
        """host:port."""
        host, port = self._listening.getsockname()[:2]
        return f"{host}:{port}"

    def greet(
        self,
        wanted: int,
        name_them: Callable[[Sequence[Mapping[str, Any]]], Sequence[str]],
        *,
        patience_s: float,
        late_s: float = LATE_S,
        goes_on: Callable[[], bool] = lambda: True,
    ) -> list[Reached]:
        """Those that have reported, by their numbers; `name_them` says how they are called, from what they said first.

        No more are waited for when `wanted` have come, the others are late, or nothing `goes_on` that may bring them.
        """
        deadline = time.monotonic() + patience_s
        first = 0.0
        while len(self._came) < wanted and time.monotonic() < deadline and goes_on():
            time.sleep(0.02)
            if self._came and not first:
                first, deadline = time.monotonic(), min(deadline, time.monotonic() + late_s)
        hellos = []
        for each in list(self._came):
            with contextlib.suppress(LaunchError):
                hellos.append((each.facts(), each))
        hellos.sort(key=lambda pair: int(pair[0]["group_rank"] or 0))
        names = name_them([hello for hello, _ in hellos])
        for name, (_, connected) in zip(names, hellos, strict=True):
            connected.name = name
        return [Reached(name, hello, each) for name, (hello, each) in zip(names, hellos, strict=True)]

    def close(self) -> None:
        """Let go of all host probes, which then end, and take no more."""
        self._over.set()
        self._doorman.close()
        for each in self._came:
            each.close()

    def _pulse(self) -> None:
        while not self._over.wait(remote_probe.PULSE_S):
            for each in list(self._came):
                each.pulse()

    def _admit(self, connection: socket.socket) -> None:
        """Let in who knows the token."""
        with contextlib.suppress(OSError, ValueError):
            connection.settimeout(_ADMISSION_S)
            address = connection.getpeername()[0]
            channel = answer(connection, self._identity, self._token, _ADMISSION_S)
            if channel is not None:
                self._came.append(Connected(channel, address))
                return
        connection.close()


T = TypeVar("T")
Facts = dict[str, Any]


class ReachedHosts:
    """Those that still answer, and what is to be said of the others."""

    def __init__(self, reached: Sequence[Reached]) -> None:
        self.there = list(reached)
        self.lost: list[Finding] = []

    def of_all(self, question: str, **details: Any) -> dict[str, Any]:
        """What every host answers, by name."""
        return self.each(lambda each: each.asked.ask(question, **details))

    def each(self, ask: Callable[[Reached], T], asked: Sequence[Reached] | None = None) -> dict[str, T]:
        """What `ask` gives for every host, all at the same time, by name."""
        asked = [each for each in (self.there if asked is None else asked) if each in self.there]
        if not asked:
            return {}
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda each: self._safely(each, ask), asked))
        found = {}
        for each, found_there in zip(asked, answers, strict=True):
            if isinstance(found_there, LaunchError):
                self._lose(each, found_there)
            else:
                found[each.name] = found_there
        return found

    @staticmethod
    def at_once(act: Callable[[Facts], None], each: Sequence[Facts]) -> None:
        """Do it for all at the same time."""
        if each:
            with ThreadPoolExecutor(len(each)) as pool:
                list(pool.map(act, each))

    def ask(self, each: Reached, question: str, **details: Any) -> Any:
        """What one host answers; None where it is gone."""
        return self.each(lambda one: one.asked.ask(question, **details), [each]).get(each.name)

    @staticmethod
    def _safely(each: Reached, ask: Callable[[Reached], T]) -> T | LaunchError:
        try:
            return ask(each)
        except LaunchError as error:
            return error

    def _lose(self, each: Reached, error: LaunchError) -> None:
        if each in self.there:
            self.there.remove(each)
            self.lost.append(unreachable(error, each.name))
