"""Averages of the weights over the steps: `EMA`, which forgets, and `SWA`, which does not. Evaluated in their place.

Anchors: Polyak and Juditsky 1992; Izmailov et al. 2018 (arXiv:1803.05407) for SWA.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from manyhosts.callbacks.callback import Callback, Moment, counted, local
from manyhosts.errors import ConfigError


class Average(Callback):
    """Of the parameters that the optimizer updates and of buffers of floating point; frozen ones are as they are."""

    def __init__(self) -> None:
        self.count = 0
        """How many weights are in it."""
        self.first = 0
        """The step whose weights were the first in it."""
        self._average: dict[str, Tensor] = {}

    def attach(self, moment: Moment) -> None:
        """Begin with the weights of now."""
        self.count = 0
        self._average = {
            name: _kept(each) for name, each in _averaged(moment).items()
        }  # by names: buffers are replaced

    def averages(self) -> Mapping[str, Tensor]:
        """The average; nothing while nothing is in it."""
        return self._average if self.count else {}

    @torch.no_grad()
    def take_in(self, moment: Moment, share: float) -> None:
        """Move the average by `share` of the way to the weights of now."""
        self.count += 1
        self.first = moment.step if self.count == 1 else self.first
        now = {**dict(moment.trained.named_parameters()), **dict(moment.trained.named_buffers())}
        own = [local(each) for each in self._average.values()]
        taken = [local(now[name]).to(mine.dtype) for name, mine in zip(self._average, own, strict=True)]
        torch._foreach_lerp_(own, taken, share)

    def state_dict(self) -> dict[str, Any]:
        """The average, and how many weights are in it."""
        return {"count": self.count, "first": self.first, "average": dict(self._average)}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave.

        Raises:
            ConfigError: it is of other parameters.
        """
        if other := sorted(self._average.keys() ^ state["average"].keys()):
            raise ConfigError(
                f"the average in the snapshot is of other weights: {other[0]} is on one side alone",
                where=f"mh.{type(self).__name__}",
                fix="take back the change of the model or of what the optimizer updates, or use another run directory",
            )
        self.count, self.first = state["count"], state.get("first", 0)
        for name, average in self._average.items():
            local(average).copy_(local(state["average"][name]))


class EMA(Average):
    """An exponential moving average: after each step `average = decay * average + (1 - decay) * weights`.

    `fit` validates by it, keeps the best of it in `best/`, and `test`, `predict`, `save` and `validate` use it. With
    `warmup` the decay rises, as `(1 + n) / (10 + n)` after n steps, so that the first weights are soon forgotten.
    """

    name = "ema"

    def __init__(self, decay: float = 0.999, *, warmup: bool = True) -> None:
        """Check the decay.

        Raises:
            ConfigError: it is no number between 0 and 1.
        """
        super().__init__()
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise ConfigError(
                f"decay is {decay!r}", where="mh.EMA(decay=…)", fix="give a number from 0 to below 1: 0.999"
            )
        if warmup not in (True, False):
            fix = "give True or False: the decay rises by itself, as (1 + n) / (10 + n) after n steps"
            raise ConfigError(f"warmup is {warmup!r}", where="mh.EMA(warmup=…)", fix=fix)
        self.decay, self.warmup = decay, warmup

    def after_step(self, moment: Moment) -> None:
        """Take in the weights after a step that has changed them."""
        if moment.updated:
            n = self.count + 1
            self.take_in(moment, 1 - (min(self.decay, (1 + n) / (10 + n)) if self.warmup else self.decay))


class SWA(Average):
    """Stochastic weight averaging: the plain mean of the weights at the end of each `every`, from `start` on.

    Intervals are counted from the beginning of the run: with 4 steps in an epoch `mh.SWA("7 steps", every="1 epoch")`
    takes the weights of steps 8, 12, 16. Until the first of them is taken, evaluations use the weights of now. What the
    learning rate does is said by `schedule`, with `torch.optim.swa_utils.SWALR` for example. Running values of
    BatchNorm are averaged like weights.
    """

    name = "swa"

    def __init__(self, start: str, *, every: str = "1 epoch") -> None:
        """Both in epochs or steps."""
        super().__init__()
        counted(start), counted(every)
        self.start, self.every = start, every

    def after_step(self, moment: Moment) -> None:
        """Take in the weights where an interval ends."""
        if moment.reached(self.start) and moment.passed(self.every):
            self.take_in(moment, 1 / (self.count + 1))


def _averaged(moment: Moment) -> dict[str, Tensor]:
    updated = {id(each) for group in moment.optimizer.param_groups for each in group["params"]}
    found: dict[str, Tensor] = {n: each for n, each in moment.trained.named_parameters() if id(each) in updated}
    kept = moment.trained.state_dict()
    return found | {n: each for n, each in moment.trained.named_buffers() if n in kept and each.is_floating_point()}


def _kept(tensor: Tensor) -> Tensor:
    """A copy in at least 32 bits: a share of 0.001 is lost in 16."""
    tensor = tensor.detach()
    return tensor.float() if tensor.element_size() < 4 else tensor.clone()
