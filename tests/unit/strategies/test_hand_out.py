"""Micro-batches handed out under a bound: in any order of events nobody is further ahead than it says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import manyhosts as mh
from manyhosts.config.settings import Settings
from manyhosts.errors import ConfigError
from manyhosts.strategies.asynchronous.requests import NONE_LEFT, HandOut
from manyhosts.strategies.asynchronous.served import owners_of


@given(
    pieces=st.integers(0, 40),
    bound=st.none() | st.integers(1, 4),
    order=st.lists(st.integers(0, 3), min_size=200, max_size=200),
)
def test_no_worker_is_ahead_by_more_than_the_bound_and_each_piece_is_taken_once(
    pieces: int, bound: int | None, order: list[int]
) -> None:
    """`order`: who acts next. A worker that may not begin does nothing; at the end all act in turn."""
    hand_out, holding, taken = HandOut(pieces, 4, bound), dict.fromkeys(range(4), NONE_LEFT), []
    for worker in [*order, *range(4), *range(4)] + [0, 1, 2, 3] * 100:
        if holding[worker] >= 0:
            hand_out.pushed(worker)
            holding[worker] = NONE_LEFT
        elif hand_out.taken == pieces or hand_out.may_begin(worker):
            holding[worker] = hand_out.take(worker)
            taken += [holding[worker]] * (holding[worker] >= 0)
            ahead = hand_out.clocks[worker] - min(hand_out.clocks)
            if holding[worker] >= 0 and bound is not None:
                assert ahead <= bound, hand_out.clocks
    assert taken == list(range(pieces)), "all of them, whoever waited"
    assert sum(hand_out.clocks) == pieces
    assert bound is None or max(hand_out.most_ahead) <= bound


def test_one_who_waits_is_let_go_when_a_server_fails() -> None:
    hand_out = HandOut(9, 2, 1)
    hand_out.fail(ValueError("no memory"))
    with pytest.raises(RuntimeError, match="no memory"):
        hand_out.take(0)


def test_a_worker_that_only_serves_is_given_nothing_and_holds_no_other_up() -> None:
    hand_out = HandOut(3, 2, 1, first=1)
    assert hand_out.take(0) == NONE_LEFT
    for number in range(3):
        assert hand_out.take(1) == number
        hand_out.pushed(1)
    assert hand_out.take(1) == NONE_LEFT


@given(
    sizes=st.dictionaries(st.text(min_size=1, max_size=3), st.integers(1, 99), min_size=1, max_size=12),
    workers=st.integers(1, 5),
)
def test_servers_keep_about_equally_much(sizes: dict[str, int], workers: int) -> None:
    owners = owners_of(sizes, None, workers)
    keepers = set(owners.values())
    loads = [sum(size for name, size in sizes.items() if owners[name] == rank) for rank in keepers]
    assert max(loads) - min(loads) <= max(sizes.values())
    assert len(keepers) == min(workers, len(sizes))


def test_more_servers_than_parameters_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 servers"):
        owners_of({"weight": 4, "bias": 1}, 3, 4)


@pytest.mark.parametrize(
    ("strategy", "settings", "words"),
    [
        (mh.ParameterServer(), {}, "micro_batch_size"),
        (mh.ParameterServer(), {"micro_batch_size": 4, "clip_gradients": 1.0}, "clip_gradients"),
        (mh.ParameterServer(), {"micro_batch_size": 4, "warmup": "3 steps"}, "warmup"),
        (mh.ParameterServer(), {"micro_batch_size": 4, "on_bad_step": "skip"}, "on_bad_step"),
        (mh.ParameterServer(staleness=0), {"virtual_workers": 2}, "virtual_workers"),
        (mh.ParameterServer(staleness=2), {"micro_batch_size": 4, "precision": "fp16"}, "fp16"),
        (mh.Hogwild(), {"micro_batch_size": 4, "virtual_workers": 2}, "virtual_workers"),
    ],
)
def test_what_does_not_go_with_it_is_refused(strategy: object, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(strategy=strategy, **{"batch_size": 8, **settings})  # type: ignore[arg-type]
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"staleness": -1}, "staleness is -1"),
        ({"servers": 0}, "servers is 0"),
        ({"dedicated": True}, "no one says how many there are"),
        ({"dedicated": True, "servers": 1, "staleness": 0}, "in step each worker has its share"),
    ],
)
def test_numbers_below_their_least_are_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mh.ParameterServer(**given)  # type: ignore[arg-type]
