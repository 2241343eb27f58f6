"""`mh.Order`: each sample once per epoch, whoever reads which."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhosts as mh
from manyhosts.errors import ConfigError


def epoch_of(order: mh.Order) -> list[list[int]]:
    return list(order)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_shares_of_all_workers_are_the_global_batches_of_one(size: int, drop_last: bool) -> None:
    def made(rank: int, count: int) -> mh.Order:
        return mh.Order(21, batch_size=6, seed=5, drop_last=drop_last, rank=rank, size=count)

    alone = epoch_of(made(0, 1))
    shares = [epoch_of(made(rank, size)) for rank in range(size)]
    assert [list(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)] == alone
    assert len(alone) == len(made(0, 1)) == (3 if drop_last else 4)
    assert sorted(list(chain.from_iterable(alone))) == list(range(21)) or drop_last


def test_weights_make_the_mean_of_the_workers_means_that_of_the_batch() -> None:
    orders = [mh.Order(20, batch_size=7, rank=rank, size=3) for rank in range(3)]
    for _ in range(3):
        counts = [len(next(iter(order))) for order in orders]
        assert [order.weight for order in orders] == [3 * count / sum(counts) for count in counts]
        for order in orders:
            order.advance()


def test_it_goes_on_where_it_was_on_other_workers_and_with_another_batch_size() -> None:
    first = mh.Order(20, batch_size=6, rank=0, size=1)
    taken = next(iter(first))
    first.advance()
    second = mh.Order(20, batch_size=4, rank=0, size=1)
    second.load_state_dict(first.state_dict())
    rest = epoch_of(second)
    assert sorted(taken + list(chain.from_iterable(rest))) == list(range(20))
    assert rest[0] == list(chain.from_iterable(epoch_of(first)))[:4]


def test_epoch_that_is_read_again_without_a_step_is_refused() -> None:
    order = mh.Order(20, batch_size=6, rank=0, size=1)
    epoch_of(order)
    with pytest.raises(ConfigError, match="no step was counted") as refused:
        epoch_of(order)
    assert "order.advance()" in refused.value.fix
    for _ in range(4):
        order.advance()
    assert len(epoch_of(order)) == 4, "the next epoch"


def test_each_epoch_has_its_order() -> None:
    order = mh.Order(20, batch_size=20, rank=0, size=1)
    first = epoch_of(order)
    order.advance()
    assert order.epoch == 1
    assert epoch_of(order) != first


def test_another_order_and_batches_too_small_for_all_workers_are_refused() -> None:
    order = mh.Order(20, batch_size=6, rank=0, size=1)
    with pytest.raises(ConfigError, match="seed 1"):
        order.load_state_dict({**order.state_dict(), "seed": 1})
    with pytest.raises(ConfigError, match="2 samples, and there are 3 workers"):
        mh.Order(20, batch_size=6, rank=0, size=3)
    with pytest.raises(ConfigError, match="batches of 0"):
        mh.Order(20, batch_size=0)


def test_step_is_counted_once_and_of_samples_that_were_read() -> None:
    order = mh.Order(20, batch_size=6, rank=0, size=1)
    for _ in order:
        order.advance()
        with pytest.raises(ConfigError, match="and no more was read"):
            order.advance()
    assert order.epoch == 1


def test_epoch_of_which_some_steps_were_counted_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    order = mh.Order(20, batch_size=5, rank=0, size=1)
    for number, _ in enumerate(order):
        if number % 2:
            order.advance()
    assert len(epoch_of(order)) == 2
    assert "epoch 0 was handed out to its end, and steps of 10 of 20 samples were counted" in capsys.readouterr().err


def test_rest_of_an_epoch_that_other_workers_cannot_share_is_refused() -> None:
    first = mh.Order(100, batch_size=20, rank=0, size=2)
    for _ in zip(range(3), first, strict=False):
        first.advance()
    second = mh.Order(100, batch_size=13, rank=1, size=2)
    with pytest.raises(ConfigError, match="a batch of an epoch has 1 samples, and there are 2 workers"):
        second.load_state_dict(first.state_dict())


def test_whether_the_last_batch_is_left_out_is_a_part_of_the_order() -> None:
    kept = mh.Order(20, batch_size=6, drop_last=True, rank=0, size=1).state_dict()
    with pytest.raises(ConfigError, match="had drop_last True"):
        mh.Order(20, batch_size=6, rank=0, size=1).load_state_dict(kept)


def test_order_that_comes_as_the_sampler_of_single_samples_is_refused() -> None:
    loader = DataLoader(TensorDataset(torch.arange(20)), batch_size=5, sampler=mh.Order(20, batch_size=5))
    with pytest.raises(ConfigError, match="comes as the sampler of a DataLoader"):
        next(iter(loader))


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ({"rank": 5, "size": 2}, "rank is 5, and size 2"),
        ({"rank": -1}, "rank is -1, and size 1"),
        ({"rank": 1}, "rank is 1, and size 1"),
        ({"size": 0}, "rank is 0, and size 0"),
        ({"rank": "a", "size": 2}, "rank is of the type str"),
        ({"seed": "a"}, "seed is of the type str"),
        ({"seed": 1.5}, "seed is of the type float"),
        ({"shuffle": "no"}, "shuffle is of the type str"),
        ({"batch_size": True}, "batch_size is of the type bool"),
    ],
    ids=str,
)
def test_values_that_make_no_sense_are_refused(given: Any, what: str) -> None:
    with pytest.raises(ConfigError) as refused:
        mh.Order(10, **{"batch_size": 4, **given})
    assert refused.value.what == what


def test_numbers_of_numpy_are_taken_and_plain_in_its_state() -> None:
    taken = mh.Order(np.int64(10), batch_size=np.int64(4), seed=np.int64(3), shuffle=np.bool_(False), rank=0, size=1)  # type: ignore[arg-type]
    assert {type(each) for each in taken.state_dict().values()} == {int, bool}
