"""What a worker holds of each tensor of a model and its optimizer: all of it, or a part that others complete."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from manyhosts.communication.parts import TensorPart


class Holding:
    """How a strategy has laid out tensors over the workers. As it is here every worker holds every tensor in full."""

    by_stage: ClassVar[bool] = False
    """Whether some workers have tensors of which others have nothing, nor what the optimizer keeps of them."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether this worker has something of `tensor`, a parameter: then its optimizer keeps something of it, too."""
        return True

    def everywhere(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of `tensors` of which every worker has something. All workers call this."""
        return dict(tensors)

    def part(self, tensor: Tensor) -> Tensor | TensorPart:
        """What this worker gives of `tensor` where each element is to be given once; `tensor` itself where all hold it.

        Where several workers hold the same part, one of them gives it, and the others a part without elements.
        """
        return tensor

    def local(self, tensor: Tensor) -> Tensor:
        """What this worker holds of `tensor` in its memory, as a plain tensor that shares it."""
        return tensor

    def block(self, tensor: Tensor) -> TensorPart:
        """The same with its place in the full tensor."""
        return TensorPart.all_of(tensor)

    def full(self, tensor: Tensor) -> Tensor:
        """All of `tensor`. Where it is cut that is new memory, and all workers that hold parts call this together."""
        return tensor

    def like(self, tensor: Tensor, local: Tensor) -> Tensor:
        """A tensor that is cut as `tensor` is, of which this worker holds `local`."""
        return local


UNCUT = Holding()
