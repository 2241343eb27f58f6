"""What does it cost to have parts computed again: a run with `audit` next to the same run without?

Two workers on this machine train a small ResNet, batch 64 in 8 parts, in three ways by turns within one job: without
audits, with one part in a hundred audited, and with all of them. Counted are the seconds that the processor works for
the leader, which other programs do not take away; the ratio is taken within each round.

Run: python benchmarks/audit.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from machine import describe
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import manyhosts as mh

ANSWER = Path(__file__).with_suffix(".md")
WAYS: dict[str, float | None] = {"without": None, "audit=0.01": 0.01, "audit=1": 1.0}
WORKERS, PARTS, BATCH = 2, 8, 64


class Block(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inside = nn.Sequential(
            *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width)),
        )

    def forward(self, images: Tensor) -> Tensor:
        return torch.relu(images + self.inside(images))


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), Block(16), nn.Conv2d(16, 32, 3, 2, 1), Block(32)),
        *(nn.Conv2d(32, 64, 3, 2, 1), Block(64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )


def worker(rounds: int, steps: int) -> None:
    images = torch.randn(2048, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = mh.Data(TensorDataset(images, (images.mean((1, 2, 3)) > 0).long()), batch_size=BATCH)
    trainers = {
        way: mh.Trainer(
            model=network,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            data=data,
            virtual_workers=PARTS,
            audit=share,
        )
        for way, share in WAYS.items()
    }
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    ways = list(WAYS)
    for turn in range(rounds + 1):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            begin = time.process_time()
            result = trainers[way].fit(f"{(turn + 1) * steps} steps")
            if turn:  # the first warms everything up
                found[way].append((time.process_time() - begin) / steps)
    if trainers["without"].is_main:
        compared = {
            way: 0 if (found_by := trainer.components.auditor) is None else found_by.compared
            for way, trainer in trainers.items()
        }
        Path(os.environ["FOUND"]).write_text(json.dumps({"seconds": found, "compared": compared, "end": result.status}))


def report(found: dict[str, dict[str, list[float]]], rounds: int, steps: int) -> str:
    seconds = found["seconds"]
    rows = []
    for way in WAYS:
        ratios = [own / plain for own, plain in zip(seconds[way], seconds["without"], strict=True)]
        rows.append(f"| {way} | {spread(seconds[way], '.4f')} | {spread(ratios, '.3f')} | {found['compared'][way]} |")
    return "\n".join(
        [
            "# What do audits cost?",
            "",
            f"A ResNet of {sum(each.numel() for each in network().parameters()) / 1e3:.0f} thousand parameters on "
            f"{WORKERS} workers of this machine, one thread each; a batch of {BATCH} in {PARTS} parts.",
            "",
            f"{describe(Path(sys.executable), ['torch'])} {os.getloadavg()[0]:.0f} processes wanted to run at the end. "
            f"n = {rounds} rounds of {steps} steps for each way, in an order that turns. A figure is the median, with "
            "the lowest and the highest.",
            "",
            "| way | processor seconds per step | times those without, within a round | parts compared |",
            "|---|---|---|---|",
            *rows,
            "",
            "A part that is audited is computed twice, so one part in a hundred costs at least a hundredth; beyond "
            "that there are checksums and one exchange in each step that has audits. In such a step every worker "
            "audits, so the cost does not grow with the number of workers.",
            "",
        ]
    )


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.rounds, asked.steps)
        return
    with tempfile.TemporaryDirectory() as folder:
        words = [
            sys.executable,
            "-m",
            "manyhosts.cli.main",
            "run",
            "--workers",
            str(WORKERS),
            "--run-dir",
            f"{folder}/run",
        ]
        words += [__file__, "--worker", "--rounds", str(asked.rounds), "--steps", str(asked.steps)]
        subprocess.run(words, env={**os.environ, "FOUND": f"{folder}/found"}, check=True)
        found = json.loads(Path(folder, "found").read_text())
    ANSWER.write_text(report(found, asked.rounds, asked.steps), encoding="utf-8")


if __name__ == "__main__":
    main()
