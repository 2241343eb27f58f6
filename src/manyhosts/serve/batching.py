"""Requests put together: what waits while the model computes is its next batch, and a short wait lets a batch fill."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from manyhosts.serve.tensors import Arrays, Refused, samples_of
from manyhosts.serve.workers import Lost, Workers


@dataclass(slots=True, eq=False)
class _Waiting:
    arrays: Arrays
    answer: asyncio.Future[Arrays]

    @property
    def form(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """What those of one batch have in common: the shapes of their samples."""
        return tuple((name, each.shape[1:]) for name, each in self.arrays.items())


class Batching:
    """Hands out batches of at most so many samples, one at a time, in the order of the requests."""

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
        self._came = asyncio.Event()
        self._filled = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self) -> None:
        """Begin to answer."""
        self._pump = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End; whoever waits is told that there is no answer."""
        if self._pump is not None:
            self._pump.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._pump
        for each in self._waiting:
            if not each.answer.done():
                each.answer.set_exception(Lost("the server is ending"))

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
        self._came.set()
        if self._samples() >= self._most:
            self._filled.set()
        try:
            return await one.answer
        except asyncio.CancelledError:  # the client has gone
            with contextlib.suppress(ValueError):
                self._waiting.remove(one)
            raise

    def _samples(self) -> int:
        return sum(samples_of(each.arrays) for each in self._waiting)

    async def _run(self) -> None:
        while True:
            self._came.clear()
            if not self._waiting:
                await self._came.wait()
            if self._samples() < self._most and self._wait_s:
                self._filled.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._filled.wait(), self._wait_s)
            if batch := self._next():
                await self._serve(batch)

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
            self._on_batch(joined, outputs)
            begin = 0
            for one in batch:
                end = begin + samples_of(one.arrays)
                if not one.answer.done():
                    one.answer.set_result({name: each[begin:end] for name, each in outputs.items()})
                begin = end


def _fail(batch: list[_Waiting], error: Exception) -> None:
    for one in batch:
        if not one.answer.done():
            one.answer.set_exception(error)
