"""How many bytes a worker puts on the wire in a collective: the one place where `bytes_sent` is defined.

Counted is payload, without the headers of the network: what each worker sends in the algorithms that Gloo and NCCL use
for large messages. Where the workers send unequal amounts (a broadcast down a tree) it is the mean over them. What the
workers of a node exchange so that only nodes compress or diverge is on no wire, and does not count.
"""

from __future__ import annotations


def all_reduce_bytes(payload: int, workers: int) -> int:
    """A ring: each worker passes on every part but one, twice, first to sum and then to spread. `2 (W-1)/W n`."""
    return 2 * (workers - 1) * payload // workers


def all_gather_bytes(payload: int, workers: int) -> int:
    """Each worker's `payload` bytes reach all others. `(W-1) n`."""
    return (workers - 1) * payload


def all_to_all_bytes(payload: int, workers: int) -> int:
    """Of `payload` bytes, one part of W is each worker's own and stays. `(W-1)/W n`."""
    return (workers - 1) * payload // workers


broadcast_bytes = all_to_all_bytes
"""All but one worker receive `payload` bytes once; shared out over all. `(W-1)/W n`."""
