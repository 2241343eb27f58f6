"""The parts of a run, made in the order in which they need each other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from manyhosts.communication.batch_norm import GlobalBatch, make_global
from manyhosts.communication.shared_norm import Batch, OwnBatch, prepare
from manyhosts.communication.world import World
from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import DDP, Single
from manyhosts.config.strategies import Strategy as Asked
from manyhosts.data import randomness
from manyhosts.data.data import Data
from manyhosts.data.fetch import Fetcher
from manyhosts.data.identity import DataIdentity
from manyhosts.data.order import bounds
from manyhosts.data.steps import Cut
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.snapshot.fingerprint import tensor_checksums
from manyhosts.strategies.audit import Auditor
from manyhosts.strategies.ddp import DataParallel
from manyhosts.strategies.diloco import OuterSteps
from manyhosts.strategies.local_sgd import LocalSteps
from manyhosts.strategies.local_updates import LocalUpdates
from manyhosts.strategies.single import SingleProcess
from manyhosts.strategies.strategy import Shard, Strategy
from manyhosts.strategies.virtual import VirtualWorkers
from manyhosts.training import learning_rate, watching
from manyhosts.training.as_made import AsMade, options_of
from manyhosts.training.compute import ForwardPass, Loss, UserStep, pair
from manyhosts.training.evaluate import Evaluation
from manyhosts.training.precision import Precision
from manyhosts.training.same_given import compare_descriptions, described, settings_compared
from manyhosts.training.source import Source, make_source
from manyhosts.training.suitable import (
    check_kept,
    check_optimizer,
    check_tensors,
    hooked,
    is_lazy,
    make_schedule,
    make_whole,
)
from manyhosts.training.trained import check_optimized, model_of, trained, twice
from manyhosts.training.weighing import Weighing, Weight

if TYPE_CHECKING:
    from torchmetrics import Metric

ModelOrMaker = nn.Module | Callable[[], nn.Module]
MakeOptimizer = Callable[[Sequence[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer], LRScheduler]


@dataclass(kw_only=True, slots=True)
class Parts:
    """What the loop works with, each ready for use. When the workers change, `recut` makes some of it anew."""

    world: World
    strategy: Strategy
    trained: nn.Module
    """What the strategy has placed: the model, and with it a loss that has a state."""
    batch_norm: Batch | None
    """What BatchNorm layers take for their batch in a step; None where there are none, or they are PyTorch's own."""
    optimizer: Optimizer
    schedule: LRScheduler | None
    warmup: learning_rate.WarmUp
    precision: Precision
    compute: ForwardPass
    auditor: Auditor | None
    """What compares parts that several workers compute; None where that was not asked for."""
    source: Source
    as_made: AsMade
    """Optimizer and schedule before the first step."""
    data_identity: DataIdentity
    batch: int
    """The global batch: that of the beginning, however many workers there are later."""
    weighing: Weighing
    make_source: Callable[[int], Source]
    """The source for a global batch and this worker's present place."""
    make_warmup: Callable[[Source], learning_rate.WarmUp]

    @property
    def model(self) -> nn.Module:
        """The user's model, as the strategy has placed it."""
        return model_of(self.trained)

    def recut(self, batch: int) -> None:
        """Read from now on what this worker's place is to read of each global batch. Every worker calls this."""
        self.batch, self.source = batch, self.make_source(batch)
        self.warmup = self.make_warmup(self.source)


def batch_of(settings: Settings, world: World) -> int:
    """The global batch."""
    if settings.batch_size is not None:
        return settings.batch_size
    assert settings.batch_size_per_worker is not None, "Settings has checked that one of the two is there"
    return settings.batch_size_per_worker * counted_workers(settings, world)


def counted_workers(settings: Settings, world: World) -> int:
    """The workers that a batch or a learning rate grows with: the virtual ones, where there are any."""
    return settings.virtual_workers or world.size


def cut_for(settings: Settings, shard: Shard, *, level: bool) -> Cut:
    """Which parts of each batch this worker computes."""
    if settings.virtual_workers is None:
        return Cut(shard.count, shard.index, shard.index + 1, settings.micro_batch_size, level and shard.count > 1)
    first, behind = bounds(settings.virtual_workers, shard.count, shard.index)
    return Cut(settings.virtual_workers, first, behind, settings.micro_batch_size, level)


def make_strategy(settings: Settings, world: World, auditor: Auditor | None = None) -> Strategy:
    """The strategy that `settings` names.

    Raises:
        ConfigError: it cannot work with this many workers.
    """
    if settings.virtual_workers is not None and (not world.is_shared or isinstance(settings.strategy, DDP)):
        return virtual_workers(settings.virtual_workers, settings.strategy, world, auditor)
    if not world.is_shared:
        return SingleProcess(world)
    if isinstance(settings.strategy, Single):
        raise ConfigError(
            f"strategy 'single' trains in one process, but there are {world.size} workers",
            where="strategy",
            fix='leave strategy out, or choose "ddp"',
        )
    if settings.virtual_workers is not None:
        raise ConfigError(
            f"strategy {settings.strategy.name!r} lets the workers' models differ, which virtual workers never do",
            where="virtual_workers",
            fix='leave virtual_workers out, or choose "ddp"',
        )
    plain = isinstance(settings.strategy, DDP) and settings.strategy.compression == "none"
    if settings.on_bad_step == "skip" and not plain:
        raise ConfigError(
            "a bad step is left out by all, with nothing kept of it; compression and local steps keep some of it",
            where="on_bad_step",
            fix='leave compression and local steps out, or use on_bad_step="stop"',
        )
    if settings.on_bad_step == "rewind" and not isinstance(settings.strategy, DDP):
        raise ConfigError(
            "with local steps each worker has a gradient of its own, and one alone would find it bad and go back",
            where="on_bad_step",
            fix='leave local steps out, or use on_bad_step="stop"',
        )
    if isinstance(settings.strategy, LocalSGD):
        return LocalSteps(settings.strategy, world)
    if isinstance(settings.strategy, DiLoCo):
        return OuterSteps(settings.strategy, world)
    return DataParallel(settings.strategy, world)


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


def choose_kernels(settings: Settings, world: World) -> None:
    """Set the number of threads; and with virtual workers, have every kernel give the same bits on every worker."""
    exact = settings.virtual_workers is not None
    if exact or settings.threads is not None:
        torch.set_num_threads(settings.threads or 1)
    if exact and is_asynchronous(world.device):
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch says cuBLAS needs
        torch.backends.cudnn.benchmark = False  # it would choose by the clock
        torch.use_deterministic_algorithms(True)  # an operation that cannot keep the promise of bits raises


def make_model(model: ModelOrMaker, settings: Settings) -> nn.Module:
    """The model itself; one that is yet to be made is made under the run's seed, the same on every worker.

    Raises:
        ConfigError: what was given is no model and makes none.
    """
    if not isinstance(model, nn.Module):
        with randomness.kept():
            randomness.seed_all(settings.seed, randomness.MODEL)
            model = model()
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module",
            where="mh.Trainer(model=…)",
            fix="give a module, or a callable that makes one",
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "the model has no parameter that could be trained",
            where="mh.Trainer(model=…)",
            fix="set requires_grad on those that should change",
        )
    return model


def batch_for_norm(model: nn.Module, strategy: Strategy, settings: Settings, world: World) -> Batch | None:
    """What the BatchNorm layers of `model` take for their batch."""
    if isinstance(strategy, VirtualWorkers):
        return strategy.statistics
    if settings.batch_norm == "global" and world.is_shared:
        return make_global(model, world)
    # One worker is its own global batch. What is compiled is left as it is: the compiler knows PyTorch's own class.
    return OwnBatch() if not settings.compile and prepare(model) else None


def build(  # noqa: PLR0913  # the one place where everything the user gave comes together
    *,
    settings: Settings,
    world: World,
    data: Data,
    model: ModelOrMaker,
    loss: Loss | None,
    step: UserStep | None,
    optimizer: MakeOptimizer,
    schedule: MakeSchedule | None,
    weight: Weight | None,
) -> Parts:
    """Make everything that `fit` needs."""
    weighing = Weighing(weight, loss, data=data, settings=settings, world=world)
    choose_kernels(settings, world)
    auditor = None if settings.audit is None else Auditor(settings.audit, settings.seed, world, tensor_checksums)
    strategy = make_strategy(settings, world, auditor)
    bare = make_model(model, settings)
    if is_lazy(bare):
        make_whole(bare, data, step or (lambda model, batch: model(pair(batch)[0])), seed=settings.seed)
    made = trained(bare, loss)
    compare_descriptions(world, _given(made, data, settings))  # before the first exchange, which would not end
    if watching.watcher is not None:
        watching.watcher.made(made)
    check_kept(made)
    if world.is_shared or settings.virtual_workers is not None:
        check_tensors(made)
        world.notes += hooked(made)
    placed = strategy.place(made)
    norm = batch_for_norm(placed, strategy, settings, world)
    global_batch = norm if isinstance(norm, GlobalBatch) else None
    if settings.compile:
        model_of(placed).compile()  # in place, so that names in snapshots stay the same
    made_optimizer = make_optimizer(placed, optimizer, settings, world, has_step=step is not None)
    if isinstance(strategy, LocalUpdates):
        strategy.hold(made_optimizer)
    precision = Precision(settings.precision, world.device)

    def cut_source(batch: int) -> Source:
        cut = cut_for(settings, strategy.shard(), level=global_batch is not None)
        if auditor is not None:
            cut = replace(cut, audits=auditor.plan())
        return make_source(data, settings, batch=batch, cut=cut, world=world)

    def warm(source: Source) -> learning_rate.WarmUp:
        return learning_rate.WarmUp(learning_rate.warmup_steps(settings.warmup, source.steps_per_epoch))

    batch = batch_of(settings, world)
    source = cut_source(batch)
    options = options_of(made_optimizer)
    made_schedule = None if schedule is None else make_schedule(schedule, made_optimizer)
    if isinstance(made_schedule, ReduceLROnPlateau) and data.validation is None:
        raise ConfigError(
            "the schedule is a ReduceLROnPlateau, which moves after validations, and there is no validation set",
            where="mh.Trainer(schedule=…)",
            fix="give mh.Data(validation=…), or choose a schedule that moves by steps",
        )
    return Parts(
        world=world,
        strategy=strategy,
        trained=placed,
        batch_norm=norm,
        optimizer=made_optimizer,
        schedule=made_schedule,
        warmup=warm(source),
        precision=precision,
        compute=ForwardPass(loss, step, seed=settings.seed, context=precision.context, global_batch=global_batch),
        auditor=auditor,
        source=source,
        as_made=AsMade.of(made_optimizer, made_schedule, options=options, model=placed),
        data_identity=DataIdentity(
            data.train, seed=settings.seed, elsewhere=settings.loader_workers not in (0, "auto")
        ),
        batch=batch,
        weighing=weighing,
        make_source=cut_source,
        make_warmup=warm,
    )


def _given(model: nn.Module, data: Data, settings: Settings) -> dict[str, dict[str, str]]:
    """What the script has given, in words, as far as it must be the same on every worker."""
    sets = {"train": data.train, "validation": data.validation, "test": data.test}
    lengths = {
        name: type(each).__qualname__ + (f" of {len(each)} samples" if isinstance(each, Sized) else "")
        for name, each in sets.items()
        if each is not None
    }
    return {"models": described(model), "data": lengths, "settings": settings_compared(settings)}


def make_optimizer(
    module: nn.Module, make: MakeOptimizer | Optimizer, settings: Settings, world: World, *, has_step: bool
) -> Optimizer:
    """The user's optimizer over the placed parameters, with the learning rate that `settings` ask for.

    Raises:
        ConfigError: `make` gave something else, or an optimizer of other parameters than those.
    """
    if isinstance(make, Optimizer):
        kind = type(make).__name__
        raise ConfigError(
            f"optimizer is the {kind} of a model, made before the workers share the model",
            where="mh.Trainer(optimizer=…)",
            fix=f"write optimizer=lambda params: torch.optim.{kind}(params, lr={make.param_groups[0]['lr']:g})",
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="optimizer contains a parameter group with duplicate")  # refused
            made = make([parameter for parameter in module.parameters() if parameter.requires_grad])
    except ValueError as cause:
        if "more than one parameter group" in str(cause):
            raise twice(str(cause)) from cause
        raise
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer gave a {type(made).__name__}, not a torch.optim.Optimizer",
            where="mh.Trainer(optimizer=…)",
            fix="write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    check_optimizer(made, world)
    check_optimized(made.param_groups, module, has_step=has_step)
    factor = learning_rate.scale(settings.lr_scaling, counted_workers(settings, world))
    for group in made.param_groups:
        group["lr"] = (group["lr"] if settings.lr is None else settings.lr) * factor
        # PyTorch's fused kernels do a step in one pass over the memory of a GPU; others are as the user made them.
        real = all(parameter.is_floating_point() for parameter in group["params"])
        asked = "fused" in group and (group["fused"] is not None or group.get("foreach"))
        if is_asynchronous(world.device) and "fused" in group and real and not asked:
            group["fused"] = True
    return made


def make_evaluation(  # noqa: PLR0913  # made in one place, by name
    name: str,
    dataset: Any,
    *,
    data: Data,
    settings: Settings,
    world: World,
    loss: Loss | None,
    step: UserStep | None,
    metrics: Mapping[str, Metric],
    weighing: Weighing,
) -> Evaluation:
    """What evaluates models on `dataset`, the validation or the test set."""
    fetcher = Fetcher(
        dataset,
        seed=randomness.seed_at(settings.seed, randomness.EVALUATION),
        name=name,
        collate=data.collate,
    )
    # A pure function of the settings, never of the number of workers: the forward passes must be the same.
    batch = settings.evaluation_batch_size or settings.micro_batch_size or settings.batch_size
    return Evaluation(
        fetcher,
        len(cast(Any, dataset)),
        batch=batch or cast(int, settings.batch_size_per_worker),
        loader_workers=settings.loader_workers,
        world=world,
        loss=loss,
        step=step,
        metrics=metrics,
        weighing=weighing,
        context=Precision(settings.precision, world.device).context,
    )
