"""A callback acts at named points of a run, on every worker and once per step; a listener only hears what happened.

    class EveryTenth(mh.Callback):
        def after_step(self, moment):
            if moment.step % 10 == 0:
                copy_weights(moment.model.online, moment.model.target)

A step may compute several pieces of its batch: parts, micro-batches, on several workers. `step` and the model's forward
pass run for each; what is to happen once per step happens here.
"""

from __future__ import annotations

import gc
import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from types import FunctionType
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyhosts.errors import ConfigError, check_run
from manyhosts.units import Duration

_A_LITTLE = 1e-9  # epochs are fractions of steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A point of a run, equal on all workers."""

    model: nn.Module
    """As the strategy has placed it."""
    optimizer: Optimizer
    step: int
    """Optimizer steps done, the one just done included."""
    epochs: float
    """Epochs done, with the fraction of the one under way."""
    before: tuple[int, float] = (0, 0.0)
    """The same two before that step."""
    updated: bool = False
    """Whether that step has changed the model: one whose loss is NaN may have been left out."""
    values: Mapping[str, float] = field(default_factory=dict)
    """What the validation found, in `after_validation`."""
    trained: nn.Module
    """The model, and with it a loss that has parameters of its own."""

    def reached(self, duration: str) -> bool:
        """Whether the run is as long as `duration`: `"3 epochs"` or `"500 steps"`."""
        limit = counted(duration)
        by_epochs = limit.epochs is not None and self.epochs >= limit.epochs - _A_LITTLE
        return by_epochs or (limit.steps is not None and self.step >= limit.steps)

    def passed(self, every: str) -> bool:
        """Whether the step just done ends an interval of `every`: each `"1 epoch"` or `"100 steps"`."""
        each = counted(every)
        pairs = ((each.steps, self.before[0], self.step), (each.epochs, self.before[1], self.epochs))
        return any(
            size is not None and math.floor(now / size + _A_LITTLE) > math.floor(then / size + _A_LITTLE)
            for size, then, now in pairs
        )


@lru_cache(maxsize=64)
def counted(text: str) -> Duration:
    """A duration of epochs or steps.

    Raises:
        ConfigError: it is none, or a time: clocks differ from worker to worker.
    """
    found = Duration.parse(text, where="callbacks")
    if found.seconds is not None:
        raise ConfigError(
            f"{text!r} is a time, but what changes training must not depend on how fast a machine is",
            where="callbacks",
            fix='give epochs or steps, such as "3 epochs"',
        )
    return found


class Callback:
    """Override what is needed: every method here does nothing.

    Each is called on every worker, callbacks in the order in which they were given, and must do the same everywhere: it
    may look at the moment, and at nothing that differs from worker to worker. Random numbers are seeded by the step.
    """

    name = ""
    """Under which its state is in snapshots; the name of its class where it is empty."""

    def prepare(self, model: nn.Module) -> Sequence[str]:
        """Change the model before it is placed. Returns the names of frozen parameters that are to be trained later."""
        return ()

    def frozen_for_a_while(self) -> Sequence[str]:
        """After `prepare`: the names of parameters that are frozen, or trained, for a part of the run."""
        return ()

    def attach(self, moment: Moment) -> None:
        """The model is placed, and its weights are those that the run begins with: make the state."""

    def begin(self, moment: Moment) -> None:
        """Training begins here, or continues after a resume or a lost worker, with the states of this step."""

    def after_step(self, moment: Moment) -> None:
        """A step is done: part of it, so it happens once for each step that counts, even if a worker is lost."""

    def after_epoch(self, moment: Moment) -> None:
        """The step just done was the last of its epoch."""

    def after_validation(self, moment: Moment) -> None:
        """A validation within `fit` is done; `moment.values` is what it found."""

    def end(self, moment: Moment) -> None:
        """`fit` is about to return; its last snapshot is made."""

    def averages(self) -> Mapping[str, Tensor]:
        """Weights to evaluate with in place of the trained ones, by their names in `moment.trained`; mostly none."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """What a snapshot keeps: plain values and tensors, equal on all workers."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""


_ARGUMENTS = {
    "EarlyStopping": 'it is an argument of its own: mh.Trainer(early_stopping=mh.EarlyStopping("{metric}"))',
    "ModelCheckpoint": "it is two arguments of their own: "
    'mh.Trainer(snapshots=mh.Snapshots(every="1 epoch"), best="{metric}")',
    "Snapshots": 'it is an argument of its own: mh.Trainer(snapshots=mh.Snapshots(every="1 epoch"))',
    "Best": 'it is an argument of its own: mh.Trainer(best="{metric}")',
}
"""What no callback does here, ours and those of others, by the name of its class."""


_LIKE = 0.85
"""How alike two names are of which one is the other mistyped."""
_ELSEWHERE = {
    **dict.fromkeys(("setup", "on_fit_start"), "attach"),
    **dict.fromkeys(("on_train_start", "on_train_begin", "on_train_epoch_start", "on_epoch_begin"), "begin"),
    **dict.fromkeys(("on_train_batch_start", "on_step_begin", "before_step"), "after_step"),
    **dict.fromkeys(("on_train_batch_end", "on_step_end", "on_batch_end", "on_before_zero_grad"), "after_step"),
    **dict.fromkeys(("on_train_epoch_end", "on_epoch_end"), "after_epoch"),
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end", "on_evaluate"), "after_validation"),
    **dict.fromkeys(("on_train_end", "on_fit_end", "teardown"), "end"),
}
"""What other trainers call a point of a run, and the one here that is nearest."""
POINTS = ("attach", "begin", "after_step", "after_epoch", "after_validation", "end")
"""The methods that are called with the moment alone."""


def _signature(method: str) -> str:
    return f"({', '.join(inspect.signature(getattr(Callback, method)).parameters)})"


def _check_methods(callback: Callback) -> None:
    """See that it has a method that is called here, and none that has almost the name of one, or another trainer's.

    Raises:
        ConfigError: it has none, or one that would never be called.
    """
    kind, known = type(callback), {name for name in vars(Callback) if not name.startswith("_")} - {"name"}
    own = _own(kind)
    methods = [each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, FunctionType)]
    used = {name for each in methods for name in each.__code__.co_names}  # a method may call another of its own
    for name in dir(kind):
        if name in known or name.startswith("_") or not callable(getattr(kind, name)):
            continue
        like = get_close_matches(name, [each for each in known if each not in own], n=1, cutoff=_LIKE)
        other = "after_step" if name.startswith("on_") and name not in used else ""
        if meant := _ELSEWHERE.get(name) or "".join(like) or other:
            raise ConfigError(
                f"callback {kind.__name__} has a method {name!r}, which nothing calls",
                where="mh.Trainer(callbacks=…)",
                fix=f"write def {meant}{_signature(meant)}, or, where it is not that, choose another name",
            )
    if not known & (own | vars(callback).keys()):
        raise ConfigError(
            f"callback {kind.__name__} has no method that is called",
            where="mh.Trainer(callbacks=…)",
            fix=f"write def {POINTS[2]}(self, moment), or another of {', '.join(POINTS)}",
        )


def _own(kind: type[Callback]) -> set[str]:
    """What a class of callbacks overrides."""
    return {name for name in vars(Callback) if getattr(kind, name) is not getattr(Callback, name)}


_live: WeakSet[Callbacks] = WeakSet()
"""Those of all trainers that are there."""


class Callbacks:
    """Those of one trainer, in order."""

    def __init__(self, given: Sequence[Callback] = ()) -> None:
        """Name them.

        Raises:
            ConfigError: something else is among them, two have one name, or two give weights to evaluate with.
        """
        alone = not isinstance(given, Iterable)
        if wrong := [given] if alone else [each for each in given if not isinstance(each, Callback)]:
            found: Any = wrong[0]
            metric = str(getattr(found, "metric", None) or getattr(found, "monitor", None) or "loss")
            kind = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
            raise ConfigError(
                f"callbacks is one {type(found).__name__}, no list" if alone else f"a callback is {kind}",
                where="mh.Trainer(callbacks=…)",
                fix=_ARGUMENTS.get(
                    type(found).__name__,
                    "write callbacks=[…] with objects of classes that build on mh.Callback; functions that only watch "
                    "are listeners=[function]",
                ).format(metric=metric.removeprefix("val_")),
            )
        self.by_name: dict[str, Callback] = {}
        for each in given:
            name = each.name or type(each).__name__.lower()
            if name in self.by_name:
                raise ConfigError(
                    f"two callbacks have the name {name!r}, by which snapshots know their states",
                    where="mh.Trainer(callbacks=…)",
                    fix='give one of them another: callback.name = "second"',
                )
            self.by_name[name] = each
            _check_methods(each)
            self._see_that_own(name, each)
        _live.add(self)
        averaging = [name for name, each in self.by_name.items() if type(each).averages is not Callback.averages]
        if len(averaging) > 1:
            raise ConfigError(
                f"{' and '.join(averaging)} both give weights to evaluate with",
                where="mh.Trainer(callbacks=…)",
                fix="keep one of them",
            )
        self.averaging = averaging[0] if averaging else ""
        """The name of the one that gives weights to evaluate with; empty where none does."""

    def _see_that_own(self, name: str, callback: Callback) -> None:
        """See that a callback which keeps something of its run is not that of another trainer, too.

        Raises:
            ConfigError: it is.
        """

        def is_elsewhere() -> bool:
            return any(each is callback for other in list(_live) for each in other.by_name.values())

        if type(callback).state_dict is Callback.state_dict or not is_elsewhere():
            return
        gc.collect()  # a trainer that is gone may wait for that
        if is_elsewhere():
            raise ConfigError(
                f"callback {name!r} is that of another trainer, too, and keeps what belongs to one run",
                where="mh.Trainer(callbacks=…)",
                fix=f"make one for each trainer: callbacks=[{type(callback).__name__}(…)]",
            )

    def __bool__(self) -> bool:
        return bool(self.by_name)

    def prepare(self, model: nn.Module) -> set[str]:
        """Let each change the model before it is placed. Returns the parameters that are trained later, by name.

        Raises:
            ConfigError: two would freeze and thaw the same parameter.
        """
        later, for_a_while, frozen = set[str](), set[str](), set[str]()
        whose: dict[str, str] = {}
        trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
        for own, each in self.by_name.items():
            later |= {*(each.prepare(model) or ())}
            changing = {*(each.frozen_for_a_while() or ())}
            own_frozen = {name for name, parameter in trained.items() if not parameter.requires_grad}
            for name in sorted(changing | own_frozen):
                if name in whose and name in for_a_while | changing:
                    raise ConfigError(
                        f"{name} is frozen and thawed by two callbacks, {whose[name]!r} and {own!r}, of which each "
                        "undoes what the other does",
                        where="mh.Trainer(callbacks=…)",
                        fix="name each parameter in one of them, by other patterns; to freeze one twice, write a "
                        "callback that does both",
                    )
                whose[name] = own
            for name in own_frozen:
                trained[name].requires_grad_()  # so that the next one sees the model as it was made
            for_a_while, frozen = for_a_while | changing, frozen | own_frozen
        for name in frozen:
            trained[name].requires_grad_(False)
        return later

    def frozen_for_a_while(self) -> set[str]:
        """Parameters that one of them freezes or thaws in the midst of the run, by name."""
        return {name for each in self.by_name.values() for name in each.frozen_for_a_while() or ()}

    def call(self, point: str, moment: Moment) -> None:
        """Call the method `point` of each.

        Raises:
            ConfigError: one is no plain function, and did nothing.
        """
        for name, each in self.by_name.items():
            found = getattr(each, point)(moment)
            if found is not None:
                check_run(found, what=f"{point} of callback {name!r}", where="mh.Trainer(callbacks=…)")

    def state_dict(self) -> dict[str, Any]:
        """The state of each that has one, by name; the tensors are those in use."""
        return {name: state for name, each in self.by_name.items() if (state := each.state_dict())}

    def load_state_dict(self, kept: Mapping[str, Any], moment: Moment) -> None:
        """Take up what `state_dict` gave. One that is new since then, and keeps a state, begins with weights of now."""
        for name, each in self.by_name.items():
            if name in kept:
                each.load_state_dict(kept[name])
            elif type(each).state_dict is not Callback.state_dict:
                each.attach(moment)

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of their states, by name: equal on all workers, and compared."""
        return dict(_tensors(self.state_dict(), ("callbacks",)))

    @contextmanager
    def evaluated(self, trained: nn.Module) -> Iterator[None]:
        """Within, `trained` has the weights that it is evaluated with."""
        averages = self.by_name[self.averaging].averages() if self.averaging else {}
        own = {**dict(trained.named_parameters()), **dict(trained.named_buffers())} if averages else {}
        with torch.no_grad():
            before = {name: local(own[name]).clone() for name in averages}
            for name, average in averages.items():
                local(own[name]).copy_(local(average))
        try:
            yield
        finally:
            with torch.no_grad():
                for name, value in before.items():
                    local(own[name]).copy_(value)


def local(tensor: Tensor) -> Tensor:
    """What this worker holds of `tensor`, sharing its memory: all of it, or its part of a DTensor."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _tensors(state: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield ".".join(path), state
    items = state.items() if isinstance(state, Mapping) else enumerate(state) if isinstance(state, list | tuple) else ()
    for key, value in items:
        yield from _tensors(value, (*path, str(key)))
