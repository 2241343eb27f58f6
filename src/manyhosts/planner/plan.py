"""A complete plan: what was measured, every prediction, the advice, and how far off it is known to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from manyhosts.config.strategies import DDP, Strategy, kind_of
from manyhosts.config.strategy_settings import own_or
from manyhosts.planner import calibrate
from manyhosts.planner.calibrate import Calibration
from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import Measured
from manyhosts.planner.predict import Prediction, predictions, ways
from manyhosts.planner.recommend import Recommendation, recommend
from manyhosts.planner.strategies.ddp import compared
from manyhosts.records.atomic_file import read_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The answer."""

    measured: Measured
    machines: tuple[Machines, ...]
    predictions: tuple[Prediction, ...]
    recommendation: Recommendation
    calibration: Calibration | None = None
    """What a study of the same script taught; None where none was given."""

    def to_json(self) -> dict[str, Any]:
        """For `plan --json`."""
        return {
            "measured": self.measured.to_json(),
            "machines": [asdict(each) for each in self.machines],
            "predictions": [each.to_json() for each in self.predictions],
            "recommendation": self.recommendation.to_json(),
            "calibration": None if self.calibration is None else asdict(self.calibration),
        }


def make(
    measured: Measured,
    machines: Sequence[Machines],
    *,
    sizes: Sequence[tuple[int, int]] | None = None,
    strategy: Strategy | None = None,
    study: Path | None = None,
) -> Plan:
    """Predict for all `machines`, and advise.

    `sizes`: numbers of machines and of workers on each; None: those that each kind has room for. `strategy`: that of
    the script. `study`: the folder of a study of it on the first of the machines, to be calibrated by.

    Raises:
        ConfigError: nothing fits, or the study cannot be used.
    """
    measured = compared(measured, own_or(DDP(), strategy))
    asked = ways(measured, strategy)
    found = None
    if study is not None:
        here = machines[0]
        runs = calibrate.runs_of(read_json(study / "study.json"), here.between, here.within, asked)
        found = calibrate.calibrate(measured, runs)
        found.write(study)
        measured, machines = found.measured(measured), [found.machines(each) for each in machines]
    predicted = [
        each
        for kind in machines
        for each in predictions(measured, kind, kind.sizes() if sizes is None else sizes, asked)
    ]
    return Plan(
        measured=measured,
        machines=tuple(machines),
        predictions=tuple(predicted),
        recommendation=recommend(predicted),
        calibration=found,
    )


def strategy_of(plain: Mapping[str, Any]) -> Strategy | None:
    """The strategy that has this `name` and these settings; None for one that is not known here."""
    kind = kind_of(str(plain.get("name", "")))
    if kind is None:
        return None
    return replace(kind(), **{key: value for key, value in plain.items() if key != "name"})
