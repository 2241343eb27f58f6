"""How long the same amount takes between every two hosts of a run, over the connections that the run uses.

Pairs that share no host are measured at the same time, the others one round after another.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from manyhosts.cluster.rounds import rounds
from manyhosts.communication.world import World

_BYTES = 256 << 10
_TIMES = 4


def can_measure(world: World) -> bool:
    """Whether `measure` works on this backend: GPUs would make connections for it that nothing else needs."""
    return world.backend == "gloo" and world.device.type == "cpu"


def measure(world: World, hosts: Sequence[str]) -> dict[tuple[str, str], float]:
    """Seconds in which every two hosts send each other 256 KiB at once; the same answer on every worker.

    All workers call it together. `hosts` has the host of each by rank; the first worker of each host measures.
    """
    names = list(dict.fromkeys(hosts))
    ranks = [hosts.index(name) for name in names]
    own = torch.zeros(len(names), dtype=torch.float64)
    sent, exposed = world.bytes_sent, world.exposed_s
    for pairs in rounds(len(names)):
        for one, other in pairs:
            if world.rank == ranks[one]:
                own[other] = _exchange(world, ranks[other])
            elif world.rank == ranks[other]:
                own[one] = _exchange(world, ranks[one])
        world.barrier()  # what is still under way would slow the next round down
    table = world.stack(own)
    world.bytes_sent, world.exposed_s = sent, exposed  # nothing of a step
    return {
        (names[one], names[other]): float(max(table[ranks[one], other], table[ranks[other], one]))
        for pairs in rounds(len(names))
        for one, other in pairs
    }


def _exchange(world: World, rank: int) -> float:
    """Seconds in which both send each other the same, at once: the shorter of the last two of several times.

    The first ones are not counted: switches and shapers let a burst pass.
    """
    mine, theirs = torch.zeros(_BYTES, dtype=torch.uint8), torch.empty(_BYTES, dtype=torch.uint8)
    taken = []
    for _ in range(_TIMES):
        begin = time.perf_counter()
        sending, receiving = world.start_send(mine, rank), world.start_receive(theirs, rank)
        world.wait(sending)
        world.wait(receiving)
        taken.append(time.perf_counter() - begin)
    return min(taken[-2:])
