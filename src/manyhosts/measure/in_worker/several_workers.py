"""Several workers of one machine at once: what each takes then, and what the way between them carries."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from manyhosts import device
from manyhosts.communication import volume
from manyhosts.communication.compression.feedback import CHUNK_BYTES
from manyhosts.communication.gathering import gather_words
from manyhosts.communication.link import Link
from manyhosts.communication.probe import probe
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.measure import lines
from manyhosts.measure.in_worker import machine, real_steps
from manyhosts.measure.in_worker.batches import Batches
from manyhosts.measure.in_worker.passes import Passes, spread
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState

_FEWEST = 3
SETTLE = 5
"""Steps of the loop that do not count: loaders begin with nothing, the loop looks at its first steps, and memory is got
that passes of other sizes had given back."""
_MOST, _FULL_S = 25, 2.5
"""The most steps that do count, and the seconds that they may take."""
_SHARE, _PROBE_S = 0.1, 0.1
"""Shares of the time, for passes and for the network; real steps have what is left."""
_LINGER_S = 0.3
_OWNERS_FEWEST, _OWNERS_MOST = 2, 5
_SMALL_SUMS, _SMALL_COUNT = 20, 1 << 12
_LARGE_SUMS, _LARGE_COUNT = 3, 1 << 18
"""How many sums show what they take of a core, and how many numbers are in each. A small one has some for every worker:
a worker that has no part of a sum is sent no message."""


def measure(components: Components, settings: Settings, state: RunState, seconds: float) -> dict[str, Any]:
    """Compute at the same time as the others, then talk to them, then do both. Returns what rank 0 reports."""
    world = components.world
    batches = Batches(components, state)
    grows = settings.batch_size is None
    share = batches.most if grows else -(-components.batches.size // (settings.virtual_workers or world.size))
    samples = min(share, settings.micro_batch_size or share, batches.most)
    if not batches.can_be(samples):
        samples = batches.most
    passes = Passes(components, batches)
    if world.is_rank_0:
        lines.send("measures", what=f"{world.size} workers at once")
    begin = time.perf_counter()
    passes.once(samples)
    world.barrier()
    until = time.perf_counter() + _SHARE * seconds
    times: list[float] = []
    while len(times) < _FEWEST or time.perf_counter() < until:
        times.append(sum(passes.once(samples)))
    network = probe(world, seconds=_PROBE_S * seconds)
    payload = sum(each.nbytes for each in components.trained.parameters()) // 2
    owners = owners_bandwidth(world, payload, seconds=_PROBE_S * seconds)
    pass_s = world.agree(statistics.median(times))
    own = json.dumps([statistics.median(times), spread(times), machine.name(), *processor_seconds(world)])
    left = world.agree(begin + seconds - time.perf_counter())
    steps = real_steps.measure(passes, settings, samples=samples, pass_s=pass_s, network=network, seconds=left)
    all_times, spreads, names, of_message, of_byte = zip(*map(json.loads, gather_words(world, own)), strict=True)
    return {
        "workers": world.size,
        "samples": samples,
        "pass_s": statistics.mean(all_times),
        "pass_spread_s": math.hypot(statistics.mean(spreads), statistics.pstdev(all_times)),
        "latency_s": network.latency_s / (2 * (world.size - 1)),  # messages, one after another in a ring
        "bandwidth": network.bandwidth,
        "owners_bandwidth": owners,
        "spread": network.spread,
        "processor_s_per_message": statistics.mean(of_message),
        "processor_s_per_byte": statistics.mean(of_byte),
        "of_one_machine": max(Counter(names).values()),
        "steps": steps,
        "full_step_s": 0.0,
    }


class FullSteps:
    """The steps that the loop takes after that, with everything in them: loaders share the cores with them."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.ends: list[float] = []
        self.count = SETTLE + 1
        """After which it is known how many there is time for."""

    def are_over(self) -> bool:
        """Note that a step has ended. Whether it was the last one; all workers are told the same."""
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.count == SETTLE + 1:
            usual = self.world.agree((self.ends[-1] - self.ends[1]) / (len(self.ends) - 2))
            self.count += max(_FEWEST, min(_MOST, math.floor(_FULL_S / max(usual, 1e-6))))
        return len(self.ends) >= self.count

    @property
    def seconds(self) -> float:
        """Of one of them: the mean, for some wait for a batch, and the next ones find several."""
        settled = self.ends[SETTLE:]
        return (settled[-1] - settled[0]) / (len(settled) - 1)


def report(world: World, said: Mapping[str, Any]) -> None:
    """Have rank 0 report what was found, and stay until all have what they wait for."""
    if world.is_rank_0:
        lines.send("together", **said)
    world.barrier()
    time.sleep(_LINGER_S)  # who ends first would break what the others still read


def processor_seconds(world: World) -> tuple[float, float]:
    """That this worker's cores are busy for one message of a sum, and for each byte that it sends in a large one."""
    messages = 2 * (world.size - 1)
    small = _busy(world, _SMALL_COUNT, _SMALL_SUMS)
    large = _busy(world, _LARGE_COUNT, _LARGE_SUMS)
    sent = volume.all_reduce_bytes(4 * (_LARGE_COUNT - _SMALL_COUNT), world.size)
    return small / messages, max(0.0, large - small) / sent


def owners_bandwidth(world: World, payload: int, *, seconds: float) -> float:
    """Bytes that each worker sends in a second where `payload` is summed by the owners of its parts, as much of it as
    goes at once: the middle one of a few times, as far as `seconds` allow, and the same on every worker.
    """
    link = Link(world.rank, world.size, world.process_group)
    each = max(1, min(payload, CHUNK_BYTES // 2) // world.size)
    parts = torch.zeros(world.size, each, dtype=torch.uint8, device=world.device)
    times: list[float] = []
    count = _OWNERS_FEWEST
    while len(times) < count:
        world.barrier()
        begin = time.perf_counter()
        link.all_gather(link.all_to_all(parts)[0])
        device.wait_for(world.device)
        times.append(time.perf_counter() - begin)
        if len(times) == 1:
            rounds = math.floor(seconds / max(world.agree(times[0]), 1e-9))
            count = max(_OWNERS_FEWEST, min(_OWNERS_MOST, rounds))
    return link.bytes_sent / count / max(world.agree(statistics.median(times)), 1e-9)


def _busy(world: World, count: int, times: int) -> float:
    """Seconds of all cores in a sum of `count` numbers: the median, for a few small ones take three times as long."""
    tensor = torch.zeros(count, device=world.device)
    world.all_reduce(tensor)
    found = []
    for _ in range(times):
        begin = time.process_time()
        world.all_reduce(tensor)
        found.append(time.process_time() - begin)
    return statistics.median(found)
