"""What those that are left of nodes that stepped alone make of it: the mean, what is lost, whose optimizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.communication.nodes import levels_of
from manyhosts.strategies.local_stepping import (
    LocalProgress,
    Lost,
    first_of,
    optimizers_from,
    parts_of_mean,
    what_is_lost,
)

NEW = LocalProgress(-1, 0.0, 0)


@st.composite
def leftovers(draw: st.DrawFn) -> tuple[list[LocalProgress], list[int], list[float]]:
    """Who is left of some nodes, new workers among them; the node of each worker as it was; what each node took."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    since = draw(st.integers(1, 9))
    cuts = draw(st.lists(st.integers(0, 16), min_size=len(sizes), max_size=len(sizes)))
    shares = [since * cut / max(1, sum(cuts)) for cut in cuts]
    node_of = [node for node, size in enumerate(sizes) for _ in range(size)]
    kept = draw(st.lists(st.booleans(), min_size=len(node_of), max_size=len(node_of)))
    local_progress = [
        LocalProgress(since, shares[node], node) for node, stays in zip(node_of, kept, strict=True) if stays
    ]
    local_progress += [NEW] * draw(st.integers(0 if local_progress else 1, 2))
    return draw(st.permutations(local_progress)), node_of, shares


@given(leftovers(), st.booleans())
def test_parts_of_the_mean_sum_to_one_and_a_node_counts_the_same_whoever_of_it_is_left(
    found: tuple[list[LocalProgress], list[int], list[float]], alike: bool
) -> None:
    local_progress, _, shares = found
    parts = parts_of_mean(local_progress, alike=alike)
    assert all(part == 0 for part, each in zip(parts, local_progress, strict=True) if not each.trained)
    nodes = {each.alone for each in local_progress if each.trained}
    if not nodes:
        return
    assert sum(parts) == pytest.approx(1)
    of_node = {
        node: sum(p for p, each in zip(parts, local_progress, strict=True) if each.alone == node) for node in nodes
    }
    total = sum(shares[node] for node in nodes)
    for node, part in of_node.items():
        assert part == pytest.approx(1 / len(nodes) if alike or not total else shares[node] / total)


@given(leftovers())
def test_only_what_nobody_is_left_of_is_lost(found: tuple[list[LocalProgress], list[int], list[float]]) -> None:
    local_progress, node_of, shares = found
    lost = what_is_lost(local_progress, node_of)
    gone = set(node_of) - {each.alone for each in local_progress if each.trained}
    assert bool(lost.who) == bool(gone)
    if gone and any(each.trained for each in local_progress) and sum(shares):
        assert lost.batches == pytest.approx(sum(shares[node] for node in gone), abs=1e-9)


def local_progress(*words: str) -> list[LocalProgress]:
    """`a`: a worker of the node a; `?`: one that may have another optimizer than its node; `new`."""
    return [NEW if word == "new" else LocalProgress(4, 2.0, ord(word[0]) - ord("a"), "?" in word) for word in words]


@pytest.mark.parametrize(
    ("left", "reported"),
    [
        (local_progress("a", "b", "b"), ""),
        (local_progress("a", "new", "b", "b"), ""),
        (local_progress("a", "a", "new", "new"), "what the lost host learned alone from 2 batches in 4 steps"),
        (local_progress("new", "new"), "what the 2 lost hosts learned alone since the last mean"),
    ],
)
def test_what_is_lost_is_told_of_hosts_and_not_of_each_of_their_workers(
    left: list[LocalProgress], reported: str
) -> None:
    assert what_is_lost(left, [0, 0, 1, 1]).reported() == reported


def test_where_each_worker_stepped_alone_workers_are_lost() -> None:
    left = [LocalProgress(4, 4 / 3, 1)]
    assert what_is_lost(left, [0, 1]).reported() == "what the lost worker learned alone from 2.67 batches in 4 steps"
    assert what_is_lost(left, [0, 1, 2]).who == "the 2 lost workers"
    assert what_is_lost([LocalProgress(4, 2, 0), LocalProgress(4, 2, 1)], [0, 1]) == Lost()


@pytest.mark.parametrize(
    ("left", "node_of", "givers"),
    [
        (local_progress("a", "a", "b", "b"), [0, 0, 1, 1], [0, 1, 2, 3]),
        (local_progress("a", "new", "b", "b"), [0, 0, 1, 1], [0, 0, 2, 3]),
        (local_progress("new", "a", "b", "b"), [0, 0, 1, 1], [1, 1, 2, 3]),
        (local_progress("a", "a", "new", "new"), [0, 0, 1, 1], [0, 1, 2, 2]),
        (local_progress("a", "b", "c", "d"), [0, 0, 1, 1], [0, 0, 2, 2]),
        (local_progress("a", "a?", "b?", "b?"), [0, 0, 1, 1], [0, 0, 2, 2]),
        (local_progress("a", "a", "b"), [0, 0, 1], [0, 1, 2]),
        (local_progress("a", "new"), [0, 0], [0, 1]),
    ],
)
def test_all_of_a_node_take_the_optimizer_of_its_first_that_trained(
    left: list[LocalProgress], node_of: list[int], givers: list[int]
) -> None:
    found = optimizers_from(left, levels_of(node_of))
    assert found == givers


def test_others_follow_the_first_that_trained_or_the_first_of_all() -> None:
    assert first_of([2, 3], local_progress("a", "a", "new", "b")) == 3
    assert first_of([2, 3], local_progress("a", "a", "new", "new")) == 2
