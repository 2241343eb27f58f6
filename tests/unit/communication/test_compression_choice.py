"""`auto`: what each way would cost, and which one is taken."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from manyhosts.communication.compression.choose import BY_LOSS, Cost, choose, cost_of
from manyhosts.communication.compression.codecs import BLOCK
from manyhosts.communication.probe import Network
from manyhosts.config.strategies import DDP

PARAMETERS = [nn.Parameter(torch.zeros(512, 1024)), nn.Parameter(torch.zeros(512))]
COSTS = {name: cost_of(name, DDP(), PARAMETERS, rank=0, size=4, bucket_bytes=25_000_000) for name in BY_LOSS}
LARGE, SMALL = 512 * 1024, 512


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        ("none", 1.5 * 4 * (LARGE + SMALL)),
        ("bf16", 1.5 * (2 * LARGE + 4 * SMALL)),
        ("int8", 1.5 * (LARGE * (1 + 4 / BLOCK) + 4 * SMALL)),
        ("powersgd", 1.5 * 4 * (DDP().powersgd_rank * (512 + 1024) + SMALL)),
        ("topk", 3 * 8 * round(0.01 * LARGE) + 1.5 * 4 * SMALL),
    ],
)
def test_bytes_of_a_rehearsal_are_those_of_the_formulas(name: str, sent: float) -> None:
    assert COSTS[name].bytes_sent == pytest.approx(sent, rel=0.001)


def test_rehearsal_tells_whether_parts_go_to_owners() -> None:
    assert {name for name, cost in COSTS.items() if cost.through_owners} == {"fp16", "bf16", "int8"}


def cable(name: str, inside_node: str) -> float:
    """Of eight workers, two on each node."""
    config = DDP(inside_node=inside_node)  # type: ignore[arg-type]
    return cost_of(name, config, PARAMETERS, rank=0, size=8, bucket_bytes=25_000_000, each=2).bytes_sent


def test_cable_of_a_node_carries_once_what_its_workers_send_together() -> None:
    exact, small = LARGE * 2, 1.75 * 4 * SMALL
    assert cable("bf16", "exact") == pytest.approx(2 * 3 / 4 * exact + small, rel=0.001)
    # There to each of six others from both workers of a node; back in a ring.
    assert cable("bf16", "alike") == pytest.approx((2 * 6 / 8 + 7 / 8) * exact + small, rel=0.001)
    assert cable("none", "exact") == cable("none", "alike")


def test_larger_model_is_reckoned_from_a_part_of_it() -> None:
    part = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(4)]
    whole = [nn.Parameter(torch.zeros(1000, 1000)) for _ in range(20)]
    few, many = (cost_of("int8", DDP(), p, rank=0, size=2, bucket_bytes=4_000_000) for p in (part, whole))
    assert many.bytes_sent == pytest.approx(5 * few.bytes_sent, rel=0.01)


def test_fast_network_is_sent_every_bit() -> None:
    choice = choose(COSTS, Network(1e-5, 1e12), compute_s=1.0, hidden_s=0.6)
    assert choice.name == "none"


def test_slow_network_is_sent_little() -> None:
    choice = choose(COSTS, Network(1e-5, 1e4), compute_s=0.1, hidden_s=0.06)
    assert choice.name in ("powersgd", "topk")
    assert choice.step_seconds["none"] > 30 * choice.step_seconds[choice.name]


def test_less_lossy_way_is_taken_where_it_costs_at_most_a_twentieth_more() -> None:
    costs = {"none": Cost(0, 400, 0), "bf16": Cost(0, 200, 0), "int8": Cost(0, 191, 0), "topk": Cost(0, 191, 0)}
    assert choose(costs, Network(0, 100), compute_s=0, hidden_s=0).name == "bf16"
    assert choose(costs, Network(0, 100), compute_s=100, hidden_s=0).name == "none"


def test_what_the_backward_pass_hides_costs_nothing() -> None:
    costs = {"none": Cost(0, 400, 0), "int8": Cost(0.5, 100, 0)}
    assert choose(costs, Network(0, 100), compute_s=5, hidden_s=4).step_seconds == {"none": 5, "int8": 5.5}


def test_choice_says_why_in_one_line() -> None:
    words = choose(COSTS, Network(2e-4, 1.25e8), compute_s=0.1, hidden_s=0.05).why()
    assert "1 Gbit/s" in words
    assert "\n" not in words
    assert all(name in words for name in BY_LOSS)
