"""A device that is a CPU and behaves as a GPU does: what is asked of it happens later, on streams."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from manyhosts.communication import batch_norm
from manyhosts.communication.norm_kernels import PlainKernels


@contextmanager
def norm_in_one_order() -> Iterator[None]:
    """Within, BatchNorm computes and adds up alike on a CPU and on this device; `test_stand_in_norm` is about the ways.

    On a CPU it has kernels of its own, and adds in the order of the ranks what a device leaves to its group.
    """
    with (
        patch.object(batch_norm, "kernels_for", lambda device: PlainKernels()),
        patch.object(batch_norm.GlobalBatch, "sum", lambda self, own: self.members.all_reduce(own, confirmed=False)),
    ):
        yield
