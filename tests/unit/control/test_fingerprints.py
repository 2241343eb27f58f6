"""Fingerprints: equal for equal tensors, different for others, of whatever a batch is made of."""

from __future__ import annotations

import numpy
import pytest
import torch

from manyhosts.control.agent.script_faults import Fingerprints, tensors_in


def print_of(*tensors: torch.Tensor, words: tuple[str, ...] = ()) -> str:
    fingerprints = Fingerprints()
    fingerprints.add("it", tensors, words)
    return fingerprints.read()["it"]


def test_equal_values_have_equal_prints_and_one_other_value_changes_them() -> None:
    one = torch.arange(1000.0)
    other = one.clone()
    assert print_of(one) == print_of(other)
    other[500] += 1
    assert print_of(one) != print_of(other)


def test_shape_and_type_and_words_count() -> None:
    zeros = torch.zeros(4, 6)
    fingerprints = {
        print_of(zeros),
        print_of(zeros.reshape(6, 4)),
        print_of(zeros.int()),
        print_of(zeros, words=("cat",)),
    }
    assert len(fingerprints) == 4


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64, torch.complex64, torch.int8])
def test_every_type_of_number_is_read(dtype: torch.dtype) -> None:
    assert print_of(torch.ones(3).to(dtype)) != print_of(torch.zeros(3).to(dtype))


def test_large_tensors_are_sampled_over_their_whole_length() -> None:
    torch.manual_seed(0)
    large = torch.rand(3 << 20)
    assert print_of(large) == print_of(large.clone())
    other = large.clone()
    other[len(other) // 2 :] = torch.rand(len(other) - len(other) // 2)
    assert print_of(large) != print_of(other)


def test_what_is_taken_is_what_was_there_then() -> None:
    fingerprints, tensor = Fingerprints(), torch.zeros(3)
    fingerprints.add("it", [tensor])
    tensor += 1
    assert fingerprints.read()["it"] == print_of(torch.zeros(3))


def test_scalars_and_tensors_that_lie_strangely_in_memory_are_read() -> None:
    strange = torch.arange(12.0).reshape(3, 4).T
    assert print_of(strange) == print_of(strange.contiguous())
    assert print_of(torch.tensor(1.0)) != print_of(torch.tensor(2.0))


def test_of_many_pieces_under_one_name_the_first_are_enough() -> None:
    fingerprints = Fingerprints()
    for _ in range(1000):
        fingerprints.add("it", [torch.zeros(3)])
    assert len(fingerprints._pieces) < 10


def test_tensors_are_found_in_whatever_a_batch_is_made_of() -> None:
    batch = {"a": [torch.zeros(1), (numpy.ones(2), "word")], "b": {"c": 3}, "d": object()}
    tensors, words = tensors_in(batch)
    assert [each.tolist() for each in tensors] == [[0.0], [1.0, 1.0]]
    assert words == ["'word'", "3"]
