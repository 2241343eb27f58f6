"""Hosts that share no disk: one comes back with an empty one, and the run continues as if nothing had been."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from alone import SOURCE, undisturbed
from commands import summary
from launching import wait_until
from remote import run, start
from runs import step_lines

from manyhosts.lab import Host, Lab
from manyhosts.records.manifest import found_in


@pytest.mark.timeout(400)
def test_leader_that_comes_back_with_an_empty_disk_gets_all_from_its_neighbour(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    options = ["--hosts", ",".join(hosts.names), "--run-dir", "many"]
    first = run(hosts, tmp_path, SOURCE, "--env", "DURATION=12 steps", *options)
    assert first.code == 0, first.err
    hosts[0].kill()
    hosts[0].boot()
    second = run(hosts, tmp_path, SOURCE, "--env", "DURATION=24 steps", *options)
    assert second.code == 0, second.err
    assert "continues after step 12" in second.out
    assert summary(tmp_path / "many")["weights_sha256"] == undisturbed(tmp_path, 24)["weights_sha256"]
    assert [line["step"] for line in step_lines(tmp_path / "many")] == list(range(1, 25))


def agent_of(host: Host) -> int:
    [agent] = [pid for pid, words in host.processes().items() if words.startswith("manyhosts agent")]
    return agent


@pytest.mark.slow  # see test_separate_disks of tests/multiprocess for a leader with another disk
@pytest.mark.timeout(400)
def test_leader_whose_host_is_lost_while_training_is_followed_by_one_that_has_the_records(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    options = ["--hosts", ",".join(hosts.names), "--run-dir", "many", "--env", "SLOW=0.01"]
    process = start(hosts, tmp_path, SOURCE, "--env", "DURATION=100 steps", *options)
    records = [host.path(tmp_path / "many" / "metrics.jsonl") for host in hosts]
    try:
        wait_until(lambda: records[0].exists() and '"step": 20,' in records[0].read_text(), "it trains")
        os.kill(agent_of(hosts[0]), signal.SIGKILL)
        out, err = process.communicate(timeout=180)
    finally:
        hosts.desk.end(process)
        process.communicate()
    assert process.returncode == 0, err
    assert "continued with 2 workers after rank 0 on host lab1 was lost" in out
    run_dirs = [tmp_path / "many", *(host.path(tmp_path / "many") for host in hosts[1:])]
    assert summary(run_dirs[0])["weights_sha256"] == undisturbed(tmp_path, 100)["weights_sha256"]
    for run_dir in run_dirs:  # here; on the second host, which led; on the third, which has had a copy since then
        assert [line["step"] for line in step_lines(run_dir)] == list(range(1, 101))


@pytest.mark.timeout(400)
@pytest.mark.slow
def test_hosts_without_a_launcher_save_on_their_own_disks_and_any_one_of_them_is_enough(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    options = ["--hosts", ",".join(hosts.names), "--run-dir", "many", "--set", "snapshots.every=1000 steps"]
    options += ["--env", "DURATION=40 steps", "--env", "SLOW=0.05", "--head-timeout", "2"]
    process = start(hosts, tmp_path, SOURCE, *options)
    run_dirs = [host.path(tmp_path / "many") for host in hosts]
    try:
        wait_until(lambda: "step" in _text(run_dirs[2] / "metrics.jsonl"), "it trains")
        wait_until(lambda: '"step": 3,' in _text(run_dirs[0] / "metrics.jsonl"), "some steps are done")
        hosts.desk.end(process)
        wait_until(lambda: not any(_workers(host) for host in hosts), "all have ended")
    finally:
        hosts.desk.end(process)
        process.communicate()
    saved = [max((found.step for found in found_in(run_dir / "snapshots")), default=0) for run_dir in run_dirs]
    assert 3 <= min(saved) <= max(saved) < 40, saved
    hosts[0].kill()
    hosts[0].boot()
    second = run(hosts, tmp_path, SOURCE, *options)
    assert second.code == 0, second.err
    assert f"continues after step {max(saved[1:])}" in second.out
    assert summary(tmp_path / "many")["weights_sha256"] == undisturbed(tmp_path, 40)["weights_sha256"]
    for host in hosts:
        assert [line["step"] for line in step_lines(host.path(tmp_path / "many"))] == list(range(1, 41))


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _workers(host: Host) -> list[str]:
    return [words for words in host.processes().values() if words.startswith("manyhosts")]
