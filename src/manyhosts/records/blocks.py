"""Something of every step, kept over a run of any length: as few blocks of steps, which grow with the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

Block = TypeVar("Block")


class Blocks(ABC, Generic[Block]):
    """The blocks of one run: when there are `MOST`, pairs of them become one."""

    MOST: ClassVar[int]

    def __init__(self) -> None:
        self._every = 1
        self._closed: list[Block] = []
        self._open: list[Block] = []

    @staticmethod
    @abstractmethod
    def merged(blocks: Sequence[Block]) -> Block:
        """One block of several that follow each other."""

    def take(self, block: Block) -> None:
        """That of the steps that came last."""
        self._open.append(block)
        if len(self._open) == self._every:
            self._closed, self._open = self.blocks(), []
        if len(self._closed) == self.MOST:
            self._closed = [self.merged(self._closed[at : at + 2]) for at in range(0, self.MOST, 2)]
            self._every *= 2

    def blocks(self) -> list[Block]:
        """All of them; the last one may have fewer steps."""
        return [*self._closed, *([self.merged(self._open)] if self._open else [])]
