"""What one worker holds of a tensor that several hold together."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from manyhosts.records.tensor_parts import Box


@dataclass(eq=False, slots=True)
class TensorPart:
    """A block of a tensor; in a state that is saved it is where the full tensor would be.

    All workers give the same tensor the same `shape`, and each element is given by exactly one of them: a snapshot is
    written only where that is so. What a worker holds nothing of has a `local` without elements.
    """

    local: Tensor
    offset: tuple[int, ...]
    """Where it begins in the full tensor, in each dimension."""
    shape: tuple[int, ...]
    """Of the full tensor."""

    @classmethod
    def all_of(cls, tensor: Tensor) -> TensorPart:
        """A tensor that one worker holds in full."""
        shape = tuple(tensor.shape)
        return cls(tensor, (0,) * len(shape), shape)

    @property
    def box(self) -> Box:
        """Which of the elements these are."""
        return Box(self.offset, tuple(self.local.shape))

    @property
    def is_all(self) -> bool:
        """Whether no one else holds anything of it."""
        return tuple(self.local.shape) == self.shape
