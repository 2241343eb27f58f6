"""Who of the workers holds the others up, by which factor, and when that is sure enough to be said.

Pure rules: times in, sentences out. `pace` measures.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from manyhosts.events import WorkerTimes

SLOW = 1.5
"""A host or worker that takes this many times as long as the others for its own part of a step is named."""
SLOW_LINK = 2.0
_MATTERS = 0.1
"""What a host takes more than the others counts where it is this share of a step: the rest of it may be the network."""
_NO_MORE = 0.8
"""It is slow no more when its factor is below this share of what it takes to be named."""
_HOT = 0.1
"""A host that has slowed its processors down for this share of the time more than the others is slow for that."""
_WINDOWS = 3
_PROBES = 3


@dataclass(frozen=True, slots=True)
class Change:
    """Somebody was found to be slow, or is so no more."""

    who: str
    """`host b`, or `rank 3 on host b`, `the link to host c`."""
    factor: float
    """How many times slower than the others; 1.0: no more."""


@dataclass(slots=True)
class SlownessDetector:
    """Names somebody when all of the last few measurements call it slow, and once again when it is so no more."""

    slow: float
    times: int
    _heard: dict[str, deque[float]] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    @property
    def is_unsure(self) -> bool:
        """Whether somebody was slow in the last measurement, and is not named yet."""
        return any(last and last[-1] >= self.slow and who not in self._named for who, last in self._heard.items())

    def hear(self, factors: Mapping[str, float]) -> list[Change]:
        """Take one measurement: the factor of everybody that was measured. Returns what is to be said."""
        changes = []
        for gone in self._heard.keys() - factors.keys():
            self._heard.pop(gone)
            self._named.discard(gone)
        for who, factor in factors.items():
            last = self._heard.setdefault(who, deque(maxlen=self.times))
            last.append(factor)
            if len(last) < self.times:
                continue
            if who not in self._named and min(last) >= self.slow:
                self._named.add(who)
                changes.append(Change(who, statistics.median(last)))
            elif who in self._named and max(last) < _NO_MORE * self.slow:
                self._named.discard(who)
                changes.append(Change(who, 1.0))
        return changes


def of_workers() -> SlownessDetector:
    """For `factors_of_workers`."""
    return SlownessDetector(SLOW, _WINDOWS)


def of_links() -> SlownessDetector:
    """For `factors_of_links`."""
    return SlownessDetector(SLOW_LINK, _PROBES)


def factors_of_workers(workers: Sequence[WorkerTimes]) -> dict[str, float]:
    """How many times as long as the others each host takes, and each worker among several of one host.

    Who has more samples than others is not slow for that: the smaller of two factors counts, of its time and of its
    time for each sample. A host is as fast as its faster workers, and a single slow one of them is named itself.
    """
    hosts: dict[str, list[WorkerTimes]] = {}
    for worker in workers:
        if worker.samples:
            hosts.setdefault(worker.host, []).append(worker)
    times = {
        f"host {name}": (
            statistics.median_low(worker.own for worker in its),
            statistics.median_low(worker.own / worker.samples for worker in its),
        )
        for name, its in hosts.items()
    }
    least_s = _MATTERS * statistics.median(worker.total for worker in workers)
    found = _against_others(times, least_s)
    for its in hosts.values():
        found |= _against_others({_name(worker): (worker.own, worker.own / worker.samples) for worker in its}, least_s)
    return found


def _name(worker: WorkerTimes) -> str:
    return f"rank {worker.rank} on host {worker.host}"


def factors_of_links(
    seconds: Mapping[tuple[str, str], float], of_workers: Mapping[str, float] | None = None
) -> dict[str, float]:
    """How many times as long as the others' each host's link takes, and each way between two hosts.

    `seconds`: of the same amount between every two hosts, there and back. A host's link is as fast as its fastest way,
    and a way is held against the links of its two hosts. Of two hosts nobody can say whose link it is.
    A host that computes slowly, as `of_workers` has it, answers late whatever its link does: nothing is said of that.
    """
    hosts = sorted({host for pair in seconds for host in pair})
    if len(hosts) < 3:
        return {}
    best = {host: min(taken for pair, taken in seconds.items() if host in pair) for host in hosts}
    found = {}
    for host in hosts:
        others = [best[other] for other in hosts if other != host]
        found[f"the link to host {host}"] = best[host] / statistics.median_low(others)
    if len(hosts) > 3:
        for (one, other), taken in seconds.items():
            found[f"the link between hosts {one} and {other}"] = taken / max(best[one], best[other])
    late = [host for host in hosts if (of_workers or {}).get(f"host {host}", 1.0) > _NO_MORE * SLOW]
    return {who: 1.0 if any(host in who.split() for host in late) else factor for who, factor in found.items()}


def _against_others(times: Mapping[str, tuple[float, float]], least_s: float) -> dict[str, float]:
    """Of each its time by the middle one of the others', in the unit in which that is less.

    A difference of less than `least_s` seconds is none.
    """
    if len(times) < 2:
        return {}
    found = {}
    for who, own in times.items():
        others = [time for other, time in times.items() if other != who]
        middle = [statistics.median_low(column) for column in zip(*others, strict=True)]
        factor = min(mine / max(usual, 1e-9) for mine, usual in zip(own, middle, strict=True))
        found[who] = factor if own[0] - middle[0] >= least_s else min(factor, 1.0)
    return found


def cause(change: Change, workers: Sequence[WorkerTimes] = ()) -> str:
    """The likely cause: `data`, `compute`, `thermal` or `network`; empty for who is slow no more.

    `workers`: all of them, for a host or a worker.
    """
    if change.factor <= 1:
        return ""
    if change.who.startswith("the link"):
        return "network"
    its = [worker for worker in workers if change.who in (f"host {worker.host}", _name(worker))]
    rest = [worker for worker in workers if worker not in its]
    if not its or not rest:
        return "compute"

    def more(part: Callable[[WorkerTimes], float]) -> float:
        return statistics.median(map(part, its)) - statistics.median(map(part, rest))

    if more(lambda worker: worker.data_wait) > more(lambda worker: worker.own) / 2:
        return "data"
    return "thermal" if more(lambda worker: worker.hot) >= _HOT else "compute"


_SENTENCES = {
    "network": "{who} is {factor:.1f} times slower than the others: every step waits for it",
    "data": "{who} takes {factor:.1f} times as long as the others for a step: it waits for its data",
    "compute": "{who} computes {factor:.1f} times slower than the others: every step waits for it",
    "thermal": (
        "{who} computes {factor:.1f} times slower than the others, and its processors were slowed down by heat: "
        "every step waits for it"
    ),
    "": "{who} is as fast as the others again",
}


def sentence(change: Change, cause: str) -> str:
    """What is said of a change that has this cause."""
    return _SENTENCES[cause].format(who=change.who, factor=change.factor)
