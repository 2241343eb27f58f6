"""The calls that all workers of a script make together, in order: `fit`, `validate`, `test`, and trainers made later.

The first of them lets workers go and come; from then on each has a number. Where workers are lost in a call, those
that are left form a new group and make it again from where it was: see `rendezvous`. A worker that comes late runs
the script from its beginning. Of a call that the others have finished it gets the result (`CallAlreadyFinished`),
and joins them in the first that they have not: there it is given what every trainer of the script holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from manyhosts.cluster.membership import PartOfCopy
from manyhosts.communication.world import World
from manyhosts.elastic import state_transfer
from manyhosts.elastic.work import StateProvider


class CollectiveCalls:
    """Those of one process."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = 0
        """Of the call under way, or the last one."""
        self.over = world.membership is None
        """Whether no worker continues without the others any more."""
        self.layout: PartOfCopy | None = None
        """This worker's place where several make one copy of the model, as the last call that began had it."""
        self.new = world.is_joining
        """Whether this worker has yet to be given the state of the others."""
        self.under_way = False
        """Whether a call has begun and is not over: one that a callback makes in it is a part of it."""
        self._providers: weakref.WeakValueDictionary[int, StateProvider] = weakref.WeakValueDictionary()

    def add(self, number: int, provider: StateProvider) -> None:
        """A trainer was made, the `number`th of this process."""
        self._providers[number] = provider

    @property
    def trainers(self) -> int:
        """How many the script has."""
        return len(self._providers)

    @property
    def last_provider(self) -> StateProvider | None:
        """That of the trainer that was made last, of those that have begun a run."""
        found = [provider for _, provider in sorted(self._providers.items()) if provider.records is not None]
        return found[-1] if found else None

    # One call.

    def begin(self, *, most: int, survives: bool, layout: PartOfCopy | None = None) -> bool:
        """The next call begins. `most`, `layout`: see `Membership`.

        Returns whether others continue where workers are lost.
        """
        self.number, self.under_way = self.number + 1, True
        self.layout = layout
        membership = self.world.membership
        if membership is None or self.over:
            return False
        if not survives:
            self._withdraw()
            return False
        if not membership.joins:
            membership.begin(self.number, most=most, layout=layout)
        self.world.confirms = True
        return True

    def done(self, outcome: Any) -> None:
        """The call is over on every worker, and this is what came out, in plain values."""
        self.world.in_doubt = self.under_way = False
        membership = self.world.membership
        if membership is not None and not self.over and not membership.joins:
            membership.done(self.number, outcome)

    def fail(self) -> None:
        """The call ended in a way that others do not know of: this worker's place in the script is no longer known."""
        self.world.in_doubt, self.under_way = True, False
        self._withdraw()

    def _withdraw(self) -> None:
        if not self.over and self.world.membership is not None:
            self.world.membership.withdraw()
        self.over, self.world.confirms = True, False

    # What a new worker is given.

    def hand_over(self, givers: Mapping[int, int], *, but: StateProvider | None = None) -> None:
        """Have workers give all that their trainers hold, `but` one, to new ones. All call this.

        `givers`: by the rank of each that is new.
        """
        state_transfer.pass_on_all(
            self.world,
            givers,
            lambda: {str(number): each.everything() for number, each in self._providers.items() if each is not but},
            self._take,
        )
        self.new = False

    def _take(self, given: dict[str, Any]) -> None:
        for number, state in given.items():
            if (provider := self._providers.get(int(number))) is not None:  # this worker may have let go of a trainer
                provider.take_up(state)
