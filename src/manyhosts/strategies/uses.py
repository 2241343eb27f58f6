"""Which parameters the functions of a forward pass are given, for strategies that look before they cut a model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

_LOOKS = {Tensor.requires_grad.__get__, Tensor.shape.__get__, Tensor.dtype.__get__, Tensor.device.__get__}  # type: ignore[attr-defined]
"""What needs no values."""


class Uses(TorchFunctionMode):
    """Within, each use of a named tensor is noted."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names`: by the `id` of each tensor."""
        super().__init__()
        self.names = names

    @abstractmethod
    def note(self, name: str, tensor: Tensor) -> None:
        """A function is given `tensor`, and needs its values."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in tensors_in((args, kwargs)):
            if (name := self.names.get(id(each))) is not None and function not in _LOOKS:
                self.note(name, each)
        return function(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those in `value`, a nest of containers."""
    if isinstance(value, Tensor):
        yield value
    for each in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from tensors_in(each)
