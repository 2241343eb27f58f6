"""Connections that do not open: whose firewall it is, in which direction, and which ports are to be opened."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from manyhosts.cluster.findings import Finding
from manyhosts.doctor import closed, host_probe

DROPPED, REFUSED = "timed out", "Connection refused"


def found(names: str, shut: dict[str, str], *, ssh_port: str = "", firewall: str = "") -> list[Finding]:
    """What is said of hosts between which all ways are open but those in `shut`: `ab` for the one from a to b."""
    hosts = [
        {"name": name, "address": f"10.0.0.{number}", "ports": [32768, 60999], "firewall": firewall}
        for number, name in enumerate(names, start=1)
    ]
    addresses = {host["name"]: host["address"] for host in hosts}
    pairs: list[dict[str, Any]] = [
        {
            "from": one,
            "to": other,
            "address": addresses[other],
            "trouble": shut.get(one + other, ""),
            "stage": "connect",
        }
        for one, other in permutations(names, 2)
    ]
    for pair in pairs:
        if pair["trouble"]:
            pair["ssh_port"] = ssh_port
    return list(closed.findings(hosts, pairs))


def test_host_whose_firewall_lets_nothing_in_is_named_with_direction_ports_and_senders() -> None:
    [finding] = found("abc", {"ab": DROPPED, "cb": DROPPED}, firewall="ufw")
    assert finding.what == (
        "host b takes no connection from a and c: packets get no answer (a firewall or security group drops them),"
        " while port 22 answers"
    )
    assert finding.fix == (
        "open TCP ports 32768-60999 of 10.0.0.2 to 10.0.0.1 and 10.0.0.3, on host b with"
        " `ufw allow proto tcp from 10.0.0.1 to any port 32768:60999`, and so for each;"
        " where hosts are of a cloud, in its security group"
    )
    assert (finding.level, finding.kind, finding.where) == ("error", "network", "host b")


def test_refused_is_told_from_dropped() -> None:
    [finding] = found("abc", {"ab": REFUSED, "cb": REFUSED})
    assert "connections are refused (a firewall rejects them" in finding.what
    [finding] = found("abc", {"ab": "No route to host", "cb": "No route to host"}, ssh_port="No route to host")
    assert finding.what == "host b takes no connection from a and c: No route to host"


def test_host_that_may_open_nothing_is_named_for_what_leaves_it() -> None:
    [finding] = found("abc", {"ba": DROPPED, "bc": DROPPED})
    assert finding.what.startswith("host b can open no connection to a and c: packets get no answer")
    assert "what leaves b" in finding.fix


def test_host_that_is_cut_off_both_ways_is_one_finding() -> None:
    shut = {"ab": DROPPED, "ba": DROPPED, "bc": DROPPED, "cb": DROPPED}
    [finding] = found("abc", shut, ssh_port=DROPPED)
    assert finding.what == (
        "host b opens and takes no connection at all: packets get no answer (a firewall drops them, or no network leads"
        " there)"
    )


def test_closed_ways_of_one_pair_are_one_finding_with_both_directions() -> None:
    [finding] = found("abc", {"ac": DROPPED, "ca": DROPPED}, firewall="nft")
    assert finding.what.startswith("host a cannot open a connection to host c at 10.0.0.3: packets get no answer")
    assert finding.what.endswith("; nor can c to a")
    assert "`ip saddr 10.0.0.1 tcp dport 32768-60999 accept`" in finding.fix
    assert "and on a: open TCP ports 32768-60999 of 10.0.0.1 to 10.0.0.3" in finding.fix
    [finding] = found("ab", {"ab": REFUSED})
    assert finding.what.endswith("; b can to a"), "of two hosts the direction is known"


def test_two_firewalls_are_two_findings() -> None:
    findings = found("abcd", {"ab": DROPPED, "cb": DROPPED, "db": DROPPED, "ac": REFUSED})
    assert [finding.where for finding in findings] == ["host b", "between a and c"]


def test_no_way_that_is_closed_is_left_out_whatever_is_closed() -> None:
    names = "abcd"
    ways = ["".join(pair) for pair in permutations(names, 2)]
    for number in range(1 << len(ways)):
        shut = {way: DROPPED for place, way in enumerate(ways) if number >> place & 1}
        reported = " ".join(finding.what for finding in found(names, shut))
        for one, other in shut:
            assert f"host {one}" in reported or f"host {other}" in reported, (shut, reported)


def test_every_firewall_that_a_host_may_have_has_its_remedy() -> None:
    for firewall in host_probe._FIREWALLS:
        [finding] = found("ab", {"ab": DROPPED}, firewall=firewall)
        assert "32768" in finding.fix.partition("on host b with")[2]
        assert "10.0.0.1" in finding.fix.partition("on host b with")[2]
