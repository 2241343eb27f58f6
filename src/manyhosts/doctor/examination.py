"""Asks every host, every pair of hosts, and all of them together, in an order that lets no check disturb another."""

from __future__ import annotations

import inspect
import secrets
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from manyhosts import __version__
from manyhosts.cluster.findings import Finding, exit_code, worst_first
from manyhosts.cluster.rounds import rounds
from manyhosts.doctor import checksum, closed, exercise, hosts, network
from manyhosts.doctor.probe_server import Facts, Reached, ReachedHosts

SCHEMA = 1
_CLOCK_ROUNDS = 5
_SECONDS_OF_A_WAY = 0.3
_SECONDS_OF_ALL_WAYS = 20.0
_LEAST_SECONDS_OF_A_WAY = 0.08
_MORE_ROUNDS_OF_A_WAY = 2
_SPEED_S = 0.25
_SPEED_ROUNDS = 2
_MORE_SPEED_ROUNDS = 4
_TORCH_S = 90.0
_RENDEZVOUS_S = 20.0
_READING_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What is to be examined in addition to the hosts themselves."""

    target: str
    run_dir: str
    script: str = ""
    data: tuple[str, ...] = ()
    shares_disk: bool = True
    """Whether the target expects hosts to share the run directory and the script."""


@dataclass(kw_only=True, slots=True)
class Examination:
    """What was found. Hosts by the order in which they were named; pairs by sender, then by receiver."""

    request: Request
    hosts: list[Facts] = field(default_factory=list)
    pairs: list[Facts] = field(default_factory=list)
    rendezvous: Facts = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0

    @property
    def exit_code(self) -> int:
        """0, 3 or 4, as the command line ends."""
        return exit_code(self.findings)

    @classmethod
    def of_json(cls, request: Request, found: Facts) -> Examination:
        """From the result of `to_json`."""
        kept = {name: found[name] for name in ("hosts", "pairs", "seconds")}
        findings = [Finding(**one) for one in found["findings"]]
        return cls(request=request, rendezvous=found["meeting"], findings=findings, **kept)

    def to_json(self) -> Facts:
        """Everything, by the names that docs/doctor.md explains."""
        return {
            "schema": SCHEMA,
            "target": self.request.target,
            "hosts": self.hosts,
            "pairs": self.pairs,
            "meeting": self.rendezvous,
            "findings": [finding.to_json() for finding in self.findings],
            "exit_code": self.exit_code,
            "seconds": self.seconds,
        }


def examine(
    reached: Sequence[Reached], lost: Sequence[Finding], request: Request, report: Callable[[str], None]
) -> Examination:
    """Examine all hosts that were reached. `report` gets lines on the progress."""
    begin = time.monotonic()
    found = _Rounds(reached, request, report)
    found.hosts.lost += lost
    if reached:
        found.examine()
        found.begin_exercise()
        found.compare()
        found.await_exercise()
        found.try_ways()
        found.compute()
        found.try_rendezvous()
    here = [found.facts[each.name] for each in found.hosts.there]
    mine = hosts.versions_here(__version__)
    script = checksum.of_path(request.script) if request.script else None
    of_hosts = hosts.findings(here, mine, request.data, shares_disk=request.shares_disk, script=script)
    findings = [*found.hosts.lost, *of_hosts]
    findings += [*network.findings(here, found.pairs), *network.of_rendezvous(here, found.rendezvous)]
    return Examination(
        request=request,
        hosts=here,
        pairs=found.pairs,
        rendezvous=found.rendezvous,
        findings=worst_first(findings),
        seconds=time.monotonic() - begin,
    )


class _Rounds:
    """The rounds from host to host."""

    def __init__(self, reached: Sequence[Reached], request: Request, report: Callable[[str], None]) -> None:
        self.hosts = ReachedHosts(reached)
        self.facts: dict[str, Facts] = {each.name: _first_facts(each) for each in reached}
        self.pairs: list[Facts] = []
        self.rendezvous: Facts = {}
        self._request, self._report = request, report

    def examine(self) -> None:
        """What each host is alone."""
        self._report(f"looking at {len(self.hosts.there)} host{'s' if len(self.hosts.there) > 1 else ''}")
        request = self._request
        for name, seen in self.hosts.of_all("look", run_dir=request.run_dir, script=request.script).items():
            self.facts[name].update(seen)
            for interface in self.facts[name]["interfaces"]:
                interface["mtu"] = seen["mtu"].get(interface["name"])
            del self.facts[name]["mtu"]

    def compare(self) -> None:
        """What hosts have alike: the time, data, and the run directory. They load torch meanwhile."""
        request = self._request
        for name, clock in self.hosts.each(_clock).items():
            self.facts[name]["clock"] = clock
        if request.data:
            self._report("comparing the data")
            checksum = self.hosts.of_all("checksum", timeout_s=_READING_S, paths=list(request.data))
            for name, data in checksum.items():
                self.facts[name]["data"] = data
        self._compare_run_dirs()

    def _compare_run_dirs(self) -> None:
        """Every host leaves a file of its own, and looks for the first one's."""
        folder, secret = self._request.run_dir, secrets.token_hex(16)
        names = {each.name: f".manyhosts-doctor-{secret[:8]}-{number}" for number, each in enumerate(self.hosts.there)}
        wrote = self.hosts.each(
            lambda each: each.asked.ask("leave file", folder=folder, name=names[each.name], text=secret)
        )
        first = self.hosts.there[0].name if self.hosts.there else ""
        seen = self.hosts.of_all("see file", folder=folder, name=names.get(first, ""))
        for with_folders in (False, True):  # on a shared disk, the host that made the folder waits
            self.hosts.of_all("remove file", with_folders=with_folders)
        for name, trouble in wrote.items():
            sees = seen.get(name) == secret if not wrote.get(first) else None
            self.facts[name]["run_dir"] = {"path": folder, "trouble": trouble, "shared": sees}

    def begin_exercise(self) -> None:
        """Start the process that has torch, on hosts that have it."""
        self._find_ways()
        source = inspect.getsource(exercise)

        def begin(each: Reached) -> Any:
            interface = self.facts[each.name]["interface"]
            own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface} if interface else {}
            return each.asked.ask("begin exercise", program=source, environment=own)

        self.hosts.each(begin, self._with_torch())

    def await_exercise(self) -> None:
        """Wait until torch is loaded: it would disturb what is measured from now on."""
        self._report("starting torch on every host")
        wish = {"allowed_s": _TORCH_S, "timeout_s": _TORCH_S + 5}
        for name, said in self.hosts.each(
            lambda each: each.asked.ask("await exercise", **wish), self._with_torch()
        ).items():
            self.facts[name]["exercise"] = said

    def _with_torch(self) -> list[Reached]:
        return [each for each in self.hosts.there if self.facts[each.name]["torch"]]

    def _find_ways(self) -> None:
        """The address of every host that its routes to the first one lead through; for that one, to the second."""
        base = [self.facts[each.name]["address"] for each in self.hosts.there]
        if not base:
            return
        target = {each.name: base[0] for each in self.hosts.there}
        target[self.hosts.there[0].name] = base[min(1, len(base) - 1)]
        for name, way in self.hosts.each(lambda each: each.asked.ask("way", address=target[each.name])).items():
            facts = self.facts[name]
            facts["address"] = way or facts["address"]
            known = {one["address"]: one for one in facts["interfaces"]}
            chosen = known.get(facts["address"], {})
            facts["interface"], facts["mtu"] = chosen.get("name", ""), chosen.get("mtu")

    def try_ways(self) -> None:
        """Every pair in both directions: first whether it opens, all at once; then how fast it is, in rounds."""
        if len(self.hosts.there) < 2:
            return
        self._report("trying the ways between the hosts")
        token = secrets.token_hex(16)
        ports = self.hosts.each(lambda each: each.asked.ask("listen", address=self._address(each), token=token))
        listening = [each for each in self.hosts.there if each.name in ports]
        places = [(self._address(each), ports[each.name]) for each in listening]
        tried = self.hosts.of_all("try_connections", places=places)
        names = self.hosts.of_all("resolve", names=[self.facts[each.name]["hostname"] for each in listening])
        for name, resolved in names.items():
            self.facts[name]["names"] = resolved
        self.pairs = [
            {
                "from": one.name,
                "to": other.name,
                "address": places[number][0],
                "port": places[number][1],
                "trouble": tried[one.name][number],
                "stage": "connect",
            }
            for one in self.hosts.there
            if one.name in tried
            for number, other in enumerate(listening)
            if other is not one
        ]
        self._see_what_is_filtered()
        self._measure_ways(token)

    def _see_what_is_filtered(self) -> None:
        """Where a connection was not opened: whether another port of that host is let through."""
        by_name = {each.name: each for each in self.hosts.there}
        for name in dict.fromkeys(pair["from"] for pair in self.pairs if pair["trouble"]):
            shut = [pair for pair in self.pairs if pair["from"] == name and pair["trouble"]]
            at_ssh = [(pair["address"], closed.SSH_PORT) for pair in shut]
            if name in by_name:
                for pair, said in zip(
                    shut, self.hosts.ask(by_name[name], "try_connections", places=at_ssh) or [], strict=False
                ):
                    pair["ssh_port"] = said

    def _measure_ways(self, token: str) -> None:
        by_name = {each.name: each for each in self.hosts.there}
        open_ways = [pair for pair in self.pairs if not pair["trouble"]]
        share = _SECONDS_OF_ALL_WAYS / max(1, len(open_ways))
        seconds = max(_LEAST_SECONDS_OF_A_WAY, min(_SECONDS_OF_A_WAY, share))

        def measure(pair: Facts) -> None:
            one = by_name[pair["from"]]
            if one not in self.hosts.there:
                return  # it is gone by now
            wish = {"address": pair["address"], "port": pair["port"], "token": token, "seconds": seconds}
            said = self.hosts.ask(one, "try out", **wish) or {"trouble": "the host is gone"}
            if "bandwidth" in said and "bandwidth" in pair:
                said["latency_s"] = min(said["latency_s"], pair["latency_s"])
                said["bandwidth"] = max(said["bandwidth"], pair["bandwidth"])
            pair.update(said)

        number = {each.name: place for place, each in enumerate(self.hosts.there)}
        by_hosts = {(number[pair["from"]], number[pair["to"]]): pair for pair in open_ways if pair["to"] in number}
        for places in rounds(len(number)):
            for now in (places, [(other, one) for one, other in places]):  # no host sends or receives twice at a time
                self.hosts.at_once(measure, [by_hosts[way] for way in now if way in by_hosts])
        for _ in range(_MORE_ROUNDS_OF_A_WAY):  # a neighbour's noise goes by, a slow cable stays slow
            for pair in network.suspects([self.facts[each.name] for each in self.hosts.there], self.pairs):
                measure(pair)
        for pair in self.pairs:
            if not pair["trouble"]:
                del pair["stage"]

    def compute(self) -> None:
        """How fast each host is. Hosts that are one machine in truth take turns; the best of several turns counts."""
        able = self._able() or self.hosts.there
        self._report("measuring how fast each host computes")
        for _ in range(_SPEED_ROUNDS):
            self._compute_once(able)
        for _ in range(_MORE_SPEED_ROUNDS):  # a neighbour's noise goes by, a slow host stays slow
            if not hosts.slow_ones([self.facts[each.name] for each in able]):
                break
            self._compute_once(able)

    def _able(self) -> list[Reached]:
        """The hosts that have torch, and could load it."""
        return [each for each in self.hosts.there if "torch" in self.facts[each.name].get("exercise", {})]

    def _compute_once(self, able: Sequence[Reached]) -> None:
        with_torch = bool(self._able())

        def turn_of(each: Reached) -> Any:
            if with_torch:
                return _exercise(each, "speed", seconds=_SPEED_S)
            return {**each.asked.ask("loop", seconds=_SPEED_S), "gpus": []}

        machines = defaultdict(list)
        for each in able:
            machines[self.facts[each.name]["machine"]].append(each)
        for turn in range(max(len(group) for group in machines.values())):
            now = [group[turn] for group in machines.values() if turn < len(group) and group[turn] in self.hosts.there]
            for name, said in self.hosts.each(turn_of, now).items():
                if "trouble" in said:
                    continue
                _add_to(self.facts[name], said, unit="operations" if with_torch else "rounds of a loop")

    def try_rendezvous(self) -> None:
        """The rendezvous of all hosts that can compute, and a sum over them."""
        able = self._able()
        names = {each.name for each in able}
        closed = any(pair["trouble"] for pair in self.pairs if {pair["from"], pair["to"]} <= names)
        if len(able) < 2 or closed:  # where a way is closed it can only fail, which is reported already
            return
        self._report("trying the rendezvous of all hosts")
        address = self._address(able[0])
        opened = self.hosts.ask(able[0], "exercise", do="open", address=address, allowed_s=_RENDEZVOUS_S) or {}
        self.rendezvous = {"hosts": [each.name for each in able], "address": address, "port": opened.get("port")}
        if "port" not in opened:
            self.rendezvous["trouble"] = {able[0].name: opened.get("trouble", "the host is gone")}
            return
        where = {"address": address, "port": opened["port"], "size": len(able), "limit_s": _RENDEZVOUS_S}
        ranks = {each.name: rank for rank, each in enumerate(able)}

        def join(each: Reached) -> Any:
            return _exercise(each, "join", rank=ranks[each.name], allowed_s=2 * _RENDEZVOUS_S + 10, **where)

        said = self.hosts.each(join, able)
        self.rendezvous["trouble"] = {name: one["trouble"] for name, one in said.items() if "trouble" in one}
        if not self.rendezvous["trouble"] and said:
            self.rendezvous["seconds"] = max(one["met_s"] for one in said.values())
            self.rendezvous["sum_s"] = statistics.median(one["sum_s"] for one in said.values())
            self.rendezvous["right"] = all(one["right"] for one in said.values())
            self.rendezvous["faults"] = sorted({fault for one in said.values() for fault in one["faults"]})

    def _address(self, each: Reached) -> str:
        return str(self.facts[each.name]["address"])


def _first_facts(each: Reached) -> Facts:
    hello = each.hello
    names = ("python", "executable", "torch", "manyhosts", "address", "interfaces", "image")
    kept = {name: hello[name] for name in names}
    return {"name": each.name, "hostname": hello["name"], **kept, "interface": "", "names": {}}


def _clock(each: Reached) -> Facts:
    """How far the host's clock is ahead of ours: what it says, against the middle of asking and hearing."""
    rounds = []
    for _ in range(_CLOCK_ROUNDS):
        begin, wall = time.perf_counter(), time.time()
        theirs = each.asked.ask("time")
        took = time.perf_counter() - begin
        rounds.append((took, theirs - (wall + took / 2)))
    took, offset = min(rounds)
    return {"offset_s": offset, "unsure_s": took / 2}


def _add_to(facts: Facts, said: Facts, *, unit: str) -> None:
    """Add one turn of computing: of the speed the best counts, of the share of the time the mean."""
    best = facts.setdefault("speed", {"unit": unit, "cpu": 0.0, "share": 0.0, "turns": 0, "gpus": said["gpus"]})
    quota = facts["condition"]["cpu_quota"] or float("inf")
    best["cpu"] = max(best["cpu"], said["cpu"] * min(1.0, quota / facts["condition"]["cores"]))
    best["share"] = (best["share"] * best["turns"] + said["share"]) / (best["turns"] + 1)
    best["turns"] += 1
    best["gpus"] = [max(pair) for pair in zip(best["gpus"], said["gpus"], strict=True)]


def _exercise(each: Reached, do: str, *, allowed_s: float = _TORCH_S, **details: Any) -> Any:
    return each.asked.ask("exercise", do=do, allowed_s=allowed_s, timeout_s=allowed_s + 5, **details)
