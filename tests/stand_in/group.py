"""A process group of the stand-in: each collective is work of a stream of its own, as with NCCL.

It begins after what the caller's stream had been given before, and `wait` has the caller's stream wait, not the host.
The sums themselves are Gloo's. A collective that others do not come to lasts until its group is aborted, and then ends
without a word, leaving anything at all where its result was to be.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
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


class _Collective:
    """One of them, as work of a stream."""

    def __init__(self, group: Group, start: Callable[[], Any], results: Sequence[Tensor]) -> None:
        self.group, self.start, self.results = group, start, results
        self.has_begun = self.is_over = False
        self.work: Any = None

    def __call__(self) -> bool:
        """Continue with it. Whether it is over."""
        if not self.is_over and not self.group.is_aborted:
            with suppress(RuntimeError):  # that others are gone: a GPU would wait for them all the same
                self._go_on()
        elif self.group.is_aborted:
            self.is_over = True
            for result in self.results:
                result.untyped_storage().fill_(0x7F)
        return self.is_over

    def _go_on(self) -> None:
        if not self.has_begun:
            self.has_begun = True
            self.work = self.start()
        if self.work is not None and self.work.is_completed():
            self.work.wait()
            self.is_over = True


class _Waited:
    """A message of Gloo's, which does not say of itself that it has come: a thread waits for it."""

    def __init__(self, work: Any) -> None:
        self.over = threading.Event()
        threading.Thread(target=self._wait, args=(work,), daemon=True).start()

    def _wait(self, work: Any) -> None:
        with suppress(RuntimeError):  # as if it were yet to come
            work.wait()
            self.over.set()

    def is_completed(self) -> bool:
        return self.over.is_set()

    def wait(self) -> None:
        pass


class _Reduced:
    """A sum of rows of which each worker keeps its own, added up in the order of the ranks."""

    def __init__(self, group: Group, own: Tensor, rows: Tensor) -> None:
        self.own, self.all_rows = own, torch.empty_like(rows)
        self.work = group.gloo.alltoall_base(self.all_rows, rows, [], [])

    def is_completed(self) -> bool:
        return bool(self.work.is_completed())

    def wait(self) -> None:
        self.work.wait()
        torch.sum(self.all_rows.view(-1, *self.own.shape), 0, out=self.own)


def _there(tensor: Tensor) -> Tensor:
    there: Tensor | None = getattr(tensor, "data_there", None)
    if there is None:
        raise RuntimeError(f"No backend type associated with device type {tensor.device.type}")
    assert there.is_contiguous(), "a collective was given a tensor that is not contiguous"
    return there


class Group(dist.ProcessGroup):
    """What `init_process_group` makes for the backend of this device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.stream = streams.Stream(streams.COLLECTIVES)
        self.is_aborted = False
        self._name = ""

    @property
    def group_name(self) -> str:
        """PyTorch keeps it in a backend of C++, of which there is none here."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def abort(self) -> None:
        """Have all that is under way end, and refuse what comes."""
        self.is_aborted = True

    def shutdown(self) -> None:
        """Wait until all that is under way has ended."""
        self.stream.run_until(self.stream.launched)

    def _launch(self, held: Any, start: Callable[[], Any], results: Sequence[Tensor]) -> _Work:
        if self.is_aborted:
            raise RuntimeError("NCCL communicator was aborted on this rank")
        self.stream.wait_stream(streams.current_stream())
        self.stream.launch(_Collective(self, start, results))
        return _Work(self.stream.record_event(), held)

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: self.gloo.allreduce(there, opts or dist.AllreduceOptions()), there)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: self.gloo.broadcast(there, opts), there)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> _Work:
        """Of a list: NCCL fills one tensor, and PyTorch copies it into those of the list."""
        raise AssertionError("a list is filled by way of a copy: gather into one tensor")

    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        rows = list(_there(output).view(self.size(), -1).unbind(0))
        of = _there(own).view(-1)
        return self._launch((output, own), lambda: self.gloo.allgather([rows], [of]), rows)

    _allgather_base = all_gather_single

    def reduce_scatter_single(self, output: Tensor, own: Tensor, opts: Any = None) -> _Work:
        to, of = _there(output), _there(own)
        return self._launch((output, own), lambda: _Reduced(self, to, of), [to])

    _reduce_scatter_base = reduce_scatter_single

    def all_to_all_single(
        self, output: Tensor, own: Tensor, output_rows: Sequence[int], own_rows: Sequence[int], opts: Any = None
    ) -> _Work:
        to, of = _there(output), _there(own)
        rows = list(output_rows), list(own_rows)
        return self._launch((output, own), lambda: self.gloo.alltoall_base(to, of, *rows), [to])

    alltoall_base = all_to_all_single

    def send(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: _Waited(self.gloo.send(there, rank, tag)), [])

    def recv(self, tensors: Sequence[Tensor], rank: int, tag: int = 0) -> _Work:
        there = [_there(tensor) for tensor in tensors]
        return self._launch(tensors, lambda: _Waited(self.gloo.recv(there, rank, tag)), there)

    def barrier(self, opts: Any = None) -> _Work:
        return self.allreduce([torch.zeros(1, device="standin:0")])

    def getBackendName(self) -> str:
        return "standin"


def gathered(own: Tensor, size: int, name: str) -> Tensor:
    """What `DTensor.full_tensor` asks for."""
    whole = own.new_empty((own.shape[0] * size, *own.shape[1:]))
    dist.distributed_c10d._resolve_process_group(name).all_gather_single(whole, own.contiguous()).wait()
    return whole


def summed(own: Tensor, how: str, name: str) -> Tensor:
    """What a DTensor asks for that is the sum, or the largest, of what the workers have."""
    total, options = own.clone(), dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, how.upper())
    dist.distributed_c10d._resolve_process_group(name).allreduce([total], options).wait()
    return total


def _make(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Group:
    return Group(store, rank, size, timeout)


def register(name: str) -> None:
    """Let torch.distributed know the backend."""
    if name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _make, devices=[name])
