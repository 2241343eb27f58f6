"""What a plan says of updates by micro-batch, against a simulation of every pull and push, event by event."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from measured_training import MEASURED, group, machines

import manyhosts as mh
from manyhosts.planner.group import Group
from manyhosts.planner.measured import Compression, Measured, Network
from manyhosts.planner.plan import strategy_of
from manyhosts.planner.predict import predictions, ways
from manyhosts.planner.recommend import recommend
from manyhosts.planner.strategies.strategy import STRATEGIES
from manyhosts.strategies.asynchronous.served import owners_of

PIECES, SIZE = 24, 2
TRAINING = replace(MEASURED, global_batch=PIECES * SIZE, micro_batch=SIZE, step_other_s=0.0, samples=480)
MODEL = {"first": 250, "second": 250, "third": 250, "fourth": 250}
"""Its parameters: bytes by name, 1000 in all."""


def simulated(measured: Measured, asked: Group, servers: int | None) -> float:
    """Seconds of a step but for its meeting: who is free takes a piece, asks one server after another, and computes.

    A server sends one reply after another, takes in one push after another, and makes one update at a time.
    """
    network, workers = asked.between, asked.workers
    owners = list(owners_of(MODEL, servers, workers).values())
    kept = {rank: 250 * owners.count(rank) for rank in set(owners)}
    out, into, updates = (dict.fromkeys(kept, 0.0) for _ in range(3))
    passes = 0.3 * SIZE
    left = PIECES

    def begin(worker: int, at: float) -> tuple[float, int, str, int]:
        return (at + 2 * network.latency_s, worker, "pull", 0)

    events = [begin(worker, 0.0) for worker in range(workers)]
    left -= workers
    end = 0.0
    while events:
        now, worker, what, number = heapq.heappop(events)
        server = sorted(kept)[number] if number < len(kept) else -1
        if server < 0:
            if what == "pull":
                heapq.heappush(events, (now + passes, worker, "push", 0))
                continue
            end = max(end, now)
            if left:
                left -= 1
                heapq.heappush(events, begin(worker, now + 2 * network.latency_s))
            continue
        lines, travels = (out if what == "pull" else into), 0.0 if server == worker else kept[server]
        if travels:
            lines[server] = max(lines[server], now + network.latency_s) + travels / network.bytes_per_second
            now = lines[server] + network.latency_s
        if what == "push":
            updates[server] = now = max(updates[server], now) + measured.update_s * kept[server] / 1000
        heapq.heappush(events, (now, worker, what, number + 1))
    return end


@pytest.mark.parametrize("servers", [None, 1])
@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("bytes_per_second", [1e9, 10_000, 3_000])
def test_step_is_about_as_long_as_simulated(workers: int, servers: int | None, bytes_per_second: float) -> None:
    asked = group(workers, latency_s=0.002, bytes_per_second=bytes_per_second)
    model = STRATEGIES.load("parameter-server")(mh.ParameterServer(servers=servers))
    end = model._end_of_step(TRAINING, asked) if workers > 1 else 0.0
    predicted = model.step(TRAINING, asked).seconds - end
    assert predicted == pytest.approx(simulated(TRAINING, asked, servers), rel=0.25)


def test_a_server_for_all_limits_many_workers() -> None:
    asked = group(8, bytes_per_second=1_000)
    one, each = (
        STRATEGIES.load("parameter-server")(mh.ParameterServer(servers=servers)).step(TRAINING, asked).seconds
        for servers in (1, None)
    )
    assert one > 2 * each


def test_in_step_it_is_data_parallelism_that_hides_no_exchange() -> None:
    asked = group(4, bytes_per_second=1_000)
    found = STRATEGIES.load("parameter-server")(mh.ParameterServer(staleness=0)).step(TRAINING, asked)
    beside = STRATEGIES.load("ddp")(mh.DDP()).step(TRAINING, asked)
    assert found.compute == pytest.approx(beside.compute)
    assert found.communication_exposed > beside.communication_exposed


def test_hogwild_exchanges_next_to_nothing_and_each_micro_batch_is_an_update() -> None:
    found = STRATEGIES.load("hogwild")(mh.Hogwild()).step(TRAINING, group(1, 4))
    assert found.communication_exposed == pytest.approx(0, abs=1e-9)
    assert found.update == pytest.approx(PIECES / 4 * TRAINING.update_s)


def test_less_is_pushed_with_a_compression() -> None:
    asked = group(4, bytes_per_second=1_000)
    rounded = replace(
        TRAINING,
        compression={"bf16": Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=1)},
    )
    plain, less = (
        STRATEGIES.load("parameter-server")(mh.ParameterServer(compression=name)).step(rounded, asked).seconds
        for name in ("none", "bf16")
    )
    assert less < plain


@pytest.mark.parametrize("strategy", [mh.ParameterServer(), mh.ParameterServer(staleness=2), mh.Hogwild()])
def test_a_plan_has_it_where_the_script_asks_for_it_and_advises_it_never(strategy: object) -> None:
    strategy.check_planned(None)  # type: ignore[attr-defined]
    slow = machines(4, network=Network(latency_s=0.0, bytes_per_second=200))
    own = strategy_of({"name": strategy.name})  # type: ignore[attr-defined]
    found = predictions(TRAINING, slow, slow.sizes(), ways(TRAINING, own))
    name = strategy.name  # type: ignore[attr-defined]
    assert {each.workers for each in found if each.strategy == name} == {2, 4}
    assert name not in {each.strategy for each in predictions(TRAINING, slow, slow.sizes(), ways(TRAINING))}
    fast = [replace(each, epoch_seconds=1e-3, why_not="") if each.strategy == name else each for each in found]
    advised = recommend(fast)
    assert advised.best.strategy != name
    assert "do not wait for each other's updates" in advised.why
    fits = {each.fits for each in found if each.strategy == name}
    assert fits == {name != "hogwild"}, "which is of one host"


def test_pauses_of_one_worker_are_waited_for_at_the_meeting_alone() -> None:
    spread = replace(TRAINING, compute=tuple(replace(each, spread_s=0.1) for each in TRAINING.compute))
    asked = group(4)
    alone = STRATEGIES.load("parameter-server")(mh.ParameterServer()).step(spread, asked).straggler
    assert 0 < alone < STRATEGIES.load("ddp")(mh.DDP()).step(spread, asked).straggler
