"""Tensor parallelism: the workers of a copy compute the same samples, and each its part of the large layers.

What is not cut is computed by all of them alike. A layer is cut only where a trial has shown, before the first step and
on a batch of the training set, that outputs, gradients and evaluation are those of the entire model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import nn

from manyhosts.communication.dtensors import DTensors
from manyhosts.communication.gathering import gather_plain
from manyhosts.communication.layout import spread
from manyhosts.communication.mesh import Mesh
from manyhosts.communication.world import World
from manyhosts.config.tensor_cut import Tensor
from manyhosts.data import randomness
from manyhosts.errors import ConfigError
from manyhosts.strategies.cut_model import ComputedTogether, check_hooks, check_memory, copy_of
from manyhosts.strategies.materialise import is_meta, materialise, places_of
from manyhosts.strategies.optimizer_step import asks_within_update
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome
from manyhosts.strategies.tally import StepMetrics
from manyhosts.strategies.tensor.exchange import Exchange
from manyhosts.strategies.tensor.layers import cut, inner, sum_gradient
from manyhosts.strategies.tensor.look import few, look, tried, uncut_passes
from manyhosts.strategies.tensor.plan import Group, Plan, models_plan, users_plan
from manyhosts.strategies.traits import Traits

_HEADS = (
    "num_heads",
    "n_heads",
    "n_head",
    "nhead",
    "heads",
    "num_attention_heads",
    "num_key_value_heads",
    "n_kv_heads",
)
_FEATURES = ("embed_dim", "d_model", "hidden_size", "all_head_size", "n_embd", "width", "dim", "inner_dim")
"""Attributes by which modules shape what is between their layers; whether they do, a trial shows."""


class TensorParallel(ComputedTogether):
    """Parameters, gradients and optimizer state of a part of each layer that is cut, and all of every other."""

    traits = Traits(communicates_in_forward=True, holds_full_model=False)

    def __init__(self, config: Tensor, world: World, mesh: Mesh | None = None) -> None:
        """A strategy for several workers. `mesh`: theirs, where more is to be cut than layers.

        Raises:
            ConfigError: they compute on GPUs, or are no integral number of copies.
        """
        mesh = mesh or Mesh(world, tensor=config.size or world.size)
        super().__init__(mesh, DTensors(mesh), name="tensor")
        self.config, self.size = config, mesh.size("tensor")
        mesh.along("replicate")  # all workers make its groups together
        self.layer_exchange = Exchange(mesh)

    def place(self, model: nn.Module) -> nn.Module:
        """Keep this worker's part of the layers that are cut, equal to rank 0's, and all of the rest.

        Raises:
            ConfigError: nothing can be cut, a trial of the plan does not give what the entire model does, or there is
                no batch to try it on.
        """
        uncut = next(model.children()) if getattr(model, "is_never_called", False) else model
        for each in self.cut_layers(model, uncut):
            sum_gradient(each, self.layer_exchange)
        self.parameters = list(model.parameters())
        return model

    def cut_layers(self, model: nn.Module, uncut: nn.Module) -> list[nn.Parameter]:
        """Place all but the sums of gradients: returns the parameters of which each worker has a part of a sum.

        Raises:
            ConfigError: see `place`.
        """
        check_hooks(uncut, "strategy='tensor'")
        check_memory(uncut, "strategy='tensor'")
        if is_meta(model):
            materialise(model.modules(), places_of(model))
        spread([*model.parameters(), *model.buffers()], self.world)
        with self.mesh.stood_in_for():
            self.device_mesh = self.mesh.device_mesh("tensor")
            if self.world.part is None:
                with randomness.undisturbed():
                    plan = self._proved(uncut)
            else:
                plan = Plan.from_dict(self.world.part.plan)  # that of the workers that it will join
            cut(uncut, plan, self.layer_exchange, self.device_mesh)
        self.plan = asdict(plan)
        copies = f", in {self.mesh.data.size} copies" if self.mesh.data.size > 1 else ""
        self.world.notes.append(f"tensor parallel over {self.size} workers{copies}: {plan.in_words()} (by layers)")
        return inner(uncut, plan)

    def why_all_end(self) -> str:
        """See `CutModel`."""
        return super().why_all_end() or asks_within_update(self.optimizer)

    def _proved(self, model: nn.Module) -> Plan:
        """The plan by which the model is cut; each step of it was tried.

        Raises:
            ConfigError: see `place`.
        """
        if self.sample is None:
            raise _refusal(
                "the training set is a stream, so no batch can be had before training begins, on which to see that a "
                "cut model computes what the uncut one does",
                fix="give a map-style dataset, or choose another strategy",
            )
        inputs = self.sample.inputs()
        try:
            plan, groups = look(copy_of(model), given := few(inputs), self.size)
        except Exception:  # a model may count on the batch's size, and raise whatever it likes
            plan, groups = look(copy_of(model), given := inputs, self.size)
        ways = self.config.ways
        if ways:
            plan = users_plan(model, ways, self.size)
            groups = tuple(each for each in groups if _is_asked(each, plan))
        if len({*gather_plain(self.world, repr((plan.ways, groups)))}) > 1:
            raise _refusal("workers have seen different layers of the model in a forward pass", fix=_DRAWS)
        if not plan.ways:
            raise _refusal(
                "the model has no nn.Linear or nn.Embedding that could be cut: one that it calls, with features for "
                "each worker, whose weight nothing else uses",
                fix="choose another strategy",
            )
        wanted, inputs, is_double = uncut_passes(model, given)

        def wrong_with(candidate: Plan) -> str:
            """On any worker; empty where nothing is. All workers call this."""
            own = tried(
                copy_of(model), candidate, self.layer_exchange, self.device_mesh, inputs, wanted, is_double=is_double
            )
            return next(filter(None, gather_plain(self.world, own)), "")

        return (self._users if ways else self._found)(plan, groups, model, wrong_with)

    def _found(self, plan: Plan, groups: tuple[Group, ...], model: nn.Module, wrong_with: Any) -> Plan:
        """The model's own plan, or layer by layer, with each kind of group that a trial shows to be right.

        Raises:
            ConfigError: the layers alone do not give what the entire model does.
        """
        if (own := models_plan(model, plan)) is not None:
            asked = tuple(each for each in groups if _is_asked(each, own))
            for variant in _variants(asked, model, self.size):
                if not wrong_with(candidate := own.with_groups(variant)):
                    self.world.notes.append("layers are cut as the model says itself (tp_plan)")
                    return candidate
        if wrong := wrong_with(plan):
            raise _refusal(f"the model cannot be cut: {wrong}", fix=_NAME_SOME)
        for alike in _by_kind(groups, model):
            candidates = (plan.with_groups(each) for each in _variants(alike, model, self.size))
            plan = next((each for each in candidates if not wrong_with(each)), plan)
        return plan

    def _users(self, plan: Plan, groups: tuple[Group, ...], model: nn.Module, wrong_with: Any) -> Plan:
        """The user's plan.

        Raises:
            ConfigError: it does not give what the entire model does.
        """
        wrong = ""
        for each in _variants(groups, model, self.size):
            candidate = plan.with_groups(each)
            if not (wrong := wrong_with(candidate)):
                return candidate
        raise _refusal(
            f"cut by this plan the model does not compute what it does uncut: {wrong}",
            where="Tensor(plan=…)",
            fix="a layer cut as 'column' gives parts, which one cut as 'row' takes, with nothing between that mixes "
            "them: set others to 'gathered'; or leave plan out",
        )

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Accumulate the gradients of all pieces, of each part on the worker that keeps it."""
        for parameter in self.parameters:
            parameter.grad = None
        tally = StepMetrics(control_flags, self.agreed, self.world)
        for piece in pieces:
            scale(self.counted(tally, compute(model, piece), piece)).backward()
        self.sum_copies()
        self.world.wait(tally.start_sum())
        return tally.outcome()


_DRAWS = "let the forward pass of a model depend on nothing but its inputs and torch's generator"
_NAME_SOME = "name the layers that can be cut: mh.Tensor(plan={'blocks.*.up': 'column', 'blocks.*.down': 'row'})"


def _refusal(what: str, *, fix: str, where: str = "strategy='tensor'") -> ConfigError:
    return ConfigError(what, where=where, fix=fix)


def _is_asked(group: Group, plan: Plan) -> bool:
    return plan.ways.get(group.row) == "row" and all(plan.ways.get(name) == "column" for name in group.columns)


def _by_kind(groups: Sequence[Group], model: nn.Module) -> Iterator[tuple[Group, ...]]:
    """Groups of one kind together: what holds for one block of a model holds for the others."""
    kinds: dict[Any, list[Group]] = {}
    for group in groups:
        kinds.setdefault(group.kind(model), []).append(group)
    return (tuple(each) for each in kinds.values())


def _variants(groups: tuple[Group, ...], model: nn.Module, workers: int) -> Iterator[tuple[Group, ...]]:
    """The groups as they are; with numbers of heads divided by the workers; with those of features divided, too."""
    yield tuple(replace(group, dims={}) for group in groups)
    for names in (_HEADS, (*_HEADS, *_FEATURES)):
        found = tuple(
            replace(group, dims={}, divided=_dividable(model.get_submodule(group.owner), names, workers))
            for group in groups
        )
        if any(group.divided for group in found):
            yield found


def _dividable(owner: nn.Module, names: Sequence[str], workers: int) -> tuple[str, ...]:
    values = {name: owner.__dict__.get(name) for name in names}
    return tuple(name for name, value in values.items() if type(value) is int and value % workers == 0)
