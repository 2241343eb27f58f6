"""Before anything is cut: a trial on a batch, compared with the whole model, outputs and gradients and evaluation.

The gradients are those of a sum of all outputs, each weighted by another number: whatever loss is computed of the
outputs then has the right ones, too.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from manyhosts.data import randomness
from manyhosts.strategies.cut_model import copy_of
from manyhosts.strategies.tensor.exchange import Exchange, OtherFailed
from manyhosts.strategies.tensor.layers import cut
from manyhosts.strategies.tensor.plan import Plan
from manyhosts.strategies.uses import tensors_in

_RELATIVE = 1e-5
"""How far apart two sums in another order may be."""
_RELATIVE_16 = 3e-2
"""The same, of numbers of 16 bits."""
_SAMPLES = 4
"""A trial holds what they need, in numbers of 64 bits, next to a copy of the model."""


@dataclass(slots=True)
class Passes:
    """What a model gives for one batch."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    evaluated: list[Tensor]


def passes(model: nn.Module, inputs: Any) -> Passes:
    """Those of `model`, a copy that may be changed."""
    inputs = copy.deepcopy(inputs)
    gradients: dict[str, Tensor] = {}
    for name, each in model.named_parameters():
        if each.requires_grad_(each.is_floating_point()).requires_grad:
            each.register_post_accumulate_grad_hook(partial(_take, gradients, name))
    with torch.enable_grad():
        randomness.seed_compute(0, randomness.COMPUTE)
        outputs = list(_differentiable(model.train()(inputs)))
        generator = torch.Generator().manual_seed(0)
        probe = [(each.float() * torch.randn(each.shape, generator=generator)).sum() / each.numel() for each in outputs]
        torch.stack(probe).sum().backward()
    with torch.no_grad():
        evaluated = list(_floating(model.eval()(inputs)))
    return Passes([each.detach() for each in outputs], gradients, evaluated)


def _take(gradients: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Keep the gradient of `parameter`, which is computed, in at most 32 bits: a model of 64 has none beside it."""
    found = parameter.grad
    assert found is not None, "it was just accumulated"
    gradients[name] = found.float() if found.dtype == torch.float64 else found
    parameter.grad = None


def _floating(value: Any) -> Iterator[Tensor]:
    return (each for each in tensors_in(value) if each.is_floating_point() and each.numel())


def _differentiable(value: Any) -> Iterator[Tensor]:
    return (each for each in _floating(value) if each.requires_grad)


def few(inputs: Any) -> Any:
    """Some samples of `inputs`, where each of its tensors has them in its first dim; all of it where not."""
    found = [*tensors_in(inputs)]
    if len({each.shape[:1] for each in found}) != 1:
        return inputs
    return tree_map_only(Tensor, lambda each: each[:_SAMPLES], inputs)


def copied(model: nn.Module, *, is_double: bool = False) -> nn.Module:
    """A model to try things on; with numbers of 64 bits sums in another order are alike, and no ReLU flips."""
    made = copy_of(model)
    return made.double() if is_double else made


def whole_passes(model: nn.Module, inputs: Any) -> tuple[Passes, Any, bool]:
    """What `model` gives, with the inputs of the trials and whether they compute with 64 bits."""
    wide = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)
    try:
        return passes(copied(model, is_double=True), wide), wide, True
    except (RuntimeError, TypeError):  # it mixes formats, and says so
        return passes(copied(model), inputs), inputs, False


def tried(
    trial: nn.Module, plan: Plan, exchange: Exchange, mesh: DeviceMesh, inputs: Any, wanted: Passes, *, is_double: bool
) -> str:
    """What is wrong with `plan` for `trial`, a copy; empty where it gives what the whole model does, or all but this
    worker has found that."""
    exchange.is_trial = True
    try:
        cut(trial, plan, exchange, mesh)
        if is_double:
            trial.double()
        found = passes(trial, inputs)
        exchange.check()
    except OtherFailed:
        return ""
    except Exception as error:  # whatever a model raises where it meets parts
        exchange.check(failed=True)
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    finally:
        exchange.is_trial = False
        for module in trial.modules():
            module.__dict__.pop("forward", None)  # it leads back to the module, so that memory would stay
    return _difference(wanted, found, exchange)


def _difference(wanted: Passes, found: Passes, exchange: Exchange) -> str:
    for what, one, other in (
        ("outputs", wanted.outputs, found.outputs),
        ("evaluation", wanted.evaluated, found.evaluated),
    ):
        if [each.shape for each in one] != [each.shape for each in other]:
            return f"its {what} have other shapes than those of the whole model"
        for mine, theirs in zip(one, other, strict=True):
            if (away := _away(mine, theirs, mine.norm().item())) > 1:
                return f"its {what} are {away * _tolerance(mine):.1e} away from those of the whole model"
    if wanted.gradients.keys() != found.gradients.keys():
        name = next(iter(wanted.gradients.keys() ^ found.gradients.keys()))
        return f"{name} has a gradient in one of them alone"
    largest = max((each.norm().item() for each in wanted.gradients.values()), default=0.0)
    for name, whole in wanted.gradients.items():
        here, own = found.gradients[name], whole
        if isinstance(here, DTensor):
            [place], here = here.placements, here.to_local()
            assert isinstance(place, Shard), "a part"
            own = whole.narrow(place.dim, *exchange.bounds(whole.shape[place.dim]))
        if (away := _away(own, here, whole.norm().item() + 1e-2 * largest)) > 1:
            return f"the gradient of {name} is {away * _tolerance(own):.1e} away from that of the whole model"
    return ""


def _tolerance(tensor: Tensor) -> float:
    return _RELATIVE if tensor.dtype.itemsize > 2 else _RELATIVE_16


def _away(one: Tensor, other: Tensor, size: float) -> float:
    """How far apart they are, where 1 is what is tolerated."""
    if one.shape != other.shape:
        return float("inf")
    away = (one.double() - other.double()).nan_to_num(nan=float("inf") if one.isfinite().all() else 0.0).norm().item()
    return float(away) / (_tolerance(one) * size + 1e-30)
