"""`manyhosts plan`: its words, and what it shows of a plan."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
from measured_training import MEASURED, machines

from manyhosts.cli import plan
from manyhosts.cli.main import main
from manyhosts.cli.plan import print_plan, table, worth_a_look
from manyhosts.communication.compression.choose import BY_LOSS
from manyhosts.config.pipelined import Pipeline
from manyhosts.config.strategies import DDP
from manyhosts.config.tensor_cut import Tensor
from manyhosts.planner.interval import past
from manyhosts.planner.measured import Compression, Network, Tried
from manyhosts.planner.plan import Plan, make, strategy_of

SLOW = Network(latency_s=1e-3, bytes_per_second=2000.0)
COMPRESSED = {
    "bf16": Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=4),
    "topk": Compression(arithmetic_s=30.0, reduced_bytes=10, gathered_bytes=0, exchanges=4),
}


def plan_of(*, price: float | None = None, device_memory_bytes: int = 0) -> Plan:
    measured = replace(MEASURED, compression=COMPRESSED, device_memory_bytes=device_memory_bytes)
    return make(measured, [machines(8, network=SLOW, price=price)])


def shown(plan: Plan, *, everything: bool = False) -> str:
    stream = io.StringIO()
    print_plan(plan, stream, everything=everything)
    return stream.getvalue()


def test_a_plan_is_read_on_80_columns() -> None:
    plan = plan_of(price=12.5, device_memory_bytes=10_000)
    large = tuple(
        replace(each, memory=replace(each.memory, parameters=123_400_000, process=456_000_000))
        for each in plan.predictions
    )
    assert "process" in shown(replace(plan, predictions=large))
    assert max(map(len, shown(replace(plan, predictions=large), everything=True).splitlines())) <= 80
    for everything in (False, True):
        assert max(map(len, shown(plan, everything=everything).splitlines())) <= 80
    assert len(table(plan.predictions)) == len(plan.predictions) + 1


def test_of_each_size_only_ways_that_are_faster_than_plainer_ones_are_shown() -> None:
    plan = plan_of()
    ways = {(each.workers, each.strategy, each.compression) for each in worth_a_look(plan.predictions)}
    assert {(1, "single", "none"), (2, "ddp", "none"), (2, "ddp", "bf16")} <= ways
    assert not any(compression == "topk" for *_, compression in ways), "its arithmetic takes half a minute"
    assert "topk" in shown(plan, everything=True)


def test_a_busy_machine_and_hosts_that_are_one_machine_are_told() -> None:
    hosts = replace(machines(4), hosts_per_machine=4)
    plans = [make(replace(MEASURED, cores=2, load=load), [hosts], sizes=[(1, 1), (4, 1)]) for load in (3.6, 2.9)]
    busy, quiet = (" ".join(shown(plan).split()) for plan in plans)
    assert "careful: 4 processes wanted the 2 cores" in busy
    assert "processes wanted" not in quiet
    assert "4 of the hosts are one machine, and share its 2 cores" in quiet


def test_its_own_past_stands_at_the_head_and_a_range_beside_each_step() -> None:
    plan = plan_of()
    text = shown(plan)
    assert " ".join(text.split()).startswith(f"{past()} A study measures.")
    low, high = plan.predictions[0].step_range
    assert f"{low:.2g}-{high:.2g} s" in text
    assert max(high, low) < 10, "two digits are as they are printed"


def test_real_steps_that_were_timed_are_shown_and_where_there_was_no_time_it_is_said() -> None:
    steps = {2: {"none": 0.0123, "powersgd": 0.5}, 8: {}}
    tried = tuple(Tried(nodes=nodes, workers_per_node=1, network=SLOW, steps=each) for nodes, each in steps.items())
    text = " ".join(shown(make(replace(MEASURED, tried=tried), [machines(8, network=SLOW)])).split())
    assert "real steps of 2 hosts, without data: none 12.3 ms, powersgd 500 ms;" in text
    assert "real steps of 8 hosts: there was no time for any" in text


def test_ways_that_there_was_no_time_to_measure_are_named() -> None:
    words = " ".join(shown(plan_of()).split())
    assert "--seconds was over before fp16, int8, powersgd could be measured, so no way with them is predicted" in words
    nothing = Compression(arithmetic_s=0.0, reduced_bytes=500, gathered_bytes=0, exchanges=4)
    every = replace(MEASURED, compression=dict.fromkeys(plan.COMPRESSIONS, nothing))
    assert "--seconds" not in shown(make(every, [machines(2)]))
    assert (*BY_LOSS,) == ("none", *plan.COMPRESSIONS)


def test_what_does_not_fit_is_marked_with_the_reason() -> None:
    text = shown(plan_of(device_memory_bytes=12_000), everything=True)
    rows = [line.split() for line in text.splitlines() if line.startswith(" ") and "single" in line]
    assert [row[3] for row in rows] == ["*"], "the whole batch on one worker"
    assert "* does not fit: a worker needs" in text or "* does not fit: 1 worker" in text


def test_the_advice_is_the_recommendations_own(capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_of()
    assert " ".join(plan.recommendation.why.split()) in " ".join(shown(plan).split())
    assert plan.to_json()["recommendation"]["why"] == plan.recommendation.why


def test_the_scripts_own_strategy_is_predicted_with_its_settings() -> None:
    config = strategy_of({"name": "ddp", "bucket_mb": 3.0, "compression": "bf16", "powersgd_rank": 2})
    assert config == DDP(bucket_mb=3.0, compression="bf16", powersgd_rank=2)
    assert strategy_of({"name": "pipeline", "schedule": "gpipe"}) == Pipeline(schedule="gpipe")
    assert strategy_of({"name": "tensor"}) == Tensor()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "2", "--network", "1 Gbit/s"], "--network is between machines"),
        (["--workers", "1,x"], "--workers is '1,x'"),
        (["--workers", "2", "--nodes", "2"], "machines are counted, too"),
        (["--nodes", "1,2"], "nothing says how fast they talk"),
        (["--network", "fast"], "cannot read the network 'fast'"),
        (["--nodes", "9", "--hosts", "a,b"], "--nodes asks for 9 hosts, and 2 are named"),
        (["--price", "-1"], "--price is -1"),
        (["--seconds", "0.1"], "--seconds is 0.1"),
        (["--machines", "nowhere.toml"], "cannot read nowhere.toml"),
        (["--machines", "catalog.toml", "--price", "3"], "both --machines and --price are given"),
        (["--calibrate", "nowhere"], "nowhere"),
        (["--set", "batch=3"], "batch"),
        (["--env", "NOWHERE_TO_BE_FOUND"], "'NOWHERE_TO_BE_FOUND' has no value here"),
        (["--env", "RANK=3"], "RANK differs from worker to worker"),
    ],
)
def test_words_that_cannot_be_are_refused_before_anything_is_started(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import manyhosts\nraise SystemExit('it was started')\n")
    Path("catalog.toml").write_text("[small]\ncount = 1\n")
    assert main(["plan", *words, "train.py"]) == 2
    assert said in capsys.readouterr().err


def test_a_script_that_does_not_import_manyhosts_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\nraise SystemExit('it was started')\n")
    assert main(["plan", str(script)]) == 2
    assert "trains without mh.Trainer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sizes"),
    [
        ([], "1 here, 2 here, 4 here"),
        (["--workers", "3"], "3 here"),
        (["--hosts", "a,b,c"], "1 here, 2 x 1, 3 x 1"),
        (["--nodes", "1,4", "--workers-per-node", "1,4", "--network", "1 Gbit/s"], "1 here, 4 here, 4 x 1, 4 x 4"),
        (["--machines", "catalog.toml"], "1 here, 2 here, 2 x 1, 2 x 2"),
    ],
)
def test_a_dry_run_says_what_would_be_measured_and_predicted(
    words: list[str], sizes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("import manyhosts\n")
    Path("catalog.toml").write_text('[small]\ncount = 2\nworkers = 2\nbetween = "1 Gbit/s"\n')
    assert main(["plan", "--dry-run", *words, "train.py"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"predict: {sizes}"
