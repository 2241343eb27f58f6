"""Layers of which a worker computes its part: their parameters put into parts, their forward passes replaced."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from manyhosts import host_memory
from manyhosts.strategies.tensor.exchange import Exchange, gathered, shared, summed, taken
from manyhosts.strategies.tensor.plan import Plan


def cut(model: nn.Module, plan: Plan, exchange: Exchange, mesh: DeviceMesh) -> None:
    """Keep this worker's part of what `plan` cuts, in place. A tensor that is in several layers stays one."""
    made: dict[int, tuple[Tensor, nn.Parameter]] = {}
    forwards: dict[str, Callable[..., Any]] = {
        "column": partial(_column, is_gathered=False),
        "gathered": partial(_column, is_gathered=True),
        "row": _row,
        "vocabulary": _vocabulary,
    }
    for name, way in plan.ways.items():
        module = model.get_submodule(name)
        _put_into_parts(module, "weight", 1 if way == "row" else 0, made, exchange, mesh)
        if way in ("column", "gathered"):
            _put_into_parts(module, "bias", 0, made, exchange, mesh)
        module.__dict__["forward"] = partial(forwards[way], module, exchange)
    for group in plan.groups:
        for name, shape in group.dropouts.items():
            module = cast(nn.Dropout, model.get_submodule(name))
            module.__dict__["forward"] = partial(_dropout, module, exchange, shape, group.dims.setdefault(name, []))
        owner = model.get_submodule(group.owner)
        for key in group.divided:
            setattr(owner, key, getattr(owner, key) // exchange.size)
    host_memory.give_back()  # of full tensors and of earlier trials: steps of many small ones would not reuse it


def inner(model: nn.Module, plan: Plan) -> list[nn.Parameter]:
    """Parameters that are used between the parts: the gradient of each is the sum over the workers."""
    return [model.get_parameter(name) for group in plan.groups for name in group.inner]


def _put_into_parts(
    module: nn.Module,
    key: str,
    dim: int,
    made: dict[int, tuple[Tensor, nn.Parameter]],
    exchange: Exchange,
    mesh: DeviceMesh,
) -> None:
    full = module._parameters[key]
    if full is None or isinstance(full, DTensor):
        return
    if id(full) not in made:
        local = (
            full.detach().narrow(dim, *exchange.bounds(full.shape[dim])).clone(memory_format=torch.contiguous_format)
        )
        shape, stride = full.shape, torch.empty(full.shape, device="meta").stride()
        part = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride)
        made[id(full)] = (full, nn.Parameter(part, requires_grad=full.requires_grad))
    module._parameters[key] = made[id(full)][1]


def sum_gradient(parameter: nn.Parameter, exchange: Exchange) -> None:
    """Sum what each backward pass gives it."""
    trained = parameter.requires_grad
    parameter.requires_grad_(True)  # a hook is put on no other
    parameter.register_hook(exchange.sum)
    parameter.requires_grad_(trained)


def _local(parameter: Any) -> Any:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _column(module: nn.Linear, exchange: Exchange, input: Tensor, *, is_gathered: bool) -> Tensor:
    part = functional.linear(shared(input, exchange), _local(module.weight), _local(module.bias))
    return gathered(part, exchange, module.out_features) if is_gathered else part


def _row(module: nn.Linear, exchange: Exchange, input: Tensor) -> Tensor:
    if input.shape[-1] == module.in_features:
        input = taken(input, exchange)
    out = summed(functional.linear(input, _local(module.weight)), exchange)
    return out if module.bias is None else out + module.bias.to(out.dtype)


def _vocabulary(module: nn.Embedding, exchange: Exchange, input: Tensor) -> Tensor:
    if bool(((input < 0) | (input >= module.num_embeddings)).any()):
        raise IndexError(f"index out of range: the embedding has {module.num_embeddings} rows")
    begin, length = exchange.bounds(module.num_embeddings)
    is_elsewhere = (input < begin) | (input >= begin + length)
    padding = None if module.padding_idx is None else module.padding_idx - begin
    own = functional.embedding(
        (input - begin).masked_fill(is_elsewhere, 0),
        _local(module.weight),
        padding if padding is not None and 0 <= padding < length else None,
    )
    return summed(own.masked_fill(is_elsewhere.unsqueeze(-1), 0.0), exchange)


def _dropout(module: nn.Dropout, exchange: Exchange, shape: tuple[int, ...], dims: list[int], input: Tensor) -> Tensor:
    """Draw for the full tensor, as one process does, and take this worker's part of the mask.

    `shape`: of the input in the look, of which a trial sees a part and so learns in `dims` which dim is cut.
    """
    if not dims:
        dims += [dim for dim, size in enumerate(shape) if input.shape[dim] != size]
    [dim] = dims
    if not module.training:
        return input
    full = [*input.shape]
    full[dim] = shape[dim]
    mask = functional.dropout(input.new_ones(full), module.p, True)
    return input * mask.narrow(dim, *exchange.bounds(shape[dim]))
