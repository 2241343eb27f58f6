"""Going on when workers are lost in a call that is made again from its beginning: an evaluation, a trainer's making.

Those that are left ask the head who they are, meet in a new group, give a new worker what the trainers of the script
hold, and say what happened. What they held before the call they hold still, so there is nothing to compare.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from manyhosts.cluster.membership import Group, Membership, Refused
from manyhosts.communication.world import is_break
from manyhosts.errors import CommunicationError
from manyhosts.events import Note, Recovered

if TYPE_CHECKING:
    from manyhosts.elastic.session import CollectiveCalls
    from manyhosts.training.run import Run


class NobodyHasIt(Exception):
    """There are only snapshots left."""


class Rendezvous:
    """Takes one worker through the changes of the workers in one call."""

    def __init__(self, calls: CollectiveCalls, *, most: int, run: Run | None) -> None:
        """`most`: see `Membership`. `run` tells of it; where there is none, the last run of the script."""
        assert calls.world.membership is not None, "CollectiveCalls.begin() has said that workers go on"
        self.calls, self.world, self.most, self.run = calls, calls.world, most, run
        self.membership: Membership = calls.world.membership
        self.since = time.time()
        self.refused = ""
        """Why nobody goes on; empty where somebody does."""

    def make(self, once: Callable[[], None]) -> None:
        """Join the others where this worker comes late, and call `once` until all have done it together.

        Raises:
            Passed: the others have finished this call.
        """
        if self.membership.joins:
            self.join()
        while True:
            try:
                self.check()
                once()
                self.world.barrier()  # nobody leaves before everybody has done its part
            except Exception as error:
                if not is_break(error):
                    raise
                self.go_on(error)
            else:
                return

    def check(self) -> None:
        """Raise CommunicationError where the group broke since the last call: no exchange would tell so."""
        if self.world.is_broken:
            raise CommunicationError(
                "workers were lost before this call", where="recovery", fix="see what was printed about the others"
            )

    def join(self) -> None:
        """Come to those that are in the call, and take what they hold.

        Raises:
            Passed: they have finished it.
            CommunicationError: they are no more.
        """
        try:
            group = self.membership.join(self.calls.number, most=self.most)
        except Refused as refused:
            raise CommunicationError(
                f"this worker was to join others, and they do not go on: {refused}",
                where="recovery",
                fix="see what was printed about the others",
            ) from None
        try:
            self.meet(group, lost=False)
        except NobodyHasIt as nobody:
            raise CommunicationError(str(nobody), where="recovery", fix="start it again") from None
        except Exception as error:
            if not is_break(error):
                raise
            self.go_on(error)

    def go_on(self, error: Exception) -> None:
        """Leave the group that broke or is to change, meet those that are left, and stand where all can go on.

        Raises:
            Passed: they have finished this call.
            Exception: `error`, where nobody goes on.
        """
        lost = False
        while True:
            if is_break(error):
                self.world.abort()  # so that the others, and threads of Gloo that still wait, hear of it at once
            lost = self.let_go() or lost
            try:
                group = self.membership.regroup(self.calls.number, self.progress())
            except Refused as refused:
                self.refused = str(refused)
                raise error from None
            try:
                self.meet(group, lost=lost)
            except NobodyHasIt:
                raise error from None
            except Exception as again:
                if not is_break(again):
                    raise
                error = again
            else:
                return

    def let_go(self) -> bool:
        """Have nothing under way in the group that is left. Whether a snapshot is lost by it."""
        return False

    def progress(self) -> int:
        """How much of the call is done that is not done again."""
        return 0

    def meet(self, group: Group, *, lost: bool) -> None:
        """Be in the new group, and as far as all others in it.

        Raises:
            NobodyHasIt: all are new.
        """
        world, calls = self.world, self.calls
        world.enter(group)
        flags = world.stack(torch.tensor([calls.new], dtype=torch.int64)).flatten().tolist()
        self.give_to_new([rank for rank, new in enumerate(flags) if new])
        run = self.run or calls.last_run
        if run is None:
            return
        if world.is_leader:
            run.journal.take_lead()
            now = time.time()
            if group.reason:
                lost_s = max(0.0, now - self.since)
                step = max(0, run.state.step)
                run.journal.tell(
                    Recovered(
                        step=step, reason=group.reason, how=group.how, steps_redone=0, seconds_lost=lost_s, time=now
                    )
                )
            else:
                run.journal.tell(Note(text=f"goes on {group.how}", step=run.state.step, time=now))
            run.journal.flush()
        run.journal.copy_records()

    def give_to_new(self, new: list[int]) -> None:
        """Have the first that is not `new` give those what it holds.

        Raises:
            NobodyHasIt: all are new.
        """
        old = [rank for rank in range(self.world.size) if rank not in new]
        if not old:
            raise NobodyHasIt("no worker is left that holds the state of the run")
        self.calls.hand_over(new, old[0])
        self.calls.new = False
