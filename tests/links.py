"""Workers that are threads of this process, with a link between them that behaves like the real one.

received = on_links(3, lambda link: link.all_reduce(torch.tensor([link.rank])))
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


class Board:
    """Where each worker lays what it sends, and all read when everyone has."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.slots: list[Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        self.slots[rank] = tensor.clone()
        self.barrier.wait()
        all_of_them = list(self.slots)
        self.barrier.wait()
        return all_of_them


class ThreadLink:
    """What `manyhosts.communication.link.Link` is, between threads."""

    def __init__(self, rank: int, board: Board) -> None:
        self.rank, self.size, self.board = rank, board.size, board
        self.inside: ThreadLink | None = None
        self.across: ThreadLink | None = None
        self.bytes_sent = 0

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return tensor.copy_(sum(self.board.exchange(self.rank, tensor)))  # type: ignore[arg-type]  # never an empty sum

    def all_gather(self, tensor: Tensor) -> Tensor:
        return torch.stack(self.board.exchange(self.rank, tensor))

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self.board.exchange(self.rank, parts)])

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return tensor.copy_(self.board.exchange(self.rank, tensor)[source])


def on_links(size: int, work: Callable[[ThreadLink], T]) -> list[T]:
    """Call `work(link)` for each of `size` workers at once; their answers by rank."""
    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(ThreadLink(rank, board)), range(size)))


def on_nodes(nodes: int, each: int, work: Callable[[ThreadLink], T]) -> list[T]:
    """The same for `nodes` nodes of `each` workers, whose links know the two levels."""
    world, inside, across = (
        Board(nodes * each),
        [Board(each) for _ in range(nodes)],
        [Board(nodes) for _ in range(each)],
    )

    def life(rank: int) -> T:
        link = ThreadLink(rank, world)
        link.inside = ThreadLink(rank % each, inside[rank // each])
        link.across = ThreadLink(rank // each, across[rank % each])
        return work(link)

    with ThreadPoolExecutor(nodes * each) as pool:
        return list(pool.map(life, range(nodes * each)))
