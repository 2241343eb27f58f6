"""Compression between nodes only: exact inside a node, nothing lost, and what a node sends is sent once."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from links import ThreadLink, on_links, on_nodes
from torch import Tensor

from manyhosts.communication.compression.between_nodes import BetweenNodes, between_nodes
from manyhosts.communication.compression.choose import DryLink
from manyhosts.communication.compression.exchange import Chunk, Compression
from manyhosts.communication.compression.table import COMPRESSIONS, make_compression
from manyhosts.communication.nodes import levels_of
from manyhosts.config.local_steps import DiLoCo, LocalSGD
from manyhosts.config.strategies import DDP
from manyhosts.errors import ConfigError

SHAPES = [torch.Size((12, 7)), torch.Size((5, 3, 2)), torch.Size((40, 41))]
NAMES = ["bf16", "fp16", "int8", "topk"]


class Halves:
    """Sends half of each number, and must see whole tensors."""

    full_tensors = True

    def __call__(self, chunk: Chunk, link: ThreadLink) -> Tensor:
        assert chunk.values.numel() == sum(math.prod(shape) for shape in chunk.shapes)
        sent = chunk.values / 2
        chunk.values.copy_(link.all_reduce(sent.clone()))
        return sent


def everything(chunk: Chunk, link: ThreadLink) -> None:
    link.all_reduce(chunk.values)


def make(name: str) -> Compression:
    return Halves() if name == "halves" else COMPRESSIONS.load(name)(DDP(compression=name, topk_fraction=0.1))  # type: ignore[return-value]


def gradient(rank: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(sum(math.prod(shape) for shape in SHAPES), generator=source)


def exchanged(compression: Compression, nodes: int, each: int, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    """What each worker received, and what of its own values is in it."""

    def work(link: ThreadLink) -> tuple[Tensor, Tensor]:
        values = gradient(link.rank, seed)
        sent = BetweenNodes(compression)(Chunk(values, SHAPES, [3, 4, 5]), link)  # type: ignore[arg-type]
        return values, values if sent is None else sent

    return on_nodes(nodes, each, work)


@pytest.mark.parametrize("name", [*NAMES, "halves"])
@pytest.mark.parametrize(("nodes", "each"), [(2, 2), (3, 2), (2, 3)])
def test_sum_of_what_was_sent_is_what_every_worker_received(name: str, nodes: int, each: int) -> None:
    answers = exchanged(make(name), nodes, each)
    assert all(torch.equal(received, answers[0][0]) for received, _ in answers), "the same bits on every worker"
    total = sum(sent.double() for _, sent in answers)
    torch.testing.assert_close(answers[0][0].double(), total, rtol=1e-4, atol=1e-5)


def test_compression_that_drops_nothing_gives_the_exact_sum() -> None:
    for received, sent in exchanged(everything, 2, 3):
        torch.testing.assert_close(received, sum(gradient(rank) for rank in range(6)), rtol=1e-5, atol=1e-5)
        assert not torch.equal(sent, received)


@pytest.mark.parametrize("name", ["bf16", "int8"])
def test_what_is_rounded_is_the_sum_of_a_node(name: str) -> None:
    """The plain reference: add up each node, then let one worker for each node exchange what the node's owners do."""
    nodes, each = 3, 2
    of_node = [gradient(2 * node) + gradient(2 * node + 1) for node in range(nodes)]
    part = -(-len(of_node[0]) // each)

    def speak(link: ThreadLink) -> Tensor:
        parts = []
        for owner in range(each):
            values = torch.nn.functional.pad(of_node[link.rank], (0, part * each - len(of_node[0])))
            values = values[owner * part : (owner + 1) * part].clone()
            make(name)(Chunk(values, [values.shape], [0]), link)  # type: ignore[arg-type]
            parts.append(values)
        return torch.cat(parts)[: len(of_node[0])]

    expected = on_links(nodes, speak)[0]
    assert torch.equal(exchanged(make(name), nodes, each)[0][0], expected)


@settings(max_examples=20)
@given(name=st.sampled_from([*NAMES, "halves"]), seed=st.integers(0, 99), steps=st.integers(1, 4))
def test_what_arrived_and_what_is_kept_is_the_sum_of_the_gradients(name: str, seed: int, steps: int) -> None:
    def work(link: ThreadLink) -> tuple[Tensor, Tensor]:
        compression, kept = BetweenNodes(make(name)), torch.zeros(len(gradient(0)))
        arrived = torch.zeros(len(kept), dtype=torch.float64)
        for step in range(steps):
            whole = gradient(link.rank, 100 * seed + step) + kept
            values = whole.clone()
            sent = compression(Chunk(values, SHAPES, [3, 4, 5]), link)  # type: ignore[arg-type]
            assert sent is not None
            kept = whole - sent
            arrived += values.double()
        return arrived, kept.double()

    answers = on_nodes(2, 2, work)
    exact = sum(gradient(rank, 100 * seed + step).double() for rank in range(4) for step in range(steps))
    torch.testing.assert_close(answers[0][0] + sum(kept for _, kept in answers), exact, rtol=1e-4, atol=1e-4)


def test_only_the_owner_of_a_part_keeps_what_was_dropped() -> None:
    for rank, (_, sent) in enumerate(exchanged(make("int8"), 2, 2)):
        part = -(-len(sent) // 2)
        kept = gradient(rank) - sent
        own = slice(0, part) if rank % 2 == 0 else slice(part, None)
        assert int(kept.count_nonzero()) == int(kept[own].count_nonzero()) > 0


def test_one_level_is_compressed_between_all() -> None:
    def work(link: ThreadLink, compression: Compression) -> Tensor:
        values = gradient(link.rank)
        compression(Chunk(values, SHAPES, [3, 4, 5]), link)  # type: ignore[arg-type]
        return values

    plain = on_links(3, lambda link: work(link, make("int8")))
    assert torch.equal(plain[0], on_links(3, lambda link: work(link, BetweenNodes(make("int8"))))[0])


def test_bytes_that_count_are_those_between_nodes() -> None:
    link = DryLink(0, 8)
    link.inside, link.across = DryLink(0, 2), DryLink(0, 4)
    values = torch.randn(1 << 16)
    BetweenNodes(make("bf16"))(Chunk(values, [values.shape], [0]), link)
    assert link.bytes_sent == 2 * 3 * (2 * len(values) // 2) // 4


def test_compression_that_remembers_stays_between_all_workers() -> None:
    powersgd = COMPRESSIONS.load("powersgd")(DDP())
    assert between_nodes(powersgd) is powersgd


def test_setting_says_whether_nodes_are_told_apart() -> None:
    assert isinstance(make_compression(DDP(compression="int8")), BetweenNodes)
    assert not isinstance(make_compression(DDP(compression="int8", inside_node="alike")), BetweenNodes)


@pytest.mark.parametrize("kind", [DDP, LocalSGD, DiLoCo])
def test_unknown_way_inside_a_node_is_refused(kind: type) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(inside_node="loud")
    assert caught.value.where == f"{kind.__name__}(inside_node=…)"


@pytest.mark.parametrize(
    ("node_of", "nodes"),
    [
        ([0, 0, 1, 1], ((0, 1), (2, 3))),
        ([7, 7, 3, 3], ((0, 1), (2, 3))),
        ([0, 1, 0, 1], ((0, 2), (1, 3))),
        ([0, 0, 0], None),
        ([0, 1, 2], None),
        ([0, 0, 1], None),
    ],
)
def test_two_levels_are_several_nodes_with_equally_many_workers(node_of: list[int], nodes: object) -> None:
    levels = levels_of(node_of)
    assert (None if levels is None else levels.nodes) == nodes


def test_rail_joins_those_in_the_same_place_on_each_node() -> None:
    levels = levels_of([0, 0, 1, 1, 2, 2])
    assert levels is not None
    assert levels.rails == ((0, 2, 4), (1, 3, 5))
