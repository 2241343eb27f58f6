"""Every pair of several hosts, in rounds in which no host is in two pairs."""

from __future__ import annotations


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` once, each member once per round, in as few rounds as possible: a round robin."""
    order = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(order) - 1):
        pairs = [(order[place], order[-1 - place]) for place in range(len(order) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        order = [order[0], order[-1], *order[1:-1]]
    return found
