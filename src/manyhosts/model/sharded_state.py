"""A state whose tensors several workers hold together: given to a snapshot in parts, and taken up block by block."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.holding import Holding
from manyhosts.communication.layout import write
from manyhosts.errors import SnapshotError
from manyhosts.model.trained_module import loss_state, model_of, names_kept
from manyhosts.records.tensor_parts import Box
from manyhosts.snapshot.slices import StoredTensor


def in_parts(state: Any, holding: Holding) -> Any:
    """`state` with what this worker gives of each tensor in the place of the tensor."""
    return _each(state, Tensor, holding.part)


def local_state(state: Any, holding: Holding) -> Any:
    """`state` with what lies in this worker's memory in the place of each tensor, for one that has the same parts."""
    return _each(state, Tensor, holding.local)


def _each(state: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """The nested `state` with what `change` makes of each value of this kind in its place."""
    return _each_beside(state, None, lambda value, _: change(value) if isinstance(value, kind) else value)


def _each_beside(state: Any, own: Any, change: Callable[[Any, Any], Any]) -> Any:
    """The nested `state` with what `change` makes of each value, and the one in its place in `own`: None for none."""
    if isinstance(state, Mapping) and type(state) is not Counter:  # the milestones of a MultiStepLR: of numbers alone
        inside = own if isinstance(own, Mapping) else {}
        return {key: _each_beside(value, inside.get(key), change) for key, value in state.items()}
    if type(state) in (list, tuple):  # of tensors, as Shampoo keeps them, none is that of a parameter
        return type(state)(_each_beside(value, None, change) for value in state)
    return change(state, own)


def as_held(given: Any, own: Any, holding: Holding) -> Any:
    """What `local_state` gave on such a worker, each tensor cut as the one in its place in `own`, if any."""

    def cut(given: Any, own: Any) -> Any:
        is_part = isinstance(given, Tensor) and isinstance(own, Tensor) and holding.local(own).shape == given.shape
        return holding.like(own, given) if is_part else given

    return _each_beside(given, own, cut)


def by_name_kept(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of what is trained, by the names that snapshots have."""
    return dict(zip(names_kept(module).values(), module.parameters(), strict=True))


def beside_kept(kept: Mapping[str, Any], own: Mapping[str, Tensor]) -> dict[str, Any]:
    """In the place of each value that an optimizer keeps of a parameter: that parameter, as `own` has it by name."""
    return {name: dict.fromkeys(each, own.get(name)) for name, each in kept.items() if isinstance(each, Mapping)}


class TakenUp(Mapping[str, Any]):
    """What a snapshot keeps, each tensor cut as this worker holds it: read when it is asked for, value by value.

    What is where a parameter, or what the optimizer keeps of its shape, belongs is cut as the parameter is; all
    else is read entirely.
    """

    def __init__(
        self, stored: Mapping[str, Any], module: nn.Module, holding: Holding, callbacks: Mapping[str, Any]
    ) -> None:
        """`stored`: the state, with a `StoredTensor` in the place of each tensor. `module`: what is trained.

        `callbacks`: what callbacks hold now, by which what is kept of theirs is cut.
        """
        self._stored, self._module, self._holding, self._callbacks = stored, module, holding, callbacks

    def __len__(self) -> int:
        return len(self._stored)

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __getitem__(self, key: str) -> Any:
        """The value under `key`.

        Raises:
            KeyError: there is none.
            SnapshotError: it cannot be read.
        """
        stored = self._stored[key]
        if key == "callbacks":
            return _each_beside(stored, self._callbacks, self._like)
        if key in ("model", "loss"):
            own = model_of(self._module).state_dict() if key == "model" else loss_state(self._module)
            tensors = {name: each for name, each in own.items() if isinstance(each, Tensor)}  # and no nested state
            return _each_beside(stored, tensors, self._like)
        if key == "optimizer" and isinstance(stored.get("state"), Mapping):
            parameters = by_name_kept(self._module)
            state = {
                name: each
                for name, each in stored["state"].items()
                if name not in parameters or self._holding.holds(parameters[name])
            }
            return _each_beside({**stored, "state": state}, {"state": beside_kept(state, parameters)}, self._like)
        return full_values(stored)

    def _like(self, value: Any, own: Any) -> Any:
        if not isinstance(value, StoredTensor) or not isinstance(own, Tensor) or tuple(own.shape) != value.shape:
            return full_values(value)
        block = self._holding.block(own)
        is_all = tuple(block.local.shape) == value.shape  # what is cut may lie with one worker, as a bias of one number
        found = value.full() if is_all else value.block(block.box)
        return found if found.is_meta else self._holding.like(own, found.to(block.local.device))  # meta: only asked for


def full_values(stored: Any) -> Any:
    """`stored` with complete tensors."""
    return _each(stored, StoredTensor, StoredTensor.full)


@torch.no_grad()
def put_cut(
    own: Mapping[str, Any], given: Mapping[str, Any], holding: Holding, *, may_lack: Collection[str] = ()
) -> None:
    """Copy the tensors of `given`, complete, cut as those of `own` or not read yet, into these, one after another.

    `may_lack`: names of which `given` may have nothing; these stay as they are.

    Raises:
        SnapshotError: they have other names or shapes.
    """
    if other := sorted((own.keys() ^ given.keys()) - (set(may_lack) - given.keys())):
        raise SnapshotError(
            f"it is of another model or loss: {other[0]} is on one side alone",
            where="mh.Trainer(model=…, loss=…)",
            fix="take back the change, or begin again in another folder (of a run: --run-dir)",
        )
    for name, tensor in own.items():
        if not isinstance(tensor, Tensor) or name not in given:
            continue
        block, value = holding.block(tensor), given[name]
        if tuple(value.shape) not in (block.shape, tuple(block.local.shape)):
            raise SnapshotError(
                f"it is of another model or loss: {name} has shape {tuple(value.shape)} there and {block.shape} here",
                where="mh.Trainer(model=…, loss=…)",
                fix="take back the change, or begin again in another folder (of a run: --run-dir)",
            )
        stored_here = value.block(block.box) if isinstance(value, StoredTensor) else holding.local(value)
        if tuple(stored_here.shape) != tuple(block.local.shape):
            stored_here = stored_here[block.box.within(Box.full(block.shape))]
        write(block.local, stored_here)


def full_state(state: Mapping[str, Any], holding: Holding, *, keep: bool) -> dict[str, Any]:
    """`state` with complete tensors on the CPU, put together one after another; nothing of them without `keep`.

    All workers that hold parts call this together.
    """
    found = {}
    for name, value in state.items():
        full = holding.full(value).detach() if isinstance(value, Tensor) else value
        if keep:
            found[name] = full.cpu() if isinstance(full, Tensor) else full
    return found
