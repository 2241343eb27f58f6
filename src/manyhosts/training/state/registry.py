"""What one trainer holds, model, optimizer and what goes with them: to be kept on disk, or given to a new worker."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from manyhosts.callbacks.averaging import Average
from manyhosts.communication.layout import without_repeats, write
from manyhosts.device import wait_for
from manyhosts.elastic import state_transfer
from manyhosts.elastic.work import Records
from manyhosts.errors import ConfigError
from manyhosts.model.buffers import put_transient, transient
from manyhosts.model.optimizer_state import by_name, load_by_name, without_functions
from manyhosts.model.sharded_state import (
    TakenUp,
    as_held,
    beside_kept,
    by_name_kept,
    full_values,
    local_state,
    put_cut,
)
from manyhosts.model.trained_module import load_loss, loss_state
from manyhosts.training.consistency.same_weights import own_statistics
from manyhosts.training.setup.build import Components
from manyhosts.training.state.run_state import RunState

_OWN_LOOP = "own loop"


class TrainerState:
    """What one trainer holds that a new worker lacks."""

    def __init__(self, components: Components) -> None:
        self.components = components
        self.run: RunState | None = None
        """Of the last run that it has begun."""
        self.records: Records | None = None
        """Of that run."""
        world = components.world
        self.group = None if world.is_joining or world.membership is None else world.membership.group
        """The group of workers that its strategy has met last; None where it was made without the others."""

    @property
    def step(self) -> int:
        """Where its last run is."""
        return 0 if self.run is None else self.run.step

    def refresh(self) -> None:
        """Let the strategy agree with the workers of now, where others are there than the last time. All call this."""
        world = self.components.world
        if world.membership is None or self.group == world.membership.group:
            return
        self.resync(0, new=self.group is None, gone=0)

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Train with the workers of now; see `Strategy.resync`. All of them call this."""
        components, membership = self.components, self.components.world.membership
        assert membership is not None, "only then do workers change"
        components.recut()
        lost = [components.strategy.resync(source, new=new, gone=gone)]
        if gone and own_statistics(components):  # a new worker begins with those of another, which count once more
            of_whom = "a lost worker's" if gone == 1 else f"{gone} lost workers'"
            lost.append(f"what {of_whom} BatchNorm layers had seen since their last mean")
        share_optimizers(components)
        if components.own_step is not None:
            components.own_step.on_world_changed()
        self.group = membership.group
        return "; ".join(filter(None, lost))

    def everything(self, *, but_parts: bool = False) -> dict[str, Any]:
        """All of it; the tensors are those in use. `but_parts`: without what workers hold parts of."""
        return {
            "kept": _equal_everywhere(self.components) if but_parts else given_to_copy(self.components),
            "strategy": self.components.strategy.shared_state(),
            "batch": self.components.batches.size,
            "initial optimizer": None if but_parts else self.components.initial_optimizer.given(),
            "run": None if self.run is None else self.run.to_dict(),
        }

    def take_up(self, given: Mapping[str, Any], *, own: bool = False) -> None:
        """Hold what `everything` gave on another worker; with it may come the `stream` of its run.

        `own`: see `take_up`.
        """
        take_up(self.components, taken_from_copy(self.components, given["kept"]), own=own)
        if not own:
            self.components.strategy.take_shared(given["strategy"])
        self.components.batches.size = given["batch"]
        if given["initial optimizer"] is not None:
            self.components.initial_optimizer = self.components.initial_optimizer.taken(given["initial optimizer"])
        if self.run is not None and given["run"] is not None:
            self.run.become(RunState.from_dict(given["run"], given.get("stream", {})))


def given_to_copy(components: Components) -> dict[str, Any]:
    """What `training_state_dict` gives, for a new worker: where tensors are cut, for one that has the same parts."""
    state, holding = training_state_dict(components), components.strategy.holding
    own: dict[str, Any] = local_state(state, holding)
    own["buffers"] = {name: each for name, each in state["buffers"].items() if holding.holds(each)}
    return own


def taken_from_copy(components: Components, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """What `given_to_copy` gave, as `take_up` takes it."""
    if "optimizer" not in given:
        return given
    state = beside_kept(given["optimizer"].get("state", {}), by_name_kept(components.trained))
    own = {"optimizer": {"state": state}, "callbacks": components.callbacks.state_dict()}
    return cast(Mapping[str, Any], as_held(given, own, components.strategy.holding))


def share_optimizers(components: Components) -> None:
    """Where nodes step alone: have each worker continue with the optimizer that the strategy has named when all met.

    The workers of such a node sum their gradients and stay equal, so one of them gives those that come new to it the
    optimizer that it has. All workers call this.
    """
    optimizer = components.optimizer
    for taker, giver in enumerate(components.strategy.givers):
        if taker != giver:
            state_transfer.pass_on(components.world, giver, [taker], optimizer.state_dict, optimizer.load_state_dict)


def training_state_dict(components: Components) -> dict[str, Any]:
    """Model, optimizer and what goes with them; the tensors are those in use."""
    return {
        **weights_of(components),
        "buffers": transient(components.trained),
        "optimizer": by_name(components.optimizer, components.trained),
        **_equal_everywhere(components),
        **({"callbacks": states} if (states := components.callbacks.state_dict()) else {}),
    }


def _equal_everywhere(components: Components) -> dict[str, Any]:
    """Of that what is equal on all workers, also where each has a part of the model."""
    own_step = components.own_step
    evaluating = [name for name, each in components.trained.named_modules() if not each.training]
    return {
        "schedule": {} if components.schedule is None else without_functions(components.schedule.state_dict()),
        "scaler": components.precision.state_dict(),
        "random": {"torch": torch.get_rng_state()},
        "objects": {} if own_step is None else {_OWN_LOOP: own_step.state_dict()},
        **({} if components.strategy.mesh.size("pipe") > 1 else {"evaluating": evaluating}),
    }


def take_up(components: Components, kept: Mapping[str, Any], *, own: bool = False, schedule: bool = True) -> None:
    """Put what `training_state_dict` gave, here or on another worker, into `components`.

    `own`: this worker has stepped alone, and keeps its model and optimizer. `schedule`: whether it is of the schedules
    of `components`.
    """
    if not own:
        put_weights(components, kept)
        put_transient(components.trained, kept.get("buffers", {}))  # none in snapshots of before: the script made them
        load_by_name(components.optimizer, components.trained, kept["optimizer"])
        components.callbacks.load_state_dict(kept.get("callbacks", {}), components.moment())
    if components.schedule is not None and schedule:
        components.schedule.load_state_dict(kept["schedule"])
    components.precision.load_state_dict(kept["scaler"])
    torch.set_rng_state(kept["random"]["torch"])
    if "evaluating" in kept:  # snapshots of before have none, nor has one of a model that is cut into stages
        evaluating = set(kept["evaluating"])
        for name, module in components.trained.named_modules():
            module.training = name not in evaluating
    # Snapshots of before have none.
    if components.own_step is not None and (state := kept.get("objects", {}).get(_OWN_LOOP)) is not None:
        components.own_step.load_state_dict(state if schedule else {**state, "schedulers": {}})


def state_of(stored: Mapping[str, Any], components: Components) -> Mapping[str, Any]:
    """What a snapshot keeps, as `components` hold it: complete, or of each tensor this worker's part.

    `stored`: the same, with a `StoredTensor` in the place of each tensor.
    """
    return TakenUp(stored, components.trained, components.strategy.holding, components.callbacks.state_dict())


def ask_for_state(stored: Mapping[str, Any], components: Components) -> None:
    """Ask for all that `state_of` gives."""
    for value in state_of(stored, components).values():
        full_values(value)


def weights_of(components: Components, *, but_frozen: bool = False) -> dict[str, Any]:
    """The model's `state_dict`, and that of a loss which has a state; the tensors are those in use.

    `but_frozen`: without the frozen weights below adapters.
    """
    but, loss = components.frozen_base.names if but_frozen else (), loss_state(components.trained)
    model = {name: each for name, each in components.model.state_dict().items() if name not in but}
    return {"model": model, **({"loss": loss} if loss else {})}


def copied(weights: dict[str, Any]) -> dict[str, Any]:
    """What `weights_of` gave, with tensors of its own."""
    return {
        part: {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
        for part, values in weights.items()
    }


def put_weights(components: Components, kept: Mapping[str, Any]) -> None:
    """Put what `weights_of` gave, here or elsewhere, into the model and the loss.

    Raises:
        SnapshotError: it is of another loss.
    """
    if not components.strategy.traits.holds_full_model:
        put_one_by_one(components, kept)
        return
    load_loss(components.trained, kept.get("loss", {}))
    load_model(components.model, kept["model"], may_lack=components.frozen_base.names)


def put_one_by_one(components: Components, kept: Mapping[str, Any]) -> None:
    """The same, with of each tensor what this worker holds, and no more of those on the disk in memory than one's.

    Raises:
        SnapshotError: it is of another model or loss, or cannot be read.
    """
    holding = components.strategy.holding
    wait_for(components.world.device)  # it may still read what lies on the host
    put_cut(loss_state(components.trained), kept.get("loss", {}), holding)
    own, given = components.model.state_dict(), kept["model"]
    put_cut(own, given, holding, may_lack=components.frozen_base.names)
    if extra := {name: given[name] for name, value in own.items() if not isinstance(value, torch.Tensor)}:
        components.model.load_state_dict(extra, strict=False)


def put_average(components: Components, stored: Mapping[str, Any], where: Path) -> None:
    """Put the average into the model that a callback has kept in a snapshot: what a run evaluates with at that step.

    Raises:
        ConfigError: a callback of the script's keeps it, in a form that only a run knows.
    """
    name = components.callbacks.averaging
    kept = stored["callbacks"].get(name) if name and "callbacks" in list(stored) else None
    if kept is None:
        return
    if not isinstance(components.callbacks.by_name[name], Average):
        raise ConfigError(
            f"the weights that a run evaluates with at this step are of callback {name!r}, which a run alone knows",
            where=str(where),
            fix="take the best model, which has them, or a file of trainer.save()",
        )
    if kept["count"]:
        own = {**dict(components.trained.named_parameters()), **dict(components.trained.named_buffers())}
        put_cut({each: own[each] for each in kept["average"]}, kept["average"], components.strategy.holding)


@torch.no_grad()
def load_model(model: nn.Module, weights: dict[str, Any], *, may_lack: Collection[str] = ()) -> None:
    """Put `weights` into `model`, in place, so that all that hold its tensors see them.

    `may_lack`: names of which `weights` may have nothing; these stay as they are.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)}
    expanded = {name for name in weights if name in own and without_repeats(own[name]) is not own[name]}
    lacking = expanded | (set(may_lack) - weights.keys())
    if not lacking:
        model.load_state_dict(weights)
        return
    # PyTorch does not write into expanded tensors.
    found = model.load_state_dict({name: weights[name] for name in weights if name not in expanded}, strict=False)
    if found.unexpected_keys or not lacking.issuperset(found.missing_keys):
        model.load_state_dict(weights)  # says what is wrong
    for name in expanded:
        write(own[name], weights[name])
