"""Times of workers over a run of any length, in few windows of steps that grow with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from manyhosts.records.blocks import Blocks
from manyhosts.records.line_file import Line
from manyhosts.records.summary import PARTS


@dataclass(frozen=True, order=True, slots=True)
class Who:
    """One worker; None for the host where the record does not name it."""

    rank: int
    host: str = ""
    worker: int = -1
    """Its number in the run, where it is not its rank: after a loss others have the ranks of before."""

    def __str__(self) -> str:
        where = f" on {self.host}" if self.host else ""
        return f"rank {self.rank}{where}" + (f" (worker {self.worker})" if self.worker >= 0 else "")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of one worker, over some steps."""

    steps: int
    seconds: Mapping[str, float]
    """By part of a step: see `records.summary.PARTS`."""

    @property
    def own_s(self) -> float:
        """Seconds of a step, on average, that this worker has not spent waiting for others."""
        return sum(value for part, value in self.seconds.items() if part != "communication_exposed") / self.steps

    @property
    def step_s(self) -> float:
        """Seconds of a step, on average."""
        return sum(self.seconds.values()) / self.steps

    def __add__(self, other: Spent) -> Spent:
        """Both together."""
        parts = {part: self.seconds.get(part, 0.0) + other.seconds.get(part, 0.0) for part in PARTS}
        return Spent(self.steps + other.steps, parts)


Times = Mapping[Who, Spent]


@dataclass(frozen=True, slots=True)
class Window:
    """All workers over the steps from `first` to `last`."""

    first: int
    last: int
    times: Times


class Windows(Blocks[Window]):
    """The windows of one run."""

    MOST = 160

    @staticmethod
    def merged(blocks: Sequence[Window]) -> Window:
        """The times of all added, from the first step to the last."""
        return Window(blocks[0].first, blocks[-1].last, added(*(window.times for window in blocks)))

    def add(self, step: int, times: Times) -> None:
        """Those of the steps that end with `step`."""
        steps = max((spent.steps for spent in times.values()), default=1)
        self.take(Window(step - steps + 1, step, times))

    def total(self) -> dict[Who, Spent]:
        """Of each worker, over the entire run, by rank."""
        return dict(sorted(added(*(window.times for window in self.blocks())).items()))


def added(*several: Times) -> dict[Who, Spent]:
    """The same workers' times added."""
    found: dict[Who, Spent] = {}
    for times in several:
        for who, spent in times.items():
            found[who] = found[who] + spent if who in found else spent
    return found


def of_step(line: Line) -> Times:
    """What a step line says: the times of rank 0."""
    return {Who(0): Spent(1, {part: line[part] for part in PARTS})}


def of_workers(line: Line) -> Times:
    """What a `workers` line says: means over its steps, of every worker."""
    found = {}
    for each in line["workers"]:
        means = {part: each.get(part, 0.0) for part in PARTS if part != "other"}
        means["other"] = max(0.0, each["total"] - sum(means.values()))
        steps = max(1, line["steps"])
        worker = each.get("worker", -1)
        who = Who(each["rank"], each["host"], -1 if worker == each["rank"] else worker)
        found[who] = Spent(steps, {part: steps * means[part] for part in PARTS})
    return found
