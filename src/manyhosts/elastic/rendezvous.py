"""Continuing in one call when workers are lost or come: those that are left form a group, with the most advanced state.

The rule is one for every call: the state of the most advanced worker is taken by all others. A call that is made again
from its beginning (an evaluation) has nothing but what was there before it, so there all that were there are level.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import partial
from typing import Any

import torch

from manyhosts.cluster.membership import CallAlreadyFinished, Group, Membership, PartOfCopy, Refused
from manyhosts.communication.world import is_connection_error
from manyhosts.elastic import state_transfer
from manyhosts.elastic.session import CollectiveCalls
from manyhosts.elastic.work import (
    NO_STATE,
    Records,
    RecoverableCall,
    RestartedCall,
    StateProvider,
    WorkerProgress,
    most_advanced,
)
from manyhosts.errors import CommunicationError
from manyhosts.events import Note, Recovered


class NoWorkerHasState(Exception):
    """There are only snapshots left."""


class Rendezvous:
    """Takes one worker through the changes of the workers in one call."""

    def __init__(self, calls: CollectiveCalls, work: RecoverableCall, *, most: int) -> None:
        """`most`: any number of workers up to this gives the same bits; 0: each gives its own."""
        assert calls.world.membership is not None, "CollectiveCalls.begin() has said that workers continue"
        self.calls, self.world, self.work, self.most = calls, calls.world, work, most
        self.membership: Membership = calls.world.membership
        self.refused = ""
        """Why the run does not continue; empty where it does."""

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
                self.world.barrier()  # no worker leaves before all have done their part
            except Exception as error:
                if not is_connection_error(error):
                    raise
                self.go_on(error)
            else:
                return

    def check(self) -> None:
        """Raise CommunicationError where the group broke since the last call, which no collective would report."""
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
        self.work.stand_nowhere()
        try:
            group = self.membership.join(self.calls.number, most=self.most)
        except Refused as refused:
            raise CommunicationError(
                f"this worker was to join others, and they do not resume: {refused}",
                where="recovery",
                fix="see what was printed about the others",
            ) from None
        try:
            self._enter(group, lost=False)
        except NoWorkerHasState as cause:
            raise CommunicationError(str(cause), where="recovery", fix="start it again") from None
        except Exception as error:
            if not is_connection_error(error):
                raise
            self.go_on(error)

    def go_on(self, error: Exception | None) -> None:
        """Leave the group that broke or is to change, join those that are left, and be where all can continue.

        `error`: what broke it; None where all is well, and somebody waits to join.

        Raises:
            CallAlreadyFinished: they have finished this call.
            Exception: `error`, where the run does not continue.
        """
        lost = False
        while True:
            if error is not None and is_connection_error(error):
                self.world.abort()  # so that the others, and threads of Gloo that still wait, hear of it at once
            lost = self.work.let_go() or lost
            try:
                group = self.membership.regroup(self.calls.number, self.work.done)
            except Refused as refused:
                self.refused = str(refused)
                raise error or _ended(self.refused) from None
            try:
                self._enter(group, lost=lost)
            except NoWorkerHasState as cause:
                raise error or _ended(str(cause)) from None
            except Exception as again:
                if not is_connection_error(again):
                    raise
                error = again
            else:
                return

    def _enter(self, group: Group, *, lost: bool) -> None:
        """Be in the new group, and as far as the farthest in it.

        Raises:
            NobodyHasIt: all are new.
        """
        world, work = self.world, self.work
        world.enter(group)
        if group.rank in group.newcomers and not self.calls.new:
            self.calls.new = True  # it waited for others to make a copy of the model with, and the rest went on
            work.stand_nowhere()
        own, layout = work.progress(), self.calls.layout
        own = replace(own, new=int(self.calls.new), lost_snapshot=int(lost or own.lost_snapshot))
        own = replace(own, part=0 if layout is None else layout.part)
        rows = world.stack(torch.tensor(astuple(own), dtype=torch.int64, device=world.device)).tolist()
        progress = [WorkerProgress(*row) for row in rows]
        work.compare(progress)
        source, begun = most_advanced(progress), max(each.step for each in progress) != NO_STATE
        givers = [most_advanced(progress, part=each.part) for each in progress]
        if any(progress[each].new or (begun and progress[each].step == NO_STATE) for each in givers):
            raise NoWorkerHasState("no worker is left that holds the state of the run")
        new = {rank: givers[rank] for rank, found in enumerate(progress) if found.new}
        if not begun:
            self.calls.hand_over(new)
            work.begin()
        else:
            work.settle(finished=progress[source].step > own.step)
            self.calls.hand_over(new, but=work.provider)
            self._bring_level(progress, source, givers)
            work.met(group, source, progress)
        if work.records is not None:
            redone = max(0, max(each.tried for each in progress) - work.step)
            self._report(work.records, group, redone=redone)
            work.lost = ""
            work.records.copy_records()

    def _bring_level(self, progress: Sequence[WorkerProgress], source: int, givers: Sequence[int]) -> None:
        """Have all workers as far as `source`.

        Where each has a part of the model, none has finished a step before each had all that its own part of that step
        takes: so one that was there lacks what is equal on all workers, and one that was not has its part from another
        copy.
        """
        in_parts, work = len({each.part for each in progress}) > 1, self.work
        lagging = [rank for rank, found in enumerate(progress) if found.reached != progress[source].reached]
        present = [rank for rank in lagging if in_parts and progress[rank].step != NO_STATE]
        state_transfer.pass_on(self.world, source, present, partial(work.state, but_parts=True), work.take_state)
        lacking = {rank: givers[rank] for rank in lagging if rank not in present}
        state_transfer.pass_on_all(self.world, lacking, work.state, work.take_state)

    def _report(self, records: Records, group: Group, *, redone: int) -> None:
        if not self.world.is_rank_0:
            return
        records.become_rank_0()
        now, step = time.time(), self.work.step
        if group.reason:
            lost_s = time.monotonic() - self.work.since
            records.emit(
                Recovered(
                    step=step,
                    reason=group.reason,
                    how=group.how,
                    lost=self.work.lost,
                    steps_redone=redone,
                    seconds_lost=lost_s,
                    workers=self.world.size,
                    time=now,
                )
            )
        else:
            records.emit(Note(text=f"continues {group.how}", step=step, time=now))
        records.flush()  # the next failure may come soon, and to this worker


def _ended(why: str) -> CommunicationError:
    return CommunicationError(why, where="recovery", fix="start it again: it continues from its last snapshot")


def make(
    calls: CollectiveCalls,
    once: Callable[[], Any],
    *,
    most: int,
    survives: bool,
    layout: PartOfCopy | None = None,
    has_outcome: bool = True,
    provider: StateProvider | None = None,
) -> Any:
    """Make a call that is made again from its beginning where workers are lost in it: all of them call `once`.

    One that a callback makes is a part of the call under way.

    Where the others have finished it, it gives what they have got; without an outcome, `once` is called alone.
    `most`, `survives`, `layout`: see `CollectiveCalls.begin`. `provider`: of the trainer whose run records losses;
    where that has begun none, the last run of the script does.
    """
    if calls.under_way:
        return once()  # where it breaks off, the call that it is a part of does it again
    if not calls.begin(most=most, survives=survives, layout=layout):
        try:
            return once()
        finally:
            calls.under_way = False
    own = provider if provider is not None and provider.records is not None else None
    rendezvous = Rendezvous(calls, RestartedCall(lambda: own or calls.last_provider), most=most)
    found: list[Any] = []
    try:
        rendezvous.make(lambda: found.append(once()))
    except CallAlreadyFinished as passed:
        if not found:
            found.append(passed.outcome if has_outcome else once())
    except BaseException:
        calls.fail()
        raise
    calls.done(found[-1] if has_outcome else None)
    return found[-1]
