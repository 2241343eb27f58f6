"""Which requests are a batch, and when it is handed out: a full one also while another is computed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from manyhosts.serve.batching import Batching
from manyhosts.serve.workers import Lost


class Held:
    """In place of the processes with the model: answers a batch when it is let go, oldest first."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[float], asyncio.Event]] = []
        self.most_at_once = self.under_way = 0

    async def answer(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        let_go = asyncio.Event()
        self.batches.append((arrays["x"].ravel().tolist(), let_go))
        self.under_way += 1
        self.most_at_once = max(self.most_at_once, self.under_way)
        await let_go.wait()
        self.under_way -= 1
        return {"y": arrays["x"] * 2}


async def some_turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def ask(batching: Batching, *values: float) -> list[asyncio.Task[Any]]:
    return [asyncio.create_task(batching.answer({"x": np.array([[each]])})) for each in values]


def begun(held: Held) -> Batching:
    batching = Batching(held, most=2, wait_s=0, queue=9)  # type: ignore[arg-type]  # all that it calls
    batching.start()
    return batching


async def full_ones_lie_ready() -> None:
    held = Held()
    batching = begun(held)
    asked = ask(batching, 1, 2, 3, 4, 5, 6, 7)
    await some_turns()
    assert [values for values, _ in held.batches] == [[1, 2], [3, 4]], "one is computed, one lies ready"
    for number in range(3):
        assert len(held.batches) == min(2 + number, 3), "while another is computed one that is not full waits for more"
        held.batches[number][1].set()
        await some_turns()
    assert [values for values, _ in held.batches] == [[1, 2], [3, 4], [5, 6], [7]]
    held.batches[3][1].set()
    assert [(await each)["y"].item() for each in asked] == [2, 4, 6, 8, 10, 12, 14]
    assert held.most_at_once == 2
    await batching.stop()


def test_full_batch_is_handed_out_while_another_is_computed_and_one_that_is_not_waits_for_more() -> None:
    asyncio.run(full_ones_lie_ready())


async def end_in_between() -> None:
    held = Held()
    batching = begun(held)
    asked = ask(batching, 1, 2, 3, 4, 5)
    await some_turns()
    await batching.stop()
    for each in asked:
        with pytest.raises(Lost, match="the server is ending"):
            await each


def test_end_leaves_nobody_without_an_answer() -> None:
    asyncio.run(end_in_between())
