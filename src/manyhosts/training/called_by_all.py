"""A model whose workers exchange something in every forward pass: if one alone called it, it would wait for ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from manyhosts.errors import ConfigError

_called: WeakSet[nn.Module] = WeakSet()
"""Models that all workers call now, in the same order."""


@contextmanager
def called_by_all(model: nn.Module) -> Iterator[None]:
    """Within, every worker calls `model` as often as this one."""
    within = model in _called
    _called.add(model)
    try:
        yield
    finally:
        if not within:
            _called.discard(model)


def refuse_other_calls(model: nn.Module) -> None:
    """From now on a call of `model` from elsewhere ends in a sentence."""
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
