"""Asks which share of a step waits for samples, with and without loader processes that are chosen by measuring.

    python benchmarks/loading.py

A dataset that waits 2 ms for each sample, as one on a disk or behind a network does; a small model, batches of 16. Runs
of 60 steps take turns, in fresh processes. Writes `loading.md`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import describe
from torch import nn
from torch.utils.data import Dataset

import manyhosts as mh

ROUNDS = 5
STEPS, FIRST = 60, 20
"""Steps of a run; the first ones, in which is measured and processes start, do not count."""
SAMPLE_S = 0.002
RESULTS = Path(__file__).with_suffix(".md")


class Waiting(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take their time to come."""

    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(SAMPLE_S)
        return torch.randn(256), torch.tensor(index % 10)


class Slow(nn.Module):
    """A model whose forward pass takes 20 ms without keeping a core busy, as one on a GPU does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        outputs: torch.Tensor = self.layer(inputs)
        return outputs


def work(loaders: str, folder: str) -> None:
    torch.set_num_threads(1)
    trainer = mh.Trainer(
        model=Slow,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=mh.Data(train=Waiting(), batch_size=16, loader_workers="auto" if loaders == "auto" else int(loaders)),
        run_dir=folder,
    )
    trainer.fit(f"{STEPS} steps")


def measure(loaders: str) -> dict[str, float | str]:
    """Of one run: the share of the steps' time that waited for samples, and samples in a second."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(Path(__file__).resolve()), "--work", loaders, folder]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        summary = json.loads(Path(folder, "summary.json").read_text())
        lines = [json.loads(line) for line in Path(folder, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"][FIRST:]
    share = sum(step["data_wait"] for step in steps) / sum(step["seconds"] for step in steps)
    notes = [line["text"] for line in lines if line["event"] == "note" and "loader" in line["text"]]
    return {
        "share": share,
        "speed": 16 * len(steps) / sum(step["seconds"] for step in steps),
        "said": notes[0] if notes else "",
        "weights": summary["weights_sha256"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", nargs=2, help="be a run; the benchmark starts them itself")
    asked = parser.parse_args()
    if asked.work:
        work(*asked.work)
        return
    found: dict[str, list[dict[str, float | str]]] = {"0": [], "auto": []}
    for number in range(ROUNDS):
        for loaders in sorted(found, reverse=bool(number % 2)):
            found[loaders].append(measure(loaders))
            print(loaders, found[loaders][-1], flush=True)
    hashes = {run["weights"] for runs in found.values() for run in runs}
    assert len(hashes) == 1, f"all runs end with the same weights, got {hashes}"
    lines = ["# What waiting for samples costs", "", __doc__.split("\n\n", 2)[2].split("Writes")[0].strip(), ""]
    lines += [describe(Path(sys.executable), ["torch"]), ""]
    lines += [
        f"Steps {FIRST + 1} to {STEPS}, median of n = {ROUNDS} runs (lowest to highest); all end with equal weights.",
        "",
    ]
    lines += ["| loader processes | share of a step that waits for samples | samples in a second |", "|---|---|---|"]
    for loaders, runs in found.items():
        shares, speeds = sorted(float(r["share"]) for r in runs), sorted(float(r["speed"]) for r in runs)
        lines.append(
            f"| {loaders} | {statistics.median(shares):.1%} ({shares[0]:.1%} to {shares[-1]:.1%}) | "
            f"{statistics.median(speeds):.0f} ({speeds[0]:.0f} to {speeds[-1]:.0f}) |"
        )
    ratio = statistics.median(
        float(b["speed"]) / float(a["speed"]) for a, b in zip(found["0"], found["auto"], strict=True)
    )
    lines += ["", f"{ratio:.2f} times as fast, the median of the ratios by round. What the last run said:", ""]
    lines += [f"> {found['auto'][-1]['said']}", ""]
    RESULTS.write_text("\n".join(lines))


if __name__ == "__main__":
    main()
