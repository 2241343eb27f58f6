"""The components of a session, made in the order in which they need each other."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import Dataset

from manyhosts.callbacks.callback import Callbacks, Moment
from manyhosts.communication.batch_norm import GlobalBatch, make_global
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.shared_norm import Batch, OwnBatch, prepare
from manyhosts.communication.world import World
from manyhosts.config.mesh import laid_out
from manyhosts.config.settings import Settings
from manyhosts.config.strategies import Strategy as Asked
from manyhosts.data import drawing, own_order, randomness
from manyhosts.data.cut import Cut, CutBatches
from manyhosts.data.data import Data, loss_of_first, reads_in_shards
from manyhosts.data.identity import DataIdentity
from manyhosts.data.order import bounds
from manyhosts.device import is_asynchronous
from manyhosts.errors import ConfigError
from manyhosts.loss.compute import ForwardPass, Loss, UserStep, pair
from manyhosts.loss.precision import Precision
from manyhosts.loss.weighing import Weighing, Weight
from manyhosts.model.activation_checkpointing import prepare_blocks
from manyhosts.model.combined_optimizer import each_of
from manyhosts.model.frozen_base import FrozenBase
from manyhosts.model.model_checks import (
    check_kept,
    check_optimizer,
    check_own_steps,
    check_rates,
    check_sparse,
    check_tensors,
    check_unwrapped,
    complete,
    hooked,
    is_lazy,
    make_complete,
    make_schedule,
    refuse,
)
from manyhosts.model.optimizer_kernels import fuse
from manyhosts.model.optimizer_state import InitialOptimizer, options_of
from manyhosts.model.parameter_groups import MakeOptimizer, check_options, parameters_of
from manyhosts.model.trained_module import (
    check_optimized,
    model_of,
    refuse_other_calls,
    trained,
    twice,
    untrained,
)
from manyhosts.model.uncompiled import step_without_compiler
from manyhosts.snapshot.fingerprint import Fingerprint, fingerprint, tensor_checksums
from manyhosts.snapshot.load import Fits
from manyhosts.strategies.audit import Auditor
from manyhosts.strategies.cut_model import check_hooks
from manyhosts.strategies.local_updates import is_cut
from manyhosts.strategies.materialise import is_meta
from manyhosts.strategies.strategy import Shard, Strategy
from manyhosts.training.consistency.same_given import compare_data, compare_descriptions, described, settings_compared
from manyhosts.training.loop import learning_rate
from manyhosts.training.loop.source import Source, TrainBatches, make_source
from manyhosts.training.own_loop.own_step import OwnStep
from manyhosts.training.setup.choose_strategy import Given, choose, look_ahead, make_strategy
from manyhosts.training.telemetry.watching import Watcher

if TYPE_CHECKING:
    from manyhosts.planner.fit import Training

ModelOrMaker = nn.Module | Callable[[], nn.Module]
MakeSchedule = Callable[[Optimizer], LRScheduler]


@dataclass(kw_only=True, slots=True)
class Components:
    """What the loop works with, each ready for use. When the workers change, `recut` makes some of it again."""

    settings: Settings
    """With the strategy that `auto` means."""
    chosen_for: Training | None
    """The sizes that it was chosen for; None where the strategy was named."""
    world: World
    strategy: Strategy
    trained: nn.Module
    """What the strategy has placed: the model, and with it a loss that has a state."""
    batch_norm: Batch | None
    """What BatchNorm layers take for their batch in a step; None where there are none, or they are PyTorch's own."""
    optimizer: Optimizer
    schedule: LRScheduler | None
    """That of a trainer."""
    schedules: Mapping[str, LRScheduler]
    """By the name of its optimizer, which is empty in a trainer."""
    warmup: learning_rate.WarmUp
    precision: Precision
    compute: ForwardPass
    callbacks: Callbacks
    thawed: Sequence[str]
    """Parameters that are trained in a part of the run alone."""
    frozen: Mapping[str, nn.Parameter]
    """By name, those that a trainer's optimizer was not given, for they were not to be trained."""
    replaced: Sequence[tuple[str, weakref.ref[nn.Parameter]]]
    """Those in whose place the model has others since it was placed: parts of them, say."""
    watcher: Watcher | None
    auditor: Auditor | None
    """What compares parts that several workers compute; None where that was not asked for."""
    batches: TrainBatches
    initial_optimizer: InitialOptimizer
    """Optimizer and schedule before the first step."""
    watched_loss: str
    """What the loss of a validation is called: `loss`, or `clean/loss` of the first of several sets."""
    weighing: Weighing
    own_fingerprint: Fingerprint
    """Of the model before it was placed."""
    frozen_base: FrozenBase
    """What snapshots of a model with adapters do without."""
    own_step: OwnStep | None
    """What a step does, where the script has written it."""

    @property
    def model(self) -> nn.Module:
        """The user's model, as the strategy has placed it."""
        return model_of(self.trained)

    def moment(self, step: int = 0, epochs: float = 0.0, **more: Any) -> Moment:
        """What callbacks know of a point of the run; `more`: other fields of it."""
        return Moment(
            model=self.model, trained=self.trained, optimizer=self.optimizer, step=step, epochs=epochs, **more
        )

    def fits(self) -> Fits:
        """Whether a snapshot is one of this model. All workers call this."""
        return self.frozen_base.fits(self.fingerprint())

    def fingerprint(self) -> Fingerprint:
        """What a snapshot must match to be one of this model."""
        return fingerprint(self.model)

    def cut_batches(self) -> CutBatches:
        """The batches of now, where their cut may change from one step to the next."""
        cuts = self.batches.source.cuts
        assert cuts is not None, "make_source() has refused what cannot be cut otherwise"
        return CutBatches(cuts, self.batches.size, self.world.rank)

    def recut(self) -> None:
        """Read from now on what this worker's place is to read of each global batch. Every worker calls this."""
        self.batches.recut()
        self.warmup = learning_rate.WarmUp.of(self.settings.warmup, self.batches.source.steps_per_epoch)


def batch_of(settings: Settings, mesh: Mesh) -> int:
    """The global batch."""
    if settings.batch_size is not None:
        return settings.batch_size
    assert settings.batch_size_per_worker is not None, "Settings has checked that one of the two is there"
    return settings.batch_size_per_worker * counted_workers(settings, mesh)


def counted_workers(settings: Settings, mesh: Mesh) -> int:
    """The workers that a batch or a learning rate grows with: the virtual ones, or those with samples of their own."""
    return settings.virtual_workers or mesh.size("replicate", "shard")


def cut_for(settings: Settings, shard: Shard, *, level: bool) -> Cut:
    """Which parts of each batch this worker computes."""
    if settings.virtual_workers is None:
        return Cut(shard.count, shard.index, shard.index + 1, settings.micro_batch_size, level and shard.count > 1)
    assignment = tuple(range(*bounds(settings.virtual_workers, shard.count, index)) for index in range(shard.count))
    own = assignment[shard.index]
    return Cut(settings.virtual_workers, own.start, own.stop, settings.micro_batch_size, level, assignment=assignment)


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
    check_unwrapped(model)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            "the model has no parameter that could be trained",
            where="mh.Trainer(model=…)",
            fix="set requires_grad on those that should change",
        )
    if not model.training:
        model.train()  # Hugging Face makes them so; a part that alone is in evaluation mode stays so: a frozen norm
    return model


def batch_for_norm(model: nn.Module, strategy: Strategy, settings: Settings, world: World) -> Batch | None:
    """What the BatchNorm layers of `model` take for their batch."""
    if strategy.statistics is not None:
        return strategy.statistics
    members = strategy.normalised_with() if world.is_shared else None
    if settings.batch_norm == "global" and members is not None:
        return make_global(model, members)
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
    own_step: OwnStep | None,
    callbacks: Callbacks,
    watcher: Watcher | None,
) -> Components:
    """Make everything that `fit` needs. `own_step`: that of a script which computes its gradients itself."""
    weighing = Weighing(weight, loss, data=data, settings=settings, world=world)
    choose_kernels(settings, world)
    auditor = None if settings.audit is None else Auditor(settings.audit, settings.seed, world, tensor_checksums)
    bare = make_model(model, settings)
    if is_lazy(bare):
        make_complete(bare, data, step or (lambda model, batch: model(pair(batch)[0])), seed=settings.seed)
    made = trained(bare, loss)
    thawed, frozen = callbacks.prepare(bare), callbacks.frozen_for_a_while()
    _compare_given(made, data, settings, world, watcher)
    compute = ForwardPass(loss, step, seed=settings.seed, context=Precision(settings.precision, world.device).context)
    settings, chosen_for = choose(
        Given(settings=settings, made=made, data=data, compute=compute, optimizer=optimizer, world=world)
    )
    settings = replace(settings, strategy=_laid_out(settings, world))
    strategy = make_strategy(settings, world, auditor)
    if own_step is not None:
        own_step.use(strategy, settings, world, auditor)
    if reads_in_shards(data.train):
        strategy.check_shards()
    weighing.mesh = strategy.mesh
    _check_made(made, settings, world, takes_sparse=strategy.traits.takes_sparse_gradients)
    own_fingerprint = fingerprint(model_of(made))
    strategy.look(partial(look_ahead, compute, data, settings))
    uncut = [
        (name, weakref.ref(each)) for name, each in made.named_parameters() if each.requires_grad and each.grad is None
    ]
    placed = _place(made, strategy, settings, world)
    if own_step is not None:
        own_step.take_models(placed, compute)
    norm = batch_for_norm(placed, strategy, settings, world)
    global_batch = compute.global_batch = norm if isinstance(norm, GlobalBatch) else None
    world.notes += prepare_blocks(model_of(placed), settings)
    compute.is_collective = strategy.passing() is not None
    if compute.is_collective:
        refuse_other_calls(model_of(placed))
    made_optimizer = make_optimizer(placed, optimizer, settings, strategy, has_step=step is not None, thawed=thawed)
    strategy.hold(made_optimizer)
    together = world if strategy.mesh.parts > 1 else None
    precision = Precision(settings.precision, world.device, together=together, holding=strategy.holding)

    def cut_source(batch: int) -> Source:
        cut = cut_for(settings, strategy.shard(), level=global_batch is not None or compute.is_collective)
        if auditor is not None:
            cut = replace(cut, audits=auditor.plan())
        return make_source(data, settings, batch=batch, cut=cut, world=world)

    own = {id(each) for each in placed.parameters()}
    identity = DataIdentity(
        data.train,
        seed=settings.seed,
        elsewhere=settings.loader_workers not in (0, "auto"),
        weights=_drawn(data, settings),
    )
    batches = TrainBatches(cut_source, batch_of(settings, strategy.mesh), identity)
    options = options_of(made_optimizer)
    made_schedule = _make_schedule(schedule, made_optimizer, data, settings)
    schedules = {} if made_schedule is None else {"": made_schedule}
    if own_step is not None:
        schedules = own_step.take_optimizers(made_optimizer)
    elif schedule is not None:
        check_rates(settings, [each["lr"] for each in options], made_optimizer, schedule)
    return Components(
        settings=settings,
        chosen_for=chosen_for,
        world=world,
        strategy=strategy,
        trained=placed,
        batch_norm=norm,
        optimizer=made_optimizer,
        schedule=made_schedule,
        schedules=schedules,
        warmup=learning_rate.WarmUp.of(settings.warmup, batches.source.steps_per_epoch),
        precision=precision,
        compute=compute,
        callbacks=callbacks,
        thawed=sorted(thawed | frozen),
        frozen={}
        if own_step is not None
        else untrained(placed, made_optimizer, thawed | frozen, all_of_them=settings.strategy.drifts),
        replaced=[(name, each) for name, each in uncut if id(each()) not in own],
        watcher=watcher,
        auditor=auditor,
        batches=batches,
        initial_optimizer=InitialOptimizer.of(
            made_optimizer, schedules, named=each_of(made_optimizer), options=options, model=placed
        ),
        watched_loss=loss_of_first(data.validation),
        weighing=weighing,
        own_fingerprint=own_fingerprint,
        frozen_base=FrozenBase(model_of(placed), strategy.holding, world),
        own_step=own_step,
    )


def _laid_out(settings: Settings, world: World) -> Asked:
    """What was asked for, with the sizes of the mesh. A worker that comes late knows how many make a copy."""
    mesh = settings.mesh
    if world.part is None:
        return laid_out(settings.strategy, mesh, world.size)
    return laid_out(settings.strategy, mesh and replace(mesh, replicate=0), world.part.parts)


def _check_made(made: nn.Module, settings: Settings, world: World, *, takes_sparse: bool) -> None:
    """See that what was made can be kept and shared out, and say what hooks would do several times in a step."""
    check_kept(made)
    if settings.strategy.passes_copies:
        check_hooks(model_of(made), f"strategy={settings.strategy.name!r}")
    in_parts = world.is_shared or settings.virtual_workers is not None
    if in_parts:
        check_tensors(made, takes_sparse=takes_sparse)
    if in_parts or settings.micro_batch_size is not None:
        world.notes += hooked(made)


def _compare_given(made: nn.Module, data: Data, settings: Settings, world: World, watcher: Watcher | None) -> None:
    """See that all workers were given the same, before the first exchange that would not end where they were not."""
    lengths = {name: type(each).__qualname__ + _length(each) for name, each in data.sets().items()}
    if drawn := _drawn(data, settings):
        lengths["order"] = f"drawn in the order {drawn}"
    compare_descriptions(world, {"models": described(made), "data": lengths, "settings": settings_compared(settings)})
    if watcher is None:  # who watches looks for the reason in what was trained
        compare_data(world, data.sets())
    else:
        watcher.made(made)


def _make_schedule(
    make: MakeSchedule | None, optimizer: Optimizer, data: Data, settings: Settings
) -> LRScheduler | None:
    schedule = None if make is None else make_schedule(make, optimizer)
    if not isinstance(schedule, ReduceLROnPlateau):
        return schedule
    rule = settings.early_stopping
    metric, mode = ("loss", "min") if rule is None else (rule.metric, rule.mode)
    better = "higher" if mode == "max" else "lower"
    what, where = "the schedule is a ReduceLROnPlateau", "mh.Trainer(schedule=…)"
    refuse(
        [
            (
                data.validation is None,
                f"{what}, which moves after validations, and there is no validation set",
                where,
                "give mh.Data(validation=…), or choose a schedule that moves by steps",
            ),
            (
                schedule.mode != mode,
                f"{what}, made with mode={schedule.mode!r}, and it follows {metric!r}, of which {better} is better",
                where,
                f"write ReduceLROnPlateau(optimizer, mode={mode!r}, …); it follows what early_stopping does, or the "
                "loss",
            ),
        ]
    )
    return schedule


def _place(made: nn.Module, strategy: Strategy, settings: Settings, world: World) -> nn.Module:
    """What the strategy makes of the model; one that has no values yet gets them under the run's seed."""
    if not is_meta(made):
        return strategy.place(made)
    world.notes.append(
        "the model was made on the meta device: each of its modules has its first values from its own "
        "reset_parameters(), not from what the model does with them when it is made"
    )
    with randomness.kept():
        randomness.seed_all(settings.seed, randomness.MODEL)
        return strategy.place(made)


def _drawn(data: Data, settings: Settings) -> str:
    """What identifies the order in which samples are drawn, where the script has a say in it."""
    if data.order is not None:
        return own_order.fingerprint(data.order, len(cast(Any, data.train)), seed=settings.seed)
    return "" if data.weights is None else drawing.fingerprint(data.weights)


def _length(dataset: Dataset[Any]) -> str:
    """In words; nothing of a stream that has none. A ChainDataset asks streams that cannot say."""
    with suppress(TypeError):
        return f" of {len(cast(Sized, dataset))} samples"
    return ""


def attach_callbacks(components: Components) -> None:
    """Let callbacks make their states of the weights that the run begins with.

    Raises:
        ConfigError: they keep tensors, or freeze some for a while, and the strategy lets every worker's model drift.
    """
    components.callbacks.call("attach", components.moment())
    if components.world.is_shared and components.thawed:
        components.settings.strategy.check_thawed(components.thawed[0])
    if components.world.is_shared and (names := sorted(components.callbacks.tensors())):
        components.settings.strategy.check_kept(names[0])


def make_optimizer(
    module: nn.Module,
    make: MakeOptimizer,
    settings: Settings,
    strategy: Strategy,
    *,
    has_step: bool,
    thawed: Collection[str] = (),
) -> Optimizer:
    """The user's optimizer over the placed parameters, with the learning rate that `settings` ask for.

    `thawed`: the names, in the model, of those that are frozen and will be trained later.

    Raises:
        ConfigError: `make` gave something else, or an optimizer of other parameters than those.
    """
    step_without_compiler()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="optimizer contains a parameter group with duplicate")  # refused
            parameters = parameters_of(module, thawed)
            made = make(parameters)
    except ValueError as cause:
        if "more than one parameter group" in str(cause):
            raise twice(str(cause)) from cause
        raise
    except AttributeError as cause:
        if "'Parameters' object" not in str(cause):
            raise
        raise ConfigError(
            f"optimizer= is called with the parameters, and takes them for a model: {cause}",
            where="mh.Trainer(optimizer=…)",
            fix="write lambda params: torch.optim.AdamW(params, lr=1e-3); mh.groups(params, {…}) makes groups by name",
        ) from cause
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer gave a {type(made).__name__}, not a torch.optim.Optimizer",
            where="mh.Trainer(optimizer=…)",
            fix="write optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3)",
        )
    complete(made)
    check_options(parameters, made, strategy.mesh.world.notes)
    mesh = strategy.mesh
    uncut = not any(is_cut(each, strategy.holding) for each in module.parameters())
    check_optimizer(made, mesh.world, holds_full_model=uncut, takes_sparse=strategy.traits.takes_sparse_gradients)
    check_sparse(module, made)
    check_own_steps(made, settings.strategy, mesh.world.notes)
    check_optimized(made.param_groups, module, has_step=has_step)
    factor = learning_rate.scale(settings.lr_scaling, counted_workers(settings, mesh))
    for group in made.param_groups:
        group["lr"] = (group["lr"] if settings.lr is None else settings.lr) * factor
    fuse(made, holds_full_model=uncut)
    return made
