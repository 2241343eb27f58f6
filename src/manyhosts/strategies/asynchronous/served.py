"""The parameters that one worker keeps for all, and the gradients that are pushed there.

A push has all of a gradient or the rows that are not zero, as it is or with fewer bits for each number. What a
compression drops is kept by who pushes, and goes with the next gradient that it pushes of that parameter. The rows that
a micro-batch has not touched travel neither as zeros nor as what was kept of them: that waits until they are.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from manyhosts.communication.compression.exchange import worth_it
from manyhosts.communication.compression.table import COMPRESSIONS
from manyhosts.communication.gathering import joined, parted
from manyhosts.config.asynchronous import ParameterServer
from manyhosts.config.strategies import DDP
from manyhosts.errors import ConfigError, TrainingError

_THERE, _SPARSE, _CODED, _ROWS = 1, 2, 4, 8
"""Of a gradient: there is one; an optimizer is to get it as a sparse tensor; its numbers are encoded; some rows."""


def owners_of(sizes: Mapping[str, int], servers: int | None, workers: int) -> dict[str, int]:
    """Which worker keeps each parameter, by its name, as `sizes` (bytes): evenly, the largest first.

    `servers`: into how many parts, one after another to the workers; None: one for each worker.

    Raises:
        ConfigError: there are more servers than parameters.
    """
    if servers is not None and servers > len(sizes):
        raise ConfigError(
            f"{servers} servers are to keep the parameters, but {len(sizes)} tensors of the model are trained",
            where="ParameterServer(servers=…)",
            fix=f"give {len(sizes)} or fewer, or leave it out",
        )
    loads = [0] * min(servers or workers, len(sizes))
    owners = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = loads.index(min(loads))
        owners[name], loads[least] = least % workers, loads[least] + sizes[name]
    return owners


def twin(optimizer: Optimizer, other: Mapping[Tensor, Tensor]) -> Optimizer:
    """The same optimizer over other tensors: those of `other`, in place of its own. Its state is a copy."""
    made: Optimizer = object.__new__(type(optimizer))
    made.__dict__ = {name: value for name, value in optimizer.__dict__.items() if name != "step"}  # of a schedule
    groups = [{**each, "params": [other[one] for one in each["params"] if one in other]} for each in made.param_groups]
    made.param_groups = [each for each in groups if each["params"]]
    kept = {own: copy.deepcopy(optimizer.state[one]) for one, own in other.items() if one in optimizer.state}
    made.state = defaultdict(dict, kept)
    return made


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
        row = functional.pad(wide.reshape(1, -1), (0, -wide.numel() % self.way.block))
        wire: Tensor = self.way.encode(row)
        if self.feeds_back:
            kept[at] = torch.nan_to_num(wide - self._decoded(wire, wide), 0.0, 0.0, 0.0)
        return wire

    def _decoded(self, wire: Tensor, like: Tensor) -> Tensor:
        decoded: Tensor = self.way.decode(wire, like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32)))
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


class Served:
    """What one worker serves in one step. Its calls may come from any thread.

    A worker that pulls will push after all that have pulled and not pushed yet. So it may be given, in place of the
    newest values, those that they are expected to make of them: the last update again for each of them. Its gradient is
    then one of about the values that it is applied to (Chen et al. 2018, "Efficient and Robust Parallel DNN Training
    through Model Parallelism on Multi-GPU Platform", arXiv:1809.02839, predict the weights of a pipeline so).
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        gradients: Gradients | None,
        *,
        looks_ahead: bool,
    ) -> None:
        self.values = [parameter.detach().clone() for parameter in parameters]
        self.optimizer = twin(optimizer, dict(zip(parameters, self.values, strict=True)))
        self._groups = [dict(group) for group in self.optimizer.param_groups]
        self.gradients, self.looks_ahead = gradients, looks_ahead
        self.version = 0
        """How many gradients were applied in this step."""
        self._under_way = 0
        """How many have pulled and not pushed yet."""
        self._moved: list[Tensor | None] = [None] * len(parameters)
        """What the last update has added to each; None where it is not known, as of one by some rows."""
        self._lock = threading.Lock()

    def pull(self) -> tuple[int, Tensor]:
        """The version of now, and the values, `joined`."""
        with self._lock:
            ahead, self._under_way = self._under_way, self._under_way + 1
            pairs = zip(self.values, self._moved, strict=True)
            values = [value if by is None or not ahead else torch.add(value, by, alpha=ahead) for value, by in pairs]
            return self.version, joined(values)

    def push(self, version: int, payload: Tensor) -> int:
        """Make an update by gradients of the values of `version`. Returns how many came in between."""
        assert self.gradients is not None, "nothing is pushed that could not be unpacked"
        gradients = self.gradients.unpacked(payload, self.values)
        with self._lock:
            if self.looks_ahead and any(self.optimizer.state.values()):  # else an update says nothing of the next
                known = [gradient is not None and not gradient.is_sparse for gradient in gradients]
                self._moved = [each.clone() if of else None for each, of in zip(self.values, known, strict=True)]
            self.update(gradients)
            for value, before in zip(self.values, self._moved, strict=True):
                if before is not None:
                    torch.sub(value, before, out=before)
            self.version += 1
            self._under_way -= 1
            return self.version - 1 - version

    def update(self, gradients: Sequence[Tensor | None]) -> None:
        """Step by `gradients`, one for each value.

        Raises:
            TrainingError: the optimizer keeps something in its groups, from which no worker would take it.
        """
        for value, gradient in zip(self.values, gradients, strict=True):
            value.grad = gradient
        if self.optimizer.param_groups:
            self.optimizer.step()
        for before, after in zip(self._groups, self.optimizer.param_groups, strict=True):
            for name, value in before.items():
                if isinstance(value, int | float) and not math.isnan(value) and after[name] != value:
                    raise TrainingError(
                        f"the optimizer {type(self.optimizer).__name__} keeps {name!r} for all parameters together, "
                        "and each server has those of its own alone",
                        where="the first step",
                        fix='choose another optimizer, or strategy="ddp"',
                    )


def described(state: Mapping[str, Any]) -> list[Any]:
    """What an optimizer keeps of one parameter in plain values: of a tensor its dtype and shape."""
    return [
        [name, [str(value.dtype).removeprefix("torch."), list(value.shape)] if isinstance(value, Tensor) else value]
        for name, value in state.items()
    ]


def like_described(description: Sequence[Any], device: torch.device) -> dict[str, Any]:
    """A state of this description, whose tensors are yet to be filled."""
    return {
        name: torch.empty(value[1], dtype=getattr(torch, value[0]), device=device) if isinstance(value, list) else value
        for name, value in description
    }
