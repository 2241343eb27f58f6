"""Connections that do not open: which host's firewall it is, in which direction, and which ports are to be opened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from manyhosts.cluster.findings import Finding

Facts = Mapping[str, Any]
SSH_PORT = 22
"""A port that firewalls between hosts leave open: whether it answers says whether single ports are closed, or all."""
_REFUSED = "Connection refused"
_SILENT = ("timed out", "Connection timed out")
_REMEDIES = {
    "ufw": "`ufw allow proto tcp from {sender} to any port {first}:{last}`",
    "firewall-cmd": "`firewall-cmd --add-rich-rule='rule family={family} source address={sender}"
    " port port={first}-{last} protocol=tcp accept'`",
    "nft": "a rule `{ip} saddr {sender} tcp dport {first}-{last} accept` before those that reject (`nft list ruleset`)",
    "iptables": "`iptables -I INPUT -p tcp -s {sender} --dport {first}:{last} -j ACCEPT`",
}
"""Program that a host has for its firewall, as a host probe finds it → what to type there."""


def findings(hosts: Sequence[Facts], pairs: Sequence[Facts]) -> Iterator[Finding]:
    """What keeps the connections of `pairs` that did not open from opening; each connection is in one finding."""
    by_name = {host["name"]: host for host in hosts}
    closed = {(pair["from"], pair["to"]): pair for pair in pairs if pair["trouble"] and pair["stage"] == "connect"}
    tried = {(pair["from"], pair["to"]) for pair in pairs}
    cut_off = [name for name in by_name if _all_of(closed, tried, name, 0) and _all_of(closed, tried, name, 1)]
    for name in cut_off:
        own = [pair for pair in closed if name in pair]
        if own:
            yield _of_one_host(
                by_name, name, [closed.pop(pair) for pair in own], "opens and takes no connection at all"
            )
    for name in by_name:
        if _all_of(closed, tried, name, 1):
            own = [pair for pair in closed if pair[1] == name]
            yield _of_one_host(by_name, name, [closed.pop(pair) for pair in own], "takes no connection")
    for name in by_name:
        if _all_of(closed, tried, name, 0):
            own = [pair for pair in closed if pair[0] == name]
            yield _of_one_host(by_name, name, [closed.pop(pair) for pair in own], "can open no connection")
    while closed:
        (one, other), pair = next(iter(closed.items()))
        del closed[one, other]
        yield _of_a_pair(by_name, pair, closed.pop((other, one), None))


def ports(host: Facts) -> tuple[int, int]:
    """The first and the last of the ports that the system gives to programs of `host` that choose none."""
    first, last = host.get("ports") or (1024, 65535)
    return first, last


def _all_of(closed: Iterable[tuple[str, str]], tried: Iterable[tuple[str, str]], name: str, end: int) -> bool:
    """Whether all connections from (`end` 0) or to (1) a host are closed, and there are several."""
    own = {pair for pair in tried if pair[end] == name}
    return len(own) > 1 and own <= set(closed)


def _of_one_host(by_name: Mapping[str, Facts], name: str, pairs: Sequence[Facts], does: str) -> Finding:
    others = list(dict.fromkeys(other for pair in pairs for other in (pair["from"], pair["to"]) if other != name))
    word = "from" if does.startswith("takes") else "to"
    what = f"host {name} {does} {word} {_listed(others)}: {_why(pairs)}"
    if "at all" in does:
        what = f"host {name} {does}: {_why(pairs)}"
    if does.startswith("can"):
        fix = (
            f"let {name} open connections to all ports of {_listed(others)}: it is what leaves {name} that is filtered"
        )
    else:
        fix = _to_open(by_name[name], [by_name[other] for other in others])
    return _finding(what, f"host {name}", fix)


def _of_a_pair(by_name: Mapping[str, Facts], pair: Facts, back: Facts | None) -> Finding:
    one, other = pair["from"], pair["to"]
    what = f"host {one} cannot open a connection to host {other} at {pair['address']}: {_why([pair])}"
    what += f"; nor can {other} to {one}" if back else f"; {other} can to {one}"
    fix = _to_open(by_name[other], [by_name[one]])
    if back:
        fix += f"; and on {one}: {_to_open(by_name[one], [by_name[other]], briefly=True)}"
    return _finding(what, f"between {one} and {other}", fix)


def _finding(what: str, where: str, fix: str) -> Finding:
    return Finding(level="error", check="connection", what=what, where=where, fix=fix, kind="network")


def _why(pairs: Sequence[Facts]) -> str:
    """What becomes of packets, as far as the connecting side sees it."""
    said = list(dict.fromkeys(pair["trouble"] for pair in pairs))
    passes = any(pair.get("ssh_port") in ("", _REFUSED) for pair in pairs)
    but = f", while port {SSH_PORT} answers" if passes else ""
    if said == [_REFUSED]:
        return f"connections are refused (a firewall rejects them: the doctor's own program listens there){but}"
    if all(each in _SILENT for each in said):
        dropped = (
            "a firewall or security group drops them" if passes else "a firewall drops them, or no network leads there"
        )
        return f"packets get no answer ({dropped}){but}"
    return " and ".join(said) + but


def _to_open(host: Facts, senders: Sequence[Facts], *, briefly: bool = False) -> str:
    first, last = ports(host)
    named = _listed([sender["address"] for sender in senders])
    words = f"open TCP ports {first}-{last} of {host['address']} to {named}"
    if senders and (remedy := _REMEDIES.get(host.get("firewall", ""))):
        address = senders[0]["address"]
        ip, family = ("ip6", "ipv6") if ":" in address else ("ip", "ipv4")
        typed = remedy.format(sender=address, first=first, last=last, ip=ip, family=family)
        words += f", on host {host['name']} with {typed}" + (", and so for each" if len(senders) > 1 else "")
    return words if briefly else f"{words}; where hosts are of a cloud, in its security group"


def _listed(names: Sequence[str]) -> str:
    return " and ".join([*([", ".join(names[:-1])] if len(names) > 1 else []), names[-1]])
