"""Who is called slow, by which factor, and when."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from manyhosts.cluster.rounds import rounds
from manyhosts.events import WorkerTimes
from manyhosts.training.telemetry import pace
from manyhosts.training.telemetry.pace import Change, cause, factors_of_links, factors_of_workers, sentence


def part(
    host: str, compute_s: float, samples: int = 10, data_s: float = 0.0, step_s: float = 0.0, hot: float = 0.0
) -> WorkerTimes:
    """One worker, whose rank is yet to be given."""
    return WorkerTimes(
        rank=0, host=host, samples=samples, total=step_s, compute=compute_s, communication_exposed=0.0,
        data_wait=data_s, snapshot_stall=0.0, hot=hot,
    )  # fmt: skip


def factors(*parts: WorkerTimes) -> dict[str, float]:
    return factors_of_workers(ranked(parts))


def ranked(parts: Sequence[WorkerTimes]) -> list[WorkerTimes]:
    return [replace(each, rank=rank) for rank, each in enumerate(parts)]


def test_slow_host_has_its_factor_and_the_others_none() -> None:
    found = factors(part("a", 0.1), part("b", 0.21), part("c", 0.1), part("d", 0.09))
    assert found["host b"] == pytest.approx(2.1)
    assert all(factor <= 1.12 for who, factor in found.items() if who != "host b")


def test_what_is_no_tenth_of_a_step_is_not_slowness() -> None:
    parts = [part(host, 0.02 if host == "b" else 0.01, samples=1, step_s=0.2) for host in "abc"]
    assert max(factors(*parts).values()) <= 1, "the network takes the rest of the step"
    assert factors(*(replace(each, total=0.05) for each in parts))["host b"] == pytest.approx(2)


def test_of_two_hosts_the_slower_one_is_known() -> None:
    found = factors(part("a", 0.3), part("b", 0.1))
    assert found == {"host a": pytest.approx(3), "host b": pytest.approx(1 / 3)}


def test_one_slow_worker_of_a_host_is_named_and_not_the_host() -> None:
    found = factors(part("a", 0.1), part("a", 0.4), part("b", 0.1), part("b", 0.1))
    assert found["rank 1 on host a"] == pytest.approx(4)
    assert max(factor for who, factor in found.items() if who != "rank 1 on host a") <= 1


def test_host_all_of_whose_workers_are_slow_is_named_and_they_are_not() -> None:
    found = factors(part("a", 0.1), part("a", 0.1), part("b", 0.3), part("b", 0.3))
    assert found["host b"] == pytest.approx(3)
    assert max(factor for who, factor in found.items() if who != "host b") <= 1


def test_more_samples_are_not_slowness_and_fewer_do_not_hide_it() -> None:
    by_samples = factors(part("a", 0.2, samples=2), part("b", 0.1, samples=1), part("c", 0.1, samples=1))
    assert max(by_samples.values()) <= 1, "twice the samples in twice the time"
    by_overhead = factors(part("a", 0.1, samples=2), part("b", 0.1, samples=1))
    assert max(by_overhead.values()) <= 1, "so few samples that only the step itself takes time"
    assert factors(part("a", 0.1), part("b", 0.1, samples=0)) == {}, "who has no samples is no measure"


def test_link_of_a_host_has_its_factor_on_three_hosts_and_four() -> None:
    for hosts in ("abc", "abcd"):
        seconds = {pair: 0.1 if "c" in pair else 0.0125 for pair in itertools.combinations(hosts, 2)}
        found = factors_of_links(seconds)
        assert found["the link to host c"] == pytest.approx(8)
        assert max(factor for who, factor in found.items() if who != "the link to host c") <= 1
    assert factors_of_links({("a", "b"): 1.0}) == {}, "of two hosts nobody knows whose link it is"


def test_host_that_computes_slowly_answers_late_and_nothing_is_said_of_its_link() -> None:
    seconds = {pair: 0.1 if "c" in pair else 0.0125 for pair in itertools.combinations("abcd", 2)}
    assert max(factors_of_links(seconds, {"host c": 3.0, "host a": 0.4}).values()) <= 1


def test_way_between_two_hosts_whose_links_are_well_is_named_as_such() -> None:
    seconds = {pair: 0.01 for pair in itertools.combinations("abcd", 2)} | {("b", "d"): 0.05}
    found = factors_of_links(seconds)
    assert found["the link between hosts b and d"] == pytest.approx(5)
    assert max(factor for who, factor in found.items() if who != "the link between hosts b and d") <= 1


def test_it_is_said_once_when_it_is_sure_and_once_when_it_is_over() -> None:
    judge = pace.SlownessDetector(slow=1.5, times=3)
    said = [judge.hear({"host b": factor}) for factor in (2, 1.4, 2, 2, 2.2, 2.1, 1.3, 2, 1.1, 1.1, 1.1, 1.0)]
    assert said[:4] == [[], [], [], []], "three in a row"
    assert said[4] == [Change("host b", 2)]
    assert said[5:10] == [[]] * 5
    assert said[10] == [Change("host b", 1.0)]
    assert said[11] == []
    assert not judge.is_unsure
    judge.hear({"host b": 2})
    assert judge.is_unsure


def test_noise_of_busy_machines_names_nobody() -> None:
    """Medians of windows that differ by a third either way, as on machines with thirty programs for each core."""
    chance = random.Random(1)
    judge = pace.SlownessDetector(pace.SLOW, 3)
    for _ in range(2000):
        parts = [part(host, 0.1 * chance.uniform(0.8, 1.2)) for host in "abcd"]
        assert judge.hear(factors(*parts)) == []


def test_each_cause_has_its_sentence_and_who_is_well_again_has_none() -> None:
    parts = ranked([part("a", 0.1), part("b", 0.21), part("c", 0.1, data_s=0.3), part("d", 0.21, hot=0.4)])

    def said(who: str, factor: float) -> tuple[str, str]:
        change = Change(who, factor)
        return cause(change, parts), sentence(change, cause(change, parts))

    assert said("host b", 2.1) == (
        "compute", "host b computes 2.1 times slower than the others: every step waits for it"
    )  # fmt: skip
    assert said("host c", 4.0) == (
        "data", "host c takes 4.0 times as long as the others for a step: it waits for its data"
    )  # fmt: skip
    assert said("rank 3 on host d", 2.1)[0] == "thermal"
    assert "slowed down by heat" in said("rank 3 on host d", 2.1)[1]
    assert said("the link to host c", 8.0) == (
        "network", "the link to host c is 8.0 times slower than the others: every step waits for it"
    )  # fmt: skip
    assert said("host b", 1.0) == ("", "host b is as fast as the others again")
    assert said("the link to host c", 1.0) == ("", "the link to host c is as fast as the others again")


def test_heat_that_all_hosts_have_is_not_why_one_is_slow() -> None:
    parts = ranked([part("a", 0.1, hot=0.5), part("b", 0.3, hot=0.55), part("c", 0.1, hot=0.5)])
    assert cause(Change("host b", 3.0), parts) == "compute"


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8])
def test_every_pair_has_one_round_and_nobody_is_in_two_pairs_of_one(count: int) -> None:
    found = rounds(count)
    assert sorted(itertools.chain(*found)) == list(itertools.combinations(range(count), 2))
    assert all(len(set(itertools.chain(*pairs))) == 2 * len(pairs) for pairs in found)
    assert len(found) == count - 1 + count % 2
