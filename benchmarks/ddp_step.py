"""Asks what a step of our data parallelism takes, against torch's DistributedDataParallel, on wires of several speeds.

    python benchmarks/ddp_step.py                # needs root on Linux: makes hosts in network namespaces

Both train the same network (1.2 million parameters) on the same hosts, taking turns step by step in the same processes.
Writes `ddp_step.md`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.world import World
from manyhosts.lab import lab
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.strategy import Piece

ROUNDS = {"100mbit": 40, "1gbit": 150, "40gbit": 400}
"""Steps of each that are timed, by the cables' rate; 40gbit is more than the machine can do."""
RESULTS = Path(__file__).with_suffix(".md")


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(512, 768), nn.ReLU(), nn.Linear(768, 768), nn.ReLU(), nn.Linear(768, 256))


def work(rounds: int) -> None:
    """The life of a worker: both take turns, block by block of steps; the leader tells each one's times."""
    torch.set_num_threads(1)
    world = World(Place.from_environment())
    inputs, targets = torch.randn(64, 512), torch.randint(0, 256, (64,))
    loss_of = nn.CrossEntropyLoss()
    ours = DataParallel(mh.DDP(), world)
    model = ours.place(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    piece = Piece(lambda: (inputs, targets), 64, 1 / world.size, (0,))
    theirs = DistributedDataParallel(network(), gradient_as_bucket_view=True)
    their_optimizer = torch.optim.SGD(theirs.parameters(), lr=0.01)

    def our_step() -> None:
        ours.forward_backward(
            model,
            [piece],
            lambda net, p: {"loss": loss_of(net(p.batch[0]), p.batch[1])},
            lambda loss: loss,
            [0.0],
        )
        ours.update(model, optimizer)

    def their_step() -> None:
        their_optimizer.zero_grad()
        loss_of(theirs(inputs), targets).backward()
        their_optimizer.step()

    times: dict[str, list[float]] = {"ours": [], "torch": []}
    for number in range(rounds + 3):
        turns = [("ours", our_step), ("torch", their_step)]
        for name, step in turns if number % 2 else reversed(turns):
            world.barrier()
            begin = time.perf_counter()
            step()
            if number >= 3:
                times[name].append(time.perf_counter() - begin)
    if world.is_rank_0:
        print(json.dumps(times), flush=True)
    world.barrier()
    os._exit(0)


def measure(workers: int, rate: str, rounds: int) -> dict[str, list[float]]:
    with lab(workers, bandwidth=rate, prefix="step") as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            place: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            place |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29512, "GLOO_SOCKET_IFNAME": "eth0"}
            variables = {key: str(value) for key, value in place.items()}
            variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            words = [sys.executable, str(Path(__file__).resolve()), "--work", "--rounds", str(rounds)]
            processes.append(host.start(words, env=variables, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
        out, _ = processes[0].communicate(timeout=900)
        for process in processes[1:]:
            process.communicate(timeout=60)
    found: dict[str, list[float]] = json.loads(out)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--rates", default=",".join(ROUNDS), help="of the cables: some of these")
    parser.add_argument(
        "--rounds", type=int, default=0, help="steps of each that are timed, where not as many as usual"
    )
    parser.add_argument("--work", action="store_true", help="be a worker; the benchmark starts them itself")
    asked = parser.parse_args()
    if asked.work:
        work(asked.rounds)
    lines = ["# Our data parallelism against torch's", "", __doc__.split("\n\n")[2].split("Writes")[0].strip(), ""]
    lines += [
        describe(Path(sys.executable), ["torch"]),
        "",
        "Both take turns, step by step; what a step took is that of the slowest thing on the wire and on the cores. "
        f"When it began, {os.getloadavg()[1]:.1f} processes wanted the {os.cpu_count()} cores.",
        "",
    ]
    lines += [
        "| workers | wire | n | ours, ms (median, lowest to highest) | torch, ms | ratio of the medians "
        "| ratio by turn: median (middle half) |"
    ]
    lines += ["|---|---|---|---|---|---|---|"]
    for workers in map(int, asked.workers.split(",")):
        for rate in asked.rates.split(","):
            rounds = asked.rounds or ROUNDS[rate]
            times = measure(workers, rate, rounds)
            shown = [
                f"{1e3 * statistics.median(found):.1f} ({1e3 * min(found):.1f} to {1e3 * max(found):.1f})"
                for found in (times["ours"], times["torch"])
            ]
            ratios = sorted(a / b for a, b in zip(times["ours"], times["torch"], strict=True))
            ratio = statistics.median(ratios)
            middle = f"{ratios[len(ratios) // 4]:.3f} to {ratios[3 * len(ratios) // 4]:.3f}"
            whole = statistics.median(times["ours"]) / statistics.median(times["torch"])
            lines.append(
                f"| {workers} | {rate} | {rounds} | {shown[0]} | {shown[1]} | {whole:.3f} | {ratio:.3f} ({middle}) |"
            )
            print(lines[-1], flush=True)
    RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
