"""Exchanges of several collectives, run during the backward pass.

An exchange that compresses, sends, adds, compresses again and sends again cannot be handed to the network in one call.
It is a plain function, which a communication queue runs: on a CPU a thread, on a GPU a stream. Each has a process group
of its own: the queue of every worker sends the same things in the same order whatever its main thread sends meanwhile,
and what that one sends does not wait after them. On a CPU there are two queues, taken in turn: while one waits for the
network, the other computes.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import torch

from manyhosts import device
from manyhosts.communication.link import Link
from manyhosts.communication.nodes import find_levels, link_among, make_link
from manyhosts.communication.world import World
from manyhosts.errors import CommunicationError

QUEUES_ON_CPU = 2

Job = Callable[[Link], None]


class QueuedExchange:
    """An exchange under way."""

    def __init__(self) -> None:
        self.bytes_sent = 0
        self.seconds = 0.0
        """That its job took, in a communication queue of a CPU."""
        self.error: BaseException | None = None
        self.event: device.Event | None = None
        self._done = threading.Event()

    def done(self, error: BaseException | None = None) -> None:
        """It is over; `error` says how it failed."""
        self.error = error
        self._done.set()

    def wait(self) -> None:
        """Wait until it is over. Raises what the exchange raised."""
        self._done.wait()
        if self.error is not None:
            raise self.error
        if self.event is not None:
            self.event.wait()


class CommQueue:
    """Runs jobs in the order in which they are handed in, which must be the same on all workers."""

    def __init__(
        self, world: World, *, by_node: bool = False, among: Callable[[], Sequence[tuple[int, ...]]] | None = None
    ) -> None:
        """`by_node`: let jobs exchange inside a node and between nodes separately, where there are such.

        `among`: gives the ranks of those that exchange, where they are not all.
        """
        self.world, self.by_node, self.among = world, by_node, among
        self.links: list[Link] = []
        self._queues: list[SimpleQueue[tuple[Job, QueuedExchange] | None]] = []
        self._threads: list[threading.Thread] = []
        self._stream: device.Stream | None = None
        self._next = 0
        self._under_way: list[QueuedExchange] = []
        """On a GPU: what was not waited for yet."""
        self._made_for: object = None

    def ready(self) -> None:
        """Called by all workers before a step's first job: makes the queues, again where the world has changed."""
        world = self.world
        self._next = 0
        if self._made_for is world.group:
            return
        self.close()
        self._made_for = world.group
        levels = find_levels(world) if self.by_node else None
        is_asynchronous = device.is_asynchronous(world.device)
        self.links = [
            make_link(world, levels) if self.among is None else link_among(world, self.among())
            for _ in range(1 if is_asynchronous else QUEUES_ON_CPU)
        ]
        if is_asynchronous:
            self._stream = device.module(world.device).Stream(world.device)
            return
        for link in self.links:
            queue: SimpleQueue[tuple[Job, QueuedExchange] | None] = SimpleQueue()
            weakref.finalize(self, queue.put, None).atexit = False  # its thread ends with it
            self._queues.append(queue)
            thread = threading.Thread(
                target=_work, args=(queue, link), name="manyhosts-communication queue", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def submit(self, job: Job) -> QueuedExchange:
        """Hand in a job. It begins when those before it in its communication queue are over."""
        queued = QueuedExchange()
        number, self._next = self._next, (self._next + 1) % len(self.links)
        if self._stream is None:
            self._queues[number].put((job, queued))
            return queued
        module = device.module(self.world.device)
        self._stream.wait_stream(module.current_stream(self.world.device))
        with module.stream(self._stream):
            sent = self.links[number].bytes_sent
            job(self.links[number])
            queued.bytes_sent = self.links[number].bytes_sent - sent
            queued.event = self._stream.record_event()
        queued.done()
        self._under_way.append(queued)
        return queued

    def wait(self, queued: QueuedExchange) -> None:
        """Wait for a job, and count what it sent."""
        self.world.wait(queued)
        if queued in self._under_way:
            self._under_way.remove(queued)
        self.world.bytes_sent += queued.bytes_sent

    def close(self) -> None:
        """Let the threads end."""
        for queue in self._queues:
            queue.put(None)
        self.links, self._queues, self._threads, self._stream = [], [], [], None

    def abandon(self) -> None:
        """The workers change: return when no job runs any more. Those of a group that is broken fail at once."""
        threads = self._threads
        self.close()
        self._made_for = None
        for thread in threads:
            thread.join()
        under_way, self._under_way = self._under_way, []
        for queued in under_way if self.world.is_broken else ():  # whether it has ended is not known
            queued.error = CommunicationError(
                "an exchange was cut off", where="the group that broke", fix="see what was printed about the others"
            )


@torch.no_grad()
def _work(queue: SimpleQueue[tuple[Job, QueuedExchange] | None], link: Link) -> None:
    """The life of a communication queue's thread."""
    broken: BaseException | None = None
    while (order := queue.get()) is not None:
        job, queued = order
        if broken is None:
            sent, begin = link.bytes_sent, time.perf_counter()
            try:
                job(link)
            except BaseException as error:  # raised in the main thread, which waits for the exchange
                broken = error
            queued.seconds = time.perf_counter() - begin
            queued.bytes_sent = link.bytes_sent - sent
        del job, order  # and what they hold
        queued.done(broken)  # after a failure nothing more is sent: the others do not know which exchange is which
