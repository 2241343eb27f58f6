"""How far off is `manyhosts plan` where workers hold parts of the model?

    python benchmarks/prediction_sharded.py             # the lab as root, on Linux
    python benchmarks/prediction_sharded.py --places host --quick

`prediction_sharded_train.py` trains a small transformer by `mh.FSDP` with `zero=1`, `2` and `3`: on two and four
workers of this host, and on two and four hosts of a lab whose cables carry 1 Gbit/s. `manyhosts plan` measures it for
some seconds at each place, and predicts. Then each is trained, and the median of its steps is compared. It computes for
real, one thread in each worker, so four workers share what two cores give. Nothing is calibrated.

Writes `prediction_sharded.md` and `prediction_sharded.jsonl`: what was planned and what was measured. `--page` writes
the page from that, by the model as it is now.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prediction_page import PROGRAM, Line, Row, kept, machines_of, measured_of, page, read, reported, write

from manyhosts.lab import lab
from manyhosts.planner.predict import predictions, ways

HERE = Path(__file__).parent
SCRIPT = "prediction_sharded_train.py"
RECORD = HERE / "prediction_sharded.jsonl"
PLACES = {"host": "workers of one host", "lab": "hosts, 1 Gbit/s"}
SIZES = (2, 4)
ZEROS = (1, 2, 3)

Run = Callable[[Sequence[str]], str]
"""Runs `manyhosts` with these words, and gives what it printed."""


@contextmanager
def host() -> Iterator[tuple[Run, Callable[[int], list[str]]]]:
    """This host, and the words for so many workers."""
    with tempfile.TemporaryDirectory(prefix="prediction-", dir="/var/tmp") as folder:
        shutil.copy(HERE / SCRIPT, folder)

        def run(words: Sequence[str]) -> str:
            done = subprocess.run([*PROGRAM, *words], cwd=folder, capture_output=True, text=True, timeout=600)
            return _printed(words, done)

        yield run, lambda workers: ["--workers", str(workers)]


@contextmanager
def hosts() -> Iterator[tuple[Run, Callable[[int], list[str]]]]:
    """Hosts of a lab that share a disk, for their snapshots, and the words for so many of them."""
    with tempfile.TemporaryDirectory(prefix="prediction-", dir="/var/tmp") as folder:
        shutil.copy(HERE / SCRIPT, folder)
        disk = Path(folder, "shared")
        disk.mkdir()
        with lab(max(SIZES), bandwidth="1gbit", shared={str(disk): range(max(SIZES))}) as made:

            def run(words: Sequence[str]) -> str:
                done = made.desk.run([*PROGRAM, *words], folder=folder, timeout_s=600, check=False)
                return _printed(words, done)

            yield run, lambda workers: ["--hosts", ",".join(made.names[:workers])]


def _printed(words: Sequence[str], done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode:
        raise SystemExit(f"manyhosts {' '.join(words)} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def measure(place: str, *, seconds: float, steps: int) -> Iterator[dict[str, Any]]:
    """The plan that is made at a place, and a line for each number of workers and way."""
    with (host if place == "host" else hosts)() as (run, on):
        sizes = ["--nodes", "1,2,4"] if place == "lab" else []
        where = on(max(SIZES)) if place == "lab" else ["--workers", "1,2,4"]
        plan = json.loads(run(["plan", *where, *sizes, "--seconds", f"{seconds:g}", "--json", SCRIPT, "3"]))
        yield {"place": place, "plan": kept(plan)}
        for workers in SIZES:
            words = ["run", *on(workers), "--env", f"STEPS={steps}", "--no-prefix", "--run-dir"]
            printed = run([*words, f"shared/run-{time.time_ns()}", SCRIPT, ",".join(map(str, ZEROS))])
            for line in reported(printed):
                yield {"place": place, "workers": workers, **line}


def predicted(plan: Line, place: str, workers: int) -> Mapping[int, float]:
    """By `zero`, the seconds of a step."""
    measured = measured_of(plan)
    size = (1, workers) if place == "host" else (workers, 1)
    found = predictions(measured, machines_of(plan), [size], [way for way in ways(measured) if way.strategy == "fsdp"])
    return {int(each.setting.removeprefix("zero=")): each.step.seconds for each in found}


def written() -> str:
    """The page of what is recorded."""
    lines, plans, trained = read(RECORD, lambda line: line["place"])
    rows = [
        Row(
            (PLACES[line["place"]], str(line["workers"]), f"zero={line['zero']}"),
            predicted(plans[line["place"]], line["place"], line["workers"])[line["zero"]],
            line["measured"],
            line["steps"],
        )
        for line in trained
    ]
    head = ("place", "workers", "way")
    return page(
        rows, head, title="How far off a plan is of parts", about=__doc__ or "", began=lines[0]["began"], found="**"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--places", default=",".join(PLACES), help="some of these")
    parser.add_argument("--page", action="store_true", help="write the page again from what is recorded")
    asked = parser.parse_args()
    if not asked.page:
        began = f"When it began, {os.getloadavg()[1]:.1f} processes wanted the {os.cpu_count()} cores."
        lines = []
        for place in asked.places.split(","):
            for line in measure(place, seconds=20, steps=13 if asked.quick else 33):
                lines.append({**line, "began": began})
                write(RECORD, lines)
                print({key: value for key, value in line.items() if key not in ("steps", "plan")}, flush=True)
    (HERE / "prediction_sharded.md").write_text(written())


if __name__ == "__main__":
    main()
