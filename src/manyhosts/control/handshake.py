"""Every message by which a head and a caller come to trust each other: see `control.proof`.

    who calls    Call                                         Enrol, where an engine has started it
    the head     Prove                                        Secret: it calls on another connection
    who calls    Hello      or Ask, before a host joins
    the head     Welcome    or Offer

What comes in place of one of these is answered by the end of the connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from manyhosts.control.wire_format import WireMessage, by_name


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCaller(WireMessage):
    """What one says that the head does not know yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FromCalled(WireMessage):
    """What the head says to it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call(FromCaller):
    """The first word. Every version says it, `Prove` and `Hello` alike."""

    protocol: int
    """The version of `control.protocol` that it speaks."""
    nonce: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Prove(FromCalled):
    """The answer to `Call`."""

    protocol: int
    nonce: str
    proof: str
    """That the head knows the secret."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello(FromCaller):
    """An agent wants to be one of the run's, or is one and has lost its connection."""

    proof: str = ""
    """That it knows the secret; one that was born with its connection need not prove it."""
    session: str
    """What the agent calls itself, on whichever connection."""
    heard: int
    """How many messages of the head it has heard."""
    node: int
    """Which node it is; `ANY_NODE` where the head decides."""
    host: str
    address: str
    """Where other hosts reach it."""
    process: int
    cores: int
    gpus: int
    folder: str = ""
    """Where a host that joins has the project; the next three are of such a host, too."""
    machine: str = ""
    mark: str = ""
    """What it has left in its run directory."""
    marks: list[str] = field(default_factory=list)
    """What it has found there of others: those have the same disk."""


ANY_NODE = -1
"""What an agent says in place of its number, when it is for the head to say which node it is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Welcome(FromCalled):
    """The answer to `Hello`."""

    heard: int
    """How many messages of the agent the head has heard."""
    node: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ask(FromCaller):
    """A host asks what it must have to join."""

    proof: str
    machine: str
    """By which two of the same machine are noticed; empty where it has no such number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer(FromCalled):
    """The answer to `Ask`."""

    run: str
    script: str
    host: str
    """What the head's machine is called."""
    folder: str
    """Where the head has the project."""
    run_dir: str
    """As seen from that folder."""
    files: dict[str, str]
    """The hash of each file that a host must have."""
    versions: dict[str, str]
    """By package."""
    refused: str = ""
    """Why the host may not join; empty where it may."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Enrol(FromCaller):
    """An agent of an engine asks for the secret: see `control.enrolment`."""

    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Secret(FromCalled):
    """The answer to `Enrol`."""

    token: str


FROM_CALLER: Mapping[str, type[FromCaller]] = by_name(Call, Hello, Ask, Enrol)
"""What one may say that the head does not know yet, by its name on the wire."""
FROM_CALLED: Mapping[str, type[FromCalled]] = by_name(Prove, Welcome, Offer, Secret)
"""What the head may say to it, by its name on the wire."""
