"""Who of the workers holds the others up, by which factor, and when that is sure enough to be said.

Pure rules: times in, sentences out. `pace` measures.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SLOW = 1.5
"""A host or worker that takes this many times as long as the others for its own part of a step is named."""
SLOW_LINK = 2.0
_MATTERS = 0.1
"""What a host takes more than the others counts where it is this share of a step: the rest of it may be the network."""
_NO_MORE = 0.8
"""It is slow no more when its factor is below this share of what it takes to be named."""
_WINDOWS = 3
_PROBES = 3


@dataclass(frozen=True, slots=True)
class Part:
    """What one worker's own part of a step takes, as means over the steps of a window."""

    host: str
    compute_s: float
    data_s: float
    samples: int
    """How many samples it computes in a step."""
    step_s: float = 0.0
    """The whole step, with what was waited for others."""

    @property
    def own_s(self) -> float:
        """Seconds in which it does not wait for other workers."""
        return self.compute_s + self.data_s


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


def factors_of_workers(parts: Sequence[Part]) -> dict[str, float]:
    """How many times as long as the others each host takes, and each worker among several of one host.

    Who has more samples than others is not slow for that: the smaller of two factors counts, of its time and of its
    time for each sample. A host is as fast as its faster workers, and a single slow one of them is named itself.
    """
    hosts: dict[str, list[tuple[int, Part]]] = {}
    for rank, part in enumerate(parts):
        if part.samples:
            hosts.setdefault(part.host, []).append((rank, part))
    times = {
        f"host {name}": (
            statistics.median_low(part.own_s for _, part in workers),
            statistics.median_low(part.own_s / part.samples for _, part in workers),
        )
        for name, workers in hosts.items()
    }
    least_s = _MATTERS * statistics.median(part.step_s for part in parts)
    found = _against_others(times, least_s)
    for name, workers in hosts.items():
        own = {f"rank {rank} on host {name}": (part.own_s, part.own_s / part.samples) for rank, part in workers}
        found |= _against_others(own, least_s)
    return found


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


def sentence(change: Change, parts: Sequence[Part] = ()) -> str:
    """What is said of a change. `parts`: those of all workers, for a host or a worker."""
    who, factor = change.who, change.factor
    if who.startswith("the link"):
        if factor <= 1:
            return f"{who} is as fast as the others again"
        return f"{who} is {factor:.1f} times slower than the others: every step waits for it"
    if factor <= 1:
        return f"{who} is as fast as the others again"
    its = [part for rank, part in enumerate(parts) if who in (f"host {part.host}", f"rank {rank} on host {part.host}")]
    rest = [part for part in parts if part not in its]
    if its and rest:
        more_data = statistics.median(part.data_s for part in its) - statistics.median(part.data_s for part in rest)
        more = statistics.median(part.own_s for part in its) - statistics.median(part.own_s for part in rest)
        if more_data > more / 2:
            return f"{who} takes {factor:.1f} times as long as the others for a step: it waits for its data"
    return f"{who} computes {factor:.1f} times slower than the others: every step waits for it"
