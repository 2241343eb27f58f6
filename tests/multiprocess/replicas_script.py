"""Trains copies of a model that several workers make together, and kills workers at named steps.

WORKERS: how many there are. KILLS: steps and ranks, such as `6:3 9:0,2`; each is due in that step, or in the first one
after it in which all workers are there again. DIES: a worker that comes to take a place dies once where it has `made`
its trainer, or when it is `given` the state. STRATEGY, OPTIONS: see `sharded.Case`.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sharded import Case, make_trainer

import manyhosts as mh

WORKERS, DIES = int(os.environ["WORKERS"]), os.environ.get("DIES", "")
KILLS = [(int(step), ranks.split(",")) for step, ranks in (each.split(":") for each in os.environ["KILLS"].split())]
JOINS = "MANYHOSTS_JOINS" in os.environ
WAITS_AFTER = 8
"""With workers missing, so many steps are made before the next one waits for those that take their places."""


def die(name: str, step: int = 0) -> None:
    Path(name).write_text(str(step))
    os.kill(os.getpid(), signal.SIGKILL)


def find(pattern: str) -> list[Path]:
    return list(Path().glob(pattern))


class Kills(mh.Callback):
    name = "kills"
    missing = 0

    def after_step(self, moment: Any) -> None:
        if int(os.environ["WORLD_SIZE"]) < WORKERS:
            self.missing += 1
            while self.missing > WAITS_AFTER and len(find("made-*")) < len(find("killed-[0-9g]*")):
                time.sleep(0.01)
            time.sleep(0.1 * (self.missing > WAITS_AFTER))
            return
        self.missing = 0
        done = sum(len(find(f"killed-{number}-*")) == len(ranks) for number, (_, ranks) in enumerate(KILLS))
        last = max((int(each.read_text() or 0) for each in find("killed-*")), default=0)
        if done < len(KILLS) and moment.step >= max(KILLS[done][0], last + 3 * (not find(f"killed-{done}-*"))):
            own = os.environ["RANK"]
            if own in KILLS[done][1] and not Path(f"killed-{done}-{own}").exists():
                die(f"killed-{done}-{own}", moment.step)

    def state_dict(self) -> dict[str, Any]:
        return {"kills": 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if JOINS and DIES == "given" and not find("killed-given"):
            die("killed-given")


def main() -> None:
    case = Case(
        strategy=os.environ["STRATEGY"],
        options=json.loads(os.environ["OPTIONS"]),
        samples=60,
        trainer={
            "micro_batch_size": 2,
            "clip_gradients": 0.5,
            "callbacks": [Kills()],
        },
    )
    trainer = make_trainer(case, None)  # type: ignore[arg-type]
    if JOINS:
        if DIES == "made" and not find("killed-made"):
            die("killed-made")
        Path(f"made-{os.getpid()}").touch()
    trainer.fit(os.environ["STEPS"])
    trainer.validate(weights="last")


main()
