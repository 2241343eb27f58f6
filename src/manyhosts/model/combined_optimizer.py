"""Several named optimizers as one, for everything that saves, compares or moves the state of an optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from manyhosts.errors import ConfigError


def each_of(optimizer: Optimizer) -> Mapping[str, Optimizer]:
    """The optimizers that `optimizer` is made of, by name; itself, without one, where it is not several."""
    return optimizer.named if isinstance(optimizer, CombinedOptimizer) else {"": optimizer}


class _States(MutableMapping[Any, Any]):
    """Of all optimizers together: what is changed or removed here is so in the optimizer that has it."""

    def __init__(self, combined: CombinedOptimizer) -> None:
        self.combined = combined

    def _of(self, key: Any) -> tuple[Any, Any]:
        """The state that has `key`, and how it is called there."""
        if not isinstance(key, Tensor):
            return self.combined.named[key[0]].state, key[1]
        for each in self.combined.named.values():
            if key in each.state or any(key is one for group in each.param_groups for one in group["params"]):
                return each.state, key
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        state, own = self._of(key)
        return state[own]

    def __setitem__(self, key: Any, kept: Any) -> None:
        state, own = self._of(key)
        state[own] = kept

    def __delitem__(self, key: Any) -> None:
        state, own = self._of(key)
        del state[own]

    def __iter__(self) -> Iterator[Any]:
        for name, each in self.combined.named.items():
            yield from (key if isinstance(key, Tensor) else (name, key) for key in each.state)

    def __len__(self) -> int:
        return sum(len(each.state) for each in self.combined.named.values())


class CombinedOptimizer(Optimizer):
    """The parameter groups and the state of several optimizers, one after another. Each of them steps by itself."""

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        """Take `named` optimizers, whose parameters do not overlap.

        Raises:
            ConfigError: one of them has a state in a form of its own, or two of them share a parameter.
        """
        self.named = dict(named)
        self._is_made = False
        owner: dict[int, str] = {}
        for name, each in named.items():
            if type(each).state_dict is not Optimizer.state_dict:
                raise ConfigError(
                    f"optimizer {name!r} is a {type(each).__name__} with a state_dict() of its own",
                    where="mh.Run(optimizers=…)",
                    fix="keep what it remembers in optimizer.state and param_groups, as PyTorch's optimizers do",
                )
            for parameter in (parameter for group in each.param_groups for parameter in group["params"]):
                if (other := owner.setdefault(id(parameter), name)) != name:
                    raise ConfigError(
                        f"optimizers {other!r} and {name!r} both change a parameter of shape {tuple(parameter.shape)}",
                        where="mh.Run(optimizers=…)",
                        fix="give each parameter to one optimizer",
                    )
        groups = (group for each in named.values() for group in each.param_groups)
        super().__init__([{"params": list(each["params"])} for each in groups], {})
        self.take_groups()
        self._is_made = True

    def take_groups(self) -> None:
        """Have the groups that the optimizers have now: one whose state was loaded has new ones."""
        self.param_groups = [group for each in self.named.values() for group in each.param_groups]

    @property
    def state(self) -> Any:
        """By parameter, those of the optimizers themselves; what one keeps of none, by its name and the key."""
        return _States(self)

    @state.setter
    def state(self, given: Any) -> None:
        """Nothing: `Optimizer.__init__` begins with an empty one, and each optimizer has its own."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take none but those of the optimizers: which of them would step it?

        Raises:
            ConfigError: somebody else calls it.
        """
        if self._is_made:
            raise ConfigError(
                "a group of parameters is added to all optimizers of the run together",
                where="optimizer.add_param_group",
                fix="give all parameters in mh.Run(optimizers=…), and freeze those of later until then (mh.Freeze)",
            )
        super().add_param_group(param_group)

    def step(self, closure: Any = None) -> Any:
        """Never called: `run.update(name)` steps the optimizer of that name."""
        raise AssertionError("each optimizer steps by itself")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Give each optimizer its own groups, and what was kept of its own parameters."""
        groups, begin = list(state_dict["param_groups"]), 0
        for name, each in self.named.items():
            own, groups = groups[: len(each.param_groups)], groups[len(each.param_groups) :]
            end = begin + sum(len(group["params"]) for group in own)
            each.load_state_dict(
                {
                    "state": {
                        key - begin if isinstance(key, int) else key[1]: kept
                        for key, kept in state_dict["state"].items()
                        if (begin <= key < end if isinstance(key, int) else key[0] == name)
                    },
                    "param_groups": [{**group, "params": [key - begin for key in group["params"]]} for group in own],
                }
            )
            begin = end
        self.take_groups()
