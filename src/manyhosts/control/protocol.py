"""Every message that a head and its agents exchange once both have proven who they are: see `control.handshake`.

The fields of a worker's report are its own; only those that need them read them.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from manyhosts.control.wire_format import AsPrinted, Text, WireMessage, by_name, see_range

MOST_PORT, MOST_CODE = 65535, 1 << 31

# From an agent.


@dataclass(frozen=True, kw_only=True, slots=True)
class FromAgent(WireMessage):
    """What an agent says."""

    CHANGES_STATE: ClassVar[bool] = True
    """Whether another head would have to know of it: see `head.takeover`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OfWorker(FromAgent):
    """What concerns one worker of the host."""

    rank: int
    """When it was started; what it is now the head knows."""
    generation: int
    """How often all workers had been started before."""
    member: int
    """Its own number, which no other worker of the run ever has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive(FromAgent):
    """A sign of life, twice a second: see `agent.head_connection`."""

    CHANGES_STATE = False
    held_s: float
    """For how long the agent's loop has waited for something of its own system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopRequested(FromAgent):
    """The agent was asked to end by a signal: a request to stop the run."""

    NAME = "asked"

    signal: int

    def __post_init__(self) -> None:
        if self.signal not in set(signal.Signals):
            raise ValueError(f"its 'signal' is {self.signal}, which no system has")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition(FromAgent):
    """How the host is, where `Prepare` asks for it, and at which port others may try to connect (0: none)."""

    reported: dict[str, Any]
    """As `agent.host_state` gathers it."""
    port: int

    def __post_init__(self) -> None:
        see_range("port", self.port, 0, MOST_PORT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Connectivity(FromAgent):
    """The answer to `ListenForHost`: at which port others may try to connect."""

    port: int

    def __post_init__(self) -> None:
        see_range("port", self.port, 0, MOST_PORT)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionsTried(FromAgent):
    """The answer to `TryConnections`: for each place why it was not reached, or nothing."""

    answers: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreOpened(FromAgent):
    """The answer to `OpenStore`."""

    NAME = "store"
    generation: int
    port: int
    shared: bool
    """Whether it is more than a free port. On a host without torch rank 0 opens a store there itself."""
    listens: bool
    """Whether it is served, and not only its port taken."""

    def __post_init__(self) -> None:
        see_range("port", self.port, 0, MOST_PORT)


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStore(FromAgent):
    """What a worker asks through `cluster.store_line`."""

    IS_SHOWN = False
    line: int
    """A connection of a worker to this agent."""
    id: int
    """Counts the questions on it."""
    do: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble(FromAgent):
    """The host can start no worker."""

    text: Text
    where: str
    early: bool
    """Whether it has started none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModulesPreloaded(FromAgent):
    """Modules that are loaded because the script imports them: a host that comes later need not find that out."""

    modules: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Output(OfWorker):
    """Lines that a worker has printed."""

    CHANGES_STATE = False
    stream: str
    """`out` or `err`."""
    lines: AsPrinted


@dataclass(frozen=True, kw_only=True, slots=True)
class LinesDropped(OfWorker):
    """So many lines of a worker were left out: the head did not keep up."""

    CHANGES_STATE = False
    lines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlogged(OfWorker):
    """The log of a worker has gaps: its disk is full, say."""

    CHANGES_STATE = False
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(OfWorker):
    """What a worker said through `cluster.reports`."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberSays(FromAgent):
    """What a worker said through `cluster.membership`, for other workers."""

    IS_SHOWN = False
    NAME = "member"
    member: int
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(OfWorker):
    """A worker has ended."""

    code: int
    signal: int
    """That has ended it; 0 for none."""
    finished: bool
    """Whether its main module came to its end."""
    error: dict[str, Any] | None
    """What it said of its failure: see `head.failures`."""
    out_of_memory: bool
    exchanges: int | None = None
    """How many it had begun."""
    last_words: Text = ""
    """Of C++."""
    memory: dict[str, Any] = field(default_factory=dict)
    """`killed`, `peak`, `limit`, `of_cgroup`: see `head.failures`."""

    def __post_init__(self) -> None:
        see_range("code", self.code, -MOST_CODE, MOST_CODE)
        see_range("signal", self.signal, 0, signal.NSIG)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenWorker:
    """What one worker is doing."""

    rank: int
    generation: int
    member: int
    step: int | None
    """The last that it has done, where it counts them."""
    state: str
    """As in /proc."""
    cpu_s: float
    """In all."""
    busy: float
    """Which share of a core it uses."""
    stack: Text
    loader: Text
    """The stack of a process that loads its data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStates(FromAgent):
    """The answer to `InspectWorkers`."""

    NAME = "seen"

    CHANGES_STATE = False
    round: int
    workers: list[SeenWorker]


# From the head.


@dataclass(frozen=True, kw_only=True, slots=True)
class FromHead(WireMessage):
    """What the head says."""

    IS_SHOWN = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare(FromHead):
    """Load what the workers will need. Said once, before all else."""

    host: str
    """What the head calls the host."""
    command: dict[str, Any]
    """What workers run: `kind`, `program`, `arguments`, `folder`."""
    preload: list[str]
    environment: dict[str, str]
    run_dir: str
    workers: int
    log_bytes: int = 0
    warm_s: float = 0.0
    """How long the fork server waits for another run when this one is over; 0: not at all."""
    head_timeout_s: float = 0.0
    can_be_taken_over: bool = False
    tell_condition: bool = False
    listen: bool = False
    """Whether other hosts will try to reach this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TryConnections(FromHead):
    """See whether this host reaches the others."""

    places: list[list[Any]]
    """Address and port of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenForHost(FromHead):
    """Listen for a while: a host that joins tries to reach this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStore(FromHead):
    """Take a port for a TCPStore of the workers."""

    generation: int
    address: str
    listens: bool = True
    """Have it served, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseStore(FromHead):
    """End it, which releases the clients that wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NewWorker:
    """A worker that is to be started."""

    rank: int
    local_rank: int
    member: int
    environment: dict[str, str]
    """Its variables in addition to those of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start(FromHead):
    """Start workers."""

    generation: int
    workers: list[NewWorker]


@dataclass(frozen=True, kw_only=True, slots=True)
class ToWorker(FromHead):
    """Pass on to a worker what is for it, through `cluster.membership`."""

    NAME = "tell"

    member: int
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerStore(FromHead):
    """Pass on to a worker what it has asked by `AskStore`."""

    line: int
    answer: dict[str, Any]
    """`id`, and `value` or `error`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill(FromHead):
    """SIGKILL to one worker."""

    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectWorkers(FromHead):
    """Say of all workers what they are doing."""

    NAME = "look"

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End(FromHead):
    """SIGTERM to all that the workers have started, and SIGKILL when the time is over."""

    generation: int
    grace_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal(FromHead):
    """A signal to the workers themselves, and SIGKILL when the time is over."""

    generation: int
    signal: int
    cause: int
    """The signal that ended the run, which workers pass on to their script."""
    farewell_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(FromHead):
    """End everything."""

    code: int | None = 0
    """What the run ends with; None where it continues without this host."""
    why: str = ""
    """For the user of a host that is turned away."""


FROM_AGENT: Mapping[str, type[FromAgent]] = by_name(
    *(
        Alive,
        StopRequested,
        Condition,
        Connectivity,
        ConnectionsTried,
        StoreOpened,
        Trouble,
        ModulesPreloaded,
        WorkerStates,
        MemberSays,
    ),
    *(AskStore, Output, LinesDropped, Unlogged, Report, Ended),
)
"""What an agent may say, by its name on the wire."""
FROM_HEAD: Mapping[str, type[FromHead]] = by_name(
    *(Prepare, TryConnections, ListenForHost, OpenStore, CloseStore, AnswerStore),
    *(Start, ToWorker, Kill, InspectWorkers, End, Signal, Leave),
)
"""What the head may say, by its name on the wire."""
