"""An optimizer's state by the names of parameters, where PyTorch has their numbers.

Numbers follow from the order in which one process was given its parameters. A worker that holds other parts of a model
counts otherwise, and reads what it needs by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from manyhosts.errors import SnapshotError
from manyhosts.training.setup.optimizer_kernels import KERNELS
from manyhosts.training.setup.trained_module import names_kept

_BY_ID = "id of "
"""Before the name of a parameter, where an optimizer has `id(parameter)`."""


def by_name(optimizer: Optimizer, module: nn.Module) -> dict[str, Any]:
    """The optimizer's `state_dict` with the name of a parameter of `module` in place of each number.

    What an optimizer of the script's own gives in another form is left as it is, but for `id(parameter)`: no other
    process has that number, and two workers have one of their own each.

    Raises:
        SnapshotError: it holds a parameter that is not the module's, or keeps something under the name of one.
    """
    known = names_kept(module)
    given = _renamed(optimizer.state_dict(), {number: _BY_ID + name for number, name in known.items()})
    held = optimizer.param_groups
    if not _is_numbered(given, held):
        return given
    names: dict[Any, str] = {}
    groups = []
    for group, parameters in zip(given["param_groups"], (each["params"] for each in held), strict=True):
        for number, parameter in zip(group["params"], parameters, strict=True):
            if id(parameter) not in known:
                raise _refusal(f"holds a parameter of shape {tuple(parameter.shape)} that the model has not")
            names[number] = known[id(parameter)]
        kept = {key: value for key, value in group.items() if not callable(value)}  # functions are the script's
        groups.append({**kept, "params": [names[number] for number in group["params"]]})
    if taken := set(names.values()) & given["state"].keys():
        raise _refusal(f"keeps something under {min(taken)!r}, which is the name of a parameter")
    state = {names.get(key, key): value for key, value in given["state"].items()}
    return {**given, "state": state, "param_groups": groups}


def load_by_name(optimizer: Optimizer, module: nn.Module, kept: Mapping[str, Any]) -> None:
    """Give the optimizer what `by_name` gave, or what PyTorch does: snapshots of before have numbers.

    Raises:
        SnapshotError: it is of other parameters, or of the same in other groups.
    """
    known = names_kept(module)
    kept = _renamed(kept, {_BY_ID + name: number for number, name in known.items()})
    groups = kept.get("param_groups", [])
    if not any(isinstance(name, str) for group in groups for name in group["params"]):
        optimizer.load_state_dict(dict(kept))
        return
    own = [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    if len(own) != len(groups):
        raise _refusal(f"has {len(own)} groups of parameters, and there were {len(groups)}")
    for here, there in zip(own, (group["params"] for group in groups), strict=True):
        if other := sorted(set(here) ^ set(there)):
            raise _refusal(f"has {other[0]} in another group than it was, or it was not there")
    numbers = {name: number for number, name in enumerate(name for names in own for name in names)}
    state = {numbers.get(key, key): value for key, value in kept["state"].items()}
    placed = [
        {**there, **_of_script(here), "params": [numbers[name] for name in names]}
        for there, here, names in zip(groups, optimizer.param_groups, own, strict=True)
    ]
    optimizer.load_state_dict({**kept, "state": state, "param_groups": placed})


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """`state` with other keys in place of those of `names`, also within."""
    return {
        names.get(key, key): _renamed(each, names) if isinstance(each, dict) else each for key, each in state.items()
    }


def _of_script(group: Mapping[str, Any]) -> dict[str, Any]:
    """What no snapshot brings: kernels, which are for the device of now, and functions, such as the filters of LARS."""
    return {key: value for key, value in group.items() if key in KERNELS or callable(value)}


def _is_numbered(given: Mapping[str, Any], held: list[dict[str, Any]]) -> bool:
    """Whether a `state_dict` is of PyTorch's form."""
    groups = given.get("param_groups")
    if not isinstance(groups, list) or not isinstance(given.get("state"), dict) or len(groups) != len(held):
        return False
    return all(
        len(group.get("params", ())) == len(mine["params"]) and all(isinstance(each, int) for each in group["params"])
        for group, mine in zip(groups, held, strict=True)
    )


def _refusal(what: str) -> SnapshotError:
    return SnapshotError(
        f"the optimizer {what}",
        where="mh.Trainer(optimizer=…)",
        fix="give it the parameters of the model and of the loss, in the groups that it had when the run began",
    )
