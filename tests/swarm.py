"""Workers by the hundred that meet as Gloo's do, with a real board and file of a head, and real agents; no training.

Each worker is a thread that asks what `connectFullMesh` of Gloo asks: it puts its address there, and then waits for and
takes that of each worker, one after the other. The agents of all hosts share a thread, and the head has its own.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from manyhosts.cluster.store_line import StoreLine
from manyhosts.communication.channel_store import ChannelStore
from manyhosts.control import tls
from manyhosts.control.agent.store_lines import StoreLines
from manyhosts.control.agent.watched_worker import ReportServer
from manyhosts.control.head.store import Asker, KeyValueStore
from manyhosts.control.head.takeover import HeadCheckpoint, Record
from manyhosts.control.loop import Channel, Loop
from manyhosts.control.protocol import FROM_AGENT, FROM_HEAD, AnswerStore, AskStore
from manyhosts.control.session import Session
from manyhosts.control.wire_format import read


@dataclass
class Meeting:
    """What one meeting of all workers has taken."""

    seconds: float
    questions: int
    """That the head was asked."""
    writes: int
    """Of its file, each waited for until the disk has it."""
    found: list[list[bytes]] = field(repr=False)
    """By worker: the addresses that it has of all."""


class Swarm:
    """So many workers on so many hosts."""

    def __init__(self, folder: Path, workers: int, hosts: int) -> None:
        self.workers, self.hosts, self.folder = workers, hosts, folder
        self.head, self.agents = Loop(), Loop()
        self.board = KeyValueStore(self.answer)
        self.sessions, self.sessions_of_agents = list[Session](), list[Session]()
        self.record = Record(folder, self.gather)
        self.questions = self.writes = 0
        self.head.before_waiting = self.commit
        identity, self.reports = tls.Identity(), list[ReportServer]()
        for host in range(hosts):
            here, there = socket.socketpair()
            session = Session(self.head.after, partial(self.hear, host), holds_back=True)
            session.attach(Channel(self.head, here, lambda _: None, lambda: None, tls=identity.answer()))
            self.sessions.append(session)
            self.reports.append(self.agent(host, there))

    def agent(self, host: int, connection: socket.socket) -> ReportServer:
        def hear(message: dict[str, Any]) -> None:
            if message["message"] == "answer_store":
                lines.answer(read(message, FROM_HEAD))  # type: ignore[arg-type]

        session = Session(self.agents.after, hear)
        self.sessions_of_agents.append(session)
        lines = StoreLines(session.say)
        session.attach(Channel(self.agents, connection, lambda _: None, lambda: None, tls=tls.call()))
        return ReportServer(self.agents, self.folder / f"agent{host}", lambda *_: None, lambda *_: None, lines)

    def hear(self, host: int, message: dict[str, Any]) -> None:
        if message["message"] == AskStore.NAME:
            asked = read(message, FROM_AGENT)
            assert isinstance(asked, AskStore)
            self.questions += 1
            self.record.is_needed = True
            self.board.ask(Asker(host, asked.line, asked.id), asked.do, asked.fields)

    def answer(self, asker: Asker, /, **answer: Any) -> None:
        self.sessions[asker.node].say(AnswerStore(line=asker.line, answer={"id": asker.id, **answer}))

    def gather(self) -> HeadCheckpoint:
        state = {"board": self.board.to_dict(), "agents": [each.to_dict() for each in self.sessions]}
        return HeadCheckpoint(
            token="", start="", address="", port=0, asked="", unasked=False, launcher={"none": ""}, state=state
        )

    def commit(self) -> None:
        if self.record.is_needed or any(session.holds_some_back for session in self.sessions):
            self.writes += 1
            self.record.write()
        for session in self.sessions:
            session.release()

    def meet(self, group: int, *, together: bool = True) -> Meeting:
        """All workers meet once, as the group of that number. `together`: they know how many they are."""
        found: list[list[bytes]] = [[] for _ in range(self.workers)]
        before, began = (self.questions, self.writes), time.monotonic()
        threads = [
            threading.Thread(target=self.work, args=(rank, group, found[rank], together))
            for rank in range(self.workers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.monotonic() - began
        return Meeting(seconds, self.questions - before[0], self.writes - before[1], found)

    def work(self, rank: int, group: int, found: list[bytes], together: bool = True) -> None:
        address = self.folder / f"agent{rank % self.hosts}"
        store = ChannelStore(StoreLine(str(address), start=0, group=group), timedelta(seconds=60))
        try:
            with store.expecting(self.workers if together else 0):
                store.set(f"0//cpu//0/{rank}", b"%d of %d " % (rank, group) * 12)  # as long as an address of Gloo
                for other in range(self.workers):
                    name = f"0//cpu//0/{other}"
                    store.wait([name], timedelta(seconds=60))
                    found.append(store.get(name))
        finally:
            store.close()


@contextlib.contextmanager
def swarm(folder: Path, workers: int, hosts: int) -> Iterator[Swarm]:
    """One that leaves nothing open."""
    made, over = Swarm(folder, workers, hosts), list[bool]()
    for loop in (made.head, made.agents):
        loop.every(0.05, lambda: None)  # looks whether it is over
    threads = [threading.Thread(target=loop.run, args=(lambda: bool(over),)) for loop in (made.head, made.agents)]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        over.append(True)
        for thread in threads:
            thread.join()
        for reports in made.reports:
            reports.close()
        for session in (*made.sessions, *made.sessions_of_agents):
            session.close()
        for loop in (made.head, made.agents):
            loop.close()
