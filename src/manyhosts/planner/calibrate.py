"""What measured runs say about the model: how far off its steps were, and two factors that bring them nearer.

    compute         every time of a worker's own: passes, update, the rest of a step
    communication   the seconds of every exchange

Both come from the points of a study (`study.json`) together: those for which the logarithms of measured over predicted
step times have the least sum of squares. How good the calibrated model is on runs that it has not seen is found by
leaving each point out in its turn.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyhosts.errors import ConfigError
from manyhosts.planner.catalog import Machines
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured, Network
from manyhosts.planner.predict import Way
from manyhosts.records.atomic_file import read_json, write_json

NAME = "plan-calibration.json"
"""Next to the `study.json` that it was made from."""
_PARTS = ("compute", "communication_exposed", "data_wait", "straggler")
_FEWEST_EPOCHS = 3
_OF_A_WAY = {"strategy", "compression"}
_OF_NO_MATTER = {"duration", "seed"}
"""Settings of a point that the model knows, and those that change no step: with others it is another training."""
_MOST, _FINEST = 16.0, 2e-3
"""Factors are looked for between the first and its inverse, to a five-hundredth."""
_FIRST, _FEW, _FINER = 8, 2, 0.6
"""Steps of a grid to either side: of the first one, and of those after it, each 0.6 times as wide."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibration:
    """Two factors, and how far off steps were without and with them."""

    compute: float = 1.0
    communication: float = 1.0
    points: int = 0
    """Measured runs that it is made from."""
    median_before: float | None = None
    """Of `|predicted - measured| / measured` over the points, without the factors."""
    worst_before: float | None = None
    median_after: float | None = None
    """With factors found from the other points; None where there is one."""
    worst_after: float | None = None

    def measured(self, measured: Measured) -> Measured:
        """What was measured, as slow as the factors say."""
        return measured.slower(compute=self.compute, communication=self.communication)

    def machines(self, machines: Machines) -> Machines:
        """Machines whose networks are as slow as the factor says."""
        return replace(
            machines,
            between=machines.between.slower(self.communication),
            within=machines.within.slower(self.communication),
        )

    def __str__(self) -> str:
        text = (
            f"from {self.points} runs: computing takes {self.compute:.2f} times as long as predicted, "
            f"exchanges {self.communication:.2f} times"
        )
        if self.median_before is not None:
            text += f"; steps were off by {100 * self.median_before:.0f} % (median)"
        if self.median_after is not None:
            text += f", and are by {100 * self.median_after:.0f} % with it, on runs that it was not made from"
        return text

    def write(self, folder: Path) -> Path:
        """Put it next to the study in `folder`."""
        write_json(folder / NAME, asdict(self))
        return folder / NAME

    @classmethod
    def read(cls, folder: Path) -> Calibration:
        """What `write` put there.

        Raises:
            ConfigError: there is none, or it is something else.
        """
        found = read_json(folder / NAME)
        known = asdict(cls())
        numbers = all(value is None or isinstance(value, int | float) for value in found.values())
        if found.keys() != known.keys() or not numbers:
            fix = "make it again: manyhosts plan --calibrate STUDY"
            raise ConfigError(f"{NAME} holds something else", where=str(folder), fix=fix)
        return cls(**found)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A measured run: who trained, how, and the seconds of one of its steps."""

    group: Group
    way: Way
    step_seconds: float


def runs_of(study: Mapping[str, Any], between: Network, within: Network, known: Sequence[Way]) -> list[Run]:
    """The points of a `study.json` that ended well, of the strategies and compressions that `known` has.

    `between`, `within`: the networks that the study ran on.

    Raises:
        ConfigError: it has none.
    """
    found = []
    always = study.get("asked", {}).get("settings", {})
    for point in study.get("points", ()):
        way = _way_of(point, always, known)
        if "seconds" not in point or way is None or point["steps"] - point["restarts"] < 2:
            continue  # it has not ended well, or has no step but the first, which is another thing
        per_step = sum(point["seconds"][part] for part in _PARTS) / (point["steps"] - 1 - point["restarts"])
        per_step *= _usual(point)
        nodes, workers = point["nodes"], point["workers"]
        group = Group(nodes=nodes, workers_per_node=workers // nodes, between=between, within=within)
        found.append(Run(group=group, way=way, step_seconds=per_step))
    if not found:
        raise ConfigError(
            "no run of this study ended well that could be compared with a prediction",
            where="--calibrate",
            fix="give the folder of a study of this script",
        )
    return found


def _usual(point: Mapping[str, Any]) -> float:
    """What the middle epoch took of the mean one, for what disturbs some is no part of a step; 1 where few are known.

    At the start of a run the machine still loads what a lost worker would need.
    """
    epochs = point.get("epoch_seconds", ())
    return statistics.median(epochs) / statistics.fmean(epochs) if len(epochs) >= _FEWEST_EPOCHS else 1.0


def _way_of(point: Mapping[str, Any], always: Mapping[str, str], known: Sequence[Way]) -> Way | None:
    """How a point trained; None where the model has no such way, or a setting was tried that makes its steps others."""
    varied = point.get("settings", {})
    if varied.keys() - _OF_A_WAY - _OF_NO_MATTER:
        return None
    settings = {**always, **varied}
    strategy = str(settings.get("strategy", "")).replace("_", "-")
    compression = str(settings.get("compression", "none"))
    if point.get("workers") == 1 and not strategy:
        return known[0]  # alone, every way is the same
    return next((way for way in known if way.compression == compression and strategy in ("", way.strategy)), None)


def calibrate(measured: Measured, runs: Sequence[Run]) -> Calibration:
    """The factors for `runs` of the training that was `measured`, and the error without and with them."""
    plain = Calibration()
    before = [_error(measured, run, plain) for run in runs]
    found = _fit(measured, runs)
    after = []
    for number, run in enumerate(runs):
        others = [*runs[:number], *runs[number + 1 :]]
        after += [_error(measured, run, _fit(measured, others))] if others else []
    return replace(
        found,
        points=len(runs),
        median_before=statistics.median(before),
        worst_before=max(before),
        median_after=statistics.median(after) if after else None,
        worst_after=max(after, default=None),
    )


def step_seconds(measured: Measured, run: Run, by: Calibration) -> float:
    """What the model says of a run's step."""
    return run.way.model.step(by.measured(measured), run.group.slower(by.communication)).seconds


def _error(measured: Measured, run: Run, by: Calibration) -> float:
    return abs(step_seconds(measured, run, by) - run.step_seconds) / run.step_seconds


def _fit(measured: Measured, runs: Sequence[Run]) -> Calibration:
    """The best factors, on grids of logarithms that grow finer around the best so far.

    Coarse first: a step is no smooth function of them, because what is hidden costs nothing.
    """

    def off(compute: float, communication: float) -> float:
        by = Calibration(compute=math.exp(compute), communication=math.exp(communication))
        return sum(math.log(step_seconds(measured, run, by) / run.step_seconds) ** 2 for run in runs)

    exchanges = any(run.group.workers > 1 for run in runs)
    width, steps, at = math.log(_MOST), _FIRST, (0.0, 0.0)
    while width > _FINEST:
        offsets = [width * step / steps for step in range(-steps, steps + 1)]
        grid = [(at[0] + x, at[1] + y) for x in offsets for y in (offsets if exchanges else (0.0,))]
        # Of equally good factors the one that changes least: where every exchange is hidden nothing is known of them.
        at = min(grid, key=lambda point: (round(off(*point), 9), abs(point[0]) + abs(point[1])))
        width, steps = width * (_FINER if steps == _FEW else 2 / steps), _FEW
    return Calibration(compute=math.exp(at[0]), communication=math.exp(at[1]))
