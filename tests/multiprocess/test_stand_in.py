"""Training on a device that does later what it is asked for: the same bits as on a CPU, and nothing waits in a step."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from runs import step_lines
from stand_in import norm_in_one_order, streams, tensor
from torch import nn

import manyhosts as mh
from manyhosts.cluster.place import Place
from manyhosts.communication.comm_queue import CommQueue, QueuedExchange
from manyhosts.communication.world import World
from manyhosts.data import steps
from manyhosts.elastic.session import CollectiveCalls
from manyhosts.training.process_session import ProcessSession
from manyhosts.training.telemetry import pace

pytestmark = [pytest.mark.multiprocess, pytest.mark.xdist_group("stand-in")]

WAYS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "small buckets": {"strategy": mh.DDP(bucket_mb=0.002)},
    "micro-batches": {"micro_batch_size": 3},
    "virtual workers": {"virtual_workers": 4},
    "bf16 gradients": {"strategy": mh.DDP(compression="bf16", compress_above=64)},
    "powersgd": {"strategy": mh.DDP(compression="powersgd", compress_above=64)},
    "int8 gradients": {"strategy": mh.DDP(compression="int8", compress_above=64)},
    "local steps": {"strategy": mh.LocalSGD(sync_every=3)},
    "diloco": {"strategy": mh.DiLoCo(sync_every=4)},
}
FP16 = {"precision": "fp16", **WAYS["int8 gradients"]}


class Quiet:
    """Forbids the host to wait for the device, from the end of step 3 to that of step 9: a look in step 10 waits."""

    def __init__(self) -> None:
        self.forbidden = streams.no_synchronisation()

    def __call__(self, event: object) -> None:
        """Told of every step, two steps after it was done."""
        if isinstance(event, mh.events.StepDone) and event.step == 3:
            self.forbidden.__enter__()
        if isinstance(event, mh.events.StepDone) and event.step == 7:
            self.forbidden.__exit__(None, None, None)


class Stopwatch(torch.optim.SGD):
    """The wall's time at which the device had done each update, beside the times that are told of the steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1e-3)
        self.times: list[float] = []
        self.seconds: list[float] = []

    def step(self, closure: Any = None) -> Any:
        """Ask for an update, and for a look at the clock behind it."""
        found = super().step(closure)
        streams.current_stream().launch(lambda: self.times.append(time.perf_counter()))
        return found

    def hear(self, event: object) -> None:
        """Told of every step."""
        if isinstance(event, mh.events.StepDone):
            self.seconds.append(event.timing.total)
            parts = event.timing
            assert min(parts.compute, parts.communication_exposed, parts.data_wait, parts.snapshot_stall) >= 0
            assert parts.compute + parts.communication_exposed + parts.data_wait + parts.other == pytest.approx(
                parts.total - parts.snapshot_stall
            )

    def deviation(self) -> float:
        """By how much the times told depart from the wall's, in that stretch of steps where it is least.

        A busy machine may stop a worker between a look at the clock and the end of its step.
        """
        assert len(self.times) == len(self.seconds) == 20, "each step was done, and told"
        stretches = [(first, last) for first in range(3, 9) for last in range(12, 20)]
        return min(
            abs(sum(self.seconds[first + 1 : last + 1]) / (self.times[last] - self.times[first]) - 1)
            for first, last in stretches
        )


class Resident(torch.utils.data.Dataset[Any]):
    """Samples that lie on the device."""

    def __init__(self) -> None:
        device = torch.device(tensor.NAME, 0)
        self.inputs = torch.randn(160, 100, generator=torch.Generator().manual_seed(1)).to(device)
        self.labels = torch.arange(160).remainder(5).to(device)

    def __len__(self) -> int:
        return 160

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.labels[index]


class Flow(torch.utils.data.IterableDataset[Any]):
    """A stream, whose samples nobody has pinned. A batch of them is larger than what is sent without a wait."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(400):
            yield torch.full((3, 6, 6), index / 80), torch.tensor(index % 5)


class Curious(nn.CrossEntropyLoss):
    """A loss that wants to know its value at once."""

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Shape () for outputs of shape (N, C) and labels of shape (N,)."""
        loss = super().forward(outputs, labels)
        loss.item()
        return loss


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 24),
        nn.Linear(24, 5),
    ).to(memory_format=torch.channels_last)


def train(
    folder: Path,
    way: dict[str, Any],
    *,
    quiet: bool = False,
    loss: nn.Module | None = None,
    stream: bool = False,
    fused: bool | None = True,
) -> tuple[Any, ...]:
    """What a run gave: its losses, its weights, and all that its snapshots hold."""
    inputs = torch.randn(80, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(0, 5, (80,), generator=torch.Generator().manual_seed(2))
    data = torch.utils.data.TensorDataset(inputs, labels)
    trainer = mh.Trainer(
        model=model(),
        loss=loss or nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, fused=fused),
        data=mh.Data(train=Flow() if stream else data, validation=None if quiet else data, batch_size=16),
        snapshots=mh.Snapshots(every="1000 steps" if quiet else "4 steps"),
        listeners=[Quiet()] if quiet else [],
        run_dir=folder,
        **way,
    )
    result = trainer.fit("12 steps" if quiet else "10 steps")
    files = sorted((folder / "snapshots").glob("*/*.safetensors"))
    kept = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    return [line["loss"] for line in step_lines(folder)], result.weights_sha256, kept


QUICK = ["ddp", "virtual workers", "int8 gradients", "diloco"]


def each_way(rank: int, folder: Path, names: list[str], *, on_device: bool) -> dict[str, tuple[Any, ...]]:
    if on_device:
        tensor.install()
    return {name: train(folder / name.replace(" ", "-"), WAYS[name]) for name in names}


@pytest.mark.parametrize("names", [QUICK, pytest.param(list(WAYS), marks=pytest.mark.slow)], ids=["some", "all"])
def test_every_way_of_training_gives_the_bits_of_a_cpu(names: list[str], tmp_path: Path) -> None:
    expected = run_ranks(2, each_way_on_cpu, tmp_path / "cpu", names, timeout_s=240)
    found = run_ranks(2, each_way_on_device, tmp_path / "device", names, timeout_s=240)
    fp16 = [ways.pop("fp16") for ways in found]
    assert found == expected
    # Nothing computes in another format on this device, and powers of two, by which the loss is scaled, cost no bit.
    assert [run[:2] for run in fp16] == [ways["int8 gradients"][:2] for ways in found]


def each_way_on_cpu(rank: int, folder: Path, names: list[str]) -> dict[str, tuple[Any, ...]]:
    with norm_in_one_order():
        return each_way(rank, folder, names, on_device=False)


def each_way_on_device(rank: int, folder: Path, names: list[str]) -> dict[str, tuple[Any, ...]]:
    with norm_in_one_order():
        return {**each_way(rank, folder, names, on_device=True), "fp16": train(folder / "fp16", FP16)}


def first_way_on_device(rank: int, folder: Path) -> list[float]:
    tensor.install()
    losses: list[float] = train(folder, {})[0]
    return losses


def test_two_workers_with_channels_last_and_fused_adamw_equal_one(tmp_path: Path) -> None:
    [alone] = run_ranks(1, first_way_on_device, tmp_path / "one")
    assert run_ranks(2, first_way_on_device, tmp_path / "two") == [pytest.approx(alone, rel=1e-5)] * 2


def without_waiting(rank: int, folder: Path) -> None:
    tensor.install()
    pace.EVERY_S = 1e9  # what workers tell each other every few seconds is waited for
    for name, way in {**WAYS, "fp16": FP16}.items():
        train(folder / name.replace(" ", "-"), way, quiet=True, fused=None)
    train(folder / "stream", {}, quiet=True, stream=True)
    assert torch.are_deterministic_algorithms_enabled(), "by virtual workers"
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


def on_two_nodes(rank: int, folder: Path, on_device: bool) -> tuple[Any, ...]:
    os.environ.update(LOCAL_WORLD_SIZE="2", LOCAL_RANK=str(rank % 2), GROUP_RANK=str(rank // 2))
    if on_device:
        tensor.install()
    pace.EVERY_S = 1e9  # as above
    with norm_in_one_order():
        return train(folder, {"strategy": mh.LocalSGD(sync_every=3, inside_node="exact")}, quiet=True)[:2]


def test_nodes_that_step_alone_wait_for_nothing_and_give_the_bits_of_a_cpu(tmp_path: Path) -> None:
    expected = run_ranks(4, on_two_nodes, tmp_path / "cpu", False)
    assert run_ranks(4, on_two_nodes, tmp_path / "device", True) == expected


def looking_at_the_loss(rank: int, folder: Path) -> None:
    tensor.install()
    train(folder, {}, quiet=True, loss=Curious())


def test_host_never_waits_for_the_device_in_a_step(tmp_path: Path) -> None:
    run_ranks(2, without_waiting, tmp_path, timeout_s=240)
    with pytest.raises(AssertionError, match=r"HiddenSynchronisation: item\(\)"):
        run_ranks(1, looking_at_the_loss, tmp_path / "curious")


def timed(rank: int, folder: Path) -> float:
    """By how much the times that the leader tells depart from the wall's."""
    tensor.install()
    made: list[Stopwatch] = []

    def optimizer(params: Any) -> Stopwatch:
        made.append(Stopwatch(params))
        return made[0]

    trainer = mh.Trainer(
        model=nn.Sequential(nn.Linear(100, 1200), nn.Linear(1200, 1200), nn.Linear(1200, 5)),
        loss=nn.CrossEntropyLoss(),
        optimizer=optimizer,
        data=mh.Data(train=Resident(), validation=Resident(), batch_size=8),
        snapshots=mh.Snapshots(every="1000 steps"),
        listeners=[lambda event: made[0].hear(event)],
        run_dir=folder,
    )
    trainer.fit("1 epoch")
    return 0.0 if rank else made[0].deviation()


@pytest.mark.parametrize("workers", [1, 2])
def test_steps_take_as_long_as_by_the_wall_and_samples_may_be_on_the_device_already(
    workers: int, tmp_path: Path
) -> None:
    leader, *_ = run_ranks(workers, timed, tmp_path)
    assert leader < 0.02


def not_on_side_streams(real: Any) -> Any:
    def wait(self: streams.Stream, other: Any) -> None:
        if self.name != "side":
            real(self, other)

    return wait


@dataclass(frozen=True)
class Fault:
    """Something that is taken out of the product."""

    target: Any
    attribute: str
    put: Any
    early: bool = False
    """Whether side streams run ahead, in place of lagging behind."""
    quiet: bool = False

    @contextmanager
    def made(self) -> Iterator[None]:
        """Within, it is taken out."""
        streams.early = self.early
        with patch.object(self.target, self.attribute, self.put):
            yield
        streams.early = False
        streams.run_everything()


IN_RUNS = {
    "numbers are not waited for": Fault(streams.Event, "synchronize", lambda self: None),
    "snapshots do not wait for the update": Fault(
        streams.Stream, "wait_event", not_on_side_streams(streams.Stream.wait_event), early=True
    ),
    "snapshots are not waited for": Fault(streams.Stream, "synchronize", lambda self: None),
    "batches are not pinned": Fault(steps, "pinned", lambda batch: batch, quiet=True),
}
IN_EXCHANGES = {
    "sums are not waited for": Fault(World, "wait", lambda self, work, confirmed=True: None),
    "compressed sums are not waited for": Fault(QueuedExchange, "wait", lambda self: None),
    "exchanges do not wait for gradients": Fault(
        streams.Stream, "wait_stream", not_on_side_streams(streams.Stream.wait_stream), early=True
    ),
}


PATIENT_S = 5.0
"""A worker that a busy machine stops for longer finds done what nobody waited for, and a fault does not show."""


def unnoticed_in_runs(rank: int, folder: Path) -> list[str]:
    """The faults that change nothing."""
    tensor.install()
    streams.idle_s = PATIENT_S
    right = train(folder / "right", {})
    same = []
    for name, fault in IN_RUNS.items():
        found: tuple[Any, ...] = ()
        with fault.made(), suppress(Exception, SystemExit):  # nonsense may also read as being asked to stop
            found = train(folder / name.replace(" ", "-"), {}, quiet=fault.quiet)
        if found == right or (fault.quiet and found):
            same.append(name)
    return same


def exchanged(world: World, comm_queue: CommQueue) -> list[float]:
    """A sum over the workers by each of the two ways that gradients take."""
    plain = torch.zeros(4, device=world.device).add_(world.rank + 1)
    world.all_reduce(plain)
    summed = plain.tolist()  # now: while the next exchange waits for another worker, this one is done all the same
    comm_queue.ready()
    compressed = torch.zeros(4, device=world.device).add_(world.rank + 1)
    comm_queue.wait(comm_queue.submit(lambda link: link.all_reduce(compressed)))
    return [*summed, *compressed.tolist()]


def crossing(rank: int) -> list[float]:
    """An exchange of the queue's to which one worker comes when it has the sum that the other began behind it."""
    tensor.install()
    world = World(Place.from_environment())
    comm_queue = CommQueue(world)
    comm_queue.ready()
    plain, queued = (torch.full((4,), each * (rank + 1), device=world.device) for each in (1.0, 10.0))
    if rank:
        world.all_reduce(plain).tolist()
    exchange = comm_queue.submit(lambda link: link.all_reduce(queued))
    if not rank:
        world.all_reduce(plain).tolist()
    comm_queue.wait(exchange)
    found = [*plain.tolist(), *queued.tolist()]
    world.leave()
    return found


def test_sum_does_not_wait_behind_what_travels_beside_the_steps() -> None:
    assert run_ranks(2, crossing) == [[3.0] * 4 + [30.0] * 4] * 2


class Failing(torch.optim.SGD):
    """Takes some steps."""

    def __init__(self, params: Any, steps: int) -> None:
        super().__init__(params, lr=0.1)
        self.left = steps

    def step(self, closure: Any = None) -> Any:
        """One of them."""
        self.left -= 1
        if self.left < 0:
            raise ArithmeticError("no more steps")
        return super().step(closure)


def left_alone(rank: int, folder: Path) -> dict[str, Any]:
    """Fails with a sum under way that the other, which failed a step before, does not come to."""
    tensor.install()
    trainer = mh.Trainer(
        model=nn.Linear(4, 2),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: Failing(params, steps=3 - rank),
        data=mh.Data(train=torch.utils.data.TensorDataset(torch.ones(64, 4), torch.arange(64) % 2), batch_size=8),
        run_dir=folder,
    )
    with pytest.raises(ArithmeticError):
        trainer.fit("10 steps")
    ProcessSession.current().close()
    return {} if rank else json.loads((folder / "summary.json").read_text())


def test_worker_that_fails_ends_also_where_others_do_not_come_to_what_it_has_begun(tmp_path: Path) -> None:
    reported, _ = run_ranks(2, left_alone, tmp_path)
    assert reported["status"] == "failed"
    assert reported["reason"] == "ArithmeticError: no more steps"
    assert reported["weights_sha256"] == "", "nobody knows what they are"


def failing_call(rank: int) -> float:
    """Fails, as in a validation, with a sum under way that the other, which failed before it, does not come to."""
    tensor.install()
    world = World(Place.from_environment())
    calls = CollectiveCalls(world)
    met = world.all_reduce(torch.ones(1, device=world.device)).item()
    if not rank:
        world.start_all_reduce(torch.ones(1, device=world.device))
    calls.fail()
    world.leave()
    return met


def test_worker_leaves_also_where_a_call_has_failed_with_a_sum_under_way() -> None:
    assert run_ranks(2, failing_call, timeout_s=60) == [2.0, 2.0]


def unnoticed_in_exchanges(rank: int) -> list[str]:
    """The faults that change nothing."""
    tensor.install()
    streams.idle_s = PATIENT_S
    world = World(Place.from_environment())
    comm_queue = CommQueue(world)
    right = exchanged(world, comm_queue)
    with streams.no_synchronisation(), pytest.raises(streams.HiddenSynchronisation):
        world.barrier()
    assert right == [3.0] * 8
    same = []
    for name, fault in IN_EXCHANGES.items():
        with fault.made():
            if exchanged(world, comm_queue) == right:
                same.append(name)
        world.barrier()
    world.leave()
    return same


def test_every_wait_and_pin_is_missed_where_it_is_taken_out(tmp_path: Path) -> None:
    assert run_ranks(1, unnoticed_in_runs, tmp_path) == [[]]
    assert run_ranks(2, unnoticed_in_exchanges) == [[], []]
