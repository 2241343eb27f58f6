"""What is wrong between hosts: facts in, findings out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from manyhosts.cluster.findings import Finding
from manyhosts.doctor import closed

Facts = Mapping[str, Any]
SLOW = 1.4
"""A way this many times slower than the median is named."""
_SUSPECT = 1.2
_FAR_S = 0.002
_FAR = 5
_LOOPBACK = "127."
_LOST = 0.005
"""What a way may lose of its packets: more than this holds up every exchange."""


def findings(hosts: Sequence[Facts], pairs: Sequence[Facts]) -> list[Finding]:
    """What is wrong with the ways between `hosts`."""
    pairs = [pair for pair in pairs if not pair["address"].startswith(_LOOPBACK)]  # no wire, and nothing to learn
    return [
        *closed.findings(hosts, pairs),
        *_of_large_packets(pairs),
        *_of_slow_hosts(hosts, pairs),
        *_of_slow_pairs(hosts, pairs),
        *_of_latency(pairs),
        *_of_loss(hosts, pairs),
        *_of_packets(hosts),
        *_of_names(hosts),
        *_of_equal_names(hosts),
    ]


def caps(hosts: Sequence[Facts], pairs: Sequence[Facts], way: str) -> dict[str, float]:
    """The most that each host sends (`way` is "from") or takes ("to"), in bytes in a second: its best way."""
    found: dict[str, float] = {}
    for pair in pairs:
        if "bandwidth" in pair:
            found[pair[way]] = max(found.get(pair[way], 0), pair["bandwidth"])
    return {host["name"]: found[host["name"]] for host in hosts if host["name"] in found}


def is_slow(hosts: Sequence[Facts], pairs: Sequence[Facts], pair: Facts) -> bool:
    """Whether a way is far below the median of what hosts can send."""
    most = caps(hosts, pairs, "from")
    if pair["address"].startswith(_LOOPBACK):
        return False
    return "bandwidth" in pair and bool(most) and pair["bandwidth"] * SLOW < statistics.median_high(most.values())


def suspects(hosts: Sequence[Facts], pairs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Ways that would be named, or that make a host be named: worth a second look."""
    pairs = [pair for pair in pairs if not pair["address"].startswith(_LOOPBACK)]
    if not any(_of_slow_hosts(hosts, pairs)) and not any(_of_slow_pairs(hosts, pairs)):
        return []
    usual = statistics.median_high(caps(hosts, pairs, "from").values())
    return [pair for pair in pairs if "bandwidth" in pair and pair["bandwidth"] * _SUSPECT < usual]


def _of_large_packets(pairs: Sequence[Facts]) -> Iterator[Finding]:
    """Ways that open, and do not let through what is sent then."""
    reported = set()
    for pair in pairs:
        both = frozenset((pair["from"], pair["to"]))
        if not pair["trouble"] or pair["stage"] == "connect" or both in reported:
            continue
        reported.add(both)
        one, other = pair["from"], pair["to"]
        if pair["stage"] == "send":
            what = f"small packets from host {one} to host {other} arrive, large ones do not: {pair['trouble']}"
            fix = "the packet size (MTU) of a switch or tunnel between them is smaller than that of the hosts: "
            fix += f"`ip link set dev INTERFACE mtu 1400` on {one} shows whether that is it"
        else:
            what = f"host {one} opens a connection to host {other} at {pair['address']}, and nothing comes through it:"
            what += f" {pair['trouble']}"
            fix = f"see what answers in place of {other}: a proxy, or another host with the same address"
        where = f"between {one} and {other}"
        yield Finding(level="error", check="connection", what=what, where=where, fix=fix, kind="network")


def _of_slow_hosts(hosts: Sequence[Facts], pairs: Sequence[Facts]) -> Iterator[Finding]:
    if len(hosts) < 3:
        return  # of two, either may be the slow one
    sending, taking = caps(hosts, pairs, "from"), caps(hosts, pairs, "to")
    for host in hosts:
        name = host["name"]
        slow = {}
        for word, most in (("sends", sending), ("takes", taking)):
            if name in most:
                factor = statistics.median_high(most.values()) / most[name]
                if factor >= SLOW:
                    slow[word] = (factor, most)
        if slow:
            factor, most = max(slow.values(), key=lambda one: one[0])
            usual = statistics.median_high(most.values())
            yield Finding(
                level="warning",
                check="bandwidth",
                what=f"host {name} {' and '.join(slow)} {factor:.1f} times slower than the others:"
                f" {bits(most[name])} in place of {bits(usual)}",
                where=f"host {name}, {host['interface']}",
                fix=f"see its cable and its port at the switch: `ethtool {host['interface']}` there says its speed",
            )


def _of_slow_pairs(hosts: Sequence[Facts], pairs: Sequence[Facts]) -> Iterator[Finding]:
    """Ways that are slower than what both of their ends can do."""
    sending, taking = caps(hosts, pairs, "from"), caps(hosts, pairs, "to")
    if len(hosts) == 2 and pairs:  # what a host can do is not known from elsewhere: the two directions are compared
        sending = taking = {host["name"]: max(pair.get("bandwidth", 0) for pair in pairs) for host in hosts}
    for pair in pairs:
        if "bandwidth" not in pair:
            continue
        able = min(sending[pair["from"]], taking[pair["to"]])
        if able / pair["bandwidth"] >= SLOW:
            yield Finding(
                level="warning",
                check="bandwidth",
                what=f"from host {pair['from']} to host {pair['to']} goes {able / pair['bandwidth']:.1f} times less"
                f" than both can do: {bits(pair['bandwidth'])} in place of {bits(able)}",
                where=f"between {pair['from']} and {pair['to']}",
                fix="see the switches and cables between these two, and what else uses them",
            )


def _of_latency(pairs: Sequence[Facts]) -> Iterator[Finding]:
    known = [pair for pair in pairs if "latency_s" in pair]
    if not known:
        return
    usual = statistics.median_high(pair["latency_s"] for pair in known)
    for pair in known:
        if pair["latency_s"] > max(_FAR_S, _FAR * usual) and pair["from"] < pair["to"]:
            yield Finding(
                level="warning",
                check="latency",
                what=f"a word from host {pair['from']} to host {pair['to']} and back takes"
                f" {pair['latency_s'] * 1e3:.1f} ms, between the others {usual * 1e3:.2g} ms",
                where=f"between {pair['from']} and {pair['to']}",
                fix="see by which way it goes: `tracepath` from one to the other",
            )


def _of_loss(hosts: Sequence[Facts], pairs: Sequence[Facts]) -> Iterator[Finding]:
    """Ways on which packets get lost; where all that lead to a host, or from it, are such, that host."""
    lossy = [pair for pair in pairs if (pair.get("lost") or 0) >= _LOST]

    def finding(what: str, where: str, host: str, of: Sequence[Facts]) -> Finding:
        share = statistics.median(pair["lost"] for pair in of)
        reported = f"{share:.1%} of the packets {what} get lost, and each of them holds up an exchange"
        fix = f"see the cable of {host} and its port at the switch: `ip -s link` and `ethtool -S INTERFACE` there count"
        return Finding(level="warning", check="loss", what=reported, where=where, fix=f"{fix} errors and drops")

    for side, words in (("to", "that are sent to host"), ("from", "from host")):
        for name in (host["name"] for host in hosts):
            own = [pair for pair in pairs if pair[side] == name]
            if len(own) > 1 and all(pair in lossy for pair in own):
                yield finding(f"{words} {name}", f"host {name}", name, own)
                lossy = [pair for pair in lossy if pair not in own]
    for pair in lossy:
        one, other = pair["from"], pair["to"]
        yield finding(f"from host {one} to host {other}", f"between {one} and {other}", other, [pair])


def _of_packets(hosts: Sequence[Facts]) -> Iterator[Finding]:
    sizes = {host["name"]: host["mtu"] for host in hosts if host.get("mtu")}
    if len(set(sizes.values())) > 1:
        reported = ", ".join(f"{name} {size}" for name, size in sizes.items())
        yield Finding(
            level="warning",
            check="mtu",
            what=f"hosts send packets of different sizes (MTU): {reported}",
            where="between the hosts",
            fix="give all of them one size: `ip link set dev INTERFACE mtu 1500`, and the switches as large a one",
        )


def _of_names(hosts: Sequence[Facts]) -> Iterator[Finding]:
    for host in hosts:
        for other in hosts:
            address = host["names"].get(other.get("hostname"), "")
            own = {one["address"] for one in other.get("interfaces", [])}
            alike = [each for each in hosts if each.get("hostname") == other.get("hostname")]
            if (
                address
                and own
                and len(alike) == 1
                and address not in own
                and not address.startswith((_LOOPBACK, "::1"))
            ):
                yield Finding(
                    level="warning",
                    check="names",
                    what=f"host {host['name']} takes {other['hostname']} for {address}, which is no address of host"
                    f" {other['name']} ({other['address']})",
                    where=f"host {host['name']}",
                    fix=f"correct the line of {other['hostname']} in /etc/hosts there, or what its name server says",
                )
        unknown = [name for name, address in host["names"].items() if not address]
        if unknown:
            yield Finding(
                level="note",
                check="names",
                what=f"host {host['name']} does not know the name{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
                where=f"host {host['name']}",
                fix="`manyhosts run` uses addresses; for what you start by hand, write the names into /etc/hosts",
            )


def _of_equal_names(hosts: Sequence[Facts]) -> Iterator[Finding]:
    """Hosts with addresses of their own that call themselves the same."""
    for name in dict.fromkeys(host["hostname"] for host in hosts if host.get("hostname")):
        alike = {host["address"]: host["name"] for host in hosts if host.get("hostname") == name}
        if len(alike) > 1 and not any(address.startswith(_LOOPBACK) for address in alike):
            who = ", ".join(alike.values())
            yield Finding(
                level="warning",
                check="names",
                what=f"hosts {who} have the same name, {name}: logs and messages cannot distinguish them",
                where=f"hosts {who}",
                fix="give each a name of its own: `hostnamectl set-hostname NAME` there",
            )


FAULTS = {
    "average": (
        "ReduceOp.AVG adds up and does not divide, without an error",
        "in code of your own use ReduceOp.SUM and divide by the number of workers; manyhosts does",
    ),
    "reduce_scatter": (
        "reduce_scatter gives wrong sums, without an error",
        "in code of your own use all_reduce and take your part of it; manyhosts uses all_to_all",
    ),
    "reduce_scatter bytes": (
        "reduce_scatter sends as much as an all-reduce for every worker",
        "in code of your own use all_to_all and add up what comes; manyhosts does",
    ),
    "nested shards": (
        "a tensor that is cut twice along one dimension, unevenly, is put together with wrong rows, without an error",
        "in code of your own cut each dimension over one axis of the mesh, or into even parts; manyhosts does",
    ),
}
"""By the words of `exercise.silent_faults`: what is wrong, and what to do."""


def of_rendezvous(hosts: Sequence[Facts], rendezvous: Facts) -> Iterator[Finding]:
    """What is wrong with the rendezvous and the sum over all hosts."""
    interfaces = ", ".join(sorted({host["interface"] for host in hosts if host["interface"]}))
    fix = f"see the findings about connections; workers talk over {interfaces}: that interface must lead to all hosts"
    trouble = rendezvous.get("trouble", {})
    if trouble:
        name, said = next(iter(trouble.items()))
        others = f" (and {len(trouble) - 1} more)" if len(trouble) > 1 else ""
        what = f"the rendezvous and the sum over all hosts failed; host {name}{others}: {said}"
        where = f"at {rendezvous['address']} port {rendezvous['port']}"
        yield Finding(level="error", check="rendezvous", what=what, where=where, fix=fix, kind="network")
    elif rendezvous.get("right") is False:
        what = "a sum over all hosts came out wrong"
        yield Finding(level="error", check="rendezvous", what=what, where="between the hosts", fix=fix, kind="network")
    for fault in rendezvous.get("faults", ()):
        what, fix = FAULTS[fault]
        yield Finding(level="warning", check="collectives", what=what, where="PyTorch over Gloo", fix=fix)


def bits(bandwidth: float) -> str:
    """`96 Mbit/s` for 12e6 bytes in a second."""
    amount = bandwidth * 8
    for unit in ("bit/s", "kbit/s", "Mbit/s", "Gbit/s"):
        if amount < 1000 or unit == "Gbit/s":
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return ""
