"""Virtual workers: each batch is cut into a fixed number of parts, and no bit depends on who computes which.

Each part is computed alone, one after another, from the same shapes, threads and random numbers whoever does it. Its
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

from manyhosts.communication.layout import spread
from manyhosts.communication.part_norm import PartStatistics, normalise_by_part
from manyhosts.communication.tree_buckets import TreeBuckets
from manyhosts.communication.tree_sum import Exchange, Pace, TreeSum, pace_on
from manyhosts.communication.world import World
from manyhosts.data import randomness
from manyhosts.data.order import bounds
from manyhosts.errors import ConfigError
from manyhosts.strategies.audit import Auditor, Digest
from manyhosts.strategies.strategy import Compute, Piece, Scale, Shard, StepOutcome, Steppable
from manyhosts.strategies.tally import Agreed, Own, outcome, settled


class VirtualWorkers:
    """`parts` virtual workers, shared out over the real ones."""

    def __init__(self, parts: int, world: World, *, bucket_mb: float, auditor: Auditor | None = None) -> None:
        """Check that every worker has a part. `auditor`: what compares parts that others compute again.

        Raises:
            ConfigError: there are more workers than parts.
        """
        if world.size > parts:
            raise ConfigError(
                f"virtual_workers is {parts}, but there are {world.size} workers, and each needs a part of the batch",
                where="virtual_workers",
                fix=f"start at most {parts} workers, or begin anew with virtual_workers={world.size} or more",
            )
        self.parts, self.world, self.bucket_mb, self.auditor = parts, world, bucket_mb, auditor
        self.exchange = Exchange(pace_on(world.device))
        self.gradients: TreeBuckets | None = None
        self.statistics = PartStatistics([])
        self.news = News(world, self.exchange.pace)
        self.buffers: dict[str, int] | None = None
        """How often each buffer had been changed before the first part, until that has been looked at."""
        self.looked = False
        self.digest: Digest | None = None
        """What sees the part that is computed now."""

    def shard(self) -> Shard:
        """Some neighbouring parts for each worker."""
        return Shard(self.world.rank, self.world.size)

    def place(self, model: nn.Module) -> nn.Module:
        """Move `model` to this worker's device, make it equal to the leader's, let BatchNorm see parts."""
        model = model.to(self.world.device)
        spread([*model.parameters(), *model.buffers()], self.world)
        self.statistics = normalise_by_part(model)
        self.gradients = TreeBuckets(
            model.parameters(), self.world, self.exchange, bucket_bytes=int(self.bucket_mb * 1e6)
        )
        return model

    @property
    def whole(self) -> bool:
        """Never: whoever is behind takes everything from one that is not."""
        return False

    def let_go(self) -> None:
        """Nothing is under way between two steps."""

    def step_back(self) -> None:
        """Forget what the forward passes of a step that broke off have left; the rest is made anew in each step."""
        self.statistics.take()
        self.buffers, self.looked = None, False
        if self.gradients is not None:
            self._watch(None)

    def shared_state(self) -> dict[str, Any]:
        """Nothing: what it knows follows from the number of parts and of workers."""
        return {}

    def take_shared(self, state: Mapping[str, Any]) -> None:
        """Nothing to take up."""

    def meet(self, source: int, *, new: bool, gone: int) -> str:
        """Nothing to agree on: every worker holds everything."""
        self.step_back()
        self.news.agreed.forget()
        return ""

    def forward_backward(
        self, model: nn.Module, pieces: Sequence[Piece], compute: Compute, scale: Scale, riders: Sequence[float]
    ) -> StepOutcome:
        """Compute this worker's parts one after another, and sum them with those of the others in the tree."""
        gradients = self.gradients
        assert gradients is not None, "place() comes before forward_backward()"
        held = [range(*bounds(self.parts, self.world.size, rank)) for rank in range(self.world.size)]
        own = held[self.world.rank]
        self.exchange.forget()
        if not self.looked:
            self.buffers, self.looked = {name: buffer._version for name, buffer in model.named_buffers()}, True
        gradients.begin(held)
        self.news.begin(held, riders)
        for part in own:
            last = part == own[-1]
            self._watch(self._digest_of(part))
            computed = [piece for piece in pieces if piece.address[1] == part and piece.weight]
            if not computed:
                self._close(part, last=last)
            for piece in computed:
                loss = scale(self.news.add(compute(model, piece), piece.weight))
                if piece is computed[-1]:
                    self._close(part, last=last)
                try:
                    loss.backward()
                except BaseException:
                    gradients.rest()  # another trainer may train this model, with buckets of its own
                    raise
            gradients.take(part, last=last)
            self._check_buffers(model)
        self._watch(None)
        self.exchange.finish()
        if self.auditor is not None:
            self.auditor.compare(
                model, lambda part, audited: self._again(model, part, audited or pieces, compute, scale)
            )
        gradients.put()
        found, statistics = self.news.split()
        self.statistics.track(statistics)
        return found

    def _digest_of(self, part: int) -> Digest | None:
        return None if self.auditor is None else self.auditor.digests.get(part)

    def _watch(self, digest: Digest | None) -> None:
        """Have `digest`, if there is one, see what comes of the part that is computed now."""
        assert self.gradients is not None, "place() comes before forward_backward()"
        self.digest, self.gradients.on_handover = digest, None if digest is None else digest.add

    def _again(self, model: nn.Module, part: int, pieces: Sequence[Piece], compute: Compute, scale: Scale) -> int:
        """The digest of `part`, computed beside the step and without a trace in it."""
        assert self.gradients is not None, "place() comes before forward_backward()"
        assert self.auditor is not None, "only where audits were asked for"
        digest = self.auditor.digest()
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

    def _check_buffers(self, model: nn.Module) -> None:
        """Refuse a model whose forward pass changes what the next part would see; looked at after the first part."""
        if self.buffers is None:
            return
        changed = [
            name for name, buffer in model.named_buffers() if self.buffers.get(name) not in (None, buffer._version)
        ]
        self.buffers = None
        if changed:
            raise ConfigError(
                f"the forward pass changes the buffer {changed[0]!r}, whose bits would depend on who computes what",
                where="virtual_workers",
                fix="leave virtual_workers out, or take the layer that keeps this buffer out of the model",
            )

    def _close(self, part: int, *, last: bool) -> None:
        """All forward passes of `part` are done. After the last one the backward pass hides the exchange."""
        statistics = self.statistics.take()
        if self.digest is not None:
            self.digest.add([*self.news.seen(), *statistics])
        self.news.close(part, statistics)
        if last:
            assert self.gradients is not None, "place() comes before forward_backward()"
            self.exchange.send(self.news.total)
            self.gradients.arm(part)

    def clip_gradients(self, model: nn.Module, max_norm: float) -> Tensor:
        """Clip by the norm over all parameters; every worker has the same bits, so the same norm."""
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)

    def update(self, model: nn.Module, optimizer: Steppable) -> None:
        """Step the optimizer; equal gradients keep the workers equal."""
        optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Nothing: what it knows follows from the number of parts and of workers."""
        return {}

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Nothing to take up."""


class News:
    """The values of each part and the statistics its BatchNorm layers saw: float64, one vector, one sum.

    Riders travel in it, each worker's with its first part; their sum is equal on all workers, but not for any number
    of them, so nothing that changes weights may depend on it.
    """

    def __init__(self, world: World, pace: Pace) -> None:
        self.world, self.pace = world, pace
        self.total = self._sum_of(0)
        self.agreed = Agreed()
        self.parts: list[Own] = []
        """What each part that this worker has computed gave, the one under way last."""

    def begin(self, held: Sequence[range], riders: Sequence[float]) -> None:
        """Forget the last step."""
        self.held, self.riders = held, riders
        self.parts, self.own = [], Own()

    def add(self, values: Mapping[str, Tensor], weight: float) -> Tensor:
        """Add one piece's means. Returns its weighted loss, from which to go backward."""
        self.own.add({name: value.detach().double() for name, value in values.items()}, weight)
        return values["loss"] * weight

    def seen(self) -> list[Tensor]:
        """The values of the part under way, in the order of their names."""
        return [self.own.sums[name] for name in sorted(self.own.sums)]

    def forget(self) -> list[Tensor]:
        """The same, of a part that does not count."""
        seen, self.own = self.seen(), Own()
        return seen

    @torch.no_grad()
    def close(self, part: int, statistics: Sequence[Tensor]) -> None:
        """`part` has seen all its samples."""
        names, first = self.agreed.names, not self.parts
        if first:
            self._open(len(names) + len(self.riders) + 1 + sum(len(row) for row in statistics))
        riders = self.riders if first else [0.0] * len(self.riders)
        numbers = [*riders, float(not self.own.fits(names))]
        row = torch.cat(
            [
                *self.own.in_places(names, self.world.device),
                torch.tensor(numbers, dtype=torch.float64).to(self.world.device, non_blocking=True),
                *statistics,
            ]
        )
        self.parts.append(self.own)
        self.own = Own()
        buffer, adding = self.total.open(part)
        view = buffer[: len(row)]
        view.add_(row) if adding else view.copy_(row)
        self.total.close(part, buffer, added=adding)

    def _sum_of(self, length: int) -> TreeSum:
        return TreeSum(length, dtype=torch.float64, world=self.world, stretch_bytes=self.pace.stretch_bytes)

    def _open(self, length: int) -> None:
        if length != self.total.length:
            self.total = self._sum_of(length)
        self.total.begin(self.held)

    def split(self) -> tuple[StepOutcome, Tensor]:
        """What was found of the values and the riders, and the sum over all parts of the statistics."""
        sums = self.total.result.clone()  # its memory is the next step's, and the numbers may be read later
        values = len(self.agreed.names)
        flag = values + len(self.riders)
        known = dict(zip(self.agreed.names, sums[:values], strict=True))
        settle = partial(settled, self.world, self.agreed, self.parts, known)
        return outcome(self.world, known, sums[values:flag], sums[flag], settle), sums[flag + 1 :]
