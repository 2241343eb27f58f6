"""A process group of the stand-in: each collective is work of a stream of its own, as with NCCL.

It begins after what the caller's stream had been given before, and `wait` has the caller's stream wait, not the host.
The sums themselves are Gloo's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stand_in import streams


class _Work(dist.Work):
    def __init__(self, done: streams.Event, held: Any) -> None:
        super().__init__()
        self.done, self.held = done, held

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        streams.current_stream().wait_event(self.done)
        self.held = None
        return True

    def is_completed(self) -> bool:
        return self.done.query()

    def is_success(self) -> bool:
        return self.done.query()


def _there(tensor: Tensor) -> Tensor:
    there: Tensor | None = getattr(tensor, "data_there", None)
    assert there is not None, f"a collective was given a tensor on {tensor.device}"
    assert there.is_contiguous(), "a collective was given a tensor that is not contiguous"
    return there


class Group(dist.ProcessGroup):
    """What `init_process_group` makes for the backend of this device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.stream = streams.Stream("collectives")

    def _launch(self, held: Any, start: Callable[[], Any]) -> _Work:
        self.stream.wait_stream(streams.current_stream())
        self.stream.launch(lambda: start().wait())
        return _Work(self.stream.record_event(), held)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: self.gloo.allreduce(there, opts or dist.AllreduceOptions()))

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: self.gloo.broadcast(there, opts))

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> _Work:
        to = [[_there(tensor) for tensor in row] for row in outputs]
        of = [_there(tensor) for tensor in inputs]
        return self._launch((outputs, inputs), lambda: self.gloo.allgather(to, of))

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        rows = list(_there(output).view(self.size(), -1).unbind(0))
        of = _there(own).view(-1)
        return self._launch((output, own), lambda: self.gloo.allgather([rows], [of]))

    _allgather_base = all_gather_single

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_rows: Sequence[int], own_rows: Sequence[int], opts: Any = None
    ) -> _Work:
        to, of = _there(output), _there(own)
        return self._launch((output, own), lambda: self.gloo.alltoall_base(to, of, list(output_rows), list(own_rows)))

    alltoall_base = all_to_all_single

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: self.gloo.send(there, rank, tag))

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: self.gloo.recv(there, rank, tag))

    def barrier(self, opts: Any = None) -> _Work:
        return self.allreduce([torch.zeros(1, device="standin:0")])

    def getBackendName(self) -> str:
        return "standin"


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Group:
    return Group(store, rank, size, timeout)


def register(name: str) -> None:
    """Let torch.distributed know the backend."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _make, devices=[name])
