"""How far off is `manyhosts plan`, and is what it names first the fastest?

    python benchmarks/prediction.py             # as root, on Linux: it makes hosts of this machine
    python benchmarks/prediction.py --quick     # fewer steps, in at most ten minutes

Three kinds of models (`prediction_train.py`): one is limited by exchanging gradients, one by computing, one by reading
samples. On four hosts behind cables of 100 Mbit/s and of 1 Gbit/s, `manyhosts plan --hosts` measures each for some
seconds, the network between the hosts included, and predicts 2 and 4 workers without compression, with bf16 and with
PowerSGD. Then each of these is trained, and the median of its steps is compared. Computing and reading are sleeping,
because the hosts share this machine's cores; packing, sending and updating are not. Nothing is calibrated.

A size is a case for the advice: of the three ways that are predicted for it the one that `recommend` names is compared
with the fastest that was measured.

Writes `prediction.md` and `prediction.jsonl`: what was planned and what was measured. `--page` writes the page from
that, by the model as it is now.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from machine import describe
from prediction_train import KINDS

from manyhosts.config.strategies import DDP
from manyhosts.lab import Lab, lab
from manyhosts.planner.catalog import Machines
from manyhosts.planner.measured import Measured, Network
from manyhosts.planner.predict import predictions, ways
from manyhosts.planner.recommend import recommend

HERE = Path(__file__).parent
SCRIPT = "prediction_train.py"
RATES = ("100mbit", "1gbit")
SIZES = (2, 4)
WAYS = ("none", "bf16", "powersgd")
PROGRAM = (sys.executable, "-P", "-m", "manyhosts.cli.main")
MARK = "STEPS "


def planned(hosts: Lab, folder: str, kind: str, seconds: float) -> tuple[dict[str, Any], float]:
    """What `manyhosts plan` says of a kind, and how long it took."""
    words = [*PROGRAM, "plan", "--hosts", ",".join(hosts.names), "--nodes", "1,2,4", "--seconds", f"{seconds:g}"]
    began = time.monotonic()
    done = hosts.desk.run([*words, "--json", SCRIPT, kind, "none"], folder=folder, timeout_s=300, check=False)
    if done.returncode:
        raise SystemExit(f"plan of {kind} ended with {done.returncode}: {done.stderr or done.stdout}")
    return json.loads(done.stdout), time.monotonic() - began


def trained(hosts: Lab, folder: str, workers: int, steps: int) -> Iterator[dict[str, Any]]:
    """The steps of every kind in every way, on so many hosts."""
    words = [*PROGRAM, "run", "--hosts", ",".join(hosts.names[:workers]), "--env", f"STEPS={steps}", "--no-prefix"]
    words += ["--run-dir", f"{folder}/run-{time.time_ns()}", SCRIPT, ",".join(KINDS), ",".join(WAYS)]
    done = hosts.desk.run(words, folder=folder, timeout_s=900, check=False)
    told = [line.partition(MARK)[2] for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or len(told) != len(KINDS) * len(WAYS):
        raise SystemExit(f"{workers} workers ended with {done.returncode}: {done.stderr[-2000:]} {done.stdout[-2000:]}")
    yield from map(json.loads, told)


def machines_of(plan: Mapping[str, Any]) -> Machines:
    """Those that it was planned for."""
    [kind] = plan["machines"]
    networks = {key: Network(**kind[key]) for key in ("between", "within")}
    return Machines(**{**kind, **networks})


def predicted(plan: Mapping[str, Any], workers: int) -> tuple[dict[str, float], str]:
    """The seconds of a step by each of the three ways, and which of them is advised for that size."""
    measured, machines = Measured.from_json(plan["measured"]), machines_of(plan)
    asked = [way for way in ways(measured, DDP(bucket_mb=2)) if way.strategy == "ddp" and way.compression in WAYS]
    found = predictions(measured, machines, [(workers, 1)], asked)
    times = {each.compression: each.step.seconds for each in found}
    if missing := [name for name in WAYS if name not in times]:
        raise SystemExit(f"the plan did not come to measuring {', '.join(missing)}: take a quieter machine")
    return times, recommend(found).best.compression


def measure(rate: str, *, seconds: float, steps: int) -> Iterator[dict[str, Any]]:
    """The plan of each model on cables of `rate`, and a line for each model, size and way."""
    with tempfile.TemporaryDirectory(prefix="prediction-", dir="/var/tmp") as folder, lab(4, bandwidth=rate) as hosts:
        shutil.copy(HERE / SCRIPT, folder)
        for kind in KINDS:
            plan, took = planned(hosts, folder, kind, seconds)
            kept = {key: plan[key] for key in ("measured", "machines")}
            yield {"kind": kind, "rate": rate, "plan": kept, "plan_seconds": round(took, 1)}
        for workers in SIZES:
            for line in trained(hosts, folder, workers, steps):
                yield {
                    "kind": line["kind"], "rate": rate, "workers": workers, "compression": line["compression"],
                    "measured": line["median"], "steps": line["seconds"],
                }  # fmt: skip


def compared(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What was measured, each beside what is predicted of it and what is advised."""
    plans = {(line["kind"], line["rate"]): line["plan"] for line in lines if "plan" in line}
    found = []
    for line in lines:
        if "plan" not in line:
            times, advised = predicted(plans[line["kind"], line["rate"]], line["workers"])
            found.append({**line, "predicted": times[line["compression"]], "advised": advised})
    return found


def error(line: Mapping[str, Any]) -> float:
    return float(abs(line["predicted"] - line["measured"]) / line["measured"])


def advice(lines: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each size of each model on each network: what is advised, the fastest measured, and how much slower it is."""
    cases: dict[tuple[Any, ...], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        cases.setdefault((line["kind"], line["rate"], line["workers"]), {})[line["compression"]] = line
    found = []
    for (kind, rate, workers), each in cases.items():
        fastest = min(each, key=lambda name: float(each[name]["measured"]))
        advised = next(iter(each.values()))["advised"]
        slower = each[advised]["measured"] / each[fastest]["measured"] - 1
        found.append(
            {"kind": kind, "rate": rate, "workers": workers, "advised": advised, "fastest": fastest, "slower": slower}
        )
    return found


def page(recorded: Sequence[Mapping[str, Any]], began: str) -> str:
    """What was found, as a page."""
    lines, slowest = compared(recorded), max(line["plan_seconds"] for line in recorded if "plan" in line)
    errors, cases = [error(line) for line in lines], advice(lines)
    right = sum(case["slower"] <= 0.05 for case in cases)
    text = ["# How far off a plan is", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    text += [describe(Path(sys.executable), ["torch"]), began, ""]
    text += [
        f"**Steps are off by {100 * statistics.median(errors):.1f} % (median of {len(errors)}), at worst by "
        f"{100 * max(errors):.1f} %. What is advised is the fastest measured, or within 5 % of it, in {right} of "
        f"{len(cases)} cases.** A plan took {slowest:.0f} s at most.",
        "",
        "| model | cable | workers | compression | predicted, s | measured, s (median, range, n) | off by |",
        "|---|---|---|---|---|---|---|",
    ]
    for line in lines:
        steps = line["steps"]
        text.append(
            f"| {line['kind']} | {line['rate']} | {line['workers']} | {line['compression']} | {line['predicted']:.3f} "
            f"| {line['measured']:.3f} ({min(steps):.3f} to {max(steps):.3f}, {len(steps)}) "
            f"| {100 * (line['predicted'] / line['measured'] - 1):+.1f} % |"
        )
    text += ["", "| model | cable | workers | advised | fastest | slower by |", "|---|---|---|---|---|---|"]
    for case in cases:
        text.append(
            f"| {case['kind']} | {case['rate']} | {case['workers']} | {case['advised']} | {case['fastest']} "
            f"| {100 * case['slower']:.1f} % |"
        )
    return "\n".join(text) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--rates", default=",".join(RATES), help="of the cables: some of these")
    parser.add_argument("--page", action="store_true", help="write the page anew from what is recorded")
    asked = parser.parse_args()
    recorded = HERE / "prediction.jsonl"
    if not asked.page:
        load = f"When it began, {os.getloadavg()[1]:.1f} processes wanted the {os.cpu_count()} cores."
        lines = []
        for rate in asked.rates.split(","):
            for line in measure(rate, seconds=20, steps=11 if asked.quick else 33):
                lines.append({**line, "began": load})
                print({key: value for key, value in line.items() if key not in ("steps", "plan")}, flush=True)
        recorded.write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [json.loads(line) for line in recorded.read_text().splitlines()]
    (HERE / "prediction.md").write_text(page(lines, lines[0]["began"]))


if __name__ == "__main__":
    main()
