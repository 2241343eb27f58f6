"""What do equal bits cost: the step of virtual workers next to plain data parallelism, in time, bytes and memory?

Four hosts on cables of 1 Gbit/s (`manyhosts lab`), one worker each, 67 MB of gradients. In each round the same workers
take some steps in every way, in an order that turns. Bytes are those that the network card counts; memory is the most
that a fresh process of each way holds, above what it holds with the model made.

Run: python benchmarks/bits_cost.py
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import nn

from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.config.strategies import DDP
from manyhosts.data.order import bounds
from manyhosts.lab import lab
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.strategy import Piece, Strategy
from manyhosts.strategies.virtual import VirtualWorkers

ANSWER = Path(__file__).with_suffix(".md")
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
HOSTS, WIDTH, LAYERS = 4, 2048, 4
WAYS = {"ddp": 0, "virtual 4": 4, "virtual 8": 8, "virtual 6": 6}
"""The way, and the number of its parts."""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def made(way: str, world: World) -> Strategy:
    return VirtualWorkers(WAYS[way], world, bucket_mb=25) if WAYS[way] else DataParallel(DDP(), world)


class Trainee:
    """One way to train: its strategy, its model, and its part of the batch."""

    def __init__(self, way: str, world: World, batch: int) -> None:
        self.strategy = made(way, world)
        self.model = self.strategy.place(network())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        parts = WAYS[way] or world.size
        inputs = torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(1))
        cut = [(part, *bounds(batch, parts, part)) for part in range(*bounds(parts, world.size, world.rank))]
        self.pieces = [Piece(partial(inputs[a:b].clone), b - a, (b - a) / batch, (0, part, 0)) for part, a, b in cut]

    def step(self) -> None:
        def compute(model: nn.Module, piece: Piece) -> dict[str, torch.Tensor]:
            return {"loss": model(piece.batch).square().mean()}

        self.strategy.forward_backward(self.model, self.pieces, compute, lambda loss: loss, [0.0])
        self.strategy.update(self.model, self.optimizer)


def worker(ways: list[str], rounds: int, steps: int, batch: int) -> None:
    torch.set_num_threads(1)
    world = World(Place.from_environment())
    network()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    trainees = {way: Trainee(way, world, batch) for way in ways}
    found: dict[str, Any] = {way: {"seconds": [], "bytes": []} for way in ways}
    for trainee in trainees.values():
        for _ in range(2):
            trainee.step()
    for turn in range(rounds):
        for way in ways[turn % len(ways) :] + ways[: turn % len(ways)]:
            world.barrier()
            begin, sent = time.perf_counter(), int(SENT.read_text())
            for _ in range(steps):
                trainees[way].step()
            world.barrier()
            found[way]["seconds"].append((time.perf_counter() - begin) / steps)
            found[way]["bytes"].append((int(SENT.read_text()) - sent) / steps)
    found["memory"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if world.is_rank_0:
        sys.stdout.write(json.dumps(found) + "\n")
    world.barrier()
    sys.stdout.flush()
    os._exit(0)


def measured(hosts: Any, ways: list[str], rounds: int, steps: int, batch: int) -> dict[str, Any]:
    """What the leader of four workers found."""
    options = ["--rounds", str(rounds), "--steps", str(steps), "--batch", str(batch)]
    words = [sys.executable, str(Path(__file__).resolve()), "--worker", *ways, *options]
    started = [
        host.start(
            words,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": str(HOSTS),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": hosts[0].address,
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                **({"PYTHONPATH": os.environ["PYTHONPATH"]} if "PYTHONPATH" in os.environ else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]
    try:
        outputs = [process.communicate(timeout=1200) for process in started]
    finally:
        for host, process in zip(hosts, started, strict=True):
            host.end(process)
    if not outputs[0][0]:
        raise SystemExit(outputs[0][1])
    answer: dict[str, Any] = json.loads(outputs[0][0].splitlines()[-1])
    return answer


def report(times: dict[str, Any], memory: dict[str, float], asked: argparse.Namespace) -> str:
    plain = times["ddp"]["seconds"]
    size = sum(parameter.numel() * parameter.element_size() for parameter in network().parameters()) / 1e6
    rows = []
    for way in WAYS:
        seconds = times[way]["seconds"]
        ratios = [own / other for own, other in zip(seconds, plain, strict=True)]
        rows.append(
            f"| {way} | {spread(seconds, '.2f')} | {spread(ratios, '.2f')} "
            f"| {statistics.median(times[way]['bytes']) / 1e6:.1f} | {memory[way] / 1e6:.0f} |"
        )
    lines = [
        "# What do equal bits cost?",
        "",
        f"One step of an optimizer on {HOSTS} hosts of a lab, each on a cable of 1 Gbit/s and with one worker of one "
        f"thread; {size:.0f} MB of gradients in {LAYERS} layers, a batch of {asked.batch}. `ddp` is plain data "
        "parallelism; `virtual V` has the batch in V parts.",
        "",
        f"{describe(Path(sys.executable), ['torch'])} The hosts share its cores, with each other and with what else "
        f"ran: {os.getloadavg()[0]:.0f} processes wanted to run at the end. n = {asked.rounds} rounds of {asked.steps} "
        "steps for each way, in an order that turns. A figure is the median, with the lowest and the highest.",
        "",
        "| way | seconds per step | times ddp's, within a round | MB sent per step and host | MB of memory |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "Bytes are those that the network card counts. Memory is the most that a fresh process held in three steps, "
        "above what it held before it made the model.",
        "",
    ]
    return "\n".join(lines)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker, asked.rounds, asked.steps, asked.batch)
    ways = list(WAYS)
    with lab(HOSTS, bandwidth="1gbit") as hosts:
        times = measured(hosts, ways, asked.rounds, asked.steps, asked.batch)
        memory = {way: measured(hosts, [way], 1, 1, asked.batch)["memory"] for way in ways}
    ANSWER.write_text(report(times, memory, asked), encoding="utf-8")


if __name__ == "__main__":
    main()
