"""A host with a quarter of its processor, and one with a tenth of its link, are named while they train."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import wait_until
from remote import start

from manyhosts.lab import Host, Lab

TRAIN = """
    import time
    import torch
    from torch import nn
    import manyhosts as mh
    from manyhosts.training.telemetry import pace

    pace.EVERY_S, pace.MOST_OF_THE_TIME = 1.0, 0.05

    def step(model, batch):
        begin = time.thread_time()
        while time.thread_time() - begin < 0.004:
            pass
        return model(batch[0]).square().mean()

    data = torch.utils.data.TensorDataset(torch.ones(64, 256))
    trainer = mh.Trainer(
        model=nn.Linear(256, 256),
        step=step,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        data=mh.Data(train=data, batch_size=16),
        run_dir="out",
    )
    trainer.fit("5 min")
"""


@contextlib.contextmanager
def quarter_of_the_processor(host: Host) -> Iterator[None]:
    """Let the workers of a host run for 10 ms of every 40, as a quota of the kernel does. Safe where they end."""
    over = threading.Event()

    def send(number: signal.Signals, processes: list[int]) -> None:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)

    def hold() -> None:
        while not over.is_set():
            processes = [process for process, words in host.processes().items() if "sshd" not in words]
            until = time.monotonic() + 1
            while time.monotonic() < until and not over.is_set():
                send(signal.SIGSTOP, processes)
                time.sleep(0.03)
                send(signal.SIGCONT, processes)
                time.sleep(0.01)

    holding = threading.Thread(target=hold)
    holding.start()
    try:
        yield
    finally:
        over.set()
        holding.join()


def lines(host: Host, folder: Path) -> list[dict[str, Any]]:
    """The leader's record, on the disk of its host."""
    path = host.path(folder / "out" / "metrics.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def named(host: Host, folder: Path) -> set[str]:
    """Who was found slow so far."""
    return {line["who"] for line in lines(host, folder) if line["event"] == "slow" and line["factor"] > 1}


@pytest.mark.slow
def test_slow_host_and_slow_link_are_named_with_their_factors_and_even_ones_are_not(
    make_lab: Callable[..., Lab], tmp_path: Path
) -> None:
    hosts = make_lab(4, bandwidth="200mbit")
    process = start(hosts, tmp_path, TRAIN, "--hosts", ",".join(hosts.names))

    def seconds() -> float:
        steps = [line["time"] for line in lines(hosts[0], tmp_path) if line["event"] == "step"]
        return steps[-1] - steps[0] if steps else 0.0

    wait_until(lambda: seconds() > 6, "six comparisons were made")
    assert not named(hosts[0], tmp_path)
    with quarter_of_the_processor(hosts[1]):
        wait_until(lambda: "host lab2" in named(hosts[0], tmp_path), "the host is named")
    hosts[2].slow("20mbit")
    wait_until(lambda: "the link to host lab3" in named(hosts[0], tmp_path), "the link is named")
    hosts.desk.end(process, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    reported = re.findall(r"((?:host|the link|rank) .*?) (?:computes|is) (\S+) times slower than the others", out)
    first = dict(reversed(reported))  # on a machine with other work a host may be slow again, later
    assert first.keys() == {"host lab2", "the link to host lab3"}, (out, err)
    assert 1.5 <= float(first["host lab2"]) <= 8
    assert 4 <= float(first["the link to host lab3"]) <= 14
