"""Every pair of several hosts, in rounds in which nobody has to do with two others."""

from __future__ import annotations


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` once, nobody twice in a round, in as few rounds as there can be: a round robin."""
    order = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(order) - 1):
        pairs = [(order[place], order[-1 - place]) for place in range(len(order) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        order = [order[0], order[-1], *order[1:-1]]
    return found
