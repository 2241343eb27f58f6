"""Workers that train together on machines of one kind, and what each collective takes them.

Every collective is `rounds * latency + bytes / bandwidth`, the model of Hockney 1994, with the bytes that cross the
narrowest place: a machine's connection in one direction, or the memory that the workers of one machine share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from manyhosts.planner.measured import Network, Tried


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """`nodes` machines with `workers_per_node` workers on each."""

    nodes: int = 1
    workers_per_node: int = 1
    between: Network
    """From one machine to another."""
    within: Network
    """From one worker to another of the same machine."""
    speed: float = 1.0
    """Of one worker's device, alone, as a multiple of the measured one."""
    cores: int | None = None
    """Of each machine; None: as the measured one."""
    hosts_per_machine: int = 1
    """Of the `nodes`, how many are hosts of one and the same machine, as those of a lab are, and share its cores."""

    @property
    def workers(self) -> int:
        """On all machines together."""
        return self.nodes * self.workers_per_node

    @property
    def per_machine(self) -> int:
        """Workers that share the cores of one machine."""
        return self.workers_per_node * min(self.nodes, self.hosts_per_machine)

    def processor_seconds(self, sent: float, messages: float) -> float:
        """That sending `sent` bytes in `messages`, and taking in as much, keeps a worker's cores busy."""
        network = self.between if self.nodes > 1 else self.within
        return messages * network.processor_s_per_message + sent * network.processor_s_per_byte

    def message(self, payload: float) -> float:
        """Seconds until `payload` bytes have come from one worker to the next one."""
        network = self.between if self.nodes > 1 else self.within
        return network.latency_s + payload / network.bytes_per_second

    def all_reduce(self, payload: float) -> float:
        """Seconds to sum `payload` bytes over all workers, in a ring: `2 (W-1) (latency + payload / W / bandwidth)`.

        A ring passes each machine's connection once, however many workers the machine has.
        """
        return self._ring(2 * (self.workers - 1), payload / max(1, self.workers))

    def through_owners(self, payload: float) -> float:
        """The same sum where every worker owns a part: it is sent the others' of it at once, and sends all the sum."""
        between, within = (
            replace(network, bytes_per_second=network.owners_bytes_per_second or network.bytes_per_second)
            for network in (self.between, self.within)
        )
        return replace(self, between=between, within=within).all_reduce(payload)

    def all_gather(self, payload: float) -> float:
        """Seconds until each worker's `payload` bytes have reached all others, in a ring."""
        return self._ring(self.workers - 1, payload)

    def all_to_all(self, payload: float) -> float:
        """Seconds until each worker has sent every other one its part, a W-th, of `payload` bytes."""
        if self.workers == 1:
            return 0.0
        part, own = payload / self.workers, self.workers_per_node
        leaves = own * (self.workers - own) * part
        stays = own * (own - 1) * part
        return self.latency_s + max(
            leaves / self.between.bytes_per_second if self.nodes > 1 else 0.0, stays / self.within.bytes_per_second
        )

    @property
    def latency_s(self) -> float:
        """Of one message over the longest way that there is in the group."""
        latencies = [self.between.latency_s] * (self.nodes > 1) + [self.within.latency_s] * (self.workers_per_node > 1)
        return max(latencies, default=0.0)

    def inside(self) -> Group:
        """The workers of one machine."""
        return self.shared_by(1, self.workers_per_node)

    def across(self) -> Group:
        """One worker of each machine."""
        return self.shared_by(self.nodes, 1)

    def shared_by(self, nodes: int, workers_per_node: int) -> Group:
        """Some of its machines, and of the workers on each."""
        return Group(
            nodes=nodes, workers_per_node=workers_per_node, between=self.between, within=self.within,
            speed=self.speed, cores=self.cores, hosts_per_machine=self.hosts_per_machine,
        )  # fmt: skip

    def slower(self, times: float) -> Group:
        """The same, on networks on which everything takes so many times as long."""
        return replace(self, between=self.between.slower(times), within=self.within.slower(times))

    def _ring(self, rounds: int, passed_on: float) -> float:
        """Seconds of `rounds` in each of which every worker passes `passed_on` bytes on to the next one."""
        seconds = passed_on / self.between.bytes_per_second if self.nodes > 1 else 0.0
        if self.workers_per_node > 1:
            sends_inside = self.workers_per_node - (self.nodes > 1)
            seconds = max(seconds, sends_inside * passed_on / self.within.bytes_per_second)
        return rounds * (self.latency_s + seconds)


def nearest(tried: Sequence[Tried], group: Group) -> Tried | None:
    """The number of workers that was tried, on several machines or on one as those of `group` are, and is nearest."""
    alike = [each for each in tried if (each.nodes > 1) == (group.nodes > 1)]
    return min(alike, key=lambda each: abs(math.log(each.workers / group.workers)), default=None)


def on_tried_networks(tried: Sequence[Tried], group: Group) -> Group:
    """The same workers, on networks as they were seen to be with about so many: a switch and cores are shared."""
    within, between = nearest(tried, group.inside()), nearest(tried, group.across())
    return replace(
        group,
        within=group.within if within is None else within.network,
        between=group.between if between is None or group.nodes == 1 else between.network,
    )
