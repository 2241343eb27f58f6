"""What no callback can be is refused in a sentence."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
from torch import nn, optim

import manyhosts as mh
from manyhosts.callbacks.callback import Callbacks, Moment
from manyhosts.errors import ConfigError
from manyhosts.model.model_checks import check_callbacks


def moment() -> Moment:
    model = nn.Linear(1, 1)
    return Moment(model=model, optimizer=optim.SGD(model.parameters(), 0.1), step=1, epochs=0.5, trained=model)


class Later(mh.Callback):
    async def after_step(self, moment: Moment) -> None:  # type: ignore[override]
        raise AssertionError("nobody awaits it")


class Yielding(mh.Callback):
    def after_step(self, moment: Moment) -> Any:
        yield


class Mistyped(mh.Callback):
    def after_stp(self, moment: Moment) -> None:
        """Never called."""


class OfItsOwn(mh.Callback):
    steps = 0

    def after_step(self, moment: Moment) -> None:
        self.after_steps()

    def after_steps(self) -> None:
        """Called by the one whose name is like its own."""
        self.steps += 1


class OfLightning(mh.Callback):
    def on_train_epoch_end(self, *given: Any) -> None:
        """Never called."""


class Idle(mh.Callback):
    def helper(self) -> None:
        """Nobody calls it."""


class WithoutMoment(mh.Callback):
    def after_epoch(self) -> None:  # type: ignore[override]
        raise AssertionError("it cannot be called")


@pytest.mark.parametrize(
    ("kind", "words", "fix"),
    [
        (OfLightning, "has a method 'on_train_epoch_end', which nothing calls", r"after_epoch\(self, moment\)"),
        (Idle, "callback Idle has no method that is called", "after_step"),
    ],
)
def test_callback_that_nothing_calls_is_refused(kind: type[mh.Callback], words: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        Callbacks([kind()])
    assert re.search(fix, refused.value.fix)


def test_callback_that_takes_other_arguments_is_refused() -> None:
    with pytest.raises(ConfigError, match="after_epoch of callback 'withoutmoment' is called with"):
        check_callbacks(Callbacks([WithoutMoment()]))


@pytest.mark.parametrize(("kind", "words"), [(Later, "a coroutine"), (Yielding, "a generator")])
def test_method_that_is_called_and_not_run_ends_the_run(kind: type[mh.Callback], words: str) -> None:
    with pytest.raises(ConfigError, match=f"after_step of callback '{kind.__name__.lower()}' gives {words}"):
        Callbacks([kind()]).call("after_step", moment())


def test_mistyped_method_is_refused_with_the_name_that_was_meant() -> None:
    with pytest.raises(ConfigError, match=r"'after_stp', which nothing calls(.|\n)*def after_step"):
        Callbacks([Mistyped()])


def test_method_of_its_own_that_is_like_one_that_is_there_is_none() -> None:
    callbacks = Callbacks([OfItsOwn()])
    callbacks.call("after_step", moment())
    assert cast(OfItsOwn, callbacks.by_name["ofitsown"]).steps == 1
