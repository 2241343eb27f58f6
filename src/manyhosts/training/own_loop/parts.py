"""What belongs to one part of the batch and is kept from step to step: an environment, a buffer, a hidden state.

After each step every worker is given the state of all parts, so that none is lost with the worker that computed it, a
part may move to another worker, and a snapshot has all of them. It costs one collective of that state for each step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from manyhosts.communication.world import World
from manyhosts.elastic.state_transfer import gather
from manyhosts.errors import ConfigError

T = TypeVar("T")


class Part:
    """One part of the batch, while a function of the user's computes it."""

    def __init__(self, index: int, count: int, kept: dict[str, Any], *, stays: bool) -> None:
        """`kept`: the state of this part. `stays`: whether the number of parts is the same on any number of workers."""
        self.index, self.count, self._kept, self._stays = index, count, kept, stays
        self.objects: dict[str, Any] = {}

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """The object of this name that belongs to this part, made by `make()` where there is none yet.

        It has `state_dict()` and `load_state_dict(state)`, or is a dict; with tensors, numbers, words, and lists and
        dicts of them. It is in snapshots, and moves with the part when the workers change.

        Raises:
            ConfigError: there are no virtual workers, so that a part is not the same on another number of workers.
        """
        if not self._stays:
            raise ConfigError(
                f"{name!r} is kept by part, and without virtual_workers the parts change with the number of workers",
                where="run.part.keep",
                fix="set mh.Run(virtual_workers=…), such as 4: each batch is then always cut into 4 parts",
            )
        if name not in self.objects:
            made = self.objects[name] = make()
            if name in self._kept:
                load(made, copy.deepcopy(self._kept[name]))
        found: T = self.objects[name]
        return found

    def state(self) -> dict[str, Any]:
        """What is kept of it now; what no one has asked for since it came stays as it came."""
        return {**self._kept, **self.states()}

    def states(self) -> dict[str, Any]:
        """What of it was asked for in this step, as it is now, for `put_back`."""
        return {name: state_of(name, each) for name, each in self.objects.items()}

    def numbers(self) -> list[Tensor]:
        """All numbers and tensors of `states`, for a comparison of their bits."""
        kept = tree_leaves(self.states())
        return [torch.as_tensor(each) for each in kept if isinstance(each, Tensor | int | float)]

    def put_back(self, before: Mapping[str, Any]) -> None:
        """Keep what was kept at `before = states()`."""
        for name, each in list(self.objects.items()):
            if name in before:
                load(each, before[name])
            else:
                del self.objects[name]


class Parts:
    """Those of one run."""

    def __init__(self, world: World, count: int, *, stays: bool) -> None:
        self.world, self.count, self.stays = world, count, stays
        self.kept: dict[int, dict[str, Any]] = {}
        """The state of each part that has any, after the last step, equal on all workers."""
        self.live: dict[int, Part] = {}
        """Those that were asked for in the step under way: empty as one begins, so that one made again has the same."""

    def of(self, index: int) -> Part:
        """The part of this number."""
        if index not in self.live:
            self.live[index] = Part(index, self.count, copy.deepcopy(self.kept.get(index, {})), stays=self.stays)
        return self.live[index]

    def end_step(self, own: Collection[int]) -> dict[int, dict[str, Any]]:
        """What all parts keep after this step. All workers call this; nothing is changed before all have it.

        `own`: the parts that are this worker's; others it has computed for an audit alone.

        Raises:
            SnapshotError: something that is kept cannot travel.
        """
        states = {str(index): part.state() for index, part in self.live.items() if part.objects and index in own}
        found = dict(self.kept)
        for reported in gather(self.world, states):
            found.update({int(index): state for index, state in reported.items()})
        return found


def state_of(name: str, each: Any) -> Any:
    """What is to be kept of an object.

    Raises:
        ConfigError: it has nothing that could be kept.
    """
    if hasattr(each, "state_dict"):
        return copy.deepcopy(each.state_dict())
    if isinstance(each, Mapping):
        return copy.deepcopy(dict(each))
    raise ConfigError(
        f"{name!r} is a {type(each).__name__}, of which no snapshot could keep anything",
        where="run.part.keep",
        fix="give it state_dict() and load_state_dict(state), or keep a dict of tensors and numbers",
    )


def load(each: Any, state: Any) -> None:
    """Put what `state_of` gave into an object that was made again."""
    if hasattr(each, "load_state_dict"):
        each.load_state_dict(state)
    else:
        each.clear()
        each.update(state)
