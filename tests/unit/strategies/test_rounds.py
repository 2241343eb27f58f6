"""When workers that step alone meet: the quadratic rule against its formula."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import manyhosts as mh
from manyhosts.errors import ConfigError
from manyhosts.strategies.local_stepping import Rounds, steps_at


def optimizer_at(rate: float) -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)


@given(every=st.integers(1, 50), share=st.floats(0.01, 1.0), most=st.integers(50, 10_000))
def test_round_has_the_length_of_the_published_formula(every: int, share: float, most: int) -> None:
    config = mh.LocalSGD(sync_every=every, sync_rule="quadratic", sync_at_most=most)
    highest = 0.3
    rate = share * highest
    growth = every**0.5 * highest  # the published coefficient, for which a round has `every` steps at the highest rate
    expected = min(most, max(every, (growth / rate) ** 2))
    assert abs(steps_at(config, rate, highest) - expected) <= 1


@pytest.mark.parametrize("config", [mh.LocalSGD(sync_every=8), mh.DiLoCo(sync_every=32)])
def test_fixed_rule_keeps_its_length_at_any_rate(config: mh.LocalSGD | mh.DiLoCo) -> None:
    assert steps_at(config, 1e-9, 1.0) == config.sync_every


def test_rate_that_rises_or_is_zero_gives_the_shortest_and_the_longest_round() -> None:
    config = mh.DiLoCo(sync_every=32, sync_rule="quadratic")
    assert (steps_at(config, 1.0, 1.0), steps_at(config, 0.0, 1.0)) == (32, 16 * 32)


def test_round_under_way_keeps_its_length_while_the_rate_falls() -> None:
    rounds = Rounds(mh.LocalSGD(sync_every=4, sync_rule="quadratic"))
    rounds.saw(optimizer_at(0.1))
    rounds.saw(optimizer_at(0.05))
    assert rounds.length == 4
    rounds.next()
    assert rounds.length == 16


def test_length_and_highest_rate_are_in_snapshots() -> None:
    config = mh.LocalSGD(sync_every=4, sync_rule="quadratic")
    rounds, later = Rounds(config), Rounds(config)
    rounds.saw(optimizer_at(0.1))
    rounds.saw(optimizer_at(0.05))
    rounds.next()
    later.load_state_dict(rounds.state_dict())
    assert later.length == 16
    later.saw(optimizer_at(0.025))
    later.next()
    assert later.length == 64


def test_snapshot_of_a_growing_round_is_taken_up_by_a_fixed_rule_as_its_own_length() -> None:
    rounds = Rounds(mh.LocalSGD(sync_every=4))
    rounds.load_state_dict({"round": 64, "highest_rate": 0.1})
    assert rounds.length == 4


@pytest.mark.parametrize("kind", [mh.LocalSGD, mh.DiLoCo])
@pytest.mark.parametrize("wrong", [{"sync_rule": "cubic"}, {"sync_every": 40, "sync_at_most": 39}])
def test_rule_that_makes_no_sense_is_refused(kind: type, wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**wrong)
    assert list(wrong)[-1] in caught.value.where
