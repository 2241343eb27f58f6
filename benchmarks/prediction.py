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
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from prediction_page import PROGRAM, Line, Row, kept, machines_of, measured_of, page, read, reported, write
from prediction_train import KINDS

from manyhosts.config.strategies import DDP
from manyhosts.lab import Lab, lab
from manyhosts.planner.predict import predictions, ways
from manyhosts.planner.recommend import recommend

HERE = Path(__file__).parent
SCRIPT = "prediction_train.py"
RECORD = HERE / "prediction.jsonl"
RATES = ("100mbit", "1gbit")
SIZES = (2, 4)
WAYS = ("none", "bf16", "powersgd")


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
    found = reported(done.stdout)
    if done.returncode or len(found) != len(KINDS) * len(WAYS):
        raise SystemExit(f"{workers} workers ended with {done.returncode}: {done.stderr[-2000:]} {done.stdout[-2000:]}")
    yield from found


def predicted(plan: Line, workers: int) -> tuple[dict[str, float], str]:
    """The seconds of a step by each of the three ways, and which of them is advised for that size."""
    measured = measured_of(plan)
    asked = [way for way in ways(measured, DDP(bucket_mb=2)) if way.strategy == "ddp" and way.compression in WAYS]
    found = predictions(measured, machines_of(plan), [(workers, 1)], asked)
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
            yield {"kind": kind, "rate": rate, "plan": kept(plan), "plan_seconds": round(took, 1)}
        for workers in SIZES:
            for line in trained(hosts, folder, workers, steps):
                yield {
                    "kind": line["kind"], "rate": rate, "workers": workers, "compression": line["compression"],
                    "measured": line["median"], "steps": line["seconds"],
                }  # fmt: skip


def compared(lines: Sequence[Line], plans: Mapping[Any, Line]) -> list[dict[str, Any]]:
    """What was measured, each beside what is predicted of it and what is advised."""
    found = []
    for line in lines:
        times, advised = predicted(plans[line["kind"], line["rate"]], line["workers"])
        found.append({**line, "predicted": times[line["compression"]], "advised": advised})
    return found


def advice(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """For each size of each model on each network: what is advised, the fastest measured, and how much slower it is."""
    cases: dict[tuple[Any, ...], dict[str, Line]] = {}
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


def written() -> str:
    """The page of what is recorded."""
    recorded, plans, trained = read(RECORD, lambda line: (line["kind"], line["rate"]))
    lines, slowest = compared(trained, plans), max(line["plan_seconds"] for line in recorded if "plan" in line)
    cases = advice(lines)
    right = sum(case["slower"] <= 0.05 for case in cases)
    text = page(
        [
            Row(
                (line["kind"], line["rate"], str(line["workers"]), line["compression"]),
                line["predicted"],
                line["measured"],
                line["steps"],
            )
            for line in lines
        ],
        ("model", "cable", "workers", "compression"),
        title="How far off a plan is",
        about=__doc__ or "",
        began=recorded[0]["began"],
        found=f" What is advised is the fastest measured, or within 5 % of it, in {right} of {len(cases)} cases.** "
        f"A plan took {slowest:.0f} s at most.",
    )
    text += "\n| model | cable | workers | advised | fastest | slower by |\n|---|---|---|---|---|---|\n"
    for case in cases:
        text += (
            f"| {case['kind']} | {case['rate']} | {case['workers']} | {case['advised']} | {case['fastest']} "
            f"| {100 * case['slower']:.1f} % |\n"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument("--rates", default=",".join(RATES), help="of the cables: some of these")
    parser.add_argument("--page", action="store_true", help="write the page again from what is recorded")
    asked = parser.parse_args()
    if not asked.page:
        load = f"When it began, {os.getloadavg()[1]:.1f} processes wanted the {os.cpu_count()} cores."
        lines = []
        for rate in asked.rates.split(","):
            for line in measure(rate, seconds=20, steps=11 if asked.quick else 33):
                lines.append({**line, "began": load})
                print({key: value for key, value in line.items() if key not in ("steps", "plan")}, flush=True)
        write(RECORD, lines)
    (HERE / "prediction.md").write_text(written())


if __name__ == "__main__":
    main()
