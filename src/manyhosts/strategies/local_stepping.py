"""What `local-sgd` and `diloco` have in common: workers that step alone, and exchange something now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.collectives import Collectives
from manyhosts.communication.layout import spread
from manyhosts.communication.nodes import Levels
from manyhosts.communication.world import World
from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.strategies import local_rate
from manyhosts.strategies.local_updates import LocalGradient, local_tensors, own_state, take_own_state, weighted_mean
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome, Steppable
from manyhosts.strategies.traits import Traits
from manyhosts.strategies.uncut_model import UncutModel


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """How far a worker had stepped alone when the workers changed."""

    since: int
    """Steps since the last exchange; -1 for a worker that has not trained yet."""
    share: float
    """Its part of the samples of those steps, in batches; where a node stepped alone, the node's."""
    alone: int
    """The number of the one that stepped alone in them: that of its node, or its own."""
    in_doubt: bool = False
    """Whether its optimizer may be another than that of those who share this number."""

    @property
    def trained(self) -> bool:
        """Whether it has something that counts."""
        return self.since >= 0


@dataclass(frozen=True, slots=True)
class Lost:
    """What went with those that are gone."""

    who: str = ""
    """Those of whom none is left that stepped with them, in words; empty where there are none."""
    batches: float = 0.0
    """What they had learned from."""
    steps: int = 0
    """In how many steps; -1 where none is left that trained with them."""

    def reported(self) -> str:
        """In words; empty where nothing is."""
        if not self.who:
            return ""
        from_what = f"from {self.batches:.3g} batches in {self.steps} steps"
        return f"what {self.who} learned alone {from_what if self.steps >= 0 else 'since the last mean'}"


def parts_of_mean(local_progress: Sequence[LocalProgress], *, alike: bool = False) -> list[float]:
    """What each worker's model counts in the mean of those that trained, by rank; together 1.

    A worker that stepped alone counts by its samples, or all count `alike`; a node's is split evenly over those of
    it that are left, who hold the same.
    """
    left = Counter(each.alone for each in local_progress if each.trained)
    shares = {each.alone: each.share for each in local_progress if each.trained}
    if alike or not sum(shares.values()):
        shares = dict.fromkeys(shares, 1.0)
    total = sum(shares.values())
    return [shares[each.alone] / total / left[each.alone] if each.trained else 0.0 for each in local_progress]


def what_is_lost(local_progress: Sequence[LocalProgress], node_of: Sequence[int]) -> Lost:
    """What those took along who are not among `local_progress` any more.

    `node_of`: see `LocalGradient`, when all were there.
    """
    shares = {each.alone: each.share for each in local_progress if each.trained}
    lost = set(node_of) - set(shares)
    if not lost:
        return Lost()
    kind = "worker" if len(set(node_of)) == len(node_of) else "host"
    who = f"the lost {kind}" if len(lost) == 1 else f"the {len(lost)} lost {kind}s"
    since = max(each.since for each in local_progress)
    return Lost(who, max(0.0, since - sum(shares.values())), since)


def first_of(ranks: Sequence[int], local_progress: Sequence[LocalProgress]) -> int:
    """Which of the workers of a node, by rank, the others follow: the first that has trained."""
    return next((rank for rank in ranks if local_progress[rank].trained), ranks[0])


def optimizers_from(local_progress: Sequence[LocalProgress], levels: Levels | None) -> list[int]:
    """For each worker, by rank, whose optimizer it continues with: of those of a node all are to be alike."""
    givers = list(range(len(local_progress)))
    for ranks in () if levels is None else levels.nodes:
        first = first_of(ranks, local_progress)
        for rank in ranks:
            both = (local_progress[first], local_progress[rank])
            stepped_together = both[0].alone == both[1].alone and all(one.trained for one in both)
            if not stepped_together or any(one.in_doubt for one in both):
                givers[rank] = first
    return givers


class LocalStepping(UncutModel):
    """All of such a strategy but the exchange, which each adds."""

    has_own = True

    def __init__(self, config: LocalSGD | DiLoCo, world: World) -> None:
        super().__init__(world)
        self.config = config
        self.alone = LocalGradient(world, by_node=config.inside_node == "exact")
        self.rounds = Rounds(config)
        self.model: nn.Module | None = None
        self.steps = 0
        """Of the run."""
        self.squares_of = 0
        """How many stepped alone when the optimizer last took the mean of squared gradients; 0 before it has."""
        self.lost = Lost()
        """What a resync that broke off has found to be lost."""
        self.is_new = self.in_doubt = False
        """Since a resync began, until the next step: whether this worker had not trained before it, and whether its
        optimizer may be another than those of its node. It may break off, and begin again among others."""

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device and make it equal to rank 0's."""
        self.model = super().place(model)
        self.alone.place(self.model, exact=self.is_exact)
        return self.model

    @property
    def is_exact(self) -> bool:
        """Whether the next step is one of the exact beginning, in which all step together."""
        return self.steps < self.config.sync_warmup

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Fill the gradients with the mean over one's own samples: the worker's, or its node's."""
        return self.alone.forward_backward(model, pieces, compute, scale, control_flags)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step alone. What is exchanged comes after it: see `exchange`."""
        assert isinstance(optimizer, torch.optim.Optimizer), f"local steps have no loss scaler, got {type(optimizer)}"
        rule, count = self.config.local_lr_scaling, self.alone.count
        if self.squares_of not in (0, count) and local_rate.applies(rule, optimizer):
            local_rate.expect_noise(optimizer, count / self.squares_of)
        self.squares_of = count
        with local_rate.multiplied(optimizer, local_rate.factor(rule, optimizer, count), decay=False):
            self.step(optimizer)
        self.is_new = self.in_doubt = False  # by the last word of this step all have met
        self.steps += 1
        self.rounds.saw(optimizer)

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Change this worker's parameters by one step."""
        optimizer.step()

    def end_exact_step(self) -> None:
        """A step of the exact beginning is over, and a round begins with the next. Called by all workers."""
        self.alone.met()
        self.rounds.next()
        if not self.is_exact:
            self.alone.regroup(self.alone.levels(exact=False), 0)

    def average(self, model: nn.Module) -> None:
        """Replace the model of every worker by the mean over all of them. In an exact beginning all are equal."""
        if self.alone.together is self.world:
            return
        weight = 1 / self.world.size if self.counts_alike else self.alone.weight
        weighted_mean(local_tensors(model, self.holding, cut=False), weight, self.world)
        if cut := local_tensors(model, self.holding, cut=True):
            # As many hold another part of this copy.
            weighted_mean(cut, weight * (self.world.size // self.copies.size), self.world, self.copies)

    @contextmanager
    def averaged(self, model: nn.Module) -> Iterator[bool]:
        """The mean within, and then each worker's own again."""
        own = [tensor.clone() for tensor in local_tensors(model, self.holding)]
        self.average(model)
        try:
            yield True
        finally:
            torch._foreach_copy_(local_tensors(model, self.holding), own)

    def compared(self, model: nn.Module) -> dict[str, Tensor]:
        """All but integers: each worker counts its own batches, and no mean is taken of them."""
        compared = super().compared(model)
        return {name: each for name, each in compared.items() if each.is_floating_point() or each.is_complex()}

    def own_statistics(self, model: nn.Module) -> list[Tensor]:
        """None: they are averaged with the model."""
        return []

    @property
    def copies(self) -> Collectives:
        """Those that hold of other copies what this worker holds of its own."""
        return self.mesh.along("replicate")

    def about_rate(self, optimizer: Steppable) -> str:
        """What this does to the learning rate, in a sentence for the user; empty where it does nothing."""
        by = local_rate.factor(self.config.local_lr_scaling, optimizer, self.alone.later)
        if by == 1:
            return ""
        since = f" from step {self.config.sync_warmup + 1} on" if self.is_exact else ""
        return (
            f"{self.config.name}: {type(optimizer).__name__} steps at {by:.3g} times the learning rate{since}, the "
            f"root of how many step alone ({self.alone.later}); local_lr_scaling=None leaves it as it is"
        )

    # Workers that go and come.

    @property
    def complete(self) -> bool:
        """Whether this worker's gradient of the step under way is here."""
        return self.alone.complete

    def step_back(self) -> None:
        """Count the samples of the step under way as not seen."""
        self.alone.step_back()

    def shared_state(self) -> dict[str, Any]:
        """The position of the run and of its rounds."""
        return {"steps": self.steps, "squares_of": self.squares_of, **self.rounds.shared_state()}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        self.steps, self.squares_of = state["steps"], state["squares_of"]
        self.rounds.take_shared(state)

    def resync_models(self, source: int, *, new: bool) -> Lost:
        """Have one model on all workers, and find who steps alone from now on. Returns what is lost.

        It is the mean of the models of those that trained, weighted by the samples each has seen. Where one of them has
        the mean that was due already, with the part of a lost worker in it, all take that.
        """
        assert self.model is not None, "place() comes before resync()"
        alone, world = self.alone, self.world
        self.is_new = self.is_new or new
        row = [-1 if self.is_new else alone.steps, float(alone.share), alone.number, self.in_doubt]
        self.in_doubt = True  # before anybody can be through with it
        rows = world.stack(torch.tensor(row, dtype=torch.float64, device=world.device)).tolist()
        local_progress = [
            LocalProgress(int(since), share, int(number), bool(doubt)) for since, share, number, doubt in rows
        ]
        have_met = [rank for rank, each in enumerate(local_progress) if each.since == 0]
        if not have_met:
            self.lost = what_is_lost(local_progress, alone.node_of)
        if have_met or not any(each.trained for each in local_progress):
            spread(local_tensors(self.model, self.holding), world, have_met[0] if have_met else source)
        else:
            weighted_mean(
                local_tensors(self.model, self.holding),
                parts_of_mean(local_progress, alike=self.counts_alike)[world.rank],
                world,
            )
        alone.met()
        levels = alone.levels(exact=self.is_exact)
        self.givers = optimizers_from(local_progress, levels)
        ranks = next((ranks for ranks in levels.nodes if world.rank in ranks), (0,)) if levels is not None else (0,)
        alone.regroup(levels, ranks.index(first_of(ranks, local_progress)))
        lost, self.lost = self.lost, Lost()
        return lost

    @property
    def counts_alike(self) -> bool:
        """Whether all that step alone count alike in the mean, and not by their samples."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """This worker's own model and optimizer, where they differ from the others'."""
        return {
            "steps": self.steps,
            "squares_of": self.squares_of,
            **self.rounds.state_dict(),
            **self.alone.state_dict(),
            **own_state(self.model, self.optimizer, self.holding),
        }

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take up what `state_dict` gave; where the workers changed, all continue from the mean."""
        if not states or not states[0]:
            return
        assert self.model is not None, "place() comes before load_state_dict()"
        began_exact = self.is_exact
        self.steps, self.squares_of = states[0]["steps"], states[0].get("squares_of", 0)
        if began_exact and not self.is_exact:
            self.alone.regroup(self.alone.levels(exact=False), 0)
        self.rounds.load_state_dict(states[0])
        self.alone.load_state_dict(states)
        if self.alone.same(states):  # else all continue from the mean in the snapshot
            take_own_state(states[self.world.rank], self.model, self.optimizer, self.holding)


class Rounds:
    """The length of the round under way. It follows from learning rates alone, so it is the same on every worker.

    The quadratic rule: where the learning rate has fallen to a share s of its highest value, a round has 1/s² times as
    many steps as at first. A worker that steps alone for H steps at rate r wanders about as far from the others as the
    square root of H, times r: so the models stay as near to each other as they were, and the workers synchronise ever
    more rarely.

    Source: Gu, Lyu, Arora, Zhang and Huang 2023, "A Quadratic Synchronization Rule for Distributed Deep Learning",
    arXiv:2310.14423: `H = max(H_base, (c / rate)²)`, with c such that a round has `sync_every` steps at the highest
    rate.
    """

    def __init__(self, config: LocalSGD | DiLoCo) -> None:
        self.config = config
        self.length = config.sync_every
        """Steps of the round under way."""
        self.rate = self.highest = 0.0
        """The learning rate of the last step, and the highest one so far; of the first parameter group."""

    def saw(self, optimizer: torch.optim.Optimizer) -> None:
        """A step was taken by `optimizer`."""
        self.rate = float(optimizer.param_groups[0]["lr"])
        self.highest = max(self.highest, self.rate)

    def next(self) -> None:
        """A round is over: fix the length of the one that begins."""
        self.length = steps_at(self.config, self.rate, self.highest)

    def state_dict(self) -> dict[str, Any]:
        """For snapshots."""
        return {"round": self.length, "highest_rate": self.highest}

    def shared_state(self) -> dict[str, Any]:
        """For a worker that comes new."""
        return {**self.state_dict(), "rate": self.rate}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Take up what `shared_state` gave on another worker."""
        self.length, self.highest, self.rate = state["round"], state["highest_rate"], state["rate"]

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave; a run that was begun with another rule continues with the one of now."""
        self.highest = state.get("highest_rate", 0.0)
        if self.config.sync_rule != "fixed":
            self.length = state.get("round", self.config.sync_every)


def steps_at(config: LocalSGD | DiLoCo, rate: float, highest: float) -> int:
    """The steps of a round that begins when the learning rate is `rate` and was at most `highest`."""
    most = config.sync_every * 16 if config.sync_at_most is None else config.sync_at_most
    if config.sync_rule == "fixed" or rate >= highest:
        return config.sync_every
    return int(min(config.sync_every * (highest / rate) ** 2 if rate > 0 else most, most))


class LocalSteps(LocalStepping):
    """Local SGD: each worker steps alone, and every `sync_every` steps all take the mean of their models.

    The mean is weighted by the samples that each has seen since the last one, so with `sync_every=1` and plain SGD it
    is data parallelism, however the batch is cut. Optimizers keep their own state: it is not averaged.

    Source: Stich 2018, "Local SGD Converges Fast and Communicates Little", arXiv:1805.09767; the exact start
    ("post-local"): Lin et al. 2018, arXiv:1808.07217.
    """

    traits = Traits(synchronous=False)
    config: LocalSGD

    def exchange(self, model: nn.Module) -> None:
        """Take the mean when it is time. After a step that all took together there is none to take."""
        if self.steps <= self.config.sync_warmup:
            self.end_exact_step()
        elif self.alone.steps >= self.rounds.length:
            self.average(model)
            self.alone.met()
            self.rounds.next()

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Let all continue from the mean of those that trained, as if that had been due; a round begins with it."""
        lost = self.resync_models(source, new=new)
        self.rounds.next()
        return lost.reported()
