"""What a strategy is shown that cuts the model by what a forward pass shows, and what it cannot do beside."""

from __future__ import annotations

from manyhosts.config.settings import Settings
from manyhosts.data.data import Data
from manyhosts.errors import ConfigError
from manyhosts.strategies.strategy import LooksAhead, Sample
from manyhosts.training.loop.compute import ForwardPass, pair
from manyhosts.training.setup.choose_strategy import largest_batch
from manyhosts.training.setup.sizing import Unknown


def look_ahead(strategy: LooksAhead, compute: ForwardPass, data: Data, settings: Settings) -> None:
    """Show `strategy` what the model will be called with, where that can be known.

    Raises:
        ConfigError: the script computes model and loss in one, or asks for what stages cannot do.
    """
    name = settings.strategy.name
    if compute.step is not None:
        raise ConfigError(
            f"step= computes model and loss in one, and with strategy {name!r} several workers compute the model",
            where="mh.Trainer(step=…)",
            fix="give loss=function(outputs, targets) -> loss in place of it, and batches that are (inputs, targets)",
        )
    for key in ("compile", "activation_checkpointing"):
        if getattr(settings, key):
            raise ConfigError(
                f"{key} is asked for, and with strategy {name!r} it has not been tried",
                where=key,
                fix="leave it out, or choose another strategy",
            )
    if settings.balance == "speed":
        raise ConfigError(
            f"with strategy {name!r} several workers compute the same samples, and none of them can take fewer",
            where="balance",
            fix="leave balance out, or choose another strategy",
        )
    if hasattr(data.train, "shard"):
        raise ConfigError(
            f"the train stream offers shard(), and with strategy {name!r} every worker reads the same samples",
            where="mh.Data(train=…)",
            fix="give a stream without shard(), a map-style dataset, or choose another strategy",
        )
    try:
        batch = largest_batch(data, settings, 1)
    except Unknown:
        return
    strategy.look(Sample(lambda: pair(batch)[0], compute.context, settings.precision))
