"""Numbers that travel among gradients arrive with every bit, whatever the gradients' dtype rounds to."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.communication.buckets import elements_for, pack, unpack

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def summed(rows: list[list[float]], dtype: torch.dtype) -> list[float]:
    """What arrives, where worker r takes `rows[r]` along in buckets of `dtype` that are added element by element."""
    workers, numbers = len(rows), len(rows[0])
    total = torch.zeros(elements_for(numbers, workers), dtype=dtype)
    for rank, row in enumerate(rows):
        packed = torch.full((elements_for(numbers, workers),), 7, dtype=dtype)  # of the step before
        pack(packed, torch.tensor(row, dtype=torch.float64), rank)
        total += packed
    return unpack(total, workers).tolist()


@given(
    st.integers(1, 4).flatmap(
        lambda numbers: st.lists(
            st.lists(st.floats(), min_size=numbers, max_size=numbers),
            min_size=1,
            max_size=9,
        )
    ),
    st.sampled_from(DTYPES),
)
def test_sums_are_those_of_the_numbers_in_the_order_of_ranks(rows: list[list[float]], dtype: torch.dtype) -> None:
    expected = torch.tensor(rows, dtype=torch.float64).sum(0).tolist()
    for found, wanted in zip(summed(rows, dtype), expected, strict=True):
        assert math.isnan(found) if math.isnan(wanted) else struct.pack("d", found) == struct.pack("d", wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_byte_survives_a_sum(dtype: torch.dtype) -> None:
    numbers = [struct.unpack(">d", bytes(range(first, first + 8)))[0] for first in range(0, 256, 8)]
    assert summed([[0.0] * 32, numbers, [0.0] * 32], dtype) == numbers


@pytest.mark.parametrize("dtype", DTYPES)
def test_number_that_is_none_is_none_everywhere_and_harms_no_other(dtype: torch.dtype) -> None:
    lost, other = summed([[math.inf, 1.5], [-math.inf, 2.0**-40]], dtype)
    assert math.isnan(lost)
    assert other == 1.5 + 2.0**-40
