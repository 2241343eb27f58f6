"""Top-k: each worker sends its largest numbers and their positions; the rest waits in what it keeps.

Source: Aji and Heafield 2017, "Sparse Communication for Distributed Gradient Descent", arXiv:1704.05021.
"""

from __future__ import annotations

import torch
from torch import Tensor

from manyhosts.communication.compression.exchange import Chunk
from manyhosts.communication.link import Link
from manyhosts.config.strategies import DDP

_SAMPLE = 1 << 15


class TopK:
    """Sends the `fraction` of the numbers that are largest in absolute value: 8 bytes for each, to every worker."""

    def __init__(self, config: DDP) -> None:
        self.fraction = config.topk_fraction

    def __call__(self, chunk: Chunk, link: Link) -> Tensor:
        """See `Compression`."""
        values = chunk.values
        places = largest(values, max(1, round(self.fraction * values.numel())))
        numbers = values[places].float()
        wire = torch.cat([places.to(torch.int32).view(torch.uint8), numbers.view(torch.uint8)])
        spread = link.all_gather(wire).view(link.size, 2, -1, 4)
        sent = torch.zeros_like(values)
        sent[places] = numbers.to(values.dtype)
        values.zero_()
        for places_bytes, numbers_bytes in spread:  # one worker after the other: the same order of sums everywhere
            theirs = numbers_bytes.reshape(-1).view(torch.float32).to(values.dtype)
            values.index_add_(0, places_bytes.reshape(-1).view(torch.int32).long(), theirs)
        return sent


def largest(values: Tensor, count: int) -> Tensor:
    """The positions of the `count` numbers of `values` that are largest in absolute value; shape (count,).

    Looks first for those above what a sample promises, and sorts only them: ten times as fast on a CPU.
    """
    sizes = values.abs()
    step = values.numel() // _SAMPLE
    if step > 1:
        sample = sizes[::step]
        share = min(len(sample), 2 * count // step + 64)
        candidates = (sizes >= sample.topk(share, sorted=False).values.min()).nonzero().squeeze(1)
        if len(candidates) >= count:
            return candidates[sizes[candidates].topk(count, sorted=False).indices]
    return sizes.topk(count, sorted=False).indices
