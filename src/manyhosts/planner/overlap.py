"""When the last of a step's exchanges is over, which begin while the backward pass still runs.

Exchanges go in one order, the same on all workers, and share one wire: each begins when its bytes are ready and the
wire is free. One that computes before and after it sends (a compression) does so in one of a few queues, taken in turn,
so that one computes while another's bytes travel. Whatever computes at a moment shares the cores of its worker evenly:
an exchange makes the passes longer that it overlaps with, and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """One exchange. Seconds."""

    ready: float
    """Of the passes, after which it may begin."""
    wire: float
    """That its bytes need the wire for."""
    before: float = 0.0
    """Computing, in its queue, before its bytes leave."""
    after: float = 0.0
    """Computing, in its queue, when they have come."""
    sending: float = 0.0
    """That a core is busy with its bytes while they travel: it is over when both are."""
    threads: float = 1.0
    """Cores that `before` and `after` keep busy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Passes:
    """What overlaps with the exchanges, and the cores that both share."""

    seconds: float
    """That all passes take where nothing is exchanged."""
    cores: float
    """Of this worker: its share of the machine's."""
    busy: float
    """Cores that its passes would keep busy, if there were so many."""


@dataclass(slots=True, eq=False)
class _Left:
    """What is left of an exchange, in seconds."""

    ready: float
    before: float
    wire: float
    sending: float
    after: float
    threads: float


def last_end(transfers: Iterable[Transfer], *, queues: int = 1, passes: Passes | None = None) -> float:
    """When passes and exchanges are over; without `passes`, when the exchanges are. 0 where there are none.

    `queues`: how many exchanges compute at the same time.
    """
    play = _Play(transfers, queues, passes)
    while play.is_on():
        play.next()
    return play.clock


class _Play:
    """The step, from one event to the next: something is over, and what else runs gets its share of the cores."""

    def __init__(self, transfers: Iterable[Transfer], queues: int, passes: Passes | None) -> None:
        self.cores, self.busy, self.total, latest = math.inf, 0.0, 0.0, math.inf
        if passes is not None:
            self.cores, self.busy, self.total, latest = passes.cores, passes.busy, passes.seconds, passes.seconds
        self.wire = [
            _Left(min(each.ready, latest), each.before, each.wire, each.sending, each.after, each.threads)
            for each in transfers
        ]
        """Those that have not left it, in their order."""
        self.queues = [self.wire[number::queues] for number in range(queues)]
        self.clock = self.done = 0.0
        """By the clock, and of the passes."""

    def is_on(self) -> bool:
        """Whether anything is left to do, once what is over has been let go of."""
        while self._lets_go():
            pass
        return any(self.queues) or self.done < self.total

    def _lets_go(self) -> bool:
        for queue in self.queues:
            if not queue or queue[0].ready > self.done:
                continue
            first = queue[0]
            travels = self.wire[:1] == [first]
            if travels and not first.before and not first.wire:
                self.wire.pop(0)
                return True
            if first not in self.wire and not first.sending and not first.after:
                queue.pop(0)
                return True
        return False

    def next(self) -> None:
        """Until the first of all that runs is over."""
        computes, travels, ready = self._runs()
        passing = self.done < self.total or not self.total
        threads = sum(1.0 if name == "sending" else each.threads for each, name in computes)
        threads += self.busy if self.done < self.total else 0.0
        share = min(1.0, self.cores / threads) if threads else 1.0
        # Passes that want more cores than the worker has were timed with those that it has.
        speed = min(1.0, share * max(1.0, self.busy / self.cores)) if self.busy else 1.0
        waits = [getattr(each, name) / share for each, name in computes]
        waits += [getattr(each, name) for each, name in travels]
        marks = [*ready, *([self.total] if self.done < self.total else [])] if passing else []
        span = min([*waits, *((mark - self.done) / speed for mark in marks)])
        for (each, name), wait, rate in zip(
            [*computes, *travels], waits, [share] * len(computes) + [1.0] * len(travels), strict=True
        ):
            setattr(each, name, 0.0 if wait <= span else getattr(each, name) - rate * span)
        reached = [mark for mark in marks if (mark - self.done) / speed <= span]
        self.clock += span
        self.done = max([self.done + speed * span, *reached]) if passing else self.done

    def _runs(self) -> tuple[list[tuple[_Left, str]], list[tuple[_Left, str]], list[float]]:
        """What computes now, what travels, and when those are ready that their queue has come to."""
        computes, travels, ready = [], [], []
        for queue in filter(None, self.queues):
            first = queue[0]
            if first.ready > self.done:
                ready.append(first.ready)
            elif first.before:
                computes.append((first, "before"))
            else:
                if self.wire[:1] == [first] and first.wire:
                    travels.append((first, "wire"))
                has_left = first not in self.wire
                if first.sending and (has_left or self.wire[0] is first):
                    computes.append((first, "sending"))
                elif has_left and first.after:
                    computes.append((first, "after"))
        return computes, travels, ready
