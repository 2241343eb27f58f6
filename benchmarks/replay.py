"""Replays a published study of VGG19 over Ethernet: what would each way of sending have kept of the ideal speed?

    python benchmarks/replay.py                  # needs root on Linux: makes hosts in network namespaces

The study (one GPU per node, batch 32 per node) kept 0.81, 0.65 and 0.46 of the ideal speed on 2, 4 and 8 nodes. Here
VGG19 with an eighth of the width of every layer (1/64 of the parameters, and of the buckets and chunks) trains on that
many hosts, on two small pictures each: its gradients are real ones. After what it computes each layer sleeps, for its
share of a step of `STEP_S` seconds by the operations of the real layer on a real picture. The hosts share two cores,
which the study's did not: the slower the motion, the less that counts. The cable of every host is slowed until plain
data parallelism keeps what was published; all other ways then meet the same cable. Writes `replay.md`.
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
from torch.nn import functional

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.compression import feedback
from manyhosts.communication.compression.choose import cost_of
from manyhosts.communication.volume import all_reduce_bytes
from manyhosts.communication.world import World
from manyhosts.lab import lab
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.diloco import OuterSteps
from manyhosts.strategies.local_stepping import LocalSteps
from manyhosts.strategies.strategy import Piece, Strategy
from manyhosts.strategies.uncut_model import SingleProcess

PUBLISHED = {2: 0.81, 4: 0.65, 8: 0.46}
STEP_S = 4.8
"""What the layers of one node sleep in a step, forward and backward."""
REAL_STEP_S = 0.4
"""About what the study's nodes took, which it does not say."""
BACKWARD = 2 / 3
SHRINK = 8
CONVOLUTIONS = [3, 64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0]
LINEAR = [25088, 4096, 2048, 20]
BUCKET_MB = 25 / SHRINK**2
CASES: dict[str, tuple[Any, int]] = {
    "one node": (None, 3),
    "ddp": (mh.DDP(bucket_mb=BUCKET_MB), 3),
    "ddp bf16": (mh.DDP(bucket_mb=BUCKET_MB, compression="bf16"), 3),
    "ddp int8": (mh.DDP(bucket_mb=BUCKET_MB, compression="int8"), 3),
    "ddp powersgd": (mh.DDP(bucket_mb=BUCKET_MB, compression="powersgd"), 3),
    "local-sgd, every 4": (mh.LocalSGD(sync_every=4), 8),
    "diloco, every 8": (mh.DiLoCo(sync_every=8, fragments=4), 8),
    "ddp auto": (mh.DDP(bucket_mb=BUCKET_MB, compression="auto"), 3),
}
"""Each with the steps that are timed: whole rounds, where workers meet now and then. `one node`: every host by itself,
all at once, which is the ideal speed."""
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


class Held(torch.autograd.Function):
    """Lets the gradient of a layer's output pass after a while: so its weight's comes as late as the real one's."""

    @staticmethod
    def forward(context: Any, flow: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        return flow.view_as(flow)

    @staticmethod
    def backward(context: Any, flow: Tensor) -> tuple[Tensor, None]:
        time.sleep(context.seconds)
        return flow, None


class Paced(nn.Module):
    """A layer that takes its share of a step's time, beside what it computes."""

    def __init__(self, layer: nn.Module, share: float) -> None:
        super().__init__()
        self.layer = layer
        self.forward_s, self.backward_s = share * STEP_S * (1 - BACKWARD), share * STEP_S * BACKWARD

    def forward(self, flow: Tensor) -> Tensor:
        time.sleep(self.forward_s)
        computed: torch.Tensor = Held.apply(self.layer(flow), self.backward_s)  # type: ignore[no-untyped-call]
        return computed


def vgg19() -> nn.Sequential:
    """Its convolutions and linear layers, narrower; pictures may be small, as the pooling before the latter adapts."""
    found = list(layers(SHRINK))
    total = sum(operations for _, operations in found)
    parts: list[nn.Module] = []
    paced = iter(found)
    for channels in CONVOLUTIONS[1:]:
        if channels == 0:
            parts.append(nn.MaxPool2d(2))
            continue
        shape, operations = next(paced)
        parts += [Paced(nn.Conv2d(shape[1], shape[0], 3, padding=1), operations / total), nn.ReLU()]
    parts += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    for shape, operations in paced:
        parts += [Paced(nn.Linear(shape[1], shape[0]), operations / total), nn.ReLU()]
    return nn.Sequential(*parts[:-1])


def make(config: Any, world: World) -> Strategy:
    if config is None:
        return SingleProcess(world)
    if isinstance(config, mh.DDP):
        return DataParallel(config, world)
    return LocalSteps(config, world) if isinstance(config, mh.LocalSGD) else OuterSteps(config, world)


def one_case(config: Any, steps: int, world: World) -> dict[str, Any]:
    strategy = make(config, world)
    torch.manual_seed(0)
    model = strategy.place(vgg19())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    torch.manual_seed(world.rank)
    pictures, kinds = torch.randn(2, 3, 32, 32), torch.randint(LINEAR[-1], (2,))
    piece = Piece(lambda: (pictures, kinds), 2, 1 / world.size, (0, 1))

    def compute(net: nn.Module, part: Piece) -> dict[str, Tensor]:
        return {"loss": functional.cross_entropy(net(part.batch[0]), part.batch[1])}

    def step() -> None:
        strategy.forward_backward(model, [piece], compute, lambda loss: loss, [0.0])
        strategy.update(model, optimizer)
        strategy.exchange(model)

    auto = getattr(config, "compression", "") == "auto"
    for _ in range(7 if auto else 1 if config is None or isinstance(config, mh.DDP) else 0):
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
    feedback.CHUNK_BYTES //= SHRINK**2  # as small as everything else
    world = World(Place.from_environment())
    for name in ["calibration", *CASES]:
        config, steps = CASES["ddp"] if name == "calibration" else CASES[name]
        found = one_case(config, steps, world)
        if world.is_rank_0:
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
    rate, load = rate_for(workers), os.getloadavg()[0]
    with lab(workers, bandwidth=f"{rate / 1e6:.1f}mbit", prefix="replay") as hosts:
        processes = []
        for rank, host in enumerate(hosts):
            place: dict[str, Any] = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
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
        reported: dict[str, Any] = {}
        leader = processes[0]
        assert leader.stdout is not None, "a pipe"
        assert leader.stdin is not None, "a pipe"
        for line in leader.stdout:
            news = json.loads(line)
            reported[news["case"]] = news
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
    return {"rate": rate, "cases": reported, "load": load}


def limit_s(alone: float, sent: float, rate: float) -> float:
    """The step that bytes over bandwidth and compute allow, where one node by itself takes `alone`."""
    return alone + max(0.0, 8 * sent / rate - STEP_S * BACKWARD)


def page(found: dict[int, dict[str, Any]]) -> str:
    lines = ["# A published study, replayed", "", __doc__.split("\n\n", 2)[2].strip(), ""]
    lines += [describe(Path(sys.executable), ["torch", "numpy"]), ""]
    lines += [
        f"The layers of a node sleep {STEP_S} s in a step, {BACKWARD:.0%} of it backward. Efficiency is the step of a "
        "node by itself, all hosts at once, over that of the nodes together; one run, the mean over 3 steps (8 where "
        "workers meet now and then). The limit is the former plus what bytes over bandwidth take longer than the "
        f"backward pass. Bytes are 1/{SHRINK**2} of the study's, so its cable was {SHRINK**2} times as fast as here, "
        f"times {STEP_S / REAL_STEP_S:.0f} for the slow motion if a step took it {REAL_STEP_S} s.",
        "",
    ]
    for workers, answer in sorted(found.items()):
        rate = answer["rate"]
        lines += [
            f"## {workers} nodes, published {PUBLISHED[workers]}, cable {rate / 1e6:.1f} Mbit/s",
            "",
            f"Load of the machine before: {answer['load']:.2f} on {os.cpu_count()} cores.",
            "",
            "| way | efficiency | bytes per step and worker | fewer than ddp | exposed s | step s | of its limit |",
            "|---|---|---|---|---|---|---|",
        ]
        plain, alone = answer["cases"]["ddp"]["bytes"], answer["cases"]["one node"]["step_s"]
        lines.append(f"| one node | 1 | 0 | | 0 | {alone:.2f} | |")
        for name, case in answer["cases"].items():
            if name in ("calibration", "one node"):
                continue
            lines.append(
                f"| {name} | {alone / case['step_s']:.2f} | {case['bytes'] / 1e6:.2f} MB | "
                f"{plain / case['bytes']:.1f}-fold | {case['exposed_s']:.2f} | {case['step_s']:.2f} | "
                f"{case['step_s'] / limit_s(alone, case['bytes'], rate):.2f}-fold |"
            )
        lines += ["", *(f"> {note}" for note in answer["cases"]["ddp auto"]["notes"]), ""]
    real = [nn.Parameter(torch.empty(shape)) for shape, _ in layers(1)]
    whole = 4 * sum(parameter.numel() for parameter in real)
    few = {name: _bytes_of(name, real) for name in ("int8", "powersgd")}
    lines += [
        f"At VGG19's real shapes a gradient is {whole / 1e6:.0f} MB: int8 sends "
        f"{few['int8']:.2f}-fold fewer bytes and powersgd of rank {mh.DDP().powersgd_rank} "
        f"{few['powersgd']:.0f}-fold, where the smaller matrices here gain less.",
        "",
    ]
    return "\n".join(lines)


def _bytes_of(name: str, parameters: list[nn.Parameter]) -> float:
    if name == "powersgd":
        thin = sum(
            mh.DDP().powersgd_rank * (one.shape[0] + one.shape[1:].numel()) if one.numel() >= 1024 else one.numel()
            for one in parameters
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
