"""How many steps workers that step alone take between two meetings, and how that number grows.

The quadratic rule: where the learning rate has fallen to a share s of its highest value, a round has 1/s² times as many
steps as at first. A worker that steps alone for H steps at rate r wanders about as far from the others as the square
root of H, times r: so the models stay as near to each other as they were, and the workers meet ever more rarely.

Source: Gu, Lyu, Arora, Zhang and Huang 2023, "A Quadratic Synchronization Rule for Distributed Deep Learning",
arXiv:2310.14423: `H = max(H_base, (c / rate)²)`, with c such that a round has `sync_every` steps at the highest rate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.strategies.strategy import Steppable


class Rounds:
    """The length of the round under way. It follows from learning rates alone, so it is the same on every worker."""

    def __init__(self, config: LocalSGD | DiLoCo) -> None:
        self.config = config
        self.length = config.sync_every
        """Steps of the round under way."""
        self.rate = self.highest = 0.0
        """The learning rate of the last step, and the highest one so far; of the first parameter group."""

    def saw(self, optimizer: Steppable) -> None:
        """A step was taken by `optimizer`."""
        self.rate = rate_of(optimizer)
        self.highest = max(self.highest, self.rate)

    def next(self) -> None:
        """A round is over: fix the length of the one that begins."""
        self.length = steps_at(self.config, self.rate, self.highest)

    def state_dict(self) -> dict[str, Any]:
        """For snapshots."""
        return {"round": self.length, "highest_rate": self.highest}

    def shared_state(self) -> dict[str, Any]:
        """For a worker that comes new."""
        return {**self.state_dict(), "rate": self.rate}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        self.length, self.highest, self.rate = state["round"], state["highest_rate"], state["rate"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; a run that was begun with another rule continues with the one of now."""
        self.highest = state.get("highest_rate", 0.0)
        if self.config.sync_rule != "fixed":
            self.length = state.get("round", self.config.sync_every)


def steps_at(config: LocalSGD | DiLoCo, rate: float, highest: float) -> int:
    """The steps of a round that begins when the learning rate is `rate` and was at most `highest`."""
    most = config.sync_every * 16 if config.sync_at_most is None else config.sync_at_most
    if config.sync_rule == "fixed" or rate >= highest:
        return config.sync_every
    if rate <= 0 or config.sync_every * (highest / rate) ** 2 >= most:
        return most
    return int(config.sync_every * (highest / rate) ** 2)


def rate_of(optimizer: Steppable) -> float:
    """The learning rate of its first group."""
    assert isinstance(optimizer, torch.optim.Optimizer), f"local steps have no loss scaler, got {type(optimizer)}"
    return float(optimizer.param_groups[0]["lr"])
