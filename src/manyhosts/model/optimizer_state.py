"""An optimizer's state by the names of parameters; and optimizer and schedule as if they had been so from the start.

PyTorch has numbers in place of names. They follow from the order in which one process was given its parameters. A
worker that holds other parts of a model counts otherwise, and reads what it needs by name.

Where a run is resumed under another learning rate, other options or another schedule, its schedule is stepped from
its beginning to the step of the snapshot: so any schedule is where it would be, whatever it computes and from what.
What an optimizer keeps of each parameter (momentum, say) is the snapshot's.
"""

from __future__ import annotations

import copy
import hashlib
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, islice, zip_longest
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.model.optimizer_kernels import KERNELS
from manyhosts.model.trained_module import names_kept

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
    if not _is_numbered(given, optimizer.param_groups):
        return given
    parameters = {
        number: parameter
        for group, own in zip(given["param_groups"], optimizer.param_groups, strict=True)
        for number, parameter in zip(group["params"], own["params"], strict=True)
    }
    for each in parameters.values():
        if id(each) not in known:
            raise _refusal(f"holds a parameter of shape {tuple(each.shape)} that the model has not")
    names = {number: known[id(each)] for number, each in parameters.items()}
    groups = [
        {key: value for key, value in group.items() if not callable(value)}  # functions are the script's
        | {"params": [names[number] for number in group["params"]]}
        for group in given["param_groups"]
    ]
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
    if any(isinstance(name, str) for group in groups for name in group["params"]):
        own = [[known[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        if len(own) != len(groups):
            raise _refusal(f"has {len(own)} groups of parameters, and there were {len(groups)}")
        for here, there in zip(own, groups, strict=True):
            if other := sorted(set(here) ^ set(there["params"])):
                raise _refusal(f"has {other[0]} in another group than it was, or it was not there")
        numbers = {name: number for number, name in enumerate(chain.from_iterable(own))}
        placed = [
            {**there, **_of_script(here), "params": [numbers[name] for name in names]}
            for there, here, names in zip(groups, optimizer.param_groups, own, strict=True)
        ]
        state = {numbers.get(key, key): value for key, value in kept["state"].items()}
        kept = {**kept, "state": state, "param_groups": placed}
    optimizer.load_state_dict(dict(kept))
    _keep_precision(optimizer, kept.get("state", {}))


def _keep_precision(optimizer: Optimizer, state: Mapping[Any, Any]) -> None:
    """Have what `optimizer` keeps in the dtype that it had: PyTorch loads it in that of the parameters."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for number, kept in state.items():
        own = optimizer.state[parameters[number]] if isinstance(number, int) and number < len(parameters) else {}
        for name, value in kept.items() if isinstance(kept, Mapping) else ():  # else a value of the optimizer's own
            loaded = own.get(name)
            if isinstance(value, Tensor) and isinstance(loaded, Tensor) and value.dtype != loaded.dtype:
                own[name] = value.to(loaded.device, copy=True)


def _renamed(state: Mapping[str, Any], names: Mapping[Any, Any]) -> dict[str, Any]:
    """`state` with other keys in place of those of `names`, also within."""
    return {
        names.get(key, key): _renamed(each, names) if isinstance(each, dict) else each for key, each in state.items()
    }


def _of_script(group: Mapping[str, Any]) -> dict[str, Any]:
    """What no snapshot brings: kernels, which are for the device of now, and functions, such as the filters of LARS."""
    return {key: value for key, value in group.items() if key in KERNELS or callable(value)}


def _is_numbered(given: Mapping[str, Any], own_groups: list[dict[str, Any]]) -> bool:
    """Whether a `state_dict` is of PyTorch's form."""
    groups = given.get("param_groups")
    if not isinstance(groups, list) or not isinstance(given.get("state"), dict) or len(groups) != len(own_groups):
        return False
    return all(
        len(group.get("params", ())) == len(mine["params"]) and all(isinstance(each, int) for each in group["params"])
        for group, mine in zip(groups, own_groups, strict=True)
    )


def _refusal(what: str) -> SnapshotError:
    return SnapshotError(
        f"the optimizer {what}",
        where="mh.Trainer(optimizer=…)",
        fix="give it the parameters of the model and of the loss, in the groups that it had when the run began",
    )


_NONE = object()
_OF_SCHEDULES = {"lr", "initial_lr", "max_lr", "min_lr", "betas", "momentum", "base_momentum", "max_momentum"}
"""Options that schedules move."""
_ABOUT_SPEED = {*KERNELS, "differentiable"}
"""Options that change no number."""
_COUNTS = {"base_lrs", "_last_lr", "last_epoch", "_step_count", "_is_initial", "_get_lr_called_within_step"}
"""What a schedule keeps besides its own parameters; its first rates follow from the optimizer's."""
_PROGRESS = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch", "_last_lr")
"""What a plateau schedule has learned from validations, which no one can do again."""


@dataclass(frozen=True, slots=True)
class InitialOptimizer:
    """One optimizer and its schedules."""

    asked: Mapping[str, Any]
    """In plain values: `optimizer`, `groups`, `options` of each group, `schedule`; of an own loop `schedules`, too."""
    options: Sequence[Mapping[str, Any]] = ()
    """Of each group, with what the schedules have put there."""
    schedules: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The `state_dict` of each schedule: by the name of its optimizer, which is empty in a trainer."""

    @classmethod
    def of(
        cls,
        optimizer: Optimizer,
        schedules: Mapping[str, LRScheduler],
        *,
        named: Mapping[str, Optimizer],
        options: Sequence[Mapping[str, Any]],
        model: nn.Module,
    ) -> InitialOptimizer:
        """Look at both before the first step. `named`: what `optimizer` is made of, by the names that `schedules` have;
        `options`: those of the groups before the schedules were made.
        """
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        before = iter(options)
        of_each = {name: list(islice(before, len(each.param_groups))) for name, each in named.items()}
        plain = {name: _plain_schedule(each, of_each[name], named[name]) for name, each in schedules.items()}
        asked = {
            "optimizer": ", ".join(type(each).__name__ for each in named.values()),
            "groups": [
                {
                    "tensors": len(group["params"]),
                    "names": _hash_of(names.get(id(each), "") for each in group["params"]),
                }
                for group in optimizer.param_groups
            ],
            "options": [_plain_options(each) for each in options],
            "schedule": plain.get(""),
            **({} if "" in named else {"schedules": plain}),
        }
        return cls(asked, options_of(optimizer), {n: copy.deepcopy(each.state_dict()) for n, each in schedules.items()})

    def given(self) -> dict[str, Any]:
        """All of it, for a worker that joins: it made its own alone, and rates may follow the number of workers."""
        return {
            "asked": self.asked,
            "options": [{key: each[key] for key in _plain_options(each)} for each in self.options],
            "schedules": {name: without_functions(each) for name, each in self.schedules.items()},
        }

    def taken(self, given: Mapping[str, Any]) -> InitialOptimizer:
        """As that of the worker which gave `given`; what is no plain value, as functions, is this one's."""
        return InitialOptimizer(
            given["asked"],
            [{**own, **each} for own, each in zip(self.options, given["options"], strict=True)],
            {name: {**own, **given["schedules"][name]} for name, own in self.schedules.items()},
        )

    def after_steps(
        self,
        optimizer: Optimizer,
        schedules: Mapping[str, LRScheduler],
        *,
        steps: int,
        kept: Mapping[str, Any],
        asked: Mapping[str, Any],
    ) -> None:
        """Have options and schedules as after `steps` moves of these.

        `kept` is what a snapshot kept of both; `asked`, under which options it was made.

        Raises:
            ConfigError: a schedule is shorter than that.
        """
        for group, options, before in zip_longest(optimizer.param_groups, self.options, asked.get("options", [])):
            plain = _plain_options(options)
            for key in (group.keys() & _OF_SCHEDULES) - options.keys():
                del group[key]
            for key, value in options.items():
                # What an optimizer counts in its groups (d of Prodigy, k of schedule-free ones) is no changed option.
                counts = key not in _OF_SCHEDULES and before is not None and before.get(key, _NONE) == plain.get(key)
                if key not in _ABOUT_SPEED and not counts:
                    group[key] = copy.deepcopy(value)
        before = {name: each for own in kept.get("objects", {}).values() for name, each in own["schedulers"].items()}
        for name, schedule in schedules.items():
            schedule.load_state_dict(copy.deepcopy(dict(self.schedules[name])))
            if isinstance(schedule, ReduceLROnPlateau):
                _resume_plateau(optimizer, schedule, kept, asked)
            else:
                moves = _moves(before.get(name, {}), steps)
                with unwarned():
                    for _ in range(moves):
                        advance(schedule, f"the schedule does not reach to step {moves}, where the run is", "schedule")


def _moves(kept: Mapping[str, Any], steps: int) -> int:
    """How often a schedule has moved, by what a snapshot kept of it; `steps` where it does not count that."""
    inner = kept.get("_schedulers") or [{}]  # a ChainedScheduler has no count of its own
    return int(kept["last_epoch"]) if "last_epoch" in kept else _moves(inner[0], steps) if any(inner) else steps


def advance(
    schedule: LRScheduler, short: str = "the schedule goes no further", where: str = "mh.Trainer(schedule=…)"
) -> None:
    """Have `schedule` move on.

    Raises:
        ConfigError: it is shorter than the run; `short` and `where` say so.
    """
    try:
        schedule.step()
    except ValueError as cause:
        raise ConfigError(
            f"{short}: {cause}",
            where=where,
            fix="make it as long as the entire run is to be, counted from the first step",
        ) from cause


@contextmanager
def unwarned() -> Iterator[None]:
    """Within, PyTorch does not warn of a schedule whose first step comes before any of the optimizer's.

    fp16 leaves out steps whose gradients overflow; the schedule continues all the same, on every worker.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        yield


def options_of(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group, copied."""
    return [
        {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]


def without_functions(state: Mapping[str, Any]) -> dict[str, Any]:
    """Of a schedule's state what can be kept: functions the script makes again."""
    return {
        key: value
        for key, value in state.items()
        if not any(map(callable, value if isinstance(value, list) else [value]))
    }


def _resume_plateau(
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
    """Its kind, its own parameters, and what it has put into the optimizer's groups besides the rate."""
    now = [
        _plain_options({key: group[key] for key in group.keys() - {"params", "lr", "initial_lr"}})
        for group in optimizer.param_groups
    ]
    groups = [
        {key: value for key, value in new.items() if key not in old or old[key] != value}
        for old, new in zip(map(_plain_options, before), now, strict=True)
    ]
    own = _plain_values(_own_parameters(schedule.state_dict()))
    return {"kind": type(schedule).__name__, **own, **({"groups": groups} if any(groups) else {})}


def _own_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's state without its counts; those of schedules inside it likewise."""
    return {
        key: [_own_parameters(inner) for inner in value] if key == "_schedulers" else value
        for key, value in state.items()
        if key not in _COUNTS
    }


def _plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    return _plain_values({key: value for key, value in options.items() if key not in _ABOUT_SPEED})


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are numbers, texts, or lists and mappings of them: what a function does no one can compare."""
    plain = {str(key): _plain(value) for key, value in sorted(values.items())}
    return {key: value for key, value in plain.items() if value is not ...}


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
