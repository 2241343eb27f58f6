"""Parameter groups by name: no decay on norms and biases, another rate for the backbone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.callbacks.freezing import matches
from manyhosts.errors import ConfigError
from manyhosts.model.trained_module import model_of, names_kept
from manyhosts.table import nearest

_KINDS = ("norms", "biases")


class Parameters(list[nn.Parameter]):
    """What `optimizer` is called with: a list that knows what its parameters are called in the model."""

    def __init__(self, found: Iterable[nn.Parameter], module: nn.Module, names: Mapping[int, str]) -> None:
        """`names`: by the `id` of each."""
        super().__init__(found)
        self.names = [names[id(each)] for each in self]
        norms = {
            id(own)
            for layer in module.modules()
            for own in layer.parameters(recurse=False)
            if "norm" in type(layer).__name__.lower()
        }
        self.kinds = {
            "norms": {name for name, each in zip(self.names, self, strict=True) if id(each) in norms},
            "biases": {name for name in self.names if name.rpartition(".")[2] == "bias"},
        }
        self.options: set[str] = set()
        """The names of those that `groups` has given any of them."""

    def with_shapes_alone(self) -> Parameters:
        """As many parameters of the same shapes, names and kinds, on the meta device."""
        made = copy.copy(self)
        made[:] = [nn.Parameter(torch.empty_like(each, device="meta")) for each in self]
        return made


MakeOptimizer = Callable[[Parameters], Optimizer]


def parameters_of(module: nn.Module, thawed: Collection[str] = ()) -> Parameters:
    """Those of what is trained, and those that are frozen for now and `thawed` later, by their names in the model."""
    later = {id(each) for name, each in model_of(module).named_parameters() if name in thawed}
    chosen = [each for each in module.parameters() if each.requires_grad or id(each) in later]
    return Parameters(chosen, module, {i: name.removeprefix("model.") for i, name in names_kept(module).items()})


def groups(params: Sequence[nn.Parameter], options: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The parameter groups for an optimizer, by names: `mh.groups(params, {"norms": {"weight_decay": 0.0}})`.

    `params`: what `optimizer=` is called with. A key of `options` is a name (`"backbone"`, with all below it), a
    pattern (`"*.embedding.*"`), or `"norms"` or `"biases"`: those of every layer whose class has `norm` in its name,
    and all that are called `bias`. A parameter that several fit has the options of all; of two that say the same the
    later one counts. The rest comes first, with the optimizer's own options. Each parameter is in one group.

    Raises:
        ConfigError: `params` has no names, or a key fits none of them.
    """
    if not isinstance(params, Parameters):
        raise ConfigError(
            f"mh.groups is given a {type(params).__name__} of parameters without names",
            where="mh.Trainer(optimizer=…)",
            fix="hand on what optimizer is called with: optimizer=lambda params: torch.optim.AdamW(mh.groups(params, "
            '{"norms": {"weight_decay": 0.0}}), lr=1e-3)',
        )
    for key, asked in options.items():
        if not isinstance(asked, Mapping):
            raise ConfigError(
                f"the options of {key!r} are a {type(asked).__name__}, not a dict",
                where=f"mh.groups(params, {{{key!r}: …}})",
                fix=f'name the option, such as {{{key!r}: {{"lr": 1e-5}}}}',
            )
        if not any(_fits(name, key, params) for name in params.names):
            tops = dict.fromkeys(name.partition(".")[0] for name in params.names)
            raise ConfigError(
                f"no parameter is called {key!r}, or is below it",
                where=f"mh.groups(params, {{{key!r}: …}})",
                fix=f"known: {', '.join((*tops, *_KINDS))}, and what is below",
            )
    params.options |= {option for asked in options.values() for option in asked}
    found: dict[tuple[str, ...], dict[str, Any]] = {(): {"params": []}}
    for name, parameter in zip(params.names, params, strict=True):
        keys = tuple(key for key in options if _fits(name, key, params))
        group = found.setdefault(keys, {"params": [], **{k: v for key in keys for k, v in options[key].items()}})
        group["params"].append(parameter)
    return [group for group in found.values() if group["params"]]


_SLIPS = {"learning_rate": "lr", "rate": "lr", "wd": "weight_decay", "decay": "weight_decay"}
"""What options are called elsewhere."""


def check_options(params: Sequence[nn.Parameter], optimizer: Optimizer, notes: list[str]) -> None:
    """See that `optimizer` has each option that `groups` has given some of `params`, and each group a rate.

    One that is called as none of its own, nearly, may be a schedule's: that it does not read it is added to `notes`.

    Raises:
        ConfigError: it has not: PyTorch keeps such an option, and nothing reads it.
    """
    known, kind = optimizer.defaults, type(optimizer).__name__
    for option in sorted(getattr(params, "options", set()) - known.keys()) if known else ():
        meant = f"did you mean {_SLIPS[option]!r}? " if option in _SLIPS else nearest(option, [*known])
        if meant:
            raise ConfigError(
                f"{kind} has no option {option!r}, and would not read it",
                where="mh.groups(…)",
                fix=f"{meant}it has {', '.join(known)}",
            )
        notes.append(f"{kind} does not read the option {option!r} that mh.groups gives it")
    for number, group in enumerate(optimizer.param_groups):
        if not isinstance(rate := group.get("lr"), Real | Tensor):
            raise ConfigError(
                f"the learning rate of group {number} of {kind} is {rate!r}",
                where="mh.Trainer(optimizer=…)",
                fix="give a number, lr=1e-3 say: schedules, warm-up and records take the rate from there",
            )


def _fits(name: str, key: str, params: Parameters) -> bool:
    return name in params.kinds[key] if key in _KINDS else matches(name, key)
