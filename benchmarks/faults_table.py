"""The tables of `faults.py`, made from its lines: the whole one, and a short one for the pages that show it."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults_kinds import KINDS
from machine import origins

from manyhosts.records.line_file import read_lines

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "faults.md"
SHOWN_IN = (ROOT / "README.md", ROOT / "docs" / "when-something-dies.md")
BEGIN, END = "<!-- made by benchmarks/faults.py -->", "<!-- end -->"
MOST_HOSTS = 4
AIM_S = 0.5
"""Of a killed worker: until the others have done the next step, and until the one in its place has."""
AIM_IMPORTS = 1.5
"""Of a host that comes back: until its workers have done a step, in times that Python needs to import torch."""
Line = dict[str, Any]
WORDS = {
    "worker": "a worker is killed",
    "agent": "a host's agent is killed, and its workers with it",
    "launcher": "the command itself is killed",
    "frozen": "a host freezes",
    "cut": "a cable is cut",
    "sigterm": "SIGTERM to a worker",
    "disk-full": "the disk is full during a snapshot",
    "bit-flip": "a bit flips in the newest snapshot",
    "power": "all processes on all hosts die at once",
}


VIRTUAL = (
    "All runs have `virtual_workers=8`, with which the others train on at once, in their smaller number. Without it\n"
    "they wait for a new worker in the lost one's place: the full table has that as seconds until all workers train."
)
"""What the reader must know of the runs; see `faults_train.py`."""


def publish(record: Path) -> None:
    """Write the table, and the short one wherever a page has a place for it."""
    REPORT.write_text(table(record))
    for page in SHOWN_IN:
        before, _, rest = page.read_text().partition(BEGIN)
        _, _, after = rest.partition(END)
        page.write_text(f"{before}{BEGIN}\n\n{short_table(record)}\n\n{END}{after}")


def short_table(record: Path) -> str:
    """For each kind: median seconds to the next finished step by number of workers, and the most steps redone."""
    lines = list(read_lines(record))
    recorded = [line for line in lines if "kind" in line]
    faults = newest(at_full_speed(recorded) or recorded)
    sizes = sorted({line["workers"] for line in faults})
    rows = [
        f"| what happens | seconds to the next step on {' / '.join(map(str, sizes))} workers | steps redone, at most |"
    ]
    rows.append("|---|---:|---:|")
    for kind in KINDS:
        found = [line for line in faults if line["kind"] == kind]
        if found:
            medians = [_median([line["next_step_s"] for line in found if line["workers"] == size]) for size in sizes]
            rows.append(f"| {WORDS[kind]} | {' / '.join(medians)} | {max(line['steps_redone'] for line in found)} |")
    done = whole_runs(lines)
    equal, wrong = (
        sum(line.get("weights_equal", False) for line in done),
        sum(line.get("samples_wrong", 0) for line in done),
    )
    rows += [
        "",
        VIRTUAL,
        f"{len(recorded)} faults in {len(done)} runs. Runs that ended with the weights of one to which nothing",
        f"happened, bit for bit: {equal} of {len(done)}. Samples lost or repeated: {wrong}.",
        *(f"One did not end: {line['since']}." for line in done if "since" in line),
    ]
    return "\n".join(rows)


def at_full_speed(faults: Sequence[Line]) -> list[Line]:
    """Those of runs that do not pause in every step."""
    return [line for line in faults if "pause_s" not in line]


def newest(faults: Sequence[Line]) -> list[Line]:
    """Of each kind on each number of workers, the lines of the newest version of what is measured."""
    best: dict[tuple[str, int], int] = {}
    for line in faults:
        case = line["kind"], line["workers"]
        best[case] = max(best.get(case, 0), version(line))
    return [line for line in faults if version(line) == best[line["kind"], line["workers"]]]


def version(line: Line) -> int:
    """Lines of the first version do not say it."""
    return int(line.get("version", 1))


def whole_runs(lines: Sequence[Line]) -> list[Line]:
    """The runs that nobody cut short."""
    return [line for line in lines if "faults" in line and not line.get("cut_short")]


def aims(faults: Sequence[Line], chapters: Sequence[Line]) -> list[str]:
    """How the fast ways back compare with what they are to be."""
    rows = []
    killed = [line for line in faults if line["kind"] == "worker"]
    for size in sorted({line["workers"] for line in killed}):
        found = [line for line in killed if line["workers"] == size]
        for words, name in (
            ("the others' next step", "next_step_s"),
            ("the first step of the one in its place", "whole_s"),
        ):
            seconds = [line[name] for line in found if line[name] is not None]
            if seconds:
                rows.append(_aim(f"a worker is killed: {words}", size, seconds, AIM_S, " s"))
    return rows + returns(faults, chapters, "")


def returns(faults: Sequence[Line], chapters: Sequence[Line], how: str) -> list[str]:
    """How long a host takes that comes back, beside an import of torch."""
    rows = []
    imports = {line["chapter"]: line for line in chapters}
    agents = [line for line in faults if line["kind"] == "agent" and line["chapter"] in imports and line["whole_s"]]
    for size in sorted({line["workers"] for line in agents}):
        for words, name in (("", "import_torch_s"), (", measured while all train", "import_torch_busy_s")):
            times = [
                line["whole_s"] / imports[line["chapter"]][name]
                for line in agents
                if line["workers"] == size and name in imports[line["chapter"]]
            ]
            if times:
                rows.append(
                    _aim(
                        f"a host comes back{how}: its first step, in imports of torch{words}",
                        size,
                        times,
                        AIM_IMPORTS,
                        "",
                    )
                )
    return rows


def _aim(words: str, size: int, values: Sequence[float], aim: float, unit: str) -> str:
    met = sum(value < aim for value in values)
    return f"| {words} | {size} | {aim}{unit} | {_spread(values)}{unit} | {met} of {len(values)} |"


def _median(values: Sequence[float]) -> str:
    if not values:
        return "-"
    value = statistics.median(values)
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def table(record: Path) -> str:
    """The recorded answer, as Markdown."""
    lines = list(read_lines(record))
    chapters = whole_runs(lines)
    recorded = [line for line in lines if "kind" in line]
    faults = newest(at_full_speed(recorded) or recorded)
    idle = [line for line in recorded if "pause_s" in line]
    older = [line for line in recorded if line not in faults and line not in idle]
    sizes = sorted({line["workers"] for line in faults})
    rows = []
    for kind in KINDS:
        for size in sizes:
            found = [line for line in faults if (line["kind"], line["workers"]) == (kind, size)]
            if found:
                whole = [line["whole_s"] for line in found if line["whole_s"] is not None]
                rows.append(
                    f"| {kind} | {size} | {len(found)} | {_spread([line['next_step_s'] for line in found])} "
                    f"| {_spread(whole) if whole else ''} | {_spread([line['steps_redone'] for line in found], 0)} |"
                )
    done = [line for line in chapters if "weights_equal" in line]
    broken = [line for line in chapters if "trouble" in line]
    loads = [line["load"] for line in faults if "load" in line]
    imports = [line["import_torch_s"] for line in chapters]
    return "\n".join(
        [
            "# What each kind of fault costs",
            "",
            "Written by `python benchmarks/faults.py`; its first lines say what is done, and `faults_kinds.py` what",
            "each fault is. Made from `faults.jsonl`, which has a line for each fault.",
            "",
            f"{origins(recorded, 'faults')}, under the load that stands at the end.",
            "",
            VIRTUAL,
            "",
            f"{len(recorded)} faults in {len(chapters)} runs on {', '.join(map(str, sizes))} workers over up to "
            f"{MOST_HOSTS} practice hosts that share this machine's processor and one disk in memory. Median (worst).",
            "",
            "| fault | workers | n | seconds to the next step | seconds until all workers train | steps redone |",
            "|---|---:|---:|---:|---:|---:|",
            *rows,
            "",
            *(
                [
                    f"Rows are made from the newest way of continuing: {len(older)} of the faults were recorded before",
                    "the template loaded what the script imports, and count below, for samples and bits, alone.",
                    "",
                ]
                if older
                else []
            ),
            "| what is aimed at | workers | less than | median (worst) | met |",
            "|---|---:|---:|---:|---:|",
            *aims(faults, chapters),
            *returns(idle, chapters, ", found idle processors"),
            "",
            f"* Samples lost or repeated, over all steps: {sum(line['samples_wrong'] for line in done)}; lines of "
            f"steps missing or twice: {sum(line['lines_wrong'] for line in done)}.",
            f"* Runs that ended with the weights of an undisturbed one, bit for bit: "
            f"{sum(line['weights_equal'] for line in done)} of {len(chapters)}.",
            f"* Runs that did not come to their end: {len(broken)}"
            + "".join(f"; {line['trouble']}" + (f" ({line['since']})" if "since" in line else "") for line in broken)
            + ". Cut short, by a signal or by a mistake of the benchmark: "
            + f"{sum(bool(line.get('cut_short')) for line in lines)}.",
            *([f"* The machine's load meanwhile: {_spread(loads, 1)} on {os.cpu_count()} cores."] if loads else []),
            f"* Python needed {_spread(imports, 2)} s to import torch on one of these hosts before the run began.",
            "",
        ]
    )


def _spread(values: Sequence[float], digits: int = 2) -> str:
    return f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"
