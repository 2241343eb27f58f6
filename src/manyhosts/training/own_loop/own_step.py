"""The user's own step: all its updates count as one step, or none does.

A step of the user's calls `backward` and `update` as often as it wants. Each `backward` is one `forward_backward` of
the strategy, over the parameters of one optimizer. What a step changes before it is over (parameters, optimizers,
schedulers, `run.state`, what belongs to parts) is copied before its first change, so that a step which breaks off is
made again from where it began.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from itertools import accumulate, repeat
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_leaves

from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.world import World
from manyhosts.config.settings import Settings
from manyhosts.data import randomness
from manyhosts.elastic.state_transfer import gather
from manyhosts.errors import ConfigError, SnapshotError
from manyhosts.loss.compute import OVER_BATCH, ForwardPass, check_count, check_gradient, step_values
from manyhosts.model.buffers import BufferCopies, ParameterCopies
from manyhosts.model.combined_optimizer import CombinedOptimizer
from manyhosts.model.held_values import Held, HeldValues, changed_attributes
from manyhosts.model.model_checks import check_called
from manyhosts.model.optimizer_state import advance, without_functions
from manyhosts.refusals import place_in_script
from manyhosts.snapshot.flatten import flatten
from manyhosts.strategies.audit import Auditor, Digest
from manyhosts.strategies.strategy import Compute, Piece, StepOutcome, Strategy
from manyhosts.strategies.uncut_model import norm_of
from manyhosts.training.consistency.same_given import compare_calls
from manyhosts.training.own_loop.parts import Parts, load
from manyhosts.training.state.run_state import RunState

_NOT_TRIED = (
    "whether each loss is a mean over its samples, or over the count that it gives, could not be tried: a step of the "
    "script's own is not called on a trial; `manyhosts prove` compares 1, 2 and 3 workers"
)
_INSTEAD = {
    "clip_gradients": "clip in the step, for each optimizer: run.update(clip=…)",
    "warmup": "give a scheduler that begins with a low rate: mh.Run(schedulers=…)",
    "schedule_every": "a scheduler moves on with each run.update of its optimizer: give it lengths in updates",
    "look_every": "leave it out: steps of the script's own are not called on a trial",
    **dict.fromkeys(("compile", "lr_scaling", "activation_checkpointing"), "leave it out"),
}
"""What is for the step of a Trainer, and what to do in a loop of one's own."""
_SAME = (
    "decide what a step does by what backward and update give, by run.state or run.steps_done, which all workers have "
    "alike, and not by RANK or by a batch"
)
_FEW = 1 << 14
"""Numbers in the gradients of a small model."""
_SAME_ROWS = 2e-2
"""By this share of their norm rows may differ from those computed without a graph before: in half precision, say."""
_LOOKS = 3
"""Steps after which plain attributes of models are looked at; in the first ones of a run calls are compared."""
LossOf = Callable[[Any], Tensor | Mapping[str, Any]]
"""`loss(batch)`: the mean over the samples of a micro-batch, or a mapping with `loss`, perhaps `count`, and values."""


_ALL = nullcontext()


class _BadStep(Exception):
    """A loss or a gradient of this step is not finite: it ends here, on all workers alike."""


@dataclass(slots=True)
class Group:
    """The parameters of one optimizer, and how their gradients are summed over the workers."""

    name: str
    optimizer: Optimizer
    parameters: list[nn.Parameter]
    scheduler: LRScheduler | None
    sums: Any
    """What the strategy sums their gradients in."""
    has_all: bool
    """Whether there is no other parameter."""
    is_small: bool = field(init=False)
    """Whether its gradients are so few numbers that to copy them costs less than a call for each."""

    def __post_init__(self) -> None:
        alike = len({(each.dtype, each.device) for each in self.parameters}) == 1
        self.is_small = alike and sum(each.numel() for each in self.parameters) <= _FEW

    def norm(self) -> Tensor:
        """That of its gradient, shape ()."""
        gradients = self.gradients()
        is_sparse = any(each.is_sparse for each in gradients)
        if is_sparse or not self.is_small or not gradients:
            return norm_of([each.coalesce().values() if each.is_sparse else each for each in gradients])
        found: Tensor = torch.linalg.vector_norm(_flatten_dense_tensors(gradients)).detach()
        return found

    def clip(self, most: float) -> Tensor:
        """Make its gradient no longer than `most`. Returns its norm before."""
        if not any(each.is_sparse for each in self.gradients()):
            return nn.utils.clip_grad_norm_(self.parameters, most)
        norm = self.norm()  # of sparse ones PyTorch's function knows none
        nn.utils.clip_grads_with_norm_(self.parameters, most, norm)
        return norm

    def gradients(self) -> list[Tensor]:
        """Of those of its parameters that have one."""
        return [gradient for each in self.parameters if (gradient := each.grad) is not None]


class Verbs(Protocol):
    """What a step of either face is made of: see `training.loop.step.Stepper`."""

    def around(self, pieces: int) -> AbstractContextManager[None]:
        """What passes run in."""

    def backward(self, pieces: Sequence[Piece], compute: Compute, control_flags: Sequence[float] = ()) -> StepOutcome:
        """The gradients of what `compute` gives, summed over the workers."""

    def update(self, optimizer: Optimizer, step: Callable[[], Any], *address: int) -> None:
        """Change the model by `step`, whose random numbers are of `address`."""


class OwnStep:
    """Runs the user's step, its updates included."""

    def __init__(self, make_schedulers: Callable[[Mapping[str, Optimizer]], dict[str, LRScheduler]]) -> None:
        """`make_schedulers`: makes those of the optimizers of these names, by their names."""
        self.make_schedulers = make_schedulers
        self.step: Callable[[], None]
        """The user's, to be called once for each optimizer step."""
        self.written: Callable[..., Any] | None = None
        """The function that the script has written for it."""
        self.groups: dict[str, Group] = {}
        self.combined: CombinedOptimizer
        self.state: dict[str, Any] = {}
        """The user's own numbers and tensors, equal on all workers."""
        self.remembers = False
        self.verbs: Verbs
        """Of the last run that was begun."""
        self.run_state = RunState()
        """Of that run."""
        self.computed: int | None = None
        """The number of the part that is computed now."""
        self.pieces: Sequence[Piece] | None = None
        """Those of the step under way; None between steps."""
        self.place = ""
        """Where the user's step is written."""
        self.attributes: dict[str, Any] = {}
        """Those of the `mh.Run`."""
        self.known = frozenset[str]()
        """Its own, of which the script has set none."""
        self.call: Callable[[LossOf, Any], Any] = lambda function, batch: function(batch)
        """How a function of the user's is called; who watches a run may put another in its place."""
        self.logged: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}
        """By the name of an optimizer: of the last backward pass for it in this step."""
        self.pending: set[str] = set()
        """The optimizers for which there are gradients that no update has used yet."""
        self.counts: set[float] = set()
        """What the batch has counted in the backward passes of this step, over all workers, where they say it."""
        self.norms: list[Tensor] = []
        """Of the gradient of each update of the step under way, or the last one, before clipping."""
        self._broken: Exception | None = None
        """What a call of this step was broken off by."""
        self.calls = 0
        """Backward passes of this step so far."""
        self._begun: dict[int, tuple[int, dict[str, Any]]] | None = None
        """Where parts are computed twice, for an audit or a loss over the batch: by the number of a part, its first
        micro-batch and what the part kept before the pass. None: in this pass each is computed once."""
        self._placed: list[nn.Parameter] = []
        """All parameters: to walk through the models in every backward pass takes longer than a small one."""
        self._before: dict[int, tuple[Any, Any]] = {}
        """By id, what the step under way may have changed besides parameters, with its state before; else empty."""
        self._copies = ParameterCopies()
        self._plain: Held | None = None
        """What models keep in plain attributes, before the first step of this process."""
        self._looks = _LOOKS
        self._known: set[str] = set()
        """What was in `run.state` when it was looked at last."""
        self._new_buffers: list[tuple[nn.Module, str]] = []
        self._gradients: dict[nn.Parameter, tuple[Tensor | None, int]] = {}
        """In the first steps: those that parameters had before the step, or after an update, and how often written."""

    def use(self, strategy: Strategy, settings: Settings, world: World, auditor: Auditor | None) -> None:
        """Sum gradients by `strategy`, which has not placed the models yet. `auditor`: what it has compared.

        Raises:
            ConfigError: it cannot sum those of one optimizer at a time.
        """
        settings.strategy.check_own_loop(is_shared=world.is_shared)
        for each in fields(Settings):
            if (name := each.name) in _INSTEAD and getattr(settings, name) != each.default:
                raise ConfigError(
                    f"{name} is for the step of mh.Trainer", where=f"mh.Run({name}=…)", fix=_INSTEAD[name]
                )
        if settings.precision == "fp16":
            raise ConfigError(
                "fp16 needs a scaler for each optimizer, which an own loop has not",
                where="mh.Run(precision=…)",
                fix='use precision="bf16"',
            )
        if settings.virtual_workers or settings.micro_batch_size or world.is_shared:
            world.notes.append(_NOT_TRIED)
        self.strategy, self.settings, self.world, parts = strategy, settings, world, settings.virtual_workers
        self.auditor = auditor
        self.parts = Parts(world, parts or world.size, stays=parts is not None)

    def begin(self, verbs: Verbs, run_state: RunState, *, remembers: bool) -> None:
        """A run begins. `remembers`: whether a step may be made again, so that what it changes is copied before."""
        self.verbs, self.run_state, self.remembers = verbs, run_state, remembers
        stepped = {each for group in self.groups.values() for each in group.parameters}
        for name, model in self.model.named_children():
            if not model.training and not stepped.isdisjoint(model.parameters()):
                model.train()
                self.world.notes.append(
                    f"the model {name!r} was in evaluation mode, and is trained in training mode; to train it in "
                    f"evaluation mode, call run.models[{name!r}].eval() in the step"
                )

    def take_models(self, placed: nn.Module, compute: ForwardPass) -> None:
        """Know the models as they were placed, and what a forward pass runs in."""
        self.model, self.compute, self._placed = placed, compute, list(placed.parameters())
        self._modules = set(placed.modules())

    def take_optimizers(self, combined: Optimizer) -> dict[str, LRScheduler]:
        """Know the optimizers, which are made after the models were placed. Returns the schedulers, by their names."""
        assert isinstance(combined, CombinedOptimizer), "mh.Run makes one"
        self.combined, schedulers = combined, self.make_schedulers(combined.named)
        for name, each in combined.named.items():
            parameters = [parameter for group in each.param_groups for parameter in group["params"]]
            with _trained(self._placed, parameters, also_frozen=True):
                sums = self.strategy.make_group(parameters)
            has_all = len({id(parameter) for parameter in parameters}) == len(self._placed)
            self.groups[name] = Group(name, each, parameters, schedulers.get(name), sums, has_all)
        stepped = {each for group in self.groups.values() for each in group.parameters}
        self.world.notes += (
            f"no optimizer steps {_first(left)} of the model {name!r}, and it steps others of it: give them to one in "
            "optimizers={…}, or freeze what is to stay as it is (requires_grad_(False))"
            for name, model in self.model.named_children()
            if not stepped.isdisjoint(model.parameters())  # not of a teacher, a target network
            and (left := [key for key, each in model.named_parameters() if each.requires_grad and each not in stepped])
        )
        return schedulers

    def _held(self) -> HeldValues:
        found = HeldValues(self.model, self.written)
        found.add_names("run", self.attributes, [name for name in self.attributes if name not in self.known])
        return found

    def others(self, values: HeldValues | None = None) -> dict[str, nn.Module]:
        """The modules, by name, that the step's code uses and the run does not have. `values`: what it holds."""
        found = (values or self._held()).modules.items()
        return {
            name: each for name, each in found if each not in self._modules and any(True for _ in each.parameters())
        }

    # A step.

    def make(self, pieces: Sequence[Piece], control_flags: Sequence[float]) -> tuple[StepOutcome, bool]:
        """Run the user's step. `control_flags` are summed over the workers. Returns also whether it counts."""
        audited: list[Piece] = []
        if self.auditor is not None:
            audited = [piece for each in self.auditor.due for piece in each.pieces]
            self.auditor.all_compute = bool(self.parts.kept) or not self.run_state.step
        for each in [*pieces, *audited]:  # a step may compute it several times
            # Summed as they count, and divided at the end: a weight only distinguishes ghosts from samples here.
            each.bring, each.weight = repeat(each.batch).__next__, 1.0 if each.weight else 0.0
        self.pieces = pieces
        self.is_alone = self.world.size == len(pieces) == 1 and not self.settings.virtual_workers
        self.calls, self.logged, self.norms, self.losses, self.pending = 0, {}, [], {}, set()
        self.counts.clear()
        self._broken, self.parts.live, self._new_buffers = None, {}, []
        if self.remembers:
            self._keep()
        self._note_gradients(self._placed)
        if self._plain is None:
            self._plain = (values := self._held()).now()
            self.world.notes += _of_others(self.others(values), values.iterators)
        self._seed()
        is_good = self._made()
        if not self.calls and not self.run_state.step:
            self.world.notes.append("the first step has called no run.backward: it has trained nothing")
        flags, are_kept = self._agree(control_flags)
        kept = self.parts.end_step({piece.address[1] for piece in pieces}) if are_kept else self.parts.kept
        if is_good:
            self.parts.kept = kept
        else:
            self._put_back()
        self.pieces, self._before = None, {}
        if self._looks:
            self._looks -= 1
            if note := changed_attributes(self._plain, self._held().now()):
                self.world.notes.append(note)
                self._looks = 0
        return StepOutcome(self._values(is_good=is_good), flags), is_good

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Within, a step is refused that gives a model something which nothing else knows."""
        with (
            register_module_parameter_registration_hook(self._refuse_added),
            register_module_module_registration_hook(self._refuse_added),
            register_module_buffer_registration_hook(self._note_buffer),
        ):
            yield

    def _made(self) -> bool:
        """Call the user's step, and see what it has left behind. Whether all its numbers are finite."""
        try:
            self.step()
            self._see_that_whole()
            self._check_left()
        except _BadStep:
            return False
        except ConfigError as error:
            error.where = f"{error.where}, {place_in_script(error) or self.place}"
            raise
        return True

    def _seed(self, *call: int) -> None:
        """What the step draws next, outside of its parts, has an address: this step, and the `call` before it."""
        randomness.seed_compute(self.settings.seed, randomness.OWN_STEP, self.run_state.step, *call)

    def _agree(self, control_flags: Sequence[float]) -> tuple[Sequence[float] | Tensor, bool]:
        """The sums of the control flags over the workers, and whether any worker keeps something by part."""
        in_use = any(part.objects for part in self.parts.live.values())
        if self.world.size == 1:
            return control_flags, in_use
        if self.run_state.step < _LOOKS:
            compare_calls(self.world, "the end of the step", _SAME)
        # A checksum of 20 bits, so that the sum of its squares is exact; 0 of a worker that logs nothing.
        names = 1 + (zlib.crc32(" ".join(sorted(self.logged)).encode()) >> 13) if self.logged else 0
        own = [float(in_use), names, names * names, bool(names), names * self.world.is_rank_0]
        reported = self.world.all_reduce(
            torch.tensor([*control_flags, *own], dtype=torch.float64, device=self.world.device)
        )
        used, total, squares, loggers, of_rank_0 = reported[-5:].tolist()
        if (total, squares) != (loggers * of_rank_0, loggers * of_rank_0**2):
            logged: list[str] = gather_plain(self.world, ", ".join(sorted(self.logged)) or "nothing")
            rank, other = next(each for each in enumerate(logged) if each[1] not in (logged[0], "nothing"))
            raise ConfigError(
                f"in one step rank 0 logs {logged[0]}, and rank {rank} logs {other}; what rank 0 logs is recorded",
                where=f"run.log, {self.place}",
                fix="log the same names on every worker, or on rank 0 alone",
            )
        return reported[:-5], used > 0

    def _keep(self) -> None:
        """Copy what the step may change by itself: the script's own values, and parameters."""
        named = dict(self.model.named_parameters())
        stepped = {id(each) for group in self.groups.values() for each in group.parameters}
        self._copies.keep(named, [name for name, each in named.items() if id(each) in stepped])
        self._before = {id(self.state): (self.state, copy.deepcopy(self.state))}

    def _see_that_whole(self) -> None:
        """Raise again what a pass or an update was broken off by, where the step has caught it and gone on.

        The other workers may be waiting in that pass, and gradients of half a pass are those of no batch.
        """
        if self._broken is not None:
            self._broken.add_note(
                "It broke off a call of run.backward or run.update: a step that catches it ends here."
            )
            raise self._broken

    def _check_left(self) -> None:
        """See that a step which is over has left nothing behind that counts for nothing, or that nothing could keep.

        `run.state` is looked at in the first steps and where something has come to it. A buffer that is in the
        `state_dict` must be there when a resume makes the model; others are made again.
        """
        for name in self.groups:
            if name in self.pending:
                raise ConfigError(
                    f"this step has computed a gradient for {name!r}, and no run.update has used it",
                    where="run.backward",
                    fix="call run.update after it in the same step: gradients do not outlive a step; to sum those of "
                    "several batches, make batch_size larger and set micro_batch_size",
                )
        for name, kept in self.state.items():
            if any(isinstance(each, Tensor) and not each.is_leaf for each in tree_leaves(kept)):
                raise ConfigError(
                    f"run.state[{name!r}] holds a tensor with the graph that has made it, which nothing can save",
                    where="run.state",
                    fix="keep its value: value.detach()",
                )
        if self._looks or self.state.keys() != self._known:
            self._known = set(self.state)
            try:
                flatten(self.state)
            except SnapshotError as error:
                raise ConfigError(error.what, where=f"run.{error.where}", fix=error.fix) from None
        for module, name in self._new_buffers:
            if name in module._buffers and name not in module._non_persistent_buffers_set:
                raise ConfigError(
                    f"the step gives a model of the run the buffer {name!r}: a snapshot has it, and the model that a "
                    "resume makes has not",
                    where="run.fit(step)",
                    fix="register it in the model's __init__, or with persistent=False where it is made again",
                )

    def _refuse_added(self, module: nn.Module, name: str, given: nn.Parameter | nn.Module | None) -> None:
        """Called where a step gives a module a parameter, or another module."""
        if self.pieces is None or module not in self._modules or given is None:
            return
        added = given.parameters() if isinstance(given, nn.Module) else [given]
        if not {id(each) for each in added} <= {id(each) for each in self._placed}:
            raise ConfigError(
                f"the step gives a model of the run the parameter or module {name!r}, which no optimizer steps, no "
                "snapshot resumes and no other worker has",
                where="run.fit(step)",
                fix="make it with its model, in mh.Run(models=…)",
            )

    def _note_buffer(self, module: nn.Module, name: str, _given: Tensor | None) -> None:
        """Called where a module is given a buffer: before it is known whether snapshots are to have it."""
        if self.pieces is not None and module in self._modules and name not in module._buffers:
            self._new_buffers.append((module, name))

    def _values(self, *, is_good: bool) -> dict[str, Tensor]:
        losses = {name: self.losses[name] for name in self.groups if name in self.losses}
        if not losses:
            return {"loss": torch.zeros((), dtype=torch.float64, device=self.world.device), **self.logged}
        first, *others = losses.values()
        total = sum(others, first)
        if not is_good and bool(total.isfinite()):
            total = torch.full_like(total, math.nan)  # a gradient was not finite
        named = {f"loss/{name}": each for name, each in losses.items()} if len(self.groups) > 1 else {}
        return {"loss": total, **named, **self.logged}

    def backward(
        self, loss: LossOf, into: str | None, over_batch: Callable[[Any], Tensor | Mapping[str, Any]] | None
    ) -> dict[str, Tensor]:
        """See `Run.backward`."""
        try:
            _check_called(binds=self._looks > 0, loss=loss, over_batch=over_batch)
            group, call = self._group(into, "run.backward"), self.calls
            if self.run_state.step < _LOOKS and self.world.size > 1:
                what = " over the batch" if over_batch else ""
                compare_calls(self.world, f"run.backward for {group.name!r}{what}", _SAME)
            if self._looks and group.name not in self.pending:
                self._refuse_lost(group)
            self.calls += 1
            is_audited = self.auditor is not None and bool(self.auditor.due)
            self._begun = {} if is_audited or over_batch is not None else None
            added_to = group.parameters if group.name in self.pending else []
            old = [None if each.grad is None else each.grad.clone() for each in added_to]
            self.strategy.use_group(group.sums, call)  # within, only this group is given gradients
            try:
                with _ALL if group.has_all else _trained(self._placed, group.parameters):
                    values = (
                        self._of_pieces(loss, group) if over_batch is None else self._of_batch(loss, over_batch, group)
                    )
            finally:
                self.strategy.use_group(None, call)
        except Exception as error:
            self._broken = error  # the step may catch it
            raise
        for parameter, before in zip(added_to, old, strict=True):
            if before is not None:
                parameter.grad = before if parameter.grad is None else parameter.grad.add_(before)
        self.pending.add(group.name)
        self.losses[group.name] = values["loss"]
        self._seed(self.calls, 0)  # the parts have left each worker's generators at its own last one
        return values

    def _note_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        if self._looks:
            grads = {each: each.grad for each in parameters}
            self._gradients |= {each: (grad, 0 if grad is None else grad._version) for each, grad in grads.items()}

    def _refuse_lost(self, group: Group) -> None:
        """See that the step has not gone backward by itself for what the pass that begins now gives new gradients."""
        for parameter in group.parameters:
            grad, (before, version) = parameter.grad, self._gradients[parameter]
            if grad is None or (grad is before and grad._version == version):
                continue
            if bool((grad.coalesce().values() if grad.is_sparse else grad).any()):
                raise ConfigError(
                    f"the step has computed gradients for {group.name!r} before run.backward, which begins with none: "
                    "they would be lost",
                    where="run.backward",
                    fix="make what they are of a part of the loss, or go backward by yourself after run.backward",
                )

    def _of_pieces(self, loss: LossOf, group: Group) -> dict[str, Tensor]:
        """The gradient of the mean over all that the micro-batches count, divided once, when the sums are there.

        Where one micro-batch is all of the batch, its mean is the mean.
        """

        def sums(_module: nn.Module, piece: Piece) -> Mapping[str, Tensor]:
            values = step_values(self._called(loss, piece, seeds=not self.is_alone), "run.backward")
            check_gradient(values["loss"], "run.backward", of=f"that optimizer {group.name!r} steps")
            count = values.pop("count", None)
            if count is None:
                if self.is_alone:
                    return values
                count = torch.full((), piece.samples, dtype=torch.float64, device=self.world.device)
                return {**{name: each * piece.samples for name, each in values.items()}, "count": count}
            count = count.detach().reshape(())  # how many there are is no function of the parameters
            if not self.is_alone and not bool(count):
                values = _of_nothing(values, group)
            return {**{name: each * count for name, each in values.items()}, "count": count.double()}

        values = dict(self.verbs.backward(self.pieces or [], sums).values)
        if "count" not in values:
            return values
        total = values.pop("count").item()
        check_count(total, "run.backward")
        self.counts.add(total)
        gradients = group.gradients()
        if not total:
            for gradient in gradients:
                gradient.zero_()
            return {name: torch.zeros_like(each) for name, each in values.items()}
        if gradients:
            torch._foreach_div_(gradients, total)
        return {name: each / total for name, each in values.items()}

    def _of_batch(self, rows_of: LossOf, over_batch: Callable[[Any], Any], group: Group) -> dict[str, Tensor]:
        """The gradient of a loss over all rows of the batch at once.

        First the rows of all parts, without a graph; then the loss, on every worker alike, and its gradient by each
        row; then each part again, from the same random numbers and what it keeps, and backward from that gradient.
        """
        reported = self._rows_of_all(rows_of)
        leaves = [torch.cat(parts) for parts in zip(*reported.values(), strict=True)]
        places = [accumulate(map(len, parts), initial=0) for parts in zip(*reported.values(), strict=True)]
        begins = dict(zip(reported, zip(*places, strict=True), strict=False))
        # Labels and indices are rows, too, and have no gradient; frozen parameters have none either.
        moved = [each.requires_grad_() for each in leaves if each.is_floating_point() or each.is_complex()]
        trained = [each for each in group.parameters if each.requires_grad]
        self._seed(self.calls, 1)
        with self.compute.context():
            values = step_values(over_batch(leaves[0] if len(leaves) == 1 else tuple(leaves)), OVER_BATCH)
        check_gradient(values["loss"], OVER_BATCH, of="or row that it is given")
        found = torch.autograd.grad(values["loss"], [*moved, *trained], allow_unused=True)
        gradients = iter(found)
        by_row = [next(gradients) if each.requires_grad else None for each in leaves]

        def surrogate(_module: nn.Module, piece: Piece) -> Mapping[str, Tensor]:
            result = self._called(rows_of, piece)
            rows, zero = result if isinstance(result, tuple) else (result,), torch.zeros((), device=self.world.device)
            if not piece.weight:
                return {"loss": sum((each.sum() for each in rows), zero)}
            address = piece.address[1:]
            if self._looks:
                _refuse_others(rows, reported[address])
            pairs = (
                (each * gradient[first : first + len(each)]).sum()
                for each, gradient, first in zip(rows, by_row, begins[address], strict=True)
                if gradient is not None
            )
            total = sum(pairs, zero)
            check_gradient(total, OVER_BATCH, of=f"that optimizer {group.name!r} steps")
            return {"loss": total}

        self.verbs.backward(self.pieces or [], surrogate)
        for parameter, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return {name: each.detach().double() for name, each in values.items()}

    def _rows_of_all(self, rows_of: LossOf) -> dict[tuple[int, ...], list[Tensor]]:
        """The rows of all micro-batches, without a graph, by the part and the number in it. All workers call this."""
        auditor, buffers = self.auditor, BufferCopies(self.model)
        buffers.keep()
        own: dict[tuple[int, ...], list[Tensor]] = {}
        with torch.no_grad(), self.verbs.around(0):
            for piece in self.pieces or []:
                rows = self._rows(rows_of, piece)
                if piece.weight:
                    own[piece.address[1:]] = rows
                    if auditor is not None and piece.address[1] in auditor.digests:
                        auditor.digests[piece.address[1]].add([*rows, *self.parts.of(piece.address[1]).numbers()])
        buffers.put_back()
        if auditor is not None:
            auditor.compare(self.model, lambda part, audited: self._rows_again(rows_of, buffers, part, audited))
        if self.strategy.statistics is not None:
            self.strategy.statistics.take()
        reported = gather(self.world, {"rows": own})
        return dict(sorted(each for worker in reported for each in worker["rows"].items()))

    def _rows(self, rows_of: LossOf, piece: Piece) -> list[Tensor]:
        """What the user's function gives to `over_batch` of one micro-batch, without a graph."""
        found = self._called(rows_of, piece)
        rows = list(found) if isinstance(found, tuple) else [found]
        if piece.weight:
            self._check_rows(rows, piece)
        return rows

    @torch.no_grad()
    def _rows_again(self, rows_of: LossOf, buffers: BufferCopies, part: int, audited: Sequence[Piece]) -> int:
        """The digest of the rows of a part, computed again; without `audited` pieces, of this worker's own."""
        assert self.auditor is not None, "only where audits were asked for"
        digest = Digest(self.auditor.checksums)
        with self.verbs.around(0), randomness.undisturbed():
            for piece in audited or self.pieces or []:
                if piece.address[1] == part and piece.weight:
                    digest.add([*self._rows(rows_of, piece), *self.parts.of(part).numbers()])
        buffers.put_back()
        return digest.value

    def _check_rows(self, rows: Sequence[Any], piece: Piece) -> None:
        """See that there is a row for each sample.

        With virtual workers any rows are: parts are the same on every number of workers.
        """
        for each in rows:
            if not isinstance(each, Tensor) or not each.dim():
                what = f"a {type(each).__name__}" if not isinstance(each, Tensor) else "one number"
            elif len(each) != piece.samples and not self.settings.virtual_workers:
                what = f"{len(each)} rows for {piece.samples} samples"
            else:
                continue
            raise ConfigError(
                f"the function that gives rows to over_batch gives {what}",
                where=OVER_BATCH,
                fix="give a tensor with a row for each sample, or a tuple of such: two views are two tensors",
            )

    def _called(self, function: LossOf, piece: Piece, *, seeds: bool = True) -> Any:
        """What the user's function gives for one micro-batch, with the random numbers of its address.

        Not where one call is all of the pass: it draws on from those of the step, which have an address as well.
        """
        if seeds:
            randomness.seed_compute(self.settings.seed, randomness.COMPUTE, *piece.address, self.calls)
        if self.compute.global_batch is not None:
            self.compute.global_batch.ghost = piece.weight == 0
        self.computed = piece.address[1]
        if self._begun is not None:
            part, micro = self.parts.of(piece.address[1]), piece.address[2]
            first, before = self._begun.setdefault(part.index, (micro, part.states()))
            if micro == first:
                part.put_back(before)
        try:
            with self.compute.context():
                result = self.call(function, piece.batch)
        finally:
            self.computed = None
        if self.strategy.digest is not None:
            self.strategy.digest.add(self.parts.of(piece.address[1]).numbers())
        return result

    def update(self, name: str | None, clip: float | None) -> Tensor:
        """See `Run.update`."""
        try:
            group = self._group(name, "run.update")
            self._check_update(group, clip)
            norm = group.norm() if clip is None else group.clip(clip)
            if not math.isfinite(self.losses[group.name].item()) or not math.isfinite(norm.item()):
                raise _BadStep
            if self.remembers and id(group.optimizer) not in self._before:
                stepped = [each for each in (group.optimizer, group.scheduler) if each is not None]
                self._before |= {id(each): (each, copy.deepcopy(each.state_dict())) for each in stepped}
            self.verbs.update(
                group.optimizer, group.optimizer.step, randomness.OWN_STEP, self.run_state.step, self.calls
            )
            if group.scheduler is not None:
                advance(group.scheduler)
        except Exception as error:
            self._broken = error  # the step may catch it
            raise
        self.pending.remove(group.name)
        self.norms.append(norm)
        self._note_gradients(group.parameters)
        return norm

    def _check_update(self, group: Group, clip: Any) -> None:
        if group.name not in self.pending:
            raise ConfigError(
                "run.update comes before a run.backward for the same optimizer in this step",
                where="run.update",
                fix="call run.backward first: gradients do not outlive a step",
            )
        if sum(len(each["params"]) for each in group.optimizer.param_groups) != len(group.parameters):
            raise ConfigError(
                f"optimizer {group.name!r} was given more parameters since the run was made, whose gradients no one "
                "sums over the workers",
                where="run.update",
                fix="give it all of them in mh.Run(optimizers=…), and freeze those of later: requires_grad_(False)",
            )
        is_number = isinstance(clip, Real | Tensor) and not isinstance(clip, bool)
        if clip is not None and not (is_number and float(clip) > 0):
            raise ConfigError(
                f"clip is {clip!r}, and a norm is above 0", where="run.update(clip=…)", fix="give a positive number"
            )

    def weight(self, samples: int) -> float | None:
        """What the last step counts in the mean of its epoch, where that is one number, and not its `samples`."""
        return next(iter(self.counts)) if len(self.counts) == 1 and self.counts != {samples} else None

    def norm(self) -> Tensor | None:
        """Of the gradients of all updates of the last step together, before clipping; None where it had no update."""
        return self.norms[0] if len(self.norms) == 1 else norm_of(self.norms) if self.norms else None

    def _group(self, name: str | None, where: str) -> Group:
        if self.pieces is None:
            raise ConfigError(
                f"{where} is called outside of a step", where=where, fix="call it in the function that run.fit is given"
            )
        self._see_that_whole()
        if self.computed is not None:
            raise ConfigError(
                f"{where} is called in a function that run.backward calls for each micro-batch",
                where=where,
                fix="call it in the step, before or after that run.backward",
            )
        if name is None and len(self.groups) == 1:
            return next(iter(self.groups.values()))
        if name not in self.groups:
            raise ConfigError(
                f"there is no optimizer {name!r}" if name else "there are several optimizers, and none is named",
                where=where,
                fix=f"name one of {', '.join(map(repr, self.groups))}",
            )
        return self.groups[name]

    def _put_back(self) -> None:
        """Be as before the step, in everything that it has changed but buffers, to which the engine sees."""
        if self._before:
            for each, state in self._before.values():
                load(each, state)
            self.combined.take_groups()
            self._copies.put_back()
        self._before, self.parts.live = {}, {}

    def step_back(self) -> None:
        """Be as before the step under way, which broke off and will be done again."""
        self._put_back()
        self.pieces = None

    def on_world_changed(self) -> None:
        """Other workers are there now."""
        if not self.parts.stays:
            self.parts.count = self.world.size

    # What snapshots and new workers need of it besides models and optimizers.

    def state_dict(self) -> dict[str, Any]:
        """The schedulers, `run.state`, and what belongs to parts."""
        return {
            "schedulers": {
                name: without_functions(each.scheduler.state_dict())
                for name, each in self.groups.items()
                if each.scheduler is not None
            },
            "state": copy.deepcopy(self.state),
            "parts": {str(index): copy.deepcopy(kept) for index, kept in self.parts.kept.items()},
        }

    def compared(self) -> dict[str, Any]:
        """`run.state`; what belongs to parts was given to all workers by one."""
        return {f"run.state[{name!r}]": value for name, value in self.state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave, here or on another worker."""
        for name, kept in state["schedulers"].items():
            if (scheduler := self.groups[name].scheduler) is not None:
                scheduler.load_state_dict(dict(kept))
        load(self.state, state["state"])
        self.parts.kept = {int(index): kept for index, kept in state["parts"].items()}


def _refuse_others(rows: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """See that a micro-batch has given the same rows again, up to rounding."""
    for now, first in zip((each.detach() for each in rows), before, strict=True):
        is_same = now.shape == first.shape and (
            not now.is_floating_point() or bool((now - first).norm() <= _SAME_ROWS * first.norm())
        )
        if not is_same and bool(now.isfinite().all()):
            raise ConfigError(
                "the function that gives rows to over_batch gives others when it is called again for the same "
                "micro-batch: it is called twice, without a graph and with one",
                where=OVER_BATCH,
                fix="draw in it by torch's own generator alone, which begins again, and take what comes from an "
                "iterator, or from a generator of the script's own, in the step, before run.backward",
            )


def _of_nothing(values: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """Values of a micro-batch that counts nothing: the mean over nothing is no number, and its gradient neither.

    Its gradient is zero for the parameters that have one in other micro-batches.
    """
    parameters = [each for each in group.parameters if each.requires_grad]
    found = torch.autograd.grad(values["loss"], parameters, allow_unused=True)
    used = [each.flatten()[:0].sum() for each, by in zip(parameters, found, strict=True) if by is not None]
    none = {name: torch.zeros_like(each) for name, each in values.items()}
    return {**none, "loss": sum(used, none["loss"].detach())}


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _of_others(modules: Collection[str], iterators: Sequence[str]) -> Iterator[str]:
    """What to say of modules and iterators that the step's code names and the run does not have."""
    if modules:
        yield (
            f"the step uses {_first(list(modules))}, and mh.Run was not given it: where it changes (a target "
            "network, an average), give it in models=, and optimizers={NAME: …} for those that are trained; else no "
            "snapshot has it, and workers may come to differ"
        )
    if iterators:
        yield (
            f"the step uses {_first(iterators)}, an iterator: no snapshot has where it is, so a resumed run and "
            "a worker that comes later begin it again; index a dataset by run.steps_done in its place, or put the "
            "samples of both sets into the one of mh.Data"
        )


def _check_called(*, binds: bool, **functions: Any) -> None:
    """See that each function can be called; `binds`: and with one argument."""
    for name, function in functions.items():
        if (callable(function) and not binds) or (function is None and name != "loss"):
            continue
        call = "(loss), with def loss(batch)" if name == "loss" else "(rows, over_batch=loss), with def loss(rows)"
        if not callable(function):
            often = "for each micro-batch" if name == "loss" else "with the rows of all of them"
            raise ConfigError(
                f"run.backward is given a {type(function).__name__} as {name}, and calls it {often}",
                where="run.backward",
                fix=f"give the function, not what it returns: run.backward{call}",
            )
        given = ["batch"] if name == "loss" else ["rows"]
        check_called(name, function, given, where="run.backward", fix=f"write run.backward{call}")


@contextmanager
def _trained(
    everything: Sequence[nn.Parameter], parameters: Sequence[nn.Parameter], *, also_frozen: bool = False
) -> Iterator[None]:
    """Within, of `everything` these parameters alone are trained: those that are, or the frozen ones, too."""
    own = {id(each) for each in parameters}
    before = [(each, each.requires_grad) for each in everything]
    for each, is_trained in before:
        if is_trained is not (wanted := id(each) in own and (is_trained or also_frozen)):
            each.requires_grad_(wanted)
    try:
        yield
    finally:
        for each, is_trained in before:
            if each.requires_grad is not is_trained:
                each.requires_grad_(is_trained)
