"""How many bytes tensors hold, looked at after every operation of a process."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode


class HeldMemory(TorchDispatchMode):
    """Within, notes the most that tensors hold at once; their memory is asked again each time, for some change its
    size.

    Sees what PyTorch's operations are given and give, not what they need while they run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.see(args)
        self.see(made)
        self.most = max(self.most, self.bytes())
        return made

    def see(self, value: Any) -> None:
        """Know the memory of the tensors in `value` from now on."""
        if isinstance(value, list | tuple):
            for each in value:
                self.see(each)
        elif isinstance(value, DTensor):
            self.see(value._local_tensor)
        elif type(value) in (Tensor, nn.Parameter) and not value.is_meta:
            storage = value.untyped_storage()
            self.storages.setdefault(storage._cdata, StorageWeakRef(storage))

    def bytes(self) -> int:
        """That are held now."""
        self.storages = {place: each for place, each in self.storages.items() if not each.expired()}
        found = (torch.UntypedStorage._new_with_weak_ptr(place) for place in self.storages)
        return sum(each.nbytes() for each in found if each is not None)

    def begin(self) -> None:
        """Look for the most again."""
        self.most = 0


def bytes_of(tensors: Iterable[Tensor]) -> int:
    """Of memory that is there once."""
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())
