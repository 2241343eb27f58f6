"""A look at a forward pass of the entire model: which layers can be cut, and between which no outputs are gathered.

Two sets of layers belong together where each part of what the second one takes depends on the same part of what the
first ones give and on no other. Autograd says so: of the gradient of one part, the others are zero.

Before anything is cut there is a trial on some samples, compared with the entire model, outputs and gradients and
evaluation. The gradients are those of a sum of all outputs, each weighted by another number: whatever loss is computed
of the outputs then has the right ones, too.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map_only

from manyhosts.data import randomness
from manyhosts.strategies.cut_model import copy_of
from manyhosts.strategies.tensor.exchange import Exchange, OtherFailed, has_parts, part_of
from manyhosts.strategies.tensor.layers import cut, inner, sum_gradient
from manyhosts.strategies.tensor.plan import Group, Plan, is_cuttable
from manyhosts.strategies.uses import Uses, tensors_in


@dataclass(slots=True)
class _Call:
    """Of a layer."""

    name: str
    given: Tensor
    before: Tensor
    """The state of torch's generator before it."""
    made: Tensor | None = None
    draws: Tensor | None = None
    """The same after it."""
    used: dict[str, None] = field(default_factory=dict)
    """Parameters that were used since, outside of layers."""


class _Look(Uses):
    """Notes the calls of layers and dropouts, and which parameters are used by others than the layer that has them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__({id(each): name for name, each in model.named_parameters()})
        self.calls: list[_Call] = []
        self.layers = {
            name: module for name, module in model.named_modules() if is_cuttable(module) or type(module) is nn.Dropout
        }
        self.own: set[int] = set()
        """Parameters of the layer that computes."""
        self.direct: set[str] = set()
        """Those that were used by others."""

    def note(self, name: str, tensor: Tensor) -> None:
        """Where it is not the layer's own."""
        if id(tensor) not in self.own:
            self.direct.add(name)
            if self.calls:
                self.calls[-1].used[name] = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Within, calls are noted."""
        hooks = []
        for name, module in self.layers.items():

            def before(module: nn.Module, args: Any, named: Any, name: str = name) -> None:
                self.own = {id(each) for each in module.parameters()}
                self.calls.append(_Call(name, next(iter((*args, *named.values()))), torch.get_rng_state()))

            def after(module: nn.Module, args: Any, made: Tensor) -> None:
                self.own = set()
                self.calls[-1].made, self.calls[-1].draws = made, torch.get_rng_state()

            hooks += [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()


def look(model: nn.Module, inputs: Any, workers: int) -> tuple[Plan, tuple[Group, ...]]:
    """What can be cut layer by layer, and which groups may be used with it; `model` is a copy that may be changed."""
    seen = _Look(model)
    for each in model.parameters():
        each.requires_grad_(each.is_floating_point())
    randomness.seed_compute(0, randomness.COMPUTE)
    with seen.watching(), torch.enable_grad():
        model.train()(inputs)
    # Other kernels may take a layer's weight then, and pass by the layer: nn.TransformerEncoderLayer has one.
    passed = {call.name for call in seen.calls} - _called_in_evaluation(model, seen.layers, inputs)
    direct = seen.direct | {seen.names[id(each)] for name in passed for each in model.get_submodule(name).parameters()}
    plan = _by_layers(model, seen, direct, workers)
    return plan, tuple(_groups(model, seen, plan, workers))


def _called_in_evaluation(model: nn.Module, layers: Mapping[str, nn.Module], inputs: Any) -> set[str]:
    """Which of `layers` an evaluation calls. Hooks and modes would turn off the kernels in question."""
    called = set[str]()

    def noting(name: str, forward: Any, *args: Any, **named: Any) -> Any:
        called.add(name)
        return forward(*args, **named)

    for name, module in layers.items():
        module.__dict__["forward"] = partial(noting, name, module.forward)
    try:
        with torch.no_grad():
            model.eval()(inputs)
    finally:
        for module in layers.values():
            module.__dict__.pop("forward", None)
    return called


def _by_layers(model: nn.Module, seen: _Look, direct: set[str], workers: int) -> Plan:
    """Each layer that was called, has a part for each worker, and whose tensors no one else uses."""
    called = dict.fromkeys(call.name for call in seen.calls)
    ways: dict[str, str] = {}
    for name in called:
        module = model.get_submodule(name)
        if type(module) is nn.Dropout:
            continue
        names = {seen.names[id(each)] for each in module.parameters()}
        total = module.num_embeddings if isinstance(module, nn.Embedding) else module.out_features
        if not names & direct and has_parts(int(total), workers):  # type: ignore[arg-type]
            ways[name] = "vocabulary" if isinstance(module, nn.Embedding) else "gathered"
    while True:  # a tensor that is in several modules is cut where all of them are
        cut = {id(model.get_submodule(name)) for name in ways}
        others = [each for each in model.modules() if id(each) not in cut]
        uncut = {id(each) for module in others for each in module._parameters.values()}
        shared = [name for name in ways if any(id(each) in uncut for each in model.get_submodule(name).parameters())]
        if not shared:
            return Plan(ways)
        for name in shared:
            del ways[name]


def _groups(model: nn.Module, seen: _Look, plan: Plan, workers: int) -> Iterator[Group]:
    """Layers that were called one after the other and belong together, each layer in one group at most."""
    counts = [call.name for call in seen.calls]
    weights = Counter(id(model.get_submodule(name)._parameters["weight"]) for name in plan.ways)
    once = {
        name
        for name, way in plan.ways.items()
        if way == "gathered"
        and counts.count(name) == 1
        and weights[id(model.get_submodule(name)._parameters["weight"])] == 1
    }
    taken: set[str] = set()
    layers = [place for place, call in enumerate(seen.calls) if type(model.get_submodule(call.name)) is nn.Linear]
    for number, place in enumerate(layers):
        row = seen.calls[place]
        if number == 0 or row.name not in once:
            continue
        first = number - 1
        while first > 0 and seen.calls[layers[first - 1]].given is seen.calls[layers[number - 1]].given:
            first -= 1
        columns = [seen.calls[each] for each in layers[first:number]]
        names = [call.name for call in columns]
        if not {*names} <= once - taken or not _belong(columns, row, workers):
            continue
        between = seen.calls[layers[first] : place]
        if (found := _group(model, between, columns, row, counts)) is not None:
            taken |= {*names, row.name}
            yield found


def _belong(columns: list[_Call], row: _Call, workers: int) -> bool:
    """Whether each part of what `row` takes depends on the same part of what `columns` give alone."""
    made = [call.made for call in columns if call.made is not None]
    total = row.given.shape[-1]
    if not row.given.requires_grad or not has_parts(total, workers):
        return False
    for rank in range(workers):
        begin, length = part_of(total, workers, rank)
        part = row.given.narrow(-1, begin, length)
        weight = torch.linspace(0.5, 1.5, part.numel(), dtype=part.dtype).view(part.shape)
        found: tuple[Tensor | None, ...] = torch.autograd.grad(
            (part * weight).sum(), made, retain_graph=True, allow_unused=True
        )
        for each in found:
            if each is None:
                return False
            begin, length = part_of(each.shape[-1], workers, rank)
            outside = each.clone()
            outside.narrow(-1, begin, length).zero_()
            if bool(outside.any()) or not bool(each.any()):
                return False
    return True


def _group(model: nn.Module, between: list[_Call], columns: list[_Call], row: _Call, counts: list[str]) -> Group | None:
    """The group of these; None where random numbers are drawn between them otherwise than by an `nn.Dropout`."""
    dropouts = {}
    for call, following in zip(between, [*between[1:], row], strict=True):
        if type(model.get_submodule(call.name)) is nn.Dropout:
            if counts.count(call.name) > 1:
                return None
            dropouts[call.name] = tuple(call.given.shape)
        assert call.draws is not None, "noted with each call"
        if not torch.equal(call.draws, following.before):
            return None
    names = [call.name for call in columns]
    owner = _around([*names, row.name])
    inner = dict.fromkeys(name for call in between for name in call.used)
    return Group(tuple(names), row.name, owner, tuple(inner), dropouts)


def _around(names: list[str]) -> str:
    """The innermost module that holds all of `names`."""
    return ".".join(commonprefix([name.split(".")[:-1] for name in names]))  # noqa: RUF071 - of lists it compares elements


_RELATIVE = 1e-5
"""The largest relative difference of two sums in another order."""
_RELATIVE_16 = 3e-2
"""The same, of numbers of 16 bits."""
_SAMPLES = 2
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
        outputs = [each for each in _floating(model.train()(inputs)) if each.requires_grad]
        generator = torch.Generator().manual_seed(0)
        probe = [(each.float() * torch.randn(each.shape, generator=generator)).sum() / each.numel() for each in outputs]
        torch.stack(probe).sum().backward()
    with torch.no_grad():
        evaluated = list(_floating(model.eval()(inputs)))
    return Passes([each.detach() for each in outputs], gradients, evaluated)


def _take(gradients: dict[str, Tensor], name: str, parameter: Tensor) -> None:
    """Keep the gradient of `parameter`, which is computed, in at most 32 bits: a model of 64 has no room for more."""
    found = parameter.grad
    assert found is not None, "it was just accumulated"
    gradients[name] = found.float() if found.dtype == torch.float64 else found
    parameter.grad = None


def _floating(value: Any) -> Iterator[Tensor]:
    return (each for each in tensors_in(value) if each.is_floating_point() and each.numel())


def few(inputs: Any) -> Any:
    """Some samples of `inputs`, where each of its tensors has them in its first dim; all of it where not."""
    have_samples = len({each.shape[:1] for each in tensors_in(inputs)}) == 1
    return tree_map_only(Tensor, lambda each: each[:_SAMPLES], inputs) if have_samples else inputs


def uncut_passes(model: nn.Module, inputs: Any) -> tuple[Passes, Any, bool]:
    """What `model` gives, with the inputs of the trials and whether they compute with 64 bits.

    With numbers of 64 bits sums in another order are alike, and no ReLU flips.
    """
    wide = tree_map_only(Tensor, lambda each: each.double() if each.is_floating_point() else each, inputs)
    try:
        return passes(copy_of(model).double(), wide), wide, True
    except (RuntimeError, TypeError):  # it mixes formats, and says so
        return passes(copy_of(model), inputs), inputs, False


def tried(
    trial: nn.Module, plan: Plan, exchange: Exchange, mesh: DeviceMesh, inputs: Any, wanted: Passes, *, is_double: bool
) -> str:
    """What is wrong with `plan` for `trial`, a copy; empty where it gives what the entire model does, or all but this
    worker has found that."""
    exchange.is_trial = True
    try:
        cut(trial, plan, exchange, mesh)
        for each in inner(trial, plan):
            sum_gradient(each, exchange)
        if is_double:
            trial.double()
        found = passes(trial, inputs)
        exchange.check()
    except OtherFailed:
        return ""
    except Exception as error:  # whatever a model raises where it is given parts
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
            return f"its {what} have other shapes than those of the entire model"
        for mine, theirs in zip(one, other, strict=True):
            if (away := _away(mine, theirs, mine.norm().item())) > 1:
                return f"its {what} are {away * _tolerance(mine):.1e} away from those of the entire model"
    if wanted.gradients.keys() != found.gradients.keys():
        name = next(iter(wanted.gradients.keys() ^ found.gradients.keys()))
        return f"{name} has a gradient in one of them alone"
    largest = max((each.norm().item() for each in wanted.gradients.values()), default=0.0)
    for name, full in wanted.gradients.items():
        here, own = found.gradients[name], full
        if isinstance(here, DTensor):
            [place], here = here.placements, here.to_local()
            assert isinstance(place, Shard), "a part"
            own = full.narrow(place.dim, *exchange.bounds(full.shape[place.dim]))
        if (away := _away(own, here, full.norm().item() + 1e-2 * largest)) > 1:
            return f"the gradient of {name} is {away * _tolerance(own):.1e} away from that of the entire model"
    return ""


def _tolerance(tensor: Tensor) -> float:
    return _RELATIVE if tensor.dtype.itemsize > 2 else _RELATIVE_16


def _away(one: Tensor, other: Tensor, size: float) -> float:
    """The distance between them, where 1 is what is tolerated."""
    if one.shape != other.shape:
        return float("inf")
    away = (one.double() - other.double()).nan_to_num(nan=float("inf") if one.isfinite().all() else 0.0).norm().item()
    return float(away) / (_tolerance(one) * size + 1e-30)
