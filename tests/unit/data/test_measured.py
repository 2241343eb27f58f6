"""Loader processes chosen by measuring: how many, and that the samples stay the same."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from manyhosts.data import measured
from manyhosts.data.cut import Cut, Cuts
from manyhosts.data.fetch import Fetcher
from manyhosts.data.measured import MEASURED, Timed, loaders_for, most_here
from manyhosts.data.order import Order, Position
from manyhosts.data.steps import LoadedPiece, Loader, Step


class Slow(Dataset[torch.Tensor]):
    """Samples that are drawn again each time they are read, each after a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.seconds)
        return index + torch.rand(2)


@pytest.mark.parametrize(
    ("fetch_s", "rest_s", "count"),
    [
        (0.0, 0.1, 0),
        (0.001, 0.1, 0),
        (0.01, 0.1, 1),
        (0.08, 0.1, 1),
        (0.1, 0.1, 2),
        (0.3, 0.1, 4),
        (9.0, 0.1, 16),
        (0.1, 0.0, 16),
    ],
)
def test_processes_keep_pace_with_the_steps(fetch_s: float, rest_s: float, count: int) -> None:
    assert loaders_for(fetch_s, rest_s, most=16) == count


def test_fetching_that_waits_leaves_room_for_more_processes_than_fetching_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert [most_here(busy) for busy in (1.0, 0.5, 0.25, 0.0)] == [2, 4, 8, 16]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert most_here(1.0) == 1


class Clock:
    """Continues when a test says so."""

    def __init__(self) -> None:
        self.now, self.busy = 0.0, 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.busy

    def pass_by(self, seconds: float, *, busy: float) -> None:
        self.now += seconds
        self.busy += busy


def test_fetching_and_the_rest_of_a_step_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measured, "time", clock)

    def items() -> Iterator[int]:
        for number in range(3):
            clock.pass_by(5.0, busy=2.0)
            yield number

    timed = Timed(items())
    for _ in timed:
        clock.pass_by(20.0, busy=20.0)
    assert (timed.fetching, timed.rest, timed.busy_s) == ([5.0] * 3, [20.0] * 3, 6.0)


def steps_of(processes: Any, seconds: float, count: int = 20) -> tuple[list[Step], Loader, list[str]]:
    said: list[str] = []
    loader = Loader(Fetcher(Slow(seconds), seed=3, name="train"), processes=processes, pin=False, say=said.append)
    order = Order(30, batch=4, seed=3, shuffle=True, drop_last=False)
    found = []
    for step in islice(loader.steps(order, Cuts(Cut(1, 0, 1, 3)), Position(0)), count):
        pieces = [LoadedPiece(piece.plan, piece.batch) for piece in step.pieces]  # as a forward pass asks for them
        found.append(replace(step, pieces=pieces))
        time.sleep(0.01)
    return found, loader, said


@pytest.mark.parametrize("seconds", [0.0, 0.02])
def test_number_that_was_chosen_changes_no_sample_and_no_random_number(seconds: float) -> None:
    here, _, _ = steps_of(0, 0.0)
    chosen, loader, said = steps_of("auto", seconds)
    assert [step.after for step in here] == [step.after for step in chosen]
    for one, other in zip(here, chosen, strict=True):
        for mine, theirs in zip(one.pieces, other.pieces, strict=True):
            assert torch.equal(mine.batch, theirs.batch)
    assert [text.startswith(f"loader processes: {loader.processes} ") for text in said] == [True]


def test_dataset_that_is_slower_than_the_steps_gets_processes() -> None:
    _, loader, _ = steps_of("auto", 0.02)  # three samples a piece, 60 ms, next to 10 ms
    assert loader.processes not in ("auto", 0)


def test_run_that_is_over_before_anything_was_measured_chooses_nothing() -> None:
    found, loader, said = steps_of("auto", 0.0, count=MEASURED // 2)
    assert len(found) == MEASURED // 2
    assert (loader.processes, said) == ("auto", [])
