"""What the head makes of what its workers have seen: one line where they do not train together, else nothing."""

from __future__ import annotations

from typing import Any

import pytest

from manyhosts.control.head.output import Notices


def account(**changed: Any) -> dict[str, Any]:
    """What a worker of two tells that trains as it should, and has seen samples that only it has."""
    usual = {"workers": 2, "world": 2, "apart": False, "optimizer": True, "shapes": 7, "weights": "w", "libraries": []}
    return {**usual, "steps": 3, "ended": False, "samples": {"batch 0": "s"}, **changed}


def heard(first: dict[str, Any], second: dict[str, Any]) -> str:
    said: list[str] = []
    notices = Notices(said.append)
    notices.add_report(0, 0, first)
    assert said == [], "nothing is said before all have been heard"
    notices.add_report(0, 1, second)
    return "\n".join(said)


OTHER = {"samples": {"batch 0": "t"}}


def test_workers_that_train_together_hear_nothing() -> None:
    assert heard(account(), account(**OTHER)) == ""


def test_workers_without_a_group_train_alone() -> None:
    words = heard(account(world=0), account(world=1, **OTHER))
    assert words.startswith("manyhosts: each of the 2 workers trains alone: ")


@pytest.mark.parametrize(
    ("library", "remedy"),
    [
        ("accelerate", "ACCELERATE_USE_CPU=true"),
        ("lightning", "give Fabric, or the Trainer, devices="),
        ("pytorch_lightning", "give the Trainer devices="),
    ],
)
def test_remedy_is_in_the_words_of_the_library(library: str, remedy: str) -> None:
    lonely = account(world=0, libraries=[library])
    assert remedy in heard(lonely, lonely)


def test_groups_that_are_smaller_than_the_run_are_named() -> None:
    four = [account(workers=4, world=2, samples=None) for _ in range(4)]
    said: list[str] = []
    notices = Notices(said.append)
    for rank, each in enumerate(four):
        notices.add_report(0, rank, each)
    assert len(said) == 1
    assert "the 4 workers train in groups of 2 that know nothing of each other" in said[0]


def test_different_weights_are_named_whatever_is_known_of_the_samples() -> None:
    for samples in (None, {"batch 0": "t"}):
        first = account(samples={"batch 0": "s"} if samples else None)
        assert "began with different weights" in heard(first, account(weights="x", samples=samples))


def test_same_samples_are_named() -> None:
    assert "all 2 workers train on the same samples" in heard(account(), account())


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(account(weights="x"), id="same samples and other weights: each may hold a part of the model"),
        pytest.param(account(weights="x", samples=None), id="one reads nothing: it may be a later stage"),
        pytest.param(account(shapes=8, weights="x", **OTHER), id="other shapes"),
        pytest.param(account(apart=True), id="parts of a tensor, or other ways to train together"),
        pytest.param(account(weights=None), id="weights that could not be read"),
        pytest.param(account(steps=0, world=0), id="one that makes no step"),
    ],
)
def test_what_may_be_right_is_not_called_wrong(second: dict[str, Any]) -> None:
    assert heard(account(), second) == ""


def test_it_is_said_once_also_after_all_have_been_started_again() -> None:
    said: list[str] = []
    notices = Notices(said.append)
    for generation in (0, 1):
        for ended in (False, True):
            for rank in (0, 1):
                notices.add_report(generation, rank, account(world=0, ended=ended))
    notices.report_end()
    assert len(said) == 1


def test_accounts_of_workers_that_were_given_up_are_not_mixed_with_those_of_their_successors() -> None:
    said: list[str] = []
    notices = Notices(said.append)
    notices.add_report(0, 0, account())
    notices.add_report(1, 1, account())
    assert said == []


@pytest.mark.parametrize(
    ("changed", "is_said"),
    [({}, True), ({"optimizer": False}, False), ({"steps": 1}, False), ({"ended": False}, False)],
)
def test_end_without_a_step_is_told_where_an_optimizer_was_made(changed: dict[str, Any], is_said: bool) -> None:
    said: list[str] = []
    notices = Notices(said.append)
    for rank in (0, 1):
        notices.add_report(0, rank, {**account(steps=0, ended=True, samples=None), **changed})
    notices.report_end()
    assert ["without one optimizer step" in line for line in said] == [True] * is_said


def test_run_that_nobody_told_of_ends_in_silence() -> None:
    Notices(pytest.fail).report_end()
