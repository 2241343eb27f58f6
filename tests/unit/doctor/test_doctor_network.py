"""What is said of the ways between hosts: the slow host, the slow way, the closed one, and nothing else."""

from __future__ import annotations

from itertools import permutations
from typing import Any

from manyhosts.doctor import network

FAST = 25e6


def hosts(names: str, **more: Any) -> list[dict[str, Any]]:
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, start=1)}
    own = {"interface": "eth0", "mtu": 1500, "names": {}, "ports": [32768, 60999]}
    return [{"name": name, "address": addresses[name], **own, **more} for name in names]


def pairs(names: str, slow: dict[str, float] | None = None, ways: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """All ways between hosts; those of a host in `slow` have that share of the bandwidth; `ways` change one way."""
    found = []
    for one, other in permutations(names, 2):
        share = min((slow or {}).get(one, 1), (slow or {}).get(other, 1))
        way = {"from": one, "to": other, "address": "10.0.0.1", "port": 1, "trouble": ""}
        way |= {"latency_s": 1e-4, "bandwidth": FAST * share, "mtu": 1500}
        found.append({**way, **(ways or {}).get(one + other, {})})
    return found


def whats(names: str, found: list[dict[str, Any]], **more: Any) -> list[str]:
    return [finding.what for finding in network.findings(hosts(names, **more), found)]


def test_ways_that_are_alike_give_no_finding() -> None:
    for names in ("ab", "abc", "abcdef"):
        assert whats(names, pairs(names)) == []


def test_host_with_half_the_bandwidth_is_named_once_with_its_factor() -> None:
    for names in ("abc", "abcd", "abcdefgh"):
        said = whats(names, pairs(names, slow={"b": 0.5}))
        assert said == ["host b sends and takes 2.0 times slower than the others: 100 Mbit/s in place of 200 Mbit/s"]


def test_one_slow_way_between_good_hosts_is_named_and_no_host() -> None:
    said = whats("abcd", pairs("abcd", ways={"bd": {"bandwidth": FAST / 4}}))
    assert said == ["from host b to host d goes 4.0 times less than both can do: 50 Mbit/s in place of 200 Mbit/s"]


def test_of_two_hosts_one_direction_is_held_against_the_other() -> None:
    said = whats("ab", pairs("ab", ways={"ba": {"bandwidth": FAST / 2}}))
    assert said == ["from host b to host a goes 2.0 times less than both can do: 100 Mbit/s in place of 200 Mbit/s"]
    assert whats("ab", pairs("ab", slow={"a": 0.5})) == [], "of two, nobody can say which is the slow one"


def test_loss_is_named_by_host_where_all_of_its_ways_have_it_and_by_way_else() -> None:
    lossy = {"lost": 0.051}
    said = whats("abc", pairs("abc", ways={"ab": lossy, "cb": lossy}))
    assert said == ["5.1% of the packets that are sent to host b get lost, and each of them holds up an exchange"]
    said = whats("abc", pairs("abc", ways={"ba": lossy, "bc": lossy}))
    assert said == ["5.1% of the packets from host b get lost, and each of them holds up an exchange"]
    said = whats("abc", pairs("abc", ways={"ab": lossy}))
    assert said == ["5.1% of the packets from host a to host b get lost, and each of them holds up an exchange"]
    assert whats("ab", pairs("ab", ways={"ab": {"lost": 0.0}, "ba": {"lost": None}})) == []


def test_closed_way_is_named_once_and_makes_exit_code_4() -> None:
    closed = {"trouble": "timed out", "stage": "connect"}
    ways = {name: {**closed, "bandwidth": 0} for name in ("ac", "ca")}
    found = pairs("abc", ways=ways)
    for pair in found:
        if pair["trouble"]:
            del pair["bandwidth"], pair["latency_s"]
    [finding] = network.findings(hosts("abc"), found)
    assert finding.what.startswith("host a cannot open a connection to host c at 10.0.0.1: packets get no answer")
    assert (finding.level, finding.kind) == ("error", "network")


def test_large_packets_that_do_not_arrive_point_to_the_packet_size() -> None:
    found = pairs("ab", ways={"ab": {"trouble": "timed out", "stage": "send"}})
    del found[0]["bandwidth"], found[0]["latency_s"]
    [finding] = network.findings(hosts("ab"), found)
    assert "small packets from host a to host b arrive, large ones do not" in finding.what
    assert "mtu" in finding.fix


def test_slow_answer_of_one_pair_is_named() -> None:
    said = whats("abc", pairs("abc", ways={way: {"latency_s": 0.05} for way in ("ab", "ba")}))
    assert said == ["a word from host a to host b and back takes 50.0 ms, between the others 0.1 ms"]


def test_packet_sizes_that_differ_are_named_with_each() -> None:
    different = hosts("ab")
    different[1]["mtu"] = 9000
    [finding] = network.findings(different, pairs("ab"))
    assert finding.what == "hosts send packets of different sizes (MTU): a 1500, b 9000"


def test_names_that_a_host_does_not_know_are_a_note() -> None:
    [finding] = network.findings([{**hosts("a")[0], "names": {"b": "", "c": "10.0.0.3"}}], [])
    assert (finding.level, finding.what) == ("note", "host a does not know the name b")


def test_name_that_stands_for_another_machine_is_named_with_both_addresses() -> None:
    seen = [{**each, "hostname": each["name"], "address": f"10.0.0.{n}"} for n, each in enumerate(hosts("ab"))]
    seen = [{**each, "interfaces": [{"name": "eth0", "address": each["address"]}]} for each in seen]
    seen[0]["names"] = {"a": "127.0.1.1", "b": "10.0.0.1"}
    assert network.findings(seen, []) == []
    seen[0]["names"]["b"] = "10.0.0.77"
    [finding] = network.findings(seen, [])
    assert (finding.level, finding.check) == ("warning", "names")
    assert finding.what == "host a takes b for 10.0.0.77, which is no address of host b (10.0.0.1)"


def test_hosts_that_have_the_same_name_are_named_together() -> None:
    seen = [{**each, "hostname": "node"} for each in hosts("abc")]
    seen[2]["hostname"] = "other"
    [finding] = network.findings(seen, [])
    assert (finding.level, finding.check) == ("warning", "names")
    assert finding.what.startswith("hosts a, b have the same name, node:")
    assert network.findings([{**each, "address": "10.0.0.1"} for each in seen], []) == [], "one host, listed twice"


def test_ways_through_loopback_are_no_wires() -> None:
    ways = {"ab": {"bandwidth": FAST / 4, "address": "127.0.0.1"}}
    found = [{**pair, "address": "127.0.0.1"} for pair in pairs("abc", ways=ways)]
    assert whats("abc", found) == []
    assert network.suspects(hosts("abc"), found) == []
    assert whats("ab", [pair for pair in found if {pair["from"], pair["to"]} == {"a", "b"}]) == []


def test_only_slow_ways_are_looked_at_twice() -> None:
    assert network.suspects(hosts("abcd"), pairs("abcd")) == []
    found = network.suspects(hosts("abcd"), pairs("abcd", slow={"b": 0.5}))
    assert {pair["from"] + pair["to"] for pair in found} == {"ab", "ba", "bc", "cb", "bd", "db"}


def test_rendezvous_that_fails_is_named_with_the_host_that_says_why() -> None:
    meeting = {"address": "10.0.0.1", "port": 7, "trouble": {"a": "RuntimeError: refused", "b": "timeout"}}
    [finding] = network.of_rendezvous(hosts("ab"), meeting)
    assert (finding.kind, "host a (and 1 more): RuntimeError: refused" in finding.what) == ("network", True)
    [finding] = network.of_rendezvous(hosts("ab"), {"trouble": {}, "right": False})
    assert finding.what == "a sum over all hosts came out wrong"
    assert list(network.of_rendezvous(hosts("ab"), {"trouble": {}, "right": True})) == []


def test_collectives_that_are_wrong_in_silence_are_warned_of() -> None:
    meeting = {"trouble": {}, "right": True, "faults": list(network.FAULTS)}
    found = list(network.of_rendezvous(hosts("ab"), meeting))
    assert [each.level for each in found] == ["warning"] * len(network.FAULTS)
    assert "adds up and does not divide" in found[0].what
