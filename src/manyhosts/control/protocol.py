"""Every message that a head and its agents exchange once both have proven who they are: see `control.proof`.

On the wire each is one JSON object on one line: `message` names the class, beside it are the fields. Whatever comes is
checked against the class before anybody looks at it: a field that is missing, or of another type, is refused in a
sentence. What workers report (`fields`) is theirs to say, and is looked at by those that it concerns.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, ClassVar, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    NAME: ClassVar[str]
    """What it is called on the wire."""


# From an agent.


@dataclass(frozen=True, kw_only=True, slots=True)
class FromAgent(_Message):
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

    NAME, CHANGES_STATE = "alive", False
    held_s: float
    """For how long the agent's loop has waited for something of its own system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked(FromAgent):
    """The agent was asked to end by a signal: a wish for the whole run."""

    NAME = "asked"
    signal: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition(FromAgent):
    """How the host is, where `Prepare` asks for it, and at which port others may try to connect (0: none)."""

    NAME = "condition"
    told: dict[str, Any]
    """As `agent.host_state` gathers it."""
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Connectivity(FromAgent):
    """The answer to `OpenDoor`: at which port others may try to connect."""

    NAME = "connectivity"
    port: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ConnectionsTried(FromAgent):
    """The answer to `TryConnections`: for each place why it was not reached, or nothing."""

    NAME = "connections_tried"
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


@dataclass(frozen=True, kw_only=True, slots=True)
class AskStore(FromAgent):
    """What a worker asks through `cluster.store_line`."""

    NAME = "ask_store"
    line: int
    """A connection of a worker to this agent."""
    id: int
    """Counts the questions on it."""
    do: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble(FromAgent):
    """The host can start no worker."""

    NAME = "trouble"
    text: str
    where: str
    early: bool
    """Whether it has started none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Warm(FromAgent):
    """Modules that are loaded because the script imports them: a host that comes later need not find that out."""

    NAME = "warm"
    modules: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Output(OfWorker):
    """Lines that a worker has printed."""

    NAME, CHANGES_STATE = "output", False
    stream: str
    """`out` or `err`."""
    lines: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unshown(OfWorker):
    """So many lines of a worker were left out: the head did not keep up."""

    NAME, CHANGES_STATE = "unshown", False
    lines: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unlogged(OfWorker):
    """The log of a worker has gaps: its disk is full, say."""

    NAME, CHANGES_STATE = "unlogged", False
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(OfWorker):
    """What a worker said through `cluster.reports`."""

    NAME = "report"
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberSays(FromAgent):
    """What a worker said through `cluster.membership`."""

    NAME = "member"
    member: int
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended(OfWorker):
    """A worker has ended."""

    NAME = "ended"
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
    last_words: str = ""
    """Of C++."""
    memory: dict[str, Any] = field(default_factory=dict)
    """`killed`, `peak`, `limit`, `of_cgroup`: see `head.failures`."""


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
    stack: str
    loader: str
    """The stack of a process that loads its data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen(FromAgent):
    """The answer to `Look`."""

    NAME, CHANGES_STATE = "seen", False
    round: int
    workers: list[SeenWorker]


# From the head.


@dataclass(frozen=True, kw_only=True, slots=True)
class FromHead(_Message):
    """What the head says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepare(FromHead):
    """Load what the workers will need. Said once, before all else."""

    NAME = "prepare"
    host: str
    """What the head calls the host."""
    command: dict[str, Any]
    """What workers run: `kind`, `program`, `arguments`, `folder`."""
    preload: list[str]
    environment: dict[str, str]
    run_dir: str
    workers: int
    log_bytes: int = 0
    head_timeout_s: float = 0.0
    can_be_taken_over: bool = False
    tell_condition: bool = False
    listen: bool = False
    """Whether other hosts will try to reach this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TryConnections(FromHead):
    """See whether this host reaches the others."""

    NAME = "try_connections"
    places: list[list[Any]]
    """Address and port of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenDoor(FromHead):
    """Listen for a while: a host that joins tries to reach this one."""

    NAME = "open_door"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenStore(FromHead):
    """Take a port for a TCPStore of the workers."""

    NAME = "open_store"
    generation: int
    address: str
    listens: bool = True
    """Have it served, too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CloseStore(FromHead):
    """End it, so that whoever waits for it waits no more."""

    NAME = "close_store"


@dataclass(frozen=True, kw_only=True, slots=True)
class NewWorker:
    """A worker that is to be started."""

    rank: int
    local_rank: int
    member: int
    environment: dict[str, str]
    """What it has beside the others'."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start(FromHead):
    """Start workers."""

    NAME = "start"
    generation: int
    workers: list[NewWorker]


@dataclass(frozen=True, kw_only=True, slots=True)
class Tell(FromHead):
    """Pass on to a worker what is for it, through `cluster.membership`."""

    NAME = "tell"
    member: int
    content: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerStore(FromHead):
    """Pass on to a worker what it has asked by `AskStore`."""

    NAME = "answer_store"
    line: int
    answer: dict[str, Any]
    """`id`, and `value` or `error`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kill(FromHead):
    """SIGKILL to one worker."""

    NAME = "kill"
    member: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Look(FromHead):
    """Say of all workers what they are doing."""

    NAME = "look"
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class End(FromHead):
    """SIGTERM to all that the workers have started, and SIGKILL when the time is over."""

    NAME = "end"
    generation: int
    grace_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Signal(FromHead):
    """A signal to the workers themselves, and SIGKILL when the time is over."""

    NAME = "signal"
    generation: int
    signal: int
    cause: int
    """The signal that the run was ended by, which workers tell their script."""
    farewell_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(FromHead):
    """End everything."""

    NAME = "leave"
    code: int | None = 0
    """What the run ends with; None where it goes on without this host."""
    why: str = ""
    """For the user of a host that is turned away."""


# On the wire.

FROM_AGENT: Mapping[str, type[FromAgent]] = {
    kind.NAME: kind
    for kind in (
        *(Alive, Asked, Condition, Connectivity, ConnectionsTried, StoreOpened, Trouble, Warm, Seen, MemberSays),
        *(AskStore, Output, Unshown, Unlogged, Report, Ended),
    )
}
"""What an agent may say, by its name on the wire."""
FROM_HEAD: Mapping[str, type[FromHead]] = {
    kind.NAME: kind
    for kind in (
        *(Prepare, TryConnections, OpenDoor, OpenStore, CloseStore, AnswerStore),
        *(Start, Tell, Kill, Look, End, Signal, Leave),
    )
}
"""What the head may say, by its name on the wire."""
HELLO = {
    "session": str,
    "heard": int,
    "node": int,
    "host": str,
    "address": str,
    "process": int,
    "cores": int,
    "gpus": int,
}
"""What an agent says first, with its proof: the fields that must be there, and their types."""
JOINING = {"folder": str, "machine": str, "mark": str, "marks": list[str]}
"""What the `hello` of a host has beside that, where it is the host that has come to the run."""


def content_of(message: FromAgent | FromHead) -> dict[str, Any]:
    """The fields of a message, as JSON can have them."""
    return {entry.name: _plain(getattr(message, entry.name)) for entry in fields(message)}


def _plain(value: Any) -> Any:
    if isinstance(value, list) and value and is_dataclass(value[0]):
        return [{entry.name: getattr(each, entry.name) for entry in fields(each)} for each in value]
    return value


def from_agent(found: Mapping[str, Any]) -> FromAgent:
    """What an agent has said.

    Raises:
        ValueError: it is no message that is known. The text ends a sentence.
    """
    message: FromAgent = _read(found, FROM_AGENT)
    return message


def from_head(found: Mapping[str, Any]) -> FromHead:
    """What the head has said.

    Raises:
        ValueError: as of `from_agent`.
    """
    message: FromHead = _read(found, FROM_HEAD)
    return message


def fault_in(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """Which of the `wanted` fields (name → type) `found` lacks or has otherwise; empty where it has them all."""
    try:
        for name, kind in wanted.items():
            _field(found, name, kind)
    except ValueError as fault:
        return str(fault)
    return ""


@functools.cache
def _hints(kind: Any) -> dict[str, tuple[Any, bool]]:
    """By field of a class: its type, and whether it may be absent."""
    hints = get_type_hints(kind)
    return {
        entry.name: (hints[entry.name], entry.default is not MISSING or entry.default_factory is not MISSING)
        for entry in fields(kind)
    }


def _read(found: Mapping[str, Any], kinds: Mapping[str, Any]) -> Any:
    name = found.get("message")
    if not isinstance(name, str) or name not in kinds:
        raise ValueError(f"it is of the kind {_short(name)}, which this version does not know")
    return _built(found, kinds[name])


def _built(found: Mapping[str, Any], kind: Any) -> Any:
    """An object of a dataclass. What it has no field for is not looked at."""
    hints = _hints(kind).items()
    return kind(
        **{name: _field(found, name, hint) for name, (hint, optional) in hints if name in found or not optional}
    )


def _field(found: Mapping[str, Any], name: str, hint: Any) -> Any:
    if name not in found:
        raise ValueError(f"it has no {name!r}")
    try:
        return _fitted(found[name], hint)
    except ValueError:
        raise ValueError(f"its {name!r} is {_short(found[name])}") from None


def _fitted(value: Any, hint: Any) -> Any:
    """`value` as a field of type `hint` has it.

    Raises:
        ValueError: it is of another type.
    """
    if hint is Any:
        return value
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        fits = any(value is None if option is type(None) else _is(value, option) for option in get_args(hint))
    elif origin is list and isinstance(value, list):
        [kind] = get_args(hint)
        if kind is not str:
            return [_fitted(each, kind) for each in value]
        fits = all(isinstance(each, str) for each in value)  # lines of workers: there may be many
    elif is_dataclass(hint) and isinstance(value, dict):
        return _built(value, hint)
    else:
        fits = _is(value, hint)
    if not fits:
        raise ValueError
    return value


def _is(value: Any, hint: Any) -> bool:
    kind = get_origin(hint) or hint
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _short(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
