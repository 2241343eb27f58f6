"""Replays a published study of VGG19 over Ethernet: what would each way of sending have kept of the ideal speed?

    python benchmarks/replay.py                  # needs root on Linux: makes hosts in network namespaces

The study (one GPU per node, batch 32 per node) kept 0.81, 0.65 and 0.46 of the ideal speed on 2, 4 and 8 nodes. Here a
model with VGG19's layers, each dim of each weight an eighth (1/64 of the parameters, and of the buckets and parcels),
runs on that many hosts. Its layers do not compute but sleep, in proportion to the operations of the real ones; its
gradients are random numbers. The cable of every host is slowed until plain data parallelism keeps what was published;
all other ways then meet the same cable. Writes `replay.md`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from machine import describe
from torch import Tensor, nn

import manyhands as mh
from manyhands.cluster.place import Place
from manyhands.communication.compression import feedback
from manyhands.communication.compression.choose import cost_of
from manyhands.communication.volume import all_reduce_bytes
from manyhands.communication.world import World
from manyhands.lab import lab
from manyhands.strategies.ddp import DataParallel
from manyhands.strategies.diloco import OuterSteps
from manyhands.strategies.local_sgd import LocalSteps
from manyhands.strategies.strategy import Piece, Strategy

PUBLISHED = {2: 0.81, 4: 0.65, 8: 0.46}
STEP_S = 1.5
"""Forward and backward pass on one node. On the real one about 0.4 s: everything here runs in slow motion."""
BACKWARD = 2 / 3
SHRINK = 8
CONVOLUTIONS = [3, 64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0]
LINEAR = [25088, 4096, 2048, 20]
BUCKET_MB = 25 / SHRINK**2
CASES: dict[str, tuple[Any, int]] = {
    "ddp": (mh.DDP(bucket_mb=BUCKET_MB), 3),
    "ddp bf16": (mh.DDP(bucket_mb=BUCKET_MB, compression="bf16"), 3),
    "ddp int8": (mh.DDP(bucket_mb=BUCKET_MB, compression="int8"), 3),
    "ddp powersgd": (mh.DDP(bucket_mb=BUCKET_MB, compression="powersgd"), 3),
    "local-sgd, every 4": (mh.LocalSGD(sync_every=4), 8),
    "diloco, every 8": (mh.DiLoCo(sync_every=8, fragments=4), 8),
    "ddp auto": (mh.DDP(bucket_mb=BUCKET_MB, compression="auto"), 3),
}
"""Each with the steps that are timed: whole rounds, where workers meet now and then."""
RESULTS = Path(__file__).with_suffix(".md")


def layers(shrink: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shape of each weight, its dims divided by `shrink`, and the operations of the real layer."""
    side, before = 224, 3
    for channels in CONVOLUTIONS[1:]:
        if channels == 0:
            side //= 2
            continue
        yield (channels // shrink, max(3, before // shrink), 3, 3), side * side * 9 * before * channels
        before = channels
    for before, after in pairwise(LINEAR):
        yield (after if after == 20 else after // shrink, before // shrink), before * after


class Slept(torch.autograd.Function):
    """A layer that takes its time."""

    @staticmethod
    def forward(context: Any, flow: Tensor, weight: Tensor, bias: Tensor, layer: Layer) -> Tensor:
        context.layer = layer
        time.sleep(layer.forward_s)
        return flow.clone()

    @staticmethod
    def backward(context: Any, flow: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        time.sleep(context.layer.backward_s)
        return flow, context.layer.gradients[0], context.layer.gradients[1], None


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...], share: float) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape[0]))
        self.gradients = torch.randn(shape), torch.randn(shape[0])
        self.forward_s, self.backward_s = share * STEP_S * (1 - BACKWARD), share * STEP_S * BACKWARD

    def forward(self, flow: Tensor) -> Tensor:
        return Slept.apply(flow, self.weight, self.bias, self)


def vgg19() -> nn.Sequential:
    found = list(layers(SHRINK))
    total = sum(operations for _, operations in found)
    return nn.Sequential(*(Layer(shape, operations / total) for shape, operations in found))


def make(config: Any, world: World) -> Strategy:
    if isinstance(config, mh.DDP):
        return DataParallel(config, world)
    return LocalSteps(config, world) if isinstance(config, mh.LocalSGD) else OuterSteps(config, world)


def one_case(config: Any, steps: int, world: World) -> dict[str, Any]:
    strategy = make(config, world)
    model = strategy.place(vgg19())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    piece = Piece(torch.zeros(1, requires_grad=True), 1, 1 / world.size, (0,))

    def step() -> None:
        strategy.forward_backward(model, [piece], lambda net, p: {"loss": net(p.batch).sum()}, lambda loss: loss, [0.0])
        strategy.update(model, optimizer)

    auto = getattr(config, "compression", "") == "auto"
    for _ in range(7 if auto else 1 if isinstance(config, mh.DDP) else 0):
        step()
    world.barrier()
    sent, exposed, begin = world.bytes_sent, world.exposed_s, time.perf_counter()
    for _ in range(steps):
        step()
    world.barrier()
    return {
        "step_s": (time.perf_counter() - begin) / steps,
        "bytes": (world.bytes_sent - sent) / steps,
        "exposed_s": (world.exposed_s - exposed) / steps,
        "notes": world.notes,
    }


def work() -> None:
    """The life of a worker: every case, told by the leader, one JSON line each."""
    torch.set_num_threads(1)
    feedback.PARCEL_BYTES //= SHRINK**2  # as small as everything else
    world = World(Place.from_environment())
    for name in ["calibration", *CASES]:
        config, steps = CASES.get(name, CASES["ddp"])
        found = one_case(config, steps, world)
        if world.is_leader:
            print(json.dumps({"case": name, **found}), flush=True)
            if name == "calibration":
                sys.stdin.readline()  # the cable is changed meanwhile
        world.notes.clear()
        world.barrier()
    os._exit(0)


def rate_for(workers: int) -> float:
    """Bits per second at which plain data parallelism should keep what was published: a first guess."""
    gradient = 4 * sum(math.prod(shape) + shape[0] for shape, _ in layers(SHRINK))
    exposed = STEP_S * (1 / PUBLISHED[workers] - 1)
    return 8 * all_reduce_bytes(gradient, workers) / (exposed + STEP_S * BACKWARD)


def replay(workers: int) -> dict[str, Any]:
    rate = rate_for(workers)
    with lab(workers, bandwidth=f"{rate / 1e6:.1f}mbit", prefix="replay") as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            place = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            place |= {"MASTER_ADDR": hosts[0].address, "MASTER_PORT": 29511, "GLOO_SOCKET_IFNAME": "eth0"}
            variables = {key: str(value) for key, value in place.items()} | {
                "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"
            }  # fmt: skip
            processes.append(
                host.start(
                    [sys.executable, str(Path(__file__).resolve()), "--work"],
                    env=variables,
                    stdin=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                )
            )
        told: dict[str, Any] = {}
        leader = processes[0]
        assert leader.stdout is not None, "a pipe"
        assert leader.stdin is not None, "a pipe"
        for line in leader.stdout:
            news = json.loads(line)
            told[news["case"]] = news
            print(workers, line.strip(), flush=True)
            if news["case"] == "calibration":
                # What was exposed beyond the plan is not the cable's alone; correct the whole exchange for it.
                planned = STEP_S / PUBLISHED[workers]
                hidden = STEP_S * BACKWARD
                rate *= (news["step_s"] - STEP_S + hidden) / (planned - STEP_S + hidden)
                for host in hosts:
                    host.slow(f"{rate / 1e6:.1f}mbit")
                leader.stdin.write("go\n")
                leader.stdin.flush()
        for process in processes:
            process.wait(timeout=60)
    return {"rate": rate, "cases": told}


def limit_s(sent: float, rate: float) -> float:
    """The step that bytes over bandwidth and compute allow."""
    return STEP_S + max(0.0, 8 * sent / rate - STEP_S * BACKWARD)


def page(found: dict[int, dict[str, Any]]) -> str:
    lines = ["# A published study, replayed", "", __doc__.split("\n\n", 2)[2].strip(), ""]
    lines += [describe(Path(sys.executable), ["torch", "numpy"]), ""]
    lines += [
        f"A step of one node takes {STEP_S} s here, {BACKWARD:.0%} of it backward. Efficiency is that over the time of "
        "a step; one run, the mean over 3 steps (8 where workers meet now and then). The limit is compute plus what "
        "bytes over bandwidth take longer than the backward pass.",
        "",
    ]
    for workers, answer in sorted(found.items()):
        rate = answer["rate"]
        lines += [
            f"## {workers} nodes, published {PUBLISHED[workers]}, cable {rate / 1e6:.1f} Mbit/s",
            "",
            "| way | efficiency | bytes per step and worker | fewer than ddp | exposed s | step s | of its limit |",
            "|---|---|---|---|---|---|---|",
        ]
        plain = answer["cases"]["ddp"]["bytes"]
        for name, case in answer["cases"].items():
            if name == "calibration":
                continue
            lines.append(
                f"| {name} | {STEP_S / case['step_s']:.2f} | {case['bytes'] / 1e6:.2f} MB | "
                f"{plain / case['bytes']:.1f}-fold | {case['exposed_s']:.2f} | {case['step_s']:.2f} | "
                f"{case['step_s'] / limit_s(case['bytes'], rate):.2f}-fold |"
            )
        lines += ["", *(f"> {note}" for note in answer["cases"]["ddp auto"]["notes"]), ""]
    real = [nn.Parameter(torch.empty(shape)) for shape, _ in layers(1)]
    whole = 4 * sum(parameter.numel() for parameter in real)
    few = {name: _bytes_of(name, real) for name in ("int8", "powersgd")}
    lines += [
        f"At VGG19's real shapes a gradient is {whole / 1e6:.0f} MB: int8 sends "
        f"{few['int8']:.2f}-fold fewer bytes and powersgd of rank 4 "
        f"{few['powersgd']:.0f}-fold, where the smaller matrices here gain less.",
        "",
    ]
    return "\n".join(lines)


def _bytes_of(name: str, parameters: list[nn.Parameter]) -> float:
    if name == "powersgd":
        thin = sum(
            4 * (one.shape[0] + one.shape[1:].numel()) if one.numel() >= 1024 else one.numel() for one in parameters
        )
        return sum(one.numel() for one in parameters) / thin
    few = parameters[:6]
    return 2 * 4 * sum(one.numel() for one in few) / 2 / cost_of(
        name, mh.DDP(), few, rank=0, size=2, bucket_bytes=25_000_000
    ).bytes_sent  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", default="8,4,2")
    parser.add_argument("--work", action="store_true", help="be a worker; the benchmark starts them itself")
    asked = parser.parse_args()
    if asked.work:
        work()
    found = {}
    for workers in map(int, asked.nodes.split(",")):
        found[workers] = replay(workers)
        RESULTS.write_text(page(found))


if __name__ == "__main__":
    main()
