"""Nothing is lost: what was sent plus what is kept is the sum of the gradients, whatever happens in between."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from links import ThreadLink, on_links
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from manyhosts.communication.comm_queue import Job
from manyhosts.communication.compression.exchange import Chunk, Compression
from manyhosts.communication.compression.feedback import Compressor
from manyhosts.communication.compression.table import COMPRESSIONS
from manyhosts.config.strategies import DDP

NAMES = ["bf16", "fp16", "int8", "powersgd", "topk"]
SHAPES = [(12, 7), (5, 3, 2), (20, 20)]


class InlineLanes:
    """Runs each job at once, over a link between threads."""

    def __init__(self, link: ThreadLink) -> None:
        self.link = link
        self.world = link  # it knows its rank, and how many there are

    def ready(self) -> None:
        pass

    def submit(self, job: Job) -> None:
        job(self.link)  # type: ignore[arg-type]  # behaves like a Link

    def wait(self, queued: None) -> None:
        pass


class Worker:
    """A compressor over the memory of one bucket."""

    def __init__(self, compression: Compression, link: ThreadLink, *, dtype: torch.dtype = torch.float32) -> None:
        self.parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
        self.memory = torch.zeros(sum(math.prod(shape) for shape in SHAPES), dtype=dtype)
        self.compressor = Compressor(
            compression,
            InlineLanes(link),
            above=1,
            feedback=True,
            parameters=self.parameters,  # type: ignore[arg-type]
        )
        self.compressor.lay_out([(self.memory, self.parameters)])

    def step(self, gradient: Tensor, scale: float | None = None) -> Tensor:
        """The sum that arrives."""
        self.compressor.begin(None if scale is None else torch.tensor(scale))
        self.memory.copy_(gradient)
        self.compressor.start(0)
        self.compressor.finish(0)
        self.compressor.settle()
        return self.memory.clone()

    def broken_step(self, gradient: Tensor, *, settled: bool) -> None:
        """One that breaks off when the sums are here, with what is kept changed already or not yet."""
        self.compressor.begin(None)
        self.memory.copy_(gradient)
        self.compressor.start(0)
        if settled:
            self.compressor.settle()
            self.compressor.lay_out([(self.memory, self.parameters)])  # as when the order of the buckets is found
        self.compressor.step_back()

    def meet(self, link: ThreadLink) -> Worker:
        """The workers have changed."""
        self.compressor.comm_queue = InlineLanes(link)  # type: ignore[assignment]
        return self

    def residual(self) -> Tensor:
        return torch.cat([self.compressor.by_key("residual")[key].reshape(-1) for key in range(len(SHAPES))]).double()


def make(name: str) -> Compression:
    return COMPRESSIONS.load(name)(DDP(compression=name, powersgd_rank=1, topk_fraction=0.05))


def gradient(step: int, rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    source = torch.Generator().manual_seed(100 * step + rank)
    count = sum(math.prod(shape) for shape in SHAPES)
    return (torch.randn(count, generator=source) * 10.0 ** (step % 10 - 2)).to(dtype)


def run(
    name: str, workers: int, steps: Sequence[int], states: Sequence[Any] = (), dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor, Any]]:
    """Of each worker: the sum of what arrived in all steps, what it keeps, and its state."""

    def work(link: ThreadLink) -> tuple[Tensor, Tensor, Any]:
        worker = Worker(make(name), link, dtype=dtype)
        worker.compressor.load_state_dict(states)
        arrived = sum(worker.step(gradient(step, link.rank, dtype)).double() for step in steps)
        return arrived, worker.residual(), worker.compressor.state_dict()

    return on_links(workers, work)


@settings(max_examples=25)
@given(
    name=st.sampled_from(NAMES),
    before=st.integers(1, 4),
    after=st.integers(1, 4),
    steps=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
@example(name="int8", before=3, after=1, steps=2, dtype=torch.float32)
@example(name="topk", before=2, after=3, steps=2, dtype=torch.float32)
def test_what_was_sent_and_what_is_kept_are_all_gradients_also_when_the_workers_change(
    name: str, before: int, after: int, steps: int, dtype: torch.dtype
) -> None:
    first = run(name, before, range(steps), dtype=dtype)
    second = run(name, after, range(10, 10 + steps), [state for _, _, state in first], dtype=dtype)
    wanted = sum(gradient(step, rank, dtype).double() for step in range(steps) for rank in range(before))
    wanted += sum(gradient(step, rank, dtype).double() for step in range(10, 10 + steps) for rank in range(after))
    found = first[0][0] + second[0][0] + sum(residual for _, residual, _ in second)
    narrow = dtype == torch.bfloat16  # what arrives is rounded to the gradients' own dtype, as without compression
    tolerance = float(wanted.abs().max()) * (0.02 if narrow else 1e-5)
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    workers=st.integers(2, 4),
    steps=st.lists(st.sampled_from(["done", "settled", "not settled"]), min_size=1, max_size=6),
    new=st.booleans(),
)
@example(name="powersgd", workers=2, steps=["done", "settled", "done"], new=True)
def test_steps_that_break_off_leave_what_was_kept_and_a_lost_worker_takes_only_its_own(
    name: str, workers: int, steps: list[str], new: bool
) -> None:
    """The last of the workers is lost after `steps`; all others continue, perhaps with a new one."""

    def before(link: ThreadLink) -> tuple[Worker, Tensor]:
        worker = Worker(make(name), link)
        worker.compressor.revocable = True
        arrived = torch.zeros(len(worker.memory), dtype=torch.float64)
        for step, how in enumerate(steps):
            if how != "done":
                worker.broken_step(gradient(step, link.rank), settled=how == "settled")
            arrived += worker.step(gradient(step, link.rank)).double()
            worker.compressor.confirm()
        return worker, arrived

    first = on_links(workers, before)
    lost = first[-1][0].residual()
    shared = first[0][0].compressor.shared_state()

    def after(link: ThreadLink) -> tuple[Tensor, Tensor]:
        worker = Worker(make(name), link) if link.rank == workers - 1 else first[link.rank][0].meet(link)
        worker.compressor.take_shared(shared)
        return worker.step(gradient(20, link.rank)).double(), worker.residual()

    left = workers if new else workers - 1
    second = on_links(left, after)
    wanted = sum(gradient(step, rank).double() for step in range(len(steps)) for rank in range(workers))
    wanted += sum(gradient(20, rank).double() for rank in range(left))
    found = first[0][1] + second[0][0] + sum(residual for _, residual in second) + lost
    torch.testing.assert_close(found, wanted, rtol=0, atol=float(wanted.abs().max()) * 1e-5)
    assert all(torch.equal(arrived, second[0][0]) for arrived, _ in second), "the same bits on every worker"


def test_step_that_is_done_again_gives_the_same_bits_as_one_that_did_not_break_off() -> None:
    def work(link: ThreadLink, *, broken: bool) -> Tensor:
        worker = Worker(make("powersgd"), link)
        worker.compressor.revocable = True
        worker.step(gradient(0, link.rank))
        if broken:
            worker.broken_step(gradient(7, link.rank), settled=True)  # with other numbers: they must leave no trace
        return torch.cat([worker.step(gradient(1, link.rank)), worker.residual().float()])

    whole = on_links(2, lambda link: work(link, broken=False))
    again = on_links(2, lambda link: work(link, broken=True))
    assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_mean_of_many_steps_comes_to_the_gradient_because_of_what_is_kept(name: str) -> None:
    def work(link: ThreadLink) -> tuple[float, float]:
        worker = Worker(make(name), link)
        exact = gradient(2, 0) + gradient(2, 1)
        first = worker.step(gradient(2, link.rank)).clone()
        total = first + sum(worker.step(gradient(2, link.rank)) for _ in range(49))
        return float((first - exact).norm() / exact.norm()), float((total / 50 - exact).norm() / exact.norm())

    for once, often in on_links(2, work):
        assert often < 0.25 * once


def test_step_whose_sum_is_no_number_leaves_what_is_kept_as_it_was() -> None:
    def work(link: ThreadLink) -> tuple[bool, bool]:
        worker = Worker(make("int8"), link)
        worker.step(gradient(2, link.rank))
        before = worker.residual()
        poisoned = gradient(3, link.rank)
        if link.rank == 1:
            poisoned[5] = float("inf")
        arrived = worker.step(poisoned)
        return bool(arrived.isfinite().all()), torch.equal(before, worker.residual())

    assert on_links(2, work) == [(False, True)] * 2


def test_what_is_kept_follows_the_scale_of_the_loss() -> None:
    def work(link: ThreadLink) -> Tensor:
        worker = Worker(make("int8"), link)
        arrived = sum(
            worker.step(gradient(2, link.rank) * scale, scale).double() / scale for scale in (1024.0, 256.0, 4096.0)
        )
        residual = [tensor.reshape(-1) for tensor in worker.compressor.state_dict()["kept"].values()]
        return arrived / 2 + torch.cat(residual).double()  # what arrived is the same on both workers

    total = sum(on_links(2, work))
    torch.testing.assert_close(total, 3 * (gradient(2, 0) + gradient(2, 1)).double(), rtol=1e-4, atol=1e-4)


def test_another_scale_of_the_loss_costs_no_pass_over_what_is_kept() -> None:
    class Touched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            sizes.extend(each.numel() for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor))
            return func(*args, **(kwargs or {}))

    def work(link: ThreadLink) -> None:
        worker = Worker(make("int8"), link)
        worker.step(gradient(2, link.rank), 1024.0)
        scale = torch.tensor(512.0)
        with Touched():
            worker.compressor.begin(scale)

    sizes: list[int] = []
    on_links(1, work)
    assert set(sizes) == {1}


def test_step_that_breaks_off_leaves_the_scale_of_what_is_kept() -> None:
    def work(link: ThreadLink) -> bool:
        worker = Worker(make("int8"), link)
        worker.step(gradient(2, link.rank) * 1024, 1024.0)
        before = worker.compressor.state_dict()["kept"]
        worker.step(gradient(3, link.rank) * 512, 512.0)
        worker.compressor.step_back()
        after = worker.compressor.state_dict()["kept"]
        return all(torch.equal(before[key], after[key]) for key in before)

    assert on_links(2, work) == [True] * 2


def test_function_of_a_users_own_is_a_compression() -> None:
    def send_signs(chunk: Chunk, link: Any) -> Tensor:
        sent = chunk.values.sign() * chunk.values.abs().mean()
        chunk.values.copy_(link.all_reduce(sent.clone()))
        return sent

    def work(link: ThreadLink) -> tuple[Tensor, Tensor]:
        worker = Worker(send_signs, link)
        return sum(worker.step(gradient(step, link.rank)).double() for step in (1, 2)), worker.residual()

    answers = on_links(2, work)
    wanted = sum(gradient(step, rank).double() for step in (1, 2) for rank in (0, 1))
    torch.testing.assert_close(answers[0][0] + sum(residual for _, residual in answers), wanted, rtol=1e-4, atol=1e-4)
