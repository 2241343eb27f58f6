"""Every pair of several hosts, in rounds in which nobody has to do with two others."""

from __future__ import annotations


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Every pair of `count` once, nobody twice in a round, in as few rounds as there can be: a round robin."""
    seats = [*range(count), *([-1] if count % 2 else [])]
    found = []
    for _ in range(len(seats) - 1):
        pairs = [(seats[place], seats[-1 - place]) for place in range(len(seats) // 2)]
        found.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return found
