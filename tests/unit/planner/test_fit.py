"""Which way to train is the simplest that fits, by arithmetic that can be done on paper."""

from __future__ import annotations

from dataclasses import replace

import pytest

from manyhosts.config.asynchronous import ParameterServer
from manyhosts.config.strategies import BY_NAME, gives_up
from manyhosts.planner import fit
from manyhosts.planner.fit import Training, Way, simplest, ways, workers_that_would_do
from manyhosts.planner.memory import ModelBytes

MB = 1_000_000
MODEL = ModelBytes(
    parameters=100 * MB, gradients=100 * MB, optimizer=200 * MB, buffers=0, activations=80 * MB,
    units=(30 * MB, 30 * MB, 30 * MB, 10 * MB), on_cpu=True,
)  # fmt: skip
"""AdamW in fp32: 4 + 4 + 8 bytes for each of 25 million parameters; a snapshot copies 300 MB, shared out."""
TRAINING = Training(model=MODEL, checkpointed=20 * MB, is_shared=True)
ORDER = [f"{how}{again}" for how in ("ddp", "fsdp zero=1", "fsdp zero=2", "fsdp zero=3")
         for again in ("", ", activation checkpointing")]  # fmt: skip


def needed(found: list[Way]) -> dict[str, int]:
    return {each.name: each.needed for each in found}


def test_ways_come_the_simplest_first() -> None:
    assert [each.name for each in ways(TRAINING, 2)] == ORDER


@pytest.mark.parametrize(
    ("change", "workers", "names"),
    [
        ({"is_shared": False}, 1, ["single", "single, activation checkpointing"]),
        ({"checkpointed": None}, 2, ORDER[::2]),
        ({"joins": True}, 1, ORDER[:2]),
        ({"virtual_workers": 4}, 2, ORDER[:2]),
        ({"model": replace(MODEL, units=())}, 2, ORDER[:2]),
        ({}, 1, ORDER[:2]),
    ],
)
def test_only_what_can_be_is_looked_at(change: dict[str, object], workers: int, names: list[str]) -> None:
    assert [each.name for each in ways(replace(TRAINING, **change), workers)] == names  # type: ignore[arg-type]


def test_what_is_needed_is_the_sum_and_a_reserve() -> None:
    first, *_ = ways(TRAINING, 2)
    assert first.memory.total == (100 + 100 + 200 + 80 + 150) * MB
    assert first.needed == round(1.1 * 630 * MB) + 64 * MB
    on_gpu, *_ = ways(replace(TRAINING, model=replace(MODEL, on_cpu=False)), 2)
    assert on_gpu.needed == round(1.1 * 480 * MB), "the copy for a snapshot lies in the host's memory"


@pytest.mark.parametrize("name", ORDER)
def test_first_one_that_fits_is_taken(name: str) -> None:
    found = ways(TRAINING, 2)
    exactly = needed(found)[name]
    first = next(each.name for each in found if each.needed <= exactly)
    chosen, below = simplest(found, exactly), simplest(found, exactly - 1)
    assert chosen is not None
    assert chosen.name == first
    assert below is None or needed(found)[below.name] < exactly


def test_all_the_memory_there_is_means_the_simplest_and_none_means_nothing() -> None:
    found = ways(TRAINING, 2)
    assert simplest(found, 10**15) is found[0]
    assert simplest(found, 0) is None


def test_virtual_workers_keep_sums() -> None:
    plain, virtual = ways(TRAINING, 2)[0], ways(replace(TRAINING, virtual_workers=4), 2)[0]
    assert virtual.memory.total - plain.memory.total == 2 * MODEL.gradients  # a finished part's sum, and an inbox


def test_fewest_workers_that_would_do_are_found() -> None:
    left = 330 * MB
    assert simplest(ways(TRAINING, 2), left) is None
    count = workers_that_would_do(TRAINING, 2, left)
    assert count is not None
    assert simplest(ways(TRAINING.on(count, 2), count), left) is not None
    assert simplest(ways(TRAINING.on(count - 1, 2), count - 1), left) is None
    assert workers_that_would_do(TRAINING, 2, 0) is None
    assert workers_that_would_do(replace(TRAINING, virtual_workers=4), 2, 0) is None


def test_batch_is_shared_out_over_more_workers() -> None:
    more = TRAINING.on(8, 2)
    assert (more.model.activations, more.checkpointed) == (20 * MB, 5 * MB)
    assert more.model.parameters == MODEL.parameters


def test_table_has_the_arithmetic() -> None:
    lines = fit.table((each.name, each.memory) for each in ways(TRAINING, 2))
    assert lines[0].split() == ["how", "weights", "gradients", "optimizer", "activations", "other", "in", "all"]
    assert lines[1].replace(" MB", "").split() == ["ddp", "100.0", "100.0", "200.0", "80.0", "150.0", "630.0"]
    assert len({len(line) for line in lines}) == 1
    assert fit.in_one_line(ways(TRAINING, 2)[0].memory) == (
        "100.0 MB parameters + 100.0 MB gradients + 200.0 MB optimizer + 80.0 MB activations + 150.0 MB other"
    )


def test_in_mixed_precision_a_parameter_takes_16_bytes_with_adamw() -> None:
    """As they are kept here: parameters, gradients and both averages in fp32; copies in bf16 are activations."""
    first, *_ = ways(replace(TRAINING, model=replace(MODEL, on_cpu=False, activations=0)), 2)
    assert first.memory.total == 16 * (MODEL.parameters // 4)


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_auto_looks_at_none_that_gives_up_a_promise(workers: int) -> None:
    model = replace(MODEL, blocks=(10 * MB,) * 8, divisible=80 * MB)
    found = ways(replace(TRAINING, model=model, is_shared=workers > 1), workers)
    assert found
    assert not [each.name for each in found if gives_up(each.strategy)]
    assert not {each.strategy.name for each in found} & {"parameter-server", "hogwild", "pipedream", "local-sgd"}


def test_each_strategy_says_what_it_gives_up_and_why() -> None:
    lost = {name: gives_up(kind()) for name, kind in BY_NAME.items() if gives_up(kind())}
    assert lost == {
        "local-sgd": ("workers", "ranks"),
        "diloco": ("workers", "ranks"),
        "parameter-server": ("workers", "micro", "resume"),
        "hogwild": ("workers", "micro", "resume"),
        "pipedream": ("micro",),
    }
    assert all(getattr(BY_NAME[name], "by_design") for name in lost)  # noqa: B009
    assert not gives_up(ParameterServer(staleness=0))
