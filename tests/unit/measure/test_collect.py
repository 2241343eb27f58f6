"""What is made of the answers of several starts; the workers are made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from measured_training import MEASURED

from manyhosts.measure import measure
from manyhosts.measure.measure import Asked, Told, Where, collect, measure_on_hosts, settings_of
from manyhosts.measure.request import Request

ALONE_S = 2.7
"""What a pass of 9 samples takes in `MEASURED`."""


class Hosts:
    """Workers that say what they are asked for. `sharing`: so many hosts are one machine.

    Where the script cuts its model into parts, passes of several workers exchange, and take ten times as long.
    """

    def __init__(self, sharing: int, pass_s: float, strategy: str = "ddp") -> None:
        self.sharing, self.pass_s, self.strategy = sharing, pass_s, strategy

    def __call__(self, request: Request, nodes: int, workers_per_node: int) -> Told:
        reported = Told(lambda _: None)
        if not request.together:
            measured = replace(MEASURED, cores=2).to_json()
            reported.by_kind["measured"] = {"measured": measured, "strategy": {"name": self.strategy}, "devices": 0}
            return reported
        in_parts = settings_of(asked(), request).get("strategy", self.strategy) == "fsdp"
        said: dict[str, Any] = {
            "samples": 9, "pass_s": self.pass_s * (10 if in_parts else 1), "latency_s": 0.001,
            "bandwidth": 1000.0, "owners_bandwidth": 800.0,
            "of_one_machine": self.sharing, "pass_spread_s": 0.2 * self.pass_s, "spread": 0.05,
            "processor_s_per_message": 0.01, "processor_s_per_byte": 1e-9,
            "steps": {"none": float(nodes * workers_per_node)}, "full_step_s": 7.0,
        }  # fmt: skip
        reported.by_kind["together"] = said
        return reported


def asked(**changes: Any) -> Asked:
    return Asked(script="train.py", folder=Path("/"), nodes=(1, 4), **changes)


def test_hosts_that_share_a_machine_are_known_with_what_their_passes_cost_each_other() -> None:
    found = collect(asked(), Hosts(4, 2 * ALONE_S), between=True)
    assert found.hosts_per_machine == 4
    assert (found.measured.contention, found.measured.contention_of_hosts) == ({}, {4: pytest.approx(2.0)})
    assert found.measured.contention_spread == pytest.approx(0.2)
    assert found.between is not None
    assert found.between.spread == 0.05
    assert (found.between.processor_s_per_message, found.between.processor_s_per_byte) == (0.01, 1e-9)


def test_workers_of_a_script_that_cuts_its_model_are_timed_with_all_of_it() -> None:
    found = collect(asked(workers_per_node=(1, 2)), Hosts(1, ALONE_S, "fsdp"))
    assert found.measured.contention == {2: 1.0}
    assert found.strategy == {"name": "fsdp"}
    given = asked(settings={"zero": "2", "micro_batch_size": "4"})
    assert "zero" in settings_of(given, Request())
    whole = settings_of(given, Request(uncut=True))
    assert (whole["strategy"], whole["micro_batch_size"], "zero" in whole) == ("ddp", "4", False)


@pytest.mark.parametrize(("pass_s", "times"), [(3 * ALONE_S, 3.0), (372 * ALONE_S, 8.0)])
def test_what_workers_take_from_each_other_is_no_more_than_they_can(pass_s: float, times: float) -> None:
    """A neighbour had the cores when workers were 372 times as slow: that is no property of these hosts."""
    found = collect(asked(), Hosts(4, pass_s), between=True)
    assert found.measured.contention_of_hosts == {4: pytest.approx(times)}


def test_hosts_of_their_own_share_nothing() -> None:
    found = collect(asked(), Hosts(1, 2 * ALONE_S), between=True)
    assert found.hosts_per_machine == 1
    assert not found.measured.contention_of_hosts


def test_every_number_of_workers_that_was_tried_keeps_its_own_network_and_steps() -> None:
    found = collect(replace(asked(workers_per_node=(1, 2)), nodes=(1, 2, 3, 4)), Hosts(2, 2 * ALONE_S), between=True)
    assert [(each.nodes, each.workers_per_node, each.hosts_per_machine) for each in found.measured.tried] == [
        (1, 2, 1), (2, 1, 2), (4, 1, 2)
    ]  # fmt: skip
    assert [each.steps for each in found.measured.tried] == [{"none": 2.0}, {"none": 2.0}, {"none": 4.0}]
    assert [each.network for each in found.measured.tried[:2]] == [found.within, found.between]
    assert found.within != found.between, "two workers of a host share what both send"


def test_several_workers_of_a_host_are_no_hosts_of_one_machine() -> None:
    found = collect(asked(workers_per_node=(1, 2)), Hosts(2, ALONE_S))
    assert found.hosts_per_machine == 1
    assert found.measured.contention == {2: 1.0}
    assert found.within is not None
    assert found.within.bytes_per_second == 2000
    assert found.within.owners_bytes_per_second == 1600


@pytest.mark.parametrize("hosts", [("a", "b", "c", "d"), ()])
def test_torch_stays_loaded_on_named_hosts_from_one_start_to_the_next(
    hosts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other engines end what a start has left."""
    starts, workers = [], Hosts(1, ALONE_S)

    def heard(words: list[str], _log: Path, asked: Asked, _tell: Any) -> Told:
        nodes = words[words.index("--hosts") + 1].count(",") + 1 if hosts else int(words[words.index("--nodes") + 1])
        starts.append((nodes, "--warm" in words, float(asked.environment["MANYHOSTS_WARM_S"])))
        return workers(Request(together=nodes > 1), nodes, 1)

    monkeypatch.setattr(measure, "_heard", heard)
    where = Where(program=["manyhosts"], words=[], hosts=hosts)
    measure_on_hosts(replace(asked(), nodes=(1, 2, 4), folder=Path("/tmp")), where, lambda _: None)
    warm = bool(hosts)
    assert starts == [(1, warm, 30.0), (4, warm, 30.0), (2, warm, 0.1)]


class Lottery(Hosts):
    """Another start of the same workers finds the cores otherwise."""

    starts = 0

    def __call__(self, request: Request, nodes: int, workers_per_node: int) -> Told:
        reported = super().__call__(request, nodes, workers_per_node)
        if request.together:
            self.starts += 1
            said = reported.by_kind["together"]
            said["steps"] = {"none": 1.0, "powersgd": 3.0} if self.starts == 1 else {"none": 2.0}
            said["full_step_s"] = 7.0 if self.starts == 1 else 0.0
            self.seconds = request.seconds
        return reported


def test_workers_of_one_machine_are_started_twice_and_the_mean_is_taken() -> None:
    start = Lottery(1, ALONE_S)
    found = collect(asked(workers=(1, 2), workers_per_node=(1, 2)), start)
    assert start.starts == 2
    [tried] = found.measured.tried
    assert tried.steps == {"none": 1.5}, "what both had time for"
    assert tried.full_step_s == 0.0
    once = Lottery(1, ALONE_S)
    collect(asked(workers=(1, 4)), once, between=True)
    assert once.starts == 1, "hosts take too long to start"
    assert start.seconds == pytest.approx(once.seconds / 2)
