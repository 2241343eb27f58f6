"""What cannot be kept in parts, or is used where it is not gathered: said in a sentence, before it could go wrong."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from manyhosts.communication.layout import as_real
from manyhosts.config.fully_sharded import FSDP
from manyhosts.errors import ConfigError
from manyhosts.strategies.cut_model import check_hooks, check_memory
from manyhosts.strategies.units import is_uncut


def check_placeable(root: nn.Module, units: Mapping[str, nn.Module], config: FSDP) -> None:
    """See that each parameter of `root` can be cut, with those next to it in its unit.

    Raises:
        ConfigError: one cannot; or it carries what would be lost with the tensor that takes its place.
    """
    check_hooks(root, "strategy='fsdp'")
    check_memory(root, "strategy='fsdp'")
    for name, module in root.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"the module {name!r} is TorchScript, whose parameters cannot be taken out of it",
                where="strategy='fsdp'",
                fix="leave torch.jit out: compile=True makes a model faster, too; or choose strategy='ddp'",
            )
        if config.gather != "exact" and isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise ConfigError(
                f"parameters are gathered in bf16, and the BatchNorm layer {name!r} computes in fp32 only",
                where="FSDP(gather=…)",
                fix='leave gather out: "exact" gathers them as they are',
            )
    owner = {id(each): name for name, unit in units.items() for each in unit.parameters()}
    first: dict[str, tuple[str, nn.Parameter]] = {}
    for name, parameter in root.named_parameters():
        if parameter.numel() == 0:
            raise ConfigError(
                f"the parameter {name!r} has no elements, which cannot be cut into parts",
                where="strategy='fsdp'",
                fix="leave it out",
            )
        if not parameter.requires_grad or is_uncut(parameter):
            continue
        unit = owner.get(id(parameter), "")
        other, earlier = first.setdefault(unit, (name, parameter))
        if earlier.dtype != parameter.dtype:
            raise ConfigError(
                f"the parameters {other!r} and {name!r} are gathered together, and one is of {_word(earlier)}, the "
                f"other of {_word(parameter)}",
                where="strategy='fsdp'",
                fix="make them of one dtype (precision='bf16' computes in bf16 all the same), or name the module that "
                "holds one of them as a unit: mh.FSDP(units=[…])",
            )


def _word(parameter: nn.Parameter) -> str:
    return str(parameter.dtype).removeprefix("torch.")


class Replaced:
    """The tensors in whose place a model now has parts. Who kept one elsewhere trains something that no one keeps."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: before it is cut."""
        self._left = [
            (name, weakref.ref(each))
            for name, each in model.named_parameters()
            if each.requires_grad and not is_uncut(each)
        ]

    def check(self) -> None:
        """See that none of them has been given a gradient.

        Raises:
            ConfigError: one has: it took part in the loss in place of the model's own.
        """
        for name, each in self._left:
            if (parameter := each()) is not None and parameter.grad is not None:
                raise ConfigError(
                    f"the model computes with the parameter {name!r} through something that was given it before it was "
                    "cut into parts, and would never see it change",
                    where="strategy='fsdp'",
                    fix="take it from its module in each forward pass: keep it in no list, dict, partial or closure",
                )


class Given:
    """The lists, dicts and dataclasses that a unit is given: it sees copies, so what it writes there is lost."""

    def __init__(self, name: str, *, always: bool) -> None:
        """`always`: PyTorch copies them on their way to a device, and not only where gradients go back through them."""
        self.name, self.always = name, always
        self._before: list[list[Any]] = []

    def note(self, module: nn.Module, inputs: Any, named: Any) -> None:
        """The unit is called with this."""
        given = _held((inputs, named))
        has_gradient = torch.is_grad_enabled() and any(torch.is_tensor(each) and each.requires_grad for each in given)
        self._before.append(_inside(inputs, named) if self.always or has_gradient else [])

    def compare(self, module: nn.Module, inputs: Any, named: Any, output: Any) -> None:
        """See that it has written nothing.

        Raises:
            ConfigError: it has.
        """
        before = self._before.pop()
        now = _inside(inputs, named) if before else []
        if len(now) != len(before) or any(one is not other for one, other in zip(before, now, strict=True)):
            raise ConfigError(
                f"{self.name} writes into a list, a dict or a dataclass that it is given, of which it sees a "
                "copy: no one would see what it has written",
                where="strategy='fsdp'",
                fix="let forward return what it has computed, and put it there outside",
            )


def holders_of(unit: nn.Module) -> list[tuple[str, Mapping[str, Tensor | None]]]:
    """By the name of each module of a unit, where it has its parameters; without the units inside it."""
    inside = {
        each
        for other in unit.modules()
        if other is not unit and isinstance(other, FSDPModule)
        for each in other.modules()
    }
    return [(name, each._parameters) for name, each in unit.named_modules() if each._parameters and each not in inside]


def see_own_parameters(
    unit: str, holders: Sequence[tuple[str, Mapping[str, Tensor | None]]], module: nn.Module, inputs: Any
) -> None:
    """See that the parameters of a unit are its own when it is called: PyTorch gathers these in their place.

    Raises:
        ConfigError: others have been put there for this call.
    """
    for part_name, parameters in holders:
        for name, each in parameters.items():
            if each is not None and not isinstance(each, nn.Parameter):
                where = ".".join(filter(None, (unit, part_name, name)))
                raise ConfigError(
                    f"the parameter {where!r} was replaced for a call (torch.func.functional_call, or a "
                    "parametrization of your own), and its parts would be gathered in place of what was put there",
                    where="strategy='fsdp'",
                    fix="compute with the weights in the forward pass of the module that holds them "
                    "(torch.nn.functional), or choose strategy='ddp'",
                )


class Written:
    """Which gathered parameters a forward pass writes into: they are let go of, and what is kept does not change."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[str, nn.Parameter, int]] = {}
        self._calls = Counter[str]()
        self._sums: dict[str, list[tuple[str, nn.Parameter, Tensor]]] = {}

    def note(self, unit: str, module: nn.Module, inputs: Any) -> None:
        """The unit is called, with its parameters gathered."""
        for name, each in _gathered(module):
            self._seen.setdefault(id(each), (f"{unit}.{name}".lstrip("."), each, each._version))
        self._calls[unit] += 1
        self._sums.pop(unit, None)  # a call that a checkpoint makes again may break off before its end
        if self._calls[unit] & self._calls[unit] - 1 == 0:
            self._sums[unit] = [
                (f"{unit}.{name}".lstrip("."), each, _sums(each))
                for name, each in _gathered(module)
                if each.requires_grad
            ]

    def compare(self, unit: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """See that its numbers are those that it was called with: what is written through `.data` counts no version.

        Looked at in calls 1, 2, 4, 8 and so on, for each costs a pass over the parameters.

        Raises:
            ConfigError: some are others.
        """
        for name, parameter, before in self._sums.pop(unit, ()):
            if not torch.equal(before, _sums(parameter)):
                raise _written(name)

    def forget(self) -> None:
        """Know of no pass: one broke off."""
        self._seen.clear()
        self._sums.clear()

    def check(self) -> None:
        """See that nothing was written since they were noted, and forget them.

        Raises:
            ConfigError: something was.
        """
        seen, self._seen = self._seen, {}
        for name, parameter, version in seen.values():
            if parameter._version != version:
                raise _written(name)


def _gathered(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(n, each) for n, each in module.named_parameters() if not isinstance(each, DTensor) and not is_uncut(each)]


def _sums(parameter: nn.Parameter) -> Tensor:
    """Two numbers that change with any of its own."""
    values = as_real(parameter.detach())
    both = (values.sum(dtype=torch.float64), torch.linalg.vector_norm(values, dtype=torch.float64))
    return torch.stack(both).nan_to_num()


def _written(name: str) -> ConfigError:
    return ConfigError(
        f"the parameter {name!r} is written into while the model is computed: that is a copy, which is let go of, and "
        "the parameter itself would stay as it was",
        where="strategy='fsdp'",
        fix="write in the optimizer's step, or in step= before the model is called; or choose strategy='ddp'",
    )


def _inside(inputs: Any, named: Any) -> list[Any]:
    """All that is inside what a unit is given. Tensors that it is given themselves may be others after a hook."""
    return [inner for each in (*inputs, *named.values()) for inner in _held(each)]


def _held(given: Any) -> Iterator[Any]:
    """All that is in lists, tuples, dicts and dataclasses, at any depth."""
    if is_dataclass(given) and not isinstance(given, type):
        inside: Iterable[Any] = [getattr(given, each.name) for each in fields(given)]
    elif isinstance(given, dict):
        inside = given.values()
    elif isinstance(given, list | tuple):
        inside = given
    else:
        return
    for each in inside:
        yield each if torch.is_tensor(each) or not isinstance(each, list | tuple | dict) else None
        yield from _held(each)


@contextmanager
def misuse_told() -> Iterator[None]:
    """Within, the model is computed, forward or backward.

    Raises:
        ConfigError: it was used in a way in which its parts are not gathered.
    """
    try:
        yield
    except (RuntimeError, AssertionError) as cause:
        if "storage of size 0" in str(cause):
            raise ConfigError(
                "the backward pass comes to a unit by something that its forward pass has computed and not returned, "
                "such as an attribute, or a second time (create_graph), and its weights are not gathered for that",
                where="strategy='fsdp'",
                fix="return it from the unit's forward pass; gradients of gradients need strategy='ddp'",
            ) from cause
        if "DTensor" not in str(cause) and "lazily init" not in str(cause):
            raise
        raise ConfigError(
            "a parameter was used outside the forward pass of the module that holds it, where it is not gathered",
            where="strategy='fsdp'",
            fix="call the model itself, not its submodules or their weights; name a unit that holds both with "
            "mh.FSDP(units=[…]); or add in the optimizer (weight_decay) what the loss takes of the weights",
        ) from cause
