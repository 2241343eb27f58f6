"""Optimizer and schedule as the script made them, and as they would stand had they been so from the first step on.

Where a run is resumed under another learning rate, other options or another schedule, its schedule is stepped from
its beginning to the step of the snapshot: so any schedule stands where it would stand, whatever it computes and from
what. What an optimizer keeps of each parameter (momentum, say) is the snapshot's.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhosts.errors import ConfigError
from manyhosts.training.setup.optimizer_kernels import KERNELS

_ABOUT_SPEED = {*KERNELS, "differentiable"}
"""Options that change no number."""
_COUNTS = {"base_lrs", "_last_lr", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step"}
"""What a schedule keeps beside its own parameters; its first rates follow from the optimizer's."""
_PROGRESS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
"""What a plateau schedule has learned from validations, which nobody can do again."""


@dataclass(frozen=True, slots=True)
class InitialOptimizer:
    """One optimizer and its schedule."""

    asked: Mapping[str, Any]
    """In plain values: `optimizer`, `groups`, `options` of each group, `schedule`."""
    options: Sequence[Mapping[str, Any]] = ()
    """Of each group, with what the schedule has put there."""
    schedule: Mapping[str, Any] = field(default_factory=dict)
    """The schedule's `state_dict`."""

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        *,
        options: Sequence[Mapping[str, Any]],
        model: nn.Module,
    ) -> InitialOptimizer:
        """Look at both before the first step. `options`: those of the groups before the schedule was made."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        asked = {
            "optimizer": type(optimizer).__name__,
            "groups": [
                {
                    "tensors": len(group["params"]),
                    "names": _hash_of(names.get(id(each), "") for each in group["params"]),
                }
                for group in optimizer.param_groups
            ],
            "options": [_plain_options(each) for each in options],
            "schedule": None if schedule is None else _plain_schedule(schedule, options, optimizer),
        }
        state = {} if schedule is None else copy.deepcopy(schedule.state_dict())
        return cls(asked, options_of(optimizer), state)

    def stand(
        self, optimizer: Optimizer, schedule: LRScheduler | None, *, steps: int, kept: Mapping[str, Any], asked: Any
    ) -> None:
        """Have options and schedule as after `steps` steps. `kept` is what a snapshot held of both; `asked`, under
        which options it was made.

        Raises:
            ConfigError: the schedule is shorter than that.
        """
        for group, options in zip(optimizer.param_groups, self.options, strict=True):
            speed = {key: group[key] for key in _ABOUT_SPEED & group.keys()}
            for key in group.keys() - {"params"}:
                del group[key]
            group.update({**copy.deepcopy(dict(options)), **speed})
        if schedule is None:
            return
        schedule.load_state_dict(copy.deepcopy(dict(self.schedule)))
        if isinstance(schedule, ReduceLROnPlateau):
            _stand_on_plateau(optimizer, schedule, kept, asked)
            return
        done = int(kept["schedule"].get("last_epoch", steps))
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
                for _ in range(done):
                    schedule.step()
        except ValueError as cause:
            raise ConfigError(
                f"the schedule does not reach to step {done}, where the run stands: {cause}",
                where="schedule",
                fix="make it as long as the whole run is to be, counted from the first step",
            ) from cause


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, copied."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def _stand_on_plateau(
    optimizer: Optimizer, schedule: ReduceLROnPlateau, kept: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:
    """Keep what validations have taught it, and reduce the rates of now as much as those of before were."""
    if (asked["schedule"] or {}).get("kind") != ReduceLROnPlateau.__name__:
        return
    progress = {key: kept["schedule"][key] for key in _PROGRESS if key in kept["schedule"]}
    schedule.load_state_dict({**schedule.state_dict(), **progress})
    for group, before, first in zip(
        optimizer.param_groups, kept["optimizer"]["param_groups"], asked["options"], strict=True
    ):
        if first.get("lr"):
            group["lr"] = float(group["lr"]) * (float(before["lr"]) / first["lr"])


def _hash_of(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def _plain_schedule(schedule: LRScheduler, before: Sequence[Mapping[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
    """Its kind, its own parameters, and what it has put into the optimizer's groups beside the rate."""
    groups = []
    for old, group in zip(map(_plain_options, before), optimizer.param_groups, strict=True):
        now = _plain_options({key: group[key] for key in group.keys() - {"params", "lr", "initial_lr"}})
        groups.append({key: value for key, value in now.items() if key not in old or old[key] != value})
    own = _plain_values(_own_parameters(schedule.state_dict()))
    return {"kind": type(schedule).__name__, **own, **({"groups": groups} if any(groups) else {})}


def _own_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's state without its counts; those of schedules inside it likewise."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        if key == "_schedulers":
            found[key] = [_own_parameters(inner) for inner in value]
        elif key not in _COUNTS:
            found[key] = value
    return found


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return _plain_values({key: value for key, value in options.items() if key not in _ABOUT_SPEED})


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers, texts, or lists and mappings of them: what a function does nobody can compare."""
    found = {}
    for key, value in sorted(values.items()):
        plain = _plain(value)
        if plain is not ...:
            found[str(key)] = plain
    return found


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it; `...` where it cannot."""
    if isinstance(value, Tensor):
        value = value.tolist() if value.numel() <= 1 else ...
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return _plain_values(value)
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return ... if any(item is ... for item in items) else items
    return ...
