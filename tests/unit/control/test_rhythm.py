"""Silences of hosts: those that are told, and those that are usual, whatever the network does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhosts.control.agent.head_connection import EVERY_S
from manyhosts.control.head.missing_hosts import LEAST_S, Rhythm

Latency = Callable[[random.Random], float]


def arrivals(latency: Latency, seconds: float, seed: int) -> Iterator[float]:
    """When signs of life come that are sent every `EVERY_S` over one connection: none overtakes another."""
    draw, newest = random.Random(seed), 0.0
    for number in range(int(seconds / EVERY_S)):
        newest = max(newest, number * EVERY_S + latency(draw))
        yield newest


def reported(latency: Latency, seconds: float, seed: int) -> list[float]:
    """The silences that are told, where somebody looks all the time."""
    rhythm, last, found = Rhythm(), 0.0, []
    for now in arrivals(latency, seconds, seed):
        if now - last > rhythm.overdue_s:
            found.append(now - last)
        rhythm.note(now, now - last)
        last = now
    return found


def starved(draw: random.Random) -> float:
    """What a process waits for its turn among thirty others on a core, with slices of 4 ms; at times twice over."""
    return sum(draw.expovariate(1 / 0.004) for _ in range(30)) * (3 if draw.random() < 0.01 else 1)


def lossy(draw: random.Random) -> float:
    """A link that loses one packet in fifty, which is sent again after 0.2 s, 0.4 s, ..."""
    tries = 0
    while draw.random() < 0.02:
        tries += 1
    return 0.001 + 0.2 * (2**tries - 1)


def slow(draw: random.Random) -> float:
    return draw.uniform(0, 1.5)


@pytest.mark.parametrize("latency", [starved, lossy, slow])
def test_no_false_alarm_in_ten_minutes_on_bad_hosts_and_links(latency: Latency) -> None:
    assert [reported(latency, 600, seed) for seed in range(10)] == [[]] * 10


@pytest.mark.parametrize("alpha", [1.1, 1.5, 2.5])
def test_a_heavy_tail_is_told_of_rarely(alpha: float) -> None:
    """Delays without a mean to speak of: what is told are the few that surpass all others of ten minutes."""
    counts = [len(reported(lambda draw: 0.05 * draw.paretovariate(alpha), 3600, seed)) for seed in range(10)]
    assert max(counts) <= 12, "two in ten minutes"


@given(st.lists(st.floats(0.0, 1000.0), max_size=200))
def test_ever_longer_silences_are_told_ever_more_rarely(silences: list[float]) -> None:
    rhythm, count = Rhythm(), 0
    for silence in silences:
        count += silence > rhythm.overdue_s
        rhythm.note(0.0, silence)
    longest = max([LEAST_S, *silences])
    assert count <= 1 + math.log(longest / LEAST_S, 3) + 1e-9


@given(st.floats(0.0, 0.2), st.integers(0, 1000))
@settings(max_examples=30)
def test_on_a_quiet_network_silence_is_worth_a_word_within_three_seconds(jitter: float, seed: int) -> None:
    rhythm, last = Rhythm(), 0.0
    for now in arrivals(lambda draw: draw.uniform(0, jitter), 300, seed):
        rhythm.note(now, now - last)
        last = now
    look_s = 0.25
    assert rhythm.overdue_s + look_s < 3 - (0.0 if jitter < 0.1 else -EVERY_S)


def test_what_was_more_than_ten_minutes_ago_is_forgotten() -> None:
    rhythm = Rhythm()
    rhythm.note(0.0, 9.0)
    assert rhythm.overdue_s == 27.0
    for second in range(1, 700):
        rhythm.note(float(second), 0.5)
    assert rhythm.overdue_s == LEAST_S
