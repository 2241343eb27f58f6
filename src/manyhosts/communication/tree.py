"""One fixed binary tree over the parts of a batch, and the sums of its subtrees.

Part p is leaf p. Node (level, index) is over the leaves from index * 2**level on, 2**level of them or as many as
there are; one whose right half has no leaf is its left half. So the tree knows the number of parts and nothing else:

    parts 0 1 2 3 4        ((0 + 1) + (2 + 3)) + 4

Adding neighbours in this tree, and nothing but neighbours, gives the same bits as everybody else. A worker that
has contiguous parts adds what it can, as a binary counter carries, and is left with at most 2 log2(parts) subtrees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Node:
    """A subtree."""

    level: int
    index: int

    @property
    def end(self) -> int:
        """The leaf after its last one; there may be fewer parts."""
        return (self.index + 1) << self.level


def root(parts: int) -> Node:
    """The entire tree."""
    return Node((parts - 1).bit_length(), 0)


def subtrees(parts: int, first: int, end: int) -> list[Node]:
    """The fewest subtrees that hold exactly the leaves from `first` up to, not including, `end`, from the left."""
    last = root(parts).end if end == parts else end  # leaves that are not there may be taken along
    found = []
    while first < last and first < parts:
        level = min((first & -first).bit_length() - 1 if first else root(parts).level, (last - first).bit_length() - 1)
        found.append(Node(level, first >> level))
        first += 1 << level
    return found


class Subtrees(Generic[T]):
    """A binary counter: takes the sums of neighbouring subtrees from left to right, and carries."""

    def __init__(self, parts: int, add: Callable[[T, T], T]) -> None:
        """`add(left, right)` gives the sum, and may do so in `left`."""
        self.parts = parts
        self.add = add
        self.stack: list[tuple[Node, T]] = []
        """What could not be added up yet, from left to right."""

    def put(self, node: Node, value: T) -> None:
        """Take the sum of `node`, which begins where the last one ended."""
        self.stack.append((node, value))
        while self._carry():
            pass

    def _carry(self) -> bool:
        node, value = self.stack[-1]
        if node == root(self.parts):
            return False
        above = Node(node.level + 1, node.index >> 1)
        if node.index & 1:
            if len(self.stack) < 2 or self.stack[-2][0] != Node(node.level, node.index - 1):
                return False
            self.stack[-2:] = [(above, self.add(self.stack[-2][1], value))]
        elif node.end >= self.parts:  # there is no right half
            self.stack[-1] = above, value
        else:
            return False
        return True

    def left_of(self, part: int) -> T | None:
        """The leaf that waits for leaf `part` to be added to it, if there is one."""
        waits = bool(self.stack) and part & 1 and self.stack[-1][0] == Node(0, part - 1)
        return self.stack[-1][1] if waits else None

    def added_to_left_of(self, part: int) -> None:
        """Leaf `part` has been added into what `left_of` gave."""
        _, value = self.stack.pop()
        self.put(Node(1, part >> 1), value)
