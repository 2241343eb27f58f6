"""What is pushed of a gradient: all of it or the rows that are not zero, as it is or with fewer bits for each number.

What a compression drops is kept by who pushes, and goes with the next gradient that it pushes of that parameter. The
rows that a micro-batch has not touched travel neither as zeros nor as what was kept of them: that waits until they are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.communication.compression.exchange import worth_it
from manyhosts.communication.compression.table import COMPRESSIONS
from manyhosts.config.asynchronous import ParameterServer
from manyhosts.config.strategies import DDP

_THERE, _SPARSE, _CODED = 1, 2, 4
"""Of a gradient: there is one; an optimizer is to get it as a sparse tensor; its numbers are encoded."""
_ALL = -1
"""In place of how many rows there are."""


class Gradients:
    """How the gradients of a run are packed by who pushes, and unpacked by who keeps their parameters."""

    def __init__(self, config: ParameterServer) -> None:
        self.config = config
        self.way: Any = COMPRESSIONS.load(config.compression)(DDP()) if config.compression != "none" else None
        """A compression that encodes numbers by themselves; None for none."""
        self.feeds_back = self.way is not None and config.error_feedback
        self.kept: dict[str, Tensor] = {}
        """What this worker's pushes have dropped, by the name of the parameter, in its shape."""
        self._before: dict[str, Tensor] = {}

    def begin(self) -> None:
        """A step begins."""
        self._before = copy.deepcopy(self.kept)

    def step_back(self) -> None:
        """The step under way broke off: keep what was kept before it."""
        self.kept = self._before

    def packed(self, named: Mapping[str, nn.Parameter], *, exact: bool) -> Tensor:
        """The gradients of `named` parameters, uint8 of shape (bytes,). `exact`: as they are; they travel nowhere."""
        marks, parts = torch.zeros(len(named), 2, dtype=torch.int64), []
        for mark, (name, parameter) in zip(marks, named.items(), strict=True):
            if parameter.grad is None:
                continue
            rows, values = _touched(parameter.grad)
            coded = not exact and self.way is not None and values.numel() > 0
            coded = coded and worth_it(self.way, parameter, above=self.config.compress_above)
            mark[0] = _THERE + _SPARSE * parameter.grad.is_sparse + _CODED * coded
            mark[1] = _ALL if rows is None else len(rows)
            parts += [] if rows is None else [rows]
            parts.append(self._encoded(name, parameter, rows, values) if coded else values)
        return packed([marks, *parts])

    def _encoded(self, name: str, parameter: Tensor, rows: Tensor | None, values: Tensor) -> Tensor:
        """`values`, or those of `rows`, with what was kept of them; what this drops is kept in its place."""
        wide = values.to(torch.promote_types(values.dtype, torch.float32))
        at = slice(None) if rows is None else rows
        if self.feeds_back:
            kept = self.kept.setdefault(name, torch.zeros_like(parameter, dtype=wide.dtype, requires_grad=False))
            wide = wide + kept[at]
        row = functional.pad(wide.reshape(1, -1), (0, -wide.numel() % self.way.codec.block))
        wire: Tensor = self.way.codec.encode(row)
        if self.feeds_back:
            arrives = self.way.codec.decode(wire, row)[0, : wide.numel()].view_as(wide)
            kept[at] = torch.nan_to_num(wide - arrives, 0.0, 0.0, 0.0)
        return wire

    def unpacked(self, payload: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
        """What `packed` gave for parameters `like` these."""
        read = _reader(payload)
        found: list[Tensor | None] = []
        for (form, count), parameter in zip(read((len(like), 2), torch.int64).tolist(), like, strict=True):
            if not form:
                found.append(None)
                continue
            rows = None if count == _ALL else read((count,), torch.int64)
            shape = parameter.shape if rows is None else (count, *parameter.shape[1:])
            values = self._decoded(read, shape, parameter) if form & _CODED else read(shape, parameter.dtype)
            if rows is not None and form & _SPARSE:
                values = torch.sparse_coo_tensor(
                    rows[None], values, parameter.shape, check_invariants=False, is_coalesced=True
                )
            elif rows is not None:
                values = torch.zeros_like(parameter).index_copy_(0, rows, values)
            found.append(values)
        return found

    def _decoded(self, read: Any, shape: Sequence[int], parameter: Tensor) -> Tensor:
        count = torch.Size(shape).numel()
        row = torch.empty(
            1, count + -count % self.way.codec.block, dtype=torch.promote_types(parameter.dtype, torch.float32)
        )
        wire = read((1, self.way.codec.encode(torch.zeros_like(row)).shape[1]), torch.uint8)
        decoded: Tensor = self.way.codec.decode(wire, row)
        return decoded[0, :count].view(torch.Size(shape)).to(parameter.dtype)


def _touched(gradient: Tensor) -> tuple[Tensor | None, Tensor]:
    """The rows of `gradient` that are not zero, shape (rows,), and these; None and all of it where they are many."""
    if gradient.is_sparse:
        gradient = gradient.coalesce()
        return gradient.indices()[0], gradient.values()
    if gradient.dim() > 1:
        rows = gradient.flatten(1).any(1).nonzero().squeeze(1)
        if 2 * len(rows) < len(gradient):
            return rows, gradient[rows]
    return None, gradient


def packed(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes one after another, uint8 of shape (bytes,)."""
    parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)


def _reader(payload: Tensor) -> Callable[[Sequence[int], torch.dtype], Tensor]:
    """What gives the tensors in the bytes of `payload` one after another, each by its shape and dtype."""
    begin = 0

    def read(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        nonlocal begin
        size = torch.Size(shape).numel() * dtype.itemsize
        begin += size
        part = payload[begin - size : begin].clone()  # at an address fit for its dtype
        return part.view(dtype).view(torch.Size(shape))

    return read


@torch.no_grad()
def unpack(payload: Tensor, into: Sequence[Tensor]) -> None:
    """Fill tensors with what `packed` gave for ones of the same shapes and dtypes."""
    read = _reader(payload)
    for tensor in into:
        tensor.copy_(read(tensor.shape, tensor.dtype))
