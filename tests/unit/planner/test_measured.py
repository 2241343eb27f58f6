"""What was measured goes into JSON and comes back as it was; what cannot be is refused by name."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from measured_training import MEASURED

from manyhosts.errors import ConfigError
from manyhosts.planner.measured import Measured, Network, Tried


def test_what_was_measured_comes_back_from_json_as_it_was() -> None:
    network = Network(latency_s=1e-3, bytes_per_second=1e6)
    tried = Tried(nodes=2, workers_per_node=1, network=network, steps={"none": 0.5}, times={"none": 1.25})
    more = replace(MEASURED, contention={2: 1.5}, contention_of_hosts={4: 1.25}, tried=(tried,), loader_processor_s=0.5)
    for each in (MEASURED, more):
        assert Measured.from_json(json.loads(json.dumps(each.to_json(), allow_nan=False))) == each


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"samples": 0}, "samples is 0"),
        ({"update_s": -1.0}, "update_s is -1.0"),
        ({"update_s": math.nan}, "update_s is nan"),
        ({"compute": ()}, "no size of a micro-batch"),
        ({"compute": MEASURED.compute[::-1]}, "do not rise"),
        ({"buckets": MEASURED.buckets[::-1]}, "does not rise"),
        ({"gradient_bytes": 999}, "gradient_bytes is 999, but the buckets hold 1000"),
    ],
)
def test_what_cannot_have_been_measured_is_refused(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        replace(MEASURED, **change)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"speed": 1}, "measured"),
        ({"samples": "many"}, "measured.samples"),
        ({"buckets": [{"bytes": 1.5, "ready": 1.0}]}, r"measured.buckets\[0\].bytes"),
        ({"compute": [{"samples": 1}]}, r"measured.compute\[0\]"),
    ],
)
def test_json_that_holds_something_else_is_refused_by_its_place(change: dict[str, Any], where: str) -> None:
    with pytest.raises(ConfigError, match=f"where: {where}\n"):
        Measured.from_json({**MEASURED.to_json(), **change})


def test_network_that_carries_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="carries nothing"):
        Network(latency_s=0.001, bytes_per_second=0)
