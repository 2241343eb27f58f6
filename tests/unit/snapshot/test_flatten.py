"""States of any shape, taken apart and put together again."""

from __future__ import annotations

import json
import math
from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manyhosts.errors import SnapshotError
from manyhosts.records.contents import unflatten
from manyhosts.snapshot.flatten import flatten
from manyhosts.snapshot.tensors import bytes_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool]
DTYPES += [torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2]


def tensor_of(seed: int, dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    count = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
    content = torch.randint(
        0, 2 if dtype is torch.bool else 256, (count,), generator=torch.Generator().manual_seed(seed)
    )
    return content.to(torch.uint8).view(dtype).reshape(shape)


TENSORS = st.builds(tensor_of, st.integers(0, 9), st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.none() | st.booleans() | st.sampled_from(["$tensor", "$", "a.b", "__metadata__"])
STATES = st.recursive(
    SCALARS | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "a.b"]), inner, max_size=3)
    ),
    max_leaves=12,
)


def through_json(state: Any) -> Any:
    apart = flatten(state)
    return unflatten(json.loads(json.dumps(apart.nodes, allow_nan=False)), apart.tensors)


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert [(type(key), key) for key in one] == [(type(key), key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert bytes_of(one.contiguous()) == bytes_of(other.contiguous())
    elif isinstance(one, float):
        assert one == other or (math.isnan(one) and math.isnan(other))
        assert math.copysign(1, one) == math.copysign(1, other) or math.isnan(one)
    else:
        assert one == other


@settings(max_examples=200)
@given(state=st.dictionaries(KEYS, STATES, max_size=4))
def test_any_nested_state_comes_back_the_same(state: dict[Any, Any]) -> None:
    assert_same(state, through_json(state))


def test_ordered_dict_comes_back_as_a_dict_in_the_same_order() -> None:
    back = through_json({"model": OrderedDict(b=1, a=2)})
    assert list(back["model"].items()) == [("b", 1), ("a", 2)]


def test_tied_tensors_are_kept_once_and_come_back_as_one() -> None:
    shared = torch.ones(3)
    apart = flatten({"in": shared, "out": [shared.detach()], "view": shared[:2]})
    assert list(apart.tensors) == ["in", "view"]
    back = unflatten(apart.nodes, apart.tensors)
    assert back["in"] is back["out"][0]


def test_tensors_whose_paths_read_alike_have_names_of_their_own() -> None:
    apart = flatten(
        {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}, 1: torch.full((1,), 2.0), "1": torch.full((1,), 3.0)}
    )
    assert len(apart.tensors) == 4
    assert unflatten(apart.nodes, apart.tensors)["a"]["b"].item() == 1


def test_numpy_arrays_and_numbers_are_kept() -> None:
    back = through_json(
        {"state": np.arange(6, dtype=np.uint32).reshape(2, 3).T, "step": np.int64(3), "flag": np.bool_(True)}
    )
    assert back["state"].dtype == np.uint32
    np.testing.assert_array_equal(back["state"], [[0, 3], [1, 4], [2, 5]])
    assert (back["step"], back["flag"]) == (3, True)


def test_random_states_of_python_numpy_and_torch_are_kept() -> None:
    import random

    generator = np.random.RandomState(3)
    state = {"python": random.Random(3).getstate(), "numpy": generator.get_state(), "torch": torch.get_rng_state()}
    back = through_json(state)
    assert back["python"] == state["python"]
    fresh = np.random.RandomState()
    fresh.set_state(back["numpy"])
    assert fresh.rand() == generator.rand()


Pair = namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (object(), "a value of type object"),
        (lambda: 1, "a value of type function"),
        ({1, 2}, "a value of type set"),
        (Pair(1, 2), "a value of type Pair"),
        (1 + 2j, "a value of type complex"),
        (1 << 20_000, "an integer of 20001 bits"),
        ({frozenset(): 1}, "a dict key of type frozenset"),
        (torch.zeros(2, device="meta"), "a tensor on the meta device"),
        (torch.eye(2).to_sparse(), "a sparse_coo tensor"),
        (torch.zeros(1, dtype=torch.complex128), "a tensor of complex128"),
        (np.array(["a"]), "a numpy array of <U1"),
    ],
    ids=lambda part: part if isinstance(part, str) else type(part).__name__,
)
def test_what_cannot_be_kept_is_named_with_its_path(value: Any, words: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        flatten({"optimizer": {"state": {0: [1, value]}}})
    assert caught.value.what.startswith(words)
    assert caught.value.where == "state['optimizer']['state'][0][1]"


def test_state_that_contains_itself_is_refused() -> None:
    state: dict[str, Any] = {}
    state["again"] = [state]
    with pytest.raises(SnapshotError, match="contains itself"):
        flatten(state)
