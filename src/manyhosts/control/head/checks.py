"""What is checked before workers start, while hosts load torch: is every host fit, does each reach the others.

An agent reports its host's state as soon as it is asked to prepare, and listens for the others; then each connects to
all. That takes some milliseconds of a second or more in which torch is loaded. Errors end the run, warnings are a line
each. A host that joins while others train is checked in the same way before a worker starts there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from manyhosts.cluster.findings import Finding, Level, worst_first
from manyhosts.control.head.agents import Agents
from manyhosts.control.head.state import HeadState, Node
from manyhosts.control.protocol import Condition, ConnectionsTried, Connectivity, ListenForHost, TryConnections
from manyhosts.errors import CommunicationError, LaunchError
from manyhosts.hosts.ways import Place, Ways
from manyhosts.units import bytes_in_words, seconds_in_words

MIB, GIB = 1 << 20, 1 << 30
CLOCK_S = 5.0
"""How far a clock may be off before files, certificates and logs of hosts contradict each other."""
_LEFT_OVER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": ("1", "has every GPU kernel waited for"),
    "TORCH_DISTRIBUTED_DEBUG": ("DETAIL", "has every collective checked against all workers"),
    "NCCL_P2P_DISABLE": ("1", "has GPUs of one host talk through its memory"),
    "NCCL_SHM_DISABLE": ("1", "has GPUs of one host talk over the network"),
    "NCCL_IB_DISABLE": ("1", "leaves InfiniBand unused"),
}


def host_findings(host: str, reported: Mapping[str, Any], *, offset_s: float = 0, unsure_s: float = 0) -> list[Finding]:
    """What is wrong with `host`.

    Its clock is `offset_s` seconds ahead of ours, known up to `unsure_s` seconds in both directions.
    """
    return [
        *_of_disks(host, reported["disks"]),
        *_of_memory(host, reported["memory"], reported["shared_memory"]),
        *_of_descriptors(host, reported["descriptors"]),
        *_of_clock(host, offset_s, unsure_s),
        *_of_variables(host, reported),
    ]


def _of_disks(host: str, disks: Mapping[str, Any]) -> Iterator[Finding]:
    for name, disk in disks.items():
        where = f"host {host}, {disk['path']}"
        if not disk["writable"]:
            level: Level = "error"
            what = f"host {host} cannot write where the {name} {'is' if name == 'run directory' else 'are'}"
            fix = "give a --run-dir that is writable there" if name == "run directory" else "mount it so that it is"
            yield Finding(level=level, check="disk", what=what, where=where, fix=fix)
        elif disk["free"] < GIB or (disk["files_left"] is not None and disk["files_left"] < 1000):
            level = "error" if disk["free"] < 64 * MIB or disk["files_left"] == 0 else "warning"
            left = bytes_in_words(disk["free"]) + " are left"
            if disk["free"] >= GIB:
                left = f"{disk['files_left']} more files fit"
            what = f"the disk of host {host} is nearly full: {left} for the {name}"
            fix = f"see `du -xh {disk['path']} | sort -h | tail` there, or put the {name} on another disk"
            fix += " (--run-dir)" if name == "run directory" else " (TMPDIR)"
            yield Finding(level=level, check="disk", what=what, where=where, fix=fix)


def _of_memory(host: str, memory: Mapping[str, int] | None, shared: Mapping[str, Any] | None) -> Iterator[Finding]:
    if memory is not None and memory["available"] < GIB:
        yield Finding(
            level="error" if memory["available"] < 256 * MIB else "warning",
            check="memory",
            what=f"host {host} has {bytes_in_words(memory['available'])} of memory left of"
            f" {bytes_in_words(memory['total'])}",
            where=f"host {host}",
            fix="see who has it: `ps aux --sort=-rss | head` there",
        )
    if shared is not None and shared["free"] < 512 * MIB:
        yield Finding(
            level="warning" if shared["free"] < 32 * MIB else "note",
            check="shared memory",
            what=f"host {host} has {bytes_in_words(shared['free'])} of shared memory left; DataLoader workers hand"
            " batches over through it",
            where=f"host {host}, {shared['path']}",
            fix="`mount -o remount,size=8G /dev/shm` there; in a container, start it with --ipc=host or --shm-size=8g",
        )


def _of_descriptors(host: str, descriptors: Mapping[str, int]) -> Iterator[Finding]:
    limit = descriptors["limit"]
    if 0 <= limit < 1024:
        yield Finding(
            level="error" if limit < 128 else "warning",
            check="descriptors",
            what=f"processes of host {host} may have {limit} files and connections open, which many workers exceed",
            where=f"host {host}",
            fix="`ulimit -n 65536` there, for good in /etc/security/limits.conf",
        )


def _of_clock(host: str, offset_s: float, unsure_s: float) -> Iterator[Finding]:
    if abs(offset_s) - unsure_s > CLOCK_S:
        yield Finding(
            level="warning",
            check="clock",
            what=f"the clock of host {host} is {seconds_in_words(abs(offset_s))}"
            f" {'ahead of' if offset_s > 0 else 'behind'} this machine's",
            where=f"host {host}",
            fix="`timedatectl set-ntp true` there, and see `timedatectl` for what it says of its time server",
        )


def _of_variables(host: str, reported: Mapping[str, Any]) -> Iterator[Finding]:
    found: Mapping[str, str] = reported["environment"]

    def finding(level: Level, what: str, fix: str) -> Finding:
        return Finding(level=level, check="environment", what=what, where=f"host {host}, environment", fix=fix)

    if found.get("CUDA_VISIBLE_DEVICES") in ("", "-1") and reported["has_gpus"]:
        said = found["CUDA_VISIBLE_DEVICES"] or "empty"
        what = f"CUDA_VISIBLE_DEVICES is {said} on host {host}, so no worker sees its GPUs"
        yield finding("warning", what, "unset CUDA_VISIBLE_DEVICES, or name the GPUs: CUDA_VISIBLE_DEVICES=0,1")
    threads = found.get("OMP_NUM_THREADS", "1").partition(",")[0].strip()
    if not threads.isdecimal() or not 1 <= int(threads) <= 2 * reported["cores"]:
        what = f"OMP_NUM_THREADS is {threads!r} on host {host}, which has {reported['cores']} cores"
        yield finding("warning", what, "unset it: the cores are then shared out between the workers")
    yield from _of_interfaces(finding, host, found, reported)
    for name, (bad, effect) in _SLOW.items():
        if found.get(name, "").upper() == bad:
            yield finding("warning", f"{name}={found[name]} on host {host} {effect}: slow", f"unset {name}")
    left = [name for name in _LEFT_OVER if name in found]
    if left:
        what = f"{', '.join(left)} {'is' if len(left) == 1 else 'are'} set on host {host} already"
        fix = f"`unset {' '.join(left)}`: manyhosts run sets its own, but `python train.py` alone waits for others"
        yield finding("note", what, fix)
    proxied = any(name.lower().endswith("_proxy") and value == "set" for name, value in found.items())
    if proxied and not any(name.lower() == "no_proxy" for name in found):
        what = f"a web proxy is set on host {host}, and no_proxy is not: requests to other hosts go through it"
        yield finding("note", what, "name your hosts in no_proxy")


def _of_interfaces(
    finding: Callable[[Level, str, str], Finding], host: str, found: Mapping[str, str], reported: Mapping[str, Any]
) -> Iterator[Finding]:
    there = reported["interfaces"]
    names = [name.strip() for name in found.get("GLOO_SOCKET_IFNAME", "").split(",") if name.strip()]
    missing = [name for name in names if name not in there]
    fix = "unset it: manyhosts then takes the one that leads to the other hosts; there are: " + ", ".join(there)
    if missing:
        what = f"GLOO_SOCKET_IFNAME names {missing[0]}, an interface that host {host} does not have"
        yield finding("error", what, fix)
    wanted = found.get("NCCL_SOCKET_IFNAME", "")
    names = [name.strip() for name in wanted.lstrip("=").split(",") if name.strip()]
    if names and not wanted.startswith("^"):  # NCCL takes beginnings of names, unless they follow a =
        exact = wanted.startswith("=")
        if not any(one == name or (not exact and one.startswith(name)) for one in there for name in names):
            what = f"NCCL_SOCKET_IFNAME names {wanted}, an interface that host {host} does not have"
            yield finding("error" if reported["has_gpus"] else "warning", what, fix)


_LIMIT_S = 20.0
"""How long a host may take to report, longer than a connection attempt without an answer.

One that takes longer is not waited for: its workers may fare as badly.
"""


class Precheck:
    """Looked through once, before the first workers start."""

    def __init__(self, state: HeadState, agents: Agents, *, ways: bool, one_way: bool = False) -> None:
        """`ways`: whether hosts try to reach each other, too; ssh has had them do so already.

        `one_way`: see `hosts.ways`.
        """
        self._state, self._agents = state, agents
        self.is_over = not state.job.check
        """Whether everything is looked through."""
        self._ways = ways and len(agents.nodes) > 1
        self._asked: dict[int, float] = {}
        self._findings: list[Finding] = []
        self._found = Ways(one_way=one_way)
        self._reported: set[int] = set()
        self._knocked: set[int] = set()
        self._has_begun = False

    def requests(self, node: Node) -> dict[str, bool]:
        """What an agent is to report while it prepares itself."""
        self._asked[node.number] = time.time()
        return {"tell_condition": not self.is_over, "listen": not self.is_over and self._ways}

    def begin(self) -> None:
        """All agents are here: check what they report."""
        if not self.is_over:
            self._has_begun = True
            self._state.loop.after(_LIMIT_S, self._conclude)
            self._advance()

    def receive(self, node: Node, message: Condition | ConnectionsTried | Connectivity) -> None:
        """What an agent reports of its host."""
        if self.is_over:
            return
        if isinstance(message, Condition):
            self._take_condition(node, message)
        elif isinstance(message, ConnectionsTried):
            self._take_answers(node, message.answers)
        self._advance()

    def _take_condition(self, node: Node, message: Condition) -> None:
        reported, now = message.reported, time.time()
        before = self._asked[node.number]
        offset = reported["time_s"] - (before + now) / 2
        self._findings += host_findings(node.name, reported, offset_s=offset, unsure_s=(now - before) / 2)
        self._reported.add(node.number)
        if message.port:
            self._found.places[node.number] = place_of(node, message.port)

    def _take_answers(self, node: Node, answers: list[str]) -> None:
        self._found.take(node.number, list(self._found.places), answers)
        self._knocked.add(node.number)

    def _advance(self) -> None:
        """Take the next step, if everybody has taken the last one."""
        present = set(self._agents.present())
        if not self._has_begun or not present <= self._reported:
            return
        if self._ways and len(present) > 1 and not self._knocked:
            self._knocked.add(-1)  # asked for
            places = [[place.address, place.port] for place in self._found.places.values()]
            self._agents.send_all(TryConnections(places=places))
        if not self._ways or len(present) < 2 or present <= self._knocked:
            self._conclude()

    def _conclude(self) -> None:
        if self.is_over or self._state.is_over:
            return
        self.is_over = True
        findings = [*self._findings, *self._found.findings()]
        errors = [finding for finding in findings if finding.level == "error"]
        for finding in worst_first(findings):
            if finding.level == "warning":
                self._state.display.warn(f"manyhosts: warning: {finding.what} ({finding.fix})")
        if not errors:
            return
        first, more = errors[0], len(errors) - 1
        kind = CommunicationError if first.kind == "network" else LaunchError
        rest = (
            f" (and {more} more: `manyhosts doctor` lists all, with the same --hosts, --on or --cluster)"
            if more
            else ""
        )
        self._state.result = kind(f"{first.what}{rest}", where=first.where, fix=first.fix)


def place_of(node: Node, port: int) -> Place:
    """Where the host of a node can be connected to. The workers' store is on the first one."""
    facts = node.facts
    assert facts is not None, "its agent has come"
    return Place(
        name=node.name,
        address=facts.address,
        port=port,
        gpus=facts.gpus,
        keeps_store=node.number == 0,
    )


_NEWCOMER_LIMIT_S = 20.0
"""How long this may take. A host that does not answer is not waited for: its connection is handled elsewhere."""


class Newcomers:
    """They are admitted one after another: all agents listen, then the newcomer and the others try each other."""

    def __init__(self, state: HeadState, agents: Agents) -> None:
        self._state, self._agents = state, agents
        self._waiting: deque[tuple[Node, Callable[[], None]]] = deque()
        """The first of them is being admitted."""
        self._turn = 0

    def admit(self, node: Node, then: Callable[[], None]) -> None:
        """Call `then` when nothing is in the way of `node`; turn it away otherwise."""
        self._waiting.append((node, then))
        if len(self._waiting) == 1:
            self._begin()

    def receive(self, node: Node, message: Condition | ConnectionsTried | Connectivity) -> None:
        """An agent listens, or has connected to the others."""
        if not self._waiting:
            return
        if isinstance(message, Connectivity) and node.number in self._awaited and not self._places_sent:
            if message.port:  # else it could open none, and is not tried
                self._ways.places[node.number] = place_of(node, message.port)
            self._advance(node)
        elif isinstance(message, ConnectionsTried) and node.number in self._awaited and self._places_sent:
            self._ways.take(node.number, self._tried_by[node.number], message.answers)
            self._advance(node)

    def lose(self, node: Node) -> None:
        """An agent is gone."""
        if not self._waiting:
            return
        if node is self._waiting[0][0]:
            self._end(lambda: None)
            return
        self._waiting = deque(each for each in self._waiting if each[0] is not node)
        self._advance(node)

    def _begin(self) -> None:
        self._turn += 1
        turn = self._turn
        self._ways = Ways(one_way=True)
        self._places_sent = False
        self._tried_by: dict[int, list[int]] = {}
        here = [self._agents.nodes[number] for number in self._agents.present()]
        newcomers = {node.number for node, _ in self._waiting} - {self._waiting[0][0].number}
        self._taking_part = [node for node in here if node.number not in newcomers]
        self._awaited = {node.number for node in self._taking_part}
        self._agents.send(self._taking_part, ListenForHost())

        def check() -> None:
            if self._waiting and turn == self._turn:
                self._conclude()

        self._state.loop.after(_NEWCOMER_LIMIT_S, check)

    def _advance(self, node: Node) -> None:
        self._awaited.discard(node.number)
        if self._awaited:
            return
        if self._places_sent:
            self._conclude()
            return
        self._places_sent = True
        newcomer = self._waiting[0][0].number
        for each in self._taking_part:
            if each.number not in self._ways.places:
                continue
            others = [number for number in self._ways.places if number != newcomer]
            to_it = [newcomer] if newcomer in self._ways.places else []
            self._tried_by[each.number] = others if each.number == newcomer else to_it
            self._awaited.add(each.number)
            places = [self._ways.places[number] for number in self._tried_by[each.number]]
            self._agents.send([each], TryConnections(places=[[place.address, place.port] for place in places]))

    def _conclude(self) -> None:
        node, then = self._waiting[0]
        found = self._ways.findings()
        if not found:
            self._end(then)
            return
        self._state.display.warn(
            f"manyhosts: {found[0].what} ({found[0].fix})\nmanyhosts: the run continues without host {node.name}"
        )
        self._end(lambda: self._agents.turn_away(node, f"{found[0].what} ({found[0].fix})"))

    def _end(self, do: Callable[[], None]) -> None:
        self._waiting.popleft()
        self._turn += 1
        do()
        if self._waiting:
            self._begin()
