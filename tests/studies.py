"""Studies that nobody has run: run directories with the records of made-up runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from manyhosts.records.line_file import Line
from manyhosts.records.run_record import RunRecord
from manyhosts.records.summary import summarise
from manyhosts.study.points import Asked, Point
from manyhosts.study.study import POINTS, Study, known, write
from manyhosts.study.times import Spent, spent
from manyhosts.trials.runs import Outcome, Place


class Story:
    """The lines of a made-up run, with a clock of its own."""

    def __init__(self, samples: int = 8) -> None:
        self.now, self.number, self.samples = 1000.0, 0, samples
        self.lines: list[Line] = []

    def add(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, "step": self.number, "time": self.now, **fields})

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def start(self) -> None:
        self.add("start")

    def step(self, compute: float, exposed: float = 0.0, data: float = 0.0, stall: float = 0.0, epoch: int = 0) -> None:
        self.number += 1
        seconds = compute + exposed + data + stall
        self.wait(seconds)
        self.add(
            "step", epoch=epoch, loss=1 / self.number, lr=0.1, samples=self.samples, bytes_sent=1000, seconds=seconds,
            compute=compute, communication_exposed=exposed, data_wait=data, snapshot_stall=stall, other=0.0,
        )  # fmt: skip

    def workers(self, *times: tuple[float, float, float, float], steps: int) -> None:
        """What the last steps took each worker: computing, waiting for others, for data, for a snapshot."""
        names = ("compute", "communication_exposed", "data_wait", "snapshot_stall")
        found = [{**dict(zip(names, each, strict=True)), "total": sum(each)} for each in times]
        least = min(each["communication_exposed"] for each in found)
        self.add("workers", steps=steps, workers=found, communication=least)

    def validate(self, seconds: float, loss: float, *, best: bool = False) -> None:
        self.wait(seconds)
        self.add("validation", seconds=seconds, values={"loss": loss}, best=best)

    def spent(self) -> Spent:
        return spent(self.lines)


Costs = dict[str, float]
"""Seconds of one sample, or of one step, by what they are spent on."""


def costs(point: Point) -> Costs:
    """A job on machines of their own: exchanges take longer the more there are, and each evaluates everything."""
    n = point.workers
    packed = 0.5 if dict(point.varied).get("compression") == "bf16" else 1.0
    noise = 1 + 0.01 * (point.seed or 0)
    return {"compute": 1.6 / n * noise, "exposed": packed * 0.12 * (n - 1) ** 0.5, "data": 0.02, "evaluation": 1.5}


def make_study(folder: Path, asked: Asked, of: Callable[[Point], Costs] = costs, fails: int = 0) -> Study:
    """The study `asked`, with every run done but those of `fails` workers."""
    for point in asked.points():
        place = Place(folder / POINTS, point.name)
        place.folder.mkdir(parents=True, exist_ok=True)
        if point.workers == fails:
            reason = "RuntimeError: there is no room for so many\n  where: rank 0 on host a\n  fix:   use fewer"
            Outcome(status="failed", reason=reason, launched=997.0).write(place)
            continue
        run, cost = Story(samples=32), of(point)
        run.start()
        run.step(cost["compute"], cost["exposed"])
        for epoch in range(4):
            for _ in range(10 - (epoch == 0)):
                run.step(cost["compute"], cost["exposed"], cost["data"], epoch=epoch)
            run.add("epoch", epoch=epoch, train_loss=0.5)
            run.validate(cost["evaluation"], 2.0 / (epoch + 1) + 0.01 * point.workers, best=True)
            run.wait(cost.get("writing", 0.0))  # the best model is written
        run.add("end", status="completed", reason="", weights_sha256="0" * 64)
        run.add("test", values={"loss": 0.5, "accuracy": 0.95 - 0.002 * point.workers + 0.003 * (point.seed or 0)})
        _keep(place, point, run)
    study = known(asked, folder, 0.5)
    write(study)
    return study


def _keep(place: Place, point: Point, run: Story) -> None:
    place.run.path.mkdir(parents=True, exist_ok=True)
    run.lines[0] |= {"steps_per_epoch": 10}
    place.run.metrics.write_text("".join(json.dumps(line) + "\n" for line in run.lines))
    record = RunRecord(
        script="train.py",
        settings={"precision": "fp32", "batch_size": 32, "strategy": {}},
        seed=0,
        versions={"manyhosts": "0.1.0", "torch": "2.13.0", "python": "3.11.7", "git_commit": None},
        hosts=[f"host-{number}" for number in range(point.nodes)],
        workers=point.workers,
        strategy="ddp",
        backend="gloo",
        started=1000.0,
    )
    record.write(place.run.run_json)
    replace(summarise(iter(run.lines), record), nodes=point.nodes).write(place.run.summary)
    Outcome(status="completed", launched=997.0).write(place)
