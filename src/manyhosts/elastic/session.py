"""The calls that all workers of a script make together, in order: `fit`, `validate`, `test`, and trainers made later.

The first of them lets workers go and come; from then on each has a number. Where workers are lost in a call, those that
are left meet in a new group and make it again from where it stood: see `rendezvous` and `recover`. A worker that comes
late runs the script from its beginning. Of a call that the others have finished it is told what came out (`Passed`),
and joins them in the first that they have not: there it is given what every trainer of the script holds.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from manyhosts.cluster.membership import Passed
from manyhosts.communication import transfer
from manyhosts.communication.world import World
from manyhosts.elastic.optimizers import share_optimizers
from manyhosts.elastic.rendezvous import Rendezvous
from manyhosts.snapshot.flatten import flatten, unflatten
from manyhosts.strategies.strategy import Survivable
from manyhosts.training.build import Parts
from manyhosts.training.snapshot_schedule import held_by, take_up
from manyhosts.training.state import RunState

if TYPE_CHECKING:
    from manyhosts.training.run import Run


class StateProvider:
    """What one trainer holds that a new worker lacks."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.run: Run | None = None
        """The last that it has begun."""
        world = parts.world
        self.group = None if world.apart or world.membership is None else world.membership.group
        """The group of workers that its strategy has met last; None where it was made apart from the others."""

    def refresh(self) -> None:
        """Let the strategy meet the workers of now, where others are there than the last time. All call this."""
        world, strategy = self.parts.world, self.parts.strategy
        if world.membership is None or self.group == world.membership.group:
            return
        self.parts.recut(self.parts.batch)
        if isinstance(strategy, Survivable):
            strategy.meet(0, new=self.group is None, gone=0)
            share_optimizers(self.parts)
        self.group = world.membership.group

    def everything(self) -> dict[str, Any]:
        """All of it; the tensors are those in use."""
        strategy = self.parts.strategy
        return {
            "kept": held_by(self.parts),
            "strategy": strategy.shared_state() if isinstance(strategy, Survivable) else {},
            "batch": self.parts.batch,
            "run": None if self.run is None else self.run.state.to_dict(),
        }

    def take_up(self, given: dict[str, Any]) -> None:
        """Hold what `everything` gave on another worker."""
        strategy = self.parts.strategy
        take_up(self.parts, given["kept"])
        if isinstance(strategy, Survivable):
            strategy.take_shared(given["strategy"])
        self.parts.batch = given["batch"]
        if self.run is not None and given["run"] is not None:
            self.run.state.become(RunState.from_dict(given["run"], {}))


class CollectiveCalls:
    """Those of one process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = 0
        """Of the call under way, or the last one."""
        self.over = world.membership is None
        """Whether no worker goes on without the others any more."""
        self.new = world.apart
        """Whether this worker has yet to be given what the others hold."""
        self._holders: weakref.WeakValueDictionary[int, StateProvider] = weakref.WeakValueDictionary()

    def add(self, number: int, provider: StateProvider) -> None:
        """A trainer was made, the `number`th of this process."""
        self._holders[number] = provider

    @property
    def last_run(self) -> Run | None:
        """That of the trainer that was made last, of those that have one."""
        runs = [provider.run for _, provider in sorted(self._holders.items()) if provider.run is not None]
        return runs[-1] if runs else None

    # One call.

    def begin(self, *, most: int, survives: bool) -> bool:
        """The next call begins. `most`: see `Membership`. Returns whether the others go on where workers are lost."""
        self.number += 1
        membership = self.world.membership
        if membership is None or self.over:
            return False
        if not survives:
            self.fail()
            return False
        if not membership.joins:
            membership.begin(self.number, most=most)
        return True

    def done(self, outcome: Any) -> None:
        """The call is over on every worker, and this is what came out, in plain values."""
        membership = self.world.membership
        if membership is not None and not self.over and not membership.joins:
            membership.done(self.number, outcome)

    def fail(self) -> None:
        """The call ended in a way that others know nothing of: nobody can find its place in this script any more."""
        if not self.over and self.world.membership is not None:
            self.world.membership.withdraw()
        self.over = True

    def make(
        self, once: Callable[[], Any], *, most: int, survives: bool, has_outcome: bool = True, run: Run | None = None
    ) -> Any:
        """A call that is made again from its beginning where workers are lost in it: `once` is called by all of them.

        Where the others have finished it, it gives what they have got; without an outcome, `once` is called alone.
        `run` tells of losses.
        """
        if not self.begin(most=most, survives=survives):
            return once()
        rendezvous = Rendezvous(self, most=most, run=run)
        found: list[Any] = []
        try:
            rendezvous.make(lambda: found.append(once()))
        except Passed as passed:
            if not found:
                found.append(passed.outcome if has_outcome else once())
        except BaseException:
            self.fail()
            raise
        self.done(found[-1] if has_outcome else None)
        return found[-1]

    # What a new worker is given.

    def hand_over(self, new: Sequence[int], giver: int, *, but: StateProvider | None = None) -> None:
        """Have worker `giver` give all that its trainers hold, `but` one, to the `new` workers. All call this."""
        world = self.world
        if world.rank == giver and new:
            given = {str(number): each.everything() for number, each in self._holders.items() if each is not but}
            apart = flatten(given)
            for rank in new:
                transfer.give(world, rank, json.dumps(apart.nodes), apart.tensors)
        elif world.rank in new:
            text, tensors = transfer.take(world, giver)
            for number, held in unflatten(json.loads(text), tensors).items():
                with suppress(KeyError):  # a trainer that this worker has let go of
                    self._holders[int(number)].take_up(held)
