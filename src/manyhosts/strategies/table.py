"""The module of each strategy, by its name."""

from __future__ import annotations

from typing import Any, Protocol

from manyhosts.communication.world import World
from manyhosts.strategies.strategy import Strategy
from manyhosts.strategies.traits import Traits
from manyhosts.table import Table


class Maker(Protocol):
    """The class of a strategy, whose traits are known before there is one."""

    traits: Traits

    def __call__(self, config: Any, world: World, /) -> Strategy:
        """The strategy that `config`, the value in the settings, asks for.

        Raises:
            ConfigError: it cannot work with these workers.
        """


STRATEGIES: Table[Maker] = Table(
    kind="strategy",
    group="manyhosts.strategies",
    own={
        "ddp": "manyhosts.strategies.ddp:DataParallel",
        "local-sgd": "manyhosts.strategies.local_stepping:LocalSteps",
        "fsdp": "manyhosts.strategies.fsdp.strategy:FullySharded",
        "pipeline": "manyhosts.strategies.pipeline.strategy:Pipelined",
        "tensor": "manyhosts.strategies.tensor.strategy:TensorParallel",
        "fsdp+tensor": "manyhosts.strategies.sharded_layers:FullyShardedLayers",
        "diloco": "manyhosts.strategies.diloco:OuterSteps",
        "fsdp+diloco": "manyhosts.strategies.local_parts:OuterStepsInParts",
        "fsdp+local-sgd": "manyhosts.strategies.local_parts:MeanInParts",
        "parameter-server": "manyhosts.strategies.asynchronous.parameter_server:Servers",
        "pipedream": "manyhosts.strategies.asynchronous.pipedream:PipeDreamed",
        "hogwild": "manyhosts.strategies.asynchronous.hogwild:SharedMemory",
    },
)
"""By the name of the setting's value, for runs of several workers; `single` needs no row."""
