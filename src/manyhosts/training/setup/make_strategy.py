"""The strategy that the settings ask for, where it goes with what else they ask for."""

from __future__ import annotations

from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import DDP, Single, is_asynchronous
from manyhosts.config.strategies import Strategy as Asked
from manyhosts.errors import ConfigError
from manyhosts.strategies.audit import Auditor
from manyhosts.strategies.strategy import Strategy
from manyhosts.strategies.table import STRATEGIES
from manyhosts.strategies.traits import Traits
from manyhosts.strategies.virtual import VirtualWorkers
from manyhosts.strategies.whole_model import SingleProcess


def make_strategy(settings: Settings, world: World, auditor: Auditor | None = None) -> Strategy:
    """The strategy that `settings` names.

    Raises:
        ConfigError: it cannot work with this many workers, or with other settings.
    """
    asked = settings.strategy
    if settings.virtual_workers is not None and (not world.is_shared or isinstance(asked, DDP)):
        return virtual_workers(settings.virtual_workers, asked, world, auditor)
    if not world.is_shared and not is_asynchronous(asked):
        return SingleProcess(world)
    if isinstance(asked, Single):
        raise ConfigError(
            f"strategy 'single' trains in one process, but there are {world.size} workers",
            where="strategy",
            fix='leave strategy out, or choose "ddp"',
        )
    make = STRATEGIES.load(asked.name)
    _check_goes_with(settings, make.traits)
    if world.size == 1 and not make.traits.survives_loss and not is_asynchronous(asked):
        return SingleProcess(world)  # others come with a new start of all
    return make(asked, world)


def _check_goes_with(settings: Settings, traits: Traits) -> None:
    """See that a strategy can do what else was asked for.

    Raises:
        ConfigError: it cannot.
    """
    name = settings.strategy.name
    if not traits.synchronous and settings.balance == "speed":
        raise ConfigError(
            f"with strategy {name!r} workers step alone and their models count alike, so each must have equally many "
            "samples",
            where="balance",
            fix='leave balance out, or choose strategy="ddp"',
        )
    if settings.virtual_workers is not None:
        why = "lets the workers' models differ" if not traits.synchronous else "cuts the model and its sums"
        raise ConfigError(
            f"strategy {name!r} {why}, which virtual workers never do",
            where="virtual_workers",
            fix='leave virtual_workers out, or choose "ddp"',
        )
    compresses = getattr(settings.strategy, "compression", "none") != "none"
    if settings.on_bad_step == "skip" and (compresses or not traits.synchronous):
        raise ConfigError(
            "a bad step is left out by all, with nothing kept of it; compression and local steps keep some of it",
            where="on_bad_step",
            fix='leave compression and local steps out, or use on_bad_step="stop"',
        )
    if settings.on_bad_step == "rewind" and not traits.synchronous:
        raise ConfigError(
            "with local steps each worker has a gradient of its own, and one alone would find it bad and go back",
            where="on_bad_step",
            fix='leave local steps out, or use on_bad_step="stop"',
        )


def virtual_workers(parts: int, strategy: Asked, world: World, auditor: Auditor | None) -> VirtualWorkers:
    """Virtual workers, with the buckets of the strategy that was asked for.

    Raises:
        ConfigError: there are more workers than parts, or gradients are to be compressed.
    """
    ddp = strategy if isinstance(strategy, DDP) else DDP()
    if ddp.compression != "none":
        raise ConfigError(
            f"compression is {ddp.compression!r}, but virtual workers add every bit of the gradients",
            where="virtual_workers",
            fix="leave compression or virtual_workers out",
        )
    return VirtualWorkers(parts, world, bucket_mb=ddp.bucket_mb, auditor=auditor)
