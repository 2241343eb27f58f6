"""Which compression a network and a model deserve: the least lossy one within 5 % of the fastest.

Each way is rehearsed on this worker, with chunks of the model's own shapes and a link that sends nothing but counts:
so its arithmetic is timed here, that of keeping what it drops included, and its bytes are those that it would send.
The time of a step follows:

    compute + arithmetic of the compression + what the network takes longer than the backward pass, which hides it
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from manyhosts import device
from manyhosts.communication import volume
from manyhosts.communication.compression.exchange import Chunk, Compression, worth_it
from manyhosts.communication.compression.feedback import chunks_of, exchange
from manyhosts.communication.compression.table import make_compression
from manyhosts.communication.link import Link
from manyhosts.communication.nodes import find_levels
from manyhosts.communication.packing import packed
from manyhosts.communication.probe import Network, probe
from manyhosts.communication.world import World
from manyhosts.config.strategies import DDP

BY_LOSS = ("none", "fp16", "bf16", "int8", "powersgd", "topk")
"""From the way that loses nothing to the one that loses most in a step."""
TOLERANCE = 1.05
_SAMPLE = 8_000_000
"""Elements that are rehearsed of a larger model; its time is reckoned from theirs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What exchanging one gradient takes."""

    arithmetic_s: float
    bytes_sent: float
    exchanges: int
    processor_s: float = 0.0
    """Of all cores together, for the arithmetic."""
    through_owners: bool = False
    """Whether parts are sent to the workers that own them."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The way that was taken, and the seconds of a step that each would give."""

    name: str
    step_seconds: Mapping[str, float]
    network: Network

    def why(self) -> str:
        """In one line."""
        others = ", ".join(f"{name} {seconds:.3g}" for name, seconds in self.step_seconds.items())
        return (
            f"compression: {self.name}, the least lossy within 5 % of the fastest on this network ({self.network}); "
            f"seconds a step would take: {others}"
        )


class DryLink(Link):
    """A link that sends nothing: each worker is taken to hold what this one does.

    Counted is what the cable of a node carries, as far as it is more than what one worker sends: a ring passes each
    cable once, however many workers a node has, but what goes to every other worker directly leaves it for each.
    """

    exchanges = 0
    through_owners = False

    def __init__(self, rank: int, size: int, *, on_cable: int = 1, each: int = 1) -> None:
        """`on_cable`: links that share a node's cable; `each`: workers of this link on a node."""
        super().__init__(rank, size)
        self.on_cable, self.each = on_cable, each

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Leave `tensor` as it is."""
        self._count(volume.all_reduce_bytes(tensor.nbytes, self.size))
        return tensor

    def all_gather(self, tensor: Tensor) -> Tensor:
        """This worker's tensor, as often as there are workers."""
        self._count(volume.all_gather_bytes(tensor.nbytes, self.size))
        return tensor.expand(self.size, *tensor.shape).contiguous()

    def all_to_all(self, parts: Tensor) -> Tensor:
        """The parts as they are."""
        self.through_owners = True
        sent = volume.all_to_all_bytes(parts.nbytes, self.size)
        # What stays on the node does not count; what leaves it does for each of its workers.
        self._count(sent * self.each * (self.size - self.each) // max(1, self.size - 1))
        return parts

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        """Leave `tensor` as it is."""
        self._count(volume.broadcast_bytes(tensor.nbytes, self.size))
        return tensor

    def _count(self, sent: int) -> None:
        self.bytes_sent += self.on_cable * sent
        self.exchanges += 1


def dry_link(rank: int, size: int, each: int) -> DryLink:
    """For `size` workers, `each` on a node: with the two levels of `communication.nodes`, where there are such."""
    if each == 1 or size == each:
        return DryLink(rank, size)
    link = DryLink(rank, size, each=each)
    link.inside, link.across = DryLink(0, each), DryLink(rank // each, size // each, on_cable=each)
    return link


@torch.no_grad()
def cost_of(
    name: str,
    config: DDP,
    parameters: Sequence[nn.Parameter],
    *,
    rank: int,
    size: int,
    bucket_bytes: int,
    each: int = 1,
) -> Cost:
    """Rehearse one way on this worker. `each`: workers on a node, the same number on every one of them."""
    compression = make_compression(replace(config, compression=name))
    groups = packed(parameters, reversed(range(len(parameters))), bucket_bytes=bucket_bytes)
    if compression is None:
        sent = sum(volume.all_reduce_bytes(parameter.nbytes, size) for parameter in parameters)
        return Cost(0.0, sent, len(groups))
    link = dry_link(rank, size, each)
    elements = exact = 0
    chunks: list[Chunk] = []
    rehearsed = 0
    for group in groups:
        large = [parameter for parameter in group if worth_it(compression, parameter, above=config.compress_above)]
        exact += sum(parameter.nbytes for parameter in group) - sum(one.nbytes for one in large)
        elements += sum(parameter.numel() for parameter in large)
        if not large or rehearsed >= _SAMPLE:
            continue
        shapes = [parameter.shape for parameter in large]
        values = torch.randn(sum(shape.numel() for shape in shapes), device=large[0].device)
        for chunk, _ in chunks_of(compression, values, shapes, range(len(shapes))):
            if rehearsed < _SAMPLE:
                chunks.append(chunk)
                rehearsed += chunk.values.numel()
    seconds, processor = _exchanged(compression, chunks, link, feedback=config.error_feedback)
    scale = elements / rehearsed if rehearsed else 0.0
    return Cost(
        arithmetic_s=seconds * scale,
        bytes_sent=link.bytes_sent * scale + volume.all_reduce_bytes(exact, size),
        exchanges=math.ceil((link.exchanges + getattr(link.across, "exchanges", 0)) * scale) + len(groups),
        processor_s=processor * scale,
        through_owners=link.through_owners,
    )


def _exchanged(compression: Compression, chunks: Sequence[Chunk], link: Link, *, feedback: bool) -> tuple[float, float]:
    """Seconds, and of these seconds of all cores, to exchange all `chunks`.

    All their memory is made before: as in a step, none of it is in a cache because it was written a moment ago.
    """
    kept = [torch.ones_like(chunk.values) if feedback else None for chunk in chunks]
    dropped = [torch.ones_like(chunk.values) for chunk in chunks]
    for place in (places := {chunk.values.device for chunk in chunks}):
        device.wait_for(place)
    begin, busy = time.perf_counter(), time.process_time()
    for chunk, residual, together in zip(chunks, kept, dropped, strict=True):
        exchange(compression, chunk, link, residual, together=together)
    for place in places:
        device.wait_for(place)
    return time.perf_counter() - begin, time.process_time() - busy


def choose(costs: Mapping[str, Cost], network: Network, *, compute_s: float, hidden_s: float) -> Choice:
    """The least lossy way within 5 % of the fastest.

    `compute_s` is a step without any exchange; `hidden_s` of it run while gradients are already on their way.
    """
    seconds = {
        name: compute_s + cost.arithmetic_s + max(0.0, network.seconds(cost.bytes_sent, cost.exchanges) - hidden_s)
        for name, cost in costs.items()
    }
    limit = TOLERANCE * min(seconds.values())
    return Choice(next(name for name in BY_LOSS if name in seconds and seconds[name] <= limit), seconds, network)


TIMED_STEPS = 4
"""Steps that are timed; before them one that warms everything up and is not."""


class Stopwatch:
    """Times what this worker computes in a step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.times: list[tuple[float, float]] = []
        """Of each step: seconds in all, and those of them in which gradients were on their way."""

    @property
    def enough(self) -> bool:
        """Whether the steps that were timed suffice."""
        return len(self.times) > TIMED_STEPS

    def begin(self) -> None:
        """A step begins."""
        self._began = self._now()

    def backward(self) -> None:
        """The last backward pass begins."""
        self._backward = self._now()

    def computed(self) -> None:
        """Everything is computed; waiting begins."""
        now = self._now()
        self.times.append((now - self._began, now - self._backward))

    def _now(self) -> float:
        device.wait_for(self.world.device)  # in these few steps only
        return time.perf_counter()

    def decide(self, config: DDP, parameters: Sequence[nn.Parameter], *, bucket_bytes: int) -> Choice:
        """The compression to continue with, the same on every worker. All workers call it together."""
        world = self.world
        network = probe(world)
        timed = self.times[1:]
        compute_s = world.agree(statistics.median(total for total, _ in timed))
        hidden_s = world.agree(statistics.median(hidden for _, hidden in timed))
        levels = find_levels(world)
        each = 1 if levels is None else len(levels.nodes[0])
        costs = {
            name: cost_of(
                name, config, parameters, rank=world.rank, size=world.size, bucket_bytes=bucket_bytes, each=each
            )
            for name in BY_LOSS
        }
        choice = choose(costs, network, compute_s=compute_s, hidden_s=hidden_s)
        return replace(choice, name=BY_LOSS[int(world.agree(BY_LOSS.index(choice.name)))])
