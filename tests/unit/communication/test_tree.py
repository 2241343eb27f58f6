"""The tree over the parts: the same for any cut over workers, with few values at a time."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given
from hypothesis import strategies as st

from manyhosts.communication.tree import Node, Subtrees, root, subtrees

parts_and_cuts = st.integers(1, 70).flatmap(
    lambda parts: st.tuples(
        st.just(parts), st.lists(st.integers(1, max(parts - 1, 1)), max_size=8).map(lambda found: sorted(set(found)))
    )
)


def as_ranges(parts: int, cuts: list[int]) -> list[tuple[int, int]]:
    return list(pairwise([0, *(cut for cut in cuts if cut < parts), parts]))


def written(left: str, right: str) -> str:
    return f"({left}+{right})"


def counted(parts: int, first: int, behind: int) -> Subtrees[str]:
    sums = Subtrees(parts, written)
    for part in range(first, behind):
        sums.put(Node(0, part), str(part))
    return sums


def whole(parts: int) -> str:
    [(_, text)] = counted(parts, 0, parts).stack
    return text


def test_sums_are_pairs_of_neighbours() -> None:
    assert whole(1) == "0"
    assert whole(4) == "((0+1)+(2+3))"
    assert whole(5) == "(((0+1)+(2+3))+4)"
    assert whole(7) == "(((0+1)+(2+3))+((4+5)+6))"


@given(parts_and_cuts)
def test_any_contiguous_cut_over_workers_writes_the_same_sum(parts_and_cuts: tuple[int, list[int]]) -> None:
    parts, cuts = parts_and_cuts
    together = Subtrees(parts, written)
    for first, behind in as_ranges(parts, cuts):
        for node, text in counted(parts, first, behind).stack:
            together.put(node, text)
    assert [text for _, text in together.stack] == [whole(parts)]
    assert together.stack[0][0] == root(parts)


@given(parts_and_cuts)
def test_worker_is_left_with_the_fewest_subtrees_that_hold_its_parts(parts_and_cuts: tuple[int, list[int]]) -> None:
    parts, cuts = parts_and_cuts
    for first, behind in as_ranges(parts, cuts):
        nodes = subtrees(parts, first, behind)
        assert [node for node, _ in counted(parts, first, behind).stack] == nodes
        leaves = [leaf for node in nodes for leaf in range(node.index << node.level, min(node.end, parts))]
        assert leaves == list(range(first, behind))
        siblings = [(a, b) for a, b in pairwise(nodes) if (a.level, a.index ^ 1) == (b.level, b.index)]
        assert not siblings, "two of them could have been added"


@given(st.integers(0, 6), st.integers(0, 6))
def test_where_workers_divide_the_parts_by_a_power_of_two_each_has_one_subtree(workers: int, each: int) -> None:
    parts = 2 ** (workers + each)
    for worker in range(2**workers):
        assert len(subtrees(parts, worker * 2**each, (worker + 1) * 2**each)) == 1


@given(st.integers(1, 500), st.data())
def test_never_more_is_held_than_twice_the_height_of_the_tree(parts: int, data: st.DataObject) -> None:
    first = data.draw(st.integers(0, parts - 1))
    sums = Subtrees(parts, written)
    for part in range(first, parts):
        sums.put(Node(0, part), str(part))
        assert len(sums.stack) <= max(1, 2 * root(parts).level)


@given(st.integers(1, 70))
def test_leaf_added_into_its_neighbour_is_as_good_as_one_that_was_put(parts: int) -> None:
    sums: Subtrees[list[int]] = Subtrees(parts, lambda left, right: left + right)
    for part in range(parts):
        waiting = sums.left_of(part)
        assert (waiting is not None) == bool(part & 1)
        if waiting is None:
            sums.put(Node(0, part), [part])
        else:
            waiting.append(part)
            sums.added_to_left_of(part)
    assert [value for _, value in sums.stack] == [list(range(parts))]


def test_first_part_of_a_worker_waits_for_nobody_whom_it_does_not_have() -> None:
    assert counted(8, 3, 3).left_of(3) is None
    assert counted(8, 1, 2).left_of(3) is None, "part 1 does not wait for part 3"


def test_numbers_show_which_order_they_were_added_in() -> None:
    """Were it otherwise, no test on weights could tell a tree from a left fold."""
    rows = torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    sums = Subtrees(8, torch.Tensor.add)
    fold = rows[0]
    for part, row in enumerate(rows):
        sums.put(Node(0, part), row)
        fold = row if part == 0 else fold + row
    assert not torch.equal(sums.stack[0][1], fold)
    torch.testing.assert_close(sums.stack[0][1], fold)
