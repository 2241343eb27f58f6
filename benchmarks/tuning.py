"""Do 20 trials of `manyhosts tune` find at least what the best of 20 random ones finds, within 2 workers?

    python benchmarks/tuning.py [--seeds 10] [--trials 20] [--epochs 2]

The digits example, two trials of one worker at once. For each seed one search as it is by default (a learning-rate
range test, then TPE, with bad trials stopped early), and one of random settings with rates from 1e-5 to 1; both vary
the batch size, too. The figure is the least loss over the validations of all trials. Which is first alternates by seed.
Lines go to tuning.jsonl as they come, and seeds that are there already are not run again; the answer to tuning.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import describe, origin, origins

REPORT = Path(__file__).with_suffix(".md")
LINES = Path(__file__).with_suffix(".jsonl")
DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
ARMS = {
    "tune": ["--search", "lr=auto"],
    "random": ["--search", "lr=log:1e-5:1", "--sampler", "random"],
}


def search(arm: str, seed: int, trials: int, epochs: int) -> dict[str, Any]:
    """One search: its best loss and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--at-once", "2", "--trials", str(trials), "--seed", str(seed), "--set", f"seed={seed}"]
        words += ["--set", f"duration={epochs} epochs", "--search", "batch_size=32,64,128", "--json"]
        command = [sys.executable, "-m", "manyhosts.cli.main", "tune", *words, *ARMS[arm], "--run-dir", folder]
        environment = os.environ | {"MANYHOSTS_WARM_S": "30"}
        done = subprocess.run([*command, str(DIGITS)], env=environment, check=True, capture_output=True)
        found = json.loads(done.stdout)
    statuses = [trial["status"] for trial in found["trials"]]
    return {
        "seed": seed, "arm": arm, "best": found["best"]["value"], "settings": found["best"]["settings"],
        "trials": len(statuses), "pruned": statuses.count("pruned"), "failed": statuses.count("failed"),
        **found["spent"], "load": round(os.getloadavg()[0], 1), "recorded": origin(),
    }  # fmt: skip


def known() -> list[dict[str, Any]]:
    return [json.loads(line) for line in LINES.read_text().splitlines()] if LINES.exists() else []


def report(epochs: int) -> None:
    """The table of what is known."""
    lines = known()
    by_seed: dict[int, dict[str, dict[str, Any]]] = {}
    for line in lines:
        by_seed.setdefault(line["seed"], {})[line["arm"]] = line
    both = {seed: arms for seed, arms in sorted(by_seed.items()) if len(arms) == len(ARMS)}
    wins = sum(arms["tune"]["best"] <= arms["random"]["best"] for arms in both.values())
    rows = [
        f"| {seed} | {arms['tune']['best']:.4f} | {arms['random']['best']:.4f} | {arms['tune']['pruned']} | "
        f"{arms['random']['pruned']} | {arms['tune']['worker_seconds']:.0f} | {arms['random']['worker_seconds']:.0f} |"
        for seed, arms in both.items()
    ]
    spread = {arm: sorted(arms[arm]["best"] for arms in both.values()) for arm in ARMS}
    words = "; ".join(
        f"{arm}: median {statistics.median(values):.4f} ({values[0]:.4f} - {values[-1]:.4f})"
        for arm, values in spread.items()
    )
    loads = sorted(line["load"] for line in lines if line["load"] is not None)
    load = f"load {loads[-1]} of 2 cores at most, where it was noted" if loads else "its load was not noted"
    versions = describe(Path(sys.executable), ["torch", "manyhosts", "optuna"])
    versions = versions[versions.index("Python") : versions.index(" Recorded")]
    count = next(iter(both.values()))["tune"]["trials"]
    REPORT.write_text(
        "# What a search finds, against random settings\n\n"
        "Written by `python benchmarks/tuning.py`; its first lines say what is compared, and how.\n\n"
        f"{origins(lines, 'searches')}, {load}. "
        f"Versions: {versions}\n"
        f"{count} trials a search, {epochs} epochs each, n = {len(both)} seeds.\n\n"
        f"**At least as good as random in {wins} of {len(both)} seeds.** Least loss, median (lowest - highest) "
        f"over the seeds: {words}.\n\n"
        "| seed | least loss, tune | random | stopped early, tune | random | workers' seconds, tune | random |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--epochs", type=int, default=2)
    asked = parser.parse_args()
    done = {(line["seed"], line["arm"]) for line in known()}
    for seed in range(asked.seeds):
        for arm in sorted(ARMS, reverse=seed % 2 == 0):
            if (seed, arm) not in done:
                line = search(arm, seed, asked.trials, asked.epochs)
                with LINES.open("a") as file:
                    file.write(json.dumps(line) + "\n")
                print(line, flush=True)
        report(asked.epochs)


if __name__ == "__main__":
    main()
