"""What every compression can do. Read this file, then any one other in this folder.

A compression is a function: it is given a chunk and a link, replaces the chunk's values by their sum over the workers
(or something near it, the same bits on every worker), and returns what of *this worker's* values is contained in that
sum. What is not is kept here, and added to the values of the next step: nothing is lost, only late. Hence the one law
that each must obey, and the tests hold:

    the sum over the workers of what each returned is what every worker received
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from manyhosts.communication.layout import memory_shape
from manyhosts.communication.link import Link


@dataclass(frozen=True, slots=True)
class Chunk:
    """Gradients that travel together."""

    values: Tensor
    """Shape (elements,), float32 or float64; replaced in place by the sum over the workers."""
    shapes: Sequence[torch.Size]
    """Of the tensors in it, which lie one after the other."""
    keys: Sequence[int]
    """For each shape a number that stays the same from step to step, for those that remember something."""


class Compression(Protocol):
    """One way to sum a chunk over the workers. A plain function of a user's own is one too."""

    def __call__(self, chunk: Chunk, link: Link) -> Tensor | None:
        """Exchange `chunk`. Returns what of this worker's values arrived, shape (elements,); None for all of them."""


def worth_it(compression: Compression, parameter: nn.Parameter, *, above: int) -> bool:
    """Whether the gradient of `parameter` is sent through `compression`: small ones cost more than they save."""
    is_large = parameter.is_floating_point() and parameter.numel() >= above
    return is_large and judge_of(compression)(memory_shape(parameter))


def judge_of(compression: Compression) -> Callable[[torch.Size], bool]:
    """What says whether tensors of a shape are worth it: all of them, where `compression` has no word in it."""
    return getattr(compression, "worth_it", lambda shape: True)


def takes_full_tensors(compression: Compression) -> bool:
    """Whether it looks at shapes, so that a tensor may not be cut over several chunks."""
    return bool(getattr(compression, "full_tensors", False))
