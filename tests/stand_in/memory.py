"""The memory of the stand-in, and when it is another's.

What is given back is overwritten where the stream that it was made on is next given some, as PyTorch's allocator reuses
it: a stream that still reads it without having said so (`record_stream`) reads nonsense.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from stand_in import module, streams


class Memory:
    """What tensors on the device share that are views of each other."""

    def __init__(self, data: Tensor) -> None:
        self.streams: set[streams.Stream] = set()
        self.storage = Storage(data.untyped_storage(), self.streams)
        weakref.finalize(self, self.storage.resize_, 0)


class Storage:
    """What a storage of PyTorch's answers. It holds all of its bytes, or none."""

    def __init__(self, of_host: torch.UntypedStorage, used_on: set[streams.Stream]) -> None:
        self.of_host, self.made_on, self.used_on = of_host, streams.current_stream(), used_on
        self.held = 0
        self.resize_(of_host.nbytes())

    def resize_(self, size: int) -> None:
        """Hold so many bytes: all of them, or none."""
        module.held.take(size - self.held)
        if size and not self.held:
            _reuse(streams.current_stream())
        if self.held and not size:
            _given_back.setdefault(self.made_on, []).append(self)
        self.held = size

    def nbytes(self) -> int:
        return self.held

    size = nbytes

    @property
    def _cdata(self) -> int:
        return self.of_host._cdata

    def data_ptr(self) -> int:
        return self.of_host.data_ptr()


_given_back: dict[streams.Stream, list[Storage]] = {}
"""By the stream that they were made on, those that nobody has been given again."""


def _reuse(stream: streams.Stream) -> None:
    for storage in _given_back.pop(stream, []):
        for other in storage.used_on - {stream}:
            stream.wait_stream(other)
        stream.launch(lambda of_host=storage.of_host: of_host.fill_(0x7F))
