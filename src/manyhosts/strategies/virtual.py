"""Virtual workers: each batch is cut into a fixed number of parts, and no bit depends on who computes which.

Each part is computed alone, one after another, from the same shapes, threads and random numbers on any worker. Its
gradients, losses and BatchNorm statistics are added to those of the other parts in one fixed binary tree, inside a
worker and between workers alike.

Anchors: EasyScale (Li et al. 2022, arXiv:2208.14228), VirtualFlow (Or, Zhang and Freedman 2020, arXiv:2009.09523).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyhosts.communication.gathering import gather_words
from manyhosts.communication.model_watch import UNFROZEN, ModelWatch
from manyhosts.communication.part_norm import PartStatistics
from manyhosts.communication.tree_buckets import TreeBuckets, unseen
from manyhosts.communication.tree_sum import Exchange, Pace, TreeSum, pace_on
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.order import bounds
from manyhosts.errors import ConfigError
from manyhosts.strategies.audit import Auditor, Digest
from manyhosts.strategies.strategy import Compute, Piece, Scale, StepOutcome
from manyhosts.strategies.tally import Agreed, LocalSums, outcome, resolve_names
from manyhosts.strategies.traits import Traits
from manyhosts.strategies.uncut_model import UncutModel


class VirtualWorkers(UncutModel):
    """`parts` virtual workers, shared out over the real ones."""

    traits = Traits()
    statistics: PartStatistics

    def __init__(self, parts: int, world: World, *, bucket_mb: float, auditor: Auditor | None = None) -> None:
        """Check that every worker has a part. `auditor`: what compares parts that others compute again.

        Raises:
            ConfigError: there are more workers than parts.
        """
        if world.size > parts:
            raise ConfigError(
                f"virtual_workers is {parts}, but there are {world.size} workers, and each needs a part of the batch",
                where="virtual_workers",
                fix=f"start at most {parts} workers, or begin again with virtual_workers={world.size} or more",
            )
        super().__init__(world)
        self.parts, self.bucket_mb, self.auditor = parts, bucket_mb, auditor
        self.tree_exchange = Exchange(pace_on(world.device))
        self.gradients = self._buckets_of(())
        self.statistics = PartStatistics(nn.Module())
        self.news = News(world, self.tree_exchange.pace)
        self.model_watch = ModelWatch(nn.Module(), world)
        """Of the model, once it is placed."""
        self.changed: list[str] = []
        """The buffers that forward passes have changed, until all workers know of them."""
        self.groups: list[TreeBuckets] = []
        """Those of each optimizer, where a step has several passes: `gradients` are one of them then, or none."""
        self._assignment: Sequence[range] = ()

    def share_out(self, assignment: Sequence[range]) -> None:
        """From the next step on each worker computes these parts, by rank; empty: neighbouring ones, evenly."""
        self._assignment = assignment

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, make it equal to rank 0's, let BatchNorm see parts."""
        model = super().place(model)
        self.statistics = PartStatistics(model)
        self.model_watch = ModelWatch(model, self.world)
        self.gradients = self._buckets_of([each for _, each in self.model_watch.trained()])
        return model

    def make_group(self, parameters: Sequence[nn.Parameter]) -> TreeBuckets:
        """See `Strategy`."""
        self.model_watch.frozen = []  # buckets of a group have all: none is met as new
        self.groups.append(self._buckets_of(parameters))
        return self.groups[-1]

    def use_group(self, group: TreeBuckets | None, call: int) -> None:
        """See `Strategy`."""
        self.gradients, self.news.agreed = group or self._buckets_of(()), self.agreed_of[call]

    def _buckets_of(self, parameters: Sequence[nn.Parameter]) -> TreeBuckets:
        return TreeBuckets(parameters, self.world, self.tree_exchange, bucket_bytes=int(self.bucket_mb * 1e6))

    def step_back(self) -> None:
        """Forget what the forward passes of a step that broke off have left; the rest is made again in each step."""
        self.statistics.take()
        self.changed = []
        self._watch(None)
        for buckets in self.groups:
            buckets.rest()

    def shared_state(self) -> dict[str, Any]:
        """Which parameters were unfrozen; the rest follows from the number of parts and of workers."""
        return {UNFROZEN: self.model_watch.thawed}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Train what the others train."""
        self._unfreeze(state[UNFROZEN])

    def resync(self, source: int, *, new: bool, gone: int) -> str:
        """Nothing to agree on: every worker holds everything."""
        self.step_back()
        for agreed in (self.news.agreed, *self.agreed_of.values()):
            agreed.forget()
        self.model_watch.all_is_new()
        return ""

    def _unfreeze(self, names: Sequence[str]) -> None:
        """Train the parameters of these names, too, as the other workers do, or as the run did before."""
        if self.model_watch.unfreeze(names):
            self.gradients = self._buckets_of([each for _, each in self.model_watch.trained()])

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, control_flags: Sequence[float]
    ) -> StepOutcome:
        """Compute this worker's parts one after another, and sum them with those of the others in the tree."""
        gradients, model_watch = self.gradients, self.model_watch
        assignment = self._assignment or [
            range(*bounds(self.parts, self.world.size, rank)) for rank in range(self.world.size)
        ]
        own = assignment[self.world.rank]
        self.tree_exchange.forget()
        model_watch.watch.begin_step()  # what has changed between two steps was changed by what all share
        unfrozen = model_watch.unfrozen()
        late = self._buckets_of([each for _, each in unfrozen]) if unfrozen else None
        gradients.begin(assignment)
        if late is not None:
            late.begin(assignment)
        # As many numbers as in `_close`.
        self.news.begin(assignment, [*control_flags, *([0.0] * 3 if model_watch.may_differ else ())])
        for part in own:
            last = part == own[-1]
            self._watch(None if self.auditor is None else self.auditor.digests.get(part))
            computed = [piece for piece in pieces if piece.address[1] == part and piece.weight]
            if not computed:
                self._close(part, last=last)
            for piece in computed:
                loss = scale(self.news.add(compute(model, piece), piece.weight))
                if piece is computed[-1]:
                    self._close(part, last=last)
                gradients.backward(loss)
            gradients.take(part, last=last)
            if late is not None:
                late.take(part, last=False)
        self.changed += model_watch.watch.changed_state()  # by a backward pass: sent in the next step
        self._watch(None)
        self.tree_exchange.finish()
        if self.auditor is not None:
            self.auditor.compare(
                model, lambda part, audited: self._again(model, part, audited or pieces, compute, scale)
            )
        gradients.put()
        found, statistics = self.news.split()
        self._check(found.control_flags[len(control_flags) :])
        found.control_flags = found.control_flags[: len(control_flags)]
        if late is not None:
            self._take_in(late, unfrozen)
        for _, parameter in model_watch.unfrozen():  # in the middle of this step: trained from the next one on
            parameter.grad = None
        self.statistics.track(statistics)
        return found

    def _watch(self, digest: Digest | None) -> None:
        """Have `digest`, if there is one, see what comes of the part that is computed now."""
        self.digest, self.gradients.on_handover = digest, unseen if digest is None else digest.add

    def _again(self, model: nn.Module, part: int, pieces: Sequence[Piece], compute: Compute, scale: Scale) -> int:
        """The digest of `part`, computed during the step and without a trace in it."""
        assert self.auditor is not None, "only where audits were asked for"
        digest = Digest(self.auditor.checksums)
        computed = [piece for piece in pieces if piece.address[1] == part and piece.weight]
        self._watch(digest)
        with randomness.undisturbed():
            for piece in computed:
                loss = scale(self.news.add(compute(model, piece), piece.weight))
                if piece is computed[-1]:
                    digest.add([*self.news.forget(), *self.statistics.take()])
                loss.backward()
        self.gradients.drop()
        self._watch(None)
        return digest.value

    def _check(self, reported: Sequence[float] | Tensor) -> None:
        """Refuse, on all workers, a model whose forward pass changes what the next part would see."""
        if not len(reported) or (numbers := self.model_watch.read(reported)) is None:
            return
        changes, *sums = numbers
        if changes:
            names = [name for name in gather_words(self.world, next(iter(self.changed), "")) if name]
            raise ConfigError(
                f"the forward pass changes the {self.model_watch.watch.kind_of(names[0])} {names[0]!r}, whose bits"
                " would depend on who computes what",
                where="virtual_workers",
                fix="leave virtual_workers out, or take the layer that changes it out of the model; what a loss of "
                "mh.Run changes itself (a target network, say), change in the step, after run.update",
            )
        if self.world.size > 1:
            self.model_watch.check(sums)

    def _take_in(self, late: TreeBuckets, unfrozen: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Sum the gradients of parameters that are trained from this step on, by all workers alike."""
        late.send()
        self.tree_exchange.finish()
        late.put()
        self.model_watch.known(unfrozen)
        self.gradients = self._buckets_of([each for _, each in self.model_watch.trained()])

    def _close(self, part: int, *, last: bool) -> None:
        """All forward passes of `part` are done. After the last one the backward pass hides the exchange."""
        self.changed += self.model_watch.watch.changed_state()
        reported = (
            [float(len(self.changed)), *self.model_watch.numbers()] if last and self.model_watch.may_differ else []
        )
        statistics = self.statistics.take()
        if self.digest is not None:
            self.digest.add([*self.news.seen(), *statistics])
        self.news.close(part, statistics, reported)
        if last:
            self.tree_exchange.send(self.news.total)
            self.gradients.arm(part)

    def state_dict(self) -> dict[str, Any]:
        """Which parameters were unfrozen; the rest follows from the number of parts and of workers."""
        return {UNFROZEN: self.model_watch.thawed} if self.model_watch.thawed else {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Train what was trained."""
        self._unfreeze(states[0].get(UNFROZEN, ()) if states else ())


class News:
    """The values of each part and the statistics its BatchNorm layers saw: float64, one vector, one sum.

    Control flags travel in it, each worker's with its first part, and what it sends late with its last; their sum is
    equal on all workers, but not for any number of them, so nothing that changes weights may depend on it.
    """

    def __init__(self, world: World, pace: Pace) -> None:
        self.world, self.pace = world, pace
        self.total = self._sum_of(0)
        self.agreed = Agreed()
        self.parts: list[LocalSums] = []
        """What each part that this worker has computed gave, the one under way last."""

    def begin(self, assignment: Sequence[range], control_flags: Sequence[float]) -> None:
        """Forget the last step."""
        self.assignment, self.control_flags = assignment, control_flags
        self.parts, self.own = [], LocalSums()

    def add(self, values: Mapping[str, Tensor], weight: float) -> Tensor:
        """Add one piece's means. Returns its weighted loss, from which to go backward."""
        self.own.add({name: value.detach().double() for name, value in values.items()}, weight)
        return values["loss"] * weight

    def seen(self) -> list[Tensor]:
        """The values of the part under way, in the order of their names."""
        return [self.own.sums[name] for name in sorted(self.own.sums)]

    def forget(self) -> list[Tensor]:
        """The same, of a part that does not count."""
        seen, self.own = self.seen(), LocalSums()
        return seen

    @torch.no_grad()
    def close(self, part: int, statistics: Sequence[Tensor], reported: Sequence[float] = ()) -> None:
        """`part` has seen all its samples. `told`: this worker's last control flags, where only these are known."""
        names, first = self.agreed.names, not self.parts
        if first:
            length = len(names) + len(self.control_flags) + 1 + sum(len(row) for row in statistics)
            self.total = self.total if length == self.total.length else self._sum_of(length)
            self.total.begin(self.assignment)
        control_flags = self.control_flags if first else [0.0] * len(self.control_flags)
        numbers = [*control_flags[: len(control_flags) - len(reported)], *reported, float(not self.own.fits(names))]
        row = torch.cat(
            [
                *self.own.in_places(names, self.world.device),
                torch.tensor(numbers, dtype=torch.float64).to(self.world.device, non_blocking=True),
                *statistics,
            ]
        )
        self.parts.append(self.own)
        self.own = LocalSums()
        buffer, adding = self.total.open(part)
        view = buffer[: len(row)]
        view.add_(row) if adding else view.copy_(row)
        self.total.close(part, buffer, added=adding)

    def _sum_of(self, length: int) -> TreeSum:
        return TreeSum(length, dtype=torch.float64, world=self.world, segment_bytes=self.pace.segment_bytes)

    def split(self) -> tuple[StepOutcome, Tensor]:
        """What was found of the values and the control flags, and the sum over all parts of the statistics."""
        sums = self.total.result.clone()  # its memory is the next step's, and the numbers may be read later
        values = len(self.agreed.names)
        flag = values + len(self.control_flags)
        known = dict(zip(self.agreed.names, sums[:values], strict=True))
        settle = partial(resolve_names, self.world, self.agreed, self.parts, known)
        return outcome(self.world, known, sums[values:flag], sums[flag], settle), sums[flag + 1 :]
