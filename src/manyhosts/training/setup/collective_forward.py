"""A model whose workers exchange something in every forward pass: if one alone called it, it would wait for ever."""

from __future__ import annotations

from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from manyhosts.errors import ConfigError

_guarded: WeakSet[nn.Module] = WeakSet()
"""Models that nobody may call alone."""
_called: WeakSet[nn.Module] = WeakSet()
"""Of these, the ones that all workers call now, in the same order."""


class collective_forward:  # read as a verb: with called_by_all(model)
    """Within, every worker calls `model` as often as this one."""

    __slots__ = ("_ends", "_model")

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __enter__(self) -> None:
        self._ends = self._model in _guarded and self._model not in _called
        if self._ends:
            _called.add(self._model)

    def __exit__(self, *_: object) -> None:
        if self._ends:
            _called.discard(self._model)


def refuse_other_calls(model: nn.Module) -> None:
    """From now on a call of `model` from elsewhere ends in a sentence."""
    _guarded.add(model)
    # Before the hook that begins to gather: the others would take what it sends for something else.
    model.register_forward_pre_hook(torch.compiler.disable(_check), prepend=True)


def _check(model: nn.Module, inputs: Any) -> None:
    if model not in _called:
        raise ConfigError(
            "the model is called by the script itself, and its parts are gathered only where all workers call it in "
            "the same order",
            where="trainer.model(…)",
            fix="call trainer.predict(dataset, forward=…) on all workers; or make a model of your own and give it what "
            "mh.load(run_dir) gives, which is the whole",
        )
