"""What is pushed of a gradient: all of it or the rows that are not zero, as it is or with fewer bits for each number.

What a compression drops is kept by who pushes, and goes with the next gradient that it pushes of that parameter. The
rows that a micro-batch has not touched travel neither as zeros nor as what was kept of them: that waits until they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from manyhosts.communication.compression.exchange import worth_it
from manyhosts.communication.compression.table import COMPRESSIONS
from manyhosts.communication.gathering import joined, parted
from manyhosts.config.asynchronous import ParameterServer
from manyhosts.config.strategies import DDP

_THERE, _SPARSE, _CODED, _ROWS = 1, 2, 4, 8
"""Of a gradient: there is one; an optimizer is to get it as a sparse tensor; its numbers are encoded; some rows."""


class Gradients:
    """How the gradients of a step are packed by who pushes, and unpacked by who keeps their parameters."""

    def __init__(self, config: ParameterServer, kept: Mapping[str, Tensor]) -> None:
        """`kept`: what this worker's pushes have dropped so far; see `kept`."""
        self.config = config
        self.way: Any = COMPRESSIONS.load(config.compression)(DDP()) if config.compression != "none" else None
        """A compression that encodes numbers by themselves; None for none."""
        self.feeds_back = self.way is not None and config.error_feedback
        self.kept = {name: each.clone() for name, each in kept.items()}
        """What this worker's pushes have dropped, by the name of the parameter, in its shape."""

    def packed(self, named: Mapping[str, nn.Parameter], *, exact: bool) -> Tensor:
        """The gradients of `named` parameters, uint8 of shape (bytes,). `exact`: as they are; they travel nowhere."""
        forms, parts = torch.zeros(len(named), dtype=torch.uint8), []
        for number, (name, parameter) in enumerate(named.items()):
            if parameter.grad is None:
                continue
            rows, values = _touched(parameter.grad)
            coded = not exact and self.way is not None and values.numel() > 0
            coded = coded and worth_it(self.way, parameter, above=self.config.compress_above)
            forms[number] = _THERE + _SPARSE * parameter.grad.is_sparse + _CODED * coded + _ROWS * (rows is not None)
            parts += [] if rows is None else [rows]
            parts.append(self._encoded(name, parameter, rows, values) if coded else values)
        return joined([forms, *parts])

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
            kept[at] = torch.nan_to_num(wide - self._decoded(wire, wide), 0.0, 0.0, 0.0)
        return wire

    def _decoded(self, wire: Tensor, like: Tensor) -> Tensor:
        wide = torch.empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        decoded: Tensor = self.way.codec.decode(wire, wide)
        return decoded[0, : like.numel()].view(like.shape).to(like.dtype)

    def unpacked(self, payload: Tensor, like: Sequence[Tensor]) -> list[Tensor | None]:
        """What `packed` gave for parameters `like` these."""
        forms, *parts = parted(payload)
        arrived = iter(parts)
        found: list[Tensor | None] = []
        for form, parameter in zip(forms.tolist(), like, strict=True):
            rows = next(arrived) if form & _ROWS else None
            values = next(arrived) if form else None
            if values is not None and form & _CODED:
                values = self._decoded(values, parameter if rows is None else parameter[: len(rows)])
            if values is not None and rows is not None:
                shape = parameter.shape
                values = torch.sparse_coo_tensor(rows[None], values, shape, check_invariants=False, is_coalesced=True)
                values = values if form & _SPARSE else values.to_dense()
            found.append(values)
        return found


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
