"""What a worker measures, piece by piece: counts against plain counts, times against each other."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import manyhosts as mh
from manyhosts import host_memory
from manyhosts.communication.compression.choose import BY_LOSS, cost_of
from manyhosts.config.strategies import DDP
from manyhosts.measure import lines
from manyhosts.measure.in_worker import (
    compressions,
    loading,
    machine,
    measurer,
    passes,
    readiness,
    updating,
    validating,
)
from manyhosts.measure.in_worker.batches import Batches
from manyhosts.measure.in_worker.passes import Passes, SavedBytes
from manyhosts.training.state.run_state import RunState
from manyhosts.training.trainer import Trainer

SAMPLES, WIDTH, CLASSES = 64, 8, 4
INPUTS = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(SAMPLES) % CLASSES


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def trainer_of(train: Any = None, **changes: Any) -> Trainer:
    settings = {
        "model": network,
        "loss": nn.CrossEntropyLoss(),
        "optimizer": lambda params: torch.optim.AdamW(params, lr=0.1),
        "data": mh.Data(train=train or TensorDataset(INPUTS, TARGETS), batch_size=12),
        **changes,
    }
    return mh.Trainer(**settings)


def profiled(forward: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes that are allocated in `forward` and still there behind it, as PyTorch's own profiler counts them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        loss = forward()
    return sum(event.self_cpu_memory_usage for event in profile.events()), loss


def test_saved_bytes_are_those_of_a_plain_count() -> None:
    model, count = network(), 12
    with SavedBytes([*model.parameters(), *model.buffers()]) as saved:
        nn.functional.cross_entropy(model(INPUTS[:count].clone()), TARGETS[:count].clone()).backward()
    inputs, hidden, logarithms = 4 * count * WIDTH, 4 * count * 16, 4 * count * CLASSES
    targets, total_weight = 8 * count, 4
    assert saved.bytes == inputs + hidden + logarithms + targets + total_weight


def test_saved_bytes_of_attention_are_what_the_allocator_holds() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    inputs = torch.randn(4, 16, 32)

    def forward() -> Tensor:
        return model(inputs).square().mean()

    forward()
    held, loss = profiled(forward)
    del loss
    with SavedBytes([*model.parameters(), inputs]) as saved:
        forward()
    assert saved.bytes == pytest.approx(held, rel=0.02)


def test_what_a_checkpoint_computes_again_is_not_saved() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6)))
    inputs = torch.randn(8, 16, requires_grad=True)
    with SavedBytes(model.parameters()) as whole:
        model(inputs).sum().backward()
    with SavedBytes(model.parameters()) as less:
        checkpoint(model, inputs, use_reentrant=False).sum().backward()
    assert less.bytes * 5 < whole.bytes


def test_memory_that_several_tensors_share_counts_once() -> None:
    numbers = torch.randn(10, requires_grad=True)
    with SavedBytes([numbers]) as saved:
        twice = numbers * 2
        (twice * twice.view(2, 5).view(10)).sum().backward()
    assert saved.bytes == 40


def test_sizes_are_those_of_the_workers_and_then_powers_of_two() -> None:
    assert passes.sizes(48, None, (1, 2, 3), None) == [48, 24, 16, 32, 8, 4, 2, 1]
    assert passes.sizes(48, 10, (1, 2, 16), None) == [10, 3, 8, 4, 2, 1]
    assert passes.sizes(48, None, (1, 4), 8) == [6, 4, 2, 1]
    assert passes.sizes(1, None, (1, 2), None) == [1]


def test_one_slow_pass_does_not_make_the_spread() -> None:
    times = [1.0, 1.1, 0.9, 1.0, 1.05, 0.95, 1.0, 1.02, 0.98, 50.0]
    assert 0.01 < passes.spread(times) < 0.1
    assert passes.spread([2.0]) == 0.0


class Sleeps(torch.autograd.Function):
    """The identity, whose backward pass takes some time."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(0.02)
        return gradient


class Slow(nn.Module):
    """Four layers, whose backward passes take 20 ms each: the gradient of the last is there first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        for layer in self.layers:
            values = layer(Sleeps.apply(values))  # type: ignore[no-untyped-call]
        return values


def timed(trainer: Trainer) -> Passes:
    return Passes(trainer.components, Batches(trainer.components, RunState()))


def test_buckets_are_ready_when_the_backward_pass_has_come_to_them() -> None:
    trainer = trainer_of(model=Slow)
    trained = list(trainer.model.parameters())
    size = 4 * WIDTH * WIDTH
    found = readiness.measure(timed(trainer), trained, bucket_bytes=size, samples=12, seconds=0.5)
    assert [bucket.bytes for bucket in found] == [size + 4] * 4, "a count of the workers that used it goes with each"
    # Sleeping comes after each layer's own gradient, on the way down, but the first layer's inputs need no gradient.
    assert [bucket.ready for bucket in found] == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.15)
    assert all(parameter.grad is None for parameter in trained)


def test_updating_changes_no_weight_and_counts_what_the_optimizer_keeps() -> None:
    trainer = trainer_of(clip_gradients=1.0)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    seconds, kept, passing = updating.measure(trainer.components, timed(trainer), clip=1.0, samples=12, seconds=0.1)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    parameters = list(trainer.model.parameters())
    assert kept == sum(2 * each.nbytes for each in parameters) + 4 * len(parameters), "two moments, and a count"
    assert passing >= max(each.nbytes for each in parameters), "the root of a moment, while it is divided by"
    assert not trainer.components.optimizer.state
    assert trainer.components.optimizer.param_groups[0]["lr"] == 0.1
    assert seconds > 0


def test_batches_have_as_many_samples_as_were_asked_for() -> None:
    batches = Batches(trainer_of().components, RunState())
    assert [len(batches.of(count)[0]) for count in (1, 5, 12)] == [1, 5, 12]
    assert not batches.can_be(13)
    assert batches.of(5) is batches.of(5)


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        yield from zip(INPUTS, TARGETS, strict=True)


def test_batches_of_a_stream_are_cut_from_its_first() -> None:
    batches = Batches(trainer_of(Stream()).components, RunState())
    assert batches.most == 12
    assert torch.equal(batches.of(5)[0], batches.of(12)[0][:5])


class Paced(Dataset[tuple[Tensor, Tensor]]):
    """Takes so long for a sample, as a disk or a network would."""

    def __init__(self, seconds: float, *, computes: bool = False) -> None:
        self.seconds, self.computes = seconds, computes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.computes:
            until = time.thread_time() + self.seconds
            while time.thread_time() < until:
                pass
        else:
            time.sleep(self.seconds)
        return INPUTS[index], TARGETS[index]


def loader_facts(seconds: float, processes: int | str = 0, step_s: float = 1.0, **changes: bool) -> dict[str, Any]:
    data = mh.Data(train=Paced(seconds, **changes), batch_size=12, loader_workers=processes)  # type: ignore[arg-type]
    return loading.measure(trainer_of(data=data).components, RunState(), step_s=step_s, seconds=1.0)


def rate_of(seconds: float, processes: int | str = 0, step_s: float = 1.0) -> tuple[float, int]:
    found = loader_facts(seconds, processes, step_s)
    return found["loader_samples_per_second"], found["loader_processes"]


def test_a_loader_gives_as_many_samples_as_its_processes_fetch() -> None:
    (slow, _), (fast, none), (several, two) = rate_of(0.05), rate_of(0.01), rate_of(0.05, 2)
    assert slow < 20
    assert fast < 100
    assert (none, two) == (0, 2)
    assert several > 1.2 * slow
    assert fast > 1.5 * slow


@pytest.mark.skipif(sys.platform != "linux", reason="nobody counts what a process takes of the cores")
@pytest.mark.parametrize("processes", [0, 2])
def test_what_a_loader_takes_of_the_cores_is_told_from_what_it_waits_for(processes: int) -> None:
    computes, waits = (
        loader_facts(0.01, processes, computes=computes)["loader_processor_s"] for computes in (True, False)
    )
    assert waits < 0.5 * computes
    assert computes > 0.005


@pytest.mark.skipif(sys.platform != "linux", reason="nobody says what memory a process shares")
def test_memory_of_a_process_is_what_it_has_touched_until_it_gives_it_back() -> None:
    host_memory.give_back()
    before = machine.process_bytes([os.getpid()])
    held = bytearray(b"x" * 200_000_000)
    with_it = machine.process_bytes([os.getpid()])
    assert with_it - before == pytest.approx(len(held), rel=0.05)
    del held
    host_memory.give_back()
    assert machine.process_bytes([os.getpid()]) < before + 20_000_000
    assert machine.process_bytes([os.getpid(), 2**22 + 1]) == 0, "one that is not there: not known"


@pytest.mark.skipif(sys.platform != "linux", reason="nobody says what memory a process shares")
def test_memory_of_loader_processes_is_measured_where_there_are_some() -> None:
    assert loader_facts(0.001)["process_bytes"] == 0, "the worker's own, which is measured with it"
    assert loader_facts(0.001, 2)["process_bytes"] > 2_000_000


def test_a_loader_that_chooses_its_processes_does_so_by_the_rest_of_a_step() -> None:
    _, few = rate_of(0.002, "auto", step_s=10.0)
    _, many = rate_of(0.01, "auto", step_s=0.05)
    assert few == 0
    assert many >= 2


def test_copying_is_timed_by_the_byte_whatever_the_sizes_of_model_and_unit() -> None:
    times = [
        machine.copy_s_per_byte(torch.device("cpu"), unit, total) for unit, total in ((1 << 20, 8 << 20), (999, 999))
    ]
    assert all(1e-12 < each < 1e-6 for each in times)


def test_a_validation_takes_its_samples_whole_time() -> None:
    data = mh.Data(train=TensorDataset(INPUTS, TARGETS), validation=Paced(0.004), batch_size=12)
    trainer = trainer_of(data=data)
    validation = trainer._evaluation("validation")
    assert validation is not None
    assert 0.004 <= validating.measure(validation, trainer.model, seconds=0.5) < 0.04
    assert validation.passes.samples == SAMPLES, "the evaluation itself is left as it was"


@pytest.mark.parametrize("name", BY_LOSS[1:])
def test_what_a_compression_sends_on_four_workers_follows_from_two_and_eight(name: str) -> None:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(256, 512)), nn.Parameter(torch.randn(1024, 256))]
    config = DDP()
    found = compressions.measure(config, parameters, bucket_bytes=25_000_000, seconds=30)[name]
    sent = cost_of(name, config, parameters, rank=0, size=4, bucket_bytes=25_000_000).bytes_sent
    assert 2 * 3 / 4 * found.reduced_bytes + 3 * found.gathered_bytes == pytest.approx(sent, rel=0.02)
    assert found.arithmetic_s > 0
    assert found.processor_s > 0


@pytest.mark.parametrize(
    ("validate_every", "steps"),
    [("1 epoch", None), ("3 steps", 3), ("2 epochs", 12), ("10 s", 20), ("1 epoch or 4 s", 8)],
)
def test_how_often_is_validated_is_said_in_steps(validate_every: str, steps: int | None) -> None:
    trainer = trainer_of(validate_every=validate_every)
    assert measurer.validate_every(trainer.settings, trainer.components, 0.5) == steps


def test_step_of_one_worker_is_timed_when_memory_has_been_got() -> None:
    lengths = [60.0, 40.0, 30.0, 20.0, 15.0, 14.0, 13.0, 14.0]
    marks = [{"read": sum(lengths[:count])} for count in range(len(lengths) + 1)]
    assert measurer.full_step(marks) == 14.0
    assert measurer.full_step(marks[:-1]) == 0.0, "two are too few"


def test_time_around_a_step_is_neither_compute_nor_the_first_start() -> None:
    marks = [
        {"read": 10.0, "computed": 15.0, "updated": 15.2},
        {"read": 15.3, "computed": 16.0, "updated": 16.2},
        {"read": 16.3, "computed": 17.0, "updated": 17.2},
    ]
    assert measurer.around(marks) == pytest.approx(0.3)
    late = [*marks[:2], {name: when + 5.0 for name, when in marks[2].items()}]
    assert measurer.around(late) == pytest.approx(0.3), "of two gaps one was a neighbour's"


def test_lines_are_heard_among_those_of_a_script(capfd: pytest.CaptureFixture[str]) -> None:
    os.write(1, b"half a line")
    lines.send("measures", what="the loader")
    said = capfd.readouterr().out.splitlines()
    assert [lines.heard(line) for line in said] == [None, {"kind": "measures", "what": "the loader"}]
    assert lines.heard("[0] " + said[1]) == {"kind": "measures", "what": "the loader"}, "with a rank before it"
    for strange in ("", "text", said[1][:-3], "manyhosts-measures:" + json.dumps([1])):
        assert lines.heard(strange) is None


def test_sizes_that_cannot_be_computed_are_left_out_unless_none_can() -> None:
    trainer = trainer_of(model=lambda: nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)))
    found = passes.measure(timed(trainer), [12, 6, 2, 1], 1.5)
    assert [each.samples for each in found] == [2, 6, 12], "one sample has no variance"
    assert all(each.forward_s > 0 and each.backward_s > 0 and each.activation_bytes > 0 for each in found)
    wrong = trainer_of(model=lambda: nn.Linear(WIDTH + 1, 4))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        passes.measure(timed(wrong), [12, 6], 0.2)


def test_a_size_of_which_one_pass_takes_too_long_is_left_out() -> None:
    trainer = trainer_of(model=Slow)
    assert [each.samples for each in passes.measure(timed(trainer), [12, 6, 3], 0.1)] == [3]
