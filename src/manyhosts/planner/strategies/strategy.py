"""What a plan asks of every strategy. Read this file, then any one other in this folder.

A new strategy adds a file with a `make`, and a line to the table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from manyhosts.planner.group import Group
from manyhosts.planner.measured import Measured
from manyhosts.planner.memory import Memory, ModelBytes
from manyhosts.planner.step import Step
from manyhosts.table import Table


class StrategyModel(Protocol):
    """One strategy with its settings, as far as time and memory depend on it."""

    def step(self, measured: Measured, group: Group) -> Step:
        """The mean optimizer step of `group`; of a strategy that exchanges now and then, with its part of that."""

    def memory(self, measured: Measured, group: Group) -> Memory:
        """What one worker of `group` holds at most."""


class CutStrategyModel(StrategyModel, Protocol):
    """One whose workers hold parts of the model."""

    def largest(self, model: ModelBytes, workers: int) -> Memory:
        """What one of so many workers holds of `model` at most."""


STRATEGIES: Table[Callable[[Any], StrategyModel]] = Table(
    kind="strategy that can be planned",
    group="manyhosts-strategy-models",
    own={
        "single": "manyhosts.planner.strategies.ddp:make_single",
        "ddp": "manyhosts.planner.strategies.ddp:make",
        "fsdp": "manyhosts.planner.strategies.fsdp:make",
        "pipeline": "manyhosts.planner.strategies.pipeline:make",
        "pipedream": "manyhosts.planner.strategies.pipeline:make",
        "tensor": "manyhosts.planner.strategies.tensor:make",
        "fsdp+tensor": "manyhosts.planner.strategies.sharded_layers:make",
        "virtual-workers": "manyhosts.planner.strategies.virtual:make",
        "local-sgd": "manyhosts.planner.strategies.local_sgd:make",
        "diloco": "manyhosts.planner.strategies.diloco:make",
        "fsdp+diloco": "manyhosts.planner.strategies.diloco:make",
        "fsdp+local-sgd": "manyhosts.planner.strategies.local_sgd:make",
        "parameter-server": "manyhosts.planner.strategies.asynchronous:ServersModel",
        "hogwild": "manyhosts.planner.strategies.asynchronous:ServersModel",
    },
)
"""By the name of the strategy's settings; `make(settings)` gives its model."""
