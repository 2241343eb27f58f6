"""Which gradients travel together: parameters packed in the order in which their gradients become ready."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

from torch import Tensor, nn

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.gathering import gather_plain

_Tensor = TypeVar("_Tensor", bound=Tensor)

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the network has something to do early in the backward pass."""


def packed(tensors: Sequence[_Tensor], order: Iterable[int], *, bucket_bytes: int) -> list[list[_Tensor]]:
    """Groups of `tensors`, taken in `order`, of about `bucket_bytes` each and of one dtype and device."""
    groups: list[list[_Tensor]] = []
    group: list[_Tensor] = []
    size = 0
    for number in order:
        tensor = tensors[number]
        limit = bucket_bytes if groups else min(FIRST_BUCKET_BYTES, bucket_bytes)
        if group and (size >= limit or (tensor.dtype, tensor.device) != (group[0].dtype, group[0].device)):
            groups.append(group)
            group, size = [], 0
        group.append(tensor)
        size += tensor.numel() * tensor.element_size()
    return [*groups, group] if group else groups


class ReadyOrder:
    """The order in which gradients become ready, found in one backward pass and then fixed for all by rank 0."""

    def __init__(self, parameters: Sequence[nn.Parameter], world: Collectives) -> None:
        self.world = world
        self.guess = list(reversed(range(len(parameters))))
        """Until it is known: the last layer's gradient comes first."""
        self.seen: list[int] | None = []
        """Parameters by number as their gradients came, while that is being found out; None afterwards."""
        self.present = self.guess
        self.in_parts: set[int] = set()
        """Parameters whose gradient came several times in that pass, each time with more in it: one that sees it come
        does not know whether it is complete before the pass is over. Reentrant checkpoints of shared layers do that."""

    def forget(self) -> None:
        """A backward pass begins: what is known of one that broke off does not count."""
        if self.seen is not None:
            self.seen = []

    def note(self, number: int) -> None:
        """The gradient of the parameter of this number is ready."""
        if self.seen is not None:
            self.seen.append(number)

    def agree(self) -> list[int] | None:
        """The order that rank 0 saw, on every worker, the parameters it did not use last; None where known."""
        if self.seen is None:
            return None
        counts = Counter(self.seen)
        order = [*counts, *(number for number in self.guess if number not in counts)]
        self.present, in_parts = gather_plain(self.world, [order, [number for number in order if counts[number] > 1]])[
            0
        ]
        self.in_parts = set(in_parts)
        self.seen = None  # not before: if the exchange breaks, the step is done again
        return self.present

    def resync(self, source: int) -> list[int]:
        """What worker `source` uses, on every worker: those that were not there when it was found out follow it."""
        known, self.present, in_parts = gather_plain(self.world, [self.seen is None, self.present, [*self.in_parts]])[
            source
        ]
        self.seen, self.in_parts = None if known else [], set(in_parts)
        return self.present
