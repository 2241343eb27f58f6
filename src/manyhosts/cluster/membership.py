"""A worker's side of elastic training: it reports its progress to its agent, and learns who is left after a failure.

One connection per worker to the socket of its agent, both ways, one JSON object per line. The agent passes everything
on between its workers and the head, which alone decides. From the worker (`kind`):

    begin      call, most, layout        a call that all make together has begun: others may go, and this worker
    continues done       call, outcome             it is over, on every worker, and the script goes its own way until
    the next regroup    call, step                the group is broken, or is to change: this worker has finished so many
    steps join       call, most                a worker that was started later is ready to be one of them
    accuse     group, rank, what         the bits of that worker of the group are wrong: leave it out, and its host
    saving                               the run does not continue, and this worker saves its state: its agent waits
    withdraw                             from now on no worker can continue without this one, or join it

Calls (`fit`, `test`, …) are numbered in the order in which the script makes them, from 1.

To the worker (`message`):

    change     group                     a worker waits to join `group`'s workers: regroup after the current step
    broken     group                     a worker of `group` is lost: do not wait for it any longer
    group      see `Group`               the answer to `regroup` and `join`
    passed     call, outcome, replaces   another answer: the others have finished that call
    refused    reason                    the last one: the run does not continue
    headless   reason                    the head is gone, so the run ends: finish the step if possible, save, and end
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from queue import SimpleQueue
from typing import Any

from manyhosts.cluster import reports

MEMBER = "MANYHOSTS_MEMBER"
"""Numbers a worker in the environment: no two workers that a run ever had share a number."""
JOINS = "MANYHOSTS_JOINS"
"""Set in the environment of a worker that was started while the others train."""
PART = "MANYHOSTS_PART"
"""Set in the environment of such a worker where several make one copy of the model: a `PartOfCopy`, as JSON."""
_STEP_S = 2.0
"""How long workers whose head is gone have to finish their step together, before their group counts as broken."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Who trains together from now on, as one of them sees it."""

    number: int
    """Counts the groups of a run."""
    key: str
    """The key of the rendezvous of this group, and no other, in the store."""
    rank: int
    size: int
    local_rank: int
    local_size: int
    node_rank: int
    nodes: int
    address: str
    """Where the store is."""
    port: int
    newcomers: tuple[int, ...] = ()
    """The ranks of those that were not in the group before."""
    reason: str = ""
    """What failed, in one sentence with host and rank; empty where the group only grew."""
    how: str = ""
    """How it continues, in a few words."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Group:
        """What the head has sent."""
        chosen = {entry.name: message[entry.name] for entry in fields(cls)}
        return cls(**{**chosen, "newcomers": tuple(chosen["newcomers"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOfCopy:
    """The place of a worker where several make one copy of the model. It keeps it for as long as it lives."""

    part: int
    parts: int
    parts_first: bool
    """Whether workers are ranked by their parts, and those of equal parts by their copies; or the other way round."""
    plan: Mapping[str, Any]
    """What one that comes later must know of how the model is cut, in plain values."""

    @classmethod
    def from_environment(cls) -> PartOfCopy | None:
        """That of a worker that was started late; None where each worker has all of the model."""
        word = os.environ.get(PART)
        return cls(**json.loads(word)) if word else None


class Refused(Exception):
    """The head says that the run does not continue."""


class CallAlreadyFinished(Exception):
    """The others have finished the call that this worker is in."""

    def __init__(self, outcome: Any, *, replaces: bool = True) -> None:
        super().__init__("the others have finished this call")
        self.outcome = outcome
        """The call's result, as one of them reported it."""
        self.replaces = replaces
        """Whether a worker is lost and not replaced, so that its lines of the script are yet to be done."""


class Membership:
    """One worker's line to its agent. Its thread listens; each message wakes the one that trains."""

    def __init__(self, address: str, *, member: int, local_rank: int, joins: bool) -> None:
        """Remember how to reach the agent; `begin` and `join` connect."""
        self.joins = joins
        """Whether this worker was started while others train, and has not met them yet."""
        self.on_broken: Callable[[], None] = _nothing
        """Called from the listening thread when the present group is broken, so that no wait in it lasts."""
        self.group = 0
        """The number of the present group."""
        self._to_change = -1
        """The number of the group that somebody waited to join last."""
        self._broken = -1
        """The number of the group that broke last."""
        self.headless = False
        """Whether the head is gone, so that this worker is to save what it has and end."""
        self._address, self._member, self._local_rank = address, member, local_rank
        self._socket: socket.socket | None = None
        self._process = os.getpid()
        self._answers: SimpleQueue[dict[str, Any]] = SimpleQueue()

    @classmethod
    def from_environment(cls, variables: Mapping[str, str] | None = None) -> Membership | None:
        """The line of this worker, or None where no agent started it."""
        variables = os.environ if variables is None else variables
        if not variables.get(reports.VARIABLE) or not variables.get(MEMBER):
            return None
        return cls(
            variables[reports.VARIABLE],
            member=int(variables[MEMBER]),
            local_rank=int(variables.get("LOCAL_RANK", "0")),
            joins=bool(variables.get(JOINS)),
        )

    @property
    def change_asked(self) -> bool:
        """Whether the workers are to regroup after this step: somebody waits to join them, or the head is gone."""
        return self.headless or self._to_change == self.group

    @property
    def is_broken(self) -> bool:
        """Whether a worker of the present group is lost, as far as is known here."""
        return self._broken == self.group

    def begin(self, call: int, *, most: int, layout: PartOfCopy | None = None) -> None:
        """A call begins: the others may go. `most`: any number of workers up to this gives the same bits; 0: none.

        `layout`: this worker's place where several make one copy of the model.
        """
        self._connect()
        self._send("begin", call=call, most=most, layout=None if layout is None else asdict(layout))

    def done(self, call: int, outcome: Any) -> None:
        """A call is over on every worker. `outcome` (plain values) is for those that were not there."""
        self._send("done", call=call, outcome=outcome)

    def join(self, call: int, *, most: int) -> Group:
        """Wait until the others take this worker in.

        Raises:
            Passed: they have finished that call.
            Refused: they do not.
        """
        self._connect()
        self._send("join", call=call, most=most)
        return self._answer()

    def regroup(self, call: int, step: int) -> Group:
        """Wait until it is known who continues.

        Raises:
            CallAlreadyFinished: the others have finished that call.
            Refused: the run does not continue.
        """
        self._send("regroup", call=call, step=step, group=self.group)
        return self._answer()

    def accuse(self, rank: int, what: str) -> None:
        """Say that a worker of the present group has computed wrongly, in words that follow its name."""
        self._send("accuse", group=self.group, rank=rank, what=what)

    def saving(self) -> None:
        """Say that this worker, which the others cannot continue without, is about to save its state."""
        self._send("saving")

    def withdraw(self) -> None:
        """Say that no worker can continue without this one any more. Safe to call twice."""
        if self._socket is not None and os.getpid() == self._process:
            self._send("withdraw")
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)  # the listening thread ends when the agent closes its side
        self._socket = None

    def _connect(self) -> None:
        if self._socket is None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            with contextlib.suppress(OSError):  # the agent is gone, and this worker will be, too
                self._socket.connect(self._address)
            threading.Thread(target=self._listen, args=(self._socket,), name="membership", daemon=True).start()

    def _send(self, kind: str, **content: Any) -> None:
        line = {"worker": self._local_rank, "member": self._member, "kind": kind, "fields": content}
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.sendall(json.dumps(line).encode() + b"\n")

    def _answer(self) -> Group:
        answer = self._answers.get()
        if answer["message"] == "passed":
            raise CallAlreadyFinished(answer["outcome"], replaces=answer["replaces"])
        if answer["message"] != "group":
            raise Refused(answer.get("reason", ""))
        group = Group.from_message(answer)
        self.group, self.joins = group.number, False
        return group

    def _listen(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rb") as lines:
            for line in lines:
                self._receive(json.loads(line))
        self._answers.put({"message": "refused", "reason": "the agent of this host is gone"})

    def _receive(self, message: dict[str, Any]) -> None:
        if message["message"] in ("group", "passed", "refused"):
            self._answers.put(message)
        elif message["message"] == "headless":
            self.headless = True
            self._answers.put({"message": "refused", "reason": message["reason"]})
            threading.Thread(target=self._break_soon, name="headless", daemon=True).start()
        elif message["message"] == "change":
            # Perhaps of a group that this worker has yet to enter. It is sent once, and the new workers wait for it.
            self._to_change = message["group"]
        else:
            self._broken = message["group"]  # sent once, and perhaps before this worker enters it
            if self.is_broken:
                self.on_broken()

    def _break_soon(self) -> None:
        """The head is gone, and so may be workers that others wait for."""
        time.sleep(_STEP_S)
        self.on_broken()


def _nothing() -> None:
    """What is done while there is no group."""
