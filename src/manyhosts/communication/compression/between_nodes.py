"""A compression between nodes only: inside a node every bit is exchanged, over a wire that is short.

The workers of a node share a chunk out among themselves: each adds up one part of it, exactly, and exchanges that sum
with those that own the same part on the other nodes, compressed. Then the node puts the parts together again. So what
goes between nodes is sent once for a node and not once for each worker, and is rounded once for a node.

What the compression drops is dropped by the owner of a part, who alone keeps it; of all other values of a worker
everything has arrived. A compression that must see full tensors has one worker of the node exchange the entire chunk,
each in its turn.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor
from torch.nn import functional

from manyhosts.communication.compression.exchange import Chunk, Compression, judge_of, takes_full_tensors
from manyhosts.communication.link import Link


class BetweenNodes:
    """`compression`, where there are several nodes of several workers each; elsewhere the same as it is."""

    def __init__(self, compression: Compression) -> None:
        self.compression = compression
        self.full_tensors = takes_full_tensors(compression)
        self.worth_it = judge_of(compression)

    def __call__(self, chunk: Chunk, link: Link) -> Tensor | None:
        """See `Compression`."""
        if link.inside is None or link.across is None:
            return self.compression(chunk, link)
        before = link.across.bytes_sent
        exchange = self._by_one if self.full_tensors else self._by_parts
        sent = exchange(chunk, link.inside, link.across)
        link.bytes_sent += link.across.bytes_sent - before
        return sent

    def _by_parts(self, chunk: Chunk, inside: Link, across: Link) -> Tensor:
        values = chunk.values
        count = values.numel()
        part = -(-count // inside.size)
        own = functional.pad(values, (0, part * inside.size - count)).view(inside.size, part)
        of_node = inside.all_to_all(own).sum(0)
        exchanged = of_node.clone()
        sent = self.compression(Chunk(exchanged, [exchanged.shape], chunk.keys[:1]), across)
        arrived = own.clone()
        if sent is not None:
            arrived[inside.rank] -= of_node - sent  # what the node drops is its owner's to keep
        values.copy_(inside.all_gather(exchanged).view(-1)[:count])
        return arrived.view(-1)[:count]

    def _by_one(self, chunk: Chunk, inside: Link, across: Link) -> Tensor:
        owner = chunk.keys[0] % inside.size
        arrived = chunk.values.clone()
        inside.all_reduce(chunk.values)
        if inside.rank == owner:
            of_node = chunk.values.clone()
            sent = self.compression(replace(chunk), across)
            if sent is not None:
                arrived -= of_node - sent
        inside.broadcast(chunk.values, owner)
        return arrived


def between_nodes(compression: Compression) -> Compression:
    """`compression` between nodes only.

    One that remembers something from step to step, the same on every worker (it has a `state_dict`), stays between all
    workers. PowerSGD is such a one, and loses nothing by it: it is linear, so that the thin matrices of a node's
    workers add up to those of the node's sum, and a ring carries them between two nodes once.
    """
    return compression if hasattr(compression, "state_dict") else BetweenNodes(compression)
