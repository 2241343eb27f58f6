"""Fully sharded data parallelism equals one process, and `ddp` where one process computes other shapes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from sharded import Case, Outcome, assert_same, fit, outcome, trained
from torch import nn

from manyhosts.errors import ConfigError
from manyhosts.strategies.fsdp import exchange

pytestmark = pytest.mark.multiprocess

CASES = {
    "plain": Case(),
    "three micro-batches": Case(trainer={"micro_batch_size": 2}),
    "micro-batches of one": Case(trainer={"micro_batch_size": 1}),
    "clipped": Case(trainer={"clip_gradients": 0.1}),
    "batch of two": Case(samples=5, batch=2),  # and one of one: some workers have none
    "batch norm": Case(block={"norm": nn.BatchNorm1d}),
    "loss with parameters": Case(centred=True),
    "AdamW": Case(optimizer="AdamW"),
}
"""What one process computes, too: sums in another order apart."""
ALIKE = {
    "bf16": Case(trainer={"precision": "bf16"}),
    "fp16": Case(trainer={"precision": "fp16", "clip_gradients": 0.5}),
    "dropout": Case(block={"dropout": 0.3}),
    "accumulated batch norm": Case(block={"norm": nn.BatchNorm1d, "dropout": 0.1}, trainer={"micro_batch_size": 3}),
}
"""What `ddp` on as many workers computes in the same shapes, from the same random numbers."""
WAYS: dict[int, dict[str, Any]] = {2: {"zero": 2}, 3: {"zero": 3}, 4: {"zero": 1, "shard": 2}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    return trained(1, CASES, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("workers", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (2, 4))])
def test_parts_on_several_workers_equal_one_process(workers: int, alone: Any, tmp_path: Path) -> None:
    cases = {name: replace(case, options=WAYS[workers]) for name, case in CASES.items()}
    for name, found in trained(workers, cases, tmp_path).items():
        assert len(found.norms) == 5, name
        assert_same(alone[name], found)


@pytest.mark.slow  # in `make test` they equal one process
def test_parts_equal_whole_models_on_as_many_workers(tmp_path: Path) -> None:
    ways = ({"zero": 3}, {"zero": 1})  # all of them: the slow test below
    cases = {f"{name}, {way}": replace(case, options=way) for way in ways for name, case in ALIKE.items()}
    whole = {name: replace(case, strategy="ddp") for name, case in ALIKE.items()}
    found = trained(2, {**cases, **whole}, tmp_path)
    for name in ALIKE:
        for way in ways:
            assert_same(found[name], found[f"{name}, {way}"])


def test_sums_in_bf16_train_nearly_alike(alone: Any, tmp_path: Path) -> None:
    names = ("plain", "three micro-batches", "clipped", "batch of two")
    cases = {name: replace(CASES[name], options={"reduce": "bf16"}) for name in names}
    scaled = replace(ALIKE["fp16"], options={"reduce": "bf16"})
    found = trained(2, {**cases, "fp16": scaled, "fp16, exact": replace(scaled, options={})}, tmp_path)
    for name in names:
        assert_same(alone[name], found[name], relative=0.01)
        assert found[name].norms != pytest.approx(alone[name].norms, rel=1e-5), "it is rounded"
    assert_same(found["fp16, exact"], found["fp16"], relative=0.01)


def fit_on_hosts(rank: int, cases: dict[str, Case], folder: Path) -> tuple[int, dict[str, Any]]:
    """As each worker were on a host of its own, and every unit long. The most segments of one exchange come back."""
    os.environ |= {"GROUP_RANK": str(rank), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    exchange._LEAST_BYTES = 16
    counts, cut = [], exchange.segments

    def counted(length: int, itemsize: int, *, is_far: bool) -> list[slice]:
        counts.append(len(found := cut(length, itemsize, is_far=is_far)))
        return found

    exchange.segments = counted
    answer = fit(rank, cases, folder)
    return max(counts), answer


def test_what_goes_between_hosts_goes_in_segments_and_changes_no_bit(tmp_path: Path) -> None:
    ways = {"whole sums": {"zero": 2}, "in bf16": {"zero": 3, "reduce": "bf16"}}
    cases = {name: replace(CASES["clipped"], options=way) for name, way in ways.items()}
    near = trained(3, cases, tmp_path / "near")
    answers = run_ranks(3, fit_on_hosts, cases, tmp_path / "far")
    assert [most for most, _ in answers] == [4, 4, 4]
    for name in cases:
        far = outcome(tmp_path / "far" / name, answers[0][1][name])
        assert (far.sha, far.norms, far.bytes_sent) == (near[name].sha, near[name].norms, near[name].bytes_sent)


def fit_on_two_hosts(rank: int, local: tuple[int, ...], cases: dict[str, Case], folder: Path) -> Any:
    """Of so many workers each. What was refused comes back, or the outcomes."""
    node = 0 if rank < local[0] else 1
    own = {"GROUP_RANK": node, "LOCAL_RANK": rank - node * local[0], "LOCAL_WORLD_SIZE": local[node]}
    os.environ |= {name: str(value) for name, value in own.items()}
    try:
        return fit(rank, cases, folder)
    except ConfigError as refused:
        return refused.what


def test_workers_of_a_host_share_a_copy(alone: Any, tmp_path: Path) -> None:
    """Four workers on two hosts: as if somebody had counted two."""
    rounded = {"gather": "bf16"}
    cases = {name: CASES[name] for name in ("plain", "batch of two", "batch norm", "micro-batches of one")}
    cases |= {"scaled": ALIKE["fp16"], "rounded": replace(ALIKE["bf16"], options=rounded)}
    by_host = {name: replace(case, options={**case.options, "shard": "host"}) for name, case in cases.items()}
    counted = {name: replace(case, options={**case.options, "shard": 2}) for name, case in cases.items()}
    answers = run_ranks(4, fit_on_two_hosts, (2, 2), by_host, tmp_path / "host")
    assert all(answer == answers[0] for answer in answers)
    found = trained(4, {**counted, "rounded, one copy": cases["rounded"]}, tmp_path / "counted")
    for name in cases:
        assert answers[0][name]["sha"] == found[name].sha
        if name in alone:
            assert_same(alone[name], outcome(tmp_path / "host" / name, answers[0][name]))
    assert_same(found["rounded, one copy"], found["rounded"], relative=1e-3)


def test_hosts_with_other_numbers_of_workers_do_not_share_copies(tmp_path: Path) -> None:
    cases = {"plain": replace(CASES["plain"], options={"shard": "host"})}
    for reported in run_ranks(3, fit_on_two_hosts, (2, 1), cases, tmp_path):
        assert reported.startswith("the host of rank 0 has 2 workers, and not every host has as many")


def test_segments_of_an_exchange() -> None:
    whole = exchange.segments(10**6, 4, is_far=False)
    assert whole == [slice(0, 10**6)]
    assert exchange.segments(10, 4, is_far=True) == [slice(0, 10)]
    several = exchange.segments(10**6 + 3, 4, is_far=True)
    assert len(several) == 4
    assert [each.start for each in several] == [0, *(each.stop for each in several[:-1])]
    assert several[-1].stop == 10**6 + 3
    assert len(exchange.segments(200_000, 4, is_far=True)) == 3, "none is shorter than is worth a message"


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_every_way_on_every_number_of_workers_equals_one_process_or_whole_models(
    workers: int, alone: Any, tmp_path: Path
) -> None:
    shards = [shard for shard in (None, 1, 2) if shard != workers and (shard is None or workers % shard == 0)]
    ways = [{"zero": zero, "shard": shard} for zero in (1, 2, 3) for shard in shards]
    whole = trained(workers, {name: replace(case, strategy="ddp") for name, case in ALIKE.items()}, tmp_path / "whole")
    for number, way in enumerate(ways):
        cases = {name: replace(case, options=way) for name, case in {**CASES, **ALIKE}.items()}
        for name, found in trained(workers, cases, tmp_path / str(number)).items():
            # In float64 all are equal to 1e-15: BatchNorm of two samples makes the rounding of a sum larger.
            relative = 3e-5 if name == "accumulated batch norm" else 1e-5
            assert_same(alone[name] if name in CASES else whole[name], found, relative=relative)
