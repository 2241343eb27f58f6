"""What is common to `prediction.py` and `prediction_sharded.py`: a record of plans and steps, and the page from it.

A record has a line for each plan (`plan`: what it measured, and the machines it was for) and one for each training
(`measured`: the median of its `steps`, in seconds). So a page can be predicted again by the model as it is now.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import describe

from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import Measured, Network

PROGRAM = (sys.executable, "-P", "-m", "manyhosts.cli.main")
MARK = "STEPS "
"""Before what a script tells of its steps."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """One training beside what was predicted of it."""

    labels: tuple[str, ...]
    """That tell it from others, one for each of the page's columns."""
    predicted: float
    measured: float
    steps: Sequence[float]

    @property
    def off(self) -> float:
        """The share of what was measured by which more was predicted."""
        return self.predicted / self.measured - 1


def machines_of(plan: Line) -> Machines:
    """Those that it was planned for."""
    [kind] = plan["machines"]
    networks = {key: Network(**kind[key]) for key in ("between", "within")}
    return Machines(**{**kind, **networks})


def measured_of(plan: Line) -> Measured:
    """What it was made from."""
    return Measured.from_json(plan["measured"])


def kept(plan: Line) -> dict[str, Any]:
    """What a record has of a plan: what another prediction can be made from."""
    return {key: plan[key] for key in ("measured", "machines")}


def reported(printed: str) -> list[dict[str, Any]]:
    """What scripts have told of their steps, among all that was printed."""
    return [json.loads(line.partition(MARK)[2]) for line in printed.splitlines() if MARK in line]


def write(record: Path, lines: Iterable[Line]) -> None:
    """Replace what is recorded."""
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(record: Path, place: Callable[[Line], Any]) -> tuple[list[Line], dict[Any, Line], list[Line]]:
    """What is recorded: all lines, the plan of each `place`, and the lines of trainings."""
    lines = [json.loads(line) for line in record.read_text().splitlines()]
    plans = {place(line): line["plan"] for line in lines if "plan" in line}
    return lines, plans, [line for line in lines if "plan" not in line]


def page(rows: Sequence[Row], head: Sequence[str], *, title: str, about: str, began: str, found: str = "") -> str:
    """What was found on this machine just now, as a page; see `page_of`."""
    where = f"{describe(Path(sys.executable), ['torch'])}\n{began}"
    return page_of(rows, head, title=title, about=about, where=where, found=found)


def page_of(rows: Sequence[Row], head: Sequence[str], *, title: str, about: str, where: str, found: str = "") -> str:
    """What was found, as a page: `head` names the columns of labels, `found` is said behind how far off steps are.

    `about`: the text of the benchmark's file, whose third paragraph says what was done. `where`: the machine, when, of
    what, and how busy it was.
    """
    errors = [abs(row.off) for row in rows]
    text = [f"# {title}", "", about.split("\n\n")[2].replace("\n", " "), "", where, ""]
    text += [
        f"**Steps are off by {100 * statistics.median(errors):.1f} % (median of {len(errors)}), at worst by "
        f"{100 * max(errors):.1f} %.{found}",
        "",
        f"| {' | '.join(head)} | predicted, s | measured, s (median, range, n) | off by |",
        "|---" * (len(head) + 3) + "|",
    ]
    text += [
        f"| {' | '.join(row.labels)} | {row.predicted:.3f} "
        f"| {row.measured:.3f} ({min(row.steps):.3f} to {max(row.steps):.3f}, {len(row.steps)}) "
        f"| {100 * row.off:+.1f} % |"
        for row in rows
    ]
    return "\n".join(text) + "\n"
