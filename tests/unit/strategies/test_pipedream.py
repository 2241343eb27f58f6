"""What a pipeline that is not emptied between updates takes as settings, and how many versions it keeps."""

from __future__ import annotations

from typing import Any

import pytest

import manyhosts as mh
from manyhosts.config.settings import Settings
from manyhosts.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"versions": "three"}, "versions is 'three'"),
        ({"accumulate": 0}, "accumulate is 0"),
        ({"schedule": "gpipe"}, "schedule is 'gpipe'"),
        ({"stages": -2}, "stages is -2"),
    ],
)
def test_values_out_of_range_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        mh.PipeDream(**given)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"micro_batch_size": None}, "micro_batch_size"),
        ({"clip_gradients": 1.0}, "clip_gradients"),
        ({"warmup": "3 steps"}, "warmup"),
        ({"on_bad_step": "skip"}, "on_bad_step"),
        ({"virtual_workers": 2}, "virtual_workers"),
        ({"precision": "fp16"}, "fp16"),
        ({"compile": True}, "compile"),
        ({"balance": "speed"}, "balance"),
        ({"batch_size": None, "batch_size_per_worker": 8}, "batch_size_per_worker"),
    ],
)
def test_what_does_not_go_with_it_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**{"strategy": mh.PipeDream(), "batch_size": 8, "micro_batch_size": 4, **settings})
    assert words in str(caught.value)
    assert "with strategy='pipedream'" in str(caught.value)


def test_a_plan_knows_it_without_copies_of_its_stages() -> None:
    mh.PipeDream().check_planned(None)
    with pytest.raises(ConfigError, match="the strategy has stages=2, and a plan is for one copy over all workers"):
        mh.PipeDream(stages=2).check_planned(None)


@pytest.mark.parametrize(
    ("versions", "accumulate", "expected"),
    [
        ("all", 1, [4, 3, 2, 1]),
        ("all", 2, [3, 2, 2, 1]),
        ("all", 3, [2, 2, 2, 1]),
        ("two", 3, [2, 2, 2, 2]),
        ("one", 3, [1, 1, 1, 1]),
    ],
)
def test_versions_of_each_of_four_stages(versions: Any, accumulate: int, expected: list[int]) -> None:
    strategy = mh.PipeDream(versions=versions, accumulate=accumulate)
    assert [strategy.most_versions(stage, 4) for stage in range(4)] == expected
