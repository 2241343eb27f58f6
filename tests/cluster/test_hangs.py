"""What gets no further on real hosts is named with host, rank and seconds; and where others can, they continue."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import run as run_here
from launching import wait_until
from remote import run, start

from manyhosts.lab import Host, Lab

PATIENCE_S = 5
LONG_S = 120
"""The longest time until a sentence, on a machine that is busy with other things."""

TRAINING = """
    import os, time
    import torch
    from torch import nn
    import manyhosts as mh

    class Slow(nn.Linear):
        def forward(self, inputs):
            time.sleep(0.02 if os.environ["WORLD_SIZE"] != "1" else 0)
            return super().forward(inputs)

    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 4, (64,)))
    trainer = mh.Trainer(
        model=lambda: nn.Sequential(Slow(8, 4096), nn.Linear(4096, 4)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        data=mh.Data(train=data, batch_size=16),
        virtual_workers=4,
        snapshots=mh.Snapshots(every="1000000 steps"),
    )
    trainer.fit(os.environ["DURATION"])
"""


def steps_done(hosts: Lab, run_dir: Path) -> int:
    """How far the run is, as the records of the hosts tell."""
    last = 0
    for host in hosts:
        path = host.path(run_dir / "metrics.jsonl")
        for line in path.read_text().splitlines() if path.exists() else []:
            if line.startswith('{"event": "step"') and line.endswith("}"):
                last = max(last, json.loads(line)["step"])
    return last


class Training:
    """A run of `TRAINING` without end on the hosts of a lab, read as it goes."""

    def __init__(self, hosts: Lab, folder: Path, *options: str, source: str = TRAINING) -> None:
        self.hosts, self.run_dir, self.source = hosts, folder / "run", source
        words = ["--hosts", ",".join(hosts.names), "--run-dir", str(self.run_dir), "--hang-timeout", str(PATIENCE_S)]
        self.process = start(hosts, folder, source, "--env", "DURATION=1000000 steps", *words, *options)

    def reported(self) -> str:
        """What the first host has put on record."""
        return self.hosts[0].path(self.run_dir / "metrics.jsonl").read_text()

    def wait_for(self, true: Callable[[], bool], what: str) -> None:
        wait_until(lambda: self.process.poll() is not None or true(), what, timeout_s=LONG_S)
        assert self.process.poll() is None, self.process.communicate()

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: steps_done(self.hosts, self.run_dir) >= step, f"step {step}")

    def finish(self) -> str:
        """Ask it to stop, and see that it does. Returns all that was printed."""
        try:
            self.hosts.desk.end(self.process, signal.SIGTERM)
            out, err = self.process.communicate(timeout=LONG_S)
        except subprocess.TimeoutExpired:
            self.hosts.desk.end(self.process)
            raise AssertionError(f"no end: {self.process.communicate()}") from None
        return out + err


def assert_as_if_nothing_had_happened(training: Training, folder: Path, reported: str) -> None:
    """The weights are, bit for bit, those of one process that trained as many steps."""
    summary = json.loads((training.run_dir / "summary.json").read_text())
    assert summary["status"] == "interrupted", reported
    run_here(folder, training.source, "--env", f"DURATION={summary['steps']} steps", "--run-dir", "one", name="one.py")
    alone = json.loads((folder / "one" / "summary.json").read_text())
    assert summary["weights_sha256"] == alone["weights_sha256"], reported
    assert summary["steps_redone"] <= summary["restarts"]


@pytest.mark.timeout(400)
def test_frozen_host_is_dropped_and_taken_in_again_when_it_is_thawed(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    training = Training(hosts, tmp_path, "--nodes", "2:3")
    training.wait_for_step(10)
    old = set(hosts[2].processes())
    begin = time.monotonic()
    hosts[2].freeze()
    training.wait_for(lambda: '"event": "restart"' in training.reported(), "the others continue")
    training.wait_for_step(steps_done(hosts, training.run_dir) + 5)
    seconds = time.monotonic() - begin
    hosts[2].thaw()
    training.wait_for(lambda: "continues with 3 workers, 1 of them new" in training.reported(), "it is taken in again")
    training.wait_for_step(steps_done(hosts, training.run_dir) + 5)
    left = {
        words for process, words in hosts[2].processes().items() if process in old and words.startswith("manyhosts ")
    }
    reported = training.finish()
    assert not left, "the workers from before are ended"
    said = re.search(r"rank 2 on host lab3 was lost: the host has given no sign of life for (\d+) s", reported)
    assert said, f"continued after {seconds:.1f} s:\n{reported}"
    assert int(said[1]) >= PATIENCE_S
    assert_as_if_nothing_had_happened(training, tmp_path, reported)


def sent(host: Host) -> int:
    """Bytes that a host has put on its wire."""
    return int(host.path("/sys/class/net/eth0/statistics/tx_bytes").read_text())


def cut_in_the_middle_of_an_exchange(training: Training, host: Host, of_bytes: int) -> None:
    """Make the wire of `host` so slow that a step's exchange of `of_bytes` lasts seconds; cut it while that runs."""
    host.slow("8mbit")
    before = seen = sent(host)  # what went out while the wire was being slowed does not count
    deadline = time.monotonic() + LONG_S
    while True:
        time.sleep(0.05)
        last, seen = seen, sent(host)
        if seen - before > of_bytes / 10 and seen - last > 10_000:  # more than signs of life
            break
        assert time.monotonic() < deadline, "nothing is exchanged"
    host.cut()
    assert seen - before < of_bytes, "the exchange is over already"


@pytest.mark.slow  # a host that falls silent: the test above
@pytest.mark.timeout(400)
def test_cable_that_is_cut_in_the_middle_of_an_all_reduce_costs_the_others_a_step(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(3)
    wide = 100_000
    training = Training(hosts, tmp_path, "--nodes", "2:3", source=TRAINING.replace("4096", str(wide)))
    training.wait_for_step(3)
    begin, step = time.monotonic(), steps_done(hosts, training.run_dir)
    cut_in_the_middle_of_an_exchange(training, hosts[2], of_bytes=4 * wide * (8 + 1 + 4))
    training.wait_for(lambda: '"event": "restart"' in training.reported(), "the others continue")
    training.wait_for_step(steps_done(hosts, training.run_dir) + 3)
    seconds = time.monotonic() - begin
    reported = training.finish()
    assert "rank 2 on host lab3 was lost" in reported, f"continued after {seconds:.1f} s from step {step}:\n{reported}"
    assert_as_if_nothing_had_happened(training, tmp_path, reported)


FOREIGN = """
    import os, sys
    import torch, torch.distributed as dist
    from torch import nn

    def spin():
        while True:
            pass

    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(100):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        if step == 20 and dist.get_rank() == 1:
            {fault}
"""


@pytest.mark.slow  # test_hangs of tests/multiprocess; the host of a rank: the tests below
def test_endless_loop_on_a_host_is_named_with_host_rank_step_and_seconds(four: Lab, tmp_path: Path) -> None:
    options = ("--hosts", "lab1,lab2", "--hang-timeout", str(PATIENCE_S))
    ended = run(four, tmp_path, FOREIGN.format(fault="spin()"), *options)
    assert re.search(
        r"manyhosts: rank 1 on host lab2 computes without end at script.py:[78] in spin, and has got no further "
        r"for \d+ s \(after step 21\); 1 other waits for it; 1 other worker was ended\n",
        ended.err,
    ), f"after {ended.seconds:.1f} s: {ended.err}"
    assert ended.code == 4


def test_worker_that_leaves_early_is_named_with_its_host_and_who_waited_for_it(four: Lab, tmp_path: Path) -> None:
    ended = run(four, tmp_path, FOREIGN.format(fault="os._exit(0)"), "--hosts", "lab1,lab2")
    assert re.search(
        r"rank 1 on host lab2 came to its end while others still waited for it: rank 0 on host lab1", ended.err
    ), f"after {ended.seconds:.1f} s: {ended.err}"
    assert (ended.code, "Traceback" in ended.err) == (1, False), ended.err


def test_data_that_one_host_does_not_have_is_told_once_with_the_host(four: Lab, tmp_path: Path) -> None:
    source = FOREIGN.format(fault="open('/data/part-1.bin')").replace("step == 20", "step == 2")
    ended = run(four, tmp_path, source, "--hosts", "lab1,lab2")
    assert ended.code == 1
    assert ended.err.count("Traceback") == 1, ended.err
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/data/part-1.bin'"
    assert f"manyhosts: rank 1 on host lab2 failed with {error}" in ended.err, f"after {ended.seconds:.1f} s"


def test_disk_that_is_full_on_every_host_costs_snapshots_and_logs_and_is_said(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(2)
    run_dir = tmp_path / "run"
    for host in hosts:
        host.run(["mkdir", "-p", str(run_dir)])
        host.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(run_dir)])
    # All of them fail alike; the first has more to write down, and prints after the others.
    says = (
        "    def fit(trainer, duration):\n        try:\n            trainer.fit(duration)\n"
        "        except BaseException:\n"
        '            print("x" * 200000, flush=True)\n            raise\n'
    )
    source = says + TRAINING.replace("1000000 steps", "10 steps").replace("trainer.fit(", "fit(trainer, ")
    options = ("--hosts", "lab1,lab2", "--run-dir", str(run_dir), "--env", "DURATION=20 steps", "--no-check")
    ended = run(hosts, tmp_path, source, *options)
    assert (ended.code, ended.out.count("x" * 200000)) == (1, 2), "its weights are nowhere; every line is shown"
    assert "the snapshot of the last step, 20, could not be written" in ended.err
    assert "snapshot step-00000010 is left out: No space left on device" in ended.out
    for rank, host in enumerate(hosts.names):
        said = f"manyhosts: the log of rank {rank} on host {host} is incomplete: No space left on device"
        assert ended.err.count(said) == 1, f"after {ended.seconds:.1f} s: {ended.err[-2000:]}"
