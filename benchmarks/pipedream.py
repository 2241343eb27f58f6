"""What does a pipeline give that is not emptied between updates, beside 1F1B: samples per second, memory, loss?

    python benchmarks/pipedream.py [--rounds 3] [--only speed|memory|loss]

Speed: as many blocks as stages, each of which sleeps 100 ms in both passes, so that this machine's other work falls on
none of them. An update is made of as many micro-batches as there are stages: under 1F1B that is a batch; else 64
or 128 micro-batches pass through between two meetings. Counted are samples per second behind the first step, by turns.
The bubble is the share of the time in which the stages of 1F1B do not sleep, messages and this machine's other work
among it; beside it stands what they say themselves that they have waited for messages of others.

Memory: four stages of one block of 64 MB, SGD with momentum; the peak of each worker's process behind the first step.

Loss: the validation loss of one process after so many samples, and the share of these samples after which a pipeline
of four stages has at most 1.02 times that loss; three seeds.

Each run adds a line to pipedream.jsonl, and the answer in pipedream.md is written of those of all lines.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from machine import describe

HERE = Path(__file__).parent
RECORD, REPORT = HERE / "pipedream.jsonl", HERE / "pipedream.md"
WAYS = ("1f1b", "two", "all", "one")
BETWEEN = 64
"""Micro-batches between two meetings."""
SPEEDS = ((4, 128), (4, BETWEEN), (2, BETWEEN))
"""Stages, and micro-batches between two meetings."""
BUSY_S = 0.2
"""What a micro-batch takes each stage, both passes together, which is slept."""
LOSSES: dict[str, dict[str, int]] = {
    "digits": {"piece": 8, "accumulate": 4, "meetings": 20},
    "characters": {"piece": 4, "accumulate": 4, "meetings": 12},
}
ALLOWED = 1.3


def speeds(rounds: int) -> Iterator[dict[str, Any]]:
    for _ in range(rounds):
        for stages, between in SPEEDS:
            for way in WAYS:
                plain = way == "1f1b"
                batch, steps = (4 * stages, 10) if plain else (4 * between, 1 + 128 // between)
                yield {"task": "sleeping", "way": way, "workers": stages, "blocks": stages, "accumulate": stages} | {
                    "batch": batch,
                    "piece": 4,
                    "steps": steps,
                    "seed": 0,
                }


def memories(rounds: int) -> Iterator[dict[str, Any]]:
    for _ in range(rounds):
        for way, accumulate in (("1f1b", 4), ("two", 4), ("all", 4), ("all", 1), ("one", 4)):
            yield {"task": "large", "way": way, "workers": 4, "blocks": 4, "accumulate": accumulate} | {
                "batch": 16,
                "piece": 1,
                "steps": 3,
                "seed": 0,
            }


def losses(rounds: int) -> Iterator[dict[str, Any]]:
    for seed in range(rounds):
        for task, sizes in LOSSES.items():
            piece, accumulate, meetings = sizes["piece"], sizes["accumulate"], sizes["meetings"]
            for way in ("one process", "two", "all", "one"):
                alone = way == "one process"
                updates = BETWEEN // accumulate
                yield {"task": task, "way": way, "workers": 1 if alone else 4, "accumulate": accumulate} | {
                    "batch": piece * (accumulate if alone else BETWEEN),
                    "piece": piece,
                    "steps": meetings * updates if alone else int(ALLOWED * meetings),
                    "every": updates if alone else 1,
                    "seed": seed,
                }


PARTS = {"speed": speeds, "memory": memories, "loss": losses}


def trained(asked: dict[str, Any]) -> dict[str, Any]:
    """What the workers of one run found."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        command = [str(Path(sys.executable).with_name("manyhosts")), "run", "--workers", str(asked["workers"])]
        command += ["--no-prefix", "--run-dir", str(run_dir), str(HERE / "pipedream_train.py"), json.dumps(asked)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
        found = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert len(found) == asked["workers"], done.stdout + done.stderr
        found.sort(key=lambda each: each["rank"])
        waited = re.search(r"the stages waited ([\d %,.]+) of", (run_dir / "metrics.jsonl").read_text())
    return {
        "rate": found[0]["rate"],
        "losses": found[0]["losses"],
        "peak_mb": [each["peak_mb"] for each in found],
        "waited": [float(each) / 100 for each in re.findall(r"[\d.]+", waited.group(1))] if waited else [],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=list(PARTS))
    given = parser.parse_args()
    for part in [given.only] if given.only else PARTS:
        for asked in PARTS[part](given.rounds):
            line = {"part": part, "asked": asked, "found": trained(asked)}
            with RECORD.open("a") as record:
                record.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    lines = [json.loads(line) for line in RECORD.read_text().splitlines()]
    if {line["part"] for line in lines} == set(PARTS):
        REPORT.write_text(report(lines))


def spread(values: Iterable[float], digits: int) -> str:
    """The median, with the lowest and the highest."""
    found = sorted(values)
    low, middle, high = (f"{each:.{digits}f}" for each in (found[0], statistics.median(found), found[-1]))
    return f"{middle} ({low} to {high})"


def of_speed(lines: list[Any]) -> Iterator[str]:
    yield "| stages | way | micro-batches a step | samples per second | of 1F1B's | of its / (1 - bubble) | n |"
    yield "|---|---|---|---|---|---|---|"
    for stages in (4, 2):
        rates: dict[tuple[str, int], list[float]] = {}
        runs = [line for line in lines if line["part"] == "speed" and line["asked"]["workers"] == stages]
        for asked, found in ((line["asked"], line["found"]) for line in runs):
            rates.setdefault((asked["way"], asked["batch"] // asked["piece"]), []).append(found["rate"])
        base = statistics.median(rates["1f1b", stages])
        bubble = 1 - base * BUSY_S / 4
        waits = [statistics.mean(line["found"]["waited"]) for line in runs if line["asked"]["way"] == "1f1b"]
        for (way, between), found in sorted(rates.items(), key=lambda each: (WAYS.index(each[0][0]), each[0][1])):
            ratio = statistics.median(found) / base
            share = f"bubble {100 * bubble:.0f} %, {100 * statistics.median(waits):.0f} % in receives"
            share = share if way == "1f1b" else f"{ratio * (1 - bubble):.2f}"
            cells = (stages, named(way), between, spread(found, 1), f"{ratio:.2f}", share, len(found))
            yield f"| {' | '.join(map(str, cells))} |"
    yield ""


def named(way: str, accumulate: int | None = None) -> str:
    words = way if way in ("1f1b", "one process") else f'versions="{way}"'
    return f"`{words}`" + (f", accumulate={accumulate}" if accumulate and way not in ("1f1b", "one process") else "")


def of_memory(lines: list[Any]) -> Iterator[str]:
    runs: dict[tuple[str, int], list[list[float]]] = {}
    for line in lines:
        if line["part"] == "memory":
            key = (line["asked"]["way"], line["asked"]["accumulate"])
            runs.setdefault(key, []).append(line["found"]["peak_mb"])
    yield f"Four stages of 64 MB of weights each; MB, n = {len(next(iter(runs.values())))}."
    yield ""
    yield "| way | stage 0 | stage 1 | stage 2 | stage 3 |"
    yield "|---|---|---|---|---|"
    for (way, accumulate), peaks in runs.items():
        cells = " | ".join(spread([peak[stage] for peak in peaks], 0) for stage in range(4))
        yield f"| {named(way, accumulate)} | {cells} |"
    yield ""


def of_loss(lines: list[Any]) -> Iterator[str]:
    yield "The last column: after which share of the samples of one process it is at most 1.02 times that."
    yield ""
    yield "| model | seed | way | loss after as many samples | of the first row's | samples needed |"
    yield "|---|---|---|---|---|---|"
    aims: dict[tuple[str, int], float] = {}
    for line in lines:
        if line["part"] != "loss":
            continue
        asked, found = line["asked"], line["found"]["losses"]
        key, meetings = (asked["task"], asked["seed"]), LOSSES[asked["task"]]["meetings"]
        if asked["way"] == "one process":
            aims[key] = found[meetings - 1]
        reached = next((number for number, loss in enumerate(found, 1) if loss <= 1.02 * aims[key]), None)
        share = f"{reached / meetings:.2f}" if reached else f"not within {ALLOWED}"
        loss = found[meetings - 1]
        yield f"| {key[0]} | {key[1]} | {named(asked['way'])} | {loss:.4f} | {loss / aims[key]:.3f} | {share} |"
    yield ""


def report(lines: list[Any]) -> str:
    return "\n".join(
        [
            "# A pipeline that is not emptied between updates, beside 1F1B",
            "",
            "How each is measured stands at the head of `pipedream.py`.",
            "",
            "## Samples per second",
            "",
            *of_speed(lines),
            "## Memory",
            "",
            *of_memory(lines),
            "## Loss",
            "",
            *of_loss(lines),
            describe(Path(sys.executable), ("torch", "manyhosts")),
            "Again: `python benchmarks/pipedream.py`.",
            "",
        ]
    )


if __name__ == "__main__":
    main()
