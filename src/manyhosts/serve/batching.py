"""Requests put together: what waits while the model computes is its next batch, and a short wait lets a batch fill.

A full batch is given to the process with the model while that still computes the one before.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manyhosts.serve.tensors import Arrays, Refused, samples_of
from manyhosts.serve.workers import Lost, Workers

_AT_ONCE = 2
"""Batches that are with the process: one is computed, and one lies ready."""


@dataclass(slots=True, eq=False)
class _Waiting:
    arrays: Arrays
    answer: asyncio.Future[Arrays]

    @property
    def form(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What those of one batch have in common: the shapes of their samples."""
        return tuple((name, each.shape[1:]) for name, each in self.arrays.items())


class Batching:
    """Hands out batches of at most so many samples, in the order of the requests."""

    def __init__(
        self,
        workers: Workers,
        *,
        most: int,
        wait_s: float,
        queue: int,
        on_batch: Callable[[Arrays, Arrays], None] = lambda inputs, outputs: None,
    ) -> None:
        """`queue`: most requests that wait. `on_batch` hears of each batch that was answered."""
        self._workers, self._most, self._wait_s, self._queue, self._on_batch = workers, most, wait_s, queue, on_batch
        self._waiting: deque[_Waiting] = deque()
        self._due, self._filled = asyncio.Event(), asyncio.Event()
        self._turn = asyncio.Lock()  # To take the next batch
        self._under_way = 0
        self._pumps: list[asyncio.Task[None]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Begin to answer."""
        self._pumps = [asyncio.create_task(self._run()) for _ in range(_AT_ONCE)]

    async def stop(self) -> None:
        """End; those who wait are answered that there is none."""
        for each in self._pumps:
            each.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for one in self._waiting:
            if not one.answer.done():
                one.answer.set_exception(Lost("the server is ending"))

    async def answer(self, arrays: Arrays) -> Arrays:
        """The outputs for the samples of one request.

        Raises:
            Refused: the queue is full, or the model cannot compute it.
            Lost: the process with the model ended.
        """
        if len(self._waiting) >= self._queue:
            raise Refused(503, f"{self._queue} requests wait already: try again later")
        one = _Waiting(arrays, asyncio.get_running_loop().create_future())
        self._waiting.append(one)
        self._note()
        try:
            return await one.answer
        except asyncio.CancelledError:  # the client has gone
            with contextlib.suppress(ValueError):
                self._waiting.remove(one)
            self._note()
            raise

    def _samples(self) -> int:
        return sum(samples_of(each.arrays) for each in self._waiting)

    def _note(self) -> None:
        """Say whether there is a batch to hand out: a full one, or any where the process has nothing to compute."""
        is_full = self._samples() >= self._most
        for event, holds in ((self._filled, is_full), (self._due, is_full or (self._waiting and not self._under_way))):
            event.set() if holds else event.clear()

    async def _run(self) -> None:
        while True:
            async with self._turn:
                await self._due.wait()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._filled.wait(), self._wait_s)
                batch = self._next()
                self._under_way += 1
                self._note()
            try:
                if batch:
                    await self._serve(batch)
            finally:
                self._under_way -= 1
                self._note()

    def _next(self) -> list[_Waiting]:
        """The requests of the next batch, oldest first: those of one form, up to so many samples."""
        batch: list[_Waiting] = []
        count, left = 0, deque[_Waiting]()
        while self._waiting:
            one = self._waiting.popleft()
            size = samples_of(one.arrays)
            if batch and (one.form != batch[0].form or count + size > self._most):
                left.append(one)
                continue
            batch.append(one)
            count += size
        self._waiting = left
        return batch

    async def _serve(self, batch: list[_Waiting]) -> None:
        try:
            joined = {name: np.concatenate([one.arrays[name] for one in batch]) for name in batch[0].arrays}
            outputs = await self._workers.answer(joined)
        except Refused as error:
            if len(batch) > 1:  # one of them is to blame, and the others get their answers
                for one in batch:
                    await self._serve([one])
                return
            _fail(batch, error)
        except Lost as error:
            _fail(batch, error)
        except asyncio.CancelledError:
            _fail(batch, Lost("the server is ending"))
            raise
        else:
            begin = 0
            for one in batch:
                end = begin + samples_of(one.arrays)
                if not one.answer.done():
                    one.answer.set_result({name: each[begin:end] for name, each in outputs.items()})
                begin = end
            self._on_batch(joined, outputs)


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for one in batch:
        if not one.answer.done():
            one.answer.set_exception(error)
